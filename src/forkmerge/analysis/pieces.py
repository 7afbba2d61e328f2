"""The pieces of a diagnosis: each is done once, in any process, and written down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkmerge.analysis.advice import probe
from forkmerge.analysis.budget import Key, Plan
from forkmerge.analysis.conflict import measure_similarity, one_step_gains
from forkmerge.analysis.heldout import reads_heldout
from forkmerge.analysis.lessons import EVERY, Lesson, Recipes, fit_lesson, forkmerge, take
from forkmerge.auxiliaries import with_l2
from forkmerge.codec import encode, plain
from forkmerge.disk import read_versioned, write_atomically
from forkmerge.order import random_state_kept
from forkmerge.pool import using_threads
from forkmerge.trial import safe_name
from forkmerge.workers import Tell

FORMAT = 1
L2 = "l2"


@dataclass(frozen=True)
class Piece:
    """One piece of work.

    Args:
        recipes: Where the recipe of a seed comes from.
        plan: The diagnosis it belongs to.
        target: The target.
        kind: "single task", "transfer", "ForkMerge", "probe" or "gradients".
        auxiliary: The auxiliary, where it is about one.
        weight: λ.
        seed: The seed.
    """

    recipes: Recipes
    plan: Plan
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
    def label(self) -> str:
        """What it is, for people."""
        return f"{self.auxiliary} λ={self.weight:g}" if self.auxiliary else self.kind

    @property
    def file(self) -> str:
        """Where it is written, relative to the diagnosis' folder."""
        about = f" {self.auxiliary} {self.weight:g}" if self.auxiliary else ""
        return f"pieces/{safe_name(f'{self.kind}{about} seed {self.seed}')}.json"


def do(piece: Piece, tell: Tell = lambda value: None) -> dict[str, Any]:
    """Do a piece, and return what it found as plain data."""
    return _KINDS[piece.kind](piece)


def _lesson(piece: Piece) -> dict[str, Any]:
    lesson = Lesson(piece.recipes, piece.seed, piece.auxiliary, piece.weight, steps=piece.plan.steps)
    return take(lesson).to_json()


def _merges(piece: Piece) -> dict[str, Any]:
    lesson = Lesson(piece.recipes, piece.seed, EVERY, 1.0, steps=piece.plan.steps, maker=forkmerge, label="ForkMerge")
    return take(lesson).to_json()


def _probe(piece: Piece) -> dict[str, Any]:
    trials = probe(piece.recipes(piece.seed), piece.plan.probe, piece.seed)
    return {"trials": [trial.to_json() for trial in trials]}


def _gradients(piece: Piece) -> dict[str, Any]:
    """Compare gradients in the middle of the target's own training, as the paper does."""
    middle = max(piece.plan.steps // 2, 1)
    with random_state_kept(), using_threads(1):
        recipe = piece.recipes(piece.seed)
        problem = recipe.problem.sealed()
        model = fit_lesson(Lesson(piece.recipes, piece.seed, steps=middle), recipe).model
        assert model is not None
        found = measure_similarity(
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
    return {"similarities": [value.to_json() for value in found.values()], "one_step": steps}


_KINDS: Mapping[str, Callable[[Piece], dict[str, Any]]] = {
    "single task": _lesson,
    "transfer": _lesson,
    "ForkMerge": _merges,
    "probe": _probe,
    "gradients": _gradients,
}


def write_piece(folder: Path, piece: Piece, result: Mapping[str, Any]) -> None:
    """Write down what a piece found."""
    path = folder / piece.file
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, encode({"format": FORMAT, "kind": piece.kind, "result": plain(result)}, 2))


def read_piece(folder: Path, piece: Piece) -> dict[str, Any] | None:
    """Return what a piece found; None if it has not been done."""
    path = folder / piece.file
    if not path.is_file():
        return None
    return dict(read_versioned(path, FORMAT, ["result"], "a piece of a diagnosis", "it")["result"])
