"""The data sheet of a method, read from its docstring."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from forkmerge.methods.base import GramianMethod, LossMethod, MatrixMethod, Method

FACTS = ("State", "Passes", "Memory", "Target", "Heads")
_KINDS = {LossMethod: "losses", GramianMethod: "Gramian", MatrixMethod: "gradients"}


def facts_of(method: type[Method]) -> dict[str, Any]:
    """Return what a method's docstring says about it, by lower-case keys: one row of the table of methods.

    Example:
        >>> from forkmerge.methods import PCGrad
        >>> facts_of(PCGrad)["heads"]
        'unweighted'
    """
    text = inspect.getdoc(method) or ""
    paragraphs = text.split("\n\n")
    row: dict[str, Any] = {
        "name": method.__name__,
        "summary": " ".join(paragraphs[0].split()),
        "uses": next((word for kind, word in _KINDS.items() if issubclass(method, kind)), ""),
        "options": _options(method),
    }
    for fact in FACTS:
        row[fact.lower()] = _line(paragraphs, fact)
    row["paper"] = _section(paragraphs, "References:")
    row["note"] = _section(paragraphs, "Note:")
    return row


def _line(paragraphs: list[str], fact: str) -> str:
    """The line of a paragraph that begins with a fact's name."""
    for paragraph in paragraphs:
        for line in paragraph.splitlines():
            if line.startswith(fact + ": "):
                return line.removeprefix(fact + ": ").rstrip(".")
    return ""


def _section(paragraphs: list[str], title: str) -> str:
    for paragraph in paragraphs:
        if paragraph.startswith(title + "\n"):
            return " ".join(paragraph.removeprefix(title).split())
    return ""


def _options(method: type[Method]) -> dict[str, Any]:
    if not is_dataclass(method):
        return {}
    return {item.name: None if item.default is MISSING else item.default for item in fields(method)}
