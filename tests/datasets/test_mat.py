"""MATLAB's files of version 5, as far as numeric arrays go."""

from __future__ import annotations

import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest

import forkmerge as fm
from forkmerge.datasets._mat import read_mat


def test_every_kind_of_array_is_read_as_scipy_reads_it(tmp_path: Path) -> None:
    scipy = pytest.importorskip("scipy.io")
    kinds = ("f8", "f4", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")
    content = {f"a_{kind}": np.arange(24).reshape(2, 3, 4).astype(kind) for kind in kinds}
    content |= {"short": np.array([[1, 2]], np.uint8), "a_name_longer_than_eight": np.ones((3, 1)), "text": "hello"}
    scipy.savemat(tmp_path / "all.mat", content, long_field_names=True)
    names = [name for name in content if name != "text"]
    arrays, wanted = read_mat(tmp_path / "all.mat", names), scipy.loadmat(tmp_path / "all.mat")
    for name in names:
        assert np.array_equal(arrays[name], wanted[name])
        assert arrays[name].dtype == wanted[name].dtype


def test_big_endian_files_are_read(tmp_path: Path) -> None:
    def element(kind: int, data: bytes) -> bytes:
        return kind.to_bytes(4, "big") + len(data).to_bytes(4, "big") + data + b"\0" * (-len(data) % 8)

    matrix = element(6, (9).to_bytes(4, "big") + b"\0" * 4) + element(5, np.array([2, 1], ">i4").tobytes())
    matrix += element(1, b"y") + element(4, np.array([1, 258], ">u2").tobytes())
    header = b"MATLAB 5.0 MAT-file".ljust(124) + b"\x01\x00MI"
    (tmp_path / "big.mat").write_bytes(header + element(14, matrix))
    with pytest.raises(fm.ProblemError, match="no variable X"):
        read_mat(tmp_path / "big.mat", ["X"])
    matrix = matrix.replace((9).to_bytes(4, "big") + b"\0" * 4, (11).to_bytes(4, "big") + b"\0" * 4)
    (tmp_path / "big.mat").write_bytes(header + element(14, matrix))
    assert read_mat(tmp_path / "big.mat", ["y"])["y"].tolist() == [[1], [258]]


@pytest.mark.parametrize(
    ("flags", "lengths"), [(b"", [1, 1]), (b"\x09\0\0\0\0\0\0\0", [-1, -1])], ids=["no flags", "no shape"]
)
def test_impossible_variables_are_named(tmp_path: Path, flags: bytes, lengths: list[int]) -> None:
    def element(kind: int, data: bytes) -> bytes:
        return kind.to_bytes(4, "little") + len(data).to_bytes(4, "little") + data + b"\0" * (-len(data) % 8)

    matrix = element(6, flags) + element(5, np.array(lengths, "<i4").tobytes())
    matrix += element(1, b"y") + element(2, b"\1")
    header = b"MATLAB 5.0 MAT-file".ljust(124) + b"\0\1IM"
    (tmp_path / "odd.mat").write_bytes(header + element(14, matrix))
    with pytest.raises(fm.ProblemError, match=r"cannot read .*odd.mat: a variable has no type or an impossible"):
        read_mat(tmp_path / "odd.mat", ["y"])


def element(kind: int, data: bytes, size: int | None = None) -> bytes:
    length = len(data) if size is None else size
    return kind.to_bytes(4, "little") + length.to_bytes(4, "little") + data + b"\0" * (-len(data) % 8)


def matrix(name: str, shape: list[int], values: bytes) -> bytes:
    head = element(6, b"\x09" + b"\0" * 7) + element(5, np.array(shape, "<i4").tobytes())
    return head + element(1, name.encode()) + element(2, values)


def compressed(data: bytes) -> bytes:
    packed = zlib.compress(data)
    return (15).to_bytes(4, "little") + len(packed).to_bytes(4, "little") + packed


class TestHostileFiles:
    """A file costs no more than what it promises, and it cannot promise more than it can hold."""

    def refused(self, folder: Path, *elements: bytes) -> str:
        path = folder / "hostile.mat"
        path.write_bytes(b"MATLAB 5.0 MAT-file".ljust(124) + b"\0\1IM" + b"".join(elements))
        tracemalloc.start()
        try:
            with pytest.raises(fm.ProblemError, match=r"^cannot read .*hostile.mat: .*Get the file again\.$") as caught:
                read_mat(path, ["y"])
            assert tracemalloc.get_traced_memory()[1] < 30e6
        finally:
            tracemalloc.stop()
        return str(caught.value)

    def test_a_variable_that_inflates_without_end(self, tmp_path: Path) -> None:
        endless = element(14, matrix("y", [10, 1], b"\1" * 10)) + b"\0" * 60_000_000
        assert "goes on after" in self.refused(tmp_path, compressed(endless))

    def test_a_variable_that_promises_more_than_it_can_hold(self, tmp_path: Path) -> None:
        content = matrix("y", [2**31 - 1, 1], b"\0" * 4000)
        assert "impossible" in self.refused(tmp_path, compressed(element(14, content, 2**31 - 1)))
        assert "impossible" in self.refused(tmp_path, compressed(element(14, content, 2**32 - 1)))
        assert "cut off" in self.refused(tmp_path, compressed(element(14, content, len(content) + 1000)))

    def test_shapes_that_overflow(self, tmp_path: Path) -> None:
        shape = [2**16, 2**16, 2**16, 2**16]  # 0, in 64 bits
        assert "values for the shape" in self.refused(tmp_path, element(14, matrix("y", shape, b"")))
        assert "1000 dimensions" in self.refused(tmp_path, element(14, matrix("y", [1] * 1000, b"\1")))

    def test_the_same_variable_many_times(self, tmp_path: Path) -> None:
        one = compressed(element(14, matrix("y", [1, 1], b"\1")))
        assert "variable 'y' is there twice" in self.refused(tmp_path, *[one] * 1000)

    def test_variables_nobody_asks_for_are_not_inflated(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        large = compressed(element(14, matrix("z", [50_000_000, 1], b"\1" * 50_000_000)))
        wanted = compressed(element(14, matrix("y", [2, 1], b"\1\2")))
        path = tmp_path / "large.mat"
        path.write_bytes(b"MATLAB 5.0 MAT-file".ljust(124) + b"\0\1IM" + large * 20 + wanted)
        tracemalloc.start()
        assert read_mat(path, ["y"])["y"].tolist() == [[1], [2]]
        assert tracemalloc.get_traced_memory()[1] < 10e6
        tracemalloc.stop()
