"""What goes through the codec comes back exactly, what cannot is named, and nothing is pickled."""

from __future__ import annotations

import enum
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from forkmerge.engine.storage import json_codec
from forkmerge.engine.storage.json_codec import pack, plain, unpack
from forkmerge.errors import StoreError
from tensor_bits import DTYPES, identical, make_tensor


def round_trip(value: Any) -> Any:
    """Through the text a file would hold; a strict reader must accept it."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    data, tensors = pack(value)
    return unpack(json.loads(json_codec.encode(data), parse_constant=refuse), tensors)


tensors = st.builds(make_tensor, st.sampled_from(DTYPES), st.sampled_from([(), (0,), (3,), (2, 0), (2, 3)]))


any_float = st.integers(0, 2**64 - 1).map(lambda word: struct.unpack(">d", word.to_bytes(8, "big"))[0])


any_text = st.text(st.characters(exclude_categories=())) | st.sampled_from(["$", "v", "\ud83d\ude00", ""])


hashable = st.recursive(
    st.none() | st.booleans() | st.integers() | any_float | any_text | st.sampled_from(DTYPES),
    lambda inner: st.tuples(inner, inner),
    max_leaves=3,
)


devices = st.sampled_from(["cpu", "cuda", "cuda:1", "meta"]).map(torch.device)


huge = st.integers(-(10**6000), 10**6000)


values = st.recursive(
    hashable | tensors | devices | st.floats() | huge,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(any_text, inner, max_size=4)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.dictionaries(hashable, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(hashable, st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=12,
)


@given(values)
def test_every_packable_value_comes_back_with_its_types_and_bits(value: Any) -> None:
    assert identical(round_trip(value), value)


@pytest.mark.parametrize(
    "value",
    [
        {"$": "tensor", "v": "weight"},
        {"$": {"$": "tuple", "v": [1]}},
        {"a": {"$": None}, "v": 1},
        Counter({"$": 2}),
        [float("nan"), -float("nan"), float("inf"), -float("inf"), -0.0, 5e-324],
        {1: "int", "1": "str", 1.5: "float", None: "none", (1, "a"): "tuple"},
        {True: "bool"},
    ],
    ids=repr,
)
def test_values_that_look_like_the_encoding_survive(value: Any) -> None:
    assert identical(round_trip(value), value)


def test_a_defaultdict_becomes_a_dict_and_numpy_scalars_python_numbers() -> None:
    value = [defaultdict(list, a=[1]), np.float64(0.1), np.float32(0.1), np.int8(-3), np.bool_(True)]
    assert identical(round_trip(value), [{"a": [1]}, 0.1, float(np.float32(0.1)), -3, True])


def test_tensors_whose_paths_collide_get_different_names() -> None:
    value = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, "a.b#1": torch.full((1,), 2.0)}
    value["__metadata__"] = torch.full((1,), 3.0)
    data, taken = pack(value)
    assert len(taken) == 4
    assert "__metadata__" not in taken
    assert identical(unpack(data, taken), value)


def test_tensors_are_named_after_their_path() -> None:
    _, taken = pack({"optimizer": {"state": [{"exp_avg": torch.zeros(2)}]}, "é": torch.zeros(1)})
    assert list(taken) == ["optimizer.state[0].exp_avg", "\\xe9"]


def test_the_same_tensor_twice_is_taken_out_once_and_comes_back_as_one() -> None:
    weight = torch.arange(3.0)
    data, taken = pack({"a": weight, "b": [weight]})
    back = unpack(data, taken)
    assert len(taken) == 1
    assert back["a"] is back["b"][0]


def test_a_parameter_comes_back_as_a_plain_tensor_without_a_graph() -> None:
    weight = nn.Parameter(torch.ones(2))
    back = round_trip([weight, weight * 2])
    assert [type(item) for item in back] == [Tensor, Tensor]
    assert not any(item.requires_grad for item in back)


def test_a_lazily_conjugated_tensor_comes_back_conjugated() -> None:
    lazy = make_tensor(torch.complex128, (3,)).conj()
    assert lazy.is_conj()
    assert identical(round_trip(lazy), lazy.resolve_conj())


class Colour(enum.IntEnum):
    RED = 1


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"scheduler": {"anneal": len}}, r"^scheduler\.anneal: a builtin_function_or_method cannot"),
        ({"a": {"b": lambda: 0}}, r"^a\.b: a function cannot be saved without pickle"),
        ({"a": [0, (1, object())]}, r"^a\[1\]\[1\]: an object cannot be saved without pickle"),
        (b"bytes", r"^the value: a bytes cannot be saved"),
        ({"s": {1, 2}}, r"^s: a set cannot be saved without pickle; keep it out, or put numbers, .* in its place\.$"),
        ({"e": Colour.RED}, r"^e: a Colour cannot"),
        ({"p": Pair(1, 2)}, r"^p: a Pair cannot"),
        ({"a": np.zeros(2)}, r"^a: a ndarray cannot"),
        ({"l": np.longdouble(1)}, r"^l: a longdouble cannot"),
        ({3: {"x": 1j}}, r"^\[3\]\.x: a complex cannot"),
        ({frozenset(): 1}, r"^\[frozenset\(\)\] \(the key\): a frozenset cannot"),
        ({"t": torch.eye(2).to_sparse()}, r"^t: a Tensor of layout torch.sparse_coo on cpu cannot be saved"),
        ({"t": torch.zeros(1, device="meta")}, r"^t: a Tensor of layout torch.strided on meta cannot"),
        ({"t": nn.UninitializedParameter()}, r"^t: an UninitializedParameter of layout"),
    ],
)
def test_what_needs_pickle_is_refused_with_its_path_and_type(value: Any, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        pack(value)


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append({"again": value})
    with pytest.raises(StoreError, match="nested more than 100 deep"):
        pack(value)


def test_the_deepest_value_that_is_accepted_also_comes_back() -> None:
    value: Any = 1
    for level in range(99):
        value = (value,) if level % 2 else {level: value}
    assert identical(round_trip(value), value)


def test_depth_is_counted_through_keys_too() -> None:
    key: Any = 1
    for _ in range(60):
        key = (key,)
    value: Any = {key: 1}
    assert identical(round_trip(value), value)
    for _ in range(50):
        value = [value]
    with pytest.raises(StoreError, match="nested more than 100 deep"):
        pack(value)


def test_what_json_can_say_is_said_as_json_says_it() -> None:
    value = {"text": "é😀", "whole": -(2**63), "real": -0.5, "list": [None, True], "dict": {"a": ""}}
    assert pack(value) == (value, {})
    for odd in ("\ud800", "\udfff", "a\udabc"):
        assert pack(odd) == ({"$": "str", "v": [ord(char) for char in odd]}, {})
        assert identical(round_trip(odd), odd)
    for huge in (2**64, -(2**64)):
        assert pack(huge) == ({"$": "int", "v": hex(huge)}, {})


def test_as_read_is_what_a_reader_of_the_file_gets() -> None:
    data = {1: (0.5, math.nan), "x": np.float32(0.25)}
    assert json_codec.as_read(data) == {"1": [0.5, None], "x": 0.25}


@pytest.mark.parametrize(
    "data",
    [
        {"$": "tensor", "v": "absent"},
        {"$": "lambda", "v": "x"},
        {"$": "dtype", "v": "torch.load"},
        {"$": "float", "v": "zz"},
        {"$": "int"},
        {"$": ["unhashable"]},
    ],
    ids=str,
)
def test_data_that_pack_never_made_is_refused(data: Any) -> None:
    with pytest.raises(StoreError, match="cannot decode"):
        unpack(data, {})


schedules = torch.optim.lr_scheduler


@pytest.mark.parametrize(
    "make",
    [
        lambda o: schedules.MultiStepLR(o, [2, 2, 5]),
        lambda o: schedules.OneCycleLR(o, 0.1, total_steps=10, cycle_momentum=False),
        lambda o: schedules.LambdaLR(o, lambda step: 0.9**step),
        lambda o: schedules.CosineAnnealingWarmRestarts(o, 4),
        lambda o: schedules.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    ],
    ids=["multistep", "one-cycle", "lambda", "restarts", "cyclic"],
)
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adafactor])
def test_states_of_torch_optimizers_and_schedulers_come_back(make: Any, optimizer: Any) -> None:
    weights = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))]
    for weight in weights:
        weight.grad = torch.full_like(weight, 0.1)
    live = optimizer(weights, lr=0.1)
    scheduler = make(live)
    for _ in range(3):
        live.step()
        scheduler.step()
    state = {"optimizer": live.state_dict(), "scheduler": scheduler.state_dict()}
    assert identical(round_trip(state), state)


def test_plain_is_strict_json_with_null_for_what_is_not_finite() -> None:
    event = {"loss": float("nan"), "best": np.float32("inf"), "n": np.int64(3), 4: (1, [True, None, "é"])}
    assert plain(event) == {"loss": None, "best": None, "n": 3, "4": [1, [True, None, "é"]]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [torch.zeros(1)]}, r"^a\[0\]: a Tensor cannot be recorded; give numbers, text, lists or dicts\.$"),
        ({"a": {"b": {3: {1}}}}, r"^a\.b\[3\]: a set cannot be recorded"),
        ({"a": {1.5: 0}}, r"^a\[1\.5\]: a float cannot be a key"),
    ],
)
def test_plain_names_what_cannot_be_recorded(value: Any, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        plain(value)
