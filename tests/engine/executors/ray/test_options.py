"""`Ray(...)`: wrong options are refused where they are given, and nothing heavy is imported for them."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import forkmerge as fm


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers must be a positive integer, got 0"),
        ({"attempts": 0}, "attempts must be a positive integer, got 0"),
        ({"num_cpus": 0}, "num_cpus must be more than 0, got 0"),
        ({"num_gpus": -1}, "num_gpus must be 0 or more, got -1"),
        ({"num_gpus": True}, "num_gpus must be 0 or more, got True"),
        ({"address": "ray://head:10001"}, "is an address of Ray's client.*ray job submit"),
        ({"working_dir": "/nowhere/at/all"}, "working_dir '/nowhere/at/all' is not a folder"),
    ],
)
def test_wrong_options_are_refused(options: Any, message: str) -> None:
    with pytest.raises(fm.ProblemError, match=message):
        fm.Ray(**options)


def test_without_ray_the_error_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forkmerge.errors.find_spec", lambda name: None if name == "ray" else find_spec(name))
    with pytest.raises(fm.ProblemError, match=r"Ray needs ray: type pip install 'forkmerge\[ray\]'"):
        fm.Ray()


def test_threads_are_the_cpus_of_a_worker(tmp_path: Path) -> None:
    assert [fm.Ray(num_cpus=count).threads for count in (0.5, 1, 4)] == [1, 1, 4]
    assert fm.Ray(working_dir=str(tmp_path)).devices == ()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_workers_with_gpus_need_one_here() -> None:
    with pytest.raises(fm.ProblemError, match="device 'cuda:0' cannot be used"):
        fm.Ray(num_gpus=1).devices  # noqa: B018 (no GPU is there)


def test_options_do_not_import_ray() -> None:
    code = "import sys, forkmerge as fm; fm.Ray(workers=2); assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
