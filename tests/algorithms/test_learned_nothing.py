"""Runs that learned nothing end as failed, and say where."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import forkmerge as fm
from forkmerge.algorithms.export import export_run
from forkmerge.algorithms.saved_run import list_saved_runs, read_saved_run
from forkmerge.problem.example_order import batch_indices
from problems import TASKS, diverging_problem, evaluation, examples, fit, shared_losses


def problem_with(losses: Any, data: Any = None) -> fm.Problem:
    stream = fm.Stream(data or TensorDataset(*examples(16, 1)), losses, TASKS, 8)
    return fm.Problem("tgt", {"all": stream}, evaluation())


def no_losses(model: nn.Module, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
    return {}


def no_target(model: nn.Module, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
    return shared_losses(model, batch, [task for task in tasks if task != "tgt"], context)


def test_losses_that_are_always_empty_fail_after_the_first_round() -> None:
    message = r"nothing was learned in round 1, steps 0 to 4: the losses of branches 'alone', 'joint' were empty"
    with pytest.raises(fm.RunFailed, match=message):
        fit(fm.ForkMerge("mixed", interval=4), problem_with(no_losses))
    with pytest.raises(fm.RunFailed, match=r"nothing was learned in round 1"):
        fit(fm.SingleTask(refit=True), problem_with(no_losses))


def test_a_target_without_one_label_fails() -> None:
    message = "the target 'tgt' was never learned: none of the 12 steps had a loss of it"
    with pytest.raises(fm.RunFailed, match=message):
        fit(fm.ForkMerge("mixed", interval=4), problem_with(no_target))


def test_a_target_that_no_branch_trains_needs_no_label() -> None:
    run = fit(fm.ForkMerge({"aux": {"aux": 1.0}, "odd": {"odd": 1.0}}, interval=4), problem_with(no_target))
    assert run.coefficients


def test_a_target_that_a_short_run_never_drew_is_no_failure() -> None:
    stream = fm.Stream(TensorDataset(*examples(16, 1)), no_target, TASKS, 8)
    problem = fm.Problem("tgt", {"all": stream}, evaluation(), weights="sampling")
    assert fit(fm.Joint(), problem, steps=2).rounds
    with pytest.raises(fm.RunFailed, match="learned"):
        fit(fm.ForkMerge("mixed", interval=4), problem)  # whose target-only branch draws nothing else


def test_branches_that_are_all_faulty_in_every_round_fail_and_the_step_is_named() -> None:
    message = (
        r"every branch was faulty in all 3 rounds. In round 1, branch 'alone': its training loss of tgt is not finite "
        r"from step 1 on. The data of that step are finite: lower the learning rate"
    )
    with pytest.raises(fm.RunFailed, match=message):
        fit(fm.ForkMerge("mixed", interval=4), diverging_problem(1, "tgt"))


def test_a_bad_example_is_named_with_its_stream() -> None:
    inputs, labels = examples(16, 1)
    index = int(batch_indices(16, 8, 1, 0, "all")[3])  # of the second step: the first is tried before training
    inputs[index, 2] = torch.nan
    with pytest.raises(fm.RunFailed, match=rf"from step 1 on. Example {index} of stream 'all', which that step reads"):
        fit(fm.ForkMerge("mixed", interval=4), problem_with(shared_losses, TensorDataset(inputs, labels)))


def test_streams_that_the_faulty_branch_does_not_read_are_not_blamed() -> None:
    inputs, labels = examples(16, 1)

    def diverging(model: nn.Module, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
        losses = shared_losses(model, batch, tasks, context)
        return {task: loss * (torch.nan if context.step >= 1 else 1.0) for task, loss in losses.items()}

    def masked(model: nn.Module, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
        return shared_losses(model, [batch[0].nan_to_num(), batch[1]], tasks, context)

    missing = TensorDataset(torch.full_like(inputs, torch.nan), labels)
    streams = {
        "missing": fm.Stream(missing, masked, ["aux"], 8),
        "all": fm.Stream(TensorDataset(inputs, labels), diverging, ["tgt"], 8),
    }
    with pytest.raises(fm.RunFailed, match=r"branch 'alone': .* from step 1 on. The data of that step are finite"):
        fit(fm.ForkMerge("mixed", interval=4), fm.Problem("tgt", streams, evaluation()))


@pytest.mark.parametrize("workers", [1, 2])
def test_the_folder_says_that_it_failed_and_a_resume_says_it_again(tmp_path: Path, workers: int) -> None:
    options: dict[str, Any] = {"folder": tmp_path / "run", "workers": workers}
    with pytest.raises(fm.RunFailed) as first:
        fit(fm.ForkMerge("mixed", interval=4), diverging_problem(1, "tgt"), **options)
    saved = read_saved_run(tmp_path / "run")
    assert (saved.status, saved.reason, saved.run) == ("failed", str(first.value), None)
    assert [row["status"] for row in list_saved_runs(tmp_path)] == ["failed"]
    with pytest.raises(fm.StoreError, match=r"run has failed and has no model: nothing was learned"):
        export_run(tmp_path / "run", tmp_path / "out")
    with pytest.raises(fm.RunFailed) as second:
        fit(fm.ForkMerge("mixed", interval=4), diverging_problem(1, "tgt"), resume=True, **options)
    assert str(second.value) == str(first.value)
