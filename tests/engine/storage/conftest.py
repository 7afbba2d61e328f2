"""What the tests of storage share: a quick disk, and faults of it."""

from __future__ import annotations

import os

import pytest

from disk_faults import Faults


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power cut happens here, so waiting for the disk would only cost time; its order has its own test."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
