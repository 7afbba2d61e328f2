"""The test split, which `fit` never reads: measured once, on the final model."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from forkmerge.algorithms.run_record import Run
from forkmerge.algorithms.saved_run import read_events
from forkmerge.engine.storage.json_codec import plain
from forkmerge.engine.storage.json_files import read_object, write_object
from forkmerge.engine.storage.run_folder import RunFolder
from forkmerge.errors import ProblemError, StoreError
from forkmerge.problem.definition import Evaluation, Problem
from forkmerge.problem.scoring import measure


def measure_test(run: Run, problem: Problem, folder: str | os.PathLike[str] | None = None) -> dict[str, float] | None:
    """Measure the target's test split on a run's final model, into `run.test`; None if the problem has no such split.

    What was measured before is returned as it is, so a test split is looked at once per run.

    Args:
        run: What `fit` returned.
        problem: The problem it was given.
        folder: The run's folder, whose record and result then hold the metrics, too.
    """
    evaluation = problem.evaluations("test").get(problem.target)
    if evaluation is None or run.test is not None:
        return run.test
    run.test = _measured(run, evaluation) if folder is None else _kept(run, evaluation, Path(folder))
    return run.test


def _measured(run: Run, evaluation: Evaluation) -> dict[str, float]:
    if run.model is None:
        raise ProblemError("the run holds no model to test: take it from fit, or resume its folder.")
    return measure(run.model, evaluation, seed=run.seed)


def _kept(run: Run, evaluation: Evaluation, folder: Path) -> dict[str, float]:
    with RunFolder.open(folder) as store:
        measured: list[dict[str, float]] = []
        with suppress(StoreError):  # a damaged record must not keep a run from its end
            measured += [event.metrics for event in read_events(store) if event.event == "test"]
        if not measured:  # a kill between the two writes leaves the record's line alone
            measured = [_measured(run, evaluation)]
            store.record({"event": "test", "task": run.target, "metrics": measured[0]})
    amend_result(folder, test=measured[0])
    return measured[0]


def amend_result(folder: Path, **values: Any) -> None:
    """Add what was measured after a run to its result on disk."""
    path = folder / "result.json"
    data = read_object(path)
    data["result"].update({name: plain(value) for name, value in values.items()})
    write_object(path, data)
