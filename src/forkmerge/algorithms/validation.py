"""P̂ of a state: the target's validation metrics, on all examples or on a round's sub-sample."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import ref

from torch import nn

from forkmerge.engine.merging.coefficients import Coefficients, vertices
from forkmerge.engine.merging.measure_candidate import Measurement, read_metrics
from forkmerge.engine.merging.race_over_examples import ExampleRace, turn_length
from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.engine.training.state import State
from forkmerge.problem.definition import Problem
from forkmerge.problem.example_order import sample_indices
from forkmerge.problem.scoring import CostReader, Criterion, ExampleCosts, adds_up, measure


@dataclass(frozen=True)
class _Measured:
    """What is known of a state, held weakly: a new state may get the address of one that is gone."""

    state: ref[State]
    metrics: dict[str, float]
    costs: ExampleCosts | None
    seconds: float


class Validator:
    """Scores states on the target's validation data.

    Args:
        binding: The module that states are attached to.
        problem: The sealed problem.
        reference: Reference metrics, if the user gave some.
        search_examples: Size of the sub-sample a search uses, if any.
        seed: The run's seed.
    """

    def __init__(
        self,
        binding: ModelBinding,
        problem: Problem,
        reference: Mapping[str, float] | None,
        search_examples: int | None,
        seed: int,
    ) -> None:
        self.binding, self.evaluation, self.seed = binding, problem.target_validation, seed
        self.criterion = Criterion(self.evaluation.directions)
        self.search_examples = search_examples
        self._reader = CostReader(self.evaluation, seed) if adds_up(self.evaluation) else None
        self._turn: int | None = None
        self._indices: list[int] | None = None
        self._known: dict[int, _Measured] = {}
        self._lasting: dict[int, _Measured] = {}
        if reference is not None:
            self.set_reference(reference)

    def set_reference(self, reference: Mapping[str, float]) -> None:
        """Fix the values that several metrics are compared with."""
        if len(self.criterion.directions) > 1:
            self.criterion = self.criterion.with_reference(reference)

    def start_round(self, index: int) -> None:
        """Draw the round's sub-sample and forget what was measured of states that training changes."""
        self._known = {}
        self._lasting = {key: found for key, found in self._lasting.items() if found.state() is not None}
        if self.search_examples is not None:
            size = len(self.evaluation.dataset)  # type: ignore[arg-type]  # checked by Problem
            self._indices = sample_indices(size, self.search_examples, self.seed, "validation", index)

    def metrics(self, state: State) -> dict[str, float]:
        """Return the target's metrics on all validation examples."""
        started = time.perf_counter()
        self.binding.attach_weights(state)
        values, costs = read_metrics(self.binding.model, self.evaluation, None, self.seed)
        self._known[id(state)] = _Measured(ref(state), values, costs, time.perf_counter() - started)
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
        """Return the score on the round's sub-sample; a branch whose costs are known is not evaluated again."""
        if not state.is_finite():
            return -math.inf
        found = self._find(state)
        if found is not None and found.costs is not None and self._reader is not None:
            part = ExampleCosts(*(column[self._indices] for column in found.costs))
            return self.criterion.score(self._reader.values(part))
        self.binding.attach_weights(state)
        return self.criterion.score(measure(self.binding.model, self.evaluation, indices=self._indices, seed=self.seed))

    def note(self, state: State, found: Measurement) -> None:
        """Take over what a worker has measured of a state."""
        if found.metrics is not None:
            self._known[id(state)] = _Measured(ref(state), found.metrics, found.costs, 0.0)

    @property
    def indices(self) -> tuple[int, ...] | None:
        """The examples of the round's sub-sample; None without one."""
        return tuple(self._indices) if self.search_examples is not None and self._indices is not None else None

    def keep(self, copy: State, original: State) -> None:
        """Let what is known of a state count for a copy of it that nobody will change, in later rounds, too."""
        found = self._find(original)
        if found is not None:
            self._lasting[id(copy)] = replace(found, state=ref(copy), seconds=0.0)

    def forget(self, state: State) -> None:
        """Forget what was measured of a state that has changed since."""
        self._known.pop(id(state), None)

    def known_metrics(self, state: State) -> dict[str, float]:
        """Return the metrics last measured for a state in this round; empty if it was not."""
        found = self._find(state)
        return found.metrics if found is not None else {}

    def seconds(self, state: State) -> float:
        """Return the time that measuring a state took in this round."""
        found = self._find(state)
        return found.seconds if found is not None else 0.0

    def course(self, states: Sequence[State], blend: Callable[[Coefficients], State]) -> ExampleRace | None:
        """Return where combinations of branches that have been scored can be raced; None if scores do not add up.

        While it is used, nothing else may be attached to the binding.
        """
        reader = self._reader
        found = zip(vertices(len(states)), map(self._find, states), strict=True)
        known = {vertex: each.costs for vertex, each in found if each is not None and each.costs is not None}
        if reader is None or not known or not reader.falls_with_costs:
            return None
        if self._turn is None:
            parameters = sum(row.numel() for row in states[0].rows.values())
            self._turn = turn_length(self.binding.model, reader, parameters)
        finite: dict[Coefficients, bool] = {}
        placed: Coefficients = ()

        def place(coefficients: Coefficients) -> nn.Module | None:
            nonlocal placed
            if coefficients != placed:
                state = blend(coefficients)
                if coefficients not in finite:
                    finite[coefficients] = state.is_finite()
                self.binding.attach_weights(state)
                placed = coefficients
            return self.binding.model if finite[coefficients] else None

        indices = self._indices if self.search_examples is not None else None
        return ExampleRace(reader, self.criterion, place, known=known, indices=indices, turn=self._turn)

    def _find(self, state: State) -> _Measured | None:
        for known in (self._known, self._lasting):
            found = known.get(id(state))
            if found is not None and found.state() is state:
                return found
        return None
