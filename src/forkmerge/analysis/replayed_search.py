"""Ask a merge why: a round's search again, from its saved branches, with something changed; nothing is trained.

The run must have kept its branches: `ForkMerge(keep_branches=True).fit(…, folder=…)`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from forkmerge.algorithms.fit import build_model
from forkmerge.algorithms.mixtures import is_target_only, reference_branch
from forkmerge.algorithms.run_record import Round, Run
from forkmerge.algorithms.settings import Settings
from forkmerge.analysis.combination_scores import CombinationScores, ReplayedMerge
from forkmerge.analysis.combinations import copy_state
from forkmerge.analysis.merge_results import Counterfactual, Replay, Survival
from forkmerge.engine.executors.devices import check_devices, place_model
from forkmerge.engine.merging.arithmetic import Coefficients, vertices
from forkmerge.engine.merging.batchnorm_policy import recompute_statistics
from forkmerge.engine.merging.blend import Blender
from forkmerge.engine.merging.find_merge import Merge, find_merge
from forkmerge.engine.merging.rules import ARGMAX, Rule, check_rule
from forkmerge.engine.merging.searches import Greedy, Search, fitting, search_from
from forkmerge.engine.storage.run_folder import RunFolder
from forkmerge.engine.training.options import Mixture, Training
from forkmerge.engine.training.state import State
from forkmerge.errors import ProblemError, StoreError, unknown_name
from forkmerge.experiments.recipe import Recipe
from forkmerge.problem.definition import Evaluation, Problem
from forkmerge.problem.example_order import sample_indices
from forkmerge.problem.metrics import Criterion
from forkmerge.problem.randomness import derive
from forkmerge.problem.searched_evaluation import (
    SearchedEvaluation,
    reported_directions,
    search_directions,
    with_metrics,
    with_search_metric,
)

MERGE = "merge"
"""Stands for the round's merge where branches are named."""


@dataclass
class SavedRound:
    """The branches of one round, made by `open_round`.

    Attributes:
        record: What the run recorded of the round.
        names: The branches.
        target_only: The branch that gains are measured against: the target alone, or the first.
        problem: The problem, without its test split.
        search_examples: Size of the sub-sample of validation examples that the run searched on, if it did.
    """

    record: Round
    names: tuple[str, ...]
    target_only: str
    problem: Problem
    blend: Blender
    criterion: Criterion
    search: Search
    search_examples: int | None
    seed: int
    rule: str = ARGMAX

    def __post_init__(self) -> None:
        alone = vertices(len(self.names))[self.names.index(self.target_only)]
        self._scores = CombinationScores(self.blend, self.criterion, alone, self.seed)

    @property
    def evaluation(self) -> Evaluation:
        """The target's validation data and metrics."""
        return self.problem.target_validation

    @property
    def model(self) -> nn.Module:
        """The module that weights are tried in."""
        return self.blend.binding.model

    def weights(self, *names: str) -> dict[str, dict[str, Tensor]]:
        """Return `{branch: state dict}`, as the functions of `forkmerge.analysis.combinations` take it.

        Args:
            names: Branches, and "merge" for what the round merged them to; all branches where there are none.
        """
        points = dict(zip(self.names, vertices(len(self.names)), strict=True))
        states = {}
        for name in names or self.names:
            if name not in points and name != MERGE:
                raise self._unknown(name)
            self.blend.binding.release(self.blend(points[name] if name in points else self._recorded()))
            states[name] = copy_state(self.model)
        return states

    def replay(
        self,
        *,
        search: Search | str | Mapping[str, Any] | None = None,
        evaluation: Evaluation | None = None,
        metrics: Any = None,
        higher_is_better: Mapping[str, bool] | None = None,
        indices: Sequence[int] | None = None,
        rule: str | None = None,
    ) -> Replay:
        """Search the coefficients again, as the run did: on a sub-sample if it drew one, without faulty branches.

        What `ForkMerge(confidence=…)` made of the search's answer is not asked again.

        Args:
            search: Another search.
            evaluation: Other data, e.g. a second validation set.
            metrics: Other metrics of the same data: a metric or `{name: metric}`.
            higher_is_better: `{name: bool}` of metrics that do not say so themselves; one that has the name of a
                metric of the data keeps its direction.
            indices: Some of the validation examples only, for search and score.
            rule: Another rule; all but "argmax" need metrics that add up over examples.
        """
        if rule is not None:
            check_rule(rule, is_guarded=(search_from(search) or self.search).guarded)
        data = self.evaluation if evaluation is None else self._searched_alike(evaluation)
        if metrics is not None or higher_is_better is not None:
            own = {name: data.metrics[name] for name in reported_directions(data)}
            data = _measured_by(data, own if metrics is None else metrics, higher_is_better or {})
        merge = self._find(data, indices, search_from(search) or self.search, rule=rule)
        changed = {
            "search": search is not None,
            "data": evaluation is not None,
            "metric": metrics is not None or higher_is_better is not None,
            "examples": indices is not None,
            "rule": rule is not None,
        }
        words = ", ".join(name for name, is_changed in changed.items() if is_changed)
        return Replay(
            round=self.record.index,
            question=f"another {words}" if words else "nothing",
            branches=self.names,
            recorded=dict(self.record.coefficients),
            chosen=merge.coefficients,
            score=merge.score,
            recorded_score=self._scores.scorer(data, indices)(self._recorded()),
            branch_scores=merge.branch_scores,
            evaluations=len(merge.candidates),
        )

    def without(self, branch: str) -> Counterfactual:
        """Return what the merge would have been had a branch got coefficient 0."""
        if branch not in self.names:
            raise self._unknown(branch)
        out, score, recorded = self.names.index(branch), self._scores.scorer(self.evaluation, None), self._recorded()
        others = [i for i in range(len(self.names)) if i != out]
        if not others:
            raise ProblemError(f"{branch!r} is the only branch of round {self.record.index}.")
        left = math.fsum(recorded[i] for i in others)
        scaled = tuple(0.0 if i == out else recorded[i] / left for i in range(len(recorded))) if left else None
        search = fitting(self.search, len(others)) or Greedy()
        merge = self._find(self.evaluation, None, search, without=branch)
        return Counterfactual(
            round=self.record.index,
            branch=branch,
            score=score(recorded),
            without=math.nan if scaled is None else score(scaled),
            searched=merge.score,
            coefficients=merge.coefficients,
        )

    def survival(self, *, splits: int = 20, seed: int = 0) -> Survival:
        """Return how much of the gain that a search finds on half of the validation data is left on the other half.

        Args:
            splits: How many random halvings; each half is searched on once.
            seed: Of the halvings.
        """
        size = self.evaluation.size
        if size < 2:
            raise ProblemError("one validation example cannot be halved.")
        base = vertices(len(self.names))[self.names.index(self.target_only)]
        seen, unseen = [], []
        for split in range(splits):
            generator = torch.Generator().manual_seed(derive(seed, "halves", split))
            order = torch.randperm(size, generator=generator).tolist()
            halves = sorted(order[: size // 2]), sorted(order[size // 2 :])
            for one, other in (halves, halves[::-1]):
                score, check = self._scores.scorer(self.evaluation, one), self._scores.scorer(self.evaluation, other)
                chosen = tuple(self._find(self.evaluation, one, self.search).coefficients.values())
                seen.append(score(chosen) - score(base))
                unseen.append(check(chosen) - check(base))
        means = fmean(seen), fmean(unseen)
        kept = means[1] / means[0] if means[0] > 0 else None
        return Survival(self.record.index, tuple(seen), tuple(unseen), *means, kept, self.target_only)

    def _find(
        self,
        data: Evaluation,
        indices: Sequence[int] | None,
        search: Search,
        without: str | None = None,
        rule: str | None = None,
    ) -> Merge:
        """Search as the run did; branches that were faulty, or are left out, get coefficient 0."""
        self._recorded()  # refuses a round without a merge
        faults = {name: branch.fault for name, branch in self.record.branches.items() if branch.fault}
        if without is not None:
            faults[without] = "it was left out"
        on_sample, sample = None, indices
        if indices is None and self.search_examples is not None:
            size = data.size
            sample = sample_indices(size, self.search_examples, self.seed, "validation", self.record.index)
            on_sample = self._scores.scorer(data, sample)
        tables = partial(self._scores.table, data, indices), partial(self._scores.table, data, sample)
        problem = ReplayedMerge(self.names, faults, self._scores.scorer(data, indices), on_sample, tables)
        return find_merge(problem, search, Rule(rule or self.rule, derive(self.seed, "rule", self.record.index)))

    def _searched_alike(self, data: Evaluation) -> Evaluation:
        """Return other data searched by the metric that the run searched by, where it chose one."""
        own = self.evaluation
        if not isinstance(own, SearchedEvaluation) or not own.search_by:
            return data
        return with_search_metric(data, own.metrics[own.search_by])

    def _unknown(self, branch: str) -> ProblemError:
        return ProblemError(f"round {self.record.index}: " + unknown_name("branch", branch, self.names))

    def _recorded(self) -> Coefficients:
        if not self.record.coefficients:
            raise ProblemError(
                f"every branch of round {self.record.index} was faulty: there was no merge to ask about."
            )
        return tuple(self.record.coefficients.get(name, 0.0) for name in self.names)


def _measured_by(data: Evaluation, metrics: Any, higher_is_better: Mapping[str, bool]) -> Evaluation:
    """Return the same data with other metrics."""
    other = with_metrics(data, metrics, {})
    own = {name: sign > 0 for name, sign in data.directions.items() if name in other.metrics}
    return replace(other, higher_is_better={**own, **higher_is_better})


def open_round(folder: str | os.PathLike[str], recipe: Recipe, index: int) -> SavedRound:
    """Return the saved branches of a round, ready for questions.

    Args:
        folder: The run's folder.
        recipe: The recipe it was run with: problem, model, optimizer and algorithm.
        index: The round, counted from 1.
    """
    store = RunFolder.open(folder, lock=False)
    run, record = _finished_round(store, os.fspath(folder), recipe.problem.target, index)
    saved = store.load_branches(index)
    seed, model = run.seed, build_model(recipe.model, run.seed)
    place_model(model, check_devices(recipe.options.get("devices")))
    algorithm = recipe.algorithm.resolved(recipe.problem.sealed(), model, seed, run.steps, store.config["algorithm"])
    settings = algorithm.settings(recipe.problem)
    problem = settings.searched(recipe.problem.sealed(), seed)
    _check_replayable(settings, len(saved), os.fspath(folder))
    training = Training(
        recipe.optimizer,
        scheduler=recipe.options.get("scheduler"),
        **{name: store.config["training"][name] for name in ("precision", "channels_last")},
    ).over(run.steps)
    binding = training.binding(model)
    states = [binding.place(State.from_value(value)) for value in saved.values()]

    def refresh(state: State) -> None:
        if settings.bn == "recompute":
            recompute_statistics(binding, state, problem, training=training, seed=seed, count=settings.bn_batches)

    mixtures = [Mixture(n, record.branches[n].task_weights, record.branches[n].lr_scale) for n in saved]
    alone = next((m.name for m in mixtures if is_target_only(m, problem.target)), mixtures[0].name)
    return SavedRound(
        record=record,
        names=tuple(saved),
        target_only=alone,
        problem=problem,
        blend=Blender(binding, states, states[0].clone(), refresh),
        criterion=_criterion(problem, settings.reference, run),
        search=settings.search_for(len(states)),
        search_examples=settings.search_examples,
        seed=seed,
        rule=settings.rule or ARGMAX,
    )


def _check_replayable(settings: Settings, branches: int, folder: str) -> None:
    """Refuse rounds whose candidates were made of more than the branches that are kept."""
    reasons = {
        "sums of updates, and their fork points are": settings.search_for(settings.entrants(branches)).beyond_one,
        "previous merges, too, and these are": settings.previous_merges is not None,
        "coefficients of layer groups, and what these are is": settings.layer_groups is not None,
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise StoreError(
                f"{folder} was searched among {reason} not kept with the branches: such a round cannot be asked again."
            )


def _finished_round(store: RunFolder, folder: str, target: str, index: int) -> tuple[Run, Round]:
    """Return a finished run and the record of one of its rounds."""
    result = store.result()
    if result is None:
        raise StoreError(f"{folder} is not finished: only finished runs can be asked.")
    run = Run.from_json(result)
    if run.target != target:
        raise StoreError(
            f"{folder} trained for the target {run.target!r}, the recipe's is {target!r}: "
            f"pass replace(recipe, problem=recipe.problem.with_target({run.target!r}))."
        )
    record = next((r for r in run.searched if r.index == index), None)
    if record is None:
        raise StoreError(f"{folder} has no searched round {index}: it has 1 to {len(run.searched)}.")
    return run, record


def _criterion(problem: Problem, reference: Mapping[str, float] | None, run: Run) -> Criterion:
    """Return what the run searched merges by."""
    criterion = Criterion(search_directions(problem.target_validation))
    if not criterion.needs_reference:
        return criterion
    first = run.searched[0].branches
    position = reference_branch([Mixture(n, b.task_weights, b.lr_scale) for n, b in first.items()], problem.target)
    return criterion.with_reference(reference or first[list(first)[position or 0]].metrics)
