"""Documents as windows of tokens: what a language model reads in a step, and what it is measured by, bits per byte.

Every token of a document is predicted exactly once, from the tokens of its window before it. So the bits of all windows
add up to those of the documents, however they are cut, and models with different tokens can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from forkmerge.problem.metrics import MeanCost

BEGIN = 256  # the token before a document, where tokens are bytes
_NOTHING = -100  # torch's `ignore_index`

Ids = npt.NDArray[Any]


def byte_windows(texts: Sequence[str], length: int) -> TensorDataset:
    """Return documents as windows of bytes, see `token_windows`; the token before a document is `BEGIN`."""
    tokens = [np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(np.int32) for text in texts]
    return token_windows(tokens, [np.ones_like(each) for each in tokens], length, BEGIN)


def token_windows(tokens: Sequence[Ids], sizes: Sequence[Ids], length: int, begin: int) -> TensorDataset:
    """Return documents as windows, the last of each filled up with −100.

    Args:
        tokens: The tokens of every document.
        sizes: How many bytes of the document every token stands for.
        length: Tokens to predict in a window.
        begin: The token before a document.

    Returns:
        Pairs of a window's tokens, the one before it first, [length + 1], and the bytes they stand for.
    """
    rows, counts = [np.zeros([0, length + 1], np.int32)], [np.zeros([0], np.int64)]
    for ids, bytes_of in zip(tokens, sizes, strict=True):
        count = math.ceil(len(ids) / length)
        filled = np.full([count * length], _NOTHING, np.int32)
        filled[: len(ids)] = ids
        total = np.zeros([count * length], np.int64)
        total[: len(ids)] = bytes_of
        row = np.empty([count, length + 1], np.int32)
        row[:, 1:] = filled.reshape(count, length)
        row[1:, 0] = row[:-1, -1]
        row[:1, 0] = begin
        rows.append(row)
        counts.append(total.reshape(count, length).sum(1))
    return TensorDataset(torch.from_numpy(np.concatenate(rows)), torch.from_numpy(np.concatenate(counts)))


def next_token_loss(model: nn.Module, batch: Any, tasks: Sequence[str], context: object) -> dict[str, Tensor]:
    """Return the mean cross-entropy of the tokens of a batch of windows: the losses of a stream of one task."""
    logits, targets = _predicted(model, batch)
    return {tasks[0]: functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_NOTHING)}


def measure_bits(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the bits that every window takes, −log₂ p of its tokens, and its bytes: an evaluation's `predict`."""
    logits, targets = _predicted(model, batch)
    nats = functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=_NOTHING, reduction="none")
    return nats.double().sum(1) / math.log(2), batch[1]


def _predicted(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return logits [n, length, tokens] and the tokens that they are for, [n, length]."""
    rows = batch[0].long()
    output = model(rows[:, :-1].clamp(min=0))  # what fills up comes last: no other token sees it
    logits = output["logits"] if isinstance(output, Mapping) else output
    return logits.float(), rows[:, 1:]


def _bits(bits: Tensor, sizes: Tensor) -> Tensor:
    return bits


def _sizes(sizes: Tensor) -> Tensor:
    return sizes.double()


bits_per_byte = MeanCost(_bits, _sizes, name="bits_per_byte")
"""Bits that a language model takes for a byte of text, of what `measure_bits` returns; lower is better."""
