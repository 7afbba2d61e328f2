"""CIFAR-10 and SVHN in miniature, in the formats their authors distribute."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from forkmerge.datasets.semi import Images

BATCH, SIDE = 20, 32
NAMES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def rows(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Twenty images as CIFAR-10 stores them, [20, 3072], two of every class."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (BATCH, 3 * SIDE * SIDE), dtype=np.uint8), rng.permutation(np.arange(BATCH) % 10)


def expected() -> Images:
    parts = [rows(seed) for seed in range(6)]
    images = [torch.from_numpy(data.reshape(-1, 3, SIDE, SIDE)) for data, _ in parts]
    classes = [torch.from_numpy(labels) for _, labels in parts]
    return Images(torch.cat(images[:5]), torch.cat(classes[:5]), images[5], classes[5])


def write_binary(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(NAMES):
        data, labels = rows(seed)
        (folder / f"{name}.bin").write_bytes(np.hstack([labels[:, None].astype(np.uint8), data]).tobytes())


def python2_pickle(data: np.ndarray, labels: np.ndarray) -> bytes:
    """The bytes that Python 2 wrote for {'data': array, 'labels': list, 'batch_label': str}."""
    shape = b"K" + bytes([len(data)]) + b"M\x00\x0c\x86"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85U\x01b\x87Rq\x03"
        b"(K\x01" + shape + b"cnumpy\ndtype\nq\x04U\x02u1K\x00K\x01\x87Rq\x05"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T" + len(data.tobytes()).to_bytes(4, "little")
    )
    numbers = b"](" + b"".join(b"K" + bytes([int(label)]) for label in labels) + b"e"
    return (
        b"\x80\x02}q\x00(U\x04data" + array + data.tobytes() + b"tbU\x06labels" + numbers
        + b"U\x0bbatch_labelU\x15training batch 1 of 5u."
    )  # fmt: skip


def write_python(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(NAMES):
        data, labels = rows(seed)
        (folder / name).write_bytes(python2_pickle(data, labels))


def same(images: Images, wanted: Images) -> bool:
    return all(torch.equal(a, b) for a, b in zip(images, wanted, strict=True))


def digits(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (SIDE, SIDE, 3, count), dtype=np.uint8), rng.permutation(np.arange(count) % 10 + 1)


def write_svhn(folder: Path, compress: bool = True) -> None:
    savemat = pytest.importorskip("scipy.io").savemat
    for name, seed, count in (("train", 0, 60), ("test", 1, 20)):
        pixels, labels = digits(seed, count)
        content = {"X": pixels, "y": labels[:, None].astype(np.uint8)}
        savemat(folder / f"{name}_32x32.mat", content, do_compression=compress)
