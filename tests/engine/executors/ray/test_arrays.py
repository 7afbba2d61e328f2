"""Rows as arrays: every dtype comes back, Ray's memory is not written to, and what is known is not sent again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forkmerge.engine.executors.ray.arrays import KnownRows, copy_rows, to_arrays, to_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64])
def test_rows_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    rows = {"row": torch.tensor([1.0, -0.0, 3.0]).to(dtype), "empty": torch.zeros(0, dtype=dtype)}
    if dtype.is_floating_point:
        rows["row"][2] = torch.nan
    for back in (to_rows(to_arrays(rows)), copy_rows(to_arrays(rows), {})):
        assert list(back) == list(rows)
        for name, row in rows.items():
            assert back[name].dtype == dtype
            assert bytes(back[name].view(torch.uint8).tolist()) == bytes(row.view(torch.uint8).tolist())


def test_copies_take_the_memory_they_are_given_where_it_fits() -> None:
    arrays = to_arrays({"a": torch.ones(3), "b": torch.ones(2)})
    for _, data in arrays.values():
        data.flags.writeable = False  # as Ray gives them
    room = {"a": torch.zeros(3), "b": torch.zeros(5)}
    copies = copy_rows(arrays, room)
    assert copies["a"] is room["a"]
    assert copies["b"].shape == (2,)
    copies["a"].fill_(7)
    assert np.array_equal(arrays["a"][1].view(np.float32), np.ones(3, np.float32))


class TestKnownRows:
    def test_rows_are_known_until_somebody_writes_to_them(self) -> None:
        known, rows = KnownRows(), {"row": torch.ones(9)}
        known.note(rows, "here")
        assert known.find(rows) == "here"
        assert known.find({"row": rows["row"]}) == "here", "another dict of the same tensors"
        rows["row"][3:4].add_(1)
        assert known.find(rows) is None

    def test_equal_rows_of_another_branch_are_the_last_that_were_put(self) -> None:
        known, rows = KnownRows(), {"row": torch.arange(9.0)}
        known.note(rows, "here")
        assert known.find({"row": rows["row"].clone()}) == "here"
        zero, minus = {"row": torch.zeros(9)}, {"row": -torch.zeros(9)}
        known.note(zero, "zeros")
        assert known.find(minus) is None, "equal numbers are not equal bits"
        assert known.find({"row": rows["row"].clone()}) is None, "only the last ones are compared"

    def test_rows_that_are_gone_are_forgotten(self) -> None:
        known = KnownRows()
        known.note({"row": torch.ones(9)}, "gone")
        assert known.find({"row": torch.ones(9)}) is None
