"""Coefficients Λ, and the merge itself on plain tensors: θ_r + Σ_{k≠r} Λ_k (θ_k − θ_r), r the heaviest branch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from forkmerge.errors import ProblemError

Coefficients = tuple[float, ...]
"""Λ: one coefficient per branch, non-negative; they sum to 1, or to more over the common fork point (see `Sums`)."""


_SUM_TOLERANCE = 1e-6  # 1/3 typed as 0.3333333 must pass

CHUNK = 2**18
"""Elements merged at a time: small enough for the cache, large enough to hide the cost of a call."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def vertices(branches: int) -> list[Coefficients]:
    """Return e_1, …, e_B: each single branch as coefficients."""
    return [tuple(float(k == b) for k in range(branches)) for b in range(branches)]


def is_vertex(coefficients: Sequence[float]) -> bool:
    """Whether coefficients are those of a single branch."""
    return 1.0 in coefficients and sum(value != 0 for value in coefficients) == 1


def rest_of(coefficients: Sequence[float]) -> float:
    """Return 1 − ΣΛ, the coefficient of the common fork point; 0 where coefficients sum to 1, up to rounding."""
    rest = 1 - math.fsum(coefficients)
    return 0.0 if abs(rest) <= _SUM_TOLERANCE else rest


def normalised(coefficients: Sequence[float]) -> Coefficients:
    """Return coefficients divided by their sum; themselves, to the bit, where that is 1 up to rounding."""
    total = math.fsum(coefficients)
    return tuple(v if rest_of(coefficients) == 0 else v / total for v in coefficients)


def check_coefficients(
    coefficients: Sequence[float], branches: int | None = None, *, any_sum: bool = False, signed: bool = False
) -> Coefficients:
    """Return the coefficients as floats if they are non-negative, sum to 1 and fit the number of branches.

    Args:
        coefficients: The coefficients.
        branches: How many there must be.
        any_sum: Whether they may sum to anything above 0.
        signed: Whether they may be negative, as that of a fork point is.
    """
    try:
        values = tuple(float(value) + 0.0 for value in coefficients)  # + 0.0 turns -0.0 into 0.0
    except (TypeError, ValueError):
        raise ProblemError(f"coefficients must be numbers, one per branch, got {coefficients!r}.") from None
    if branches is not None and len(values) != branches:
        raise ProblemError(f"expected {branches} coefficients, one per branch, got {len(values)}: {values}.")
    # NaN fails the comparison, infinity the sum.
    is_sum = 0 < sum(values) < math.inf if any_sum else abs(sum(values) - 1) <= _SUM_TOLERANCE
    if not all(value >= 0 or (signed and math.isfinite(value)) for value in values) or not is_sum:
        raise ProblemError(
            f"coefficients must be finite, not negative and sum to 1, got {values}, "
            f"which sum to {sum(values):.7g}: divide non-negative numbers by their sum."
        )
    return values


def heaviest(coefficients: Sequence[float]) -> int:
    """Return the branch with the largest coefficient; of equals the first.

    Example:
        >>> heaviest((0.2, 0.4, 0.4))
        1
    """
    if not coefficients:
        raise ProblemError("coefficients must be given for at least one branch, got none.")
    return max(range(len(coefficients)), key=coefficients.__getitem__)


@torch.no_grad()
def merge_into(
    out: Tensor, tensors: Sequence[Tensor], coefficients: Sequence[float], *, signed: bool = False
) -> Tensor:
    """Write the merge of `tensors` into `out` and return `out`.

    Computes θ_r + Σ_{k≠r} Λ_k (θ_k − θ_r) element by element, r the heaviest branch, k ascending,
    difference, product and sum each rounded once. A branch of coefficient 0 is never read, so its NaN
    cannot leak. A single branch, and branches that are copies of one another, come out bit for bit.
    Needs three chunks of scratch memory besides `out`, unless the layouts of the tensors differ.

    Half and lower precision is computed in float32 and rounded once. Integers and booleans are copied
    from the heaviest branch. Bits depend neither on memory layout nor on where a chunk ends.

    Args:
        out: Takes the result; may be one of `tensors`, but may not overlap them in any other way.
        tensors: θ_k, one tensor per branch, all of the shape, dtype and device of `out`.
        coefficients: Λ, one per branch, non-negative, summing to 1.
        signed: Whether some may be negative, as that of a fork point is.
    """
    weights = check_coefficients(coefficients, len(tensors), signed=signed)
    _check_alike(out, tensors)
    root = heaviest(weights)
    used = [(weight, k) for k, weight in enumerate(weights) if weight != 0 and k != root]
    if not used or not (out.is_floating_point() or out.is_complex()):
        return out.copy_(tensors[root])
    views = [out, tensors[root], *(tensors[k] for _, k in used)]
    if out.is_complex():
        views = [torch.view_as_real(view) for view in views]
    dtype = views[0].dtype if views[0].itemsize > 2 else torch.float32
    scratch: Tensor | None = None
    for target, base, *others in _chunks(views):
        if scratch is None:
            scratch = torch.empty((3, *target.shape), dtype=dtype, device=out.device)
        room = scratch[:, : len(target)] if target.dim() == 1 else scratch
        _merge_chunk(target, base, [(weight, other) for (weight, _), other in zip(used, others, strict=True)], room)
    return out


def merge_tensors(tensors: Sequence[Tensor], coefficients: Sequence[float]) -> Tensor:
    """Return the merge of `tensors` as a new tensor laid out like the heaviest; see `merge_into`.

    Example:
        >>> merge_tensors([torch.tensor([0.0, 2.0]), torch.tensor([1.0, 2.0])], (0.75, 0.25))
        tensor([0.2500, 2.0000])
    """
    weights = check_coefficients(coefficients, len(tensors))
    return merge_into(torch.empty_like(tensors[heaviest(weights)], requires_grad=False), tensors, weights)


def _merge_chunk(out: Tensor, base: Tensor, others: list[tuple[float, Tensor]], scratch: Tensor) -> None:
    """Merge one chunk, writing `out` only after everything has been read, since they may be one tensor.

    It is written as base − Σ Λ_k (base − θ_k): equal elements then differ by +0, and subtracting +0 keeps
    even the sign of −0, which adding +0 would not. Product and difference are separate calls because a
    fused one rounds differently in the vectorised and the remaining part of a loop.
    """
    difference, total, wide_base = scratch
    wide = base.dtype == scratch.dtype
    start = base if wide else wide_base.copy_(base)
    # A sum is the cheapest look for inf and NaN; an overflow only sends finite numbers the longer way.
    finite = math.isfinite(start.sum().item())
    merged = start
    for count, (weight, other) in enumerate(others, start=1):
        torch.sub(start, other if wide else difference.copy_(other), out=difference)
        last = finite and wide and count == len(others)
        merged = torch.sub(merged, difference.mul_(weight), out=out if last else total)
    if not finite:
        out.copy_(_restore_copies(merged.to(base.dtype), base, [other for _, other in others]))
    elif not wide:
        out.copy_(merged)


def _restore_copies(merged: Tensor, base: Tensor, others: list[Tensor]) -> Tensor:
    """Keep the bits all branches share: inf − inf would turn a mask of −inf into NaN."""
    bits = _BITS[base.itemsize]
    shared = torch.ones_like(base, dtype=torch.bool)
    for other in others:
        shared &= base.view(bits) == other.view(bits)
    return torch.where(shared, base.view(bits), merged.view(bits)).view(base.dtype)


def _chunks(views: list[Tensor]) -> Iterator[list[Tensor]]:
    """Cut the tensors alike into pieces of at most `CHUNK` elements, or yield them whole if laid out unlike.

    Dimensions are first put into memory order, so that tensors that are all channels_last are cut too.
    """
    if not views[0].numel():
        return
    order = sorted(range(views[0].dim()), key=views[0].stride, reverse=True)
    ordered = [view.permute(order) for view in views]
    if not all(view.is_contiguous() for view in ordered):
        yield views
        return
    flat = [view.view(-1) for view in ordered]
    for start in range(0, flat[0].numel(), CHUNK):
        yield [view[start : start + CHUNK] for view in flat]


def _check_alike(out: Tensor, tensors: Sequence[Tensor]) -> None:
    for k, tensor in enumerate(tensors):
        if tensor.layout != torch.strided:
            raise ProblemError(f"the tensor of branch {k} is {tensor.layout}: call .to_dense() before merging.")
        if (tensor.shape, tensor.dtype, tensor.device) != (out.shape, out.dtype, out.device):
            raise ProblemError(
                f"the tensor of branch {k} is {_describe(tensor)} but the merge is {_describe(out)}: "
                "give every branch the same model, of one dtype and on one device."
            )


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"
