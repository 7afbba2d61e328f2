"""Near-duplicates among documents, found by hashed n-grams of words: what may not stand in the data of a fair test.

Two documents are near-duplicates where they share at least half of the n-grams of the one that has fewer. N-grams that
stand in many documents are boilerplate (licences, how to report bugs) and do not count. Words are lower-cased runs of
letters and digits, so layout does not matter; of scripts that are written without spaces, every character is one.
Documents of few words are also compared by n-grams of characters, and documents whose words are all the same, in the
same order, are always near-duplicates.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

NGRAM = 8  # words: long enough that sentences which happen to agree are rare; of short documents, characters
SHARE = 0.5  # of the n-grams of the smaller document
FEWEST = 5  # n-grams of words: less than a dozen words can agree by chance
FEWEST_LETTERS = 20  # n-grams of characters: half of them is a phrase of 17, not just one rare word
SHORT = 24  # words: twice what n-grams of words need, so that shorter documents are compared with some longer ones
COMMON = 10  # documents: what stands in more of them is boilerplate
# Words of a document that is compared as a whole: "Yes.", "Thank you" or "See also" are written by anyone, and known
# without having been read, so that a test loses nothing by them, while corpora of answers would lose a good part.
FEWEST_WORDS = 3

Hashes = npt.NDArray[Any]
_UNSPACED = (
    r"\u0e00-\u109f\u1780-\u17ff"  # Thai, Lao, Tibetan, Burmese; Khmer
    r"\u3040-\u312f\u31f0-\u31ff\uff66-\uff9f"  # kana and bopomofo
    r"\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Chinese characters
)
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
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
        >>> len(ngrams("今天天气很好我们去公园"))
        4
    """
    return _hashes_of_words(_words(text), size)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _hashes_of_words(words: Sequence[str], size: int = NGRAM) -> Hashes:
    return _rolled([zlib.crc32(word.encode("utf-8", "surrogatepass")) for word in words], size)


def _rolled(items: Sequence[int], size: int) -> Hashes:
    values = np.array(items, np.uint64)
    count, hashes = max(len(values) - size + 1, min(len(values), 1)), np.uint64(0)
    for offset in range(min(size, len(values))):
        hashes = hashes * _MULTIPLIER + (values[offset : offset + count] + np.uint64(1))
    return np.unique(hashes) if count else values


class _Prints(NamedTuple):
    """What of a document is compared: n-grams of words, of characters if it is short, and all of it."""

    words: Hashes
    letters: Hashes
    whole: bytes | None

    @classmethod
    def of(cls, text: str) -> _Prints:
        words = _words(text)
        joined = " ".join(words)
        whole = hashlib.sha256(joined.encode("utf-8", "surrogatepass")).digest()
        letters = [ord(letter) for letter in joined] if len(words) < SHORT else []
        return cls(_hashes_of_words(words), _rolled(letters, NGRAM), whole if len(words) >= FEWEST_WORDS else None)


class _Kind:
    """The n-grams of one kind of many documents, but for boilerplate."""

    def __init__(self, documents: Sequence[Hashes], background: Sequence[Hashes], fewest: int) -> None:
        everything = np.concatenate([*documents, *background, np.array([], np.uint64)])
        values, counts = np.unique(everything, return_counts=True)
        self._boilerplate = values[counts > COMMON]
        own = [self._rare(each) for each in documents]
        self._sizes, self._fewest = np.array([len(each) for each in own], np.int64), fewest
        joined = np.concatenate([*own, np.array([], np.uint64)])
        owners = np.repeat(np.arange(len(own)), self._sizes)
        order = np.argsort(joined, kind="stable")
        self._hashes, self._owners = joined[order], owners[order]

    def _rare(self, hashes: Hashes) -> Hashes:
        return np.setdiff1d(hashes, self._boilerplate, assume_unique=True)

    def shares(self, document: Hashes) -> dict[int, float]:
        """Return the share that near-duplicates of a document have in common with it, by their indices."""
        hashes = self._rare(document)
        begin, end = (np.searchsorted(self._hashes, hashes, side) for side in ("left", "right"))
        counts = end - begin
        places = np.repeat(end - counts.cumsum(), counts) + np.arange(counts.sum())  # all of [begin, end), joined
        shared = np.bincount(self._owners[places], minlength=len(self._sizes))
        smaller = np.minimum(self._sizes, len(hashes))
        near = np.flatnonzero((smaller >= self._fewest) & (shared >= SHARE * smaller))
        return {index: float(shared[index] / smaller[index]) for index in near.tolist()}

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Return all pairs of these documents that are near-duplicates."""
        count, codes = len(self._sizes), [np.array([], np.int64)]
        for apart in range(1, COMMON):
            same = np.flatnonzero(self._hashes[apart:] == self._hashes[:-apart])
            codes.append(self._owners[same] * count + self._owners[same + apart])
        for code, shared in zip(
            *map(np.ndarray.tolist, np.unique(np.concatenate(codes), return_counts=True)), strict=True
        ):
            pair = divmod(code, count)
            smaller = int(self._sizes[list(pair)].min())
            if smaller >= self._fewest and shared >= SHARE * smaller:
                yield pair


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
        own, further = ([_Prints.of(text) for text in each] for each in (texts, background))
        self._words = _Kind([each.words for each in own], [each.words for each in further], FEWEST)
        self._letters = _Kind([each.letters for each in own], [each.letters for each in further], FEWEST_LETTERS)
        self._same: dict[bytes, list[int]] = {}
        for index, each in enumerate(own):
            if each.whole is not None:
                self._same.setdefault(each.whole, []).append(index)
        self._count = len(own)

    def pairs(self, texts: Iterable[str]) -> list[Pair]:
        """Return all pairs of a document of the index and one of these that are near-duplicates."""
        return [pair for second, text in enumerate(texts) for pair in self._pairs_of(second, _Prints.of(text))]

    def _pairs_of(self, second: int, prints: _Prints) -> Iterator[Pair]:
        words, letters = self._words.shares(prints.words), self._letters.shares(prints.letters)
        same = dict.fromkeys(self._same.get(prints.whole, ()) if prints.whole else (), 1.0)
        for first in sorted({*words, *letters, *same}):
            yield Pair(first, second, max(shares.get(first, 0.0) for shares in (words, letters, same)))

    def groups(self) -> list[int]:
        """Return for every document the first one of its group: near-duplicates, and theirs, are in one group."""
        leaders = list(range(self._count))
        same = ((first, other) for first, *others in self._same.values() for other in others)
        for pair in (*self._words.pairs(), *self._letters.pairs(), *same):
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
