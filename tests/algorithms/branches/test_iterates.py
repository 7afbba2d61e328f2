"""Means of iterates: which steps, what they are, and where they enter a merge."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import forkmerge as fm
from _asserts import assert_other_bits, assert_same_bits, assert_same_run
from forkmerge.algorithms.branches.iterates import add_iterates, iterate_steps
from forkmerge.algorithms.checkpoint import Phase, RunState
from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.engine.training.options import Mixture
from problems import ADAM, SGD, Stopped, diverging_problem, fit, noisy_net, seeded, shared_problem, stop_at

WILD = fm.OptimizerOf("SGD", lr=1.0, momentum=0.9)
"""Whose iterates lie around what they are the mean of."""


def test_steps_are_spread_over_the_last_half_and_end_with_the_last() -> None:
    assert iterate_steps(5, 0, 100) == [60, 70, 80, 90, 100]
    assert iterate_steps(2, 100, 108) == [106, 108]
    assert iterate_steps(10, 0, 6) == [4, 5, 6], "no more than there are"
    assert iterate_steps(3, 0, 1) == iterate_steps(3, 4, 6) == iterate_steps(None, 0, 100) == []


def test_a_mean_is_that_of_all_iterates_and_counters_are_the_last_ones() -> None:
    model = seeded(noisy_net)
    binding = ModelBinding(model, SGD(model))
    state, draw = binding.initial(), torch.Generator().manual_seed(0)
    run = RunState(Phase.SEARCH, [Mixture("alone", {"tgt": 1.0})], [state], state.clone())
    rows, means = [], []
    for count in range(1, 6):
        for row in state.rows.values():
            row += torch.randn(row.shape, generator=draw)
        state.buffers = {"body.1.running_mean": torch.randn(8, generator=draw)}
        state.buffers["body.1.num_batches_tracked"] = torch.tensor(count)
        state.step = count
        rows.append(state.rows["float32"].double())
        means.append(state.buffers["body.1.running_mean"].double())
        add_iterates(run, binding)
        mean = run.averages["alone"]
        assert (mean.count, mean.weights.step) == (count, count)
        torch.testing.assert_close(
            mean.weights.rows["float32"].double(), torch.stack(rows).mean(0), rtol=1e-5, atol=1e-6
        )
    averaged = mean.weights.buffers["body.1.running_mean"].double()
    torch.testing.assert_close(averaged, torch.stack(means).mean(0), rtol=1e-5, atol=1e-6)
    assert mean.weights.buffers["body.1.num_batches_tracked"] == 5


def test_what_enters_is_never_worse_than_the_branch_and_records_say_which_it_is() -> None:
    plain, run = (
        fit(fm.ForkMerge("per_auxiliary", interval=6, average_iterates=n), net=noisy_net, optimizer=WILD, steps=6)
        for n in (None, 3)
    )
    first, second = plain.searched[0].branches, run.searched[0].branches
    assert all(branch.averaged is None for branch in first.values())
    assert 3 in {branch.averaged for branch in second.values()} <= {None, 3}
    for name, branch in second.items():
        assert branch.score > first[name].score if branch.averaged else branch.score == first[name].score
        assert branch.entered_step == 6


@pytest.mark.parametrize(
    "options", [{}, {"bn": "recompute", "bn_batches": 2}, {"checkpoint": "best_so_far", "validate_every": 6}]
)
def test_the_bits_depend_neither_on_processes_nor_on_being_resumed(tmp_path: Path, options: dict[str, object]) -> None:
    algorithm = fm.ForkMerge("per_auxiliary", interval=6, average_iterates=3, refit=True, floor=True, **options)
    whole = fit(algorithm, net=noisy_net, optimizer=WILD)
    assert any(branch.averaged for r in whole.searched for branch in r.branches.values())
    if not options:
        assert_same_run(fit(algorithm, net=noisy_net, optimizer=WILD, workers=2), whole)
    for step in (7, 31):
        again = {"net": noisy_net, "optimizer": WILD, "folder": tmp_path / str(step)}
        with pytest.raises(Stopped):
            fit(algorithm, **again, on_event=stop_at(step), checkpoint_every=5)  # between two iterates
        assert_same_run(fit(algorithm, **again, resume=True), whole)


def test_a_refit_enters_the_means_that_the_search_took() -> None:
    algorithm = fm.ForkMerge("per_auxiliary", interval=6, average_iterates=3, refit=True)
    run = fit(algorithm, net=noisy_net, steps=12)
    searched, refitted = run.rounds[:2], run.rounds[2:]
    for one, other in zip(searched, refitted, strict=True):
        for name, branch in other.branches.items():
            assert branch.averaged == one.branches[name].averaged


def test_fixed_coefficients_take_means_too_and_search_before_a_refit() -> None:
    fixed = fm.ForkMerge("mixed", interval=6, search="fixed", average_iterates=3, refit=True)
    run = fit(fixed, net=noisy_net)
    assert run.searched
    assert any(branch.averaged for r in run.searched for branch in r.branches.values())
    without = fit(fm.ForkMerge("mixed", interval=6, search="fixed", refit=True), net=noisy_net)
    assert_other_bits(run, without)


def test_a_diverged_branch_has_no_mean_that_could_enter() -> None:
    for bn in ("average", "recompute"):
        algorithm = fm.ForkMerge("per_auxiliary", interval=4, average_iterates=2, bn=bn, bn_batches=2)
        run = fit(algorithm, diverging_problem(6, "odd"), noisy_net, optimizer=ADAM)
        assert run.rounds[1].branches["odd"].fault is not None
        assert run.rounds[1].branches["odd"].averaged is None


def test_rounds_too_short_for_two_iterates_have_none() -> None:
    plain, short = (
        fit(fm.ForkMerge("mixed", interval=2, average_iterates=n), shared_problem(), steps=4) for n in (None, 4)
    )
    assert_same_bits(plain, short)
