"""Runs as the command prints them."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from rich.console import Console

from forkmerge.algorithms.run_record import BranchRecord, Round, Run
from forkmerge.algorithms.saved_run import SavedRun
from forkmerge.cli.print_run import show_run, show_saved_run


def merge(index: int) -> Round:
    branches = {name: BranchRecord({"tgt": 1.0}, score, {}, {}, 10) for name, score in (("a", 0.25), ("[b]", 0.5))}
    shares = {"a": 0.25, "[b]": 0.75}
    return Round(index, "search", 10 * index - 10, 10 * index, branches, [], shares, 0.5, {}, list(branches))


def printed(show: object, value: object) -> list[str]:
    text = io.StringIO()
    show(Console(file=text, width=100), value)  # type: ignore[operator]
    return [line.rstrip() for line in text.getvalue().splitlines()]


def test_a_run_is_its_facts_its_rounds_and_where_the_time_went():
    run = Run("ForkMerge", "tgt", 20, 0, 0.5, {"accuracy": 0.5}, "last merge", [merge(1)])
    run.test, run.notes, run.seconds = {"accuracy": 0.25}, ["[odd]"], {"train": 90.0}
    run.probes = {"[b]": 0.125}
    assert printed(show_run, run) == [
        "ForkMerge on 'tgt': 20 steps, seed 0, model: last merge",
        "  validation  accuracy 0.5",
        "  test        accuracy 0.25",
        "",
        "coefficients by branch, each with the branch's own score in brackets",
        "round  step            a         [b]   score",
        "1        10  0.25 (0.25)  0.75 (0.5)  0.5000",
        "",
        "  probes      [b] 0.125",
        "  time        train 90 s",
        "  note: [odd]",
    ]


def test_a_run_that_is_not_finished_says_how_to_continue_it():
    config = {"algorithm": {"name": "ForkMerge"}, "problem": {"target": "tgt"}, "training": {"steps": 20}}
    source = {"source": {"settings": {}}}
    saved = SavedRun(Path("a run"), "interrupted", {**config, **source}, datetime.now(), None, [], "refit", 12, None)
    assert printed(show_saved_run, saved) == [
        "ForkMerge on 'tgt': interrupted at step 12 of 20 of the refit",
        "  it continues from the beginning: there is no undamaged checkpoint with: forkmerge resume 'a run'",
    ]


def test_probes_of_an_error_are_shown_as_errors():
    rounds = [replace(merge(1), score=-0.5, metrics={"absolute_error": 0.5})]
    run = Run("ForkMerge", "tgt", 20, 0, -0.5, {"absolute_error": 0.5}, "last merge", rounds)
    run.probes = {"a": -2.5}
    assert "  probes      a 2.5" in printed(show_run, run)
