"""How the tasks of one branch are combined in a step: one class per method, one file per family."""

from forkmerge.methods._base import GramianMethod, LossMethod, MatrixMethod, Method, Setup, View
from forkmerge.methods._registry import METHODS, method_from

__all__ = ["METHODS", "GramianMethod", "LossMethod", "MatrixMethod", "Method", "Setup", "View", "method_from"]
