"""Whole runs with one `fit`."""

from forkmerge.algorithms.fit import Algorithm
from forkmerge.algorithms.forkmerge import ForkMerge, Joint, SingleTask
from forkmerge.algorithms.post_train import PostTrain
from forkmerge.algorithms.weight_grid import WeightGrid, pareto_front

__all__ = ["Algorithm", "ForkMerge", "Joint", "PostTrain", "SingleTask", "WeightGrid", "pareto_front"]
