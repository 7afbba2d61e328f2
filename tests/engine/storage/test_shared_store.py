"""States that several runs have in common: kept once, whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forkmerge.engine.storage.shared_store import SharedStore


def value() -> dict[str, object]:
    return {"state": {"rows": {"a": torch.arange(6.0)}, "step": 3}, "result": {"sums": {"tgt": [1.5, 1e-30]}}}


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_value_comes_back_as_it_was_and_belongs_to_whoever_asks(on_disk: bool, tmp_path: Path) -> None:
    states = SharedStore(tmp_path / "shared" if on_disk else None)
    assert states.get("key") is None
    kept = value()
    states.put("key", kept)
    kept["state"]["rows"]["a"].zero_()
    first = states.get("key")
    assert torch.equal(first["state"]["rows"]["a"], torch.arange(6.0))
    assert first["result"] == value()["result"]
    first["state"]["rows"]["a"].zero_()
    assert torch.equal(states.get("key")["state"]["rows"]["a"], torch.arange(6.0))
    states.put("key", {"other": 1})
    assert "other" not in states.get("key"), "the first one stays"
    states.clear()
    assert states.get("key") is None
    assert not (tmp_path / "shared").exists()


@pytest.mark.parametrize("file", ["state.safetensors", "state.json", "manifest.json"])
def test_what_is_damaged_counts_as_not_there_and_is_made_again(file: str, tmp_path: Path) -> None:
    states = SharedStore(tmp_path)
    states.put("key", value())
    path = tmp_path / "key" / file
    path.write_bytes(path.read_bytes()[:-3] + b"xyz")
    assert states.get("key") is None
    states.put("key", value())
    assert states.get("key") is not None
