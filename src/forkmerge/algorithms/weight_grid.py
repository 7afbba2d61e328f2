"""A grid over task weights: fixed-weight runs in parallel, the best on validation, and the Pareto front."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal

import safetensors.torch
from torch import Tensor, nn

from forkmerge.algorithms.composed import Composed, Parts, comparable_scores, is_started, whole
from forkmerge.algorithms.events.send import in_part
from forkmerge.algorithms.forkmerge import Joint
from forkmerge.algorithms.run_record import Run
from forkmerge.algorithms.settings import Settings
from forkmerge.engine.executors.devices import on_own_device
from forkmerge.engine.executors.executor import Tell
from forkmerge.engine.executors.executor_options import LocalOptions
from forkmerge.engine.executors.parallel_calls import Failure, run_calls, using_threads
from forkmerge.engine.storage.records import Record
from forkmerge.engine.storage.run_folder import RunFolder
from forkmerge.engine.training.model_binding import OptimizerFactory
from forkmerge.errors import ProblemError
from forkmerge.methods import Method, method_from
from forkmerge.problem.definition import Problem
from forkmerge.problem.scoring import measure


@dataclass(frozen=True)
class Point(Record):
    """One combination of task weights.

    Args:
        task_weights: The weights.
        metrics: `{task: {metric: value}}` on validation, for every task that has validation data.
        scores: One number per task, higher is better: its metric, with the sign turned where lower is better, or
            the mean relative change of its metrics against the point of equal weights.
    """

    task_weights: dict[str, float]
    metrics: dict[str, dict[str, float]]
    scores: dict[str, float]

    def __post_init__(self) -> None:
        # A score that is not finite is written as nothing: read back, it must lose against every other.
        scores = {task: -math.inf if math.isnan(score) else score for task, score in self.scores.items()}
        object.__setattr__(self, "scores", scores)


@dataclass(repr=False)
class GridRun(Run):
    """The result of `WeightGrid.fit`: the run of the best point, and all points.

    Args:
        points: Every combination of task weights, in the order of the grid.
    """

    points: list[Point] = field(default_factory=list)

    @property
    def front(self) -> list[Point]:
        """The points that no other point beats for one task without losing for another."""
        return [self.points[index] for index in pareto_front([point.scores for point in self.points])]


@dataclass(frozen=True)
class WeightGrid(Composed):
    """Train with every combination of fixed task weights, and keep the model that scores best on validation.

    For K tasks and n values that is nᴷ runs, the target's weight included: 27 for three tasks. With `workers` they
    run in parallel, and a grid that was interrupted goes on. In a run's folder every run stands in a subfolder;
    without one, all models stay in memory until the best is known.

    Args:
        values: What every task weight is set to.
        method: How the weighted tasks are combined; None sums them.
        interval: Steps between validations; None makes five.
        select: The model of every run: the "last", or the "best" on validation.
        refit: Train the best weights once more, on training ∪ validation data of the target.

    Example:
        >>> import forkmerge as fm
        >>> len(fm.WeightGrid(values=(0.3, 1, 3)).combinations(["segmentation", "depth", "normal"]))
        27

    References:
        ForkMerge, appendix, "Comparison with grid searching λ".
    """

    result: ClassVar[type[Run]] = GridRun

    values: Sequence[float] = (0.3, 1.0, 3.0)
    method: Method | str | None = None
    interval: int | None = None
    select: Literal["last", "best"] = "last"
    refit: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", method_from(self.method))
        try:
            values = tuple(dict.fromkeys(float(value) for value in self.values))
        except (TypeError, ValueError):
            values = ()
        if not values or not all(math.isfinite(value) and value > 0 for value in values):
            raise ProblemError(f"values must be positive task weights such as (0.3, 1, 3), got {self.values!r}.")
        object.__setattr__(self, "values", values)

    def combinations(self, tasks: Sequence[str]) -> list[dict[str, float]]:
        """Return the task weights of every run."""
        return [dict(zip(tasks, weights, strict=True)) for weights in product(self.values, repeat=len(tasks))]

    def settings(self, problem: Problem) -> Settings:
        """Return one of the runs, with the refit that follows."""
        one = self._joint(dict.fromkeys(problem.tasks, self.values[0]))
        return replace(one, refit=self.refit).settings(problem)

    def branch_steps(self, problem: Problem, steps: int) -> int:
        """Return the steps of all runs."""
        return int(steps * (len(self.values) ** len(problem.tasks) + self.refit))

    def compose(self, parts: Parts) -> GridRun:
        """Run every point, then the refit of the best one."""
        grid = self.combinations(parts.problem.tasks)
        names = [f"{index:03d}_" + "-".join(f"{w:g}" for w in weights.values()) for index, weights in enumerate(grid)]
        trained = self._train(parts, dict(zip(names, grid, strict=True)))
        points = _points(parts.problem, grid, [each.metrics for each in trained])
        best = max(range(len(grid)), key=lambda index: points[index].scores[parts.problem.target])
        for name, each in zip(names, trained, strict=True):
            parts.finish(name, each.run)
        chosen = trained[best]
        last = chosen.run
        if self.refit:
            again = replace(self._joint(grid[best]), refit=True)
            last = replace(
                parts.run("refit", again, model=parts.module), score=chosen.run.score, metrics=chosen.run.metrics
            )
        else:
            parts.module.load_state_dict(_tensors_of(chosen, parts.folder(names[best])))
        run = whole(self, parts, last)
        shown = ", ".join(f"{task} {weight:g}" for task, weight in grid[best].items())
        run.notes.append(f"best of {len(grid)} combinations of task weights on validation: {shown}")
        return GridRun(**vars(run), points=points)

    def _joint(self, weights: Mapping[str, float]) -> Joint:
        return Joint(weights, self.method, self.interval, self.select)

    def _train(self, parts: Parts, grid: Mapping[str, Mapping[str, float]]) -> list[_TrainedPoint]:
        """Train all points, in processes of their own where there are several workers."""
        common = {"devices": list(parts.executor.devices)} if parts.executor.devices else {}
        shared = _GridWork(
            problem=parts.problem,
            module=parts.module,
            optimizer=parts.optimizer,
            folder=parts.store.path if isinstance(parts.store, RunFolder) else None,
            options={**common, "steps": parts.steps, "seed": parts.seed, "threads": parts.threads, **parts.options},
        )
        if parts.executor.workers > 1 or not isinstance(parts.executor, LocalOptions):
            shared = shared if parts.rebuild is None else replace(shared, problem=None, rebuild=parts.rebuild)
        jobs = [(name, self._joint(weights)) for name, weights in grid.items()]
        names = [f"task weights {name}" for name in grid]
        points: dict[int, _TrainedPoint] = {}
        raised: list[Exception] = []  # by the callback of the user, who gets that and no failed point

        def news(_: int, event: Any) -> None:
            try:
                if event is not None:
                    parts.on_event(event)
            except Exception as error:
                raised.append(error)
                raise

        for index, result in run_calls(partial(_train_point, shared), jobs, parts.executor, news, names, shared.folder):
            if raised:
                raise raised[0]
            if isinstance(result, Failure):
                raise ProblemError(
                    f"the run with task weights {dict(jobs[index][1].task_weights or {})}: {result.error}"
                )
            points[index] = result
        return [points[index] for index in range(len(jobs))]


def read_points(folder: str | os.PathLike[str]) -> list[Point]:
    """Return the points of a finished grid from its folder; none where it is the folder of another run."""
    with RunFolder.open(folder, lock=False) as store:
        result = store.result() or {}
    return [Point.from_json(each, name=folder) for each in result.get("points", [])]


def pareto_front(points: Sequence[Mapping[str, float]]) -> list[int]:
    """Return the positions of the points that are not dominated, in their order.

    A point is dominated if another is at least as good in every coordinate and better in one. Higher is better; a
    point with a coordinate that is not finite is never on the front.

    Example:
        >>> pareto_front([{"a": 1.0, "b": 3.0}, {"a": 2.0, "b": 2.0}, {"a": 1.0, "b": 2.0}])
        [0, 1]
    """
    usable = [index for index, point in enumerate(points) if all(map(math.isfinite, point.values()))]
    return [index for index in usable if not any(_dominates(points[other], points[index]) for other in usable)]


def _dominates(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    return all(one[name] >= other[name] for name in other) and any(one[name] > other[name] for name in other)


@dataclass(frozen=True)
class _GridWork:
    """What all points have in common; sent to every worker process once."""

    problem: Problem | None
    module: nn.Module
    optimizer: OptimizerFactory
    folder: Path | None
    options: Mapping[str, Any]
    rebuild: Callable[[], Problem] | None = None


@dataclass(frozen=True)
class _TrainedPoint:
    """A point's run, its metrics by task, and its weights where they are not in a folder."""

    run: Run
    metrics: dict[str, dict[str, float]]
    tensors: bytes | None


def _train_point(shared: _GridWork, job: tuple[str, Joint], tell: Tell) -> _TrainedPoint:
    name, algorithm = job
    problem = shared.problem
    if problem is None:
        assert shared.rebuild is not None
        problem = shared.rebuild()
    folder = None if shared.folder is None else shared.folder / name
    run = algorithm.fit(
        problem,
        model=copy.deepcopy(shared.module),
        optimizer=shared.optimizer,
        folder=folder,
        resume=is_started(folder),
        on_event=in_part(name, tell),
        progress=False,
        **on_own_device(shared.options),
    )
    model = run.model
    assert model is not None
    with using_threads(shared.options["threads"]):
        evaluations = problem.evaluations("validation")
        metrics = {task: measure(model, evaluation, seed=run.seed) for task, evaluation in evaluations.items()}
    tensors = None if folder is not None else _packed(model)
    run.model = None
    return _TrainedPoint(run, metrics, tensors)


def _packed(model: nn.Module) -> bytes:
    # Tied tensors share memory, which the format does not: every name gets a copy.
    return safetensors.torch.save({name: t.detach().clone().contiguous() for name, t in model.state_dict().items()})


def _tensors_of(trained: _TrainedPoint, folder: Path | None) -> dict[str, Tensor]:
    if trained.tensors is not None:
        return dict(safetensors.torch.load(trained.tensors))
    assert folder is not None
    with RunFolder.open(folder, lock=False) as store:
        return store.model_tensors()


def _points(
    problem: Problem, grid: Sequence[dict[str, float]], metrics: Sequence[dict[str, dict[str, float]]]
) -> list[Point]:
    # Equal weights are the natural reference; of several such points, those nearest to 1.
    middle = min(range(len(grid)), key=lambda i: (len(set(grid[i].values())), abs(max(grid[i].values()) - 1)))
    scores = {
        task: comparable_scores(evaluation.directions, [values[task] for values in metrics], middle)
        for task, evaluation in problem.evaluations("validation").items()
    }
    return [
        Point(weights, metrics[i], {task: values[i] for task, values in scores.items()})
        for i, weights in enumerate(grid)
    ]
