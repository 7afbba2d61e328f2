"""Image files, decoded once: a data set that reads whole batches out of one memory map of bytes."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from forkmerge.engine.storage import atomic_files
from forkmerge.engine.storage.convert_once import convert_once, key_of
from forkmerge.engine.storage.user_folders import cache_folder, check_private
from forkmerge.errors import ProblemError

Pixels = npt.NDArray[np.uint8]
Decode = Callable[[Path], Pixels]

_FORMAT = 1  # part of every key: another way of storing images must not find the old files


class CachedImages(Dataset[tuple[Tensor, ...]]):
    """Image files and their labels, decoded once into one memory map of uint8 values [n, channels, height, width].

    The map lies in the cache folder under a name made from the list of files, their sizes and dates, and the way they
    are decoded; anything else decodes anew. It is written under another name and renamed when complete, so an
    interrupted decoding is done again and never read. Batches are one indexed read and a conversion to float32; worker
    processes open the same map.

    Args:
        paths: The image files.
        labels: Any number of tensors with one row per image. A batch is `[images, *labels]`.
        size: Height and width, one number for both; None takes the files' own, which must then be one and the same.
        mode: Pillow's colour mode: "RGB", or "L" for one channel.
        mean: Subtracted from values in [0, 1], one number or one per channel.
        std: What they are divided by afterwards.
        as_bytes: Give uint8 values as they are, to be converted where the model is; a quarter of the bytes to move.
        cache: The folder; by default `forkmerge/images` in the user's cache folder.
        decode: Makes an array [height, width, channels] of uint8 from a path, instead of Pillow; `size` and `mode` are
            then its own affair. A change of its code decodes anew, a change of what it calls does not.
        workers: Threads that decode.
        progress: Whether a bar is shown on a terminal while decoding.

    Example: `CachedImages(sorted(folder.glob("*.jpg")), classes, size=64, mean=0.5, std=0.25)`
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *labels: Tensor | Sequence[Any],
        size: int | tuple[int, int] | None = None,
        mode: str = "RGB",
        mean: float | Sequence[float] = 0.0,
        std: float | Sequence[float] = 1.0,
        as_bytes: bool = False,
        cache: str | os.PathLike[str] | None = None,
        decode: Decode | None = None,
        workers: int = 1,
        progress: bool = True,
    ) -> None:
        self.paths = [Path(os.path.abspath(path)) for path in paths]
        if not self.paths:
            raise ProblemError("CachedImages got no image files: look at the folder or the pattern they come from.")
        self.labels = [torch.as_tensor(column) for column in labels]
        for position, column in enumerate(self.labels, 1):
            if column.dim() == 0 or len(column) != len(self.paths):
                raise ProblemError(
                    f"labels {position} of CachedImages have {len(column) if column.dim() else 'no'} rows for "
                    f"{len(self.paths)} images: give one row per image."
                )
        self.as_bytes = as_bytes
        shape = (size, size) if isinstance(size, int) else None if size is None else (int(size[0]), int(size[1]))
        decoder = decode or _Pillow(shape, mode)
        self.file = map_file(cache, key_of(f"{_FORMAT}\n{_form(decoder)}", self.paths, "image"))
        self._pixels: Pixels | None = decode_once(self.file, self.paths, decoder, workers, progress)
        self.shape = tuple(self.pixels.shape[1:])
        self._scale, self._shift = _affine(mean, std, self.shape[0])

    @property
    def pixels(self) -> Pixels:
        """The memory map."""
        if self._pixels is None:
            self._pixels = open_map(self.file, len(self.paths))
        if self._pixels is None:
            raise ProblemError(f"the decoded images {self.file} are gone: make the CachedImages again.")
        return self._pixels

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        return tuple(column[0] for column in self.read_batch(torch.tensor([index % len(self)])))

    def read_batch(self, indices: Tensor) -> list[Tensor]:
        """Return images [n, channels, height, width] and labels of the given examples."""
        images = torch.from_numpy(self.pixels.take(indices.numpy(), axis=0))
        if not self.as_bytes:
            images = images.to(torch.float32).mul_(self._scale).add_(self._shift)
        return [images, *(column.index_select(0, indices) for column in self.labels)]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pixels": None}  # opened again where it is used, never copied


class ImageFiles(Dataset[tuple[Tensor, ...]]):
    """Image files and their labels, decoded whenever they are read: for data sets too large to keep decoded.

    Args:
        paths: The image files.
        labels: Any number of tensors with one row per image. An example is `(image, *labels)`, the image as bytes.
        size: Height and width, one number for both.
        mode: Pillow's colour mode: "RGB", or "L" for one channel.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *labels: Tensor | Sequence[Any],
        size: int | tuple[int, int],
        mode: str = "RGB",
    ) -> None:
        self.paths, self.labels = [Path(path) for path in paths], [torch.as_tensor(column) for column in labels]
        self.size, self.mode = (size, size) if isinstance(size, int) else size, mode

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        pixels = _decoded(_Pillow(self.size, self.mode), self.paths[index], None)
        return (torch.from_numpy(pixels), *(column[index] for column in self.labels))


def map_file(cache: str | os.PathLike[str] | None, key: str) -> Path:
    """Return where decoded images are kept: in a folder of the user's, by default the one in the cache folder."""
    folder = Path(cache) if cache is not None else cache_folder("images")
    check_private(folder)
    check_private(folder / f"{key}.npy")
    return folder / f"{key}.npy"


class _Pillow:
    """Decodes a file with Pillow."""

    def __init__(self, size: tuple[int, int] | None, mode: str) -> None:
        try:
            from PIL import Image
        except ImportError:
            raise ProblemError("decoding images needs Pillow: type pip install 'forkmerge[vision]'.") from None
        self._open, self._how = Image.open, Image.Resampling.BILINEAR
        self.size, self.mode = size, mode

    def __call__(self, path: Path) -> Pixels:
        with self._open(path) as image:
            converted = image.convert(self.mode)
            if self.size is not None and (converted.height, converted.width) != self.size:
                converted = converted.resize(self.size[::-1], self._how)
            pixels: Pixels = np.asarray(converted)
        return pixels if pixels.ndim == 3 else pixels[:, :, None]


def _form(decoder: Any) -> str:
    """What tells a way of decoding from the others."""
    if isinstance(decoder, _Pillow):
        return f"Pillow {decoder.size} {decoder.mode}"
    try:
        code = inspect.getsource(decoder)
    except (OSError, TypeError):
        code = ""
    return f"{getattr(decoder, '__module__', '')}:{getattr(decoder, '__qualname__', type(decoder).__name__)}\n{code}"


def decode_once(file: Path, paths: Sequence[Path], decoder: Decode, workers: int, progress: bool) -> Pixels:
    """Return the memory map of decoded images, decoding them first where that is not done yet."""
    write = partial(_write_map, paths=paths, decoder=decoder, workers=workers, progress=progress)
    return convert_once(file, partial(open_map, count=len(paths)), write)


def open_map(file: Path, count: int) -> Pixels | None:
    """Return the memory map, or None where there is none or not a whole one."""
    try:
        pixels = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        return None
    is_whole = pixels.dtype == np.uint8 and pixels.ndim == 4 and len(pixels) == count
    return np.asarray(pixels) if is_whole else None


def _write_map(file: Path, paths: Sequence[Path], decoder: Decode, workers: int, progress: bool) -> None:
    first = _decoded(decoder, paths[0], None)
    target = np.lib.format.open_memmap(file, "w+", np.uint8, (len(paths), *first.shape))
    _reserve(file)
    _decode_all(paths, decoder, target, workers, progress)
    target.flush()
    del target
    with file.open("rb+") as written:
        atomic_files.sync(written)


def _reserve(file: Path) -> None:
    """Take the disk space now, where that is possible: writing to a map on a full disk would end the process."""
    if hasattr(os, "posix_fallocate"):
        with file.open("rb+") as opened:
            os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)


def _decode_all(paths: Sequence[Path], decoder: Decode, target: Pixels, workers: int, progress: bool) -> None:
    from rich.console import Console
    from rich.progress import track

    def decode(position: int) -> None:
        target[position] = _decoded(decoder, paths[position], target.shape[1:])

    pool = ThreadPoolExecutor(workers)
    try:
        results = pool.map(decode, range(len(paths)))
        console, is_silent = Console(stderr=True), not (progress and sys.stderr.isatty())
        for _ in track(results, "decoding images", len(paths), console=console, transient=True, disable=is_silent):
            pass
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _decoded(decoder: Decode, path: Path, shape: tuple[int, ...] | None) -> Pixels:
    """Return an image as [channels, height, width], refusing what is not one or not of the shape of the others."""
    try:
        pixels = np.asarray(decoder(path))
    except Exception as error:  # whatever a decoder makes of a damaged file
        raise ProblemError(f"cannot decode the image {path}: {error}.") from error
    if pixels.dtype != np.uint8 or pixels.ndim != 3:
        raise ProblemError(
            f"decoding {path} gave an array of {pixels.dtype} of shape {pixels.shape}: expected uint8 values "
            "[height, width, channels]."
        )
    image = np.ascontiguousarray(pixels.transpose(2, 0, 1))
    if shape is not None and image.shape != shape:
        raise ProblemError(
            f"{path} is {image.shape} (channels, height, width), the images before it are {shape}: give size=(height, "
            "width), or a decode that gives them one shape."
        )
    return image


def _affine(mean: float | Sequence[float], std: float | Sequence[float], channels: int) -> tuple[Tensor, Tensor]:
    """Return a and b of a·x + b that takes bytes to (x/255 − mean)/std."""
    columns = []
    for name, value in (("mean", mean), ("std", std)):
        column = torch.as_tensor(value, dtype=torch.float64).reshape(-1, 1, 1)
        if len(column) not in (1, channels):
            raise ProblemError(
                f"{name} has {len(column)} values, the images {channels} channels: give one, or as many."
            )
        columns.append(column)
    if not bool((columns[1] > 0).all()):
        raise ProblemError(f"std must be positive, got {std!r}.")
    return (1 / (255 * columns[1])).float(), (-columns[0] / columns[1]).float()
