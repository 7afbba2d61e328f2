"""An error of the user's own code keeps its type and traceback, and says where it came from."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import forkmerge as fm
from forkmerge.errors import WorkerError, facts_of, user_traceback
from forkmerge.problem.error_facts import describe
from problems import examples, fit, plain_net, predict_target, problem_with, seeded, shared_losses, shared_problem


class Pairs(Dataset[Any]):
    """Examples read one by one, of which one cannot be read."""

    def __init__(self, bad: int | None = None) -> None:
        self.inputs, self.labels = examples(16, 1)
        self.bad = bad

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise OSError("the file is gone")
        return self.inputs[index], self.labels[index]


def failing(step: int) -> Any:
    def losses(model: Any, batch: Any, tasks: Any, context: fm.Context) -> Any:
        if context.step == step:
            raise KeyError("labels")
        return shared_losses(model, batch, tasks, context)

    return losses


def facts(error: type[Exception], problem: fm.Problem, **options: Any) -> str:
    with pytest.raises(error) as caught:
        fit(fm.SingleTask(), problem, **options)
    return "\n".join(facts_of(caught.value))


def test_losses_that_fail_while_training() -> None:
    told = facts(KeyError, problem_with(failing(2)), steps=4)
    assert "in the losses of stream 'all' (tasks tgt); examples " in told
    assert "the batch is [float32[8, 6], int64[8, 3]]" in told
    assert "at step 2 of branch" in told


def test_losses_that_fail_on_the_first_batch() -> None:
    told = facts(KeyError, problem_with(failing(0)))
    assert "the losses of stream 'all' (tasks tgt) on the first batch, before training" in told


def test_a_data_set_that_cannot_read_an_example() -> None:
    streams = {"all": fm.Stream(Pairs(bad=5), shared_losses, ("tgt", "aux"), 4)}
    told = facts(OSError, fm.Problem("tgt", streams, shared_problem().target_validation), steps=4)
    assert "in the data set of stream 'all', example 5" in told


def test_a_data_set_of_an_evaluation_that_cannot_read_an_example() -> None:
    validation = fm.Evaluation(Pairs(bad=3), fm.accuracy, predict_target)
    told = facts(OSError, shared_problem(validation=validation))
    assert "in the data set of an evaluation, example 3" in told
    assert "validating 'tgt', before training" in told


def test_examples_that_do_not_make_a_batch() -> None:
    def collate(items: Any) -> Any:
        raise ValueError("ragged")

    validation = fm.Evaluation(Pairs(), fm.accuracy, predict_target, batch_size=4, collate_fn=collate)
    told = facts(ValueError, shared_problem(validation=validation))
    assert "in making a batch of an evaluation; examples 0, 1, 2, 3; the batch is [(float32[6], int64[3])," in told


def test_predict_that_fails() -> None:
    def predict(model: Any, batch: Any) -> Any:
        raise IndexError("head")

    validation = fm.Evaluation(TensorDataset(*examples(24, 2)), fm.accuracy, predict)
    told = facts(IndexError, shared_problem(validation=validation))
    assert (
        "in predict of an evaluation; examples 0, 1, 2, 3, 4, 5, 6, 7, … (24 in all); the batch is [float32[24" in told
    )


def test_a_metric_that_fails() -> None:
    def broken(predictions: Any, targets: Any) -> float:
        raise ZeroDivisionError("no positives")

    told = facts(ZeroDivisionError, shared_problem(metrics={"m": broken}))
    assert "in metric 'm' of an evaluation; predictions are float32[24, 3]; targets are int64[24]" in told


def test_the_traceback_is_the_users_alone() -> None:
    with pytest.raises(KeyError) as caught:
        fit(fm.SingleTask(), problem_with(failing(2)), steps=4)
    shown = user_traceback(caught.value)
    assert shown is not None
    assert "src/forkmerge/" not in shown
    assert "test_error_facts.py" in shown
    assert shown.count("forkmerge: in the losses of stream 'all'") == 1


def test_an_error_of_our_own_has_no_such_traceback() -> None:
    with pytest.raises(KeyError) as caught:
        seeded(plain_net).heads["none"]  # type: ignore[index]
    assert user_traceback(caught.value.with_traceback(caught.tb.tb_next)) is None  # without this test's own frame


def test_batches_of_any_form_are_described() -> None:
    many = [torch.zeros(2)] * 9
    assert describe(many) == "9 × float32[2]"
    assert describe(({"a": 1}, None)) == "({a: int}, NoneType)"
    assert describe([torch.zeros(1), *range(9)]) == "[float32[1], int, int, int, int, int, int, int, …]"


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, r"losses must return {task: loss}, got NoneType"),
        ({"tgt": 1.0}, "the loss of task 'tgt' must be a scalar tensor, got float"),
        ({"tgt": torch.zeros(3)}, r"the loss of task 'tgt' must be a scalar tensor, got shape \[3\]"),
    ],
)
def test_losses_that_change_their_form_later_are_shown_without_our_frames(result: Any, message: str) -> None:
    def losses(model: Any, batch: Any, tasks: Any, context: fm.Context) -> Any:
        return result if context.step == 3 else shared_losses(model, batch, tasks, context)

    with pytest.raises(TypeError, match=message) as caught:
        fit(fm.SingleTask(), problem_with(losses), steps=6)
    shown = user_traceback(caught.value.with_traceback(caught.tb.tb_next.tb_next))  # without this test's own frames
    assert shown is not None
    assert "Traceback" not in shown
    assert "forkmerge: in the losses of stream 'all' (tasks tgt); examples" in shown
    assert "forkmerge: at step 3 of branch" in shown


class Ragged(Pairs):
    """Gives examples of different length from the second epoch on."""

    reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        inputs, labels = super().__getitem__(index)
        return (inputs[: self.reads % 3], labels) if self.reads > 30 else (inputs, labels)


def test_what_torch_says_of_the_users_examples_is_shown_without_our_frames() -> None:
    streams = {"all": fm.Stream(Ragged(), shared_losses, ("tgt", "aux"), 4)}
    with pytest.raises(RuntimeError, match="equal size") as caught:
        fit(None, fm.Problem("tgt", streams, shared_problem().target_validation), steps=12)
    shown = user_traceback(caught.value.with_traceback(caught.tb.tb_next.tb_next))
    assert shown is not None
    assert shown.startswith("RuntimeError: stack expects each tensor to be equal size")
    assert "forkmerge: in making a batch of stream 'all'; examples" in shown


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_while_validating_says_when(workers: int, tmp_path: Path) -> None:
    with pytest.raises((ZeroDivisionError, WorkerError)) as caught:
        fit(None, shared_problem(metrics=Late(tmp_path / "count")), workers=workers)
    shown = user_traceback(caught.value)
    assert shown is not None
    assert "ZeroDivisionError: no positives" in shown
    assert "forkmerge: validating 'tgt' in round 1, after step 4" in shown
    assert "in metric 'late'" in shown


class Late:
    """A metric that fails the second time, in whatever process."""

    __name__ = "late"

    def __init__(self, file: Path) -> None:
        self.file = file

    def __call__(self, predictions: Any, targets: Any) -> float:
        if self.file.exists():
            raise ZeroDivisionError("no positives")
        self.file.write_text("once")
        return 0.0


def test_frames_before_the_users_first_are_left_out() -> None:
    def inside() -> None:
        raise KeyError("theirs")

    with pytest.raises(KeyError) as caught:
        contextlib.ExitStack().__enter__().enter_context(contextlib.contextmanager(inside)())  # type: ignore[arg-type]
    shown = user_traceback(caught.value.with_traceback(caught.tb.tb_next))
    assert shown is not None
    assert "contextlib.py" not in shown
    assert "inside" in shown
