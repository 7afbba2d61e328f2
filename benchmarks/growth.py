"""How time and memory of a ForkMerge run grow with branches, tasks, model size, validation size and rounds.

    ./run bench growth [--repeats 3]

Each axis is measured at several sizes, in turn, and a line is fitted to logarithms: its slope is the power of the size
that the cost grows with, 1 being linear. Costs that do not grow with the axis, such as starting a run, lower it. Time
is that of `fit` alone; memory is the peak above what the process held before, each size in a fresh process.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from harness import begin, parser, read_results, save
from memory import peak, start_peak
from nets import CLASSES, MultiTask, mlp_case
from page import Goal, Section, Table, show
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import forkmerge as fm
from forkmerge.engine.training.branch import train_branch
from forkmerge.engine.training.options import Mixture, Training

FEATURES = 64
OPTIMIZER = fm.OptimizerOf("SGD", lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Size:
    """One run: everything that can grow, and whether it keeps a folder."""

    branches: int = 3
    tasks: int = 3
    hidden: int = 256
    validation: int = 512
    steps: int = 20
    rounds: int = 2
    keeps: bool = False


@dataclass(frozen=True)
class Axis:
    """One thing that grows, and how to make a run of that size."""

    title: str
    values: tuple[int, ...]
    quick: tuple[int, ...]
    size: Callable[[int], Size]
    has_memory: bool = True


def _with_hidden(parameters: int) -> Size:
    """Three square layers hold almost all parameters of the network."""
    return Size(hidden=int(math.sqrt(parameters / 3)), steps=8)


AXES = {
    "branches": Axis(
        "branches beside the target's own, B − 1",
        (1, 2, 3, 5, 7, 11),
        (1, 3),
        lambda n: Size(branches=n + 1, hidden=512),
    ),
    "tasks": Axis("tasks K, B=3", (2, 5, 10, 20, 40), (2, 6), lambda n: Size(tasks=n)),
    "parameters": Axis(
        "parameters", (200_000, 800_000, 3_200_000, 12_800_000, 25_000_000), (200_000, 800_000), _with_hidden
    ),
    "validation": Axis(
        "validation examples V", (1000, 3000, 10_000, 50_000), (1000, 3000), lambda n: Size(validation=n, steps=4)
    ),
    "rounds": Axis(
        "rounds R, with a folder",
        (30, 100, 300),
        (3, 9),
        lambda n: Size(hidden=32, validation=64, steps=n, rounds=n, keeps=True),
        False,
    ),
    "gramian": Axis("tasks K, a step under PCGrad", (2, 5, 10, 20, 40), (2, 6), lambda n: Size(tasks=n), False),
}


class Wide(nn.Sequential):
    """An encoder whose size is that of its three square layers."""

    def __init__(self, hidden: int) -> None:
        layers: list[nn.Module] = [nn.Linear(FEATURES, hidden), nn.ReLU()]
        for _ in range(3):
            layers += [nn.Linear(hidden, hidden), nn.ReLU()]
        super().__init__(*layers)


class _Losses:
    """One pass through the encoder for all tasks asked for."""

    def __init__(self, tasks: Sequence[str]) -> None:
        self.tasks = tasks

    def __call__(self, model: Any, batch: Any, tasks: Sequence[str], context: fm.Context) -> dict[str, Tensor]:
        inputs, labels = batch
        z = context.shared(model.encoder(inputs))
        return {t: cross_entropy(model.heads[t](z), labels[:, k]) for k, t in enumerate(self.tasks) if t in tasks}


def _predict(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    return model.heads["task0"](model.encoder(batch[0])), batch[1]


def forkmerge_run(size: Size) -> Callable[[], None]:
    """A whole run, made anew every time."""
    names = [f"task{k}" for k in range(size.tasks)]
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1024, FEATURES, generator=generator)
    rule = torch.randn(FEATURES, CLASSES, generator=generator)  # all tasks can learn it: races end as they do in life
    labels = (inputs @ rule).argmax(1, keepdim=True).repeat(1, len(names))
    held_out = torch.randn(size.validation, FEATURES, generator=generator)
    truth = (held_out @ rule).argmax(1)
    stream = fm.Stream(TensorDataset(inputs, labels), _Losses(names), names, 32)
    problem = fm.Problem("task0", [stream], fm.Evaluation(TensorDataset(held_out, truth), fm.accuracy, _predict))
    # Every branch trains on all tasks, so that the number of branches changes nothing else.
    mixtures = {
        f"b{b}": {name: 1.0 if k == 0 else (b + 1) / 20 for k, name in enumerate(names)} for b in range(size.branches)
    }

    def run() -> None:
        torch.manual_seed(0)
        model = MultiTask(Wide(size.hidden), [size.hidden], names)
        with tempfile.TemporaryDirectory() as folder:
            fm.ForkMerge(mixtures, interval=max(size.steps // size.rounds, 1)).fit(
                problem,
                model=model,
                optimizer=OPTIMIZER,
                steps=size.steps,
                threads=1,
                folder=f"{folder}/run" if size.keeps else None,
            )

    return run


def gramian_step(size: Size) -> Callable[[], None]:
    """Ten steps under a method of the Gramian family."""
    case = mlp_case(size.tasks)
    training = Training(OPTIMIZER, method=fm.methods.PCGrad())
    binding = training.binding(case.model())
    state, problem = binding.initial(), case.problem()
    mixture = Mixture("joint", dict.fromkeys(case.tasks, 1.0))

    def run() -> None:
        train_branch(binding, problem, mixture, state, steps=10, training=training, seed=0)

    return run


def memory_of(size: Size) -> float:
    """Return the peak of a run in a fresh process, in bytes."""
    words = [sys.executable, __file__, "--memory", json.dumps(asdict(size))]
    return float(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout)


def slope(sizes: Sequence[float], costs: Sequence[float]) -> dict[str, float]:
    """Fit log cost = a + b log size by least squares; b with its standard error."""
    x, y = [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    fit = statistics.linear_regression(x, y)
    spread = sum((value - statistics.fmean(x)) ** 2 for value in x)
    rest = sum((b - fit.intercept - fit.slope * a) ** 2 for a, b in zip(x, y, strict=True))
    error = math.sqrt(rest / (len(x) - 2) / spread) if len(x) > 2 else 0.0
    return {"slope": fit.slope, "error": error}


def measure(
    name: str, values: Sequence[int], repeats: int, tick: Callable[[], None], *, memory: bool
) -> dict[str, Any]:
    """Measure one axis: sizes in turn, round after round."""
    axis = AXES[name]
    make = gramian_step if name == "gramian" else forkmerge_run
    runs = {value: make(axis.size(value)) for value in values}
    times: dict[int, list[float]] = {value: [] for value in values}
    runs[values[0]]()
    for _ in range(repeats):
        for value, run in runs.items():
            started = time.perf_counter()
            run()
            times[value].append(time.perf_counter() - started)
            tick()
    seconds = [statistics.median(times[value]) for value in values]
    result: dict[str, Any] = {"values": list(values), "seconds": seconds, "time": slope(values, seconds)}
    if memory and axis.has_memory:
        sizes = [memory_of(replace(axis.size(value), steps=4)) for value in values]
        result.update(bytes=sizes, memory=slope(values, sizes))
    return result


def _per_branch(found: Mapping[str, Any]) -> str:
    """Say what the growth with B − 1 means for B itself."""
    values, seconds = found["values"], found["seconds"]
    fitted = slope([value + 1 for value in values], seconds)
    pairs = zip(pairwise(values), pairwise(seconds), strict=True)
    steps = [(after - before) / (more - less) for (less, more), (before, after) in pairs]
    return (
        "A merge searches a coefficient for every branch but one, so branches are counted beside the target's own. "
        f"From {values[0] + 1} to {values[-1] + 1} of them each further one takes {min(steps):.2f} to {max(steps):.2f} "
        "s: a straight line, but one that does not pass through zero, so that a power of B itself has "
        f"p = {fitted['slope']:.2f} ± {2 * fitted['error']:.2f}."
    )


def _per_round(found: Mapping[str, Any]) -> str:
    """Say whether later rounds take longer than earlier ones."""
    pairs = zip(pairwise(found["values"]), pairwise(found["seconds"]), strict=True)
    steps = [(after - before) / (more - less) for (less, more), (before, after) in pairs]
    shown = ", then ".join(f"{1000 * step:.1f}" for step in steps)
    return (
        f"Runs whose rounds are counted keep a folder. From {found['values'][0]} to {found['values'][-1]} rounds each "
        f"further one takes {shown} ms, in the end {steps[-1] / steps[0]:.2f} times as long as in the beginning."
    )


def section(results: Mapping[str, Any]) -> Section:
    """Say what the results mean."""
    rows, goals = [], []
    for name, found in results.items():
        title = AXES[name].title
        for what, costs, unit, scale in (("time", "seconds", "s", 1), ("memory", "bytes", "MB", 1e6)):
            if what not in found:
                continue
            fitted = found[what]
            measured = ", ".join(
                f"{value:,}: {cost / scale:.3g}" for value, cost in zip(found["values"], found[costs], strict=True)
            )
            power = f"{fitted['slope']:.2f} ± {2 * fitted['error']:.2f}"
            rows.append([f"{title}: {what}", power, f"{measured} {unit}"])
            goals.append(Goal(f"{what} over {title}, lower end of p", 1, fitted["slope"] - 2 * fitted["error"]))
    return Section(
        "Growth",
        "How the time and the peak memory of a whole ForkMerge run, and the time of a step under a gradient method, "
        "grow: the power p in cost ∝ sizeᵖ, fitted on logarithms, ± two standard errors.",
        [Table(["grows with", "power", "measured"], rows)],
        goals,
        [
            "Linear or better means p ≤ 1; the goal is missed where p exceeds 1 by more than two standard errors. "
            "MLPs, two rounds, one thread, no folder; what does not depend on the size (data, starting a run) is "
            "included and lowers p.",
            *([_per_branch(results["branches"])] if "branches" in results else []),
            *([_per_round(results["rounds"])] if "rounds" in results else []),
        ],
        [("How do time and memory of a run grow?", _powers(results))],
    )


def _powers(results: Mapping[str, Any]) -> str:
    """Say the powers of the time, and of the memory."""
    parts = []
    for what in ("time", "memory"):
        slopes = [found[what]["slope"] for found in results.values() if what in found]
        parts.append(f"{what} with powers {min(slopes):.2f} to {max(slopes):.2f}")
    return f"{', '.join(parts)} of branches, tasks, parameters and validation examples; 1 is linear"


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int)
    arguments.add_argument("--axes", default=",".join(AXES))
    arguments.add_argument("--memory", metavar="SIZE", help="for itself")
    known = arguments.parse_args(argv)
    if known.memory:
        torch.set_num_threads(1)
        forkmerge_run(Size(hidden=8, validation=8, steps=2))()
        before = start_peak()
        forkmerge_run(Size(**json.loads(known.memory)))()
        print(peak() - before)
        return
    options = begin(arguments, argv)
    repeats = options.repeats or (1 if options.quick else 3)
    plan = {name: AXES[name].quick if options.quick else AXES[name].values for name in options.axes.split(",")}
    results = read_results("growth", options.out) if known.axes != ",".join(AXES) else {}
    with Progress(transient=True) as progress:
        bar = progress.add_task("growth", total=repeats * sum(map(len, plan.values())))
        for name, values in plan.items():
            progress.update(bar, description=AXES[name].title)
            memory = not options.quick or name == "branches"  # every size takes a process
            results[name] = measure(name, values, repeats, lambda: progress.advance(bar), memory=memory)
            save("growth", results, options.out)
    show("growth", options.out)


if __name__ == "__main__":
    main()
