"""From the records of a comparison to its numbers: Δ_m, paired differences, wins and losses, costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from forkmerge.experiments.paired_statistics import CONFIDENCE, Paired, Spread, compare_paired, relative_change, spread
from forkmerge.experiments.run_results import RunResult
from forkmerge.experiments.single_task_reference import selecting

Scores = Mapping[int, float]  # by seed
SEVERAL = "\n"  # between the words of references that differ by target


@dataclass(frozen=True)
class Standing:
    """How a method does on a target, or over all targets.

    Args:
        method: The method's word.
        label: Its name in tables.
        metrics: Each metric over seeds; empty over all targets.
        change: The mean relative change against its reference, over seeds, as a fraction: Δ_m over all targets. None
            where it does not exist.
        to_baseline: The paired difference to its reference, in units of `change`; None for a reference itself.
        rival: The best other method with the same reference, by its mean.
        to_rival: The paired difference to it.
        reference: Label of the single-task training that it is compared with, whose model is selected alike: the
            baseline, in most comparisons. None for a reference itself.
    """

    method: str
    label: str
    metrics: dict[str, Spread]
    change: Spread | None
    to_baseline: Paired | None
    rival: str | None
    to_rival: Paired | None
    reference: str | None = None


@dataclass(frozen=True)
class Cost:
    """What a method costs.

    Args:
        branches: B, after pruning, or the number of runs that take the place of branches; 1 for most methods.
        per_branch: Δ_m / (B − 1): the gain per extra branch; None for B = 1.
        time: Seconds of a run with its tuning, as a ratio to one run of the baseline.
        tuning: The part of `time` that is tuning.
        memory: Model sizes held beyond the baseline's.
    """

    branches: int
    per_branch: float | None
    time: float | None
    tuning: float | None
    memory: float | None


@dataclass(frozen=True)
class Summary:
    """Everything that the tables show.

    Args:
        baseline: Label of the method that all are compared with whose model is selected as its own.
        confidence: Of all intervals.
        seeds: All seeds.
        split: What the metrics were measured on: "test", "held out", "validation" or "mixed".
        equal_labels: Whether all methods trained on training ∪ validation data in the end.
        directions: `{target: {metric: ±1}}`.
        targets: Every method's standing on every target.
        overall: Every method's standing over all targets.
        costs: By method.
        settings: What tuning chose, `{target: {method: setting}}`.
        failures: One line for every run without a result.
        is_selected: Whether validation chooses the baseline's model among those of its training.
    """

    baseline: str
    confidence: float
    seeds: list[int]
    split: str
    equal_labels: bool
    directions: dict[str, dict[str, int]]
    targets: dict[str, list[Standing]]
    overall: list[Standing]
    costs: dict[str, Cost]
    settings: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    is_selected: bool = False

    @property
    def has_references(self) -> bool:
        """Whether some methods are compared with other single-task training than the baseline."""
        standings = [standing for group in (*self.targets.values(), self.overall) for standing in group]
        return any(standing.reference not in (None, self.baseline) for standing in standings)

    @property
    def compared_with(self) -> str:
        """What gains are against, in words."""
        return f"{self.baseline} with the same selection" if self.has_references else self.baseline


def summarise(
    results: Sequence[RunResult], plan: Mapping[str, Any], baseline: str = "stl", confidence: float = CONFIDENCE
) -> Summary:
    """Return the numbers of a comparison.

    Relative changes are taken against the mean of a method's reference over its seeds: the single-task training whose
    model is selected alike, so that early stopping does not look like transfer. So Δ_m is linear in the metrics, its
    mean over seeds can be checked against the means in the tables, and equals the mean paired difference to it.

    Args:
        results: The records of all runs.
        plan: What is compared, as it was written.
        baseline: The method that all are compared with.
        confidence: Of all intervals.
    """
    labels = {method["word"]: method["label"] for method in plan["methods"]}
    finals = [result for result in results if result.kind == "final" and result.method in labels]
    good = [result for result in finals if result.is_complete]
    targets = [target for target in plan["targets"] if any(result.target == target for result in good)]
    directions = {target: next(o.directions for o in good if o.target == target) for target in targets}
    references = {target: references_on(target, results, plan, baseline) for target in targets}
    changes = changes_by_target(results, plan, baseline)
    overall = average_changes(changes)
    bases = {t: {word: changes[t].get(own[word], {}) for word in labels} for t, own in references.items()}
    standings = {
        target: _standings(labels, _of(good, target), changes[target], bases[target], references[target], confidence)
        for target in targets
    }
    each = list(references.values()) or [references_on("", results, plan, baseline)]
    everywhere = {word: SEVERAL.join(dict.fromkeys(own[word] for own in each)) for word in labels}
    splits = {result.split for result in good}
    return Summary(
        baseline=labels[baseline],
        confidence=confidence,
        seeds=list(plan["seeds"]),
        split=splits.pop() if len(splits) == 1 else "mixed",
        equal_labels=bool(plan["equal_labels"]),
        directions=directions,
        targets=standings,
        overall=_standings(labels, [], overall, average_changes(bases), everywhere, confidence),
        costs={word: _cost(word, results, overall, baseline) for word in labels},
        settings=_settings(finals),
        failures=[_failure(result) for result in finals if not result.is_complete],
        is_selected=any(each.get("is_selected", False) for each in plan["methods"] if each["word"] == baseline),
    )


def changes_by_target(
    results: Sequence[RunResult], plan: Mapping[str, Any], baseline: str = "stl"
) -> dict[str, dict[str, Scores]]:
    """Return `{target: {method: {seed: relative change}}}`, for targets that have a result.

    Args:
        results: The records of all runs.
        plan: What is compared, as it was written.
        baseline: The method whose mean over its seeds changes are relative to, where a method has no other reference.
    """
    words = {method["word"] for method in plan["methods"]}
    good = [o for o in results if o.kind == "final" and o.method in words and o.is_complete]
    changes: dict[str, dict[str, Scores]] = {}
    for target in plan["targets"]:
        own = _of(good, target)
        if own:
            references = references_on(target, results, plan, baseline)
            changes[target] = _changes(own, own[0].directions, references)
    return changes


def references_on(
    target: str, results: Sequence[RunResult], plan: Mapping[str, Any], baseline: str = "stl"
) -> dict[str, str]:
    """Return the word of the single-task training that every method is compared with on a target.

    It depends on what tuning chose there, if that says how models are selected.
    """
    chosen = {o.method: o.setting for o in results if o.kind == "final" and o.target == target}
    own = {each["word"]: each.get("references", {}) for each in plan["methods"]}
    used = {word for references in own.values() for word in references.values()}
    return {
        word: word if word in used else references.get(selecting(chosen.get(word, {})), baseline)
        for word, references in own.items()
    }


def _of(results: Iterable[RunResult], target: str) -> list[RunResult]:
    return [result for result in results if result.target == target]


def _numbers(result: RunResult) -> dict[str, float]:
    return {name: value for name, value in result.metrics.items() if value is not None}


def _changes(
    results: Sequence[RunResult], directions: Mapping[str, int], references: Mapping[str, str]
) -> dict[str, Scores]:
    """Return `{method: {seed: relative change}}` on one target, against the mean of a method's reference."""
    means: dict[str, dict[str, float]] = {}
    for word in dict.fromkeys(references.values()):
        base = [_numbers(result) for result in results if result.method == word]
        if base:
            means[word] = {name: fmean(metrics[name] for metrics in base) for name in directions}
    changes: dict[str, dict[int, float]] = {}
    for result in results:
        reference = means.get(references[result.method])
        change = math.nan if reference is None else relative_change(_numbers(result), reference, directions)
        if change == change:  # a metric of 0 in the reference gives no relative change
            changes.setdefault(result.method, {})[result.seed] = change
    return dict(changes)


def average_changes(targets: Mapping[str, Mapping[str, Scores]]) -> dict[str, Scores]:
    """Return Δ_m by method and seed: the mean over targets, for seeds that have all of them."""
    if not targets:
        return {}
    result: dict[str, Scores] = {}
    for method in next(iter(targets.values())):
        runs = [target.get(method, {}) for target in targets.values()]
        seeds = [seed for seed in runs[0] if all(seed in run for run in runs)]
        if seeds:
            result[method] = {seed: fmean(run[seed] for run in runs) for seed in seeds}
    return result


def _standings(
    labels: Mapping[str, str],
    results: Sequence[RunResult],
    changes: Mapping[str, Scores],
    bases: Mapping[str, Scores],
    references: Mapping[str, str],
    confidence: float,
) -> list[Standing]:
    """Return all standings, given the changes of every method's reference and the words of the references."""
    means = {method: fmean(scores.values()) for method, scores in changes.items()}
    standings = []
    for method, label in labels.items():
        runs = [_numbers(result) for result in results if result.method == method]
        own, reference = changes.get(method, {}), references.get(method, method)
        alike = [other for other in means if other != method and references[other] == reference]
        rival = max(alike, key=means.__getitem__, default=None)
        is_reference = reference == method
        standings.append(
            Standing(
                method=method,
                label=label,
                metrics={name: spread([run[name] for run in runs]) for name in (runs[0] if runs else ())},
                change=spread(list(own.values())) if own else None,
                to_baseline=None if is_reference else compare_paired(own, bases.get(method, {}), confidence),
                rival=labels[rival] if rival and own else None,
                to_rival=compare_paired(own, changes[rival], confidence) if rival else None,
                reference=None if is_reference else ", ".join(labels[word] for word in reference.split(SEVERAL)),
            )
        )
    return standings


def _cost(word: str, results: Sequence[RunResult], overall: Mapping[str, Scores], baseline: str) -> Cost:
    """Return what a method costs, on the targets and seeds where the baseline has a result, too."""
    runs = {(o.target, o.seed): o for o in results if o.kind == "final" and o.method == word and o.error is None}
    base = {(o.target, o.seed): o for o in results if o.kind == "final" and o.method == baseline and o.error is None}
    shared = [key for key in runs if key in base]
    branches = max((run.branches_left for run in runs.values()), default=1)
    extra = fmean(overall[word].values()) / (branches - 1) if word in overall and branches > 1 else None
    time = tuning = None
    unit = sum(base[key].seconds for key in shared)
    if unit:
        targets = {target for target, _ in shared}
        spent = sum(o.seconds for o in results if o.kind == "tuning" and o.method == word and o.target in targets)
        # A choice is made once per target, however many seeds follow it.
        tuning = spent / len(targets) / (unit / len(shared))
        time = sum(runs[key].seconds for key in shared) / unit + tuning
    sizes = [(runs[key].memory, base[key].memory) for key in shared]
    extra_sizes = [own - other for own, other in sizes if own is not None and other is not None]
    return Cost(branches, extra, time, tuning, max(extra_sizes, default=None))


def _settings(finals: Iterable[RunResult]) -> dict[str, dict[str, dict[str, Any]]]:
    settings: dict[str, dict[str, dict[str, Any]]] = {}
    for result in finals:
        if result.setting:
            settings.setdefault(result.target, {})[result.label] = result.setting
    return settings


def _failure(result: RunResult) -> str:
    reason = result.error or "a metric is not finite"
    return f"{result.label} on {result.target!r}, seed {result.seed}: {reason}"
