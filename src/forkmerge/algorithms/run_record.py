"""What a run gives back: plain numbers, JSON-serialisable, and the trained model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from forkmerge.algorithms.table_data import Cell, Column, Table, show_metrics, show_number, show_share, show_shares
from forkmerge.engine.storage.records import Record
from forkmerge.errors import printable
from forkmerge.problem.display import Display, Displayed

_MOST_BRANCHES = 8  # columns that can be read side by side
_MOST_FAULTS = 20  # faults, and layer groups, that a table's notes name


@dataclass(frozen=True)
class BranchRecord(Record):
    """One branch in one round.

    Args:
        task_weights: ν of the branch.
        score: Validation score of what entered the merge; None in a refit, which scores nothing.
        metrics: The target's metrics behind the score.
        losses: Mean training loss per task over the round.
        entered_step: Step of the checkpoint that entered the merge.
        fault: Why the branch was given coefficient 0 without being tried, if it was.
        search_score: Its score in the metric of `search_by`, which ranked it; None where that is `score`.
        lr_scale: The branch's factor on the learning rate.
        averaged: Of how many iterates the weights that entered are the mean; None where they are the branch's own.
    """

    not_finite: ClassVar[float | None] = None

    task_weights: dict[str, float]
    score: float | None
    metrics: dict[str, float]
    losses: dict[str, float]
    entered_step: int
    fault: str | None = None
    search_score: float | None = None
    lr_scale: float = 1.0
    averaged: int | None = None


@dataclass(frozen=True)
class Candidate(Record):
    """One combination of branches that was tried.

    Args:
        coefficients: Λ by branch.
        score: Its validation score, in the metric of `search_by` where there is one; None if that is not finite.
        is_bound: Whether the candidate lost a race before all examples were evaluated: its score is at most `score`.
        groups: Λ by layer group and branch, where groups have their own; `coefficients` are then their mean.
    """

    not_finite: ClassVar[float | None] = None

    coefficients: dict[str, float]
    score: float | None
    is_bound: bool = False
    groups: dict[str, dict[str, float]] | None = None


@dataclass(frozen=True)
class Round(Record):
    """One round: from a fork at step `start` to the merge at step `end`.

    Args:
        index: Rounds are counted from 1.
        phase: "search" or "refit"; "pretraining" where the model returned was not chosen among these.
        start: Step of the fork.
        end: Step of the merge.
        branches: Every branch by name.
        candidates: Every combination tried, in order.
        coefficients: Λ by branch; empty if every branch was faulty and the last good state was kept.
        score: Validation score of the merge.
        relevance: λ_k = Σ_b Λ_b s_b ν^b_k by task, s_b the branch's `lr_scale`.
        kept: Branches that go on into the next round.
        floor_score: Validation score of the unmerged target-only run, where `floor=True`.
        seconds: Wall time by phase: train, rank, search, merge.
        metrics: The target's metrics behind `score`.
        examples: What a race of candidates took, in examples: `evaluated`, the lower `bound` of any race in the same
            order, and `full`, one pass per candidate. Empty where every candidate took a full pass.
        certainty: Share of resamples in which the winner of the search beat the target-only branch, where
            `confidence` asks for it.
        skipped: Branches that a refit did not train: neither this merge nor a later one takes anything of them.
        search_score: Score of the merge in the metric of `search_by`, which chose it; None where that is `score`.
        groups: Λ by layer group and branch, where groups have their own: `coefficients`, and so `relevance`, are then
            means over the groups, each weighted by its parameters.
    """

    not_finite: ClassVar[float | None] = None

    index: int
    phase: str
    start: int
    end: int
    branches: dict[str, BranchRecord]
    candidates: list[Candidate]
    coefficients: dict[str, float]
    score: float | None
    relevance: dict[str, float]
    kept: list[str]
    floor_score: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    examples: dict[str, int] = field(default_factory=dict)
    certainty: float | None = None
    skipped: list[str] = field(default_factory=list)
    search_score: float | None = None
    groups: dict[str, dict[str, float]] | None = None

    @property
    def error(self) -> str | None:
        """The metric that the score is, turned round, where lower is better; None where higher is, or of several."""
        if self.score is None or len(self.metrics) != 1:
            return None
        ((name, value),) = self.metrics.items()
        is_turned = value == -self.score and math.copysign(1, value) != math.copysign(1, self.score)
        return name if is_turned else None

    @property
    def reached(self) -> str:
        """What the merge reached on validation data, as it is told: an error as one, under its name."""
        name, sign = shown_score([self])
        return "" if self.score is None else f"{name} {show_number(sign * self.score)}"


@dataclass(repr=False)
class Run(Record, Displayed):
    """The result of `fit`.

    Args:
        algorithm: Name of the algorithm.
        target: The target task.
        steps: Training steps T.
        seed: The run's seed.
        score: Validation score of the returned model before any refit; None if nothing was scored.
        metrics: The target's validation metrics behind it.
        final: Which model is returned: "last merge", "best merge", "floor", "refit" or "joint".
        rounds: Every round, search first, then refit.
        probes: Validation scores of the ranking runs, if the branches were built from some.
        notes: What a reader should know: diverged branches, a refit given up, parameters without gradient.
        settings: The algorithm's and the training's resolved options.
        seconds: Wall time by phase over the whole run.
        environment: Versions, threads and machine type that the bits depend on.
        test: Test metrics, once they have been measured after the fit.
        trained_steps: Steps of every branch, and of the floor, over all phases.
        verdict: How the model compares with single-task training, once that has been measured after the fit.
        model: The trained module (not part of the JSON form).
        reference: Weights of single-task training, where `floor=True` (not part of the JSON form).
    """

    not_finite: ClassVar[float | None] = None
    unwritten: ClassVar[tuple[str, ...]] = ("model", "reference")

    algorithm: str
    target: str
    steps: int
    seed: int
    score: float | None
    metrics: dict[str, float]
    final: str
    rounds: list[Round]
    probes: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    test: dict[str, float] | None = None
    trained_steps: dict[str, int] = field(default_factory=dict)
    verdict: dict[str, Any] | None = None
    model: nn.Module | None = field(default=None, repr=False, compare=False)
    reference: dict[str, torch.Tensor] | None = field(default=None, repr=False, compare=False)

    @property
    def searched(self) -> list[Round]:
        """The rounds that searched coefficients."""
        return [r for r in self.rounds if r.phase in ("search", "pretraining")]

    @property
    def coefficients(self) -> list[dict[str, float]]:
        """Λ of every searched round."""
        return [r.coefficients for r in self.searched]

    @property
    def relevance(self) -> dict[str, float]:
        """λ of every task in the model returned: the mean over the rounds behind it, each weighted by its steps."""
        if self.final == "floor":
            return {self.target: 1.0}
        behind = self.searched or self.rounds  # a refit of fixed coefficients has searched nothing
        rounds = [r for r in behind if r.coefficients and r.relevance and r.end <= self.last_step]
        total = sum(r.end - r.start for r in rounds)
        tasks = dict.fromkeys(task for r in rounds for task in r.relevance)
        return {t: sum(r.relevance.get(t, 0.0) * (r.end - r.start) for r in rounds) / total for t in tasks}

    @property
    def last_step(self) -> int:
        """The step at which the model returned was merged: an earlier one than the last where the best was selected."""
        refitted = [r.end for r in self.rounds if r.phase == "refit"]
        if refitted and self.final == "refit":
            return max(refitted)
        best = self._best_round
        return best.end if best is not None and self.final in ("best merge", "best validation") else self.steps

    @property
    def remarks(self) -> list[str]:
        """What the record says that a reader may overlook, beside the notes taken while it ran."""
        best, last = self._best_round, self.searched[-1] if self.searched else None
        if best is None or last is None or last.score is None or self.final not in ("last merge", "last step"):
            return []
        if best.score is None or not last.score < best.score:
            return []
        name, sign = shown_score([best, last])
        fell = "the validation score fell" if sign > 0 else f"on validation data, {name} rose"
        return [
            f"{fell} from {show_number(sign * best.score)} at step {best.end} to {show_number(sign * last.score)} "
            f'at the {self.final}, which is returned: select="best" returns the best one.'
        ]

    @property
    def _best_round(self) -> Round | None:
        """The searched round of the highest score, by what merges were chosen; of equals the first."""
        rounds = [r for r in self.rounds if r.phase == "search"]
        scores = {r.index: r.score if r.search_score is None else r.search_score for r in rounds}
        scored = [r for r in rounds if scores[r.index] is not None]
        return max(scored, key=lambda r: scores[r.index] or 0.0, default=None)

    @property
    def title(self) -> str:
        """What was run, in one line."""
        return f"{self.algorithm} on {self.target!r}: {self.steps} steps, seed {self.seed}, model: {self.final}"

    @property
    def test_split(self) -> str:
        """What `test` was measured on: "test", or "held out", validation examples kept from the search."""
        return "held out" if (self.verdict or {}).get("is_held_out") else "test"

    @property
    def facts(self) -> dict[str, str]:
        """What it reached, each fact as one line under its name; `repr`, notebooks and the terminal print these."""
        before = ", before the refit" * (self.final == "refit")
        facts = {"validation": show_metrics(self.metrics) + before} if self.metrics else {}
        if self.test is not None:
            facts[self.test_split] = show_metrics(self.test)
        if len(self.relevance) > 1:
            facts["relevance"] = show_shares(self.relevance)
        return facts

    @property
    def legend(self) -> list[str]:
        """What the words for numbers of merges mean, where there are any."""
        if "relevance" not in self.facts:
            return []
        return ["coefficients (Λ): shares of the branches in a merge; relevance (λ): the task weights they amount to"]

    def __repr__(self) -> str:
        lines = [self.title, *(f"  {name:<11} {text}" for name, text in self.facts.items())]
        for r in self.searched:
            if len(r.branches) > 1:
                shares = show_shares(r.coefficients) or "all faulty"
                lines.append(f"  round {r.index:<3} step {r.end:<7} {r.reached or 'score –'}  {shares}")
                lines += [f"  {text}" for text in _group_shares(r)]
        lines += [f"  note: {note}" for note in (*self.notes, *self.remarks)]
        return printable("\n".join([*lines, *(f"  {text}" for text in self.legend)]))

    def display(self) -> Display:
        """Return what a notebook shows of the run."""
        table = rounds_table(self.searched)
        head, notes = [column.title for column in table.columns], [f"note: {n}" for n in (*self.notes, *self.remarks)]
        return Display(self.title, self.facts, head, table.texts(), (*notes, *self.legend))


def shown_score(rounds: Sequence[Round]) -> tuple[str, int]:
    """Return what the scores of rounds are called where they are shown, and their sign there: an error is no score."""
    errors = {r.error for r in rounds if r.score is not None}
    name = errors.pop() if len(errors) == 1 else None
    return ("score", 1) if name is None else (name, -1)


def rounds_table(
    rounds: Sequence[Round],
    *,
    with_branch_scores: bool = False,
    with_costs: bool = False,
    most_branches: int = _MOST_BRANCHES,
) -> Table:
    """Return a row for every round: step, coefficients and score.

    Args:
        rounds: The rounds.
        with_branch_scores: Add every branch's own score, in brackets behind its coefficient.
        with_costs: Add how many candidates were tried, and the seconds.
        most_branches: Columns of branches; where there are more, only the heaviest of each round is named.
    """
    # Branches first, then earlier merges, where some were among what a merge could take.
    names = list(
        dict.fromkeys(name for part in ("branches", "coefficients") for r in rounds for name in getattr(r, part))
    )
    score, sign = shown_score(rounds)
    few = len(names) <= most_branches
    columns = [Column("round", is_words=True), Column("step", decimals=0)]
    if few:
        columns += [Column(name, decimals=2) for name in names]
    else:
        columns += [Column("heaviest branch", is_words=True), Column("its coefficient", decimals=2)]
        columns.append(Column("branches taken", decimals=0))
    columns.append(Column(score))
    if with_costs:
        columns += [Column("candidates", decimals=0), Column("seconds", decimals=2)]
    rows = []
    for r in rounds:
        cells = [Cell(text=str(r.index)), Cell(float(r.end))]
        cells += [_share(r, name, sign * with_branch_scores) for name in names] if few else _heaviest(r)
        cells.append(Cell(None if r.score is None else sign * r.score))
        if with_costs:
            cells += [Cell(float(len(r.candidates))), Cell(sum(r.seconds.values()))]
        rows.append(tuple(cells))
    faults = tuple(f"round {r.index}: {name}: {b.fault}" for r in rounds for name, b in r.branches.items() if b.fault)
    own = f"coefficients by branch, each with the branch's own {score} in brackets"
    title = own if with_branch_scores else "Rounds"
    groups = tuple(text for r in rounds for text in _group_shares(r))
    return Table(title, tuple(columns), tuple(rows), (*faults[:_MOST_FAULTS], *groups[:_MOST_FAULTS]))


def _group_shares(r: Round) -> list[str]:
    """The coefficients of layer groups, where they have their own: the table shows their means."""
    return [f"round {r.index}: {group}: {show_shares(shares)}" for group, shares in (r.groups or {}).items()]


def _share(r: Round, name: str, sign: int) -> Cell:
    """A branch's coefficient, and its score with that sign; without it where the sign is 0."""
    if name not in r.coefficients or name in r.skipped:
        return Cell(text="faulty") if name in r.branches else Cell()
    score = r.branches[name].score if sign and name in r.branches else None
    if score is None:
        return Cell(r.coefficients[name])
    return Cell(text=f"{show_share(r.coefficients[name])} ({show_number(sign * score)})")


def _heaviest(r: Round) -> list[Cell]:
    name = max(r.coefficients, key=r.coefficients.__getitem__, default="")
    taken = sum(value > 0 for value in r.coefficients.values())
    return [Cell(text=name), Cell(r.coefficients.get(name)), Cell(float(taken))]
