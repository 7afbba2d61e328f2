"""Corners where several features meet: each was once wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import forkmerge as fm
from forkmerge.engine.executors.serial import SerialExecutor
from forkmerge.engine.executors.worker_team import WorkerError
from forkmerge.engine.training.state import State
from problems import (
    SGD,
    TASKS,
    diverge_from,
    domains_problem,
    evaluation,
    examples,
    fit,
    minus_loss,
    plain_net,
    shared_losses,
    shared_problem,
)


class TwoArguments(Exception):
    """Cannot be rebuilt from its message, so it does not survive a pickle."""

    def __init__(self, text: str, where: str) -> None:
        super().__init__(text)


def raising(model: nn.Module, batch: Any, tasks: Any, context: fm.Context) -> dict[str, Tensor]:
    if context.step > 0:
        raise TwoArguments("label out of range", "stream t")
    return shared_losses(model, batch, tasks, context)


def test_an_exception_in_a_worker_arrives_with_its_traceback() -> None:
    stream = fm.Stream(TensorDataset(*examples(16, 1)), raising, TASKS, 8)
    problem = fm.Problem("tgt", stream, evaluation())
    with pytest.raises(WorkerError, match=r"(?s)Traceback.*TwoArguments: label out of range"):
        fm.ForkMerge().fit(problem, model=plain_net, optimizer=SGD, steps=4, workers=2, threads=1)


def test_a_diverged_target_only_branch_is_not_what_several_metrics_are_compared_with() -> None:
    stream = fm.Stream(TensorDataset(*examples(16, 1)), diverge_from(1, "tgt"), TASKS, 8)
    problem = fm.Problem("tgt", stream, evaluation(metrics={"accuracy": fm.accuracy, "score": minus_loss}))
    run = fit(fm.ForkMerge(interval=2), problem, steps=2)
    assert run.rounds[0].coefficients == {}
    assert any("compared with the fork point" in note for note in run.notes)


class Extra(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 1}

    def set_extra_state(self, state: Any) -> None:
        del state


def test_extra_state_is_refused_before_training() -> None:
    with pytest.raises(fm.ProblemError, match="keeps extra state"):
        fm.SingleTask().fit(shared_problem(), model=lambda: Extra(6, 3), optimizer=SGD, steps=1)


class Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["shared"]["count"] = self.state["shared"].get("count", 0) + 1
        super().step(closure)


def test_optimizer_state_that_belongs_to_no_parameter_is_refused_by_name() -> None:
    with pytest.raises(fm.ProblemError, match="Counting keeps state under 'shared'"):
        fm.SingleTask().fit(
            shared_problem(), model=plain_net, optimizer=lambda m: Counting(m.parameters(), lr=0.1), steps=1
        )


def test_recorded_losses_do_not_depend_on_where_training_pauses() -> None:
    def sparse(model: nn.Module, batch: Any, tasks: Any, context: fm.Context) -> dict[str, Tensor]:
        found = shared_losses(model, batch, tasks, context)
        return {task: loss for task, loss in found.items() if task == "tgt" or context.step % 3 == 0}

    stream = fm.Stream(TensorDataset(*examples(16, 1)), sparse, TASKS, 8)
    problem = fm.Problem("tgt", stream, evaluation())
    whole, pieces = (fit(fm.Joint(), problem, steps=10, checkpoint_every=every) for every in (None, 2))
    for one, other in zip(whole.rounds, pieces.rounds, strict=True):
        assert one.branches["joint"].losses == pytest.approx(other.branches["joint"].losses, rel=1e-5)


def test_pruning_waits_for_a_round_with_coefficients() -> None:
    calls = {"n": 0}

    def metric(predictions: Tensor, targets: Tensor) -> float:
        calls["n"] += 1
        return float("nan") if calls["n"] <= 5 else minus_loss(predictions, targets)

    problem = domains_problem(validation=evaluation(metrics=metric))
    run = fit(fm.ForkMerge("per_auxiliary", interval=2, prune_to=1), problem, steps=6)
    assert run.rounds[0].coefficients == {}
    first = next(r for r in run.rounds if r.coefficients)
    assert first.kept == ["alone"]


def test_ranking_runs_train_with_the_scaled_weights() -> None:
    seen: list[float] = []

    real = SerialExecutor.train

    def train(self: SerialExecutor, segments: Any, states: Any) -> Any:
        seen.extend(s.mixture.task_weights.get(task, 0) for s in segments for task in TASKS[1:])
        return real(self, segments, states)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SerialExecutor, "train", train)
        fit(fm.ForkMerge(fm.NestedTopK(probe_steps=1), interval=1, auxiliary_scale=0.5), domains_problem(), steps=1)
    assert {weight for weight in seen if weight} == {0.5}


def test_a_state_is_tested_for_finite_numbers_piece_by_piece() -> None:
    row = torch.zeros(3_000_000)
    state = State(0, {"float32": row})
    assert state.is_finite()
    row[-1] = float("nan")
    assert not state.is_finite()
