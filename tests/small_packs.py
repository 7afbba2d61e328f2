"""The small counterparts of the paper's data as miniature packs."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forkmerge as fm
from forkmerge.datasets import census, pacs, retailrocket, taskonomy, tmall

RNG = np.random.default_rng


def write_pacs(folder: Path, copies: int = 1) -> None:
    image = pytest.importorskip("PIL.Image")
    streams, domains, labels, split = [], [], [], []
    for index in range(4 * 7 * 3 * copies):
        buffer = io.BytesIO()
        colour = (30 * (index % 7), 60 * (index % 4), 90 + 20 * (index // 84))
        image.new("RGB", (64, 64), colour).save(buffer, "JPEG", quality=90)
        streams.append(buffer.getvalue())
        domains.append(index % 4)
        labels.append(index % 7)
        split.append(index // 28 % 3)
    np.savez(
        folder / pacs.FILE,
        jpeg=np.frombuffer(b"".join(streams), np.uint8),
        offsets=np.cumsum([0, *map(len, streams)]),
        labels=np.array(labels, np.uint8),
        domains=np.array(domains, np.uint8),
        split=np.array(split, np.uint8),
        class_names=np.array(["dog", "elephant", "giraffe", "guitar", "horse", "house", "person"]),
        domain_names=np.array(pacs.DOMAINS),
    )


def write_taskonomy(folder: Path) -> None:
    rng, n = RNG(0), 9
    normals = rng.normal(size=(n, 64, 64, 3))
    normals /= np.linalg.norm(normals, axis=3, keepdims=True)
    normals[:, :4] = 0
    depth = rng.random((n, 64, 64)) * 8
    depth[:, :, :5] = 0
    np.savez(
        folder / taskonomy.FILE,
        rgb=rng.integers(0, 256, (n, 64, 64, 3), dtype=np.uint8),
        depth=depth.astype(np.float16),
        normal=(127 * normals).round().astype(np.int8),
        surfseg=np.where(rng.random((n, 64, 64)) < 0.1, 255, rng.integers(0, 9, (n, 64, 64))).astype(np.uint8),
        semseg=rng.integers(0, 17, (n, 64, 64)).astype(np.uint8),
        split=np.arange(n, dtype=np.uint8) // 3,
    )


def write_census(folder: Path) -> None:
    rng, n = RNG(0), 300
    np.savez(
        folder / census.FILE,
        cat=rng.integers(0, [3, 5], (n, 2)).astype(np.uint8),
        cat_cardinality=np.array([3, 5]),
        num=np.hstack([rng.integers(0, 90, (n, 1)), np.zeros((n, 1))]).astype(np.float32),
        y=rng.integers(0, 2, (n, 3)).astype(np.uint8),
        task_names=np.array(census.TASKS),
        split=(np.arange(n) % 3).astype(np.uint8),
    )


def write_retailrocket(folder: Path) -> None:
    rng, n = RNG(0), 240
    np.savez(
        folder / retailrocket.FILE,
        user=rng.integers(0, 20, n).astype(np.uint16),
        item=rng.integers(0, 90, n).astype(np.uint16),
        timestamp=np.sort(rng.integers(1_430_000_000, 1_440_000_000, n)).astype(np.uint32),
        view=(rng.random(n) < 0.9).astype(np.uint8),
        cart=(rng.random(n) < 0.4).astype(np.uint8),
        buy=(rng.random(n) < 0.4).astype(np.uint8),
        split_time=(np.arange(n) * 3 // n).astype(np.uint8),
        n_users=np.int64(20),
        n_items=np.int64(90),
    )


def write_tmall(folder: Path) -> None:
    rng = RNG(0)
    arrays: dict[str, Any] = {"n_users": np.int64(15), "n_items": np.int64(80)}
    for name, n in (("buy", 200), ("cart", 160), ("fav", 120), ("test_buy", 20)):
        arrays[f"{name}_user"] = rng.integers(0, 15, n).astype(np.uint16)
        arrays[f"{name}_item"] = rng.integers(0, 80, n).astype(np.uint16)
        if name != "test_buy":
            arrays[f"{name}_timestamp"] = rng.permutation(n).astype(np.uint32)
    np.savez(folder / tmall.FILE, **arrays)


WRITERS: dict[str, tuple[Any, Callable[[Path], None]]] = {
    "pacs": (pacs, write_pacs),
    "taskonomy": (taskonomy, write_taskonomy),
    "census": (census, write_census),
    "retailrocket": (retailrocket, write_retailrocket),
    "tmall": (tmall, write_tmall),
}


def contents(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as arrays:
        return {key: arrays[key] for key in arrays.files}


def assert_recipe_trains(name: str, folder: Path) -> None:
    """The recipe of a pack trains, and each of its tasks can be the target."""
    module, write = WRITERS[name]
    write(folder)
    recipe = module.recipe(steps=2, interval=1)
    for task in recipe.problem.tasks:
        assert recipe.problem.with_target(task).target_validation is not None
    run = recipe.fit()
    values = fm.measure(run.model, recipe.problem.evaluations("test")[recipe.problem.target])
    assert values
    assert all(np.isfinite(value) for value in values.values())
