"""All tasks first, then the target alone: as two trainings (Post-train), or as one under one schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from sys import maxsize
from typing import Literal

from forkmerge.algorithms.composed import Composed, Parts, follow, whole
from forkmerge.algorithms.fit import Algorithm
from forkmerge.algorithms.forkmerge import Joint, SingleTask, one_branch
from forkmerge.algorithms.mixtures import JOINT
from forkmerge.algorithms.run_record import Run
from forkmerge.algorithms.settings import Settings
from forkmerge.engine.training.options import Mixture
from forkmerge.errors import ProblemError, is_count
from forkmerge.methods import Method, method_from
from forkmerge.problem.definition import Problem
from forkmerge.problem.randomness import derive


@dataclass(frozen=True)
class PostTrain(Composed):
    """Train on all tasks, take the best checkpoint on validation, fine-tune it on the target alone.

    Both parts together take `steps` steps; the fine-tuning starts with a fresh optimizer and a fresh schedule, and
    has an order of examples of its own. In a run's folder the parts stand in `pretraining` and `finetuning`.

    Args:
        pretrain_steps: Steps of the first part; None takes half of all steps, rounded down (the paper does not say).
        task_weights: `{task: weight}` of the first part; None weighs every task equally.
        method: How the tasks of the first part are combined, e.g. "PCGrad"; None sums them.
        interval: Steps between validations, in both parts; None makes five in each.
        select: The model returned by the fine-tuning: the "last", or the "best" on validation.
        refit: Then do both parts on training ∪ validation data of the target, the first as long as its best
            checkpoint was.

    Example:
        >>> import forkmerge as fm
        >>> fm.PostTrain(pretrain_steps=300).split(1000)
        (300, 700)

    References:
        ForkMerge, section 5: "Post-train, an ATL method that pre-trains the model on all tasks and then fine-tunes it
        for each task separately".
    """

    pretrain_steps: int | None = None
    task_weights: Mapping[str, float] | None = None
    method: Method | str | None = None
    interval: int | None = None
    select: Literal["last", "best"] = "last"
    refit: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", method_from(self.method))

    def split(self, steps: int) -> tuple[int, int]:
        """Return the steps of the two parts."""
        first = steps // 2 if self.pretrain_steps is None else self.pretrain_steps
        if not is_count(first) or first >= steps:
            raise ProblemError(
                f"pretrain_steps must leave both parts at least one of the {steps} steps, got {first!r}."
            )
        return first, steps - first

    def settings(self, problem: Problem) -> Settings:
        """Return the first part's run, the larger of the two."""
        return self._pretraining.settings(problem)

    def branch_steps(self, problem: Problem, steps: int) -> int:
        """Return the steps of both parts, and of the first part's refit."""
        before, after = self.split(steps)
        return before * (2 if self.refit else 1) + after

    def compose(self, parts: Parts) -> Run:
        """Pre-train, then fine-tune the same module."""
        before, after = self.split(parts.steps)
        pretrained = parts.run("pretraining", self._pretraining, model=parts.module, steps=before)
        tuning = SingleTask(interval=self.interval, select=self.select, refit=self.refit)
        seed = derive(parts.seed, "fine-tuning")
        tuned = parts.run("finetuning", tuning, model=parts.module, steps=after, seed=seed)
        first = [replace(r, phase="pretraining") if r.phase == "search" else r for r in pretrained.rounds]
        return whole(self, parts, tuned, rounds=follow(first, tuned.rounds, before))

    @property
    def _pretraining(self) -> Joint:
        return Joint(self.task_weights, self.method, self.interval, select="best", refit=self.refit)


@dataclass(frozen=True)
class JointThenAlone(Algorithm):
    """Train on all tasks, then on the target alone, as one training with one optimizer and one schedule.

    Unlike `PostTrain` it goes on from the last weights of the first part with the optimizer of that part, and a
    learning rate that falls over the run falls once. It is ForkMerge with one branch, and one round with a tail.

    Args:
        alone: Share of the steps that train on the target alone, the last ones.
        task_weights: `{task: weight}` of the first part; None weighs every task equally.
        method: How the tasks of the first part are combined, e.g. "PCGrad"; None sums them.
        interval: Steps between validations, for `select="best"`; None makes five.
        select: The model returned: the "last", or the "best" on validation of either part.
        refit: Train on training ∪ validation data of the target; with `select="last"` that is all that is trained.
    """

    alone: float = 0.5
    task_weights: Mapping[str, float] | None = None
    method: Method | str | None = None
    interval: int | None = None
    select: Literal["last", "best"] = "last"
    refit: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", method_from(self.method))
        if isinstance(self.alone, bool) or not isinstance(self.alone, int | float) or not 0 < self.alone < 1:
            raise ProblemError(f"alone must be a share of the steps between 0 and 1, got {self.alone!r}.")

    def settings(self, problem: Problem) -> Settings:
        """Return the equivalent ForkMerge: a round as long as any run."""
        weights = dict.fromkeys(problem.tasks, 1.0) if self.task_weights is None else self.task_weights
        return one_branch(
            Mixture(JOINT, weights),
            maxsize,
            self.method,
            # The best of a round's steps is the best of the run's, for there is one.
            checkpoint="best_in_interval" if self.select == "best" else "last",
            validate_every=self.interval,
            select=self.select,
            refit=self.refit,
            tail=self.alone,
            tail_anneal="none",
        )
