"""The page of a mixture: what it reached and what each corpus was worth come before the comparison."""

from __future__ import annotations

from pathlib import Path

import pytest

from forkmerge.experiments.mix import mix
from forkmerge.experiments.run_results import read_run_results
from forkmerge.report import page_from
from text_corpora import write_causal, write_lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page")
    corpora = [write_lines(path / f"{name}.jsonl", name, 12) for name in ("da", "nb", "ru")]
    sizes = {"steps": 2, "interval": 1, "length": 16, "batch_size": 2}
    mix(corpora[0], corpora[1:], write_causal(path / "model"), out=path / "out", id_key="page", **sizes)
    return path / "out"


def test_the_mixture_comes_first_with_its_model_and_what_gave_the_test_away(folder: Path) -> None:
    page = page_from(folder)
    first = page.sections[0]
    titles = [item.title for item in first.items]
    assert [title.partition(":")[0].partition(";")[0] for title in titles] == [
        "bits per byte on test text, lower is better", "what each corpus was worth", "the mixture over time", "corpora"
    ]  # fmt: skip
    assert any("with the same id" in note for note in first.items[-1].notes)
    assert (page.kind, page.facts["model"]) == ("mixture", str(folder / "export/model"))
    assert page.headline.startswith("The mixture reaches ")
    assert "target only" in page.headline
    assert len(page.sections) > 2  # the comparison follows
    assert page.figures["change"].panels[0].y.labels


def test_a_page_reads_and_writes_no_model(folder: Path) -> None:
    (folder / "export").rename(folder / "elsewhere")
    try:
        assert page_from(folder).facts["model"] == "not written yet"
        assert not (folder / "export").exists()
    finally:
        (folder / "elsewhere").rename(folder / "export")


def test_a_mixture_that_has_not_ended_has_the_page_of_its_comparison(folder: Path) -> None:
    (ours,) = [run for run in read_run_results(folder) if run.method == "forkmerge-aux"]
    record = folder / ours.file
    hidden = record.rename(folder / "hidden")
    try:
        assert page_from(folder).kind == "comparison"
    finally:
        hidden.rename(record)
