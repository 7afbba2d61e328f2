"""Several comparisons of the same methods as one: Δ_m over the targets of all, as a table over two data sets has it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forkmerge.errors import ConfigError
from forkmerge.experiments.results_file import read_comparison
from forkmerge.experiments.run_results import RunResult

_PREFIX = "compare-"  # of folders that the command names


def read_joined(sources: Sequence[str | os.PathLike[str]]) -> tuple[dict[str, Any], list[RunResult]]:
    """Return one plan and all records of several comparisons.

    A target is named after its comparison, so that those of two data sets keep apart. Methods that some comparison does
    not have are left out: an average over all targets needs all of them.

    Args:
        sources: Folders of comparisons, or files of records.
    """
    plans: dict[str, dict[str, Any]] = {}
    results: list[RunResult] = []
    for source in sources:
        name = Path(source).resolve().stem.removeprefix(_PREFIX)
        if name in plans:
            raise ConfigError(f"two of the comparisons are called {name!r}: rename a folder to tell them apart.")
        plan, records = read_comparison(source)
        names = {target: name if len(plan["targets"]) == 1 else f"{name} {target}" for target in plan["targets"]}
        results += [replace(each, target=names[each.target]) for each in records if each.target in names]
        plans[name] = {**plan, "targets": list(names.values())}
    return _joined(plans), results


def _joined(plans: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the plan that others add up to."""
    first = next(iter(plans.values()))
    if any(plan["equal_labels"] != first["equal_labels"] for plan in plans.values()):
        raise ConfigError("only some of the comparisons train on equal labels: such runs cannot be averaged.")
    words = [{method["word"] for method in plan["methods"]} for plan in plans.values()]
    return {
        "settings": {name: plan["settings"] for name, plan in plans.items()},
        "code": None,
        "pretrained": None,
        "methods": [method for method in first["methods"] if all(method["word"] in each for each in words)],
        "targets": [target for plan in plans.values() for target in plan["targets"]],
        "seeds": list(dict.fromkeys(seed for plan in plans.values() for seed in plan["seeds"])),
        "tune": {},
        "tune_seeds": 1,
        "equal_labels": first["equal_labels"],
    }
