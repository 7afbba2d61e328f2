"""Branches that take turns: the rule against a queue, whole runs against a plain loop, the same bits anyhow."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch

import forkmerge as fm
from _asserts import assert_same_bits, assert_same_run
from forkmerge.algorithms.branches.rotation import Rotation, go_on_with
from forkmerge.algorithms.branches.round_sizes import branch_count, count_steps
from forkmerge.algorithms.checkpoint import Phase, RunState
from forkmerge.algorithms.run_record import Run
from forkmerge.engine.training.options import Mixture
from forkmerge.engine.training.state import State
from naive_forkmerge import halve, stay_or_shift, take_turns
from problems import ADAM, Stopped, fit, noisy_net, shared_problem, stop_at

MANY = {
    "alone": {"tgt": 1.0},
    "aux": {"tgt": 1.0, "aux": 1.0},
    "odd": {"tgt": 1.0, "odd": 1.0},
    "little aux": {"tgt": 1.0, "aux": 0.3},
    "little odd": {"tgt": 1.0, "odd": 0.3},
    "joint": {"tgt": 1.0, "aux": 1.0, "odd": 1.0},
}
TURNING = ["aux", "odd", "little aux", "little odd"]


def turns(**options: Any) -> fm.ForkMerge:
    return fm.ForkMerge(MANY, **{"interval": 2, "per_round": 2, **options})


def test_branches_with_no_auxiliary_or_with_all_do_not_take_turns():
    rotation = Rotation([Mixture(name, weights) for name, weights in MANY.items()], ("aux", "odd"), 2)
    assert rotation.turning == TURNING
    assert [mixture.name for mixture in rotation.first()] == ["alone", "aux", "odd", "joint"]
    for two in (fm.ForkMerge("mixed", per_round=1), fm.ForkMerge(MANY, per_round=4), fm.ForkMerge(MANY)):
        assert two.rotation(shared_problem()).turning == []


def test_the_better_half_stays_and_who_has_rested_longest_returns():
    mixtures = [Mixture(name, weights) for name, weights in MANY.items()]
    rotation = Rotation(mixtures, ("aux", "odd"), 2)
    first = {"alone": 0.4, "aux": 0.1, "odd": 0.5}
    assert rotation.after([(first, first)]) == ["alone", "odd", "little aux", "joint"]
    second = {"alone": 0.4, "odd": 0.1, "little aux": 0.5}
    assert rotation.after([(first, first), (second, second)]) == ["alone", "little aux", "little odd", "joint"]
    third = {"alone": 1.0, "little aux": 0.0, "little odd": 0.0}
    following = rotation.after([(first, first), (second, second), (third, third)])
    assert following == ["alone", "aux", "odd", "joint"], "of coefficient 0 nobody stays, and aux has rested longest"


def test_the_rule_is_a_queue():
    draw = random.Random(0)
    for _ in range(300):
        count, places = draw.randint(2, 9), draw.randint(1, 5)
        names = [f"b{index}" for index in range(count)]
        tasks = [f"t{index}" for index in range(count)]
        mixtures = [Mixture(name, {"tgt": 1.0, task: 1.0}) for name, task in zip(names, tasks, strict=True)]
        rotation = Rotation([Mixture("alone", {"tgt": 1.0}), *mixtures], tasks, places)
        trained, queue = (names[:places], names[places:]) if count > places else (names, [])
        assert [mixture.name for mixture in rotation.first()] == ["alone", *trained]
        history: list[Any] = []
        for _ in range(8):
            shares = {name: draw.choice([0.0, 0.0, 0.1, 0.2, 0.5]) for name in trained}
            history.append((["alone", *trained], shares))
            following = rotation.after(history)
            if count > places:
                chosen, queue = take_turns(sorted(trained), shares, queue, places)
                trained = sorted(chosen)
            assert following == ["alone", *trained]


def test_a_round_trains_as_many_branches_whatever_the_number_of_auxiliaries():
    run = fit(turns(), steps=12)
    assert {len(r.branches) for r in run.rounds} == {4}
    assert sum(run.trained_steps.values()) == 4 * 12 == count_steps(turns(), shared_problem(), 12)
    every = fit(turns(per_round=None), steps=12)
    assert sum(every.trained_steps.values()) == 6 * 12 == count_steps(turns(per_round=None), shared_problem(), 12)
    assert (branch_count(turns(), shared_problem()), branch_count(turns(per_round=None), shared_problem())) == (4, 6)


def test_records_say_who_goes_on_and_that_follows_from_their_coefficients():
    run = fit(turns(), steps=12)
    rotation = turns().rotation(shared_problem())
    trained = {name for r in run.rounds for name in r.branches}
    assert trained == set(MANY), "everybody had a turn"
    for index, (one, other) in enumerate(pairwise(run.rounds), 1):
        assert one.kept == list(other.branches)
        assert one.kept == rotation.after([(set(r.branches), r.coefficients) for r in run.rounds[:index]])


@pytest.mark.parametrize("state", ["keep", "average", "reset"])
def test_the_bits_depend_neither_on_processes_nor_on_being_resumed(tmp_path, state):
    algorithm = turns(optimizer_state=state, refit=True, floor=True, select="best")
    options = {"net": noisy_net, "optimizer": ADAM, "steps": 12}
    whole = fit(algorithm, **options)
    assert_same_run(fit(algorithm, **options, workers=2), whole)
    for step in (3, 6, 11):
        folder = tmp_path / str(step)
        with pytest.raises(Stopped):
            fit(algorithm, **options, folder=folder, on_event=stop_at(step), checkpoint_every=1)
        assert_same_run(fit(algorithm, **options, folder=folder, resume=True), whole)


def test_a_branch_that_returns_has_no_memory_of_its_last_turn():
    # In round 3 "aux" returns: what it was in round 1 does not matter, but what was merged does.
    run = fit(fm.ForkMerge("per_auxiliary", interval=3, per_round=1, search=fm.Fixed()), optimizer=ADAM, steps=9)
    assert [list(r.branches) for r in run.rounds] == [["alone", "aux"], ["alone", "odd"], ["alone", "aux"]]
    assert [r.branches["aux"].entered_step for r in (run.rounds[0], run.rounds[2])] == [3, 9]
    assert run.trained_steps == {"alone": 9, "aux": 6, "odd": 3}


@pytest.mark.parametrize("checkpoint", ["best_in_interval", "best_so_far"])
def test_best_weights_are_those_of_the_present_turn(checkpoint):
    run = fit(turns(checkpoint=checkpoint, validate_every=1, refit=True), steps=12)
    began: dict[str, int] = {}
    for before, r in pairwise([None, *run.searched]):
        for name, branch in r.branches.items():
            if before is None or name not in before.branches:
                began[name] = r.start
            assert branch.entered_step > began[name]
    entered = [{name: b.entered_step for name, b in r.branches.items()} for r in run.rounds if r.phase == "refit"]
    for searched, again in zip(run.searched, entered, strict=False):
        assert again.items() <= {name: b.entered_step for name, b in searched.branches.items()}.items()


def test_a_branch_that_returns_has_the_optimizer_of_the_heaviest_and_no_method_of_its_own():
    moments = [torch.full((2,), float(branch)) for branch in range(3)]
    states = [State(3, {"w": torch.full((2,), 5.0)}, optimizer_rows={"m/w": moment}) for moment in moments]
    for state in states:
        state.method = {"s": state.optimizer_rows["m/w"].clone()}
    mixtures = [Mixture(name, weights) for name, weights in MANY.items()]
    run = RunState(Phase.SEARCH, mixtures[:3], states, states[0].weights())
    go_on_with(run, ["alone", "odd", "little aux"], mixtures, {"alone": 0.2, "aux": 0.5, "odd": 0.3})
    assert [mixture.name for mixture in run.mixtures] == ["alone", "odd", "little aux"]
    assert [state.optimizer_rows["m/w"][0].item() for state in run.branches] == [0, 2, 1]
    assert [bool(state.method) for state in run.branches] == [True, True, False]
    assert [state.step for state in run.branches] == [3, 3, 3]
    run.branches[2].rows["w"].zero_()
    assert all(state.rows["w"][0] == 5 for state in states), "its memory is its own"


def test_where_every_branch_was_faulty_some_branch_gives_its_reset_optimizer():
    mixtures = [Mixture(name, weights) for name, weights in MANY.items()]
    run = RunState(Phase.SEARCH, mixtures[:2], [State(3, {}), State(3, {})], State(3, {}))
    go_on_with(run, ["alone", "odd"], mixtures, {})
    assert [mixture.name for mixture in run.mixtures] == ["alone", "odd"]


def test_methods_that_keep_state_go_on_in_turns(tmp_path):
    algorithm = turns(method="UW", interval=3, refit=True)
    whole = fit(algorithm, optimizer=ADAM, steps=12)
    with pytest.raises(Stopped):
        fit(algorithm, optimizer=ADAM, steps=12, folder=tmp_path / "run", on_event=stop_at(8), checkpoint_every=1)
    assert_same_run(fit(algorithm, optimizer=ADAM, steps=12, folder=tmp_path / "run", resume=True), whole)


def refits_everything(run: Run) -> list[set[str]]:
    return [set(r.branches) for r in run.rounds if r.phase == "refit"]


def test_a_refit_trains_what_its_merges_take_to_the_same_bits(monkeypatch):
    algorithm = turns(refit=True)
    options = {"net": noisy_net, "optimizer": ADAM, "steps": 12}
    thrifty = fit(algorithm, **options)

    def is_trained(name, rounds):
        return any(name in r.branches for r in rounds[:1])

    monkeypatch.setattr("forkmerge.algorithms.refit._is_taken", is_trained)
    generous = fit(algorithm, **options)
    assert_same_bits(thrifty, generous)
    scripts = [set(r.branches) for r in thrifty.searched]
    assert refits_everything(generous) == scripts
    assert any(some < every for some, every in zip(refits_everything(thrifty), scripts, strict=True))


def test_parameters_that_wait_for_their_branch_are_not_called_untouched():
    options = {"steps": 6}
    assert any("without gradient" in note for note in fit(fm.SingleTask(), **options).notes)
    run = fit(fm.ForkMerge("per_auxiliary", interval=3, per_round=1), **options)
    assert not any("without gradient" in note for note in run.notes)


def test_too_few_rounds_for_everybody_are_noted():
    note = "1 of 4 branches may never have a turn in 2 rounds: with per_round=2 that takes 3 rounds"
    assert note in fit(turns(interval=6), steps=12).notes
    assert not any("turn" in text for text in fit(turns(interval=4), steps=12).notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per_round": 0}, "per_round must be a positive integer"),
        ({"per_round": True}, "per_round must be a positive integer"),
        ({"per_round": 1, "prune_to": 2}, "choose one"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(fm.ProblemError, match=message):
        fm.ForkMerge("per_auxiliary", **options)


def test_fixed_coefficients_are_for_the_branches_of_a_round():
    fit(fm.ForkMerge("per_auxiliary", per_round=1, search=fm.Fixed((0.5, 0.5)), interval=4))
    with pytest.raises(fm.ProblemError, match="3"):
        fit(fm.ForkMerge("per_auxiliary", per_round=1, search=fm.Fixed((0.5, 0.25, 0.25)), interval=4))


def test_halving_leaves_out_the_worse_half_whenever_all_have_had_a_turn():
    tasks = [f"t{index}" for index in range(5)]
    mixtures = [Mixture("alone", {"tgt": 1.0}), *(Mixture(task, {"tgt": 1.0, task: 1.0}) for task in tasks)]
    worth = {"t0": 0.0, "t1": 0.3, "t2": 0.1, "t3": 0.5, "t4": 0.2}
    for places, expected in (
        (1, [["t0"], ["t1"], ["t2"], ["t3"], ["t4"], ["t1"], ["t3"], ["t4"], ["t1"], ["t3"], ["t3"], ["t3"]]),
        (2, [["t0", "t1"], ["t2", "t3"], ["t3", "t4"], ["t1", "t3"], ["t3", "t4"], ["t1", "t3"], ["t1", "t3"]]),
    ):
        rotation = Rotation(mixtures, tasks, places, "halving")
        trained, history = [m.name for m in rotation.first()], []
        for names in expected:
            assert trained == ["alone", *names]
            history.append((trained, {name: worth.get(name, 0.5) for name in trained}))
            trained = rotation.after(history)


def test_halving_is_the_queue_of_a_plain_loop():
    draw = random.Random(1)
    for _ in range(200):
        count, places = draw.randint(2, 9), draw.randint(1, 4)
        names = [f"b{index}" for index in range(count)]
        mixtures = [Mixture("alone", {"tgt": 1.0}), *(Mixture(name, {"tgt": 1.0, name: 1.0}) for name in names)]
        rotation = Rotation(mixtures, names, places, "halving")
        if count <= places:
            continue
        trained, queue, left, seen, history = names[:places], names[places:], names, {}, []
        for _ in range(10):
            shares = {name: draw.choice([0.0, 0.0, 0.1, 0.2, 0.5]) for name in trained}
            history.append((["alone", *trained], shares))
            seen.update(shares)
            called, queue, left = halve(left, seen, queue, places)
            trained = [name for name in names if name in called]
            assert rotation.after(history) == ["alone", *trained]


def test_halving_resumes_and_its_refit_trains_the_same_turns(tmp_path):
    algorithm = turns(per_round=1, turns="halving", refit=True)
    options = {"net": noisy_net, "optimizer": ADAM, "steps": 14}
    whole = fit(algorithm, **options)
    with pytest.raises(Stopped):
        fit(algorithm, **options, folder=tmp_path / "run", on_event=stop_at(11), checkpoint_every=1)
    assert_same_run(fit(algorithm, **options, folder=tmp_path / "run", resume=True), whole)
    assert sum(r.branches.keys() >= {"little odd"} for r in whole.searched) >= 1
    note = "1 of 4 branches may never have a turn in 3 rounds: with per_round=1 that takes 4 rounds"
    assert note in fit(turns(per_round=1, turns="halving"), steps=6).notes


def test_winners_stay_and_the_joint_branch_comes_first():
    rotation = Rotation([Mixture(name, weights) for name, weights in MANY.items()], ("aux", "odd"), 1, "win_stay")
    assert rotation.turning == ["joint", *TURNING]
    assert [mixture.name for mixture in rotation.first()] == ["alone", "joint"]
    joint, aux = ({"alone": 1 - share, name: share} for name, share in (("joint", 0.5), ("aux", 0.4)))
    assert rotation.after([(joint, joint)]) == ["alone", "joint"], "an equal share is a win"
    lost = {"alone": 0.6, "joint": 0.4}
    assert rotation.after([(joint, joint), (lost, lost)]) == ["alone", "aux"]
    assert rotation.after([(joint, joint), (lost, lost), (aux, aux)]) == ["alone", "odd"]


def test_thirds_of_a_merge_are_equal_shares():
    rotation = Rotation([Mixture(name, weights) for name, weights in MANY.items()], ("aux", "odd"), 2, "win_stay")
    thirds = {"alone": 1 - 2 * (1 / 3), "joint": 1 / 3, "aux": 1 - 2 / 3 - 1e-16}
    assert rotation.after([(thirds, thirds)]) == ["alone", "aux", "joint"]


def test_win_stay_is_the_queue_of_a_plain_loop():
    draw = random.Random(2)
    for _ in range(200):
        count, places = draw.randint(2, 9), draw.randint(1, 4)
        names = [f"b{index}" for index in range(count)]
        mixtures = [Mixture("alone", {"tgt": 1.0}), *(Mixture(name, {"tgt": 1.0, name: 1.0}) for name in names)]
        rotation = Rotation(mixtures, names, places, "win_stay")
        if count <= places:
            continue
        trained, queue, history = names[:places], names[places:], []
        for _ in range(10):
            shares = {name: draw.choice([0.0, 0.1, 0.2, 0.5, 0.8]) for name in trained}
            history.append((["alone", *trained], shares))
            called, queue = stay_or_shift(trained, shares, queue, places + 1)
            trained = [name for name in names if name in called]
            assert rotation.after(history) == ["alone", *trained]


def test_where_all_take_turns_the_targets_own_branch_begins_and_rests_when_it_loses():
    rotation = Rotation([Mixture(name, weights) for name, weights in MANY.items()], ("aux", "odd"), 1, "win_stay_all")
    assert rotation.turning == ["alone", "joint", *TURNING]
    assert [mixture.name for mixture in rotation.first()] == ["alone", "joint"]
    first, second = {"alone": 0.4, "joint": 0.6}, {"joint": 0.7, "aux": 0.3}
    assert rotation.after([({"alone": 0.5, "joint": 0.5},) * 2]) == ["alone", "joint"], "an equal share is a win"
    assert rotation.after([(first, first)]) == ["aux", "joint"]
    assert rotation.after([(first, first), (second, second)]) == ["odd", "joint"]
    assert rotation.after([(first, {})]) == ["aux", "odd"], "of a merge of nothing nobody stays"


def test_win_stay_of_all_is_the_queue_of_a_plain_loop():
    draw = random.Random(3)
    for _ in range(200):
        count, places = draw.randint(2, 9), draw.randint(2, 4)
        names = ["alone", *(f"b{index}" for index in range(count))]
        mixtures = [Mixture(name, {"tgt": 1.0} | ({name: 1.0} if name != "alone" else {})) for name in names]
        rotation = Rotation(mixtures, names[1:], places - 1, "win_stay_all")
        if len(names) <= places:
            continue
        trained, queue, history = names[:places], names[places:], []
        for _ in range(10):
            shares = {name: draw.choice([0.0, 0.1, 0.2, 0.5, 0.8]) for name in trained}
            history.append((trained, shares))
            called, queue = stay_or_shift(trained, shares, queue, places)
            trained = [name for name in names if name in called]
            assert rotation.after(history) == trained


def test_a_floor_goes_on_by_itself_where_the_targets_own_branch_rests(tmp_path):
    options = {"net": noisy_net, "optimizer": ADAM, "steps": 18}
    fixed = fm.Fixed((0.3, 0.7))
    algorithm = turns(per_round=1, turns="win_stay_all", floor=True, search=fixed)
    whole, alone = fit(algorithm, **options), fit(fm.SingleTask(interval=algorithm.interval), **options)
    assert any("alone" not in r.branches for r in whole.rounds)
    assert whole.rounds[-1].floor_score == alone.rounds[-1].score
    with pytest.raises(Stopped):
        fit(algorithm, **options, folder=tmp_path / "run", on_event=stop_at(11), checkpoint_every=1)
    assert_same_run(fit(algorithm, **options, folder=tmp_path / "run", resume=True), whole)


def test_too_few_rounds_for_all_to_have_a_turn_are_noted():
    note = "3 of 6 branches may never have a turn in 2 rounds: with per_round=1 that takes 5 rounds"
    assert note in fit(turns(per_round=1, turns="win_stay_all"), steps=4).notes


@pytest.mark.parametrize("kind", ["win_stay", "win_stay_all"])
def test_win_stay_resumes_and_its_refit_trains_the_same_turns(tmp_path, kind):
    algorithm = turns(per_round=1, turns=kind, refit=True)
    options = {"net": noisy_net, "optimizer": ADAM, "steps": 14}
    whole = fit(algorithm, **options)
    with pytest.raises(Stopped):
        fit(algorithm, **options, folder=tmp_path / "run", on_event=stop_at(11), checkpoint_every=1)
    assert_same_run(fit(algorithm, **options, folder=tmp_path / "run", resume=True), whole)
    assert {len(r.branches) for r in whole.rounds if r.phase == "search"} == {2}
    assert_same_run(fit(algorithm, **options, workers=2), whole)
