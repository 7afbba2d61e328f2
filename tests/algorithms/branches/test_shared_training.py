"""What several runs train alike until their first merge: trained once, with the bits of runs that share nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import forkmerge as fm
from _asserts import assert_same_run
from forkmerge.engine.storage.shared_store import SharedStore
from problems import (
    ADAM,
    TASKS,
    Stopped,
    counting_steps,
    domains_problem,
    evaluation,
    fit,
    noisy_net,
    shared_problem,
    stop_at,
)

OPTIONS: dict[str, Any] = {"net": noisy_net, "optimizer": ADAM, "steps": 8}


def predict_aux(model: Any, batch: Any) -> Any:
    inputs, labels = batch
    return model(inputs, "aux"), labels[:, 1]


def two_targets(problem: fm.Problem) -> fm.Problem:
    data = evaluation()
    return replace(problem, validation={"tgt": data, "aux": replace(data, predict=predict_aux)})


def test_every_target_has_the_run_that_it_would_have_alone_and_the_common_branch_is_trained_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = two_targets(shared_problem())
    algorithm = fm.ForkMerge("mixed", interval=4, refit=True)
    options = {"optimizer": ADAM, "steps": 8, "threads": 1}
    with counting_steps(monkeypatch) as apart:
        alone = {name: fit(algorithm, problem.with_target(name), **OPTIONS) for name in ("tgt", "aux")}
    with counting_steps(monkeypatch) as together:
        runs = algorithm.fit_targets(problem, ["tgt", "aux"], model=noisy_net, **options)
    assert list(runs) == ["tgt", "aux"]
    for name, run in runs.items():
        assert run.target == name
        assert_same_run(run, alone[name])
        assert run.trained_steps == alone[name].trained_steps, "costs are those of the run by itself"
    assert together.count("joint") == apart.count("joint") - 1, "that of the first round"
    assert together.count("alone") == apart.count("alone")


@pytest.mark.parametrize(
    ("problem", "training", "shared"),
    [
        (shared_problem(), {}, 1),
        (domains_problem(), {}, 1),
        (domains_problem(), {"paired": False}, 1),
        (shared_problem(), {"statistics": "target"}, 0),
        (domains_problem(weights="sampling"), {}, 0),
    ],
    ids=["one stream", "own inputs", "own orders", "statistics", "sampling"],
)
def test_what_depends_on_the_target_is_not_shared(problem: fm.Problem, training: dict[str, Any], shared: int) -> None:
    states = SharedStore()
    problem = two_targets(problem)
    for target in ("tgt", "aux"):
        on = problem.with_target(target)
        mine = fit(fm.ForkMerge("mixed", interval=4), on, **OPTIONS, shared=states, **training)
        assert_same_run(mine, fit(fm.ForkMerge("mixed", interval=4), on, **OPTIONS, **training))
    assert len(states._values) == 4 - shared, "two branches of each target, but for what both have"


def test_other_algorithms_take_what_is_the_same_for_them_and_a_method_nothing() -> None:
    states = SharedStore()
    fit(fm.ForkMerge("mixed", interval=4, tail=0.5), **OPTIONS, shared=states)
    assert len(states._values) == 2, "up to the tail"
    for algorithm, more in ((fm.SingleTask(interval=2), 0), (fm.SingleTask(interval=4), 1), (fm.Joint(interval=2), 0)):
        before = len(states._values)
        assert_same_run(fit(algorithm, **OPTIONS, shared=states), fit(algorithm, **OPTIONS))
        assert len(states._values) == before + more
    before = len(states._values)
    for algorithm in (fm.Joint(method="PCGrad"), fm.ForkMerge("mixed", interval=4, checkpoint="best_in_interval")):
        assert_same_run(fit(algorithm, **OPTIONS, shared=states), fit(algorithm, **OPTIONS))
    other = {**OPTIONS, "seed": 1}
    assert_same_run(
        fit(fm.ForkMerge("mixed", interval=4), **other, shared=states), fit(fm.ForkMerge("mixed", interval=4), **other)
    )
    assert len(states._values) == before + 2, "of the other seed"


def test_interrupted_runs_for_several_targets_go_on_to_the_same_bits(tmp_path: Path) -> None:
    problem = two_targets(shared_problem())
    algorithm = fm.ForkMerge("per_auxiliary", interval=4)
    options = {"model": noisy_net, "optimizer": ADAM, "steps": 8, "threads": 1, "folder": tmp_path / "runs"}
    for count in (3, 6, 4):
        with pytest.raises(Stopped):
            algorithm.fit_targets(problem, TASKS[:2], **options, on_event=stop_at(count), checkpoint_every=2)
    runs = algorithm.fit_targets(problem, TASKS[:2], **options)
    for name, run in runs.items():
        assert_same_run(run, fit(algorithm, problem.with_target(name), **OPTIONS))
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["aux", "tgt"]
    again = algorithm.fit_targets(problem, TASKS[:2], **options)
    assert again["tgt"].score == runs["tgt"].score


def test_a_module_is_copied_for_every_target() -> None:
    model = noisy_net()
    runs = fm.SingleTask().fit_targets(
        two_targets(shared_problem()), ["tgt", "aux"], model=model, optimizer=ADAM, steps=2, threads=1
    )
    assert len({id(model), *(id(run.model) for run in runs.values())}) == 3


def test_names_that_would_be_one_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(fm.ProblemError, match="would be the same folder"):
        fm.SingleTask().fit_targets(
            shared_problem(), ["a", "A"], model=noisy_net, optimizer=ADAM, steps=2, folder=tmp_path
        )
