"""Merging branches after one step is one step on the weighted gradient (Eq. 7, 8), whatever trains and merges them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor, nn

import forkmerge as fm
from forkmerge.engine.merging.blend import blend_weights
from forkmerge.engine.training.branch import train_branch
from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.engine.training.state import State
from problems import ADAM, SGD, TASKS, evaluation, plain_net, seeded, shared_losses, shared_problem

SEED = 3


def one_head(model: nn.Module, batch: Any, tasks: Sequence[str], context: fm.Context) -> dict[str, Tensor]:
    """All tasks on one head, so that every branch trains every parameter."""
    logits, labels = model.heads["tgt"](model.body(batch[0].double())), batch[1]
    return {task: nn.functional.cross_entropy(logits, labels[:, TASKS.index(task)]) for task in tasks}


def own_heads(model: nn.Module, batch: Any, tasks: Sequence[str], context: fm.Context) -> dict[str, Tensor]:
    return shared_losses(model, (batch[0].double(), batch[1]), tasks, context)


def train(
    binding: ModelBinding,
    state: State,
    weights: dict[str, float],
    steps: int,
    training: fm.Training,
    problem: fm.Problem,
) -> State:
    mixture = fm.Mixture("branch", weights)
    return train_branch(binding, problem, mixture, state, steps=steps, training=training, seed=SEED).state


def one_step_apart(
    optimizer: fm.OptimizerOf, auxiliaries: dict[str, float], losses: Any = one_head
) -> dict[str, float]:
    """Distance between a merge after Δt = 1 and one step on g_tgt + Σ λ_k g_k, by parameter, in units of that step.

    The branches start from a common state with momentum in its buffers.
    """
    training = fm.Training(optimizer)
    stream = fm.Stream(shared_problem().stream_map["all"].dataset, losses, TASKS, 8)
    problem = fm.Problem("tgt", {"all": stream}, evaluation())
    binding = training.binding(seeded(plain_net).double())
    start = train(binding, binding.initial(), {"tgt": 1.0, "aux": 1.0, "odd": 0.5}, 5, training, problem)
    plans: list[dict[str, float]] = [{"tgt": 1.0}, *({"tgt": 1.0, task: 1.0} for task in auxiliaries)]
    branches = [train(binding, start.clone(), plan, 1, training, problem) for plan in plans]
    coefficients = (1 - sum(auxiliaries.values()), *auxiliaries.values())
    merged = blend_weights(binding, branches, coefficients, start.weights())
    direct = train(binding, start.clone(), {"tgt": 1.0, **auxiliaries}, 1, training, problem)
    before, after, blended = (
        {part.name: part.view(state.rows["float64"]) for part in binding.layout.slices}
        for state in (start, direct, merged)
    )
    length = max((after[name] - before[name]).norm().item() for name in after)
    assert length > 1e-3
    return {name: (blended[name] - after[name]).norm().item() / length for name in after}


class TestOneStepIdentity:
    """Δt = 1 and equal batches: merging branches is one step on the weighted gradient (Eq. 7, 8)."""

    @pytest.mark.parametrize("weight", [0.2, 0.5, 0.9])
    def test_merge_of_two_sgd_branches_is_one_step_with_the_coefficient_as_task_weight(self, weight: float) -> None:
        assert max(one_step_apart(SGD, {"aux": weight}).values()) < 1e-12

    def test_merge_of_k_plus_one_sgd_branches_is_one_step_with_all_coefficients_as_task_weights(self) -> None:
        assert max(one_step_apart(SGD, {"aux": 0.3, "odd": 0.5}).values()) < 1e-12

    def test_nesterov_momentum_keeps_the_identity(self) -> None:
        nesterov = fm.OptimizerOf("SGD", lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2)
        assert max(one_step_apart(nesterov, {"aux": 0.4}).values()) < 1e-12

    def test_with_heads_of_their_own_it_holds_for_all_that_every_branch_trains(self) -> None:
        # The target-only branch leaves another task's head alone, its momentum and weight decay included.
        apart = one_step_apart(SGD, {"aux": 0.3, "odd": 0.5}, own_heads)
        trained = [name for name in apart if name.startswith(("body", "heads.tgt"))]
        assert len(trained) == 4
        assert max(apart[name] for name in trained) < 1e-12

    def test_with_heads_of_their_own_and_neither_momentum_nor_decay_it_holds_for_everything(self) -> None:
        plain = fm.OptimizerOf("SGD", lr=0.1)
        assert max(one_step_apart(plain, {"aux": 0.3, "odd": 0.5}, own_heads).values()) < 1e-12

    @pytest.mark.parametrize("auxiliaries", [{"aux": 0.4}, {"aux": 0.3, "odd": 0.5}])
    def test_adam_does_not_have_the_identity(self, auxiliaries: dict[str, float]) -> None:
        assert max(one_step_apart(ADAM, auxiliaries).values()) > 1e-3
