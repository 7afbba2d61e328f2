"""Pickled arrays, read without running anything in the file."""

from __future__ import annotations

import io
import os
import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import forkmerge as fm
from few_label_files import rows
from forkmerge.datasets import _pickles
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

    def refused(self, folder: Path, data: bytes) -> str:
        """What is said of a pickle, which must cost little."""
        tracemalloc.start()
        try:
            with pytest.raises(fm.ProblemError, match="data_batch_1") as caught:
                self.read(folder, data)
            assert tracemalloc.get_traced_memory()[1] < 50e6 + 20 * len(data)
        finally:
            tracemalloc.stop()
        return str(caught.value)

    def test_a_large_number_in_the_memo_takes_no_memory(self, tmp_path: Path) -> None:
        self.read(tmp_path, b"\x80\x02}r\xff\xff\xff\x7f.")
        assert "cannot read" in self.refused(tmp_path, b"\x80\x02}j\xff\xff\xff\x7f.")

    @pytest.mark.parametrize("opcode", [b"\x8e", b"\x96", b"\x8d"], ids=["bytes", "bytearray", "text"])
    def test_promised_bytes_that_are_not_there(self, tmp_path: Path, opcode: bytes) -> None:
        assert "cannot read" in self.refused(tmp_path, b"\x80\x05}" + opcode + (2**40).to_bytes(8, "little") + b"x.")

    def test_a_key_that_holds_itself_twice_and_twice_again(self, tmp_path: Path) -> None:
        assert "a tuple as a key" in self.refused(tmp_path, b"\x80\x02})" + b"2\x86" * 60 + b"Ns.")

    def test_a_list_that_holds_itself_twice_and_twice_again(self, tmp_path: Path) -> None:
        assert "a tuple in 'data'" in self.refused(tmp_path, b"\x80\x02}U\x04data)" + b"2\x86" * 60 + b"s.")
        assert "a list in 'data'" in self.refused(tmp_path, pickle.dumps({"data": [[1], [2]]}))

    @pytest.mark.parametrize("name", [b"cnumpy\ndtype\n", b"c_codecs\nencode\n"], ids=["dtype", "encode"])
    def test_what_is_no_text_is_never_printed(self, tmp_path: Path, name: bytes) -> None:
        nested = b")" + b"2\x86" * 60
        rest = b"\x85" if b"dtype" in name else b"X\x06\0\0\0latin1\x86"
        assert "where text is expected" in self.refused(tmp_path, b"\x80\x02}U\x04data" + name + nested + rest + b"Rs.")

    def test_bytes_do_not_multiply(self, tmp_path: Path) -> None:
        text = b"X" + (1 << 20).to_bytes(4, "little") + b"a" * (1 << 20) + b"q\1"
        once = b"c_codecs\nencode\nh\1X\x06\0\0\0latin1\x86Ra"
        data = b"\x80\x02}U\x04data]" + text + b"a" + once * 1000 + b"s."
        assert "more bytes than it has" in self.refused(tmp_path, data)

    def test_nesting_and_many_operations(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "a tuple in 'data'" in self.refused(tmp_path, b"\x80\x02}U\x04data)" + b"\x85" * 20_000 + b"s.")
        assert "cannot read" in self.refused(tmp_path, b"\x80\x02" + b"(" * 20_000 + b".")
        monkeypatch.setattr(_pickles, "_MOST_OPERATIONS", 1000)
        assert "more than 1000 operations" in self.refused(tmp_path, b"\x80\x02}" + b"N0" * 1000 + b".")
