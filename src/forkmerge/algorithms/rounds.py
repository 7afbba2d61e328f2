"""The rounds of a run: train every branch, merge, synchronise, repeat."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from forkmerge.algorithms.checkpoint import RunState, Snapshot
from forkmerge.algorithms.end_of_round import Merger
from forkmerge.algorithms.mixtures import ALONE, check_mixtures, reference_branch, scale_auxiliaries
from forkmerge.algorithms.run_record import Round
from forkmerge.algorithms.settings import Settings
from forkmerge.algorithms.validation import Validator
from forkmerge.engine.executors.serial import Segment, SerialExecutor
from forkmerge.engine.storage.run_folder import NoStore, RunFolder
from forkmerge.engine.training.options import Mixture
from forkmerge.engine.training.release_memory import MappedRows
from forkmerge.engine.training.state import State
from forkmerge.problem.definition import Problem

Observe = Callable[[Mapping[str, Any]], None]

# Serial runs report progress this often per interval, but never cut segments shorter than 50 steps for it.
_REPORTS, _SHORTEST_REPORT = 10, 50


class Rounds:
    """One run of the fork–merge loop, from the start or from a checkpoint to the final weights.

    Args:
        settings: The algorithm's options.
        executor: Who trains the branches.
        steps: T.
        store: Where checkpoints and the record go.
        observe: Called with every event, for progress bars.
        checkpoint_every: Steps between checkpoints inside a round; None checkpoints at merges only.
    """

    def __init__(
        self,
        settings: Settings,
        executor: SerialExecutor,
        steps: int,
        *,
        store: RunFolder | NoStore,
        observe: Observe,
        checkpoint_every: int | None,
    ) -> None:
        self.settings, self.executor, self.steps, self.store = settings, executor, steps, store
        self.binding, self.job, self.target = executor.binding, executor.job, executor.job.problem.target
        self.observe, self.checkpoint_every = observe, checkpoint_every
        self.interval, self.validate_every = settings.interval_of(steps), settings.validate_every_of(steps)
        self.judge = Validator(
            self.binding, self.job.problem, settings.reference, settings.search_examples, self.job.seed
        )
        self.merger = Merger(settings, executor, self.judge)
        self.attic = MappedRows(store.path)
        self.progress: RunState

    def run(self) -> RunState:
        """Run to the end and return the final progress, whose `merged` is the model to return."""
        if not self._restore(self.store.load()):
            self._begin()
        while self.progress.phase != "done":
            phase = self.progress.phase
            while self.progress.phase == phase and self.progress.step < self._last_step():
                self._round()
            if phase == "search":
                self._end_search()
            elif self.progress.phase == "refit":
                self.progress.outcome["final"] = "refit"
                self.progress.phase = "done"
        return self.progress

    def _begin(self) -> None:
        settings, problem = self.settings, self.job.problem
        initial = self.binding.initial()
        probes = self._probe(initial)
        mixtures = branches_of(settings, self.job.problem, probes)
        self.progress = RunState(
            phase="search",
            mixtures=mixtures,
            branches=[initial.clone() for _ in mixtures],
            merged=self._stowed(initial),
            initial=initial if settings.refit else None,
            floor=initial.clone() if settings.floor else None,
            probes=probes,
        )
        details: dict[str, Any] = {"branches": [m.name for m in mixtures], "seed": self.job.seed}
        if settings.keep_branches:
            weights = sum(row.nbytes for row in initial.rows.values())
            details["branch_bytes"] = weights * len(mixtures) * math.ceil(self.steps / self.interval)
        self._emit("start", target=problem.target, steps=self.steps, **details)
        if settings.refit and len(mixtures) == 1 and settings.select == "last" and not settings.floor:
            # One branch and its last weights: there is nothing to search.
            self.progress.phase = "refit"
            self.progress.outcome = {"score": None, "metrics": {}, "step": self.steps, "replays": False}
        self._save()

    def _restore(self, value: dict[str, Any] | None) -> bool:
        """Go on from a checkpoint, if there is one."""
        for text in self.store.warnings:
            self.observe({"event": "warning", "text": text})
        if value is None:
            return False
        self.progress = progress = RunState.from_value(value)
        value.clear()  # which would hold a second copy of the last merge until this call ends
        progress.merged = self._stowed(self.binding.place(progress.merged))
        self.binding.attach_weights(progress.merged)  # frees the module's own memory before the branches need theirs
        self.binding.give_back()
        progress.refork()
        for state in progress.states():
            self.binding.place(state)
        self.attic.rest()
        if self.progress.reference:
            self.judge.set_reference(self.progress.reference)
        self._tell("resume")
        return True

    def _stowed(self, state: State) -> State:
        """Return a copy of the weights that need not stay in memory while the branches train."""
        rows = {name: self.attic.hold(row) for name, row in state.rows.items()}
        return State(state.step, rows, {name: buffer.clone() for name, buffer in state.buffers.items()})

    def _probe(self, initial: State) -> dict[str, float]:
        """Score a short run of every probe; most constructors have none."""
        constructor = self.settings.constructor
        scale = self.settings.auxiliary_scale
        probes = [scale_auxiliaries(probe, self.target, scale) for probe in constructor.probes(self.job.problem)]
        segments = [Segment("search", probe, constructor.probe_steps) for probe in probes]
        scores: dict[str, float] = {}
        results = self.executor.train(segments, [initial.clone() for _ in probes])
        try:
            for probe, result in zip(probes, results, strict=True):
                scores[probe.name] = self.judge.score(result.state)
                self._emit("probe", branch=probe.name, score=scores[probe.name], step=result.state.step)
        finally:
            self.binding.attach(initial)  # nothing is saved yet: a second attempt starts from the module itself
        return scores

    def _last_step(self) -> int:
        """The step at which the phase ends: a refit of the best merge ends where that merge was found."""
        step: int = self.progress.outcome["step"] if self.progress.phase == "refit" else self.steps
        return step

    def _round(self) -> None:
        progress = self.progress
        end = min(progress.round_start + self.interval, self.steps)
        if self.settings.checkpoint == "best_in_interval" and progress.step == progress.round_start:
            progress.snapshots = {}
        for mark in self._marks(progress.round_start, end):
            if mark <= progress.step:
                continue
            self._train_to(mark)
            if self._uses_snapshots() and (mark == end or (mark - progress.round_start) % self.validate_every == 0):
                self._take_snapshots(mark)
            if mark != end and self.checkpoint_every and mark % self.checkpoint_every == 0:
                self._save()
        finished = self._merge()
        if finished is None:
            self._give_up_refit()
            return
        self._emit("round", **asdict(finished))
        progress.rounds.append(finished)
        progress.next_round()
        self._save()

    def _marks(self, start: int, end: int) -> list[int]:
        """The steps of a round at which training pauses."""
        marks = {end}
        if self._uses_snapshots():
            marks |= set(range(start + self.validate_every, end, self.validate_every))
        if self.checkpoint_every:
            first = (start // self.checkpoint_every + 1) * self.checkpoint_every
            marks |= set(range(first, end, self.checkpoint_every))
        if self.executor.workers == 1 and not self.job.training.loader_workers:
            every = max(math.ceil(self.interval / _REPORTS), _SHORTEST_REPORT)
            marks |= set(range(start + every, end, every))
        return sorted(marks)

    def _train_to(self, mark: int) -> None:
        progress = self.progress
        steps = mark - progress.step
        segments = [Segment(progress.phase, mixture, steps) for mixture in progress.mixtures]
        states = list(progress.branches)
        if progress.floor is not None and progress.phase == "search":
            segments.append(Segment("search", Mixture(ALONE, {self.target: 1.0}), steps))
            states.append(progress.floor)
        untouched: set[str] | None = None
        for index, result in enumerate(self.executor.train(segments, states)):
            name = "floor"
            if index == len(progress.branches):
                progress.floor = result.state
            else:
                name = progress.mixtures[index].name
                progress.branches[index] = result.state
                progress.add_losses(name, result.sums, result.counts)
                untouched = set(result.untouched) if untouched is None else untouched & set(result.untouched)
            progress.seconds += result.seconds
            for what, counts in result.reports.items():
                for task in counts:
                    progress.note(f"round {len(progress.rounds) + 1}: branch {name!r}: gradient of {task!r} was {what}")
            self._emit(
                "segment", branch=name, step=mark, losses=result.losses, seconds=result.seconds, reports=result.reports
            )
        if mark == steps and untouched:
            progress.note(f"parameters without gradient in every branch at step 0: {', '.join(sorted(untouched))}")

    def _uses_snapshots(self) -> bool:
        if self.progress.phase == "refit" and not self.progress.outcome["replays"]:
            return False  # an unmerged run is refitted as it was trained, to its last step
        return self.settings.checkpoint != "last"

    def _take_snapshots(self, mark: int) -> None:
        """Keep the weights of every branch that are its best so far; a refit keeps those the search had chosen."""
        progress = self.progress
        if progress.phase == "search":
            for state in progress.branches:
                self.judge.forget(state)
            self.merger.rank(progress.branches)
        for mixture, state in zip(progress.mixtures, progress.branches, strict=True):
            held = progress.snapshots.get(mixture.name)
            if progress.phase == "refit":
                chosen = {r.branches[mixture.name].entered_step for r in self._script() if mixture.name in r.branches}
                if mark in chosen or held is None:
                    progress.snapshots[mixture.name] = Snapshot(0.0, mark, state.weights())
                continue
            self._fix_reference()
            score = self.judge.score(state, remeasure=False)
            if held is None or score > held.score:
                progress.snapshots[mixture.name] = Snapshot(score, mark, state.weights())
                self.judge.keep(progress.snapshots[mixture.name].weights, state)

    def _fix_reference(self) -> None:
        """Let the target-only, or the only, branch of round 1 be what several metrics are compared with."""
        if self.judge.criterion.needs_reference:
            index = reference_branch(self.progress.mixtures, self.target)
            assert index is not None  # checked before training
            state = self.progress.branches[index]
            if not state.is_finite():
                state = self.progress.merged  # what all branches forked from
                self.progress.note("the target-only branch diverged: metrics are compared with the fork point's")
            self.progress.reference = self.judge.known_metrics(state) or self.judge.metrics(state)
            self.judge.set_reference(self.progress.reference)

    def _script(self) -> list[Round]:
        return [finished for finished in self.progress.rounds if finished.phase == "search"]

    def _merge(self) -> Round | None:
        progress = self.progress
        self.binding.give_back()  # the gradients' memory, before a candidate needs as much
        entering = progress.branches
        if self._uses_snapshots():
            entering = [progress.snapshots[mixture.name].weights for mixture in progress.mixtures]
        if progress.phase == "refit":
            script = self._script() if progress.outcome["replays"] else []
            done = len(progress.rounds) - len(self._script())
            return self.merger.replay(progress, entering, script[done] if script else None)
        self.judge.start_round(len(progress.rounds) + 1)
        self._fix_reference()
        if self.settings.keep_branches:
            names = [mixture.name for mixture in progress.mixtures]
            weights = {n: State(s.step, s.rows, s.buffers).to_value() for n, s in zip(names, entering, strict=True)}
            self.store.keep_branches(weights, len(progress.rounds) + 1)
        return self.merger.search(progress, entering)

    def _end_search(self) -> None:
        """Choose the model among the last or best merge and the floor; start the refit if there is one."""
        progress, last = self.progress, self.progress.rounds[-1]
        outcome: dict[str, Any] = {"final": "last merge", "score": last.score, "step": self.steps, "replays": True}
        metrics = last.metrics
        if self.settings.select == "best" and progress.best is not None:
            progress.merged.take_weights(progress.best.weights)
            outcome.update(final="best merge", score=progress.best.score, step=progress.best.step)
            (metrics,) = (r.metrics for r in progress.rounds if r.end == progress.best.step)
        floor_score = last.floor_score
        if floor_score is not None and (outcome["score"] is None or floor_score > outcome["score"]):
            assert progress.floor is not None
            progress.merged.take_weights(progress.floor)
            outcome.update(final="floor", score=floor_score, step=self.steps, replays=False)
            metrics = self.judge.known_metrics(progress.floor)
            progress.note("the unmerged target-only run validated better than the merge and is returned")
        outcome["metrics"] = metrics or self.judge.metrics(progress.merged)
        progress.outcome, progress.floor, progress.best, progress.snapshots = outcome, None, None, {}
        progress.phase = "refit" if self.settings.refit else "done"
        if self.settings.refit:
            self._start_refit()
        self._save()

    def _start_refit(self) -> None:
        progress = self.progress
        assert progress.initial is not None
        progress.mixtures = branches_of(self.settings, self.job.problem, progress.probes)
        if not progress.outcome["replays"]:
            progress.mixtures = [Mixture(ALONE, {self.target: 1.0})]
        progress.searched = progress.merged.weights()
        progress.branches = []  # before the new ones: both at once would be the peak of the whole run
        progress.branches = [progress.initial.clone() for _ in progress.mixtures]
        progress.merged.take_weights(progress.initial)
        progress.next_round()

    def _give_up_refit(self) -> None:
        progress = self.progress
        if progress.searched is not None:
            progress.merged.take_weights(progress.searched)
        else:
            progress.outcome["final"] = "last good state"
        progress.phase = "done"

    def _emit(self, event: str, **details: Any) -> None:
        progress = getattr(self, "progress", None)
        common = {"phase": progress.phase, "round": len(progress.rounds) + 1} if progress else {}
        line = {"event": event, **common, **details}
        self.store.record(line)
        self.observe(line)

    def _save(self) -> None:
        self.progress.saves += 1
        self.store.save(self.progress.to_value(), self.progress.saves)
        self.attic.rest()
        self._tell("checkpoint")

    def _tell(self, event: str) -> None:
        """Tell the observer what is still to be trained; the record, which a resume cuts back, has no use for it."""
        progress = self.progress
        names = [mixture.name for mixture in progress.mixtures]
        place = {"phase": progress.phase, "round": len(progress.rounds) + 1, "step": progress.step}
        floor = ["floor"] if progress.floor is not None else []
        self.observe({"event": event, **place, "until": self._last_step(), "branches": names + floor})


def branches_of(settings: Settings, problem: Problem, probes: Mapping[str, float]) -> list[Mixture]:
    """Return the branches a run starts with, auxiliary weights scaled."""
    built = settings.constructor.build(problem, probes)
    mixtures = [scale_auxiliaries(mixture, problem.target, settings.auxiliary_scale) for mixture in built]
    check_mixtures(problem, mixtures)
    return mixtures
