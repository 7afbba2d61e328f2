"""Image files decoded once: the same values as decoding each time, and nothing half-written is ever read."""

from __future__ import annotations

import builtins
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import forkmerge as fm
from _asserts import assert_same_bits, bits
from forkmerge.datasets import images
from forkmerge.datasets.images import CachedImages
from forkmerge.engine.storage import atomic_files
from problems import fit

Image = pytest.importorskip("PIL.Image")
COUNT = 10


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Ten PNG files of 6 × 4 pixels."""
    folder = tmp_path / "files"
    folder.mkdir()
    rng = np.random.default_rng(0)
    paths = []
    for index in range(COUNT):
        paths.append(folder / f"{index}.png")
        Image.fromarray(rng.integers(0, 256, (6, 4, 3), dtype=np.uint8)).save(paths[-1])
    return paths


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def raw(path: Path, size: tuple[int, int] | None = None, mode: str = "RGB") -> np.ndarray[Any, Any]:
    image = Image.open(path).convert(mode)
    if size is not None:
        image = image.resize(size[::-1], Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    return (pixels if pixels.ndim == 3 else pixels[..., None]).transpose(2, 0, 1)


def decode_red(path: Path) -> Any:
    return np.asarray(Image.open(path).convert("RGB"))[:, :, :1]


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.suffix != ".npy" or path.name.startswith(".")]


@pytest.mark.parametrize("workers", [1, 3])
def test_batches_hold_the_decoded_files(files: list[Path], cache: Path, workers: int) -> None:
    labels = torch.arange(COUNT)
    data = CachedImages(files, labels, list(range(COUNT)), cache=cache, as_bytes=True, workers=workers)
    x, y, z = data.read_batch(torch.tensor([3, 0, 3]))
    assert x.dtype == torch.uint8
    assert torch.equal(x, torch.from_numpy(np.stack([raw(files[i]) for i in (3, 0, 3)])))
    assert y.tolist() == z.tolist() == [3, 0, 3]
    assert leftovers(cache) == []


@pytest.mark.parametrize(("size", "mode"), [(5, "RGB"), ((3, 8), "L")])
def test_images_are_resized_and_converted(files: list[Path], cache: Path, size: Any, mode: str) -> None:
    Image.open(files[2]).resize((9, 2)).save(files[2])
    data = CachedImages(files, cache=cache, size=size, mode=mode, as_bytes=True)
    wanted = (5, 5) if size == 5 else size
    (x,) = data.read_batch(torch.arange(COUNT))
    assert torch.equal(x, torch.from_numpy(np.stack([raw(path, wanted, mode) for path in files])))
    assert data.shape == (3 if mode == "RGB" else 1, *wanted)


def test_values_are_normalised_per_channel(files: list[Path], cache: Path) -> None:
    mean, std = (0.1, 0.2, 0.3), (0.5, 1.0, 2.0)
    data = CachedImages(files, cache=cache, mean=mean, std=std)
    (x,) = data.read_batch(torch.arange(COUNT))
    expected = torch.from_numpy(np.stack([raw(path) for path in files])).double() / 255
    expected = (expected - torch.tensor(mean).reshape(3, 1, 1)) / torch.tensor(std).reshape(3, 1, 1)
    assert x.dtype == torch.float32
    torch.testing.assert_close(x.double(), expected, rtol=1e-5, atol=1e-6)
    assert x.is_contiguous()


def test_one_example_is_a_row_of_its_batch(files: list[Path], cache: Path) -> None:
    data = CachedImages(files, torch.arange(COUNT), cache=cache)
    x, y = data.read_batch(torch.arange(COUNT))
    assert all(torch.equal(data[i][0], x[i]) and data[i][1] == y[i] for i in range(COUNT))
    assert torch.equal(data[-1][0], x[-1])
    with pytest.raises(IndexError):
        data[COUNT]
    assert len(list(data)) == COUNT


class TestTheCache:
    def decodings(self, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
        seen: list[Path] = []
        real = images._Pillow.__call__
        monkeypatch.setattr(images._Pillow, "__call__", lambda self, path: seen.append(path) or real(self, path))
        return seen

    def test_a_second_data_set_decodes_nothing(self, files: list[Path], cache: Path, monkeypatch: Any) -> None:
        CachedImages(files, cache=cache)
        seen = self.decodings(monkeypatch)
        CachedImages(files, cache=cache, mean=0.5)
        assert seen == []

    @pytest.mark.parametrize("change", ["content", "date", "list", "size", "mode", "decode"])
    def test_whatever_could_change_a_pixel_decodes_anew(self, files: list[Path], cache: Path, change: str) -> None:
        first = CachedImages(files, cache=cache)
        options: dict[str, Any] = {}
        if change == "content":
            Image.fromarray(np.zeros((6, 4, 3), np.uint8)).save(files[0])
        elif change == "date":
            os.utime(files[0], (1, 1))
        elif change == "list":
            files[0], files[1] = files[1], files[0]
        else:
            options = {change: {"size": 4, "mode": "L", "decode": decode_red}[change]}
        assert CachedImages(files, cache=cache, **options).file != first.file

    def test_an_interrupted_decoding_leaves_nothing_behind_and_is_done_again(
        self, files: list[Path], cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = images._Pillow.__call__

        def stop(self: Any, path: Path) -> Any:
            if path == files[7]:
                raise KeyboardInterrupt
            return real(self, path)

        with monkeypatch.context() as patch:
            patch.setattr(images._Pillow, "__call__", stop)
            with pytest.raises(KeyboardInterrupt):
                CachedImages(files, cache=cache)
        assert list(cache.iterdir()) == []
        data = CachedImages(files, cache=cache, as_bytes=True)
        assert torch.equal(data[7][0], torch.from_numpy(raw(files[7]).copy()))

    def test_nothing_unfinished_has_the_final_name(self, files: list[Path], cache: Path, monkeypatch: Any) -> None:
        """A kill while decoding, or between the last image and the rename, leaves no file that would be opened."""
        states: list[bool] = []
        real = atomic_files._rename

        def rename(source: Path, target: Path) -> None:
            states.append(target.exists())
            assert images.open_map(source, COUNT) is not None
            real(source, target)

        monkeypatch.setattr(atomic_files, "_rename", rename)
        CachedImages(files, cache=cache)
        assert states == [False]

    def test_a_damaged_map_is_made_again(self, files: list[Path], cache: Path) -> None:
        file = CachedImages(files, cache=cache).file
        file.write_bytes(file.read_bytes()[:200])
        data = CachedImages(files, cache=cache, as_bytes=True)
        assert torch.equal(data[9][0], torch.from_numpy(raw(files[9]).copy()))

    def test_old_leftovers_of_a_kill_are_removed(self, files: list[Path], cache: Path) -> None:
        file = CachedImages(files, cache=cache).file
        file.unlink()
        old, young = (cache / f"{atomic_files.TEMPORARY}{file.stem}-{i}.npy" for i in range(2))
        old.write_bytes(b"half")
        young.write_bytes(b"half")
        os.utime(old, (1, 1))
        CachedImages(files, cache=cache)
        assert leftovers(cache) == [young.name]

    def test_a_pickle_holds_the_place_of_the_map_not_its_pixels(self, files: list[Path], cache: Path) -> None:
        data = CachedImages(files, torch.arange(COUNT), cache=cache, size=(200, 200))
        data.read_batch(torch.tensor([1]))
        text = pickle.dumps(data)
        assert len(text) < data.pixels.nbytes / 100
        copied = pickle.loads(text)
        assert torch.equal(copied[4][0], data[4][0])
        data.file.unlink()
        with pytest.raises(fm.ProblemError, match="are gone"):
            pickle.loads(text)[0]

    def test_the_default_folder_is_the_users_cache(self, files: list[Path], tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
        assert CachedImages(files).file.parent == tmp_path / "home" / "forkmerge" / "images"


class TestBadInput:
    def test_a_corrupt_file_is_named(self, files: list[Path], cache: Path) -> None:
        files[3].write_bytes(files[3].read_bytes()[:60])
        with pytest.raises(fm.ProblemError, match=r"cannot decode the image .*3\.png"):
            CachedImages(files, cache=cache)
        assert list(cache.iterdir()) == []

    def test_a_missing_file_is_named(self, files: list[Path], cache: Path) -> None:
        files[3].unlink()
        with pytest.raises(fm.ProblemError, match=r"cannot read the image .*3\.png: No such file"):
            CachedImages(files, cache=cache)

    def test_images_of_different_size_need_one(self, files: list[Path], cache: Path) -> None:
        Image.open(files[2]).resize((9, 2)).save(files[2])
        with pytest.raises(fm.ProblemError, match=r"2\.png is \(3, 2, 9\) .* give size="):
            CachedImages(files, cache=cache)

    def test_labels_must_fit(self, files: list[Path], cache: Path) -> None:
        with pytest.raises(fm.ProblemError, match="labels 2 of CachedImages have 3 rows for 10 images"):
            CachedImages(files, torch.arange(COUNT), torch.arange(3), cache=cache)
        with pytest.raises(fm.ProblemError, match="no image files"):
            CachedImages([], cache=cache)

    def test_normalisation_must_fit(self, files: list[Path], cache: Path) -> None:
        with pytest.raises(fm.ProblemError, match="mean has 2 values, the images 3 channels"):
            CachedImages(files, cache=cache, mean=(0.0, 0.1))
        with pytest.raises(fm.ProblemError, match="std must be positive"):
            CachedImages(files, cache=cache, std=0.0)

    def test_a_decoder_must_give_bytes(self, files: list[Path], cache: Path) -> None:
        with pytest.raises(fm.ProblemError, match=r"gave an array of float64 of shape \(2, 2\)"):
            CachedImages(files, cache=cache, decode=lambda path: np.zeros((2, 2)))

    def test_a_missing_pillow_says_what_to_type(self, files: list[Path], cache: Path, monkeypatch: Any) -> None:
        real = builtins.__import__

        def without(name: str, *rest: Any) -> Any:
            if name == "PIL":
                raise ImportError(name)
            return real(name, *rest)

        monkeypatch.setattr(builtins, "__import__", without)
        with pytest.raises(fm.ProblemError, match=r"pip install 'forkmerge\[vision\]'"):
            CachedImages(files, cache=cache)

    def test_a_full_disk_says_so(self, files: list[Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*arguments: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
        with pytest.raises(fm.StoreError, match="No space left"):
            CachedImages(files, cache=cache)
        assert list(cache.iterdir()) == []


class ImageNet(nn.Module):
    """Two heads on convolutions of enough channels to be trained in channels-last format."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.body = nn.Sequential(*layers)
        self.heads = nn.ModuleDict({task: nn.Linear(4, 2) for task in ("tgt", "aux")})

    def forward(self, x: Tensor) -> Tensor:
        return self.heads["tgt"](self.body(x))


def image_losses(model: Any, batch: Any, tasks: Sequence[str], context: fm.Context) -> dict[str, Tensor]:
    x, y = batch
    z = model.body(x)
    return {task: cross_entropy(model.heads[task](z), y) for task in tasks}


def image_problem(data: CachedImages) -> fm.Problem:
    stream = fm.Stream(data, image_losses, ["tgt", "aux"], batch_size=4)
    return fm.Problem("tgt", [stream], fm.Evaluation(data, fm.accuracy, batch_size=4))


def test_a_run_on_cached_images_is_the_run_on_their_tensors_with_any_workers(files: list[Path], cache: Path) -> None:
    data = CachedImages(files, torch.arange(COUNT) % 2, cache=cache)
    tensors = torch.utils.data.TensorDataset(*data.read_batch(torch.arange(COUNT)))
    algorithm = fm.ForkMerge("mixed", interval=3, refit=True)
    options: dict[str, Any] = {"net": ImageNet, "steps": 6}
    first = fit(algorithm, image_problem(tensors), **options)  # type: ignore[arg-type]
    assert first.settings["training"]["channels_last"] is True
    whole = bits(first)
    for more in ({}, {"workers": 2}, {"loader_workers": 1}):
        assert_same_bits(whole, fit(algorithm, image_problem(data), **options, **more))
