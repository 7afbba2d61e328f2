"""Tiny problems and nets for the tests of the engine.

Everything a worker process needs stands at module level, so that it pickles.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

import forkmerge as fm
from forkmerge.algorithms.events import (
    CheckpointWritten,
    Event,
    PhaseStarted,
    ProbeScored,
    RoundFinished,
    RunResumed,
    StepProgress,
)
from forkmerge.algorithms.run_record import Run
from forkmerge.engine.merging.arithmetic import Coefficients, vertices
from forkmerge.engine.merging.find_merge import MergeProblem
from forkmerge.engine.merging.race import Entrant, ScoredEntrant
from forkmerge.engine.training import branch as branch_module
from forkmerge.problem import example_order, randomness

TASKS = ("tgt", "aux", "odd")
FEATURES, CLASSES, WIDTH = 6, 3, 8
SGD = fm.OptimizerOf("SGD", lr=0.3, momentum=0.9, weight_decay=1e-3)
ADAM = fm.OptimizerOf("Adam", lr=0.01)
Refuse = Callable[..., None]
"""Expects a message of an error: the fixture `refused` of runs."""


class Net(nn.Module):
    """A body and one linear head per task."""

    def __init__(self, body: nn.Module, width: int = WIDTH, tasks: Sequence[str] = TASKS) -> None:
        super().__init__()
        self.body = body
        self.heads = nn.ModuleDict({task: nn.Linear(width, CLASSES) for task in tasks})

    def forward(self, inputs: Tensor, task: str = "tgt") -> Tensor:
        return self.heads[task](self.body(inputs))


def plain_net() -> Net:
    return Net(nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh()))


def noisy_net() -> Net:
    """BatchNorm (floating and integer buffers) and dropout: all that makes a step more than its weights."""
    layers = [nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.2)]
    return Net(nn.Sequential(*layers))


def frozen_net() -> Net:
    """A frozen backbone with a constant buffer, and an adapter that is trained."""
    backbone = nn.Linear(FEATURES, WIDTH)
    backbone.requires_grad_(False)
    backbone.register_buffer("table", torch.arange(5.0))
    return Net(nn.Sequential(backbone, nn.Tanh(), nn.Linear(WIDTH, WIDTH)))


class Tied(nn.Module):
    """Two layers that are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(inputs)))


def tied_net() -> Net:
    return Net(nn.Sequential(nn.Linear(FEATURES, WIDTH), Tied()))


def conv_net() -> Net:
    """Reads the features as an image of 2 channels, 1 × 3 pixels, after an upsampling."""
    layers = [
        nn.Unflatten(1, (2, 1, 3)),
        nn.Upsample(scale_factor=2.0),
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, WIDTH, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ]
    return Net(nn.Sequential(*layers))


class Bag(nn.Module):
    """An embedding of the sign pattern of the features, with sparse gradients if asked."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(2 * FEATURES, WIDTH, sparse=sparse)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.table((inputs > 0).long() + 2 * torch.arange(FEATURES)).mean(1)


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The net that `make` gives under a seed; the caller's random state is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def examples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs [n, 6] and one label per task [n, 3]: "aux" agrees with the target, "odd" is noise."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, FEATURES, generator=generator)
    rule = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(99))
    logits = inputs @ rule + 0.5 * torch.randn(count, CLASSES, generator=generator)
    cleaner = (inputs @ rule).argmax(1)
    noise = torch.randint(CLASSES, (count,), generator=generator)
    return inputs, torch.stack([logits.argmax(1), cleaner, noise], 1)


def shared_losses(model: nn.Module, batch: Any, tasks: Sequence[str], context: fm.Context) -> dict[str, Tensor]:
    """One pass through the body for all tasks asked for."""
    inputs, labels = batch
    features = model.body(inputs)
    return {task: cross_entropy(model.heads[task](features), labels[:, TASKS.index(task)]) for task in tasks}


def predict_target(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    inputs, labels = batch
    return model(inputs, "tgt"), labels[:, 0]


def minus_loss(predictions: Tensor, targets: Tensor) -> float:
    """A score without ties."""
    return -cross_entropy(predictions.double(), targets).item()


def evaluation(count: int = 24, seed: int = 2, metrics: Any = minus_loss, **options: Any) -> fm.Evaluation:
    return fm.Evaluation(TensorDataset(*examples(count, seed)), metrics, predict_target, **options)


def shared_problem(dataset: Dataset[Any] | None = None, *, metrics: Any = minus_loss, **options: Any) -> fm.Problem:
    """One stream serves all tasks."""
    stream = fm.Stream(dataset or TensorDataset(*examples(16, 1)), shared_losses, TASKS, batch_size=8)
    settings: dict[str, Any] = {"validation": evaluation(metrics=metrics), **options}
    return fm.Problem("tgt", {"all": stream}, **settings)


DATA = TensorDataset(*examples(16, 1))


def problem_with(losses: Any = shared_losses, dataset: Any = None, **options: Any) -> fm.Problem:
    """One stream for all tasks, with its losses, data or options changed."""
    settings = {"tasks": TASKS, "batch_size": 8, **options}
    return fm.Problem("tgt", {"all": fm.Stream(DATA if dataset is None else dataset, losses, **settings)}, evaluation())


def union_problem() -> fm.Problem:
    """`shared_problem` trained on training and validation data."""
    return shared_problem().with_validation_labels()


@dataclass(frozen=True)
class DomainLoss:
    """The loss of a stream that serves one task."""

    task: str

    def __call__(self, model: nn.Module, batch: Any, tasks: Sequence[str], context: fm.Context) -> dict[str, Tensor]:
        assert list(tasks) == [self.task]
        inputs, labels = batch
        return {self.task: cross_entropy(model(inputs, self.task), labels[:, TASKS.index(self.task)])}


def domains_problem(datasets: dict[str, Dataset[Any]] | None = None, **options: Any) -> fm.Problem:
    """One stream per task, of different sizes."""
    chosen = datasets or {}
    streams = [
        fm.Stream(chosen.get(task) or TensorDataset(*examples(20 + 10 * i, 10 + i)), DomainLoss(task), task, 8)
        for i, task in enumerate(TASKS)
    ]
    return fm.Problem("tgt", streams, **{"validation": evaluation(), **options})


class Augmented(Dataset[Any]):
    """Draws from torch, numpy and `random` for every example it gives."""

    def __init__(self, count: int = 16, seed: int = 1) -> None:
        self.inputs, self.labels = examples(count, seed)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(FEATURES) + float(np.random.standard_normal()) + random.gauss(0, 1)  # noqa: NPY002
        return self.inputs[index] + 0.1 * noise, self.labels[index]


class Counted(Dataset[Any]):
    """Counts how often an example is read."""

    def __init__(self, count: int = 16, seed: int = 1) -> None:
        self.inputs, self.labels = examples(count, seed)
        self.reads = 0

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        return self.inputs[index], self.labels[index]


class Untouchable(Dataset[Any]):
    """Raises whatever is done with it."""

    def __len__(self) -> int:
        raise AssertionError("the sealed data set was asked for its length")

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("the sealed data set was read")


Vector = tuple[float, float]


class Point(nn.Module):
    """θ in the plane, the model of quadratic problems."""

    def __init__(self, start: Sequence[float] = (0.0, 0.0)) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(start, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.theta.expand(len(inputs), 2)


def point_losses(
    model: Point, batch: list[Tensor], tasks: Sequence[str], context: fm.Context, scale: float = 1.0
) -> dict[str, Tensor]:
    """½‖θ − c‖² for the centre c that the stream holds."""
    (centres,) = batch
    return {tasks[0]: scale * 0.5 * (model.theta - centres).square().sum(1).mean()}


def point_score(predictions: Tensor, targets: Tensor) -> float:
    return -0.5 * (predictions - targets).square().sum(1).mean().item()


def predict_point(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    (goals,) = batch
    return model(goals), goals


def quadratic_problem(centres: dict[str, Vector], goal: Vector) -> fm.Problem:
    """L_k = ½‖θ − c_k‖² for every task, the first of them the target; validation wants θ at the goal."""
    streams = [
        fm.Stream(TensorDataset(torch.tensor([c], dtype=torch.float64)), point_losses, task, 1)
        for task, c in centres.items()
    ]
    goals = TensorDataset(torch.tensor([goal], dtype=torch.float64))
    return fm.Problem(next(iter(centres)), streams, fm.Evaluation(goals, point_score, predict_point))


def quadratic_run(algorithm: fm.Algorithm, centres: dict[str, Vector], goal: Vector, *, lr: float, steps: int) -> Run:
    """Train on quadratics from θ = 0 with plain gradient descent."""
    return algorithm.fit(
        quadratic_problem(centres, goal),
        model=Point,
        optimizer=fm.OptimizerOf("SGD", lr=lr),
        steps=steps,
        threads=1,
    )


def fit(
    algorithm: fm.Algorithm | None = None,
    problem: fm.Problem | None = None,
    net: Callable[[], nn.Module] | nn.Module = plain_net,
    **options: Any,
) -> Run:
    """`fit` with the defaults of the tests: 12 steps of SGD with momentum and weight decay."""
    settings = {"optimizer": SGD, "steps": 12, "threads": 1, **options}
    return (algorithm or fm.ForkMerge("mixed", interval=4)).fit(problem or shared_problem(), model=net, **settings)


def plain_loop(
    net: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    weights: dict[str, float],
    steps: int,
    *,
    clip: float | None = None,
    scheduler: Any = None,
    seed: int = 0,
) -> nn.Module:
    """Joint training on `shared_problem` as anybody would write it, with nothing of the library but `order`."""
    inputs, labels = examples(16, 1)
    with randomness.random_state_kept():
        randomness.set_random_state(randomness.derive(seed, "model"))
        model = net()
        used = optimizer(model)
        schedule = scheduler(used) if scheduler else None
        model.train()
        for step in range(steps):
            chosen = example_order.batch_indices(16, 8, step, seed, "all")
            used.zero_grad()
            randomness.set_random_state(randomness.derive(seed, "all", "forward", step))
            features = model.body(inputs[chosen])
            total: Tensor | None = None
            for task, weight in weights.items():
                loss = cross_entropy(model.heads[task](features), labels[chosen, TASKS.index(task)])
                total = loss * weight if total is None else total + loss * weight
            total.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            used.step()
            if schedule:
                schedule.step()
    return model


class Stopped(BaseException):
    """Stands for a kill: nothing in the library may catch it."""


def is_written(event: Event) -> bool:
    """Whether an event is recorded, or comes with a checkpoint."""
    is_start = isinstance(event, PhaseStarted) and event.phase == "search"
    return is_start or isinstance(event, ProbeScored | StepProgress | RoundFinished | CheckpointWritten | RunResumed)


def stop_at(count: int) -> Callable[[Any], None]:
    """A callback that ends the process, as far as the library can tell, at the `count`-th event that is written."""
    seen = 0

    def observe(event: Any) -> None:
        nonlocal seen
        seen += is_written(event)
        if seen == count:
            raise Stopped

    return observe


@contextmanager
def counting_steps(monkeypatch: Any) -> Iterator[list[str]]:
    """The names of the branches that are trained inside, one entry per segment."""
    trained: list[str] = []
    real = branch_module.train_branch

    def train(binding: Any, problem: Any, mixture: fm.Mixture, *rest: Any, **options: Any) -> Any:
        trained.append(mixture.name)
        return real(binding, problem, mixture, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr("forkmerge.engine.executors.branch_worker.train_branch", train)
        yield trained


def diverge_from(step: int, task: str) -> Callable[..., dict[str, Tensor]]:
    """Losses whose `task` is NaN from a step on."""
    return partial(_diverging, at=step, bad=task)


def _diverging(
    model: nn.Module, batch: Any, tasks: Sequence[str], context: fm.Context, *, at: int, bad: str
) -> dict[str, Tensor]:
    losses = shared_losses(model, batch, tasks, context)
    return {t: loss * torch.nan if t == bad and context.step >= at else loss for t, loss in losses.items()}


class ScoredMerge(MergeProblem):
    """A merge whose scores are a function of the coefficients, and of nothing else."""

    def __init__(
        self,
        names: Sequence[str],
        score: Callable[[Coefficients], float],
        *,
        sample: Callable[[Coefficients], float] | None = None,
        faults: dict[str, str] | None = None,
    ) -> None:
        super().__init__(names, faults, on_sample=sample is not None)
        self.full, self.sample, self.singles = score, sample or score, vertices(len(names))

    def score_branch(self, index: int) -> float:
        return self.full(self.singles[index])

    def score(self, coefficients: Coefficients) -> float:
        return self.full(coefficients)

    def sample_score_of_branch(self, index: int) -> float:
        return self.sample(self.singles[index])

    def enter(self, candidates: Sequence[Coefficients], guides: Sequence[Coefficients]) -> list[Entrant]:
        return [ScoredEntrant(self.sample(coefficients)) for coefficients in candidates]


def diverging_problem(step: int, task: str) -> fm.Problem:
    """One stream for all tasks, whose `task` is NaN from a step on."""
    stream = fm.Stream(TensorDataset(*examples(16, 1)), diverge_from(step, task), TASKS, 8)
    return fm.Problem("tgt", {"all": stream}, evaluation(metrics=fm.accuracy))
