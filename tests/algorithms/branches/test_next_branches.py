"""Which branches go on: pruned once, in turns, or all."""

from __future__ import annotations

import forkmerge as fm
from problems import fit

MANY = {
    "alone": {"tgt": 1.0},
    "aux": {"tgt": 1.0, "aux": 1.0},
    "odd": {"tgt": 1.0, "odd": 1.0},
    "little": {"tgt": 1.0, "aux": 0.3},
}


def test_all_go_on_unless_pruning_or_turns_say_otherwise() -> None:
    assert all(r.kept == list(MANY) for r in fit(fm.ForkMerge(MANY, interval=4)).rounds)


def test_pruning_happens_once() -> None:
    run = fit(fm.ForkMerge(MANY, interval=3, prune_to=2, prune_after=2))
    assert [len(r.branches) for r in run.rounds] == [4, 4, *[len(run.rounds[1].kept)] * 2]
    assert "alone" in run.rounds[1].kept


def test_after_the_last_round_nobody_takes_a_turn() -> None:
    run = fit(fm.ForkMerge(MANY, interval=6, per_round=1))
    assert run.rounds[0].kept != list(run.rounds[0].branches)
    assert run.rounds[-1].kept == list(run.rounds[-1].branches)
