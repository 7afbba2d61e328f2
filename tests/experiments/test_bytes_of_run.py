"""Bytes of a run, beside what its states and its folder really take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import forkmerge as fm
from forkmerge.algorithms.events import CheckpointWritten
from forkmerge.engine.storage.run_folder import CHECKPOINTS_KEPT
from forkmerge.experiments.cost_of_run import estimate_run
from problems import (
    ADAM,
    SGD,
    frozen_net,
    plain_net,
    seeded,
    shared_problem,
)

STEPS = 22


def recipe(algorithm: fm.Algorithm, **changes: Any) -> fm.Recipe:
    given = {"problem": shared_problem(), "model": plain_net, "optimizer": ADAM, "steps": STEPS, **changes}
    return fm.Recipe(**given, algorithm=algorithm)


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [(fm.OptimizerOf("SGD", lr=0.1), 0), (SGD, 1), (ADAM, 2)],
    ids=["plain", "momentum", "Adam"],
)
def test_memory_is_b_times_one_plus_s_plus_two_model_sizes(optimizer: fm.OptimizerOf, slots: int) -> None:
    plan = estimate_run(
        recipe(fm.ForkMerge("per_auxiliary"), optimizer=optimizer, model=lambda: wide_net(nn.Identity()))
    )
    size = 4 * plan.parameters
    assert plan.memory["total"] == pytest.approx((3 * (1 + slots) + 2) * size, rel=0.01)


def test_sums_over_the_fork_point_hold_one_model_size_more() -> None:
    plans = [
        estimate_run(recipe(fm.ForkMerge("per_auxiliary", search=search), model=lambda: wide_net(nn.Identity())))
        for search in ("greedy", "sums")
    ]
    assert plans[1].memory["total"] - plans[0].memory["total"] == plans[0].memory["merged"]


def test_frozen_parameters_are_counted_once_and_shared_by_workers_which_hold_a_spare_branch() -> None:
    model = seeded(frozen_net)
    fixed = sum(t.nbytes for t in model.body[0].state_dict().values())
    few, many = (estimate_run(recipe(fm.ForkMerge(m), model=model)) for m in ("mixed", "per_auxiliary"))
    assert few.memory["fixed"] == many.memory["fixed"] == fixed
    assert "workers" not in few.memory
    two, three = (estimate_run(recipe(fm.ForkMerge("mixed"), model=model), workers=w).memory["workers"] for w in (2, 3))
    assert three - two > few.memory["branches"] / 2
    assert two == 2 * (three - two) + fixed


def wide_net(norm: nn.Module | None = None) -> nn.Module:
    """Wide enough for weights to outweigh padding and the JSON around them."""
    net = plain_net()
    net.body = nn.Sequential(nn.Linear(6, 4000), norm or nn.BatchNorm1d(4000), nn.ReLU(), nn.Linear(4000, 8))
    return net


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (fm.ForkMerge("mixed", interval=3, keep_branches=True), {}),
        (fm.ForkMerge("per_auxiliary", interval=3, floor=True, optimizer_state="average"), {}),
        (fm.ForkMerge("mixed", interval=4, checkpoint="best_so_far"), {}),
        (fm.ForkMerge("mixed", interval=8), {"checkpoint_every": 3}),
    ],
    ids=["kept", "floor", "snapshots", "inside"],
)
def test_disk_is_what_the_folder_grows_to(algorithm: fm.ForkMerge, options: Any, tmp_path: Path) -> None:
    made = recipe(algorithm, model=wide_net, steps=8, options=options)
    plan = estimate_run(made)
    largest: dict[str, int] = {}

    def observe(event: Any) -> None:
        if isinstance(event, CheckpointWritten):
            for part in ("checkpoints", "branches"):
                files = (tmp_path / "run" / part).rglob("*.safetensors")
                largest[part] = max(largest.get(part, 0), sum(file.stat().st_size for file in files))

    made.fit(folder=tmp_path / "run", on_event=observe)
    assert 0.95 * largest["checkpoints"] < plan.disk["checkpoints"] < 1.7 * largest["checkpoints"]
    assert largest["branches"] == pytest.approx(plan.disk["branches"], rel=0.02, abs=1)
    assert plan.disk["model"] == pytest.approx((tmp_path / "run/model.safetensors").stat().st_size, rel=0.02)
    assert plan.disk["checkpoints"] == CHECKPOINTS_KEPT * plan.disk["checkpoint"]
