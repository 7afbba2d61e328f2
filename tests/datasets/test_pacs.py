"""PACS: every domain with its images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import forkmerge as fm
from forkmerge.datasets import pacs
from small_packs import assert_recipe_trains, write_pacs


def test_every_domain_has_its_images_in_its_split(folder: Path) -> None:
    write_pacs(folder)
    problem = pacs.problem("sketch", size=16)
    assert set(problem.tasks) == set(pacs.DOMAINS)
    for code, domain in enumerate(pacs.DOMAINS):
        parts = [problem.stream_map[domain].dataset] + [
            problem.evaluations(part)[domain].dataset for part in ("validation", "test")
        ]
        for part in parts:
            images, labels = part.tensors
            assert sorted(labels.tolist()) == list(range(7))
            green = images[:, 1].float().mean((1, 2))
            assert torch.allclose(green, torch.full((7,), 60.0 * code), atol=4)
            red = images[:, 0].float().mean((1, 2))
            assert torch.allclose(red, 30.0 * labels, atol=6)


def test_one_head_can_serve_all_domains(folder: Path) -> None:
    write_pacs(folder)
    assert len(pacs.recipe(shared_head=True).model().heads) == 1
    assert len(pacs.recipe().model().heads) == 4


def test_the_recipe_trains_and_any_task_can_be_the_target(folder: Path) -> None:
    assert_recipe_trains("pacs", folder)


def test_few_labels_are_as_many_of_every_class_and_drawn_by_the_seed(folder: Path) -> None:
    write_pacs(folder)
    few = pacs.problem("photo", size=16, labels=1)
    for part in (few.stream_map["photo"], few.target_validation):
        assert sorted(part.dataset.tensors[1].tolist()) == list(range(7))
    with pytest.raises(fm.ProblemError, match="labels must be a positive integer, got 0"):
        pacs.problem("photo", size=16, labels=0)


def test_training_images_without_a_label_can_take_the_place_of_the_test_split(folder: Path) -> None:
    write_pacs(folder, copies=2)
    whole, few = pacs.problem("photo", size=16), pacs.problem("photo", size=16, labels=1, others_as_test=True)
    parts = [few.stream_map["photo"].dataset, few.evaluations("test")["photo"].dataset]
    assert [len(part) for part in parts] == [7, 7]
    seen = torch.cat([part.tensors[0] for part in parts]).flatten(1).double().sum(1).sort().values
    everything = whole.stream_map["photo"].dataset.tensors[0].flatten(1).double().sum(1).sort().values
    torch.testing.assert_close(seen, everything)
    with pytest.raises(fm.ProblemError, match="others_as_test needs labels"):
        pacs.problem("photo", size=16, others_as_test=True)
