"""The steps of a round, and its tail: the last, in which every branch trains on the target alone at falling rates."""

from __future__ import annotations

from dataclasses import dataclass, replace

from forkmerge.algorithms.branches.iterates import iterate_steps
from forkmerge.algorithms.checkpoint import Phase
from forkmerge.algorithms.settings import Settings
from forkmerge.engine.executors.branch_worker import Segment
from forkmerge.engine.training.learning_rates import Anneal
from forkmerge.engine.training.options import Mixture


def tail_mixture(mixture: Mixture, target: str) -> Mixture:
    """Return what a branch trains on in the tail: the target alone, at the weight it has in the mixture."""
    return replace(mixture, task_weights={target: mixture.task_weights.get(target) or 1.0})


@dataclass(frozen=True)
class RoundSteps:
    """The steps of one round: up to `tail` on the branches' mixtures, from there to `end` on the target alone.

    Args:
        phase: What the run is doing.
        start: The step at which the round forked.
        target: The target task.
        tail: The first step of the tail; `end` where there is none.
        end: The step after the last.
        anneals: Whether the learning rate falls in the tail.
        iterates: The steps whose iterates are averaged.
    """

    phase: Phase
    start: int
    target: str
    tail: int
    end: int
    anneals: bool
    iterates: tuple[int, ...] = ()

    @classmethod
    def of(cls, settings: Settings, phase: Phase, target: str, start: int, end: int) -> RoundSteps:
        """Return the steps of the round that forked at `start`."""
        iterates = iterate_steps(settings.average_iterates, start, end)
        return cls(phase, start, target, end - settings.tail_steps(end - start), end, settings.anneals, tuple(iterates))

    def pauses(self, *, validate: int | None, save: int | None, report: int | None) -> list[int]:
        """Return the steps at which training pauses.

        Args:
            validate: Steps of the round between validations.
            save: Steps of the run between checkpoints.
            report: Steps of the round between reports of progress.
        """
        marks = {self.end, self.tail, *self.iterates}
        for every in filter(None, (validate, report)):
            marks |= set(range(self.start + every, self.end, every))
        if save:
            marks |= set(range((self.start // save + 1) * save, self.end, save))
        return sorted(marks)

    def segment(self, mixture: Mixture, start: int, mark: int, *, is_floor: bool = False) -> Segment:
        """Return a branch's steps from `start` to `mark`, which lie on one side of the tail's first.

        The floor is plain single-task training, and trains as if there were no tail.
        """
        if is_floor or mark <= self.tail:
            return Segment(self.phase.value, mixture, mark - start)
        anneal = Anneal(self.tail, self.end) if self.anneals else None
        return Segment(self.phase.value, tail_mixture(mixture, self.target), mark - start, anneal)
