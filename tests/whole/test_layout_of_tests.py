"""Every test file lies at the path of its module, and every module has one; other themes are in tests/whole."""

from __future__ import annotations

from pathlib import Path

from paths import ROOT, TESTS

PACKAGE = ROOT / "src" / "forkmerge"

WITHOUT_A_TEST_FILE = {
    "cli/__main__.py": "two lines, which every test of a command in a process of its own runs",
    "cli/options.py": "declarations, which the tests of every command type",
    "experiments/events.py": "the type of a callback, and one that does nothing",
    "report/colours.py": "constants, which the figures are made of",
}
"""Modules without a test file of their own, and why."""


def modules() -> dict[str, Path]:
    """Every module that is more than names of others, and where its test file belongs."""
    paths = [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))]
    return {
        path.as_posix(): path.parent / f"test_{path.name.lstrip('_')}"
        for path in paths
        if path.name not in ("__init__.py", "_version.py") and "templates" not in path.parts
    }


def packages() -> set[Path]:
    """Where the test file of a package belongs: what is true of all its modules."""
    folders = (path.parent.relative_to(PACKAGE) for path in PACKAGE.rglob("__init__.py"))
    return {folder / f"test_{folder.name}.py" for folder in folders if folder.name}


def files_of_tests() -> set[Path]:
    """Every test file outside of tests/whole."""
    paths = {path.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    return {path for path in paths if path.parts[0] != "whole"}


def test_every_module_has_a_test_file_at_its_path() -> None:
    excused = WITHOUT_A_TEST_FILE.keys()
    missing = [module for module, path in modules().items() if path not in files_of_tests() and module not in excused]
    assert not missing


def test_every_test_file_lies_at_the_path_of_a_module_or_a_package() -> None:
    assert not sorted(map(str, files_of_tests() - set(modules().values()) - packages()))


def test_no_excuse_outlives_its_reason() -> None:
    """A module that is gone, or has a test file by now, needs none."""
    needed = {module for module, path in modules().items() if path not in files_of_tests()}
    assert not sorted(WITHOUT_A_TEST_FILE.keys() - needed)


def test_a_folder_of_whole_themes_has_no_folders() -> None:
    assert not [path for path in (TESTS / "whole").iterdir() if path.is_dir() and path.name != "__pycache__"]
