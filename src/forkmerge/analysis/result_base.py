"""Results as plain data: every result can be written as JSON and read back."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import lru_cache
from typing import Any, TypeVar

from forkmerge.engine.storage.json_codec import plain
from forkmerge.errors import StoreError

R = TypeVar("R", bound="Result")


class Result:
    """Base of all results, which are frozen dataclasses of numbers, words, tuples, dicts and other results."""

    def to_json(self) -> dict[str, Any]:
        """Return strict JSON data; numbers that are not finite become None."""
        data = plain(asdict(self))  # type: ignore[call-overload]  # every subclass is a dataclass
        assert isinstance(data, dict)
        return data

    @classmethod
    def from_json(cls: type[R], data: Mapping[str, Any]) -> R:
        """Return the result that `to_json` wrote; a number that was not finite comes back as NaN."""
        try:
            built: R = _build(cls, data)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise StoreError(f"this is not a {cls.__name__}: {error}. Delete the file and run again.") from None
        return built


def _build(kind: Any, data: Any) -> Any:
    """Rebuild a value of an annotated type from plain data."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if data is None:
            return None
        return _build(next(argument for argument in arguments if argument is not type(None)), data)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        known = {item.name for item in fields(kind)}
        return kind(**{name: _build(hints[name], value) for name, value in data.items() if name in known})
    if origin is tuple:
        inner = arguments[:1] * len(data) if arguments[-1] is ... else arguments
        return tuple(_build(argument, value) for argument, value in zip(inner, data, strict=True))
    if origin is dict:
        return {key: _build(arguments[1], value) for key, value in data.items()}
    if kind is float:
        return math.nan if data is None else float(data)
    return data


@lru_cache(maxsize=64)
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)
