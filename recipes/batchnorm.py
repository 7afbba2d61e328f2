"""How much of negative transfer lies in BatchNorm: the runs of a comparison with statistics recomputed on the target.

    python recipes/batchnorm.py recipes/small/pacs.toml runs/results/pacs [--methods stl,ew]

Prints, by target and method, the validation metric as trained → with statistics of the target's training data.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch
from safetensors.torch import load_file

from forkmerge.algorithms.fit import build_model
from forkmerge.engine.merging.batchnorm_policy import recompute_statistics
from forkmerge.engine.training.options import Training
from forkmerge.experiments.recipe import Recipe, load_recipe
from forkmerge.experiments.results_file import read_comparison
from forkmerge.experiments.run_results import RunResult
from forkmerge.problem.scoring import measure

BATCHES = 50


def both(recipe: Recipe, folder: Path, seed: int) -> tuple[float, float]:
    """Return the target's first validation metric of a run, as it is and with statistics recomputed."""
    problem, training = recipe.problem.sealed(), Training(recipe.optimizer)
    model = build_model(recipe.model, seed)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    binding = training.binding(model)
    state = binding.initial()
    before = measure(binding.model, problem.target_validation)
    recompute_statistics(binding, state, problem, training=training, seed=seed, count=BATCHES)
    binding.attach_weights(state)
    after = measure(binding.model, problem.target_validation)
    name = next(iter(before))
    return before[name], after[name]


def table(recipe: str, runs: Path, methods: Sequence[str]) -> list[str]:
    """Return a row per method, with a column per target; means over seeds."""
    plan, outcomes = read_comparison(runs)
    finals = [o for o in outcomes if o.kind == "final" and o.is_complete]
    targets = plan["targets"]
    lines = ["| method | " + " | ".join(targets) + " |", "|---" * (len(targets) + 1) + "|"]
    for method in methods:
        cells = [_cell(recipe, runs, [o for o in finals if (o.method, o.target) == (method, t)]) for t in targets]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return lines


def _cell(recipe: str, runs: Path, found: Sequence[RunResult]) -> str:
    if not found:
        return "–"
    read = load_recipe(recipe, {"target": found[0].target})
    pairs = [both(read, runs / outcome.folder, outcome.seed) for outcome in found]
    return " → ".join(f"{fmean(column):.3f}" for column in zip(*pairs, strict=True))


def main(words: Sequence[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("runs", type=Path)
    parser.add_argument("--methods", default="stl,ew,forkmerge-aux-uniform")
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    print("\n".join(table(given.recipe, given.runs, given.methods.split(","))))


if __name__ == "__main__":
    main(sys.argv[1:])
