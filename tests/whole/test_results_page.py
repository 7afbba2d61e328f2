"""The page of results is what the records give, says plainly who is better, and decides every claim from numbers."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import forkmerge as fm
from forkmerge.experiments.compared_methods import compared_method_from
from forkmerge.experiments.results_file import to_text
from forkmerge.experiments.run_results import RunResult
from paths import ROOT
from problems import SGD, conv_net, shared_problem

FOLDER = ROOT / "recipes"
GAINS = {
    "stl": 0.0,
    "ew": -3.0,
    "pcgrad": -1.0,
    "posttrain": 1.0,
    "forkmerge": 2.0,
    "forkmerge-aux": 4.0,
    "forkmerge-aux[prune_to=2]": 3.0,
    "forkmerge-aux[interval=10]": 1.5,
    "forkmerge-aux[interval=90]": 1.0,
    "stl-best:2": 0.5,
}


def made(gains: dict[str, float], targets: tuple[str, ...] = ("a", "b"), seeds: int = 3) -> tuple[Any, list[RunResult]]:
    """A comparison whose metrics are 50 + gain, a little different for every seed."""
    methods = {word: compared_method_from(word) for word in gains}
    plan = {
        "settings": {"recipe": "somewhere:recipe", "algorithm": {"interval": 30}},
        "methods": [{"word": word, "label": method.label} for word, method in methods.items()],
        "targets": list(targets),
        "seeds": list(range(seeds)),
        "equal_labels": False,
    }
    results = []
    for index, (word, gain) in enumerate(gains.items()):
        for target in targets:
            for seed in range(seeds):
                score = 50 + gain + 0.1 * ((seed + index) % 3)
                shares = {"alone": 0.5 + 0.4 * (seed % 2), "joint": 0.5 - 0.4 * (seed % 2)}
                rounds = [
                    {"end": end, "score": score - 5 + end / 20, "metrics": {"accuracy": score - 5 + end / 20}}
                    for end in (30, 60, 90)
                ]
                if word.startswith("forkmerge"):
                    flipped = {"alone": shares["joint"], "joint": shares["alone"]}
                    rounds = [{**r, "coefficients": s} for r, s in zip(rounds, (shares, flipped, shares), strict=True)]
                result = RunResult(word, methods[word].label, target, seed, "final", {}, f"{target}/{index}-{seed}")
                branches = {"forkmerge": 2, "forkmerge-win-stay": 2}.get(methods[word].base, 4 if "aux" in word else 1)
                results.append(
                    replace(
                        result,
                        metrics={"accuracy": score},
                        directions={"accuracy": 1},
                        validation={"accuracy": score + 1},
                        branches=branches,
                        steps=90,
                        seconds=float(branches if word != "pcgrad" else 3),
                        rounds=rounds,
                    )
                )
    return plan, results


@pytest.fixture
def scripts(monkeypatch):
    """Import the scripts as they import each other, and forget them afterwards: their names are common ones."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    import claims
    import overview  # noqa: F401
    import page
    import setting

    yield page, claims, setting
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and Path(sys.modules[name].__file__).parent == FOLDER:
            del sys.modules[name]


def verdicts(claims: Any, settings: list[Any]) -> dict[str, str]:
    rows = (line.strip("| ").split(" | ") for line in claims.claims_table(settings)[2:])
    return {row[0]: row[1] for row in rows}


def test_the_committed_pages_and_the_table_of_the_readme_are_what_the_committed_records_give():
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(FOLDER / "page.py"), "--check"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_one_table_says_who_wins_against_single_task_training_and_the_best_other_method(scripts):
    page, _, setting = scripts
    good = setting.Setting("good", *made({"stl": 0.0, "ew": 1.0, "forkmerge": 4.0}))
    level = setting.Setting("level", *made({"stl": 0.0, "ew": 0.02, "forkmerge": 0.02}))
    bad = setting.Setting("bad", *made({"stl": 0.0, "ew": 3.0, "forkmerge": -3.0}))
    text = page.summary_page([good, level, bad])
    rows = {row[0]: row for row in (line.strip("| ").split(" | ") for line in text.splitlines() if line[:2] == "| ")}
    assert [rows[name][3] for name in ("good", "level", "bad")] == ["win", "tie", "loss"]
    assert rows["good"][4:7] == ["–", "–", ""], "no study, no choice beforehand"
    assert [rows[name][9] for name in ("good", "level", "bad")] == ["win", "tie", "loss"]
    assert rows["good"][2].startswith("+7.98 [+")
    assert rows["good"][2].endswith("], 3–0–0")
    assert rows["good"][7] == "EW"
    assert "against single-task training ForkMerge wins 1, ties 1 and loses 1" in text
    assert "ForkMerge hurt the target beyond noise on bad; it helped beyond noise on good" in text
    only = page.summary_page([level])
    assert "did not hurt the target beyond noise in any of these 1 settings; it did not help beyond noise" in only
    assert "There are no records yet." in page.summary_page([])


def test_other_methods_and_learning_rates_are_chosen_by_the_study_before(scripts):
    page, _, setting = scripts
    word = setting.DEFAULT
    gains = {"stl": 0.0, word: 4.0, "ew": 1.0, "pcgrad": 5.0, f"{word}[lr=0.1]": 9.0, "stl[lr=0.1]": 5.5}
    study = setting.Setting(
        "x", *made({**gains, "ew": 2.0, "pcgrad": 1.0, "stl[lr=0.1]": 1.0, f"{word}[lr=0.1]": 3.0, "uw": -1.0})
    )
    judged = setting.Setting(
        "x", *made({**gains, "posttrain": 6.0, "forkmerge-aux-uniform": 20.0, "uw": -1.0}), study=study
    )
    assert (judged.chosen, judged.alone, judged.rival_beforehand) == (word, "stl[lr=0.1]", "ew")
    assert judged.rival_in_hindsight == "posttrain", "a branch per auxiliary takes more steps"
    row = next(line for line in page.summary_page([judged]).splitlines() if line.startswith("| x |"))
    assert [cell for cell in row.strip("| ").split(" | ") if cell in ("EW, best of 5", "PostTrain", "win", "loss")] == [
        "loss", "EW, best of 5", "win", "PostTrain", "loss",
    ]  # fmt: skip


def test_the_interval_over_settings_keeps_what_belongs_together(scripts):
    import overview

    assert overview.hierarchical({"one": [[0.1, 0.2]]}) is None
    mean, low, high = overview.hierarchical({"one": [[0.1] * 50], "other": [[0.3] * 50, [0.5] * 50]})
    assert mean == pytest.approx(0.25)
    assert low == pytest.approx(0.1), "settings and targets vary, whatever their seeds"
    assert 0.4 <= high <= 0.5
    _, low, high = overview.hierarchical({name: [[0.0, 1.0] * 50] for name in "abcdefghij"})
    assert 0.45 < low < 0.5 < high < 0.55, "many settings alike leave the noise of seeds"


def test_mechanisms_without_a_pair_of_forms_or_with_options_that_are_tables_are_shown(scripts):
    import what_matters

    _, _, setting = scripts
    gains = {"stl": 0.0, "stl[lr=0.1]": 1.0, "forkmerge[layer_groups={'lower':'body'}]": 2.0, "forkmerge-win-stay": 3.0}
    text = what_matters.page([setting.Setting("x", *made(gains))])
    assert "| A larger learning rate | 1 |" in text


def test_forms_of_a_variant_with_the_same_batches_are_compared_with_those_of_the_setting(scripts):
    import what_matters

    _, _, setting = scripts
    own = setting.Setting("x", *made({"stl": 0.0, "forkmerge-uniform": 3.0, "forkmerge": 1.0}))
    paired = setting.Setting("x_paired", *made({"stl": 9.0, "forkmerge-uniform": 1.0, "forkmerge": 2.0}), base=own)
    text = what_matters.page([own, paired])
    rows = [line for line in text.split("## An order of one's own")[1].splitlines() if line.startswith("| x |")]
    assert [row.count("forkmerge-uniform") for row in rows] == [2, 0]
    assert ["| +4." in rows[0] or "| +3." in rows[0], "| −2." in rows[1] or "| −1." in rows[1]] == [True, True]


def test_how_far_every_method_is_behind_the_best_is_said_over_all_settings(scripts):
    page, _, setting = scripts
    word = setting.DEFAULT
    one = {"stl": 0.0, "ew": 5.0, "ew[lr=0.1]": 1.0, "pcgrad": 1.0, word: 4.0}
    study = setting.Setting("one", *made({**one, "ew": 0.0}))
    settings = [
        setting.Setting("one", *made(one), study=study),
        setting.Setting("two", *made({"stl": 0.0, "ew": -5.0, word: 1.0})),
        setting.Setting("three", *made({"stl": 0.0, "forkmerge": 9.0})),
    ]
    rows = [line for line in page.summary_page(settings).splitlines() if line.count("|") == 6]
    cells = {row[0]: row[1:] for row in (line.strip("| ").split(" | ") for line in rows)}
    assert list(cells)[2:] == ["**ForkMerge**", "STL", "EW"], "pcgrad is in one of two settings only"
    assert cells["**ForkMerge**"][0] == "2"
    assert float(cells["**ForkMerge**"][1]) == 0
    assert cells["EW"][3] == "two"
    assert 8 < float(cells["EW"][1]) < 10, "3 points of 50 at the rate of its study, and 6"


def test_the_best_in_hindsight_is_that_of_the_seeds_which_both_have(scripts):
    _, _, setting = scripts
    word = setting.DEFAULT
    plan, results = made({"stl": 0.0, word: 2.0, "ew": 3.0, "pcgrad": 0.0, "uw": 0.0}, seeds=6)
    easy = range(3)  # the seeds on which everything is better
    has_run = {"pcgrad": easy, "uw": range(1)}
    kept = []
    for each in results:
        if each.seed not in has_run.get(each.method, range(6)):
            continue
        gain = 9.0 if each.seed in easy else 0.0
        own = {"pcgrad": 2.5, "uw": 9.0}.get(each.method, 0.0)
        kept.append(replace(each, metrics={name: value + gain + own for name, value in each.metrics.items()}))
    judged = setting.Setting("x", plan, kept)
    assert setting.mean(judged.overall["pcgrad"]) > setting.mean(judged.overall["ew"])
    assert judged.rival_in_hindsight == "ew"


def test_a_choice_among_few_methods_is_none(scripts):
    _, _, setting = scripts
    gains = {"stl": 0.0, "ew": 1.0, "pcgrad": 2.0, "forkmerge-win-stay": 3.0}
    judged = setting.Setting("x", *made(gains), study=setting.Setting("x", *made(gains)))
    assert judged.rival_beforehand is None
    assert judged.rival_in_hindsight == "pcgrad"


def test_the_default_with_other_options_is_not_the_default(scripts):
    _, _, setting = scripts
    word = setting.DEFAULT
    gains = {"stl": 0.0, f"{word}[lr=0.1]": 1.0, word: 2.0, f"{word}[bn=recompute]": 3.0}
    judged = setting.Setting("x", *made(gains), study=setting.Setting("x", *made(gains)))
    assert judged.chosen == word


def test_the_same_setting_on_other_data_is_chosen_for_by_the_study_of_the_first(scripts, tmp_path):
    _, _, setting = scripts
    (tmp_path / "development").mkdir()
    for name, gain in (("x", 1.0), ("x-own", 2.0)):
        study = {"stl": 0.0, "forkmerge": gain}
        (tmp_path / "development" / f"{name}.json").write_text(to_text(*made(study)), "utf-8")
    for name in ("x", "x-other", "x-own", "y-other"):
        (tmp_path / f"{name}.json").write_text(to_text(*made({"stl": 0.0, "forkmerge": 0.0})), "utf-8")
    read = {s.name: s for s in setting.read_settings(tmp_path)}
    gains = {name: s.study and round(setting.mean(s.study.overall["forkmerge"]), 3) for name, s in read.items()}
    assert gains["x"] == gains["x-other"] != gains["x-own"]
    assert gains["y-other"] is None
    assert all(s.base is None for s in read.values())


def test_variants_of_a_setting_stand_in_the_table_but_are_not_counted(scripts):
    page, _, setting = scripts
    base = setting.Setting("x", *made({"stl": 0.0, "ew": 1.0, "forkmerge": 4.0}))
    variant = setting.Setting("x_more", *made({"stl": 0.0, "ew": 1.0, "forkmerge": 4.0}), base=base)
    text = page.summary_page([base, variant])
    assert "| *x_more* | ForkMerge |" in text
    assert "Of 1 settings" in text


def test_a_mechanism_is_judged_by_forms_that_differ_in_it_alone(scripts):
    import what_matters

    _, _, setting = scripts
    gains = {
        "stl": 0.0,
        "forkmerge": 2.0,
        "forkmerge-aux": 4.0,
        "forkmerge-aux[search_by='nll']": 7.0,
        "forkmerge-aux[search_by='nll',rule='bagged']": 3.0,
        "forkmerge-aux[search_by='nll',rule='bagged',per_round=1,interval=10]": 3.01,
    }
    text = what_matters.page([setting.Setting("x", *made(gains))])
    rows = {row[0]: row for row in (line.strip("| ").split(" | ") for line in text.splitlines() if line[:2] == "| ")}
    counts = {title: row[1:4] for title, row in rows.items() if len(row) == 5 and row[1].isdigit()}
    assert counts == {
        "One branch per auxiliary": ["1", "1", "0"],
        "A smooth cost": ["1", "1", "0"],
        "Rules that know the noise": ["1", "0", "1"],
        "Branches in turn": ["1", "0", "0"],
    }
    assert rows["A smooth cost"][4] == "+5.99"
    assert "| x | 3 | `forkmerge` | `forkmerge-aux` | +" in text
    assert "## Searching" not in text
    assert "There are no records yet." in what_matters.page([])


def test_a_mechanism_of_one_value_is_no_other_value_and_one_that_the_default_has_is_taken_from_it(scripts):
    import what_matters

    _, _, setting = scripts
    word = setting.DEFAULT
    gains = {"stl": 0.0, word: 2.0, f"{word}[auxiliary_scale=1]": 1.0}
    text = what_matters.page([setting.Setting("x", *made(gains))])
    assert f"| x | 3 | `{word}[auxiliary_scale=1]` | `{word}` | +" in text
    assert "## Twice the weight, elsewhere" not in text
    text = what_matters.page([setting.Setting("x", *made({**gains, f"{word}[auxiliary_scale=2]": 3.0}))])
    assert f"| x | 3 | `{word}` | `{word}[auxiliary_scale=2]` | +" in text


def test_steps_of_all_branches_are_counted_also_after_pruning_and_refits(scripts):
    import overview

    _, _, setting = scripts
    plan, results = made({"stl": 0.0, "ew": 1.0, "forkmerge": 2.0}, ("a",))
    assert overview.steps_ratio(setting.Setting("x", plan, results), "forkmerge") == 2.0
    names = ["a", "b", "c", "d"]
    pruned = [
        replace(o, rounds=[{**r, "branches": dict.fromkeys(names[: 4 - i], 0.5)} for i, r in enumerate(o.rounds)])
        if o.method == "forkmerge"
        else o
        for o in results
    ]
    assert overview.steps_ratio(setting.Setting("x", plan, pruned), "forkmerge") == 3.0
    assert overview.steps_ratio(setting.Setting("x", {**plan, "equal_labels": True}, pruned), "forkmerge") == 6.0


def test_the_readme_shows_the_table_between_its_marks_and_nothing_else_changes(scripts):
    import overview

    _, _, setting = scripts
    settings = [setting.Setting("x", *made({"stl": 0.0, "ew": 1.0, "forkmerge": 4.0}))]
    plain = "# Title\n\ntext\n"
    assert overview.with_block(plain, settings) == plain
    marked = f"# Title\n\n{overview.BEGIN}\nold\n{overview.END}\n\nend\n"
    written = overview.with_block(marked, settings)
    assert written.startswith(f"# Title\n\n{overview.BEGIN}\n\n| setting |")
    assert written.endswith(f"loses 0.\n\n{overview.END}\n\nend\n")
    assert "old" not in written
    assert overview.with_block(written, settings) == written


def test_the_readme_that_has_marks_shows_what_the_records_give(scripts):
    import overview

    _, _, setting = scripts
    readme = (ROOT / "README.md").read_text("utf-8")
    assert readme.count(overview.BEGIN) == readme.count(overview.END) <= 1
    assert overview.with_block(readme, setting.read_settings(ROOT / "results")) == readme, "type ./run results"


def test_committed_records_name_no_place_of_a_machine():
    for path in (ROOT / "results").glob("*.json"):
        text = path.read_text("utf-8")
        assert not any(word in text for word in ("/tmp/", "/home/", "/root/", "/Users/")), path.name


def test_the_page_is_made_from_files_of_records_alone(scripts, tmp_path):
    page, _, setting = scripts
    assert "There are no records yet." in page.page(setting.read_settings(tmp_path))
    (tmp_path / "small.json").write_text(to_text(*made(GAINS)))
    text = page.page(setting.read_settings(tmp_path))
    assert "- **small**: ForkMerge-aux is better than PostTrain, the best other method, beyond noise: +5.99 %" in text
    assert "| **ForkMerge-aux** (best on validation) |" in text
    assert "| STL, best of 2 |" in text
    assert "| ForkMerge | a | alone | 0.63 0.37 0.63 |" in text
    assert text == page.page(setting.read_settings(tmp_path))
    (tmp_path / "small.md").write_text("Why? *Because.*\n")
    assert "3 seeds.\n\nWhy? *Because.*\n\nPaired difference" in page.page(setting.read_settings(tmp_path))


def test_large_batches_are_compared_with_the_single_task_training_of_the_base(scripts):
    page, claims, setting = scripts
    base = setting.Setting("x", *made({"stl": 0.0, "ew": 1.0, "forkmerge": 3.0}))
    plan, results = made({"stl": 4.0, "ew": 5.0})  # large batches help single-task training as much
    variant = setting.Setting("x_batch", plan, results, base=base)
    assert verdicts(claims, [base, variant])["Larger batches do not explain the gain"] == "does not"
    assert "**x_batch**" not in page.page([base, variant]), "it has no form of ForkMerge to speak of"


@pytest.mark.parametrize(
    ("gain", "words"),
    [(4.0, "better than EW, the best other method, beyond noise"), (0.02, "within noise"), (-4.0, "worse than EW")],
)
def test_it_is_said_plainly_where_forkmerge_is_not_best(scripts, gain, words):
    page, _, setting = scripts
    made_up = setting.Setting("x", *made({"stl": 0.0, "ew": 1.0, "forkmerge": 1.0 + gain}))
    assert words in page.page([made_up])


def test_the_form_is_chosen_on_validation_and_not_on_test(scripts):
    _, _, setting = scripts
    plan, results = made({"stl": 0.0, "ew": 1.0, "forkmerge": 2.0, "forkmerge-aux": 3.0})
    turned = [replace(o, validation={"accuracy": 90.0}) if o.method == "forkmerge" else o for o in results]
    assert setting.Setting("x", plan, results).chosen == "forkmerge-aux"
    assert setting.Setting("x", plan, turned).chosen == "forkmerge"


def test_with_equal_labels_single_task_training_has_no_validation_and_a_form_is_chosen_all_the_same(scripts):
    page, _, setting = scripts
    plan, results = made({"stl": 0.0, "ew": 1.0, "forkmerge": 2.0, "forkmerge-aux": 3.0})
    plain = [o if o.method.startswith("forkmerge") else replace(o, validation={}) for o in results]
    equal = setting.Setting("x", {**plan, "equal_labels": True}, plain)
    assert equal.chosen == "forkmerge-aux"
    text = page.page([equal])
    assert "All methods were trained on training ∪ validation data in the end." in text
    assert "on validation | on test" not in text


def test_claims_are_decided_from_the_numbers(scripts):
    _, claims, setting = scripts
    good = verdicts(claims, [setting.Setting("good", *made(GAINS))])
    assert good["It has the best mean Δ_m of all methods"] == "holds"
    assert good["Targets that equal weights harm are not harmed by ForkMerge"] == "holds"
    assert good["K+1 branches are better than two"] == "holds"
    assert good["The gain per branch, Δ_m/(B−1), falls with B"] == "holds"
    assert good["Pruning keeps most of the gain"] == "holds"
    assert good["A middle Δt is best"] == "holds"
    assert good["Coefficients are dynamic"] == "holds"
    assert good["It converges faster"] == "holds"
    assert good["It is not slower than most gradient methods"] == "holds"
    assert good["Larger batches do not explain the gain"] == "not tested"
    turned = {word: -gain for word, gain in GAINS.items()}
    bad = verdicts(claims, [setting.Setting("bad", *made(turned))])
    assert bad["ForkMerge is never below single-task training beyond noise, on any target"] == "does not"
    assert bad["It has the best mean Δ_m of all methods"] == "does not"
    assert bad["K+1 branches are better than two"] == "does not"
    assert bad["It converges faster"] == "does not"
    both = verdicts(claims, [setting.Setting("good", *made(GAINS)), setting.Setting("bad", *made(turned))])
    assert both["It has the best mean Δ_m of all methods"] == "does not (1 of 2)"


def test_pairs_of_tasks_come_from_the_benchmark_that_trains_them(scripts, tmp_path):
    page, claims, setting = scripts
    (tmp_path / "small.json").write_text(to_text(*made(GAINS)))

    def read(merged: float) -> list[Any]:
        pair = {"gain": -0.2, "low": -0.3, "high": -0.1, "ForkMerge": {"gain": merged, "low": None, "high": merged}}
        results = {"Small, a": {"pairs": {"b": pair}}, "digits, 20 labels": {"pairs": {"c": {"gain": 1.0}}}}
        (tmp_path / "advice").write_text(json.dumps({"results": results}))
        return setting.read_settings(tmp_path, tmp_path / "advice")

    assert "| auxiliary | a |\n|---|---|\n| b | −0.2000 → +0.1000 |" in page.page(read(0.1))
    assert verdicts(claims, read(0.1))[claims.PAIRS] == "holds"
    assert verdicts(claims, read(-0.1))[claims.PAIRS] == "does not"
    assert verdicts(claims, setting.read_settings(tmp_path, tmp_path / "none"))[claims.PAIRS] == "not tested"


def test_studies_of_options_stand_beside_the_results_and_are_no_part_of_the_claims(scripts):
    page, _, setting = scripts
    settings = [setting.Setting("x", *made({"stl": 0.0, "ew": 1.0, "forkmerge": 2.0}))]
    study = setting.Setting("y", *made({"stl": 0.0, "forkmerge-aux": 1.0, "forkmerge-aux[bn=recompute]": 2.0}))
    with_study = page.page(settings, [study])
    assert with_study.startswith(page.page(settings).rstrip())
    rows = with_study.partition("## How options were chosen")[2].splitlines()
    names = [row.split(" | ")[0] for row in rows if row.startswith("| ")]
    assert names == ["| method", "| ForkMerge-aux[bn=recompute]", "| ForkMerge-aux", "| STL"]
    assert "recipes/development/y.toml`, 3 methods × 2 targets × 3 seeds." in with_study


def test_it_works_with_whatever_there_is(scripts):
    page, claims, setting = scripts
    for gains in ({"stl": 0.0}, {"stl": 0.0, "ew": 1.0}, {"stl": 0.0, "forkmerge": 1.0}):
        for seeds in (1, 2):
            text = page.page([setting.Setting("x", *made(gains, ("a",), seeds))])
            assert text.startswith("# Results")
    plan, results = made(GAINS)
    partial = [replace(o, error="broke", metrics={}) if o.seed == 2 or o.method == "ew" else o for o in results]
    assert "Failed: EW on 'a', seed 0: broke." in page.page([setting.Setting("x", plan, partial)])
    assert "there is not enough to compare yet" in page.page([setting.Setting("x", plan, [])])
    assert len(verdicts(claims, [])) == len(claims.CLAIMS)


def test_an_unknown_recipe_is_named(scripts, capsys):
    page, _, _ = scripts
    assert page.main(["nothing"]) == 2
    assert "there is no recipe 'nothing'" in capsys.readouterr().err


def test_statistics_are_recomputed_on_the_target_and_nothing_else_is(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(FOLDER))
    import batchnorm

    recipe = fm.Recipe(shared_problem(), conv_net, SGD, 6, fm.Joint(), {"threads": 1})
    run = recipe.fit(folder=tmp_path / "run")
    before, after = batchnorm.both(recipe, tmp_path / "run", seed=0)
    assert before == pytest.approx(run.metrics["minus_loss"])
    assert after != before


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*/*.toml")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_recipe_file_names_a_recipe_and_methods_that_there_are(path):
    from forkmerge.experiments.compare_options import options_from
    from forkmerge.experiments.compared_methods import compared_methods_from
    from forkmerge.experiments.recipe import tomllib

    settings = tomllib.loads(path.read_text("utf-8"))
    module, _, function = settings["recipe"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    words = options_from(settings.get("compare", {})).methods
    assert len(compared_methods_from(",".join(words))) >= len(set(words))
