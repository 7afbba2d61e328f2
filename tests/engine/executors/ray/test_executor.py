"""Calls on Ray: what the interface promises, with the bits of a serial run, whatever dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import ObjectLostError
from torch import Tensor, nn

import forkmerge as fm
from _asserts import assert_same_run
from forkmerge.engine.executors.pending_calls import CallLost, PendingCalls
from forkmerge.engine.executors.ray.executor import RayExecutor
from forkmerge.engine.training.remote_rows import RemoteRows
from forkmerge.testing import check_executor, same_state
from forkmerge.testing.executor_conformance import CheckWorker
from forkmerge.testing.small_training import train_small
from problems import ADAM, fit, noisy_net, problem_with, shared_losses, shared_problem


def test_it_does_what_the_interface_promises(on_ray: fm.Ray) -> None:
    check_executor(on_ray.open)


POLICIES: dict[str, dict[str, Any]] = {
    "the best so far": {"checkpoint": "best_so_far", "select": "best", "validate_every": 2},
    "the best of an interval": {"checkpoint": "best_in_interval", "validate_every": 2},
    "groups of layers": {"layer_groups": "modules"},
    "pruned to the largest": {"prune_to": 1, "prune_keeps": "largest"},
    "halved in turns": {"per_round": 1, "turns": "halving"},
    "winners stay": {"per_round": 1, "turns": "win_stay_all"},
    "searched on a few": {"search_examples": 8},
    "searched by another metric": {"search_by": "nll"},
    "within one standard error": {"rule": "one_standard_error"},
    "bagged": {"rule": "bagged"},
}


class TestTheSameBits:
    @pytest.mark.parametrize(
        ("algorithm", "options"),
        [
            (fm.ForkMerge("per_auxiliary", interval=16, optimizer_state="keep", floor=True, refit=True), {}),
            (fm.ForkMerge("per_auxiliary", interval=16, optimizer_state="average", bn="recompute"), {}),
            (fm.ForkMerge("mixed", interval=8, optimizer_state="reset", method="gradnorm"), {"precision": "float16"}),
            (fm.PostTrain(), {}),
            (fm.WeightGrid(values=(0.5, 1.0)), {}),
        ],
        ids=["keep, floor, refit", "average, recomputed statistics", "reset, a method, float16", "PostTrain", "a grid"],
    )
    def test_a_run_has_the_bits_of_the_serial_one(self, on_ray: fm.Ray, algorithm: Any, options: Any) -> None:
        common = {"net": noisy_net, "optimizer": ADAM, "steps": 32, **options}
        assert_same_run(fit(algorithm, **common), fit(algorithm, executor=on_ray, **common))

    def test_a_run_has_them_whatever_the_policies_of_its_merges_are(self, on_ray: fm.Ray) -> None:
        problem = shared_problem(metrics=fm.accuracy)
        trains_as_many = {}
        for name, options in POLICIES.items():
            algorithm = fm.ForkMerge("per_auxiliary", interval=4, **options)
            serial = fit(algorithm, problem, noisy_net)
            assert_same_run(serial, fit(algorithm, problem, noisy_net, executor=on_ray))
            trains_as_many[name] = [len(each.branches) for each in serial.rounds]
        assert trains_as_many.pop("pruned to the largest") == [3, 1, 1]
        assert trains_as_many.pop("halved in turns") == [2, 2, 2]
        assert trains_as_many.pop("winners stay") == [2, 2, 2]
        assert {tuple(counts) for counts in trains_as_many.values()} == {(3, 3, 3)}

    def test_a_resumed_run_may_change_its_executor(self, on_ray: fm.Ray, tmp_path: Path) -> None:
        whole = fit(optimizer=ADAM)
        raised = _Stop()
        with pytest.raises(KeyError):
            fit(optimizer=ADAM, executor=on_ray, folder=tmp_path / "run", on_event=raised)
        assert_same_run(whole, fit(optimizer=ADAM, folder=tmp_path / "run", resume=True))


class _Stop:
    """Ends a run from a callback, after its first merge."""

    def __call__(self, event: Any) -> None:
        if type(event).__name__ == "CheckpointWritten" and event.step >= 4:
            raise KeyError("stop")


@dataclass(frozen=True)
class Deadly:
    """Losses that kill their process while a file says so: once, or always."""

    folder: Path

    def __call__(self, model: nn.Module, batch: Any, tasks: Sequence[str], context: fm.Context) -> dict[str, Tensor]:
        if context.step == 6 and "aux" in tasks and os.getpid() != int((self.folder / "driver").read_text()):
            if (self.folder / "once").exists():
                (self.folder / "once").unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            if (self.folder / "always").exists():
                os.kill(os.getpid(), signal.SIGKILL)
        return shared_losses(model, batch, tasks, context)


class TestLostWorkers:
    def test_a_worker_killed_in_the_middle_of_a_segment_changes_no_bit(self, on_ray: fm.Ray, tmp_path: Path) -> None:
        (tmp_path / "driver").write_text(str(os.getpid()))
        problem = problem_with(Deadly(tmp_path))
        serial = fit(None, problem, optimizer=ADAM)
        (tmp_path / "once").touch()
        assert_same_run(serial, fit(None, problem, optimizer=ADAM, executor=on_ray))
        assert not (tmp_path / "once").exists()

    def test_a_segment_that_ends_worker_after_worker_is_named(self, on_ray: fm.Ray, tmp_path: Path) -> None:
        (tmp_path / "driver").write_text(str(os.getpid()))
        (tmp_path / "always").touch()
        few, node = fm.Ray(workers=2, attempts=1), ray.get_runtime_context().get_node_id()[:8]
        reason = rf"the loss of its process \d+ on node [\d.]+ \({node}\)"
        with pytest.raises(fm.ProblemError, match=rf"branch '\S+' at steps 4 to 8 ended 1 worker .* with {reason}"):
            fit(None, problem_with(Deadly(tmp_path)), executor=few)


def gone() -> Any:
    """Where something was that has gone with its node."""

    def lose() -> None:
        raise ObjectLostError("0" * 56, b"", "")

    return ray.remote(num_cpus=0, max_retries=0)(lose).remote()


def lost_here() -> str:
    """What is said of a state that is lost, as a pattern: this node has it, and is still there."""
    return rf"the loss of its state on node [\d.]+ \({ray.get_runtime_context().get_node_id()[:8]}\)"


class TestLostStates:
    """A node that is gone takes the states along that it had: who asks for them gets an `ObjectLostError`."""

    def test_a_state_that_was_put_is_put_again(self, on_ray: fm.Ray) -> None:
        state = train_small(None, cuts=(0, 2)).state
        with on_ray.open(1) as executor:
            executor.start(CheckWorker)
            handle: Any = executor.put(state)
            handle.rows = handle.optimizer_rows = gone()
            call = executor.submit(("train", 3), [handle])
            executor.result(call)
            executor.fetch(call, state)
        assert same_state(state, train_small(None, cuts=(0, 5)).state)

    def test_a_call_whose_state_is_gone_is_made_again(self, on_ray: fm.Ray) -> None:
        state = train_small(None, cuts=(0, 0)).state
        with on_ray.open(2) as executor:
            executor.start(CheckWorker)
            calls = PendingCalls(executor)
            first = calls.submit(("train", 2), [executor.put(state)])
            assert next(iter(calls)) is first
            first.handle.rows = gone()  # type: ignore[attr-defined]
            second = calls.submit(("train", 3), [first])
            assert list(calls) == [second]
            second.handle.rows = gone()  # type: ignore[attr-defined]
            calls.fetch(second, state)
            assert (first.attempts, second.attempts) == (2, 2)
        assert same_state(state, train_small(None, cuts=(0, 5)).state)

    def test_a_call_is_given_up_where_its_state_is_lost_however_often_it_is_put(
        self, on_ray: fm.Ray, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        places = iter([(gone(), None) for _ in range(12)])  # so that what puts for ever ends here, too
        monkeypatch.setattr(RayExecutor, "_address_of", lambda *words, **options: next(places))
        begun: list[Any] = []
        with on_ray.open(1) as executor:
            executor.start(CheckWorker)
            calls = PendingCalls(executor)
            put = [executor.put(train_small(None, cuts=(0, 0)).state)]
            call = calls.submit(("train", 2), put, name="2 steps", note=begun.append)
            assert list(calls) == [call]
            with pytest.raises(CallLost, match=rf"2 steps ended 3 workers, the last with {lost_here()}"):
                call.result()
        assert begun == [None] * 3

    def test_what_was_lost_before_counts_for_a_call_that_is_submitted_again(self, on_ray: fm.Ray) -> None:
        state = train_small(None, cuts=(0, 0)).state
        with fm.Ray(workers=1, attempts=2).open() as executor:
            executor.start(CheckWorker)
            calls = PendingCalls(executor)
            call = calls.submit(("train", 2), [executor.put(state)], name="2 steps")
            assert list(calls) == [call]
            call.handle.rows = gone()  # type: ignore[attr-defined]
            calls.fetch(call, state)
            _lose(state)
            with pytest.raises(fm.ProblemError, match=rf"2 steps was done 2 times, the last with {lost_here()}"):
                dict(state.optimizer_rows)


def test_what_cannot_be_sent_is_said_before_training(on_ray: fm.Ray) -> None:
    open_file = (line for line in ())
    problem = shared_problem(metrics=lambda predictions, targets: float(sum(1 for _ in open_file)))
    with pytest.raises(
        fm.ProblemError, match=r"workers on Ray need a problem, model and optimizer that pickle.*generator"
    ):
        fit(None, problem, executor=on_ray)


class TestRowsThatStay:
    """The optimizer's rows stay with their worker until somebody here reads them."""

    def test_they_come_when_they_are_read(self, on_ray: fm.Ray) -> None:
        state = train_small(None, cuts=(0, 0)).state
        with on_ray.open(1) as executor:
            executor.start(CheckWorker)
            for _ in range(2):
                _train(executor, state, 2)
                assert isinstance(state.optimizer_rows, RemoteRows)
                assert not state.optimizer_rows.is_here
                assert state.is_finite(optimizer=True)
                assert not state.optimizer_rows.is_here
            assert same_state(state, train_small(None, cuts=(0, 4)).state)

    def test_a_run_reads_them_for_checkpoints_alone(
        self, on_ray: fm.Ray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        brought, bring = [], RayExecutor._bring
        monkeypatch.setattr(RayExecutor, "_bring", lambda *words: brought.append(words[1].name) or bring(*words))
        merges = fm.ForkMerge("mixed", interval=4, optimizer_state="keep")
        fit(merges, optimizer=ADAM, steps=12, executor=on_ray)
        assert brought == []
        fit(merges, optimizer=ADAM, steps=12, executor=on_ray, folder=tmp_path / "run")
        assert len(brought) == 6

    def test_those_that_went_with_their_node_are_made_again(self, on_ray: fm.Ray) -> None:
        state = train_small(None, cuts=(0, 0)).state
        with on_ray.open(1) as executor:
            executor.start(CheckWorker)
            _train(executor, state, 2)
            _ = dict(state.optimizer_rows)  # as for a checkpoint
            for _ in range(2):
                _train(executor, state, 2)
            _lose(state)
            assert same_state(state, train_small(None, cuts=(0, 6)).state)
            _train(executor, state, 1)
            _lose(state)
            _train(executor, state, 1)
            assert same_state(state, train_small(None, cuts=(0, 8)).state)

    def test_those_of_weights_that_were_merged_since_are_made_again_from_the_merge(self, on_ray: fm.Ray) -> None:
        def scale(state: Any) -> None:
            for row in state.rows.values():
                row.mul_(0.5)

        expected, state = (train_small(None, cuts=(0, 0)).state for _ in range(2))
        with on_ray.open(1) as executor:
            executor.start(CheckWorker)
            for _ in range(3):
                expected = train_small(None, cuts=(0, 2), state=expected).state
                scale(expected)
                _train(executor, state, 2)
                scale(state)
            _lose(state)
            assert same_state(state, expected)

    def test_so_many_losses_of_one_call_are_an_error(self, on_ray: fm.Ray) -> None:
        state = train_small(None, cuts=(0, 0)).state
        with fm.Ray(workers=1, attempts=1).open() as executor:
            executor.start(CheckWorker)
            _train(executor, state, 2)
            _lose(state)
            with pytest.raises(fm.ProblemError, match=rf"2 steps was done 1 times, the last with {lost_here()}\. "):
                dict(state.optimizer_rows)

    def test_not_too_many_calls_have_to_be_made_again(self, on_ray: fm.Ray) -> None:
        state = train_small(None, cuts=(0, 0)).state
        with on_ray.open(1) as executor:
            executor.start(CheckWorker)
            are_here = []
            for _ in range(9):
                _train(executor, state, 1)
                are_here.append(state.optimizer_rows.is_here)  # type: ignore[attr-defined]
        assert are_here == [False] * 7 + [True, False]


def _train(executor: RayExecutor, state: Any, steps: int) -> None:
    call = executor.submit(("train", steps), [executor.put(state)], name=f"{steps} steps")
    executor.result(call)
    executor.fetch(call, state)


def _lose(state: Any) -> None:
    """Let all that calls left in the cluster on the way to a state be gone; what this process has put is not."""
    call = state.optimizer_rows.source
    while call is not None:
        call.rows = call.optimizer_rows = gone()
        given = call.made_from[0] if call.made_from else None
        if given is None:
            return
        if given.source is not None:
            given.source.rows = given.source.optimizer_rows = given.optimizer_rows = gone()
        if given.maker is not None:
            given.rows = gone() if given.source is None else given.source.rows
        call = given.source
