"""Bytes of a run, in memory and on disk, from the sizes of one branch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from forkmerge.algorithms.settings import Settings
from forkmerge.engine.storage.run_folder import CHECKPOINTS_KEPT
from forkmerge.engine.training.state import State


@dataclass(frozen=True)
class StateSizes:
    """Bytes: trainable parameters, optimizer state and changed buffers of one branch, and what is never forked."""

    weights: int
    optimizer: int
    buffers: int
    fixed: int


def memory_of_run(settings: Settings, sizes: StateSizes, branches: int, workers: int) -> dict[str, int]:
    """Return the bytes of all states: B(1 + s) + 2 model sizes, and what the options add."""
    branch = sizes.weights + sizes.buffers + sizes.optimizer
    held = 2 * settings.refit + (settings.select == "best") + branches * (settings.checkpoint != "last")
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


def disk_of_run(settings: Settings, sizes: StateSizes, first: int, in_all: int, inside: bool) -> dict[str, int]:
    """Return the bytes that a run's folder grows to.

    After a merge all branches have the merged weights, which are then written once; inside a round (`inside`) each has
    its own.

    Args:
        settings: The algorithm's options.
        sizes: Those of one branch.
        first: How many branches the first round has, which has most.
        in_all: How many all rounds have together.
        inside: Whether checkpoints are written inside rounds.
    """
    weights = sizes.weights + sizes.buffers
    held = 2 * settings.refit + (settings.select == "best") + first * (settings.checkpoint != "last")
    checkpoint = (1 + held) * weights + first * (sizes.optimizer + sizes.buffers)
    checkpoint += settings.floor * (weights + sizes.optimizer) + (first * sizes.weights if inside else 0)
    kept = in_all * weights if settings.keep_branches else 0
    parts = {"checkpoints": CHECKPOINTS_KEPT * checkpoint, "branches": kept, "model": sizes.weights + sizes.fixed}
    return {"checkpoint": checkpoint, **parts, "total": sum(parts.values())}


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
