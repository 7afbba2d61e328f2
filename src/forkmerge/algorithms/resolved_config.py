"""What a run's folder says it was started with: the resolved config, which a resume must find unchanged."""

from __future__ import annotations

import hashlib
import math
import os
import platform
import shlex
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import nn

from forkmerge.engine.executors.resources import is_out_of_memory
from forkmerge.engine.storage.atomic_files import is_full, is_unused
from forkmerge.engine.storage.records import Record
from forkmerge.engine.storage.run_folder import NoStore, RunFolder
from forkmerge.engine.storage.user_folders import is_signed, sign
from forkmerge.engine.training.options import Training
from forkmerge.errors import ResourceError, StoreError, add_fact, command
from forkmerge.moved_paths import current_paths
from forkmerge.problem.definition import Problem
from forkmerge.problem.searched_evaluation import of_every_example

if TYPE_CHECKING:
    from forkmerge.algorithms.fit import Algorithm


def fixed_hash(model: nn.Module) -> str:
    """Return a checksum of what training does not write to checkpoints: frozen parameters and first buffers."""
    digest = hashlib.sha256()
    frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    for name, tensor in (*frozen, *model.named_buffers()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def environment(threads: int, device: torch.device) -> dict[str, Any]:
    """Return the facts that a run's bits depend on."""
    from forkmerge._version import __version__

    return {
        "forkmerge": __version__,
        "torch": str(torch.__version__),  # a subclass of str, which the store refuses
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": threads,
    }


def run_config(
    algorithm: Algorithm,
    problem: Problem,
    module: nn.Module,
    training: Training,
    source: Mapping[str, Any] | None,
    **numbers: int,
) -> dict[str, Any]:
    """Return the resolved config of a run: what a resume must find unchanged, and where the run came from."""
    return {
        "algorithm": {"name": type(algorithm).__name__, **_described(algorithm)},
        "problem": _describe_problem(problem),
        "training": {**numbers, **_described(training)},
        "model": {"kind": _describe(type(module)), "fixed": fixed_hash(module), **_layout(module)},
        "source": dict(source or {}),
    }


@dataclass(frozen=True)
class SavedAlgorithm(Record):
    """Which algorithm it was."""

    name: str


@dataclass(frozen=True)
class SavedProblem(Record):
    """What was learned."""

    target: str
    validation: dict[str, Any]


@dataclass(frozen=True)
class SavedTraining(Record):
    """How it was trained."""

    steps: int
    seed: int
    threads: int
    channels_last: bool | None = None


@dataclass(frozen=True)
class SavedModel(Record):
    """What was trained."""

    kind: str


@dataclass(frozen=True)
class SavedSource(Record):
    """Where the recipe came from; a run started from Python has none."""

    settings: dict[str, Any] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    command: str | None = None
    workers: int | None = None
    code: str | None = None
    pretrained: str | None = None


@dataclass(frozen=True)
class SavedConfig(Record):
    """What every config says, besides much that is only compared."""

    algorithm: SavedAlgorithm
    problem: SavedProblem
    training: SavedTraining
    model: SavedModel
    source: SavedSource = field(default_factory=SavedSource)
    environment: dict[str, Any] = field(default_factory=dict)
    started_by: str | None = None


def open_run(folder: str | os.PathLike[str], *, lock: bool = False) -> RunFolder:
    """Open the folder of a run whose config says what it must; by default to look at it."""
    store = RunFolder.open(folder, lock=lock)
    try:
        SavedConfig.from_json(store.config, name=store.path / "config.json")
    except BaseException:
        store.close()
        raise
    return store


def started_config(folder: str | os.PathLike[str] | None, resume: bool) -> dict[str, Any]:
    """Return what the run in a folder was started with; nothing of a new one.

    What is resolved once, such as threads and memory format, a resumed run goes on with, whatever the machine is now.
    """
    if folder is None or not resume or is_unused(Path(folder)):
        return {"algorithm": {}, "training": {}}
    return open_run(folder).config


# What runs did that were begun before there was a choice: of training, and of algorithms and methods by name.
_FORMER = {"statistics": "all", "lr_of": None}
_FORMER_OPTIONS: dict[str, dict[str, Any]] = {
    "Averaged": {"bn": "average", "bn_batches": 50},
    "ForkMerge": {
        "prune_keeps": "target",
        "search_by": None,
        "tail": None,
        "tail_anneal": "linear",
        "rule": "argmax",
        "per_round": None,
        "previous_merges": None,
        "average_iterates": None,
        "layer_groups": None,
        "turns": "rotation",
        "validation_examples": None,
    },
    "GradNorm": {"softmax": False, "weighted_heads": True, "gradients": None},
    "MGDA": {"gradients": None},
    "Mixture": {"lr_scale": 1.0, "auxiliary_streams": "all"},
    "NashMTL": {"weighted_heads": False},
    "OL_AUX": {"applied": "before", "weighted_heads": True},
    "PerAuxiliary": {"joint": False},
    "UW": {"initial": 0.0},
}


@contextmanager
def advised(folder: str | os.PathLike[str] | None, source: Mapping[str, Any]) -> Iterator[None]:
    """Say how to go on where a disk has become full inside, or the machine has run out of something else."""
    try:
        yield
    except (StoreError, ResourceError) as error:
        if folder is None or not (isinstance(error, ResourceError) or is_full(error)):
            raise
        before = "" if isinstance(error, ResourceError) else "free some space, then "
        raise type(error)(f"{error} What was written is whole: {before}{resume_with(folder, source)}.") from error
    except Exception as error:
        if folder is not None and is_out_of_memory(error):
            add_fact(error, f"what was written is whole: {resume_with(folder, source)}")
        raise


def resume_with(folder: str | os.PathLike[str], source: Mapping[str, Any]) -> str:
    """Return what continues a run, which was started from a recipe or from Python."""
    if source:
        return f"continue with: {command(f'resume {shlex.quote(str(folder))}')}"
    return f"continue with fit(…, folder={str(folder)!r}, resume=True)"


def code_of(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a source says which code a resume would run."""
    return {key: source.get(key) for key in ("settings", "folders")}


def is_own_run(config: Mapping[str, Any]) -> bool:
    """Whether this user has started the run of a config, wherever its folder is now."""
    return is_signed(code_of(config["source"]), config.get("started_by"))


def open_store(
    folder: str | os.PathLike[str] | None, resume: bool, config: dict[str, Any], facts: dict[str, Any], depth: int = 3
) -> tuple[RunFolder | NoStore, list[str]]:
    """Open or make the run's folder; `depth` calls up is where a warning points."""
    if folder is None:
        if resume:
            raise StoreError("resume=True needs the folder of the run: pass folder=….")
        return NoStore(), []
    if not resume or is_unused(Path(folder)):
        mark = sign(code_of(config["source"])) if config["source"] else None
        return RunFolder.create(folder, {**config, "environment": facts, "started_by": mark}), []
    store = open_run(folder, lock=True)
    for key, value in config.items():
        stored: Any = store.config.get(key)
        if key == "training":  # a run's bits do not depend on who reads the examples
            stored = {**_FORMER, **(stored or {}), "loader_workers": value["loader_workers"]}
        if key == "problem":  # older runs do not say how many examples they evaluated at a time
            stored = {**stored, "validation": {"batch_size": value["validation"]["batch_size"], **stored["validation"]}}
        if key in ("algorithm", "training"):
            stored, value = _with_former_options(stored), _with_former_options(value)
        stored = _with_current_paths(stored, value)
        if key != "source" and stored != value:
            store.close()
            raise StoreError(
                f"{os.fspath(folder)} was started differently: {_difference(key, stored, value)}. Resume it with the "
                "same problem, model and options, or choose another folder."
            )
    before = store.config.get("environment", {})
    changed = [f"{key} {before.get(key)} → {facts[key]}" for key in facts if before.get(key) != facts[key]]
    notes = [f"resumed in another environment, the bits may differ: {', '.join(changed)}"] if changed else []
    for note in notes:
        warnings.warn(note, stacklevel=depth)
    return store, notes


def _with_former_options(stored: Any) -> Any:
    """Return the described options of an algorithm with those that did not exist yet as they were in effect."""
    if isinstance(stored, list):
        return [_with_former_options(item) for item in stored]
    if not isinstance(stored, dict):
        return stored
    if stored.get("name") == "AveragedSingleTask":  # which one class for all algorithms has replaced
        trained = {key: item for key, item in stored.items() if key not in ("name", "runs")}
        stored = {"name": "Averaged", "algorithm": {"kind": "SingleTask", **trained}, "runs": stored["runs"]}
    former = _FORMER_OPTIONS.get(str(stored.get("kind", stored.get("name"))), {})
    options = {key: _with_former_options(item) for key, item in stored.items()}
    unnamed = former is _FORMER_OPTIONS["ForkMerge"] and options.get("mixtures", "") is None
    if unnamed and "validation_examples" not in options and options.get("turns") == "rotation":
        options["turns"] = None  # what it was where nobody had named it, before there was another one
    if unnamed and options.get("auxiliary_scale") == 1:
        options["auxiliary_scale"] = None  # which says the same of one that nobody, or somebody, had named
    return options | {key: value for key, value in former.items() if key not in options}


def _with_current_paths(stored: Any, value: Any) -> Any:
    """Return a stored value with `module:qualname` of modules that have moved since as they are called in `value`."""
    if isinstance(stored, dict) and isinstance(value, dict):
        return {key: _with_current_paths(item, value.get(key)) for key, item in stored.items()}
    if isinstance(stored, list) and isinstance(value, list) and len(stored) == len(value):
        return [_with_current_paths(*pair) for pair in zip(stored, value, strict=True)]
    return value if isinstance(stored, str) and value in current_paths(stored) else stored


def _difference(path: str, old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in (*old, *new):
            if old.get(key) != new.get(key):
                return _difference(f"{path}.{key}", old.get(key), new.get(key))
    return f"{path} was {old!r} and is {new!r} now"


def _layout(model: nn.Module) -> dict[str, Any]:
    trainable = [p for p in model.parameters() if p.requires_grad]
    shapes = repr([(name, tuple(p.shape)) for name, p in model.named_parameters()])
    return {
        "parameters": sum(p.numel() for p in trainable),
        "shapes": hashlib.sha256(shapes.encode()).hexdigest()[:16],
    }


def _describe_problem(problem: Problem) -> dict[str, Any]:
    streams = {
        name: {"tasks": list(s.tasks), "examples": s.size, "batch_size": s.batch_size}
        for name, s in problem.stream_map.items()
    }
    evaluation = of_every_example(problem.target_validation)
    return {
        "target": problem.target,
        "weights": problem.weights,
        "streams": streams,
        "validation": {
            "examples": evaluation.size,
            "metrics": list(evaluation.metrics),
            "batch_size": evaluation.batch_size,
        },
    }


def _described(value: Any) -> dict[str, Any]:
    return {item.name: _describe(getattr(value, item.name)) for item in fields(value)}


def _describe(value: Any) -> Any:
    """Return a JSON form of an option that is the same in every process: functions by name, objects by fields."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {str(key): _describe(item) for key, item in value.items()}
    if isinstance(value, list | tuple | range):
        return [_describe(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {"kind": type(value).__name__, **_described(value)}
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}:{value.__qualname__}"
    if hasattr(value, "func"):
        return [_describe(value.func), _describe(value.args), _describe(value.keywords)]
    text = repr(value)
    return text if " at 0x" not in text else f"{type(value).__module__}:{type(value).__qualname__}"
