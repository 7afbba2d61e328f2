"""Corpora on disk as documents: text files, JSON lines, or folders of either; and a fair division of one."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from forkmerge.errors import ProblemError
from forkmerge.problem.text.near_duplicates import DuplicateIndex, join_groups, leader_of

FILE_NAME = "file"
"""The key that stands for the name of a document's file, which is its id in a folder of pages."""

_LINES, _TEXTS = (".jsonl", ".ndjson"), (".txt", ".md", ".rst", ".py", ".tex", ".html")
_SHORTEST = 1000  # characters: paragraphs of one text file are put together to documents of at least this length
_PARAGRAPH = re.compile(r"\n\s*\n")


class Document(NamedTuple):
    """A text, and what says which other texts are translations of it.

    Args:
        text: The text.
        id: Equal for translations of each other; None where nothing is known.
        origin: Where it stands, for people.
    """

    text: str
    id: str | None
    origin: str


def read_documents(path: Path, id_key: str | None = None, *, needs_ids: bool = True) -> list[Document]:
    """Return the documents of a corpus.

    A line of JSON is a document, its text under "text". In a folder a text file is one; a text file by itself is cut at
    empty lines.

    Args:
        path: A file or a folder.
        id_key: Under which key lines of JSON have an id that translations share; "file" for the name of the file.
        needs_ids: Refuse a corpus without ids; otherwise either all of its documents have one, or none has.
    """
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and file.suffix in (*_LINES, *_TEXTS))
        documents = [document for file in files for document in _read_file(file, id_key, is_alone=False)]
    else:
        documents = list(_read_file(path, id_key, is_alone=True))
    documents = [document for document in documents if document.text.strip()]
    if not documents:
        kinds = ", ".join((*_LINES, *_TEXTS))
        raise ProblemError(f"{path} holds no text: give a text file, JSON lines, or a folder of {kinds}.")
    if id_key is not None and (needs_ids or any(document.id is not None for document in documents)):
        _check_ids(documents, id_key)
    return documents


def _check_ids(documents: Sequence[Document], id_key: str) -> None:
    for document in documents:
        if document.id is None:
            raise ProblemError(
                f"{document.origin} has no {id_key!r}, which is to be the id of its document: only lines of JSON have "
                f"keys, and --id {FILE_NAME} takes the names of files."
            )


def _read_file(path: Path, id_key: str | None, *, is_alone: bool) -> Iterator[Document]:
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise ProblemError(f"cannot read {path}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ProblemError(f"{path} is no text in UTF-8: {error.reason} at byte {error.start}.") from None
    name = path.stem if id_key == FILE_NAME else None
    if path.suffix in _LINES:
        yield from _read_lines(path, text, name if id_key == FILE_NAME else id_key, is_name=id_key == FILE_NAME)
    elif is_alone:
        for number, part in enumerate(_cut(text), 1):
            yield Document(part, name, f"{path.name}, part {number}")
    else:
        yield Document(text, name, path.name)


def _read_lines(path: Path, text: str, key: str | None, *, is_name: bool) -> Iterator[Document]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path.name}, line {number}"
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ProblemError(f"{where} is not JSON: {error}.") from None
        entry = {"text": entry} if isinstance(entry, str) else entry
        if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
            raise ProblemError(f'{where} has no text: write {{"text": "…"}} in every line.')
        if is_name or key is None:
            yield Document(entry["text"], key, where)
        else:
            yield Document(entry["text"], str(entry[key]) if key in entry else None, where)


def _cut(text: str) -> Iterator[str]:
    """Cut a text at empty lines into parts of some length."""
    part = ""
    for paragraph in _PARAGRAPH.split(text):
        part = f"{part}\n\n{paragraph}" if part else paragraph
        if len(part) >= _SHORTEST:
            yield part
            part = ""
    if part.strip():
        yield part


def divide(documents: Sequence[Document], shares: Sequence[float]) -> list[list[Document]]:
    """Return parts of a corpus, the first ones with these shares of its text, the last with the rest.

    Documents that are near-duplicates, or have the same id, are in the same part. Which part depends on the texts
    alone, not on their order.
    """
    leaders = DuplicateIndex([document.text for document in documents]).groups()
    first: dict[str, int] = {}
    for index, document in enumerate(documents):
        if document.id is not None:
            join_groups(leaders, index, first.setdefault(document.id, index))
    groups: dict[int, list[Document]] = {}
    for index, document in enumerate(documents):
        groups.setdefault(leader_of(leaders, index), []).append(document)
    ordered = sorted(groups.values(), key=lambda group: min(_checksum(document.text) for document in group))
    total = sum(len(document.text) for document in documents)
    parts: list[list[Document]] = [[] for _ in range(len(shares) + 1)]
    filled = 0
    for group in ordered:
        while filled < len(shares) and sum(len(document.text) for document in parts[filled]) >= shares[filled] * total:
            filled += 1
        parts[filled] += group
    return parts


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
