"""What a Ray executor knows of a call: how far back it would have to begin, and what is still lent."""

from __future__ import annotations

import torch

from forkmerge.engine.executors.ray.handle import RayHandle
from forkmerge.engine.executors.state_bytes import rest_to_wire
from forkmerge.engine.training.state import State


def test_depth_counts_calls_until_something_that_is_here() -> None:
    first = RayHandle("first", made_from=[RayHandle("state", lender=State(0, {}))])
    part = RayHandle("part", made_from=[first])
    second = RayHandle("second", made_from=[RayHandle("state", source=part)])
    assert [each.depth for each in (first, part, second)] == [1, 2, 3]
    part.made_from = ()  # its rows have been read
    assert second.depth == 1


def test_a_call_that_is_made_again_waits_for_what_it_was_made_from() -> None:
    state = RayHandle("state", status="done", lender=State(0, {"float32": torch.ones(2)}))
    call = RayHandle("call", status="done", made_from=[state], rest=rest_to_wire(State(7, {})))
    call.again()
    assert (call.status, list(call.inputs), call.attempts, call.has_ended, call.step) == (
        "waiting",
        [state],
        2,
        False,
        7,
    )
    state.end_loan()
    assert state.lender is not None
    assert state.lender.rows == {}


def test_a_state_is_on_the_nodes_of_the_calls_that_left_its_rows_there() -> None:
    maker = RayHandle("call", node="one")
    assert RayHandle("state", node="two", maker=maker).nodes == ["two", "one"]
    assert RayHandle("state", maker=maker).nodes == ["one"]
    assert RayHandle("state").nodes == []
