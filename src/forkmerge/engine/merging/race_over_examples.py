"""Candidates of a merge as entrants of a race over validation examples, hardest first."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from forkmerge.engine.merging.coefficients import Coefficients
from forkmerge.engine.merging.race import Entrant
from forkmerge.engine.training.torch_compile import uncompiled
from forkmerge.errors import ProblemError
from forkmerge.problem.exact_sum import add_exactly, rounded
from forkmerge.problem.scoring import CostReader, Criterion, ExampleCosts

# In multiply-adds: what a chunk costs besides its arithmetic, and what a turn should hold per number that is merged. A
# merge is bound by memory: a number takes about as long as 15 multiply-adds, and all may take a quarter of a turn.
_CALL, _MERGE = 500_000, 60
_MATRICES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class ExampleRace:
    """The examples that candidates of one merge are evaluated on, hardest first, and the candidates themselves.

    Used while the model is `evaluating`, which is done once for all of them.

    Args:
        reader: Gives the costs of examples.
        criterion: From metrics to a score that falls as costs grow.
        place: Returns the model with a candidate's weights; None if they are not finite.
        known: Costs of single branches on all examples, by their coefficients.
        indices: The examples that count; all where None.
        turn: How many chunks a candidate is extended by at a time.
    """

    def __init__(
        self,
        reader: CostReader,
        criterion: Criterion,
        place: Callable[[Coefficients], nn.Module | None],
        *,
        known: Mapping[Coefficients, ExampleCosts],
        indices: Sequence[int] | None = None,
        turn: int = 1,
    ) -> None:
        self.reader, self.criterion, self.place, self.turn = reader, criterion, place, turn
        first = next(iter(known.values()))
        self.indices = torch.arange(len(first.costs)) if indices is None else torch.tensor(list(indices))
        self.counts = first.counts
        self.totals = [rounded(column.tolist()) for column in self.counts[self.indices].unbind(1)]
        self._known = dict(known)
        self._entrants: dict[Coefficients, _Runner] = {}
        self._orders: dict[tuple[Coefficients, ...], list[int]] = {}

    def enter(self, coefficients: Coefficients, guides: Sequence[Coefficients]) -> Entrant:
        """Return the entrant of a candidate, whose examples come in the order of their costs to the guides."""
        key = tuple(guides)
        if key not in self._orders:
            self._orders[key] = self._order([self._costs(guide) for guide in guides])
        self._entrants[coefficients] = runner = _Runner(self, coefficients, self._orders[key])
        return runner

    def metrics(self, coefficients: Coefficients) -> dict[str, float]:
        """Return the metrics of a candidate that was evaluated to the end; empty for any other."""
        runner = self._entrants.get(coefficients)
        return self.values(runner.sums) if runner is not None and runner.done == len(self.indices) else {}

    def certainty(self, ours: Coefficients, theirs: Coefficients, seed: int, resamples: int = 1000) -> float:
        """Return how often one candidate beats another when the examples are drawn anew, with replacement.

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
            ahead, behind = (self.score(sums, totals) for sums in costs[:, chosen].sum(1).tolist())
            wins += ahead > behind
        return wins / resamples

    @property
    def examples(self) -> dict[str, int]:
        """Examples `evaluated`; the lower `bound`; and what one `full` pass per candidate takes."""
        runners = list(self._entrants.values())
        return {
            "evaluated": sum(runner.done for runner in runners),
            "bound": sum(runner.needed for runner in runners),
            "full": len(runners) * len(self.indices),
        }

    def values(self, sums: Sequence[float], totals: Sequence[float] | None = None) -> dict[str, float]:
        """Return the metrics from sums of costs over (some of) the examples; counts are those of all, or `totals`."""
        columns = zip(self.reader.metrics.items(), sums, totals or self.totals, strict=True)
        return {name: metric.value(cost, count) for (name, metric), cost, count in columns}

    def score(self, sums: Sequence[float], totals: Sequence[float] | None = None) -> float:
        """Return the score from sums of costs; over some of the examples, an upper bound of it."""
        return self.criterion.score(self.values(sums, totals))

    def _all_costs(self, coefficients: Coefficients) -> Tensor:
        """Return the costs of a candidate, evaluating what no race has asked for."""
        if coefficients not in self._known:
            runner = self._entrants.get(coefficients) or self.enter(coefficients, ())
            while not runner.is_complete:
                runner.extend()
        return self._costs(coefficients).costs

    def _costs(self, coefficients: Coefficients) -> ExampleCosts:
        return self._known[coefficients] if coefficients in self._known else self._entrants[coefficients].rows

    def _order(self, guides: Sequence[ExampleCosts]) -> list[int]:
        """Return the examples, hardest first; of equals the first."""
        if not guides:
            return self.indices.tolist()
        rank = torch.stack([guide.rank[self.indices] for guide in guides]).sum(0)  # [n, metrics]
        if rank.shape[1] > 1:
            # Metrics differ in their units; a mean of 0 belongs to a metric that tells no examples apart.
            rank = (rank / rank.mean(0)).nan_to_num(nan=0.0, posinf=math.inf)
        places = torch.sort(rank.sum(1), descending=True, stable=True).indices
        return self.indices[places].tolist()


class _Runner(Entrant):
    """A candidate on a course."""

    def __init__(self, course: ExampleRace, coefficients: Coefficients, order: list[int]) -> None:
        self.course, self.coefficients, self.order = course, coefficients, order
        self.rows = ExampleCosts(torch.zeros_like(course.counts), course.counts, torch.zeros_like(course.counts))
        self.done, self.needed = 0, 0
        self._sums: list[list[float]] = [[] for _ in course.totals]
        self.bound, self.is_complete = course.score(self.sums), False

    @property
    def sums(self) -> list[float]:
        """The costs so far, by metric."""
        return [rounded(parts) for parts in self._sums]

    def extend(self) -> None:
        """Evaluate some chunks."""
        course = self.course
        model = course.place(self.coefficients)
        if model is None:
            self.bound, self.is_complete = -math.inf, True
            return
        chosen = self.order[self.done : self.done + course.turn * course.reader.chunk]
        self._take(chosen, course.reader.read(model, chosen, self.done, is_ready=True))
        self.bound, self.is_complete = course.score(self.sums), self.done == len(self.order)

    def ask(self) -> None:
        """Note that every example was needed."""
        self.needed = self.done

    def lose(self, winner: float, *, is_preferred: bool) -> None:
        """Note how many examples prove that this candidate does not win."""
        columns = self.rows.costs[self.order[: self.done]].unbind(1)
        costs = [column.tolist() for column in columns]
        low, high = self.needed, self.done  # a race before may have needed more
        while low < high:
            middle = (low + high) // 2
            bound = self.course.score([rounded(column[:middle]) for column in costs])
            if bound < winner or (bound == winner and not is_preferred):
                high = middle
            else:
                low = middle + 1
        self.needed = high

    def _take(self, chosen: list[int], found: ExampleCosts) -> None:
        expected: Tensor = self.course.counts[chosen]
        if not torch.equal(found.counts, expected):
            raise ProblemError(
                "the counts of a metric differ between models: `count` of a MeanCost must depend on targets only."
            )
        self.rows.costs[chosen], self.rows.rank[chosen] = found.costs, found.rank
        columns = zip(self._sums, found.costs.unbind(1), strict=True)
        self._sums = [add_exactly(parts, column.tolist()) for parts, column in columns]
        self.done += len(chosen)


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
    size = len(reader.evaluation.dataset)  # type: ignore[arg-type]  # checked by Problem
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
