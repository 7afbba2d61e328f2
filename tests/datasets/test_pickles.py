"""Pickled arrays, read without running anything in the file."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

import forkmerge as fm
from few_label_files import rows
from forkmerge.datasets._pickles import read_arrays


class Spy:
    def __init__(self, call: tuple) -> None:
        self.call = call

    def __reduce__(self) -> tuple:
        return self.call


class Built:
    def __init__(self, state: object) -> None:
        self.state = state

    def __reduce__(self) -> tuple:
        return np._core.multiarray._reconstruct, (np.ndarray, (0,), b"b"), self.state


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_pickles_of_today_are_read_too(tmp_path: Path, protocol: int) -> None:
    data, labels = rows(0)
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps({b"data": data, "labels": labels.tolist()}, protocol=protocol))
    content = read_arrays(path)
    assert np.array_equal(content["data"], data)
    assert content["labels"] == labels.tolist()


def test_arrays_keep_their_order_and_dtype(tmp_path: Path) -> None:
    path = tmp_path / "arrays"
    arrays = {
        "fortran": np.asfortranarray(np.arange(12, dtype=">f4").reshape(3, 4)),
        "flags": np.array([True, False]),
        "empty": np.zeros((0, 3), np.int64),
    }
    path.write_bytes(pickle.dumps(arrays))
    content = read_arrays(path)
    for name, array in arrays.items():
        assert np.array_equal(content[name], array)
        assert content[name].shape == array.shape


class TestHostilePickles:
    def read(self, folder: Path, value: object) -> None:
        path = folder / "data_batch_1"
        path.write_bytes(value if isinstance(value, bytes) else pickle.dumps(value))
        read_arrays(path)

    @pytest.mark.parametrize(
        "call", [(os.mkdir, ("owned",)), (eval, ("1",)), (getattr, ({}, "keys")), (np.load, ("x",)), (io.BytesIO, ())]
    )
    def test_nothing_is_called(self, tmp_path: Path, monkeypatch, call: tuple) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(fm.ProblemError, match="only arrays are read"):
            self.read(tmp_path, {"data": Spy(call)})
        assert not (tmp_path / "owned").exists()

    def test_arrays_of_objects_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(fm.ProblemError, match=r"dtype 'O8'"):
            self.read(tmp_path, {"data": np.array([{}], dtype=object)})

    def test_structured_arrays_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(fm.ProblemError, match=r"dtype 'V"):
            self.read(tmp_path, {"data": np.zeros(2, dtype=[("a", "u1"), ("b", "f4")])})

    def test_a_shape_that_does_not_fit_the_bytes_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(fm.ProblemError, match="cannot read"):
            self.read(tmp_path, {"data": Built((1, (1000,), np.dtype("u1"), False, b"123"))})

    def test_codecs_other_than_latin1_are_refused(self, tmp_path: Path) -> None:
        import _codecs

        with pytest.raises(fm.ProblemError, match=r"a call of _codecs.encode"):
            self.read(tmp_path, {"data": Spy((_codecs.encode, ("abc", "zip")))})

    def test_names_cannot_be_changed(self, tmp_path: Path) -> None:
        with pytest.raises(fm.ProblemError, match=r"a change of numpy.dtype"):
            self.read(tmp_path, b"\x80\x02}U\x04datacnumpy\ndtype\n}U\x01aK\x01sbs.")

    def test_persistent_objects_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(fm.ProblemError, match="stored elsewhere"):
            self.read(tmp_path, b"\x80\x02}U\x04dataU\x01xQs.")

    def test_something_else_than_a_dict_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(fm.ProblemError, match="holds a list"):
            self.read(tmp_path, [1])
