"""The options of a fork–merge run, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from forkmerge.algorithms.branches.rotation import HALVING, ROTATION, WIN_STAY, WIN_STAY_ALL, Rotation, Turns
from forkmerge.algorithms.mixtures import Mixtures, check_mixtures, mixtures_from, scale_auxiliaries
from forkmerge.engine.executors.resources import check_descriptors
from forkmerge.engine.merging.group_search import group_evaluations
from forkmerge.engine.merging.layer_groups import check_layer_groups
from forkmerge.engine.merging.rules import ARGMAX, RULES, RuleName
from forkmerge.engine.merging.searches import Fixed, Greedy, Grid, Search, search_from
from forkmerge.engine.storage.run_folder import CHECKPOINTS_KEPT
from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.engine.training.optimizers import state_share
from forkmerge.engine.training.options import Mixture
from forkmerge.engine.training.state import StateSizes
from forkmerge.errors import ProblemError, check_count, check_flag
from forkmerge.methods import Method, method_from
from forkmerge.problem.definition import Problem
from forkmerge.problem.searched_evaluation import check_search_by, searched_by

GRID, GREEDY = Grid(5), Greedy((0.0, 0.2, 0.4, 0.6, 0.8, 1.0))
"""The paper's searches for two branches and for more, whatever their own defaults become."""

_ROUNDS, _ROUNDS_IN_TURN = 5, 10
"""Of a run whose interval nobody has named: branches that take turns need some."""
_FLAGS = ("refit", "floor", "keep_branches")
_COUNTS = (
    *("interval", "search_examples", "validate_every", "bn_batches", "prune_to", "prune_after", "per_round"),
    *("previous_merges", "average_iterates", "validation_examples"),
)
PREVIOUS = "previous merge"
"""How coefficients call the merge before, which is what the branches were forked from."""
_CHOICES = {
    "checkpoint": ("last", "best_in_interval", "best_so_far"),
    "bn": ("average", "recompute"),
    "optimizer_state": ("keep", "average", "reset"),
    "select": ("last", "best"),
    "rule": RULES,
    "prune_keeps": ("target", "largest"),
    "tail_anneal": ("linear", "none"),
    "turns": (ROTATION, HALVING, WIN_STAY, WIN_STAY_ALL),
}


@dataclass(frozen=True)
class Settings:
    """The options of `ForkMerge`, which documents them."""

    mixtures: Mixtures | str | Mapping[str, Any] | Sequence[Mixture] | None = None
    interval: int | None = None
    search: Search | str | Mapping[str, Any] | None = None
    search_examples: int | None = None
    checkpoint: Literal["last", "best_in_interval", "best_so_far"] = "last"
    validate_every: int | None = None
    bn: Literal["average", "recompute"] = "average"
    bn_batches: int = 50
    optimizer_state: Literal["keep", "average", "reset"] = "keep"
    select: Literal["last", "best"] = "last"
    prune_to: int | None = None
    prune_after: int = 1
    auxiliary_scale: float | None = None
    reference: Mapping[str, float] | None = None
    refit: bool = False
    floor: bool = False
    keep_branches: bool = False
    method: Method | str | None = None
    confidence: float | None = None
    prune_keeps: Literal["target", "largest"] = "target"
    search_by: Any = None
    tail: float | None = None
    tail_anneal: Literal["linear", "none"] = "linear"
    rule: RuleName | None = None
    per_round: int | None = None
    previous_merges: int | None = None
    average_iterates: int | None = None
    layer_groups: Literal["modules"] | Mapping[str, str | Sequence[str]] | None = None
    turns: Turns | None = None
    validation_examples: int | None = None

    def __post_init__(self) -> None:
        if self.mixtures is not None:
            object.__setattr__(self, "mixtures", mixtures_from(self.mixtures))
            object.__setattr__(self, "rule", self.rule or ARGMAX)
            object.__setattr__(self, "turns", self.turns or ROTATION)
            object.__setattr__(self, "auxiliary_scale", 1.0 if self.auxiliary_scale is None else self.auxiliary_scale)
        object.__setattr__(self, "search", search_from(self.search))
        object.__setattr__(self, "method", method_from(self.method))
        check_search_by(self.search_by)
        check_layer_groups(self.layer_groups)
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in (*allowed, *([None] if name in ("rule", "turns") else [])):
                raise ProblemError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}.")
        for name in _FLAGS:
            check_flag(name, getattr(self, name))
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None:
                check_count(name, value)
        if self.per_round is not None and self.prune_to is not None:
            raise ProblemError("prune_to ends branches for good and per_round lets them take turns: choose one.")
        if self.confidence is not None and self.turns == WIN_STAY_ALL:
            raise ProblemError(
                "confidence falls back on the target's own branch, which turns='win_stay_all' lets rest: take "
                "turns='win_stay'."
            )
        if self.average_iterates == 1:
            raise ProblemError("average_iterates must be at least 2, or None: the mean of one iterate is itself.")
        for name in ("previous_merges", "layer_groups"):
            if getattr(self, name) is not None and isinstance(self.search, Search) and not self.search.guarded:
                raise ProblemError(
                    f"{name} is for coefficients that are searched, and fixed ones are not: leave it out."
                )
        scale = self.auxiliary_scale
        if scale is not None and (not isinstance(scale, int | float) or not (math.isfinite(scale) and scale > 0)):
            raise ProblemError(f"auxiliary_scale must be positive and finite, got {self.auxiliary_scale!r}.")
        tail = self.tail
        if tail is not None and (isinstance(tail, bool) or not isinstance(tail, int | float) or not 0 < tail < 1):
            raise ProblemError(f"tail must be a share of a round's steps between 0 and 1, or None, got {tail!r}.")
        sure = self.confidence
        if sure is not None and (isinstance(sure, bool) or not isinstance(sure, int | float) or not 0 < sure < 1):
            raise ProblemError(f"confidence must be a number between 0 and 1, such as 0.9, or None, got {sure!r}.")

    def searched(self, problem: Problem, seed: int) -> Problem:
        """The sealed problem as branches are ranked, merges searched and selected on it."""
        return searched_by(problem, self.search_by, self.validation_examples, seed)

    @property
    def constructor(self) -> Mixtures:
        """The branch constructor."""
        assert isinstance(self.mixtures, Mixtures), "options that nobody has named are chosen by `ForkMerge.settings`"
        return self.mixtures

    def branches(self, problem: Problem, probe_scores: Mapping[str, float]) -> list[Mixture]:
        """All branches of a run, auxiliary weights scaled."""
        mixtures = [self._scaled(mixture, problem) for mixture in self.constructor.build(problem, probe_scores)]
        check_mixtures(problem, mixtures)
        taken = [mixture.name for mixture in mixtures if mixture.name in self.earlier_names]
        if taken:
            raise ProblemError(f"a branch is called {taken[0]!r}, as an earlier merge is: give it another name.")
        return mixtures

    @property
    def earlier_names(self) -> list[str]:
        """How coefficients call the earlier merges that a search may take, the last one first."""
        return [PREVIOUS if back == 1 else f"{PREVIOUS} {back}" for back in range(1, (self.previous_merges or 0) + 1)]

    def entrants(self, branches: int) -> int:
        """How many coefficients a merge of so many branches has at most: earlier merges have one, too."""
        return branches + (self.previous_merges or 0)

    def evaluations(self, branches: int, groups: int = 1) -> int:
        """How many candidates a search among so many branches scores at most, the branches themselves included."""
        count = self.entrants(branches)
        return self.search_for(count).evaluations(count) + (group_evaluations(count, groups) if groups > 1 else 0)

    def rotation(self, problem: Problem, probe_scores: Mapping[str, float] | None = None) -> Rotation:
        """Which of the branches every round trains; without scores of probes, how many is right."""
        scores = dict.fromkeys((probe.name for probe in self.probes(problem)), 0.0)
        mixtures = self.branches(problem, scores if probe_scores is None else probe_scores)
        return Rotation(mixtures, problem.auxiliaries, self.per_round, self.turns or ROTATION)

    def probes(self, problem: Problem) -> list[Mixture]:
        """Short runs that come before, auxiliary weights scaled; most constructors have none."""
        return [self._scaled(probe, problem) for probe in self.constructor.probes(problem)]

    def _scaled(self, mixture: Mixture, problem: Problem) -> Mixture:
        assert self.auxiliary_scale is not None, "as `constructor` says"
        return scale_auxiliaries(mixture, problem.target, self.auxiliary_scale)

    def search_for(self, branches: int) -> Search:
        """The search used for a number of branches."""
        if isinstance(self.search, Search):
            return self.search
        return GRID if branches <= 2 else GREEDY

    @property
    def anneals(self) -> bool:
        """Whether learning rates fall over the tail of every round."""
        return self.tail is not None and self.tail_anneal != "none"

    def tail_steps(self, steps: int) -> int:
        """Steps of the tail of a round: the share, rounded, but never the whole round."""
        return 0 if self.tail is None else min(round(self.tail * steps), steps - 1)

    def needs_search(self, branches: int) -> bool:
        """Whether a run searches before it refits: not where coefficients are fixed and nothing else is chosen."""
        if not self.refit or self.select == "best" or self.floor:
            return True
        if self.previous_merges is not None or self.average_iterates is not None:
            return True
        if branches == 1:
            return False
        chooses = self.checkpoint != "last" or self.confidence is not None
        chooses = chooses or self.prune_to is not None or self.per_round is not None
        return chooses or self.keep_branches or not isinstance(self.search_for(branches), Fixed)

    def refitted(self, branches: int) -> int:
        """How many branches a refit trains at most: none whose coefficient is fixed at 0."""
        search = self.search_for(branches)
        fixed = search.coefficients if isinstance(search, Fixed) else None
        return sum(share > 0 for share in fixed) if fixed is not None and branches > 1 else branches

    def least_disk(self, binding: ModelBinding, problem: Problem, steps: int) -> int:
        """Return the bytes that a run's folder needs at least: of rounds with as few branches as pruning may leave."""
        branches, rounds = self._most_branches(problem), -(-steps // self.interval_of(steps))
        weights = sum(parameter.nbytes for parameter in binding.layout.parameters)
        sizes = StateSizes(weights, int(weights * state_share(binding.optimizer)), buffers=0, fixed=0)
        kept = rounds * min(branches, self.prune_to or branches)
        return disk_of_run(self, sizes, branches, kept, inside=False)["total"]

    def check_descriptors(self, binding: ModelBinding, problem: Problem, workers: int) -> None:
        """Refuse a run whose branches need more open files than a process may have."""
        if workers < 2:
            return  # nothing is shared, and the optimizer need not be tried out
        rows = len(binding.layout.sizes) * (1 + math.ceil(state_share(binding.optimizer)))
        held = max(self._most_branches(problem) + self.floor, len(self.probes(problem)))
        check_descriptors(rows, held, workers)

    def _most_branches(self, problem: Problem) -> int:
        return len(self.rotation(problem).first())

    def interval_of(self, steps: int) -> int:
        """Δt for a run of `steps` steps."""
        return min(self.interval or -(-steps // (_ROUNDS if self.per_round is None else _ROUNDS_IN_TURN)), steps)

    def validate_every_of(self, steps: int) -> int:
        """Steps between in-interval validations for a run of `steps` steps."""
        return self.validate_every or -(-self.interval_of(steps) // 5)


def disk_of_run(settings: Settings, sizes: StateSizes, first: int, in_all: int, inside: bool) -> dict[str, int]:
    """Return the bytes that a run's folder grows to.

    After a merge all branches have the merged weights, which are then written once; inside a round (`inside`) each has
    its own.

    Args:
        settings: The algorithm's options.
        sizes: Those of one branch.
        first: How many branches the first round has, which has most.
        in_all: How many all rounds have together.
        inside: Whether checkpoints are written inside rounds.
    """
    weights = sizes.weights + sizes.buffers
    held = 2 * settings.refit + (settings.select == "best") + first * (settings.checkpoint != "last")
    held += max((settings.previous_merges or 1) - 1, 0) + (first if settings.average_iterates and inside else 0)
    checkpoint = (1 + held) * weights + first * (sizes.optimizer + sizes.buffers)
    checkpoint += settings.floor * (weights + sizes.optimizer) + (first * sizes.weights if inside else 0)
    kept = in_all * weights if settings.keep_branches else 0
    kept += settings.floor * (sizes.weights + sizes.fixed)  # the reference, as a model
    parts = {"checkpoints": CHECKPOINTS_KEPT * checkpoint, "branches": kept, "model": sizes.weights + sizes.fixed}
    return {"checkpoint": checkpoint, **parts, "total": sum(parts.values())}
