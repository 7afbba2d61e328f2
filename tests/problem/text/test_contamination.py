"""Contamination: copies and translations of held-out documents are found in other corpora, and nothing else is."""

from __future__ import annotations

from forkmerge.problem.text.contamination import find_contamination
from forkmerge.problem.text.documents import Document
from text_corpora import text_of


def document(language: str, key: object, page: str | None = None) -> Document:
    return Document(text_of(language, key), page, f"{language} {key}")


HELD_OUT = [document("da", i, f"p{i}") for i in range(5)]


def test_copies_and_translations_are_found_and_other_documents_are_not() -> None:
    corpus = [document("nb", i, f"p{i + 3}") for i in range(6)] + [document("da", 1, "elsewhere"), document("da", 77)]
    found = find_contamination("nb", corpus, HELD_OUT)
    assert (found.same_id, found.duplicates, found.all) == ((0, 1), (6,), (0, 1, 6))
    assert str(found) == (
        "nb: 3 of 8 documents (1 near-duplicates, 2 with the same id); da 1 is nearly da 1; nb 0 has the id p3"
    )


def test_a_near_duplicate_of_a_translation_is_found_too() -> None:
    again = Document(text_of("nb", 0) + " and more", "another", "nb again")
    assert find_contamination("nb", [document("nb", 0, "p0"), document("nb", 1), again], HELD_OUT).all == (0, 2)


def test_without_ids_only_texts_are_compared() -> None:
    corpus = [document("nb", i) for i in range(6)]
    found = find_contamination("nb", corpus, [document("da", i) for i in range(5)])
    assert found.all == ()
    assert str(found) == "nb: none of 6 documents"


def test_copies_of_short_documents_and_of_such_without_spaces_are_found() -> None:
    texts = ["ls lists what is in a folder", "自由软件基金会发布了新的许可证，任何人都可以复制和分发。", "Thank you"]
    held_out = [Document(text, None, f"held {number}") for number, text in enumerate(texts)]
    corpus = [Document(text, None, "copy") for text in (*texts, "cp copies what is in a file", "任何人都可以")]
    assert find_contamination("other", corpus, held_out, held_out * 9).duplicates == (0, 1)
