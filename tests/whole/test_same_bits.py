"""One run, any way: in processes, with loader workers, in segments, killed and resumed; always the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import forkmerge as fm
from _asserts import assert_same_bits, assert_same_run
from problems import Augmented, Stopped, fit, noisy_net, shared_problem, stop_at

BUSY = fm.ForkMerge("per_auxiliary", interval=6, floor=True, refit=True)


def busy_problem() -> fm.Problem:
    return shared_problem(Augmented())


@pytest.fixture(scope="module")
def undisturbed() -> Any:
    run = fit(BUSY, busy_problem(), noisy_net, steps=15)
    assert any(0 < value < 1 for c in run.coefficients for value in c.values()), "the run should really merge"
    return run


class TestTheSameRun:
    def test_two_spawned_processes_give_the_bits_of_the_serial_run(self, undisturbed: Any) -> None:
        assert_same_run(undisturbed, fit(BUSY, busy_problem(), noisy_net, steps=15, workers=2))

    @pytest.mark.parametrize("workers", [1, 2])
    def test_loader_workers_do_not_change_a_bit(self, undisturbed: Any, workers: int) -> None:
        assert_same_run(undisturbed, fit(BUSY, busy_problem(), noisy_net, steps=15, loader_workers=workers))

    @pytest.mark.parametrize("every", [1, 5])
    def test_segment_length_does_not_change_a_bit(self, undisturbed: Any, every: int, tmp_path: Path) -> None:
        cut = fit(BUSY, busy_problem(), noisy_net, steps=15, folder=tmp_path / "run", checkpoint_every=every)
        assert_same_bits(undisturbed, cut)
        assert cut.coefficients == undisturbed.coefficients
        assert [r.candidates for r in cut.rounds] == [r.candidates for r in undisturbed.rounds]

    @pytest.mark.parametrize("at", [5, 14])  # test_kill_and_resume.py goes through many more
    def test_killed_and_resumed_gives_the_same_bits(self, undisturbed: Any, at: int, tmp_path: Path) -> None:
        options: dict[str, Any] = {"steps": 15, "folder": tmp_path / "run"}
        with pytest.raises(Stopped):
            fit(BUSY, busy_problem(), noisy_net, on_event=stop_at(at), **options)
        assert_same_run(undisturbed, fit(BUSY, busy_problem(), noisy_net, resume=True, **options))
