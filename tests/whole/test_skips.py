"""No test is left out unnoticed: a skip that tests/skips.py does not list fails the suite."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paths import TESTS


def run_pytest(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-m", "pytest", "-p", "skips", "-p", "no:cacheprovider", *options, "."]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("options", [["-p", "no:xdist"], ["-n", "1"]], ids=["alone", "workers"])
def test_a_skip_that_is_not_listed_fails_the_suite_and_is_named(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "test_whole_file.py").write_text("import pytest\npytest.importorskip('no_such_library')\n")
    text = "import pytest\ndef test_a(): pass\ndef test_b(): pytest.importorskip('no_such_library')\n"
    done = run_pytest(tmp_path, text, *options)
    assert done.returncode == 1, done.stdout
    for place in ("test_it.py::test_b", "test_whole_file.py"):
        assert f"{place}: could not import 'no_such_library'" in done.stdout


def test_a_listed_skip_and_an_expected_failure_do_not(tmp_path: Path) -> None:
    text = (
        "import pytest\n"
        "@pytest.mark.skip(reason='there is a GPU')\ndef test_a(): pass\n"
        "@pytest.mark.xfail(reason='a bug of somebody else')\ndef test_b(): assert False\n"
    )
    done = run_pytest(tmp_path, text, "-p", "no:xdist")
    assert done.returncode == 0, done.stdout
    assert "does not list" not in done.stdout


def test_the_suite_itself_looks() -> None:
    import skips

    assert "from skips import" in (TESTS / "conftest.py").read_text("utf-8")
    assert not skips.is_listed("could not import 'trl': No module named 'trl'")


def test_every_listed_reason_is_one_that_some_test_has() -> None:
    """Reasons that are made while the tests run are looked for by their first words."""
    import skips

    files = [path for path in TESTS.rglob("*.py") if path.name not in ("skips.py", "test_skips.py")]
    text = "".join(path.read_text("utf-8") for path in files)
    for pattern in skips.LISTED:
        words = pattern.replace("\\+", "+").replace("could not import ", "importorskip(").replace("'", '"')
        plain = [part for part in words.replace("(/dev/full is )?", "").replace("\\w+", "").split(".*") if part]
        plain = [part.replace("\\S+", "").strip() for part in plain]
        assert all(part in text for part in plain), pattern
