"""Windows of tokens for encoders: some tokens are masked, and the model has to say which they were."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from forkmerge.problem.definition import Context
from forkmerge.problem.metrics import MeanCost

_SHARE = 0.15  # of the tokens, as BERT has it
_NOTHING = -100


def with_masks(windows: TensorDataset) -> TensorDataset:
    """Return windows with the tokens that are masked in each, always the same ones, and at least one."""
    rows = windows.tensors[0]
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(*windows.tensors, _draw(rows[:, 1:], generator))


@dataclass(frozen=True)
class MaskedTokens:
    """The loss and the prediction of masked tokens.

    Args:
        mask: The token that stands in the place of a masked one.
    """

    mask: int

    def loss(
        self, model: nn.Module, batch: Sequence[Tensor], tasks: Sequence[str], context: Context
    ) -> dict[str, Tensor]:
        """Return the mean cross-entropy of masked tokens, drawn anew in every step: the losses of a stream."""
        tokens = batch[0][:, 1:].long()
        masked = _draw(tokens.cpu(), context.generator).to(tokens.device)
        return {tasks[0]: self._nats(model, tokens, masked).sum() / masked.sum()}

    def measure(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the bits that the masked tokens of every window take, and how many there are."""
        tokens, masked = batch[0][:, 1:].long(), batch[2]
        return self._nats(model, tokens, masked).double().sum(1) / math.log(2), masked.sum(1)

    def _nats(self, model: nn.Module, tokens: Tensor, masked: Tensor) -> Tensor:
        """Return −log p of the masked tokens, and 0 of all others, [n, length]."""
        inputs = torch.where(masked, self.mask, tokens.clamp(min=0))
        output = model(input_ids=inputs, attention_mask=(tokens >= 0).long())
        logits = output["logits"] if isinstance(output, Mapping) else output
        targets = torch.where(masked, tokens, _NOTHING)
        return functional.cross_entropy(
            logits.float().transpose(1, 2), targets, ignore_index=_NOTHING, reduction="none"
        )


def _draw(tokens: Tensor, generator: torch.Generator) -> Tensor:
    """Return which tokens are masked: a share of those that are any, and always the one drawn first."""
    numbers = torch.rand(tokens.shape, generator=generator).masked_fill(tokens < 0, 2.0)
    return (numbers < _SHARE) | (numbers == numbers.min(1, keepdim=True).values)


def _bits(bits: Tensor, counts: Tensor) -> Tensor:
    return bits


def _counts(counts: Tensor) -> Tensor:
    return counts.double()


bits_per_token = MeanCost(_bits, _counts, name="bits_per_token")
"""Bits that an encoder takes for a masked token, of what `MaskedTokens.measure` returns; lower is better."""
