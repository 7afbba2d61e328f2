"""--executor, --address and --workers, over a recipe's own table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import forkmerge as fm
from command_line import TINY, error_of, invoke
from forkmerge.algorithms.saved_run import read_saved_run
from forkmerge.cli.executor_arguments import ExecutorArguments
from forkmerge.engine.executors.executor_options import LocalOptions

RAY = {"executor": "ray", "workers": 4, "num_gpus": 1}


@pytest.mark.parametrize(
    ("where", "own", "table"),
    [
        (ExecutorArguments(), None, {}),
        (ExecutorArguments(workers=3), None, {}),
        (ExecutorArguments("ray"), None, {"executor": "ray"}),
        (ExecutorArguments(address="h:1", workers=2), None, {"executor": "ray", "address": "h:1", "workers": 2}),
        (ExecutorArguments(), RAY, RAY),
        (ExecutorArguments(workers=2), RAY, {**RAY, "workers": 2}),
        (ExecutorArguments("ray", "auto"), RAY, {**RAY, "address": "auto"}),
        (ExecutorArguments("processes"), RAY, {"executor": "processes", "workers": 4}),
    ],
)
def test_what_is_typed_goes_over_the_table(where: ExecutorArguments, own: Any, table: Any) -> None:
    assert where.table(own) == table


def test_an_executor_comes_of_it() -> None:
    assert ExecutorArguments().options() is None
    assert ExecutorArguments("processes", workers=3).options() == LocalOptions(3)
    assert ExecutorArguments("ray", "auto").options(RAY) == fm.Ray(workers=4, num_gpus=1, address="auto")


def test_an_unknown_executor_is_an_error_of_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny.py").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "unknown executor 'rya'. Did you mean 'ray'?" in error_of("run", "tiny:recipe", "--executor", "rya")


def test_a_run_on_ray_is_a_run_here_and_resumes_there(
    on_ray: fm.Ray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.py").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ("--no-reference", "--set", "training.threads=1")
    invoke("run", "tiny:recipe", "--out", "here", *words)
    invoke("run", "tiny:recipe", "--out", "there", "--executor", "ray", "--workers", 2, *words)
    one, other = (read_saved_run(tmp_path / name) for name in ("here", "there"))
    assert one.run is not None
    assert other.run is not None
    assert one.run.coefficients == other.run.coefficients
    assert (tmp_path / "here/model.safetensors").read_bytes() == (tmp_path / "there/model.safetensors").read_bytes()
    assert other.source["execution"] == {"executor": "ray", "workers": 2}
