"""The state that coefficients give: a single branch bit for bit, copies as they are, counters and ties kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import forkmerge as fm
from _asserts import assert_same_bits
from forkmerge.engine.merging.arithmetic import vertices
from problems import conv_net, fit, noisy_net, tied_net


class TestVertices:
    @pytest.mark.parametrize("net", [noisy_net, tied_net, conv_net])
    def test_a_coefficient_of_one_installs_that_branch_bit_for_bit(self, net: Any) -> None:
        mixtures = [{"tgt": 1.0}, {"tgt": 1.0, "aux": 1.0}, {"tgt": 1.0, "odd": 1.0}]
        for vertex, mixture in zip(vertices(3), mixtures, strict=True):
            merged = fit(fm.ForkMerge("per_auxiliary", interval=4, search=fm.Fixed(vertex)), net=net, steps=4)
            assert_same_bits(merged, fit(fm.Joint(mixture), net=net, steps=4))


class TestWhatAMergeKeeps:
    def test_integer_buffers_keep_their_dtype_and_come_from_the_heaviest_branch(self) -> None:
        algorithm = fm.ForkMerge(interval=4, search=fm.Fixed((0.3, 0.7)))
        counter = fit(algorithm, net=noisy_net).model.body[1].num_batches_tracked
        assert counter.dtype == torch.int64
        assert counter == 12

    def test_tied_parameters_stay_tied(self) -> None:
        layers = fit(fm.ForkMerge(interval=4, search="fixed"), net=tied_net).model.body[1]
        assert layers.first.weight is layers.second.weight
        assert layers.first.weight.data_ptr() == layers.second.weight.data_ptr()


class TestCopies:
    @pytest.mark.parametrize("coefficients", [(0.2, 0.5, 0.3), None])
    def test_k_copies_merge_bit_for_bit_to_the_copy(self, coefficients: Any) -> None:
        copies = {name: {"tgt": 1.0, "aux": 0.5} for name in ("one", "two", "three")}
        merged = fit(fm.ForkMerge(copies, interval=4, search=fm.Fixed(coefficients)), net=noisy_net)
        assert_same_bits(merged, fit(fm.Joint({"tgt": 1.0, "aux": 0.5}, interval=4), net=noisy_net))
