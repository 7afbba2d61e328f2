"""A callback's errors are the user's own, and said to be."""

from __future__ import annotations

from pathlib import Path

import pytest

import forkmerge as fm
from _asserts import assert_same_run
from forkmerge.algorithms.events import Event, RoundFinished
from forkmerge.errors import facts_of, user_traceback
from problems import fit


def careless(event: Event) -> None:
    if isinstance(event, RoundFinished):
        raise KeyError("a mistake of the user's own")


@pytest.mark.parametrize(
    "algorithm", [fm.ForkMerge("mixed", interval=4), fm.PostTrain(), fm.WeightGrid(values=(1.0, 2.0))]
)
def test_an_error_in_a_callback_keeps_its_type_and_says_where_it_came_from(algorithm: fm.Algorithm) -> None:
    with pytest.raises(KeyError, match="a mistake of the user's own") as raised:
        fit(algorithm, on_event=careless)
    (fact,) = facts_of(raised.value)
    assert fact == "forkmerge: raised by on_event, which was called with RoundFinished; the run itself was in order"
    shown = user_traceback(raised.value)
    assert shown is not None
    assert "in careless" in shown


def test_the_run_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        fit(folder=tmp_path / "run", on_event=careless)
    assert_same_run(fit(folder=tmp_path / "run", resume=True), fit())


def test_what_cannot_be_called_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for algorithm in (fm.ForkMerge("mixed", interval=4), fm.PostTrain()):
        with pytest.raises(fm.ProblemError, match="on_event must be a function of one event, got 3"):
            fit(algorithm, folder=tmp_path / "run", on_event=3)
        assert not (tmp_path / "run").exists()
