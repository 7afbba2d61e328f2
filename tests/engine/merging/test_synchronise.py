"""What branches go on with after a merge: optimizer state that is kept, averaged or reset."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch

import forkmerge as fm
from _asserts import assert_same_bits
from forkmerge.engine.merging.synchronise import share_optimizer, synchronise
from forkmerge.engine.training.state import State
from problems import ADAM, SGD, Point, fit, quadratic_problem


class TestOptimizerPolicies:
    COPIES: ClassVar[dict[str, dict[str, float]]] = {"one": {"tgt": 1.0}, "two": {"tgt": 1.0}}

    @pytest.mark.parametrize("optimizer", [SGD, ADAM])
    @pytest.mark.parametrize("policy", ["keep", "average"])
    def test_copies_go_on_as_one_run_would(self, policy: Any, optimizer: Any) -> None:
        algorithm = fm.ForkMerge(self.COPIES, interval=4, search=fm.Fixed((0.5, 0.5)), optimizer_state=policy)
        assert_same_bits(fit(algorithm, optimizer=optimizer), fit(fm.SingleTask(), optimizer=optimizer))

    def test_reset_starts_every_round_without_momentum(self) -> None:
        heavy = fm.OptimizerOf("SGD", lr=0.1, momentum=1.0)
        branches = {"alone": {"tgt": 1.0}}
        problem = quadratic_problem({"tgt": (1.0, 0.0)}, (1.0, 0.0))
        for policy, expected in (("reset", 1 - self.coast(2) ** 2), ("keep", 1 - self.coast(4))):
            run = fm.ForkMerge(branches, interval=2, optimizer_state=policy).fit(
                problem, model=Point, optimizer=heavy, steps=4
            )
            assert run.model.theta[0].item() == pytest.approx(expected, abs=1e-12)

    @staticmethod
    def coast(steps: int) -> float:
        """Distance left after heavy-ball steps with momentum 1 and rate 0.1 from rest, at distance 1."""
        left, velocity = 1.0, 0.0
        for _ in range(steps):
            velocity += -left
            left += 0.1 * velocity
        return left

    def state(self, value: float, step: float, slots: bool = True) -> State:
        state = State(3, {"r": torch.zeros(4)}, groups=[{"lr": value}], scheduler={"last_epoch": 3})
        if slots:
            state.optimizer_rows = {"m/r": torch.full((4,), value)}
            state.optimizer_slots = {"m/r": [0]}
            state.optimizer_loose = {0: {"step": torch.tensor(step)}}
        return state

    def test_average_combines_tensors_with_the_coefficients_and_takes_counters_from_the_heaviest(self) -> None:
        states = [self.state(1.0, 10.0), self.state(3.0, 20.0)]
        share_optimizer(states, (0.25, 0.75), "average")
        for state, rate in zip(states, (1.0, 3.0), strict=True):
            assert state.optimizer_rows["m/r"].tolist() == [2.5] * 4
            assert state.optimizer_loose[0]["step"] == 20
            assert state.groups == [{"lr": rate}]
        assert states[0].optimizer_rows["m/r"] is not states[1].optimizer_rows["m/r"]

    def test_average_counts_a_missing_tensor_as_zeros(self) -> None:
        states = [self.state(2.0, 10.0), self.state(0.0, 0.0, slots=False)]
        share_optimizer(states, (0.5, 0.5), "average")
        assert states[1].optimizer_rows["m/r"].tolist() == [1.0] * 4
        assert states[1].optimizer_slots == {"m/r": [0]}

    def test_average_ignores_a_branch_of_coefficient_zero(self) -> None:
        states = [self.state(2.0, 10.0), self.state(math.nan, 20.0)]
        share_optimizer(states, (1.0, 0.0), "average")
        assert states[1].optimizer_rows["m/r"].tolist() == [2.0] * 4

    def test_average_takes_tensors_that_only_some_branches_have_and_slots_of_all(self) -> None:
        states = [self.state(2.0, 10.0), self.state(4.0, 20.0), self.state(8.0, 30.0)]
        states[1].optimizer_rows["v/r"] = torch.full((4,), 4.0)
        states[1].optimizer_slots = {"m/r": [2], "v/r": [1]}
        states[1].optimizer_loose = {1: {"step": torch.tensor(5.0)}}
        share_optimizer(states, (0.25, 0.75, 0.0), "average")
        for state in states:
            assert state.optimizer_rows["m/r"].tolist() == [3.5] * 4
            assert state.optimizer_rows["v/r"].tolist() == [3.0] * 4
            assert state.optimizer_slots == {"m/r": [0, 2], "v/r": [1]}
            assert {index: entry["step"].item() for index, entry in state.optimizer_loose.items()} == {0: 10.0, 1: 5.0}
        states[0].optimizer_loose[0]["step"] += 1
        assert states[1].optimizer_loose[0]["step"] == 10  # of its own

    def test_reset_forgets_every_branchs_optimizer_and_keep_none(self) -> None:
        states = [self.state(2.0, 10.0), self.state(4.0, 20.0)]
        share_optimizer(states, (0.5, 0.5), "keep")
        assert [state.optimizer_rows["m/r"][0].item() for state in states] == [2.0, 4.0]
        share_optimizer(states, (0.5, 0.5), "reset")
        for state in states:
            assert (state.optimizer_rows, state.optimizer_slots, state.optimizer_loose) == ({}, {}, {})
            assert state.scheduler == {"last_epoch": 3}


class TestSynchronise:
    def branches(self, *values: float) -> list[State]:
        return [
            State(3, {"r": torch.full((4,), value)}, optimizer_rows={"m/r": torch.ones(4)}, method={"w": value})
            for value in values
        ]

    def test_every_branch_goes_on_from_the_merged_weights_and_one_that_diverged_forgets_the_rest(self) -> None:
        branches, merged = (
            self.branches(1.0, math.nan, 3.0),
            State(3, {"r": torch.full((4,), 2.0)}, {"b": torch.ones(1)}),
        )
        synchronise(branches, merged, (0.5, 0.0, 0.5), "keep")
        for branch in branches:
            assert branch.rows["r"].tolist() == [2.0] * 4
            assert branch.rows["r"] is not merged.rows["r"]
            assert branch.buffers["b"].item() == 1.0
            assert branch.buffers["b"] is not merged.buffers["b"]
        assert [branch.optimizer_rows == {} for branch in branches] == [False, True, False]
        assert [branch.method for branch in branches] == [{"w": 1.0}, {}, {"w": 3.0}]

    def test_coefficients_that_are_all_zero_mean_that_every_branch_has_diverged(self) -> None:
        for policy in ("keep", "average", "reset"):
            branches = self.branches(1.0, 3.0)
            synchronise(branches, State(3, {"r": torch.zeros(4)}), (0.0, 0.0), policy)
            for branch in branches:
                assert (branch.rows["r"].tolist(), branch.optimizer_rows, branch.method) == ([0.0] * 4, {}, {})

    def test_the_optimizer_of_a_branch_that_diverged_stays_out_of_the_average(self) -> None:
        merged = State(3, {"r": torch.full((4,), 2.0)})
        for spoilt in ("rows", "optimizer_rows"):  # older weights, which were sound, may stand for those that are not
            branches = self.branches(1.0, 2.0, 3.0)
            for value, branch in enumerate(branches):
                branch.optimizer_rows["m/r"].fill_(value)
            for row in getattr(branches[0], spoilt).values():
                row.fill_(math.nan)
            synchronise(branches, merged, (0.5, 0.125, 0.375), "average")
            assert [branch.rows["r"][0].item() for branch in branches] == [2.0] * 3
            assert [branch.method for branch in branches] == [{}, {"w": 2.0}, {"w": 3.0}]
            assert branches[0].optimizer_rows == {}
            assert [branch.optimizer_rows["m/r"].tolist() for branch in branches[1:]] == [[1.75] * 4] * 2

    def test_optimizers_are_reset_where_only_branches_that_diverged_entered_the_merge(self) -> None:
        branches = self.branches(1.0, 2.0, 3.0)
        branches[0].optimizer_rows["m/r"].fill_(math.inf)
        synchronise(branches, State(3, {"r": torch.zeros(4)}), (1.0, 0.0, 0.0), "average")
        assert [branch.optimizer_rows for branch in branches] == [{}] * 3
        assert [branch.method for branch in branches] == [{}, {"w": 2.0}, {"w": 3.0}]
