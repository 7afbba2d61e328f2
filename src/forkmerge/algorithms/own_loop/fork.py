"""`fork`: branches of a model that your own loop trains, and `merge`, which brings them together again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from forkmerge.algorithms.faulty_branches import find_faulty
from forkmerge.algorithms.own_loop.copy_training import copied_models
from forkmerge.algorithms.own_loop.forked_branch import BranchModels, ForkedBranch
from forkmerge.algorithms.own_loop.in_place import lent_models
from forkmerge.algorithms.own_loop.merge_checks import (
    ScoreWatch,
    check_equally_trained,
    check_score,
    check_scores,
    check_state_dict,
    check_trained,
)
from forkmerge.algorithms.own_loop.merge_outcome import MergeOutcome
from forkmerge.algorithms.own_loop.own_merge import OwnMerge, Score
from forkmerge.algorithms.own_loop.paired_loader import LoaderList, PairedPasses
from forkmerge.algorithms.own_loop.parameter_state import (
    PLAIN,
    OptimizerSlots,
    packed,
    state_by_parameter,
    tensors_by_parameter,
    unpacked,
)
from forkmerge.algorithms.own_loop.ranks import Ranks, ScoreRanks
from forkmerge.algorithms.table_data import show_metrics
from forkmerge.engine.merging.blend import Blender
from forkmerge.engine.merging.find_merge import find_merge
from forkmerge.engine.merging.relevance import task_relevance
from forkmerge.engine.merging.rules import ARGMAX, Rule, check_rule
from forkmerge.engine.merging.searches import Greedy, Grid, Search, search_from
from forkmerge.engine.merging.synchronise import synchronise
from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.engine.training.module_checks import check_module
from forkmerge.engine.training.options import Mixture, mixtures_of
from forkmerge.engine.training.shards import local_of, plain_name, spans_ranks, wrapper_prefix
from forkmerge.engine.training.state import Layout, State, check_same_parameters
from forkmerge.errors import ProblemError, unknown_name
from forkmerge.problem.definition import check_weight
from forkmerge.problem.display import Display, Displayed
from forkmerge.problem.randomness import derive, random_state_kept
from forkmerge.problem.scoring import evaluating


class Fork(Displayed):
    """Branches of one model that are merged again and again; made by `fork`."""

    def __init__(self, models: BranchModels, search: Search | None, optimizer_state: str) -> None:
        self._models = models
        self._branches = {branch.name: branch for branch in models.branches}
        self._search, self._optimizer_state = search, optimizer_state
        self._watch = ScoreWatch()
        self._ranks = Ranks.of(self._first._binding.model)
        self._slots = OptimizerSlots(self._first._binding)
        self._merged = self._first._state.weights()
        models.attach(self._merged)

    def display(self) -> Display:
        """Return what a prompt shows of the fork."""
        rates = {
            b.name: "" if b.lr_scale == 1 else f", learning rate × {b.lr_scale:g}" for b in self._branches.values()
        }
        rows = [(b.name, show_metrics(b.task_weights) + rates[b.name], str(b._steps)) for b in self._branches.values()]
        search = "default" if self._search is None else type(self._search).__name__
        head = ("branch", "task weights", "steps since the last merge")
        return Display(f"Fork into {len(self)} branches", {"search": search}, head, rows)

    def __iter__(self) -> Iterator[ForkedBranch]:
        return self._models.each()

    def __len__(self) -> int:
        return len(self._branches)

    def __getitem__(self, name: str) -> ForkedBranch:
        if name not in self._branches:
            raise ProblemError(unknown_name("branch", name, self._branches))
        return self._branches[name]

    def merge(
        self,
        score: Score,
        *,
        into: nn.Module | None = None,
        search: Search | str | None = None,
        rule: str = ARGMAX,
        refresh: Callable[[nn.Module], None] | None = None,
        allow_unequal_steps: bool = False,
        ranks: ScoreRanks = "first",
    ) -> MergeOutcome:
        """Search the best combination of the branches, and let all branches go on from it.

        Args:
            score: Validates a model; higher is better. Called in evaluation mode without gradients. It returns a
                number, or one per validation example as a tensor [n], whose mean counts.
            into: A model that also gets the merged weights.
            search: Overrides the fork's search.
            rule: Which candidate is installed, see `ForkMerge`; all but "argmax" need a score per example.
            refresh: Called on every combination before it is scored, e.g. to recompute BatchNorm statistics.
            allow_unequal_steps: Merge branches whose optimizers took different numbers of steps since the last merge.
            ranks: Where several ranks train the model, all of them call `merge`, and all call `score`. The result of
                rank 0 is everybody's ("first"), or that of all of them ("all"): their examples are joined where score
                gives one number per example, and otherwise the mean of their numbers counts.
        """
        branches, names = list(self._branches.values()), list(self._branches)
        check_score(score, ranks)
        self._models.check_free("merge")
        states = self._models.gather()
        used = search_from(search) or self._search or (Grid() if len(branches) <= 2 else Greedy())
        used.check(len(branches))
        check_rule(rule, is_guarded=used.guarded)
        chooser = Rule(rule, derive(self._first._passes.seed, "rule", self._first._passes.round_index))
        self._check_trained(states, allow_unequal_steps)
        first = branches[0]._binding  # whose model is lent to the candidates
        self._ranks.share_buffers(first, states)
        faults = self._find_faulty(states)
        scratch = self._merged.weights()  # so that the last merge outlives a score that fails
        blend = Blender(first, states, scratch, partial(self._refresh, refresh), self._merged)
        try:
            with random_state_kept(), evaluating(first.model):
                merge = find_merge(OwnMerge(names, faults, blend, score, self._ranks, ranks), used, chooser)
                check_scores(merge, faults)
                if any(merge.vector):
                    self._merged.take_weights(blend(merge.vector))
            coefficients = merge.vector or (0.0,) * len(names)
            synchronise(states, self._merged, coefficients, self._optimizer_state)
        finally:
            self._models.attach(self._merged)
        loaders, index = LoaderList(), self._first._passes.round_index + 1
        for branch in branches:
            branch._passes, branch._steps = PairedPasses(branch._passes.seed, loaders, index), 0
        if into is not None:
            self.merged_into(into)
        self._watch.see(merge)
        return MergeOutcome(
            coefficients=merge.coefficients,
            score=merge.score,
            branch_scores=merge.branch_scores,
            candidates=merge.candidates,
            relevance=task_relevance(merge.coefficients, [branch._mixture for branch in branches]),
            faults=merge.faults,
        )

    def merged_into(self, model: nn.Module) -> nn.Module:
        """Write the weights of the last merge (the fork point before the first one) into a model and return it."""
        check_module(model, may_span=True)
        if model is self._first._binding.model:
            self._models.check_free("merged_into")
        layout, source = Layout(model), self._first._binding.layout
        check_same_parameters([source.signature, layout.signature], ["the fork", "the model given"])
        if [row_slice.shape for row_slice in layout.slices] != [row_slice.shape for row_slice in source.slices]:
            raise ProblemError(
                "the model given is not sharded as the fork's is. In place that one has the merge already: take its "
                "whole weights by get_model_state_dict of torch.distributed.checkpoint.state_dict."
            )
        with torch.no_grad():
            for entry, parameter in zip(source.slices, map(local_of, layout.parameters), strict=True):
                view = entry.view(self._merged.rows[entry.row])
                if parameter.data_ptr() != view.data_ptr():  # in place the module shows the merge already
                    parameter.copy_(view)
            prefix = wrapper_prefix(model)
            for name, buffer in model.named_buffers():
                buffer.copy_(self._first._binding.buffer(self._merged, plain_name(name, prefix)))
        return model

    def state_dict(self, *, by_parameter: bool | None = None) -> dict[str, Any]:
        """Return everything needed to go on later: plain nested data and tensors, safe for `torch.load`'s defaults.

        Args:
            by_parameter: Whether tensors stand under the names of parameters, sharded as these are, as torch's
                distributed checkpoint needs them to spread them over another number of ranks. None does so where
                several ranks train the model.
        """
        self._models.gather()
        signature = self._first._binding.layout.signature
        facts = {"watch": asdict(self._watch), "parameters": signature}
        if spans_ranks(self._first._binding.model) if by_parameter is None else by_parameter:
            return self._by_parameter(facts)
        branches = {
            branch.name: {
                "state": branch._state.clone().to_value(),
                "buffers": self._buffers_of(branch._state),
                **_progress(branch),
            }
            for branch in self._branches.values()
        }
        merged = {"state": self._merged.weights().to_value(), "buffers": self._buffers_of(self._merged)}
        return {"branches": branches, "merged": merged, **facts}

    def load_state_dict(self, value: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken, in a fork of the same model with the same branches."""
        own = {name: branch._state for name, branch in self._branches.items()}
        self._models.check_free("load_state_dict")
        plain = unpacked(value[PLAIN]) if isinstance(value, Mapping) and PLAIN in value else None
        facts = plain or value
        check_state_dict(value, own, self._first._binding.layout.signature, facts)
        loaders = LoaderList()
        for name, branch in self._branches.items():
            stored, tensors = facts["branches"][name], value["branches"][name]
            branch._state = (
                state_by_parameter(branch._binding, tensors, stored) if plain else self._read(branch._binding, stored)
            )
            passes = stored["passes"]  # one number, before loaders were counted one by one
            counts = passes if isinstance(passes, Mapping) else {0: passes} if passes else {}
            branch._passes = PairedPasses(branch._passes.seed, loaders, stored["round"], counts)
            branch._steps = stored.get("steps", 0)
        self._watch = ScoreWatch(**facts.get("watch", {}))
        first = self._first._binding
        self._merged = (
            state_by_parameter(first, value["merged"], plain["merged"]) if plain else self._read(first, value["merged"])
        )
        self._models.attach(self._merged)

    def _by_parameter(self, facts: dict[str, Any]) -> dict[str, Any]:
        tensors, plain = {}, {}
        for name, branch in self._branches.items():
            tensors[name], rest = tensors_by_parameter(branch._binding, branch._state, self._slots)
            plain[name] = {**rest, **_progress(branch)}
        merged, rest = tensors_by_parameter(self._first._binding, self._merged, None)
        return {"branches": tensors, "merged": merged, PLAIN: packed({"branches": plain, "merged": rest, **facts})}

    def _refresh(self, refresh: Callable[[nn.Module], None] | None, state: State) -> None:
        binding = self._first._binding
        if refresh is not None:
            binding.attach_weights(state)
            refresh(binding.model)
            binding.capture_buffers(state)
            self._ranks.share_buffers(binding, [state])

    def _find_faulty(self, states: list[State]) -> dict[str, str]:
        """Return why branches are unusable; what is not finite on one rank is a fault on all."""
        faults = find_faulty(list(self._branches), states)
        bad = self._ranks.any([name in faults for name in self._branches])
        elsewhere = "it has parameters that are not finite on another rank"
        return {name: faults.get(name, elsewhere) for name, is_bad in zip(self._branches, bad, strict=True) if is_bad}

    def _check_trained(self, states: list[State], allow_unequal_steps: bool) -> None:
        idle = check_trained(dict(zip(self._branches, states, strict=True)), self._merged, self._ranks)
        if not allow_unequal_steps:
            # A gradient scaler leaves out steps that overflow, in some branches more than in others.
            counted = [b for b in self._branches.values() if not b._binding.scaler.is_enabled()]
            names = [branch.name for branch in counted]
            check_equally_trained([name for name in idle if name in names], {b.name: b._steps for b in counted})

    @property
    def _first(self) -> ForkedBranch:
        return next(iter(self._branches.values()))

    def _buffers_of(self, state: State) -> dict[str, torch.Tensor]:
        binding = self._first._binding
        return {name: binding.buffer(state, name).clone() for name in {**binding.own_buffers, **state.buffers}}

    @staticmethod
    def _read(binding: ModelBinding, stored: Mapping[str, Any]) -> State:
        """Return a stored state; buffers are stored whole, so that any copy of the model can take them."""
        state = binding.place(State.from_value(copy.deepcopy(dict(stored["state"]))))
        state.buffers = {name: tensor.clone() for name, tensor in stored["buffers"].items()}
        return state


def _progress(branch: ForkedBranch) -> dict[str, Any]:
    passes = branch._passes
    return {"round": passes.round_index, "passes": dict(passes.counts), "steps": branch._steps}


def fork(
    model: nn.Module,
    optimizer: Optimizer,
    branches: Mapping[str, Mapping[str, Any]] | Sequence[Mixture],
    *,
    scheduler: LRScheduler | None = None,
    scaler: torch.amp.GradScaler | None = None,
    search: Search | str | None = None,
    optimizer_state: Literal["keep", "average", "reset"] = "keep",
    seed: int = 0,
    in_place: bool = False,
) -> Fork:
    """Fork a model, once, into branches that are trained on different task mixtures and merged (Alg. 1, 2).

    The model, optimizer and scheduler given are copied and left alone; frozen parameters are shared. In place they are
    not copied: `for branch in forked` lends them to the branches in turn, to the same bits.

    Args:
        model: Any module.
        optimizer: Its optimizer, in whatever state it is.
        branches: `{name: {task: weight}}`. The library only reports the weights; your loop uses them. With a factor on
            the learning rate, `{name: {"task_weights": …, "lr_scale": 3}}`, which the branch's optimizer applies.
        scheduler: The optimizer's scheduler.
        scaler: The gradient scaler of float16 training.
        search: How coefficients are found; None takes a grid for two branches, greedy search for more.
        optimizer_state: At a merge, each branch may "keep" its own, all get the "average", or "reset" it.
        seed: Of `paired` loaders.
        in_place: Train all branches in the model itself, one at a time, for trainers that own it: `branch.model is
            model` inside `for branch in forked`, and outside the model shows the last merge. Saves a gradient and a
            module per branch. What is changed in the optimizer's groups outside, by a trainer's scheduler, holds for
            all branches.

    Example:
        >>> import torch, forkmerge as fm
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> forked = fm.fork(model, optimizer, {"alone": {"ctr": 1.0}, "joint": {"ctr": 1.0, "dwell": 0.5}})
        >>> for branch in forked:
        ...     loss = branch.model(torch.ones(4, 2)).mean() * sum(branch.task_weights.values())
        ...     loss.backward()
        ...     branch.optimizer.step()
        >>> outcome = forked.merge(score=lambda m: -m(torch.ones(1, 2)).item())
        >>> outcome.coefficients
        {'alone': 0.0, 'joint': 1.0}
    """
    check_module(model, may_span=in_place)
    if not (mixtures := mixtures_of(branches)):
        raise ProblemError("there is no branch to fork: pass {name: {task: weight}}.")
    if optimizer_state not in ("keep", "average", "reset"):
        raise ProblemError(f"optimizer_state must be keep, average or reset, got {optimizer_state!r}.")
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ProblemError("the scheduler given drives another optimizer: make it from the optimizer given.")
    for mixture in mixtures:
        for task, weight in mixture.task_weights.items():
            check_weight(mixture.name, task, weight)
        if mixture.auxiliary_streams != "all":
            raise ProblemError(
                f"branch {mixture.name!r}: your own loop reads the data, so auxiliary_streams has no use."
            )
    chosen = search_from(search)
    if chosen is not None:
        chosen.check(len(mixtures))
    loaders = LoaderList()
    passes = [PairedPasses(seed, loaders) for _ in mixtures]
    make = lent_models if in_place else copied_models
    return Fork(make(mixtures, passes, model, optimizer, scheduler, scaler), chosen, optimizer_state)
