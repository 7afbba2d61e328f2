"""Records survive a round trip through JSON."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest

from forkmerge.engine.storage.records import Record
from forkmerge.errors import StoreError


@dataclass(frozen=True)
class Part(Record):
    name: str
    value: float
    pair: tuple[float, int] = (0.0, 0)


@dataclass
class Whole(Record):
    not_finite: ClassVar[float | None] = None
    unwritten: ClassVar[tuple[str, ...]] = ("model",)

    kind: Literal["a", "b"]
    parts: list[Part]
    by_name: dict[str, Part]
    numbers: dict[str, float]
    series: tuple[float, ...] = ()
    best: Part | None = None
    score: float | None = None
    anything: dict[str, Any] = field(default_factory=dict)
    is_bound: bool = True
    model: object = None


def through_json(record: Record) -> Any:
    return type(record).from_json(json.loads(json.dumps(record.to_json(), allow_nan=False)))


def test_what_is_read_is_what_was_written() -> None:
    part = Part("p", 1.5, (2.5, 3))
    whole = Whole("a", [part], {"q": Part("q", -1.0)}, {"n": 0.1}, (1.0, 2.0), part, 3.0, {"deep": [{"x": None}]})
    assert through_json(whole) == whole
    assert whole.to_json()["parts"] == [{"name": "p", "value": 1.5, "pair": [2.5, 3]}]


def test_numbers_keep_their_type() -> None:
    read = Part.from_json({"name": "p", "value": 2})
    assert type(read.value) is int
    assert read.pair == (0.0, 0)


def test_a_number_that_is_not_finite_comes_back_as_its_class_says() -> None:
    whole = through_json(Whole("a", [Part("p", math.inf)], {}, {"n": math.nan, "m": 1.0}, (math.inf,), None, math.nan))
    assert math.isnan(whole.parts[0].value)
    assert (whole.numbers, whole.series, whole.score) == ({"n": None, "m": 1.0}, (None,), None)


def test_a_field_that_is_not_written_is_neither_copied_nor_read() -> None:
    class Uncopied:
        def __deepcopy__(self, memo: object) -> None:
            raise AssertionError("it was copied")

    whole = Whole("b", [], {}, {}, model=Uncopied())
    assert "model" not in whole.to_json()
    assert Whole.from_json({**whole.to_json(), "model": 3}).model is None


def test_unknown_fields_are_ignored() -> None:
    assert Part.from_json({"name": "p", "value": 1.0, "later": 2}) == Part("p", 1.0)


@pytest.mark.parametrize(
    "data", [{"name": "p"}, {"name": "p", "value": "1"}, {"name": "p", "value": 1.0, "pair": [1.0]}, [], None]
)
def test_what_is_none_is_refused_in_words(data: Any) -> None:
    with pytest.raises(StoreError, match=r"this is not a Part: .* Delete the file and run again"):
        Part.from_json(data)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("kind", "c", "'c' is none of 'a', 'b'"),
        ("parts", {}, "{} is no list"),
        ("parts", "text", "'text' is no list"),
        ("parts", [3], "3 is no object"),
        ("by_name", [], "[] is no object"),
        ("by_name", {"q": None}, "None is no object"),
        ("by_name", {"q": {"name": 1, "value": 0}}, "1 is no text"),
        ("numbers", {"n": True}, "True is no number"),
        ("numbers", {"n": [1]}, "[1] is no number"),
        ("numbers", None, "None is no object"),
        ("series", 3, "3 is no list"),
        ("best", {"name": "p", "value": 1, "pair": [1, 2.5]}, "2.5 is no whole number"),
        ("best", {"name": "p", "value": 1, "pair": [1, True]}, "True is no whole number"),
        ("score", "1", "'1' is no number"),
        ("anything", [], "[] is no object"),
        ("is_bound", 1, "1 is no truth value"),
    ],
)
def test_a_value_of_another_type_is_refused_and_what_holds_it_is_named(name: str, value: Any, said: str) -> None:
    good = {"kind": "a", "parts": [], "by_name": {}, "numbers": {}, "is_bound": False}
    assert Whole.from_json(good).is_bound is False
    with pytest.raises(StoreError) as caught:
        Whole.from_json({**good, name: value}, name="the file")
    assert str(caught.value) == f"the file is not a Whole: {said}."


def test_what_json_cannot_say_is_named_with_its_path() -> None:
    with pytest.raises(StoreError, match=r"anything\.x: a set cannot be recorded"):
        Whole("a", [], {}, {}, anything={"x": {1}}).to_json()
