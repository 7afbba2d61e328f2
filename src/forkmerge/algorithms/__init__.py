"""Whole runs with one `fit`."""

from forkmerge.algorithms._fit import Algorithm
from forkmerge.algorithms._forkmerge import ForkMerge, Joint, SingleTask
from forkmerge.algorithms._posttrain import PostTrain
from forkmerge.algorithms._weightgrid import WeightGrid, pareto_front

__all__ = ["Algorithm", "ForkMerge", "Joint", "PostTrain", "SingleTask", "WeightGrid", "pareto_front"]
