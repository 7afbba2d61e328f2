"""Which parameters the tasks of a branch share: found out from what their losses reach, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import forkmerge as fm
from _asserts import assert_close, bits
from forkmerge.methods import EW
from gradient_twins import (
    Odd,
    OddMatrix,
    Sum,
    declared_losses,
    double_data,
    double_problem,
    doubled,
    explicit,
    split_net,
    train_with,
)
from problems import TASKS, evaluation, examples, noisy_net, plain_net, seeded, shared_losses


class TestSharedParameters:
    def test_labels_that_come_and_go_do_not_change_what_is_shared(self) -> None:
        """From the first step that shows two tasks, the body is shared, also where one has a label."""

        def present(step: int) -> Sequence[str]:
            return (TASKS, ("aux",), ("tgt", "odd"), TASKS, ("tgt",))[step]

        def losses(model: Any, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
            return declared_losses(model, batch, [t for t in tasks if t in present(context.step)], context)

        ours, theirs = seeded(doubled(plain_net)), seeded(doubled(plain_net))
        result = train_with(ours, double_problem(losses), Odd(), steps=5)
        assert_close(ours, explicit(theirs, steps=5, present=present))
        names = [name for name, _ in ours.named_parameters()]
        assert [names[i] for i in result.state.method["shared"]] == ["body.0.weight", "body.0.bias"]

    def test_a_path_that_is_taken_in_some_steps_only_is_followed(self) -> None:
        """A step that reaches other parameters than the one before must not use that one's plan."""

        def losses(model: Any, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
            inputs, labels = batch
            features = model.body(inputs)
            late = model.upper(features) if context.step % 2 else features
            return {
                task: cross_entropy(model.heads[task](late if task == "aux" else features), labels[:, i])
                for i, task in enumerate(TASKS)
            }

        used = fm.OptimizerOf("SGD", lr=0.1)
        ours, theirs = seeded(doubled(split_net)), seeded(doubled(split_net))
        train_with(ours, double_problem(losses), Sum(), steps=5, optimizer=used)
        train_with(theirs, double_problem(losses), None, steps=5, optimizer=used)
        assert_close(ours, theirs)

    def test_a_step_without_shared_parameters_trains_the_heads(self) -> None:
        def losses(model: Any, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
            inputs, labels = batch
            features = model.body(inputs).detach()
            return {t: cross_entropy(model.heads[t](features), labels[:, TASKS.index(t)]) for t in tasks}

        for method in (Odd(), OddMatrix()):
            net = seeded(plain_net)
            before = bits(net)
            result = train_with(net, double_problem(losses, TensorDataset(*examples(16, 1))), method)
            assert torch.equal(before["body.0.weight"], bits(net)["body.0.weight"])
            assert not torch.equal(before["heads.tgt.weight"], bits(net)["heads.tgt.weight"])
            assert not result.reports

    def test_a_loss_that_is_a_constant_counts_as_zero(self) -> None:
        def losses(model: Any, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
            losses = declared_losses(model, batch, tasks, context)
            return {**losses, "odd": torch.tensor(0.5)} if context.step == 2 else losses

        result = train_with(seeded(plain_net), double_problem(losses, TensorDataset(*examples(16, 1))), Odd())
        assert result.reports == {"zero": {"odd": 1}}

    def test_a_sum_over_tasks_is_plain_joint_training(self) -> None:
        for problem in (double_problem(declared_losses), double_problem(shared_losses)):
            nets = [seeded(doubled(noisy_net)) for _ in range(3)]
            for net, method in zip(nets, (None, Sum(), EW()), strict=True):
                train_with(net, problem, method)
            assert_close(nets[0], nets[1])
            assert_close(nets[0], nets[2])

    def test_a_task_whose_loss_comes_from_two_streams_is_their_sum(self) -> None:
        def half(model: Any, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
            return {task: 0.5 * loss for task, loss in shared_losses(model, batch, tasks, context).items()}

        # One example, so that both streams read the same in spite of their own orders.
        one = TensorDataset(*(t[:1] for t in double_data().tensors))
        twice = {name: fm.Stream(one, half, TASKS, 8) for name in ("first", "second")}
        nets = [seeded(doubled(plain_net)), seeded(doubled(plain_net))]
        whole = train_with(nets[0], double_problem(shared_losses, one), Odd())
        halves = train_with(nets[1], fm.Problem("tgt", twice, evaluation()), Odd())
        assert_close(*nets)
        assert whole.losses == pytest.approx(halves.losses)
