"""Did it help? A run's model beside single-task training, on examples that neither was chosen or trained on."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import stdev
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forkmerge.algorithms.measure_test_split import amend_result
from forkmerge.algorithms.run_record import Run
from forkmerge.algorithms.table_data import show_number
from forkmerge.engine.storage.records import Record
from forkmerge.experiments.paired_statistics import CONFIDENCE, t_quantile
from forkmerge.problem.definition import Evaluation, Problem
from forkmerge.problem.randomness import derive
from forkmerge.problem.scoring import measure, read_metrics

_SELECTED = (
    "validation chose among the weights of this run, and not among those of single-task training: stopping early may "
    "be part of the difference; a comparison chooses alike"
)
_GROUPS, _SMALLEST_GROUP = 20, 10  # of examples, where a metric is no mean over them


@dataclass(frozen=True)
class MetricVerdict(Record):
    """One metric of both models.

    Args:
        name: The metric.
        direction: +1 where higher is better, −1 where lower is.
        model: Its value for the model returned.
        single_task: Its value for single-task training.
        low: Lower end of the confidence interval of their difference, over examples; None where it is not known.
        high: Upper end.
    """

    not_finite: ClassVar[float | None] = None
    name: str
    direction: int
    model: float
    single_task: float
    low: float | None
    high: float | None

    @property
    def decision(self) -> str:
        """Whether the interval lies on one side of 0: "better", "worse" or "no difference shown"."""
        if self.low is None or self.high is None:
            return "no difference shown"
        ends = sorted((self.direction * self.low, self.direction * self.high))
        return "better" if ends[0] > 0 else "worse" if ends[1] < 0 else "no difference shown"

    def __str__(self) -> str:
        change = self.model - self.single_task
        interval = "" if self.low is None else f" [{_signed(self.low)}, {_signed(self.high)}]"
        values = f"{show_number(self.single_task)} → {show_number(self.model)}"
        return f"{self.name} {values} ({_signed(change)}{interval})"


@dataclass(frozen=True, repr=False)
class Verdict(Record):
    """Whether a run did better than single-task training with the same labels, steps and seed.

    Args:
        metrics: Every metric of the target.
        examples: Examples of the test split.
        times: Steps of all branches, the reference's included, over those of single-task training.
        confidence: Level of the intervals.
        is_joint: Whether the intervals of all metrics hold together at that level, as they do since 0.1, and not each
            by itself: then models that do not differ get a verdict in 1 − confidence of cases, however many metrics
            there are.
        is_selected: Whether the model was chosen on validation among several merges, as that of single-task training
            was not.
        is_held_out: Whether the examples are validation examples that the search did not see, for want of a test split.
    """

    metrics: list[MetricVerdict]
    examples: int
    times: float
    confidence: float = CONFIDENCE
    is_selected: bool = False
    is_held_out: bool = False
    is_joint: bool = False

    @property
    def looked_at(self) -> str:
        """The examples in words."""
        kind = "validation examples that the search did not see" if self.is_held_out else "test examples"
        return f"{self.examples} {kind}"

    @property
    def level(self) -> str:
        """The level of the intervals in words, and of how many metrics it is."""
        share, count = f"{100 * self.confidence:.0f} %", len(self.metrics)
        if count == 1:
            return share
        if not self.is_joint:
            return f"{share} for each metric by itself,"
        return f"{share} for {'both' if count == 2 else f'all {count}'} metrics together,"

    @property
    def decision(self) -> str:
        """The decision of the metrics; "mixed" where some are better and others worse."""
        decided = {metric.decision for metric in self.metrics} - {"no difference shown"}
        return "mixed" if len(decided) > 1 else next(iter(decided), "no difference shown")

    @property
    def summary(self) -> str:
        """The decision in words."""
        if self.decision == "no difference shown":
            return self.decision
        names = {word: [m.name for m in self.metrics if m.decision == word] for word in ("better", "worse")}
        parts = [f"{word} in {', '.join(own)}" for word, own in names.items()]
        return f"{' and '.join(parts) if self.decision == 'mixed' else self.decision} than single-task training"

    def __repr__(self) -> str:
        return "\n".join(self.lines)

    @property
    def lines(self) -> list[str]:
        """What to tell the user."""
        return [
            self.summary,
            f"{'; '.join(map(str, self.metrics))}; {self.level} over {self.looked_at}",
            f"one seed, at {self.times:.1f} times the steps of single-task training, the reference's included",
            *([_SELECTED] if self.is_selected else []),
        ]


def give_verdict(
    run: Run, problem: Problem, folder: str | os.PathLike[str] | None = None, *, is_held_out: bool = False
) -> Verdict | None:
    """Compare a run's model with single-task training on the test split, into `run.verdict`.

    None where there is nothing to compare: no reference (`floor=True` trains it) or no test split. Validation examples
    would flatter the model, whose coefficients were chosen by them.

    Args:
        run: What `fit` returned, with its model.
        problem: The problem it was given.
        folder: The run's folder, whose result then holds the verdict, too.
        is_held_out: Whether the test split is validation examples that were kept from the search.
    """
    evaluation = problem.evaluations("test").get(problem.target)
    if run.verdict is not None:
        return Verdict.from_json(run.verdict)
    if evaluation is None or run.reference is None or run.model is None:
        return None
    changes = _changes(run.model, run.reference, evaluation, run.seed)
    options = run.settings.get("algorithm", {})
    is_selected = options.get("select", "last") != "last" or options.get("checkpoint", "last") != "last"
    times = sum(run.trained_steps.values()) / run.steps
    told = {"is_selected": is_selected, "is_held_out": is_held_out, "is_joint": True}
    verdict = Verdict(changes, evaluation.size, times, **told)
    run.verdict = verdict.to_json()
    if folder is not None:
        amend_result(Path(folder), verdict=run.verdict)
    return verdict


def _changes(model: nn.Module, reference: dict[str, Tensor], evaluation: Evaluation, seed: int) -> list[MetricVerdict]:
    def both(look: Callable[[], Any]) -> tuple[Any, Any]:
        """Look at the model, and at the module with the weights of the reference; the model's own come back."""
        ours = look()
        own = {name: value.detach().clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)}
        try:
            model.load_state_dict(reference)
            return ours, look()
        finally:
            model.load_state_dict(own)

    (values, costs), (single, single_costs) = both(lambda: read_metrics(model, evaluation, None, seed))
    if costs is not None and single_costs is not None:
        halves = [
            _half_width(ours - theirs, counts, len(values))
            for ours, theirs, counts in zip(
                costs.costs.unbind(1), single_costs.costs.unbind(1), costs.counts.unbind(1), strict=True
            )
        ]
    else:
        halves = _of_groups(both, model, evaluation, seed)
    result = []
    for (name, direction), half in zip(evaluation.directions.items(), halves, strict=True):
        change = values[name] - single[name]
        low, high = (None, None) if half is None or not math.isfinite(change) else (change - half, change + half)
        result.append(MetricVerdict(name, direction, values[name], single[name], low, high))
    return result


def _half_width(differences: Tensor, counts: Tensor, metrics: int) -> float | None:
    """Return half the interval of Σ differences / Σ counts, a ratio of sums over examples, by its linear form."""
    size, total = len(differences), float(counts.sum())
    if size < 2 or not total > 0 or not bool(differences.isfinite().all()):
        return None
    residuals = differences - differences.sum() / total * counts
    error = math.sqrt(size / (size - 1) * float(residuals.square().sum())) / total
    return _quantile(size, metrics) * error


def _of_groups(both: Any, model: nn.Module, evaluation: Evaluation, seed: int) -> list[float | None]:
    """Return half the intervals of differences from their spread over groups of examples, drawn at random."""
    size = evaluation.size
    groups = min(_GROUPS, size // _SMALLEST_GROUP)
    if groups < 2:
        return [None] * len(evaluation.metrics)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(derive(seed, "verdict"))).tolist()
    parts = [order[start::groups] for start in range(groups)]
    ours, theirs = both(lambda: [measure(model, evaluation, indices=part, seed=seed) for part in parts])
    halves, wide = list[float | None](), _quantile(groups, len(evaluation.metrics))
    for name in evaluation.metrics:
        changes = [a[name] - b[name] for a, b in zip(ours, theirs, strict=True)]
        is_known = all(map(math.isfinite, changes))
        halves.append(wide * stdev(changes) / math.sqrt(groups) if is_known else None)
    return halves


def _quantile(count: int, metrics: int) -> float:
    """Return the quantile of intervals that hold together for so many metrics (Bonferroni)."""
    probability = 1 - (1 - CONFIDENCE) / (2 * metrics)
    return t_quantile(probability, min(count - 1, 1000))  # beyond, it is the normal one to three digits


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.3g}".replace("-", "−") if value else "0"
