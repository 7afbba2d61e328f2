"""Extra passes that a method asks for around a step: their values, and that they leave no trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import forkmerge as fm
from _asserts import assert_same_bits
from forkmerge.engine.training.branch import train_branch
from forkmerge.engine.training.method_context import StepContext
from forkmerge.engine.training.step_loop import StepLoop
from forkmerge.methods import EW, Array, GramianMethod, LossMethod, MethodState, View
from gradient_twins import ONES, declared_losses, double_data, double_problem, doubled, train_with
from problems import SGD, TASKS, WIDTH, Net, examples, noisy_net, plain_net, seeded, shared_losses, shared_problem


@dataclass(frozen=True)
class Looker(LossMethod):
    """Asks for every kind of extra pass, and changes nothing."""

    def before_step(self, context: StepContext, state: MethodState) -> None:
        self._look(context, state)

    def after_step(self, context: StepContext, state: MethodState) -> None:
        self._look(context, state)

    def weights(self, losses: Tensor, view: View, state: MethodState) -> Tensor:
        self._look(view.context, state)
        return torch.ones_like(losses)

    def _look(self, context: StepContext, state: MethodState) -> None:
        ahead = context.gradient({0: 1.0, 1: -2.0})
        with context.moved(ahead, 0.5):
            context.losses("second")
            context.gradient({0: 1.0}, "validation")
        context.gramian("this")
        torch.rand(3)


class Counter(nn.Module):
    """A buffer that counts forward passes and changes what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return torch.tanh(inputs) * (1 + 0.01 * self.calls)


class TestStepContext:
    @pytest.mark.parametrize("net", [noisy_net, lambda: Net(nn.Sequential(nn.Linear(6, WIDTH), Counter()))])
    def test_extra_passes_leave_no_trace(self, net: Any) -> None:
        nets = [seeded(net), seeded(net)]
        for used, method in zip(nets, (EW(), Looker()), strict=True):
            train_with(used, shared_problem(), method)
        assert_same_bits(*nets)

    def test_the_gradient_is_that_of_the_weighted_losses(self) -> None:
        net, seen = seeded(doubled(plain_net)), []
        loop, context = self._context(net)
        gradients = context.gradient({0: 1.0, 2: 3.0})
        losses = shared_losses(net, loop.last_batches[0][1], TASKS, None)
        (losses["tgt"] + 3.0 * 0.5 * losses["odd"]).backward()
        for parameter, gradient in zip(context.parameters, gradients, strict=True):
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
        train_branch(binding, double_problem(shared_losses), mixture, state, steps=2, training=training, seed=0)
        binding.attach(state)
        binding.model.train()
        _, context = self._context(net, binding=binding, step=2)
        weights = {0: 1.0, 1: 1.0, 2: 2.0}  # the loop's own task weight of "odd" is a half
        step = context.at_own_rates(context.descent(context.gradient(weights)))
        with context.moved(step, -context.lr):
            virtual = [p.detach().clone() for p in context.parameters]
        train_branch(binding, double_problem(shared_losses), mixture, state, steps=1, training=training, seed=0)
        for parameter, value in zip(context.parameters, virtual, strict=True):
            torch.testing.assert_close(parameter.detach(), value)

    def test_every_parameter_group_moves_at_its_own_rate(self) -> None:
        net = seeded(plain_net)
        groups = [{"params": net.body.parameters(), "lr": 0.1}, {"params": net.heads.parameters(), "lr": 0.4}]
        binding = fm.Training(optimizer=lambda model: torch.optim.SGD(groups)).binding(net)
        binding.initial()
        _, context = self._context(net, binding=binding)
        rates = context.at_own_rates([torch.ones_like(p) for p in context.parameters])
        assert [float(r.mean()) for r in rates] == pytest.approx([1.0] * 2 + [4.0] * 6)

    def test_a_second_batch_is_another_one_of_the_training_data(self) -> None:
        net = seeded(doubled(plain_net))
        loop, context = self._context(net)
        second = context._readings("second")[0][1][0]
        assert second.shape == loop.last_batches[0][1][0].shape
        assert not torch.equal(second, loop.last_batches[0][1][0])
        assert torch.equal(second, context._readings("second")[0][1][0])

    def test_validation_examples_the_stream_cannot_read_are_an_error_that_says_what_to_do(self) -> None:
        held_out = fm.Evaluation(TensorDataset(torch.randn(4, 6)), lambda p, t: 0.0, lambda m, b: (b, b))
        stream = fm.Stream(TensorDataset(*examples(16, 1)), shared_losses, TASKS, 8)
        _, context = self._context(seeded(plain_net), fm.Problem("tgt", [stream], held_out))
        with pytest.raises(fm.ProblemError, match="as_training"):
            context.gradient({0: 1.0}, "validation")

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
        train_with(seeded(doubled(plain_net)), double_problem(losses, one), Compare(), steps=2)
        for gramian, crossed in seen:
            np.testing.assert_allclose(crossed, gramian, rtol=1e-9)

    def _context(
        self, net: nn.Module, problem: Any = None, binding: Any = None, step: int = 0
    ) -> tuple[StepLoop, StepContext]:
        training = fm.Training(optimizer=SGD, method=EW())
        used = binding or training.binding(net)
        if binding is None:
            used.initial()
        mixture = fm.Mixture("branch", {"tgt": 1.0, "aux": 1.0, "odd": 0.5})
        loop = StepLoop(used, problem or double_problem(shared_losses), mixture, training, 0, range(step, step + 1), {})
        streams = loop.problem.stream_map
        feeds = {name: loop._feed(name, stream, [frozenset(streams)]) for name, stream in streams.items()}
        loop.last_batches = loop._read(feeds, TASKS, step, 0)
        return loop, StepContext(loop, step)
