"""P̂ of a state, or of a merge: the target's validation metrics, on all examples or on a round's sub-sample.

A search may go by another metric than the target is reported in: `score` and `sample_score` are the search's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from weakref import ref

from forkmerge.engine.executors.branch_execution import BranchExecution
from forkmerge.engine.merging.arithmetic import Coefficients, is_vertex, vertices
from forkmerge.engine.merging.blend import Blender
from forkmerge.engine.merging.find_merge import MergeProblem
from forkmerge.engine.merging.measure_candidate import Measurement, MeasureRequest
from forkmerge.engine.merging.race import Entrant, ScoredEntrant
from forkmerge.engine.merging.race_over_examples import ExampleRace, cost_table, turn_length
from forkmerge.engine.merging.rules import CostTable
from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.engine.training.state import State
from forkmerge.problem.definition import Problem
from forkmerge.problem.example_order import sample_indices
from forkmerge.problem.metrics import Criterion, ExampleCosts, NotPerExample
from forkmerge.problem.randomness import random_state_kept
from forkmerge.problem.scoring import cost_reader, evaluating, other_metrics, read_metrics
from forkmerge.problem.searched_evaluation import of_every_example, reported_directions, search_directions


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
        self.criterion = Criterion(search_directions(self.evaluation))
        self._reported = Criterion(reported_directions(self.evaluation))
        self.search_examples = search_examples
        self._every = of_every_example(self.evaluation)
        reader = cost_reader(self.evaluation, seed)
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
        if len(self._reported.directions) > 1:
            self._reported = self._reported.with_reference(reference)

    @property
    def sees_a_sample(self) -> bool:
        """Whether there are more validation examples than those that states are scored on."""
        return self._every is not self.evaluation

    def on_all(self, state: State) -> tuple[float | None, dict[str, float]]:
        """Return score and metrics, of those that the target is reported in, on every validation example there is."""
        if not state.is_finite():
            return None, {}
        self.binding.attach_weights(state)
        metrics = self.reported(read_metrics(self.binding.model, self._every, None, self.seed)[0])
        return self.report(metrics), metrics

    @property
    def needs_reference(self) -> bool:
        """Whether values that several metrics are compared with must still be set."""
        return self._reported.needs_reference

    @property
    def reports_otherwise(self) -> bool:
        """Whether the target is reported in other metrics than searches go by."""
        return self._reported.directions != self.criterion.directions

    def report(self, metrics: Mapping[str, float]) -> float:
        """Return the score in the metrics that the target is reported in; −∞ where nothing was measured."""
        return self._reported.score(metrics) if metrics else -math.inf

    def reported(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return those of some metrics that the target is reported in."""
        return {name: value for name, value in metrics.items() if name in self._reported.directions}

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
        """Return the score that a search goes by, on all validation examples; what this round measured may be trusted.

        Weights that are not finite score −∞, whatever a metric makes of them: the accuracy of NaN is a number.
        """
        if not state.is_finite():
            return -math.inf
        metrics = {} if remeasure else self.known_metrics(state)
        return self.criterion.score(metrics or self.metrics(state))

    def sample_score(self, state: State) -> float:
        """Return the score on the round's sub-sample; a branch whose costs are known is not evaluated again."""
        if not state.is_finite():
            return -math.inf
        entry = self._entry(state)
        if entry is not None and entry.costs is not None and self._reader is not None:
            part = ExampleCosts(*(column[self._indices] for column in entry.costs))
            return self.criterion.score(self._reader.values(part))
        self.binding.attach_weights(state)
        return self.criterion.score(read_metrics(self.binding.model, self.evaluation, self._indices, self.seed)[0])

    def reported_score(self, state: State) -> float:
        """Return the score in the metrics that the target is reported in, on all validation examples."""
        if not state.is_finite():
            return -math.inf
        return self.report(self.known_metrics(state) or self.metrics(state))

    def with_others(self, state: State, metrics: dict[str, float]) -> dict[str, float]:
        """Return metrics of a state together with those that their costs do not tell."""
        if self._reader is None or set(self._reader.metrics) == set(self.evaluation.metrics):
            return metrics
        self.binding.attach_weights(state)
        return {**other_metrics(self.binding.model, self.evaluation, self._reader, self.seed), **metrics}

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

    def known_costs(self, state: State) -> ExampleCosts | None:
        """Return what every example was last measured to cost a state in this round, where scores add up."""
        entry = self._entry(state)
        return entry.costs if entry is not None else None

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


class ValidatedMerge(MergeProblem):
    """The merge of a round's branches, scored on the target's validation data.

    Args:
        names: Branch names.
        blend: Builds combinations of what enters the merge.
        faults: Why a branch is unusable, by name.
        validator: Scores states.
        execution: Measures whole passes of several candidates at once, where it has workers.
        request: What workers are asked about a combination, without its coefficients.
        earlier: How many of the names, the last, are those of earlier merges.

    Attributes:
        race: The race over examples, where scores add up over them; None before the search, too.
        metrics: The metrics of combinations that took a whole pass over all examples.
    """

    def __init__(
        self,
        names: Sequence[str],
        blend: Blender,
        faults: Mapping[str, str],
        validator: Validator,
        execution: BranchExecution,
        request: MeasureRequest,
        *,
        earlier: int = 0,
    ) -> None:
        on_sample = validator.search_examples is not None
        super().__init__(names, faults, on_sample=on_sample, earlier=earlier, groups=blend.groups)
        self.blend, self.validator, self.execution, self.request = blend, validator, execution, request
        self.race: ExampleRace | None = None
        self.metrics: dict[Coefficients, dict[str, float]] = {}
        self._costs: dict[Coefficients, ExampleCosts] = {}
        self._has_started = False

    def score_branch(self, index: int) -> float:
        """Return the score of a branch, which ranking may have measured already."""
        return self.validator.score(self.blend.states[index], remeasure=False)

    def sample_score_of_branch(self, index: int) -> float:
        """Return the score of a branch on the round's sub-sample."""
        return self.validator.sample_score(self.blend.states[index])

    def score(self, coefficients: Coefficients) -> float:
        """Return the score of a combination on all validation examples."""
        state = self.blend(coefficients)
        score = self.validator.score(state, remeasure=state is self.blend.out)
        self.metrics[coefficients] = self.validator.known_metrics(state)
        costs = self.validator.known_costs(state)
        if costs is not None:
            self._costs[coefficients] = costs
        return score

    def enter(self, candidates: Sequence[Coefficients], guides: Sequence[Coefficients]) -> Sequence[Entrant]:
        """Return entrants that are raced where scores add up over examples, and took a whole pass elsewhere."""
        self._start()
        if self.race is not None:  # in this process: which example is evaluated next depends on the last one
            return self.race.enter(candidates, guides)
        if self.execution.workers == 1 or len(candidates) == 1:
            return [ScoredEntrant(self._whole_pass(coefficients)) for coefficients in candidates]
        return [ScoredEntrant(score) for score in self._passes_of_workers(candidates)]

    def cost_table(self, points: Sequence[Coefficients], *, on_all: bool = False) -> CostTable:
        """Return what every example costs combinations that were scored."""
        self._start()
        if self.race is None:
            return super().cost_table(points)
        if not (on_all and self.on_sample):
            return self.race.table(points)
        singles = dict(zip(vertices(len(self.names)), map(self.validator.known_costs, self.blend.states), strict=True))
        costs = [self._costs.get(point) or singles[point] for point in points]
        return cost_table(self.race.reader, self.race.criterion, [each for each in costs if each is not None])

    def metrics_of(self, coefficients: Coefficients) -> dict[str, float]:
        """Return the metrics of the winner as the search has measured them; empty if no branch could be used."""
        if not any(coefficients):
            return {}
        if is_vertex(coefficients):
            return self.validator.known_metrics(self.blend.states[coefficients.index(1.0)])
        if coefficients in self.metrics or self.race is None:
            return self.metrics.get(coefficients, {})
        return self.validator.with_others(self.blend(coefficients), self.race.metrics(coefficients))

    def _start(self) -> None:
        if not self._has_started:
            self._has_started, self.race = True, self.validator.race(self.blend)

    def _whole_pass(self, coefficients: Coefficients) -> float:
        return self.validator.sample_score(self.blend(coefficients)) if self.on_sample else self.score(coefficients)

    def _passes_of_workers(self, candidates: Sequence[Coefficients]) -> list[float]:
        origin = self.blend.origin
        states = [*self.blend.states, *([] if origin is None else [origin])]
        request = replace(self.request, has_origin=origin is not None)
        requests = [replace(request, coefficients=coefficients) for coefficients in candidates]
        measured = [each.metrics for each in self.execution.measure(states, requests)]
        if not self.on_sample:
            self.metrics.update((c, m) for c, m in zip(candidates, measured, strict=True) if m is not None)
        return [-math.inf if metrics is None else self.validator.criterion.score(metrics) for metrics in measured]
