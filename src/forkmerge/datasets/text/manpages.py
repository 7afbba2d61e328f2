"""Manual pages in twelve languages: a language with little text, others that may help, and Python source.

Read from `manpages_text.json.xz`, `{language: [[page, text], …]}`. Pages of the same name are translations of each
other. So a page's name decides whether it is for training, validation, development or test, in the same way for all
languages and seeds; pages whose text is nearly the same in some language count as one. Of the languages that can be the
target, the pages to validate and test on are left out of all training data, that of a pre-training included.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import sysconfig
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from forkmerge.algorithms.forkmerge import ForkMerge
from forkmerge.datasets._files import READING_ERRORS, Root, data_folder, missing
from forkmerge.engine.training.optimizers import OptimizerOf
from forkmerge.errors import ProblemError, check_count, unknown_name
from forkmerge.experiments.recipe import Recipe
from forkmerge.models import ByteLanguageModel
from forkmerge.problem.definition import Evaluation, Problem, Stream
from forkmerge.problem.text.near_duplicates import DuplicateIndex, join_groups, leader_of
from forkmerge.problem.text.windows import bits_per_byte, byte_windows, measure_bits, next_token_loss

FILE, SOURCE = "manpages_text.json.xz", "Debian's manpages packages, packed as forkmerge.datasets.text.manpages says"
CODE = "python"
AUXILIARIES = {
    "da": ("nb", "sv", "ru", CODE),
    "nb": ("da", "sv", "ru", CODE),
    "ro": ("it", "fr", "ru", CODE),
}
"""Of every language that can be a target: near ones, a far one, and no language at all."""

_PARTS = {"test": 0.35, "validation": 0.15, "development": 0.15}  # of the pages; the others are for training
_CODE_BYTES = 1_000_000

Pages = dict[str, str]
"""Texts by the names of their pages."""


def recipe(
    target: str = "da",
    auxiliaries: Sequence[str] | None = None,
    labels: int | Literal["all"] = 24_000,
    validation: int | Literal["all"] = 12_000,
    development: bool = False,
    length: int = 128,
    width: int = 96,
    depth: int = 2,
    batch_size: int = 8,
    steps: int = 400,
    interval: int = 50,
    seed: int = 0,
    root: str | None = None,
) -> Recipe:
    """Return a small language model over bytes, with one branch per other language.

    Args:
        target: The language to learn.
        auxiliaries: Other languages, or "python"; None for those of `AUXILIARIES`, and for none of another target.
        labels: Bytes of the target to train on, or "all".
        validation: Bytes of the target to validate on, or "all".
        development: Whether the development pages take the place of the test split: options may be chosen on them as
            often as one likes.
        length: Bytes of a window.
        width: Size of the model's representation.
        depth: Its layers.
        batch_size: Windows per step.
        steps: Training steps.
        interval: Steps between merges.
        seed: Draws the target's pages, the first weights and the order of the data.
        root: The folder; by default the one that FORKMERGE_DATA names.
    """
    return Recipe(
        problem(
            target,
            auxiliaries,
            root,
            labels=labels,
            validation=validation,
            development=development,
            length=length,
            batch_size=batch_size,
            seed=seed,
        ),
        partial(ByteLanguageModel, width, depth),
        OptimizerOf("AdamW", lr=1e-3, weight_decay=0.01),
        steps=steps,
        algorithm=ForkMerge("per_auxiliary", interval=interval),
        options={"seed": seed},
    )


def problem(
    target: str = "da",
    auxiliaries: Sequence[str] | None = None,
    root: Root = None,
    *,
    labels: int | Literal["all"] = 24_000,
    validation: int | Literal["all"] = 12_000,
    development: bool = False,
    length: int = 128,
    batch_size: int = 8,
    seed: int = 0,
) -> Problem:
    """Return a task per language; a task weight is the share of the steps that read it.

    Args:
        target: The language to learn.
        auxiliaries: Other languages, or "python"; None for those of `AUXILIARIES`, and for none of another target.
        root: The folder; by default the one that FORKMERGE_DATA names.
        labels: Bytes of the target to train on, or "all".
        validation: Bytes of the target to validate on, or "all".
        development: Whether the development pages take the place of the test split.
        length: Bytes of a window.
        batch_size: Windows per step.
        seed: Draws the pages that are trained and validated on.
    """
    languages, parts = _read_once(data_folder(root, "manual pages") / FILE)
    names = AUXILIARIES.get(target, ()) if auxiliaries is None else auxiliaries
    for name in (target, *names):
        if name != CODE and name not in languages:
            raise ProblemError("manual pages: " + unknown_name("language", name, [*languages, CODE]))

    def text(language: str, part: str, size: int | Literal["all"] = "all") -> list[str]:
        pages = {name: page for name, page in languages[language].items() if parts[name] == part}
        return list(pages.values()) if size == "all" else draw(pages, size, seed, f"{language}, {part}")

    training = {target: text(target, "training", labels)}
    training |= {name: python_source() if name == CODE else text(name, "training") for name in names if name != target}
    streams = {
        name: Stream(byte_windows(texts, check_count("length", length)), next_token_loss, name, batch_size)
        for name, texts in training.items()
    }
    held = [text(target, "validation", validation), text(target, "development" if development else "test")]
    evaluate = partial(Evaluation, metrics=bits_per_byte, predict=measure_bits, batch_size=32)
    windows = [byte_windows(texts, length) for texts in held]
    return Problem(target, streams, evaluate(windows[0]), evaluate(windows[1]), weights="sampling")


def _read_once(path: Path) -> tuple[dict[str, Pages], dict[str, str]]:
    """Return the pages, and the part that every name is for, read once by every process."""
    changed = path.stat().st_mtime_ns if path.is_file() else 0
    return _read(path, changed)


@cache
def _read(path: Path, changed: int) -> tuple[dict[str, Pages], dict[str, str]]:
    languages = read_pages(path)
    return languages, parts_of(languages)


def read_pages(path: Path) -> dict[str, Pages]:
    """Return the pages of every language."""
    if not path.is_file():
        raise missing("manual pages", path.parent, [path.name], SOURCE)
    try:
        with lzma.open(path, "rt", encoding="utf-8") as file:
            content: dict[str, list[Any]] = json.load(file)
        pages = {language: dict(entries) for language, entries in content.items()}
        texts = [text for entries in pages.values() for item in entries.items() for text in item]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a page is no pair of a name and a text")
    except READING_ERRORS as error:
        raise ProblemError(f"cannot read {path}: {error}. Get the file again.") from None
    return pages


def parts_of(languages: dict[str, Pages]) -> dict[str, str]:
    """Return the part that every page's name is for: training, validation, development or test.

    Names whose texts are near-duplicates in some language belong together, and a checksum decides for them all. Names
    that no language of `AUXILIARIES` has are for training.
    """
    names = sorted({name for pages in languages.values() for name in pages})
    indices = {name: index for index, name in enumerate(names)}
    leaders = list(range(len(names)))
    for pages in languages.values():
        own = [indices[name] for name in pages]
        for index, leader in zip(own, DuplicateIndex(list(pages.values())).groups(), strict=True):
            join_groups(leaders, index, own[leader])
    group = {name: names[leader_of(leaders, index)] for name, index in indices.items()}
    held = {group[name] for target in AUXILIARIES for name in languages.get(target, {})}
    return {name: _part(leader) if leader in held else "training" for name, leader in group.items()}


def _part(name: str) -> str:
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
    for part, share in _PARTS.items():
        if number < share:
            return part
        number -= share
    return "training"


def draw(pages: Pages, size: int, seed: int, what: str) -> list[str]:
    """Return pages in an order that the seed draws, up to that many bytes; the last one may be cut."""
    order = np.random.default_rng(seed).permutation(len(pages)).tolist()
    names, texts, left = sorted(pages), [], check_count(f"bytes of {what}", size)
    for index in order:
        if left <= 0:
            break
        raw = pages[names[index]].encode()[:left]
        texts.append(raw.decode("utf-8", "ignore"))
        left -= len(raw)
    return texts


def python_source() -> list[str]:
    """Return a megabyte of the standard library of the Python that runs this, in the order of its files."""
    texts: list[str] = []
    left = _CODE_BYTES
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if left <= 0:
            break
        raw = path.read_bytes()[:left]
        texts.append(raw.decode("utf-8", "ignore"))
        left -= len(raw)
    return texts
