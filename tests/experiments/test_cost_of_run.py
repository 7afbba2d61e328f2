"""What a dry run foretells is what the run then does."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import forkmerge as fm
from forkmerge.algorithms.equal_compute import Averaged, BestOf
from forkmerge.algorithms.events import ProbeScored, RoundFinished, RunStarted, StepProgress
from forkmerge.cli.print_run import show_cost
from forkmerge.experiments import cost_of_run
from forkmerge.experiments.cost_of_run import RunCost, estimate_run
from problems import (
    ADAM,
    TASKS,
    evaluation,
    examples,
    minus_loss,
    noisy_net,
    plain_net,
    seeded,
    shared_losses,
    shared_problem,
)

STEPS = 22


def recipe(algorithm: fm.Algorithm, **changes: Any) -> fm.Recipe:
    given = {"problem": shared_problem(), "model": plain_net, "optimizer": ADAM, "steps": STEPS, **changes}
    return fm.Recipe(**given, algorithm=algorithm)


class Examiner:
    """A metric that counts the examples it was shown."""

    __name__ = "examiner"

    def __init__(self) -> None:
        self.examples = 0

    def __call__(self, predictions: Tensor, targets: Tensor) -> float:
        self.examples += len(targets)
        return minus_loss(predictions, targets)


GRID = {"search": fm.Grid(4), "interval": 5}
EXACT = {
    "grid": fm.ForkMerge(**{"mixtures": "mixed", **GRID}),
    "three branches": fm.ForkMerge("per_auxiliary", **GRID),
    "binary": fm.ForkMerge("mixed", search="binary", interval=8),
    "uniform": fm.ForkMerge("per_auxiliary", search="fixed"),
    "floor": fm.ForkMerge("mixed", search="fixed", interval=5, floor=True),
    "fixed, refit": fm.ForkMerge("per_auxiliary", search=fm.Fixed((0.5, 0.0, 0.5)), interval=5, refit=True),
    "uniform, refit": fm.ForkMerge("per_auxiliary", search="fixed", refit=True),
    "uniform, refit of the best": fm.ForkMerge("per_auxiliary", search="fixed", interval=22, refit=True, select="best"),
    "snapshots": fm.ForkMerge(**{"mixtures": "mixed", **GRID}, checkpoint="best_so_far", validate_every=2),
    "sub-sample": fm.ForkMerge("mixed", search=fm.Fixed((0.5, 0.5)), search_examples=6),
    "ranking runs": fm.ForkMerge(fm.NestedTopK(probe_steps=3), search="fixed", interval=5, floor=True),
    "rates": fm.ForkMerge("rates", search=fm.Grid(2), interval=8),
    "tail": fm.ForkMerge("mixed", search="fixed", interval=5, tail=0.4),
    "tail, floor": fm.ForkMerge("mixed", search="fixed", interval=5, tail=0.4, floor=True),
    "tail without a fall, floor": fm.ForkMerge(
        "mixed", search="fixed", interval=5, tail=0.4, tail_anneal="none", floor=True
    ),
    "joint beside": fm.ForkMerge(fm.PerAuxiliary(joint="sampled"), search="fixed", interval=5, tail=0.4, refit=True),
    "in turns": fm.ForkMerge("per_auxiliary", search="fixed", interval=5, per_round=1),
    "winners stay": fm.ForkMerge(
        fm.PerAuxiliary(joint=True), search=fm.Fixed((0.3, 0.7)), interval=5, per_round=1, turns="win_stay_all"
    ),
    "in turns, floor": fm.ForkMerge(fm.PerAuxiliary(joint=True), search="fixed", interval=5, per_round=1, floor=True),
    "means of iterates": fm.ForkMerge("mixed", search="fixed", interval=5, average_iterates=3),
    "previous merge": fm.ForkMerge("mixed", search=fm.Grid(2), interval=8, previous_merges=1),
    "target alone": fm.SingleTask(),
    "target alone, best": fm.SingleTask(select="best", interval=4),
    "all labels": fm.SingleTask(refit=True),
    "all labels, jointly": fm.Joint(refit=True, select="best"),
}


def count_work(made: fm.Recipe, examiner: Examiner) -> tuple[int, float]:
    """Run a recipe; return its steps over all branches and its validation passes."""
    at: dict[tuple[str, str], int] = {}
    steps = 0

    def observe(event: Any) -> None:
        nonlocal steps
        if isinstance(event, ProbeScored):
            steps += event.step
        if isinstance(event, StepProgress):
            key = event.phase, event.branch
            steps += event.step - max(at.get(key, 0), at.get((event.phase, ""), 0))
            at[key] = event.step
        if isinstance(event, RoundFinished):  # where the floor parts from a branch, and others return
            at[event.phase, ""] = event.step
        if isinstance(event, RunStarted):
            at.clear()

    examiner.examples = 0
    made.fit(on_event=observe)
    return steps, examiner.examples / 24


@pytest.mark.parametrize("name", EXACT)
def test_steps_and_validation_passes_are_those_of_the_run(name: str) -> None:
    examiner = Examiner()
    made = recipe(EXACT[name], problem=shared_problem(metrics=examiner))
    plan = estimate_run(made)
    steps, passes = count_work(made, examiner)
    assert plan.branch_steps["total"] == steps
    assert plan.passes["total"] == pytest.approx(passes)


@pytest.mark.parametrize(
    "algorithm",
    [
        fm.ForkMerge("per_auxiliary", interval=5),
        fm.ForkMerge(**{"mixtures": "mixed", **GRID}, refit=True),
        fm.ForkMerge("per_auxiliary", interval=5, prune_to=2, prune_after=2, refit=True),
        fm.ForkMerge("per_auxiliary", interval=5, search_examples=6),
        fm.ForkMerge.authors_scripts(interval=5, refit=True),
        fm.ForkMerge("per_auxiliary", interval=3, per_round=1, refit=True),
        fm.ForkMerge("per_auxiliary", interval=3, previous_merges=2, average_iterates=2, refit=True),
        fm.ForkMerge("mixed", interval=5, layer_groups="modules", refit=True),
    ],
    ids=["greedy", "refit", "pruned", "sub-sample", "scripts", "in turns", "free candidates", "layer groups"],
)
def test_where_a_search_may_stop_early_the_counts_are_bounds(algorithm: fm.ForkMerge) -> None:
    examiner = Examiner()
    made = recipe(algorithm, problem=shared_problem(metrics=examiner))
    plan = estimate_run(made)
    steps, passes = count_work(made, examiner)
    assert steps <= plan.branch_steps["total"]
    assert 0.5 * plan.passes["total"] < passes <= plan.passes["total"] + 1e-9


@pytest.mark.parametrize("rule", ["one_standard_error", "bagged"])
def test_a_rule_takes_full_passes_of_all_candidates_of_uniform_coefficients_and_of_a_mean(rule: str) -> None:
    made = recipe(fm.ForkMerge("per_auxiliary", interval=5, rule=rule), problem=shared_problem(metrics=fm.nll))
    most = estimate_run(made).passes["per merge"]
    for finished in made.fit().searched:
        passes = len(finished.branches) + finished.examples["evaluated"] / 24
        assert 0.7 * most < passes <= most


def test_several_metrics_cost_no_pass_more_although_they_need_a_reference() -> None:
    for checkpoint in ("last", "best_in_interval"):
        examiner = Examiner()
        algorithm = fm.ForkMerge(**{"mixtures": "mixed", **GRID}, checkpoint=checkpoint)
        made = recipe(algorithm, problem=shared_problem(metrics={"a": examiner, "b": minus_loss}))
        plan = estimate_run(made)
        assert plan.passes["total"] == pytest.approx(count_work(made, examiner)[1])


def test_pruning_and_the_shortened_last_round_are_counted() -> None:
    plan = estimate_run(recipe(fm.ForkMerge("per_auxiliary", interval=5, prune_to=2, refit=True)))
    assert plan.merges == 5
    assert plan.branch_steps == {"search": 3 * 5 + 2 * 17, "refit": 3 * 5 + 2 * 17, "total": 98}
    assert plan.passes["per merge"] == 3 + 2 * 5  # the branches, and the greedy search's combinations


def test_the_time_is_that_of_the_second_step_and_of_one_batch_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    now, batches = 0.0, 0

    def losses(model: nn.Module, batch: Any, tasks: Any, context: fm.Context) -> dict[str, Tensor]:
        nonlocal now
        now += 0.5 * len(tasks) + (5.0 if context.step == 0 else 0.0)  # the first step of a branch takes longer
        return shared_losses(model, batch, tasks, context)

    def predict(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        nonlocal now, batches
        batches += 1
        now += 5.0 if batches == 4 else 0.25  # so does the first batch after the pass that checks the metrics
        return model(batch[0], "tgt"), batch[1][:, 0]

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    data = TensorDataset(*examples(24, 1))
    validation = fm.Evaluation(data, minus_loss, predict, batch_size=8)
    made = recipe(
        fm.ForkMerge(**{"mixtures": "mixed", **GRID}),
        problem=fm.Problem("tgt", [fm.Stream(data, losses, TASKS, 8)], validation),
        steps=100,
    )
    plan = estimate_run(made)
    assert [branch.seconds_per_step for branch in plan.branches] == [0.5, 1.5]
    assert plan.seconds["training"] == 100 * (0.5 + 1.5)
    assert plan.seconds["validation"] == plan.passes["total"] * 3 * 0.25
    assert estimate_run(made, workers=2).seconds["training"] == 100 * 1.5


def test_a_dry_run_leaves_model_random_state_and_disk_as_they_were(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    model = seeded(noisy_net)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    estimate_run(recipe(fm.ForkMerge("per_auxiliary", bn="recompute", keep_branches=True), model=model))
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert list(tmp_path.iterdir()) == []


def test_the_sealed_test_split_is_not_read() -> None:
    def refuse(*_: Any) -> float:
        raise AssertionError("the test split was read")

    problem = shared_problem(test=evaluation(metrics=refuse))
    estimate_run(recipe(fm.ForkMerge("mixed"), problem=problem))


def test_what_fit_refuses_a_dry_run_refuses() -> None:
    with pytest.raises(fm.ProblemError, match="steps must be a positive integer, got 0"):
        estimate_run(recipe(fm.ForkMerge("mixed"), steps=0))
    with pytest.raises(fm.ProblemError, match="must be a finite number ≥ 0"):
        estimate_run(recipe(fm.ForkMerge({"bad": {"tgt": -1.0}})))
    with pytest.raises(fm.ProblemError, match="search_by: "):
        estimate_run(recipe(fm.ForkMerge("mixed", search_by="nl")))
    with pytest.raises(fm.ProblemError, match="precision must be"):
        estimate_run(recipe(fm.ForkMerge("mixed"), options={"precision": "int8"}))


def printed(plan: RunCost) -> str:
    text = io.StringIO()
    show_cost(Console(width=200, file=text), plan)
    return text.getvalue()


def test_the_plan_is_printed_with_everything_in_it() -> None:
    made = recipe(fm.ForkMerge({"[alone]": {"tgt": 1.0}, "both": {"tgt": 1.0, "aux": 0.25}}, refit=True))
    made = replace(made, problem=replace(made.problem, weights="sampling"))
    text = printed(estimate_run(made))
    for part in ("[alone]", "tgt 1, aux 0.25", "share of steps", "search 44 + refit 44", "up to 6 validation passes"):
        assert part in text
    for name in ("memory", "disk", "time"):
        assert any(line.startswith(name) for line in text.splitlines())


@pytest.mark.parametrize(
    "algorithm",
    [
        fm.PostTrain(),
        fm.WeightGrid(),
        BestOf(fm.PostTrain(refit=True), 3),
        BestOf(fm.SingleTask(select="best", refit=True), 2),
        BestOf(fm.ForkMerge("per_auxiliary", interval=5), 2),
        Averaged(fm.PostTrain(), 3),
        Averaged(fm.JointThenAlone(), 3),
        Averaged(fm.JointThenAlone(select="best", refit=True), 2),
    ],
    ids=repr,
)
def test_an_algorithm_made_of_several_runs_is_planned_as_a_whole(algorithm: fm.Algorithm) -> None:
    examiner = Examiner()
    made = recipe(algorithm, problem=shared_problem(metrics=examiner), steps=10)
    plan = estimate_run(made)
    one = estimate_run(recipe(fm.Joint(), steps=10))
    steps, _ = count_work(made, examiner)
    assert plan.branch_steps["total"] == steps
    if isinstance(algorithm, fm.PostTrain | fm.WeightGrid):
        assert plan.disk["total"] >= one.disk["total"] * steps / 10


def test_a_dry_run_says_factors_on_the_learning_rate_and_the_tail() -> None:
    text = io.StringIO()
    cost = estimate_run(recipe(fm.ForkMerge("rates", interval=5, tail=0.4)))
    show_cost(Console(file=text, width=200), cost)
    assert "tgt 1, aux 1, odd 1, learning rate × 3" in text.getvalue()
    assert "; the last 2 of every round on 'tgt' alone" in text.getvalue()
    assert [branch.lr_scale for branch in cost.branches] == [1.0, 1.0, 3.0, 3.0]


def test_a_tail_costs_what_the_target_alone_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(execution: Any, mixture: fm.Mixture, state: Any, steps: int) -> Any:
        return real(execution, mixture, state, 1)[0].__class__(
            mixture.name, dict(mixture.task_weights), float(len(mixture.task_weights)), mixture.lr_scale
        ), state

    real = cost_of_run._time_steps
    monkeypatch.setattr(cost_of_run, "_time_steps", timed)
    whole, half = (
        estimate_run(recipe(fm.ForkMerge({"joint": dict.fromkeys(TASKS, 1.0)}, interval=22, tail=tail)))
        for tail in (None, 0.5)
    )
    assert whole.seconds["training"] == 22 * 3.0
    assert half.seconds["training"] == 11 * 3.0 + 11 * 1.0
