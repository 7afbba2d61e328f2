"""Methods by name, and the table of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from forkmerge.errors import ConfigError, ProblemError, unknown_name
from forkmerge.methods._arml import ARML
from forkmerge.methods._autolambda import AutoLambda
from forkmerge.methods._auxinash import AuxiNash
from forkmerge.methods._cagrad import CAGrad
from forkmerge.methods._dwa import DWA
from forkmerge.methods._equal import EW
from forkmerge.methods._famo import FAMO
from forkmerge.methods._gcs import GCS
from forkmerge.methods._gradnorm import GradNorm
from forkmerge.methods._imtl import IMTL, IMTL_G, IMTL_L
from forkmerge.methods._mgda import MGDA
from forkmerge.methods._nash import NashMTL
from forkmerge.methods._olaux import OL_AUX
from forkmerge.methods._rlw import RLW
from forkmerge.methods._surgery import GradVac, PCGrad, TargetAwareGradVac, TargetAwarePCGrad
from forkmerge.methods._uncertainty import UW
from forkmerge.methods.base import Method
from forkmerge.methods.data_sheet import facts_of
from forkmerge.methods.option_syntax import split_options

_LISTED: tuple[type[Method], ...] = (
    EW,
    UW,
    DWA,
    RLW,
    FAMO,
    IMTL_L,
    MGDA,
    GradNorm,
    PCGrad,
    GradVac,
    IMTL_G,
    IMTL,
    CAGrad,
    NashMTL,
    GCS,
    OL_AUX,
    ARML,
    AutoLambda,
    AuxiNash,
    TargetAwarePCGrad,
    TargetAwareGradVac,
)
METHODS: dict[str, type[Method]] = {method.__name__: method for method in _LISTED}
"""Every method of ours by its class name: weights from losses, from gradients, and for a target's sake."""

TORCHJD = "torchjd:"
FLAVOURS = ("originals", "authors_scripts")
"""Whose version of a method: its own paper's, which is the default, or that of the scripts of ForkMerge's authors."""


def method_from(value: object) -> Method | None:
    """Return a method from a method, its name, a TorchJD object or its name, or `{"name": …, **options}`.

    Case, "-" and "_" do not matter in names of ours: "Nash-MTL" is `NashMTL()`, "auto-λ" is `AutoLambda()`. TorchJD's
    follow "torchjd:". "authors_scripts:GCS" is `GCS.authors_scripts()`, and "originals:GCS" is `GCS()`. Names may have
    options in Python's spelling: "GradVac(beta=0.1)", "torchjd:CAGrad(c=0.5)". None stays None.

    Example:
        >>> method_from("nash-mtl(every=4)").every
        4
    """
    if value is None or isinstance(value, Method):
        return value
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        options = {str(key): option for key, option in value.items() if key != "name"}
        if not value["name"].startswith(TORCHJD):
            return _built(value["name"], options)
        value = f"{value['name']}({', '.join(f'{key}={option!r}' for key, option in options.items())})"
    if isinstance(value, str):
        if value.startswith(TORCHJD):
            from forkmerge.methods.torchjd.adapter import torchjd_named

            return torchjd_named(value.removeprefix(TORCHJD))
        return _built(*_parsed(value))
    if any(kind.__module__.startswith("torchjd.") for kind in type(value).__mro__):
        from forkmerge.methods.torchjd.adapter import torchjd_object

        return torchjd_object(value)
    raise ProblemError(
        f"method must be a method, its name, {{'name': …}}, or a TorchJD scalarizer, weighting or aggregator, "
        f"got {value!r}."
    )


def _parsed(text: str) -> tuple[str, dict[str, Any]]:
    """Split "GradVac(beta=0.1)" into the name and the options."""
    try:
        return split_options(text, "(")
    except ConfigError:
        raise ProblemError(f"cannot read the method {text!r}: write options as in 'GradVac(beta=0.1)'.") from None


def split_flavour(text: str) -> tuple[str, str]:
    """Return a name's flavour, "" if it says none, and what follows.

    Example:
        >>> split_flavour("authors_scripts:GCS")
        ('authors_scripts', 'GCS')
    """
    flavour, colon, name = text.partition(":")
    spelled = {method_key(each): each for each in FLAVOURS}.get(method_key(flavour), "") if colon else ""
    return (spelled, name) if spelled else ("", text)


def _built(text: str, options: Mapping[str, Any]) -> Method:
    flavour, name = split_flavour(text)
    kinds = {method_key(key): method for key, method in METHODS.items()}
    kind = kinds.get(method_key(name))
    if kind is None:
        listed = [*METHODS, f"{TORCHJD}NAME (any class of torchjd.aggregation or torchjd.scalarization)"]
        raise ProblemError(unknown_name("method", name, listed))
    base: Method = kind() if flavour != "authors_scripts" else kind.authors_scripts()
    names = facts_of(type(base))["options"]
    for option in options:
        if option not in names:
            raise ProblemError(unknown_name(f"option of {type(base).__name__}", option, names))
    return replace(base, **options)  # type: ignore[type-var]  # every method is a dataclass


def methods_table() -> list[dict[str, Any]]:
    """Return one row per method of ours, read from the docstrings; the keys are those of `facts_of`."""
    return [facts_of(method) for method in METHODS.values()]


def methods_markdown() -> str:
    """Return the tables of `docs/methods.md`: what each method costs, and its paper and deviations."""
    rows = methods_table()
    heads = ("method", "uses", "target", "heads", "state", "extra passes", "memory")
    costs = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    papers = ["| method | options | paper | where we differ or choose |", "|---|---|---|---|"]
    for row in rows:
        keys = ("uses", "target", "heads", "state", "passes", "memory")
        costs.append("| " + " | ".join([f"`{row['name']}`", *(row[key] for key in keys)]) + " |")
        options = ", ".join(f"`{key}={value!r}`" for key, value in row["options"].items())
        papers.append(f"| `{row['name']}` | {options} | {row['paper']} | {row['note']} |")
    return "\n".join(costs) + "\n\n" + "\n".join(papers) + "\n"


def flavours_markdown() -> str:
    """Return the table of `docs/methods.md` of how the authors' scripts have a method, where not as its default."""
    rows = ["| method | in the authors' scripts |", "|---|---|"]
    for name, kind in METHODS.items():
        plain, scripts = kind.originals(), kind.authors_scripts()
        if scripts == plain:
            continue
        names = [item.name for item in fields(scripts)]  # type: ignore[arg-type]  # every method is a dataclass
        changed = {key: getattr(scripts, key) for key in names if getattr(scripts, key) != getattr(plain, key, None)}
        options = ", ".join(f"{key}={value!r}" for key, value in changed.items())
        about = " ".join((kind.authors_scripts.__doc__ or "").split())
        rows.append(f"| `{name}` | `{type(scripts).__name__}({options})`: {about} |")
    return "\n".join(rows) + "\n"


def method_key(name: str) -> str:
    """Return what names of a method that mean the same have in common."""
    return "".join(char for char in name.lower().replace("λ", "lambda") if char.isalnum())
