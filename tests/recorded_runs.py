"""Runs of every algorithm whose bits were written down: a later version ends with the same ones, or says why not.

`python tests/recorded_runs.py` writes them anew, for a change that is meant to change bits; `… --new` adds those of new
cases alone, on the machine, or with its instructions (see `test_recorded_runs.py`), that the others were written on.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

import forkmerge as fm
from _asserts import bits, facts
from forkmerge.algorithms.events import Event, StepProgress
from forkmerge.experiments.compared_methods import compared_method_from
from forkmerge.methods import METHODS
from problems import ADAM, TASKS, Stopped, domains_problem, fit, noisy_net, plain_net, shared_problem

FILE = Path(__file__).parent / "recorded" / "runs.json"
FOLDERS = FILE.parent / "folders"
"""Runs interrupted in the middle, one folder each."""

_BRANCHES = {"alone": {"tgt": 1.0}, "aux": {"tgt": 1.0, "aux": 0.5}, "all": {"tgt": 1.0, "aux": 0.5, "odd": 0.25}}


def forkmerge_cases() -> dict[str, Callable[..., Any]]:
    """ForkMerge with every policy that changes bits."""
    policies: dict[str, dict[str, Any]] = {
        "two branches": {},
        "per auxiliary": {"mixtures": "per_auxiliary"},
        "named branches": {"mixtures": _BRANCHES},
        "groups": {"mixtures": fm.Groups({"near": ["aux"], "far": ["odd"]})},
        "nested top k": {"mixtures": fm.NestedTopK(sizes=(1, 2), probe_steps=3)},
        "grid over three": {"mixtures": "per_auxiliary", "search": fm.Grid(2)},
        "binary": {"search": fm.Binary()},
        "fixed": {"search": fm.Fixed()},
        "sub-sample": {"mixtures": "per_auxiliary", "search_examples": 10},
        "best in interval": {"checkpoint": "best_in_interval", "validate_every": 2},
        "best so far": {"checkpoint": "best_so_far", "select": "best", "validate_every": 2},
        "statistics anew": {"mixtures": "per_auxiliary", "bn": "recompute", "bn_batches": 3},
        "averaged optimizer": {"optimizer_state": "average"},
        "reset optimizer": {"optimizer_state": "reset"},
        "pruned": {"mixtures": "per_auxiliary", "prune_to": 2},
        "scaled": {"auxiliary_scale": 2.0},
        "refit": {"mixtures": "per_auxiliary", "refit": True, "prune_to": 2},
        "refit of the best": {"refit": True, "select": "best"},
        "refit of chosen steps": {"refit": True, "checkpoint": "best_in_interval", "validate_every": 2},
        "fixed, refit": {"mixtures": "per_auxiliary", "search": fm.Fixed((0.5, 0.0, 0.5)), "refit": True},
        "rates": {"mixtures": fm.Rates("per_auxiliary", (1, 0.5))},
        "tail": {"mixtures": "per_auxiliary", "tail": 0.5, "refit": True},
        "tail without a fall": {"tail": 0.5, "tail_anneal": "none", "floor": True},
        "nothing named": {"mixtures": None, "interval": 3, "refit": True},
        "win-stay": {"mixtures": fm.PerAuxiliary(joint=True), "interval": 3, "per_round": 1, "turns": "win_stay"},
        "a sample searched": {"mixtures": "per_auxiliary", "validation_examples": 10, "floor": True, "refit": True},
        "in turns": {"mixtures": _BRANCHES, "interval": 3, "per_round": 1, "refit": True},
        "previous merges": {"mixtures": "per_auxiliary", "interval": 3, "previous_merges": 2, "refit": True},
        "means of iterates": {"mixtures": "per_auxiliary", "interval": 6, "average_iterates": 3, "refit": True},
        "layer groups": {"mixtures": "per_auxiliary", "layer_groups": {"lower": "body.0"}, "refit": True},
        "floor": {"floor": True},
        "floor and refit": {"floor": True, "refit": True},
        "paper": {"bn": "average", "checkpoint": "last", "optimizer_state": "keep", "select": "last"},
    }
    cases: dict[str, Callable[..., Any]] = {
        name: partial(fit, fm.ForkMerge(**{"mixtures": "mixed", "interval": 4, **options}), net=noisy_net)
        for name, options in policies.items()
    }
    presets = {"paper": fm.ForkMerge.paper, "authors' scripts": fm.ForkMerge.authors_scripts}
    for name, preset in presets.items():
        cases[f"preset {name}"] = partial(fit, preset(interval=4), net=noisy_net)
        several = preset(mixtures="per_auxiliary", interval=3, prune_to=2, prune_after=2)
        # The paper's pruning leaves two auxiliaries here, and not the target alone.
        cases[f"preset {name}, pruned"] = partial(fit, several, net=noisy_net, seed=2)
    races = shared_problem(metrics=fm.nll), shared_problem(metrics={"accuracy": fm.accuracy, "nll": fm.nll})
    accuracy = shared_problem(metrics=fm.accuracy)
    return {
        **cases,
        "raced by nll": partial(fit, fm.ForkMerge("per_auxiliary", interval=4), races[0], noisy_net),
        "raced by accuracy": partial(
            fit, fm.ForkMerge("per_auxiliary", interval=4, confidence=0.8), accuracy, noisy_net
        ),
        "several metrics": partial(fit, fm.ForkMerge("per_auxiliary", interval=4), races[1], noisy_net),
        "domains": partial(fit, fm.ForkMerge("per_auxiliary", interval=4), domains_problem(), optimizer=ADAM),
        "streams in turn": partial(
            fit, fm.ForkMerge(fm.PerAuxiliary(joint="sampled"), interval=4), domains_problem(), optimizer=ADAM
        ),
        "sampling": partial(fit, fm.ForkMerge("mixed", interval=4), domains_problem(weights="sampling")),
        "two processes": partial(fit, fm.ForkMerge("per_auxiliary", interval=4, refit=True), workers=2),
        "accumulated": partial(fit, fm.ForkMerge("mixed", interval=5), accumulate=2, clip_norm=0.5, paired=False),
        "scheduled": partial(fit, scheduler=fm.SchedulerOf("CosineAnnealingLR", T_max="100%"), statistics="target"),
        "forkmerge+PCGrad": partial(fit, fm.ForkMerge("per_auxiliary", interval=4, method="PCGrad"), optimizer=ADAM),
    }


def other_cases() -> dict[str, Callable[..., Any]]:
    """The algorithms that ForkMerge is compared with."""
    return {
        **{
            f"joint {name}": partial(fit, fm.Joint(method=name), optimizer=ADAM)
            for name in (*METHODS, "torchjd:UPGrad")
        },
        "joint": partial(fit, fm.Joint({"tgt": 1.0, "aux": 0.3}, select="best", refit=True), net=noisy_net),
        "single task": partial(fit, fm.SingleTask()),
        "single task, refit": partial(fit, fm.SingleTask(refit=True)),
        "post-train": partial(fit, fm.PostTrain()),
        "weight grid": partial(fit, fm.WeightGrid(values=(0.5, 1.0), refit=True)),
    }


def compared(word: str, folder: Path) -> Any:
    """A whole run by its word in comparisons."""
    recipe = fm.load_recipe("compare_problem:recipe", {"arguments": {"seed": 1}})
    return compared_method_from(word).prepare(recipe, refit=False).fit(folder=folder, threads=1)


WORDS = (
    *("stl-best:2", "posttrain-best:2", "stl-average:2", "forkmerge-aux-uniform", "grid[values=[0.5,1.0]]"),
    *("posttrain-average:2", "joint-then-alone-average:2", "forkmerge-once", "forkmerge-aux-once"),
)


def all_cases() -> dict[str, Callable[..., Any]]:
    """Every case, each a function of the folder it may use."""
    named = {**forkmerge_cases(), **other_cases()}
    return {
        **{name: (lambda folder, case=case: case()) for name, case in named.items()},
        **{word: partial(compared, word) for word in WORDS},
    }


def checksum(run: Any) -> str:
    """Return the sha256 of a run's model and of all that is recorded of it, times and machine apart."""
    digest = hashlib.sha256(json.dumps(_without_later(facts(run)), sort_keys=True, allow_nan=False).encode())
    for name, tensor in bits(run).items():
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


_LATER = (
    "search_score",
    "averaged",
    "groups",
)  # what records say since sums were written down, and do not say of these runs


def _without_later(data: Any) -> Any:
    if isinstance(data, list):
        return [_without_later(item) for item in data]
    if not isinstance(data, dict):
        return data
    return {key: _without_later(item) for key, item in data.items() if key not in _LATER or item is not None}


def machine() -> dict[str, str]:
    """Return what bits depend on besides the code."""
    return {"torch": str(torch.__version__), "cpu": torch.backends.cpu.get_cpu_capability()}


INTERRUPTED: Mapping[str, tuple[Any, dict[str, Any], int]] = {
    # name: the algorithm, options of `fit`, and the segment event at which the run is interrupted
    "forkmerge": (
        fm.ForkMerge("per_auxiliary", interval=4, refit=True, floor=True, method="PCGrad", search=fm.Greedy()),
        {"checkpoint_every": 2, "optimizer": ADAM, "net": noisy_net},
        14,
    ),
    "joint": (fm.Joint(method="UW", select="best"), {"checkpoint_every": 2}, 4),
    "post-train": (fm.PostTrain(), {"net": plain_net}, 4),
    "weight-grid": (fm.WeightGrid(values=(0.5, 1.0)), {}, 9),
}


def interrupt(name: str, folder: Path) -> None:
    """Begin a run and stop it in the middle."""
    algorithm, options, at = INTERRUPTED[name]
    seen = 0

    def observe(event: Event) -> None:
        nonlocal seen
        seen += isinstance(event, StepProgress)
        if seen == at:
            raise Stopped

    try:
        fit(algorithm, folder=folder, on_event=observe, **options)
    except Stopped:
        return
    raise AssertionError(f"{name} ended before it was interrupted")


def record(*, only_new: bool = False) -> None:
    """Write all checksums and interrupted folders, or only checksums that are not there yet."""
    import tempfile

    torch.set_num_threads(1)
    sums: dict[str, str] = {}
    if only_new:
        written = json.loads(FILE.read_text("utf-8"))
        if written["machine"] != machine():
            raise SystemExit(f"the others were recorded with {written['machine']}, this is {machine()}")
        sums = written["sha256"]
    with tempfile.TemporaryDirectory() as folder:
        for index, (name, case) in enumerate(all_cases().items()):
            if name in sums:
                continue
            run = case(Path(folder) / str(index))
            sums[name] = checksum(run)
            print(name, sums[name][:12], flush=True)
    sums = {name: sums[name] for name in all_cases()}
    if not only_new:
        shutil.rmtree(FOLDERS, ignore_errors=True)
        for name in INTERRUPTED:
            interrupt(name, FOLDERS / name)
    FILE.write_text(json.dumps({"machine": machine(), "tasks": TASKS, "sha256": sums}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(record(only_new="--new" in sys.argv))
