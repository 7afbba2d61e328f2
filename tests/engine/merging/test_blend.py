"""The state that coefficients give: a single branch bit for bit, copies as they are, counters and ties kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import forkmerge as fm
from _asserts import assert_same_bits
from branch_states import make_branches
from forkmerge.engine.merging import blend
from forkmerge.engine.merging.arithmetic import vertices
from forkmerge.engine.merging.blend import Blender, blend_weights
from forkmerge.engine.training.state import State
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
        algorithm = fm.ForkMerge("mixed", interval=4, search=fm.Fixed((0.3, 0.7)))
        counter = fit(algorithm, net=noisy_net).model.body[1].num_batches_tracked
        assert counter.dtype == torch.int64
        assert counter == 12

    def test_tied_parameters_stay_tied(self) -> None:
        layers = fit(fm.ForkMerge("mixed", interval=4, search="fixed"), net=tied_net).model.body[1]
        assert layers.first.weight is layers.second.weight
        assert layers.first.weight.data_ptr() == layers.second.weight.data_ptr()


class TestCopies:
    @pytest.mark.parametrize("coefficients", [(0.2, 0.5, 0.3), None])
    def test_k_copies_merge_bit_for_bit_to_the_copy(self, coefficients: Any) -> None:
        copies = {name: {"tgt": 1.0, "aux": 0.5} for name in ("one", "two", "three")}
        merged = fit(fm.ForkMerge(copies, interval=4, search=fm.Fixed(coefficients)), net=noisy_net)
        assert_same_bits(merged, fit(fm.Joint({"tgt": 1.0, "aux": 0.5}, interval=4), net=noisy_net))


THIRDS = (0.5, 0.3, 0.2)


def mean_of(tensors: Sequence[Tensor], coefficients: Sequence[float]) -> Tensor:
    return sum(c * tensor for c, tensor in zip(coefficients, tensors, strict=True))


class TestBlendWeights:
    def test_rows_and_floating_buffers_are_combined_and_counters_come_from_the_heaviest(self) -> None:
        binding, branches = make_branches(3)
        out = branches[0].weights()
        assert blend_weights(binding, branches, THIRDS, out) is out
        torch.testing.assert_close(out.rows["float32"], mean_of([b.rows["float32"] for b in branches], THIRDS))
        mean = mean_of([branch.buffers["body.1.running_mean"] for branch in branches], THIRDS)
        torch.testing.assert_close(out.buffers["body.1.running_mean"], mean)
        assert out.buffers["body.1.num_batches_tracked"] == 1
        assert out.step == 7
        blend_weights(binding, branches, (0.2, 0.3, 0.5), out)
        assert out.buffers["body.1.num_batches_tracked"] == 3

    def test_a_branch_without_a_buffer_has_the_models_own_and_a_buffer_of_none_is_left_out(self) -> None:
        binding, branches = make_branches(2)
        name = "body.1.running_mean"
        own = binding.own_buffers[name]
        del branches[0].buffers[name]
        for branch in branches:
            del branch.buffers["body.1.running_var"]
        out = blend_weights(binding, branches, (0.75, 0.25), branches[0].weights())
        torch.testing.assert_close(out.buffers[name], 0.75 * own + 0.25 * branches[1].buffers[name])
        assert "body.1.running_var" not in out.buffers

    def test_buffers_that_differ_in_shape_or_dtype_come_from_the_heaviest(self) -> None:
        binding, branches = make_branches(2)
        for other in (torch.ones(3), torch.ones(8, dtype=torch.float64)):
            branches[1].buffers["body.1.running_mean"] = other
            out = blend_weights(binding, branches, (0.25, 0.75), branches[0].weights())
            copy = out.buffers["body.1.running_mean"]
            assert torch.equal(copy, other)
            assert copy is not other
            out = blend_weights(binding, branches, (0.75, 0.25), branches[0].weights())
            assert torch.equal(out.buffers["body.1.running_mean"], branches[0].buffers["body.1.running_mean"])

    def test_a_single_branch_is_returned_itself(self) -> None:
        binding, branches = make_branches(3)
        out = branches[0].weights()
        for branch, vertex in zip(branches, vertices(3), strict=True):
            assert blend_weights(binding, branches, vertex, out) is branch


class TestBlender:
    def test_candidates_are_built_in_the_same_memory_and_are_the_same_when_they_come_back(self) -> None:
        binding, branches = make_branches(2)
        out = branches[0].weights()
        blender = Blender(binding, branches, out)
        kept = {}
        for coefficients in [(0.5, 0.5), (0.2, 0.8), (0.5, 0.5), (0.2, 0.8)]:
            state = blender(coefficients)
            assert state is out
            expected = kept.setdefault(coefficients, state.weights())
            assert_same_bits(state.rows, expected.rows)
            assert_same_bits(state.buffers, expected.buffers)
            alone = blend_weights(binding, branches, coefficients, branches[0].weights())
            assert_same_bits(state.rows, alone.rows)
            assert_same_bits(state.buffers, alone.buffers)

    def test_single_branches_are_themselves_and_leave_the_candidate_that_is_there(self) -> None:
        binding, branches = make_branches(2)
        refreshed: list[State] = []
        blender = Blender(binding, branches, branches[0].weights(), refreshed.append)
        half = blender((0.5, 0.5)).weights()
        assert blender((0.0, 1.0)) is branches[1]
        assert_same_bits(blender.out.rows, half.rows)
        assert len(refreshed) == 1

    def test_statistics_are_refreshed_once_for_each_candidate_and_kept(self) -> None:
        binding, branches = make_branches(2)
        refreshed: list[State] = []

        def refresh(state: State) -> None:
            refreshed.append(state)
            state.buffers["body.1.running_mean"] = torch.full((8,), float(len(refreshed)))

        blender = Blender(binding, branches, branches[0].weights(), refresh)
        means = []
        for coefficients in [(0.5, 0.5), (0.5, 0.5), (0.2, 0.8), (0.5, 0.5)]:
            means.append(blender(coefficients).buffers["body.1.running_mean"][0].item())
        assert means == [1.0, 1.0, 2.0, 1.0]
        assert refreshed == [blender.out] * 2

    def test_a_candidate_that_is_there_is_not_merged_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        binding, branches = make_branches(2)
        merged = []
        monkeypatch.setattr(blend, "merge_into", lambda *arguments: merged.append(arguments))
        blender = Blender(binding, branches, branches[0].weights())
        for coefficients in [(0.5, 0.5), (0.5, 0.5), (1.0, 0.0), (0.5, 0.5)]:
            blender(coefficients)
        assert len(merged) == 1

    def test_a_candidate_whose_refresh_failed_is_built_anew(self) -> None:
        binding, branches = make_branches(2)
        refreshed: list[State] = []

        def refresh(state: State) -> None:
            refreshed.append(state)
            if len(refreshed) == 1:
                raise KeyboardInterrupt

        blender = Blender(binding, branches, branches[0].weights(), refresh)
        with pytest.raises(KeyboardInterrupt):
            blender((0.5, 0.5))
        blender((0.5, 0.5))
        assert len(refreshed) == 2

    def test_the_model_has_the_candidates_weights_or_is_none_where_they_are_not_finite(self) -> None:
        binding, branches = make_branches(3)
        branches[2].rows["float32"][0] = torch.nan
        blender = Blender(binding, branches, branches[0].weights())
        weight = "body.0.weight"
        for coefficients in [(0.5, 0.5, 0.0), (1.0, 0.0, 0.0), (0.5, 0.5, 0.0), (0.2, 0.8, 0.0)] * 2:
            model = blender.model_of(coefficients)
            assert model is binding.model
            state = blend_weights(binding, branches, coefficients, branches[0].weights())
            (row_slice,) = [item for item in binding.layout.slices if item.name == weight]
            assert torch.equal(model.get_parameter(weight), row_slice.view(state.rows["float32"]))
            assert blender.model_of((0.5, 0.0, 0.5)) is None
            assert blender.model_of((0.0, 0.0, 1.0)) is None

    def test_a_candidate_is_attached_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        binding, branches = make_branches(2)
        attached: list[State] = []
        monkeypatch.setattr(binding, "attach_weights", attached.append)
        blender = Blender(binding, branches, branches[0].weights())
        for coefficients in [(0.5, 0.5), (0.5, 0.5), (1.0, 0.0), (1.0, 0.0), (0.5, 0.5)]:
            blender.model_of(coefficients)
        assert attached == [blender.out, branches[0], blender.out]
