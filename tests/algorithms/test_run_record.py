"""The record of a run: JSON and back, a readable repr, escaped HTML, one table of rounds."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import forkmerge as fm
from _asserts import facts
from forkmerge.algorithms.run_record import BranchRecord, Round, Run, rounds_table
from problems import diverging_problem, evaluation, examples, fit, minus_loss, noisy_net, shared_losses


@pytest.fixture(scope="module")
def run() -> Run:
    return fit(fm.ForkMerge("per_auxiliary", interval=4, floor=True, refit=True), net=noisy_net)


def a_round(index: int, score: float | None, phase: str = "search", *, aux: float = 0.5, end: int = 0) -> Round:
    end = end or 4 * index
    return Round(index, phase, end - 4, end, {}, [], {"alone": 1.0}, score, {"tgt": 1.0, "aux": aux}, ["alone"])


class TestRun:
    def test_it_survives_json(self, run: Run) -> None:
        text = json.dumps(run.to_json(), allow_nan=False)
        back = Run.from_json(json.loads(text))
        assert back == run
        assert back.model is None
        assert repr(back) == repr(run)

    def test_so_does_one_with_numbers_that_are_not_finite(self) -> None:
        lost = fit(fm.ForkMerge("mixed", interval=4), diverging_problem(4, "tgt"))
        back = Run.from_json(json.loads(json.dumps(lost.to_json(), allow_nan=False)))
        assert facts(back) == facts(lost)
        assert back.rounds[1].branches["alone"].losses["tgt"] is None

    def test_it_reports_timings_and_environment(self, run: Run) -> None:
        assert set(run.seconds) == {"train", "rank", "search", "merge"}
        assert all(value >= 0 for r in run.rounds for value in r.seconds.values())
        assert run.environment["torch"] == torch.__version__
        assert run.environment["threads"] == 1
        assert run.settings["training"]["steps"] == 12

    def test_its_repr_is_readable(self, run: Run) -> None:
        lines = repr(run).splitlines()
        assert lines[0] == "ForkMerge on 'tgt': 12 steps, seed 0, model: refit"
        assert len([line for line in lines if line.strip().startswith("round")]) == 3
        assert any(line.strip().startswith("relevance") for line in lines)

    def test_relevance_is_the_mean_over_steps(self) -> None:
        run = fit(fm.ForkMerge("mixed", interval=8, search=fm.Fixed((0.5, 0.5))), steps=12)
        first, second = run.rounds
        first.relevance.update(aux=0.0)
        assert (first.end - first.start, second.end - second.start) == (8, 4)
        assert run.relevance["aux"] == pytest.approx((0.0 * 8 + 0.5 * 4) / 12)

    def test_relevance_is_that_of_the_rounds_behind_the_model(self) -> None:
        scores = [0.5, 0.9, 0.7]
        rounds = [a_round(index, score, aux=float(index)) for index, score in enumerate(scores, start=1)]
        last = Run("ForkMerge", "tgt", 12, 0, 0.7, {}, "last merge", rounds)
        assert last.relevance == {"tgt": 1.0, "aux": 2.0}
        best = Run("ForkMerge", "tgt", 12, 0, 0.9, {}, "best merge", rounds)
        assert best.relevance == {"tgt": 1.0, "aux": 1.5}
        refitted = Run("ForkMerge", "tgt", 12, 0, 0.9, {}, "refit", [*rounds, a_round(4, None, "refit", end=4)])
        assert refitted.relevance == {"tgt": 1.0, "aux": 1.0}
        floor = Run("ForkMerge", "tgt", 12, 0, 0.9, {}, "floor", rounds)
        assert floor.relevance == {"tgt": 1.0}

    def test_a_score_that_has_fallen_is_remarked_where_the_last_merge_is_returned(self) -> None:
        falling = [a_round(1, 0.9), a_round(2, 0.8), a_round(3, 0.75)]
        run = Run("ForkMerge", "tgt", 12, 0, 0.75, {"m": 0.75}, "last merge", falling)
        (remark,) = run.remarks
        assert remark.startswith("the validation score fell from 0.9 at step 4 to 0.75 at the last merge")
        assert 'select="best"' in repr(run)
        assert "select=&quot;best&quot;" in run._repr_html_()
        assert not replace(run, final="best merge").remarks
        assert not Run("ForkMerge", "tgt", 8, 0, 0.9, {}, "last merge", [a_round(1, 0.8), a_round(2, 0.9)]).remarks

    def test_html_escapes_names(self) -> None:
        name = "<script>alert(1)<script>"
        inputs, labels = examples(16, 1)

        def losses(model: nn.Module, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
            renamed = {name: "aux", "tgt": "tgt"}
            values = shared_losses(model, batch, [renamed[task] for task in tasks], context)
            return {task: values[renamed[task]] for task in tasks}

        stream = fm.Stream(TensorDataset(inputs, labels), losses, ("tgt", name), 8)
        problem = fm.Problem("tgt", [stream], evaluation(metrics={"<b>": minus_loss}))
        page = fit(fm.ForkMerge("per_auxiliary", interval=4), problem)._repr_html_()
        assert "<script>" not in page
        assert "&lt;script&gt;" in page
        assert "<b>&" not in page
        assert page.count("<tr>") == 2 + 4  # facts, and rounds


def branch(score: float | None, fault: str | None = None) -> BranchRecord:
    return BranchRecord({"tgt": 1.0}, score, {}, {}, 10, fault)


def merge(index: int, coefficients: dict[str, float], **faults: str) -> Round:
    names = [*coefficients, *faults]
    branches = {name: branch(index / 10, faults.get(name)) for name in names}
    score = index / 4 if coefficients else None
    return Round(index, "search", 10 * index - 10, 10 * index, branches, [], coefficients, score, {}, names)


def test_a_row_of_rounds_has_step_coefficients_and_score_and_names_faults():
    table = rounds_table([merge(1, {"a": 0.25, "b": 0.75}), merge(2, {"a": 1.0}, c="diverged")])
    assert [column.title for column in table.columns] == ["round", "step", "a", "b", "c", "score"]
    assert table.texts() == [["1", "10", "0.25", "0.75", "", "0.2500"], ["2", "20", "1.00", "", "faulty", "0.5000"]]
    assert table.notes == ("round 2: c: diverged",)


def test_branches_may_show_their_own_scores_and_rounds_their_costs():
    table = rounds_table([merge(1, {"a": 1.0})], with_branch_scores=True, with_costs=True)
    assert table.texts() == [["1", "10", "1.00 (0.1)", "0.2500", "0", "0.00"]]


def erring(index: int, error: float) -> Round:
    branches = {name: replace(branch(-error), metrics={"mae": error}) for name in "ab"}
    return replace(merge(index, {"a": 1.0, "b": 0.0}), branches=branches, score=-error, metrics={"mae": error})


def test_an_error_is_shown_as_one_under_its_name_and_not_as_a_negative_score():
    rounds = [erring(1, 0.5), erring(2, 0.75)]
    table = rounds_table(rounds, with_branch_scores=True)
    assert table.title == "coefficients by branch, each with the branch's own mae in brackets"
    assert [column.title for column in table.columns][-1] == "mae"
    assert table.texts()[0] == ["1", "10", "1.00 (0.5)", "0.00 (0.5)", "0.5000"]
    run = Run("ForkMerge", "tgt", 20, 0, -0.75, {"mae": 0.75}, "last merge", rounds)
    assert "  round 1   step 10      mae 0.5  a 1.00, b 0.00" in repr(run).splitlines()
    assert "-0" not in repr(run)
    assert "on validation data, mae rose from 0.5 at step 10 to 0.75 at the last merge" in run.remarks[0]


@pytest.mark.parametrize(
    ("metrics", "score", "shown"),
    [
        ({"mae": 0.5}, -0.5, "mae 0.5"),
        ({"mae": 0.0}, -0.0, "mae 0"),
        ({"density": -2.0}, 2.0, "density -2"),
        ({"accuracy": 0.0}, 0.0, "score 0"),
        ({"accuracy": 0.5}, 0.5, "score 0.5"),
        ({"mae": 0.5, "rmse": 0.5}, -0.5, "score -0.5"),
        ({"mae": float("nan")}, None, ""),
    ],
)
def test_a_score_is_an_error_where_it_is_the_one_metric_turned_round(metrics, score, shown):
    assert replace(merge(1, {"a": 1.0}), metrics=metrics, score=score).reached == shown


def test_of_many_branches_the_heaviest_is_named_unless_all_are_asked_for():
    rounds = [merge(1, {f"b{i}": float(i == 3) for i in range(9)}), merge(2, {}, b0="diverged")]
    assert rounds_table(rounds).texts() == [
        ["1", "10", "b3", "1.00", "1", "0.2500"],
        ["2", "20", "", "", "0", ""],
    ]
    assert len(rounds_table(rounds, most_branches=9).columns) == 3 + 9


def test_what_a_run_reached_is_said_once_for_terminals_and_notebooks():
    run = Run("ForkMerge", "tgt", 20, 0, 0.5, {"accuracy": 0.5}, "last merge", [merge(1, {"a": 1.0, "b": 0.0})])
    run.test, run.notes = {"accuracy": 0.25}, ["odd"]
    assert run.facts == {"validation": "accuracy 0.5", "test": "accuracy 0.25"}
    assert repr(run).splitlines() == [
        "ForkMerge on 'tgt': 20 steps, seed 0, model: last merge",
        "  validation  accuracy 0.5",
        "  test        accuracy 0.25",
        "  round 1   step 10      score 0.25  a 1.00, b 0.00",
        "  note: odd",
    ]
    assert replace(run, final="refit").facts["validation"] == "accuracy 0.5, before the refit"
    assert "test" not in replace(run, verdict={"is_held_out": True}).facts
    assert replace(run, verdict={"is_held_out": True}).facts["held out"] == "accuracy 0.25"
    assert replace(run, score=None).facts["validation"] == "accuracy 0.5", "of the last round that had a sound branch"
    page = run._repr_html_()
    assert run.display().facts == run.facts
    cells = re.findall(r"<t[dh][^>]*>([^<]*)<", page)
    assert cells[:4] == ["validation", "accuracy 0.5", "test", "accuracy 0.25"]
    assert cells[-5:] == ["1", "10", "1.00", "0.00", "0.2500"]
    assert "note: odd" in page
