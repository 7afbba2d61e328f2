"""What every branch goes on with after a merge: the merged weights, and optimizer state by policy."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from forkmerge.engine.merging.arithmetic import Coefficients, merge_tensors, normalised
from forkmerge.engine.training.state import State


def share_optimizer(states: Sequence[State], coefficients: Coefficients, policy: str) -> None:
    """Apply the policy for optimizer state at a merge: keep each branch's own, average them, or reset.

    Averaging combines tensors of a parameter's shape with the merge's coefficients, a missing one counting as
    zeros; counters come from the heaviest branch that has them. Schedules run on and are never touched.
    """
    if policy == "keep":
        return
    if policy == "reset":
        for state in states:
            state.reset_optimizer()
        return
    order = sorted(range(len(states)), key=lambda i: -coefficients[i])
    used = [states[i] for i in order if coefficients[i] > 0]
    weights = [c for c in sorted(coefficients, reverse=True) if c > 0]
    rows: dict[str, Tensor] = {}
    slots: dict[str, set[int]] = {}
    loose: dict[int, dict[str, object]] = {}
    for state in used:
        for name, row in state.optimizer_rows.items():
            rows.setdefault(name, row)
            slots.setdefault(name, set()).update(state.optimizer_slots.get(name, []))
        for index, entry in state.optimizer_loose.items():
            loose.setdefault(index, entry)
    for state in states:
        for name in slots:
            if name not in state.optimizer_rows:
                state.optimizer_rows[name] = torch.zeros_like(rows[name])
    for name in slots:
        merged = merge_tensors([state.optimizer_rows[name] for state in used], weights)  # one row at a time
        for state in states:
            state.optimizer_rows[name].copy_(merged)
    for state in states:
        state.optimizer_slots = {name: sorted(positions) for name, positions in slots.items()}
        state.optimizer_loose = copy.deepcopy(loose)


def synchronise(branches: Sequence[State], merged: State, coefficients: Coefficients, optimizer_state: str) -> None:
    """Let every branch go on from the merged weights, and apply the policy for optimizer state.

    The optimizer, and method, of a branch that diverged is reset whatever the policy: its tensors are not finite
    either, and would spoil the next round. Coefficients that are all 0 mean that every branch has.
    """
    coefficients = normalised(coefficients) if any(coefficients) else coefficients  # moments are no updates
    has_diverged = [not any(coefficients) or not state.is_finite(optimizer=True) for state in branches]
    if any(coefficients):
        # A diverged one may have entered the merge by older weights that were sound: its optimizer's tensors are not.
        shares = [0.0 if lost else c for lost, c in zip(has_diverged, coefficients, strict=True)]
        if shares != list(coefficients):
            total = math.fsum(shares)
            coefficients = tuple(share / total for share in shares) if total else coefficients
            optimizer_state = optimizer_state if total else "reset"
        share_optimizer(branches, coefficients, optimizer_state)
    for state, lost in zip(branches, has_diverged, strict=True):
        state.take_weights(merged)
        if lost:
            state.forget()
