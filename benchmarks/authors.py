"""A loop in the style of the authors' scripts, for `twin.py` to compare the library with.

It keeps a module and an optimizer per branch, writes and reads every branch with `torch.save`, builds each candidate as
a sum of state dicts, and scores it, α = 0 included, with a full pass over the validation data: 6(B − 1) passes and B to
rank. Its own search is timed; then it goes on with the coefficients the library found, so that both do the same
training on the same batches.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from nets import IMAGE_TASKS, MultiTask, image_model, image_problem
from torch import Tensor
from torch.nn.functional import cross_entropy

import forkmerge as fm
from forkmerge.algorithms.events import Event, RoundFinished, StepProgress
from forkmerge.problem.example_order import batch_indices

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
class RunResult:
    """A finished run: its weights, seconds by phase and in all, coefficients of every round, and validation error.

    `examples` is the share of its candidates' full passes that the search evaluated, `bound` the least in its order.
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
        self.outcome = RunResult(model.state_dict(), seconds, 0.0)

    def follow(self, event: Event) -> None:
        """Train a branch as far as the library has, or end a round with its coefficients."""
        started = time.perf_counter()
        if isinstance(event, StepProgress):
            with self._timed("train"):
                self._train(event.branch, event.step)
        elif isinstance(event, RoundFinished):
            self._end_round(event.record.coefficients)
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
