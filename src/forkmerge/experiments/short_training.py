"""A few steps of a recipe, trained as `fit` would train them: to time them, or to compare what they lead to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial

from torch import nn

from forkmerge.algorithms.preflight import check_run
from forkmerge.algorithms.settings import Settings
from forkmerge.engine.executors.devices import check_devices, place_model
from forkmerge.engine.training.memory_format import memory_format
from forkmerge.engine.training.options import Training
from forkmerge.experiments.recipe import Recipe


@contextmanager
def short_training(recipe: Recipe, settings: Settings, model: nn.Module, seed: int) -> Iterator[Training]:
    """Give how branches are trained, after every check of `fit`; inside, the model is placed as in a run.

    Args:
        recipe: The problem and how to train on it.
        settings: Of the algorithm.
        model: The recipe's model.
        seed: The run's seed.
    """
    names = [item.name for item in fields(Training)]
    options = {key: value for key, value in {"method": settings.method, **recipe.options}.items() if key in names}
    training = Training(recipe.optimizer, **options).over(recipe.steps)
    place_model(model, check_devices(recipe.options.get("devices")))
    problem = settings.searched(recipe.problem.sealed(), seed)
    check = partial(check_run, problem, model, training, settings, seed)
    with memory_format(model, training.channels_last, training.precision, check) as is_channels_last:
        # A compiler takes longer to start than a few steps take.
        yield replace(training, channels_last=is_channels_last, compile=False)
