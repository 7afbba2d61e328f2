"""Where runs are carried out: the [execution] table of a recipe file, and options that override it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from forkmerge.engine.executors.executor_options import ExecutorOptions, LocalOptions
from forkmerge.engine.executors.ray.options import Ray
from forkmerge.errors import ConfigError, ProblemError, check_count, check_keys, unknown_name

_RAY = tuple(item.name for item in fields(Ray))
_KEYS: dict[str, tuple[str, ...]] = {"processes": ("workers",), "ray": _RAY}


def execution_from(table: Any) -> ExecutorOptions | None:
    """Return the executor of an [execution] table; None for one that says nothing.

    Example:
        >>> execution_from({"executor": "ray", "workers": 4})
        Ray(workers=4, num_cpus=1, num_gpus=0, address=None, working_dir=None, attempts=3)
    """
    check_keys("[execution]", table, ("executor", *_RAY))
    if not table:
        return None
    options = dict(table)
    name = options.pop("executor", "processes")
    if name not in _KEYS:
        raise ConfigError("[execution] " + unknown_name("executor", name, _KEYS))
    check_keys(f"[execution] with executor = {name!r}", options, _KEYS[name])
    try:
        if name == "ray":
            return Ray(**options)
        return LocalOptions(check_count("workers", options.get("workers", 1)))
    except ProblemError as error:
        raise ConfigError(f"[execution] {error}") from None


def with_workers(executor: ExecutorOptions | None, workers: int | None) -> ExecutorOptions | None:
    """Return an executor with another number of workers, where both are given."""
    if executor is None or workers is None:
        return executor
    return replace(executor, workers=workers)  # type: ignore[type-var]  # they are dataclasses
