"""Names as lines of a width that an axis has room for: nothing of them is left out."""

from __future__ import annotations

import re
from unicodedata import combining, east_asian_width

_PIECES = re.compile(r"\s+|[^\s_\-/.,:;()\[\]{}<>=]*[_\-/.,:;()\[\]{}<>=]+|[^\s_\-/.,:;()\[\]{}<>=]+")


def label_lines(text: str, longest: int) -> list[str]:
    """Return text as lines that are at most `longest` columns wide, broken between words or signs where that works.

    Example:
        >>> label_lines("never_married, with a degree", 14)
        ['never_married,', 'with a degree']
    """
    lines = [""]
    for piece in _PIECES.findall(text):
        if columns(lines[-1] + piece.rstrip()) <= longest:
            lines[-1] += piece
            continue
        if columns(piece) <= longest:
            lines.append(piece)
            continue
        for char in piece:  # a word longer than a line
            if columns(lines[-1] + char) > longest:
                lines.append("")
            lines[-1] += char
    return [line.strip() for line in lines if line.strip()] or [""]


def columns(text: str) -> int:
    """Return the width of text in columns of a Latin letter."""
    return sum(0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text)
