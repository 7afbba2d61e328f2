"""What ForkMerge does where nobody names its branches."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import forkmerge as fm
from forkmerge.algorithms.branches.default_form import FEW
from forkmerge.algorithms.branches.search_share import LEAST
from forkmerge.algorithms.equal_compute import BestOf
from forkmerge.algorithms.events import RoundFinished
from forkmerge.algorithms.resolved_config import open_run
from problems import Stopped, fit, plain_net, shared_problem
from run_folders import as_earlier_version

NAMES = ("mixtures", "per_round", "search_by", "rule")


def problem_of(metric: Any, *, examples: int = 40, classes: int = 3, shape: tuple[int, ...] = ()) -> fm.Problem:
    """Two auxiliaries beside a target of `classes` classes, with predictions of [n, *shape, classes]."""
    torch.manual_seed(0)
    inputs = torch.randn(examples, 6)
    labels = torch.randint(classes, (examples, *shape))

    def losses(model: Any, batch: Any, tasks: Any, context: Any) -> dict[str, torch.Tensor]:
        x, y = batch
        out = model(x)
        loss = nn.functional.cross_entropy(out.flatten(0, -2), y.flatten())
        return dict.fromkeys(tasks, loss)

    streams = [fm.Stream(TensorDataset(inputs, labels), losses, [name], batch_size=8) for name in "tab"]
    return fm.Problem("t", streams, fm.Evaluation(TensorDataset(inputs, labels), metric))


class Net(nn.Module):
    """Class scores of every label of an example."""

    def __init__(self, classes: int = 3, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.shape = (*shape, classes)
        self.head = nn.Linear(6, classes * (shape[0] if shape else 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x).reshape(len(x), *self.shape)


def chosen(run: fm.Run) -> tuple[Any, ...]:
    """The options that a record says were chosen."""
    options = run.settings["algorithm"]
    return (options["mixtures"]["kind"], *(options[name] for name in NAMES[1:]))


def stop(event: Any) -> None:
    """Ends a run after its first round."""
    if isinstance(event, RoundFinished):
        raise Stopped


def fitted(problem: fm.Problem, model: nn.Module, algorithm: fm.ForkMerge | None = None) -> fm.Run:
    made = algorithm or fm.ForkMerge(interval=2)
    return made.fit(problem, model=model, optimizer=fm.OptimizerOf("SGD", lr=0.1), steps=4, threads=1)


def test_accuracy_on_few_examples_is_searched_by_likelihood_against_its_noise():
    run = fitted(problem_of(fm.accuracy), Net())
    assert chosen(run) == ("PerAuxiliary", 1, "nll", "bagged")
    assert list(run.metrics) == ["accuracy"]
    assert all(len(each.branches) == 2 for each in run.rounds)


def test_of_many_examples_a_search_sees_as_many_as_cost_a_tenth_of_training():
    run = fitted(problem_of(fm.accuracy, examples=FEW + 1), Net())
    assert chosen(run) == ("PerAuxiliary", 1, "nll", "bagged")
    assert run.settings["algorithm"]["validation_examples"] == LEAST
    assert run.metrics["accuracy"] * (FEW + 1) == pytest.approx(round(run.metrics["accuracy"] * (FEW + 1)))


def test_where_a_sample_lacks_a_class_of_an_auc_all_examples_are_seen():
    problem = problem_of(fm.auc, examples=5000, classes=2)
    inputs = problem.target_validation.dataset.tensors[0]
    for positives, seen in ((5, None), (2500, LEAST)):
        rare = replace(
            problem.target_validation, dataset=TensorDataset(inputs, (torch.arange(5000) < positives).long())
        )
        run = fitted(replace(problem, validation={"t": rare}), Net(2))
        assert run.settings["algorithm"]["validation_examples"] == seen
        assert all(map(math.isfinite, (each.metrics["auc"] for each in run.rounds)))


def test_where_all_of_many_examples_are_looked_at_the_best_candidate_is_taken():
    every = fm.ForkMerge(interval=2, validation_examples=FEW + 1)
    assert chosen(fitted(problem_of(fm.accuracy, examples=FEW + 1), Net(), every)) == (
        "PerAuxiliary",
        1,
        "nll",
        "argmax",
    )


def test_the_first_round_trains_the_branch_of_all_auxiliaries():
    run = fitted(problem_of(fm.accuracy), Net())
    assert list(run.rounds[0].branches) == ["alone", "joint"]
    assert run.settings["algorithm"]["turns"] == "win_stay_all"


def test_a_metric_that_is_smooth_is_searched_by_itself():
    problem = shared_problem()
    evaluation = replace(problem.target_validation, metrics={"nll": fm.nll}, higher_is_better={})
    run = fit(fm.ForkMerge(interval=2), replace(problem, validation={problem.target: evaluation}), net=plain_net)
    assert chosen(run) == ("PerAuxiliary", 1, None, "bagged")


def test_a_metric_of_ones_own_keeps_its_search():
    def score(predictions: torch.Tensor, targets: torch.Tensor) -> float:
        return -nn.functional.cross_entropy(predictions, targets).item()

    assert chosen(fitted(problem_of(score), Net())) == ("PerAuxiliary", 1, None, "argmax")


def test_several_labels_per_example_are_searched_by_their_accuracy():
    run = fitted(problem_of(fm.accuracy, shape=(5,)), Net(shape=(5,)))
    assert chosen(run)[2] is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rule": "argmax"}, ("PerAuxiliary", 1, "nll", "argmax")),
        ({"search_by": "accuracy"}, ("PerAuxiliary", 1, "accuracy", "bagged")),
        ({"per_round": 2}, ("PerAuxiliary", 2, "nll", "bagged")),
        ({"prune_to": 2}, ("PerAuxiliary", None, "nll", "bagged")),
        ({"turns": "win_stay"}, ("PerAuxiliary", 1, "nll", "one_standard_error")),
        ({"turns": "rotation"}, ("PerAuxiliary", 1, "nll", "one_standard_error")),
        ({"search": fm.Fixed()}, ("PerAuxiliary", 1, "nll", "argmax")),
        ({"mixtures": "per_auxiliary"}, ("PerAuxiliary", None, None, "argmax")),
        ({"mixtures": "mixed"}, ("Mixed", None, None, "argmax")),
    ],
)
def test_what_is_named_stays(options, expected):
    assert chosen(fitted(problem_of(fm.accuracy), Net(), fm.ForkMerge(interval=2, **options))) == expected


def test_a_method_combines_all_tasks_of_the_joint_branch():
    run = fitted(problem_of(fm.accuracy), Net(), fm.ForkMerge(interval=2, method="GCS"))
    assert run.settings["algorithm"]["mixtures"]["joint"] is True


def test_confidence_keeps_the_branch_that_it_falls_back_on():
    run = fitted(problem_of(fm.accuracy), Net(), fm.ForkMerge(interval=1, confidence=0.9))
    chosen = run.settings["algorithm"]
    assert (chosen["turns"], chosen["rule"], chosen["auxiliary_scale"]) == ("win_stay", "bagged", 2.0)
    assert all("alone" in each.branches for each in run.rounds)
    with pytest.raises(fm.ProblemError, match="take turns='win_stay'"):
        fm.ForkMerge(confidence=0.9, turns="win_stay_all")


def test_a_composed_run_that_an_earlier_version_began_goes_on(tmp_path):
    problem, algorithm = problem_of(fm.accuracy), BestOf(fm.ForkMerge(interval=2), 2)
    options = {"model": Net, "optimizer": fm.OptimizerOf("SGD", lr=0.1), "steps": 4, "threads": 1}
    with pytest.raises(Stopped):
        algorithm.fit(problem, **options, folder=tmp_path / "run", on_event=stop)
    with open_run(tmp_path / "run") as store:
        described = store.config["algorithm"]
    assert described["algorithm"]["auxiliary_scale"] is None
    described["algorithm"]["auxiliary_scale"] = 1.0
    as_earlier_version(tmp_path / "run", algorithm=described)
    algorithm.fit(problem, **options, folder=tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({}, 2.0),
        ({"auxiliary_scale": 1.0}, 1.0),
        ({"turns": "win_stay"}, 1.0),
        ({"method": "GCS"}, 1.0),
        ({"mixtures": "mixed"}, 1.0),
    ],
)
def test_losses_of_auxiliaries_weigh_twice_where_nobody_names_branches_or_weights(options, scale):
    run = fitted(problem_of(fm.accuracy), Net(), fm.ForkMerge(interval=2, **options))
    assert run.settings["algorithm"]["auxiliary_scale"] == scale


def test_where_batchnorm_sees_other_inputs_the_targets_branch_never_rests_and_auxiliaries_weigh_as_much():
    normed = normed_net()
    untracked = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3, track_running_stats=False))
    own, shared = problem_of(fm.accuracy), problem_of(fm.accuracy)
    stream = next(iter(shared.stream_map.values()))
    shared = replace(shared, streams=[replace(stream, tasks=("t", "a", "b"))])

    def chosen(problem, model, **options):
        run = fitted(problem, model, fm.ForkMerge(interval=1, **options))
        return *(run.settings["algorithm"][name] for name in ("turns", "auxiliary_scale", "rule")), run.rounds

    *names, rounds = chosen(own, normed)
    assert names == ["win_stay", 1.0, "bagged"]
    assert all("alone" in each.branches and len(each.branches) == 2 for each in rounds)
    for problem, model in ((own, untracked), (shared, normed)):
        assert chosen(problem, model)[:3] == ("win_stay_all", 2.0, "bagged")
    assert chosen(own, normed, auxiliary_scale=2.0)[:2] == ("win_stay", 2.0)
    assert chosen(own, normed, turns="win_stay_all")[:2] == ("win_stay_all", 1.0)
    assert chosen(own, normed, confidence=0.9)[:2] == ("win_stay", 1.0)
    assert chosen(own, normed, method="GCS")[:2] == ("win_stay", 1.0)


def test_probabilities_of_tasks_are_not_doubled():
    problem = replace(problem_of(fm.accuracy), weights="sampling")
    assert fitted(problem, Net()).settings["algorithm"]["auxiliary_scale"] == 1.0


def test_branches_that_take_turns_make_ten_rounds_and_others_five():
    assert fm.ForkMerge().settings(shared_problem()).interval_of(100) == 10
    assert fm.ForkMerge("mixed").interval_of(100) == 20
    assert fm.ForkMerge.paper().interval_of(100) == 20


def test_a_run_that_an_earlier_version_began_keeps_its_two_branches(tmp_path):
    paper = fm.ForkMerge("mixed", interval=3)
    with pytest.raises(Stopped):
        fit(paper, shared_problem(), net=plain_net, folder=tmp_path / "run", on_event=stop)
    resumed = fit(fm.ForkMerge(interval=3), shared_problem(), net=plain_net, folder=tmp_path / "run", resume=True)
    whole = fit(paper, shared_problem(), net=plain_net)
    assert resumed.score == whole.score
    assert [list(each.branches) for each in resumed.rounds] == [["alone", "joint"]] * len(whole.rounds)


def test_a_run_that_an_earlier_version_began_keeps_its_rotation_and_all_validation_examples():
    problem, options = problem_of(fm.accuracy, examples=FEW + 1), ("turns", "validation_examples", "rule", "mixtures")
    for turns in (None, "halving"):
        started = {"mixtures": {"kind": "PerAuxiliary", "joint": False}, "turns": turns or "rotation"}
        resumed = fm.ForkMerge(interval=2, turns=turns).resolved(problem, Net(), 0, 4, started)
        assert [getattr(resumed, name) for name in options] == [
            turns or "rotation", None, "argmax", fm.PerAuxiliary(),
        ]  # fmt: skip


def normed_net():
    return nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))


@pytest.mark.parametrize(
    ("turns", "model", "rule", "otherwise"),
    [("win_stay", Net, "one_standard_error", "win_stay_all"), ("win_stay_all", normed_net, "bagged", "win_stay")],
    ids=["before the target might rest", "before it never rested with BatchNorm"],
)
def test_a_run_that_an_earlier_version_began_keeps_who_may_rest(turns, model, rule, otherwise, tmp_path):
    problem = problem_of(fm.accuracy)
    options = {"model": model, "optimizer": fm.OptimizerOf("SGD", lr=0.1), "steps": 8, "threads": 1}
    earlier, now = fm.ForkMerge(interval=1, turns=turns), fm.ForkMerge(interval=1)
    with pytest.raises(Stopped):
        earlier.fit(problem, **options, folder=tmp_path / "run", on_event=stop)
    resumed = now.fit(problem, **options, folder=tmp_path / "run", resume=True)
    whole = earlier.fit(problem, **options)
    assert [r.coefficients for r in resumed.rounds] == [r.coefficients for r in whole.rounds]
    assert [resumed.settings["algorithm"][name] for name in ("turns", "rule")] == [turns, rule]
    assert now.fit(problem, **options).settings["algorithm"]["turns"] == otherwise


def test_a_run_resumes_with_what_it_chose(tmp_path):
    problem, model = problem_of(fm.accuracy), Net
    options = {"model": model, "optimizer": fm.OptimizerOf("SGD", lr=0.1), "steps": 4, "threads": 1}
    with pytest.raises(Stopped):
        fm.ForkMerge(interval=2).fit(problem, **options, folder=tmp_path / "run", on_event=stop)
    with open_run(tmp_path / "run") as store:
        assert store.config["algorithm"]["search_by"] == "nll"
    resumed = fm.ForkMerge(interval=2).fit(problem, **options, folder=tmp_path / "run", resume=True)
    assert resumed.score == fm.ForkMerge(interval=2).fit(problem, **options).score
