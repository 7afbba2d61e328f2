"""The share of a step that waits for data: torch's DataLoader, with and without workers, and the library's feed.

    python benchmarks/data.py [--rounds 9] [--cases mlp,conv,images] [--quick]

All contenders train the same network in the same hand-written loop and differ in where batches come from. The share is
the time spent in `next(batches)` over the time of the loop. One thread, contenders interleaved, medians with quartiles.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Ratio, begin, parser, quartiles, save
from nets import CLASSES, Embedding, MultiTask, resnet
from page import Section, Table, ratio
from rich.console import Console
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

import forkmerge as fm
from forkmerge.datasets.images import CachedImages
from forkmerge.problem.batches import batches
from forkmerge.problem.example_order import batch_indices

TASKS = ("task0", "task1", "task2")
CPU = torch.device("cpu")
BASE, WORKERS, OURS, NO_THREAD = "DataLoader", "DataLoader, 2 workers", "forkmerge", "forkmerge, without the thread"
Feed = Iterator[list[Tensor]]
Times = tuple[float, float]
"""Seconds spent waiting for data, and in all."""


def loader(dataset: Dataset[Any], batch: int, workers: int = 0) -> Feed:
    """The usual way: shuffled epochs, examples collated one by one."""
    made = DataLoader(dataset, batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0, drop_last=True)
    while True:
        yield from made


def feed(dataset: Dataset[Any], batch: int) -> Feed:
    """The library's way: an endless stream, cut into batches."""
    stream = fm.Stream(dataset, lambda model, batch, tasks, context: {}, TASKS, batch)
    return batches("all", stream, range(1 << 30), 0, CPU)


def feed_in_place(dataset: CachedImages, batch: int) -> Feed:
    """The library's way without reading ahead."""
    for position in count():
        yield dataset.read_batch(batch_indices(len(dataset), batch, position, 0, "all"))


class Decoding(Dataset[Any]):
    """Image files decoded whenever they are read."""

    def __init__(self, paths: list[Path], labels: list[Tensor], size: int) -> None:
        self.paths, self.labels, self.size = paths, labels, size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        from PIL import Image

        with Image.open(self.paths[index]) as image:
            pixels = np.asarray(image.convert("RGB").resize((self.size, self.size), Image.Resampling.BILINEAR))
        images = torch.from_numpy(pixels.copy()).permute(2, 0, 1).to(torch.float32).div_(255)
        return images, *(column[index] for column in self.labels)


def loop(model: MultiTask, source: Feed, steps: int) -> Callable[[], Times]:
    """A plain multi-task loop that notes how long it waits for batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def run() -> Times:
        waited, started = 0.0, time.perf_counter()
        for _ in range(steps):
            asked = time.perf_counter()
            inputs, *labels = next(source)
            waited += time.perf_counter() - asked
            features = model.encoder(inputs)
            optimizer.zero_grad()
            losses = [cross_entropy(model.heads[t](features), y) for t, y in zip(TASKS, labels, strict=True)]
            torch.stack(losses).sum().backward()
            optimizer.step()
        return waited, time.perf_counter() - started

    return run


def labels_of(examples: int) -> list[Tensor]:
    """Labels of all tasks."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, CLASSES, (examples,), generator=generator) for _ in TASKS]


def mlp() -> MultiTask:
    """The network of the MLP problem."""
    torch.manual_seed(0)
    return MultiTask(Embedding(), [128, 64], TASKS)


def conv() -> MultiTask:
    """The network of the conv problem."""
    torch.manual_seed(0)
    return MultiTask(resnet(), [128], TASKS)


@contextmanager
def tensors(model: Callable[[], MultiTask], inputs: Tensor, batch: int, steps: int) -> Iterator[dict[str, Any]]:
    """The contenders on data in memory."""
    dataset = TensorDataset(inputs, *labels_of(len(inputs)))
    yield {
        BASE: loop(model(), loader(dataset, batch), steps),
        WORKERS: loop(model(), loader(dataset, batch, 2), steps),
        OURS: loop(model(), feed(dataset, batch), steps),
    }


@contextmanager
def images(files: int, steps: int) -> Iterator[dict[str, Any]]:
    """The contenders on image files of 96 × 96 pixels, read as 32 × 32."""
    from PIL import Image

    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        paths = [Path(folder) / f"{index:05d}.jpg" for index in range(files)]
        for path in paths:
            small = Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8))
            small.resize((96, 96), Image.Resampling.BICUBIC).save(path, quality=90)
        labels = labels_of(files)
        decoding = Decoding(paths, labels, 32)
        cached = CachedImages(paths, *labels, size=32, cache=Path(folder) / "cache", progress=False)
        ahead = feed(cached, 32)
        stack.callback(ahead.close)  # type: ignore[attr-defined]  # ends its thread
        yield {
            BASE: loop(conv(), loader(decoding, 32), steps),
            WORKERS: loop(conv(), loader(decoding, 32, 2), steps),
            NO_THREAD: loop(conv(), feed_in_place(cached, 32), steps),
            OURS: loop(conv(), ahead, steps),
        }


def measure(contenders: Mapping[str, Callable[[], Times]], rounds: int) -> dict[str, dict[str, Ratio]]:
    """Run every contender once per round; return the share of waiting, in percent, and the ratio of step times."""
    times: dict[str, list[Times]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, run in contenders.items():
            found = run()
            if turn:
                times[name].append(found)
    base = [total for _, total in times[BASE]]
    return {
        name: {
            "share": quartiles([100 * waited / total for waited, total in found]),
            "step": quartiles(
                [total / other for (_, total), other in zip(found, base, strict=True)],
                statistics.median(total for _, total in found),
            ),
        }
        for name, found in times.items()
    }


def cases(quick: bool) -> dict[str, Any]:
    """Everything that can be timed here."""
    scale = 8 if quick else 1
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 2000, (16384 // scale, 16), generator=generator)
    pixels = torch.randn(2048 // scale, 3, 32, 32, generator=generator)
    found: dict[str, Any] = {
        "mlp": lambda: tensors(mlp, rows, 256, 60 // scale),
        "conv": lambda: tensors(conv, pixels, 32, 16 // scale),
    }
    if find_spec("PIL") is not None:
        found["images"] = lambda: images(1024 // scale, 16 // scale)
    return found


TITLES = {"mlp": "MLP, tensors", "conv": "conv 32×32, tensors", "images": "conv 32×32, JPEG files"}


def section(results: Mapping[str, Any]) -> Section:
    """Say what the JSON means."""
    tables = []
    for name, contenders in results.items():
        rows = [[who, ratio(found["share"], "%"), ratio(found["step"])] for who, found in contenders.items()]
        header = ["batches from", "waiting for data", "time of a step"]
        tables.append(Table(header, rows, f"{TITLES[name]}:"))
    return Section(
        "The share of a step that waits for data",
        "The same hand-written loop with batches from torch's `DataLoader` and from the library; times are ratios to "
        "the `DataLoader` without workers.",
        tables,
        notes=[
            "Tensors in the model's memory are cut into batches in place. Image files are decoded once into a memory "
            "map, and read ahead by a thread."
        ],
        answers=[("How much of a step waits for data?", _waiting(results))],
    )


def _waiting(results: Mapping[str, Any]) -> str:
    """Say what a step waits with the library's batches, and with torch's."""
    parts = []
    for name, contenders in results.items():
        ours, theirs = (contenders[who]["share"]["median"] for who in ("forkmerge", "DataLoader"))
        parts.append(f"{TITLES[name]}: {ours:.1f}% ({theirs:.1f}%)")
    return f"{'; '.join(parts)}; in brackets with torch's `DataLoader`"


def main(argv: list[str] | None = None) -> None:
    """Time all cases, print them and save them as JSON."""
    options_of = parser(__doc__)
    options_of.add_argument("--rounds", type=int)
    options_of.add_argument("--cases", default="mlp,conv,images")
    options = begin(options_of, argv)
    known, console, results = cases(options.quick), Console(), {}
    for name in options.cases.split(","):
        if name not in known:
            console.print(f"{name}: left out, it needs Pillow")
            continue
        with known[name]() as contenders:
            results[name] = measure(contenders, options.rounds or (2 if options.quick else 9))
        for who, found in results[name].items():
            line = f"{TITLES[name]:24} {who:32} data {found['share']}%   step {found['step']}"
            console.print(line, soft_wrap=True, highlight=False)
    save("data", results, options.out)


if __name__ == "__main__":
    main()
