"""SVHN from MATLAB files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import forkmerge as fm
from few_label_files import digits, write_svhn
from forkmerge.datasets import svhn


@pytest.mark.parametrize("compress", [False, True])
def test_is_read_from_matlab_files(tmp_path: Path, compress: bool) -> None:
    write_svhn(tmp_path, compress)
    images = svhn.load(tmp_path)
    pixels, labels = digits(0, 60)
    for index in (0, 7, 59):
        assert np.array_equal(images.images[index].numpy(), pixels[..., index].transpose(2, 0, 1))
    assert images.classes.tolist() == [int(label) % 10 for label in labels]
    assert len(images.test_images) == 20


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(fm.ProblemError, match=r"train_32x32.mat, test_32x32.mat not found.*Stanford"):
        svhn.load(tmp_path)


@pytest.mark.parametrize("compress", [False, True])
def test_truncated_files_are_named(tmp_path: Path, compress: bool) -> None:
    write_svhn(tmp_path, compress)
    path = tmp_path / "train_32x32.mat"
    whole = path.read_bytes()
    for length in (0, 64, 128, 130, 200, len(whole) // 2, len(whole) - 3):
        path.write_bytes(whole[:length])
        with pytest.raises(fm.ProblemError, match=r"train_32x32.mat"):
            svhn.load(tmp_path)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    write_svhn(tmp_path)
    path = tmp_path / "test_32x32.mat"
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 0xFF
    path.write_bytes(whole)
    with pytest.raises(fm.ProblemError, match=r"test_32x32.mat"):
        svhn.load(tmp_path)


def test_counts_of_the_paper_are_checked(tmp_path: Path) -> None:
    write_svhn(tmp_path)
    with pytest.raises(fm.ProblemError, match="expected 73,257"):
        svhn.splits(tmp_path)
