"""Images kept as one stream of JPEG bytes: decoded once, and named where they are damaged."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

import forkmerge as fm
from few_label_files import same
from forkmerge.datasets import cifar10, svhn


def test_jpeg_packs_are_decoded_once(tmp_path: Path, monkeypatch) -> None:
    image = pytest.importorskip("PIL.Image")
    wanted, arrays = {}, {}
    for part, count in (("train", 5), ("test", 3)):
        streams = []
        for index in range(count):
            buffer = io.BytesIO()
            image.new("RGB", (32, 32), (40 * index, 10, 200)).save(buffer, "JPEG", quality=95)
            streams.append(buffer.getvalue())
        arrays[f"jpeg_{part}"] = np.frombuffer(b"".join(streams), np.uint8)
        arrays[f"offsets_{part}"] = np.cumsum([0, *map(len, streams)])
        arrays[f"y_{part}"] = np.arange(count, dtype=np.uint8)
        wanted[part] = np.stack([np.asarray(image.open(io.BytesIO(s))).transpose(2, 0, 1) for s in streams])
    np.savez(tmp_path / "cifar10_jpeg.npz", **arrays)
    cache = tmp_path / "cache"
    first = cifar10.load(tmp_path, cache=cache)
    assert np.array_equal(first.images.numpy(), wanted["train"])
    assert np.array_equal(first.test_images.numpy(), wanted["test"])
    assert first.classes.tolist() == [0, 1, 2, 3, 4]
    monkeypatch.setattr(image, "open", None)  # a second decoding would fail
    assert same(cifar10.load(tmp_path, cache=cache), first)
    cache.chmod(0o777)
    with pytest.raises(fm.StoreError, match="cache can be written by other users"):
        cifar10.load(tmp_path, cache=cache)


def test_a_damaged_pack_is_named(tmp_path: Path) -> None:
    path = tmp_path / "svhn_jpeg.npz"
    path.write_bytes(b"PK\x03\x04 not a zip")
    with pytest.raises(fm.ProblemError, match=r"cannot read .*svhn_jpeg.npz"):
        svhn.load(tmp_path)
    np.savez(path, jpeg_train=np.zeros(3, np.uint8))
    with pytest.raises(fm.ProblemError, match=r"has no array 'offsets_train'"):
        svhn.load(tmp_path)
    np.savez(path, jpeg_train=np.zeros(3, np.uint8), offsets_train=np.array([0, 3]))
    with pytest.raises(fm.ProblemError, match=r"cannot decode the image .*svhn_jpeg.npz image 0"):
        svhn.load(tmp_path, cache=tmp_path)


def test_impossible_classes_of_a_pack_are_named(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    image.new("RGB", (32, 32)).save(buffer, "JPEG")
    arrays: dict[str, np.ndarray] = {}
    for part, kind in (("train", 3), ("test", 10)):
        arrays[f"jpeg_{part}"] = np.frombuffer(buffer.getvalue(), np.uint8)
        arrays[f"offsets_{part}"] = np.array([0, len(buffer.getvalue())])
        arrays[f"y_{part}"] = np.array([kind])
    for module, name in ((cifar10, "cifar10_jpeg.npz"), (svhn, "svhn_jpeg.npz")):
        np.savez(tmp_path / name, **arrays)
        with pytest.raises(fm.ProblemError, match=rf"{name}: y_test holds 10, expected 0 to 9"):
            module.load(tmp_path, cache=tmp_path)
