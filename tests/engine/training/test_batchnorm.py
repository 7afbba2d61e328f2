"""BatchNorm's running statistics: whose batches move them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import forkmerge as fm
from _asserts import assert_other_bits, assert_same_bits
from branch_training import WEIGHTS, train
from forkmerge.engine.training.branch import train_branch
from problems import SGD, WIDTH, domains_problem, noisy_net, seeded


class TestRunningStatistics:
    """BatchNorm uses a batch's own statistics in training: whom the running ones follow shows in evaluations only."""

    STILL = fm.OptimizerOf("SGD", lr=0.0)

    @staticmethod
    def run(weights: dict[str, float], statistics: str, optimizer: Any = SGD, **options: Any) -> dict[str, Tensor]:
        net = seeded(noisy_net)
        train(net, domains_problem(), weights, statistics=statistics, optimizer=optimizer, **options)
        return {name: value.clone() for name, value in net.state_dict().items()}

    @staticmethod
    def running(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value for name, value in state.items() if "running" in name or "tracked" in name}

    @pytest.mark.parametrize("method", [None, fm.methods.PCGrad(), fm.methods.UW()])
    def test_those_of_the_target_do_not_notice_an_auxiliary(self, method: Any) -> None:
        joint, alone = (
            self.run(weights, "target", self.STILL, method=method)
            for weights in ({"tgt": 1.0, "aux": 1.0}, {"tgt": 1.0})
        )
        assert_same_bits(self.running(joint), self.running(alone))
        assert_other_bits(self.running(joint), self.running(self.run(WEIGHTS, "all", self.STILL, method=method)))

    def test_the_weights_learn_the_same(self) -> None:
        ours, theirs = (self.run(WEIGHTS, statistics) for statistics in ("target", "all"))
        learnt = [name for name in ours if name not in self.running(ours)]
        assert_same_bits({name: ours[name] for name in learnt}, {name: theirs[name] for name in learnt})
        assert_other_bits(self.running(ours), self.running(theirs))

    def test_layers_of_an_auxiliary_alone_follow_it(self) -> None:
        counts = {}
        for statistics in ("target", "all"):
            net = seeded(noisy_net)
            net.heads["aux"] = nn.Sequential(nn.BatchNorm1d(WIDTH), net.heads["aux"])
            train(net, domains_problem(), WEIGHTS, statistics=statistics)
            counts[statistics] = [int(norm.num_batches_tracked) for norm in (net.body[1], net.heads["aux"][0])]
        assert counts == {"target": [6, 6], "all": [12, 6]}

    def test_cuts_between_segments_do_not_show(self) -> None:
        training, mixture = fm.Training(SGD, statistics="target"), fm.Mixture("branch", WEIGHTS)
        states = []
        for parts in ([6], [1, 3, 2]):
            binding = training.binding(seeded(noisy_net))
            state = binding.initial()
            for steps in parts:
                train_branch(binding, domains_problem(), mixture, state, steps=steps, training=training, seed=0)
            binding.attach_weights(state)
            states.append({name: value.clone() for name, value in binding.model.state_dict().items()})
        assert_same_bits(*states)

    def test_compiled_layers_know_whom_they_follow(self) -> None:
        plain, compiled = (
            self.running(self.run(WEIGHTS, "target", self.STILL, compile=how)) for how in (False, "aot_eager")
        )
        for name, value in plain.items():
            torch.testing.assert_close(compiled[name], value)

    def test_a_branch_without_the_target_has_those_of_all(self) -> None:
        ours, theirs = (self.run({"aux": 1.0, "odd": 1.0}, statistics) for statistics in ("target", "all"))
        assert_same_bits(ours, theirs)

    def test_a_layer_that_is_frozen_stays_as_it_is(self) -> None:
        net = seeded(noisy_net)
        net.body[1].track_running_stats = False
        train(net, domains_problem(), WEIGHTS, statistics="target")
        assert net.body[1].track_running_stats is False
