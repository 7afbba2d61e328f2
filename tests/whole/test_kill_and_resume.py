"""A run killed at any moment goes on to the bits it would have had, or says exactly why it cannot."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import forkmerge as fm
from _asserts import assert_same_bits, assert_same_run, bits
from forkmerge.algorithms.events import Notice, StepProgress
from forkmerge.algorithms.run_record import Run
from forkmerge.engine.storage import atomic_files
from forkmerge.engine.storage.run_folder import RunFolder, status
from paths import TESTS
from problems import (
    ADAM,
    SGD,
    Augmented,
    Stopped,
    counting_steps,
    fit,
    is_written,
    noisy_net,
    plain_net,
    seeded,
    shared_problem,
    stop_at,
)

# Everything that a checkpoint has to hold: snapshots, a floor, pruning, a refit, a schedule, a short last round.
ALGORITHM = fm.ForkMerge(
    "per_auxiliary",
    interval=4,
    checkpoint="best_so_far",
    validate_every=2,
    select="best",
    prune_to=2,
    refit=True,
    floor=True,
    keep_branches=True,
    search_examples=12,
)
OPTIONS: dict[str, Any] = {
    "steps": 10,
    "optimizer": ADAM,
    "scheduler": fm.SchedulerOf("OneCycleLR", max_lr=0.3, total_steps=30),
    "checkpoint_every": 3,
    "seed": 37,
}


@pytest.fixture(autouse=True, scope="module")
def no_waiting() -> Any:
    """No test here cuts the power, so nothing has to reach the disk; where syncs may fail, they are counted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atomic_files, "_fsync", lambda descriptor: None)
        yield


def go(folder: Path, algorithm: fm.Algorithm = ALGORITHM, **options: Any) -> Run:
    return fit(algorithm, shared_problem(Augmented()), noisy_net, folder=folder, **{**OPTIONS, **options})


def record(folder: Path) -> list[dict[str, Any]]:
    """What the record says, without timings."""
    lines = list(RunFolder.open(folder, lock=False).records())
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


class Whole(NamedTuple):
    """The undisturbed run, its folder, the events it told its observer and the changes of the atomic_files."""

    run: Run
    folder: Path
    events: int
    changes: int


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder, events = tmp_path_factory.mktemp("whole") / "run", []
    with pytest.MonkeyPatch.context() as patch:
        counted = BrokenDisk(patch, at=-1, mode="before")
        run = go(folder, on_event=events.append)
    assert run.final == "refit"
    assert any(0 < share < 1 for c in run.coefficients for share in c.values())
    assert any(len(r.kept) < 3 for r in run.rounds)
    return Whole(run, folder, sum(map(is_written, events)), counted.count)


def assert_as_if_undisturbed(run: Run, folder: Path, whole: Whole) -> None:
    assert_same_run(run, whole.run)
    assert record(folder) == record(whole.folder)
    assert status(folder) == "finished"
    files, expected = (sorted(str(p.relative_to(f)) for p in f.rglob("*")) for f in (folder, whole.folder))
    assert files == expected


class BrokenDisk:
    """Ends the process in the `at`-th change of the disk: before it, in the middle of it, or after it."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int, mode: str, error: BaseException | None = None) -> None:
        self.at, self.mode, self.count, self.error = at, mode, 0, error or Stopped()
        for name in ("write", "_save_tensors", "_fsync", "_rename"):
            patch.setattr(atomic_files, name, self.wrapped(name, getattr(atomic_files, name)))

    def wrapped(self, name: str, real: Callable[..., None]) -> Callable[..., None]:
        def call(first: Any, *rest: Any) -> None:
            self.count += 1
            if self.count != self.at:
                return real(first, *rest)
            if self.mode == "torn" and name == "write":
                real(first, rest[0][: random.Random(self.at).randrange(len(rest[0]))])
            elif self.mode == "torn" and name == "_save_tensors":
                real(first, *rest)
                os.truncate(first, random.Random(self.at).randrange(os.path.getsize(first)))
            elif self.mode == "after":
                real(first, *rest)
            raise self.error

        return call


class TestKills:
    def test_killed_at_a_random_event(self, whole: Whole, tmp_path: Path) -> None:
        for draw in range(10):
            at, folder = random.Random(draw).randint(1, whole.events), tmp_path / str(draw)
            with pytest.raises(Stopped):
                go(folder, on_event=stop_at(at))
            assert_as_if_undisturbed(go(folder, resume=True), folder, whole)

    def test_killed_at_a_random_change_of_the_disk(
        self, whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also inside a checkpoint write, and while the folder is made."""
        for draw in range(10):
            pick, folder = random.Random(100 + draw), tmp_path / str(draw)
            at, mode = pick.randint(1, whole.changes), pick.choice(["before", "torn", "after"])
            with monkeypatch.context() as patch:
                BrokenDisk(patch, at, mode)
                with pytest.raises(Stopped):
                    go(folder)
            assert_as_if_undisturbed(go(folder, resume=True), folder, whole)

    def test_killed_again_and_again(self, whole: Whole, tmp_path: Path) -> None:
        pick, kills = random.Random(7), 0
        while True:
            try:
                run = go(tmp_path / "run", resume=True, on_event=stop_at(pick.randint(3, 12)))
                break
            except Stopped:
                kills += 1
        assert kills >= 3
        assert_as_if_undisturbed(run, tmp_path / "run", whole)

    def test_a_full_disk_ends_the_run_and_it_goes_on_when_there_is_room(
        self, whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            BrokenDisk(patch, 40, "torn", OSError(28, "No space left on device"))
            with pytest.raises(fm.StoreError, match="No space left"):
                go(tmp_path / "run")
        assert_as_if_undisturbed(go(tmp_path / "run", resume=True), tmp_path / "run", whole)

    def test_a_real_sigkill(self, whole: Whole, tmp_path: Path) -> None:
        script = tmp_path / "job.py"
        script.write_text(
            "import sys, time\n"
            f"sys.path.insert(0, {str(TESTS)!r})\n"
            "from pathlib import Path\n"
            "import torch\n"
            "from tests.whole.test_kill_and_resume import go\n"
            "torch.set_num_threads(1)\n"
            "go(Path(sys.argv[1]), on_event=lambda event: time.sleep(0.05))\n"
        )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen([sys.executable, str(script), str(tmp_path / "run")], env=environment)
        lines, ends = tmp_path / "run" / "record.jsonl", time.monotonic() + 60
        while process.poll() is None and time.monotonic() < ends:
            if lines.exists() and lines.read_bytes().count(b"\n") >= 9:
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert status(tmp_path / "run") == "interrupted"
        assert_as_if_undisturbed(go(tmp_path / "run", resume=True), tmp_path / "run", whole)


class TestTheSameModule:
    """In one process the module given to the first attempt, by then trained, is given again."""

    @pytest.mark.parametrize("at", [2, 9, 20])
    def test_it_can_be_used_to_resume(self, at: int, tmp_path: Path) -> None:
        module = seeded(noisy_net)
        expected = fit(ALGORITHM, net=seeded(noisy_net), folder=tmp_path / "expected", **OPTIONS)
        with pytest.raises(Stopped):
            fit(ALGORITHM, net=module, folder=tmp_path / "run", on_event=stop_at(at), **OPTIONS)
        assert_same_bits(expected, fit(ALGORITHM, net=module, folder=tmp_path / "run", resume=True, **OPTIONS))

    def test_also_if_the_ranking_runs_before_the_first_checkpoint_were_interrupted(self, tmp_path: Path) -> None:
        algorithm = fm.ForkMerge(fm.NestedTopK(probe_steps=3), interval=4)
        module = seeded(noisy_net)
        expected = fit(algorithm, net=seeded(noisy_net))
        with pytest.raises(Stopped):
            fit(algorithm, net=module, folder=tmp_path / "run", on_event=stop_at(1))
        assert_same_bits(expected, fit(algorithm, net=module, folder=tmp_path / "run", resume=True))

    def test_buffers_that_two_modules_share_stay_shared(self) -> None:
        module = seeded(noisy_net)
        module.heads["tgt"].register_buffer("mean", module.body[1].running_mean)
        with pytest.raises(Stopped):
            fit(net=module, on_event=stop_at(5))
        assert module.heads["tgt"].mean is module.body[1].running_mean


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("????????"))


class TestDamage:
    @pytest.fixture
    def killed(self, tmp_path: Path, whole: Whole) -> Path:
        with pytest.raises(Stopped):
            go(tmp_path / "run", on_event=stop_at(whole.events // 2))
        return tmp_path / "run"

    @pytest.mark.parametrize(
        ("name", "damage"),
        [
            ("state.safetensors", "truncated"),
            ("state.safetensors", "flipped"),
            ("state.json", "flipped"),
            ("manifest.json", "truncated"),
            ("manifest.json", "missing"),
        ],
    )
    def test_a_damaged_newest_checkpoint_is_named_and_the_previous_one_used(
        self, killed: Path, whole: Whole, name: str, damage: str
    ) -> None:
        folder = newest(killed)
        data = bytearray((folder / name).read_bytes())
        if damage == "truncated":
            (folder / name).write_bytes(data[: len(data) // 2])
        elif damage == "flipped":
            data[len(data) // 2] ^= 4
            (folder / name).write_bytes(data)
        else:
            (folder / name).unlink()
        events: list[Any] = []
        run = go(killed, resume=True, on_event=events.append)
        assert_same_bits(run, whole.run)
        notes = [note for note in run.notes if note not in whole.run.notes]
        assert len(notes) == 1
        assert f"skipped the damaged checkpoint {folder}: {name}" in notes[0]
        assert [event for event in events if isinstance(event, Notice)] == [Notice(text=notes[0], is_warning=True)]
        assert record(killed) == record(whole.folder)

    def test_if_both_are_damaged_the_run_starts_again(self, killed: Path, whole: Whole) -> None:
        for folder in (killed / "checkpoints").iterdir():
            (folder / "manifest.json").write_text("{}")
        run = go(killed, resume=True)
        assert_same_bits(run, whole.run)
        assert sum("skipped the damaged checkpoint" in note for note in run.notes) == 2

    def test_a_torn_last_line_of_the_record_is_cut_off(self, killed: Path, whole: Whole) -> None:
        with (killed / "record.jsonl").open("ab") as file:
            file.write(b'{"event": "segm')
        assert_as_if_undisturbed(go(killed, resume=True), killed, whole)

    def test_at_most_two_checkpoints_are_kept(self, killed: Path) -> None:
        assert len(list((killed / "checkpoints").iterdir())) == 2

    def test_a_third_that_a_kill_left_behind_is_removed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch, RunFolder.create(tmp_path / "run", {}) as folder:
            patch.setattr(RunFolder, "_prune", lambda self: None)
            for index in (1, 2, 3):
                folder.save({"index": index}, index)
        with RunFolder.open(tmp_path / "run") as folder:
            assert folder.load() == {"index": 3}
        kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
        assert kept == ["00000002", "00000003"]


class TestFinishedRuns:
    def test_resuming_one_returns_it_without_training(self, whole: Whole, tmp_path: Path, monkeypatch: Any) -> None:
        shutil.copytree(whole.folder, tmp_path / "run")
        with counting_steps(monkeypatch) as trained:
            run = go(tmp_path / "run", resume=True)
        assert trained == []
        assert_same_bits(run, whole.run)
        assert run == Run.from_json(json.loads(json.dumps(whole.run.to_json())))

    def test_a_model_that_was_damaged_is_refused(self, whole: Whole, tmp_path: Path) -> None:
        shutil.copytree(whole.folder, tmp_path / "run")
        data = bytearray((tmp_path / "run" / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (tmp_path / "run" / "model.safetensors").write_bytes(data)
        with pytest.raises(fm.StoreError, match=r"model in .* is damaged: model\.safetensors: its sha256"):
            go(tmp_path / "run", resume=True)

    def test_the_stored_model_is_plain_safetensors(self, whole: Whole) -> None:
        from safetensors.torch import load_file

        assert_same_bits(
            dict(sorted(bits(whole.run).items())), dict(sorted(load_file(whole.folder / "model.safetensors").items()))
        )


class TestFolders:
    def test_resume_starts_a_run_where_there_is_none(self, tmp_path: Path) -> None:
        run = fit(folder=tmp_path / "new", resume=True)
        assert_same_bits(run, fit())

    def test_a_folder_whose_making_was_killed_can_be_resumed(self, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "lock").write_text("")
        (tmp_path / "run" / ".tmp-config.json").write_text('{"algo')
        assert_same_bits(fit(folder=tmp_path / "run", resume=True), fit())

    def test_a_run_in_another_process_is_not_joined(self, tmp_path: Path) -> None:
        with pytest.raises(Stopped):
            fit(folder=tmp_path / "run", on_event=stop_at(4))
        with RunFolder.open(tmp_path / "run"), pytest.raises(fm.StoreError, match="already running in another process"):
            fit(folder=tmp_path / "run", resume=True)
        assert fit(folder=tmp_path / "run", resume=True).score is not None

    def test_checkpoints_inside_rounds_save_what_a_round_had_done(self, tmp_path: Path, monkeypatch: Any) -> None:
        algorithm = fm.ForkMerge({"alone": {"tgt": 1.0}}, interval=12)
        with pytest.raises(Stopped):
            fit(algorithm, folder=tmp_path / "run", checkpoint_every=4, on_event=stop_at(6))
        steps: list[int] = []

        def note(event: Any) -> None:
            if isinstance(event, StepProgress):
                steps.append(event.step)

        run = fit(algorithm, folder=tmp_path / "run", checkpoint_every=4, on_event=note, resume=True)
        assert steps == [12]
        assert_same_bits(run, fit(algorithm))
        assert run.rounds[0].branches["alone"].losses == pytest.approx(
            fit(algorithm).rounds[0].branches["alone"].losses
        )


@pytest.mark.parametrize("optimizer", [SGD, ADAM, fm.OptimizerOf("Adafactor", lr=0.05)])
@pytest.mark.parametrize("policy", ["keep", "average", "reset"])
def test_any_policy_for_optimizer_state_resumes_to_the_same_bits(optimizer: Any, policy: Any, tmp_path: Path) -> None:
    algorithm = fm.ForkMerge("per_auxiliary", interval=3, optimizer_state=policy, search=fm.Fixed())
    options: dict[str, Any] = {"optimizer": optimizer, "net": noisy_net, "steps": 9}
    with pytest.raises(Stopped):
        fit(algorithm, folder=tmp_path / "run", on_event=stop_at(12), **options)
    resumed = fit(algorithm, folder=tmp_path / "run", resume=True, **options)
    assert_same_bits(resumed, fit(algorithm, **options))


def test_a_run_resumes_with_another_number_of_loader_workers(tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": plain_net, "optimizer": fm.OptimizerOf("SGD", lr=0.1), "steps": 4}
    first = fm.SingleTask(interval=2).fit(shared_problem(), **options, folder=tmp_path / "run")
    again = fm.SingleTask(interval=2).fit(
        shared_problem(), **options, folder=tmp_path / "run", resume=True, loader_workers=1
    )
    assert again.score == first.score
