"""Near-duplicates: found whatever the layout and the script, not by boilerplate, and not by chance."""

from __future__ import annotations

import random

import numpy as np
import pytest

from forkmerge.problem.text.near_duplicates import COMMON, DuplicateIndex, ngrams

CHINESE = "自由软件基金会发布了新的许可证，任何人都可以复制和分发，但不允许修改。"
JAPANESE = "このプログラムは自由に使えますが、無保証であることに注意してください。"
THAI = "โปรแกรมนี้เป็นซอฟต์แวร์เสรีที่ทุกคนสามารถแจกจ่ายได้"


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


def test_the_same_words_are_found_however_few_and_however_common_they_are() -> None:
    for count in range(3, 13):
        text = words(1, count)
        copies = [words(2, count), text, text.upper().replace(" ", ", ") + "!"]
        assert [pair[1:] for pair in DuplicateIndex([text]).pairs(copies)] == [(1, 1.0), (2, 1.0)], count
        assert DuplicateIndex([words(2, count), *[text] * 3 * COMMON]).groups() == [0, *[1] * 3 * COMMON], count
        common = DuplicateIndex([text], background=[text] * 3 * COMMON)
        assert [pair[:2] for pair in common.pairs(copies)] == [(0, 1), (0, 2)], count


def test_one_or_two_words_that_anyone_writes_and_none_at_all_give_nothing_away() -> None:
    trivial = ["Yes.", "Thank you!", "-----", "", "好"]
    assert DuplicateIndex(trivial).pairs(trivial) == []
    assert DuplicateIndex([*trivial, *trivial]).groups() == list(range(2 * len(trivial)))


def test_of_few_words_characters_are_compared() -> None:
    held = "the quick brown fox jumps over the lazy dog"
    others = [
        "The quick brown fox leaps over the lazy dog.",
        "A lazy dog, and one that is quick, saw the brown fox",
        "They said that the quick brown fox jumps over the lazy dog on Sunday, and nobody else does",
    ]
    assert [pair.second for pair in DuplicateIndex([held]).pairs(others)] == [0, 2]
    assert DuplicateIndex([held, *others]).groups() == [0, 0, 2, 0]


def test_one_rare_word_in_common_is_chance() -> None:
    held = [f"how does one {verb} an internationalization?" for verb in ("write", "test")]
    background = [f"how does one {verb} an {verb}?" for verb in ("eat", "sell", "buy", "make") * COMMON]
    assert DuplicateIndex(held[:1], background).pairs(["who needs such internationalization in the end"]) == []
    assert len(DuplicateIndex(held[:1]).pairs(held[1:])) == 1


@pytest.mark.parametrize("text", [CHINESE, JAPANESE, THAI], ids=["Chinese", "Japanese", "Thai"])
def test_scripts_without_spaces_are_compared_by_their_characters(text: str) -> None:
    assert len(ngrams(text)) > 15
    other = (CHINESE + JAPANESE + THAI).replace(text, "")
    begun, half = text[: 2 * len(text) // 3], text[: len(text) // 3] + other
    assert [pair.second for pair in DuplicateIndex([text]).pairs([other, text, begun + other, half])] == [1, 2]
    assert DuplicateIndex([text, other, begun + "；" + words(1, 3)]).groups() == [0, 1, 0]
    assert np.array_equal(ngrams(text), ngrams(f"«{text}»\n"))
