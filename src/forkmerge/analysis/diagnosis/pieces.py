"""The pieces of a diagnosis: each is done once, in any process, and written down."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from forkmerge.analysis.advice import ShortRun, probe
from forkmerge.analysis.combinations import States, combination_gains, copy_state, loss_line
from forkmerge.analysis.conflict import measure_similarity, one_step_gains
from forkmerge.analysis.diagnosis.budget import LINE_POINTS, MAP_POINTS, PARTNERS, RESOLUTION, DiagnosisPlan, Key
from forkmerge.analysis.feature_map import feature_map
from forkmerge.analysis.heldout import reads_heldout
from forkmerge.analysis.merge_results import LossLine
from forkmerge.analysis.results import FeatureMap, GradientSimilarity, OneStepGains, Pictures
from forkmerge.analysis.transfer_runs import (
    EVERY,
    Recipes,
    TransferRun,
    TransferRunResult,
    do_transfer_run,
    fit_transfer_run,
    forkmerge,
    halfway,
)
from forkmerge.engine.executors.executor import Tell
from forkmerge.engine.executors.parallel_calls import describe_error, using_threads
from forkmerge.engine.storage.atomic_files import safe_name
from forkmerge.engine.storage.json_files import read_versioned, write_versioned
from forkmerge.engine.storage.records import Record
from forkmerge.problem.definition import Problem
from forkmerge.problem.made_auxiliaries import with_l2
from forkmerge.problem.randomness import random_state_kept

FORMAT = 1
L2 = "l2"
OPTIONAL = ("gradients", "pictures")
"""Kinds that verdicts can do without."""

_DEPENDS = {"probe": ("probe",), "gradients": ("steps", "batches", "one_step"), "pictures": ("steps", "pictures")}


@dataclass(frozen=True)
class Piece:
    """One piece of work.

    Args:
        recipes: Where the recipe of a seed comes from.
        plan: The diagnosis it belongs to.
        target: The target.
        kind: "single task", "transfer", "ForkMerge", "probe", "gradients" or "pictures".
        auxiliary: The auxiliary, where it is about one.
        weight: λ.
        seed: The seed.
    """

    recipes: Recipes
    plan: DiagnosisPlan
    target: str
    kind: str
    auxiliary: str = ""
    weight: float = 0.0
    seed: int = 0

    @property
    def key(self) -> Key:
        """What tells it from the others."""
        return self.kind, self.auxiliary, self.weight, self.seed

    @property
    def about(self) -> dict[str, Any]:
        """What of the plan it depends on."""
        plan = self.plan.to_json()
        return {name: plan[name] for name in _DEPENDS.get(self.kind, ("steps",))}

    @property
    def label(self) -> str:
        """What it is, for people."""
        return f"{self.auxiliary} λ={self.weight:g}" if self.auxiliary else self.kind

    @property
    def file(self) -> str:
        """Where it is written, relative to the diagnosis' folder."""
        about = f" {self.auxiliary} {self.weight:g}" if self.auxiliary else ""
        return f"pieces/{safe_name(f'{self.kind}{about} seed {self.seed}')}.json"


def do(piece: Piece, tell: Tell = lambda value: None) -> dict[str, Any]:
    """Do a piece, and return what it found as plain data, with the seconds it took."""
    started = time.perf_counter()
    return {**_KINDS[piece.kind](piece), "seconds": time.perf_counter() - started}


def _transfer(piece: Piece) -> dict[str, Any]:
    run = TransferRun(piece.recipes, piece.seed, piece.auxiliary, piece.weight, steps=piece.plan.steps)
    return do_transfer_run(run).to_json()


def _merges(piece: Piece) -> dict[str, Any]:
    run = TransferRun(piece.recipes, piece.seed, EVERY, 1.0, steps=piece.plan.steps, maker=forkmerge, label="ForkMerge")
    return do_transfer_run(run).to_json()


def _probe(piece: Piece) -> dict[str, Any]:
    runs = probe(piece.recipes(piece.seed), piece.plan.probe, piece.seed)
    return {"trials": [run.to_json() for run in runs]}


def _gradients(piece: Piece) -> dict[str, Any]:
    """Compare gradients in the middle of the target's own training, as the paper does."""
    with random_state_kept(), using_threads(1):
        recipe = halfway(piece.recipes(piece.seed), piece.plan.steps)
        problem, middle = recipe.problem.sealed(), recipe.steps
        model = fit_transfer_run(TransferRun(piece.recipes, piece.seed), recipe).model
        assert model is not None
        similarities = measure_similarity(
            model,
            problem,
            problem.target,
            problem.auxiliaries,
            count=piece.plan.batches,
            seed=piece.seed,
            step=middle,
        )
        steps = []
        if piece.plan.one_step:
            regularised = problem if L2 in problem.tasks else with_l2(problem, L2)
            by = "loss" if reads_heldout(model, problem, piece.seed) else "score"
            for task in regularised.auxiliaries:
                gains = one_step_gains(
                    model, regularised, task, count=piece.plan.one_step, measure_by=by, seed=piece.seed, step=middle
                )
                steps.append(gains.to_json())
    return {"similarities": [value.to_json() for value in similarities.values()], "one_step": steps}


def _pictures(piece: Piece) -> dict[str, Any]:
    """Show what λ mixes into the training data, and what lies between models trained alone and with auxiliaries."""
    with random_state_kept(), using_threads(1):
        problem = piece.recipes(piece.seed).problem.sealed()
        model = _trained(piece)
        maps, notes = _feature_maps(model, problem, piece)
        states = {f"{problem.target} alone": copy_state(model)}
        for task in problem.auxiliaries[:PARTNERS]:
            states[f"with {task}"] = copy_state(_trained(piece, task))
        mixture = combination_gains(model, problem, states, resolution=RESOLUTION, seed=piece.seed)
        lines: tuple[LossLine, ...] = ()
        if reads_heldout(model, problem, piece.seed):
            lines = _loss_lines(model, problem, states, piece.seed)
        else:
            notes.append("No loss between the models: the target's stream cannot read validation examples.")
    return Pictures(maps, (mixture,), lines, tuple(notes)).to_json()


def _trained(piece: Piece, auxiliary: str = "") -> nn.Module:
    run = TransferRun(piece.recipes, piece.seed, auxiliary, 1.0, steps=piece.plan.steps)
    model = fit_transfer_run(run, piece.recipes(piece.seed)).model
    assert model is not None
    return model


def _loss_lines(model: nn.Module, problem: Problem, states: States, seed: int) -> tuple[LossLine, ...]:
    (alone, start), *others = states.items()
    return tuple(
        loss_line(model, problem, {alone: start, name: state}, points=LINE_POINTS, seed=seed) for name, state in others
    )


def _feature_maps(model: nn.Module, problem: Problem, piece: Piece) -> tuple[tuple[FeatureMap, ...], list[str]]:
    """Return the maps that can be drawn, and a note for every reason why others cannot."""
    maps: list[FeatureMap] = []
    missing: dict[str, list[str]] = {}
    for task in problem.auxiliaries[: piece.plan.pictures]:
        if any({problem.target, task} <= set(stream.tasks) for stream in problem.stream_map.values()):
            missing.setdefault("the examples are the target's own, whatever λ is.", []).append(task)
            continue
        try:
            maps.append(feature_map(model, problem, task, points=MAP_POINTS, seed=piece.seed))
        except Exception as error:  # a user's `predict` may fail in any way on examples that are not the target's
            missing.setdefault(describe_error(error), []).append(task)
    return tuple(maps), [f"No t-SNE picture of {', '.join(tasks)}: {reason}" for reason, tasks in missing.items()]


_KINDS: Mapping[str, Callable[[Piece], dict[str, Any]]] = {
    "single task": _transfer,
    "transfer": _transfer,
    "ForkMerge": _merges,
    "probe": _probe,
    "gradients": _gradients,
    "pictures": _pictures,
}


@dataclass(frozen=True)
class PieceSeconds(Record):
    """What every piece says besides."""

    seconds: float = 0.0


@dataclass(frozen=True)
class ProbeResult(Record):
    """What short runs found."""

    trials: list[ShortRun]


@dataclass(frozen=True)
class GradientsResult(Record):
    """What gradients in the middle of training say."""

    similarities: list[GradientSimilarity]
    one_step: list[OneStepGains]


_FORMS: Mapping[str, type[Record]] = {"probe": ProbeResult, "gradients": GradientsResult, "pictures": Pictures}
"""What the results of a kind are, where they are not those of a run."""


def write_piece(folder: Path, piece: Piece, result: Mapping[str, Any]) -> None:
    """Write down what a piece found."""
    write_versioned(folder / piece.file, FORMAT, {"kind": piece.kind, "about": piece.about, "result": result})


def read_piece(folder: Path, piece: Piece) -> dict[str, Any] | None:
    """Return what a piece found; None if it has not been done, or as part of another plan."""
    path = folder / piece.file
    if not path.is_file():
        return None
    data = read_versioned(path, FORMAT, ["result"], "a piece of a diagnosis", "it")
    for form in (_FORMS.get(piece.kind, TransferRunResult), PieceSeconds):
        form.from_json(data["result"], name=path)
    return dict(data["result"]) if data.get("about", piece.about) == piece.about else None
