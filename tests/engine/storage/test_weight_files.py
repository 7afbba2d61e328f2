"""Files of weights may come from anywhere: what is damaged, or lies outside of their folder, is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import forkmerge as fm
from forkmerge.engine.storage.weight_files import INDEX, WHOLE, WeightFiles, write_shard
from tensor_bits import same_bits

TENSORS = {"w": torch.arange(6.0).view(2, 3), "n": torch.tensor(3)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    save_file(TENSORS, tmp_path / "model" / "one.safetensors")
    return tmp_path / "model"


def index(folder: Path, **files: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))


def test_tensors_are_read_and_written_in_pieces(folder: Path, tmp_path: Path) -> None:
    files = WeightFiles(folder / "one.safetensors")
    assert files.nbytes == 6 * 4 + 8
    assert files.tensors["w"].shape == (2, 3)
    assert torch.equal(files.tensors["w"].read(2, 5), torch.tensor([2.0, 3.0, 4.0]))

    def one_by_one(name: str) -> list[torch.Tensor]:
        return [TENSORS[name].reshape(-1)[i : i + 1] for i in range(TENSORS[name].numel())]

    write_shard(tmp_path / "copy.safetensors", files.tensors, lambda name: iter(one_by_one(name)))
    assert same_bits(load_file(tmp_path / "copy.safetensors"), TENSORS)


def test_a_folder_has_one_file_or_an_index(folder: Path) -> None:
    with pytest.raises(fm.StoreError, match=f"has no file {WHOLE}"):
        WeightFiles(folder)
    index(folder, w="one.safetensors", n="one.safetensors")
    assert WeightFiles(folder).shards == {"one.safetensors": ["n", "w"]}
    (folder / INDEX).unlink()
    (folder / "one.safetensors").rename(folder / WHOLE)
    assert WeightFiles(folder).tensors.keys() == TENSORS.keys()


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "..", "", "a\\b"])
def test_an_index_names_files_of_its_folder_only(folder: Path, name: str) -> None:
    save_file(TENSORS, folder.parent / "secret.safetensors")
    index(folder, w=name)
    with pytest.raises(fm.StoreError, match=r"no file of that folder|has no file|leads out"):
        WeightFiles(folder)


def test_a_link_out_of_the_folder_is_not_followed(folder: Path) -> None:
    save_file(TENSORS, folder.parent / "secret.safetensors")
    (folder / WHOLE).symlink_to("../secret.safetensors")
    with pytest.raises(fm.StoreError, match="a link that leads out of its folder: copy the folder"):
        WeightFiles(folder)
    (folder / INDEX).symlink_to("../index.json")
    (folder.parent / "index.json").write_text("{}")
    with pytest.raises(fm.StoreError, match="a link that leads out of its folder"):
        WeightFiles(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}'])
def test_an_index_that_is_none_is_refused(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    with pytest.raises(fm.StoreError, match=INDEX):
        WeightFiles(folder)


def test_an_index_that_is_wrong_about_its_shards_is_refused(folder: Path) -> None:
    index(folder, other="one.safetensors")
    with pytest.raises(fm.StoreError, match=r"'other' is not in one\.safetensors"):
        WeightFiles(folder)
    save_file(TENSORS, folder / "two.safetensors")
    index(folder, w="one.safetensors", n="two.safetensors")
    with pytest.raises(fm.StoreError, match="in two shards"):
        WeightFiles(folder)


def test_a_file_that_is_not_whole_is_refused(folder: Path) -> None:
    path = folder / "one.safetensors"
    data = path.read_bytes()
    for damaged in (b"", data[:-1], data[:9], b"\xff" * 8 + data[8:], data + b"x"):
        path.write_bytes(damaged)
        with pytest.raises(fm.StoreError, match="no whole safetensors file"):
            WeightFiles(path)
    with pytest.raises(fm.StoreError, match="is no safetensors file, and no folder"):
        WeightFiles(folder / "none.safetensors")


def test_a_type_that_cannot_be_merged_is_named(folder: Path) -> None:
    path = folder / "one.safetensors"
    header = json.dumps({"w": {"dtype": "F8_E8M0", "shape": [2], "data_offsets": [0, 2]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"ab")
    with pytest.raises(fm.StoreError, match="'w' is F8_E8M0, which cannot be merged"):
        WeightFiles(path)
