"""Colours that stay apart for every common form of colour blindness; none says anything that a sign does not."""

from __future__ import annotations

STYLES = (("#0072B2", "o"), ("#CC79A7", "D"), ("#E69F00", "s"), ("#D55E00", "X"), ("#009E73", "^"), ("#56B4E9", "v"))
"""Okabe and Ito's colours, each with a marker of its own."""

ON_DARK = ("#4BA3E3", "#E39AC4", "#F0B040", "#F28A4B", "#2FC79A", "#8FD0F5")
"""The same on a dark page."""

DASHES = ("solid", "dash", "dot", "dashdot")
"""How lines differ once colours repeat."""

GAIN, LOSS = "#00735C", "#BF2600"
"""Better and worse. Red is worse; the green is bluish, so that it differs from red for those who do not see green."""

GAIN_ON_DARK, LOSS_ON_DARK = "#3CC9A3", "#FF8F73"

CHANGES = ((0.0, LOSS), (0.25, "#F2A389"), (0.5, "#F7F7F7"), (0.75, "#83C7B6"), (1.0, GAIN))
CHANGES_ON_DARK = ((0.0, LOSS_ON_DARK), (0.5, "#2A2F38"), (1.0, GAIN_ON_DARK))
"""Scales of gains and losses."""

PAPER = ((0.0, "#2166AC"), (0.25, "#92C5DE"), (0.5, "#F7F7F7"), (0.75, "#F4A582"), (1.0, "#B2182B"))
PAPER_ON_DARK = ((0.0, "#5AA9E6"), (0.5, "#2A2F38"), (1.0, "#F2766B"))
"""The paper's scale, only for its own figures: blue below zero, red above."""

SHARE = ((0.0, "#F7FBFF"), (0.5, "#6BAED6"), (1.0, "#08306B"))
SHARE_ON_DARK = ((0.0, "#1B2028"), (1.0, "#7CC4F5"))
"""Scales of shares such as coefficients."""

GAIN_MARKER, LOSS_MARKER, LEVEL_MARKER = "^", "v", "o"
"""What says better, worse and neither beside the colour."""


GLYPHS = {"o": "●", "D": "◆", "s": "■", "X": "✖", "^": "▲", "v": "▼"}
"""Markers as text, for legends."""


def style(index: int) -> tuple[str, str, str]:
    """Return colour, marker and dash of the series at a place."""
    colour, marker = STYLES[index % len(STYLES)]
    return colour, marker, DASHES[index // len(STYLES) % len(DASHES)]
