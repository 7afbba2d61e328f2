"""What a comparison writes down about each of its runs; every table is made from these records alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from forkmerge.algorithms.table_data import show_metrics
from forkmerge.engine.storage.atomic_files import TEMPORARY
from forkmerge.engine.storage.json_files import read_versioned, write_versioned
from forkmerge.engine.storage.records import Record
from forkmerge.errors import StoreError

FORMAT = 1
PLAN = "plan.json"


@dataclass(frozen=True)
class RunResult(Record):
    """One run of a comparison.

    Args:
        method: The method's word.
        label: Its name in tables.
        target: The target task.
        seed: The run's seed.
        kind: "final", or "tuning" for a run that only helped to choose a setting.
        setting: What tuning tries or chose.
        folder: The run's folder, relative to the comparison's.
        split: What `metrics` were measured on: "test"; where the problem has no test split "held out", validation
            examples that were kept from all choices, or "validation".
        metrics: The target's metrics; None in place of a number that is not finite.
        directions: +1 for metrics where higher is better, −1 for the others.
        validation: The target's validation metrics, which choices are made by; empty where nothing was scored.
        branches: The branches that were forked, or the number of runs that take their place.
        steps: T.
        seconds: Time of training, validation and merging, over all branches.
        memory: Model sizes that the run's tensors take, activations apart; None if unknown.
        phases: The same time by phase: train, rank, search, merge.
        rounds: What every round of the search found: the step of its merge, the merge's score and metrics on
            validation, coefficients, and scores of branches, where there are several.
        relevance: λ by task, over all rounds.
        notes: What a reader should know.
        error: Why there is no result, if there is none.
        details: The traceback behind it.
    """

    not_finite: ClassVar[float | None] = None

    method: str
    label: str
    target: str
    seed: int
    kind: str
    setting: dict[str, Any]
    folder: str
    split: str = "test"
    metrics: dict[str, float | None] = field(default_factory=dict)
    directions: dict[str, int] = field(default_factory=dict)
    validation: dict[str, float | None] = field(default_factory=dict)
    branches: int = 1
    steps: int = 0
    seconds: float = 0.0
    memory: float | None = None
    phases: dict[str, float] = field(default_factory=dict)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    relevance: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    error: str | None = None
    details: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether there is a result, and all of it finite."""
        return self.error is None and bool(self.metrics) and None not in self.metrics.values()

    @property
    def branches_left(self) -> int:
        """B: the branches of the last round where some were pruned, otherwise all."""
        counts = [max(len(summary.get("branches", ())), 1) for summary in self.rounds]
        return counts[-1] if counts and counts[-1] < counts[0] else self.branches

    @property
    def title(self) -> str:
        """Which run it is, in one line."""
        setting = "".join(f", {key} {value}" for key, value in self.setting.items())
        return f"{self.label}{setting}  {self.target}  seed {self.seed}"

    @property
    def shown(self) -> str:
        """What it reached, in one line: a run that helps to choose is chosen by validation."""
        split, metrics = ("validation", self.validation) if self.kind == "tuning" else (self.split, self.metrics)
        return f"{split} {show_metrics(metrics)}"

    @property
    def file(self) -> str:
        """Where it is written, relative to the comparison's folder."""
        return f"{self.folder}{'-tuning' if self.kind == 'tuning' else ''}.json"

    def write(self, out: Path) -> None:
        """Write the record into a comparison's folder."""
        write_versioned(out / self.file, FORMAT, {"outcome": self})


@dataclass(frozen=True)
class ShortRound(Record):
    """What a record keeps of a round: see `RunResult.rounds`."""

    end: int
    score: float
    metrics: dict[str, float] = field(default_factory=dict)
    coefficients: dict[str, float] = field(default_factory=dict)
    branches: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class NameOfMethod(Record):
    """A method's word, its name in tables, and what it is compared with: see `References`.

    `is_selected` says of the baseline that validation chooses its model among those of its training.
    """

    word: str
    label: str
    references: dict[str, str] = field(default_factory=dict)
    is_selected: bool = False


@dataclass(frozen=True)
class PlanOfComparison(Record):
    """What the file of a plan holds: see `Comparison`."""

    settings: dict[str, Any]
    methods: list[NameOfMethod]
    targets: list[str]
    seeds: list[int]
    equal_labels: bool
    tune: dict[str, list[Any]] = field(default_factory=dict)
    tune_seeds: int = 1
    code: str | None = None
    pretrained: str | None = None


def read_run_result(out: Path, file: str) -> RunResult | None:
    """Return a record, or None if it has not been written."""
    path = out / file
    if not path.is_file():
        return None
    return run_result_from(_read(path, "outcome"), path)


def read_run_results(out: str | os.PathLike[str]) -> list[RunResult]:
    """Return all records of a comparison, by file name."""
    folder = Path(out)
    files = [path for path in sorted(folder.glob("*/*.json")) if not path.name.startswith(TEMPORARY)]
    results = (read_run_result(folder, str(path.relative_to(folder))) for path in files)
    return [result for result in results if result is not None]


def write_plan(out: Path, plan: Mapping[str, Any]) -> None:
    """Write what a folder compares."""
    write_versioned(out / PLAN, FORMAT, {"plan": plan})


def read_plan(out: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return what a folder compares, or None if it is not the folder of a comparison."""
    path = Path(out) / PLAN
    return plan_from(_read(path, "plan"), path) if path.is_file() else None


def check_same_settings(old: Mapping[str, Any], new: Mapping[str, Any], name: object) -> None:
    """Refuse a plan whose problem or settings are others than those of what `name` has."""
    for key in ("settings", "tune", "tune_seeds", "equal_labels"):
        if old[key] != new[key]:
            raise StoreError(
                f"{name} compares with other settings: {key} was {old[key]!r} and is {new[key]!r} now. Use the "
                "same ones to continue it, or choose another folder with --out."
            )


def run_result_from(data: Mapping[str, Any], name: object) -> RunResult:
    """Return a record from what is read in a file of this name."""
    result = RunResult.from_json(data, name=name)
    for each in result.rounds:
        ShortRound.from_json(each, name=name)
    return result


def plan_from(data: Mapping[str, Any], name: object) -> dict[str, Any]:
    """Return a plan from what is read in a file of this name."""
    PlanOfComparison.from_json(data, name=name)
    return dict(data)


def _read(path: Path, key: str) -> Any:
    return read_versioned(path, FORMAT, [key], "a record of a comparison", "it")[key]
