"""Single steps of a method on quadratics whose gradients are known, and what it sees in a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import forkmerge as fm
from forkmerge.engine.training.branch import BranchResult, train_branch
from forkmerge.methods import LossMethod, Method, Setup, View
from problems import Point, quadratic_problem

# L_i = ½‖θ − c_i‖² at θ = 0, so the gradients are −c_i: (−1, 0), (−1, −1) and (1, −½).
CENTRES = {"m": (1.0, 0.0), "a": (1.0, 1.0), "b": (-1.0, 0.5)}


GRADIENTS = -np.array(list(CENTRES.values()))


def step(
    method: Method, centres: Any = None, *, steps: int = 1, lr: float = 1.0, goal: Any = (1.0, 0.0), **options: Any
) -> tuple[np.ndarray, dict[str, Any], BranchResult]:
    """Train on quadratics from θ = 0: the way gone, −d for one step of length 1, and the method's state."""
    training = fm.Training(optimizer=fm.OptimizerOf("SGD", lr=lr, **options), method=method)
    problem = quadratic_problem(CENTRES if centres is None else centres, goal)
    binding = training.binding(Point())
    mixture = fm.Mixture("b", dict.fromkeys(problem.tasks, 1.0))
    result = train_branch(binding, problem, mixture, binding.initial(), steps=steps, training=training, seed=0)
    binding.attach_weights(result.state)
    return binding.model.theta.detach().numpy(), result.state.method["own"], result


def view(losses: Any, at: int = 0, *, epoch: int = 2, present: Any = None, tasks: int | None = None) -> View:
    """What a method sees, made by hand."""
    size = tasks or len(losses)
    setup = Setup(tuple("mabcde"[:size]), 0, epoch, torch.device("cpu"))
    return View(setup, tuple(range(size) if present is None else present), np.array(losses), at, 0.1, at, None)


def by_losses(method: LossMethod, seen: View, state: dict[str, Any]) -> torch.Tensor:
    """What a loss method makes of the losses in a view."""
    return method.weights(torch.from_numpy(seen.losses), seen, state)


def first_moments(own: dict[str, Any]) -> np.ndarray:
    """Adam's first moments of a method's weights; after one step, a tenth of the gradient."""
    return own["weights_adam"][0].numpy()


def assert_first_direction(method: Method, direction: Any) -> None:
    """The first step of length 1 on the quadratics goes in a direction."""
    np.testing.assert_allclose(-step(method)[0], direction, rtol=1e-12, atol=1e-12)
