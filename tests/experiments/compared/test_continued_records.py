"""A comparison goes on from its records alone, where its folder is gone."""

from __future__ import annotations

from command_line import error_of, invoke
from forkmerge.experiments.results_file import read_comparison

PROBLEM = "compare_problem:recipe"
OPTIONS = ("--methods", "ew", "--workers", 1, "--set", "steps=4")


def test_what_the_records_have_is_not_run_again_and_more_seeds_join_it(tmp_path):
    file, again = tmp_path / "r.json", tmp_path / "again"
    invoke("compare", PROBLEM, *OPTIONS, "--seeds", 1, "--out", tmp_path / "first", "--records", file)
    invoke("compare", PROBLEM, *OPTIONS, "--seeds", 2, "--out", tmp_path / "whole", "--records", tmp_path / "w.json")
    result = invoke("compare", PROBLEM, *OPTIONS, "--seeds", 2, "--out", again, "--records", file, "--earlier", file)
    assert "2 results of" in result.stderr
    assert not list(again.glob("*/*-seed0/config.json"))
    assert len(list(again.glob("*/*-seed1/config.json"))) == 2
    plan, results = read_comparison(file)
    whole = {(each.method, each.seed): each.metrics for each in read_comparison(tmp_path / "w.json")[1]}
    assert plan["seeds"] == [0, 1]
    assert {(each.method, each.seed): each.metrics for each in results} == whole


def test_tuning_runs_are_taken_too(tmp_path):
    file = tmp_path / "r.json"
    options = (*OPTIONS, "--seeds", 1, "--tune", "lr=0.1,0.2")
    invoke("compare", PROBLEM, *options, "--out", tmp_path / "first", "--records", file)
    invoke("compare", PROBLEM, *options, "--out", tmp_path / "again", "--earlier", file)
    assert not list((tmp_path / "again").glob("*/*/config.json"))


def test_records_of_other_settings_are_refused(tmp_path):
    file = tmp_path / "r.json"
    invoke("compare", PROBLEM, *OPTIONS, "--seeds", 1, "--out", tmp_path / "first", "--records", file)
    other = ("--methods", "ew", "--seeds", 1, "--set", "steps=5")
    said = error_of("compare", PROBLEM, *other, "--out", tmp_path / "again", "--earlier", file)
    assert "compares with other settings" in said
    assert not (tmp_path / "again" / "plan.json").exists()


def test_the_same_command_continues_what_it_began(tmp_path):
    file, again = tmp_path / "r.json", tmp_path / "again"
    invoke("compare", PROBLEM, *OPTIONS, "--seeds", 1, "--out", tmp_path / "first", "--records", file)
    for _ in range(2):
        invoke("compare", PROBLEM, *OPTIONS, "--seeds", 2, "--out", again, "--earlier", file)
    assert len(list(again.glob("*/*-seed1/config.json"))) == 2
