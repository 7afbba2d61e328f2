"""P̂ of a state: the target's validation metrics, on all examples or on a round's sub-sample."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from weakref import ref

from forkmerge.order import sample_indices
from forkmerge.problem import Problem
from forkmerge.scoring import Criterion, measure
from forkmerge.state import State
from forkmerge.workbench import Workbench


class Judge:
    """Scores states on the target's validation data.

    Args:
        bench: The module that states are attached to.
        problem: The sealed problem.
        reference: Reference metrics, if the user gave some.
        search_examples: Size of the sub-sample a search uses, if any.
        seed: The run's seed.
    """

    def __init__(
        self,
        bench: Workbench,
        problem: Problem,
        reference: Mapping[str, float] | None,
        search_examples: int | None,
        seed: int,
    ) -> None:
        self.bench, self.evaluation, self.seed = bench, problem.target_validation, seed
        self.criterion = Criterion(self.evaluation.directions)
        self.search_examples = search_examples
        self._indices: list[int] | None = None
        # By identity, with a weak reference: a new state may get the address of one that is gone.
        self._known: dict[int, tuple[ref[State], dict[str, float], float]] = {}
        if reference is not None:
            self.set_reference(reference)

    def set_reference(self, reference: Mapping[str, float]) -> None:
        """Fix the values that several metrics are compared with."""
        if len(self.criterion.directions) > 1:
            self.criterion = self.criterion.with_reference(reference)

    def start_round(self, index: int) -> None:
        """Draw the round's sub-sample and forget the last round's measurements."""
        self._known = {}
        if self.search_examples is not None:
            size = len(self.evaluation.dataset)  # type: ignore[arg-type]  # checked by Problem
            self._indices = sample_indices(size, self.search_examples, self.seed, "validation", index)

    def metrics(self, state: State) -> dict[str, float]:
        """Return the target's metrics on all validation examples."""
        started = time.perf_counter()
        self.bench.attach_weights(state)
        values = measure(self.bench.model, self.evaluation, seed=self.seed)
        self._known[id(state)] = ref(state), values, time.perf_counter() - started
        return values

    def score(self, state: State, *, remeasure: bool = True) -> float:
        """Return the score on all validation examples; a state already measured in this round may be trusted.

        Weights that are not finite score −∞, whatever a metric makes of them: the accuracy of NaN is a number.
        """
        if not state.is_finite():
            return -math.inf
        known = {} if remeasure else self.known_metrics(state)
        return self.criterion.score(known or self.metrics(state))

    def search_score(self, state: State) -> float:
        """Return the score on the round's sub-sample."""
        self.bench.attach_weights(state)
        return self.criterion.score(measure(self.bench.model, self.evaluation, indices=self._indices, seed=self.seed))

    def known_metrics(self, state: State) -> dict[str, float]:
        """Return the metrics last measured for a state in this round; empty if it was not."""
        measured, values, _ = self._known.get(id(state), (None, {}, 0.0))
        return values if measured is not None and measured() is state else {}

    def seconds(self, state: State) -> float:
        """Return the time that measuring a state took in this round."""
        measured, _, seconds = self._known.get(id(state), (None, {}, 0.0))
        return seconds if measured is not None and measured() is state else 0.0
