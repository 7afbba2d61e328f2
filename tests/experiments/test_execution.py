"""[execution] in a recipe file: where it is carried out, and nothing else of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import forkmerge as fm
from forkmerge.engine.executors.executor_options import LocalOptions
from forkmerge.experiments.execution import execution_from, with_workers


def test_a_table_names_an_executor() -> None:
    assert execution_from({}) is None
    assert execution_from({"workers": 3}) == LocalOptions(3)
    assert execution_from({"executor": "ray", "workers": 4, "num_gpus": 1}) == fm.Ray(workers=4, num_gpus=1)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"executor": "rya"}, r"\[execution\] unknown executor 'rya'. Did you mean 'ray'\? Known: processes, ray"),
        ({"executor": "processes", "num_gpus": 1}, r"with executor = 'processes': unknown key 'num_gpus'"),
        ({"executor": "ray", "wokers": 1}, r"\[execution\]: unknown key 'wokers'. Did you mean 'workers'"),
        ({"executor": "ray", "workers": 0}, r"\[execution\] workers must be a positive integer, got 0"),
        ("ray", r"\[execution\] must be a table, got 'ray'"),
    ],
)
def test_a_wrong_table_is_refused(table: Any, message: str) -> None:
    with pytest.raises(fm.ConfigError, match=message):
        execution_from(table)


def test_a_number_of_workers_changes_an_executor_and_makes_none() -> None:
    assert with_workers(fm.Ray(workers=4), 2) == fm.Ray(workers=2)
    assert with_workers(fm.Ray(workers=4), None) == fm.Ray(workers=4)
    assert with_workers(None, 2) is None


def test_a_recipe_carries_it_out_there_with_the_settings_of_any_other(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text('recipe = "compare_problem:recipe"\n[execution]\nexecutor = "ray"\nworkers = 3\n')
    recipe = fm.load_recipe(file)
    assert recipe.executor == fm.Ray(workers=3)
    assert "execution" not in recipe.source["settings"]
    assert recipe.source["execution"] == {"executor": "ray", "workers": 3}
