"""All combinations of policies, with a branch that diverges: nothing that is not finite reaches the others."""

from __future__ import annotations

from itertools import product

import forkmerge as fm
from _asserts import bits
from problems import ADAM, diverging_problem, fit, noisy_net

POLICIES = {
    "checkpoint": ("last", "best_in_interval", "best_so_far"),
    "optimizer_state": ("keep", "average", "reset"),
    "bn": ("average", "recompute"),
    "select": ("last", "best"),
    "floor": (False, True),
}


def test_a_diverged_branch_spoils_no_other_under_any_combination_of_policies() -> None:
    combinations = [dict(zip(POLICIES, values, strict=True)) for values in product(*POLICIES.values())]
    assert len(combinations) == 72
    for policies in combinations:
        algorithm = fm.ForkMerge(
            "per_auxiliary", interval=4, search="fixed", validate_every=2, bn_batches=2, **policies
        )
        run = fit(algorithm, diverging_problem(6, "odd"), noisy_net, optimizer=ADAM)
        assert all(tensor.isfinite().all() for tensor in bits(run).values()), policies
        first, second, third = run.rounds
        for name in ("alone", "aux"):
            assert all(r.branches[name].fault is None for r in (first, second, third)), policies
            assert all(loss is not None for loss in third.branches[name].losses.values()), policies
