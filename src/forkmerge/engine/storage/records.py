"""Records: dataclasses of numbers, text, lists, dicts and other records, which are written as JSON and read back."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

from forkmerge.engine.storage.json_codec import plain
from forkmerge.errors import StoreError

R = TypeVar("R", bound="Record")
_FORMS: dict[Any, tuple[Any, str]] = {
    dict: (dict, "object"),
    list: (list, "list"),
    tuple: (list | tuple, "list"),
    float: (int | float | None, "number"),
    int: (int, "whole number"),
    str: (str, "text"),
    bool: (bool, "truth value"),
}
"""What JSON has for an annotated type, and its name for people."""


class Record:
    """Base of all records.

    Attributes:
        not_finite: What a number comes back as that was not finite, which JSON cannot say.
        unwritten: Fields that are no part of the JSON form.
    """

    not_finite: ClassVar[float | None] = math.nan
    unwritten: ClassVar[tuple[str, ...]] = ()

    def to_json(self) -> dict[str, Any]:
        """Return strict JSON data; numbers that are not finite become None."""
        names = [item.name for item in fields(self)]  # type: ignore[arg-type]  # every record is a dataclass
        return {name: plain(getattr(self, name), name) for name in names if name not in self.unwritten}

    @classmethod
    def from_json(cls: type[R], data: Mapping[str, Any], name: object = None) -> R:
        """Return the record that `to_json` wrote; what it lacks has its default, what is unknown is ignored.

        Args:
            data: The JSON data.
            name: What holds it, for the error where it is no such record.
        """
        try:
            record: R = _build(cls, data, None)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            advice = " Delete the file and run again." if name is None else ""
            raise StoreError(f"{name or 'this'} is not a {cls.__name__}: {error}.{advice}") from None
        return record


def _build(kind: Any, data: Any, not_finite: float | None) -> Any:
    """Rebuild a value of an annotated type from plain data."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if data is None:
            return None
        return _build(next(argument for argument in arguments if argument is not type(None)), data, not_finite)
    if origin is typing.Literal:
        if data not in arguments:
            raise ValueError(f"{data!r:.60} is none of {', '.join(map(repr, arguments))}")
        return data
    form, word = _FORMS.get(dict if is_dataclass(kind) else origin or kind, (object, ""))
    if not isinstance(data, form) or (isinstance(data, bool) and form not in (bool, object)):
        raise TypeError(f"{data!r:.60} is no {word}")
    if isinstance(kind, type) and is_dataclass(kind):
        own = getattr(kind, "not_finite", not_finite)
        return kind(**{name: _build(hint, data[name], own) for name, hint in _hints(kind) if name in data})
    if origin is tuple:
        inner = arguments[:1] * len(data) if arguments[-1] is ... else arguments
        return tuple(_build(argument, item, not_finite) for argument, item in zip(inner, data, strict=True))
    if origin is list:
        return [_build(arguments[0], item, not_finite) for item in data]
    if origin is dict:
        return {key: _build(arguments[1], item, not_finite) for key, item in data.items()}
    return not_finite if kind is float and data is None else data


@lru_cache(maxsize=64)
def _hints(kind: type) -> list[tuple[str, Any]]:
    hints = typing.get_type_hints(kind)
    return [(item.name, hints[item.name]) for item in fields(kind) if item.name not in getattr(kind, "unwritten", ())]
