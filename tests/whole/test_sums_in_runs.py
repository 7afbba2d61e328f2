"""Merges whose coefficients sum to more than 1, over the common fork point of the branches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forkmerge as fm
from _asserts import assert_same_bits, assert_same_run
from forkmerge.algorithms.fit import build_model
from forkmerge.analysis import replayed_search
from forkmerge.engine.merging.blend import Blender, blend_weights
from forkmerge.engine.storage.run_folder import RunFolder
from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.engine.training.state import State
from problems import SGD, Stopped, fit, noisy_net, seeded, shared_problem, stop_at


class Shouting(fm.Sums):
    """Answers with sums whatever they score, so that runs have some."""

    def search(self, score: Any, branches: int) -> tuple[float, ...]:
        return (1.0, 0.5, 0.25)[:branches]


def states() -> tuple[ModelBinding, list[State], State]:
    model = seeded(noisy_net)
    binding = ModelBinding(model, SGD(model))
    origin, draw = binding.initial(), torch.Generator().manual_seed(0)
    branches = [origin.clone() for _ in range(3)]
    for state in branches:
        for row in state.rows.values():
            row += 0.1 * torch.randn(row.shape, generator=draw)
        buffers = dict(model.named_buffers())
        state.buffers = {
            name: b.clone() + (torch.rand(b.shape, generator=draw) if b.is_floating_point() else 0)
            for name, b in buffers.items()
        }
    return binding, branches, origin


class TestBlending:
    def test_parameters_are_the_fork_point_and_the_updates_and_buffers_a_mean(self) -> None:
        """The twin: the formula in float64, one tensor at a time."""
        binding, branches, origin = states()
        for sums in ((1.0, 0.5, 0.25), (1.5, 0.0, 0.0), (0.4, 0.8, 0.8), (0.3, 0.2, 0.0)):
            out = blend_weights(binding, branches, sums, origin.clone(), origin)
            for name, row in out.rows.items():
                start = origin.rows[name].double()
                expected = start + sum(c * (b.rows[name].double() - start) for c, b in zip(sums, branches, strict=True))
                torch.testing.assert_close(row.double(), expected, rtol=1e-5, atol=1e-6)
            for name, buffer in out.buffers.items():
                if buffer.is_floating_point():
                    shares = [c / sum(sums) for c in sums]
                    mean = sum(s * b.buffers[name].double() for s, b in zip(shares, branches, strict=True))
                    torch.testing.assert_close(buffer.double(), mean, rtol=1e-5, atol=1e-6)

    def test_single_branches_and_sums_of_1_have_the_bits_they_always_had(self) -> None:
        binding, branches, origin = states()
        blend = Blender(binding, branches, origin.clone(), origin=origin)
        assert blend((0.0, 1.0, 0.0)) is branches[1]
        for convex in ((0.5, 0.3, 0.2), (1 / 3, 1 / 3, 1 / 3), (0.0, 0.6, 0.4)):
            plain = blend_weights(binding, branches, convex, origin.clone())
            mine = blend(convex)
            assert all(torch.equal(row, mine.rows[name]) for name, row in plain.rows.items())
        assert blend((1.0, 0.5, 0.0)) is not branches[0]

    def test_a_branch_of_coefficient_0_is_never_read_and_what_nobody_moved_stays_to_the_bit(self) -> None:
        binding, branches, origin = states()
        for name, row in branches[2].rows.items():
            row.fill_(torch.nan)
            for state in branches[:2]:
                state.rows[name][:4] = origin.rows[name][:4]
        out = blend_weights(binding, branches, (1.5, 0.5, 0.0), origin.clone(), origin)
        for name, row in out.rows.items():
            assert torch.equal(row[:4], origin.rows[name][:4])
            assert row.isfinite().all()

    def test_without_a_fork_point_it_is_refused(self) -> None:
        binding, branches, origin = states()
        with pytest.raises(fm.ProblemError, match=r"sum to 1\.5 need the common fork point"):
            blend_weights(binding, branches, (1.0, 0.5, 0.0), origin.clone())


def the_same(predictions: Any, targets: Any) -> float:
    return 1.0


class TestRuns:
    def test_a_refit_repeats_sums_and_optimizer_moments_are_averaged(self) -> None:
        problem = shared_problem(metrics=the_same)
        for policy in ("keep", "average", "reset"):
            algorithm = fm.ForkMerge(
                "per_auxiliary", interval=4, search=Shouting(), refit=True, optimizer_state=policy, floor=True
            )
            run = fit(algorithm, problem, noisy_net)
            assert run.final == "refit"
            assert all(list(finished.coefficients.values()) == [1.0, 0.5, 0.25] for finished in run.searched)
            replayed = [finished.coefficients for finished in run.rounds if finished.phase == "refit"]
            assert replayed == [finished.coefficients for finished in run.searched]
            assert run.searched[0].relevance == pytest.approx({"tgt": 1.0, "aux": 0.5 / 1.75, "odd": 0.25 / 1.75})

    def test_every_round_adds_the_updates_of_its_branches_to_what_they_forked_from(self, tmp_path: Path) -> None:
        """The twin: from the first weights and the branches of two rounds, as they were kept."""
        algorithm = fm.ForkMerge("per_auxiliary", interval=4, search=Shouting(), keep_branches=True)
        run = fit(algorithm, shared_problem(metrics=the_same), noisy_net, steps=8, folder=tmp_path / "run")
        first = build_model(noisy_net, 0)
        expected = {name: row.double() for name, row in ModelBinding(first, SGD(first)).initial().rows.items()}
        for index in (1, 2):
            kept = RunFolder.open(tmp_path / "run", lock=False).load_branches(index)
            for name, start in expected.items():
                rows = [State.from_value(value).rows[name].double() for value in kept.values()]
                updates = (c * (row - start) for c, row in zip((1.0, 0.5, 0.25), rows, strict=True))
                expected[name] = start + sum(updates)
        for name, row in ModelBinding(run.model, SGD(run.model)).initial().rows.items():
            torch.testing.assert_close(row.double(), expected[name], rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("metric", [fm.nll, None])
    def test_they_resume_to_the_same_bits(self, metric: Any, tmp_path: Path) -> None:
        problem = shared_problem(metrics=metric) if metric else shared_problem()
        algorithm = fm.ForkMerge("per_auxiliary", interval=4, search="sums", refit=True)
        whole = fit(algorithm, problem, noisy_net)
        for count in (8, 15):
            folder = tmp_path / str(count)
            with pytest.raises(Stopped):
                fit(algorithm, problem, noisy_net, folder=folder, on_event=stop_at(count))
            assert_same_run(fit(algorithm, problem, noisy_net, folder=folder, resume=True), whole)
        for finished in whole.searched:
            assert finished.score >= max(branch.score for branch in finished.branches.values())

    def test_processes_that_measure_candidates_have_the_same_bits(self) -> None:
        algorithm = fm.ForkMerge("per_auxiliary", interval=6, search=fm.Sums(totals=(1.5,)))
        here, there = (fit(algorithm, net=noisy_net, workers=workers) for workers in (1, 2))
        assert_same_run(here, there)

    def test_a_total_of_1_alone_is_greedy_search(self) -> None:
        sums, greedy = (
            fit(fm.ForkMerge("per_auxiliary", interval=4, search=s)) for s in (fm.Sums(totals=()), "greedy")
        )
        assert_same_bits(sums, greedy)

    def test_a_kept_round_cannot_be_asked_again(self, tmp_path: Path) -> None:
        algorithm = fm.ForkMerge("mixed", interval=4, search="sums", keep_branches=True)
        recipe = fm.Recipe(shared_problem(metrics=fm.nll), noisy_net, SGD, 4, algorithm, {"threads": 1})
        recipe.fit(folder=tmp_path / "run")
        with pytest.raises(fm.StoreError, match="cannot be asked again"):
            replayed_search.open_round(tmp_path / "run", recipe, 1)


class Point(nn.Module):
    """Two numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.zeros(2))


def test_in_an_own_loop_two_updates_are_taken_in_full_where_both_are_needed() -> None:
    forked = fm.fork(
        model := Point(), torch.optim.SGD(model.parameters(), lr=1.0), {"x": {"x": 1.0}, "y": {"y": 1.0}}, search="sums"
    )
    for axis, branch in enumerate(forked):
        (-branch.model.at[axis]).backward()
        branch.optimizer.step()
    outcome = forked.merge(lambda m: -(m.at - torch.tensor([1.0, 1.0])).square().sum().item())
    assert outcome.coefficients == {"x": 1.0, "y": 1.0}
    assert outcome.score == 0
    assert outcome.relevance == {"x": 0.5, "y": 0.5}
    assert torch.equal(forked.merged_into(Point()).at, torch.ones(2))
