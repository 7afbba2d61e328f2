"""The form that ForkMerge has where nobody names its branches: what merges are searched by, and by which rule."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Subset

from forkmerge.engine.training.batchnorm import tracking_norms
from forkmerge.problem.auc import auc
from forkmerge.problem.definition import Evaluation, Problem
from forkmerge.problem.metrics import MeanCost, NotPerExample, accuracy, nll
from forkmerge.problem.randomness import random_state_kept
from forkmerge.problem.scoring import cost_reader, measure
from forkmerge.problem.searched_evaluation import reported_directions, with_search_metric

FEW = 1000
"""Validation examples up to which a merge is chosen against their noise, with a pass over all for every candidate."""


def smooth_metric(evaluation: Evaluation) -> str | None:
    """Return "nll" for a target that is reported in accuracy or auc; None where its own metrics are searched by."""
    names = list(reported_directions(evaluation))
    return nll.name if len(names) == 1 and evaluation.metrics[names[0]] in (accuracy, auc) else None


def adds_up_over_few(evaluation: Evaluation, seen: int | None) -> bool:
    """Whether searches see few examples and go by a mean over them, as far as metric and number say it."""
    names = list(reported_directions(evaluation))
    adds_up = smooth_metric(evaluation) or (len(names) == 1 and isinstance(evaluation.metrics[names[0]], MeanCost))
    return bool(adds_up) and min(seen or evaluation.size, evaluation.size) <= FEW


def mixes_statistics(problem: Problem, model: nn.Module) -> bool:
    """Whether BatchNorm's running statistics become those of other inputs, too: auxiliaries bring their own."""
    brings = any(problem.target not in stream.tasks for stream in problem.stream_map.values())
    return brings and bool(tracking_norms(model))


def is_one_label_each(problem: Problem, model: nn.Module, seed: int) -> bool:
    """Whether the target's predictions are class scores of one label per example, which likelihood can be had of."""
    evaluation, shapes = problem.target_validation, list[tuple[int, int]]()

    def look(predictions: Any, targets: Any) -> float:
        if isinstance(predictions, Tensor) and isinstance(targets, Tensor):
            shapes.append((predictions.dim(), targets.dim()))
        return 0.0

    few = Subset(evaluation.dataset, range(min(evaluation.size, evaluation.batch_size)))
    part = replace(evaluation, dataset=few, metrics={"look": look}, higher_is_better={}, as_training=None)
    with suppress(Exception), random_state_kept():  # what is wrong with them is said by the checks before training
        measure(model, part, seed=seed)
    return all(dims in ((2, 1), (1, 1), (2, 2)) for dims in shapes)


def has_values(evaluation: Evaluation, model: nn.Module, seed: int) -> bool:
    """Whether the metrics of some examples are numbers: an AUC is none where a class is missing among them."""
    try:
        with random_state_kept():
            return all(map(math.isfinite, measure(model, evaluation, seed=seed).values()))
    except Exception:
        return True  # what is wrong is said by the checks before training


def has_costs(problem: Problem, search_by: Any, model: nn.Module, seed: int) -> bool:
    """Whether every example has a cost of its own in what merges are searched by."""
    evaluation = problem.target_validation
    if search_by is not None:
        evaluation = with_search_metric(evaluation, search_by)
    reader = cost_reader(evaluation, seed)
    if reader is None:
        return False
    try:
        with random_state_kept():
            reader.read(model, range(reader.chunk))
    except NotPerExample:
        return False
    except Exception:
        return True  # what is wrong is said by the checks before training
    return True
