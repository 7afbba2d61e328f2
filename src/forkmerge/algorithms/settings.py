"""The options of a fork–merge run, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from forkmerge.algorithms.mixtures import Mixed, Mixtures, check_mixtures, mixtures_from, scale_auxiliaries
from forkmerge.engine.merging.searches import Greedy, Grid, Search, search_from
from forkmerge.engine.training.options import Mixture
from forkmerge.errors import ProblemError, check_count
from forkmerge.methods import Method, method_from
from forkmerge.problem.definition import Problem

_GRID, _GREEDY = Grid(), Greedy()
_CHOICES = {
    "checkpoint": ("last", "best_in_interval", "best_so_far"),
    "bn": ("average", "recompute"),
    "optimizer_state": ("keep", "average", "reset"),
    "select": ("last", "best"),
}


@dataclass(frozen=True)
class Settings:
    """The options of `ForkMerge`, which documents them."""

    mixtures: Mixtures | str | Mapping[str, Any] | Sequence[Mixture] = field(default_factory=Mixed)
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
    auxiliary_scale: float = 1.0
    reference: Mapping[str, float] | None = None
    refit: bool = False
    floor: bool = False
    keep_branches: bool = False
    method: Method | str | None = None
    confidence: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "mixtures", mixtures_from(self.mixtures))
        object.__setattr__(self, "search", search_from(self.search))
        object.__setattr__(self, "method", method_from(self.method))
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ProblemError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}.")
        for name in ("interval", "search_examples", "validate_every", "bn_batches", "prune_to", "prune_after"):
            value = getattr(self, name)
            if value is not None:
                check_count(name, value)
        scale = self.auxiliary_scale
        if not isinstance(scale, int | float) or not (math.isfinite(scale) and scale > 0):
            raise ProblemError(f"auxiliary_scale must be positive and finite, got {self.auxiliary_scale!r}.")

        sure = self.confidence
        if sure is not None and (isinstance(sure, bool) or not isinstance(sure, int | float) or not 0 < sure < 1):
            raise ProblemError(f"confidence must be a number between 0 and 1, such as 0.9, or None, got {sure!r}.")

    @property
    def constructor(self) -> Mixtures:
        """The branch constructor."""
        assert isinstance(self.mixtures, Mixtures)
        return self.mixtures

    def branches(self, problem: Problem, probe_scores: Mapping[str, float]) -> list[Mixture]:
        """The branches a run starts with, auxiliary weights scaled."""
        mixtures = [self._scaled(mixture, problem) for mixture in self.constructor.build(problem, probe_scores)]
        check_mixtures(problem, mixtures)
        return mixtures

    def probes(self, problem: Problem) -> list[Mixture]:
        """Short runs that come before, auxiliary weights scaled; most constructors have none."""
        return [self._scaled(probe, problem) for probe in self.constructor.probes(problem)]

    def _scaled(self, mixture: Mixture, problem: Problem) -> Mixture:
        return scale_auxiliaries(mixture, problem.target, self.auxiliary_scale)

    def search_for(self, branches: int) -> Search:
        """The search used for a number of branches."""
        if isinstance(self.search, Search):
            return self.search
        return _GRID if branches <= 2 else _GREEDY

    def interval_of(self, steps: int) -> int:
        """Δt for a run of `steps` steps."""
        return min(self.interval or -(-steps // 5), steps)

    def validate_every_of(self, steps: int) -> int:
        """Steps between in-interval validations for a run of `steps` steps."""
        return self.validate_every or -(-self.interval_of(steps) // 5)
