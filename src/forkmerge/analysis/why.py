"""Ask a merge why: a round's search again, from its saved branches, with something changed; nothing is trained.

The run must have kept its branches: `ForkMerge(keep_branches=True).fit(…, folder=…)`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import Any

import torch

from forkmerge.algorithms._fit import build_model
from forkmerge.analysis.merge_results import Counterfactual, Replay, Survival
from forkmerge.branch import Mixture, Training
from forkmerge.candidates import Candidates, Coefficients, vertices
from forkmerge.errors import ProblemError, StoreError, unknown_name
from forkmerge.measuring import read_metrics
from forkmerge.merging import Blender, recompute_statistics
from forkmerge.mixtures import is_target_only, reference_branch
from forkmerge.order import derive
from forkmerge.problem import Evaluation
from forkmerge.recipe import Recipe
from forkmerge.run import Round, Run
from forkmerge.scoring import CostReader, Costs, Criterion, measure
from forkmerge.searches import Search, best_of, search_from
from forkmerge.state import State
from forkmerge.store import RunFolder


@dataclass
class SavedRound:
    """The branches of one round, made by `open_round`.

    Attributes:
        record: What the run recorded of the round.
        names: The branches.
        target_only: The branch that gains are measured against: the target alone, or the first.
    """

    record: Round
    names: tuple[str, ...]
    target_only: str
    states: list[State]
    blend: Blender
    evaluation: Evaluation
    criterion: Criterion
    search: Search
    seed: int

    def __post_init__(self) -> None:
        self._costs: dict[tuple[int, Coefficients], Costs | None] = {}
        self._asked: dict[int, Evaluation] = {}  # alive, so that no other gets the number of one

    def replay(
        self,
        *,
        search: Search | str | Mapping[str, Any] | None = None,
        evaluation: Evaluation | None = None,
        metrics: Any = None,
        indices: Sequence[int] | None = None,
    ) -> Replay:
        """Search the coefficients again.

        Args:
            search: Another search.
            evaluation: Other data, e.g. a second validation set.
            metrics: Other metrics of the same data: a metric or `{name: metric}`.
            indices: Some of the validation examples only.
        """
        data = evaluation or self.evaluation
        if metrics is not None:
            data = replace(data, metrics=metrics, higher_is_better={})
        chosen_search = search_from(search) or self.search
        score = self._scorer(data, indices)
        tried = Candidates(score)
        chosen = best_of(chosen_search, tried, len(self.names))
        changed = {
            "search": search is not None,
            "data": evaluation is not None,
            "metric": metrics is not None,
            "examples": indices is not None,
        }
        words = ", ".join(name for name, is_changed in changed.items() if is_changed)
        recorded = self._recorded()
        return Replay(
            round=self.record.index,
            question=f"another {words}" if words else "nothing",
            branches=self.names,
            recorded=dict(self.record.coefficients),
            chosen=dict(zip(self.names, chosen, strict=True)),
            score=tried(chosen),
            recorded_score=tried(recorded),
            branch_scores={n: tried(v) for n, v in zip(self.names, vertices(len(self.names)), strict=True)},
            evaluations=len(tried.tried),
        )

    def without(self, branch: str) -> Counterfactual:
        """Return what the merge would have been had a branch got coefficient 0."""
        if branch not in self.names:
            raise ProblemError(f"round {self.record.index}: " + unknown_name("branch", branch, self.names))
        out, score, recorded = self.names.index(branch), self._scorer(self.evaluation, None), self._recorded()
        others = [i for i in range(len(self.names)) if i != out]
        if not others:
            raise ProblemError(f"{branch!r} is the only branch of round {self.record.index}.")
        left = math.fsum(recorded[i] for i in others)
        scaled = tuple(0.0 if i == out else recorded[i] / left for i in range(len(recorded))) if left else None

        def expand(coefficients: Coefficients) -> Coefficients:
            given = dict(zip(others, coefficients, strict=True))
            return tuple(given.get(i, 0.0) for i in range(len(self.names)))

        tried = Candidates(lambda coefficients: score(expand(coefficients)))
        search = self.search if self._serves(len(others)) else search_from("greedy")
        assert search is not None
        chosen = best_of(search, tried, len(others))
        return Counterfactual(
            round=self.record.index,
            branch=branch,
            score=score(recorded),
            without=math.nan if scaled is None else score(scaled),
            searched=tried(chosen),
            coefficients=dict(zip(self.names, expand(chosen), strict=True)),
        )

    def survival(self, *, splits: int = 20, seed: int = 0) -> Survival:
        """Return how much of the gain that a search finds on half of the validation data is left on the other half.

        Args:
            splits: How many random halvings; each half is searched on once.
            seed: Of the halvings.
        """
        size = len(self.evaluation.dataset)  # type: ignore[arg-type]  # checked by Problem
        if size < 2:
            raise ProblemError("one validation example cannot be halved.")
        base = vertices(len(self.names))[self.names.index(self.target_only)]
        seen, unseen = [], []
        for split in range(splits):
            generator = torch.Generator().manual_seed(derive(seed, "halves", split))
            order = torch.randperm(size, generator=generator).tolist()
            halves = sorted(order[: size // 2]), sorted(order[size // 2 :])
            for one, other in (halves, halves[::-1]):
                score, check = self._scorer(self.evaluation, one), self._scorer(self.evaluation, other)
                chosen = best_of(self.search, Candidates(score), len(self.names))
                seen.append(score(chosen) - score(base))
                unseen.append(check(chosen) - check(base))
        means = fmean(seen), fmean(unseen)
        kept = means[1] / means[0] if means[0] > 0 else None
        return Survival(self.record.index, tuple(seen), tuple(unseen), *means, kept, self.target_only)

    def _serves(self, branches: int) -> bool:
        try:
            self.search.check(branches)
        except ProblemError:
            return False
        return True

    def _recorded(self) -> Coefficients:
        if not self.record.coefficients:
            raise ProblemError(
                f"every branch of round {self.record.index} was faulty: there was no merge to ask about."
            )
        return tuple(self.record.coefficients.get(name, 0.0) for name in self.names)

    def _scorer(self, data: Evaluation, indices: Sequence[int] | None) -> Any:
        """Return the score of coefficients; what every example costs is found out once where the score adds up."""
        criterion = self.criterion
        if list(data.directions) != list(criterion.directions):
            criterion = Criterion(data.directions)
            if criterion.needs_reference:
                alone = vertices(len(self.names))[self.names.index(self.target_only)]
                criterion = criterion.with_reference(self._metrics(data, None, alone))
        return lambda coefficients: criterion.score(self._metrics(data, indices, coefficients))

    def _metrics(self, data: Evaluation, indices: Sequence[int] | None, coefficients: Coefficients) -> dict[str, float]:
        key = id(self._asked.setdefault(id(data), data)), coefficients
        bench = self.blend.bench
        if key not in self._costs:
            bench.attach_weights(self.blend(coefficients))
            metrics, self._costs[key] = read_metrics(bench.model, data, None, self.seed)
            if indices is None:
                return metrics
        costs = self._costs[key]
        if costs is not None:
            part = costs if indices is None else Costs(*(column[list(indices)] for column in costs))
            return CostReader(data, self.seed).values(part)
        bench.attach_weights(self.blend(coefficients))
        return measure(bench.model, data, indices=indices, seed=self.seed)


def open_round(folder: str | os.PathLike[str], recipe: Recipe, index: int) -> SavedRound:
    """Return the saved branches of a round, ready for questions.

    Args:
        folder: The run's folder.
        recipe: The recipe it was run with: problem, model, optimizer and algorithm.
        index: The round, counted from 1.
    """
    store = RunFolder.open(folder, lock=False)
    result = store.result()
    if result is None:
        raise StoreError(f"{os.fspath(folder)} is not finished: only finished runs can be asked.")
    known = {item.name for item in fields(Run)}
    run = Run.from_json({key: value for key, value in result.items() if key in known})
    record = next((r for r in run.searched if r.index == index), None)
    if record is None:
        raise StoreError(f"{os.fspath(folder)} has no searched round {index}: it has 1 to {len(run.searched)}.")
    saved = store.load_branches(index)
    problem, seed = recipe.problem.sealed(), run.seed
    settings = recipe.algorithm.settings(problem)
    training = Training(
        recipe.optimizer,
        scheduler=recipe.options.get("scheduler"),
        channels_last=store.config["training"]["channels_last"],
    ).over(run.steps)
    bench = training.bench(build_model(recipe.model, seed))
    states = [bench.place(State.from_value(value)) for value in saved.values()]

    def refresh(state: State) -> None:
        if settings.bn == "recompute":
            recompute_statistics(bench, state, problem, training=training, seed=seed, count=settings.bn_batches)

    mixtures = [Mixture(name, record.branches[name].task_weights) for name in saved]
    alone = next((m.name for m in mixtures if is_target_only(m, problem.target)), mixtures[0].name)
    criterion = Criterion(problem.target_validation.directions)
    if criterion.needs_reference:
        first = run.searched[0].branches
        position = reference_branch([Mixture(n, b.task_weights) for n, b in first.items()], problem.target)
        reference = settings.reference or first[list(first)[position or 0]].metrics
        criterion = criterion.with_reference(reference)
    return SavedRound(
        record=record,
        names=tuple(saved),
        target_only=alone,
        states=states,
        blend=Blender(bench, states, states[0].clone(), refresh),
        evaluation=problem.target_validation,
        criterion=criterion,
        search=settings.search_for(len(states)),
        seed=seed,
    )
