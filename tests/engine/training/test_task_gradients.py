"""The gradient core against explicit loops over tasks: every way to the same gradients gives the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import forkmerge as fm
from forkmerge.engine.training.branch import BranchResult, train_branch
from forkmerge.engine.training.method_context import StepContext
from forkmerge.engine.training.step_loop import StepLoop
from forkmerge.methods import EW, MGDA, Array, GramianMethod, LossMethod, MatrixMethod, MethodState, PCGrad, View
from forkmerge.problem import example_order, randomness
from problems import (
    SGD,
    TASKS,
    WIDTH,
    Bag,
    Net,
    bits,
    conv_net,
    domains_problem,
    evaluation,
    examples,
    frozen_net,
    noisy_net,
    plain_net,
    same_bits,
    seeded,
    shared_losses,
    shared_problem,
    tied_net,
)

ONES = dict.fromkeys(TASKS, 1.0)


@dataclass(frozen=True)
class Odd(GramianMethod):
    """Weights that depend on every entry of the Gramian in a way nobody could get right by chance."""

    def weights(self, gramian: Array, view: View, state: MethodState) -> Array:
        return odd_weights(gramian)


@dataclass(frozen=True)
class OddWithHeads(Odd):
    weighs_heads = True


@dataclass(frozen=True)
class OddMatrix(MatrixMethod):
    def direction(self, matrix: Tensor, view: View, state: MethodState) -> Tensor:
        weights = odd_weights((matrix @ matrix.T).double().numpy())
        return torch.tensor(weights, dtype=matrix.dtype) @ matrix


@dataclass(frozen=True)
class Sum(GramianMethod):
    def weights(self, gramian: Array, view: View, state: MethodState) -> Array:
        return np.ones(len(gramian))


def odd_weights(gramian: Array) -> Array:
    result: Array = np.tanh(gramian.sum(1)) + np.arange(1, len(gramian) + 1)
    return result


def doubled(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: make().double()


def double_data(count: int = 16, seed: int = 1) -> TensorDataset:
    inputs, labels = examples(count, seed)
    return TensorDataset(inputs.double(), labels)


def declared_losses(model: Any, batch: Any, tasks: Sequence[str], context: fm.Context) -> dict[str, Tensor]:
    inputs, labels = batch
    features = context.shared(model.body(inputs))
    return {task: cross_entropy(model.heads[task](features), labels[:, TASKS.index(task)]) for task in tasks}


def problem_with(losses: Any, data: TensorDataset | None = None, tasks: Sequence[str] = TASKS) -> fm.Problem:
    return fm.Problem("tgt", {"all": fm.Stream(data or double_data(), losses, tasks, 8)}, evaluation())


def train(
    net: nn.Module, problem: fm.Problem, method: Any, steps: int = 4, weights: Any = None, **options: Any
) -> BranchResult:
    training = fm.Training(**{"optimizer": SGD, "method": method, **options})
    binding = training.binding(net)
    mixture = fm.Mixture("branch", weights or ONES)
    result = train_branch(binding, problem, mixture, binding.initial(), steps=steps, training=training, seed=0)
    binding.attach_weights(result.state)
    return result


def explicit(
    net: Any,
    steps: int = 4,
    *,
    tasks: Sequence[str] = TASKS,
    weights: Any = None,
    accumulate: int = 1,
    heads: bool = False,
    streams: bool = False,
    present: Callable[[int], Sequence[str]] = lambda step: TASKS,
    shared: Sequence[str] = ("body",),
) -> nn.Module:
    """The same training as anybody would write it: one full backward pass per task and micro-batch, no library."""
    used = SGD(net)
    net.train()
    for step in range(steps):
        now = [task for task in tasks if task in present(step)]
        grads: dict[str, dict[str, Tensor]] = {}
        for task in now:
            net.zero_grad(set_to_none=True)
            for micro in range(accumulate):
                position = step * accumulate + micro
                index, name = TASKS.index(task), task if streams else "all"
                count, seed = (20 + 10 * index, 10 + index) if streams else (16, 1)
                inputs, labels = examples(count, seed)
                chosen = example_order.batch_indices(count, 8, position, 0, name)
                randomness.set_random_state(randomness.derive(0, name, "forward", position))
                logits = net.heads[task](net.body(inputs[chosen].to(next(net.parameters()).dtype)))
                loss = cross_entropy(logits, labels[chosen, index]) * (weights or ONES)[task] / accumulate
                loss.backward()
            grads[task] = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
        rows = torch.stack(
            [
                torch.cat([g[n].flatten() for n, p in net.named_parameters() if n.split(".")[0] in shared and n in g])
                for g in grads.values()
            ]
        )
        factors = odd_weights((rows @ rows.T).double().numpy())
        for n, p in net.named_parameters():
            is_shared = n.split(".")[0] in shared
            found = [(g[n], w) for g, w in zip(grads.values(), factors, strict=True) if n in g]
            p.grad = None
            if found:
                p.grad = sum(g * (float(w) if is_shared or heads else 1.0) for g, w in found)
        used.step()
    return net


def assert_close(one: nn.Module, other: nn.Module, tolerance: float = 1e-9) -> None:
    left, right = bits(one), bits(other)
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m)


class TestTwins:
    @pytest.mark.parametrize("net", [plain_net, tied_net, frozen_net])
    @pytest.mark.parametrize("losses", [shared_losses, declared_losses])
    def test_one_pass_per_head_equals_an_explicit_loop_over_tasks(self, net: Any, losses: Any) -> None:
        ours, theirs = seeded(doubled(net)), seeded(doubled(net))
        train(ours, problem_with(losses), Odd())
        assert_close(ours, explicit(theirs))

    def test_single_precision_agrees_to_a_millionth(self) -> None:
        ours, theirs = seeded(plain_net), seeded(plain_net)
        train(ours, problem_with(declared_losses, TensorDataset(*examples(16, 1))), Odd())
        assert_close(ours, explicit(theirs), 1e-6)

    @pytest.mark.parametrize("net", [noisy_net, conv_net])
    def test_declared_and_undeclared_representations_agree(self, net: Any) -> None:
        nets = [seeded(doubled(net)), seeded(doubled(net))]
        for used, losses in zip(nets, (shared_losses, declared_losses), strict=True):
            train(used, problem_with(losses), Odd())
        assert_close(*nets)

    def test_channels_last_weights_agree(self) -> None:
        nets = [seeded(doubled(conv_net)), seeded(doubled(conv_net))]
        train(nets[0], problem_with(declared_losses), Odd())
        train(nets[1], problem_with(declared_losses), Odd(), channels_last=True)
        assert_close(*nets)

    @pytest.mark.parametrize("losses", [shared_losses, declared_losses])
    def test_micro_batches_add_up(self, losses: Any) -> None:
        ours, theirs = seeded(doubled(plain_net)), seeded(doubled(plain_net))
        train(ours, problem_with(losses), Odd(), accumulate=2)
        assert_close(ours, explicit(theirs, accumulate=2))

    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_tasks_with_their_own_inputs_agree(self, accumulate: int) -> None:
        data = {task: double_data(20 + 10 * i, 10 + i) for i, task in enumerate(TASKS)}
        ours, theirs = seeded(doubled(plain_net)), seeded(doubled(plain_net))
        train(ours, domains_problem(dict(data)), Odd(), accumulate=accumulate)
        assert_close(ours, explicit(theirs, streams=True, accumulate=accumulate))

    def test_task_weights_scale_losses_before_gradients_are_compared(self) -> None:
        weights = {"tgt": 1.0, "aux": 0.3, "odd": 2.0}
        ours, theirs = seeded(doubled(plain_net)), seeded(doubled(plain_net))
        train(ours, problem_with(declared_losses), Odd(), weights=weights)
        assert_close(ours, explicit(theirs, weights=weights))

    def test_heads_are_weighted_only_if_the_method_says_so(self) -> None:
        ours, theirs = seeded(doubled(plain_net)), seeded(doubled(plain_net))
        train(ours, problem_with(declared_losses), OddWithHeads())
        assert_close(ours, explicit(theirs, heads=True))

    def test_a_direction_from_the_matrix_equals_one_from_the_gramian(self) -> None:
        nets = [seeded(doubled(plain_net)), seeded(doubled(plain_net))]
        train(nets[0], problem_with(declared_losses), Odd())
        train(nets[1], problem_with(declared_losses), OddMatrix())
        assert_close(*nets)

    def test_sparse_gradients_of_an_embedding_are_combined_like_dense_ones(self) -> None:
        nets = [seeded(lambda s=sparse: Net(Bag(s))) for sparse in (False, True)]
        plain = fm.OptimizerOf("SGD", lr=0.1)
        for net in nets:
            train(net, problem_with(shared_losses, TensorDataset(*examples(16, 1))), Odd(), optimizer=plain)
        assert_close(*nets, tolerance=1e-6)


def split_net(dtypes: bool = False) -> nn.Module:
    """Two encoders, the second on top of the first; optionally of another dtype."""
    net = Net(nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh()))
    net.upper = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return net


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
        found = {}
        for task in tasks:
            features = low + high if task == "aux" else high
            if task == "odd" and self.bypass:
                features = features + raw
            found[task] = cross_entropy(model.heads[task](features), labels[:, TASKS.index(task)])
        return found


class TestRepresentations:
    @pytest.mark.parametrize("declared", [(True, False), (False, True), (True, True)])
    @pytest.mark.parametrize("bypass", [False, True])
    def test_any_declaration_gives_the_gradients_of_none(self, declared: Any, bypass: bool) -> None:
        nets = [seeded(doubled(split_net)), seeded(doubled(split_net))]
        train(nets[0], problem_with(Nested((False, False), bypass)), Odd())
        train(nets[1], problem_with(Nested(declared, bypass)), Odd())
        assert_close(*nets)

    def test_comparing_at_the_representation_is_the_gradient_there(self) -> None:
        ours, theirs = seeded(doubled(plain_net)), seeded(doubled(plain_net))
        train(ours, problem_with(declared_losses), Odd(), gradients="representation")
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
        train(nets[0], problem_with(Nested((True, True))), Sum(), gradients="representation")
        train(nets[1], problem_with(Nested((False, False))), None)
        assert_close(*nets)

    def test_a_sum_at_the_representation_is_plain_joint_training(self) -> None:
        nets = [seeded(doubled(noisy_net)), seeded(doubled(noisy_net))]
        train(nets[0], problem_with(declared_losses), Sum(), gradients="representation")
        train(nets[1], problem_with(declared_losses), None)
        assert_close(*nets)

    @pytest.mark.parametrize("problem", [shared_problem(), domains_problem()], ids=["undeclared", "own inputs"])
    def test_comparing_there_needs_a_declared_one(self, problem: fm.Problem) -> None:
        with pytest.raises(fm.ProblemError, match=r"context\.shared"):
            train(seeded(plain_net), problem, MGDA(), gradients="representation")


class TestSharedParameters:
    def test_labels_that_come_and_go_do_not_change_what_is_shared(self) -> None:
        """From the first step that shows two tasks, the body is shared, also where one has a label."""

        def present(step: int) -> Sequence[str]:
            return (TASKS, ("aux",), ("tgt", "odd"), TASKS, ("tgt",))[step]

        def losses(model: Any, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
            return declared_losses(model, batch, [t for t in tasks if t in present(context.step)], context)

        ours, theirs = seeded(doubled(plain_net)), seeded(doubled(plain_net))
        result = train(ours, problem_with(losses), Odd(), steps=5)
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
        train(ours, problem_with(losses), Sum(), steps=5, optimizer=used)
        train(theirs, problem_with(losses), None, steps=5, optimizer=used)
        assert_close(ours, theirs)

    def test_a_step_without_shared_parameters_trains_the_heads(self) -> None:
        def losses(model: Any, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
            inputs, labels = batch
            features = model.body(inputs).detach()
            return {t: cross_entropy(model.heads[t](features), labels[:, TASKS.index(t)]) for t in tasks}

        for method in (Odd(), OddMatrix()):
            net = seeded(plain_net)
            before = bits(net)
            result = train(net, problem_with(losses, TensorDataset(*examples(16, 1))), method)
            assert torch.equal(before["body.0.weight"], bits(net)["body.0.weight"])
            assert not torch.equal(before["heads.tgt.weight"], bits(net)["heads.tgt.weight"])
            assert not result.reports

    def test_a_loss_that_is_a_constant_counts_as_zero(self) -> None:
        def losses(model: Any, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
            found = declared_losses(model, batch, tasks, context)
            return {**found, "odd": torch.tensor(0.5)} if context.step == 2 else found

        result = train(seeded(plain_net), problem_with(losses, TensorDataset(*examples(16, 1))), Odd())
        assert result.reports == {"zero": {"odd": 1}}

    def test_a_sum_over_tasks_is_plain_joint_training(self) -> None:
        for problem in (problem_with(declared_losses), problem_with(shared_losses)):
            nets = [seeded(doubled(noisy_net)) for _ in range(3)]
            for net, method in zip(nets, (None, Sum(), EW()), strict=True):
                train(net, problem, method)
            assert_close(nets[0], nets[1])
            assert_close(nets[0], nets[2])

    def test_a_task_whose_loss_comes_from_two_streams_is_their_sum(self) -> None:
        def half(model: Any, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
            return {task: 0.5 * loss for task, loss in shared_losses(model, batch, tasks, context).items()}

        # One example, so that both streams read the same in spite of their own orders.
        one = TensorDataset(*(t[:1] for t in double_data().tensors))
        twice = {name: fm.Stream(one, half, TASKS, 8) for name in ("first", "second")}
        nets = [seeded(doubled(plain_net)), seeded(doubled(plain_net))]
        whole = train(nets[0], problem_with(shared_losses, one), Odd())
        halves = train(nets[1], fm.Problem("tgt", twice, evaluation()), Odd())
        assert_close(*nets)
        assert whole.losses == pytest.approx(halves.losses)


@dataclass(frozen=True)
class Looker(LossMethod):
    """Asks for every kind of extra pass, and changes nothing."""

    def before_step(self, probe: StepContext, state: MethodState) -> None:
        self._look(probe, state)

    def after_step(self, probe: StepContext, state: MethodState) -> None:
        self._look(probe, state)

    def weights(self, losses: Tensor, view: View, state: MethodState) -> Tensor:
        self._look(view.context, state)
        return torch.ones_like(losses)

    def _look(self, probe: StepContext, state: MethodState) -> None:
        ahead = probe.gradient({0: 1.0, 1: -2.0})
        with probe.moved(ahead, 0.5):
            probe.losses("second")
            probe.gradient({0: 1.0}, "validation")
        probe.gramian("this")
        torch.rand(3)


class TestProbe:
    @pytest.mark.parametrize("net", [noisy_net, lambda: Net(nn.Sequential(nn.Linear(6, WIDTH), Counter()))])
    def test_extra_passes_leave_no_trace(self, net: Any) -> None:
        nets = [seeded(net), seeded(net)]
        for used, method in zip(nets, (EW(), Looker()), strict=True):
            train(used, shared_problem(), method)
        assert same_bits(*nets)

    def test_the_gradient_is_that_of_the_weighted_losses(self) -> None:
        net, seen = seeded(doubled(plain_net)), []
        loop, probe = self._probe(net)
        found = probe.gradient({0: 1.0, 2: 3.0})
        losses = shared_losses(net, loop.last_batches[0][1], TASKS, None)
        (losses["tgt"] + 3.0 * 0.5 * losses["odd"]).backward()
        for parameter, gradient in zip(probe.parameters, found, strict=True):
            if parameter.grad is None:
                assert gradient is None
                continue
            seen.append(gradient)
            torch.testing.assert_close(gradient, parameter.grad)
        assert seen

    def test_the_virtual_step_is_the_optimizers(self) -> None:
        """θ − α(m + g + wd·θ) with the momentum buffer of the steps before is SGD's next step."""
        net = seeded(doubled(plain_net))
        training = fm.Training(optimizer=SGD)
        binding = training.binding(net)
        state = binding.initial()
        mixture = fm.Mixture("branch", ONES)
        train_branch(binding, problem_with(shared_losses), mixture, state, steps=2, training=training, seed=0)
        binding.attach(state)
        binding.model.train()
        _, probe = self._probe(net, binding=binding, step=2)
        weights = {0: 1.0, 1: 1.0, 2: 2.0}  # the loop's own task weight of "odd" is a half
        step = probe.at_own_rates(probe.descent(probe.gradient(weights)))
        with probe.moved(step, -probe.lr):
            virtual = [p.detach().clone() for p in probe.parameters]
        train_branch(binding, problem_with(shared_losses), mixture, state, steps=1, training=training, seed=0)
        for parameter, value in zip(probe.parameters, virtual, strict=True):
            torch.testing.assert_close(parameter.detach(), value)

    def test_every_parameter_group_moves_at_its_own_rate(self) -> None:
        net = seeded(plain_net)
        groups = [{"params": net.body.parameters(), "lr": 0.1}, {"params": net.heads.parameters(), "lr": 0.4}]
        binding = fm.Training(optimizer=lambda model: torch.optim.SGD(groups)).binding(net)
        binding.initial()
        _, probe = self._probe(net, binding=binding)
        rates = probe.at_own_rates([torch.ones_like(p) for p in probe.parameters])
        assert [float(r.mean()) for r in rates] == pytest.approx([1.0] * 2 + [4.0] * 6)

    def test_a_second_batch_is_another_one_of_the_training_data(self) -> None:
        net = seeded(doubled(plain_net))
        loop, probe = self._probe(net)
        second = probe._readings("second")[0][1][0]
        assert second.shape == loop.last_batches[0][1][0].shape
        assert not torch.equal(second, loop.last_batches[0][1][0])
        assert torch.equal(second, probe._readings("second")[0][1][0])

    def test_validation_examples_the_stream_cannot_read_are_an_error_that_says_what_to_do(self) -> None:
        held_out = fm.Evaluation(TensorDataset(torch.randn(4, 6)), lambda p, t: 0.0, lambda m, b: (b, b))
        stream = fm.Stream(TensorDataset(*examples(16, 1)), shared_losses, TASKS, 8)
        _, probe = self._probe(seeded(plain_net), fm.Problem("tgt", [stream], held_out))
        with pytest.raises(fm.ProblemError, match="as_training"):
            probe.gradient({0: 1.0}, "validation")

    @pytest.mark.parametrize("losses", [shared_losses, declared_losses])
    def test_products_with_the_steps_own_gradients(self, losses: Any) -> None:
        """Of one example there is no other batch, so the products of two batches are the Gramian."""
        seen: list[tuple[Array, Array]] = []

        @dataclass(frozen=True)
        class Compare(GramianMethod):
            def weights(self, gramian: Array, view: View, state: MethodState) -> Array:
                second = view.context.gradient({1: 2.0}, "second")
                products = view.context.products(second)
                assert products is not None
                seen.append((gramian, view.context.cross_gramian(view.present)))
                np.testing.assert_allclose(products, 2 * gramian[:, 1], rtol=1e-9)
                return np.ones(len(gramian))

        one = TensorDataset(*(t[:1] for t in double_data().tensors))
        train(seeded(doubled(plain_net)), problem_with(losses, one), Compare(), steps=2)
        for gramian, crossed in seen:
            np.testing.assert_allclose(crossed, gramian, rtol=1e-9)

    def _probe(
        self, net: nn.Module, problem: Any = None, binding: Any = None, step: int = 0
    ) -> tuple[StepLoop, StepContext]:
        training = fm.Training(optimizer=SGD, method=EW())
        used = binding or training.binding(net)
        if binding is None:
            used.initial()
        mixture = fm.Mixture("branch", {"tgt": 1.0, "aux": 1.0, "odd": 0.5})
        loop = StepLoop(used, problem or problem_with(shared_losses), mixture, training, 0, range(step, step + 1), {})
        feeds = {name: loop._feed(name, stream, [TASKS]) for name, stream in loop.problem.stream_map.items()}
        loop.last_batches = loop._read(feeds, TASKS, step, 0)
        return loop, StepContext(loop, step)


class Counter(nn.Module):
    """A buffer that counts forward passes and changes what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return torch.tanh(inputs) * (1 + 0.01 * self.calls)


class TestBadGradients:
    @pytest.mark.parametrize("method", [Odd(), OddMatrix(), EW(), PCGrad()], ids=lambda m: type(m).__name__)
    def test_a_bad_task_is_trained_on_as_if_it_had_no_label(self, method: Any) -> None:
        def bad(model: Any, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
            found = declared_losses(model, batch, tasks, context)
            return {t: loss * torch.nan if t == "aux" and context.step > 0 else loss for t, loss in found.items()}

        def missing(model: Any, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
            return declared_losses(model, batch, [t for t in tasks if t != "aux" or context.step == 0], context)

        nets = [seeded(doubled(plain_net)), seeded(doubled(plain_net))]
        results = [train(net, problem_with(losses), method) for net, losses in zip(nets, (bad, missing), strict=True)]
        assert results[0].reports == {"not finite": {"aux": 3}}
        assert results[1].reports == {}
        # The head of the bad task keeps its momentum, and gets no new gradient, in both.
        assert_close(*nets)

    def test_a_gradient_that_is_bad_in_the_head_only_is_found(self) -> None:
        def losses(model: Any, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
            found = declared_losses(model, batch, tasks, context)
            bias = model.heads["odd"].bias
            infinite = (bias - bias.detach()).sum().sqrt()  # 0, with an infinite slope
            return {task: loss + infinite if task == "odd" else loss for task, loss in found.items()}

        for method in (Odd(), EW()):
            net = seeded(plain_net)
            result = train(net, problem_with(losses, TensorDataset(*examples(16, 1))), method)
            assert result.reports == {"not finite": {"odd": 4}}
            assert result.state.is_finite()

    @pytest.mark.parametrize("kind", ["losses", "gramian", "matrix"])
    def test_a_method_whose_answer_is_not_finite_is_replaced_by_the_sum_and_reported(self, kind: str) -> None:
        @dataclass(frozen=True)
        class BadLosses(LossMethod):
            def weights(self, losses: Tensor, view: View, state: MethodState) -> Tensor:
                return losses * torch.nan

        @dataclass(frozen=True)
        class BadGramian(GramianMethod):
            def weights(self, gramian: Array, view: View, state: MethodState) -> Array:
                return np.full(len(gramian), np.inf)

        @dataclass(frozen=True)
        class BadMatrix(MatrixMethod):
            def direction(self, matrix: Tensor, view: View, state: MethodState) -> Tensor:
                return matrix[0] * torch.nan

        method = {"losses": BadLosses(), "gramian": BadGramian(), "matrix": BadMatrix()}[kind]
        nets = [seeded(doubled(plain_net)), seeded(doubled(plain_net))]
        result = train(nets[0], problem_with(declared_losses), method)
        train(nets[1], problem_with(declared_losses), None)
        assert_close(*nets)
        assert list(result.reports.values()) == [{"all tasks": 4}]

    def test_a_wrong_number_of_weights_is_refused(self) -> None:
        @dataclass(frozen=True)
        class Short(GramianMethod):
            def weights(self, gramian: Array, view: View, state: MethodState) -> Array:
                return np.ones(2)

        with pytest.raises(fm.ProblemError, match=r"Short must return one weight per task of the step, \[3\]"):
            train(seeded(plain_net), shared_problem(), Short())

    def test_an_overflow_under_a_scaler_is_the_scalers_to_handle(self) -> None:
        """It skips the step and lowers its scale, as in plain training; the task is not blamed."""
        net = seeded(plain_net)
        training = fm.Training(optimizer=SGD, method=Odd(), precision="float16")
        binding = training.binding(net)
        state = binding.initial()
        binding.scaler.load_state_dict({**binding.scaler.state_dict(), "scale": 2.0**126})
        binding.capture(state)
        before = state.rows["float32"].clone()
        data = TensorDataset(*examples(16, 1))
        result = train_branch(
            binding,
            problem_with(declared_losses, data),
            fm.Mixture("b", ONES),
            state,
            steps=1,
            training=training,
            seed=0,
        )
        assert torch.equal(before, result.state.rows["float32"])
        assert result.state.scaler["scale"] == 2.0**125
        assert result.reports == {}

    def test_losses_that_a_method_sees_are_not_scaled(self) -> None:
        seen: dict[str, list[float]] = {}

        @dataclass(frozen=True)
        class Look(GramianMethod):
            name: str

            def weights(self, gramian: Array, view: View, state: MethodState) -> Array:
                seen[self.name] = [*view.losses, *gramian.flatten()]
                return np.ones(len(gramian))

        data = TensorDataset(*examples(16, 1))
        train(seeded(plain_net), problem_with(declared_losses, data), Look("float32"), steps=1)
        train(seeded(plain_net), problem_with(declared_losses, data), Look("float16"), steps=1, precision="float16")
        assert seen["float16"] == pytest.approx(seen["float32"], rel=0.05, abs=1e-3)
