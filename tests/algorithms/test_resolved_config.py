"""The config a run's folder holds: folders that cannot be used, and runs that were started differently."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

import forkmerge as fm
from problems import counting_steps, fit


class TestFolders:
    def test_a_folder_that_exists_is_refused_with_both_ways_out(self, monkeypatch: Any, tmp_path: Path) -> None:
        (tmp_path / "mine").write_text("precious")
        with counting_steps(monkeypatch) as trained, pytest.raises(fm.StoreError, match="exists and is not an empty"):
            fit(folder=tmp_path)
        assert trained == []
        assert [item.name for item in tmp_path.iterdir()] == ["mine"]

    def test_a_finished_run_is_not_overwritten(self, tmp_path: Path) -> None:
        fit(folder=tmp_path / "run", steps=2)
        with pytest.raises(fm.StoreError, match=r"choose another folder or continue it with `forkmerge resume"):
            fit(folder=tmp_path / "run", steps=2)

    def test_a_folder_below_a_file_cannot_be_made(self, monkeypatch: Any, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with counting_steps(monkeypatch) as trained, pytest.raises(fm.StoreError, match="cannot create the run folder"):
            fit(folder=tmp_path / "file" / "run")
        assert trained == []

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_a_folder_that_cannot_be_written(self, monkeypatch: Any, tmp_path: Path) -> None:
        tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
        try:
            with counting_steps(monkeypatch) as trained, pytest.raises(fm.StoreError, match="Permission denied"):
                fit(folder=tmp_path / "run")
            assert trained == []
        finally:
            tmp_path.chmod(stat.S_IRWXU)

    def test_resuming_or_keeping_branches_needs_a_folder(self, monkeypatch: Any) -> None:
        with counting_steps(monkeypatch) as trained:
            with pytest.raises(fm.StoreError, match="resume=True needs the folder of the run: pass folder="):
                fit(resume=True)
            with pytest.raises(fm.ProblemError, match="keep_branches=True needs a folder to keep them in"):
                fit(fm.ForkMerge(keep_branches=True))
        assert trained == []

    def test_resuming_a_folder_that_is_no_run_is_refused(self, monkeypatch: Any, tmp_path: Path) -> None:
        (tmp_path / "mine").write_text("precious")
        with counting_steps(monkeypatch) as trained, pytest.raises(fm.StoreError, match="is not a run folder"):
            fit(folder=tmp_path, resume=True)
        assert trained == []
