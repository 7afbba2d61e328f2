"""Everything a logger needs is in the events."""

from __future__ import annotations

import math
from collections import defaultdict

import forkmerge as fm
from forkmerge.algorithms.events import BranchTrained, Event, Merged, RunStarted, scalars
from problems import fit


def test_a_log_made_of_scalars_alone_holds_losses_scores_coefficients_and_relevance_over_rounds() -> None:
    log: dict[str, dict[int, float]] = defaultdict(dict)

    def keep(event: Event) -> None:
        step, values = scalars(event)
        for name, value in values.items():
            log[name][step] = value

    run = fit(fm.ForkMerge("per_auxiliary", interval=4, refit=True, floor=True), on_event=keep)
    for branch in ("alone", "aux", "odd"):
        rounds = run.searched
        assert log[f"coefficient/{branch}"] == {r.end: r.coefficients[branch] for r in rounds}
        assert log[f"branch_score/{branch}"] == {r.end: r.branches[branch].score for r in rounds}
        assert log[f"round_loss/{branch}/tgt"] == {r.end: r.branches[branch].losses["tgt"] for r in rounds}
        assert log[f"loss/{branch}/tgt"].keys() == {4, 8, 12}
    assert log["relevance/aux"] == {r.end: r.relevance["aux"] for r in run.searched}
    assert log["score"] == {r.end: r.score for r in run.searched}
    assert log["floor_score"] == {r.end: r.floor_score for r in run.searched}
    assert log["refit/coefficient/aux"] == log["coefficient/aux"]
    assert "refit/score" not in log  # which a refit has none of
    assert set(log["seconds/train"]) == {4, 8, 12}


def test_what_was_not_measured_is_left_out_and_what_diverged_is_not() -> None:
    position = {"phase": "refit", "round": 2, "step": 8, "part": "pretraining"}
    merged = Merged(**position, coefficients={"a": 1.0}, score=None, metrics={}, relevance={}, candidates=[])
    assert scalars(merged) == (8, {"pretraining/refit/coefficient/a": 1.0})
    _, values = scalars(BranchTrained(phase="search", round=1, step=4, branch="a", losses={"tgt": math.nan}))
    assert math.isnan(values["round_loss/a/tgt"])


def test_an_event_without_numbers_has_none() -> None:
    started = RunStarted(algorithm="ForkMerge", target="tgt", seed=0, steps=12, rounds=3)
    assert scalars(started) == (0, {})
