"""A diagnosis: what every auxiliary does to a target, within a budget of time, resumable.

OUT/diagnosis_plan.json   what is done, decided once for a budget
OUT/pieces/*.json         what every piece of it found
OUT/diagnosis.json        the result
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from forkmerge.algorithms.events.run_events import Notice, OnEvent
from forkmerge.algorithms.events.send import ignore
from forkmerge.algorithms.resolved_config import environment
from forkmerge.algorithms.table_data import show_metrics
from forkmerge.analysis.advice import ShortRun, advise, affinity, probe_settings
from forkmerge.analysis.diagnosis.budget import (
    DiagnosisPlan,
    Key,
    PieceTimes,
    longest_first,
    piece_seconds,
    plan_budget,
    time_pieces,
)
from forkmerge.analysis.diagnosis.pieces import FORMAT, OPTIONAL, Piece, do, read_piece, write_piece
from forkmerge.analysis.results import AuxiliaryFinding, Diagnosis, GradientSimilarity, OneStepGains, Pictures
from forkmerge.analysis.studies import curve_of, shift_of
from forkmerge.analysis.transfer_runs import SeededSource, TransferRunResult
from forkmerge.engine.executors.devices import check_devices
from forkmerge.engine.executors.executor_options import ExecutorOptions, LocalOptions
from forkmerge.engine.executors.parallel_calls import Failure, run_calls
from forkmerge.engine.storage.json_codec import as_read
from forkmerge.engine.storage.json_files import interpreting, read_versioned, write_versioned
from forkmerge.engine.storage.lock import locked_folder
from forkmerge.errors import ConfigError, ProblemError, StoreError
from forkmerge.experiments.events import JobEnded, JobsPlanned, JobStarted
from forkmerge.experiments.pretraining import pretrained
from forkmerge.experiments.recipe import Recipe
from forkmerge.problem.definition import Problem

PLAN, RESULT = "diagnosis_plan.json", "diagnosis.json"


def diagnose(
    recipe: Recipe,
    out: str | os.PathLike[str],
    *,
    budget: float,
    workers: int = 1,
    executor: ExecutorOptions | None = None,
    on_event: OnEvent = ignore,
    say: Callable[[str], None] = lambda text: None,
    command: str = "",
) -> Diagnosis:
    """Diagnose a recipe's target, or continue a diagnosis; what was done before is not done again.

    The test split is never read.

    Args:
        recipe: From `load_recipe`; its target is diagnosed.
        out: The folder.
        budget: Seconds, of all sessions together. A diagnosis that was begun keeps its plan, unless this is more.
        workers: Processes, of one thread each; the numbers do not depend on it.
        executor: Where else runs are done, e.g. `Ray(workers=4)`, instead of processes here.
        on_event: Gets the events of `forkmerge.experiments.events`, e.g. to draw progress.
        say: Gets what is planned, in words, before it is done.
        command: What to type to make it again.
    """
    if not recipe.problem.auxiliaries:
        raise ConfigError(f"the problem has one task only, {recipe.problem.target!r}: there is nothing to diagnose.")
    folder, recipes = Path(out), SeededSource(dict(recipe.source), recipe.problem.target)
    where = executor or LocalOptions(workers)
    with locked_folder(folder, PLAN), where.connected():
        _check_folder(recipe, folder, on_event)
        if not (folder / PLAN).is_file():
            pretrained(recipe, on_event)  # once, before several processes want the weights
        plan, costs = _planned(recipe, recipes, folder, budget, where.workers, say)
        say(plan.describe())
        works = piece_seconds(plan, costs)
        pieces = [Piece(recipes, plan, recipes.target, *key) for key in longest_first(works)]
        results, notes = _do_all(pieces, [works[piece.key] for piece in pieces], folder, where, on_event)
        result = conclude(recipe, plan, results, notes=notes, command=command)
        write_versioned(folder / RESULT, FORMAT, {"diagnosis": result})
    return result


def read_diagnosis(folder: str | os.PathLike[str]) -> Diagnosis | None:
    """Return the diagnosis of a folder, or None if it holds none that has ended."""
    path = Path(folder) / RESULT
    return Diagnosis.from_json(_read(path, "diagnosis")["diagnosis"], name=path) if path.is_file() else None


def conclude(
    recipe: Recipe,
    plan: DiagnosisPlan,
    results: Mapping[Key, Mapping[str, Any]],
    *,
    notes: Sequence[str] = (),
    command: str = "",
) -> Diagnosis:
    """Return the diagnosis that the pieces' results add up to."""
    problem = recipe.problem
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for (kind, *_), result in results.items():
        by_kind.setdefault(kind, []).append(result)
    runs = [TransferRunResult.from_json(g) for kind in ("single task", "transfer") for g in by_kind.get(kind, [])]
    runs.sort(key=lambda run: run.seed)
    findings = _findings(problem, runs, by_kind, is_whole=plan.steps == plan.full_steps)
    steps = [OneStepGains.from_json(v) for result in by_kind.get("gradients", []) for v in result["one_step"]]
    pictures = next(map(Pictures.from_json, by_kind.get("pictures", [])), Pictures())
    remarks = ["Gains are differences of validation scores; the test split was not read."]
    if plan.steps < plan.full_steps:
        remarks.append(
            f"Runs were shortened to {plan.steps} of {plan.full_steps} steps, where nearly every auxiliary looks "
            "harmful: the short trials decide the advice, and a larger budget says more."
        )
    return Diagnosis(
        target=problem.target,
        findings=tuple(findings),
        plan=plan.to_json(),
        one_step=tuple(steps),
        seconds=sum(result.get("seconds", 0.0) for result in results.values()),
        command=command,
        notes=(*remarks, *notes, *pictures.notes),
        pictures=pictures,
        settings=as_read(recipe.source["settings"]),
        environment=environment(1, next(iter(check_devices(recipe.options.get("devices"))), torch.device("cpu"))),
    )


def _findings(
    problem: Problem,
    runs: Sequence[TransferRunResult],
    by_kind: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    is_whole: bool,
) -> Iterator[AuxiliaryFinding]:
    """Yield what is known of every auxiliary, and what to do with it."""
    merge_runs = [TransferRunResult.from_json(g) for g in by_kind.get("ForkMerge", [])]
    short_runs = [ShortRun.from_json(t) for result in by_kind.get("probe", []) for t in result["trials"]]
    batches = [value for result in by_kind.get("gradients", []) for value in result["similarities"]]
    similar = {s.second: s for s in map(GradientSimilarity.from_json, batches)}
    for task in problem.auxiliaries:
        curve = curve_of(runs, problem.target, task)
        estimate = affinity(short_runs, task) if short_runs else None
        advice, reason = advise(curve, estimate, is_whole=is_whole)
        yield AuxiliaryFinding(
            auxiliary=task,
            curve=curve,
            similarity=similar.get(task),
            shift=shift_of(runs, curve),
            relevance=fmean(run.relevance.get(task, 0.0) for run in merge_runs) if merge_runs else None,
            affinity=None if estimate is None else estimate.mean,
            advice=advice,
            reason=reason,
            measure="loss" if estimate is None else estimate.measure,
        )


def _about(recipe: Recipe) -> dict[str, Any]:
    return {"settings": as_read(recipe.source["settings"]), "target": recipe.problem.target}


def _check_folder(recipe: Recipe, folder: Path, on_event: OnEvent) -> None:
    """Refuse a folder of another problem, and warn if the recipe's code is not what it was."""
    if not (folder / PLAN).is_file():
        return
    data, code = _read(folder / PLAN, "about", "plan", "costs"), recipe.source.get("code")
    if data["about"] != _about(recipe):
        raise StoreError(f"{folder} diagnoses something else: choose another folder with --out.")
    if data.get("code", code) != code:
        on_event(Notice(text=f"the code of the recipe has changed since {folder} was started", is_warning=True))


def _planned(
    recipe: Recipe, recipes: SeededSource, folder: Path, budget: float, workers: int, say: Callable[[str], None]
) -> tuple[DiagnosisPlan, PieceTimes]:
    """Return the plan of a folder, or make one from timed steps; a larger budget than before makes a larger plan."""
    path, kept = folder / PLAN, None
    content = {"kind": "diagnosis", "about": _about(recipe), "code": recipe.source.get("code")}
    if path.is_file():
        content = _read(path)
        kept = DiagnosisPlan.from_json(content["plan"], name=path)
        costs = PieceTimes.from_json(content["costs"], name=path)
        with interpreting(path, "a diagnosis"):
            is_planned = budget <= content.get("budget", math.inf)
        if is_planned:
            say(f"continuing {folder}, with the plan it has")
            return kept, costs
    else:
        say("timing a few steps")
        costs = time_pieces(recipes)
    plan = plan_budget(costs, probe_settings(recipe.problem, recipe.steps), recipe.steps, budget, workers)
    if kept is not None:
        is_more = _work(plan, costs) > _work(kept, costs)
        say(f"continuing {folder}: the larger budget {'extends its plan' if is_more else 'buys nothing more'}")
        plan = plan if is_more else kept
    write_versioned(path, FORMAT, {**content, "budget": budget, "plan": plan, "costs": costs})
    return plan, costs


def _work(plan: DiagnosisPlan, costs: PieceTimes) -> float:
    return sum(piece_seconds(plan, costs).values())


def _do_all(
    pieces: Sequence[Piece], seconds: Sequence[float], folder: Path, executor: ExecutorOptions, on_event: OnEvent
) -> tuple[dict[Key, dict[str, Any]], list[str]]:
    """Do what has not been done, and return all results, with a note for every optional piece that failed."""
    done = {piece.key: kept for piece in pieces if (kept := read_piece(folder, piece)) is not None}
    waiting = [(piece, work) for piece, work in zip(pieces, seconds, strict=True) if piece.key not in done]
    work = [max(round(1000 * value), 1.0) for _, value in waiting]
    kinds = [piece.kind for piece, _ in waiting]
    on_event(JobsPlanned(jobs=len(pieces), ended=len(done), kinds=kinds, work=work))
    failures: list[str] = []
    notes: list[str] = []

    def news(index: int, value: Any) -> None:
        if value is None:
            on_event(JobStarted(index=index))

    jobs = [piece for piece, _ in waiting]
    names = [f"{piece.label}, {piece.target}, seed {piece.seed}" for piece in jobs]
    for index, result in run_calls(do, jobs, executor, news, names) if waiting else ():
        piece, error = waiting[index][0], None
        if isinstance(result, Failure):
            error, reached = result.error, ""
            if piece.kind in OPTIONAL:
                notes.append(f"No {piece.kind}: {error.rstrip('.')}. The same command tries again.")
            else:
                failures.append(f"{piece.label}, seed {piece.seed}: {error}")
        else:
            write_piece(folder, piece, result)
            done[piece.key], metrics = result, result.get("metrics", {}).get("validation")
            reached = f"validation {show_metrics(metrics)}" if metrics else ""
        title = f"{piece.label}  {piece.target}  seed {piece.seed}"
        on_event(JobEnded(index=index, title=title, result=reached, error=error))
    if failures:
        raise ProblemError(
            f"{len(failures)} of the runs failed, the first: {failures[0]}. The same command tries again."
        )
    return done, notes


def _read(path: Path, *keys: str) -> dict[str, Any]:
    return read_versioned(path, FORMAT, keys, "a diagnosis", "its folder")
