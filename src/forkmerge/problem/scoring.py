"""From predictions to metrics, and from metrics to one score where higher is always better."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import nn

from forkmerge.errors import ProblemError
from forkmerge.problem.batch_reader import reader_of
from forkmerge.problem.batches import evaluation_batches
from forkmerge.problem.definition import Evaluation, Metric
from forkmerge.problem.error_facts import describe, note_origin
from forkmerge.problem.exact_sum import rounded
from forkmerge.problem.metrics import ExampleCosts, MeanCost, NotPerExample, checked_costs, cost_rows, values_of_sums
from forkmerge.problem.randomness import derive, random_state_kept, set_random_state
from forkmerge.problem.searched_evaluation import measured_by, search_directions


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
    if not isinstance(evaluation, Evaluation):
        raise ProblemError(
            f"measure needs an Evaluation, got {type(evaluation).__name__}: wrap the data set with its metrics, e.g. "
            "measure(model, fm.Evaluation(dataset, fm.accuracy))."
        )
    order = list(range(evaluation.size) if indices is None else indices)
    if adds_up(evaluation):
        reader = CostReader(evaluation, seed)
        try:
            return reader.values(reader.read(model, order))
        except NotPerExample:
            pass  # the metrics take all predictions at once, like any function
    device = device_of(model)
    running = {name: metric for name, metric in evaluation.metrics.items() if isinstance(metric, Metric)}
    outputs: list[tuple[Any, Any]] = []
    needs_all = len(running) < len(evaluation.metrics)
    for name, metric in running.items():
        metric.reset()
        running[name] = metric.to(device) if hasattr(metric, "to") else metric
    feed = evaluation_batches(evaluation, order, seed, device)
    with random_state_kept(), evaluating(model), closing(feed):
        for start, batch in zip(range(0, len(order), evaluation.batch_size), feed, strict=True):
            set_random_state(derive(seed, "evaluation forward", start))
            predictions, targets = _predict(evaluation, model, batch, order[start : start + evaluation.batch_size])
            for name, metric in running.items():
                _called(name, metric.update, predictions, targets)
            if needs_all:
                outputs.append((predictions, targets))
        whole = _concatenate([p for p, _ in outputs]), _concatenate([t for _, t in outputs])
        values = {
            name: _number(
                name, _called(name, running[name].compute) if name in running else _called(name, metric, *whole)
            )
            for name, metric in evaluation.metrics.items()
        }
    for metric in running.values():
        metric.reset()
    return values


def adds_up(evaluation: Evaluation) -> bool:
    """Whether every metric is a mean of costs of single examples."""
    return all(isinstance(metric, MeanCost) for metric in evaluation.metrics.values())


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
        self.chunk = min(evaluation.batch_size, evaluation.size)
        self._batch_reader = reader_of(evaluation)

    @property
    def falls_with_costs(self) -> bool:
        """Whether the score of every metric that a search goes by falls as its costs grow, as a race needs."""
        directions = search_directions(self.evaluation)
        return all((sign > 0) == self.metrics[name].complement for name, sign in directions.items())

    def read(self, model: nn.Module, order: Sequence[int], start: int = 0, *, is_ready: bool = False) -> ExampleCosts:
        """Return the costs of examples, evaluated in chunks of their order.

        Args:
            model: The model; its modes, and the caller's random states, are left as they were.
            order: The examples.
            start: Their place in a longer order, a multiple of the chunk: a model that draws draws by place.
            is_ready: Whether the caller holds the model `ready`.
        """
        rows, chunks = [], self._chunks(order, device_of(model))
        is_open = closing(chunks) if isinstance(chunks, Generator) else nullcontext()
        with nullcontext() if is_ready else self.ready(model), is_open:
            for at, batch in zip(range(start, start + len(order), self.chunk), chunks, strict=False):
                set_random_state(derive(self.seed, "evaluation forward", at))
                examples = order[at - start : at - start + self.chunk]
                predictions, targets = _predict(self.evaluation, model, batch, examples)
                try:
                    rows.append(cost_rows(self.metrics, predictions, targets, self.chunk))
                except Exception as error:
                    _note_metric(error, ", ".join(self.metrics), predictions, targets)
                    raise
        return checked_costs(self.metrics, torch.cat(rows)[: len(order)])

    @contextmanager
    def ready(self, model: nn.Module) -> Iterator[None]:
        """Evaluate the model inside, and give the caller its modes and random states back: as long as a small chunk."""
        with random_state_kept(), evaluating(model):
            yield

    def _chunks(self, order: Sequence[int], device: torch.device) -> Iterator[Any]:
        reader = self._batch_reader
        if reader is None or reader.is_worth_a_thread(device):
            return evaluation_batches(self.evaluation, order, self.seed, device, chunk=self.chunk)
        # The tensors are where the model is: a chunk is one indexed read.
        whole = torch.as_tensor([*order, *[order[-1]] * (-len(order) % self.chunk)])
        return map(reader.read, whole.split(self.chunk))

    def values(self, costs: ExampleCosts) -> dict[str, float]:
        """Return the value of every metric."""
        sums = [[rounded(column.tolist()) for column in part.unbind(1)] for part in (costs.costs, costs.counts)]
        return values_of_sums(self.metrics, *sums)


def _predict(evaluation: Evaluation, model: nn.Module, batch: Any, examples: Sequence[int]) -> tuple[Any, Any]:
    try:
        predictions, targets = evaluation.predict(model, batch)
    except Exception as error:
        note_origin(error, "predict of an evaluation", examples=examples, batch=batch)
        raise
    return predictions, targets


def _called(name: str, metric: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return metric(*arguments)
    except Exception as error:
        _note_metric(error, name, *arguments)
        raise


def _note_metric(error: Exception, name: str, *arguments: Any) -> None:
    shapes = "".join(
        f"; {word} are {describe(value)}" for word, value in zip(("predictions", "targets"), arguments, strict=False)
    )
    note_origin(error, f"metric {name!r} of an evaluation{shapes}")


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's first tensor: data goes where the model is."""
    for tensor in chain(model.parameters(), model.buffers()):
        return tensor.device
    return torch.device("cpu")


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, str | bytes):
            raise TypeError  # text that reads like a number is none
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


def cost_reader(evaluation: Evaluation, seed: int) -> CostReader | None:
    """Return what gives the costs of examples where the score that a search goes by adds up over them.

    They are those of all metrics where all add up, and of those that the search goes by elsewhere.
    """
    if adds_up(evaluation):
        return CostReader(evaluation, seed)
    searched = measured_by(evaluation, search_directions(evaluation))
    return CostReader(searched, seed) if adds_up(searched) else None


def read_metrics(
    model: nn.Module,
    evaluation: Evaluation,
    indices: Sequence[int] | None,
    seed: int,
    reader: CostReader | None = None,
) -> tuple[dict[str, float], ExampleCosts | None]:
    """Return the metrics of a model and, on all examples, their costs where the score of a search adds up.

    On some examples only what a search goes by is measured.
    """
    if indices is not None:
        searched = measured_by(evaluation, search_directions(evaluation))
        return measure(model, searched, indices=indices, seed=seed), None
    reader = reader or cost_reader(evaluation, seed)
    if reader is not None:
        try:
            costs = reader.read(model, range(evaluation.size))
        except NotPerExample:
            pass
        else:
            return {**other_metrics(model, evaluation, reader, seed), **reader.values(costs)}, costs
    return measure(model, evaluation, seed=seed), None


def other_metrics(model: nn.Module, evaluation: Evaluation, reader: CostReader, seed: int) -> dict[str, float]:
    """Return the metrics of a model that its costs do not tell: those that do not add up."""
    names = [name for name in evaluation.metrics if name not in reader.metrics]
    return measure(model, measured_by(evaluation, names), seed=seed) if names else {}
