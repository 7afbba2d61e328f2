"""Tensors of every dtype, and equality to the last bit."""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def identical(left: Any, right: Any) -> bool:
    """Equality of types, key order and every bit, NaN included."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)
    if isinstance(left, float):
        return struct.pack(">d", left) == struct.pack(">d", right)
    if isinstance(left, dict):
        return identical(list(left.items()), list(right.items()))
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(identical, left, right))
    return bool(left == right)


def make_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.arange(size, dtype=torch.int64).mul(37).add(11).to(torch.uint8)
    if dtype is torch.bool:
        raw = raw % 2
    return raw.view(dtype).reshape(shape)


def same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Equality of names, in any order, and of every bit."""
    return identical(dict(sorted(left.items())), dict(sorted(right.items())))
