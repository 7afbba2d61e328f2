"""Files of data sets: what is missing, truncated, damaged or impossible is named in one sentence."""

from __future__ import annotations

import io
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

import forkmerge as fm
from forkmerge.datasets import _files, census
from forkmerge.datasets._files import Pack
from small_packs import WRITERS, contents, write_census


@pytest.mark.parametrize("name", WRITERS)
def test_a_missing_file_is_named_with_where_to_get_it(name: str, folder: Path) -> None:
    module, _ = WRITERS[name]
    with pytest.raises(fm.ProblemError) as caught:
        module.problem()
    for part in (module.FILE, str(folder), module.SOURCE, "FORKMERGE_DATA"):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", WRITERS)
def test_truncated_files_and_missing_arrays_are_named(name: str, folder: Path) -> None:
    module, write = WRITERS[name]
    write(folder)
    path = folder / module.FILE
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(fm.ProblemError, match=f"cannot read .*{module.FILE}"):
        module.problem()
    np.savez(path, something=np.zeros(3))
    with pytest.raises(fm.ProblemError, match=f"{module.FILE} has no array .*, only something"):
        module.problem()


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(("offset", "bits"), [(8, 1), (10, 99)], ids=["encrypted", "packed otherwise"])
def test_damaged_entries_are_named(name: str, offset: int, bits: int, folder: Path) -> None:
    """Flags and the kind of compression stand at 8 and 10 in every entry of a zip file's directory."""
    module, write = WRITERS[name]
    write(folder)
    path = folder / module.FILE
    whole = bytearray(path.read_bytes())
    at = whole.find(b"PK\x01\x02")
    while at >= 0:
        whole[at + offset] ^= bits
        at = whole.find(b"PK\x01\x02", at + 4)
    path.write_bytes(whole)
    with pytest.raises(fm.ProblemError, match=f"cannot read .*{module.FILE}"):
        module.problem()


@pytest.mark.parametrize(
    ("name", "array", "value", "expected"),
    [
        ("pacs", "labels", 7, "0 to 6"),
        ("pacs", "domains", 4, "0 to 3"),
        ("taskonomy", "surfseg", 9, "0 to 8, or 255 where unknown"),
        ("census", "cat", 4, "0 to 2"),
        ("census", "y", 2, "0 to 1"),
        ("retailrocket", "item", 90, "0 to 89"),
        ("retailrocket", "buy", 2, "0 to 1"),
        ("tmall", "fav_user", 15, "0 to 14"),
    ],
)
def test_impossible_codes_are_named(name: str, array: str, value: int, expected: str, folder: Path) -> None:
    module, write = WRITERS[name]
    write(folder)
    content = contents(folder / module.FILE)
    content[array].flat[0] = value
    np.savez(folder / module.FILE, **content)
    with pytest.raises(fm.ProblemError, match=rf"{module.FILE}: {array} holds {value}, expected {expected}\. Get"):
        module.problem()


@pytest.mark.parametrize("odd", [np.array([["a", "b"]] * 300), np.zeros((300, 3), int), np.full((300, 2), 0.5)])
def test_codes_of_another_kind_are_named(odd: np.ndarray, folder: Path) -> None:
    write_census(folder)
    np.savez(folder / census.FILE, **{**contents(folder / census.FILE), "cat": odd})
    with pytest.raises(fm.ProblemError, match=rf"{census.FILE}: cat "):
        census.problem()


@pytest.mark.parametrize(
    ("name", "array"),
    [("pacs", "labels"), ("taskonomy", "split"), ("census", "y"), ("retailrocket", "buy"), ("tmall", "cart_item")],
)
def test_arrays_of_different_lengths_are_named(name: str, array: str, folder: Path) -> None:
    module, write = WRITERS[name]
    write(folder)
    content = contents(folder / module.FILE)
    np.savez(folder / module.FILE, **{**content, array: content[array][:-1]})
    with pytest.raises(fm.ProblemError, match=rf"different lengths: .*{array}"):
        module.problem()


class TestHostileArrays:
    """Sizes are what a header promises: a file of a few kilobytes costs no more than itself."""

    def pack(self, folder: Path, header: bytes, body: bytes = b"", **entry: int) -> Pack:
        path = folder / "hostile.npz"
        with zipfile.ZipFile(path, "w", entry.get("kind", zipfile.ZIP_DEFLATED)) as archive:
            archive.writestr("x.npy", header + body)
        if "claims" in entry:  # the size before compression, in the directory
            whole = bytearray(path.read_bytes())
            at = whole.find(b"PK\x01\x02")
            whole[at + 24 : at + 28] = entry["claims"].to_bytes(4, "little")
            path.write_bytes(whole)
        return Pack(path, "nowhere")

    def header(self, shape: tuple[int, ...], descr: str = "|u1") -> bytes:
        file = io.BytesIO()
        np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
        return file.getvalue()

    def refused(self, pack: Pack) -> str:
        tracemalloc.start()
        try:
            with pytest.raises(fm.ProblemError, match=r"^cannot read .*hostile.npz: .*Get the file again\.$") as caught:
                pack["x"]
            assert tracemalloc.get_traced_memory()[1] < 30e6
        finally:
            tracemalloc.stop()
        return str(caught.value)

    @pytest.mark.parametrize("shape", [(10**12,), (2**32, 2**32), (2**62, 4), (-1,), (3,)])
    def test_a_header_that_promises_what_the_entry_does_not_hold(self, tmp_path: Path, shape: tuple[int, ...]) -> None:
        self.refused(self.pack(tmp_path, self.header(shape), b"\0" * 100))

    def test_a_header_and_a_directory_that_promise_what_the_stream_cannot_hold(self, tmp_path: Path) -> None:
        header, size = self.header((4 * 10**9,)), 4 * 10**9
        assert "cannot hold" in self.refused(self.pack(tmp_path, header, b"\0" * 999, claims=size + len(header)))

    def test_a_stream_that_goes_on_after_its_end(self, tmp_path: Path) -> None:
        header = self.header((100,))
        path = self.pack(tmp_path, header, b"\0" * 60_000_000, claims=100 + len(header)).path
        self.refused(Pack(path, "nowhere"))

    def test_items_without_bytes_and_unusual_compression(self, tmp_path: Path) -> None:
        self.refused(self.pack(tmp_path, self.header((10**15,), "|V0")))
        told = self.refused(self.pack(tmp_path, self.header((10**7 * 4,)), b"\0" * 10**7 * 4, kind=zipfile.ZIP_BZIP2))
        assert "compressed in a way that numpy does not write" in told

    def test_an_array_larger_than_the_memory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pack = self.pack(tmp_path, self.header((1000,)), b"\0" * 1000)
        assert len(pack["x"]) == 1000
        monkeypatch.setattr(_files, "_memory", lambda: 999)
        assert "takes 1000 bytes, and this machine has 999" in self.refused(pack)
