"""Training of one branch on the problems of the tests, at once or in segments with everything stored in between."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

import forkmerge as fm
from _asserts import bits
from forkmerge.engine.executors.state_bytes import from_wire, to_wire
from forkmerge.engine.training.branch import BranchResult, train_branch
from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.problem import randomness
from problems import SGD, shared_problem

WEIGHTS = {"tgt": 1.0, "aux": 0.5}


def train(
    net: nn.Module,
    problem: fm.Problem | None = None,
    weights: dict[str, float] | None = None,
    steps: int = 6,
    seed: int = 0,
    **options: Any,
) -> BranchResult:
    """Train a net in place for some steps."""
    training = fm.Training(**{"optimizer": SGD, **options})
    binding = training.binding(net)
    mixture = fm.Mixture("branch", weights or WEIGHTS)
    result = train_branch(
        binding, problem or shared_problem(), mixture, binding.initial(), steps=steps, training=training, seed=seed
    )
    binding.attach_weights(result.state)
    return result


def resumed_bits(
    net: Any, optimizer: Any, scheduler: Any = None, cuts: Sequence[int] = (0, 1, 4, 5, 10), **options: Any
) -> dict[str, Tensor]:
    """The bits after training in segments, each on a new module and optimizer, the state passing through bytes."""
    training = fm.Training(optimizer, scheduler, **options)

    def new_binding() -> ModelBinding:
        with randomness.random_state_kept():
            randomness.set_random_state(randomness.derive(0, "model"))
            return training.binding(net())

    binding = new_binding()
    state = binding.initial()
    for start, end in pairwise(cuts):
        binding = new_binding()
        state = binding.place(from_wire(to_wire(state)))
        mixture = fm.Mixture("branch", WEIGHTS)
        train_branch(binding, shared_problem(), mixture, state, steps=end - start, training=training, seed=0)
    binding.attach_weights(state)
    return bits(binding.model)
