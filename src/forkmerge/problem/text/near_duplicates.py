"""Near-duplicates among documents, found by hashed n-grams of words: what may not stand in the data of a fair test.

Two documents are near-duplicates where they share at least half of the n-grams of the one that has fewer. N-grams that
stand in many documents are boilerplate (licences, how to report bugs) and do not count. Words are lower-cased runs of
letters and digits, so layout does not matter.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

NGRAM = 8  # words: long enough that sentences which happen to agree are rare
SHARE = 0.5  # of the n-grams of the smaller document
FEWEST = 5  # n-grams: less than a dozen words can agree by chance
COMMON = 10  # documents: what stands in more of them is boilerplate

Hashes = npt.NDArray[Any]
_WORD = re.compile(r"\w+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class Pair(NamedTuple):
    """Two documents that have much in common.

    Args:
        first: The index of the one.
        second: The index of the other.
        share: Of the n-grams of the smaller one, how many the other one has.
    """

    first: int
    second: int
    share: float


def ngrams(text: str, size: int = NGRAM) -> Hashes:
    """Return the hashes of the n-grams of a text, each once, in ascending order; of a shorter text that of all of it.

    Example:
        >>> len(ngrams("a b c d e f g h i j"))
        3
    """
    words = [zlib.crc32(word.encode("utf-8", "surrogatepass")) for word in _WORD.findall(text.lower())]
    values = np.array(words, np.uint64)
    count, hashes = max(len(values) - size + 1, min(len(values), 1)), np.uint64(0)
    for offset in range(min(size, len(values))):
        hashes = hashes * _MULTIPLIER + (values[offset : offset + count] + np.uint64(1))
    return np.unique(hashes) if count else values


class DuplicateIndex:
    """Documents to compare others with.

    Args:
        texts: The documents.
        background: Further texts of their kind, from which boilerplate is known, too.

    Example:
        >>> index = DuplicateIndex(["one two three four five six seven eight nine ten eleven twelve thirteen"])
        >>> index.pairs(["ONE two three four five six, seven eight nine ten eleven twelve thirteen!"])
        [Pair(first=0, second=0, share=1.0)]
    """

    def __init__(self, texts: Sequence[str], background: Iterable[str] = ()) -> None:
        hashes = [ngrams(text) for text in texts]
        everything = [*hashes, *(ngrams(text) for text in background)]
        values, counts = np.unique(np.concatenate([*everything, np.array([], np.uint64)]), return_counts=True)
        self._boilerplate = values[counts > COMMON]
        own = [self._rare(each) for each in hashes]
        self._sizes = np.array([len(each) for each in own], np.int64)
        joined = np.concatenate([*own, np.array([], np.uint64)])
        owners = np.repeat(np.arange(len(own)), self._sizes)
        order = np.argsort(joined, kind="stable")
        self._hashes, self._owners = joined[order], owners[order]

    def pairs(self, texts: Iterable[str]) -> list[Pair]:
        """Return all pairs of a document of the index and one of these that are near-duplicates."""
        return [pair for second, text in enumerate(texts) for pair in self._pairs_of(second, self._rare(ngrams(text)))]

    def _rare(self, hashes: Hashes) -> Hashes:
        return np.setdiff1d(hashes, self._boilerplate, assume_unique=True)

    def _pairs_of(self, second: int, hashes: Hashes) -> Iterator[Pair]:
        begin, end = (np.searchsorted(self._hashes, hashes, side) for side in ("left", "right"))
        counts = end - begin
        places = np.repeat(end - counts.cumsum(), counts) + np.arange(counts.sum())  # all of [begin, end), joined
        shared = np.bincount(self._owners[places], minlength=len(self._sizes))
        smaller = np.minimum(self._sizes, len(hashes))
        for first in np.flatnonzero((smaller >= FEWEST) & (shared >= SHARE * smaller)).tolist():
            yield Pair(first, second, float(shared[first] / smaller[first]))

    def groups(self) -> list[int]:
        """Return for every document the first one of its group: near-duplicates, and theirs, are in one group."""
        leaders = list(range(len(self._sizes)))
        codes = [np.array([], np.int64)]
        for apart in range(1, COMMON):
            same = np.flatnonzero(self._hashes[apart:] == self._hashes[:-apart])
            codes.append(self._owners[same] * len(leaders) + self._owners[same + apart])
        for code, shared in zip(
            *map(np.ndarray.tolist, np.unique(np.concatenate(codes), return_counts=True)), strict=True
        ):
            pair = divmod(code, len(leaders))
            smaller = int(self._sizes[list(pair)].min())
            if smaller >= FEWEST and shared >= SHARE * smaller:
                join_groups(leaders, *pair)
        return [leader_of(leaders, item) for item in range(len(leaders))]


def leader_of(leaders: Sequence[int], item: int) -> int:
    """Return the first member of an item's group."""
    while leaders[item] != item:
        item = leaders[item]
    return item


def join_groups(leaders: list[int], one: int, other: int) -> None:
    """Make one group of the groups of two items."""
    first, second = sorted((leader_of(leaders, one), leader_of(leaders, other)))
    leaders[second] = first
