"""What a worker does with a call: all that it says, in order, and whose memory is whose."""

from __future__ import annotations

import pickle
from typing import Any

import ray
import torch

import forkmerge as fm
from forkmerge.engine.executors.executor import Answer, Inputs, Tell
from forkmerge.engine.executors.ray.arrays import to_arrays
from forkmerge.engine.executors.ray.call_thread import CallThread, RayCall, SentState
from forkmerge.engine.executors.state_bytes import rest_to_wire
from forkmerge.engine.training.state import State


class Doubling:
    """Doubles the weights, counts in the optimizer's row, or raises."""

    def __init__(self, index: int) -> None:
        if index < 0:
            raise ValueError("no such worker")

    def __call__(self, payload: Any, inputs: Inputs, tell: Tell) -> Answer:
        tell("begun")
        if isinstance(payload, Exception):
            raise payload
        state = inputs.take()
        state.rows["float32"].mul_(2)
        state.optimizer_rows.setdefault("count/float32", torch.zeros(3)).add_(1)
        return Answer(payload, state)


def thread() -> CallThread:
    calls = CallThread()
    assert calls.prepare(0, ray.put(ray.cloudpickle.dumps(Doubling))) == ("ready", None)
    return calls


def said(calls: CallThread, number: int, payload: Any, *inputs: SentState) -> list[Any]:
    return list(calls.stream(RayCall(number, pickle.dumps(payload), list(inputs))))


def sent(rows: Any, optimizer_rows: Any = None, origin: int | None = None) -> SentState:
    places = [] if optimizer_rows is None else [ray.put(to_arrays(optimizer_rows))]
    return SentState(rest_to_wire(State(4, {})), [ray.put(to_arrays(rows))], places, origin)


def test_a_call_says_what_it_tells_and_what_comes_of_it(on_ray: fm.Ray) -> None:
    items = said(thread(), 1, "data", sent({"float32": torch.ones(3)}))
    assert [item[0] if isinstance(item, tuple) else list(item) for item in items] == [
        *("note", "done"),
        *(["float32"], ["count/float32"]),
        "end",
    ]
    assert pickle.loads(items[0][1]) == "begun"
    assert pickle.loads(items[1][1][0]) == "data"


def test_optimizer_rows_that_the_worker_still_has_are_not_read_again(on_ray: fm.Ray) -> None:
    calls, ones, far = thread(), {"float32": torch.ones(3)}, {"count/float32": torch.full((3,), 100.0)}
    said(calls, 1, None, sent(ones))

    def count(number: int, origin: int | None) -> float:
        name, data = said(calls, number, None, sent(ones, far, origin))[3]["count/float32"]
        assert name == "float32"
        return float(data.view("float32")[0])

    assert count(2, origin=1) == 2, "those of call 1 are still here"
    assert count(3, origin=1) == 101, "those of call 1 have gone on to be those of call 2"
    assert count(4, origin=None) == 101


def test_a_call_that_raises_spoils_no_other(on_ray: fm.Ray) -> None:
    calls = thread()
    kind, text = said(calls, 1, ValueError("no label"))[-1]
    assert kind == "failed"
    assert "ValueError: no label" in text
    assert said(calls, 2, fm.ResourceError("no memory"))[-1][0] == "lost"
    assert said(calls, 3, None, sent({"float32": torch.ones(3)}))[-1][0] == "end"


def test_what_cannot_be_made_is_said(on_ray: fm.Ray) -> None:
    kind, text = CallThread().prepare(-1, ray.put(ray.cloudpickle.dumps(Doubling)))
    assert kind == "failed"
    assert "ValueError: no such worker" in text
