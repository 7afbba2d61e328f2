"""What a run tells arrives in the loggers' own files, at the right steps, also when it was interrupted and resumed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forkmerge as fm
from forkmerge.algorithms.events import Event, Merged, RunStarted, StepProgress, scalars
from forkmerge.integrations.loggers import STEP_AXIS, Logger, MLflow, TensorBoard, WandB
from problems import fit

Curves = dict[str, list[tuple[int, float]]]
ALGORITHM = fm.ForkMerge("per_auxiliary", interval=4, refit=True)


class Stop(Exception):
    """Ends a run in the middle of it."""


class Memory(Logger):
    """The obvious twin: a dictionary."""

    def __init__(self) -> None:
        self.curves: Curves = defaultdict(list)
        self.closed: bool | None = None

    def write(self, event: Event, step: int, values: Any) -> None:
        for name, value in values.items():
            self.curves[name].append((step, value))

    def close(self, *, failed: bool = False) -> None:
        self.closed = failed


def without_seconds(curves: Curves) -> Curves:
    """Of a run, all but how long it took."""
    return {name: points for name, points in curves.items() if "seconds/" not in name}


@pytest.fixture(scope="module")
def expected() -> Curves:
    """What a run that nobody interrupted tells."""
    memory = Memory()
    fit(ALGORITHM, on_event=memory)
    return without_seconds(memory.curves)


def run_with(logger: Logger, folder: Path | None = None, stop_at: int | None = None) -> None:
    """Train, logging, and perhaps stop after the merge of a search at a step has been logged."""

    def follow(event: Event) -> None:
        logger(event)
        if stop_at is not None and isinstance(event, Merged) and event.step == stop_at:
            raise Stop

    with logger:
        fit(ALGORITHM, folder=folder, resume=folder is not None, on_event=follow)


def tensorboard_curves(folder: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves: Curves = {}
    for subfolder in {path.parent for path in folder.rglob("events.*")}:
        events = EventAccumulator(str(subfolder)).Reload()
        for name in events.Tags()["scalars"]:
            curves[name] = [(point.step, point.value) for point in events.Scalars(name)]
    return curves


class TestTensorBoard:
    def test_every_number_arrives_at_its_step(self, expected: Curves, tmp_path: Path) -> None:
        run_with(TensorBoard(tmp_path))
        assert curves_near(tensorboard_curves(tmp_path), expected)

    def test_a_resumed_run_purges_what_was_told_of_later_steps_and_nothing_else(
        self, expected: Curves, tmp_path: Path
    ) -> None:
        folder, logs = tmp_path / "run", tmp_path / "logs"
        with pytest.raises(Stop):
            run_with(TensorBoard(logs), folder, stop_at=8)
        assert tensorboard_curves(logs)["score"][-1][0] == 8, "which comes again"
        run_with(TensorBoard(logs), folder)
        assert curves_near(tensorboard_curves(logs), expected)

    def test_a_run_that_is_started_again_replaces_what_was_logged(self, expected: Curves, tmp_path: Path) -> None:
        with pytest.raises(Stop):
            run_with(TensorBoard(tmp_path), stop_at=8)
        run_with(TensorBoard(tmp_path))
        assert curves_near(tensorboard_curves(tmp_path), expected)

    @pytest.mark.parametrize("algorithm", [fm.PostTrain(), fm.ForkMerge(fm.NestedTopK(probe_steps=5), interval=4)])
    def test_what_counts_its_own_steps_has_a_subfolder(self, algorithm: fm.Algorithm, tmp_path: Path) -> None:
        memory = Memory()
        with TensorBoard(tmp_path) as log:
            fit(algorithm, on_event=lambda event: (memory(event), log(event)))
        assert curves_near(tensorboard_curves(tmp_path), without_seconds(memory.curves))
        folders = {path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("events.*")}
        parts = {"pretraining", "finetuning"} if isinstance(algorithm, fm.PostTrain) else {".", "probes"}
        assert parts <= folders


def curves_near(curves: Curves, expected: Curves) -> bool:
    """TensorBoard keeps single precision."""
    curves = without_seconds(curves)
    assert curves.keys() == expected.keys()
    for name, points in curves.items():
        assert [step for step, _ in points] == [step for step, _ in expected[name]], name
        assert [value for _, value in points] == pytest.approx([value for _, value in expected[name]], rel=1e-6)
    return True


def wandb_records(folder: Path) -> Iterator[Any]:
    """The records of an offline run's file: a log of blocks of 32 KiB, whose records may be cut into pieces."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.rglob("run-*.wandb")
    data, position, record = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        rest = 32768 - position % 32768
        if rest < 7:
            position += rest
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield Record.FromString(record)
            record = b""


def wandb_curves(folder: Path) -> Curves:
    curves: Curves = defaultdict(list)
    for record in wandb_records(folder):
        if record.WhichOneof("record_type") == "history":
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for name in row.keys() - {STEP_AXIS} - {name for name in row if name.startswith("_")}:
                curves[name].append((row[STEP_AXIS], row[name]))
    return curves


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """W&B without network, account or output."""
    import wandb

    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    return {"mode": "offline", "settings": wandb.Settings(silent=True, x_disable_stats=True, x_disable_meta=True)}


class TestWandB:
    def test_every_number_arrives_beside_its_step_though_branches_report_a_step_in_turn(
        self, expected: Curves, tmp_path: Path, offline: dict[str, Any]
    ) -> None:
        import wandb

        run_with(WandB("a-run", dir=tmp_path, **offline))
        wandb.teardown()  # its own process has then written everything
        assert without_seconds(wandb_curves(tmp_path)) == expected
        metrics = [r.metric for r in wandb_records(tmp_path) if r.WhichOneof("record_type") == "metric"]
        assert [metric.step_metric for metric in metrics if metric.glob_name == "*"] == [STEP_AXIS]
        (run,) = [r.run for r in wandb_records(tmp_path) if r.WhichOneof("record_type") == "run"]
        assert run.run_id == "a-run"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store of files, which MLflow asks to be allowed; its databases need more than the small package."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return (tmp_path / "mlruns").as_uri()


def mlflow_curves(logger: MLflow) -> Curves:
    history = logger.client.get_metric_history
    names = logger.client.get_run(logger.run_id).data.metrics
    return {name: [(p.step, p.value) for p in history(logger.run_id, name)] for name in names}


class TestMLflow:
    def test_every_number_arrives_at_its_step(self, expected: Curves, store: str) -> None:
        logger = MLflow(tracking_uri=store)
        run_with(logger)
        assert without_seconds(mlflow_curves(logger)) == expected
        assert logger.client.get_run(logger.run_id).info.status == "FINISHED"

    def test_a_resumed_run_goes_on_in_the_same_one_and_writes_nothing_twice(
        self, expected: Curves, store: str, tmp_path: Path
    ) -> None:
        first = MLflow(tracking_uri=store)
        with pytest.raises(Stop):
            run_with(first, tmp_path / "run", stop_at=8)
        assert first.client.get_run(first.run_id).info.status == "FAILED"
        second = MLflow(first.run_id, tracking_uri=store)
        run_with(second, tmp_path / "run")
        assert without_seconds(mlflow_curves(second)) == expected
        assert second.client.get_run(second.run_id).info.status == "FINISHED"

    def test_two_runs_are_of_one_experiment(self, store: str) -> None:
        runs = [MLflow(tracking_uri=store, experiment="mine") for _ in range(2)]
        (one, other) = [logger.client.get_run(logger.run_id).info for logger in runs]
        assert one.experiment_id == other.experiment_id
        assert one.run_id != other.run_id

    def test_a_task_of_any_name_can_be_logged(self, store: str) -> None:
        logger = MLflow(tracking_uri=store)
        logger(StepProgress(phase="search", round=1, step=4, branch="a+b", losses={"größe & more": 0.5}))
        assert mlflow_curves(logger) == {"loss/a_2b_b/größe _26_ more": [(4, 0.5)]}


def test_an_event_without_numbers_writes_nothing() -> None:
    memory = Memory()
    memory(RunStarted(algorithm="ForkMerge", target="tgt", seed=0, steps=12, rounds=3))
    assert not memory.curves


def test_with_closes_a_logger_and_says_whether_the_run_failed() -> None:
    for stop_at, failed in ((None, False), (4, True)):
        memory = Memory()
        try:
            run_with(memory, stop_at=stop_at)
        except Stop:
            assert failed
        assert memory.closed is failed


@pytest.mark.parametrize(
    ("make", "package", "extra"),
    [
        ("TensorBoard('logs')", "tensorboard", "tensorboard"),
        ("WandB()", "wandb", "wandb"),
        ("MLflow()", "mlflow-skinny", "mlflow"),
    ],
)
def test_a_missing_library_is_one_sentence_when_the_logger_is_made(make: str, package: str, extra: str) -> None:
    name = make.partition("(")[0]
    code = f"""
import sys
from importlib.abc import MetaPathFinder
import importlib.util
real = importlib.util.find_spec
import forkmerge.errors as errors
errors.find_spec = lambda module: None if module == {name.lower()!r} else real(module)
from forkmerge.integrations.loggers import {name}
assert {name.lower()!r} not in sys.modules, "imported before it is used"
try:
    {make}
except errors.ForkMergeError as error:
    print(error)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert ran.stdout.strip() == f"{name} needs {package}: type pip install 'forkmerge[{extra}]'."


def test_names_of_numbers_are_those_of_scalars(expected: Curves) -> None:
    """So that the page that lists them is right for every logger."""
    kinds = {re.sub("^refit/", "", name).partition("/")[0] for name in expected}
    assert kinds >= {"coefficient", "relevance", "branch_score", "loss", "round_loss", "score"}
    event = StepProgress(phase="search", round=1, step=4, branch="a", losses={"t": 0.5})
    assert scalars(event) == (4, {"loss/a/t": 0.5})
