"""A make-believe run and its folder, for tests of what a run folder keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from forkmerge.engine.storage import json_codec
from forkmerge.engine.storage.run_folder import RunFolder

CHECKSUMS = ("sha256", "crc32", "run_id")
CONFIG = {"steps": 10, "betas": (0.9, 0.999), "clip": float("inf")}


def state(step: int) -> dict[Any, Any]:
    row = torch.arange(12.0) * step
    return {
        "step": step,
        "row": row,
        "view": row[2:5],
        "half": torch.full((3,), step, dtype=torch.bfloat16),
        "scores": [float("nan"), 0.1 * step],
        7: (torch.tensor(step), torch.zeros(0)),
    }


def same(left: Any, right: Any) -> bool:
    """Equal text and equal tensor bits."""
    (text, tensors), (other_text, other_tensors) = json_codec.pack(left), json_codec.pack(right)
    return text == other_text and all(
        tensor.dtype == other_tensors[name].dtype and torch.equal(tensor, other_tensors[name])
        for name, tensor in tensors.items()
    )


def lines(until: int) -> list[dict[str, int]]:
    return [{"step": step} for step in range(1, until + 1)]


def advance(folder: RunFolder, step: int) -> None:
    """One step of a make-believe run: a line of the record and a checkpoint."""
    folder.record({"step": step})
    folder.save(state(step), step)


def make_run(path: Path, steps: int) -> Path:
    with RunFolder.create(path, CONFIG) as folder:
        for step in range(1, steps + 1):
            advance(folder, step)
        folder.record({"step": steps + 1})
    return path


def as_earlier_version(folder: Path, **changes: Any) -> Path:
    """Make a run's folder what a version without checksums and run ids left, with some keys of its config changed."""
    for name in ("config.json", "result.json"):
        if (folder / name).exists():
            data = without_checksums((folder / name).read_bytes())
            (folder / name).write_text(json.dumps({**data, **(changes if name == "config.json" else {})}))
    record = folder / "record.jsonl"
    text = record.read_bytes()
    for path in folder.glob("*/*/manifest.json"):
        manifest = json.loads(path.read_text())["content"]
        offset = len(_earlier_lines(text[: manifest["record_offset"]]))
        kept = {key: manifest[key] for key in manifest if key not in ("run_id", "config")}
        path.write_bytes(json_codec.seal({**kept, "record_offset": offset}))
    record.write_bytes(_earlier_lines(text))
    if (rounds := folder / "rounds.jsonl").exists():
        rounds.write_bytes(_earlier_lines(rounds.read_bytes()))
    return folder


def without_checksums(text: bytes) -> dict[str, Any]:
    """The object in a JSON text, without what tells it from one of an earlier version."""
    return {key: value for key, value in json.loads(text).items() if key not in CHECKSUMS}


def _earlier_lines(text: bytes) -> bytes:
    return b"".join(json_codec.encode(without_checksums(line)) for line in text.splitlines())


def names(path: Path) -> set[str]:
    return {str(item.relative_to(path)) for item in path.rglob("*")}
