"""From predictions to metrics, and from metrics to one score where higher is always better."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from forkmerge.errors import ProblemError, unknown_name
from forkmerge.problem.batches import evaluation_batches
from forkmerge.problem.definition import Evaluation, Metric
from forkmerge.problem.exact_sum import rounded
from forkmerge.problem.metrics import MeanCost
from forkmerge.problem.randomness import derive, random_state_kept, set_random_state


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Give every module its own training or evaluation mode back on exit."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode without gradients; every module gets its own mode back on exit."""
    with modes_kept(model), torch.no_grad():
        model.eval()
        yield


def measure(
    model: nn.Module, evaluation: Evaluation, *, indices: Sequence[int] | None = None, seed: int = 0
) -> dict[str, float]:
    """Return the value of every metric of an evaluation, on all its examples or the given ones.

    Batches are fixed by position, and randomness by `seed`, so the same model always gets the same numbers.
    """
    order = list(range(len(evaluation.dataset)) if indices is None else indices)  # type: ignore[arg-type]
    if adds_up(evaluation):
        reader = CostReader(evaluation, seed)
        try:
            return reader.values(reader.read(model, order))
        except NotPerExample:
            pass  # the metrics take all predictions at once, like any function
    device = device_of(model)
    running = {name: metric for name, metric in evaluation.metrics.items() if isinstance(metric, Metric)}
    kept: list[tuple[Any, Any]] = []
    needs_all = len(running) < len(evaluation.metrics)
    for name, metric in running.items():
        metric.reset()
        running[name] = metric.to(device) if hasattr(metric, "to") else metric
    feed = evaluation_batches(evaluation, order, seed, device)
    with random_state_kept(), evaluating(model), closing(feed):
        for start, batch in zip(range(0, len(order), evaluation.batch_size), feed, strict=True):
            set_random_state(derive(seed, "evaluation forward", start))
            predictions, targets = evaluation.predict(model, batch)
            for metric in running.values():
                metric.update(predictions, targets)
            if needs_all:
                kept.append((predictions, targets))
        whole = _concatenate([p for p, _ in kept]), _concatenate([t for _, t in kept])
        values = {
            name: _number(name, running[name].compute() if name in running else metric(*whole))
            for name, metric in evaluation.metrics.items()
        }
    for metric in running.values():
        metric.reset()
    return values


class NotPerExample(Exception):
    """The predictions do not belong to single examples, so neither do their costs."""


def adds_up(evaluation: Evaluation) -> bool:
    """Whether every metric is a mean of costs of single examples."""
    return all(isinstance(metric, MeanCost) for metric in evaluation.metrics.values())


class ExampleCosts(NamedTuple):
    """What predictions cost by example and metric, each [n, metrics], in float64 on the CPU; `rank` orders examples."""

    costs: Tensor
    counts: Tensor
    rank: Tensor


class CostReader:
    """Gives the costs of examples, in chunks of one shape: results may depend on the shape of a batch.

    A chunk has the evaluation's `batch_size`, or as many examples as there are; the last is filled up with copies
    of an example that do not count.

    Args:
        evaluation: Examples and metrics, all of them `MeanCost`s.
        seed: Of data sets and models that draw random numbers.
    """

    def __init__(self, evaluation: Evaluation, seed: int) -> None:
        self.evaluation, self.seed = evaluation, seed
        self.metrics: dict[str, MeanCost] = dict(evaluation.metrics)
        self.chunk = min(evaluation.batch_size, len(evaluation.dataset))  # type: ignore[arg-type]

    @property
    def falls_with_costs(self) -> bool:
        """Whether the score of every metric falls as its costs grow, as a race needs."""
        directions = self.evaluation.directions
        return all((directions[name] > 0) == metric.complement for name, metric in self.metrics.items())

    def read(self, model: nn.Module, order: Sequence[int], start: int = 0, *, is_ready: bool = False) -> ExampleCosts:
        """Return the costs of examples, evaluated in chunks of their order.

        Args:
            model: The model; its modes, and the caller's random states, are left as they were.
            order: The examples.
            start: Their place in a longer order, a multiple of the chunk: a model that draws draws by place.
            is_ready: Whether the caller is `evaluating` the model, which takes as long as a small chunk.
        """
        feed = evaluation_batches(self.evaluation, order, self.seed, device_of(model), chunk=self.chunk)
        rows = []
        with random_state_kept(), nullcontext() if is_ready else evaluating(model), closing(feed):
            for at, batch in zip(range(start, start + len(order), self.chunk), feed, strict=True):
                set_random_state(derive(self.seed, "evaluation forward", at))
                rows.append(self._rows(*self.evaluation.predict(model, batch)))
        return self._checked(torch.cat(rows)[: len(order)])

    def _rows(self, predictions: Any, targets: Any) -> Tensor:
        """Return [chunk, 3, metrics] on the model's device."""
        parts = [metric.rows(predictions, targets) for metric in self.metrics.values()]
        if any(len(part) != self.chunk for part in parts):
            raise NotPerExample
        return torch.stack(parts, 2)

    def _checked(self, rows: Tensor) -> ExampleCosts:
        costs, counts, rank = rows.cpu().unbind(1)  # one transfer
        checked = [m.check(column) for m, column in zip(self.metrics.values(), costs.unbind(1), strict=True)]
        return ExampleCosts(torch.stack(checked, 1), counts, rank.nan_to_num(nan=math.inf, posinf=math.inf))

    def values(self, costs: ExampleCosts) -> dict[str, float]:
        """Return the value of every metric."""
        columns = zip(costs.costs.unbind(1), costs.counts.unbind(1), strict=True)
        sums = [(rounded(column.tolist()), rounded(counts.tolist())) for column, counts in columns]
        return {name: m.value(*pair) for (name, m), pair in zip(self.metrics.items(), sums, strict=True)}


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's first tensor: data goes where the model is."""
    for tensor in chain(model.parameters(), model.buffers()):
        return tensor.device
    return torch.device("cpu")


@dataclass(frozen=True)
class Criterion:
    """P̂: one score from the target's metrics.

    One metric is its own score, with its sign turned where lower is better. Several are the mean of their signed
    relative changes against `reference`, which stays the same for a whole run so that rounds compare.

    Args:
        directions: +1 or −1 per metric.
        reference: The metrics' reference values; needed only for several metrics.
    """

    directions: Mapping[str, int]
    reference: Mapping[str, float] | None = None

    @property
    def needs_reference(self) -> bool:
        """Whether a reference must still be set before anything can be scored."""
        return len(self.directions) > 1 and self.reference is None

    def with_reference(self, reference: Mapping[str, float]) -> Criterion:
        """Return the criterion with its reference values fixed."""
        for name in self.directions:
            if name not in reference:
                raise ProblemError(f"the reference lacks a value: {unknown_name('metric', name, reference)}")
            if reference[name] == 0 or not math.isfinite(reference[name]):
                raise ProblemError(
                    f"the reference value of metric {name!r} is {reference[name]}: relative changes need a finite, "
                    f"non-zero one. Pass reference={{{name!r}: …}} or drop the metric."
                )
        return Criterion(self.directions, dict(reference))

    def score(self, values: Mapping[str, float]) -> float:
        """Return the score of metric values; anything that is not a number scores −∞ and can never win."""
        if len(self.directions) == 1:
            ((name, sign),) = self.directions.items()
            result = sign * values[name]
        else:
            if self.reference is None:
                raise ProblemError("several metrics need reference values before they can be scored.")
            changes = [
                sign * (values[name] - self.reference[name]) / abs(self.reference[name])
                for name, sign in self.directions.items()
            ]
            result = math.fsum(changes) / len(changes) if all(map(math.isfinite, changes)) else math.nan
        return result if math.isfinite(result) else -math.inf


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise ProblemError(f"metric {name!r} must give one number, got {got}.") from None


def _concatenate(parts: list[Any]) -> Any:
    """Join batches of predictions: tensors along the batch, containers member by member, the rest as a list."""
    if not parts:
        return []
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(parts) if first.dim() else torch.stack(parts)
    if isinstance(first, Mapping):
        return {key: _concatenate([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple):
        return tuple(_concatenate(list(group)) for group in zip(*parts, strict=True))
    return [item for part in parts for item in (part if isinstance(part, list) else [part])]
