"""Windows: every token is predicted once, whatever the cut, and bits per byte add up."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import forkmerge as fm
from forkmerge.problem.text.windows import (
    BEGIN,
    bits_per_byte,
    byte_windows,
    measure_bits,
    next_token_loss,
    token_windows,
)


class Uniform(nn.Module):
    """Gives every one of 257 tokens the same probability."""

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"logits": torch.zeros(*tokens.shape, 257)}


def test_every_byte_stands_once_where_it_is_predicted_and_once_before_the_next() -> None:
    rows, sizes = byte_windows(["abcdefg", "", "hi"], 3).tensors
    assert rows.tolist() == [
        [BEGIN, *b"abc"],
        [*b"cdef"],
        [*b"fg", -100, -100],
        [BEGIN, *b"hi", -100],
    ]
    assert sizes.tolist() == [3, 3, 1, 2]


def test_tokens_count_as_the_bytes_that_they_stand_for() -> None:
    windows = token_windows([np.array([5, 6, 7])], [np.array([4, 1, 2])], 2, 0)
    assert windows.tensors[0].tolist() == [[0, 5, 6], [6, 7, -100]]
    assert windows.tensors[1].tolist() == [5, 2]


@pytest.mark.parametrize("length", [2, 5, 64])
def test_bits_per_byte_of_a_uniform_model_do_not_depend_on_the_windows(length: int) -> None:
    evaluation = fm.Evaluation(byte_windows(["snøfnugg", "på dansk"], length), bits_per_byte, predict=measure_bits)
    assert fm.measure(Uniform(), evaluation) == {"bits_per_byte": pytest.approx(math.log2(257), rel=1e-6)}
    assert evaluation.directions == {"bits_per_byte": -1}


def test_the_loss_is_the_mean_over_tokens_and_what_fills_up_does_not_count() -> None:
    batch = byte_windows(["abcd"], 3).tensors
    loss = next_token_loss(Uniform(), batch, ["text"], None)
    assert loss["text"].item() == pytest.approx(math.log(257))
    bits, sizes = measure_bits(Uniform(), batch)
    assert bits.tolist() == pytest.approx([3 * math.log2(257), math.log2(257)], rel=1e-6)
    assert sizes.tolist() == [3, 1]
