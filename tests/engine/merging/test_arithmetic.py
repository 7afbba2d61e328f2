"""The merge of tensors against an element-by-element loop, and its algebra."""

from __future__ import annotations

import doctest
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from forkmerge.engine.merging import arithmetic
from forkmerge.engine.merging.arithmetic import CHUNK, heaviest, merge_into, merge_tensors, vertices
from forkmerge.errors import ProblemError

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, torch.float64, *HALVES)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Signed zeros, infinities, subnormals, the largest number, and NaNs with distinct payloads.
AWKWARD = torch.tensor(
    [0, 1 << 31, 0x7F800000, 0xFF800000, 1, 0x807FFFFF, 0x7F7FFFFF, 0x7FC01234, 0xFFC0ABCD, 0x7FA00001],
    dtype=torch.int64,
)


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Compare raw bits, so that −0 ≠ 0 and NaN = NaN of the same payload."""
    plain = [torch.view_as_real(t) if t.is_complex() else t for t in (first, second)]
    return first.dtype == second.dtype and torch.equal(*(t.view(BITS[t.itemsize]) for t in plain))


def awkward(dtype: torch.dtype) -> Tensor:
    if dtype == torch.bfloat16:  # cut off rather than converted, which would lose the payloads of NaN
        return (AWKWARD >> 16).to(torch.int16).view(dtype)
    return AWKWARD.to(torch.int32).view(torch.float32).to(dtype)


def branches_of(seed: int, count: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]


@st.composite
def simplex(draw: st.DrawFn, count: int | None = None) -> tuple[float, ...]:
    """Coefficients with zeros, ties and vertices."""
    count = draw(st.integers(1, 5)) if count is None else count
    raw = draw(st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 7]), min_size=count, max_size=count).filter(any))
    return tuple(value / sum(raw) for value in raw)


SEEDS = st.integers(0, 2**31)
NUMBERS = st.lists(st.floats(-1e3, 1e3, width=32), min_size=4, max_size=4)


def loop_merge(tensors: list[Tensor], coefficients: tuple[float, ...]) -> Tensor:
    """Merge one number at a time, in the literal form θ_r + Σ Λ_k (θ_k − θ_r), rounding every operation."""
    dtype = tensors[0].dtype
    kind = np.float64 if dtype == torch.float64 else np.float32
    columns = [tensor.to(torch.float64).flatten().tolist() for tensor in tensors]
    root = coefficients.index(max(coefficients))
    merged = []
    for numbers in zip(*columns, strict=True):
        base = kind(numbers[root])
        value = base
        for k, number in enumerate(numbers):
            if k != root and coefficients[k] != 0:
                value = value + kind(coefficients[k]) * (kind(number) - base)
        merged.append(value)
    return torch.from_numpy(np.array(merged, dtype=kind)).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@given(seed=SEEDS, coefficients=simplex())
def test_merge_equals_the_loop_bit_for_bit(dtype: torch.dtype, seed: int, coefficients: tuple[float, ...]) -> None:
    tensors = branches_of(seed, len(coefficients), (7,), dtype)
    assert same_bits(merge_tensors(tensors, coefficients), loop_merge(tensors, coefficients))


@given(data=st.data(), coefficients=simplex())
def test_merge_agrees_with_a_weighted_sum_in_double_precision(
    data: st.DataObject, coefficients: tuple[float, ...]
) -> None:
    tensors = [torch.tensor(data.draw(NUMBERS)) for _ in coefficients]
    exact = sum(c * tensor.double() for c, tensor in zip(coefficients, tensors, strict=True))
    # Three roundings of numbers up to 2e3 per branch.
    torch.testing.assert_close(merge_tensors(tensors, coefficients).double(), exact, rtol=0, atol=4e-3)
    doubles = [tensor.double() for tensor in tensors]
    torch.testing.assert_close(merge_tensors(doubles, coefficients), exact, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_vertex_is_that_branch_bit_for_bit(dtype: torch.dtype) -> None:
    for winner, coefficients in enumerate(vertices(3)):
        tensors = [torch.full_like(awkward(dtype), 3.0) for _ in range(3)]
        tensors[winner] = awkward(dtype)
        assert same_bits(merge_tensors(tensors, coefficients), awkward(dtype))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64], ids=str)
@given(coefficients=simplex())
def test_copies_merge_to_the_copy_bit_for_bit(dtype: torch.dtype, coefficients: tuple[float, ...]) -> None:
    copy = awkward(torch.float32).view(torch.complex64) if dtype == torch.complex64 else awkward(dtype)
    copies = [copy.clone() for _ in coefficients]
    assert same_bits(merge_tensors(copies, coefficients), copy)


@given(seed=SEEDS, coefficients=simplex())
def test_untouched_elements_keep_their_bits_beside_changed_ones(seed: int, coefficients: tuple[float, ...]) -> None:
    fixed = awkward(torch.float32)
    tensors = [torch.cat([fixed, tensor]) for tensor in branches_of(seed, len(coefficients), (5,))]
    moving = [tensor[len(fixed) :].clone() for tensor in tensors]
    merged = merge_tensors(tensors, coefficients)
    assert same_bits(merged[: len(fixed)], fixed)
    # An infinity in the chunk takes the longer way, which must not change its neighbours.
    assert same_bits(merged[len(fixed) :], merge_tensors(moving, coefficients))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64], ids=str)
def test_a_bad_branch_of_coefficient_zero_does_not_leak(dtype: torch.dtype) -> None:
    for bad in (math.nan, math.inf):
        good = branches_of(0, 2, (6,), dtype)
        tensors = [good[0], torch.full_like(good[0], bad), good[1]]
        assert same_bits(merge_tensors(tensors, (0.25, 0.0, 0.75)), merge_tensors(good, (0.25, 0.75)))


def test_a_bad_branch_of_positive_coefficient_is_not_hidden() -> None:
    for root, other in itertools.product([math.nan, 1.0], [math.nan, math.inf]):
        merged = merge_tensors([torch.tensor([root, 1.0]), torch.tensor([other, 2.0])], (0.5, 0.5))
        assert not math.isfinite(merged[0])
        assert merged[1] == 1.5


def test_an_infinity_all_branches_share_leaves_its_neighbours_alone() -> None:
    tensors = [torch.tensor([-math.inf, value]) for value in (1.0, 2.0, 1.0)]
    assert merge_tensors(tensors, (0.5, 0.25, 0.25)).tolist() == [-math.inf, 1.25]


@given(seed=SEEDS, order=st.permutations(range(4)), coefficients=simplex(4))
def test_the_order_of_branches_matters_only_to_rounding(
    seed: int, order: list[int], coefficients: tuple[float, ...]
) -> None:
    tensors = branches_of(seed, 4, (9,))
    shuffled = merge_tensors([tensors[k] for k in order], [coefficients[k] for k in order])
    torch.testing.assert_close(shuffled, merge_tensors(tensors, coefficients), rtol=0, atol=3e-6)


@given(seed=SEEDS, share=st.floats(0, 1).filter(lambda share: share != 0.5))
def test_the_order_of_two_branches_does_not_matter_at_all(seed: int, share: float) -> None:
    first, second = branches_of(seed, 2, (9,))
    there = merge_tensors([first, second], (1 - share, share))
    back = merge_tensors([second, first], (share, 1 - share))
    assert same_bits(there, back)


@given(seed=SEEDS, coefficients=simplex(), power=st.integers(-8, 8), shift=st.floats(-8, 8))
def test_scaling_and_shifting_all_branches_scales_and_shifts_the_merge(
    seed: int, coefficients: tuple[float, ...], power: int, shift: float
) -> None:
    tensors = branches_of(seed, len(coefficients), (9,))
    merged = merge_tensors(tensors, coefficients)
    scaled = merge_tensors([tensor * 2.0**power for tensor in tensors], coefficients)
    assert same_bits(scaled, merged * 2.0**power)
    shifted = merge_tensors([tensor + shift for tensor in tensors], coefficients)
    torch.testing.assert_close(shifted, merged + shift, rtol=0, atol=2e-5)


@given(seed=SEEDS, coefficients=simplex())
def test_the_merge_lies_between_the_branches(seed: int, coefficients: tuple[float, ...]) -> None:
    tensors = branches_of(seed, len(coefficients), (9,))
    merged = merge_tensors(tensors, coefficients)
    used = torch.stack([t for t, c in zip(tensors, coefficients, strict=True) if c > 0])
    assert (merged >= used.amin(0) - 1e-5).all()
    assert (merged <= used.amax(0) + 1e-5).all()


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64, torch.int64], ids=str)
def test_out_may_be_one_of_the_branches(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(arithmetic, "CHUNK", 8)
    for alias, infinite in itertools.product([None, 0, 1, 2], [False, True]):
        tensors = branches_of(3, 3, (21,), dtype)
        if infinite and dtype != torch.int64:
            for tensor in tensors:
                tensor[7] = -math.inf
        expected = merge_tensors([tensor.clone() for tensor in tensors], (0.3, 0.5, 0.2))
        out = torch.empty_like(tensors[0]) if alias is None else tensors[alias]
        before = [tensor.clone() for tensor in tensors]
        assert merge_into(out, tensors, (0.3, 0.5, 0.2)) is out
        assert same_bits(out, expected), (alias, infinite)
        assert all(same_bits(tensors[k], before[k]) for k in range(3) if k != alias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_do_not_depend_on_where_a_chunk_ends(dtype: torch.dtype) -> None:
    for size in (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 17):
        tensors = branches_of(1, 3, (size,), dtype)
        base, first, last = (tensor.float() for tensor in (tensors[1], tensors[0], tensors[2]))
        expected = (base + 0.3 * (first - base) + 0.2 * (last - base)).to(dtype)
        merged = merge_tensors(tensors, (0.3, 0.5, 0.2))
        assert torch.equal(merged, expected), size
        pieces = [merge_tensors([t[i::5].clone() for t in tensors], (0.3, 0.5, 0.2)) for i in range(5)]
        for i, piece in enumerate(pieces):
            assert torch.equal(merged[i::5], piece), size


def layouts(tensor: Tensor) -> list[Tensor]:
    """Return the same four-dimensional numbers in every kind of memory layout."""
    strided = torch.empty(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)[..., ::2]
    return [
        tensor.contiguous(),
        tensor.to(memory_format=torch.channels_last),
        tensor.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        strided.copy_(tensor),
    ]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64], ids=str)
def test_every_layout_gives_the_same_bits(dtype: torch.dtype) -> None:
    for shape in ((3, 4, 5, 6), (2, 3, 1, 1), (1, 1, 4, 2)):
        tensors = branches_of(5, 3, shape, dtype)
        for tensor in tensors:
            tensor.view(-1)[1] = math.inf
        expected = merge_tensors(tensors, (0.5, 0.2, 0.3))
        kinds = [layouts(tensor) for tensor in tensors]
        for first, second, third, out in itertools.product(range(4), repeat=4):
            target = layouts(torch.zeros_like(tensors[0]))[out]
            merge_into(target, [kinds[0][first], kinds[1][second], kinds[2][third]], (0.5, 0.2, 0.3))
            assert same_bits(target, expected), (shape, first, second, third, out)


def test_a_new_tensor_is_laid_out_like_the_heaviest() -> None:
    plain, last = torch.ones(2, 3, 4, 4), torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert merge_tensors([plain, last], (0.4, 0.6)).stride() == last.stride()
    assert merge_tensors([plain, last], (0.6, 0.4)).stride() == plain.stride()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64], ids=str)
def test_integers_and_booleans_come_from_the_heaviest(dtype: torch.dtype) -> None:
    tensors = [torch.tensor([0, 1, k % 2], dtype=dtype) for k in range(3)]
    merged = merge_tensors(tensors, (0.3, 0.4, 0.3))
    assert merged.dtype == dtype
    assert torch.equal(merged, tensors[1])


@given(seed=SEEDS, coefficients=simplex())
def test_complex_tensors_merge_real_and_imaginary_parts(seed: int, coefficients: tuple[float, ...]) -> None:
    parts = branches_of(seed, len(coefficients), (6, 2))
    merged = merge_tensors([torch.view_as_complex(part) for part in parts], coefficients)
    assert same_bits(torch.view_as_real(merged), merge_tensors(parts, coefficients))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    tensors = branches_of(2, 4, (1000,), dtype)
    single = merge_tensors([tensor.float() for tensor in tensors], (0.4, 0.3, 0.2, 0.1))
    assert same_bits(merge_tensors(tensors, (0.4, 0.3, 0.2, 0.1)), single.to(dtype))


def test_half_precision_differences_do_not_overflow() -> None:
    largest = torch.tensor([65504.0], dtype=torch.float16)
    assert merge_tensors([largest, -largest], (0.75, 0.25)).item() == 32752.0


def test_eight_bit_floats_are_merged() -> None:
    tensors = [
        torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        torch.tensor([2.0, 2.0]).to(torch.float8_e4m3fn),
    ]
    assert merge_tensors(tensors, (0.5, 0.5)).float().tolist() == [1.5, 2.0]


def test_scalars_and_parameters_are_merged_outside_autograd() -> None:
    first, second = (torch.nn.Parameter(torch.tensor(value)) for value in (1.0, 3.0))
    merged = merge_tensors([first, second], (0.5, 0.5))
    assert merged.shape == ()
    assert merged.item() == 2.0
    assert not merged.requires_grad
    merge_into(first, [first, second], (0.5, 0.5))
    assert first.requires_grad
    assert first.is_leaf
    assert first.item() == 2.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
def test_no_model_sized_temporary_is_made(dtype: torch.dtype, channels_last: bool) -> None:
    tensors = branches_of(0, 3, (64, 64, 16, 32), dtype)
    if channels_last:
        tensors = [tensor.to(memory_format=torch.channels_last) for tensor in tensors]
    out = torch.empty_like(tensors[0])
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        merge_into(out, tensors, (0.5, 0.3, 0.2))
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert 0 < largest <= 3 * CHUNK * 4 < out.nbytes


@pytest.mark.parametrize(
    ("coefficients", "expected"), [((1.0,), 0), ((0.5, 0.5), 0), ((0.2, 0.4, 0.4), 1), ((0, 0, 1), 2)]
)
def test_the_heaviest_is_the_first_of_the_largest(coefficients: tuple[float, ...], expected: int) -> None:
    assert heaviest(coefficients) == expected
    with pytest.raises(ProblemError, match="at least one branch"):
        heaviest(())


@pytest.mark.parametrize(
    ("tensors", "coefficients", "message"),
    [
        ([torch.zeros(2), torch.zeros(3)], (0.5, 0.5), r"branch 1 is float32\[3\] on cpu but.*float32\[2\]"),
        ([torch.zeros(2), torch.zeros(2).double()], (0.5, 0.5), r"branch 1 is float64\[2\]"),
        ([torch.zeros(2), torch.zeros(2, device="meta")], (0.5, 0.5), "on meta but the merge is .* on cpu"),
        ([torch.zeros(2), torch.zeros(3)], (1.0, 0.0), "branch 1"),
        ([torch.zeros(2), torch.zeros(2).to_sparse()], (0.5, 0.5), "branch 1 is torch.sparse_coo"),
        ([torch.zeros(2)], (0.5, 0.5), "expected 1 coefficients, one per branch, got 2"),
        ([torch.zeros(2), torch.zeros(2)], (0.5, 0.6), "sum to 1"),
        ([torch.zeros(2), torch.zeros(2)], (math.nan, 1.0), "finite"),
        ([], (), "sum to 1"),
    ],
)
def test_what_cannot_be_merged_is_named(tensors: list[Tensor], coefficients: tuple[float, ...], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        merge_tensors(tensors, coefficients)


def test_an_out_of_another_shape_or_dtype_is_refused() -> None:
    tensors = branches_of(0, 2, (2,))
    for out in (torch.zeros(3), torch.zeros(2, 1), torch.zeros(2, dtype=torch.float64)):
        with pytest.raises(ProblemError, match="the merge is"):
            merge_into(out, tensors, (0.5, 0.5))


def test_docstring_examples_hold() -> None:
    result = doctest.testmod(arithmetic)
    assert result.attempted > 0
    assert result.failed == 0
