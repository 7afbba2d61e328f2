"""A merge that is scored by the user's own function of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from forkmerge.algorithms.own_loop.ranks import Ranks, ScoreRanks
from forkmerge.engine.merging.arithmetic import Coefficients, vertices
from forkmerge.engine.merging.blend import Blender
from forkmerge.engine.merging.find_merge import MergeProblem
from forkmerge.engine.merging.rules import CostTable
from forkmerge.engine.training.state import State
from forkmerge.errors import ProblemError
from forkmerge.problem.exact_sum import rounded

Score = Callable[[nn.Module], "float | Tensor"]
"""Validates a model: a number, higher is better, or one per example, [n], whose mean counts."""


class OwnMerge(MergeProblem):
    """A merge that is scored by the user's own function of a model.

    Args:
        names: Branch names.
        faults: Why a branch is unusable, by name.
        blend: Builds combinations.
        score: The function.
        ranks: Those that the model spans.
        score_ranks: Whose score is everybody's.
    """

    def __init__(
        self,
        names: Sequence[str],
        faults: Mapping[str, str],
        blend: Blender,
        score: Score,
        ranks: Ranks,
        score_ranks: ScoreRanks = "first",
    ) -> None:
        super().__init__(names, faults)
        self.blend, self.user_score, self.ranks, self.score_ranks = blend, score, ranks, score_ranks
        self._examples: dict[Coefficients, Tensor] = {}

    def score_branch(self, index: int) -> float:
        """Return the score of a branch."""
        return self._score(vertices(len(self.names))[index], self.blend.states[index])

    def score(self, coefficients: Coefficients) -> float:
        """Return the score of a combination."""
        return self._score(coefficients, self.blend(coefficients))

    def cost_table(self, points: Sequence[Coefficients], *, on_all: bool = False) -> CostTable:
        """Return what every example costs combinations: minus its score."""
        rows = [self._examples.get(point) for point in points]
        if any(row is None for row in rows):
            raise ProblemError(
                "a rule other than argmax compares candidates example by example: let score return a tensor of one "
                "number per validation example, higher is better, instead of their mean. The branches are as they were."
            )
        costs = -torch.stack([row for row in rows if row is not None]).unsqueeze(2)  # [candidates, n, 1]
        return CostTable(costs, torch.ones_like(costs[0]), -torch.ones_like(costs[0, 0]))

    def _score(self, coefficients: Coefficients, state: State) -> float:
        binding = self.blend.binding
        binding.attach_weights(state)
        values = self.ranks.agree(lambda: self.user_score(binding.model), _numbers, self.score_ranks)
        return self._mean(coefficients, values) if values.dim() else float(values)

    def _mean(self, coefficients: Coefficients, row: Tensor) -> float:
        before = next(iter(self._examples.values()), row)
        if len(before) != len(row):
            raise ProblemError(
                f"score returned {len(before)} numbers for one candidate and {len(row)} for another: it must look at "
                "the same validation examples every time."
            )
        self._examples[coefficients] = row
        return rounded(row.tolist()) / len(row)


def _numbers(value: Any) -> Tensor:
    """Return what a score gave in float64 on the CPU: one number, or one per example, [n]."""
    if isinstance(value, Tensor) and value.dim() == 1 and len(value):
        return value.detach().double().cpu()
    try:
        return torch.tensor(float(value), dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise ProblemError(
            f"score must return one number, higher is better, or one per example, [n]; got {value!r:.80}."
        ) from None
