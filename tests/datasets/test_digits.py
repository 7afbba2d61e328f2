"""The demo's data come from installed packages, and its splits are clean."""

from __future__ import annotations

import sys

import pytest
import torch

import forkmerge as fm
from forkmerge.datasets import digits


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
    assert digits.problem().with_validation_labels().stream_map["digits"].size == 60


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


def test_a_missing_package_is_named_with_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    digits.load_photos.cache_clear()
    with pytest.raises(fm.ProblemError, match=r"scikit-learn and Pillow: type pip install 'forkmerge\[demo\]'"):
        digits.load_photos()
