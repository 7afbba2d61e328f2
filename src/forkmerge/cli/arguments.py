"""From what was typed to what is asked for: keys of a recipe, values to tune, the name of a problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forkmerge.errors import ConfigError
from forkmerge.methods.option_syntax import option_from, show_options, split_assignment, split_words


def overrides_from(options: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """Return the keys of a recipe that options set by name, unless None, and `--set key=value` by dotted key."""
    overrides = {key: value for key, value in options.items() if value is not None}
    for assignment in assignments:
        key, text = split_assignment(assignment)
        *tables, last = (part.strip() for part in key.split("."))
        if not last or not all(tables):
            raise ConfigError(f"--set {assignment}: write key=value, e.g. --set algorithm.interval=200.")
        table = overrides
        for name in tables:
            table[name] = table = dict(table[name]) if isinstance(table.get(name), dict) else {}
        table[last] = option_from(f"--set {key}", text)
    return overrides


def settings_of(overrides: Mapping[str, Any]) -> list[str]:
    """Return the words that set the same for a comparison, which has seeds and targets of its own.

    Example:
        >>> settings_of({"steps": 20, "seed": 3, "target": "a", "algorithm": {"interval": 10}})
        ['--targets', 'a', '--set', 'steps=20', '--set', 'algorithm.interval=10']
    """
    words = ["--targets", str(overrides["target"])] if "target" in overrides else []
    for name, value in overrides.items():
        if name in ("target", "seed"):
            continue
        options = {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
        for key, item in options.items():
            words += ["--set", show_options({key: item})[1:-1]]
    return words


def tune_from(assignments: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values that `--tune key=v1,v2` gives to every key."""
    tuned: dict[str, list[Any]] = {}
    for assignment in assignments:
        key, text = split_assignment(assignment)
        values = [option_from(f"--tune {key}", part) for part in split_words(text)]
        if not key or not values:
            raise ConfigError(f"--tune {assignment}: write key=v1,v2,…, e.g. --tune lr=0.003,0.01,0.03.")
        if key == "lr" and not all(isinstance(v, int | float) and not isinstance(v, bool) and v > 0 for v in values):
            raise ConfigError(f"--tune {assignment}: learning rates are positive numbers.")
        tuned[key] = list(dict.fromkeys(values))
    return tuned


def name_of(problem: str) -> str:
    """Return what folders are named after: the file's name, or the module's, and the function's unless it is `recipe`.

    Example:
        >>> [name_of(problem) for problem in ("recipes/nyu.toml", "my.problems:recipe", "my.problems:small")]
        ['nyu', 'problems', 'problems-small']
    """
    if problem.endswith(".toml"):
        return Path(problem).stem
    module, _, function = problem.partition(":")
    return "-".join([module.rsplit(".", 1)[-1], *([function] if function not in ("", "recipe") else [])])
