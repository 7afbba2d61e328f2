"""Combinations of a round's saved branches, scored: each is evaluated once, whatever is asked of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from forkmerge.engine.merging.arithmetic import Coefficients, vertices
from forkmerge.engine.merging.blend import Blender
from forkmerge.engine.merging.candidates import Score
from forkmerge.engine.merging.find_merge import MergeProblem
from forkmerge.engine.merging.race import Entrant, ScoredEntrant
from forkmerge.engine.merging.race_over_examples import cost_table
from forkmerge.engine.merging.rules import CostTable
from forkmerge.problem.definition import Evaluation
from forkmerge.problem.metrics import Criterion, ExampleCosts
from forkmerge.problem.scoring import cost_reader, read_metrics
from forkmerge.problem.searched_evaluation import search_directions


class CombinationScores:
    """Scores of combinations on any data; what every example costs is found out once where the score adds up.

    Args:
        blend: Builds the combinations.
        criterion: What the run searched by.
        reference: The branch that several metrics of other data are compared with, as coefficients.
        seed: The run's seed.
    """

    def __init__(self, blend: Blender, criterion: Criterion, reference: Coefficients, seed: int) -> None:
        self.blend, self.criterion, self.reference, self.seed = blend, criterion, reference, seed
        self._costs: dict[tuple[int, Coefficients], ExampleCosts | None] = {}
        self._asked: dict[int, Evaluation] = {}  # alive, so that no other gets the number of one

    def table(
        self, data: Evaluation, indices: Sequence[int] | None, points: Sequence[Coefficients]
    ) -> CostTable | None:
        """Return what examples cost combinations; None where the score does not add up over them."""
        reader = cost_reader(data, self.seed)
        for point in points:
            self.metrics(data, None, point)
        costs = [self._costs[id(data), point] for point in points]
        if reader is None or not reader.falls_with_costs or any(each is None for each in costs):
            return None
        chosen = None if indices is None else torch.tensor(list(indices))
        return cost_table(reader, self.criterion_of(data), [each for each in costs if each is not None], chosen)

    def criterion_of(self, data: Evaluation) -> Criterion:
        """Return what a search on some data goes by."""
        criterion = self.criterion
        if search_directions(data) != criterion.directions:
            criterion = Criterion(search_directions(data))
            if criterion.needs_reference:
                criterion = criterion.with_reference(self.metrics(data, None, self.reference))
        return criterion

    def scorer(self, data: Evaluation, indices: Sequence[int] | None) -> Any:
        """Return the score of coefficients; what every example costs is found out once where the score adds up."""
        criterion = self.criterion_of(data)
        return lambda coefficients: criterion.score(self.metrics(data, indices, coefficients))

    def metrics(self, data: Evaluation, indices: Sequence[int] | None, coefficients: Coefficients) -> dict[str, float]:
        """Return the metrics of a combination on all examples or some."""
        key = id(self._asked.setdefault(id(data), data)), coefficients
        binding = self.blend.binding
        if key not in self._costs:
            binding.attach_weights(self.blend(coefficients))
            metrics, self._costs[key] = read_metrics(binding.model, data, None, self.seed)
            if indices is None:
                return metrics
        costs = self._costs[key]
        reader = cost_reader(data, self.seed)
        if costs is not None and reader is not None:
            part = costs if indices is None else ExampleCosts(*(column[list(indices)] for column in costs))
            return reader.values(part)
        binding.attach_weights(self.blend(coefficients))
        return read_metrics(binding.model, data, indices, self.seed)[0]


Tables = Callable[[Sequence[Coefficients]], "CostTable | None"]


class ReplayedMerge(MergeProblem):
    """A round's merge again, scored from what is known of its combinations.

    Args:
        names: Branch names.
        faults: Why a branch is unusable, by name.
        score: The score of coefficients on all examples.
        on_sample: That on the sub-sample of the search, if there is one.
        tables: What examples cost combinations, on all examples and on those of the search.
    """

    def __init__(
        self,
        names: Sequence[str],
        faults: Mapping[str, str],
        score: Score,
        on_sample: Score | None,
        tables: tuple[Tables, Tables],
    ) -> None:
        super().__init__(names, faults, on_sample=on_sample is not None)
        self._score, self._sample_score, self._tables = score, on_sample or score, tables

    def cost_table(self, points: Sequence[Coefficients], *, on_all: bool = False) -> CostTable:
        """Return what every example costs combinations."""
        table = self._tables[0 if on_all else 1](points)
        return super().cost_table(points) if table is None else table

    def score_branch(self, index: int) -> float:
        """Return the score of a branch."""
        return self._score(vertices(len(self.names))[index])

    def sample_score_of_branch(self, index: int) -> float:
        """Return the score of a branch on the round's sub-sample."""
        return self._sample_score(vertices(len(self.names))[index])

    def score(self, coefficients: Coefficients) -> float:
        """Return the score of a combination."""
        return self._score(coefficients)

    def enter(self, candidates: Sequence[Coefficients], guides: Sequence[Coefficients]) -> list[Entrant]:
        """Return candidates whose scores, on the sub-sample where there is one, are known."""
        return [ScoredEntrant(self._sample_score(coefficients)) for coefficients in candidates]
