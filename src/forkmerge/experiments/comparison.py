"""Methods × targets × seeds on one problem: every run in its own folder, resumable at any point.

OUT/plan.json                         what is compared
OUT/TARGET/METHOD-seed0/              a run's folder
OUT/.shared/                          what runs have in common until their first merge, until all have ended
OUT/TARGET/METHOD-seed0.json          its record, written when it has ended
OUT/TARGET/METHOD-seed0-tuning.json   the record of a run that helps to choose a setting
OUT/comparison.md, .csv, .tex, .json  the tables
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from forkmerge.algorithms.branches.round_sizes import branch_count, count_steps
from forkmerge.algorithms.composed import comparable_scores
from forkmerge.algorithms.events.run_events import Notice, OnEvent
from forkmerge.algorithms.events.send import ignore
from forkmerge.engine.executors.executor_options import ExecutorOptions, LocalOptions
from forkmerge.engine.executors.parallel_calls import Failure, run_calls
from forkmerge.engine.storage.atomic_files import remove
from forkmerge.engine.storage.json_codec import as_read
from forkmerge.engine.storage.lock import locked_folder
from forkmerge.engine.storage.shared_store import SHARED
from forkmerge.errors import ConfigError, ForkMergeError, unknown_name
from forkmerge.experiments.compare_options import CompareOptions, options_from
from forkmerge.experiments.compared.method_words import BASELINE
from forkmerge.experiments.compared.run_folders import run_folder
from forkmerge.experiments.compared_methods import (
    COMPARED_METHODS,
    ComparedMethod,
    compared_method_from,
    compared_methods_from,
    equal_compute_words,
    takes,
    with_setting,
)
from forkmerge.experiments.comparison_run import ComparisonRun, do_comparison_run
from forkmerge.experiments.events import JobEnded, JobProgress, JobsPlanned, JobStarted
from forkmerge.experiments.pretraining import pretrained
from forkmerge.experiments.recipe import Recipe, load_recipe, read_settings, source_for
from forkmerge.experiments.run_results import (
    PLAN,
    RunResult,
    check_same_settings,
    read_plan,
    read_run_result,
    write_plan,
)
from forkmerge.experiments.single_task_reference import (
    References,
    reference_word,
    steps_between_choices,
    with_references,
)
from forkmerge.problem.definition import Problem
from forkmerge.problem.display import Display, Displayed


@dataclass(frozen=True, repr=False)
class Comparison(Displayed):
    """What is compared.

    Args:
        recipe: The problem and how it is trained on.
        methods: The methods, single-task training among them.
        targets: The target tasks.
        seeds: The seeds; runs with the same seed share first weights and the order of examples.
        tune: `{option: values}` chosen per method and target on validation: `lr`, `interval` (ForkMerge's Δt), or any
            option of an algorithm or method.
        tune_seeds: How many of the seeds the choice is made with.
        equal_labels: Whether all methods finally train on training ∪ validation data.
        references: The single-task training that a method is compared with, where it is not the baseline.
    """

    recipe: Recipe
    methods: tuple[ComparedMethod, ...]
    targets: tuple[str, ...]
    seeds: tuple[int, ...]
    tune: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    tune_seeds: int = 1
    equal_labels: bool = False
    references: References = field(default_factory=dict)

    def display(self) -> Display:
        """Return what a prompt shows of the plan."""
        facts = {
            "methods": ", ".join(method.label for method in self.methods),
            "targets": ", ".join(self.targets),
            "seeds": ", ".join(map(str, self.seeds)),
            **(
                {"tune": "; ".join(f"{key} of {list(values)}" for key, values in self.tune.items())}
                if self.tune
                else {}
            ),
        }
        runs = len(self.methods) * len(self.targets) * len(self.seeds)
        return Display(f"Comparison: {runs} runs, before any tuning", facts, notes=("run_comparison(…) does them",))

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        return {
            "settings": self.recipe.source["settings"],
            "code": self.recipe.source.get("code"),
            "pretrained": self.recipe.source.get("pretrained"),
            "methods": [self._entry(method) for method in self.methods],
            "targets": list(self.targets),
            "seeds": list(self.seeds),
            "tune": {key: list(values) for key, values in self.tune.items()},
            "tune_seeds": self.tune_seeds,
            "equal_labels": self.equal_labels,
        }

    def _entry(self, method: ComparedMethod) -> dict[str, Any]:
        own = self.references.get(method.word)
        entry = {"word": method.word, "label": method.label, **({"references": dict(own)} if own else {})}
        return {**entry, "is_selected": True} if self._is_selected(method) else entry

    def _is_selected(self, method: ComparedMethod) -> bool:
        """Whether this is the baseline, and validation chooses its model among those of its training."""
        if method.word != BASELINE:
            return False
        return steps_between_choices(method.algorithm(self.recipe, refit=False), self.recipe.steps) is not None


def plan_comparison(reference: str | Path, *, settings: Mapping[str, Any] | None = None, **options: Any) -> Comparison:
    """Return what would be compared; everything that can be refused is refused here.

    Args:
        reference: PROBLEM.toml or module:function.
        settings: Keys of the recipe to override.
        **options: Those of `CompareOptions`; what is not given, or None, is taken from the [compare] table of a TOML
            file, or else from the defaults.
    """
    chosen = options_from(read_settings(reference, settings)[0].get("compare", {}), **options)
    recipe = load_recipe(reference, settings)
    if not recipe.problem.auxiliaries:
        raise ConfigError(f"the problem has one task only, {recipe.problem.target!r}: there is nothing to compare.")
    methods = [COMPARED_METHODS[BASELINE], *compared_methods_from(",".join(chosen.methods))]
    if chosen.equal_compute:
        made = {method.word: method.algorithm(recipe, refit=False) for method in methods}
        branches = {word: branch_count(algorithm, recipe.problem) for word, algorithm in made.items()}
        selections = {w: reference_word(recipe, algorithm).removeprefix(BASELINE) for w, algorithm in made.items()}
        methods += [compared_method_from(word) for word in equal_compute_words(methods, branches, selections)]
    unique = tuple({method.word: method for method in methods}.values())
    names = _targets(recipe.problem, chosen.targets)
    _check_methods(recipe, unique, names, chosen)
    plan = Comparison(recipe, unique, names, chosen.seeds, chosen.tune, chosen.tune_seeds, chosen.equal_labels)
    everything, references = with_references(recipe, unique, lambda method: settings_of(plan, method))
    return replace(plan, methods=everything, references=references)


def _check_methods(
    recipe: Recipe, methods: Sequence[ComparedMethod], targets: Sequence[str], options: CompareOptions
) -> None:
    """Refuse options that contradict each other, and values that cannot be tuned, before anything is run."""
    for target, method in product(targets, methods):
        aimed = replace(recipe, problem=recipe.problem.with_target(target))
        algorithm = method.algorithm(aimed, refit=options.equal_labels)
        try:
            count_steps(algorithm, aimed.problem, aimed.steps)
        except ForkMergeError as error:
            raise ConfigError(f"{method.word}: {error}") from None
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{method.word} has an option that cannot be: {error}.") from None
    for key, values in options.tune.items():
        users = [method for method in methods if takes(method, recipe, key)]
        if not users:
            raise ConfigError(f"--tune {key}: no method of this comparison has an option of that name.")
        for method, value in product(users, values):
            with_setting(method.prepare(recipe, refit=False), {key: value})


def _targets(problem: Problem, words: Sequence[str] | None) -> tuple[str, ...]:
    """Return the targets asked for; all of them are those with validation data, and test data where there is any."""
    test = problem.evaluations("test")
    able = [task for task in problem.evaluations("validation") if task in test or not test]
    if words is None:
        return (problem.target,)
    if list(words) == ["all"] and "all" not in problem.tasks:
        return tuple(task for task in problem.tasks if task in able)
    for word in words:
        if word not in problem.evaluations("validation"):
            raise ConfigError("--targets: " + unknown_name("task with validation data", word, able))
    return tuple(words)


def run_comparison(
    comparison: Comparison,
    out: str | os.PathLike[str],
    *,
    workers: int = 1,
    executor: ExecutorOptions | None = None,
    on_event: OnEvent = ignore,
) -> None:
    """Do every run that has not ended yet; one that fails is recorded, and tried again the next time.

    Args:
        comparison: What is compared. A folder may be given more methods, targets and seeds later.
        out: The comparison's folder.
        workers: Processes, of one thread each; the numbers do not depend on it.
        executor: Where else runs are done, e.g. `Ray(workers=4)`, instead of processes here.
        on_event: Called with every event, e.g. to draw progress.
    """
    folder, where = Path(out), executor or LocalOptions(workers)
    if not where.shares_files:
        folder = folder.absolute()
    with locked_folder(folder, PLAN), where.connected():
        recipe = pretrained(comparison.recipe, on_event)
        comparison = replace(comparison, recipe=recipe)
        _note_plan(comparison, folder, on_event)
        _run_all(list(_tuning_runs(comparison, folder)), folder, where, on_event)
        runs = list(_final_runs(comparison, folder))
        for run in runs:
            if run.record.error is not None:  # there is no setting to run it with
                run.record.write(folder)
        _run_all([run for run in runs if run.record.error is None], folder, where, on_event)
        remove(folder / SHARED)


def _note_plan(comparison: Comparison, folder: Path, on_event: OnEvent) -> None:
    """Write the plan, added to what the folder already compares; a different problem or setting is refused."""
    old = read_plan(folder)
    new: dict[str, Any] = as_read(comparison.to_json())
    if old is not None:
        check_same_settings(old, new, folder)
        if old["code"] != new["code"]:
            on_event(Notice(text=f"the code of the recipe has changed since {folder} was started", is_warning=True))
        if old.get("pretrained") != new["pretrained"]:
            on_event(Notice(text=f"the pre-trained weights are others than when {folder} was started", is_warning=True))
        # Entries of older versions know of no references: methods that are compared again get new ones.
        methods = {method["word"]: method for method in (*old["methods"], *new["methods"])}
        new["methods"] = list(methods.values())
        for key in ("targets", "seeds"):
            new[key] = list(dict.fromkeys([*old[key], *new[key]]))
    write_plan(folder, new)


def settings_of(comparison: Comparison, method: ComparedMethod) -> list[dict[str, Any]]:
    """Return what tuning tries for a method: all combinations of the options that mean something to it."""
    keys = [key for key in comparison.tune if takes(method, comparison.recipe, key)]
    return [dict(zip(keys, values, strict=True)) for values in product(*(comparison.tune[key] for key in keys))]


def _tuning_runs(comparison: Comparison, out: Path) -> Iterator[ComparisonRun]:
    for seed, target, method in _grid(comparison, comparison.seeds[: comparison.tune_seeds]):
        settings = settings_of(comparison, method)
        if len(settings) > 1:
            yield from (_run(comparison, out, method, target, seed, setting, "tuning") for setting in settings)


def _final_runs(comparison: Comparison, out: Path) -> Iterator[ComparisonRun]:
    chosen: dict[tuple[str, str], dict[str, Any] | None] = {}
    for seed, target, method in _grid(comparison, comparison.seeds):
        settings = settings_of(comparison, method)
        if (target, method.word) not in chosen:
            tuned = len(settings) > 1
            choice = choose_setting(comparison, out, method, target) if tuned else settings[0]
            chosen[target, method.word] = choice
        setting = chosen[target, method.word]
        run = _run(comparison, out, method, target, seed, setting or {}, "final")
        if setting is None:
            run = replace(run, record=replace(run.record, error="every run that tuning tried has failed"))
        yield run


def _grid(comparison: Comparison, seeds: Sequence[int]) -> Iterator[tuple[int, str, ComparedMethod]]:
    yield from product(seeds, comparison.targets, comparison.methods)


def choose_setting(comparison: Comparison, out: Path, method: ComparedMethod, target: str) -> dict[str, Any] | None:
    """Return the setting that is best on validation, on average over the tuning seeds; None if all have failed."""
    settings = settings_of(comparison, method)
    totals = [0.0] * len(settings)
    for seed in comparison.seeds[: comparison.tune_seeds]:
        runs = [_run(comparison, out, method, target, seed, setting, "tuning") for setting in settings]
        results = [read_run_result(out, run.record.file) for run in runs]
        usable = {index: o for index, o in enumerate(results) if o is not None and o.error is None}
        values = [{name: math.nan if v is None else v for name, v in o.validation.items()} for o in usable.values()]
        directions = comparison.recipe.problem.evaluations("validation")[target].directions
        scores = dict(zip(usable, comparable_scores(directions, values) if values else [], strict=True))
        totals = [total + scores.get(index, -math.inf) for index, total in enumerate(totals)]
    best = max(range(len(settings)), key=totals.__getitem__)  # of equals the first given
    return settings[best] if totals[best] > -math.inf else None


def _run(
    comparison: Comparison,
    out: Path,
    method: ComparedMethod,
    target: str,
    seed: int,
    setting: dict[str, Any],
    kind: str,
) -> ComparisonRun:
    refit = comparison.equal_labels and kind == "final"
    folder = run_folder(
        comparison.recipe.problem,
        method.word,
        target,
        seed,
        setting,
        searches=kind == "tuning" and comparison.equal_labels,
    )
    record = RunResult(method.word, method.label, target, seed, kind, setting, folder)
    recipe = comparison.recipe
    work = count_steps(method.algorithm(recipe, refit=refit), recipe.problem, recipe.steps)
    weighs = kind == "final" and seed == comparison.seeds[0]
    shares = len(comparison.targets) * len(comparison.methods) > 1
    return ComparisonRun(source_for(recipe.source, seed, target), str(out), record, refit, weighs, work, shares)


def _run_all(runs: Sequence[ComparisonRun], out: Path, executor: ExecutorOptions, on_event: OnEvent) -> None:
    waiting = []
    for run in runs:
        done = read_run_result(out, run.record.file)
        if done is None or done.error is not None:
            waiting.append(run)
    # Seed by seed, so that what an interruption leaves can be compared; the longest first, so that none ends alone.
    order = {seed: position for position, seed in enumerate(dict.fromkeys(run.record.seed for run in runs))}
    waiting.sort(key=lambda run: (order[run.record.seed], -run.work))
    total = len(runs)
    kinds, work = [run.record.method for run in waiting], [float(run.work) for run in waiting]
    on_event(JobsPlanned(jobs=total, ended=total - len(waiting), kinds=kinds, work=work))
    if not waiting:
        return

    names = [run.record.title for run in waiting]

    def news(index: int, value: Any) -> None:
        on_event(JobStarted(index=index) if value is None else JobProgress(index=index, steps=value))

    for index, result in run_calls(do_comparison_run, waiting, executor, news, names, out):
        record = result
        if isinstance(result, Failure):
            record = replace(waiting[index].record, error=result.error, details=result.details)
        assert isinstance(record, RunResult)
        record.write(out)
        on_event(JobEnded(index=index, title=record.title, result=record.shown, error=record.error))
