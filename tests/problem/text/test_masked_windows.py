"""Masked tokens: those of an evaluation are always the same, those of a step are drawn by it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import forkmerge as fm
from forkmerge.problem.text.masked_windows import MaskedTokens, bits_per_token, with_masks
from forkmerge.problem.text.windows import byte_windows

TEXTS = [bytes(range(65, 90)).decode() * 4, "short"]


class SeesMask(nn.Module):
    """Gives all tokens the same probability, and keeps what it was given."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        self.inputs, self.attention = input_ids, attention_mask
        return {"logits": torch.zeros(*input_ids.shape, 258)}


def test_every_window_has_masked_tokens_and_always_the_same() -> None:
    windows = byte_windows(TEXTS, 20)
    rows, _, masked = with_masks(windows).tensors
    assert masked.sum(1).min() >= 1
    assert not (masked & (rows[:, 1:] < 0)).any()
    assert torch.equal(masked, with_masks(windows).tensors[2])


def test_bits_are_those_of_masked_tokens_alone() -> None:
    evaluation = fm.Evaluation(with_masks(byte_windows(TEXTS, 20)), bits_per_token, predict=MaskedTokens(257).measure)
    model = SeesMask()
    assert fm.measure(model, evaluation) == {"bits_per_token": pytest.approx(math.log2(258), rel=1e-6)}
    assert bool((model.inputs == 257).any())
    assert model.attention.sum() < model.attention.numel()


def test_a_step_draws_what_it_masks() -> None:
    model, batch = SeesMask(), byte_windows(TEXTS, 20).tensors
    seen = []
    for seed in (1, 1, 2):
        loss = MaskedTokens(257).loss(model, batch, ["text"], fm.Context(0, seed))
        assert loss["text"].item() == pytest.approx(math.log(258))
        seen.append(model.inputs)
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])
