"""Which branches a round trains where only some do: those of single auxiliaries take turns, by their coefficients.

A branch takes turns if it trains on some of the auxiliaries; those with none of them, or all, train in every round.
After a merge the better half of those that took their turn stays, and the others rest: the branches that have rested
longest, or were never trained, take their places. Or, by successive halving, the worse half of them is left out for
good whenever all have had a turn. Or, by the rule called win-stay, lose-shift, whoever got its share of the merge
stays; a branch with all auxiliaries then takes turns, too, and if asked for the one without any. Everything follows
from the rounds that are recorded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from forkmerge.algorithms.checkpoint import RunState
from forkmerge.engine.training.options import Mixture
from forkmerge.engine.training.state import State

Turns = Literal["rotation", "halving", "win_stay", "win_stay_all"]
"""How branches take turns."""

ROTATION: Turns = "rotation"
HALVING: Turns = "halving"
WIN_STAY: Turns = "win_stay"
WIN_STAY_ALL: Turns = "win_stay_all"

_EQUAL = 1 - 1e-9
"""An equal share of a merge, times the number of its branches: thirds do not add up to 1 exactly."""

Turn = tuple[Collection[str], Mapping[str, float]]
"""The branches that a round trained, and the coefficients of its merge."""


@dataclass(frozen=True)
class Rotation:
    """Which branches take turns, and how many of them a round trains.

    Args:
        mixtures: All branches.
        auxiliaries: The auxiliary tasks.
        per_round: How many of those that take turns a round trains; None trains all. One more where all take turns, so
            that a round has as many branches.
        turns: "rotation", in which everybody returns, "halving", "win_stay", or "win_stay_all".
    """

    mixtures: Sequence[Mixture]
    auxiliaries: Sequence[str]
    per_round: int | None
    turns: Turns = ROTATION

    @property
    def turning(self) -> list[str]:
        """The branches that take turns, by when their first one is; none where a round trains all of them."""
        counts = {mixture.name: len(mixture.active(self.auxiliaries)) for mixture in self.mixtures}
        most_first = sorted((name for name, count in counts.items() if count), key=lambda name: -counts[name])
        if self.turns == WIN_STAY_ALL:
            names = [*(name for name, count in counts.items() if not count), *most_first]
        elif self.turns == WIN_STAY:
            names = most_first
        else:
            names = [name for name, count in counts.items() if 0 < count < len(self.auxiliaries)]
        return names if self.per_round is not None and len(names) > self._places else []

    @property
    def _places(self) -> int:
        """How many of those that take turns a round trains."""
        return (self.per_round or 0) + (self.turns == WIN_STAY_ALL)

    def first(self) -> list[Mixture]:
        """Return the branches of the first round: of those that take turns the first ones."""
        return self._with(self.turning[: self._places])

    def after(self, turns: Sequence[Turn]) -> list[str]:
        """Return the names of the branches that the next round trains.

        Of those that took their turn in the last round half of `per_round`, rounded down, stay: those of the largest
        coefficients, none of coefficient 0. Then come those whose last turn was longest ago, never first; among them
        those of the larger coefficient then; among equals those listed first.

        By halving, all have a turn in the order listed. Then the half of them with the larger coefficients, rounded up
        and no fewer than a round trains, has another one, and so on. Where fewer are left to have a turn than a round
        trains, those of the largest coefficients have one more.

        By win-stay, lose-shift, those with the most auxiliaries come first, after the target's own where that takes
        turns, too. Whoever got at least an equal share of the merge, one over the number of the branches that were
        trained, stays; for the others come those whose last turn was longest ago.

        Args:
            turns: The rounds so far.

        References:
            Robbins, Some aspects of the sequential design of experiments, 1952: stay with a winner, shift from a loser.
        """
        choose = {ROTATION: self._rotated, HALVING: self._halved}.get(self.turns, self._shifted)
        chosen = choose(turns)
        return [mixture.name for mixture in self._with(chosen)]

    def _rotated(self, turns: Sequence[Turn]) -> list[str]:
        turning, count = self.turning, self.per_round or 0
        latest: dict[str, int] = {}
        shares: dict[str, float] = {}
        for index, (trained, coefficients) in enumerate(turns, 1):
            latest.update(dict.fromkeys(trained, index))
            shares.update({name: coefficients.get(name, 0.0) for name in trained})
        helpful = [name for name in turning if latest.get(name) == len(turns) and shares[name] > 0]
        staying = sorted(helpful, key=lambda name: -shares[name])[: count // 2]
        others = sorted(
            (name for name in turning if name not in staying),
            key=lambda name: (latest.get(name, 0), -shares.get(name, 0.0)),
        )
        return [*staying, *others[: count - len(staying)]]

    def _shifted(self, turns: Sequence[Turn]) -> list[str]:
        latest = {name: index for index, (trained, _) in enumerate(turns, 1) for name in trained}
        trained, coefficients = turns[-1]
        staying = [n for n in self.turning if n in trained and coefficients.get(n, 0.0) * len(trained) >= _EQUAL]
        others = sorted((n for n in self.turning if n not in staying), key=lambda name: latest.get(name, 0))
        return [*staying, *others[: self._places - len(staying)]]

    def _halved(self, turns: Sequence[Turn]) -> list[str]:
        left, count = self.turning, self.per_round or 0
        waiting, chosen, shares = left[count:], left[:count], dict.fromkeys(left, 0.0)
        for _, coefficients in turns:
            shares.update({name: coefficients.get(name, 0.0) for name in chosen})
            ranked = sorted(left, key=lambda name: -shares[name])  # stable: of equals the one listed first
            if not waiting:
                better = ranked[: max(count, -(-len(left) // 2))]
                waiting = left = [name for name in left if name in better]
            chosen, waiting = waiting[:count], waiting[count:]
            chosen += [name for name in ranked if name in left and name not in chosen][: count - len(chosen)]
        return chosen

    def note(self, rounds: int) -> str | None:
        """Say it where there are too few rounds for every branch to have a turn."""
        waiting, count = len(self.turning) - self._places, self._places
        staying = {ROTATION: count // 2, WIN_STAY_ALL: 1}.get(self.turns, 0)
        fresh = count - staying  # in every round after the first
        if not self.turning or waiting <= (rounds - 1) * fresh:
            return None
        never = waiting - (rounds - 1) * fresh
        needed = 1 - (-waiting // fresh)
        return (
            f"{never} of {len(self.turning)} branches may never have a turn in {rounds} rounds: with "
            f"per_round={self.per_round} that takes {needed} rounds"
        )

    def _with(self, chosen: Collection[str]) -> list[Mixture]:
        turning = set(self.turning)
        return [mixture for mixture in self.mixtures if mixture.name not in turning or mixture.name in chosen]


def go_on_with(
    run: RunState, names: Collection[str], every: Sequence[Mixture], coefficients: Mapping[str, float]
) -> None:
    """Let a run, after a merge, go on with the branches of some names.

    One that has rested forks from the merge like all others. Its optimizer is that of the branch of the largest
    coefficient, for its own would be as old as its last turn; it is a fresh one where the merge took earlier merges
    only. A method, which weighs tasks of a mixture, begins anew.

    Args:
        run: Where the run stands.
        names: The branches to go on with.
        every: All branches, in order; none where no round follows, and so nobody returns.
        coefficients: Those of the merge.
    """
    trained = dict(zip((mixture.name for mixture in run.mixtures), run.branches, strict=True))
    source = trained[max(trained, key=lambda name: coefficients.get(name, 0.0))]
    is_taken = any(coefficients.get(name, 0.0) for name in trained)
    run.keep(names)
    kept = dict(zip((mixture.name for mixture in run.mixtures), run.branches, strict=True))
    branches = {mixture.name: mixture for mixture in (*every, *run.mixtures)}
    run.mixtures = [mixture for name, mixture in branches.items() if name in names]
    run.branches = [kept[m.name] if m.name in kept else _returned(source, is_taken) for m in run.mixtures]


def _returned(source: State, is_taken: bool) -> State:
    state = replace(source.clone(), method={})
    if not is_taken:  # a merge of earlier merges alone: no optimizer comes with it
        state.reset_optimizer()
    return state
