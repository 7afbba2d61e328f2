"""Where the runs of a comparison lie."""

from __future__ import annotations

from dataclasses import replace

import forkmerge as fm
from compare_problem import recipe
from forkmerge.experiments.compared.run_folders import run_folder


def test_targets_that_differ_in_case_alone_have_folders_of_their_own():
    stream = recipe().problem.stream_map["all"]
    tasks = ("Depth", "depth", "normal")
    given = replace(stream, tasks=tasks)
    problem = fm.Problem("Depth", {"all": given}, recipe().problem.target_validation)
    folders = [run_folder(problem, "stl", task, 0, {}).partition("/")[0] for task in tasks]
    assert len({folder.casefold() for folder in folders}) == 3
    assert folders[2] == "normal"


def test_settings_and_searches_of_tuning_have_folders_of_their_own():
    problem = recipe().problem
    plain = run_folder(problem, "ew", "tgt", 1, {})
    assert plain == "tgt/ew-seed1"
    tuned = run_folder(problem, "ew", "tgt", 1, {"lr": 0.1})
    assert len({plain, tuned, run_folder(problem, "ew", "tgt", 1, {"lr": 0.1}, searches=True)}) == 3
