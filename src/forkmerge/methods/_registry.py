"""Methods by name."""

from __future__ import annotations

from forkmerge.errors import ProblemError, unknown_name
from forkmerge.methods._base import Method

METHODS: dict[str, type[Method]] = {}
"""Every method of ours by its class name."""


def method_from(value: object) -> Method | None:
    """Return a method from a method or its name; None stays None."""
    if value is None or isinstance(value, Method):
        return value
    if isinstance(value, str):
        if value not in METHODS:
            raise ProblemError(unknown_name("method", value, METHODS))
        return METHODS[value]()
    raise ProblemError(f"method must be a method or its name, got {value!r}.")
