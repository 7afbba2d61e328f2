"""CPU time of ForkMerge's forms over single-task training of as many steps, for two, four and eight auxiliaries, or
four without BatchNorm; and time on the clock with a worker per branch.

    ./run bench compute [--repeats 3]

One thread and no folder; refit and floor only in the form that says so. Each form is timed once per repeat, after
single-task training of the same repeat. Tasks share their inputs, or every auxiliary brings its own, which a step with
it reads besides the target's; then with BatchNorm, where the target's own branch trains in every round, and without,
where two others may. With workers it is the time of as many steps more, of a run twice as long less one, so
that their start does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from harness import begin, parser, quartiles, save
from nets import Case, Norm, group_norm, resnet
from page import Goal, Section, Table, show
from rich.progress import Progress
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import forkmerge as fm

ROUNDS, VALIDATION = 10, 128
SEARCH: dict[str, Any] = {"search_by": "nll", "rule": "bagged"}
FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "default, all in": {"refit": True, "floor": True},
    "two branches": {"mixtures": "mixed", **SEARCH},
    "all branches": {"mixtures": "per_auxiliary", **SEARCH},
}


@dataclass(frozen=True)
class Inputs:
    """What tasks read, and what the default should cost there.

    Args:
        name: How tables call it.
        where: The same after "where", in a sentence.
        auxiliaries: How many of them are tried.
        goal: CPU time of the default, at most.
        clock: Its time on the clock, at most.
        are_own: Whether every auxiliary brings its own.
        norm: The network's normalisation.
    """

    name: str
    where: str
    auxiliaries: tuple[int, ...]
    goal: float
    clock: float
    are_own: bool = True
    norm: Norm = nn.BatchNorm2d

    def case(self, auxiliaries: int, images: Tensor) -> Case:
        """A small residual network on images, with so many auxiliaries."""
        return Case("", partial(resnet, 8, self.norm), [64], images, auxiliaries + 1, 64, self.are_own)


INPUTS = {
    "shared": Inputs("shared", "tasks share inputs", (2, 4, 8), 2.3, 1.3, are_own=False),
    "own": Inputs("their own", "auxiliaries bring their own and the model has BatchNorm", (2, 4, 8), 3.2, 1.8),
    "own, no BatchNorm": Inputs(
        "their own, no BatchNorm", "auxiliaries bring their own and it has none", (4,), 3.2, 1.8, norm=group_norm
    ),
}
SHARE = 0.4  # of the compute of all branches, for three auxiliaries and more


def problem(case: Case) -> fm.Problem:
    """The case's problem, with as many validation examples as a user with few labels has."""
    made = case.problem()
    images, *labels = (values[:VALIDATION] for values in (case.inputs, *case.labels))
    held_out = fm.Evaluation(
        TensorDataset(images, labels[0]),
        fm.accuracy,
        made.validation[made.target].predict,
        as_training=TensorDataset(images, *labels[: 1 if case.own_inputs else None]),
    )
    return fm.Problem(made.target, made.streams, held_out)


def contenders(case: Case, steps: int) -> dict[str, Callable[[], Any]]:
    """Single-task training first, then the forms."""
    algorithms: dict[str, Any] = {"STL": fm.SingleTask()}
    algorithms |= {name: fm.ForkMerge(interval=max(1, steps // ROUNDS), **form) for name, form in FORMS.items()}
    given: dict[str, Any] = {"optimizer": fm.OptimizerOf("SGD", lr=0.01, momentum=0.9), "steps": steps, "threads": 1}
    return {
        name: lambda algorithm=algorithm: algorithm.fit(problem(case), model=case.model, **given, paired=False)
        for name, algorithm in algorithms.items()
    }


def measure(case: Case, steps: int, repeats: int, advance: Callable[[], None]) -> dict[str, Any]:
    """Return the ratios of CPU time to single-task training's, repeat by repeat."""
    found: dict[str, list[float]] = {}
    for repeat in range(repeats + 1):  # the first warms up
        alone = 0.0
        for name, run in contenders(case, steps if repeat else ROUNDS).items():
            started = time.process_time()
            run()
            seconds = time.process_time() - started
            alone = alone or seconds
            if repeat and name != "STL":
                found.setdefault(name, []).append(seconds / alone)
        advance()
    return {name: quartiles(values) for name, values in found.items()}


def measure_clock(case: Case, steps: int, repeats: int, advance: Callable[[], None]) -> Any:
    """Return the ratios of time on the clock of the default, on two workers, to single-task training's."""
    given: dict[str, Any] = {"optimizer": fm.OptimizerOf("SGD", lr=0.01, momentum=0.9), "threads": 1, "paired": False}
    forms = [(fm.SingleTask(interval=steps // ROUNDS), 1), (fm.ForkMerge(interval=steps // ROUNDS), 2)]
    found = []
    for repeat in range(repeats + 1):  # the first warms up
        more = []
        for algorithm, workers in forms:
            seconds = []
            for length in (steps, 2 * steps):
                started = time.perf_counter()
                algorithm.fit(problem(case), model=case.model, steps=length, workers=workers, **given)
                seconds.append(time.perf_counter() - started)
            more.append(seconds[1] - seconds[0])
        if repeat:
            found.append(more[1] / more[0])
        advance()
    return quartiles(found)


def section(results: Mapping[str, Any]) -> Section:
    """Say what the results mean."""
    rows, goals = [], []
    for case in results["cases"]:
        ratios = {name: case["ratios"][name]["median"] for name in FORMS}
        share = ratios["default"] / ratios["all branches"]
        inputs = INPUTS[case["inputs"]]
        rows.append(
            [f"{case['auxiliaries']}, {inputs.name}", *(f"{ratio:.2f}" for ratio in ratios.values()), f"{share:.0%}"]
        )
        what = f"the default, {case['auxiliaries']} auxiliaries, inputs {inputs.name}"
        goals.append(Goal(what, inputs.goal, ratios["default"], unit=" ×"))
        if case["auxiliaries"] >= 3:
            goals.append(Goal(f"{what}: share of all branches' compute", SHARE, share))
    for key, ratio in results["clock"].items():
        what = f"on the clock, two workers, inputs {INPUTS[key].name}"
        goals.append(Goal(what, INPUTS[key].clock, ratio["median"], unit=" ×"))
        rows.append([f"2, {what}", f"{ratio['median']:.2f}", "", "", ""])
    worst: dict[str, float] = {}
    for case in results["cases"]:
        worst[case["inputs"]] = max(worst.get(case["inputs"], 0.0), case["ratios"]["default"]["median"])
    said = "at most " + ", ".join(f"{ratio:.2f} where {INPUTS[key].where}" for key, ratio in worst.items())
    return Section(
        "Compute",
        "CPU time of ForkMerge over single-task training of as many steps, one thread, without refit and floor; in the "
        "rows that say so time on the clock.",
        [Table(["auxiliaries, inputs", *FORMS, "default, of all branches"], rows)],
        goals,
        [
            f"A small residual network, {results['steps']} steps of 64 images in {ROUNDS} rounds, {VALIDATION} "
            "validation examples; searches by likelihood, coefficients averaged over resamples. *default*: two "
            "branches in every round. *all in*: with a refit and the single-task reference of `floor=True`, which what "
            "is said of the default leaves out."
        ],
        [("What does ForkMerge cost without branches named, in CPU time of single-task training?", said)],
    )


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int)
    options = begin(arguments, argv)
    repeats, steps = options.repeats or (1 if options.quick else 3), 2 * ROUNDS if options.quick else 200
    images = torch.randn(1024, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    counts = {key: (2,) if options.quick else inputs.auxiliaries for key, inputs in INPUTS.items()}
    cases, clock = [], {}
    with Progress() as progress:
        task = progress.add_task("compute", total=(sum(map(len, counts.values())) + len(counts)) * (repeats + 1))
        for key, inputs in INPUTS.items():
            for count in counts[key]:
                ratios = measure(inputs.case(count, images), steps, repeats, lambda: progress.advance(task))
                cases.append({"inputs": key, "auxiliaries": count, "ratios": ratios})
            clock[key] = measure_clock(inputs.case(2, images), steps, repeats, lambda: progress.advance(task))
    save("compute", {"repeats": repeats, "steps": steps, "cases": cases, "clock": clock}, options.out)
    show("compute", options.out)


if __name__ == "__main__":
    main()
