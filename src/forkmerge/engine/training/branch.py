"""The one training loop of the library."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from forkmerge.engine.training.learning_rates import Anneal
from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.engine.training.options import Mixture, Training
from forkmerge.engine.training.state import State
from forkmerge.engine.training.step_loop import StepLoop
from forkmerge.problem.definition import Problem
from forkmerge.problem.exact_sum import add_exactly, rounded
from forkmerge.problem.randomness import derive, random_state_kept


@dataclass
class BranchResult:
    """What a segment of training gives back.

    Args:
        state: The branch after the segment (the state passed in, changed in place).
        losses: Mean unweighted loss per task over the segment's batches that had one.
        sums: Their exact sums, to which those of other segments can be added.
        counts: How many batches had one, per task.
        seconds: Wall time.
        untouched: Trainable parameters that got no gradient in the segment's first step.
        reports: How often a task's gradient was "zero" or "not finite" under a gradient method, by task.
        bad_steps: The first step whose loss was not finite, for every task that had one.
        steps: How many steps were done: all, unless a stop was requested.
    """

    state: State
    losses: dict[str, float]
    sums: dict[str, list[float]]
    counts: dict[str, int]
    seconds: float
    untouched: list[str] = field(default_factory=list)
    reports: dict[str, dict[str, int]] = field(default_factory=dict)
    bad_steps: dict[str, int] = field(default_factory=dict)
    steps: int = 0


def join_results(results: Sequence[BranchResult]) -> BranchResult:
    """Return what segments of a branch, one after the other, give as one: the same as if it had not been cut."""
    first, *others = results
    if not others:
        return first
    sums, counts = dict(first.sums), dict(first.counts)
    reports = {what: dict(by_task) for what, by_task in first.reports.items()}
    for result in others:
        for task, part in result.sums.items():
            sums[task] = add_exactly(sums.get(task, []), part)
            counts[task] = counts.get(task, 0) + result.counts[task]
        for what, by_task in result.reports.items():
            total = reports.setdefault(what, {})
            for task, count in by_task.items():
                total[task] = total.get(task, 0) + count
    return replace(
        first,
        losses={task: rounded(part) / counts[task] for task, part in sums.items()},
        sums=sums,
        counts=counts,
        seconds=sum(result.seconds for result in results),
        reports=reports,
        steps=sum(result.steps for result in results),
        bad_steps={task: step for result in reversed(results) for task, step in result.bad_steps.items()},
    )


def train_branch(
    binding: ModelBinding,
    problem: Problem,
    mixture: Mixture,
    state: State,
    *,
    steps: int,
    training: Training,
    seed: int,
    anneal: Anneal | None = None,
) -> BranchResult:
    """Train one branch for `steps` steps, from the state's global step on, changing the state in place.

    θ ← θ − η Σ_k ν_k g_k(θ), with the optimizer's rule in place of plain descent (Alg. 2, line 8). The bits do not
    depend on how a stretch of steps is cut into segments, on the loader's workers or on other branches.

    Under a method that weighs losses, nothing is read back in a step: looking at every gradient would cost a fifth of a
    step with a large embedding, and a wait per step on a GPU. What is not finite stays in the weights or in the
    optimizer's memory, so one look at the end finds it; then the segment is done again from a copy of its start, and
    every step leaves out the tasks that spoil it.

    Args:
        binding: The module and optimizer to work with.
        problem: Where batches and losses come from.
        mixture: The branch's task weights and learning rate.
        state: The branch.
        steps: Steps to do.
        training: Options common to all branches.
        seed: The run's seed.
        anneal: How the learning rate falls in these steps, if it does.
    """
    started = time.perf_counter()
    hopeful = training.weighs_losses and len(mixture.active(problem.tasks)) > 1 and mixture.name not in binding.suspects
    before = state.clone() if hopeful else None

    def train(careful: bool) -> StepLoop:
        loop = StepLoop(
            binding,
            problem,
            mixture,
            training,
            seed if training.paired else derive(seed, "branch", mixture.name),
            range(state.step, state.step + steps),
            state.method,
            careful=careful,
            anneal=anneal,
        )
        _run(loop, state)
        return loop

    loop = None
    try:
        loop = train(before is None)
    except Exception:
        if before is None or state.is_finite(optimizer=True):
            raise
    if before is not None and (loop is None or not loop.is_finite or not state.is_finite(optimizer=True)):
        state.restore(before)
        binding.suspects.add(mixture.name)
        loop = train(careful=True)
    assert loop is not None
    if not loop.reports:
        binding.suspects.discard(mixture.name)
    state.step += loop.done
    return BranchResult(
        state,
        losses=loop.mean_losses,
        sums=loop.loss_sums,
        counts={task: len(losses) for task, losses in loop.losses.items()},
        seconds=time.perf_counter() - started,
        untouched=loop.untouched,
        reports=loop.reports,
        bad_steps=loop.bad_steps,
        steps=loop.done,
    )


def _run(loop: StepLoop, state: State) -> None:
    """Do the steps of a segment on a state, changing it in place."""
    binding = loop.binding
    binding.attach(state)
    binding.model.train()  # as a plain loop would; a module with frozen layers overrides `train`
    with random_state_kept():
        loop.run()
    binding.drop_gradients()
    binding.capture(state)
