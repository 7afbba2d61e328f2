"""The demo: its data come from installed packages, its splits are clean, its words follow its numbers."""

from __future__ import annotations

import copy
import json
import sys

import pytest
import torch

import forkmerge as fm
from forkmerge.cli import demo
from forkmerge.cli.demo_figure import _spread
from forkmerge.cli.demo_text import conclude, print_report
from forkmerge.datasets import digits

QUICK = 8  # steps


def test_every_task_reads_8_by_8_images_of_values_from_0_to_1():
    problem = digits.problem()
    sizes = {task: len(stream.dataset) for task, stream in problem.stream_map.items()}
    assert sizes == {"digits": 30, "mnist": 5000, "clash": 5000, "photos": 8480}
    for task, stream in problem.stream_map.items():
        images, classes = stream.dataset.tensors
        assert images.shape[1:] == (64,)
        assert images.dtype == torch.float32
        assert images.min() >= 0
        assert images.max() <= 1
        assert classes.dtype == torch.int64
        assert classes.unique().tolist() == list(range(2 if task == "photos" else 10))


@pytest.mark.parametrize("labels", [20, 60, 61, 1000])
def test_labels_are_spread_evenly_and_never_tested_on(labels):
    _, classes = digits.load_digits()
    training, validation, test = digits.split_labels(classes, labels, seed=3)
    assert len(training) + len(validation) == labels
    assert abs(len(training) - len(validation)) <= 1
    for part, most_apart in ((torch.cat([training, validation]), 1), (training, 2), (validation, 2)):
        counts = torch.bincount(classes[part], minlength=10)
        assert counts.max() - counts.min() <= most_apart
    assert torch.equal(torch.cat([training, validation, test]).sort().values, torch.arange(len(classes)))


def test_60_labels_are_three_of_each_digit_in_both_halves():
    _, classes = digits.load_digits()
    training, validation, test = digits.split_labels(classes, 60, seed=0)
    assert torch.bincount(classes[training]).tolist() == torch.bincount(classes[validation]).tolist() == [3] * 10
    assert len(test) == 1797 - 60


def test_the_seed_draws_the_labels():
    _, classes = digits.load_digits()
    first, again, other = (digits.split_labels(classes, 60, seed)[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("labels", [19, 1001, 60.0, True])
def test_an_impossible_number_of_labels_is_refused(labels):
    with pytest.raises(fm.ProblemError, match=r"labels must be an integer from 20 to 1000, got"):
        digits.problem(labels=labels)


def test_the_refit_gives_every_method_all_labels():
    problem = digits.problem()
    assert len(problem.with_validation_labels().stream_map["digits"].dataset) == 60
    for algorithm, _ in demo.methods(QUICK).values():
        assert algorithm.settings(problem).refit


def test_clashing_labels_are_a_permutation_without_a_fixed_point():
    classes = torch.arange(10)
    assert sorted(digits.clashing(classes).tolist()) == classes.tolist()
    assert not (digits.clashing(classes) == classes).any()


def test_clash_is_mnist_with_other_labels_on_the_head_of_the_target():
    streams = digits.problem().stream_map
    assert torch.equal(streams["mnist"].dataset.tensors[0], streams["clash"].dataset.tensors[0])
    model, image = digits.DigitsNet(), torch.rand(1, 64)
    assert torch.equal(model(image), model(image, "clash"))
    assert torch.equal(model(image, "mnist"), model(image, "clash"))
    assert model(image, "photos").shape == (1, 2)


def test_mnist_fills_its_images_from_top_to_bottom_like_the_digits():
    rows = [images.view(-1, 8, 8).amax(dim=2) for images, _ in (digits.load_digits(), digits.load_mnist())]
    for inked in rows:
        assert ((inked[:, 0] > 0) & (inked[:, -1] > 0)).float().mean() > 0.97


def test_margins_do_not_matter_once_they_are_removed():
    ink = torch.rand(10, 6) + 0.1
    small, moved = torch.zeros(2, 28, 28)
    small[0:10, 0:6] = ink
    moved[14:24, 20:26] = ink
    first, second = digits._without_margins(torch.stack([small, moved]), 32)
    assert torch.allclose(first, second, atol=1e-5)
    assert (first[0].amax(dim=1) > 0).all()  # ten rows of ink became 32
    assert (first[0].amax(dim=0) > 0).sum() <= 0.6 * 32 + 4  # the shape is kept; a pixel's blur on each side


def test_the_recipe_is_found_by_its_name_and_trains():
    recipe = fm.load_recipe("forkmerge.datasets.digits:recipe", {"arguments": {"seed": 1, "labels": 40}, "steps": 4})
    assert len(recipe.problem.stream_map["digits"].dataset) == 20
    run = recipe.fit()
    assert run.final == "refit"
    assert list(run.coefficients[0]) == ["alone", "mnist", "clash", "photos"]


def test_missing_packages_are_named_at_once_with_what_to_type(monkeypatch, tmp_path):
    for module in ("mlxtend", "matplotlib"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(fm.ForkMergeError) as caught:
        demo.run_demo(seeds=1, workers=1, out=tmp_path / "out", as_json=False)
    assert str(caught.value) == "the demo needs mlxtend and matplotlib: type pip install 'forkmerge[demo]'."
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["seeds", "workers", "steps"])
def test_counts_must_be_positive(option):
    with pytest.raises(fm.ConfigError, match=f"{option} must be a positive integer, got 0"):
        demo.run_demo(**{option: 0})


def test_a_folder_that_cannot_be_made_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(fm.StoreError, match=r"cannot make the folder .*file"):
        demo.run_demo(out=tmp_path / "file")


def test_a_demo_prints_its_tables_and_writes_two_files_whatever_the_number_of_processes(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("kept")
    assert demo.run_demo(seeds=2, workers=1, out=tmp_path, as_json=False, steps=QUICK) == 0
    printed = capsys.readouterr()
    for name in demo.methods(QUICK):
        assert name in printed.out
    assert "made to" in printed.out
    assert "14 of 14 runs" in printed.err
    assert (tmp_path / demo.FIGURE).read_bytes().startswith(b"\x89PNG")
    first = json.loads((tmp_path / demo.RESULTS).read_text())

    assert demo.run_demo(seeds=2, workers=2, out=tmp_path, as_json=True, steps=QUICK) == 0
    second = json.loads(capsys.readouterr().out)
    assert second == json.loads((tmp_path / demo.RESULTS).read_text())
    for result, workers in ((first, 1), (second, 2)):
        assert result.pop("workers") == workers
        assert result.pop("seconds") > 0
    assert first == second
    assert sorted(path.name for path in tmp_path.iterdir()) == [demo.FIGURE, "mine.txt", demo.RESULTS]


def test_the_summary_is_paired_by_seed():
    coefficients = [{"alone": 0.5, "mnist": 0.5}]
    accuracies = {demo.SINGLE: [0.8, 0.9, 0.7], demo.SPLIT: [0.9, 0.9, 0.6]}
    outcomes = [
        demo.Outcome(
            demo.Job(name, seed, QUICK),
            accuracies.get(name, accuracies[demo.SINGLE])[seed],
            coefficients if name in (demo.MIXED, demo.SPLIT) else [],
            [],
        )
        for seed in (2, 0, 1)
        for name in demo.methods(QUICK)
    ]
    results = demo.summarise(outcomes, QUICK)
    split = results["methods"][demo.SPLIT]
    assert results["seeds"] == [0, 1, 2]
    assert split["accuracy"] == [0.9, 0.9, 0.6]
    assert (split["wins"], split["ties"], split["losses"]) == (1, 1, 1)
    assert split["gain"] == pytest.approx(0)
    assert split["gain_std"] == pytest.approx(0.1)
    assert split["mean_coefficients"] == coefficients


def _method(accuracies: list[float], rounds: list[dict[str, float]] | None = None) -> dict[str, object]:
    outcomes = [demo.Outcome(demo.Job("x", seed, 1), value, rounds or [], []) for seed, value in enumerate(accuracies)]
    return demo._summary(outcomes, [0.80, 0.82][: len(accuracies)])


def _methods(fork: list[float], *, helped: float = 0.05) -> dict[str, dict[str, object]]:
    runs = len(fork)
    single = [0.80, 0.82][:runs]
    chosen = [{"alone": 0.3, "a": 0.6, "b": 0.1, "c": 0.0}, {"alone": 0.35, "a": 0.4, "b": 0.25, "c": 0.0}]
    return {
        "single": _method(single),
        "with a": _method([value + helped for value in single]),
        "with b": _method(single),
        "with c": _method([value - 0.2 for value in single]),
        "fork": _method(fork, chosen),
    }


def test_the_conclusion_names_what_was_kept_and_what_was_refused():
    said = " ".join(conclude(_methods([0.86, 0.88]), "single", ["fork"], ["a", "b", "c"]))
    assert "kept a (0.50), used a little of b (0.17), refused c (0.00)" in said
    assert "a +5.0, b +0.0, c -20.0 points" in said
    assert "fork: better than single-task, 87.0% against 81.0% (+6.0 points), on 2 of 2 seeds" in said
    assert "more than chance explains" in said
    assert "highest mean" not in said


def test_the_conclusion_can_say_that_nothing_was_kept():
    methods = _methods([0.86, 0.88])
    methods["fork"]["mean_coefficients"] = [{"alone": 1.0, "a": 0.0, "b": 0.0, "c": 0.0}]
    said = " ".join(conclude(methods, "single", ["fork"], ["a", "b", "c"]))
    assert "the merges refused a (0.00), b (0.00) and c (0.00): mean" in said


def test_the_conclusion_admits_harm_chance_and_a_better_method():
    worse = " ".join(conclude(_methods([0.70, 0.72]), "single", ["fork"], ["a", "b", "c"]))
    assert "fork: worse than single-task, 71.0% against 81.0% (-10.0 points), on 2 of 2 seeds" in worse
    assert "The highest mean, 86.0%, is that of 'with a'" in worse
    unsure = " ".join(conclude(_methods([0.90, 0.80]), "single", ["fork"], ["a", "b", "c"]))
    assert "on 1 of 2 seeds, which may be chance" in unsure
    equal = " ".join(conclude(_methods([0.80, 0.82]), "single", ["fork"], ["a", "b", "c"]))
    assert "fork: as good as single-task" in equal
    lonely = " ".join(conclude(_methods([0.9]), "single", ["fork"], ["a", "b", "c"]))
    assert "on one seed, which proves nothing" in lonely


def test_a_report_of_one_seed_has_no_spread(capsys):
    methods = _methods([0.9])
    results = {
        "tasks": digits.ABOUT,
        "labels": 60,
        "test_examples": 1737,
        "seeds": [0],
        "methods": copy.deepcopy(methods),
        "conclusion": conclude(methods, "single", ["fork"], ["a", "b", "c"]),
        "files": {"figure": "f", "results": "r"},
        "workers": 1,
        "seconds": 61.0,
    }
    print_report(results)
    printed = capsys.readouterr().out
    assert "±" not in next(line for line in printed.splitlines() if line.startswith("fork"))
    assert "1 min 1 s in one process" in printed


def test_equal_coefficients_are_drawn_side_by_side():
    shifts = _spread([0.0, 1.0, 0.0, 0.0], width=0.2)
    assert shifts[1] == 0
    assert len({shifts[0], shifts[2], shifts[3]}) == 3
    assert max(map(abs, shifts)) <= 0.1
