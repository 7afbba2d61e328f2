"""What a prompt or a notebook shows of an object: one description, as short text and as HTML."""

from __future__ import annotations

import html
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forkmerge.errors import printable

if TYPE_CHECKING:
    from forkmerge.problem.definition import Evaluation, Problem

# Colours are the notebook's own, light or dark: lines and remarks are as faint as half of its text.
_TABLE = "border-collapse:collapse;margin:.4em 0;color:inherit;font-size:inherit"
_CELL = "padding:.15em .7em .15em 0;text-align:{};border:0;background:none"
_NUMBER = re.compile(r"[-+−–]?[\d.]*|faulty|diverged")
_HEAD = _CELL + ";font-weight:600;border-bottom:1px solid rgba(128,128,128,.6)"
_FAINT = "opacity:.75"
_SIGNS = {"left": "<", "right": ">"}
Rows = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Display:
    """A description of an object.

    Args:
        title: What it is, in one line.
        facts: What is to be known of it, each in one line under its name.
        head: Titles of the columns of a table.
        rows: Its rows, one text per column; the first column names them.
        notes: What a reader should know, such as what a symbol means.
    """

    title: str
    facts: Mapping[str, str] = field(default_factory=dict)
    head: Sequence[str] = ()
    rows: Rows = ()
    notes: Sequence[str] = ()

    def text(self) -> str:
        """Return it as lines of text.

        Example:
            >>> print(Display("Fork", {"search": "grid"}, ("branch", "weight"), (("alone", "1"),)).text())
            Fork
              search  grid
              branch  weight
              alone        1
        """
        width = max(map(len, self.facts), default=0)
        lines = [self.title, *(f"  {name:<{width}}  {text}" for name, text in self.facts.items())]
        table = [self.head, *self.rows] if self.rows else []
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for row in table:
            cells = [
                f"{cell:{_SIGNS[side]}{widths[i]}}" for i, (cell, side) in enumerate(zip(row, self._sides, strict=True))
            ]
            lines.append(f"  {'  '.join(cells)}".rstrip())
        return printable("\n".join([*lines, *(f"  {note}" for note in self.notes)]))

    def html(self) -> str:
        """Return it as HTML without scripts, in which every name is text."""
        parts = [f"<b>{_escaped(self.title)}</b>"]
        if self.facts:
            rows = [_row(fact, ("left", "left"), "td", _CELL) for fact in self.facts.items()]
            parts.append(f'<table style="{_TABLE}">{"".join(rows)}</table>')
        if self.rows:
            body = [_row(self.head, self._sides, "th", _HEAD), *(_row(r, self._sides, "td", _CELL) for r in self.rows)]
            parts.append(f'<table style="{_TABLE}">{"".join(body)}</table>')
        parts += [f'<div style="{_FAINT}">{_escaped(note)}</div>' for note in self.notes]
        return f"<div>{''.join(parts)}</div>"

    @property
    def _sides(self) -> list[str]:
        """Where the cells of each column stand: numbers on the right, words on the left."""
        columns = list(zip(*self.rows, strict=True))[1:]
        return ["left", *("right" if all(map(_NUMBER.fullmatch, column)) else "left" for column in columns)]


class Displayed(ABC):
    """Base of what shows itself at a prompt and in a notebook."""

    @abstractmethod
    def display(self) -> Display:
        """Return the description of the object."""

    def __repr__(self) -> str:
        return self.display().text()

    def _repr_html_(self) -> str:
        return self.display().html()


def display_problem(problem: Problem) -> Display:
    """Return the description of a problem: a row for every stream, and what is held out."""
    rows = [
        (name, ", ".join(stream.tasks), str(stream.size), str(stream.batch_size))
        for name, stream in problem.stream_map.items()
    ]
    facts = {"auxiliaries": ", ".join(problem.auxiliaries) or "none"}
    for split in ("validation", "test"):
        shown = [_held_out(task, evaluation) for task, evaluation in problem.evaluations(split).items()]
        facts[split] = "; ".join(shown) or "none"
    facts["weights"] = {"loss": "multiply losses", "sampling": "are shares of the steps"}[problem.weights]
    return Display(f"Problem: target {problem.target!r}", facts, ("stream", "tasks", "examples", "batch"), rows)


def _held_out(task: str, evaluation: Evaluation) -> str:
    arrows = {1: "↑", -1: "↓"}
    metrics = ", ".join(f"{name} {arrows[direction]}" for name, direction in evaluation.directions.items())
    return f"{task}: {evaluation.size} examples, {metrics}"


def _row(cells: Sequence[str], sides: Sequence[str], tag: str, style: str) -> str:
    shown = [
        f'<{tag} style="{style.format(side)}">{_escaped(cell)}</{tag}>' for side, cell in zip(sides, cells, strict=True)
    ]
    return f"<tr>{''.join(shown)}</tr>"


def _escaped(text: str) -> str:
    return html.escape(printable(text))
