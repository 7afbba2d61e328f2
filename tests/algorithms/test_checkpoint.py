"""What a run remembers between two moments: sums that do not depend on pauses, and states that come back."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import forkmerge as fm
from forkmerge.algorithms.checkpoint import Phase, RunState, Selection, Snapshot
from forkmerge.engine.training.branch import BranchResult
from forkmerge.engine.training.state import State
from problems import TASKS, evaluation, examples, fit, shared_losses


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
        after = RunState.from_value(before.to_value())
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
        after = RunState.from_value(run_state(round_start=4).to_value())
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
        after = RunState.from_value(held.to_value())
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
