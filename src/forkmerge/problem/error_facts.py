"""What is known where the user's own code fails: stream, tasks, step, examples and the shapes of the batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from forkmerge.errors import WorkerError, add_fact, facts_of, has_origin
from forkmerge.problem.labels import example_with, refused_label

_SHOWN = 8  # examples, columns or keys of a batch


def note_origin(error: BaseException, origin: str, *, batch: Any = None, examples: Iterable[int] | None = None) -> None:
    """Add to an error of the user's code where it came from, unless code deeper inside has done so.

    Args:
        error: What was raised; it keeps its type and its traceback.
        origin: E.g. "the losses of stream 'all' (tasks tgt, aux)".
        batch: What the code was called with.
        examples: The positions of its examples in their data set.
    """
    if has_origin(error):
        return
    parts = [f"in {origin}"]
    if examples is not None:
        shown = list(examples)
        label = refused_label(error)
        culprit = None if label is None or batch is None else example_with(label, batch, shown)
        parts += [f"example {culprit} has the label {label}"] if culprit is not None else []
        parts.append(f"examples {_listed(shown)}")
    if batch is not None:
        parts.append(f"the batch is {describe(batch)}")
    add_fact(error, "; ".join(parts))


def note_moment(error: BaseException, moment: str) -> None:
    """Add to an error of the user's code when it came, unless it says at which step, or that a callback raised it."""
    said = (*facts_of(error), str(error) if isinstance(error, WorkerError) else "")
    if not any("at step" in text or "raised by on_event" in text for text in said):
        add_fact(error, moment)


def describe(batch: Any) -> str:
    """Return the form of a batch in a few words: types and shapes.

    Example:
        >>> import torch
        >>> describe([torch.zeros(8, 6), {"label": torch.zeros(8).long()}, "x"])
        '[float32[8, 6], {label: int64[8]}, str]'
    """
    if hasattr(batch, "shape") and hasattr(batch, "dtype"):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    if isinstance(batch, Mapping):
        shown = [f"{key}: {describe(value)}" for key, value in list(batch.items())[:_SHOWN]]
        return "{" + ", ".join([*shown, *["…"] * (len(batch) > _SHOWN)]) + "}"
    if isinstance(batch, list | tuple):
        if len(batch) > _SHOWN and len({describe(value) for value in batch}) == 1:
            return f"{len(batch)} × {describe(batch[0])}"
        shown = [describe(value) for value in batch[:_SHOWN]]
        left, right = "()" if isinstance(batch, tuple) else "[]"
        return left + ", ".join([*shown, *["…"] * (len(batch) > _SHOWN)]) + right
    return type(batch).__name__


def _listed(indices: Sequence[int]) -> str:
    shown = ", ".join(str(int(index)) for index in indices[:_SHOWN])
    return shown + (f", … ({len(indices)} in all)" if len(indices) > _SHOWN else "")
