"""Near-duplicates: found whatever the layout, not by boilerplate, and not by chance."""

from __future__ import annotations

import random

import numpy as np

from forkmerge.problem.text.near_duplicates import COMMON, DuplicateIndex, ngrams


def words(seed: int, count: int = 60) -> str:
    return " ".join(f"word{random.Random(seed * 1000 + i).randrange(10**6)}" for i in range(count))


def test_ngrams_are_those_of_words_and_of_a_short_text_all_of_it() -> None:
    assert len(ngrams(words(1, 20))) == 13
    assert len(ngrams("two words")) == 1
    assert len(ngrams(" .,; ")) == 0
    assert np.array_equal(ngrams("One, TWO three"), ngrams("one two\nthree"))
    assert not np.array_equal(ngrams("one two three"), ngrams("two one three"))


def test_a_copy_is_found_whatever_its_case_and_layout_and_so_is_half_of_one() -> None:
    held = [words(1), words(2)]
    others = [words(3), words(2).upper().replace(" ", "\n"), " ".join(words(1).split()[:40]) + " " + words(4, 30)]
    assert [(pair.first, pair.second) for pair in DuplicateIndex(held).pairs(others)] == [(1, 1), (0, 2)]
    assert DuplicateIndex(held).pairs(others)[0].share == 1.0


def test_a_fifth_of_a_document_is_no_near_duplicate() -> None:
    assert not DuplicateIndex([words(1)]).pairs([" ".join(words(1).split()[:20]) + " " + words(4, 60)])


def test_what_stands_in_many_documents_is_boilerplate() -> None:
    licence = words(0, 100)
    held = [f"{words(seed, 30)} {licence}" for seed in range(1, COMMON + 2)]
    assert not DuplicateIndex(held).pairs([f"{words(50, 30)} {licence}"])
    assert len(DuplicateIndex(held[:1]).pairs([f"{words(50, 30)} {licence}"])) == 1
    assert not DuplicateIndex(held[:1], background=held[1:]).pairs([f"{words(50, 30)} {licence}"])
    assert DuplicateIndex(held).groups() == list(range(COMMON + 1))


def test_many_copies_in_the_other_corpus_are_all_found() -> None:
    assert len(DuplicateIndex([words(1)]).pairs([words(1)] * 3 * COMMON)) == 3 * COMMON


def test_groups_are_near_duplicates_and_theirs() -> None:
    chain = [words(1), " ".join(words(1).split()[:45]) + " " + words(2, 30), words(2, 30), words(3)]
    assert DuplicateIndex(chain).groups() == [0, 0, 0, 3]
    assert DuplicateIndex([]).groups() == []
    assert DuplicateIndex([]).pairs([words(1)]) == []
