"""Images kept as one stream of JPEG bytes in a .npz file, decoded once into a memory map outside of it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from forkmerge.datasets._files import Array, Pack, Root
from forkmerge.datasets.images import Pixels, decode_once, map_file, open_map
from forkmerge.engine.storage.convert_once import key_of
from forkmerge.errors import ProblemError

_FORMAT = 1  # part of every key: another way of storing images must not find the old files


def decode_pack(
    pack: Pack, stream: str, offsets: str, size: int, *, cache: Root = None, workers: int = 1, progress: bool = True
) -> Pixels:
    """Return a memory map of uint8 values [n, 3, size, size].

    Args:
        pack: The file.
        stream: The name of the bytes in it.
        offsets: The name of where every image starts, and the last ends, [n + 1].
        size: Height and width.
        cache: The folder of decoded images; by default `forkmerge/images` in the user's cache folder.
        workers: Threads that decode.
        progress: Whether a bar is shown on a terminal.
    """
    bounds = pack[offsets].astype(np.int64)
    count = len(bounds) - 1
    if count < 1 or bounds[0] < 0 or bool((np.diff(bounds) <= 0).any()):
        raise ProblemError(f"{pack.path}: {offsets!r} must hold ascending places in {stream!r}. Get the file again.")
    file = map_file(cache, key_of(f"pack {_FORMAT}\n{stream}\n{size}", [pack.path]))
    if (pixels := open_map(file, count)) is not None:
        return pixels  # without reading the stream
    data = pack[stream]
    if bounds[-1] > len(data):
        raise ProblemError(f"{pack.path}: {stream!r} ends before its last image. Get the file again.")
    names = [Path(f"{pack.path} image {index}") for index in range(count)]
    return decode_once(file, names, _Decoder(data, bounds, size), workers, progress)


class _Decoder:
    """Decodes image i of a stream, asked for by a name that ends in i."""

    def __init__(self, data: Array, bounds: Array, size: int) -> None:
        try:
            from PIL import Image
        except ImportError:
            raise ProblemError("decoding images needs Pillow: type pip install 'forkmerge[vision]'.") from None
        self._image: Any = Image
        self._data, self._bounds, self._size = data, bounds, size

    def __call__(self, path: Path) -> Pixels:
        index = int(path.name.rsplit(" ", 1)[1])
        part = self._data[self._bounds[index] : self._bounds[index + 1]]
        with self._image.open(io.BytesIO(part.tobytes())) as image:
            converted = image.convert("RGB")
            if converted.size != (self._size, self._size):
                converted = converted.resize((self._size, self._size), self._image.Resampling.BOX)
            return np.asarray(converted)
