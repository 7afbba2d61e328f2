"""Which corpora should a language model be fine-tuned on, and how much of each? ForkMerge beside what it must beat."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from forkmerge.algorithms.events.run_events import OnEvent
from forkmerge.algorithms.events.send import ignore
from forkmerge.algorithms.saved_run import read_run
from forkmerge.errors import StoreError
from forkmerge.experiments.comparison import Comparison, plan_comparison, run_comparison
from forkmerge.experiments.hf_export import check_base_model
from forkmerge.experiments.mixture_model import EQUAL, MODEL, RECIPE, write_model
from forkmerge.experiments.paired_statistics import CONFIDENCE, Paired, compare_paired, spread, t_quantile
from forkmerge.experiments.run_results import RunResult, read_run_results
from forkmerge.experiments.text_mixture import (
    Corpora,
    CorporaFacts,
    corpora_facts,
    corpus_from,
    read_corpora,
    write_corpora_facts,
)
from forkmerge.problem.display import Display, Displayed

MIXED, ALONE, WITH = "forkmerge-aux", "stl", "with:"

Scores = dict[int, float]
"""By seed."""


class Estimate(NamedTuple):
    """A mean with its interval; None where there is nothing to make one from."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True, repr=False)
class MixtureResult(Displayed):
    """What `mix` found.

    Args:
        folder: Where all runs are.
        model: The folder of the fine-tuned model; None where it is not written yet.
        metric: What is measured: bits per byte, or per token of an encoder; lower is better.
        split: What it was measured on.
        mixture: Of every round, the share of the steps that read each corpus, by name, mean over seeds.
        relevance: λ of every corpus: its weight in the merges, in units of the target's own, with its interval over
            seeds, or over the rounds of a single one.
        scores: The metric by method and seed: "mixture", "target only", "equal weights", "with NAME".
        best_single: The corpus that is best alone, chosen on validation; None without baselines.
        gains: How much lower the metric of the mixture is than that of other methods, paired over seeds.
        steps: Training steps of a method, all branches together, those of a refit included; mean over seeds.
        seconds: Mean time of a method's runs.
        model_is: Which method the model is of, with the first seed: the mixture, unless the target only validates
            better.
    """

    folder: Path
    model: Path | None
    metric: str
    split: str
    mixture: Sequence[Mapping[str, float]]
    relevance: Mapping[str, Estimate]
    scores: Mapping[str, Scores]
    best_single: str | None
    gains: Mapping[str, Paired]
    steps: Mapping[str, int]
    seconds: Mapping[str, float]
    model_is: str

    @property
    def labels(self) -> list[str]:
        """The methods as they are shown, the mixture first."""
        order = [_label(word) for word in (MIXED, ALONE, EQUAL)]
        return [*(label for label in order if label in self.scores), *(x for x in self.scores if x not in order)]

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        scores = {name: {str(seed): value for seed, value in runs.items()} for name, runs in self.scores.items()}
        relevance = {name: estimate._asdict() for name, estimate in self.relevance.items()}
        paths = {"folder": str(self.folder), "model": None if self.model is None else str(self.model)}
        return {**asdict(self), **paths, "scores": scores, "relevance": relevance}

    def display(self) -> Display:
        """Return what a notebook shows: what every training reached, and the mixture over time."""
        metric = self.metric.replace("_", " ")
        names = list(self.mixture[0]) if self.mixture else []
        facts = {label: self._reached(label) for label in self.labels}
        facts["relevance"] = ", ".join(f"{name} {estimate.mean:.2f}" for name, estimate in self.relevance.items())
        rows = [(str(number), *(f"{each[name]:.2f}" for name in names)) for number, each in enumerate(self.mixture, 1)]
        title = f"Mixture for {next(iter(names), '')!r}: {metric} on {self.split} text, lower is better"
        return Display(f"{title}; model: {self.model_is}", facts, ("round", *names), rows)

    def _reached(self, label: str) -> str:
        paired = self.gains.get(label)
        gain = "" if paired is None else f"; the mixture gains {paired.mean:+.2g}"
        return f"{fmean(self.scores[label].values()):.4g}, {self.steps[label]} steps{gain}"


def mix(
    target: str | os.PathLike[str],
    auxiliaries: Sequence[str | os.PathLike[str]],
    model: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    seeds: int = 1,
    workers: int = 1,
    baselines: bool = True,
    refit: bool = False,
    base_model: str | None = None,
    on_event: OnEvent = ignore,
    **options: Any,
) -> MixtureResult:
    """Fine-tune a language model on the best mixture of corpora, and say what each corpus was worth.

    Args:
        target: The corpus to become good at: a text file, JSON lines with "text", or a folder of such files.
        auxiliaries: Other corpora, named after their files; "name=path" gives another name.
        model: A local folder of transformers, a causal language model or an encoder; or a configuration file.
        out: The folder; one that exists is continued.
        seeds: Repetitions.
        workers: Processes.
        baselines: Also train with equal weights and with every corpus alone; the target only is trained in any case.
        refit: Train on training ∪ validation text in the end.
        base_model: What the model was made from, by its name on a hub, for the card of the new one.
        on_event: Gets the events of the comparison.
        **options: Those of `forkmerge.experiments.text_mixture.recipe`.
    """
    check_base_model(base_model)
    plan = plan_mix(target, auxiliaries, model, seeds=seeds, baselines=baselines, refit=refit, **options)
    run_comparison(plan, out, workers=workers, on_event=on_event)
    write_corpora_facts(Path(out), facts_of_mix(plan))
    return read_mix(out, base_model=base_model)


def plan_mix(
    target: str | os.PathLike[str],
    auxiliaries: Sequence[str | os.PathLike[str]],
    model: str | os.PathLike[str],
    *,
    seeds: int = 1,
    baselines: bool = True,
    refit: bool = False,
    **options: Any,
) -> Comparison:
    """Return what `mix` would run; everything that can be refused is refused here.

    Args:
        target: As of `mix`.
        auxiliaries: As of `mix`.
        model: As of `mix`.
        seeds: As of `mix`.
        baselines: As of `mix`.
        refit: As of `mix`.
        **options: As of `mix`.
    """
    corpora = [corpus_from(os.fspath(word)) for word in (target, *auxiliaries)]
    words = [f"{name}={Path(path).resolve()}" for name, path in corpora]
    arguments: dict[str, Any] = {"corpus": words[0], "auxiliaries": words[1:], "model": str(Path(model).resolve())}
    arguments |= {name: value for name, value in options.items() if value is not None}
    for name in ("validation", "test"):
        if name in arguments:
            arguments[name] = str(Path(arguments[name]).resolve())
    names = [name for name, _ in corpora[1:]]
    singles = [f"{WITH}{name}" for name in names] if len(names) > 1 else []  # of one, that is equal weights
    methods = [MIXED, ALONE, *([EQUAL, *singles] if baselines else [])]
    plan = plan_comparison(
        RECIPE, settings={"arguments": arguments}, methods=",".join(methods), seeds=seeds, equal_labels=refit
    )
    return replace(plan, methods=tuple(replace(method, label=_label(method.word)) for method in plan.methods))


def corpora_of_mix(plan: Comparison) -> Corpora:
    """Return the texts that a plan of `plan_mix` trains, validates and tests on."""
    arguments = plan.recipe.source["settings"]["arguments"]
    options = {name: arguments.get(name) for name in ("validation", "test", "id_key")}
    how = _contamination(plan)
    return read_corpora(arguments["corpus"], arguments["auxiliaries"], contamination=how, **options)


def facts_of_mix(plan: Comparison) -> CorporaFacts:
    """Return what a mixture is made of, for people."""
    return corpora_facts(corpora_of_mix(plan), _contamination(plan))


def _contamination(plan: Comparison) -> Any:
    return plan.recipe.source["settings"]["arguments"].get("contamination", "drop")


def read_mix(folder: str | os.PathLike[str], *, base_model: str | None = None) -> MixtureResult:
    """Return what the runs of a folder found; the model is written there, if it is not yet.

    Args:
        folder: The folder that `mix` was given.
        base_model: As of `mix`.
    """
    result, run = _find(Path(folder))
    return replace(result, model=write_model(Path(folder), run, base_model))


def find_mix(folder: str | os.PathLike[str]) -> MixtureResult:
    """Return what the runs of a folder found, from what is there: no model is made or written.

    Args:
        folder: The folder that `mix` was given.
    """
    return _find(Path(folder))[0]


def _find(path: Path) -> tuple[MixtureResult, RunResult]:
    """Return what was found, and the run whose model is kept."""
    results = [result for result in read_run_results(path) if result.kind == "final" and result.is_complete]
    by_word: dict[str, dict[int, RunResult]] = {}
    for result in results:
        by_word.setdefault(result.method, {})[result.seed] = result
    if MIXED not in by_word or ALONE not in by_word:
        errors = [f"{result.label}: {result.error}" for result in read_run_results(path) if result.error]
        raise StoreError(f"{path} has no mixture yet: {'; '.join(errors) or 'type the same command to continue'}.")
    first = next(iter(by_word[MIXED].values()))
    ((metric, _),) = first.metrics.items()
    validation = {word: fmean(_values(runs, "validation", metric).values()) for word, runs in by_word.items()}
    singles = [word for word in by_word if word.startswith(WITH)]
    best = min(singles, key=validation.__getitem__, default=None)
    scores = {_label(word): _values(runs, "metrics", metric) for word, runs in by_word.items()}
    ours = scores[_label(MIXED)]
    gains = {
        label: paired
        for label, theirs in scores.items()
        if label != _label(MIXED) and (paired := compare_paired(_negated(ours), _negated(theirs))) is not None
    }
    alike = {word: by_word[word][min(by_word[word])] for word in (MIXED, ALONE)}
    chosen = min(alike, key=lambda word: alike[word].validation[metric] or math.inf)  # the mixture, of equals
    names = [name for name in first.relevance if name != first.target]
    mixture = MixtureResult(
        path,
        path / MODEL if (path / MODEL).exists() else None,
        metric,
        first.split,
        _mixture(list(by_word[MIXED].values()), first.target, names),
        {name: _relevance(list(by_word[MIXED].values()), name) for name in names},
        scores,
        None if best is None else best.removeprefix(WITH),
        gains,
        {_label(word): round(fmean(_steps(path, run) for run in runs.values())) for word, runs in by_word.items()},
        {_label(word): fmean(run.seconds for run in runs.values()) for word, runs in by_word.items()},
        _label(chosen),
    )
    return mixture, alike[chosen]


def _label(word: str) -> str:
    labels = {MIXED: "mixture", ALONE: "target only", EQUAL: "equal weights"}
    return labels.get(word) or f"with {word.removeprefix(WITH)}"


def _steps(folder: Path, result: RunResult) -> int:
    """Return the steps that were trained, a refit's included; all that could have been, where the run is gone."""
    run = folder / result.folder
    trained = sum(read_run(run).trained_steps.values()) if run.is_dir() else 0
    return trained or result.steps * result.branches


def _values(runs: Mapping[int, RunResult], split: str, metric: str) -> Scores:
    return {seed: float(getattr(run, split)[metric]) for seed, run in sorted(runs.items())}


def _negated(scores: Scores) -> Scores:
    return {seed: -value for seed, value in scores.items()}


def _mixture(runs: Sequence[RunResult], target: str, names: Sequence[str]) -> list[dict[str, float]]:
    """Return the shares of the corpora in every round: a branch's steps read its corpus and the target in turn."""
    rounds = []
    for each in zip(*(run.rounds for run in runs), strict=False):
        shares = {name: fmean(_coefficient(summary, name) for summary in each) / 2 for name in names}
        rounds.append({target: 1 - sum(shares.values()), **shares})
    return rounds


def _coefficient(summary: Mapping[str, Any], name: str) -> float:
    coefficients = summary.get("coefficients", {})
    return float(coefficients.get(name, 0.0)) / (sum(coefficients.values()) or 1.0)


def _relevance(runs: Sequence[RunResult], name: str) -> Estimate:
    by_round = [[_coefficient(summary, name) for summary in run.rounds] for run in runs]
    values = [fmean(shares) for shares in by_round] if len(runs) > 1 else by_round[0]
    each = spread(values)
    if each.std is None:
        return Estimate(each.mean, None, None)
    half = t_quantile((1 + CONFIDENCE) / 2, each.count - 1) * each.std / math.sqrt(each.count)
    return Estimate(each.mean, max(each.mean - half, 0.0), min(each.mean + half, 1.0))
