"""What is wrong with a merge in one's own loop, said before it is believed: untrained branches, scores that mislead."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forkmerge.algorithms.own_loop.ranks import Ranks
from forkmerge.engine.merging.find_merge import Merge
from forkmerge.engine.training.state import State
from forkmerge.errors import ProblemError

_FALLS = 2  # one fall of all branches may be chance on few examples


def check_score(score: object, ranks: str = "first") -> None:
    """Refuse what cannot be called on a model, such as a score that was measured already, and an unknown rank."""
    if ranks not in ("first", "all"):
        raise ProblemError(f"ranks must be first or all, got {ranks!r}.")
    if not callable(score):
        raise ProblemError(
            f"score must be a function of a model, which every candidate is measured by, got {score!r}: "
            "pass e.g. score=lambda model: accuracy(model, validation_data)."
        )


def check_trained(states: Mapping[str, State], merged: State, ranks: Ranks) -> list[str]:
    """Return the branches that are, on all ranks, as the last merge left them; refuse if all are."""
    unchanged = [
        all(torch.equal(row, merged.rows[key]) for key, row in state.rows.items()) for state in states.values()
    ]
    idle = [name for name, is_idle in zip(states, ranks.all(unchanged), strict=True) if is_idle]
    if len(idle) == len(states):
        raise ProblemError(
            "no branch has changed since the last merge: train branch.model with branch.optimizer, not the model "
            "that was forked."
        )
    return idle


def check_equally_trained(idle: Sequence[str], steps: Mapping[str, int]) -> None:
    """Refuse branches that were trained less than others.

    Args:
        idle: Branches that have not changed since the last merge.
        steps: Steps of every branch's optimizer since then.
    """
    if idle:
        raise ProblemError(
            f"branch {idle[0]!r} has not changed since the last merge, while others were trained: train branch.model "
            "of every branch, or pass merge(…, allow_unequal_steps=True) to merge it as it is."
        )
    if len(set(steps.values())) > 1:
        counts = ", ".join(f"{name} {count}" for name, count in steps.items())
        raise ProblemError(
            f"the branches took different numbers of optimizer steps since the last merge ({counts}): a merge compares "
            "branches that were trained equally long. Train them alike (zip stops at the shorter loader), or pass "
            "merge(…, allow_unequal_steps=True)."
        )


def check_scores(merge: Merge, faults: Mapping[str, str]) -> None:
    """Refuse a score that is NaN for every sound branch: nothing could be chosen by it."""
    scores = [score for name, score in merge.branch_scores.items() if name not in faults]
    if scores and all(map(math.isnan, scores)):
        raise ProblemError(
            "the score of every branch is NaN, so no merge can be chosen: call your score on one branch.model and look "
            "where its NaN comes from (no validation examples, 0/0, a metric of one class). The branches are as they "
            "were."
        )


@dataclass
class ScoreWatch:
    """Notices a score that falls while training goes on, as a loss does.

    Args:
        last: Score of the last merge.
        falls: Rounds in a row in which every branch scored lower than the merge it was forked from.
    """

    last: float = math.nan
    falls: int = 0

    def see(self, merge: Merge) -> None:
        """Take in a merge, and warn once two rounds in a row have made all branches score lower."""
        scores = [score for score in merge.branch_scores.values() if math.isfinite(score)]
        self.falls = self.falls + 1 if scores and max(scores) < self.last else 0
        self.last = merge.score
        if self.falls == _FALLS:
            warnings.warn(
                f"in {_FALLS} rounds in a row every branch scored lower than the model it was forked from. If your "
                "score falls as training gets better, as a loss or an error does, return minus it: higher must be "
                "better. Otherwise training makes the target worse: lower the learning rate, or merge more often.",
                stacklevel=3,
            )


def check_state_dict(
    value: object, own: Mapping[str, State], signature: dict[str, list[int]], facts: Mapping[str, Any]
) -> None:
    """Refuse what is not the state of a fork of the same model with the same branches.

    Args:
        value: What was loaded.
        own: The branches' states.
        signature: The model's.
        facts: What of the value is no tensor.
    """
    parts = [value.get(key) for key in ("branches", "merged")] if isinstance(value, Mapping) else [None]
    branches = parts[0]
    if not isinstance(branches, Mapping) or not all(isinstance(part, Mapping) for part in (*parts, *branches.values())):
        raise ProblemError(
            "this is not a fork's state: load_state_dict takes what state_dict of a fork gave, not that of a model or "
            "an optimizer."
        )
    stored_signature = facts.get("parameters", signature)  # which earlier versions did not write
    if stored_signature != signature:
        keys = (key for key in (*stored_signature, *signature) if stored_signature.get(key) != signature.get(key))
        key = next(keys, "their order")
        shapes = [each.get(key, "missing") for each in (stored_signature, signature)]
        raise ProblemError(
            f"the state is that of another model: parameter {key!r} is {shapes[0]} in it and {shapes[1]} in this fork."
        )
    if list(branches) != list(own):
        raise ProblemError(f"the state has branches {', '.join(branches)}, this fork {', '.join(own)}.")
    for name, state in own.items() if facts is value else ():
        stored = [branches[name]["state"]["rows"], state.rows]
        if len({str({key: tuple(row.shape) for key, row in rows.items()}) for rows in stored}) > 1:
            sizes = [sum(row.numel() for row in rows.values()) for rows in stored]
            raise ProblemError(
                f"the state of branch {name!r} is that of another model: it has {sizes[0]} parameters, this fork's "
                f"has {sizes[1]}."
            )
