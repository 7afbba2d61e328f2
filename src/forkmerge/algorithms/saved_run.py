"""What the folders of runs say, finished or not, without the code that made them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from forkmerge.algorithms.resolved_config import open_run
from forkmerge.algorithms.run_record import Round, Run
from forkmerge.algorithms.table_data import show_metrics, show_steps
from forkmerge.engine.storage.records import Record
from forkmerge.engine.storage.run_folder import RunFolder, list_runs, status
from forkmerge.errors import StoreError, command


@dataclass(frozen=True)
class RunEvent(Record):
    """A line of a run's record, as far as it is read back.

    Args:
        event: What happened.
        phase: "search" or "refit".
        step: The step of a segment.
        end: The last step of a round.
        metrics: What was measured.
        reason: Why a run failed.
        round: All of a round.
    """

    unwritten: ClassVar[tuple[str, ...]] = ("round",)

    event: str
    phase: str = "search"
    step: int | None = None
    end: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    round: Round | None = None


@dataclass(frozen=True)
class SavedRun:
    """What the folder of a run says.

    Args:
        path: Its folder.
        status: "finished", "running", "interrupted" or "failed".
        config: Its resolved config.
        changed: When its record last grew.
        run: The run itself, without its model; None until it is finished.
        rounds: The rounds so far.
        phase: "search" or "refit", as far as it has got.
        step: The last recorded step of that phase.
        checkpoint: Where an interrupted run continues, e.g. "step 400"; None where it starts over.
        warnings: What is wrong with the folder.
        reason: Why it failed.
    """

    path: Path
    status: str
    config: dict[str, Any]
    changed: datetime
    run: Run | None = None
    rounds: list[Round] = field(default_factory=list)
    phase: str = "search"
    step: int = 0
    checkpoint: str | None = None
    warnings: list[str] = field(default_factory=list)
    reason: str | None = None

    @property
    def algorithm(self) -> str:
        """Name of the algorithm."""
        return str(self.config["algorithm"]["name"])

    @property
    def target(self) -> str:
        """The target task."""
        return str(self.config["problem"]["target"])

    @property
    def steps(self) -> int:
        """T."""
        return int(self.config["training"]["steps"])

    @property
    def source(self) -> dict[str, Any]:
        """Where the recipe came from; empty for a run started from Python."""
        return dict(self.config.get("source", {}))

    @property
    def how_to_resume(self) -> str:
        """What to type to continue the run."""
        if self.source:
            return command(f"resume {shlex.quote(str(self.path))}")
        return f"fit(…, folder={str(self.path)!r}, resume=True) in the program that started it"

    def to_row(self) -> dict[str, Any]:
        """Return the run as one line of a table of runs, in plain data."""
        run = self.run
        score = run.score if run else next((r.score for r in reversed(self.rounds) if r.score is not None), None)
        last = next((r.reached for r in reversed(self.rounds) if r.score is not None), "")
        progress = f"{self.step}/{self.steps}" + (" refit" if self.phase == "refit" else "")
        return {
            "name": self.path.name,
            "folder": str(self.path),
            "algorithm": self.algorithm,
            "target": self.target,
            "status": self.status,
            "phase": self.phase,
            "step": self.step,
            "steps": self.steps,
            "progress": str(self.steps) if run else progress,
            "score": score,
            "validation": show_metrics(run.metrics) if run and run.metrics else last,
            "metrics": run.metrics if run else None,
            "test_metrics": run.test if run else None,
            "test": show_metrics(run.test) + " (held out)" * (run.test_split != "test") if run and run.test else "",
            "changed": self.changed.isoformat(" ", "minutes"),
        }


def read_events(store: RunFolder) -> Iterator[RunEvent]:
    """Yield the events of a run's record."""
    for number, data in enumerate(store.records(), start=1):
        name = f"line {number} of {store.path / 'record.jsonl'}"
        event = RunEvent.from_json(data, name=name)
        yield replace(event, round=Round.from_json(data, name=name)) if event.event == "round" else event


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Return a finished run as it was recorded, without its model."""
    with open_run(folder) as store:
        result = store.result()
    if result is None:
        reason = read_saved_run(folder, needs_record=False).reason
        if reason is not None:
            raise StoreError(f"{folder} has failed and has no model: {reason}")
        raise StoreError(
            f"{folder} is not finished: continue it with `{command(f'resume {shlex.quote(str(folder))}')}`."
        )
    return Run.from_json(result, name=Path(folder) / "result.json")


def read_saved_run(folder: str | os.PathLike[str], *, verify: bool = False, needs_record: bool = True) -> SavedRun:
    """Return what a run's folder says.

    Args:
        folder: The run's folder.
        verify: Read the checkpoints of an interrupted run, too, to say where it continues and what is damaged.
        needs_record: Whether a damaged record is an error and not only a warning; a finished run does without.
    """
    path = Path(folder)
    state: str = status(folder)
    with open_run(path) as store:
        record = path / "record.jsonl"
        changed = datetime.fromtimestamp((record if record.exists() else path / "config.json").stat().st_mtime)
        run = read_run(path) if state == "finished" else None
        try:
            events = list(read_events(store)) if record.exists() else []
        except StoreError as error:
            if run is None and needs_record:
                raise
            store.warnings.append(str(error))
            events = []
        progress = _progress(events) if run is None else _end_of(run)
        if state == "interrupted" and events and events[-1].event == "failed":
            state, progress["reason"] = "failed", events[-1].reason
        if verify and state == "interrupted":
            value = store.load()
            progress["checkpoint"] = None if value is None else _where(value)
        return SavedRun(path, state, store.config, changed, **progress, warnings=store.warnings)


def _progress(events: Sequence[RunEvent]) -> dict[str, Any]:
    """Return how far a run has got, by its record."""
    last = next((event for event in reversed(events) if event.event in ("segment", "round")), RunEvent(""))
    step = last.end if last.step is None else last.step
    return {"rounds": [e.round for e in events if e.round is not None], "phase": last.phase, "step": step}


def _end_of(run: Run) -> dict[str, Any]:
    """Return where a finished run has got, by its result: its record may be damaged."""
    phase = run.rounds[-1].phase if run.rounds else "search"
    return {"rounds": list(run.rounds), "phase": phase, "step": run.steps, "run": run}


def list_saved_runs(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return a row for every run below a folder; one that cannot be read says why instead of hiding the others.

    The parts of a run that is made of several are listed only where the folder is that run's own.
    """
    rows, folders = [], list_runs(folder)
    for path in folders:
        if path.parent in folders and path.parent != Path(folder):
            continue
        try:
            row = read_saved_run(path).to_row()
        except Exception as error:  # whatever is wrong with one folder
            row = dict.fromkeys(("algorithm", "target", "progress", "validation", "test"), "")
            row.update(name=path.name, folder=str(path), status="unreadable", changed=str(error))
        rows.append({**row, "name": os.path.relpath(path, folder) if path != Path(folder) else path.name})
    return rows


def _where(value: dict[str, Any]) -> str:
    steps = {name: branch["step"] for (name, *_), branch in zip(value["mixtures"], value["branches"], strict=True)}
    return show_steps(value["phase"], steps)
