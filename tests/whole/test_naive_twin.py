"""`fit` against Algorithms 1, 2 and 3 of the paper written down in plain torch, from the paper's text alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import forkmerge as fm
from forkmerge.problem.randomness import random_state_kept
from naive_forkmerge import Naive, naive_forkmerge
from problems import (
    ADAM,
    SGD,
    TASKS,
    DomainLoss,
    conv_net,
    examples,
    fit,
    minus_loss,
    noisy_net,
    plain_net,
    predict_target,
    shared_losses,
    tied_net,
)

NESTEROV = fm.OptimizerOf("SGD", lr=0.2, momentum=0.9, nesterov=True, weight_decay=1e-3)
TWO = {"alone": {"tgt": 1.0}, "joint": {"tgt": 1.0, "aux": 1.0, "odd": 1.0}}
THREE = {"alone": {"tgt": 1.0}, "aux": {"tgt": 1.0, "aux": 1.0}, "odd": {"tgt": 1.0, "odd": 1.0}}
ANY = {"odd first": {"tgt": 0.5, "odd": 2.0}, **THREE, "all": {"tgt": 1.0, "aux": 0.7, "odd": 0.2}}
SAMPLED = {"alone": {"tgt": 1.0}, "joint": {"tgt": 1.0, "aux": 0.5, "odd": 0.5}}


def precise(count: int, seed: int) -> TensorDataset:
    inputs, labels = examples(count, seed)
    return TensorDataset(inputs.double(), labels)


def problem(kind: str = "shared", **options: Any) -> fm.Problem:
    """The problems of the tests in double precision, so that nothing but the order of sums differs."""
    streams: Any = {"all": fm.Stream(precise(16, 1), shared_losses, TASKS, 8)}
    if kind == "domains":
        streams = [fm.Stream(precise(20 + 10 * i, 10 + i), DomainLoss(task), task, 8) for i, task in enumerate(TASKS)]
    return fm.Problem("tgt", streams, fm.Evaluation(precise(24, 2), minus_loss, predict_target), **options)


def both(
    mixtures: Any, net: Any = noisy_net, optimizer: Any = SGD, on: fm.Problem | None = None, **options: Any
) -> tuple[Any, Naive]:
    """The run of `fit` and its twin."""
    steps, interval, seed = options.pop("steps", 14), options.pop("interval", 4), options.pop("seed", 0)
    on = on or problem()

    def double_net() -> Any:
        return net().double()

    algorithm = fm.ForkMerge.paper(mixtures=mixtures, interval=interval, **options)
    run = fit(algorithm, on, double_net, optimizer=optimizer, steps=steps, seed=seed)
    keeps, refit = options.pop("prune_keeps", "largest"), options.pop("refit", False)
    with random_state_kept():
        common = {"steps": steps, "interval": interval, "seed": seed}
        kept = "alone" if keeps == "target" else None
        twin = naive_forkmerge(on, double_net, optimizer, mixtures, always_kept=kept, **common, **options)
        if refit:
            union = on.with_validation_labels()
            free = ("per_round", "turns", "previous_merges", "average_iterates", "layer_groups")
            turns = {name: options[name] for name in free if name in options}
            again = naive_forkmerge(union, double_net, optimizer, mixtures, replay=twin, **common, **turns)
            both_runs = (
                [*getattr(twin, part), *getattr(again, part)] for part in ("coefficients", "groups", "averaged")
            )
            twin = Naive(again.weights, *both_runs, kept=twin.kept + again.kept)
    return run, twin


def assert_same(run: Any, twin: Naive) -> None:
    """Alike to rounding, and bit for bit where every merge is a single branch: there nothing is summed."""
    for ended, shares, kept in zip(run.rounds, twin.coefficients, twin.kept, strict=True):
        if ended.phase == "search":  # a refit leaves out what no merge to come takes anything of
            assert ended.kept == kept
            assert list(ended.coefficients) == list(shares)
        of_branches = {name: ended.coefficients.get(name, 0.0) for name in shares}
        if ended.groups is not None:  # whose mean these are
            of_branches = shares
        assert of_branches == pytest.approx(shares, abs=1e-12)
    weights = run.model.state_dict()
    assert list(weights) == list(twin.weights)
    is_single = all(max(shares.values()) == 1.0 for shares in twin.coefficients)
    is_single = is_single and not any(twin.averaged) and not twin.groups
    precision = {"rtol": 0.0, "atol": 0.0} if is_single else {"rtol": 1e-11, "atol": 1e-13}
    for name, value in twin.weights.items():
        torch.testing.assert_close(weights[name], value, **precision, msg=name)


@pytest.mark.parametrize("net", [plain_net, noisy_net, conv_net, tied_net])
@pytest.mark.parametrize("optimizer", [SGD, NESTEROV, ADAM], ids=["momentum", "nesterov", "adam"])
@pytest.mark.parametrize("mixtures", [TWO, THREE, ANY], ids=["two", "three", "any"])
def test_fit_is_the_papers_algorithm(mixtures: Any, optimizer: Any, net: Any) -> None:
    assert_same(*both(mixtures, net, optimizer))


def test_merges_of_all_kinds_occur() -> None:
    """Else the comparison above would show little: of several branches, of one, and with every λ between."""
    found = [tuple(c.values()) for seed in range(3) for c in both(TWO, seed=seed)[1].coefficients]
    assert {1.0, 0.0} < {round(share, 6) for shares in found for share in shares}
    several = [c for seed in range(3) for c in both(THREE, seed=seed)[1].coefficients]
    assert max(sum(share > 0 for share in shares.values()) for shares in several) >= 2


@pytest.mark.parametrize("keeps", ["largest", "target"])
@pytest.mark.parametrize("after", [1, 2])
def test_pruning_keeps_the_same_branches(keeps: str, after: int) -> None:
    left = set()
    for seed in range(4):
        run, twin = both(ANY, interval=3, seed=seed, prune_to=2, prune_after=after, prune_keeps=keeps)
        assert_same(run, twin)
        left.add(tuple(twin.kept[-1]))
    assert len(left) > 1, "always the same branches would show little"
    assert all(("alone" in names) for names in left) == (keeps == "target")


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["momentum", "adam"])
@pytest.mark.parametrize("options", [{}, {"prune_to": 2}, {"prune_to": 2, "prune_keeps": "target"}])
def test_a_refit_replays_the_merges_on_all_labels(optimizer: Any, options: dict[str, Any]) -> None:
    assert_same(*both(THREE, optimizer=optimizer, refit=True, seed=2, **options))


@pytest.mark.parametrize("net", [plain_net, noisy_net])
@pytest.mark.parametrize(("weights", "mixtures"), [("loss", THREE), ("sampling", SAMPLED), ("sampling", THREE)])
def test_tasks_with_inputs_of_their_own(weights: str, mixtures: Any, net: Any) -> None:
    assert_same(*both(mixtures, net, on=problem("domains", weights=weights)))


def test_the_twin_notices_a_difference() -> None:
    """One other coefficient in the first round, and nothing is the same any more."""
    run, twin = both(TWO)
    wrong = Naive({}, [{"alone": 0.9, "joint": 0.1}, *twin.coefficients[1:]], averaged=twin.averaged, kept=twin.kept)
    with random_state_kept():
        again = naive_forkmerge(problem(), lambda: noisy_net().double(), SGD, TWO, steps=14, interval=4, replay=wrong)
    with pytest.raises(AssertionError):
        assert_same(run, again)


FOUR = {**THREE, "little aux": {"tgt": 1.0, "aux": 0.3}, "little odd": {"tgt": 1.0, "odd": 0.3}}


@pytest.mark.parametrize("refit", [False, True])
@pytest.mark.parametrize(("per_round", "optimizer"), [(1, SGD), (2, ADAM), (3, NESTEROV)])
def test_branches_that_take_turns(per_round: int, optimizer: Any, refit: bool) -> None:
    run, twin = both(FOUR, optimizer=optimizer, interval=3, steps=14, per_round=per_round, refit=refit)
    assert_same(run, twin)
    assert {len(r.branches) for r in run.searched} == {per_round + 1}


@pytest.mark.parametrize("refit", [False, True])
@pytest.mark.parametrize(("mixtures", "optimizer"), [(TWO, SGD), (THREE, NESTEROV), (ANY, SGD)])
@pytest.mark.parametrize("count", [1, 2])
def test_previous_merges_are_searched_with_the_branches(count: int, mixtures: Any, optimizer: Any, refit: bool) -> None:
    run, twin = both(mixtures, optimizer=optimizer, interval=3, seed=1, previous_merges=count, refit=refit)
    assert_same(run, twin)
    names = ["previous merge", "previous merge 2"][:count]
    assert any(r.coefficients.get(name, 0.0) > 0 for r in run.searched for name in names)


@pytest.mark.parametrize("refit", [False, True])
@pytest.mark.parametrize(("net", "optimizer"), [(noisy_net, SGD), (conv_net, ADAM)])
@pytest.mark.parametrize("count", [2, 3])
def test_means_of_iterates_take_the_place_of_branches(count: int, net: Any, optimizer: Any, refit: bool) -> None:
    run, twin = both(THREE, net, optimizer, interval=7, seed=1, average_iterates=count, refit=refit)
    assert_same(run, twin)
    for ended, averaged in zip(run.searched, twin.averaged, strict=False):
        assert [name for name, branch in ended.branches.items() if branch.averaged == count] == averaged
    assert any(twin.averaged)


@pytest.mark.parametrize("refit", [False, True])
@pytest.mark.parametrize(("net", "optimizer"), [(noisy_net, SGD), (conv_net, NESTEROV)])
@pytest.mark.parametrize("mixtures", [TWO, THREE])
def test_layer_groups_have_coefficients_of_their_own(mixtures: Any, net: Any, optimizer: Any, refit: bool) -> None:
    groups = {"lower": "body.0" if net is noisy_net else "body.2", "head": "heads.tgt"}
    run, twin = both(mixtures, net, optimizer, interval=5, seed=1, layer_groups=groups, refit=refit)
    assert_same(run, twin)
    for ended, parts in zip(run.rounds, twin.groups, strict=True):
        expected = [dict(zip(twin.coefficients[0], part, strict=True)) for part in parts]
        if ended.groups is None:
            assert all(part == parts[0] for part in parts)
            continue
        for found, shares in zip(ended.groups.values(), expected, strict=True):
            assert {name: found.get(name, 0.0) for name in shares} == pytest.approx(shares, abs=1e-12)
    assert any(ended.groups is not None for ended in run.rounds)


def test_all_of_them_together() -> None:
    options = {"previous_merges": 2, "average_iterates": 2, "layer_groups": {"lower": "body.0"}}
    for seed in range(2):
        assert_same(*both(THREE, interval=4, seed=seed, refit=True, **options))


@pytest.mark.parametrize(("per_round", "refit"), [(1, True), (2, False)])
def test_branches_that_take_turns_by_halving(per_round: int, refit: bool) -> None:
    run, twin = both(FOUR, interval=2, steps=16, per_round=per_round, turns="halving", refit=refit)
    assert_same(run, twin)
    assert run.searched[-1].branches.keys() < {name for r in run.searched for name in r.branches}


@pytest.mark.parametrize(("per_round", "refit"), [(1, True), (2, False)])
def test_branches_whose_winners_stay(per_round: int, refit: bool) -> None:
    run, twin = both({**FOUR, **THREE}, interval=2, steps=16, per_round=per_round, turns="win_stay", refit=refit)
    assert_same(run, twin)
    trained = [set(r.branches) for r in run.searched]
    assert len(set.union(*trained)) > per_round + 1, "somebody left"
    if per_round == 1:
        assert any(one == other for one, other in pairwise(trained)), "and somebody stayed"


@pytest.mark.parametrize(("per_round", "refit"), [(1, True), (2, False)])
def test_the_targets_own_branch_rests_where_others_win(per_round: int, refit: bool) -> None:
    run, twin = both({**FOUR, **THREE}, interval=2, steps=24, per_round=per_round, turns="win_stay_all", refit=refit)
    assert_same(run, twin)
    trained = [set(r.branches) for r in run.searched]
    assert {len(names) for names in trained} == {per_round + 1}
    assert any("alone" not in names for names in trained), "the target's own rested"
    assert any(one & other for one, other in pairwise(trained)), "and somebody stayed"
