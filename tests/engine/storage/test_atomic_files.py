"""Files that are written all or not at all, and verified when read."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from disk_faults import Faults, Killed
from forkmerge.engine.storage import atomic_files
from forkmerge.engine.storage.atomic_files import Damage, read_tensors, safe_name, unseal, write_tensors
from forkmerge.engine.storage.json_codec import JSON, seal
from forkmerge.engine.storage.run_folder import write_atomically
from forkmerge.errors import StoreError
from run_folders import names
from tensor_bits import DTYPES, identical, make_tensor


def test_write_atomically_replaces_all_or_nothing(tmp_path: Path, faults: Faults) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    faults.arm(1, "torn", Killed())
    with pytest.raises(Killed):
        write_atomically(path, b"newer")
    assert path.read_bytes() == b"old"
    (leftover,) = names(tmp_path) - {"file"}
    assert leftover.startswith(".tmp-file-")
    faults.arm(1, "torn", OSError(28, "No space left on device"))
    with pytest.raises(StoreError, match=rf"^cannot write {path}: No space left on device\.$"):
        write_atomically(path, b"newer")
    faults.arm(2, "before", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, b"newer")
    faults.disarm()
    write_atomically(path, b"newer")
    assert path.read_bytes() == b"newer"
    assert names(tmp_path) == {"file", leftover}, "only a kill leaves anything"
    atomic_files.remove_unfinished(tmp_path)
    assert names(tmp_path) == {"file"}


def test_the_name_of_what_is_unfinished_cannot_be_guessed_and_keeps_its_ending(tmp_path: Path) -> None:
    seen: list[Path] = []
    for _ in range(2):
        with atomic_files.replacing(tmp_path / "fig.pdf") as unfinished:
            unfinished.write_text("x")
            seen.append(unfinished)
    assert all(re.fullmatch(r"\.tmp-fig-[0-9a-f]{16}\.pdf", path.name) for path in seen)
    assert seen[0] != seen[1]
    assert names(tmp_path) == {"fig.pdf"}
    with atomic_files.replacing(tmp_path / ("ä" * 120 + ".txt")) as unfinished:  # 244 bytes, of at most 255
        unfinished.write_text("x")


def test_a_link_in_place_of_a_file_is_neither_followed_nor_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precious, path = tmp_path / "precious", tmp_path / "file"
    precious.write_text("mine")
    path.symlink_to(precious)
    write_atomically(path, b"new")
    assert (precious.read_text(), path.read_text(), path.is_symlink()) == ("mine", "new", False)
    monkeypatch.setattr(atomic_files.secrets, "token_hex", lambda count: "guessed")
    (tmp_path / ".tmp-file-guessed").symlink_to(precious)
    with pytest.raises(StoreError, match="File exists"):
        write_atomically(path, b"newer")
    for write in (atomic_files.write_file, write_tensors):
        link = tmp_path / write.__name__
        link.symlink_to(precious)
        with pytest.raises(FileExistsError):
            write(link, {} if write is write_tensors else b"")  # type: ignore[operator]
    assert (precious.read_text(), path.read_text()) == ("mine", "new")


def test_links_are_removed_and_what_they_lead_to_stays(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").touch()
    for name in ("link", ".tmp-link"):
        (tmp_path / name).symlink_to(tmp_path / "folder")
    atomic_files.remove(tmp_path / "link")
    atomic_files.remove_unfinished(tmp_path)
    assert names(tmp_path) == {"folder", "folder/file"}


def test_a_folder_with_anything_but_files_and_folders_is_refused_by_name(tmp_path: Path) -> None:
    deep = tmp_path / "run" / "checkpoints" / "1"
    deep.mkdir(parents=True)
    (deep / "state").touch()
    (tmp_path / "to the run").symlink_to(tmp_path / "run")
    atomic_files.check_entries(tmp_path / "run")
    atomic_files.check_entries(tmp_path / "to the run")  # who was asked for it said so
    atomic_files.check_entries(tmp_path / "absent")

    def refused(path: Path, kind: str) -> None:
        with pytest.raises(StoreError, match=rf"^{path} is a {kind}: .* holds files and folders only\. Remove it\.$"):
            atomic_files.check_entries(tmp_path / "run")
        path.unlink()

    for target in (deep, deep / "state", tmp_path / "absent"):
        (tmp_path / "run/entry").symlink_to(target)
        refused(tmp_path / "run/entry", "link")
    os.mkfifo(deep / "pipe")
    refused(deep / "pipe", "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(deep / "s"))  # the whole path may be too long for a socket
        refused(deep / "s", "socket")
    atomic_files.check_entries(tmp_path / "run")


def test_a_folder_nested_too_deep_for_recursion_is_looked_through(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(1200):
        os.mkdir("a")
        os.chdir("a")
    os.symlink("/", "link")
    os.chdir(tmp_path)
    with pytest.raises(StoreError, match="link is a link"):
        atomic_files.check_entries(tmp_path)
    subprocess.run(["rm", "-r", "a"], check=True)  # which pytest's own recursion could not


def test_a_sealed_file_notices_a_flipped_bit_in_any_byte(tmp_path: Path) -> None:
    content: dict[str, JSON] = {"format": 1, "files": {"a": {"bytes": 20}}}
    path = tmp_path / "manifest.json"
    text = seal(content)
    path.write_bytes(text)
    assert unseal(path) == content
    for position in range(len(text)):
        for flip in (1, 32):  # the neighbouring digit; the other case of a letter
            changed = bytearray(text)
            changed[position] ^= flip
            path.write_bytes(changed)
            with pytest.raises(Damage, match=r"manifest\.json: "):
                unseal(path)


def test_a_tensor_file_keeps_every_dtype_and_shape(tmp_path: Path) -> None:
    for dtype in (*DTYPES, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64):
        if dtype is torch.complex128:  # the format does not have it; `pack` takes it apart
            continue
        written = {str(shape): make_tensor(dtype, shape) for shape in [(), (0,), (2, 0), (5,), (2, 3)]}
        write_tensors(tmp_path / f"{dtype}.safetensors", written)
        read = read_tensors(tmp_path / f"{dtype}.safetensors")
        assert identical(dict(sorted(read.items())), dict(sorted(written.items()))), dtype


def test_a_tensor_file_is_what_the_safetensors_library_reads_and_every_tensor_in_it_is_aligned(tmp_path: Path) -> None:
    for longer in range(9):  # headers of every length
        path = tmp_path / f"{longer}.safetensors"
        written = {f"{n} {dtype}": make_tensor(dtype, (n,)) for n in (1, 3) for dtype in (torch.int8, torch.float64)}
        written["half" + longer * "x"] = make_tensor(torch.float16, (5,))
        write_tensors(path, written)
        assert identical(dict(sorted(load_file(path).items())), dict(sorted(written.items())))
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        assert length % 8 == 0
        header = json.loads(data[8 : 8 + length])
        text = data[8 : 8 + length].rstrip(b" ")
        assert text.decode() == json.dumps(header, separators=(",", ":"))
        assert length - len(text) < 8
        for name, tensor in written.items():
            start, end = header[name]["data_offsets"]
            assert start % tensor.itemsize == 0, name
            assert end - start == tensor.nbytes


def test_a_large_tensor_file_is_read_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, opened = tmp_path / "t.safetensors", []
    written = {str(i): torch.full((4,), float(i)) for i in range(6)}
    write_tensors(path, written)

    def count(*arguments: Any, **options: Any) -> Any:
        opened.append(arguments)
        return safe_open(*arguments, **options)

    monkeypatch.setattr(atomic_files, "safe_open", count)
    monkeypatch.setattr(atomic_files, "_MAPPED", 32)  # the bytes of two of them
    assert identical(dict(sorted(read_tensors(path).items())), written)
    assert len(opened) == 1 + 3  # the names, then two tensors at a time


def test_a_tensor_file_keeps_views_that_overlap_or_are_lazy(tmp_path: Path) -> None:
    row, pairs = torch.arange(12.0), torch.view_as_complex(torch.arange(8.0).reshape(4, 2))
    written = {
        "row": row,
        "row again": row,
        "inside": row[3:7],
        "across": row[5:9],
        "column": row.view(3, 4)[:, 1],
        "transposed": row.view(3, 4).T,
        "spread": row[:1].expand(5),
        "empty inside": row[4:4],
        "conjugate": pairs.conj(),
        "imaginary": pairs.conj().imag,
        "negative": torch._neg_view(torch.arange(3.0)),
        "channels last": torch.arange(16.0).reshape(1, 2, 2, 4).to(memory_format=torch.channels_last),
    }
    write_tensors(tmp_path / "t.safetensors", written)
    read = read_tensors(tmp_path / "t.safetensors")
    assert read.keys() == written.keys()
    for name, tensor in written.items():
        assert torch.equal(read[name], tensor), name


def test_neighbouring_views_of_one_row_are_written_without_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, handed = torch.arange(12.0), {}
    monkeypatch.setattr(atomic_files, "_save_tensors", lambda path, tensors: (handed.update(tensors), path.touch()))
    write_tensors(tmp_path / "t.safetensors", {"a": row[:4], "b": row[4:9], "c": row[9:]})
    offsets = {name: part.data_ptr() - row.data_ptr() for name, part in handed.items()}
    assert offsets == {"a": 0, "b": 16, "c": 36}


@pytest.mark.parametrize("tensor", [torch.eye(2).to_sparse(), torch.zeros(1, dtype=torch.complex128)])
def test_a_tensor_the_format_cannot_hold_is_a_store_error(tmp_path: Path, tensor: Tensor) -> None:
    with pytest.raises(StoreError, match=r"t\.safetensors cannot hold these tensors"):
        write_tensors(tmp_path / "t.safetensors", {"x": tensor})


def test_a_tensor_that_was_read_does_not_depend_on_its_file(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    write_tensors(path, {"x": torch.arange(1000.0)})
    read = read_tensors(path)["x"]
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(read, torch.arange(1000.0))


def test_a_pickle_in_place_of_tensors_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    torch.save({"x": torch.zeros(2)}, path)
    with pytest.raises(Damage, match=r"t\.safetensors: "):
        read_tensors(path)


def test_a_tensor_file_that_is_not_there_is_damage(tmp_path: Path) -> None:
    with pytest.raises(Damage, match=r"^t\.safetensors: No such file"):
        read_tensors(tmp_path / "t.safetensors")


def test_what_the_operating_system_refuses_is_said_with_what_was_tried(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=rf"^cannot write {tmp_path}/absent/file: No such file or directory\.$"):
        write_atomically(tmp_path / "absent" / "file", b"")
    with pytest.raises(StoreError, match=r"^cannot do this: without a number\.$"), atomic_files.explained("do this"):
        raise OSError("without a number")


def test_files_and_folders_are_removed_and_absent_ones_are_no_error(tmp_path: Path) -> None:
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    (tmp_path / "file").touch()
    for name in ("folder", "file", "absent"):
        atomic_files.remove(tmp_path / name)
    assert names(tmp_path) == set()


def test_a_discarded_folder_is_renamed_before_it_is_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").touch()
    atomic_files.discard(folder)
    assert names(tmp_path) == set()
    atomic_files.discard(folder)
    folder.mkdir()
    monkeypatch.setattr(atomic_files.shutil, "rmtree", lambda *arguments, **options: None)
    atomic_files.discard(folder)
    (leftover,) = names(tmp_path)
    assert leftover.startswith(".tmp-folder-")


def test_a_folder_is_unused_until_it_holds_more_than_a_kill_leaves(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert atomic_files.is_unused(folder)
    folder.mkdir()
    for name in ("lock", ".tmp-config.json", ".tmp-config-0123.json"):
        assert atomic_files.is_unused(folder)
        (folder / name).touch()
    assert atomic_files.is_unused(folder)
    (folder / "config.json").touch()
    assert not atomic_files.is_unused(folder)
    assert not atomic_files.is_unused(folder / "config.json")


def test_numbered_folders_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("00000010", "9", "100000000", "9.damaged", ".tmp-11", "x"):
        (tmp_path / name).mkdir()
    assert [item.name for item in atomic_files.numbered(tmp_path)] == ["9", "00000010", "100000000"]
    assert atomic_files.numbered(tmp_path / "absent") == []


def test_a_file_is_verified_by_its_size_and_its_sha256(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5000  # more than is read at once
    (tmp_path / "a").write_bytes(data)
    prints = {"a": atomic_files.fingerprint(tmp_path / "a")}
    assert prints["a"] == {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    atomic_files.verify(tmp_path, prints)
    (tmp_path / "a").write_bytes(data[:-1] + b"x")
    with pytest.raises(Damage, match=r"^a: its sha256 has changed$"):
        atomic_files.verify(tmp_path, prints)
    (tmp_path / "a").write_bytes(b"xy")
    with pytest.raises(Damage, match=rf"^a: it holds 2 bytes, {len(data)} expected$"):
        atomic_files.verify(tmp_path, prints)
    (tmp_path / "a").unlink()
    with pytest.raises(Damage, match=r"^a: No such file or directory$"):
        atomic_files.verify(tmp_path, prints)


def test_a_sealed_file_says_why_it_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    with pytest.raises(Damage, match=r"^manifest\.json: No such file or directory$"):
        unseal(path)
    path.write_bytes(seal({"a": 1}).replace(b"1", b"2", 1))
    with pytest.raises(Damage, match=r"^manifest\.json: it does not match its own checksum$"):
        unseal(path)
    for text in (b"[]", b"{}", b"{"):
        path.write_bytes(text)
        with pytest.raises(Damage, match=r"^manifest\.json: "):
            unseal(path)


@pytest.mark.parametrize("text", ["a/b", "../up", ".hidden", "sp ace", "ünï", "a" * 90 + "/"])
def test_names_stay_inside_their_folder(text: str) -> None:
    name = safe_name(text)
    assert Path(name).name == name
    assert name.isascii()
    assert not name.startswith(".")
    assert safe_name(text + "x") != name
    assert safe_name("torchjd:UPGrad") == "torchjd-UPGrad"
