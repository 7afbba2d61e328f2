"""GCS: auxiliary gradients enter as far as they agree with the target's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forkmerge.methods.base import GramianMethod, MethodState, View
from forkmerge.methods.context import Array
from forkmerge.methods.solvers import gcs


@dataclass(frozen=True)
class GCS(GramianMethod):
    """Gradient cosine similarity: d = g_m + Σ_k max(0, cos(g_m, g_k)) g_k, or with 1[cos > 0] in place of the cosine.

    A step without a label or a gradient of the target trains no shared parameter: nothing agrees with nothing.

    Args:
        weighted: True weighs by the cosine, False takes an auxiliary as it is or not at all.

    State: none.
    Passes: one backward pass per task.
    Memory: K shared gradients.
    Target: needed.
    Heads: unweighted.

    References:
        Du et al., Adapting Auxiliary Losses Using Gradient Similarity, 2018, the weighted and the unweighted version.
    """

    needs_target = True
    weighted: bool = True

    @classmethod
    def authors_scripts(cls) -> GCS:
        """The unweighted version."""
        return cls(weighted=False)

    def weights(self, gramian: Array, view: View, state: MethodState) -> Array:
        """Return 1 for the target and how far each auxiliary agrees with it."""
        del state
        return np.zeros(len(gramian)) if view.target is None else gcs(gramian, view.target, self.weighted)
