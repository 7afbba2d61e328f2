"""The merge of one round: which coefficients, and the state they give."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from forkmerge.arithmetic import heaviest, merge_into, merge_tensors
from forkmerge.branch import Training
from forkmerge.candidates import Candidates, Coefficients, ScoreMany, vertices
from forkmerge.course import Course
from forkmerge.errors import ProblemError
from forkmerge.feed import batches
from forkmerge.norms import tracking_norms
from forkmerge.order import derive, random_state_kept, set_random_state
from forkmerge.problem import Context, Problem
from forkmerge.scoring import device_of, evaluating
from forkmerge.searches import Search, best_of
from forkmerge.state import State
from forkmerge.workbench import Workbench

S = TypeVar("S")


@dataclass
class Merge:
    """What a search found.

    Args:
        coefficients: Λ by branch name; empty when no branch could be used.
        score: Validation score of the merged state, −∞ when there is none.
        branch_scores: Validation score of every branch.
        candidates: Every combination tried, with its score, in order; on the sub-sample where one is used.
        unfinished: Positions in `candidates` of those that lost a race, whose scores are upper bounds.
        faults: Why a branch was given coefficient 0 without a trial, by branch name.
        certainty: How often the winner of the search beats the target-only branch on examples drawn anew, if asked.
    """

    coefficients: dict[str, float]
    score: float
    branch_scores: dict[str, float]
    candidates: list[tuple[dict[str, float], float]] = field(default_factory=list)
    unfinished: list[int] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)
    certainty: float | None = None


def find_merge(
    names: Sequence[str],
    states: Sequence[S],
    *,
    search: Search,
    score: Callable[[S], float],
    blend: Callable[[Coefficients], S],
    search_score: Callable[[S], float] | None = None,
    evaluate_many: ScoreMany | None = None,
    course: Callable[[], Course | None] | None = None,
    faults: Mapping[str, str] | None = None,
) -> Merge:
    """Search the coefficients of a merge.

    Branches with a fault (a loss, parameter or score that is not finite) get coefficient 0. With `search_score`
    the search runs on a sub-sample and its winner is confirmed by `score`: the best single branch is taken
    instead if it is better there, so the merge is never worse on validation than any branch.

    Args:
        names: Branch names.
        states: Their states, in whatever form `score` takes them.
        search: How to look for coefficients.
        score: Scores a state on all validation data.
        blend: Builds the state of given coefficients, exactly as it would be installed.
        search_score: Scores a state on the sub-sample; `score` where None.
        evaluate_many: Returns the scores of several candidates at once, on the sub-sample where there is one. Each
            candidate has one coefficient per branch, faulty ones included. One blend and score after the other
            where None. The searches pass whole lists, so this is where candidates can be spread over workers.
        course: Called once all branches are scored; gives the course that candidates are raced on, or None where
            scores do not add up over examples.
        faults: Branches already known to be unusable, and why.
    """
    found = dict(faults or {})
    branch_scores = {
        name: -math.inf if name in found else score(state) for name, state in zip(names, states, strict=True)
    }
    for name, value in branch_scores.items():
        if not math.isfinite(value):
            found.setdefault(name, "its validation score is not finite")
    good = [i for i, name in enumerate(names) if name not in found]
    result = Merge({}, -math.inf, branch_scores, faults=found)
    if not good:
        return result

    def expand(coefficients: Coefficients) -> Coefficients:
        full = dict(zip(good, coefficients, strict=True))
        return tuple(full.get(i, 0.0) for i in range(len(names)))

    rank = search_score or score
    singles, scores = vertices(len(good)), [branch_scores[names[i]] for i in good]
    ranked = scores if search_score is None else [search_score(states[i]) for i in good]
    many = evaluate_many or (lambda candidates: [rank(blend(c)) for c in candidates])
    track = course() if course is not None else None
    tried = Candidates(
        lambda c: many([expand(c)])[0],
        known=dict(zip(singles, ranked, strict=True)),
        evaluate_many=lambda candidates: many([expand(c) for c in candidates]),
        enter=None if track is None else lambda c, guides: track.enter(expand(c), [expand(g) for g in guides]),
    )
    chosen = _search(search, tried, good, len(names))
    if chosen in singles:
        result.score = scores[singles.index(chosen)]
    else:
        result.score = tried(chosen) if search_score is None else score(blend(expand(chosen)))
    best = max(range(len(good)), key=scores.__getitem__)
    if search.guarded and not result.score >= scores[best]:
        chosen, result.score = singles[best], scores[best]
    result.coefficients = dict(zip(names, expand(chosen), strict=True))
    result.candidates = [(dict(zip(names, expand(c), strict=True)), value) for c, value in tried.tried]
    result.unfinished = tried.unfinished
    return result


def _search(search: Search, tried: Candidates, good: list[int], branches: int) -> Coefficients:
    if search.guarded:
        return best_of(search, tried, len(good))
    fixed = search.search(tried, branches)  # fixed coefficients name all branches; the rest share a bad one's part
    total = math.fsum(fixed[i] for i in good)
    if total == 0:
        return tuple(float(i == 0) for i in range(len(good)))
    return tuple(fixed[i] if total == 1 else fixed[i] / total for i in good)


def blend_weights(bench: Workbench, states: Sequence[State], coefficients: Coefficients, out: State) -> State:
    """Write θ_r + Σ_{k≠r} Λ_k (θ_k − θ_r) into `out`; a single branch is returned itself, bit for bit.

    Floating buffers (BN statistics among them) are combined like parameters; integer ones, and those whose shape
    differs between branches, come from the heaviest branch.
    """
    if 1.0 in coefficients:
        return states[coefficients.index(1.0)]
    blend_rows(states, coefficients, out)
    out.buffers = {}
    for name in {name: None for state in states for name in state.buffers}:
        values = [bench.buffer(state, name) for state in states]
        top = values[heaviest(coefficients)]
        same = all(value.shape == top.shape and value.dtype == top.dtype for value in values)
        out.buffers[name] = merge_tensors(values, coefficients) if same else top.clone()
    out.step = states[0].step
    return out


def blend_rows(states: Sequence[State], coefficients: Coefficients, out: State) -> None:
    """Write the merged parameters into `out`."""
    for name, row in out.rows.items():
        merge_into(row, [state.rows[name] for state in states], coefficients)


class Blender:
    """Builds the candidates of one merge, one at a time in the same memory, exactly as they would be installed.

    A candidate's buffers are kept, so that coming back to it costs the merged parameters only and no statistics are
    computed twice; asked for the candidate that is there already, it does nothing.

    Args:
        bench: Where the states' buffers are looked up.
        states: The branches; they must not change while candidates are built.
        out: Takes the candidates; nobody else may write to it.
        refresh: Called on a new combination, e.g. to recompute BatchNorm statistics.
    """

    def __init__(
        self, bench: Workbench, states: Sequence[State], out: State, refresh: Callable[[State], None] | None = None
    ) -> None:
        self.bench, self.states, self.out, self.refresh = bench, states, out, refresh
        self._buffers: dict[Coefficients, dict[str, Tensor]] = {}
        self._current: Coefficients | None = None

    def __call__(self, coefficients: Coefficients) -> State:
        """Return the state of a candidate; a single branch is itself."""
        if 1.0 in coefficients or coefficients == self._current:
            return self.states[coefficients.index(1.0)] if 1.0 in coefficients else self.out
        self._current = None  # until it is whole
        if coefficients in self._buffers:
            blend_rows(self.states, coefficients, self.out)
            self.out.buffers = dict(self._buffers[coefficients])
        else:
            blend_weights(self.bench, self.states, coefficients, self.out)
            if self.refresh is not None:
                self.refresh(self.out)
            self._buffers[coefficients] = dict(self.out.buffers)
        self._current = coefficients
        return self.out


def recompute_statistics(
    bench: Workbench, state: State, problem: Problem, *, training: Training, seed: int, count: int
) -> None:
    """Recompute the BatchNorm statistics of a state on `count` batches of the target's training data, in place.

    Only normalisation layers run in training mode, with a cumulative average; layers the target's loss does not
    reach keep the statistics they have.
    """
    bench.attach_weights(state)
    norms = tracking_norms(bench.model)
    if not norms:
        return
    saved = [(m.momentum, _clone(m.running_mean), _clone(m.running_var), _clone(m.num_batches_tracked)) for m in norms]
    device, tasks = device_of(bench.model), [problem.target]
    with random_state_kept(), evaluating(bench.model):
        for module in norms:
            module.reset_running_stats()
            module.momentum = None
            module.train()
        for name, stream in problem.stream_map.items():
            if problem.target not in stream.tasks:
                continue
            bn_seed = derive(seed, "bn", state.step)
            with closing(batches(name, stream, range(count), bn_seed, device)) as feed:
                for position, batch in enumerate(feed):
                    call_seed = derive(bn_seed, name, position)
                    set_random_state(call_seed)
                    with training.autocast(device):
                        stream.losses(bench.model, batch, tasks, Context(state.step, call_seed))
        for module, (momentum, mean, var, tracked) in zip(norms, saved, strict=True):
            module.momentum = momentum
            if not module.num_batches_tracked:
                _restore(module.running_mean, mean)
                _restore(module.running_var, var)
            _restore(module.num_batches_tracked, tracked)
    bench.capture_buffers(state)


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def _restore(tensor: Tensor | None, saved: Tensor | None) -> None:
    if tensor is not None and saved is not None:
        tensor.copy_(saved)


def share_optimizer(states: Sequence[State], coefficients: Coefficients, policy: str) -> None:
    """Apply the policy for optimizer state at a merge: keep each branch's own, average them, or reset.

    Averaging combines tensors of a parameter's shape with the merge's coefficients, a missing one counting as
    zeros; counters come from the heaviest branch that has them. Schedules run on and are never touched.
    """
    if policy == "keep":
        return
    if policy == "reset":
        for state in states:
            state.reset_optimizer()
        return
    order = sorted(range(len(states)), key=lambda i: -coefficients[i])
    used = [states[i] for i in order if coefficients[i] > 0]
    weights = [c for c in sorted(coefficients, reverse=True) if c > 0]
    rows: dict[str, Tensor] = {}
    slots: dict[str, set[int]] = {}
    loose: dict[int, dict[str, object]] = {}
    for state in used:
        for name, row in state.optimizer_rows.items():
            rows.setdefault(name, row)
            slots.setdefault(name, set()).update(state.optimizer_slots.get(name, []))
        for index, entry in state.optimizer_loose.items():
            loose.setdefault(index, entry)
    for state in states:
        for name in slots:
            if name not in state.optimizer_rows:
                state.optimizer_rows[name] = torch.zeros_like(rows[name])
    for name in slots:
        merged = merge_tensors([state.optimizer_rows[name] for state in used], weights)  # one row at a time
        for state in states:
            state.optimizer_rows[name].copy_(merged)
    for state in states:
        state.optimizer_slots = {name: sorted(found) for name, found in slots.items()}
        state.optimizer_loose = copy.deepcopy(loose)


def synchronise(branches: Sequence[State], merged: State, coefficients: Coefficients, optimizer_state: str) -> None:
    """Let every branch go on from the merged weights, and apply the policy for optimizer state.

    The optimizer, and method, of a branch that diverged is reset whatever the policy: its tensors are not finite
    either, and would spoil the next round. Coefficients that are all 0 mean that every branch has.
    """
    diverged = [state for state in branches if not any(coefficients) or not state.is_finite()]
    if any(coefficients):
        share_optimizer(branches, coefficients, optimizer_state)
    for state in branches:
        state.take_weights(merged)
    for state in diverged:
        state.forget()


def merge_states(states: Mapping[str, Mapping[str, Tensor]], coefficients: Mapping[str, float]) -> dict[str, Tensor]:
    """Merge plain state dicts, `{branch: model.state_dict()}`, without forking anything.

    Example:
        >>> import torch, forkmerge as fm
        >>> a, b = {"w": torch.zeros(1)}, {"w": torch.ones(1)}
        >>> fm.merge_states({"a": a, "b": b}, {"a": 0.75, "b": 0.25})["w"].item()
        0.25
    """
    names = list(states)
    if set(names) != set(coefficients):
        raise ProblemError(f"coefficients are for {sorted(coefficients)}, but the states are {sorted(names)}.")
    for one, other in pairwise(names):
        for key in (*states[one], *states[other]):
            shapes = [tuple(states[n][key].shape) if key in states[n] else "missing" for n in (one, other)]
            if shapes[0] != shapes[1]:
                raise ProblemError(
                    f"branches {one!r} and {other!r} have different parameters: {key!r} is {shapes[0]} in one "
                    f"and {shapes[1]} in the other."
                )
    values = [coefficients[name] for name in names]
    return {key: merge_tensors([states[name][key] for name in names], values) for key in states[names[0]]}
