"""The rounds of a run: train every branch, merge, synchronise, repeat."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor

from forkmerge.algorithms.branches.iterates import add_iterates, with_means
from forkmerge.algorithms.branches.next_branches import next_branches
from forkmerge.algorithms.branches.probes import score_probes
from forkmerge.algorithms.branches.rotation import go_on_with
from forkmerge.algorithms.branches.search_share import search_notes
from forkmerge.algorithms.branches.shared_training import SharedTraining
from forkmerge.algorithms.branches.tail import RoundSteps
from forkmerge.algorithms.checkpoint import Phase, RunState, Snapshot, read_rounds
from forkmerge.algorithms.end_of_round import EndOfRound, MergedRound, TrainedRound, record_of
from forkmerge.algorithms.events.round_events import RoundEvents
from forkmerge.algorithms.events.run_events import OnEvent
from forkmerge.algorithms.floor import (
    FLOOR,
    floor_branch,
    floor_mixture,
    keep_reference,
    part_from_branch,
    select_model,
    start_floor,
)
from forkmerge.algorithms.learned_nothing import check_round, check_run
from forkmerge.algorithms.mixtures import reference_branch
from forkmerge.algorithms.refit import finish_refit, give_up, replay_merge, skip_search, start_refit
from forkmerge.algorithms.run_record import Round
from forkmerge.algorithms.settings import Settings
from forkmerge.algorithms.snapshots import entering_states, take_snapshots, uses_snapshots
from forkmerge.algorithms.validation import Validator
from forkmerge.engine.executors.branch_execution import BranchExecution
from forkmerge.engine.storage.json_files import interpreting
from forkmerge.engine.storage.run_folder import NoStore, RunFolder
from forkmerge.engine.training.branch import BranchResult
from forkmerge.engine.training.interrupts import is_stop_requested, stop_now
from forkmerge.engine.training.release_memory import MappedRows
from forkmerge.engine.training.state import State
from forkmerge.errors import RunFailed

# Serial runs report progress this often per interval, but never cut segments shorter than 50 steps for it.
_REPORTS, _SHORTEST_REPORT = 10, 50


class Rounds:
    """One run of the fork–merge loop, from the start or from a checkpoint to the final weights.

    Args:
        settings: The algorithm's options.
        execution: Trains the branches.
        steps: T.
        store: Where checkpoints and the record go.
        on_event: Called with every event.
        checkpoint_every: Steps between checkpoints inside a round; None checkpoints at merges only.
        shared: What other runs train alike until the first merge; None where there are none.
    """

    def __init__(
        self,
        settings: Settings,
        execution: BranchExecution,
        steps: int,
        *,
        store: RunFolder | NoStore,
        on_event: OnEvent,
        checkpoint_every: int | None,
        shared: SharedTraining | None = None,
    ) -> None:
        self.settings, self.execution, self.steps, self.store = settings, execution, steps, store
        self.binding, self.job, self.target = execution.binding, execution.job, execution.job.problem.target
        self.events, self.checkpoint_every = RoundEvents(on_event, store), checkpoint_every
        self.interval, self.validate_every = settings.interval_of(steps), settings.validate_every_of(steps)
        self.validator = Validator(
            self.binding, self.job.problem, settings.reference, settings.search_examples, self.job.seed
        )
        self.end = EndOfRound(settings, execution, self.validator)
        self.mapped = MappedRows(store.path)
        looks_inside = settings.checkpoint != "last" or settings.average_iterates is not None
        self.shared = None if looks_inside else shared  # which jumps to the end of the round
        self.state: RunState
        self.reference: dict[str, Tensor] | None = None

    def run(self) -> RunState:
        """Run to the end and return the final state, whose `merged` is the model to return."""
        try:
            return self._run()
        except RunFailed as error:
            self.events.fail(getattr(self, "state", None), str(error))
            raise

    def _run(self) -> RunState:
        if not self._restore(self.store.load()):
            self._begin()
        if self.settings.entrants(len(self.state.mixtures)) > 1 and self.state.phase is Phase.SEARCH:
            self.validator.prepare_race()
        if self.state.phase is Phase.SEARCH:
            while self.state.round_start < self.steps:
                self._round()
            self._end_search()
        while self.state.phase is Phase.REFIT and self.state.round_start < self._last_step():
            self._round()
        if self.state.phase is Phase.REFIT:
            check_run(self.state, self.execution.problem(Phase.REFIT.value), self.job.training, self.job.seed)
            self._end_floor()
            finish_refit(self.state)
        return self.state

    def _begin(self) -> None:
        settings, problem = self.settings, self.job.problem
        initial = self.binding.initial()
        probes = score_probes(settings, self.execution, self.validator, initial, self.events)
        rotation = settings.rotation(problem, probes)
        mixtures = rotation.first()
        self.state = RunState(
            phase=Phase.SEARCH,
            mixtures=mixtures,
            branches=[initial.clone() for _ in mixtures],
            merged=self.mapped.copy(initial),
            initial=initial if settings.refit else None,
            probes=probes,
        )
        if settings.floor:
            start_floor(self.state, initial, self.target, paired=self.job.training.paired, settings=settings)
        weights = sum(row.nbytes for row in initial.rows.values()) if settings.keep_branches else 0
        rounds = math.ceil(self.steps / self.interval)
        kept = weights * len(mixtures) * rounds
        self.events.start_search(self.state, self.steps, target=self.target, seed=self.job.seed, branch_bytes=kept)
        groups = 1 if self.end.groups is None else len(self.end.groups.names)
        seen = search_notes(settings, problem, mixtures, self.steps, self.job.training.accumulate, groups)
        notes = self.job.training.rate_note(self.binding.optimizer), *seen, rotation.note(rounds)
        self.state.notes += [note for note in notes if note]
        if not settings.needs_search(len(mixtures)):
            skip_search(self.state, settings.search_for(len(mixtures)), self.steps)
            self.events.start_phase(self.state, self.steps)
        self._save()

    def _restore(self, value: dict[str, Any] | None) -> bool:
        """Go on from a checkpoint, if there is one."""
        self.events.warn()
        if value is None:
            return False
        with interpreting(f"the newest checkpoint in {self.store.path}", "one of a run"):
            self.state = run = RunState.from_value(value, read_rounds(self.store, value["rounds"]))
        value.clear()  # which would hold a second copy of the last merge until this call ends
        run.merged = self.mapped.copy(self.binding.place(run.merged))
        self.binding.attach_weights(run.merged)  # frees the module's own memory before the branches need theirs
        self.binding.give_back()
        run.refork()
        for state in run.states():
            self.binding.place(state)
        self.mapped.rest()
        if run.reference:
            self.validator.set_reference(run.reference)
        self.events.resume(run, self._last_step())
        return True

    def _last_step(self) -> int:
        """The step at which the phase ends: a refit of the best merge ends where that merge was found."""
        selection = self.state.selection
        return selection.step if self.state.phase is Phase.REFIT and selection is not None else self.steps

    def _round(self) -> None:
        run, end = self.state, self._steps().end
        if self.settings.checkpoint == "best_in_interval" and run.step == run.round_start:
            run.snapshots = {}
        if self.shared is not None:
            self.shared.take(run, self._steps(), self.binding, self._take_in)
        for mark in self._pauses():
            if mark <= run.step:
                continue
            self._train_to(mark)
            if run.step < mark:
                self._save()  # which ends the run
            if uses_snapshots(self.state, self.settings) and (
                mark == end or (mark - run.round_start) % self.validate_every == 0
            ):
                take_snapshots(run, self.end, mark, self._fix_reference)
            if self.shared is not None and mark == self._steps().tail:
                self.shared.leave(run, mark)
            if mark in self._steps().iterates:
                add_iterates(run, self.binding)
            is_due = mark != end and self.checkpoint_every and mark % self.checkpoint_every == 0
            if is_due or is_stop_requested():
                self._save()
        self.events.trained(run)
        record = self._merge()
        if record is None:
            give_up(run)
            return
        self.events.finish_round(run, record)
        run.rounds.append(record)
        check_round(run)
        run.next_round()
        self.store.rounds.append(record.index, asdict(record))
        self._save()

    def _steps(self) -> RoundSteps:
        """The steps of the round under way."""
        start, phase = self.state.round_start, self.state.phase
        return RoundSteps.of(self.settings, phase, self.target, start, min(start + self.interval, self.steps))

    def _pauses(self) -> list[int]:
        """The steps of the round under way at which training pauses."""
        reads_here = self.execution.workers == 1 and not self.job.training.loader_workers
        return self._steps().pauses(
            validate=self.validate_every if uses_snapshots(self.state, self.settings) else None,
            save=self.checkpoint_every,
            report=max(math.ceil(self.interval / _REPORTS), _SHORTEST_REPORT) if reads_here else None,
        )

    def _train_to(self, mark: int) -> None:
        """Train every branch to a step, or less far where a stop is requested; after a stop they are not abreast."""
        run = self.state
        mixtures, steps = [*run.mixtures, floor_mixture(self.target)], self._steps()
        behind = [index for index, state in enumerate(run.trained) if state.step < mark]
        states = [run.trained[index] for index in behind]
        segments = [
            steps.segment(mixtures[index], state.step, mark, is_floor=index == len(run.branches))
            for index, state in zip(behind, states, strict=True)
        ]
        for index, result in zip(behind, self.execution.train(segments, states, f"round {run.round}"), strict=True):
            self._take_in(index, result)
            if self.shared is not None and index < len(run.branches):
                self.shared.note(run.mixtures[index].name, result)
        if run.step == mark:
            run.note_untouched(all_have_begun=self.settings.per_round is None)

    def _take_in(self, index: int, result: BranchResult) -> None:
        """Let the branch at a position, or after all of them the floor, be what was trained."""
        run = self.state
        if index == len(run.branches):
            run.floor, name = result.state, FLOOR
        else:
            run.branches[index], name = result.state, run.mixtures[index].name
            run.add_losses(name, result)
        run.add_segment(name, result)
        self.events.progress(run, name, result)

    def _fix_reference(self) -> None:
        """Let the target-only, or the only, branch of round 1 be what several metrics are compared with."""
        run = self.state
        if self.validator.needs_reference:
            index = reference_branch(run.mixtures, self.target)
            assert index is not None  # checked before training
            state = run.branches[index]
            if not state.is_finite():
                state = run.merged  # what all branches forked from
                run.note("the target-only branch diverged: metrics are compared with the fork point's")
            run.reference = self.validator.known_metrics(state) or self.validator.metrics(state)
            self.validator.set_reference(run.reference)

    def _merge(self) -> Round | None:
        """End the round and return its record; None if a refit must be given up."""
        run, is_search = self.state, self.state.phase is Phase.SEARCH
        self.binding.give_back()  # the gradients' memory, before a candidate needs as much
        if is_search:
            self.validator.start_round(run.round)
            self._fix_reference()
        trained = with_means(run, self._trained(), self.end)
        result = self._search(trained) if is_search else replay_merge(run, trained, self.end)
        if result is None:
            return None
        merged, kept = result
        if merged.floor is not None:
            run.floor, run.shares_floor = merged.floor, False
        if not any(merged.merge.coefficients.values()):
            run.note(f"step {trained.end}: every branch was faulty; the last good state was kept")
        part_from_branch(run, trained.floor_branch, kept)
        run.earlier = list(trained.earlier.values())[: max((self.settings.previous_merges or 1) - 1, 0)]
        every = self.settings.branches(self.job.problem, run.probes) if run.step < self._last_step() else ()
        go_on_with(run, kept, every, merged.merge.coefficients)
        return record_of(trained, merged, [mixture.name for mixture in run.mixtures], run.seconds)

    def _trained(self) -> TrainedRound:
        run, paired = self.state, self.job.training.paired
        shared = None
        if run.shares_floor:
            shared = floor_branch(run.mixtures, self.target, paired=paired, settings=self.settings)
        return TrainedRound(
            index=run.round,
            phase=run.phase,
            start=run.round_start,
            end=run.step,
            mixtures=list(run.mixtures),
            branches=run.branches,
            entering=entering_states(run, self.settings),
            losses={mixture.name: run.mean_losses(mixture.name) for mixture in run.mixtures},
            bad_steps=run.bad_steps,
            merged=run.merged,
            floor=run.floor if shared is None else run.branches[shared],
            floor_branch=shared,
            earlier=run.earlier_merges(self.settings.earlier_names),
        )

    def _end_floor(self) -> None:
        """Keep the floor's last weights, for a comparison with the model that is returned."""
        run = self.state
        if self.settings.floor:
            self.reference = keep_reference(self.binding, run.merged if run.floor is None else run.floor, self.store)
        run.floor, run.shares_floor = None, False

    def _search(self, trained: TrainedRound) -> tuple[MergedRound, list[str]]:
        """Search the round's merge; return it, and the branches that go on."""
        run, settings, names = self.state, self.settings, trained.names
        if settings.keep_branches:
            weights = [State(s.step, s.rows, s.buffers).to_value() for s in trained.entering]
            self.store.keep_branches(dict(zip(names, weights, strict=True)), run.round)
        merged = self.end.search(trained, settings.search_for(len(trained.entrants)))
        merge = merged.merge
        for name, reason in merge.faults.items():
            run.note(f"round {run.round}: branch {name!r} got coefficient 0: {reason}")
        if settings.select == "best" and merge.score > run.best_score:
            run.best = Snapshot(merge.score, run.step, run.merged.weights())
        return merged, next_branches(run, settings, self.job.problem, trained, merge, is_last=run.step >= self.steps)

    def _end_search(self) -> None:
        """Choose the model among the last or best merge and the floor; start the refit if there is one."""
        check_run(self.state, self.job.problem, self.job.training, self.job.seed)
        run = self.state
        selection = select_model(run, self.settings.select, self.validator, self.steps)
        metrics = selection.metrics or self.validator.reported(self.validator.metrics(run.merged))
        run.selection = replace(selection, metrics=metrics)
        self.events.select(run)
        run.best, run.snapshots = None, {}
        if self.settings.refit:
            run.floor, run.shares_floor = None, False
            start_refit(run, self.settings.rotation(self.job.problem, run.probes).first(), self.target)
            if self.settings.floor and run.initial is not None:
                paired = self.job.training.paired
                start_floor(run, run.initial, self.target, paired=paired, settings=self.settings)
            self.events.start_phase(run, self._last_step())
        else:
            self._end_floor()
            run.phase = Phase.DONE
        self._save()

    def _save(self) -> None:
        self.state.saves += 1
        if self.store.path is not None:  # else nobody needs what lies elsewhere
            self.store.save(self.state.to_value(), self.state.saves)
        self.mapped.rest()
        self.events.save(self.state, self._last_step())
        if is_stop_requested():
            stop_now()
