"""The example that a new user starts from."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import error_of


def test_new_never_overwrites_and_wants_a_name_that_can_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("precious")
    assert "mine.py exists" in error_of("new", "mine.py")
    assert Path("mine.py").read_text() == "precious"
    assert "such as my_problem.py" in error_of("new", "my-problem.py")
    assert "such as my_problem.py" in error_of("new", "mine")
    assert error_of("new", "no/where.py") == "cannot write no/where.py: No such file or directory."
