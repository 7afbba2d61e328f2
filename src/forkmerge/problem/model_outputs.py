"""Batches and outputs in the form of transformers: dicts of inputs with labels, outputs with logits and a loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from forkmerge.errors import ProblemError
from forkmerge.problem.error_facts import describe

LABELS = "labels"


def predict_batch(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Return predictions and targets, for batches that are (inputs, targets) pairs or dicts with labels."""
    if isinstance(batch, Mapping) and LABELS in batch:
        inputs = {name: value for name, value in batch.items() if name != LABELS}
        return _predictions(model(**inputs)), batch[LABELS]
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        raise ProblemError(
            "an evaluation without predict=… needs a data set of (input, target) pairs, or of dicts with labels, and "
            f"its batches are {describe(batch)}: pass predict=function of (model, batch) that returns (predictions, "
            "targets)."
        )
    inputs, targets = batch
    return _predictions(model(inputs)), targets


def _predictions(output: Any) -> Any:
    """Return the logits of an output that has them; any other output is the predictions."""
    return output["logits"] if isinstance(output, Mapping) and "logits" in output else output


def model_loss(model: nn.Module, batch: Any, tasks: Sequence[str], context: object) -> dict[str, Tensor]:
    """Return the loss that a model computes itself, `model(**batch).loss`, as those of transformers do.

    It is the losses of a stream that serves one task and whose batches are dicts with labels.

    Example: `fm.Stream(tokenized, fm.model_loss, tasks="reviews", batch_size=16)`
    """
    if len(tasks) != 1 or not isinstance(batch, Mapping):
        raise ProblemError(
            f"model_loss needs a stream of one task whose batches are dicts, got {', '.join(tasks)} and "
            f"{describe(batch)}: write losses(model, batch, tasks, context) that return a loss per task."
        )
    output = model(**batch)
    loss = output.get("loss") if isinstance(output, Mapping) else None
    if loss is None:
        raise ProblemError(
            f"the model returned no loss of a batch {describe(batch)}: a model of transformers computes one where the "
            f"batch holds {LABELS!r}; for any other, write losses(model, batch, tasks, context)."
        )
    return {tasks[0]: loss}
