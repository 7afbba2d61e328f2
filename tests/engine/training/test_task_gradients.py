"""The gradient core against explicit loops over tasks: every way to the same gradients gives the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import forkmerge as fm
from _asserts import assert_close
from forkmerge.methods import MGDA
from forkmerge.problem import example_order
from gradient_twins import (
    Odd,
    OddMatrix,
    OddWithHeads,
    Sum,
    declared_losses,
    double_data,
    double_problem,
    doubled,
    explicit,
    odd_weights,
    split_net,
    train_with,
)
from problems import (
    SGD,
    TASKS,
    Bag,
    Net,
    conv_net,
    domains_problem,
    examples,
    frozen_net,
    noisy_net,
    plain_net,
    seeded,
    shared_losses,
    shared_problem,
    tied_net,
)


class TestTwins:
    @pytest.mark.parametrize("net", [plain_net, tied_net, frozen_net])
    @pytest.mark.parametrize("losses", [shared_losses, declared_losses])
    def test_one_pass_per_head_equals_an_explicit_loop_over_tasks(self, net: Any, losses: Any) -> None:
        ours, theirs = seeded(doubled(net)), seeded(doubled(net))
        train_with(ours, double_problem(losses), Odd())
        assert_close(ours, explicit(theirs))

    def test_single_precision_agrees_to_a_millionth(self) -> None:
        ours, theirs = seeded(plain_net), seeded(plain_net)
        train_with(ours, double_problem(declared_losses, TensorDataset(*examples(16, 1))), Odd())
        assert_close(ours, explicit(theirs), rtol=1e-6)

    @pytest.mark.parametrize("net", [noisy_net, conv_net])
    def test_declared_and_undeclared_representations_agree(self, net: Any) -> None:
        nets = [seeded(doubled(net)), seeded(doubled(net))]
        for used, losses in zip(nets, (shared_losses, declared_losses), strict=True):
            train_with(used, double_problem(losses), Odd())
        assert_close(*nets)

    def test_channels_last_weights_agree(self) -> None:
        nets = [seeded(doubled(conv_net)), seeded(doubled(conv_net))]
        train_with(nets[0], double_problem(declared_losses), Odd())
        train_with(nets[1], double_problem(declared_losses), Odd(), channels_last=True)
        assert_close(*nets)

    @pytest.mark.parametrize("losses", [shared_losses, declared_losses])
    def test_micro_batches_add_up(self, losses: Any) -> None:
        ours, theirs = seeded(doubled(plain_net)), seeded(doubled(plain_net))
        train_with(ours, double_problem(losses), Odd(), accumulate=2)
        assert_close(ours, explicit(theirs, accumulate=2))

    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_tasks_with_their_own_inputs_agree(self, accumulate: int) -> None:
        data = {task: double_data(20 + 10 * i, 10 + i) for i, task in enumerate(TASKS)}
        ours, theirs = seeded(doubled(plain_net)), seeded(doubled(plain_net))
        train_with(ours, domains_problem(dict(data)), Odd(), accumulate=accumulate)
        assert_close(ours, explicit(theirs, streams=True, accumulate=accumulate))

    def test_task_weights_scale_losses_before_gradients_are_compared(self) -> None:
        weights = {"tgt": 1.0, "aux": 0.3, "odd": 2.0}
        ours, theirs = seeded(doubled(plain_net)), seeded(doubled(plain_net))
        train_with(ours, double_problem(declared_losses), Odd(), weights=weights)
        assert_close(ours, explicit(theirs, weights=weights))

    def test_heads_are_weighted_only_if_the_method_says_so(self) -> None:
        ours, theirs = seeded(doubled(plain_net)), seeded(doubled(plain_net))
        train_with(ours, double_problem(declared_losses), OddWithHeads())
        assert_close(ours, explicit(theirs, heads=True))

    def test_a_direction_from_the_matrix_equals_one_from_the_gramian(self) -> None:
        nets = [seeded(doubled(plain_net)), seeded(doubled(plain_net))]
        train_with(nets[0], double_problem(declared_losses), Odd())
        train_with(nets[1], double_problem(declared_losses), OddMatrix())
        assert_close(*nets)

    def test_sparse_gradients_of_an_embedding_are_combined_like_dense_ones(self) -> None:
        nets = [seeded(lambda s=sparse: Net(Bag(s))) for sparse in (False, True)]
        plain = fm.OptimizerOf("SGD", lr=0.1)
        for net in nets:
            train_with(net, double_problem(shared_losses, TensorDataset(*examples(16, 1))), Odd(), optimizer=plain)
        assert_close(*nets, rtol=1e-6)


@dataclass(frozen=True)
class Nested:
    """Heads on two representations, one made from the other; "odd" also reads the input past both."""

    declared: tuple[bool, bool]
    bypass: bool = False

    def __call__(self, model: Any, batch: Any, tasks: Sequence[str], context: fm.Context) -> dict[str, Tensor]:
        inputs, labels = batch
        raw = model.body(inputs)
        low = context.shared(raw) if self.declared[0] else raw
        high = context.shared(model.upper(low)) if self.declared[1] else model.upper(low)
        losses = {}
        for task in tasks:
            features = low + high if task == "aux" else high
            if task == "odd" and self.bypass:
                features = features + raw
            losses[task] = cross_entropy(model.heads[task](features), labels[:, TASKS.index(task)])
        return losses


class TestRepresentations:
    @pytest.mark.parametrize("declared", [(True, False), (False, True), (True, True)])
    @pytest.mark.parametrize("bypass", [False, True])
    def test_any_declaration_gives_the_gradients_of_none(self, declared: Any, bypass: bool) -> None:
        nets = [seeded(doubled(split_net)), seeded(doubled(split_net))]
        train_with(nets[0], double_problem(Nested((False, False), bypass)), Odd())
        train_with(nets[1], double_problem(Nested(declared, bypass)), Odd())
        assert_close(*nets)

    def test_comparing_at_the_representation_is_the_gradient_there(self) -> None:
        ours, theirs = seeded(doubled(plain_net)), seeded(doubled(plain_net))
        train_with(ours, double_problem(declared_losses), Odd(), gradients="representation")
        used = SGD(theirs)
        inputs, labels = (t for t in double_data().tensors)
        for step in range(4):
            chosen = example_order.batch_indices(16, 8, step, 0, "all")
            used.zero_grad()
            made = theirs.body(inputs[chosen])
            leaf = made.detach().requires_grad_()
            losses = [cross_entropy(theirs.heads[t](leaf), labels[chosen, i]) for i, t in enumerate(TASKS)]
            rows = torch.stack([torch.autograd.grad(loss, leaf, retain_graph=True)[0].flatten() for loss in losses])
            torch.stack(losses).sum().backward()
            combined = torch.tensor(odd_weights((rows @ rows.T).numpy())) @ rows
            made.backward(combined.view_as(made))
            used.step()
        assert_close(ours, theirs)

    def test_nested_representations_can_be_compared_at_both(self) -> None:
        nets = [seeded(doubled(split_net)), seeded(doubled(split_net))]
        train_with(nets[0], double_problem(Nested((True, True))), Sum(), gradients="representation")
        train_with(nets[1], double_problem(Nested((False, False))), None)
        assert_close(*nets)

    def test_a_sum_at_the_representation_is_plain_joint_training(self) -> None:
        nets = [seeded(doubled(noisy_net)), seeded(doubled(noisy_net))]
        train_with(nets[0], double_problem(declared_losses), Sum(), gradients="representation")
        train_with(nets[1], double_problem(declared_losses), None)
        assert_close(*nets)

    @pytest.mark.parametrize("problem", [shared_problem(), domains_problem()], ids=["undeclared", "own inputs"])
    def test_comparing_there_needs_a_declared_one(self, problem: fm.Problem) -> None:
        with pytest.raises(fm.ProblemError, match=r"context\.shared"):
            train_with(seeded(plain_net), problem, MGDA(), gradients="representation")
