"""Whole runs with one `fit`."""

from forkmerge.algorithms._fit import Algorithm
from forkmerge.algorithms._forkmerge import ForkMerge, Joint, SingleTask

__all__ = ["Algorithm", "ForkMerge", "Joint", "SingleTask"]
