"""A whole ForkMerge run beside a loop in the style of the authors' scripts, `authors.py`, that does the same training.

    ./run bench twin [--repeats 2] [--rounds 3] [--workers 2]

Both run side by side, in turns of fifty steps: the loop does what the library reports to have done. So a machine whose
speed changes from minute to minute hurts both alike. The library's run with workers follows after both. `--check`
compares the weights they end with.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from authors import MIXTURES, OPTIMIZER, RunResult, Setting, Twin
from harness import begin, parser, quartiles, save
from nets import image_model
from page import Goal, Section, Table, ratio, show
from rich.progress import Progress

import forkmerge as fm
from forkmerge.algorithms.events import OnEvent


def library(
    setting: Setting,
    folder: Path,
    *,
    workers: int = 1,
    channels_last: bool | None = None,
    on_event: OnEvent = lambda event: None,
) -> RunResult:
    """The library's run, as a user would start it; the data and the network exist before, for the twin, too."""
    problem, model = setting.problem(), image_model(setting.width)
    started = time.perf_counter()
    run = fm.ForkMerge(MIXTURES, interval=setting.interval).fit(
        problem,
        model=model,
        optimizer=OPTIMIZER,
        steps=setting.rounds * setting.interval,
        seed=setting.seed,
        workers=workers,
        threads=1,
        channels_last=channels_last,
        on_event=on_event,
        progress=False,
        folder=folder,
    )
    total = time.perf_counter() - started
    found = [dict(finished.coefficients) for finished in run.rounds]
    counts = {key: sum(finished.examples[key] for finished in run.rounds) for key in ("evaluated", "bound", "full")}
    shares = counts["evaluated"] / counts["full"], counts["bound"] / counts["full"]
    return RunResult(run.model.state_dict(), dict(run.seconds), total, found, 1 - (run.score or 0.0), *shares)


def check(setting: Setting) -> float:
    """Return the largest difference between the weights both end with where both use the same memory format.

    Their searches must then find the same coefficients.
    """
    ours, theirs = side_by_side(setting, channels_last=False)
    return difference(ours, theirs) if _agree(ours, theirs) else math.inf


def side_by_side(setting: Setting, *, channels_last: bool | None = None) -> tuple[RunResult, RunResult]:
    """Return the library's run and the loop's, done in turns."""
    with tempfile.TemporaryDirectory() as folder:
        twin = Twin(setting, Path(folder))
        ours = library(setting, Path(folder) / "run", channels_last=channels_last, on_event=twin.follow)
    ours.total -= twin.outcome.total
    return ours, twin.outcome


def difference(ours: RunResult, theirs: RunResult) -> float:
    """Return the largest difference between the weights two runs end with, relative to the largest of a tensor."""
    return max(
        ((ours.weights[key] - value).abs().max() / value.abs().max().clamp(min=1e-6)).item()
        for key, value in theirs.weights.items()
        if value.is_floating_point()
    )


def compare(setting: Setting, repeats: int, workers: int) -> dict[str, Any]:
    """Run library and twin side by side, then the library with workers, and again."""
    ours, theirs, executor = [], [], []
    with Progress(transient=True) as progress:
        for _ in progress.track(range(repeats), description="whole runs"):
            one, other = side_by_side(setting)
            ours.append(one)
            theirs.append(other)
            with tempfile.TemporaryDirectory() as folder:
                executor.append(library(setting, Path(folder) / "run", workers=workers))
    phases = {
        name: {
            phase: statistics.median(100 * found.seconds.get(phase, 0.0) / found.seconds["train"] for found in some)
            for phase in ("rank", "search", "merge")
        }
        for name, some in (("library", ours), ("twin", theirs))
    }
    return {
        "rounds": setting.rounds,
        "error": statistics.median(found.error for found in ours),
        "workers": workers,
        "phases": phases,
        "overhead": {
            "library": quartiles([found.overhead for found in ours]),
            "twin": quartiles([found.overhead for found in theirs]),
        },
        "step_ms": statistics.median(
            1000 * o.seconds["train"] / (len(MIXTURES) * setting.rounds * setting.interval) for o in ours
        ),
        "training": quartiles([t.seconds["train"] / o.seconds["train"] for t, o in zip(theirs, ours, strict=True)]),
        "one_thread": quartiles([t.total / o.total for t, o in zip(theirs, ours, strict=True)]),
        "with_workers": quartiles([t.total / o.total for t, o in zip(theirs, executor, strict=True)]),
        "same_coefficients": all(_agree(t, o) for t, o in zip(theirs, ours, strict=True)),
        "coefficients": {"library": ours[0].coefficients, "twin": theirs[0].coefficients},
        "drift": statistics.median(difference(o, t) for o, t in zip(ours, theirs, strict=True)),
        "examples": {"evaluated": ours[0].examples, "bound": ours[0].bound},
    }


def _agree(one: RunResult, other: RunResult) -> bool:
    """Whether two searches found the same coefficients in every round."""
    pairs = zip(one.coefficients, other.coefficients, strict=True)
    return all(abs(a[name] - b[name]) < 1e-9 for a, b in pairs for name in MIXTURES)


def _notes(results: Mapping[str, Any]) -> list[str]:
    setting, examples = results["setting"], results["examples"]
    without_all = results["training"]["median"] * (1 + results["overhead"]["twin"]["median"] / 100)
    without_search = without_all / (1 + results["phases"]["library"]["rank"] / 100)
    return [
        f"A ResNet-18-like network at {setting['side']}×{setting['side']}, B=3, {results['error']:.1%} validation "
        f"errors, V={setting['validation']}, Δt={setting['interval']}, batch {setting['batch']}, {results['rounds']} "
        f"rounds, {results['step_ms']:.0f} ms a step. `benchmarks/authors.py` is the loop; on a small setting the "
        f"weights both end with differ by {results['difference']:.0e} of the largest.",
        f"Our search evaluated {examples['evaluated']:.1%} of its candidates' examples; {examples['bound']:.1%} is the "
        f"least in their order. The loop's own search found {'the same' if results['same_coefficients'] else 'other'} "
        "coefficients, on weights of its own: it trains in another memory format, and in hundreds of steps rounding "
        f"has moved them by {results['drift']:.1f} of a tensor's largest.",
        "In one memory format a step takes as long as a plain loop's (*fixed weights* in the table of methods below), "
        "so the ratio of training is that of other kernels to channels-last ones on this network. With that, the "
        f"whole run would be {without_search:.2f}× faster if only ranking took time, and {without_all:.2f}× if nothing "
        "did. With two workers training is spread evenly, ranking three branches takes as long as two, and the race "
        "stays in one process.",
        "The loop evaluates in batches of the training's size, the library in those of its own default, twice that "
        "size. The run with workers follows after both others, which take turns.",
        "*Checkpoints, rest* is mostly one pass over the validation data before training, which finds a metric or an "
        "example that fails; it is done once per run. So is the start of worker processes, which counts in the last "
        "ratio.",
    ]


def section(results: Mapping[str, Any]) -> Section:
    """Say what the results mean."""
    overhead, phases = results["overhead"], results["phases"]
    rows = []
    for name, title in (("library", "forkmerge"), ("twin", "authors' style")):
        parts = [f"{phases[name][phase]:.1f}" for phase in ("rank", "search", "merge")]
        rest = overhead[name]["median"] - sum(phases[name].values())
        rows.append([title, *parts, f"{rest:.1f}", f"{overhead[name]['median']:.1f}"])
    speeds = [
        ["the training alone, one thread", ratio(results["training"], "×")],
        ["the whole run, one thread", ratio(results["one_thread"], "×")],
        [f"the whole run, {results['workers']} workers of one thread", ratio(results["with_workers"], "×")],
    ]
    return Section(
        "A whole run beside the authors' style",
        "A run of three branches beside a loop in the style of the authors' scripts that trains on the same batches "
        "and merges with the same coefficients.",
        [
            Table(["added to training, in % of it", "ranking", "search", "merge", "checkpoints, rest", "all"], rows),
            Table(["time of the authors' style over ours", "ratio"], speeds),
        ],
        [
            Goal(
                "ranking, search and merge over branch training", 6, sum(phases["library"].values()), unit="%", digits=1
            ),
            Goal("everything over training", 6, overhead["library"]["median"], unit="%", digits=1),
            Goal("whole run, one thread", 1.4, results["one_thread"]["median"], at_least=True, unit="×"),
            Goal("whole run, two workers", 2.4, results["with_workers"]["median"], at_least=True, unit="×"),
        ],
        _notes(results),
        [
            (
                "What do merges add to the training of the branches?",
                f"{overhead['library']['median']:.1f}% of it: ranking, search, merge, checkpoints; a loop in the style "
                f"of the authors' scripts adds {overhead['twin']['median']:.1f}%",
            ),
            (
                "Is a run faster than such a loop?",
                f"{results['one_thread']['median']:.2f}× on one thread, {results['with_workers']['median']:.2f}× with "
                f"{results['workers']} worker processes",
            ),
        ],
    )


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int)
    arguments.add_argument("--rounds", type=int)
    arguments.add_argument("--workers", type=int, default=2)
    arguments.add_argument("--check", action="store_true", help="only compare the weights on a small setting")
    options = begin(arguments, argv)
    apart = check(Setting(rounds=2, interval=4, validation=256, training=512, batch=16, side=8))
    print(f"weights differ by {apart:.1e} of the largest")
    if not apart < 1e-3:
        raise SystemExit("the twin does not do the library's training")
    if options.check:
        return
    if options.quick:
        setting, repeats = Setting(options.rounds or 1, interval=10, validation=256, training=512), options.repeats or 1
    else:
        setting, repeats = Setting(options.rounds or 3, interval=500, validation=5000), options.repeats or 2
    names = ("interval", "validation", "batch", "side")
    facts = {name: getattr(setting, name) for name in names}
    results = {"setting": facts, "difference": apart, **compare(setting, repeats, options.workers)}
    save("twin", results, options.out)
    show("twin", options.out)


if __name__ == "__main__":
    main()
