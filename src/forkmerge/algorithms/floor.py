"""The floor: an unmerged target-only run beside the branches, returned if it validates better than the merge.

It is the target-only branch itself, and costs nothing, until a merge takes something else than that branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from forkmerge.algorithms.checkpoint import RunState, Selection
from forkmerge.algorithms.mixtures import ALONE
from forkmerge.algorithms.settings import Settings
from forkmerge.algorithms.validation import Validator
from forkmerge.engine.storage.run_folder import NoStore, RunFolder
from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.engine.training.options import Mixture
from forkmerge.engine.training.state import State
from forkmerge.errors import StoreError

FLOOR = "floor"
"""How events and notes call it."""
REFERENCE = "single-task"
"""How its last weights are kept, as those of a round 0, to compare the model with that is returned."""


def floor_mixture(target: str) -> Mixture:
    """Return what the floor trains on: the target alone, with the seeds of the branches."""
    return Mixture(ALONE, {target: 1.0})


def floor_branch(mixtures: Sequence[Mixture], target: str, *, paired: bool, settings: Settings) -> int | None:
    """Return the branch that trains exactly as the floor would: target only, on the same examples; None without one.

    Where learning rates of branches fall at the end of every round, none does.
    """
    for index, mixture in enumerate(mixtures):
        weights = {task: weight for task, weight in mixture.task_weights.items() if weight > 0}
        is_plain = mixture.lr_scale == 1 and not settings.anneals
        if weights == {target: 1.0} and is_plain and (paired or mixture.name == ALONE):
            return index
    return None


def start_floor(run: RunState, initial: State, target: str, *, paired: bool, settings: Settings) -> None:
    """Let the branch that trains as the floor would be the floor, or train one beside the branches."""
    run.shares_floor = floor_branch(run.mixtures, target, paired=paired, settings=settings) is not None
    run.floor = None if run.shares_floor else initial.clone()


def part_from_branch(run: RunState, index: int | None, kept: Sequence[str]) -> None:
    """Let the floor go on as a run of its own where the branch at `index`, which has been it, does not go on."""
    if run.shares_floor and index is not None and run.mixtures[index].name not in kept:
        run.floor, run.shares_floor = run.branches[index], False


def keep_reference(binding: ModelBinding, floor: State, store: RunFolder | NoStore) -> dict[str, Tensor] | None:
    """Keep and return the last weights of the floor, by the module's own names; None if they are not finite."""
    if not floor.is_finite():
        return None
    binding.attach_weights(floor)
    values = binding.model.state_dict().items()
    tensors = {name: value.detach().clone().contiguous() for name, value in values if isinstance(value, Tensor)}
    store.keep_branches({REFERENCE: tensors}, 0)
    return tensors


def read_reference(store: RunFolder | NoStore) -> dict[str, Tensor] | None:
    """Return what `keep_reference` kept; None where a run has no floor, or one that diverged."""
    try:
        tensors: dict[str, Tensor] = store.load_branches(0)[REFERENCE]
    except StoreError:
        return None
    return tensors


def select_model(run: RunState, which: str, validator: Validator, steps: int) -> Selection:
    """Return the "last" or the "best" merge, or the floor if that validates better; its weights are taken.

    Where searches have seen a sample of the validation examples, both are measured on all of them now.
    """
    if run.shares_floor and run.floor is None and which == "best":
        run.floor = run.merged.clone()  # the last merge is the floor, and the best one takes its place
    selection = run.select_merge(which)
    if validator.sees_a_sample:
        score, metrics = validator.on_all(run.merged)
        selection = replace(selection, score=score, metrics=metrics)
    if run.floor is None:
        return selection
    if validator.sees_a_sample:
        score, metrics = validator.on_all(run.floor)
    else:
        score, metrics = run.rounds[-1].floor_score, validator.reported(validator.known_metrics(run.floor))
    if score is None or (selection.score is not None and score <= selection.score):
        return selection
    run.merged.take_weights(run.floor)
    run.note("the unmerged target-only run validated better than the merge and is returned")
    return replace(selection, final=FLOOR, score=score, metrics=metrics, step=steps, replays=False)
