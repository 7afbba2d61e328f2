"""ForkMerge on problems whose best coefficients are known in closed form, and its presets."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar

import pytest
import torch

import forkmerge as fm
from _asserts import assert_same_bits
from forkmerge.algorithms.settings import Settings
from problems import ADAM, SGD, Vector, conv_net, fit, noisy_net, plain_loop, quadratic_run, shared_problem, tied_net

SEED = 3
WEIGHTS = {"tgt": 1.0, "aux": 0.7, "odd": 0.25}


def descend(centres: Sequence[Vector], lr: float, steps: int) -> torch.Tensor:
    """θ after gradient descent from 0 on Σ ½‖θ − c‖², in closed form."""
    middle = torch.tensor(centres, dtype=torch.float64).mean(0)
    return middle * (1 - (1 - lr * len(centres)) ** steps)


class TestQuadratics:
    """L_k = ½‖θ − c_k‖²: everything is known in closed form."""

    CENTRES: ClassVar[dict[str, Vector]] = {"tgt": (1.0, 0.0), "aux": (0.0, 1.0)}

    @pytest.mark.parametrize("goal", [(0.1, 0.0), (0.2, 0.06), (0.0, 0.5), (0.3, 0.11), (-1.0, 0.3), (0.5, -1.0)])
    def test_the_coefficient_found_is_the_grid_point_nearest_to_the_best(self, goal: Vector) -> None:
        lr, centres = 0.1, list(self.CENTRES.values())
        for resolution, steps in itertools.product((5, 20), (1, 7)):
            alone, joint = descend(centres[:1], lr, steps), descend(centres, lr, steps)
            line = joint - alone
            best = min(max((torch.tensor(goal) - alone).dot(line).item() / line.dot(line).item(), 0.0), 1.0)
            algorithm = fm.ForkMerge("mixed", interval=steps, search=fm.Grid(resolution))
            run = quadratic_run(algorithm, self.CENTRES, goal, lr=lr, steps=steps)
            nearest = round(best * resolution) / resolution
            assert run.coefficients == [{"alone": pytest.approx(1 - nearest), "joint": nearest}]
            torch.testing.assert_close(run.model.theta.detach(), alone + nearest * line, rtol=0, atol=1e-12)

    def test_with_one_step_rounds_the_coefficient_is_the_best_task_weight(self) -> None:
        # One step with weights (1, λ) lands on η(c_tgt + λ c_aux) = (0.1, 0.1 λ); the goal asks for λ = 0.6.
        run = quadratic_run(fm.ForkMerge("mixed", interval=1), self.CENTRES, (0.1, 0.06), lr=0.1, steps=1)
        assert run.relevance == {"tgt": 1.0, "aux": pytest.approx(0.6)}

    def test_a_scale_lets_a_best_weight_above_one_be_found_and_reported(self) -> None:
        goal = (0.1, 0.24)  # λ* = 2.4
        clipped = quadratic_run(fm.ForkMerge("mixed", interval=1), self.CENTRES, goal, lr=0.1, steps=1)
        assert clipped.relevance["aux"] == 1.0
        scaled = quadratic_run(
            fm.ForkMerge("mixed", interval=1, auxiliary_scale=3.0), self.CENTRES, goal, lr=0.1, steps=1
        )
        assert scaled.coefficients == [{"alone": pytest.approx(0.2), "joint": pytest.approx(0.8)}]
        assert scaled.relevance == {"tgt": 1.0, "aux": pytest.approx(2.4)}

    @pytest.mark.parametrize("goal", [(0.2, 0.3), (0.0, 0.4), (0.4, 0.1), (0.25, 0.25)])
    def test_a_simplex_grid_over_three_branches_finds_the_best_of_its_points(self, goal: Vector) -> None:
        centres: dict[str, Vector] = {**self.CENTRES, "odd": (1.0, 1.0)}
        algorithm = fm.ForkMerge("per_auxiliary", interval=3, search=fm.Grid(10))
        run = quadratic_run(algorithm, centres, goal, lr=0.1, steps=3)
        ends = [descend(c, 0.1, 3) for c in ([(1.0, 0.0)], [(1.0, 0.0), (0.0, 1.0)], [(1.0, 0.0), (1.0, 1.0)])]
        points = [(a, b, 10 - a - b) for a, b in itertools.product(range(11), repeat=2) if a + b <= 10]
        costs = {
            p: (sum(k / 10 * end for k, end in zip(p, ends, strict=True)) - torch.tensor(goal)).norm().item()
            for p in points
        }
        tenths = tuple(round(10 * value) for value in run.coefficients[0].values())
        assert costs[tenths] == pytest.approx(min(costs.values()), abs=1e-9)

    def test_a_harmful_auxiliary_gets_nothing_and_a_helpful_one_something(self) -> None:
        centres: dict[str, Vector] = {"tgt": (1.0, 0.0), "helpful": (1.0, 0.4), "harmful": (-3.0, -3.0)}
        run = quadratic_run(fm.ForkMerge("per_auxiliary", interval=5), centres, (1.0, 0.2), lr=0.1, steps=20)
        assert run.relevance["harmful"] == 0
        assert run.relevance["helpful"] > 0.2


class TestPresets:
    """Their runs' bits are recorded, too (`tests/whole/test_recorded_runs.py`)."""

    PRESETS: ClassVar[list[Any]] = [fm.ForkMerge.paper, fm.ForkMerge.authors_scripts]

    def test_the_paper_differs_from_the_defaults_in_what_pruning_keeps(self) -> None:
        assert fm.ForkMerge.paper() == fm.ForkMerge("mixed", prune_keeps="largest")

    def test_the_authors_scripts_differ_from_the_paper_in_these(self) -> None:
        scripts, paper = fm.ForkMerge.authors_scripts(), fm.ForkMerge.paper()
        changed = {item.name for item in fields(scripts) if getattr(scripts, item.name) != getattr(paper, item.name)}
        assert changed == {"checkpoint", "select", "search"}
        assert (scripts.checkpoint, scripts.select) == ("best_so_far", "best")

    def test_the_authors_scripts_search_greedily_also_with_two_branches(self) -> None:
        for branches in (2, 3):
            assert fm.ForkMerge.authors_scripts().search_for(branches) == fm.Greedy((0, 0.2, 0.4, 0.6, 0.8, 1))
        assert fm.ForkMerge.paper().search_for(2) == fm.Grid(5)
        assert fm.ForkMerge.paper().search_for(3) == fm.Greedy((0, 0.2, 0.4, 0.6, 0.8, 1))

    @pytest.mark.parametrize("preset", PRESETS)
    def test_options_change_them(self, preset: Any) -> None:
        changed = preset(interval=7, select="last", prune_keeps="target")
        assert (changed.interval, changed.select, changed.prune_keeps) == (7, "last", "target")

    @pytest.mark.parametrize("preset", PRESETS)
    def test_they_give_every_option_themselves_so_that_later_defaults_change_nothing(
        self, preset: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given: dict[str, Any] = {}
        monkeypatch.setattr(fm.ForkMerge, "__init__", lambda self, **options: given.update(options))
        preset()
        assert list(given) == [item.name for item in fields(fm.ForkMerge)]


@pytest.mark.parametrize("algorithm", [fm.SingleTask(), fm.Joint(), fm.JointThenAlone()])
def test_what_forkmerge_is_compared_with_gives_every_option_so_that_later_defaults_change_nothing(
    algorithm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(Settings, "__init__", lambda self, *positional, **options: given.update(options))
    algorithm.settings(shared_problem())
    assert set(given) == {item.name for item in fields(Settings)}


def test_the_scale_is_that_of_the_auxiliary_weights() -> None:
    scaled = fit(fm.ForkMerge("mixed", interval=4, auxiliary_scale=2.5, search=fm.Fixed((0.4, 0.6))))
    weights = {"alone": {"tgt": 1.0}, "joint": {"tgt": 1.0, "aux": 2.5, "odd": 2.5}}
    assert_same_bits(scaled, fit(fm.ForkMerge(weights, interval=4, search=fm.Fixed((0.4, 0.6)))))
    assert scaled.relevance == pytest.approx({"tgt": 1.0, "aux": 1.5, "odd": 1.5})


class TestOneBranch:
    @pytest.mark.parametrize("net", [noisy_net, conv_net, tied_net])
    @pytest.mark.parametrize("optimizer", [SGD, ADAM])
    def test_forkmerge_with_one_branch_is_plain_joint_training_bit_for_bit(self, net: Any, optimizer: Any) -> None:
        ours = fit(fm.ForkMerge({"joint": WEIGHTS}, interval=5), net=net, optimizer=optimizer, seed=SEED)
        assert_same_bits(ours, plain_loop(net, optimizer, WEIGHTS, 12, seed=SEED))

    def test_so_is_joint_with_clipping_and_a_schedule(self) -> None:
        schedule = fm.SchedulerOf("CosineAnnealingLR", T_max=12)
        ours = fit(fm.Joint(WEIGHTS), net=noisy_net, seed=SEED, clip_norm=0.5, scheduler=schedule)
        assert_same_bits(ours, plain_loop(noisy_net, SGD, WEIGHTS, 12, clip=0.5, scheduler=schedule, seed=SEED))

    def test_single_task_is_the_loop_over_the_target_alone(self) -> None:
        ours = fit(fm.SingleTask(), net=noisy_net, seed=SEED)
        assert_same_bits(ours, plain_loop(noisy_net, SGD, {"tgt": 1.0}, 12, seed=SEED))


def test_greedy_is_exhaustive_search_over_the_normalised_coefficients_of_the_worse_branch() -> None:
    run = fit(fm.ForkMerge("mixed", interval=6, search=fm.Greedy()), net=noisy_net, steps=6)
    (only,) = run.rounds
    names = sorted(only.branches, key=lambda name: -only.branches[name].score)
    exhaustive = []
    for alpha in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        worse = alpha / (1 + alpha)
        share = {names[0]: 1 - worse, names[1]: worse}
        fixed = fm.Fixed((share["alone"], share["joint"]))
        score = fit(fm.ForkMerge("mixed", interval=6, search=fixed), net=noisy_net, steps=6).score
        exhaustive.append((score, -worse))
    best, worse = max(exhaustive)
    assert run.score == pytest.approx(best, abs=1e-12)
    assert only.coefficients[names[1]] == pytest.approx(-worse)
