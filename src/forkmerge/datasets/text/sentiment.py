"""Sentiment of sentences in four domains, a task each: products, films, news and tweets.

Read from the source distribution of vaderSentiment 3.3.2 (MIT licence), which carries the ratings of Hutto and Gilbert,
VADER, ICWSM 2014: every sentence has the mean of some twenty people's ratings from -4 to 4. Sentences on products and
of news that are from one review or article are always in the same part, training, validation or test. Films and tweets
come without that; there it is sentences with the same words.
"""

from __future__ import annotations

import hashlib
import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache as kept
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.utils.data import TensorDataset

from forkmerge.algorithms.forkmerge import ForkMerge
from forkmerge.datasets._classify import ClassificationLosses, PredictClass, few_of_each
from forkmerge.datasets._files import READING_ERRORS, Array, Root, data_folder, missing
from forkmerge.datasets.text._sentence_features import CHANNELS, encode_sentences
from forkmerge.engine.training.optimizers import OptimizerOf
from forkmerge.errors import ProblemError, check_count, unknown_name
from forkmerge.experiments.recipe import Recipe
from forkmerge.models import Classifier
from forkmerge.problem.definition import Evaluation, Problem, Stream
from forkmerge.problem.metrics import accuracy

FILE = "vaderSentiment-3.3.2.tar.gz"
SOURCE = "the package index: pip download --no-deps --no-binary :all: vaderSentiment==3.3.2 -d FOLDER"
DOMAINS = {
    "products": "amazonReviewSnippets",
    "films": "movieReviewSnippets",
    "news": "nytEditorialSnippets",
    "tweets": "tweets",
}
CLASSES = 2
"""Negative and positive."""
_INNER = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
_LARGEST = 16_000_000  # bytes of a member: the largest has 2.5 million
_CLEAR = 0.5  # ratings nearer to 0 are of neither class
_PARTS = {"test": 0.4, "validation": 0.2}  # of the reviews, articles and tweets; the others are for training


@dataclass(frozen=True)
class Sentence:
    """A sentence that people have rated.

    Args:
        text: Its words.
        rating: Their mean rating, -4 to 4.
        group: What it was taken from, or where nothing says so its words: sentences of a group stay together.
    """

    text: str
    rating: float
    group: str

    @property
    def part(self) -> str:
        """Whether it is for training, validation or test: a checksum of its group decides."""
        number = int.from_bytes(hashlib.sha256(self.group.encode()).digest()[:8], "big") / 2**64
        for part, share in _PARTS.items():
            if number < share:
                return part
            number -= share
        return "training"


def recipe(
    target: str = "products",
    labels: int = 20,
    validation: int = 20,
    auxiliary_labels: int | Literal["all"] = "all",
    shared_head: bool = True,
    development: bool = False,
    width: int = 128,
    batch_size: int = 32,
    steps: int = 400,
    interval: int = 80,
    seed: int = 0,
    root: str | None = None,
    cache: str | None = None,
) -> Recipe:
    """Return a small network on features of a published sentence encoder, with one branch per other domain.

    Args:
        target: A domain.
        labels: Sentences of either class of the target to train on.
        validation: Sentences of either class of the target to validate on.
        auxiliary_labels: Sentences of either class of the other domains to train on.
        shared_head: Whether all domains share the last layer; otherwise each has its own.
        development: Whether training sentences of the target that `labels` leaves out take the place of the test split:
            options may be chosen on them as often as one likes.
        width: Size of the layer between features and classes.
        batch_size: Sentences per step and task.
        steps: Training steps.
        interval: Steps between merges.
        seed: Draws the sentences, the first weights and the order of the data.
        root: The folder; by default the one that FORKMERGE_DATA names.
        cache: Where features are kept.
    """
    drawn = problem(
        target,
        root,
        labels=labels,
        validation=validation,
        auxiliary_labels=auxiliary_labels,
        development=development,
        batch_size=batch_size,
        seed=seed,
        cache=cache,
    )
    return Recipe(
        drawn,
        model=partial(_classifier, dict.fromkeys(DOMAINS, CLASSES), width, shared_head),
        optimizer=OptimizerOf("Adam", lr=1e-3),
        steps=steps,
        algorithm=ForkMerge("per_auxiliary", interval=interval),
        options={"seed": seed},
    )


def problem(
    target: str = "products",
    root: Root = None,
    *,
    labels: int = 20,
    validation: int = 20,
    auxiliary_labels: int | Literal["all"] = "all",
    development: bool = False,
    batch_size: int = 32,
    seed: int = 0,
    cache: Root = None,
) -> Problem:
    """Return one task per domain, positive or negative.

    Args:
        target: A domain.
        root: The folder; by default the one that FORKMERGE_DATA names.
        labels: Sentences of either class of the target to train on.
        validation: Sentences of either class of the target to validate on.
        auxiliary_labels: Sentences of either class of the other domains to train on.
        development: Whether training sentences of the target that `labels` leaves out take the place of the test split.
        batch_size: Sentences per step and task.
        seed: Draws the sentences.
        cache: Where features are kept.
    """
    if target not in DOMAINS:
        raise ProblemError("sentiment: " + unknown_name("domain", target, DOMAINS))
    counts = {"training": check_count("labels", labels), "validation": check_count("validation", validation)}
    domains = _read_once(data_folder(root, "sentiment") / FILE)
    features = encode_sentences([each.text for rated in domains.values() for each in rated], cache=cache)
    streams, evaluations, first = {}, {}, 0
    for name, rated in domains.items():
        rows, first = np.arange(first, first + len(rated)), first + len(rated)
        classes, parts = np.array([each.rating > 0 for each in rated], np.int64), np.array([s.part for s in rated])
        few = {part: np.flatnonzero(parts == part) for part in ("training", "validation", "test")}
        if name == target:
            drawn = {part: _few(few[part], classes, count, seed) for part, count in counts.items()}
            if development:
                few["test"] = np.setdiff1d(few["training"], drawn["training"])
                if not len(few["test"]):
                    raise ProblemError("sentiment: with so many labels none is left to develop on: ask for fewer.")
            few |= drawn
        elif auxiliary_labels != "all":
            few["training"] = _few(few["training"], classes, check_count("auxiliary_labels", auxiliary_labels), seed)
        data = {
            part: TensorDataset(torch.tensor(features[rows[chosen]]), torch.tensor(classes[chosen]))
            for part, chosen in few.items()
        }
        streams[name] = Stream(data["training"], ClassificationLosses(Features()), name, batch_size)
        predict = PredictClass(name, Features())
        evaluations[name] = [Evaluation(data[part], accuracy, predict=predict) for part in ("validation", "test")]
    validations, tests = ({name: each[i] for name, each in evaluations.items()} for i in range(2))
    return Problem(target, streams, validations, tests)


class Features:
    """Features as they are."""

    def training(self, features: Tensor, generator: Generator) -> Tensor:
        """Return them as floats."""
        return features.float()

    def evaluation(self, features: Tensor) -> Tensor:
        """Return them as floats."""
        return features.float()


def _few(rows: Array, classes: Array, count: int, seed: int) -> Array:
    """Return that many rows of either class, drawn by the seed."""
    fewest = min(int(np.sum(classes[rows] == label)) for label in range(CLASSES))
    if count > fewest:
        raise ProblemError(f"sentiment: {count} sentences of either class were asked for; of one there are {fewest}.")
    return few_of_each(rows, classes, count, seed)


def _classifier(classes: Mapping[str, int], width: int, shared_head: bool) -> Classifier:
    scaled = nn.LayerNorm(CHANNELS)  # features have length 1, which first layers are not made for
    hidden = nn.Sequential(scaled, nn.Linear(CHANNELS, width), nn.ReLU(), nn.Dropout(0.2))
    return Classifier(hidden, classes, shared_head=shared_head, channels=width)


def _read_once(path: Path) -> dict[str, list[Sentence]]:
    """Return the sentences, read once by every process."""
    return _read(path, path.stat().st_mtime_ns if path.is_file() else 0)


@kept
def _read(path: Path, changed: int) -> dict[str, list[Sentence]]:
    return read_sentences(path)


def read_sentences(path: Path) -> dict[str, list[Sentence]]:
    """Return the clearly positive and negative sentences of every domain."""
    if not path.is_file():
        raise missing("sentiment", path.parent, [path.name], SOURCE)
    try:
        inner = _member(path.read_bytes(), _INNER)
        domains = {
            name: _parse(_member(inner, f"hutto_ICWSM_2014/{file}_GroundTruth.txt"), name)
            for name, file in DOMAINS.items()
        }
        if not all(domains.values()):
            raise ValueError("a domain has no sentence")
    except (*READING_ERRORS, tarfile.TarError) as error:
        raise ProblemError(f"cannot read {path}: {error}. Get the file again.") from None
    return domains


def _member(archive: bytes, name: str) -> bytes:
    """Return a file of an archive, none of which is written anywhere."""
    with tarfile.open(fileobj=BytesIO(archive), mode="r:gz") as files:
        member = files.getmember(name)
        if member.size > _LARGEST:
            raise ValueError(f"{name} has {member.size} bytes, more than {_LARGEST}")
        content = files.extractfile(member)
        if content is None:
            raise ValueError(f"{name} is no file")
        return content.read(_LARGEST)


def _parse(content: bytes, domain: str) -> list[Sentence]:
    """Return the sentences of lines `ID TAB RATING TAB TEXT`; an ID may be that of a review, `_`, and a number."""
    sentences = []
    for line in content.decode("utf-8", "replace").splitlines():
        key, rating, text = line.split("\t", 2)
        words = " ".join(re.findall(r"\w+", text.lower()))
        group = key.partition("_")[0] if "_" in key else words
        if abs(float(rating)) >= _CLEAR:
            sentences.append(Sentence(text.strip(), float(rating), f"{domain} {group}"))
    return sentences
