"""Everything a run has to remember between two moments, and its form on disk."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from forkmerge.algorithms.run_record import Round
from forkmerge.engine.storage.run_folder import NoStore, RunFolder
from forkmerge.engine.training.branch import BranchResult
from forkmerge.engine.training.options import Mixture
from forkmerge.engine.training.state import State
from forkmerge.errors import StoreError
from forkmerge.problem.exact_sum import add_exactly, rounded


class Phase(Enum):
    """What a run is doing: searching coefficients, repeating them on more data, or nothing any more."""

    SEARCH = "search"
    REFIT = "refit"
    DONE = "done"


@dataclass
class Snapshot:
    """The weights of a branch at the step where they scored best."""

    score: float
    step: int
    weights: State


@dataclass
class Average:
    """The mean of so many iterates of a branch."""

    count: int
    weights: State


@dataclass(frozen=True)
class Selection:
    """The model that the search phase would return.

    Args:
        score: Its validation score; None where nothing was scored.
        metrics: Its validation metrics.
        step: The step it was found at: a refit ends there.
        replays: Whether a refit repeats the merges; otherwise one branch is trained on the target alone.
        final: What it is, such as "last merge"; None where only the refit will tell.
    """

    score: float | None
    metrics: dict[str, float]
    step: int
    replays: bool
    final: str | None = None


@dataclass
class RunState:
    """Where a run stands.

    Args:
        phase: What the run is doing.
        mixtures: The branches' names and task weights, after pruning.
        branches: Their states.
        merged: The weights of the last merge: what every branch forked from, and what is kept if all go wrong.
        round_start: Step at which the current round forked.
        rounds: Finished rounds.
        losses: Exact sums of the current round's losses, `{branch: {task: [sum over batches, batches]}}`.
        bad_steps: First step whose loss was not finite, in the current round, `{branch: {task: step}}`.
        first_bad_step: The first of them in the whole run.
        trained_steps: Steps trained so far, by branch, the floor's included.
        seconds: Training time of the current round.
        snapshots: Best weights by branch, for checkpoint policies other than "last".
        initial: The state a refit starts from.
        floor: The unmerged target-only run, once it differs from every branch.
        shares_floor: Whether the target-only branch still is that run.
        best: Weights of the best merge so far, with its score.
        searched: What the search phase would return, while a refit runs.
        reference: Reference metrics of the criterion.
        selection: What will be returned, or refitted, once the search is over.
        probes: Scores of ranking runs.
        notes: Remarks for the reader of the record.
        saves: Checkpoints written so far.
        averages: Means of iterates of the current round, by branch.
        earlier: Weights of the merges before the last one, the latest first, where a search may take them.
    """

    phase: Phase
    mixtures: list[Mixture]
    branches: list[State]
    merged: State
    round_start: int = 0
    rounds: list[Round] = field(default_factory=list)
    losses: dict[str, dict[str, tuple[list[float], int]]] = field(default_factory=dict)
    bad_steps: dict[str, dict[str, int]] = field(default_factory=dict)
    first_bad_step: int | None = None
    trained_steps: dict[str, int] = field(default_factory=dict)
    untouched: list[str] | None = None
    seconds: float = 0.0
    snapshots: dict[str, Snapshot] = field(default_factory=dict)
    initial: State | None = None
    floor: State | None = None
    shares_floor: bool = False
    best: Snapshot | None = None
    searched: State | None = None
    reference: dict[str, float] | None = None
    selection: Selection | None = None
    probes: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    saves: int = 0
    averages: dict[str, Average] = field(default_factory=dict)
    earlier: list[State] = field(default_factory=list)

    @property
    def step(self) -> int:
        """Global step that all branches have reached; inside a round some may be ahead, where it was interrupted."""
        return min(state.step for state in self.trained)

    @property
    def trained(self) -> list[State]:
        """What is trained: the branches and, while it is a run of its own, the floor."""
        return [*self.branches, *([self.floor] if self.floor is not None else [])]

    @property
    def round(self) -> int:
        """The round under way, counted from 1 over all phases."""
        return len(self.rounds) + 1

    @property
    def searched_rounds(self) -> list[Round]:
        """The finished rounds of the search phase, which a refit repeats."""
        return [finished for finished in self.rounds if finished.phase == Phase.SEARCH.value]

    @property
    def script(self) -> Round | None:
        """The round of the search that the one under way repeats; None where it repeats none."""
        if self.phase is not Phase.REFIT or self.selection is None or not self.selection.replays:
            return None
        searched = self.searched_rounds
        return searched[len(self.rounds) - len(searched)]

    def note(self, text: str) -> None:
        """Add a remark once."""
        if text not in self.notes:
            self.notes.append(text)

    def add_segment(self, name: str, result: BranchResult) -> None:
        """Add what a segment of a branch took, and note what was odd in it."""
        self.trained_steps[name] = self.trained_steps.get(name, 0) + result.steps
        self.seconds += result.seconds
        for oddity, counts in result.reports.items():
            for task in counts:
                self.note(f"round {self.round}: branch {name!r}: gradient of {task!r} was {oddity}")

    def note_untouched(self, *, all_have_begun: bool = True) -> None:
        """Once all branches have done their first step, name the parameters that had no gradient in any.

        Where branches take turns, some begin later, and may train what the others do not: then nothing is known.
        """
        names, self.untouched = sorted(self.untouched or []), None
        # A refit after a search leaves out branches, which that has looked at.
        if names and all_have_begun and self.searched is None:
            self.note(f"parameters without gradient in every branch at step 0: {', '.join(names)}")

    def add_losses(self, branch: str, result: BranchResult) -> None:
        """Add a segment's losses, each over as many batches as had one, to the round's."""
        losses = self.losses.setdefault(branch, {})
        for task, parts in result.sums.items():
            before, count = losses.get(task, ([], 0))
            losses[task] = (add_exactly(before, parts), count + result.counts[task])
        if result.bad_steps:
            self.bad_steps[branch] = {**result.bad_steps, **self.bad_steps.get(branch, {})}
            steps = [*result.bad_steps.values(), *([] if self.first_bad_step is None else [self.first_bad_step])]
            self.first_bad_step = min(steps)
        if result.steps and result.state.step == result.steps:  # from the first step on
            self.untouched = [n for n in result.untouched if self.untouched is None or n in self.untouched]

    def mean_losses(self, branch: str) -> dict[str, float]:
        """The round's mean loss per task."""
        return {task: rounded(parts) / count for task, (parts, count) in self.losses.get(branch, {}).items()}

    def earlier_merges(self, names: Sequence[str]) -> dict[str, State]:
        """Copies of the merges that the next one may take something of, by name: it is built where the last one is."""
        states = [self.merged.weights(), *self.earlier] if names else []
        return dict(zip(names, states, strict=False))  # as many as there have been

    def keep(self, names: Collection[str]) -> None:
        """Drop all branches but those of the given names."""
        pairs = zip(self.mixtures, self.branches, strict=True)
        rest = [(mixture, state) for mixture, state in pairs if mixture.name in names]
        self.mixtures, self.branches = [m for m, _ in rest], [s for _, s in rest]
        self.snapshots = {name: held for name, held in self.snapshots.items() if name in names}

    def select_merge(self, which: str) -> Selection:
        """Return the "last" merge or the "best" one, whose weights are taken."""
        if which == "best" and self.best is not None:
            self.merged.take_weights(self.best.weights)
            (best,) = (r for r in self.rounds if r.end == self.best.step)
            return Selection(best.score, best.metrics, best.end, replays=True, final="best merge")
        last = self.rounds[-1]
        return Selection(last.score, last.metrics, self.step, replays=True, final="last merge")

    def next_round(self) -> None:
        """Forget what belongs to the current round alone."""
        self.round_start, self.losses, self.bad_steps, self.seconds = self.step, {}, {}, 0.0
        self.averages = {}

    def to_value(self) -> dict[str, Any]:
        """Return plain nested data for the store; weights that all branches share are written once.

        Of the finished rounds it holds the number only: they stand in the folder, and `read_rounds` brings them back.
        """
        synced = all(state.step == self.round_start for state in self.branches)
        value = {name: getattr(self, name) for name in _PLAIN}
        value["phase"] = self.phase.value
        value["outcome"] = {} if self.selection is None else _selection_value(self.selection)
        value["mixtures"] = [mixture.to_value() for mixture in self.mixtures]
        value["rounds"] = len(self.rounds)
        value["branches"] = [(replace(state, rows={}) if synced else state).to_value() for state in self.branches]
        value["snapshots"] = {name: _snapshot_value(snapshot) for name, snapshot in self.snapshots.items()}
        value["best"] = _snapshot_value(self.best) if self.best else None
        means = {
            name: {"count": mean.count, "weights": mean.weights.to_value()} for name, mean in self.averages.items()
        }
        value["averages"], value["earlier"] = means, [state.to_value() for state in self.earlier]
        for name in _STATES:
            state = getattr(self, name)
            value[name] = state.to_value() if state is not None else None
        return value

    @classmethod
    def from_value(cls, value: dict[str, Any], rounds: Sequence[Round]) -> RunState:
        """Return the progress that `to_value` described, after these rounds; `refork` completes its branches."""
        data = {name: value[name] for name in _PLAIN if name in value or name not in _LATER}
        for name, item in data.items():
            if not isinstance(item, _PLAIN[name]):
                raise TypeError(f"{name} is a {type(item).__name__}")
        data["phase"] = Phase(value["phase"])
        data["selection"] = Selection(**value["outcome"]) if value["outcome"] else None
        data["mixtures"] = [Mixture.from_value(item) for item in value["mixtures"]]
        data["rounds"] = list(rounds)
        data["snapshots"] = {name: _snapshot(item) for name, item in value["snapshots"].items()}
        data["best"] = _snapshot(value["best"]) if value["best"] else None
        means = value.get("averages", {})  # earlier versions have neither
        data["averages"] = {name: Average(m["count"], State.from_value(m["weights"])) for name, m in means.items()}
        data["earlier"] = [State.from_value(item) for item in value.get("earlier", [])]
        for name in _STATES:
            data[name] = State.from_value(value[name]) if value[name] else None
        data["branches"] = [State.from_value(item) for item in value["branches"]]
        if data["merged"] is None or not 0 < len(data["branches"]) == len(data["mixtures"]):
            raise ValueError("it has no merge, or no branches to go on with")
        return cls(**data)

    def refork(self) -> None:
        """Give branches that were written without weights those of the last merge."""
        for state in self.branches:
            if not state.rows:
                state.rows = self.merged.weights().rows

    def states(self) -> list[State]:
        """Every state held, for moving them to their devices after a load."""
        loose = [getattr(self, name) for name in _STATES]
        snapshots = [s.weights for s in (*self.snapshots.values(), *([self.best] if self.best else []))]
        means = [mean.weights for mean in self.averages.values()]
        return [*self.branches, *(state for state in loose if state is not None), *snapshots, *means, *self.earlier]

    @property
    def best_score(self) -> float:
        """Score of the best merge so far."""
        return self.best.score if self.best else -math.inf


_STATES = ("merged", "initial", "floor", "searched")
_PLAIN: dict[str, tuple[type, ...]] = {
    "round_start": (int,),
    "losses": (dict,),
    "seconds": (int, float),
    "reference": (dict, type(None)),
    "probes": (dict,),
    "notes": (list,),
    "saves": (int,),
    "bad_steps": (dict,),
    "first_bad_step": (int, type(None)),
    "shares_floor": (bool,),
    "trained_steps": (dict,),
    "untouched": (list, type(None)),
}
# Which checkpoints of earlier versions lack.
_LATER = ("bad_steps", "first_bad_step", "shares_floor", "trained_steps", "untouched")


def read_rounds(store: RunFolder | NoStore, saved: int | list[dict[str, Any]]) -> list[Round]:
    """Return the rounds that a checkpoint stands on, and let the folder hold exactly these.

    Args:
        store: The folder.
        saved: Their number; earlier versions wrote the rounds themselves into the checkpoint.
    """
    values = saved if isinstance(saved, list) else store.rounds.read(saved)
    try:
        rounds = [Round.from_json(value) for value in values]
    except StoreError as error:  # which has no name of a file, and whoever reads this adds it
        raise ValueError(str(error)) from error
    store.rounds.keep([asdict(finished) for finished in rounds])
    return rounds


def _selection_value(selection: Selection) -> dict[str, Any]:
    return {name: item for name, item in asdict(selection).items() if name != "final" or item is not None}


def _snapshot_value(snapshot: Snapshot) -> dict[str, Any]:
    return {"score": snapshot.score, "step": snapshot.step, "weights": snapshot.weights.to_value()}


def _snapshot(value: dict[str, Any]) -> Snapshot:
    return Snapshot(value["score"], value["step"], State.from_value(value["weights"]))
