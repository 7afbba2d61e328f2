"""Names over several lines: nothing is lost, and no line is too long."""

from __future__ import annotations

import random

import report_samples as samples
from forkmerge.report.label_lines import columns, label_lines


def without_spaces(text: str) -> str:
    return "".join(text.split())


def test_all_letters_are_there_and_no_line_is_too_long():
    draw = random.Random(0)
    made = ["".join(draw.choice("aW _-[]äß漢<&") for _ in range(draw.randrange(90))) for _ in range(300)]
    for name in (*samples.HOSTILE, *made):
        for longest in (5, 15, 28):
            lines = label_lines(name, longest)
            assert without_spaces("".join(lines)) == without_spaces(name)
            assert all(columns(line) <= longest for line in lines)


def test_lines_end_between_words_or_after_signs():
    assert label_lines("fork_merge[interval=500]", 16) == ["fork_merge[", "interval=500]"]
    assert label_lines("Straßenbäume im Frühling", 14) == ["Straßenbäume", "im Frühling"]
    assert label_lines("short", 28) == ["short"]
    assert label_lines("", 28) == [""]


def test_a_wide_character_takes_two_columns():
    assert label_lines("漢字漢字", 4) == ["漢字", "漢字"]
