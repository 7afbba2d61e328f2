"""Groups of a model's layers that a merge may give coefficients of their own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from forkmerge.engine.merging.arithmetic import Coefficients
from forkmerge.engine.training.state import Layout
from forkmerge.errors import ProblemError, unknown_name

MODULES = "modules"
"""One group for every module at the top of the model."""
REST = "rest"
"""The group of what no name given begins with."""

Piece = tuple[int, int, int]
"""The first element of a part of a row, the element after its last, and its group."""


@dataclass(frozen=True)
class LayerGroups:
    """Which parameters and buffers belong to which group.

    Coefficients of groups are those of the first group, one per branch, then those of the second, and so on. Where all
    groups have the same, they are written once, as those of a merge without groups are.

    Args:
        names: The groups.
        prefixes: The modules or parameters of each, by name.
        pieces: The parts of every row, in order.
        sizes: How many parameters each has.
    """

    names: tuple[str, ...]
    prefixes: tuple[tuple[str, ...], ...]
    pieces: Mapping[str, tuple[Piece, ...]]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, value: str | Mapping[str, str | Sequence[str]], layout: Layout) -> LayerGroups:
        """Return the groups of a model's trainable parameters.

        Args:
            value: "modules", or `{group: name of a module or parameter, or several}`; a group "rest" takes the others.
            layout: Where the parameters lie.
        """
        names = [row_slice.name for row_slice in layout.slices]
        if isinstance(value, Mapping):
            prefixes = {group: (p,) if isinstance(p, str) else tuple(p) for group, p in value.items()}
        else:
            prefixes = {top: (top,) for top in dict.fromkeys(name.split(".")[0] for name in names)}
        _check(prefixes, names)
        if not all(any(_is_in(name, p) for p in prefixes.values()) for name in names):
            prefixes[REST] = ()
        if len(prefixes) < 2:
            raise ProblemError(
                f"layer_groups must make at least two groups of the trainable parameters, and {value!r} makes one: "
                "name parts of the model, such as {'head': 'heads'}."
            )
        groups, pieces = tuple(prefixes.values()), dict[str, list[Piece]]()
        sizes = [0] * len(groups)
        for row_slice in layout.slices:
            index = _group_of(row_slice.name, groups)
            count = math.prod(row_slice.shape)
            sizes[index] += count
            row = pieces.setdefault(row_slice.row, [])
            if row and row[-1][2] == index:
                row[-1] = (row[-1][0], row_slice.offset + count, index)
            else:
                row.append((row_slice.offset, row_slice.offset + count, index))
        return cls(tuple(prefixes), groups, {row: tuple(parts) for row, parts in pieces.items()}, tuple(sizes))

    def group_of(self, name: str) -> int:
        """Return the group of a parameter or buffer."""
        return _group_of(name, self.prefixes)

    def parts(self, coefficients: Coefficients) -> list[Coefficients]:
        """Return the coefficients of every group."""
        count = len(coefficients) // len(self.names)
        return [coefficients[start : start + count] for start in range(0, len(coefficients), count)]

    def mean(self, coefficients: Coefficients) -> Coefficients:
        """Return the mean of the groups' coefficients, each group weighted by its parameters."""
        total = sum(self.sizes)
        parts = self.parts(coefficients)
        shares = [size / total for size in self.sizes]
        return tuple(
            math.fsum(s * v for s, v in zip(shares, column, strict=True)) for column in zip(*parts, strict=True)
        )


def expanded(coefficients: Coefficients, branches: int, groups: int) -> Coefficients:
    """Return coefficients with those of every group, also where all have the same."""
    return coefficients * groups if len(coefficients) == branches else coefficients


def collapsed(coefficients: Coefficients, branches: int) -> Coefficients:
    """Return coefficients written once where all groups have the same."""
    first = coefficients[:branches]
    return first if first * (len(coefficients) // branches) == coefficients else coefficients


def check_layer_groups(value: object) -> None:
    """Refuse what cannot name groups, whatever the model is."""
    if value is None or value == MODULES:
        return
    if isinstance(value, str):
        raise ProblemError(unknown_name("layer_groups", value, [MODULES]))
    is_right = isinstance(value, Mapping) and all(
        isinstance(group, str) and (_is_text(p) or (isinstance(p, list | tuple) and p and all(map(_is_text, p))))
        for group, p in value.items()
    )
    if not is_right or not value:
        raise ProblemError(
            "layer_groups must be 'modules' or {group: name of a module or parameter, or a list of them}, "
            f"got {value!r}."
        )
    if REST in value:  # type: ignore[operator]  # a mapping
        raise ProblemError(f"layer_groups: {REST!r} is the group of what no other has, and is not given.")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_in(name: str, prefixes: Iterable[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def _group_of(name: str, groups: Sequence[Sequence[str]]) -> int:
    inside = (index for index, prefixes in enumerate(groups) if _is_in(name, prefixes))
    return next(inside, len(groups) - 1)  # the last is the rest, where something is left


def _check(prefixes: Mapping[str, Sequence[str]], names: Sequence[str]) -> None:
    tops = ", ".join(dict.fromkeys(name.split(".")[0] for name in names))
    for group, own in prefixes.items():
        for prefix in own:
            if not any(_is_in(name, [prefix]) for name in names):
                raise ProblemError(
                    f"layer_groups: group {group!r} names {prefix!r}, which has no trainable parameter; "
                    f"the model's modules with some are {tops}."
                )
    for name in names:
        inside = [group for group, own in prefixes.items() if _is_in(name, own)]
        if len(inside) > 1:
            raise ProblemError(f"layer_groups: {name!r} is in the groups {' and '.join(map(repr, inside))}.")
