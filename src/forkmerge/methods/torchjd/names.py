"""TorchJD objects from text: "UPGrad", "CAGrad(c=0.5)", "CRMOGMWeighting(UPGradWeighting())"."""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchjd import aggregation, scalarization
from torchjd.linalg import DualConeProjector

from forkmerge.errors import ConfigError, ProblemError, unknown_name
from forkmerge.methods.option_syntax import option_from, split_call
from forkmerge.methods.solvers import solve_nonnegative

_NAME = re.compile(r"[A-Za-z_][\w.]*")
_CALL = re.compile(rf"{_NAME.pattern}\s*\(.*", re.DOTALL)
_WORDS = ("true", "false", "none", "inf", "nan")  # values, and no names
# What constructors call the number of tasks, which a name cannot know.
_COUNTS = ("shape", "n_tasks")


class ExactProjector(DualConeProjector):
    """Projects on the dual cone by active sets, so that UPGrad and DualProj need no quadratic-programming package.

    min vᵀGv over v ≥ u is, with v = u + x, a non-negative quadratic programme in x. The Gramian is divided by its trace
    and gets 1e-4 on its diagonal, as in TorchJD's own projector.
    """

    def __call__(self, U: Tensor, G: Tensor) -> Tensor:
        """Return the projected weights of every row of U, [..., m]."""
        gramian = G.detach().cpu().double().numpy()
        tasks, size = len(gramian), float(np.trace(gramian))
        gramian = (gramian / size if size >= 1e-4 else np.zeros_like(gramian)) + 1e-4 * np.eye(tasks)
        rows = U.detach().cpu().double().numpy().reshape(-1, tasks)
        start = np.zeros(tasks, dtype=np.bool_)
        projected = [u + solve_nonnegative(gramian, -gramian @ u, start)[0] for u in rows]
        return torch.from_numpy(np.stack(projected)).reshape(U.shape).to(G)

    def __repr__(self) -> str:
        return "ExactProjector()"


def build_named(text: str, tasks: int) -> nn.Module:
    """Return the object that a text describes, for a number of tasks.

    A name both modules have is the aggregator's; "scalarization.Mean" is the other. Arguments are numbers, text, lists
    (which become tensors) and other objects.
    """
    try:
        built = _build(text, tasks)
    except ConfigError:
        raise ProblemError(f"cannot read 'torchjd:{text}': write a class name, or one with arguments.") from None
    if not isinstance(built, nn.Module):
        raise ProblemError(f"'torchjd:{text}' is no scalarizer, weighting or aggregator.")
    return built


def known_names() -> list[str]:
    """Every class of TorchJD that can be named; those of the same name in both modules with the module's."""
    both = set(aggregation.__all__) & set(scalarization.__all__)
    others = [f"scalarization.{name}" if name in both else name for name in scalarization.__all__]
    return [name for name in (*aggregation.__all__, *others) if not inspect.isabstract(_class(name))]


def _class(name: str) -> Any:
    module, _, last = name.rpartition(".")
    spaces = [vars(space) for space in (aggregation, scalarization) if space.__name__.endswith(module)]
    for space in spaces:
        if last in space.get("__all__", ()):
            return space[last]
    raise ProblemError(unknown_name("TorchJD class", name, known_names()))


def _build(text: str, tasks: int) -> Any:
    """Return what a text describes: an object of a class, or a number, text, list or truth value."""
    name, arguments = split_call(text, "(") if _CALL.fullmatch(text) else (text, [])
    if _NAME.fullmatch(name) and name.lower() not in _WORDS:
        positional = [_build(value, tasks) for key, value in arguments if not key]
        keywords = {key: _build(value, tasks) for key, value in arguments if key}
        return _construct(name, positional, keywords, tasks)
    value = option_from(name, text)
    return torch.tensor(value, dtype=torch.get_default_dtype()) if isinstance(value, list | tuple) else value


def _construct(name: str, arguments: list[Any], keywords: dict[str, Any], tasks: int) -> Any:
    kind = _class(name)
    parameters = inspect.signature(kind).parameters
    counts = [key for key in parameters if key in _COUNTS]
    if counts and not arguments and counts[0] not in keywords:
        keywords[counts[0]] = tasks
    if "projector" in parameters:
        keywords.setdefault("projector", ExactProjector())
    try:
        return kind(*arguments, **keywords)
    except ImportError as error:
        ours = name.removesuffix("Weighting")
        raise ProblemError(f"{error} Or leave out 'torchjd:': {ours} of forkmerge.methods needs no package.") from None
    except (TypeError, ValueError) as error:
        signature = str(inspect.signature(kind)).removesuffix(" -> None")
        reason = str(error).rstrip(".")
        raise ProblemError(f"'torchjd:{name}' cannot be made: {reason}. Write torchjd:{name}{signature}.") from None
