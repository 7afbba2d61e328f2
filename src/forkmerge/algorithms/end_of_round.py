"""The merge at the end of a round: searched on validation data, or replayed in a refit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from forkmerge.algorithms.checkpoint import RunState, Snapshot
from forkmerge.algorithms.mixtures import is_target_only
from forkmerge.algorithms.run_record import BranchRecord, Candidate, Round
from forkmerge.algorithms.settings import Settings
from forkmerge.algorithms.validation import Validator
from forkmerge.engine.executors.serial import SerialExecutor
from forkmerge.engine.merging.batchnorm_policy import recompute_statistics
from forkmerge.engine.merging.blend import Blender
from forkmerge.engine.merging.coefficients import Coefficients, vertices
from forkmerge.engine.merging.find_merge import Merge, find_merge
from forkmerge.engine.merging.measure_candidate import MeasureRequest
from forkmerge.engine.merging.race_over_examples import ExampleRace
from forkmerge.engine.merging.relevance import task_relevance
from forkmerge.engine.merging.synchronise import synchronise
from forkmerge.engine.training.state import State
from forkmerge.problem.randomness import derive
from forkmerge.problem.scoring import evaluating


class Merger:
    """Ends rounds: finds or replays the coefficients, installs the merge, prunes."""

    def __init__(self, settings: Settings, executor: SerialExecutor, judge: Validator) -> None:
        self.settings, self.executor, self.judge = settings, executor, judge
        self.target = executor.job.problem.target
        # A gradient method leaves out a task whose gradient is not finite, and a float16 scaler the whole step: the
        # weights may be sound although a loss was not.
        self._losses_tell = settings.method is None and executor.job.training.precision != "float16"

    def search(self, progress: RunState, entering: list[State]) -> Round:
        """Search the coefficients of a round and merge with them."""
        names, index = [mixture.name for mixture in progress.mixtures], len(progress.rounds) + 1
        faults, blend = self._faults(progress, entering), self._blender(progress, entering)
        raced: list[ExampleRace | None] = []  # filled once the branches are scored
        full: dict[Coefficients, dict[str, float]] = {}  # metrics of candidates that took a full pass

        def course() -> ExampleRace | None:
            raced.append(self.judge.course(entering, blend))
            return raced[0]

        started = time.perf_counter()
        usable = [state for name, state in zip(names, entering, strict=True) if name not in faults]
        self.rank(usable if progress.floor is None else [*usable, progress.floor])
        ranked = time.perf_counter()
        with evaluating(self.executor.binding.model):  # once, for all candidates
            found = find_merge(
                names,
                entering,
                search=self.settings.search_for(len(names)),
                score=lambda state: self.judge.score(state, remeasure=state is progress.merged),
                search_score=self.judge.search_score if self.settings.search_examples else None,
                blend=blend,
                evaluate_many=self._evaluator(progress, entering, blend, full),
                course=course,
                faults=faults,
            )
            track = raced[0] if raced else None
            self._doubt(progress, found, track, index)
        searched = time.perf_counter()
        rank = ranked - started + sum(self.judge.seconds(state) for state in entering)
        floor_score = self.judge.score(progress.floor, remeasure=False) if progress.floor is not None else None
        coefficients = tuple(found.coefficients.get(name, 0.0) for name in names)
        result = self._record(progress, entering, found, floor_score)
        result.examples.update({} if track is None else track.examples)
        result.metrics.update(self._metrics(progress, entering, coefficients, track, full))
        for name, reason in found.faults.items():
            progress.note(f"round {index}: branch {name!r} got coefficient 0: {reason}")
        merging = time.perf_counter()
        self._install(progress, blend, coefficients)
        self._keep_best(progress, found.score)
        self._prune(progress, found, index)
        result.kept.extend(mixture.name for mixture in progress.mixtures)
        merge = time.perf_counter() - merging
        result.seconds.update(train=progress.seconds, rank=rank, search=searched - started - rank, merge=merge)
        return result

    def _doubt(self, progress: RunState, found: Merge, track: ExampleRace | None, index: int) -> None:
        """Take the target-only branch instead if the merge is not surely better, where `confidence` asks for that."""
        alone = next((m.name for m in progress.mixtures if is_target_only(m, self.target)), None)
        if self.settings.confidence is None or track is None or alone is None:
            return
        if alone in found.faults or found.coefficients[alone] == 1.0:
            return
        single = {name: float(name == alone) for name in found.coefficients}
        seed = derive(self.executor.job.seed, "confidence", index)
        found.certainty = track.certainty(tuple(found.coefficients.values()), tuple(single.values()), seed)
        if found.certainty < self.settings.confidence:
            found.coefficients, found.score = single, found.branch_scores[alone]

    def rank(self, states: Sequence[State]) -> None:
        """Let workers measure states that will be scored, all at once; without workers each waits for its turn."""
        fresh = [state for state in states if not self.judge.known_metrics(state)]
        if self.executor.workers > 1 and len(fresh) > 1:
            questions = [MeasureRequest(vertex) for vertex in vertices(len(fresh))]
            for state, measured in zip(fresh, self.executor.measure(fresh, questions), strict=True):
                self.judge.note(state, measured)

    def replay(self, progress: RunState, entering: list[State], script: Round | None) -> Round | None:
        """Merge with the coefficients that the search phase found; None if a branch it needs has diverged."""
        names = [mixture.name for mixture in progress.mixtures]
        coefficients = dict(script.coefficients) if script else {names[0]: 1.0}
        faults = self._faults(progress, entering)
        for name, reason in faults.items():
            if coefficients.get(name, 0.0) > 0:
                progress.note(f"refit given up at step {progress.step}: branch {name!r}: {reason}")
                return None
        found = Merge(coefficients, -math.inf, {}, faults=faults)
        result = self._record(progress, entering, found, None)
        started = time.perf_counter()
        blend = self._blender(progress, entering)
        self._install(progress, blend, tuple(coefficients.get(name, 0.0) for name in names))
        self._keep(progress, set(script.kept) if script else set(names))
        result.kept.extend(mixture.name for mixture in progress.mixtures)
        result.seconds.update(train=progress.seconds, merge=time.perf_counter() - started)
        return result

    def _faults(self, progress: RunState, entering: list[State]) -> dict[str, str]:
        faults = {}
        for mixture, state in zip(progress.mixtures, entering, strict=True):
            losses = progress.mean_losses(mixture.name)
            bad = [task for task, loss in losses.items() if not math.isfinite(loss)]
            if self.settings.checkpoint == "last" and bad and self._losses_tell:
                faults[mixture.name] = f"its training loss of {', '.join(bad)} is not finite"
            elif not state.is_finite():
                faults[mixture.name] = "it has parameters that are not finite"
        return faults

    def _record(self, progress: RunState, entering: list[State], found: Merge, floor_score: float | None) -> Round:
        branches = {}
        for mixture, state in zip(progress.mixtures, entering, strict=True):
            branches[mixture.name] = BranchRecord(
                task_weights=dict(mixture.task_weights),
                score=_finite(found.branch_scores.get(mixture.name, -math.inf)),
                metrics=self.judge.known_metrics(state),
                losses=progress.mean_losses(mixture.name),
                entered_step=state.step,
                fault=found.faults.get(mixture.name),
            )
        return Round(
            index=len(progress.rounds) + 1,
            phase=progress.phase,
            start=progress.round_start,
            end=progress.step,
            branches=branches,
            candidates=[
                Candidate(coefficients, _finite(score), is_bound=place in found.unfinished)
                for place, (coefficients, score) in enumerate(found.candidates)
            ],
            coefficients=found.coefficients,
            score=_finite(found.score),
            relevance=task_relevance(found.coefficients, progress.mixtures),
            kept=[],
            floor_score=floor_score if floor_score is None else _finite(floor_score),
            certainty=found.certainty,
        )

    def _blender(self, progress: RunState, entering: list[State]) -> Blender:
        """Return what builds candidates, and the merge itself, in the memory of the last merge."""

        def recompute(state: State) -> None:
            recompute_statistics(
                self.executor.binding,
                state,
                self.executor.problem(progress.phase),
                training=self.executor.job.training,
                seed=self.executor.job.seed,
                count=self.settings.bn_batches,
            )

        refresh = recompute if self.settings.bn == "recompute" else None
        return Blender(self.executor.binding, entering, progress.merged, refresh)

    def _evaluator(
        self, progress: RunState, entering: list[State], blend: Blender, metrics: dict[Coefficients, dict[str, float]]
    ) -> Callable[[Sequence[Coefficients]], list[float]]:
        """Return the full pass over candidates, which leaves their metrics in `metrics`; workers share them."""
        on_sample = self.settings.search_examples is not None
        batches = self.settings.bn_batches if self.settings.bn == "recompute" else 0

        def here(coefficients: Coefficients) -> float:
            state = blend(coefficients)
            if on_sample:
                return self.judge.search_score(state)
            score = self.judge.score(state, remeasure=state is progress.merged)
            metrics[coefficients] = self.judge.known_metrics(state)
            return score

        def evaluate(candidates: Sequence[Coefficients]) -> list[float]:
            if self.executor.workers == 1 or len(candidates) == 1:
                return [here(coefficients) for coefficients in candidates]
            questions = [MeasureRequest(c, self.judge.indices, progress.phase, batches) for c in candidates]
            found = [each.metrics for each in self.executor.measure(entering, questions)]
            if not on_sample:
                metrics.update((c, values) for c, values in zip(candidates, found, strict=True) if values is not None)
            return [-math.inf if values is None else self.judge.criterion.score(values) for values in found]

        return evaluate

    def _metrics(
        self,
        progress: RunState,
        entering: list[State],
        coefficients: Coefficients,
        track: ExampleRace | None,
        full: dict[Coefficients, dict[str, float]],
    ) -> dict[str, float]:
        """Return the metrics of the winner as the search has measured them; empty if no branch could be used."""
        if not any(coefficients):
            return {}
        if 1.0 in coefficients:
            return self.judge.known_metrics(entering[coefficients.index(1.0)])
        if self.settings.search_examples:
            return self.judge.known_metrics(progress.merged)  # the search ended with a full pass of the winner
        return full.get(coefficients) or (track.metrics(coefficients) if track is not None else {})

    def _install(self, progress: RunState, blend: Blender, coefficients: Coefficients) -> None:
        """Merge and synchronise; the last merge stands if no branch can be used."""
        step = progress.step
        if any(coefficients):
            winner = blend(coefficients)
            if winner is not progress.merged:
                progress.merged.take_weights(winner)
        else:
            progress.note(f"step {step}: every branch was faulty; the last good state was kept")
        progress.merged.step = step
        synchronise(progress.branches, progress.merged, coefficients, self.settings.optimizer_state)

    def _keep_best(self, progress: RunState, score: float) -> None:
        """Keep a copy of the merge if it is the best so far and the best is wanted."""
        if self.settings.select == "best" and score > progress.best_score:
            progress.best = Snapshot(score, progress.step, progress.merged.weights())

    def _prune(self, progress: RunState, found: Merge, index: int) -> None:
        """Drop branches of coefficient 0 and keep the K' largest; the target-only branch always stays and counts."""
        after, ended = self.settings.prune_after, progress.rounds
        is_due = index >= after and not any(r.index >= after and r.coefficients for r in ended)
        if self.settings.prune_to is None or not is_due or not found.coefficients:
            return
        ranked = sorted(
            progress.mixtures, key=lambda m: (not is_target_only(m, self.target), -found.coefficients[m.name])
        )
        useful = [m for m in ranked if is_target_only(m, self.target) or found.coefficients[m.name] > 0]
        self._keep(progress, {mixture.name for mixture in useful[: self.settings.prune_to]})

    def _keep(self, progress: RunState, names: set[str]) -> None:
        pairs = zip(progress.mixtures, progress.branches, strict=True)
        kept = [(mixture, state) for mixture, state in pairs if mixture.name in names]
        progress.mixtures, progress.branches = [m for m, _ in kept], [s for _, s in kept]
        progress.snapshots = {name: held for name, held in progress.snapshots.items() if name in names}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
