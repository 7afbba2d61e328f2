"""Whole runs: what enters a merge, what comes out of it, and what the record says."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import forkmerge as fm
from forkmerge.algorithms.run_record import Run
from forkmerge.engine.merging.find_merge import find_merge
from forkmerge.engine.merging.synchronise import share_optimizer
from forkmerge.engine.storage.run_folder import RunFolder
from forkmerge.engine.training.state import State
from problems import (
    ADAM,
    SGD,
    TASKS,
    Counted,
    Point,
    ScoredMerge,
    bits,
    counting_steps,
    diverge_from,
    domains_problem,
    evaluation,
    examples,
    facts,
    fit,
    minus_loss,
    noisy_net,
    plain_net,
    predict_target,
    quadratic_problem,
    same_bits,
    seeded,
    shared_losses,
    shared_problem,
)

Vector = tuple[float, float]


@dataclass(frozen=True)
class Script(fm.Search):
    """Answers with prepared coefficients, by the number of branches, and scores nothing."""

    answers: tuple[tuple[float, ...], ...]
    guarded: ClassVar[bool] = False

    def search(self, score: Any, branches: int) -> tuple[float, ...]:
        return next(answer for answer in self.answers if len(answer) == branches)

    def evaluations(self, branches: int) -> int:
        return 0


class Replay(fm.Search):
    """Answers with the coefficients of an earlier run, round by round."""

    guarded: ClassVar[bool] = False

    def __init__(self, run: Run) -> None:
        self.rounds = iter([tuple(r.coefficients[name] for name in r.branches) for r in run.searched])

    def search(self, score: Any, branches: int) -> tuple[float, ...]:
        return next(self.rounds)

    def evaluations(self, branches: int) -> int:
        return 0


def quadratic_run(algorithm: fm.Algorithm, centres: dict[str, Vector], goal: Vector, *, lr: float, steps: int) -> Run:
    return algorithm.fit(
        quadratic_problem(centres, goal),
        model=Point,
        optimizer=fm.OptimizerOf("SGD", lr=lr),
        steps=steps,
        threads=1,
    )


def descend(centres: Sequence[Vector], lr: float, steps: int) -> torch.Tensor:
    """θ after gradient descent from 0 on Σ ½‖θ − c‖², in closed form."""
    middle = torch.tensor(centres, dtype=torch.float64).mean(0)
    return middle * (1 - (1 - lr * len(centres)) ** steps)


class TestQuadratics:
    """L_k = ½‖θ − c_k‖²: everything is known in closed form."""

    CENTRES: ClassVar[dict[str, Vector]] = {"tgt": (1.0, 0.0), "aux": (0.0, 1.0)}

    @pytest.mark.parametrize("goal", [(0.1, 0.0), (0.2, 0.06), (0.0, 0.5), (0.3, 0.11), (-1.0, 0.3), (0.5, -1.0)])
    @pytest.mark.parametrize("resolution", [5, 20])
    @pytest.mark.parametrize("steps", [1, 7])
    def test_the_coefficient_found_is_the_grid_point_nearest_to_the_best(
        self, goal: Vector, resolution: int, steps: int
    ) -> None:
        lr, centres = 0.1, list(self.CENTRES.values())
        alone, joint = descend(centres[:1], lr, steps), descend(centres, lr, steps)
        line = joint - alone
        best = min(max((torch.tensor(goal) - alone).dot(line).item() / line.dot(line).item(), 0.0), 1.0)
        algorithm = fm.ForkMerge(interval=steps, search=fm.Grid(resolution))
        run = quadratic_run(algorithm, self.CENTRES, goal, lr=lr, steps=steps)
        nearest = round(best * resolution) / resolution
        assert run.coefficients == [{"alone": pytest.approx(1 - nearest), "joint": nearest}]
        torch.testing.assert_close(run.model.theta.detach(), alone + nearest * line, rtol=0, atol=1e-12)

    def test_with_one_step_rounds_the_coefficient_is_the_best_task_weight(self) -> None:
        # One step with weights (1, λ) lands on η(c_tgt + λ c_aux) = (0.1, 0.1 λ); the goal asks for λ = 0.6.
        run = quadratic_run(fm.ForkMerge(interval=1), self.CENTRES, (0.1, 0.06), lr=0.1, steps=1)
        assert run.relevance == {"tgt": 1.0, "aux": pytest.approx(0.6)}

    def test_a_scale_lets_a_best_weight_above_one_be_found_and_reported(self) -> None:
        goal = (0.1, 0.24)  # λ* = 2.4
        clipped = quadratic_run(fm.ForkMerge(interval=1), self.CENTRES, goal, lr=0.1, steps=1)
        assert clipped.relevance["aux"] == 1.0
        scaled = quadratic_run(fm.ForkMerge(interval=1, auxiliary_scale=3.0), self.CENTRES, goal, lr=0.1, steps=1)
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
        found = tuple(round(10 * value) for value in run.coefficients[0].values())
        assert costs[found] == pytest.approx(min(costs.values()), abs=1e-9)

    def test_a_harmful_auxiliary_gets_nothing_and_a_helpful_one_something(self) -> None:
        centres: dict[str, Vector] = {"tgt": (1.0, 0.0), "helpful": (1.0, 0.4), "harmful": (-3.0, -3.0)}
        run = quadratic_run(fm.ForkMerge("per_auxiliary", interval=5), centres, (1.0, 0.2), lr=0.1, steps=20)
        assert run.relevance["harmful"] == 0
        assert run.relevance["helpful"] > 0.2


class TestCheckpointPolicies:
    # θ runs 0, .5, .75, .875, … towards 1 while validation wants .5: step 1 is the best there will ever be.
    def entered(self, policy: Any) -> tuple[list[int], Run]:
        branches = {"alone": {"tgt": 1.0}}
        algorithm = fm.ForkMerge(branches, interval=3, checkpoint=policy, validate_every=1)
        run = quadratic_run(algorithm, {"tgt": (1.0, 0.0)}, (0.5, 0.0), lr=0.5, steps=9)
        return [r.branches["alone"].entered_step for r in run.rounds], run

    def test_last_takes_the_weights_at_the_end_of_the_round(self) -> None:
        steps, run = self.entered("last")
        assert steps == [3, 6, 9]
        assert run.model.theta[0].item() == 1 - 0.5**9

    def test_best_in_interval_takes_the_best_since_the_fork(self) -> None:
        steps, run = self.entered("best_in_interval")
        assert steps == [1, 4, 7]
        assert run.model.theta[0].item() == 1 - 0.5**3

    def test_best_so_far_takes_the_best_since_the_start_even_from_before_a_merge(self) -> None:
        steps, run = self.entered("best_so_far")
        assert steps == [1, 1, 1]
        assert run.model.theta[0].item() == 0.5

    def test_scores_are_those_of_what_entered(self) -> None:
        mixtures = {"alone": {"tgt": 1.0}, "joint": {"tgt": 1.0, "odd": 1.0}}
        algorithm = fm.ForkMerge(mixtures, interval=6, checkpoint="best_in_interval", validate_every=2)
        (only,) = fit(algorithm, net=noisy_net, steps=6).rounds
        for name, weights in mixtures.items():
            followed = fit(fm.Joint(weights, interval=2), net=noisy_net, steps=6)
            scores = {r.end: r.score for r in followed.rounds}
            branch = only.branches[name]
            assert branch.entered_step == max(scores, key=scores.__getitem__)
            assert branch.score == max(scores.values())

    def test_validation_happens_five_times_per_interval_unless_said_otherwise(self) -> None:
        settings = fm.ForkMerge(interval=20)
        assert settings.validate_every_of(100) == 4
        assert fm.ForkMerge(interval=20, validate_every=7).validate_every_of(100) == 7


def mean_of(run: Run) -> torch.Tensor:
    return run.model.body[1].running_mean


class TestBatchNormPolicies:
    def test_average_combines_statistics_like_parameters(self) -> None:
        merged = fit(fm.ForkMerge(interval=4, search=fm.Fixed((0.3, 0.7))), net=noisy_net, steps=4)
        alone, joint = (fit(fm.Joint(w), net=noisy_net, steps=4) for w in ({"tgt": 1.0}, dict.fromkeys(TASKS, 1.0)))
        torch.testing.assert_close(mean_of(merged), 0.3 * mean_of(alone) + 0.7 * mean_of(joint))

    def test_recompute_takes_them_from_the_targets_training_data(self) -> None:
        inputs, labels = examples(16, 1)
        stream = fm.Stream(TensorDataset(inputs, labels), shared_losses, TASKS, batch_size=16)
        problem = fm.Problem("tgt", {"all": stream}, evaluation())
        algorithm = fm.ForkMerge(interval=4, search=fm.Fixed((0.3, 0.7)), bn="recompute", bn_batches=3)
        run = fit(algorithm, problem, noisy_net, steps=4)
        norm = run.model.body[1]
        before = run.model.body[0](inputs).detach()  # every batch is the whole data set
        torch.testing.assert_close(norm.running_mean, before.mean(0))
        torch.testing.assert_close(norm.running_var, before.var(0))
        assert norm.num_batches_tracked == 4
        assert norm.momentum == 0.1

    def test_recompute_leaves_a_single_branch_as_it_is(self) -> None:
        one, other = (
            fit(fm.ForkMerge(interval=4, search=fm.Fixed((0.0, 1.0)), bn=bn), net=noisy_net)
            for bn in ("average", "recompute")
        )
        assert same_bits(one, other)

    def test_recompute_without_batchnorm_changes_nothing(self) -> None:
        one, other = (fit(fm.ForkMerge(interval=4, search="fixed", bn=bn)) for bn in ("average", "recompute"))
        assert same_bits(one, other)

    @pytest.mark.parametrize("bn", ["average", "recompute"])
    def test_candidates_are_scored_exactly_as_they_are_installed(self, bn: Any) -> None:
        problem = shared_problem()
        algorithm = fm.ForkMerge("per_auxiliary", interval=6, bn=bn)
        run = fit(algorithm, problem, noisy_net, steps=18)
        assert any(0 < share < 1 for c in run.coefficients for share in c.values())
        installed = fm.measure(run.model, problem.target_validation)
        assert installed == {"minus_loss": run.rounds[-1].score} == run.metrics
        for finished in run.rounds:
            chosen = [c.score for c in finished.candidates if c.coefficients == finished.coefficients]
            assert chosen == [finished.score]


class TestOptimizerPolicies:
    COPIES: ClassVar[dict[str, dict[str, float]]] = {"one": {"tgt": 1.0}, "two": {"tgt": 1.0}}

    @pytest.mark.parametrize("optimizer", [SGD, ADAM])
    @pytest.mark.parametrize("policy", ["keep", "average"])
    def test_copies_go_on_as_one_run_would(self, policy: Any, optimizer: Any) -> None:
        algorithm = fm.ForkMerge(self.COPIES, interval=4, search=fm.Fixed((0.5, 0.5)), optimizer_state=policy)
        assert same_bits(fit(algorithm, optimizer=optimizer), fit(fm.SingleTask(), optimizer=optimizer))

    def test_reset_starts_every_round_without_momentum(self) -> None:
        heavy = fm.OptimizerOf("SGD", lr=0.1, momentum=1.0)
        branches = {"alone": {"tgt": 1.0}}
        problem = quadratic_problem({"tgt": (1.0, 0.0)}, (1.0, 0.0))
        for policy, expected in (("reset", 1 - self.coast(2) ** 2), ("keep", 1 - self.coast(4))):
            run = fm.ForkMerge(branches, interval=2, optimizer_state=policy).fit(
                problem, model=Point, optimizer=heavy, steps=4
            )
            assert run.model.theta[0].item() == pytest.approx(expected, abs=1e-12)

    @staticmethod
    def coast(steps: int) -> float:
        """Distance left after heavy-ball steps with momentum 1 and rate 0.1 from rest, at distance 1."""
        left, velocity = 1.0, 0.0
        for _ in range(steps):
            velocity += -left
            left += 0.1 * velocity
        return left

    def state(self, value: float, step: float, slots: bool = True) -> State:
        state = State(3, {"r": torch.zeros(4)}, groups=[{"lr": value}], scheduler={"last_epoch": 3})
        if slots:
            state.optimizer_rows = {"m/r": torch.full((4,), value)}
            state.optimizer_slots = {"m/r": [0]}
            state.optimizer_loose = {0: {"step": torch.tensor(step)}}
        return state

    def test_average_combines_tensors_with_the_coefficients_and_takes_counters_from_the_heaviest(self) -> None:
        states = [self.state(1.0, 10.0), self.state(3.0, 20.0)]
        share_optimizer(states, (0.25, 0.75), "average")
        for state, rate in zip(states, (1.0, 3.0), strict=True):
            assert state.optimizer_rows["m/r"].tolist() == [2.5] * 4
            assert state.optimizer_loose[0]["step"] == 20
            assert state.groups == [{"lr": rate}]
        assert states[0].optimizer_rows["m/r"] is not states[1].optimizer_rows["m/r"]

    def test_average_counts_a_missing_tensor_as_zeros(self) -> None:
        states = [self.state(2.0, 10.0), self.state(0.0, 0.0, slots=False)]
        share_optimizer(states, (0.5, 0.5), "average")
        assert states[1].optimizer_rows["m/r"].tolist() == [1.0] * 4
        assert states[1].optimizer_slots == {"m/r": [0]}

    def test_average_ignores_a_branch_of_coefficient_zero(self) -> None:
        states = [self.state(2.0, 10.0), self.state(math.nan, 20.0)]
        share_optimizer(states, (1.0, 0.0), "average")
        assert states[1].optimizer_rows["m/r"].tolist() == [2.0] * 4


class TestSelection:
    # The merges overshoot: validation is best after round 1.
    def run(self, **options: Any) -> Run:
        algorithm = fm.ForkMerge({"alone": {"tgt": 1.0}, "copy": {"tgt": 1.0}}, interval=1, **options)
        return quadratic_run(algorithm, {"tgt": (1.0, 0.0)}, (0.5, 0.0), lr=0.5, steps=3)

    def test_last_returns_the_last_merge(self) -> None:
        run = self.run()
        assert (run.final, run.score) == ("last merge", run.rounds[-1].score)
        assert run.model.theta[0].item() == 0.875

    def test_best_returns_the_best_merge_on_validation(self) -> None:
        run = self.run(select="best")
        assert run.final == "best merge"
        assert run.score == max(r.score for r in run.rounds) == 0.0
        assert run.metrics == {"point_score": 0.0}
        assert run.model.theta[0].item() == 0.5

    def test_a_refit_of_the_best_merge_ends_where_it_was_found(self) -> None:
        run = self.run(select="best", refit=True)
        assert [(r.phase, r.end) for r in run.rounds] == [("search", 1), ("search", 2), ("search", 3), ("refit", 1)]
        assert run.final == "refit"


class TestPruning:
    BRANCHES: ClassVar[dict[str, dict[str, float]]] = {
        "small": {"tgt": 1.0, "aux": 0.5},
        "big": {"tgt": 1.0, "aux": 1.0},
        "none": {"tgt": 1.0, "odd": 1.0},
        "alone": {"tgt": 1.0},
    }

    def kept(self, answers: Any, **options: Any) -> Run:
        return fit(fm.ForkMerge(self.BRANCHES, interval=3, search=Script(answers), **options), steps=9)

    def test_the_largest_stay_and_the_target_only_branch_counts_even_at_zero(self) -> None:
        run = self.kept(((0.3, 0.6, 0.1, 0.0), (0.5, 0.5)), prune_to=2)
        assert [r.kept for r in run.rounds] == [["big", "alone"]] * 3
        assert [list(r.branches) for r in run.rounds[1:]] == [["big", "alone"]] * 2

    def test_branches_of_coefficient_zero_are_dropped_even_if_there_is_room(self) -> None:
        run = self.kept(((0.0, 1.0, 0.0, 0.0), (0.5, 0.5)), prune_to=3)
        assert run.rounds[0].kept == ["big", "alone"]

    def test_the_target_only_branch_may_be_the_only_one_left(self) -> None:
        run = self.kept(((0.0, 1.0, 0.0, 0.0), (1.0,)), prune_to=1)
        assert run.rounds[0].kept == ["alone"]
        assert run.rounds[-1].coefficients == {"alone": 1.0}

    def test_it_happens_after_the_round_asked_for(self) -> None:
        run = self.kept(((0.3, 0.6, 0.1, 0.0), (0.5, 0.5)), prune_to=2, prune_after=2)
        assert [len(r.branches) for r in run.rounds] == [4, 4, 2]

    def test_a_pruned_branch_costs_nothing_any_more(self, monkeypatch: Any) -> None:
        with counting_steps(monkeypatch) as trained:
            self.kept(((0.3, 0.6, 0.1, 0.0), (0.5, 0.5)), prune_to=2)
        assert trained == ["small", "big", "none", "alone", "big", "alone", "big", "alone"]

    def test_the_default_search_follows_the_number_of_branches(self) -> None:
        settings = fm.ForkMerge()
        assert isinstance(settings.search_for(2), fm.Grid)
        assert isinstance(settings.search_for(3), fm.Greedy)


class TestSubSample:
    def test_the_search_reads_the_sub_sample_and_the_winner_is_confirmed_on_all(self) -> None:
        seen: list[int] = []

        def predict(model: nn.Module, batch: Any) -> Any:
            seen.append(len(batch[0]))
            return predict_target(model, batch)

        validation = fm.Evaluation(TensorDataset(*examples(24, 2)), minus_loss, predict)
        problem = shared_problem(validation=validation)
        run = fit(fm.ForkMerge(interval=6, search_examples=7), problem, steps=6)
        # All examples: before training, two branches, a merged winner. Seven: two branches, four mixtures.
        merged = 0 < run.coefficients[0]["joint"] < 1
        assert seen.count(7) == 6
        assert seen.count(24) == 3 + merged
        assert run.score == fm.measure(run.model, validation)["minus_loss"]

    def test_every_round_draws_its_own(self) -> None:
        data = Counted(24, 2)
        drawn: list[list[int]] = []

        def note(predictions: Any, targets: Any) -> float:
            drawn.append(targets.tolist())
            return minus_loss(predictions, targets)

        validation = fm.Evaluation(data, note, predict_target)
        fit(fm.ForkMerge(interval=4, search_examples=7), shared_problem(validation=validation), steps=8)
        assert len({tuple(labels) for labels in drawn if len(labels) == 7}) == 2

    def find(self, sub: dict[Any, float], full: dict[Any, float]) -> Any:
        problem = ScoredMerge(["a", "b"], full.__getitem__, sample=sub.__getitem__)
        return find_merge(problem, fm.Grid(2))

    def test_the_best_branch_is_installed_if_the_winner_loses_to_it_on_all_data(self) -> None:
        sub = {(1.0, 0.0): 0.0, (0.0, 1.0): 0.0, (0.5, 0.5): 1.0}
        full = {(1.0, 0.0): 5.0, (0.0, 1.0): 6.0, (0.5, 0.5): 4.0}
        found = self.find(sub, full)
        assert (found.coefficients, found.score) == ({"a": 0.0, "b": 1.0}, 6.0)

    def test_the_winner_stays_if_it_is_as_good_on_all_data(self) -> None:
        sub = {(1.0, 0.0): 0.0, (0.0, 1.0): 0.0, (0.5, 0.5): 1.0}
        full = {(1.0, 0.0): 5.0, (0.0, 1.0): 6.0, (0.5, 0.5): 6.0}
        found = self.find(sub, full)
        assert (found.coefficients, found.score) == ({"a": 0.5, "b": 0.5}, 6.0)
        assert found.branch_scores == {"a": 5.0, "b": 6.0}
        assert found.candidates == [
            ({"a": 1.0, "b": 0.0}, 0.0),
            ({"a": 0.0, "b": 1.0}, 0.0),
            ({"a": 0.5, "b": 0.5}, 1.0),
        ]


def union_problem() -> fm.Problem:
    return shared_problem().with_validation_labels()


class TestRefit:
    def test_it_trains_on_training_and_validation_data_of_the_target(self) -> None:
        union = union_problem().stream_map["all"].dataset
        inputs = torch.cat([examples(16, 1)[0], examples(24, 2)[0]])
        assert torch.equal(union.tensors[0], inputs)

    def test_other_streams_keep_their_data(self) -> None:
        union = domains_problem().with_validation_labels()
        assert [len(stream.dataset) for stream in union.stream_map.values()] == [20 + 24, 30, 40]

    @pytest.mark.parametrize("bn", ["average", "recompute"])
    def test_it_is_the_found_run_replayed_on_the_union_without_search(self, bn: Any) -> None:
        options: dict[str, Any] = {"interval": 4, "bn": bn, "prune_to": 2}
        run = fit(fm.ForkMerge("per_auxiliary", refit=True, **options), net=noisy_net, steps=10)
        assert run.final == "refit"
        replayed = [r for r in run.rounds if r.phase == "refit"]
        assert [r.end for r in replayed] == [4, 8, 10]
        for searched, refitted in zip(run.searched, replayed, strict=True):
            assert refitted.coefficients == searched.coefficients
            assert refitted.kept == searched.kept
            assert list(refitted.branches) == list(searched.branches)
            assert refitted.candidates == []
            assert refitted.score is None
        twin = fit(fm.ForkMerge("per_auxiliary", search=Replay(run), **options), union_problem(), noisy_net, steps=10)
        assert same_bits(run, twin)

    def test_no_validation_pass_happens_in_it(self) -> None:
        calls: list[int] = []

        def counted(predictions: Any, targets: Any) -> float:
            calls.append(1)
            return minus_loss(predictions, targets)

        found = []
        for refit in (False, True):
            calls.clear()
            fit(fm.ForkMerge(interval=4, refit=refit), shared_problem(metrics={"m": counted}))
            found.append(len(calls))
        assert found[0] == found[1]

    def test_the_score_reported_is_that_of_the_search(self) -> None:
        searched, refitted = (fit(fm.ForkMerge(interval=4, refit=refit)) for refit in (False, True))
        assert (refitted.score, refitted.metrics) == (searched.score, searched.metrics)
        assert not same_bits(searched, refitted)

    @pytest.mark.parametrize("policy", ["best_in_interval", "best_so_far"])
    def test_checkpoint_steps_are_replayed(self, policy: Any) -> None:
        algorithm = fm.ForkMerge("per_auxiliary", interval=6, refit=True, checkpoint=policy, validate_every=2)
        run = fit(algorithm, net=noisy_net, steps=15, optimizer=fm.OptimizerOf("SGD", lr=1.0, momentum=0.9))
        steps = {
            phase: [[b.entered_step for b in r.branches.values()] for r in run.rounds if r.phase == phase]
            for phase in ("search", "refit")
        }
        assert steps["search"] == steps["refit"]
        assert any(step < r.end for r, entered in zip(run.searched, steps["search"], strict=True) for step in entered)

    def test_as_training_is_the_form_that_is_joined(self) -> None:
        inputs, labels = examples(24, 2)
        validation = fm.Evaluation(
            TensorDataset(inputs, labels[:, 0]), minus_loss, as_training=TensorDataset(inputs, labels)
        )
        run = fit(fm.ForkMerge(interval=4, refit=True), shared_problem(validation=validation))
        assert same_bits(run, fit(fm.ForkMerge(interval=4, refit=True)))

    @staticmethod
    def poisoned() -> fm.Problem:
        """Validation examples that spoil training, but not the first of them, which is tried beforehand."""
        inputs, labels = examples(24, 2)
        bad = inputs.clone()
        bad[1:] = torch.inf
        validation = fm.Evaluation(
            TensorDataset(inputs, labels), minus_loss, predict_target, as_training=TensorDataset(bad, labels)
        )
        return shared_problem(validation=validation)

    def test_a_refit_that_diverges_returns_the_searched_model_with_a_note(self) -> None:
        run = fit(fm.ForkMerge(interval=4, refit=True), self.poisoned())
        searched = fit(fm.ForkMerge(interval=4))
        assert same_bits(run, searched)
        assert run.final == "last merge"
        assert run.score == searched.score
        assert any("refit given up at step 4: branch" in note for note in run.notes)

    def test_a_refit_without_search_that_diverges_at_once_returns_the_start(self) -> None:
        net = seeded(plain_net)
        run = fit(fm.SingleTask(refit=True), self.poisoned(), net)
        assert same_bits(run, seeded(plain_net))
        assert run.final == "last good state"
        assert any("refit given up" in note for note in run.notes)
        assert repr(run)

    @pytest.mark.parametrize("algorithm", [fm.SingleTask(refit=True), fm.Joint({"tgt": 1.0}, refit=True)])
    def test_one_branch_needs_no_search_and_trains_once_on_the_union(self, algorithm: Any) -> None:
        run = fit(algorithm)
        assert {r.phase for r in run.rounds} == {"refit"}
        assert same_bits(run, fit(fm.SingleTask(), union_problem()))
        assert run.score is None
        assert run.metrics == {}

    def test_one_branch_with_its_best_step_is_refitted_to_that_step(self) -> None:
        # θ runs .5, .75, … towards 1 and validation wants .75; the refit pulls towards both, with mean .875.
        algorithm = fm.SingleTask(interval=1, select="best", refit=True)
        run = quadratic_run(algorithm, {"tgt": (1.0, 0.0)}, (0.75, 0.0), lr=0.5, steps=4)
        assert [(r.phase, r.end) for r in run.rounds if r.phase == "refit"] == [("refit", 1), ("refit", 2)]
        assert run.score == 0.0

    def test_a_replayed_round_in_which_every_branch_was_faulty_keeps_its_state(self) -> None:
        problem = _diverging_problem(4, "tgt")
        run = fit(fm.ForkMerge(interval=4, refit=True), problem)
        assert run.rounds[1].coefficients == {}
        assert run.final == "refit"
        assert all(tensor.isfinite().all() for tensor in bits(run).values())


class TestFloor:
    HARMFUL: ClassVar[fm.Fixed] = fm.Fixed((0.0, 1.0))

    def test_the_unmerged_target_only_run_is_returned_if_it_validates_better(self) -> None:
        centres: dict[str, Vector] = {"tgt": (1.0, 0.0), "aux": (-9.0, 5.0)}
        algorithm = fm.ForkMerge(interval=2, search=self.HARMFUL, floor=True)
        run = quadratic_run(algorithm, centres, (1.0, 0.0), lr=0.1, steps=6)
        alone = quadratic_run(fm.SingleTask(), centres, (1.0, 0.0), lr=0.1, steps=6)
        assert run.final == "floor"
        assert same_bits(run, alone)
        assert run.score == alone.score == run.rounds[-1].floor_score
        assert any("unmerged target-only run validated better" in note for note in run.notes)

    def test_the_merge_is_returned_if_it_is_as_good(self) -> None:
        run = fit(fm.ForkMerge({"alone": {"tgt": 1.0}, "copy": {"tgt": 1.0}}, interval=4, floor=True))
        assert run.final == "last merge"
        assert run.rounds[-1].floor_score == run.score

    def test_the_floor_is_single_task_training_with_the_same_seeds(self) -> None:
        run = fit(fm.ForkMerge(interval=4, floor=True), net=noisy_net)
        alone = fit(fm.SingleTask(interval=4), net=noisy_net)
        assert [r.floor_score for r in run.rounds] == [r.score for r in alone.rounds]

    def test_the_floor_does_not_change_the_merge(self) -> None:
        with_floor, without = (fit(fm.ForkMerge(interval=4, floor=floor), net=noisy_net) for floor in (True, False))
        assert with_floor.coefficients == without.coefficients
        assert [r.score for r in with_floor.rounds] == [r.score for r in without.rounds]

    def test_a_refit_of_the_floor_trains_the_target_alone_on_the_union(self) -> None:
        branches = {"alone": {"tgt": 1.0}, "joint": {"odd": 1.0}}
        run = fit(fm.ForkMerge(branches, interval=4, search=self.HARMFUL, floor=True, refit=True))
        assert run.final == "refit"
        assert [list(r.branches) for r in run.rounds if r.phase == "refit"] == [["alone"]] * 3
        assert same_bits(run, fit(fm.SingleTask(), union_problem()))

    def test_a_branch_may_be_called_floor(self) -> None:
        branches = {"alone": {"tgt": 1.0}, "floor": {"tgt": 1.0, "aux": 1.0}}
        run = fit(fm.ForkMerge(branches, interval=4))
        named = fit(fm.ForkMerge({"alone": {"tgt": 1.0}, "joint": {"tgt": 1.0, "aux": 1.0}}, interval=4))
        assert same_bits(run, named)
        for finished in run.rounds:
            assert finished.floor_score is None
            assert set(finished.branches["floor"].losses) == {"tgt", "aux"}


class TestNestedTopK:
    def test_branches_are_built_from_short_ranking_runs_that_leave_no_trace(self) -> None:
        events: list[Any] = []
        run = fit(fm.ForkMerge(fm.NestedTopK(probe_steps=3), interval=4), net=noisy_net, observe=events.append)
        assert set(run.probes) == {"aux", "odd"}
        probes = {task: fit(fm.Joint({"tgt": 1.0, task: 1.0}), net=noisy_net, steps=3).score for task in run.probes}
        assert run.probes == probes
        ranked = sorted(probes, key=lambda task: -probes[task])
        nested = {"alone": [], "top 1": ranked[:1], "top 2": ranked}
        given = {name: {"tgt": 1.0, **dict.fromkeys(tasks, 1.0)} for name, tasks in nested.items()}
        assert [list(r.branches) for r in run.rounds] == [list(nested)] * 3
        assert same_bits(run, fit(fm.ForkMerge(given, interval=4), net=noisy_net))
        assert [e["branch"] for e in events if e["event"] == "probe"] == ["aux", "odd"]


def _diverging_problem(step: int, task: str) -> fm.Problem:
    stream = fm.Stream(TensorDataset(*examples(16, 1)), diverge_from(step, task), TASKS, 8)
    return fm.Problem("tgt", {"all": stream}, evaluation(metrics=fm.accuracy))


class TestDivergence:
    @pytest.mark.parametrize("policy", ["keep", "average", "reset"])
    @pytest.mark.parametrize("optimizer", [SGD, ADAM])
    def test_a_branch_that_diverges_gets_coefficient_zero_is_named_and_does_not_leak(
        self, optimizer: Any, policy: Any
    ) -> None:
        stream = fm.Stream(TensorDataset(*examples(16, 1)), _nan_once, TASKS, 8)
        problem = fm.Problem("tgt", {"all": stream}, evaluation())
        algorithm = fm.ForkMerge("per_auxiliary", interval=3, optimizer_state=policy, search=fm.Fixed())
        run = fit(algorithm, problem, noisy_net, optimizer=optimizer, steps=9)
        first, second, third = run.rounds
        assert second.coefficients == {"alone": 0.5, "aux": 0.5, "odd": 0.0}
        assert second.branches["odd"].fault == "its training loss of tgt, odd is not finite"
        assert second.branches["odd"].score is None
        assert "round 2: branch 'odd' got coefficient 0: its training loss of tgt, odd is not finite" in run.notes
        assert first.branches["odd"].fault is None
        # It comes back with the merged weights and a fresh optimizer.
        assert third.branches["odd"].fault is None
        assert third.coefficients["odd"] == pytest.approx(1 / 3)
        assert all(tensor.isfinite().all() for tensor in bits(run).values())

    def test_a_snapshot_from_before_the_divergence_is_not_replaced_by_weights_that_are_not_finite(self) -> None:
        def always_better(predictions: Any, targets: Any) -> float:
            calls.append(1)
            return float(len(calls))

        calls: list[int] = []
        stream = fm.Stream(TensorDataset(*examples(16, 1)), diverge_from(2, "odd"), TASKS, 8)
        problem = fm.Problem("tgt", {"all": stream}, evaluation(metrics=always_better))
        algorithm = fm.ForkMerge("per_auxiliary", interval=4, checkpoint="best_in_interval", validate_every=2)
        (only,) = fit(algorithm, problem, steps=4).rounds
        assert [branch.entered_step for branch in only.branches.values()] == [4, 4, 2]
        assert only.branches["odd"].fault is None

    def test_parameters_that_are_not_finite_are_found_also_behind_a_finite_score(self) -> None:
        # accuracy of NaN logits is a number: class 0 is right now and then.
        algorithm = fm.ForkMerge("per_auxiliary", interval=4, checkpoint="best_in_interval", validate_every=4)
        run = fit(algorithm, _diverging_problem(2, "odd"), steps=4)
        assert run.rounds[0].branches["odd"].fault == "it has parameters that are not finite"
        assert run.rounds[0].coefficients["odd"] == 0

    def test_if_every_branch_diverges_the_last_good_state_is_kept_bit_for_bit(self) -> None:
        run = fit(fm.ForkMerge(interval=4), _diverging_problem(4, "tgt"), noisy_net)
        good = fit(fm.ForkMerge(interval=4), _diverging_problem(99, "tgt"), noisy_net, steps=4)
        assert same_bits(run, good)
        assert [r.coefficients for r in run.rounds[1:]] == [{}, {}]
        assert [r.score for r in run.rounds[1:]] == [None, None]
        assert "step 8: every branch was faulty; the last good state was kept" in run.notes
        assert run.metrics == good.metrics

    def test_if_every_branch_diverges_at_once_the_start_is_kept(self) -> None:
        run = fit(fm.ForkMerge(interval=4), _diverging_problem(1, "tgt"), seeded(noisy_net))
        assert same_bits(run, seeded(noisy_net))
        assert "all faulty" in repr(run)

    def test_the_best_merge_is_returned_though_later_rounds_are_lost(self) -> None:
        run = fit(fm.ForkMerge(interval=4, select="best"), _diverging_problem(4, "tgt"), noisy_net)
        assert run.final == "best merge"
        assert run.score == run.rounds[0].score

    def test_the_floor_is_returned_if_nothing_else_is_left(self) -> None:
        branches = {"a": {"tgt": 1.0, "odd": 1.0}, "b": {"odd": 1.0}}
        run = fit(fm.ForkMerge(branches, interval=4, floor=True), _diverging_problem(4, "odd"))
        assert run.final == "floor"
        assert same_bits(run, fit(fm.SingleTask()))

    def test_a_floor_that_diverges_is_not_returned(self) -> None:
        branches = {"a": {"aux": 1.0}, "b": {"aux": 0.5}}
        run = fit(fm.ForkMerge(branches, interval=4, floor=True), _diverging_problem(4, "tgt"))
        assert run.final == "last merge"
        assert all(tensor.isfinite().all() for tensor in bits(run).values())


def _nan_once(model: nn.Module, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
    losses = shared_losses(model, batch, tasks, context)
    return {t: loss * torch.nan if t == "odd" and context.step == 4 else loss for t, loss in losses.items()}


class TestRounds:
    def test_the_last_round_is_shortened_to_end_at_the_last_step(self) -> None:
        run = fit(fm.ForkMerge(interval=5), steps=12)
        assert [(r.index, r.start, r.end) for r in run.rounds] == [(1, 0, 5), (2, 5, 10), (3, 10, 12)]

    def test_five_rounds_unless_an_interval_is_given(self) -> None:
        assert [r.end for r in fit(fm.ForkMerge(), steps=20).rounds] == [4, 8, 12, 16, 20]

    def test_an_interval_longer_than_the_run_is_one_round(self) -> None:
        assert [r.end for r in fit(fm.ForkMerge(interval=99), steps=5).rounds] == [5]

    def test_another_seed_is_another_run_and_the_same_seed_the_same(self) -> None:
        runs = [fit(net=noisy_net, seed=seed) for seed in (1, 1, 2)]
        assert same_bits(runs[0], runs[1])
        assert facts(runs[0]) == facts(runs[1])
        assert not same_bits(runs[0], runs[2])

    def test_presets_are_the_paper_and_the_authors_scripts(self) -> None:
        assert fm.ForkMerge.paper() == fm.ForkMerge()
        scripts = fm.ForkMerge.authors_scripts(interval=7)
        assert (scripts.checkpoint, scripts.select, scripts.interval) == ("best_so_far", "best", 7)
        assert fm.ForkMerge.authors_scripts(select="last").select == "last"

    def test_unpaired_branches_are_trained_on_batches_of_their_own(self) -> None:
        copies = {"one": {"tgt": 1.0}, "two": {"tgt": 1.0}}
        paired, unpaired = (fit(fm.ForkMerge(copies, interval=6), paired=p, steps=6) for p in (True, False))
        scores = [{b.score for b in run.rounds[0].branches.values()} for run in (paired, unpaired)]
        assert [len(found) for found in scores] == [1, 2]

    def test_a_multi_domain_problem_runs_end_to_end(self) -> None:
        run = fit(fm.ForkMerge("per_auxiliary", interval=4), domains_problem(), noisy_net)
        assert set(run.relevance) == set(TASKS)

    def test_a_sampling_problem_runs_end_to_end(self) -> None:
        run = fit(fm.ForkMerge(interval=6), shared_problem(weights="sampling"))
        assert run.rounds[0].branches["joint"].task_weights == {"tgt": 1.0, "aux": 0.5, "odd": 0.5}

    def test_the_scale_is_that_of_the_auxiliary_weights(self) -> None:
        scaled = fit(fm.ForkMerge(interval=4, auxiliary_scale=2.5, search=fm.Fixed((0.4, 0.6))))
        weights = {"alone": {"tgt": 1.0}, "joint": {"tgt": 1.0, "aux": 2.5, "odd": 2.5}}
        assert same_bits(scaled, fit(fm.ForkMerge(weights, interval=4, search=fm.Fixed((0.4, 0.6)))))
        assert scaled.relevance == pytest.approx({"tgt": 1.0, "aux": 1.5, "odd": 1.5})

    def test_no_candidate_is_evaluated_twice(self) -> None:
        for search in (fm.Grid(4), fm.Greedy()):
            for finished in fit(fm.ForkMerge("per_auxiliary", interval=4, search=search), net=noisy_net).rounds:
                tried = [tuple(round(v, 9) for v in c.coefficients.values()) for c in finished.candidates]
                assert len(set(tried)) == len(tried)

    def test_uniform_merging_shares_the_part_of_a_lost_branch(self) -> None:
        problem = ScoredMerge(["a", "b", "c"], lambda coefficients: 1.0, faults={"a": "lost"})
        assert find_merge(problem, fm.Fixed((0.5, 0.25, 0.25))).coefficients == {"a": 0.0, "b": 0.5, "c": 0.5}


@pytest.fixture(scope="module")
def run() -> Run:
    return fit(fm.ForkMerge("per_auxiliary", interval=4, floor=True, refit=True), net=noisy_net)


class TestRun:
    def test_it_survives_json(self, run: Run) -> None:
        text = json.dumps(run.to_json(), allow_nan=False)
        back = Run.from_json(json.loads(text))
        assert back == run
        assert back.model is None
        assert repr(back) == repr(run)

    def test_so_does_one_with_numbers_that_are_not_finite(self) -> None:
        lost = fit(fm.ForkMerge(interval=4), _diverging_problem(1, "tgt"))
        back = Run.from_json(json.loads(json.dumps(lost.to_json(), allow_nan=False)))
        assert facts(back) == facts(lost)
        assert back.rounds[0].branches["alone"].losses["tgt"] is None

    def test_it_reports_timings_and_environment(self, run: Run) -> None:
        assert set(run.seconds) == {"train", "rank", "search", "merge"}
        assert all(value >= 0 for r in run.rounds for value in r.seconds.values())
        assert run.environment["torch"] == torch.__version__
        assert run.environment["threads"] == 1
        assert run.settings["training"]["steps"] == 12

    def test_its_repr_is_readable(self, run: Run) -> None:
        lines = repr(run).splitlines()
        assert lines[0] == "ForkMerge on 'tgt': 12 steps, seed 0, model: refit"
        assert len([line for line in lines if line.strip().startswith("round")]) == 3
        assert any(line.strip().startswith("relevance") for line in lines)

    def test_relevance_is_the_mean_over_steps(self) -> None:
        run = fit(fm.ForkMerge(interval=8, search=fm.Fixed((0.5, 0.5))), steps=12)
        first, second = run.rounds
        first.relevance.update(aux=0.0)
        assert (first.end - first.start, second.end - second.start) == (8, 4)
        assert run.relevance["aux"] == pytest.approx((0.0 * 8 + 0.5 * 4) / 12)

    def test_html_escapes_names(self) -> None:
        name = "<script>alert(1)<script>"
        inputs, labels = examples(16, 1)

        def losses(model: nn.Module, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
            renamed = {name: "aux", "tgt": "tgt"}
            found = shared_losses(model, batch, [renamed[task] for task in tasks], context)
            return {task: found[renamed[task]] for task in tasks}

        stream = fm.Stream(TensorDataset(inputs, labels), losses, ("tgt", name), 8)
        problem = fm.Problem("tgt", [stream], evaluation(metrics={"<b>": minus_loss}))
        page = fit(fm.ForkMerge("per_auxiliary", interval=4), problem)._repr_html_()
        assert "<script>" not in page
        assert "&lt;script&gt;" in page
        assert "<b>&" not in page
        assert page.count("<tr>") == 4

    def test_what_is_observed_is_what_is_recorded(self, tmp_path: Path) -> None:
        events: list[Any] = []
        fit(fm.ForkMerge(interval=6), folder=tmp_path / "run", observe=events.append)
        folder = RunFolder.open(tmp_path / "run", lock=False)
        recorded = list(folder.records())
        rounds = ["segment", "segment", "round"]
        assert [e["event"] for e in recorded] == ["start", *rounds, *rounds, "end"]
        seen = [json.loads(json.dumps(e)) for e in events if e["event"] in ("start", "segment", "round", "probe")]
        assert seen == [e for e in recorded if e["event"] != "end"]

    def test_kept_branches_are_the_weights_that_entered_each_merge(self, tmp_path: Path) -> None:
        algorithm = fm.ForkMerge(interval=6, keep_branches=True, search=fm.Fixed((0.25, 0.75)))
        run = fit(algorithm, folder=tmp_path / "run", steps=6)
        kept = RunFolder.open(tmp_path / "run", lock=False).load_branches(1)
        assert set(kept) == {"alone", "joint"}
        rows = {name: State.from_value(value).rows["float32"] for name, value in kept.items()}
        binding = fm.Training(SGD).binding(seeded(plain_net))
        for place in binding.layout.places:
            expected = 0.25 * place.view(rows["alone"]) + 0.75 * place.view(rows["joint"])
            torch.testing.assert_close(bits(run)[place.name], expected)

    def test_the_returned_model_is_independent_of_the_run(self) -> None:
        net = seeded(noisy_net)
        run = fit(net=net)
        assert run.model is net
        assert all(parameter.grad is None for parameter in net.parameters())
        starts = [p.untyped_storage().data_ptr() for p in net.parameters()]
        assert len(set(starts)) == len(starts)


class TestConfidence:
    """The target-only branch stays unless the merge is surely better."""

    def run(self, confidence: float | None, **options: Any) -> Run:
        algorithm = fm.ForkMerge(**{"interval": 4, "search": fm.Fixed(), **options}, confidence=confidence)
        return fit(algorithm, shared_problem(metrics=fm.nll))

    def test_what_the_search_found_counts_if_it_wins_often_enough(self) -> None:
        plain, sure = self.run(None), self.run(0.001)
        assert all(r.coefficients["alone"] == 0.5 for r in plain.rounds)
        assert same_bits(plain, sure)
        assert [r.certainty for r in plain.rounds] == [None] * 3

    def test_otherwise_it_is_training_on_the_target_alone(self) -> None:
        run = self.run(0.999999)
        assert [r.coefficients["alone"] for r in run.rounds] == [1.0] * 3
        assert [r.score for r in run.rounds] == [r.branches["alone"].score for r in run.rounds]
        assert all(r.metrics == r.branches["alone"].metrics for r in run.rounds)
        assert same_bits(run, fit(fm.SingleTask(interval=4), shared_problem(metrics=fm.nll)))
        assert all(r.certainty is None or r.certainty < 0.999999 for r in run.rounds)
        assert any(r.certainty is not None for r in run.rounds)

    def test_a_metric_that_does_not_add_up_is_refused_before_training(self, monkeypatch: Any) -> None:
        with counting_steps(monkeypatch) as trained, pytest.raises(fm.ProblemError, match="metrics that add up"):
            fit(fm.ForkMerge(interval=4, confidence=0.9))
        assert trained == []
