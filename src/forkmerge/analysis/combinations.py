"""Between models: transfer gain of their combinations, and the target's loss along lines and planes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product

import torch
from torch import Tensor, nn

from forkmerge.analysis.heldout import heldout_loss
from forkmerge.analysis.merge_results import CombinationGains, LossLine, LossPlane
from forkmerge.engine.merging.arithmetic import check_coefficients
from forkmerge.engine.merging.state_dicts import merge_states
from forkmerge.errors import ProblemError
from forkmerge.problem.definition import Problem
from forkmerge.problem.metrics import Criterion
from forkmerge.problem.scoring import measure

States = Mapping[str, Mapping[str, Tensor]]
"""`{name: model.state_dict()}`."""


def combination_gains(
    model: nn.Module, problem: Problem, states: States, *, resolution: int = 10, seed: int = 0
) -> CombinationGains:
    """Return the transfer gain of Σ_b Λ_b θ^b on a grid over the simplex: a line of two models, a triangle of three.

    Args:
        model: Where weights are tried; it gets its own back.
        problem: Whose target, on its validation data.
        states: Two or three models' weights; gains are measured against the first.
        resolution: Steps from one model to another.
        seed: Of anything that draws.

    References:
        ForkMerge, Section 5.1 and Fig. 6.
    """
    names = tuple(states)
    if len(names) not in (2, 3):
        raise ProblemError(f"combinations are drawn for two or three models, got {len(names)}.")
    points = [
        tuple(c / resolution for c in (resolution - sum(rest), *rest))
        for rest in product(range(resolution + 1), repeat=len(names) - 1)
        if sum(rest) <= resolution
    ]
    score = _scorer(model, problem, seed)
    with weights_kept(model):
        scores = []
        for point in points:
            model.load_state_dict(merge_states(states, dict(zip(names, check_coefficients(point), strict=True))))
            scores.append(score())
    return CombinationGains(names, tuple(points), tuple(scores), tuple(value - scores[0] for value in scores))


def loss_line(
    model: nn.Module, problem: Problem, states: States, *, points: int = 21, beyond: float = 0.0, seed: int = 0
) -> LossLine:
    """Return the target's loss and score on the straight line through two models.

    Args:
        model: Where weights are tried; it gets its own back.
        problem: Whose target, on its validation examples.
        states: The two models' weights.
        points: How many, evenly spaced.
        beyond: How far the line goes beyond both ends, in units of their distance.
        seed: Of anything that draws.
    """
    first, second = _named(states, 2)
    positions = [-beyond + (1 + 2 * beyond) * i / (points - 1) for i in range(points)]
    score = _scorer(model, problem, seed)
    losses, scores = [], []
    with weights_kept(model):
        for position in positions:
            model.load_state_dict(_moved(states[first], [(position, states[second])]))
            losses.append(heldout_loss(model, problem, seed=seed))
            scores.append(score())
        ends = []
        for name in (first, second):
            model.load_state_dict(states[name])
            ends.append(heldout_loss(model, problem, seed=seed))
    inside = [(p, loss) for p, loss in zip(positions, losses, strict=True) if 0 <= p <= 1]
    barrier = max([loss - ((1 - p) * ends[0] + p * ends[1]) for p, loss in inside], default=0.0)
    return LossLine((first, second), tuple(positions), tuple(losses), tuple(scores), max(barrier, 0.0))


def loss_plane(
    model: nn.Module,
    problem: Problem,
    states: States,
    *,
    marks: Mapping[str, Mapping[str, float]] | None = None,
    points: int = 15,
    margin: float = 0.25,
    seed: int = 0,
) -> LossPlane:
    """Return the target's loss on the plane through three models.

    Args:
        model: Where weights are tried; it gets its own back.
        problem: Whose target, on its validation examples.
        states: The three models' weights.
        marks: Points to mark, as coefficients of the three, such as a merge's.
        points: Of each side of the grid.
        margin: How far the grid goes beyond the triangle, as a share of its size.
        seed: Of anything that draws.
    """
    names = _named(states, 3)
    parameters = [name for name, p in model.named_parameters()]
    first, second, third = (states[name] for name in names)
    across = [second[key].double() - first[key].double() for key in parameters]
    towards = [third[key].double() - first[key].double() for key in parameters]
    width = math.sqrt(_dot(across, across))
    along = _dot(across, towards) / width if width else 0.0
    height = math.sqrt(max(_dot(towards, towards) - along**2, 0.0))
    if height <= 1e-6 * width:  # what rounding leaves of nothing
        raise ProblemError(f"the models {', '.join(names)} lie on a line: there is no plane through them.")
    corners = ((0.0, 0.0), (width, 0.0), (along, height))
    spots = {
        name: (c.get(names[1], 0.0) * width + c.get(names[2], 0.0) * along, c.get(names[2], 0.0) * height)
        for name, c in (marks or {}).items()
    }
    xs, ys = (_range([corner[axis] for corner in corners], margin, points) for axis in (0, 1))
    rows = []
    with weights_kept(model):
        for y in ys:
            row = []
            for x in xs:
                b = y / height
                model.load_state_dict(_moved(first, [((x - b * along) / width, second), (b, third)]))
                row.append(heldout_loss(model, problem, seed=seed))
            rows.append(tuple(row))
    return LossPlane((names[0], names[1], names[2]), corners, spots, tuple(xs), tuple(ys), tuple(rows))


@contextmanager
def weights_kept(model: nn.Module) -> Iterator[None]:
    """Give a model its weights and buffers back on exit."""
    before = copy_state(model)
    try:
        yield
    finally:
        model.load_state_dict(before)


def copy_state(model: nn.Module) -> dict[str, Tensor]:
    """Return weights and buffers that stay as they are, whatever the model is used for."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _scorer(model: nn.Module, problem: Problem, seed: int) -> Callable[[], float]:
    """Return P̂ of the model as it stands; several metrics are compared with those of the first call."""
    evaluation = problem.target_validation
    criterion = Criterion(evaluation.directions)

    def score() -> float:
        nonlocal criterion
        metrics = measure(model, evaluation, seed=seed)
        if criterion.needs_reference:
            criterion = criterion.with_reference(metrics)
        return criterion.score(metrics)

    return score


def _moved(start: Mapping[str, Tensor], ends: Sequence[tuple[float, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """Return start + Σ a (end − start), for any a; integers stay the start's."""
    moved = {}
    for key, value in start.items():
        if not value.is_floating_point():
            moved[key] = value
            continue
        total = value.double()
        for share, end in ends:
            total = total + share * (end[key].double() - value.double())
        moved[key] = total.to(value.dtype)
    return moved


def _dot(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    return math.fsum(float(torch.sum(a * b)) for a, b in zip(first, second, strict=True))


def _range(values: Sequence[float], margin: float, points: int) -> list[float]:
    low, high = min(values), max(values)
    edge = margin * (high - low)
    return [low - edge + (high - low + 2 * edge) * i / (points - 1) for i in range(points)]


def _named(states: States, count: int) -> list[str]:
    if len(states) != count:
        raise ProblemError(f"this takes {count} models, got {len(states)}: {', '.join(states)}.")
    return list(states)
