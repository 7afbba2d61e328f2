"""P̂ of a state: the target's validation metrics, on all examples or on a round's sub-sample."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from weakref import ref

from forkmerge.engine.merging.arithmetic import vertices
from forkmerge.engine.merging.blend import Blender
from forkmerge.engine.merging.measure_candidate import Measurement
from forkmerge.engine.merging.race_over_examples import ExampleRace, turn_length
from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.engine.training.state import State
from forkmerge.problem.definition import Problem
from forkmerge.problem.example_order import sample_indices
from forkmerge.problem.metrics import Criterion, ExampleCosts, NotPerExample
from forkmerge.problem.randomness import random_state_kept
from forkmerge.problem.scoring import CostReader, adds_up, evaluating, measure, read_metrics


@dataclass(frozen=True)
class _StateMetrics:
    """What was measured of a state, held weakly: a new state may get the address of one that is gone."""

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
        reader = CostReader(self.evaluation, seed) if adds_up(self.evaluation) else None
        self._reader = reader
        self._can_race = reader is not None and reader.falls_with_costs
        self._turn: int | None = None
        self._indices: list[int] | None = None
        self._measured: dict[int, _StateMetrics] = {}
        self._lasting: dict[int, _StateMetrics] = {}
        if reference is not None:
            self.set_reference(reference)

    def set_reference(self, reference: Mapping[str, float]) -> None:
        """Fix the values that several metrics are compared with."""
        if len(self.criterion.directions) > 1:
            self.criterion = self.criterion.with_reference(reference)

    def prepare_race(self) -> None:
        """Find out, once and before training, in what turns candidates are raced; any weights will do for that."""
        if self._can_race and self._reader is not None and self._turn is None:
            parameters = sum(self.binding.layout.sizes.values())
            try:
                self._turn = turn_length(self.binding.model, self._reader, parameters)
            except NotPerExample:  # predictions of a batch that are not one per example take whole passes
                self._can_race = False

    def start_round(self, index: int) -> None:
        """Draw the round's sub-sample and forget what was measured of states that training changes."""
        self._measured = {}
        self._lasting = {key: entry for key, entry in self._lasting.items() if entry.state() is not None}
        if self.search_examples is not None:
            size = self.evaluation.size
            self._indices = sample_indices(size, self.search_examples, self.seed, "validation", index)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Keep the module ready to be measured inside, once for all candidates of a merge."""
        with random_state_kept(), evaluating(self.binding.model):
            yield

    def metrics(self, state: State) -> dict[str, float]:
        """Return the target's metrics on all validation examples."""
        started = time.perf_counter()
        self.binding.attach_weights(state)
        metrics, costs = read_metrics(self.binding.model, self.evaluation, None, self.seed, self._reader)
        self._measured[id(state)] = _StateMetrics(ref(state), metrics, costs, time.perf_counter() - started)
        return metrics

    def score(self, state: State, *, remeasure: bool = True) -> float:
        """Return the score on all validation examples; a state already measured in this round may be trusted.

        Weights that are not finite score −∞, whatever a metric makes of them: the accuracy of NaN is a number.
        """
        if not state.is_finite():
            return -math.inf
        metrics = {} if remeasure else self.known_metrics(state)
        return self.criterion.score(metrics or self.metrics(state))

    def search_score(self, state: State) -> float:
        """Return the score on the round's sub-sample; a branch whose costs are known is not evaluated again."""
        if not state.is_finite():
            return -math.inf
        entry = self._entry(state)
        if entry is not None and entry.costs is not None and self._reader is not None:
            part = ExampleCosts(*(column[self._indices] for column in entry.costs))
            return self.criterion.score(self._reader.values(part))
        self.binding.attach_weights(state)
        return self.criterion.score(measure(self.binding.model, self.evaluation, indices=self._indices, seed=self.seed))

    def note(self, state: State, measurement: Measurement) -> None:
        """Take over what a worker has measured of a state."""
        if measurement.metrics is not None:
            self._measured[id(state)] = _StateMetrics(ref(state), measurement.metrics, measurement.costs, 0.0)

    @property
    def indices(self) -> tuple[int, ...] | None:
        """The examples of the round's sub-sample; None without one."""
        return tuple(self._indices) if self.search_examples is not None and self._indices is not None else None

    def keep(self, copy: State, original: State) -> None:
        """Let what is known of a state count for a copy of it that nobody will change, in later rounds, too."""
        entry = self._entry(original)
        if entry is not None:
            self._lasting[id(copy)] = replace(entry, state=ref(copy), seconds=0.0)

    def forget(self, state: State) -> None:
        """Forget what was measured of a state that has changed since."""
        self._measured.pop(id(state), None)

    def known_metrics(self, state: State) -> dict[str, float]:
        """Return the metrics last measured for a state in this round; empty if it was not."""
        entry = self._entry(state)
        return entry.metrics if entry is not None else {}

    def seconds(self, states: Sequence[State]) -> float:
        """Return the time that measuring states took in this round."""
        return sum(entry.seconds for entry in map(self._entry, states) if entry is not None)

    def race(self, blend: Blender) -> ExampleRace | None:
        """Return the race between combinations of branches that have been scored; None if scores do not add up."""
        entries = zip(vertices(len(blend.states)), map(self._entry, blend.states), strict=True)
        costs = {vertex: entry.costs for vertex, entry in entries if entry is not None and entry.costs is not None}
        if self._reader is None or not self._can_race or not costs:
            return None
        self.prepare_race()
        indices = self._indices if self.search_examples is not None else None
        return ExampleRace(
            self._reader, self.criterion, blend.model_of, branch_costs=costs, indices=indices, turn=self._turn or 1
        )

    def _entry(self, state: State) -> _StateMetrics | None:
        for entries in (self._measured, self._lasting):
            entry = entries.get(id(state))
            if entry is not None and entry.state() is state:
                return entry
        return None
