"""From the state of a run to its events: what `Rounds` sends, and what goes into the record of the run's folder."""

from __future__ import annotations

import copy
from typing import Any

from forkmerge.algorithms.checkpoint import Phase, RunState
from forkmerge.algorithms.events.run_events import (
    BranchScored,
    BranchTrained,
    CheckpointWritten,
    Event,
    Merged,
    ModelSelected,
    Notice,
    OnEvent,
    PhaseStarted,
    ProbeScored,
    RoundFinished,
    RunResumed,
    StepProgress,
    TrainingFailed,
    record_line,
)
from forkmerge.algorithms.floor import FLOOR
from forkmerge.algorithms.run_record import Round
from forkmerge.engine.storage.run_folder import NoStore, RunFolder
from forkmerge.engine.training.branch import BranchResult


class RoundEvents:
    """Sends the events of one run. They hold copies: whoever gets them cannot change the run.

    Args:
        on_event: Gets them.
        store: Whose record gets those that are recorded.
    """

    def __init__(self, on_event: OnEvent, store: RunFolder | NoStore) -> None:
        self.on_event, self.store = on_event, store

    def warn(self) -> None:
        """Tell what is wrong with the folder."""
        for text in self.store.warnings:
            self.on_event(Notice(text=text, is_warning=True))

    def probe(self, branch: str, step: int, score: float) -> None:
        """Tell the score of a ranking run."""
        self._send(ProbeScored(branch=branch, step=step, score=score))

    def start_search(self, run: RunState, until: int, *, target: str, seed: int, branch_bytes: int = 0) -> None:
        """Tell that a run begins, with the search of coefficients."""
        names = [mixture.name for mixture in run.mixtures]
        line: dict[str, Any] = {"event": "start", "phase": run.phase.value, "round": run.round, "target": target}
        line |= {"steps": until, "branches": names, "seed": seed}
        self.store.record({**line, **({"branch_bytes": branch_bytes} if branch_bytes else {})})
        self.start_phase(run, until, branch_bytes)

    def start_phase(self, run: RunState, until: int, branch_bytes: int = 0) -> None:
        """Tell that a phase begins."""
        weights = {mixture.name: dict(mixture.task_weights) for mixture in run.mixtures}
        has_floor = run.floor is not None or run.shares_floor
        self._send(
            PhaseStarted(
                **_position(run), until=until, branches=weights, has_floor=has_floor, branch_bytes=branch_bytes
            )
        )

    def progress(self, run: RunState, branch: str, result: BranchResult) -> None:
        """Tell that a branch has been trained further."""
        position = {**_position(run), "step": result.state.step}
        reports = {what: dict(tasks) for what, tasks in result.reports.items()}
        self._send(
            StepProgress(**position, branch=branch, losses=dict(result.losses), seconds=result.seconds, reports=reports)
        )

    def trained(self, run: RunState) -> None:
        """Tell that all branches have reached the end of a round."""
        for mixture in run.mixtures:
            self._send(BranchTrained(**_position(run), branch=mixture.name, losses=run.mean_losses(mixture.name)))

    def finish_round(self, run: RunState, finished: Round) -> None:
        """Tell what a round, which is the one under way, came to."""
        record, position = copy.deepcopy(finished), _position(run)
        for name, branch in record.branches.items():
            if run.phase is Phase.SEARCH:
                self.on_event(
                    BranchScored(
                        **position,
                        branch=name,
                        score=branch.score,
                        metrics=dict(branch.metrics),
                        entered_step=branch.entered_step,
                        fault=branch.fault,
                    )
                )
        self.on_event(
            Merged(
                **position,
                coefficients=dict(record.coefficients),
                score=record.score,
                metrics=dict(record.metrics),
                relevance=dict(record.relevance),
                candidates=list(record.candidates),
                certainty=record.certainty,
                floor_score=record.floor_score,
            )
        )
        self._send(RoundFinished(**position, record=record))

    def select(self, run: RunState) -> None:
        """Tell which model the search has come to."""
        selection = run.selection
        assert selection is not None
        position = {**_position(run), "step": selection.step}
        final, metrics = selection.final or "", dict(selection.metrics)
        self._send(ModelSelected(**position, final=final, score=selection.score, metrics=metrics))

    def save(self, run: RunState, until: int) -> None:
        """Tell that a checkpoint was written."""
        self._send(CheckpointWritten(**_position(run), until=until, steps=_steps(run)))

    def resume(self, run: RunState, until: int) -> None:
        """Tell where a run goes on."""
        self._send(RunResumed(**_position(run), until=until, steps=_steps(run)))

    def fail(self, run: RunState | None, reason: str) -> None:
        """Tell that nothing was learned; before the first fork there is no state yet."""
        position = {"phase": Phase.SEARCH.value, "round": 1, "step": 0} if run is None else _position(run)
        self._send(TrainingFailed(**position, reason=reason))

    def _send(self, event: Event) -> None:
        line = record_line(event)
        if line is not None:
            self.store.record(line)
        self.on_event(event)


def _position(run: RunState) -> dict[str, Any]:
    return {"phase": run.phase.value, "round": run.round, "step": run.step}


def _steps(run: RunState) -> dict[str, int]:
    names = [mixture.name for mixture in run.mixtures] + [FLOOR] * (run.floor is not None)
    return dict(zip(names, (state.step for state in run.trained), strict=False))
