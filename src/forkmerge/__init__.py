"""Auxiliary-task learning that cannot hurt the target: fork, train, merge what helps, repeat."""

from forkmerge.algorithms import Algorithm, ForkMerge, Joint, PostTrain, SingleTask, WeightGrid, pareto_front
from forkmerge.auxiliaries import merge_auxiliaries, with_l2
from forkmerge.branch import Mixture, Training
from forkmerge.errors import ConfigError, ForkMergeError, ProblemError, StoreError
from forkmerge.factories import OptimizerOf, SchedulerOf
from forkmerge.fork import Fork, fork
from forkmerge.merging import merge_states
from forkmerge.metrics import MeanCost, absolute_error, accuracy, nll
from forkmerge.mixtures import Given, Groups, Mixed, Mixtures, NestedTopK, PerAuxiliary, task_relevance
from forkmerge.problem import Context, Evaluation, Problem, Stream
from forkmerge.recipe import Recipe, load_recipe
from forkmerge.run import Run
from forkmerge.scoring import measure
from forkmerge.searches import Binary, Fixed, Greedy, Grid, Search

__version__ = "0.1.0"

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
    "Recipe",
    "Run",
    "SchedulerOf",
    "Search",
    "SingleTask",
    "StoreError",
    "Stream",
    "Training",
    "WeightGrid",
    "absolute_error",
    "accuracy",
    "fork",
    "load_recipe",
    "measure",
    "merge_auxiliaries",
    "merge_states",
    "nll",
    "pareto_front",
    "task_relevance",
    "with_l2",
]
