"""Fixtures of data sets: a few images, and a folder for miniature packs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor


@pytest.fixture
def images() -> Tensor:
    return torch.randint(0, 256, (5, 3, 8, 8), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("FORKMERGE_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path
