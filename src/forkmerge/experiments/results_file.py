"""A comparison in one file: its plan and the record of every run, numbers only, from which all tables can be made.

Such files are made to be committed: one line per run, in a fixed order, without paths of the machine they come from;
the last line is the checksum of all.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from forkmerge.engine.storage.atomic_files import check_entries, explained, write_atomically
from forkmerge.engine.storage.json_files import checksum, interpreting, read_versioned
from forkmerge.errors import StoreError
from forkmerge.experiments.run_results import (
    FORMAT,
    RunResult,
    plan_from,
    read_plan,
    read_run_results,
    run_result_from,
)

_PATH = re.compile(r"(?<![\w.:/\\])(?:~|[A-Za-z]:)?[/\\][\w.+@~-]+(?:[/\\][\w.+@~-]+)+[/\\]?")
_DIGITS = 5  # of the times of phases, and of scores inside a run
_LEFT_OUT = ("folder", "details")


def read_comparison(source: str | os.PathLike[str]) -> tuple[dict[str, Any], list[RunResult]]:
    """Return the plan and the records of a comparison, from its folder or from a file of records."""
    path = Path(source)
    if path.is_file():
        return _read_file(path)
    with explained(f"read {path}"):
        check_entries(path)
    plan = read_plan(path)
    if plan is None:
        raise StoreError(f"{path} is not the folder of a comparison: it holds no plan.json.")
    return plan, read_run_results(path)


def write_records(out: str | os.PathLike[str], file: str | os.PathLike[str]) -> None:
    """Write the plan and all records of a comparison's folder into one file; nothing for an empty comparison."""
    path = Path(file)
    plan, results = read_comparison(out)
    with explained(f"make the folder {path.parent}"):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, to_text(plan, results).encode("utf-8", "backslashreplace"))


def to_text(plan: Mapping[str, Any], results: list[RunResult]) -> str:
    """Return the text of a file of records.

    Args:
        plan: What is compared.
        results: The records; those of methods, targets and seeds that the plan does not have are left out.
    """
    positions = {
        "method": {method["word"]: position for position, method in enumerate(plan["methods"])},
        **{key: {name: position for position, name in enumerate(plan[f"{key}s"])} for key in ("target", "seed")},
    }

    def order(result: RunResult) -> tuple[Any, ...]:
        return (
            *(positions[key][getattr(result, key)] for key in ("target", "method", "seed")),
            result.kind,
            result.file,
        )

    members = [o for o in results if all(getattr(o, key) in names for key, names in positions.items())]
    lines = [_dump(_record(result)) for result in sorted(members, key=order)]
    head = ",\n".join(f'"{key}": {_dump(_clean(value))}' for key, value in plan.items())
    text = f'{{"format": {FORMAT},\n"plan": {{\n{head}\n}},\n"outcomes": [\n' + ",\n".join(lines) + "\n]"
    return f'{text},\n"sha256": "{checksum(json.loads(text + "}"))}"}}\n'


def without_paths(text: str) -> str:
    """Return a text with every absolute path cut down to its last part.

    Example:
        >>> without_paths("cannot read '/home/me/data/pacs.npz': no such file")
        "cannot read 'pacs.npz': no such file"
    """
    return _PATH.sub(lambda match: re.split(r"[/\\]", match[0].rstrip("/\\"))[-1], text)


def _record(result: RunResult) -> dict[str, Any]:
    """Return what is kept of a record: what says nothing is left out."""
    empty = RunResult("", "", "", 0, "", {}, "")
    short = replace(
        result,
        phases=_rounded(result.phases),
        rounds=_rounded(result.rounds),
        relevance=_rounded(result.relevance),
    )
    data = short.to_json()
    always = ("method", "label", "target", "seed", "kind")
    return _clean(  # type: ignore[no-any-return]
        {
            key: value
            for key, value in data.items()
            if key not in _LEFT_OUT and (key in always or value != getattr(empty, key))
        }
    )


def _rounded(value: Any) -> Any:
    return _changed(value, lambda item: float(f"{item:.{_DIGITS}g}") if isinstance(item, float) else item)


def _clean(value: Any) -> Any:
    return _changed(value, lambda item: without_paths(item) if isinstance(item, str) else item)


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested data with every number and text changed."""
    if isinstance(value, Mapping):
        return {key: _changed(item, change) for key, item in value.items()}
    return [_changed(item, change) for item in value] if isinstance(value, list) else change(value)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _read_file(path: Path) -> tuple[dict[str, Any], list[RunResult]]:
    what = "a file of records"
    data = read_versioned(path, FORMAT, ["plan", "outcomes"], what)
    with interpreting(path, what):
        results = [run_result_from({"setting": {}, "folder": "", **each}, path) for each in data["outcomes"]]
        return plan_from(data["plan"], path), results
