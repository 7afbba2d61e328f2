"""What the compute of B branches would have bought without merging them every round."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from forkmerge.algorithms.branches.round_sizes import count_steps
from forkmerge.algorithms.composed import Composed, Parts, comparable_scores, whole
from forkmerge.algorithms.fit import Algorithm
from forkmerge.algorithms.run_record import Run
from forkmerge.algorithms.settings import Settings
from forkmerge.engine.executors.parallel_calls import using_threads
from forkmerge.engine.merging.arithmetic import merge_tensors
from forkmerge.engine.merging.batchnorm_policy import recompute_statistics
from forkmerge.engine.training.model_binding import OptimizerFactory
from forkmerge.engine.training.options import Training
from forkmerge.errors import ProblemError, check_count
from forkmerge.problem.definition import Problem
from forkmerge.problem.metrics import Criterion
from forkmerge.problem.randomness import derive
from forkmerge.problem.scoring import measure


@dataclass(frozen=True)
class Scaled:
    """An optimizer factory with its learning rates changed; groups keep their proportions.

    Args:
        factory: Makes the optimizer.
        factor: Multiplies every learning rate.
        lr: Or the learning rate that the optimizer's default becomes.
    """

    factory: OptimizerFactory
    factor: float = 1.0
    lr: float | None = None

    def __call__(self, model: nn.Module) -> Optimizer:
        """Return the optimizer of a model."""
        optimizer = self.factory(model)
        base, factor = optimizer.defaults.get("lr"), self.factor
        if self.lr is not None:
            if not base:
                raise ProblemError(f"{type(optimizer).__name__} has no learning rate to set: do not tune lr.")
            factor = self.lr / float(base)
        for group in (optimizer.defaults, *optimizer.param_groups):
            for name in ("lr", "initial_lr"):
                if name in group:
                    group[name] = self.lr if group[name] == base and self.lr is not None else group[name] * factor
        return optimizer


@dataclass(frozen=True)
class BestOf(Composed):
    """Train several times, with other learning rates and other seeds, and keep the best on validation.

    The candidates are `rates` in turn; after those the same again with another seed, which draws the order of
    examples and, where `fit` gets a function that makes the model, its first weights.

    Args:
        algorithm: What is trained.
        runs: How many candidates.
        rates: Factors of the learning rate.
    """

    algorithm: Algorithm
    runs: int
    rates: Sequence[float] = (1.0, 1 / 3, 3.0)

    def __post_init__(self) -> None:
        check_count("runs", self.runs)
        if not self.rates or not all(math.isfinite(rate) and rate > 0 for rate in self.rates):
            raise ProblemError(f"rates must be positive factors of the learning rate, got {self.rates!r}.")

    @property
    def refits(self) -> bool:
        """Whether the chosen candidate is trained once more on training ∪ validation data."""
        return bool(getattr(self.algorithm, "refit", False))

    @property
    def _searched(self) -> Algorithm:
        """What the candidates are: without a refit, which the chosen one alone gets."""
        return replace(self.algorithm, refit=False) if self.refits else self.algorithm  # type: ignore[type-var]

    def settings(self, problem: Problem) -> Settings:
        """Return the settings of a candidate."""
        return self.algorithm.settings(problem)

    def branch_steps(self, problem: Problem, steps: int) -> int:
        """Return the steps of all candidates, and of the refit."""
        counts = [count_steps(self._searched, problem, steps)] * self.runs
        return sum(counts) + (count_steps(self.algorithm, problem, steps) if self.refits else 0)

    def compose(self, parts: Parts) -> Run:
        """Train every candidate, then the best one again if it is to be refitted."""
        runs = [self._candidate(parts, self._searched, index) for index in range(self.runs)]
        scores = comparable_scores(parts.problem.target_validation.directions, [run.metrics for run in runs])
        best = max(range(self.runs), key=scores.__getitem__)  # of equals the first
        chosen = runs[best]
        if self.refits:
            again = self._candidate(parts, self.algorithm, best, name="refit")
            chosen = replace(again, score=chosen.score, metrics=chosen.metrics)
        parts.module.load_state_dict(_model(chosen).state_dict())
        run = whole(self, parts, chosen)
        rate, restart = self._setting(best)
        run.notes.append(f"best of {self.runs} on validation: learning rate × {rate:.3g}, restart {restart}")
        return run

    def _setting(self, index: int) -> tuple[float, int]:
        return self.rates[index % len(self.rates)], index // len(self.rates)

    def _candidate(self, parts: Parts, algorithm: Algorithm, index: int, name: str | None = None) -> Run:
        rate, restart = self._setting(index)
        fresh = isinstance(parts.model, nn.Module) or not restart
        return parts.run(
            name or f"candidate-{index}",
            algorithm,
            model=copy.deepcopy(parts.module) if fresh else parts.model,
            optimizer=parts.optimizer if rate == 1 else Scaled(parts.optimizer, rate),
            seed=derive(parts.seed, "restart", restart) if restart else parts.seed,
        )


@dataclass(frozen=True)
class Averaged(Composed):
    """Train several times and average the weights uniformly, once, at the end.

    The runs start from the same weights and differ in the order of their examples.

    Args:
        algorithm: What is trained.
        runs: How many times.
        bn: BatchNorm statistics of the average: "average" them like parameters, or "recompute" them on the target's
            training data.
        bn_batches: Batches for "recompute".
    """

    algorithm: Algorithm
    runs: int
    bn: Literal["average", "recompute"] = "average"
    bn_batches: int = 50

    def __post_init__(self) -> None:
        check_count("runs", self.runs)
        check_count("bn_batches", self.bn_batches)
        if self.bn not in ("average", "recompute"):
            raise ProblemError(f"bn must be one of average, recompute, got {self.bn!r}.")

    @property
    def refits(self) -> bool:
        """Whether every run is trained on training ∪ validation data in the end."""
        return bool(getattr(self.algorithm, "refit", False))

    def settings(self, problem: Problem) -> Settings:
        """Return the settings of one run."""
        return self.algorithm.settings(problem)

    def branch_steps(self, problem: Problem, steps: int) -> int:
        """Return the steps of all runs."""
        return self.runs * count_steps(self.algorithm, problem, steps)

    def compose(self, parts: Parts) -> Run:
        """Train every run, average, measure."""
        runs = []
        for index in range(self.runs):
            seed = derive(parts.seed, "order", index) if index else parts.seed
            runs.append(parts.run(f"run-{index}", self.algorithm, model=copy.deepcopy(parts.module), seed=seed))
        states = [_model(run).state_dict() for run in runs]
        coefficients = [1 / self.runs] * self.runs
        merged = {name: merge_tensors([state[name] for state in states], coefficients) for name in states[0]}
        parts.module.load_state_dict(merged)
        if self.bn == "recompute" and self.runs > 1:  # one run is a trained model, not an average, and keeps its own
            self._recompute(parts)
        changes: dict[str, Any] = {"final": f"uniform average of {self.runs} runs", "score": None, "metrics": {}}
        if not self.refits:
            with using_threads(parts.threads):
                metrics = measure(parts.module, parts.problem.target_validation, seed=parts.seed)
            criterion = Criterion(parts.problem.target_validation.directions)
            # Several metrics have no score of their own: there is no first round to compare with.
            score = -math.inf if criterion.needs_reference else criterion.score(metrics)
            changes.update(metrics=metrics, score=score if math.isfinite(score) else None)
        return whole(self, parts, runs[0], **changes)

    def _recompute(self, parts: Parts) -> None:
        """Recompute the statistics of the averaged module as those of a merge at the last step would be."""
        problem = parts.problem.with_validation_labels() if self.refits else parts.problem
        precision = parts.options.get("precision", "float32")
        training = Training(parts.optimizer, precision=precision, channels_last=False)
        binding = training.binding(parts.module)
        state = binding.initial()
        with using_threads(parts.threads):
            recompute_statistics(
                binding, state, problem, training=training, seed=parts.seed, count=self.bn_batches, step=parts.steps
            )
        binding.release(state)


def _model(run: Run) -> nn.Module:
    assert run.model is not None
    return run.model
