"""Gradient conflict: the cosine similarity of two tasks' gradients, and what one step in their direction does."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from statistics import fmean, stdev

import numpy as np
import torch
from torch import Tensor, nn

from forkmerge.analysis.heldout import heldout_loss
from forkmerge.analysis.results import GradientSimilarity, OneStepGains, OneStepPoint
from forkmerge.analysis.transfer import WEIGHTS
from forkmerge.engine.training.batchnorm import statistics_frozen
from forkmerge.engine.training.shared_parameters import dense
from forkmerge.engine.training.task_gradients import add_gradients, task_gradient
from forkmerge.errors import ProblemError, unknown_name
from forkmerge.problem.batches import batches
from forkmerge.problem.definition import Context, Problem
from forkmerge.problem.metrics import Criterion
from forkmerge.problem.randomness import derive, random_state_kept, set_random_state
from forkmerge.problem.scoring import device_of, measure, modes_kept

Gradient = list["Tensor | None"]


def task_gradients(
    model: nn.Module, problem: Problem, tasks: Sequence[str], *, count: int, seed: int = 0, step: int = 0
) -> Generator[dict[str, Gradient], None, None]:
    """Yield, for `count` batches, the gradient of every task for every trainable parameter, None where it has none.

    The model works as in training, and neither its weights nor its statistics move. Tasks of one stream see the same
    examples. A task without a label in a batch is missing there.

    Args:
        model: The model.
        problem: Where batches and losses come from.
        tasks: Whose gradients.
        count: How many batches.
        seed: Of the batches and of anything that draws.
        step: What losses are told is the training step.
    """
    for task in tasks:
        if task not in problem.tasks:
            raise ProblemError(unknown_name("task", task, problem.tasks))
    parameters = [p for p in model.parameters() if p.requires_grad]
    streams = {name: s for name, s in problem.stream_map.items() if any(task in tasks for task in s.tasks)}
    device, drawn = device_of(model), derive(seed, "gradients")
    with ExitStack() as stack:
        feeds = {
            name: stack.enter_context(closing(batches(name, stream, range(count), drawn, device)))
            for name, stream in streams.items()
        }
        for position in range(count):
            gradients: dict[str, Gradient] = {}
            with random_state_kept(), modes_kept(model), statistics_frozen(model.train()), torch.enable_grad():
                for name, stream in streams.items():
                    asked = [task for task in stream.tasks if task in tasks]
                    call_seed = derive(drawn, name, "forward", position)
                    set_random_state(call_seed)
                    losses = stream.losses(model, next(feeds[name]), asked, Context(step, call_seed))
                    for task in asked:
                        loss = losses.get(task)
                        if loss is not None:
                            own = task_gradient(loss, [], parameters, keep=True)
                            gradients[task] = add_gradients(gradients[task], own) if task in gradients else own
            yield gradients


def cosine(first: Gradient, second: Gradient) -> float | None:
    """Return cos φ of two gradients on the parameters that both reach; None if one is zero there or not finite."""
    pairs = [(dense(a), dense(b)) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    shared = [(a.double(), b.double()) for a, b in pairs]
    dot = math.fsum(float((a * b).sum()) for a, b in shared)
    norms = [math.fsum(float(pair[i].square().sum()) for pair in shared) for i in (0, 1)]
    size = math.sqrt(norms[0]) * math.sqrt(norms[1])
    if size == 0 or not math.isfinite(size) or not math.isfinite(dot):
        return None
    return max(-1.0, min(1.0, dot / size))


def measure_similarity(
    model: nn.Module,
    problem: Problem,
    first: str,
    others: Sequence[str],
    *,
    count: int = 50,
    seed: int = 0,
    step: int = 0,
) -> dict[str, GradientSimilarity]:
    """Return the gradient cosine similarity of one task with others, batch by batch.

    Args:
        model: The model, in the middle of training, say.
        problem: Where batches and losses come from.
        first: A task, usually the target.
        others: The tasks it is compared with.
        count: How many batches.
        seed: Of the batches.
        step: Training steps the model has seen.

    References:
        ForkMerge, Definition 3.4 and Fig. 8.
    """
    values: dict[str, list[float | None]] = {task: [] for task in others}
    with closing(task_gradients(model, problem, [first, *others], count=count, seed=seed, step=step)) as gradients:
        for batch in gradients:
            for task in others:
                pair = batch.get(first), batch.get(task)
                values[task].append(None if pair[0] is None or pair[1] is None else cosine(pair[0], pair[1]))
    result = {}
    for task, per_batch in values.items():
        cosines = [value for value in per_batch if value is not None]
        mean = fmean(cosines) if cosines else math.nan
        std = stdev(cosines) if len(cosines) > 1 else None
        result[task] = GradientSimilarity(first, task, step, tuple(cosines), len(per_batch) - len(cosines), mean, std)
    return result


def one_step_gains(
    model: nn.Module,
    problem: Problem,
    auxiliary: str,
    *,
    weights: Sequence[float] = WEIGHTS,
    rate: float = 0.01,
    count: int = 50,
    measure_by: str = "score",
    reference: Mapping[str, float] | None = None,
    seed: int = 0,
    step: int = 0,
) -> OneStepGains:
    """From one θ, take one step θ − η(g_tgt + λ g_aux) per batch and λ, and compare TG with GCS.

    TG(λ) = P̂(θ(λ)) − P̂(θ(0)) on the target's validation data, both from the same batch. With `with_l2(problem)` and
    the task "l2", L2 regularisation takes the place of the auxiliary.

    Args:
        model: θ; it comes back bit for bit.
        problem: The problem.
        auxiliary: The auxiliary.
        weights: λ > 0.
        rate: η.
        count: How many batches.
        measure_by: "score", the paper's P̂; or "loss", minus the target's loss on validation examples, which also
            moves where few examples leave an accuracy where it was.
        reference: For a target with several metrics, what they are compared with; θ's own metrics where None.
        seed: Of the batches.
        step: Training steps that θ has seen.

    References:
        ForkMerge, Section 3.1, Fig. 2 and its appendix.
    """
    if measure_by not in ("score", "loss"):
        raise ProblemError(f"measure_by must be 'score' or 'loss', got {measure_by!r}.")
    evaluation = problem.target_validation
    criterion = Criterion(evaluation.directions)
    if criterion.needs_reference and measure_by == "score":
        criterion = criterion.with_reference(reference or measure(model, evaluation, seed=seed))

    def value_now() -> float:
        if measure_by == "loss":
            return -heldout_loss(model, problem, seed=seed)
        return criterion.score(measure(model, evaluation, seed=seed))

    points = []
    parameters = [p for p in model.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in parameters]
    gradients = task_gradients(model, problem, [problem.target, auxiliary], count=count, seed=seed, step=step)
    with closing(gradients):
        for batch in gradients:
            target, other = batch.get(problem.target), batch.get(auxiliary)
            similarity = None if target is None or other is None else cosine(target, other)
            if target is None or other is None or similarity is None:
                continue
            scores = []
            try:
                for weight in (0.0, *weights):
                    _set_step(parameters, start, target, other, rate, weight)
                    scores.append(value_now())
            finally:
                _restore(parameters, start)
            points.append(OneStepPoint(similarity, tuple(score - scores[0] for score in scores[1:])))
    fits = tuple(fit_cubic([p.cosine for p in points], [p.gains[i] for p in points]) for i in range(len(weights)))
    related = tuple(correlation([p.cosine for p in points], [p.gains[i] for p in points]) for i in range(len(weights)))
    return OneStepGains(
        problem.target, auxiliary, step, rate, measure_by, tuple(map(float, weights)), tuple(points), fits, related
    )


def fit_cubic(x: Sequence[float], y: Sequence[float]) -> tuple[float, ...]:
    """Return c_0 … c_3 of the cubic that fits best in least squares; empty for fewer than four distinct x."""
    if len(set(x)) < 4 or not all(map(math.isfinite, (*x, *y))):
        return ()
    powers = np.vander(np.asarray(x, dtype=np.float64), 4, increasing=True)
    coefficients, *_ = np.linalg.lstsq(powers, np.asarray(y, dtype=np.float64), rcond=None)
    return tuple(coefficients.tolist())


def correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return Pearson's correlation; None where one of the two does not vary."""
    if len(x) < 2 or not all(map(math.isfinite, (*x, *y))):
        return None
    a, b = np.asarray(x) - np.mean(x), np.asarray(y) - np.mean(y)
    size = math.sqrt(float(a @ a) * float(b @ b))
    return None if size == 0 else float(a @ b) / size


@torch.no_grad()
def _set_step(
    parameters: list[nn.Parameter], start: list[Tensor], target: Gradient, other: Gradient, rate: float, weight: float
) -> None:
    """Set θ − η(g_tgt + λ g_aux)."""
    for parameter, value, g, h in zip(parameters, start, target, other, strict=True):
        parameter.copy_(value)
        if g is not None:
            parameter.add_(g, alpha=-rate)
        if h is not None and weight:
            parameter.add_(h, alpha=-rate * weight)


@torch.no_grad()
def _restore(parameters: list[nn.Parameter], start: list[Tensor]) -> None:
    for parameter, value in zip(parameters, start, strict=True):
        parameter.copy_(value)
