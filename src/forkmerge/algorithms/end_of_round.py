"""The end of a round: branches are ranked, their merge is searched on validation data, installed, and pruned."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forkmerge.algorithms.checkpoint import Phase
from forkmerge.algorithms.faulty_branches import find_faulty
from forkmerge.algorithms.mixtures import is_target_only
from forkmerge.algorithms.run_record import BranchRecord, Candidate, Round
from forkmerge.algorithms.settings import Settings
from forkmerge.algorithms.validation import ValidatedMerge, Validator
from forkmerge.engine.executors.branch_execution import BranchExecution
from forkmerge.engine.merging.arithmetic import is_vertex, vertices
from forkmerge.engine.merging.batchnorm_policy import refresh_with
from forkmerge.engine.merging.blend import Blender, Refresh
from forkmerge.engine.merging.find_merge import Merge, find_merge
from forkmerge.engine.merging.layer_groups import LayerGroups
from forkmerge.engine.merging.measure_candidate import MeasureRequest
from forkmerge.engine.merging.race_over_examples import ExampleRace
from forkmerge.engine.merging.relevance import task_relevance
from forkmerge.engine.merging.rules import ARGMAX, Rule
from forkmerge.engine.merging.searches import Search
from forkmerge.engine.merging.synchronise import synchronise
from forkmerge.engine.training.options import Mixture
from forkmerge.engine.training.state import State
from forkmerge.problem.randomness import derive


@dataclass(frozen=True)
class TrainedRound:
    """The branches of a round whose training is over.

    Args:
        index: The round, counted from 1.
        phase: What the run is doing.
        start: The step at which the round forked.
        end: The step that the branches have reached.
        mixtures: The branches' names and task weights.
        branches: Their states, which go on from the merge.
        entering: What enters the merge: these states, or the best of each on validation.
        losses: Mean training losses of the round, `{branch: {task: loss}}`.
        bad_steps: The first step whose loss was not finite, `{branch: {task: step}}`.
        merged: The last merge, whose memory takes candidates and the new one.
        floor: The unmerged target-only run, if there is one.
        floor_branch: Position of the branch that still is that run.
        earlier: Copies of earlier merges that this one may take something of, the last one first, by name.
        averaged: Of how many iterates what enters is the mean, by branch.
    """

    index: int
    phase: Phase
    start: int
    end: int
    mixtures: Sequence[Mixture]
    branches: Sequence[State]
    entering: Sequence[State]
    losses: Mapping[str, dict[str, float]]
    bad_steps: Mapping[str, Mapping[str, int]]
    merged: State
    floor: State | None = None
    floor_branch: int | None = None
    earlier: Mapping[str, State] = field(default_factory=dict)
    averaged: Mapping[str, int] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The branches' names."""
        return [mixture.name for mixture in self.mixtures]

    @property
    def entrants(self) -> dict[str, State]:
        """Everything that may get a coefficient, by name: what enters of the branches, and earlier merges."""
        return {**dict(zip(self.names, self.entering, strict=True)), **self.earlier}


@dataclass
class MergedRound:
    """What the end of a round decided.

    Args:
        merge: The coefficients, and what the search saw.
        branch_metrics: The target's metrics of what entered the merge, by branch; empty where nothing was scored.
        metrics: Those of the merge.
        branch_scores: Scores of the branches in the metrics that the target is reported in, where a search goes by
            others.
        score: The merge's.
        examples: What a race of candidates took, in examples.
        certainty: How often the winner of the search beats the target-only branch on examples drawn anew, if asked.
        floor_score: Score of the unmerged target-only run, if there is one.
        floor: That run, where the merge takes the branch that it was another way.
        skipped: Branches that a refit does not train, because no merge from here on takes anything of them.
        seconds: Wall time by phase.
    """

    merge: Merge
    branch_metrics: Mapping[str, dict[str, float]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    branch_scores: Mapping[str, float] | None = None
    score: float | None = None
    examples: dict[str, int] = field(default_factory=dict)
    certainty: float | None = None
    floor_score: float | None = None
    floor: State | None = None
    skipped: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


class EndOfRound:
    """Ends the rounds of a run: ranks the branches, searches and installs their merge, prunes.

    Args:
        settings: The algorithm's options.
        execution: Trained the branches, and measures them.
        validator: Scores states.
    """

    def __init__(self, settings: Settings, execution: BranchExecution, validator: Validator) -> None:
        self.settings, self.execution, self.validator = settings, execution, validator
        self.target = execution.job.problem.target
        # A gradient method leaves out a task whose gradient is not finite, and a float16 scaler the whole step: the
        # weights may be sound although a loss was not.
        weights_follow = settings.method is None and execution.job.training.precision != "float16"
        self.losses_tell = weights_follow and settings.checkpoint == "last"
        groups, layout = settings.layer_groups, execution.binding.layout
        self.groups = None if groups is None else LayerGroups.of(groups, layout)

    def search(self, trained: TrainedRound, search: Search) -> MergedRound:
        """Search the coefficients of a round, and merge with them."""
        validator, states = self.validator, trained.entering
        faults = self.find_faulty(trained)
        blend = self.blender(trained)
        started = time.perf_counter()
        usable = [state for name, state in zip(trained.names, states, strict=True) if name not in faults]
        separate = trained.floor is not None and trained.floor_branch is None
        usable += trained.earlier.values()
        self.rank([*usable, trained.floor] if separate and trained.floor is not None else usable)
        ranked = time.perf_counter()
        problem = ValidatedMerge(
            list(trained.entrants),
            blend,
            faults,
            validator,
            self.execution,
            self._request(trained.phase),
            earlier=len(trained.earlier),
        )
        with validator.evaluating():  # once, for all candidates
            rule = Rule(self.settings.rule or ARGMAX, derive(self.execution.job.seed, "rule", trained.index))
            merged = MergedRound(find_merge(problem, search, rule))
            self._doubt(trained, merged, problem.race)
        searched = time.perf_counter()
        rank = ranked - started + validator.seconds(states)
        if trained.floor is not None:
            merged.floor_score = validator.reported_score(trained.floor)
        merged.examples = {} if problem.race is None else problem.race.examples
        merged.metrics = validator.reported(problem.metrics_of(merged.merge.vector))
        measured = [validator.reported(validator.known_metrics(state)) for state in states]
        merged.branch_metrics = dict(zip(trained.names, measured, strict=True))
        if validator.reports_otherwise:
            merged.branch_scores = {name: validator.report(metrics) for name, metrics in merged.branch_metrics.items()}
            merged.score = validator.report(merged.metrics)
        merging = time.perf_counter()
        merged.floor = self.parted_floor(trained, merged.merge)
        self.install(trained, blend, merged.merge)
        merged.seconds = {"rank": rank, "search": searched - started - rank, "merge": time.perf_counter() - merging}
        return merged

    def parted_floor(self, trained: TrainedRound, merge: Merge) -> State | None:
        """Return a copy of the branch that has been the floor, where that branch does not go on as it is."""
        index = trained.floor_branch
        if index is None or trained.floor is None:
            return None
        is_alone = is_vertex(merge.vector) and merge.coefficients.get(trained.names[index]) == 1.0
        goes_on = is_alone and self.settings.optimizer_state != "reset"
        is_its_own = trained.entering[index] is trained.branches[index]
        return None if goes_on and is_its_own else trained.floor.clone()

    def find_faulty(self, trained: TrainedRound) -> dict[str, str]:
        """Return why a branch cannot enter the merge, by name."""
        losses = trained.losses if self.losses_tell else None
        return find_faulty(trained.names, trained.entering, losses, trained.bad_steps)

    def rank(self, states: Sequence[State]) -> None:
        """Let workers measure states that will be scored, all at once; without workers each waits for its turn."""
        if self.execution.workers == 1:
            return
        fresh = [state for state in states if not self.validator.known_metrics(state)]
        if len(fresh) > 1:
            requests = [MeasureRequest(vertex) for vertex in vertices(len(fresh))]
            for state, measured in zip(fresh, self.execution.measure(fresh, requests), strict=True):
                self.validator.note(state, measured)

    def blender(self, trained: TrainedRound, step: int | None = None) -> Blender:
        """Return what builds candidates, and the merge itself, in the memory of the last merge.

        That memory is the safety net if all branches are bad, so nothing is built before some branch is known to be
        usable. Recomputed statistics depend on `step`, that of what enters from the first branch where None.
        """
        search, refresh = self.settings.search, self.refresh(trained.phase, step)
        origin = None
        if isinstance(search, Search) and search.beyond_one:
            # A copy: candidates are built where the last merge is.
            origin = next(iter(trained.earlier.values()), None) or trained.merged.weights()
        states = list(trained.entrants.values())
        return Blender(self.execution.binding, states, trained.merged, refresh, origin, self.groups)

    def refresh(self, phase: Phase, step: int | None = None) -> Refresh | None:
        """Return what recomputes BatchNorm statistics, where that is the policy."""
        if self.settings.bn != "recompute":
            return None
        job, problem = self.execution.job, self.execution.problem(phase.value)
        return refresh_with(
            self.execution.binding,
            problem,
            training=job.training,
            seed=job.seed,
            count=self.settings.bn_batches,
            step=step,
        )

    def install(self, trained: TrainedRound, blend: Blender, merge: Merge) -> None:
        """Merge and synchronise; the last merge stands if no branch can be used."""
        coefficients = merge.vector_of(list(trained.entrants))
        if any(coefficients):
            winner = blend(coefficients)
            if winner is not trained.merged:
                trained.merged.take_weights(winner)
        trained.merged.step = trained.end
        shares, policy = [merge.coefficients.get(name, 0.0) for name in trained.names], self.settings.optimizer_state
        if any(coefficients) and not any(shares):
            # Only earlier merges are taken: there is no branch whose optimizer would come with the weights.
            shares = [1 / len(shares)] * len(shares)
            policy = "keep" if policy == "average" else policy
        synchronise(trained.branches, trained.merged, tuple(shares), policy)

    def _request(self, phase: Phase) -> MeasureRequest:
        batches = self.settings.bn_batches if self.settings.bn == "recompute" else 0
        return MeasureRequest((), self.validator.indices, phase.value, batches, groups=self.groups)

    def _doubt(self, trained: TrainedRound, merged: MergedRound, race: ExampleRace | None) -> None:
        """Take the target-only branch instead if the merge is not surely better, where `confidence` asks for that."""
        merge, confidence = merged.merge, self.settings.confidence
        if confidence is None or race is None:
            return
        alone = next((m.name for m in trained.mixtures if is_target_only(m, self.target)), None)
        if alone is None or alone in merge.faults:
            return
        if is_vertex(merge.vector) and merge.coefficients[alone] == 1.0:
            return
        single = {name: float(name == alone) for name in merge.coefficients}
        seed = derive(self.execution.job.seed, "confidence", trained.index)
        merged.certainty = race.certainty(merge.vector, tuple(single.values()), seed)
        if merged.certainty < confidence:
            merge.coefficients, merge.score, merge.groups = single, merge.branch_scores[alone], None


def record_of(trained: TrainedRound, merged: MergedRound, kept: Sequence[str], seconds: float) -> Round:
    """Return the record of a round.

    Args:
        trained: The round.
        merged: Its merge.
        kept: The branches that go on.
        seconds: Time of its training.
    """
    merge, reported = merged.merge, merged.branch_scores
    branches = {
        mixture.name: BranchRecord(
            task_weights=dict(mixture.task_weights),
            score=_finite((merge.branch_scores if reported is None else reported).get(mixture.name)),
            metrics=merged.branch_metrics.get(mixture.name, {}),
            losses=trained.losses[mixture.name],
            entered_step=state.step,
            fault=merge.faults.get(mixture.name),
            search_score=None if reported is None else _finite(merge.branch_scores.get(mixture.name)),
            lr_scale=mixture.lr_scale,
            averaged=trained.averaged.get(mixture.name),
        )
        for mixture, state in zip(trained.mixtures, trained.entering, strict=True)
    }
    candidates = [
        Candidate(coefficients, _finite(score), is_bound=position in merge.unfinished, groups=groups)
        for position, ((coefficients, score), groups) in enumerate(
            zip(merge.candidates, merge.candidate_groups, strict=True)
        )
    ]
    return Round(
        index=trained.index,
        phase=trained.phase.value,
        start=trained.start,
        end=trained.end,
        branches=branches,
        candidates=candidates,
        coefficients=merge.coefficients,
        score=_finite(merge.score if reported is None else merged.score),
        relevance=task_relevance(merge.coefficients, trained.mixtures),
        kept=list(kept),
        floor_score=_finite(merged.floor_score),
        seconds={"train": seconds, **merged.seconds},
        metrics=merged.metrics,
        examples=merged.examples,
        certainty=merged.certainty,
        skipped=merged.skipped,
        search_score=None if reported is None else _finite(merge.score),
        groups=merge.groups,
    )


def prune(trained: TrainedRound, merge: Merge, target: str, most: int, keeps: str = "target") -> list[str]:
    """Return the branches of the largest coefficients, at most `most` of them and none of coefficient 0.

    Of equal coefficients the branch listed first is kept. If `keeps` is "target", the target-only branch stays whatever
    its coefficient is, and counts.
    """
    coefficients = merge.coefficients
    always = {m.name for m in trained.mixtures if keeps == "target" and is_target_only(m, target)}
    ranked = sorted(trained.names, key=lambda name: (name not in always, -coefficients[name]))
    return [name for name in ranked if name in always or coefficients[name] > 0][:most]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
