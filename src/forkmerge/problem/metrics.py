"""Metrics that are means of costs, one per example, which a search can race on; and the one score made of metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from forkmerge.errors import ProblemError, unknown_name
from forkmerge.problem.exact_sum import rounded, sum_of_parts
from forkmerge.problem.labels import MISSING

Cost = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class MeanCost:
    """A metric Σ costs / Σ counts, or one minus that, whose costs are non-negative and belong to single examples.

    Its value never depends on how it was found: costs are summed exactly and rounded once. A cost that is NaN counts
    as +∞. A search over candidates evaluates only as many examples as the best of them can be told from.

    Args:
        cost: `cost(predictions, targets) -> tensor [n]`, not negative.
        count: `count(targets) -> tensor [n]`, what each example adds to the denominator, such as its valid pixels; it
            may depend on the targets only. Every example counts 1 where None.
        complement: Whether the value is 1 − Σ costs / Σ counts, as an accuracy is of errors; higher is better then.
        hardness: `hardness(predictions, targets) -> tensor [n]`: how likely similar models err there. A search looks
            first at the examples where it and the cost are highest; it never changes what is found.
        name: The metric's name; the cost function's where empty.

    Example:
        >>> import torch
        >>> squared = MeanCost(lambda p, t: (p - t).square(), name="mse")
        >>> squared(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
        2.0
    """

    cost: Cost
    count: Callable[[Any], Tensor] | None = None
    complement: bool = False
    hardness: Cost | None = None
    name: str = ""

    @property
    def __name__(self) -> str:
        return self.name or getattr(self.cost, "__name__", "cost")

    @property
    def higher_is_better(self) -> bool:
        """Whether the value grows as costs fall."""
        return self.complement

    def __call__(self, predictions: Any, targets: Any) -> float:
        """Return the value over all the given examples."""
        costs, counts, _ = self.rows(predictions, targets).cpu().unbind(1)
        return self.value(rounded(self.check(costs).tolist()), rounded(counts.tolist()))

    def value(self, total: float, count: float) -> float:
        """Return the metric from the sums of costs and counts: it never rises, in terms of a score, with `total`."""
        if not count > 0:
            return math.nan
        return (count - total if self.complement else total) / count

    def rows(self, predictions: Any, targets: Any) -> Tensor:
        """Return cost, count and what to order by, of every example, as [n, 3]: unchecked, on the model's device."""
        costs = self.cost(predictions, targets)
        if not isinstance(costs, Tensor) or costs.dim() != 1:
            got = f"a tensor of shape {tuple(costs.shape)}" if isinstance(costs, Tensor) else type(costs).__name__
            raise ProblemError(f"metric {self.__name__!r} must cost a tensor of one number per example, got {got}.")
        costs = costs.double()
        counts = torch.ones_like(costs) if self.count is None else self.count(targets).to(costs)
        rank = costs if self.hardness is None else costs + self.hardness(predictions, targets)
        return torch.stack([costs, counts, rank], 1)

    def check(self, costs: Tensor) -> Tensor:
        """Return costs with NaN as +∞; refuse negative ones."""
        if bool((costs < 0).any()):
            raise ProblemError(
                f"metric {self.__name__!r} has a cost of {costs.min().item():.4g}: costs may not be negative. Add a "
                "constant, or pass a plain function of all predictions and targets as the metric."
            )
        return costs.nan_to_num(nan=math.inf, posinf=math.inf)


class NotPerExample(Exception):
    """The predictions do not belong to single examples, so neither do their costs."""


class ExampleCosts(NamedTuple):
    """What predictions cost by example and metric, each [n, metrics], in float64 on the CPU; `rank` orders examples."""

    costs: Tensor
    counts: Tensor
    rank: Tensor


def cost_rows(metrics: Mapping[str, MeanCost], predictions: Any, targets: Any, size: int) -> Tensor:
    """Return cost, count and rank of `size` examples by metric, as [size, 3, metrics]: unchecked, on their device."""
    parts = [metric.rows(predictions, targets) for metric in metrics.values()]
    if any(len(part) != size for part in parts):
        raise NotPerExample
    return torch.stack(parts, 2)


def checked_costs(metrics: Mapping[str, MeanCost], rows: Tensor) -> ExampleCosts:
    """Return the costs that rows hold, on the CPU; negative ones are refused, and NaN becomes infinite."""
    costs, counts, rank = rows.cpu().unbind(1)  # one transfer
    checked = [m.check(column) for m, column in zip(metrics.values(), costs.unbind(1), strict=True)]
    return ExampleCosts(torch.stack(checked, 1), counts, rank.nan_to_num(nan=math.inf, posinf=math.inf))


def values_of_sums(metrics: Mapping[str, MeanCost], sums: Sequence[float], totals: Sequence[float]) -> dict[str, float]:
    """Return the value of every metric from the sums of its costs and of its counts."""
    columns = zip(metrics.items(), sums, totals, strict=True)
    return {name: metric.value(cost, count) for (name, metric), cost, count in columns}


def _errors(predictions: Tensor, targets: Tensor) -> Tensor:
    logits, labels = _classified(predictions, targets)
    guesses = (logits > 0).squeeze(-1) if logits.shape[-1] == 1 else logits.argmax(dim=-1)
    # A prediction of NaN is an error: `argmax` takes the first NaN, which may be the target's.
    wrong = (guesses != labels) | logits.isnan().any(dim=-1)
    return _per_example(wrong & ~_missing(labels))


def _doubt(predictions: Tensor, targets: Tensor) -> Tensor:
    """1 − the target's probability; a target that is no class has none."""
    logits, labels = _classified(predictions, targets)
    if logits.shape[-1] == 1:  # the logit of class 1; that of class 0 is 0
        logits = torch.cat([torch.zeros_like(logits), logits], -1)
    is_class = (labels >= 0) & (labels < logits.shape[-1])
    index = torch.where(is_class, labels, 0).long().unsqueeze(-1)
    doubt = 1 - torch.where(is_class, logits.softmax(-1).gather(-1, index).squeeze(-1), 0.0)
    return _per_example(torch.where(_missing(labels), 0.0, doubt))


def _classified(predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits [n, …, classes] and targets [n, …]; one logit per target, with a last dimension or without."""
    if isinstance(targets, Tensor) and isinstance(predictions, Tensor) and predictions.is_floating_point():
        is_single = predictions.shape == targets.shape and (predictions.dim() == 1 or predictions.shape[-1] == 1)
        if is_single and predictions.dim() == 1:
            predictions = predictions.unsqueeze(-1)
        elif is_single:
            targets = targets.squeeze(-1)
        if predictions.shape[:-1] == targets.shape:
            _check_whole("accuracy", targets)
            if predictions.shape[-1] > 1 or bool(((targets == 0) | (targets == 1) | _missing(targets)).all()):
                return predictions, targets
            raise ProblemError(
                "accuracy of one logit per example needs targets that are 0 or 1, got "
                f"{targets.unique()[:5].tolist()}: several classes need a logit each, [n, classes]."
            )
    shapes = [_shape(value) for value in (predictions, targets)]
    raise ProblemError(
        "accuracy needs logits [n, classes] and classes [n], or one logit per example, [n, 1] or [n], and targets that "
        f"are 0 or 1, got predictions {shapes[0]} and targets {shapes[1]}."
    )


def _check_whole(name: str, targets: Tensor) -> None:
    """Refuse targets between classes: compared with classes all would be wrong, and rounded they would be others."""
    if targets.is_floating_point() and not bool((targets == targets.round()).all()):
        odd = targets[targets != targets.round()].flatten()[0].item()
        raise ProblemError(
            f"{name} needs targets that are classes, as integers, got {odd:.4g} among {_shape(targets)}: mark missing "
            "labels by -100; numbers that are no classes want another metric, such as absolute_error."
        )


def _shape(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _surprise(predictions: Tensor, targets: Tensor) -> Tensor:
    _check_whole("nll", targets)
    logits = predictions.double()
    if (logits.dim() > 1 and logits.shape[1] == 1) or logits.shape == targets.shape:
        # One logit is that of class 1, and that of class 0 is 0: cross-entropy over one class would always be 0.
        both = logits.reshape(targets.shape) if logits.dim() > 1 else logits
        logits = torch.stack([torch.zeros_like(both), both], 1)
    return _per_example(functional.cross_entropy(logits, targets.long(), reduction="none"))


def _labelled(targets: Tensor) -> Tensor:
    return _per_example(~_missing(targets))


def _missing(targets: Tensor) -> Tensor:
    return (targets == MISSING) & (targets < 0)  # 156 equals −100 in a byte, which holds nothing below 0


def _distance(predictions: Tensor, targets: Tensor) -> Tensor:
    if not isinstance(targets, Tensor) or predictions.shape != targets.shape:
        shape = list(predictions.shape)
        raise ProblemError(f"absolute_error needs targets of the shape of predictions, {shape}, got {_shape(targets)}.")
    return _per_example(torch.where(targets.isnan(), 0.0, (predictions.double() - targets.double()).abs()))


def _known_elements(targets: Tensor) -> Tensor:
    return _per_example(~targets.isnan())


def _per_example(values: Tensor) -> Tensor:
    return values.double() if values.dim() == 1 else values.flatten(1).sum(1, dtype=torch.float64)


accuracy = MeanCost(_errors, _labelled, complement=True, hardness=_doubt, name="accuracy")
"""Share of targets that are the largest of the last dimension of the predictions; one logit means class 1 above 0.
Targets of −100 do not count."""

nll = MeanCost(_surprise, _labelled, name="nll")
"""Mean cross-entropy of logits [n, classes, …], or of one logit [n, 1, …], against classes [n, …]; targets of −100 do
not count."""

absolute_error = MeanCost(_distance, _known_elements, name="absolute_error")
"""Mean absolute difference between predictions and targets; targets of NaN do not count."""


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

    def slopes(self, metrics: Mapping[str, MeanCost]) -> list[float]:
        """Return how the score changes with Σ costs / Σ counts of every metric it is made of: it is linear in these."""
        if self.needs_reference:
            raise ProblemError("several metrics need reference values before they can be scored.")
        signs = {n: -sign if metrics[n].complement else sign for n, sign in self.directions.items()}
        ordered = [name for name in metrics if name in signs]
        if len(signs) == 1 or self.reference is None:
            return [float(signs[name]) for name in ordered]
        return [signs[name] / abs(self.reference[name]) / len(signs) for name in ordered]

    def score_of_sums(self, metrics: Mapping[str, MeanCost], sums: Sequence[float], totals: Sequence[float]) -> float:
        """Return the score of metrics from the sums of their costs and counts."""
        return self.score(values_of_sums(metrics, sums, totals))

    def examples_to_lose(
        self,
        metrics: Mapping[str, MeanCost],
        costs: Tensor,
        totals: Sequence[float],
        winner: float,
        *,
        is_preferred: bool,
    ) -> int:
        """Return how many of the first examples prove, by their costs alone, that a candidate does not win.

        Args:
            metrics: The metrics that add up.
            costs: The candidate's costs in the order of evaluation, [n, metrics]; all together prove it.
            totals: Sums of the metrics' counts over all examples.
            winner: The score to reach; to exceed, unless the candidate is preferred at equal scores.
            is_preferred: Whether it is.
        """
        sums = [(sum_of_parts(column), column) for column in (column.tolist() for column in costs.unbind(1))]
        low, high = 0, len(costs)
        while low < high:
            middle = (low + high) // 2
            bound = self.score_of_sums(metrics, [total(column[:middle]) for total, column in sums], totals)
            if bound < winner or (bound == winner and not is_preferred):
                high = middle
            else:
                low = middle + 1
        return high
