"""The area under the ROC curve, computed on logits: a float32 sigmoid would make equals of those that are large."""

from __future__ import annotations

import math

from torch import Tensor

from forkmerge.errors import ProblemError


def auc(predictions: Tensor, targets: Tensor) -> float:
    """Return the share of pairs, one example of either class, that are in the right order; ties count one half.

    NaN where there is only one class, or where a prediction is NaN.

    Args:
        predictions: One logit, or any other score, per example, [n] or [n, 1]; or logits of both classes, [n, 2].
        targets: 0 or 1, [n] or [n, 1].

    Example:
        >>> import torch
        >>> auc(torch.tensor([25.0, 27.0, 26.0]), torch.tensor([0, 1, 1]))
        1.0
    """
    scores, is_positive = _scores(predictions), _labels(predictions, targets)
    positives = int(is_positive.sum())
    negatives = len(is_positive) - positives
    if not positives or not negatives or bool(scores.isnan().any()):
        return math.nan
    _, group, sizes = scores.unique(return_inverse=True, return_counts=True)
    ranks = sizes.cumsum(0).double() - (sizes - 1) / 2  # of equals, the mean of their ranks
    above = float(ranks[group][is_positive].sum()) - positives * (positives + 1) / 2
    return above / (positives * negatives)


def _scores(predictions: Tensor) -> Tensor:
    wide = predictions.double()
    if wide.dim() == 2 and wide.shape[1] == 2:
        return wide[:, 1] - wide[:, 0]
    if wide.dim() == 1 or (wide.dim() == 2 and wide.shape[1] == 1):
        return wide.reshape(-1)
    raise ProblemError(
        f"auc needs one logit per example, of shape [n] or [n, 1], or those of two classes, [n, 2], got "
        f"{tuple(predictions.shape)}."
    )


def _labels(predictions: Tensor, targets: Tensor) -> Tensor:
    labels = targets.reshape(-1) if targets.dim() <= 2 and targets.numel() == len(predictions) else targets
    if labels.shape != predictions.shape[:1]:
        raise ProblemError(f"auc needs one target per prediction, got {tuple(targets.shape)} for {len(predictions)}.")
    if not bool(((labels == 0) | (labels == 1)).all()):
        raise ProblemError(f"auc needs targets that are 0 or 1, got {labels.unique()[:5].tolist()}.")
    return labels == 1


auc.higher_is_better = True  # type: ignore[attr-defined]  # as torchmetrics' own say it
