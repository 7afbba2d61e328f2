"""docs/performance.md and its details, made from the JSONs in `results` and from nothing else.

A benchmark says what its JSON means with a function `section(results) -> Section`; one without it is shown as it is.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "performance.md"
DETAILS = "performance-details.md"
ORDER = (
    *("twin", "compute", "search", "memory", "adapters", "parallel", "cluster", "data"),
    *("growth", "methods", "advice", "hops"),
)
"""The benchmarks, in the order of the page; one that has not been run yet is left out."""

BUSY_LOAD = 0.5


@dataclass(frozen=True)
class Table:
    """Rows under a header; the first column holds names, the others numbers."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    def __str__(self) -> str:
        lines = [self.header, ["---", *["---:"] * (len(self.header) - 1)], *self.rows]
        text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
        return f"{self.caption}\n\n{text}" if self.caption else text


@dataclass(frozen=True)
class Goal:
    """What a number should be, and what it is."""

    what: str
    bound: float
    value: float
    at_least: bool = False
    unit: str = ""
    digits: int = 2

    @property
    def is_met(self) -> bool:
        """Whether it is what it should be, as printed: 6.004% meets 6%."""
        shown = round(self.value, self.digits)
        return shown >= self.bound if self.at_least else shown <= self.bound

    def cells(self) -> list[str]:
        """Return the words of a table's row."""
        sign = "≥" if self.at_least else "≤"
        answer = "met" if self.is_met else "**not met**"
        return [self.what, f"{sign} {self.bound:g}{self.unit}", f"{self.value:.{self.digits}f}{self.unit}", answer]


@dataclass(frozen=True)
class Section:
    """One result on the page.

    Args:
        title: Its heading.
        compares: One sentence that says what is compared with what.
        tables: The numbers.
        goals: What they should be.
        notes: What a reader should know besides.
        answers: Questions that a user asks, each with an answer of one line, for the page that comes first.
    """

    title: str
    compares: str
    tables: Sequence[Table]
    goals: Sequence[Goal] = ()
    notes: Sequence[str] = field(default_factory=tuple)
    answers: Sequence[tuple[str, str]] = ()


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Section]]:
    """Return the results in a folder, and what they mean."""
    found = {name: json.loads(path.read_text("utf-8")) for name in ORDER if (path := folder / f"{name}.json").exists()}
    return found, {name: section_of(name, whole["results"]) for name, whole in found.items()}


def summarise(folder: Path) -> str:
    """Return the page that comes first: what it costs, in one table."""
    _, sections = read(folder)
    rows = [
        [question, f"{answer} ([more]({DETAILS}#{_anchor(section.title)}))"]
        for section in sections.values()
        for question, answer in section.answers
    ]
    goals = [goal for section in sections.values() for goal in section.goals]
    missed = [goal for goal in goals if not goal.is_met]
    text = f"Of {len(goals)} goals {len(goals) - len(missed)} are met"
    if missed:
        text += "; not: " + "; ".join("{}: {}, measured {}".format(*goal.cells()) for goal in missed)
    lines = ["| question | measured |", "| --- | --- |", *("| " + " | ".join(row) + " |" for row in rows)]
    return "\n\n".join([_FIRST, "\n".join(lines), f"{text}.", _READING]) + "\n"


def render(folder: Path) -> str:
    """Return the page of all results in a folder."""
    found, sections = read(folder)
    parts = [_INTRODUCTION, *_summary(sections)]
    for name, section in sections.items():
        parts += [f"## {section.title}", section.compares, *map(str, section.tables)]
        if section.goals:
            parts.append(str(Table(["goal", "bound", "measured", ""], [goal.cells() for goal in section.goals])))
        parts += [*section.notes, _facts(found[name])]
    return "\n\n".join(parts) + "\n"


def section_of(name: str, results: Mapping[str, Any]) -> Section:
    """Let the benchmark say what its results mean; every number by its path where it does not."""
    explain = getattr(importlib.import_module(name), "section", None)
    if explain is not None:
        section: Section = explain(results)
        return section
    rows = [[" · ".join(path), _number(value)] for path, value in _leaves(results)]
    return Section(name, f"The numbers of `benchmarks/{name}.py`.", [Table(["what", "value"], rows)])


def show(name: str, folder: Path) -> None:
    """Print a result that was just saved."""
    section = section_of(name, json.loads((folder / f"{name}.json").read_text("utf-8"))["results"])
    print("", section.title, *map(str, section.tables), sep="\n")
    for goal in section.goals:
        print("{}: {}, measured {}: {}".format(*goal.cells()))


def ratio(value: Mapping[str, Any], unit: str = "") -> str:
    """Return a ratio as median and quartiles."""
    return f"{value['median']:.2f}{unit} ({value['low']:.2f}–{value['high']:.2f})"


_FIRST = """# Performance

What does ForkMerge cost, and what is faster than what?"""

_READING = f"""The *branches* B of a run are copies of the model that train one after the other, or at once with worker
processes: a run takes the time of all of them, and the table says what comes on top. Medians of contenders that take
turns on one machine: ratios carry over to other machines, seconds do not. Made from `benchmarks/results` by
`./run bench`; every number, goal and condition: [performance in detail]({DETAILS})."""

_INTRODUCTION = """# Performance in detail

What things cost, measured; in one table: [performance](performance.md). Both pages are made from
`benchmarks/results/*.json`; do not edit them:

```bash
./run bench            # everything, then these pages
./run bench memory     # one benchmark; ./run bench list names them
./run bench --quick    # small versions, to see that they work; they change nothing here
```

Contenders take turns in one process on one thread, and a ratio is taken between neighbours, so that a busy machine
hurts both; medians, with quartiles in brackets. Ratios carry over to other machines, seconds do not."""


def _summary(sections: Mapping[str, Section]) -> list[str]:
    rows = []
    for section in sections.values():
        missed = [f"{goal.what}: {goal.cells()[2]} ({goal.cells()[1]})" for goal in section.goals if not goal.is_met]
        met = f"{len(section.goals) - len(missed)} of {len(section.goals)}" if section.goals else "none set"
        rows.append([f"[{section.title}](#{_anchor(section.title)})", met, "; ".join(missed)])
    return [str(Table(["section", "goals met", "not met"], rows))] if rows else []


def _facts(whole: Mapping[str, Any]) -> str:
    facts = whole["machine"]
    cores = f"{facts['cores']} cores, " if facts.get("cores") else ""
    text = f"{facts['machine']} with {facts['cpu']}, {cores}Python {facts['python']}, torch {facts['torch']}"
    load = facts.get("load")
    if load is not None:
        text += f"; load at the start {load:.2f}"
    if load is not None and load > BUSY_LOAD:
        text += ", so others were using the machine and the numbers are rough"
    made = f"Last measured, all of it or in part: `{whole['command']}` on " if "command" in whole else ""
    return f"<sub>{made}{text}.</sub>"


def _anchor(title: str) -> str:
    kept = "".join(char for char in title.lower() if char.isalnum() or char in " -")
    return kept.replace(" ", "-")


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping) and not {"median", "low", "high"} <= set(value):
        for key, item in value.items():
            yield from _leaves(item, (*path, str(key)))
    else:
        yield path, value


def _number(value: Any) -> str:
    if isinstance(value, Mapping):
        return ratio(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
