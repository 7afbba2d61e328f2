"""What a model does on examples it was not trained on, besides its score: the target's loss, and its confidence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from forkmerge.errors import ProblemError
from forkmerge.problem.batches import evaluation_batches
from forkmerge.problem.definition import Context, Evaluation, Problem
from forkmerge.problem.randomness import derive, random_state_kept, set_random_state
from forkmerge.problem.scoring import device_of, evaluating

Confidence = Callable[[Any, Any], Tensor]
"""`confidence(predictions, targets) -> [n]`: how sure a model is of what it predicts, in [0, 1]."""


def heldout_loss(model: nn.Module, problem: Problem, *, indices: Sequence[int] | None = None, seed: int = 0) -> float:
    """Return the target's loss on its validation examples, in evaluation mode.

    A loss moves with every step, where a score of few examples stands still; so short runs can be told apart by it.
    The examples are read by the target's own stream, as in a refit: `Evaluation.as_training` gives them another form.

    Args:
        model: The model; it is left as it was.
        problem: The problem.
        indices: Which validation examples; all where None.
        seed: Of anything that draws.
    """
    evaluation = problem.target_validation
    extra = evaluation.dataset if evaluation.as_training is None else evaluation.as_training
    name, stream = next((n, s) for n, s in problem.stream_map.items() if problem.target in s.tasks)
    reading = replace(evaluation, dataset=extra, batch_size=stream.batch_size, collate_fn=stream.collate_fn)
    order = list(range(reading.size) if indices is None else indices)
    total = 0.0
    for start, batch in _batches(model, reading, order, seed):
        call_seed = derive(seed, name, "held out", start)
        set_random_state(call_seed)
        loss = stream.losses(model, batch, [problem.target], Context(0, call_seed)).get(problem.target)
        if loss is None:
            raise ProblemError(f"a validation batch has no label for the target {problem.target!r}.")
        total += float(loss) * min(stream.batch_size, len(order) - start)
    return total / len(order)


def reads_heldout(model: nn.Module, problem: Problem, seed: int = 0) -> bool:
    """Whether the target's stream can read validation examples, so that `heldout_loss` works."""
    try:
        heldout_loss(model, problem, indices=[0], seed=seed)
    except (ProblemError, RuntimeError, ValueError, TypeError, LookupError, AttributeError):
        return False
    return True


def confidence_discrepancy(
    model: nn.Module, evaluation: Evaluation, *, confidence: Confidence | None = None, seed: int = 0
) -> float:
    """Return CSD: 1 minus the mean confidence of a model's predictions; labels play no part.

    1 − E_x max_y f(x, y), with f the softmax of class scores.

    Args:
        model: The model.
        evaluation: Whose inputs.
        confidence: From predictions to confidences, for predictions that are no class scores.
        seed: Of anything that draws.

    References:
        ForkMerge, Definition 3.5.
    """
    ask = confidence or class_confidence
    order = list(range(evaluation.size))
    total, count = 0.0, 0
    for _, batch in _batches(model, evaluation, order, seed):
        values = ask(*evaluation.predict(model, batch)).double()
        total, count = total + float(values.sum()), count + values.numel()
    return 1 - total / count


def class_confidence(predictions: Any, targets: Any) -> Tensor:
    """Return the largest class probability of every example (or pixel), from class scores [n, classes, …].

    Rows that are probabilities already are taken as they are. One number per example is the probability of class 1.
    Whole-number labels tell class scores from regression.
    """
    if isinstance(predictions, Tensor) and isinstance(targets, Tensor) and predictions.is_floating_point():
        if predictions.dim() == targets.dim() + 1 and predictions.shape[1] > 1 and not targets.is_floating_point():
            rows = predictions.float()
            sums = rows.sum(1)
            are_probabilities = bool((rows >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-3)
            return (rows if are_probabilities else rows.softmax(1)).amax(1)
        binary = bool(((targets == 0) | (targets == 1)).all()) and bool(((predictions >= 0) & (predictions <= 1)).all())
        if binary and predictions.shape == targets.shape:
            return torch.maximum(predictions, 1 - predictions).float()
    raise ProblemError(
        "the predictions are no class scores [n, classes] beside whole-number labels: "
        "pass confidence=…, a function (predictions, targets) -> confidences in [0, 1]."
    )


def _batches(model: nn.Module, source: Evaluation, order: Sequence[int], seed: int) -> Iterator[tuple[int, Any]]:
    """Yield (start, batch) with the model in evaluation mode."""
    feed = evaluation_batches(source, order, seed, device_of(model))
    with random_state_kept(), evaluating(model), closing(feed):
        for start, batch in zip(range(0, len(order), source.batch_size), feed, strict=True):
            set_random_state(derive(seed, "evaluation forward", start))
            yield start, batch
