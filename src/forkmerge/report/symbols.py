"""The symbols that pages show, and what each means: a page says it where it shows a symbol for the first time."""

from __future__ import annotations

import re
from collections.abc import Iterable

SYMBOLS = {
    "Δ_m": "mean over targets and metrics of the relative change against the baseline, signed so that + is better",
    "Δ": "mean over a target's metrics of the relative change against the baseline, signed so that + is better",
    "Δt": "steps between two merges",
    "TG": "transfer gain: the target's score when trained with an auxiliary minus its score when trained alone",
    "CSD": "confidence score discrepancy: 1 minus the model's mean confidence on inputs of the target; large values "
    "mean that the model was trained on other data than these",
    "λ": "weight of an auxiliary task's loss, where the target's has weight 1; 0 leaves the task out",
    "Λ": "coefficients of a merge: the share of every branch in the merged weights",
    "w–t–l": "seeds won, tied and lost",
}
"""What a symbol means, by symbol."""

_FORMS = {symbol: re.compile(rf"(?<![\w–]){re.escape(symbol)}(?![\w–])") for symbol in SYMBOLS}


def symbols_in(texts: Iterable[str]) -> list[str]:
    """Return the symbols that stand in texts as words of their own.

    Example:
        >>> symbols_in(["TG at λ = 1", "Δ_m/(B−1)"])
        ['Δ_m', 'TG', 'λ']
    """
    whole = "\n".join(texts)
    return [symbol for symbol, form in _FORMS.items() if form.search(whole)]


def explained_in(texts: Iterable[str]) -> set[str]:
    """Return the symbols that texts explain already: "λ: the task's weight …"."""
    whole = "\n".join(texts)
    return {symbol for symbol in SYMBOLS if re.search(rf"(^|\. ){re.escape(symbol)}: ", whole, re.M)}
