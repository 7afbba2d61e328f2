"""Files of data sets: what is missing, truncated, damaged or impossible is named in one sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import forkmerge as fm
from forkmerge.datasets import census
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
