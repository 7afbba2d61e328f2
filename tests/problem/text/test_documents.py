"""Corpora are read from files of every kind, and divided so that no part gives another away."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import forkmerge as fm
from forkmerge.problem.text.documents import divide, read_documents
from text_corpora import text_of, write_lines


def test_lines_of_json_are_documents_with_an_id_where_a_key_is_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", "da", 3)
    assert [document.id for document in read_documents(path)] == [None] * 3
    assert [document.id for document in read_documents(path, "page")] == ["p0", "p1", "p2"]
    assert read_documents(path)[1].origin == "a.jsonl, line 2"
    path.write_text('"a text alone"\n\n{"text": "another"}\n', "utf-8")
    assert [document.text for document in read_documents(path)] == ["a text alone", "another"]


def test_a_text_file_is_cut_at_empty_lines_into_documents_of_some_length(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("\n\n".join(text_of("en", i, 60) for i in range(12)), "utf-8")
    documents = read_documents(path)
    assert 1 < len(documents) < 12
    assert all(len(document.text) >= 1000 for document in documents[:-1])
    assert "".join("".join(d.text.split()) for d in documents) == "".join(path.read_text("utf-8").split())


def test_a_folder_has_a_document_per_text_file_named_after_it(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside/ls.txt").write_text("list files\n\nmore")
    (tmp_path / "cp.md").write_text("copy files")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert [(document.id, document.text) for document in read_documents(tmp_path, "file")] == [
        ("cp", "copy files"),
        ("ls", "list files\n\nmore"),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "good", "page": 1}\n{"txt": "bad"}\n', "a.jsonl, line 2 has no text"),
        ("{", "a.jsonl, line 1 is not JSON"),
        ("", "holds no text"),
        (
            '{"text": "good"}\n',
            "a.jsonl, line 1 has no 'page', which is to be the id of its document",
        ),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(fm.ProblemError, match=message):
        read_documents(path, "page")


def test_a_corpus_may_have_no_ids_at_all_where_that_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "code.jsonl"
    path.write_text('{"text": "def"}\n"return"\n')
    assert [document.id for document in read_documents(path, "page", needs_ids=False)] == [None, None]
    path.write_text('{"text": "def"}\n{"text": "return", "page": 1}\n')
    with pytest.raises(fm.ProblemError, match="line 1 has no 'page'"):
        read_documents(path, "page", needs_ids=False)
    book = tmp_path / "book.txt"
    book.write_text("text of no id")
    with pytest.raises(fm.ProblemError, match=r"book\.txt, part 1 has no 'page'.* only lines of JSON have keys"):
        read_documents(book, "page")
    assert [document.id for document in read_documents(book, "page", needs_ids=False)] == [None]


def test_no_text_and_no_file_are_said_so(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(fm.ProblemError, match="no text in UTF-8"):
        read_documents(tmp_path / "a.txt")
    with pytest.raises(fm.ProblemError, match="cannot read"):
        read_documents(tmp_path / "b.txt")


def test_parts_have_their_shares_whatever_the_order_and_near_duplicates_stay_together(tmp_path: Path) -> None:
    entries = [{"text": text_of("da", i, 60), "page": str(i)} for i in range(30)]
    entries += [{"text": text_of("da", 0, 60) + " and a bit", "page": "other"}, {"text": "short", "page": "1"}]
    path = tmp_path / "a.jsonl"
    parts = []
    for order in (entries, entries[::-1]):
        path.write_text("".join(json.dumps(entry) + "\n" for entry in order))
        parts.append(divide(read_documents(path, "page"), [0.2, 0.2]))
    texts = [[{document.text for document in part} for part in each] for each in parts]
    assert texts[0] == texts[1]
    assert [len(part) for part in texts[0]][:2] == [pytest.approx(7, abs=2)] * 2
    by_id = [{document.id for document in part} for part in parts[0]]
    assert any({"0", "other"} <= ids for ids in by_id)
    assert [sum("1" in ids for ids in by_id)] == [1]
