"""Task relevance: how much each task weighed in a merge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from forkmerge.engine.merging.arithmetic import normalised
from forkmerge.engine.training.options import Mixture


def task_relevance(coefficients: Mapping[str, float], mixtures: Sequence[Mixture]) -> dict[str, float]:
    """λ_k = Σ_b Λ_b s_b ν^b_k: how much each task weighed in a merge, in units of the target's own weight.

    s_b is the branch's factor on the learning rate: to first order a step moves s_b times as far. Coefficients that sum
    to more than 1 are divided by their sum: they lengthen the update of the target, too. Coefficients of earlier merges
    shorten it and are left out likewise; there is no relevance where nothing but them was taken.
    """
    own = {mixture.name: coefficients[mixture.name] for mixture in mixtures if mixture.name in coefficients}
    if coefficients and not any(own.values()):
        return {}
    shares = dict(zip(own, normalised(tuple(own.values())), strict=True))
    relevance: dict[str, float] = {}
    for mixture in mixtures:
        for task, weight in mixture.task_weights.items():
            relevance[task] = relevance.get(task, 0.0) + shares.get(mixture.name, 0.0) * mixture.lr_scale * weight
    return relevance
