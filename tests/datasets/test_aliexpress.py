"""AliExpress in miniature: its countries, their split in time, and the paper's recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import Subset

import forkmerge as fm
from aliexpress_files import load_countries, write_country
from forkmerge.datasets import aliexpress
from forkmerge.experiments.recipe import recipe_from
from forkmerge.models import ESMM
from forkmerge.problem.batch_reader import reader_of


class TestBadFiles:
    def test_missing_files_are_named_with_where_to_get_them(self, tmp_path: Path) -> None:
        with pytest.raises(
            fm.ProblemError, match=r"AliExpress_NL/train.csv, AliExpress_NL/test.csv not found.*Tianchi"
        ):
            load_countries(tmp_path)

    def test_counts_of_the_paper_are_checked(self, tmp_path: Path) -> None:
        write_country(tmp_path, "NL")
        with pytest.raises(fm.ProblemError, match=r"AliExpress NL, rows: expected about 17,700,000.*found 40"):
            aliexpress.load(tmp_path, countries=["NL"], cache=tmp_path)

    def test_an_unknown_country_gets_the_closest(self, tmp_path: Path) -> None:
        with pytest.raises(fm.ProblemError, match="country 'UK'"):
            load_countries(tmp_path, "UK")


class TestProblem:
    def test_splits_each_country_in_time(self, tmp_path: Path) -> None:
        for seed, country in enumerate(("ES", "NL")):
            write_country(tmp_path, country, seed)
        problem = aliexpress.problem_of(load_countries(tmp_path, "ES", "NL"), "NL_CTCVR")
        assert problem.tasks == ("NL_CTCVR", "ES_CTR", "ES_CTCVR", "NL_CTR")
        parts = [
            problem.stream_map["NL"].dataset,
            problem.evaluations("validation")["NL_CTR"].dataset,
            problem.evaluations("test")["NL_CTCVR"].dataset,
        ]
        assert all(isinstance(part, Subset) for part in parts)
        assert [list(part.indices) for part in parts] == [list(range(36)), [36, 37], [38, 39]]

    def test_rows_are_read_in_whole_batches(self, tmp_path: Path) -> None:
        write_country(tmp_path, "NL")
        problem = aliexpress.problem_of(load_countries(tmp_path), "NL_CTR")
        reader = reader_of(problem.stream_map["NL"])
        assert reader is not None
        assert reader.read(torch.tensor([3, 35]))[1].shape == (2, 63)

    @pytest.mark.parametrize(
        ("target", "epoch"), [("ES_CTR", 13886), ("ES_CTCVR", 13886), ("FR_CTR", 12041), ("NL_CTCVR", 7778)]
    )
    def test_the_recipe_has_50_epochs_of_the_targets_country(self, tmp_path: Path, target: str, epoch: int) -> None:
        for country in aliexpress.COUNTS:
            write_country(tmp_path, country)
        options = {"root": str(tmp_path), "cache": str(tmp_path / "c"), "check_counts": False}
        assert aliexpress.recipe(target, **options).steps == 50 * epoch  # 90% of the paper's rows over 2048
        source = {"recipe": "forkmerge.datasets.aliexpress:recipe", "arguments": options, "target": target}
        assert recipe_from({"settings": source, "folders": []}).steps == 50 * epoch

    def test_the_recipe_trains(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setattr(aliexpress, "BATCH", 8)
        for seed, country in enumerate(("ES", "NL")):
            write_country(tmp_path, country, seed, (150, 10))
        recipe = aliexpress.recipe(
            "NL_CTR", ("ES", "NL"), steps=2, root=str(tmp_path), cache=str(tmp_path / "c"), check_counts=False
        )
        assert isinstance(recipe.model(), ESMM)
        run = recipe.fit()
        assert len(run.rounds) == 2
        assert 0 <= fm.measure(run.model, recipe.problem.evaluations("test")["NL_CTR"])["AUC"] <= 1
