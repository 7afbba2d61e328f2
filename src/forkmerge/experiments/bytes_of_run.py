"""Bytes of a run in memory, from the sizes of one branch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from forkmerge.algorithms.settings import Settings
from forkmerge.engine.training.state import State, StateSizes


def memory_of_run(settings: Settings, sizes: StateSizes, branches: int, workers: int) -> dict[str, int]:
    """Return the bytes of all states: B(1 + s) + 2 model sizes, and what the options add."""
    branch = sizes.weights + sizes.buffers + sizes.optimizer
    held = 2 * settings.refit + (settings.select == "best") + branches * (settings.checkpoint != "last")
    # The fork point, while candidates are built where it was, and merges before it.
    held += max(settings.search_for(branches).beyond_one, settings.previous_merges or 0)
    held += branches if settings.average_iterates else 0
    parts = {
        "branches": (branches + settings.floor) * branch,
        "merged": sizes.weights + sizes.buffers,
        "gradients": sizes.weights,
        "fixed": sizes.fixed,
        "held": held * (sizes.weights + sizes.buffers),
        # Every worker trains in a spare branch; what is never trained lies in memory that all of them share.
        "workers": workers * (branch + sizes.weights) + sizes.fixed if workers > 1 else 0,
    }
    return {**{part: count for part, count in parts.items() if count}, "total": sum(parts.values())}


def sizes_of(model: nn.Module, states: Sequence[State]) -> StateSizes:
    """Return the bytes of a branch, the largest of some, and of what is never forked."""

    def total(tensors: Any) -> int:
        return sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))

    loose = (value for s in states[:1] for entry in s.optimizer_loose.values() for value in entry.values())
    return StateSizes(
        weights=total(states[0].rows.values()),
        optimizer=max(total(state.optimizer_rows.values()) for state in states) + total(loose),
        buffers=max(total(state.buffers.values()) for state in states),
        fixed=total(p for p in model.parameters() if not p.requires_grad) + total(model.buffers()),
    )
