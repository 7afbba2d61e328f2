"""Train a target task with the help of others: fork, train, merge what helps the target, repeat."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from forkmerge._version import __version__
from forkmerge.moved_paths import MODULES, MovedPaths

if TYPE_CHECKING:
    from forkmerge.algorithms.fit import Algorithm
    from forkmerge.algorithms.forkmerge import ForkMerge, Joint, SingleTask
    from forkmerge.algorithms.mixtures import Given, Groups, Mixed, Mixtures, NestedTopK, PerAuxiliary, Rates
    from forkmerge.algorithms.own_loop.fork import Fork, fork
    from forkmerge.algorithms.own_loop.merge_files import merge_files
    from forkmerge.algorithms.own_loop.trainer_rounds import rounds
    from forkmerge.algorithms.post_train import JointThenAlone, PostTrain
    from forkmerge.algorithms.run_record import Run
    from forkmerge.algorithms.weight_grid import WeightGrid, pareto_front
    from forkmerge.engine.executors.ray.options import Ray
    from forkmerge.engine.merging.relevance import task_relevance
    from forkmerge.engine.merging.searches import Binary, Fixed, Greedy, Grid, Search, Sums
    from forkmerge.engine.merging.state_dicts import merge_states
    from forkmerge.engine.training.optimizers import OptimizerOf, SchedulerOf
    from forkmerge.engine.training.options import Mixture, Training
    from forkmerge.errors import ConfigError, ForkMergeError, ProblemError, ResourceError, RunFailed, StoreError
    from forkmerge.experiments.mix import mix
    from forkmerge.experiments.recipe import Recipe, load_recipe
    from forkmerge.experiments.verdict import give_verdict
    from forkmerge.problem.auc import auc
    from forkmerge.problem.definition import Context, Evaluation, Problem, Stream
    from forkmerge.problem.made_auxiliaries import merge_auxiliaries, with_l2
    from forkmerge.problem.metrics import MeanCost, absolute_error, accuracy, nll
    from forkmerge.problem.model_outputs import model_loss
    from forkmerge.problem.scoring import measure

# Names are imported when they are first asked for, so that `forkmerge --help` need not wait for torch. A test compares
# this table with the imports above, which type checkers read.
_PUBLIC = {
    "algorithms.fit": ("Algorithm",),
    "algorithms.forkmerge": ("ForkMerge", "Joint", "SingleTask"),
    "algorithms.mixtures": ("Given", "Groups", "Mixed", "Mixtures", "NestedTopK", "PerAuxiliary", "Rates"),
    "algorithms.own_loop.fork": ("Fork", "fork"),
    "algorithms.own_loop.merge_files": ("merge_files",),
    "algorithms.own_loop.trainer_rounds": ("rounds",),
    "algorithms.post_train": ("JointThenAlone", "PostTrain"),
    "algorithms.run_record": ("Run",),
    "algorithms.weight_grid": ("WeightGrid", "pareto_front"),
    "engine.executors.ray.options": ("Ray",),
    "engine.merging.relevance": ("task_relevance",),
    "engine.merging.searches": ("Binary", "Fixed", "Greedy", "Grid", "Search", "Sums"),
    "engine.merging.state_dicts": ("merge_states",),
    "engine.training.optimizers": ("OptimizerOf", "SchedulerOf"),
    "engine.training.options": ("Mixture", "Training"),
    "errors": ("ConfigError", "ForkMergeError", "ProblemError", "ResourceError", "RunFailed", "StoreError"),
    "experiments.mix": ("mix",),
    "experiments.recipe": ("Recipe", "load_recipe"),
    "experiments.verdict": ("give_verdict",),
    "problem.auc": ("auc",),
    "problem.definition": ("Context", "Evaluation", "Problem", "Stream"),
    "problem.made_auxiliaries": ("merge_auxiliaries", "with_l2"),
    "problem.metrics": ("MeanCost", "absolute_error", "accuracy", "nll"),
    "problem.model_outputs": ("model_loss",),
    "problem.scoring": ("measure",),
}
_MODULE_OF = {name: f"{__name__}.{module}" for module, names in _PUBLIC.items() for name in names}

__all__ = [
    "Algorithm",
    "Binary",
    "ConfigError",
    "Context",
    "Evaluation",
    "Fixed",
    "Fork",
    "ForkMerge",
    "ForkMergeError",
    "Given",
    "Greedy",
    "Grid",
    "Groups",
    "Joint",
    "JointThenAlone",
    "MeanCost",
    "Mixed",
    "Mixture",
    "Mixtures",
    "NestedTopK",
    "OptimizerOf",
    "PerAuxiliary",
    "PostTrain",
    "Problem",
    "ProblemError",
    "Rates",
    "Ray",
    "Recipe",
    "ResourceError",
    "Run",
    "RunFailed",
    "SchedulerOf",
    "Search",
    "SingleTask",
    "StoreError",
    "Stream",
    "Sums",
    "Training",
    "WeightGrid",
    "__version__",
    "absolute_error",
    "accuracy",
    "auc",
    "fork",
    "give_verdict",
    "load_recipe",
    "measure",
    "merge_auxiliaries",
    "merge_files",
    "merge_states",
    "mix",
    "model_loss",
    "nll",
    "pareto_front",
    "rounds",
    "task_relevance",
    "with_l2",
]

if not any(isinstance(finder, MovedPaths) for finder in sys.meta_path):
    sys.meta_path.append(MovedPaths())


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(import_module(_MODULE_OF[name]), name)
        globals()[name] = value
        return value
    if f"{__name__}.{name}" in MODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
