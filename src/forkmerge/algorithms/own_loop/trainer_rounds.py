"""`rounds`: ForkMerge around trainers that own their loop, such as `Trainer` of transformers, unmodified."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from forkmerge.algorithms.own_loop.fork import fork
from forkmerge.algorithms.own_loop.forked_branch import ForkedBranch
from forkmerge.algorithms.own_loop.merge_outcome import MergeOutcome
from forkmerge.algorithms.own_loop.own_merge import Score
from forkmerge.engine.merging.searches import Search
from forkmerge.engine.training.options import Mixture
from forkmerge.errors import ProblemError, check_count


class Trainer(Protocol):
    """Whatever trains the model it was made with."""

    def train(self) -> Any:
        """Train it."""


def rounds(
    model: nn.Module,
    branches: Mapping[str, Mapping[str, Any]] | Sequence[Mixture],
    make_trainer: Callable[[ForkedBranch, int], Trainer],
    score: Score,
    *,
    count: int,
    steps: int,
    search: Search | str | None = None,
) -> Iterator[MergeOutcome]:
    """Train branches by trainers, merge them, and repeat; yields what every merge found, and `model` gets its weights.

    Every round has new trainers, so optimizers begin anew in each, and so do schedules unless the trainer is told where
    the run is. Give all trainers of a round the same seed: what branches differ in is then their tasks alone.

    Args:
        model: Any module; frozen parameters are shared by all branches.
        branches: `{name: {task: weight}}`, the target alone first. The library only reports the weights; `make_trainer`
            uses them.
        make_trainer: `make_trainer(branch, steps)` returns a trainer, of transformers for example, that trains
            `branch.model` for so many steps, on data according to `branch.task_weights`.
        score: Validates a model; higher is better. Called in evaluation mode without gradients.
        count: How many rounds.
        steps: Steps of every branch in a round.
        search: How coefficients are found; None takes a grid for two branches, greedy search for more.
    """
    check_count("count", count)
    check_count("steps", steps)
    # Trainers make their own optimizers; the fork copies one that never steps and holds nothing.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ProblemError(
            "nothing of the model can be trained: set requires_grad; an adapter of PEFT is loaded to be trained with "
            "from_pretrained(…, is_trainable=True)."
        )
    idle = torch.optim.SGD(trained, lr=0.0)
    forked = fork(model, idle, branches, search=search)
    for branch in forked:
        if branch.lr_scale != 1:
            raise ProblemError(f"branch {branch.name!r}: set its learning rate in make_trainer, not by lr_scale.")

    def go_on() -> Iterator[MergeOutcome]:
        for _ in range(count):
            for branch in forked:
                make_trainer(branch, steps).train()
            yield forked.merge(score, into=model)

    return go_on()  # so that a mistake in the arguments is told now, and not when the first outcome is asked for
