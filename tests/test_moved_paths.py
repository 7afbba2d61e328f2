"""Paths of modules before they moved: imports of them, and folders that name them, go on working."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.util import find_spec

import pytest

import forkmerge
from forkmerge.moved_paths import MODULES, current_paths
from paths import ROOT


def test_every_new_place_exists_and_no_old_path_hides_a_module() -> None:
    assert MODULES
    assert not [path for places in MODULES.values() for path in places if find_spec(path) is None]
    files = [ROOT / "src" / old.replace(".", "/") for old in MODULES]
    assert not [str(file) for file in files if file.with_suffix(".py").exists() or (file / "__init__.py").exists()]


def test_an_old_module_gives_the_objects_of_its_new_places() -> None:
    old = importlib.import_module("forkmerge.branch")
    assert old.train_branch is importlib.import_module("forkmerge.engine.training.branch").train_branch
    assert old.Training is importlib.import_module("forkmerge.engine.training.options").Training
    assert forkmerge.branch is old
    assert "forkmerge.engine.training.branch" in (old.__doc__ or "")


def test_modules_of_a_package_that_moved_give_the_same_objects() -> None:
    old = importlib.import_module("forkmerge.solvers._nash")
    assert old.nash is importlib.import_module("forkmerge.methods.solvers._nash").nash
    assert importlib.import_module("forkmerge.solvers").nash is old.nash
    assert current_paths("forkmerge.solvers._cagrad:cagrad") == ["forkmerge.methods.solvers._cagrad:cagrad"]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("forkmerge.solvers._never_was")
    from forkmerge.problem import Losses, Predict, predict_pair  # a module that became a package

    assert Losses
    assert Predict
    assert predict_pair.__module__ == "forkmerge.problem.definition"


def test_a_name_that_is_in_no_new_place_is_missing_as_usual() -> None:
    old = importlib.import_module("forkmerge.branch")
    with pytest.raises(AttributeError, match=r"module 'forkmerge.branch' has no attribute 'nothing'"):
        _ = old.nothing
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("forkmerge.never_was")


def test_the_table_loads_nothing_by_itself() -> None:
    code = "import sys, forkmerge.moved_paths; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out.strip() == "False"


def test_a_stored_name_may_be_in_any_of_the_new_places() -> None:
    assert current_paths("forkmerge.branch:Training") == [
        "forkmerge.engine.training.branch:Training",
        "forkmerge.engine.training.options:Training",
    ]
    assert current_paths("forkmerge.datasets.digits:recipe") == []
    assert current_paths("just words") == []
