"""What `forkmerge compare` is told: the [compare] table of a recipe file, and options that override it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from forkmerge.errors import ConfigError, check_count, check_keys, is_count
from forkmerge.methods.option_syntax import split_words


@dataclass(frozen=True)
class CompareOptions:
    """The options of a comparison.

    Args:
        methods: Words, in a list or comma-separated; `paper` for the paper's sixteen, `authors_scripts` for these as in
            the scripts of its authors, `all` for all of ours; a word may have options, `WORD[key=value,…]`. Single-task
            training is added where it is missing.
        targets: Target tasks, alike; "all" for all that can be scored; None for the recipe's own.
        seeds: How many, or which.
        tune: `{option: values}`, as in `Comparison`.
        tune_seeds: How many of the seeds the choice is made with.
        equal_labels: Whether all methods finally train on training ∪ validation data.
        equal_compute: Whether to add what the compute of B branches would have bought otherwise: single-task training
            and Post-train B times, with other learning rates and seeds, the best on validation; the average of B
            single-task runs; ForkMerge with uniform coefficients.
        workers: Processes.
    """

    methods: tuple[str, ...] = ("paper",)
    targets: tuple[str, ...] | None = None
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    tune: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    tune_seeds: int = 1
    equal_labels: bool = False
    equal_compute: bool = False
    workers: int = 2


KEYS = tuple(item.name for item in fields(CompareOptions))


def options_from(table: Any, **options: Any) -> CompareOptions:
    """Return the options of a [compare] table; those given that are not None take the place of the table's.

    Example:
        >>> options_from({"methods": ["stl", "forkmerge[interval=5]"], "seeds": 3}, seeds=2).seeds
        (0, 1)
    """
    check_keys("[compare]", table, KEYS)
    values = {**table, **{key: value for key, value in options.items() if value is not None}}
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key in ("methods", "targets"):
            arguments[key] = _words(key, value)
        elif key == "seeds":
            arguments[key] = _seeds(value)
        elif key == "tune":
            arguments[key] = _tune(value)
        elif key in ("equal_labels", "equal_compute"):
            if not isinstance(value, bool):
                raise ConfigError(f"[compare] {key} must be true or false, got {value!r}.")
            arguments[key] = value
        else:
            arguments[key] = check_count(key, value, error=ConfigError)
    result = CompareOptions(**arguments)
    if result.tune_seeds > len(result.seeds):
        count = len(result.seeds)
        raise ConfigError(f"tune_seeds must be from 1 to the number of seeds, {count}, got {result.tune_seeds}.")
    return result


def _words(key: str, value: Any) -> tuple[str, ...]:
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, Sequence) or not all(isinstance(part, str) for part in parts):
        raise ConfigError(f"[compare] {key} must be a string or a list of strings, got {value!r}.")
    words = [word for part in parts for word in (split_words(part) if key == "methods" else part.split(","))]
    unique = tuple(dict.fromkeys(word.strip() for word in words if word.strip()))
    if not unique:
        example = "--methods stl,ew,forkmerge" if key == "methods" else "--targets all"
        raise ConfigError(f"--{key} names no {'method' if key == 'methods' else 'task'}: write e.g. {example}.")
    return unique


def _seeds(value: Any) -> tuple[int, ...]:
    if is_count(value):
        return tuple(range(value))
    if isinstance(value, Sequence) and value and all(is_count(seed, 0) for seed in value):
        return tuple(dict.fromkeys(value))
    raise ConfigError(f"a comparison needs at least one seed: seeds is how many or a list of them, got {value!r}.")


def _tune(value: Any) -> dict[str, list[Any]]:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"[compare] tune must be a table of lists, e.g. tune = {{lr = [0.003, 0.01]}}, got {value!r}."
        )
    for key, values in value.items():
        if not isinstance(values, Sequence) or isinstance(values, str) or not values:
            raise ConfigError(f"--tune {key} has no values: write e.g. --tune lr=0.003,0.01,0.03.")
    return {key: list(values) for key, values in value.items()}
