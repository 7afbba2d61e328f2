"""Whole runs with one `fit`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from forkmerge.algorithms.fit import Algorithm
from forkmerge.algorithms.forkmerge import ForkMerge, Joint, SingleTask

if TYPE_CHECKING:
    from forkmerge.algorithms.post_train import JointThenAlone, PostTrain
    from forkmerge.algorithms.weight_grid import WeightGrid, pareto_front

# Imported when first asked for: `import forkmerge` is often for ForkMerge alone.
_LATER = {
    "JointThenAlone": "post_train",
    "PostTrain": "post_train",
    "WeightGrid": "weight_grid",
    "pareto_front": "weight_grid",
}

__all__ = [
    "Algorithm",
    "ForkMerge",
    "Joint",
    "JointThenAlone",
    "PostTrain",
    "SingleTask",
    "WeightGrid",
    "pareto_front",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
