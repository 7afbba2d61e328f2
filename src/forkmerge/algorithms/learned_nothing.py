"""Runs that learned nothing end as failed, and say where it went wrong: round, branch, step, stream, example."""

from __future__ import annotations

from collections.abc import Mapping

from forkmerge.algorithms.checkpoint import RunState
from forkmerge.engine.training.options import Training
from forkmerge.errors import RunFailed
from forkmerge.problem.definition import Problem, Stream
from forkmerge.problem.not_finite import example_not_finite
from forkmerge.problem.randomness import derive


def check_round(run: RunState) -> None:
    """Refuse to go on after a round in which no branch had a loss of any task."""
    last = run.rounds[-1]
    if not any(branch.losses for branch in last.branches.values()):
        names = ", ".join(map(repr, last.branches))
        raise RunFailed(
            f"nothing was learned in round {last.index}, steps {last.start} to {last.end}: the losses of branches "
            f"{names} were empty in every step. Let `losses` return {{task: loss}} for the tasks it is asked for; only "
            "a batch without labels may leave a task out."
        )


def check_run(run: RunState, problem: Problem, training: Training, seed: int) -> None:
    """Refuse to call a run finished in which the target was never learned, or no branch could ever be used."""
    branches = [(r, name, branch) for r in run.rounds for name, branch in r.branches.items()]
    on_target = [branch for _, _, branch in branches if branch.task_weights.get(problem.target)]
    if problem.weights == "sampling" and training.method is None:  # a short run may never draw the target
        on_target = [branch for branch in on_target if sum(map(bool, branch.task_weights.values())) == 1]
    if on_target and not any(problem.target in branch.losses for branch in on_target):
        raise RunFailed(
            f"the target {problem.target!r} was never learned: none of the {run.step} steps had a loss of it, in any "
            "branch. Its training data has no labels that `losses` uses."
        )
    if any(r.coefficients or r.floor_score is not None for r in run.rounds):
        return
    faulty = [entry for entry in branches if entry[2].fault]
    first = f"from step {run.first_bad_step} on"
    r, name, branch = next((entry for entry in faulty if (entry[2].fault or "").endswith(first)), faulty[0])
    rounds = f"all {len(run.rounds)} rounds" if len(run.rounds) > 1 else "the only round"
    streams = {key: stream for key, stream in problem.stream_map.items() if _reads(branch.task_weights, stream)}
    cause = _cause(streams, training, derive(seed, "branch", name) if not training.paired else seed, run.first_bad_step)
    raise RunFailed(
        f"nothing was learned: every branch was faulty in {rounds}. In round {r.index}, branch {name!r}: "
        f"{branch.fault}. {cause}"
    )


def _reads(task_weights: Mapping[str, float], stream: Stream) -> bool:
    return any(task_weights.get(task) for task in stream.tasks)


def _cause(streams: Mapping[str, Stream], training: Training, order: int, step: int | None) -> str:
    if step is not None:
        positions = range(step * training.accumulate, (step + 1) * training.accumulate)
        for name, stream in streams.items():
            index = example_not_finite(name, stream, positions, order)
            if index is not None:
                return f"Example {index} of stream {name!r}, which that step reads, holds a number that is not finite."
        return "The data of that step are finite: lower the learning rate, or clip gradients with clip_norm=1.0."
    return "Look at the score of an untrained model: a metric that is NaN from the start is no measure of training."
