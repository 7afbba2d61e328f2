"""One run, any way: in processes, with loader workers, in segments, killed and resumed; always the same bits."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import forkmerge as fm
from forkmerge.engine.training.branch import train_branch
from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.engine.training.state import State
from problems import ADAM, Augmented, Stopped, facts, fit, noisy_net, same_bits, seeded, shared_problem, stop_at

SEED = 3


def train(
    binding: ModelBinding,
    state: State,
    weights: dict[str, float],
    steps: int,
    training: fm.Training,
    problem: fm.Problem,
) -> State:
    mixture = fm.Mixture("branch", weights)
    return train_branch(binding, problem, mixture, state, steps=steps, training=training, seed=SEED).state


BUSY = fm.ForkMerge("per_auxiliary", interval=6, floor=True, refit=True)


def busy_problem() -> fm.Problem:
    return shared_problem(Augmented())


@pytest.fixture(scope="module")
def undisturbed() -> Any:
    run = fit(BUSY, busy_problem(), noisy_net, steps=15)
    assert any(0 < value < 1 for c in run.coefficients for value in c.values()), "the run should really merge"
    return run


def agrees(run: Any, other: Any) -> bool:
    return same_bits(run, other) and facts(run) == facts(other)


class TestTheSameRun:
    def test_two_spawned_processes_give_the_bits_of_the_serial_run(self, undisturbed: Any) -> None:
        assert agrees(undisturbed, fit(BUSY, busy_problem(), noisy_net, steps=15, workers=2))

    @pytest.mark.parametrize("workers", [1, 2])
    def test_loader_workers_do_not_change_a_bit(self, undisturbed: Any, workers: int) -> None:
        assert agrees(undisturbed, fit(BUSY, busy_problem(), noisy_net, steps=15, loader_workers=workers))

    @pytest.mark.parametrize("every", [1, 5])
    def test_segment_length_does_not_change_a_bit(self, undisturbed: Any, every: int, tmp_path: Path) -> None:
        cut = fit(BUSY, busy_problem(), noisy_net, steps=15, folder=tmp_path / "run", checkpoint_every=every)
        assert same_bits(undisturbed, cut)
        assert cut.coefficients == undisturbed.coefficients
        assert [r.candidates for r in cut.rounds] == [r.candidates for r in undisturbed.rounds]

    @pytest.mark.parametrize("at", [5, 14])  # test_resume.py goes through many more
    def test_killed_and_resumed_gives_the_same_bits(self, undisturbed: Any, at: int, tmp_path: Path) -> None:
        options: dict[str, Any] = {"steps": 15, "folder": tmp_path / "run"}
        with pytest.raises(Stopped):
            fit(BUSY, busy_problem(), noisy_net, observe=stop_at(at), **options)
        assert agrees(undisturbed, fit(BUSY, busy_problem(), noisy_net, resume=True, **options))

    def test_training_in_segments_of_any_length_is_training_at_once(self) -> None:
        training, problem = fm.Training(ADAM, fm.SchedulerOf("StepLR", step_size=3)), busy_problem()
        go = partial(train, training=training, problem=problem, weights={"tgt": 1.0, "odd": 0.5})
        binding = training.binding(seeded(noisy_net))
        first = binding.initial()
        whole = go(binding, first.clone(), steps=9)
        parts = first.clone()
        for start, end in pairwise((0, 1, 4, 5, 9)):
            other = go(binding, first.clone(), steps=2)  # another branch at work on the same binding in between
            parts = go(binding, parts, steps=end - start)
        assert other.step == 2
        for name, row in whole.rows.items():
            assert torch.equal(row, parts.rows[name])
        assert same_bits(whole.buffers, parts.buffers)
        assert same_bits(whole.optimizer_rows, parts.optimizer_rows)
