"""What a run remembers between two moments: sums that do not depend on pauses, and states that come back."""

from __future__ import annotations

import math
import random
import shutil
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import forkmerge as fm
from _asserts import assert_same_run
from forkmerge.algorithms.checkpoint import Phase, RunState, Selection, Snapshot, read_rounds
from forkmerge.engine.storage import atomic_files
from forkmerge.engine.storage.run_folder import RunFolder
from forkmerge.engine.training.branch import BranchResult
from forkmerge.engine.training.state import State
from problems import TASKS, Stopped, evaluation, examples, fit, noisy_net, shared_losses, stop_at


def test_recorded_losses_do_not_depend_on_where_training_pauses() -> None:
    def sparse(model: nn.Module, batch: Any, tasks: Any, context: fm.Context) -> dict[str, Tensor]:
        losses = shared_losses(model, batch, tasks, context)
        return {task: loss for task, loss in losses.items() if task == "tgt" or context.step % 3 == 0}

    stream = fm.Stream(TensorDataset(*examples(16, 1)), sparse, TASKS, 8)
    problem = fm.Problem("tgt", stream, evaluation())
    whole, pieces = (fit(fm.Joint(), problem, steps=10, checkpoint_every=every) for every in (None, 2))
    for one, other in zip(whole.rounds, pieces.rounds, strict=True):
        assert one.branches["joint"].losses == pytest.approx(other.branches["joint"].losses, rel=1e-5)


def states(*values: float, step: int = 4) -> list[State]:
    return [State(step, {"float32": torch.full((3,), value)}) for value in values]


def run_state(*, step: int = 4, branches: list[State] | None = None, **changes: Any) -> RunState:
    """A run between two merges, with something in every field."""
    (best, floor, *abreast), (merged,) = states(0.0, 4.0, 1.0, 2.0, step=step), states(3.0, step=2)
    mixtures = [fm.Mixture("alone", {"tgt": 1.0}), fm.Mixture("joint", {"tgt": 1.0, "aux": 0.5})]
    fields: dict[str, Any] = {
        "round_start": 2,
        "rounds": fit(fm.SingleTask(interval=2), steps=2).rounds,
        "snapshots": {"alone": Snapshot(0.5, 3, best), "joint": Snapshot(0.25, 4, best)},
        "floor": floor,
        "best": Snapshot(0.75, 2, merged),
        "reference": {"accuracy": 0.5},
        "selection": Selection(0.75, {"accuracy": 0.75}, 2, replays=True),
        "probes": {"aux": 0.1},
        "notes": ["a note"],
        "saves": 3,
    }
    return RunState(Phase.REFIT, mixtures, branches or abreast, merged, **{**fields, **changes})


def result(sums: Any, counts: Any, bad_steps: Any = None) -> BranchResult:
    return BranchResult(State(0, {}), losses={}, sums=sums, counts=counts, seconds=0.0, bad_steps=bad_steps or {})


class TestRunState:
    def test_it_comes_back_from_its_value_with_everything(self) -> None:
        before = run_state()
        before.add_losses("joint", result({"aux": [0.25]}, {"aux": 2}, bad_steps={"aux": 7}))
        after = RunState.from_value(before.to_value(), before.rounds)
        assert after.to_value().keys() == before.to_value().keys()
        assert (after.phase, after.step, after.round, after.saves) == (Phase.REFIT, 4, 2, 3)
        assert (after.mixtures, after.rounds, after.notes) == (before.mixtures, before.rounds, before.notes)
        assert (after.selection, after.probes, after.reference) == (before.selection, before.probes, before.reference)
        assert after.mean_losses("joint") == {"aux": 0.125}
        assert (after.bad_steps, after.first_bad_step) == ({"joint": {"aux": 7}}, 7)
        assert (after.best_score, after.snapshots["joint"].step) == (0.75, 4)
        assert after.initial is after.searched is None
        for one, other in zip(after.states(), before.states(), strict=True):
            assert torch.equal(one.rows["float32"], other.rows["float32"])

    def test_weights_that_all_branches_share_are_written_once_and_given_back_to_each(self) -> None:
        after = RunState.from_value(run_state(round_start=4).to_value(), [])
        assert [branch.rows for branch in after.branches] == [{}, {}]
        after.refork()
        one, other = (branch.rows["float32"] for branch in after.branches)
        assert one.tolist() == other.tolist() == after.merged.rows["float32"].tolist()
        assert len({row.data_ptr() for row in (one, other, after.merged.rows["float32"])}) == 3

    def test_losses_are_the_same_however_a_round_is_cut(self) -> None:
        values = [0.1, 1e16, 0.3, -1e16]
        whole, pieces = run_state(), run_state()
        whole.add_losses("alone", result({"tgt": values}, {"tgt": 4}))
        for value in values:
            pieces.add_losses("alone", result({"tgt": [value]}, {"tgt": 1}))
        assert whole.mean_losses("alone") == pieces.mean_losses("alone") == {"tgt": 0.1}
        assert whole.mean_losses("joint") == {}

    def test_a_branch_that_is_dropped_takes_its_state_and_snapshot_along(self) -> None:
        held = run_state()
        held.keep(["joint"])
        assert [mixture.name for mixture in held.mixtures] == ["joint"]
        assert [branch.rows["float32"][0].item() for branch in held.branches] == [2.0]
        assert set(held.snapshots) == {"joint"}

    def test_branches_that_were_cut_off_are_not_abreast_and_keep_their_own_weights(self) -> None:
        held = run_state(branches=[*states(1.0, step=2), *states(2.0, step=3)])
        assert (held.step, [state.step for state in held.trained]) == (2, [2, 3, 4])
        after = RunState.from_value(held.to_value(), [])
        after.refork()
        assert [state.rows["float32"][0].item() for state in after.branches] == [1.0, 2.0]

    def test_a_new_round_forgets_losses_and_seconds_and_a_note_is_taken_once(self) -> None:
        held = run_state(seconds=2.0)
        held.add_losses("alone", result({"tgt": [1.0]}, {"tgt": 1}, bad_steps={"tgt": 3}))
        held.next_round()
        assert (held.round_start, held.seconds, held.mean_losses("alone")) == (4, 0.0, {})
        assert (held.bad_steps, held.first_bad_step) == ({}, 3)
        held.note("a note")
        held.note("another")
        assert held.notes == ["a note", "another"]
        assert run_state(best=None).best_score == -math.inf


ALGORITHM = fm.ForkMerge("per_auxiliary", interval=2, refit=True)


def interrupted(folder: Path, at: int = 30) -> Path:
    with pytest.raises(Stopped):
        fit(ALGORITHM, net=noisy_net, steps=8, folder=folder, on_event=stop_at(at))
    return folder


def resumed(folder: Path) -> Any:
    return fit(ALGORITHM, net=noisy_net, steps=8, folder=folder, resume=True)


@cache
def undisturbed() -> Any:
    return fit(ALGORITHM, net=noisy_net, steps=8)


class TestRoundsOnDisk:
    """Finished rounds are written once, and a checkpoint says how many it stands on."""

    def test_what_a_round_writes_does_not_grow_with_the_rounds_before(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        written, real, by_checkpoint = [0], atomic_files.write, []

        def counted(file: Any, data: bytes) -> None:
            written[0] += len(data)
            real(file, data)

        def see(event: Any) -> None:
            if type(event).__name__ == "CheckpointWritten":
                by_checkpoint.append(written[0])
                written[0] = 0

        monkeypatch.setattr(atomic_files, "write", counted)
        monkeypatch.setattr(atomic_files, "_fsync", lambda descriptor: None)
        fit(
            fm.ForkMerge("mixed", search=fm.Fixed((0.5, 0.5)), interval=1),
            steps=60,
            folder=tmp_path / "run",
            on_event=see,
        )
        early, late = sum(by_checkpoint[6:16]), sum(by_checkpoint[50:60])
        assert late < 1.02 * early, "but for numbers with more digits"

    def test_a_checkpoint_holds_their_number_only(self, tmp_path: Path) -> None:
        value = RunFolder.open(interrupted(tmp_path / "run"), lock=False).load()
        assert value["rounds"] == len((tmp_path / "run/rounds.jsonl").read_bytes().splitlines()) > 1

    def test_a_flipped_bit_in_a_line_is_mended_from_the_record(self, tmp_path: Path) -> None:
        interrupted(tmp_path / "run")
        text, draw = (tmp_path / "run/rounds.jsonl").read_bytes(), random.Random(0)
        for turn in range(12):
            folder = shutil.copytree(tmp_path / "run", tmp_path / str(turn))
            changed = bytearray(text)
            changed[draw.randrange(len(text))] ^= 1 << draw.randrange(8)
            (folder / "rounds.jsonl").write_bytes(changed)
            assert_same_run(resumed(folder), undisturbed())
            assert len((folder / "rounds.jsonl").read_bytes().splitlines()) == len(undisturbed().rounds)

    def test_a_file_that_is_gone_is_made_again_from_the_record(self, tmp_path: Path) -> None:
        (interrupted(tmp_path / "run") / "rounds.jsonl").unlink()
        assert_same_run(resumed(tmp_path / "run"), undisturbed())

    def test_a_damaged_record_does_no_harm(self, tmp_path: Path) -> None:
        record = interrupted(tmp_path / "run") / "record.jsonl"
        record.write_bytes(bytes(record.stat().st_size))
        assert_same_run(resumed(tmp_path / "run"), undisturbed())

    def test_a_round_that_is_damaged_in_both_is_named_and_nothing_is_touched(self, tmp_path: Path) -> None:
        folder = interrupted(tmp_path / "run")
        for name in ("record.jsonl", "rounds.jsonl"):
            (folder / name).write_bytes(bytes((folder / name).stat().st_size))
        before = sorted(folder.rglob("*"))
        with pytest.raises(fm.StoreError, match=r"round 1 is damaged in rounds\.jsonl and in record\.jsonl"):
            resumed(folder)
        assert sorted(folder.rglob("*")) == before

    def test_lines_after_the_checkpoint_are_removed_before_the_round_is_done_again(self, tmp_path: Path) -> None:
        folder = interrupted(tmp_path / "run")
        lines = (folder / "rounds.jsonl").read_bytes()
        extra = lines + lines.splitlines(keepends=True)[-1][:-20]  # torn
        (folder / "rounds.jsonl").write_bytes(extra)
        assert_same_run(resumed(folder), undisturbed())

    def test_rounds_that_an_earlier_version_wrote_into_the_checkpoint_are_read(self, tmp_path: Path) -> None:
        rounds = fit(fm.ForkMerge("mixed", interval=4)).rounds
        with RunFolder.create(tmp_path / "run", {}) as store:
            assert read_rounds(store, [asdict(finished) for finished in rounds]) == rounds
            assert read_rounds(store, len(rounds)) == rounds

    def test_numbers_that_are_not_finite_come_back(self, tmp_path: Path) -> None:
        (finished,) = fit(fm.SingleTask(interval=2), steps=2).rounds
        finished.branches["alone"].losses["tgt"] = math.nan
        with RunFolder.create(tmp_path / "run", {}) as store:
            store.rounds.append(1, asdict(finished))
            (back,) = read_rounds(store, 1)
        assert math.isnan(back.branches["alone"].losses["tgt"])
