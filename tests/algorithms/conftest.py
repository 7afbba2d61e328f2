"""A fixture for runs that are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forkmerge as fm
from problems import Refuse, counting_steps, fit


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Refuse]:
    """Expect `fit` to raise with a message; afterwards, assert that nothing was trained and no folder was made."""

    def refuse(message: str, *arguments: Any, error: type[Exception] = fm.ProblemError, **options: Any) -> None:
        with pytest.raises(error, match=message) as caught:
            fit(*arguments, **{"folder": tmp_path / "run", **options})
        assert "\n" not in str(caught.value)

    with counting_steps(monkeypatch) as trained:
        yield refuse
    assert trained == []
    assert not (tmp_path / "run").exists()
