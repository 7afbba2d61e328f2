"""Colours that stay apart for every common form of colour blindness; none says anything that a sign does not."""

from __future__ import annotations

STYLES = (("#0072B2", "o"), ("#CC79A7", "D"), ("#E69F00", "s"), ("#D55E00", "X"), ("#009E73", "^"), ("#56B4E9", "v"))
"""Okabe and Ito's colours, each with a marker of its own."""

ON_DARK = ("#4BA3E3", "#E39AC4", "#F0B040", "#F28A4B", "#2FC79A", "#8FD0F5")
"""The same on a dark page."""

DASHES = ("solid", "dash", "dot", "dashdot")
"""How lines differ once colours repeat."""

NEGATIVE, MIDDLE, POSITIVE = "#2166AC", "#F7F7F7", "#B2182B"
"""Transfer gain as in the paper: blue below zero, red above."""

NEGATIVE_ON_DARK, MIDDLE_ON_DARK, POSITIVE_ON_DARK = "#5AA9E6", "#2A2F38", "#F2766B"

GAIN = ((0.0, NEGATIVE), (0.25, "#92C5DE"), (0.5, MIDDLE), (0.75, "#F4A582"), (1.0, POSITIVE))
SHARE = ((0.0, "#F7FBFF"), (0.5, "#6BAED6"), (1.0, "#08306B"))
"""Scales of gains and of shares such as coefficients."""


def style(index: int) -> tuple[str, str, str]:
    """Return colour, marker and dash of the series at a place."""
    colour, marker = STYLES[index % len(STYLES)]
    return colour, marker, DASHES[index // len(STYLES) % len(DASHES)]
