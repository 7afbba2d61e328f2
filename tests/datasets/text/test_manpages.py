"""Manual pages: a page's name decides its part in all languages, and nothing to test on is ever trained on."""

from __future__ import annotations

import json
import lzma
import random
from pathlib import Path

import pytest
import torch

import forkmerge as fm
from forkmerge.datasets.text import manpages

LANGUAGES = ("da", "nb", "sv", "de", "ru")
PAGES = [f"page{index}.1.gz" for index in range(40)]


def sentence(language: str, key: object) -> str:
    draw = random.Random(f"{language} {key}")
    return " ".join(f"{language}{draw.randrange(10**6)}" for _ in range(24))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a miniature of the file; in Danish, pages 0 to 5 are nearly the same."""
    content = {
        language: [[name, sentence(language, 0 if language == "da" and i < 6 else i)] for i, name in enumerate(PAGES)]
        for language in LANGUAGES
    }
    content["de"] += [[f"german{i}.1.gz", sentence("de", f"own {i}")] for i in range(10)]
    write(tmp_path, content)
    monkeypatch.setenv("FORKMERGE_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def write(folder: Path, content: object) -> None:
    with lzma.open(folder / manpages.FILE, "wt", encoding="utf-8") as file:
        json.dump(content, file)


def text_of(dataset: torch.utils.data.TensorDataset) -> str:
    rows = dataset.tensors[0][:, 1:].flatten()
    return bytes(rows[rows >= 0].tolist()).decode("utf-8", "replace")


def test_every_part_has_pages_and_near_duplicates_are_in_one(folder: Path) -> None:
    parts = manpages.parts_of(manpages.read_pages(folder / manpages.FILE))
    assert set(parts.values()) == {"training", "validation", "development", "test"}
    assert len({parts[name] for name in PAGES[:6]}) == 1
    assert all(parts[f"german{i}.1.gz"] == "training" for i in range(10))


@pytest.mark.parametrize("development", [False, True])
def test_translations_of_held_out_pages_are_in_no_training_data_nor_in_the_pretrainings(
    folder: Path, development: bool
) -> None:
    languages = manpages.read_pages(folder / manpages.FILE)
    parts = manpages.parts_of(languages)
    options = {"labels": "all", "validation": "all", "development": development}
    fine, before = manpages.problem("da", ["nb", "sv"], **options), manpages.problem("de", **options)
    for problem in (fine, before):
        for language, stream in problem.stream_map.items():
            text = text_of(stream.dataset)
            for name, page in languages[language].items():
                assert (page in text) == (parts[name] == "training")
    held = {"validation": fine.target_validation, "development" if development else "test": fine.test["da"]}
    for part, evaluation in held.items():
        text = text_of(evaluation.dataset)
        assert {name for name, page in languages["da"].items() if page in text} == {
            name for name in PAGES if parts[name] == part
        }


def test_the_seed_draws_as_many_bytes_as_asked_for_and_the_test_split_stays(folder: Path) -> None:
    first, second = (manpages.problem("da", ["nb"], labels=500, validation=300, seed=seed) for seed in (0, 1))
    for problem in (first, second):
        assert len(text_of(problem.stream_map["da"].dataset)) == 500
        assert len(text_of(problem.target_validation.dataset)) == 300
    assert text_of(first.stream_map["da"].dataset) != text_of(second.stream_map["da"].dataset)
    assert text_of(first.test["da"].dataset) == text_of(second.test["da"].dataset)


def test_the_recipe_trains_on_languages_and_python_source(folder: Path) -> None:
    recipe = manpages.recipe("da", ["nb", "python"], length=16, width=16, depth=1, batch_size=2, steps=2, interval=1)
    run = recipe.fit(progress=False)
    assert set(run.relevance) == {"da", "nb", "python"}
    assert 0 < fm.measure(run.model, recipe.problem.test["da"])["bits_per_byte"] < 20


def test_a_pretraining_on_german_is_taken_over_whole(folder: Path) -> None:
    small = {"length": 16, "width": 16, "depth": 1, "labels": "all"}
    table = {"recipe": "forkmerge.datasets.text.manpages:recipe", "part": "", "target": "de", "steps": 2}
    settings = {"arguments": {"auxiliaries": ["nb"], **small}, "pretrain": {**table, "arguments": small}}
    recipe = fm.load_recipe("forkmerge.datasets.text.manpages:recipe", {**settings, "steps": 1})
    assert recipe.problem.target == "da"
    model = recipe.model()
    assert set(model.state_dict()) == set(manpages.recipe("de", **small).model().state_dict())


def test_an_unknown_language_and_a_damaged_file_are_named(folder: Path) -> None:
    with pytest.raises(fm.ProblemError, match="unknown language 'dk'"):
        manpages.problem("dk")
    write(folder, {"da": [["page", 3]]})
    with pytest.raises(fm.ProblemError, match="no pair of a name and a text"):
        manpages.read_pages(folder / manpages.FILE)
    (folder / manpages.FILE).write_bytes(b"damaged")
    with pytest.raises(fm.ProblemError, match="cannot read "):
        manpages.read_pages(folder / manpages.FILE)
    (folder / manpages.FILE).unlink()
    with pytest.raises(fm.ProblemError, match="not complete"):
        manpages.problem("da")
