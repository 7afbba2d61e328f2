"""A whole ForkMerge run beside a faithful loop in the style of the authors' scripts, which does the same training.

    ./run bench twin [--repeats 2] [--rounds 3] [--workers 2]

The loop keeps a module and an optimizer per branch, writes and reads every branch with `torch.save`, builds each
candidate as a sum of state dicts, and scores it, α = 0 included, with a full pass over the validation data: 6(B − 1)
passes and B to rank. Its own search is timed; then it goes on with the coefficients the library found, so that both do
the same training on the same batches. `--check` compares the weights they end with.

Both run side by side, in turns of fifty steps: the loop does what the library reports to have done. So a machine whose
speed changes from minute to minute hurts both alike. The library's run with workers follows after both.
"""

from __future__ import annotations

import copy
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from harness import begin, parser, quartiles, save
from nets import IMAGE_TASKS, MultiTask, image_model, image_problem
from page import Goal, Section, Table, ratio, show
from rich.progress import Progress
from torch import Tensor
from torch.nn.functional import cross_entropy

import forkmerge as fm
from forkmerge.order import batch_indices

MIXTURES = {
    "alone": {"target": 1.0},
    "coarse": {"target": 1.0, "coarse": 1.0},
    "noisy": {"target": 1.0, "noisy": 1.0},
}
ALPHAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
OPTIMIZER = fm.OptimizerOf("SGD", lr=0.02, momentum=0.9, weight_decay=5e-4)


@dataclass(frozen=True)
class Setting:
    """The size of one comparison."""

    rounds: int
    interval: int
    validation: int
    training: int = 10_000
    width: int = 16
    side: int = 16
    noise: float = 5.0
    batch: int = 64
    seed: int = 0

    def problem(self) -> fm.Problem:
        """The problem both train on."""
        return image_problem(self.training, self.validation, self.batch, self.side, self.noise)


@dataclass
class Outcome:
    """A finished run: its weights, seconds by phase and in all, coefficients of every round, and validation error.

    `examples` is the share of its candidates' full passes that the search evaluated, `bound` the least possible.
    """

    weights: dict[str, Tensor]
    seconds: dict[str, float]
    total: float
    coefficients: list[dict[str, float]] = field(default_factory=list)
    error: float = 0.0
    examples: float = 1.0
    bound: float = 1.0

    @property
    def overhead(self) -> float:
        """Everything but training, in percent of training."""
        return 100 * (self.total - self.seconds["train"]) / self.seconds["train"]


def library(
    setting: Setting,
    folder: Path,
    *,
    workers: int = 1,
    channels_last: bool | None = None,
    observe: Callable[[Mapping[str, Any]], None] = lambda event: None,
) -> Outcome:
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
        observe=observe,
        folder=folder,
    )
    total = time.perf_counter() - started
    found = [dict(finished.coefficients) for finished in run.rounds]
    counts = {key: sum(finished.examples[key] for finished in run.rounds) for key in ("evaluated", "bound", "full")}
    shares = counts["evaluated"] / counts["full"], counts["bound"] / counts["full"]
    return Outcome(run.model.state_dict(), dict(run.seconds), total, found, 1 - (run.score or 0.0), *shares)


class Twin:
    """The loop in the authors' style, which follows the events of a library's run."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        self.setting, self.folder, problem = setting, folder, setting.problem()
        self.data = problem.stream_map["images"].dataset.tensors  # type: ignore[attr-defined]
        self.held_out = problem.target_validation.dataset.tensors  # type: ignore[attr-defined]
        model = image_model(setting.width)
        self.models = {name: copy.deepcopy(model) for name in MIXTURES}
        self.optimizers = {name: OPTIMIZER(model) for name, model in self.models.items()}
        self.steps = dict.fromkeys(MIXTURES, 0)
        seconds = dict.fromkeys(["train", "rank", "search", "merge", "checkpoint"], 0.0)
        self.outcome = Outcome(model.state_dict(), seconds, 0.0)

    def follow(self, event: Mapping[str, Any]) -> None:
        """Train a branch as far as the library has, or end a round with its coefficients."""
        started = time.perf_counter()
        if event["event"] == "segment":
            with self._timed("train"):
                self._train(event["branch"], event["step"])
        elif event["event"] == "round":
            self._end_round(event["coefficients"])
        self.outcome.total += time.perf_counter() - started

    def _end_round(self, given: Mapping[str, float]) -> None:
        for name in MIXTURES:
            with self._timed("checkpoint"):
                self._save_and_reload(name)
        states = {name: copy.deepcopy(model.state_dict()) for name, model in self.models.items()}
        with self._timed("rank"):
            scores = {name: self._score(model) for name, model in self.models.items()}
        with self._timed("search"):
            self.outcome.coefficients.append(self._search(states, scores))
        with self._timed("merge"):
            self.outcome.weights = merged = weighted_sum(states, given)
            for model in self.models.values():
                model.load_state_dict(merged)
        with self._timed("checkpoint"):
            torch.save(merged, self.folder / "merged.pt")

    def _train(self, name: str, until: int) -> None:
        model, optimizer, setting = self.models[name], self.optimizers[name], self.setting
        model.train()
        columns = [IMAGE_TASKS.index(task) + 1 for task in MIXTURES[name]]
        for step in range(self.steps[name], until):
            chosen = batch_indices(len(self.data[0]), setting.batch, step, setting.seed, "images")
            z = model.encoder(self.data[0][chosen])
            losses = [
                weight * cross_entropy(model.heads[task](z), self.data[column][chosen])
                for (task, weight), column in zip(MIXTURES[name].items(), columns, strict=True)
            ]
            optimizer.zero_grad()
            torch.stack(losses).sum().backward()
            optimizer.step()
        self.steps[name] = until

    def _save_and_reload(self, name: str) -> None:
        path = self.folder / f"{name}.pt"
        torch.save({"model": self.models[name].state_dict(), "optimizer": self.optimizers[name].state_dict()}, path)
        stored = torch.load(path, weights_only=True)  # noqa: TID251 - written one line above, by us
        self.models[name].load_state_dict(stored["model"])
        self.optimizers[name].load_state_dict(stored["optimizer"])

    def _score(self, model: MultiTask) -> float:
        inputs, labels = self.held_out
        correct = 0
        model.eval()
        with torch.no_grad():
            for x, y in zip(inputs.split(self.setting.batch), labels.split(self.setting.batch), strict=True):
                correct += int((model.heads["target"](model.encoder(x)).argmax(1) == y).sum())
        return correct / len(labels)

    def _search(self, states: Mapping[str, Mapping[str, Tensor]], scores: Mapping[str, float]) -> dict[str, float]:
        """Alg. 3 with every α, 0 included, scored by a full pass."""
        first, *others = sorted(scores, key=lambda name: -scores[name])
        weights, best, model = {first: 1.0}, scores[first], copy.deepcopy(self.models[first])
        for place, name in enumerate(others, start=1):
            upper, chosen = sum(weights.values()) / place, 0.0
            for alpha in ALPHAS:
                trial = {**weights, name: alpha * upper}
                total = sum(trial.values())
                model.load_state_dict(weighted_sum(states, {key: value / total for key, value in trial.items()}))
                score = self._score(model)
                if score > best:
                    best, chosen = score, alpha * upper
            weights[name] = chosen
        total = sum(weights.values())
        return {name: weights[name] / total for name in MIXTURES}

    @contextmanager
    def _timed(self, phase: str) -> Any:
        started = time.perf_counter()
        yield
        self.outcome.seconds[phase] += time.perf_counter() - started


def weighted_sum(states: Mapping[str, Mapping[str, Tensor]], weights: Mapping[str, float]) -> dict[str, Tensor]:
    """Σ_b Λ_b θ^b over whole state dicts; integers come from the heaviest, as in the library."""
    top = max(weights, key=lambda name: weights[name])
    merged = {}
    for key, tensor in states[top].items():
        if tensor.is_floating_point():
            merged[key] = torch.stack([weight * states[name][key] for name, weight in weights.items()]).sum(0)
        else:
            merged[key] = tensor.clone()
    return merged


def check(setting: Setting) -> float:
    """Return the largest difference between the weights both end with where both use the same memory format.

    Their searches must then find the same coefficients.
    """
    ours, theirs = side_by_side(setting, channels_last=False)
    return difference(ours, theirs) if _agree(ours, theirs) else math.inf


def side_by_side(setting: Setting, *, channels_last: bool | None = None) -> tuple[Outcome, Outcome]:
    """Return the library's run and the loop's, done in turns."""
    with tempfile.TemporaryDirectory() as folder:
        twin = Twin(setting, Path(folder))
        ours = library(setting, Path(folder) / "run", channels_last=channels_last, observe=twin.follow)
    ours.total -= twin.outcome.total
    return ours, twin.outcome


def difference(ours: Outcome, theirs: Outcome) -> float:
    """Return the largest difference between the weights two runs end with, relative to the largest of a tensor."""
    return max(
        ((ours.weights[key] - value).abs().max() / value.abs().max().clamp(min=1e-6)).item()
        for key, value in theirs.weights.items()
        if value.is_floating_point()
    )


def compare(setting: Setting, repeats: int, workers: int) -> dict[str, Any]:
    """Run library and twin side by side, then the library with workers, and again."""
    ours, theirs, crew = [], [], []
    with Progress(transient=True) as progress:
        for _ in progress.track(range(repeats), description="whole runs"):
            one, other = side_by_side(setting)
            ours.append(one)
            theirs.append(other)
            with tempfile.TemporaryDirectory() as folder:
                crew.append(library(setting, Path(folder) / "run", workers=workers))
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
        "with_workers": quartiles([t.total / o.total for t, o in zip(theirs, crew, strict=True)]),
        "same_coefficients": all(_agree(t, o) for t, o in zip(theirs, ours, strict=True)),
        "coefficients": {"library": ours[0].coefficients, "twin": theirs[0].coefficients},
        "drift": statistics.median(difference(o, t) for o, t in zip(ours, theirs, strict=True)),
        "examples": {"evaluated": ours[0].examples, "bound": ours[0].bound},
    }


def _agree(one: Outcome, other: Outcome) -> bool:
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
        f"rounds, {results['step_ms']:.0f} ms a step. `benchmarks/twin.py` is the loop; on a small setting the weights "
        f"both end with differ by {results['difference']:.0e} of the largest.",
        f"Our search evaluated {examples['evaluated']:.1%} of its candidates' examples; {examples['bound']:.1%} is the "
        f"least in their order. The loop's own search found {'the same' if results['same_coefficients'] else 'other'} "
        "coefficients, on weights of its own: it trains in another memory format, and in hundreds of steps rounding "
        f"has moved them by {results['drift']:.1f} of a tensor's largest.",
        "Training gains what torch's channels-last kernels gain on this network, and nothing else. With that, the "
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
