"""The rooms of the package, in one list: rules over the syntax trees read it, and docs/architecture.md is made of it.

.venv/bin/python tests/architecture.py    # writes the page anew
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from paths import ROOT

PACKAGE = ROOT / "src" / "forkmerge"
PAGE = ROOT / "docs" / "architecture.md"
HOPS = ROOT / "benchmarks" / "results" / "hops.json"

LAYERS = (
    "cli",
    "report",
    "analysis",
    "experiments",
    "algorithms",
    "engine/executors",
    "engine/merging",
    "engine/training",
    "engine/storage",
    "methods",
    "problem",
    "errors",
    "moved_paths",
    "_version",
)
"""From top to bottom: a layer imports those below it, and nothing above it."""

LEAVES = ("datasets", "integrations", "models", "testing")
"""They import the layers, and nothing imports them: a leaf of a leaf is a leaf, too (`datasets` use `models`)."""

MOST_AT_ROOT, MOST_IN_FOLDER = 14, 25

QUESTIONS: tuple[tuple[str, str], ...] = (
    ("My search only sees a few hundred labels: who measures how good a model is with them?", "algorithms/validation"),
    ("Which exact numbers does averaging two networks give, down to the last bit?", "engine/merging/arithmetic"),
    ("How is a candidate thrown out before it has looked at all of the data?", "engine/merging/race"),
    ("My power went off while it wrote: why is nothing half there?", "engine/storage/atomic_files"),
    ("Who stops two jobs from writing to the same directory?", "engine/storage/lock"),
    ("My convolutions got faster by themselves: who turned the tensors around?", "engine/training/memory_format"),
    ("How much longer will it take, says the bar. Where is that computed?", "algorithms/events/progress"),
    ("I want to know the hours and gigabytes of one training before I begin.", "experiments/cost_of_run"),
    ("Confidence intervals over seeds: where are the formulas?", "experiments/paired_statistics"),
    ("One of the copies became NaN. Who leaves it out?", "algorithms/faulty_branches"),
    ("The chosen mixture is trained again with all labels: where?", "algorithms/refit"),
    ("I write my training by hand, in plain PyTorch. What splits my model in two?", "algorithms/own_loop/fork"),
    ("What happens to Adam's moments once all continue from the same weights?", "engine/merging/synchronise"),
    ("Who decides on which GPU a worker computes?", "engine/executors/devices"),
    ("The GPU waits for data: what reads ahead?", "problem/prefetch"),
    ("Where does the next seed of dropout come from?", "problem/randomness"),
    ("Bargaining between gradients, solved by Newton's iteration: where is the mathematics?", "methods/solvers/_nash"),
    ("Which errors do I get before the first step, and who checks?", "algorithms/preflight"),
    ("The HTML file with all tables and pictures of my study", "report/comparison_page"),
    ("Are the directions of two losses opposed? Who computes the cosines?", "analysis/conflict"),
)
"""What people look for, in their own words, none of which is in the path; and the file that has it."""


@dataclass(frozen=True)
class Import:
    """A name that a module of the package takes from another one.

    Args:
        module: Who imports, as a path without suffix.
        line: Where.
        source: From which module, as a path; "" for the package itself.
        name: What; "" for the whole module.
    """

    module: str
    line: int
    source: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.py:{self.line} imports {self.name or 'all'} from {self.source or 'the root package'}"


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its path without suffix; a package's own is its folder."""
    paths = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if "templates" not in path.parts:  # a file for users, who import the root package
            parts = path.relative_to(PACKAGE).with_suffix("").parts
            paths["/".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def imports() -> Iterator[Import]:
    """Every import from the package itself, lazy ones and those for types included."""
    names = set(modules())
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == PACKAGE.name:
                        yield Import(module, node.lineno, "/".join(alias.name.split(".")[1:]), "")
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{module}: imports are absolute"
                parts = (node.module or "").split(".")
                if parts[0] == PACKAGE.name:
                    for alias in node.names:
                        source = "/".join(parts[1:])
                        inner = f"{source}/{alias.name}".lstrip("/")
                        yield Import(module, node.lineno, *((inner, "") if inner in names else (source, alias.name)))


def room_of(module: str) -> str:
    """The layer or leaf that a module belongs to; "" for the package itself, and `engine` for its empty inside."""
    rooms = [room for room in (*LAYERS, *LEAVES) if module == room or module.startswith(f"{room}/")]
    return rooms[0] if rooms else module.split("/")[0]


def summary(path: Path) -> str:
    """The first paragraph of a module's docstring, on one line."""
    text = inspect.cleandoc(ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "")
    return " ".join(text.split("\n\n")[0].split())


def table(room: str) -> str:
    """What every file of a room owns, by its own docstring."""
    rows = []
    for module, path in modules().items():
        if room_of(module) == room and (module == room or path.name != "__init__.py"):
            if path.name == "__init__.py":
                continue
            name = module.removeprefix(f"{room}/")
            rows.append(f"| [`{name}`](../{path.relative_to(ROOT)}) | {summary(path).replace('|', chr(92) + '|')} |")
    return "\n".join(["| file | what it owns |", "|---|---|", *rows])


def render() -> str:
    """The page."""
    parts = [_BEGINNING]
    for room in (*LAYERS, *LEAVES):
        path = modules().get(room)
        if path is None or path.name != "__init__.py":
            continue
        kind = " (a leaf)" if room in LEAVES else ""
        parts += [f"## `{room}`{kind}", summary(path), table(room)]
    single = [room for room in (*LEAVES, *LAYERS) if (PACKAGE / f"{room}.py").exists()]
    rows = [f"| [`{room}`](../src/forkmerge/{room}.py) | {summary(modules()[room])} |" for room in single]
    parts += ["## At the root", "\n".join(["| file | what it owns |", "|---|---|", *rows]), _hops(), _questions()]
    return "\n\n".join(part for part in parts if part) + "\n"


def _hops() -> str:
    results = json.loads(HOPS.read_text("utf-8"))["results"]
    rows = [f"| {name} | {len(seen['files'])} | {seen['hops']} |" for name, seen in results.items()]
    path = " → ".join(f"`{file.removesuffix('.py')}`" for file in results["merge"]["files"])
    return "\n\n".join(
        [
            "## The way of a merge",
            "Counted by `./run bench hops` in a run of two branches: files that are entered, and hops, which are calls "
            "whose file is not that of the call before.",
            "\n".join(["| what | files | hops |", "|---|---:|---:|", *rows]),
            f"A merge enters, in this order: {path}.",
        ]
    )


def _questions() -> str:
    rows = [f"| {question} | [`{path}`](../src/forkmerge/{path}.py) |" for question, path in QUESTIONS]
    return "\n\n".join(["## Where is …", _NEWCOMER, "\n".join(["| question | file |", "|---|---|", *rows])])


_BEGINNING = """# Architecture: which file to open

This page is made from the package itself, by `tests/architecture.py`: a list of layers, and the first sentence of every
file. Imports point down the page, also lazy ones and those for types: a layer knows those below it and nothing above
it. Leaves import layers; no layer imports a leaf. No private name crosses a package, nobody inside imports the root
package, a class name belongs to one class, a folder holds at most 25 files. `tests/whole/test_architecture.py` checks
all of it over the syntax trees.

Three habits explain the rest:

1. **State is explicit.** A `State` is everything training changes; a `ModelBinding` lends it to a module. Forking is
   copying rows, merging is arithmetic on rows, a checkpoint is rows on disk.
2. **Randomness is a function.** `problem/randomness.derive(seed, …)` gives every random number of a step; nothing but
   the step counter has to be saved.
3. **Workers return, they never print.** Events go to the record and to the `on_event` callback; progress bars and
   tables are made from events and records."""

_NEWCOMER = """Questions in users' words, none of which is in the path. Somebody who had never seen the package was
given the list of files alone, and named the right one for 19 of the 20; for the one about candidates it was
`race_over_examples` instead of `race`."""


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
