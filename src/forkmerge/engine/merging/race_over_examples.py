"""Candidates of a merge as entrants of a race over validation examples, hardest first."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from forkmerge.engine.merging.arithmetic import Coefficients
from forkmerge.engine.merging.race import Entrant
from forkmerge.engine.merging.rules import CostTable
from forkmerge.engine.training.torch_compile import uncompiled
from forkmerge.errors import ProblemError
from forkmerge.problem.exact_sum import add_exactly, rounded
from forkmerge.problem.metrics import Criterion, ExampleCosts, values_of_sums
from forkmerge.problem.scoring import CostReader

# In multiply-adds: what a chunk costs besides its arithmetic, and what a turn should hold per number that is merged. A
# merge is bound by memory: a number takes about as long as 15 multiply-adds, and all may take a quarter of a turn.
_CALL, _MERGE = 500_000, 60
_MATRICES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class ExampleRace:
    """A race between candidates of one merge over validation examples, hardest first.

    Used while the reader is `ready`, which is done once for all candidates.

    Args:
        reader: Gives the costs of examples.
        criterion: From sums of costs to a score that falls as they grow.
        model_of: Returns the model with a candidate's weights; None if they are not finite.
        branch_costs: Costs of single branches on all examples, by their coefficients.
        indices: The examples that count; all where None.
        turn: How many chunks a candidate is extended by at a time.
    """

    def __init__(
        self,
        reader: CostReader,
        criterion: Criterion,
        model_of: Callable[[Coefficients], nn.Module | None],
        *,
        branch_costs: Mapping[Coefficients, ExampleCosts],
        indices: Sequence[int] | None = None,
        turn: int = 1,
    ) -> None:
        self.reader, self.criterion, self.model_of, self.turn = reader, criterion, model_of, turn
        first = next(iter(branch_costs.values()))
        self.indices = torch.arange(len(first.costs)) if indices is None else torch.tensor(list(indices))
        self.counts = first.counts
        self.totals = [rounded(column.tolist()) for column in self.counts[self.indices].unbind(1)]
        # From sums of costs over all examples to the score; over some of them, to an upper bound of it.
        self.score = partial(criterion.score_of_sums, reader.metrics, totals=self.totals)
        self._columns = [at for at, name in enumerate(reader.metrics) if name in criterion.directions]
        self._branch_costs = dict(branch_costs)
        self._entrants: dict[Coefficients, _ExampleEntrant] = {}
        self._orders: dict[tuple[Coefficients, ...], list[int]] = {}

    def enter(self, candidates: Sequence[Coefficients], guides: Sequence[Coefficients]) -> list[_ExampleEntrant]:
        """Return the entrants of candidates, whose examples come in the order of their costs to the guides."""
        key = tuple(guides)
        if key not in self._orders:
            self._orders[key] = self._order([self._costs(guide) for guide in guides])
        bound = self.score([0.0] * len(self.totals))  # before any example, the same for all
        entrants = [_ExampleEntrant(self, candidate, self._orders[key], bound) for candidate in candidates]
        self._entrants.update(zip(candidates, entrants, strict=True))
        return entrants

    def metrics(self, coefficients: Coefficients) -> dict[str, float]:
        """Return the metrics of a candidate that was evaluated to the end; empty for any other."""
        entrant = self._entrants.get(coefficients)
        is_whole = entrant is not None and entrant.done == len(self.indices)
        return (
            values_of_sums(self.reader.metrics, entrant.sums, self.totals) if entrant is not None and is_whole else {}
        )

    def certainty(self, ours: Coefficients, theirs: Coefficients, seed: int, resamples: int = 1000) -> float:
        """Return how often one candidate beats another when the examples are drawn anew, with replacement.

        A rule against chance on few examples; what branches do on other seeds it cannot know. No forward pass is
        needed: both have costs for every example.

        Args:
            ours: A candidate or a single branch.
            theirs: Another.
            seed: Of the draws.
            resamples: How many.
        """
        draw = torch.Generator().manual_seed(seed)
        costs = torch.stack([self._all_costs(each)[self.indices] for each in (ours, theirs)])  # [2, n, metrics]
        counts, size, wins = self.counts[self.indices], len(self.indices), 0
        for _ in range(resamples):
            chosen = torch.randint(size, (size,), generator=draw)
            totals = counts[chosen].sum(0).tolist()
            ahead, behind = (self.score(sums, totals=totals) for sums in costs[:, chosen].sum(1).tolist())
            wins += ahead > behind
        return wins / resamples

    def table(self, points: Sequence[Coefficients]) -> CostTable:
        """Return what every example that counts costs candidates and single branches, evaluating what is missing."""
        for point in points:
            self._all_costs(point)
        return cost_table(self.reader, self.criterion, [self._costs(point) for point in points], self.indices)

    @property
    def examples(self) -> dict[str, int]:
        """Examples `evaluated`; the lower `bound`; and what one `full` pass per candidate takes."""
        entrants = list(self._entrants.values())
        return {
            "evaluated": sum(entrant.done for entrant in entrants),
            "bound": sum(entrant.needed for entrant in entrants),
            "full": len(entrants) * len(self.indices),
        }

    def _all_costs(self, coefficients: Coefficients) -> Tensor:
        """Return the costs of a candidate, evaluating what no race has asked for."""
        if coefficients not in self._branch_costs:
            entrant = self._entrants.get(coefficients) or self.enter([coefficients], ())[0]
            while not entrant.is_complete:
                entrant.extend()
        return self._costs(coefficients).costs

    def _costs(self, coefficients: Coefficients) -> ExampleCosts:
        single = self._branch_costs.get(coefficients)
        return self._entrants[coefficients].rows if single is None else single

    def _order(self, guides: Sequence[ExampleCosts]) -> list[int]:
        """Return the examples, hardest first; of equals the first."""
        if not guides:
            return self.indices.tolist()
        # With 0/1 errors most examples tie; the rank also holds the target's probability, which tells them apart and
        # saves up to a quarter of the examples.
        rank = torch.stack([guide.rank[self.indices] for guide in guides]).sum(0)[:, self._columns]  # [n, metrics]
        if rank.shape[1] > 1:
            # Metrics differ in their units; a mean of 0 belongs to a metric that tells no examples apart.
            rank = (rank / rank.mean(0)).nan_to_num(nan=0.0, posinf=math.inf)
        order = torch.sort(rank.sum(1), descending=True, stable=True).indices
        return self.indices[order].tolist()


class _ExampleEntrant(Entrant):
    """A candidate in a race over examples."""

    def __init__(self, race: ExampleRace, coefficients: Coefficients, order: list[int], bound: float) -> None:
        self.race, self.coefficients, self.order = race, coefficients, order
        self.rows = ExampleCosts(torch.zeros_like(race.counts), race.counts, torch.zeros_like(race.counts))
        self.done, self.needed = 0, 0
        self._sums: list[list[float]] = [[] for _ in race.totals]
        self.bound, self.is_complete = bound, False

    @property
    def sums(self) -> list[float]:
        """The costs so far, by metric."""
        return [rounded(parts) for parts in self._sums]

    def extend(self) -> None:
        """Evaluate some chunks."""
        race = self.race
        model = race.model_of(self.coefficients)
        if model is None:
            self.bound, self.is_complete = -math.inf, True
            return
        # Always in this order, fixed before the first chunk: a row of a matrix product has other bits at another
        # position, even in batches of one shape (measured on a CPU).
        chunk = self.order[self.done : self.done + race.turn * race.reader.chunk]
        self._add(chunk, race.reader.read(model, chunk, self.done, is_ready=True))
        self.bound, self.is_complete = race.score(self.sums), self.done == len(self.order)

    def ask(self) -> None:
        """Note that every example was needed."""
        self.needed = self.done

    def lose(self, winner: float, *, is_preferred: bool) -> None:
        """Note how many examples prove that this candidate does not win."""
        race, costs = self.race, self.rows.costs[self.order[: self.done]]
        needed = race.criterion.examples_to_lose(
            race.reader.metrics, costs, race.totals, winner, is_preferred=is_preferred
        )
        self.needed = max(self.needed, needed)  # a race before may have needed more

    def _add(self, chunk: list[int], costs: ExampleCosts) -> None:
        expected: Tensor = self.race.counts[chunk]
        if not torch.equal(costs.counts, expected):
            raise ProblemError(
                "the counts of a metric differ between models: `count` of a MeanCost must depend on targets only."
            )
        self.rows.costs[chunk], self.rows.rank[chunk] = costs.costs, costs.rank
        columns = zip(self._sums, costs.costs.unbind(1), strict=True)
        self._sums = [add_exactly(parts, column.tolist()) for parts, column in columns]
        self.done += len(chunk)


def cost_table(
    reader: CostReader, criterion: Criterion, costs: Sequence[ExampleCosts], indices: Tensor | None = None
) -> CostTable:
    """Return the costs of candidates in the metrics that a criterion goes by, on all examples or some.

    Args:
        reader: What read the costs.
        criterion: The criterion.
        costs: Those of every candidate, on all examples.
        indices: The examples; all where None.
    """
    columns = [at for at, name in enumerate(reader.metrics) if name in criterion.directions]
    rows = torch.arange(len(costs[0].counts)) if indices is None else indices
    part = torch.stack([each.costs[rows][:, columns] for each in costs])
    slopes = torch.tensor(criterion.slopes(reader.metrics), dtype=torch.float64)
    return CostTable(part, costs[0].counts[rows][:, columns], slopes)


def turn_length(model: nn.Module, reader: CostReader, parameters: int) -> int:
    """Return how many chunks a candidate is extended by at a time: 1 where a merge is cheap beside a forward pass.

    Going from one candidate to another takes a merge of all parameters, which a turn should outweigh. The rule counts
    operations, never time, so that the bits of a run are the same everywhere.

    Args:
        model: The model, with any weights.
        reader: What evaluates it.
        parameters: How many numbers a merge writes.
    """
    work = _CALL + count_operations(model, lambda: reader.read(model, range(reader.chunk)))
    size = reader.evaluation.size
    return max(1, min(math.ceil(_MERGE * parameters / work), math.ceil(size / reader.chunk)))


def count_operations(model: nn.Module, call: Callable[[], object]) -> int:
    """Return the multiply-adds of layers with a weight matrix or kernel during a call.

    A layer that makes m numbers with a weight of w numbers, n of them outputs or channels, takes m·w/n. Modules that
    look their weights up, and functions without a module, count nothing. A compiled model counts like any other.
    (torch's own counter needs over a second of imports.)
    """
    total = 0

    def add(module: nn.Module, inputs: object, output: object) -> None:
        nonlocal total
        if isinstance(output, Tensor):
            outputs = module.out_features if isinstance(module, nn.Linear) else module.out_channels
            total += output.numel() * cast(Tensor, module.weight).numel() // cast(int, outputs)

    handles = [m.register_forward_hook(add) for m in model.modules() if isinstance(m, _MATRICES)]
    try:
        with uncompiled(model):
            call()
    finally:
        for handle in handles:
            handle.remove()
    return total
