"""Pre-training as a step of a recipe: done once, kept in the user's cache folder, found again by its content.

CACHE/pretrained/KEY/      the folder of a finished run: its model, verified by checksum whenever it is read
CACHE/pretrained/KEY.lock  held while it is made or read
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from forkmerge._version import __version__
from forkmerge.algorithms import SingleTask
from forkmerge.algorithms.composed import is_started
from forkmerge.algorithms.events.run_events import (
    Event,
    Notice,
    OnEvent,
    PhaseStarted,
    PretrainingProgress,
    RunResumed,
    StepProgress,
)
from forkmerge.algorithms.events.send import ignore
from forkmerge.algorithms.fit import ModelOrFactory, build_model
from forkmerge.engine.executors.parallel_calls import using_threads
from forkmerge.engine.storage import atomic_files
from forkmerge.engine.storage.json_codec import encode, plain
from forkmerge.engine.storage.lock import try_lock
from forkmerge.engine.storage.run_folder import RunFolder
from forkmerge.engine.storage.user_folders import cache_folder, check_private, make_private
from forkmerge.errors import ConfigError, StoreError, check_keys, unknown_name
from forkmerge.experiments.recipe import Recipe, seeded_recipe
from forkmerge.problem.batches import read_examples
from forkmerge.problem.definition import Context, Problem
from forkmerge.problem.prefetch import move
from forkmerge.problem.randomness import derive, random_state_kept, set_random_state
from forkmerge.problem.scoring import device_of

KEYS = ("recipe", "arguments", "target", "steps", "seed", "optimizer", "scheduler", "training", "part")

_FORMAT = 1  # part of every key
_EXAMPLES = 64  # training examples that a key is made from, spread over the data


@dataclass(frozen=True)
class Pretraining:
    """What a [pretrain] table asks for: single-task training, of which a part of the model is taken over.

    Args:
        source: The settings of the recipe to pre-train on, and the folders of its modules.
        part: The submodule whose weights are taken over, e.g. "encoder"; "" for the whole model.
    """

    source: Mapping[str, Any]
    part: str = "encoder"

    def recipe(self) -> Recipe:
        """Return the recipe of the pre-training; one thread unless it says otherwise, since bits depend on it."""
        seed = self.source["settings"].get("seed", 0)
        recipe = seeded_recipe(self.source, seed)
        options = {"seed": seed, "threads": 1, "checkpoint_every": max(recipe.steps // 10, 1), **recipe.options}
        return replace(recipe, algorithm=SingleTask(), options=options)

    @property
    def name(self) -> str:
        """What is pre-trained on."""
        return str(self.source["settings"]["recipe"])


@dataclass(frozen=True)
class Pretrained:
    """A model factory that loads pre-trained weights into a part of what another one makes; it pickles.

    Args:
        model: The module, or a function that makes it.
        pretraining: Where the weights come from.
        key: Under which they are kept, once that is known; otherwise they are looked for, and made if need be.
    """

    model: ModelOrFactory
    pretraining: Pretraining
    key: str | None = None

    def __call__(self) -> nn.Module:
        """Return a model with the weights loaded."""
        model = first_model(self.model)
        with random_state_kept():
            _, weights = find_weights(self.pretraining, self.key)
        load_part(model, weights, self.pretraining.part)
        return model


def pretraining_from(table: Any, folders: list[str]) -> Pretraining:
    """Return what a [pretrain] table asks for."""
    check_keys("[pretrain]", table, KEYS)
    if "recipe" not in table:
        raise ConfigError("[pretrain] needs recipe = 'module:function', which returns a forkmerge.Recipe.")
    settings = {key: value for key, value in table.items() if key != "part"}
    part = table.get("part", "encoder")
    if not isinstance(part, str):
        raise ConfigError(f"[pretrain] part must be the name of a submodule, got {part!r}.")
    return Pretraining({"settings": settings, "folders": folders}, part)


def first_model(model: ModelOrFactory) -> nn.Module:
    """Return the model as it is before any pre-training."""
    if isinstance(model, Pretrained):
        return first_model(model.model)
    return copy.deepcopy(model) if isinstance(model, nn.Module) else model()


def pretrained(recipe: Recipe, on_event: OnEvent = ignore) -> Recipe:
    """Return the recipe with its pre-training done, now or earlier, so that no run has to look for it.

    Args:
        recipe: Any recipe; one without a [pretrain] table is returned as it is.
        on_event: Gets the events of `forkmerge.experiments.events`.
    """
    factory = recipe.model
    if not isinstance(factory, Pretrained):
        return recipe
    model = build_model(lambda: first_model(factory), recipe.options.get("seed", 0))
    load = partial(load_part, model, part=factory.pretraining.part)
    key, weights = find_weights(factory.pretraining, factory.key, on_event, load)
    load(weights)
    return replace(recipe, model=replace(factory, key=key), source={**recipe.source, "pretrained": key})


def find_weights(
    pretraining: Pretraining,
    key: str | None = None,
    on_event: OnEvent = ignore,
    load: Callable[[Mapping[str, Tensor]], None] = lambda weights: None,
) -> tuple[str, dict[str, Tensor]]:
    """Return the key and the weights of a pre-training; they are made where they are missing or damaged.

    Two processes that want the same weights at once make them once: the second waits.

    Args:
        pretraining: What to train.
        key: Of weights that were found before; without it the key is made from the recipe and its data.
        on_event: Gets the events of `forkmerge.experiments.events`.
        load: Tried with the first weights before anything is trained, to refuse a model that they do not fit.
    """
    if key is not None:
        with _locked(key, pretraining, on_event):
            weights = _read(key, on_event)
        if weights is not None:
            return key, weights
    recipe = pretraining.recipe()
    with using_threads(recipe.options["threads"]):
        key = content_key(recipe)
    with _locked(key, pretraining, on_event):
        weights = _read(key, on_event)
        if weights is None:
            load(build_model(recipe.model, recipe.options["seed"]).state_dict())
            weights = _train(recipe, key, pretraining, on_event)
        return key, weights


def load_part(model: nn.Module, weights: Mapping[str, Tensor], part: str) -> None:
    """Load the weights of a part of one model into the same part of another; all must fit."""
    prefix = f"{part}." if part else ""
    part_weights = {name[len(prefix) :]: tensor for name, tensor in weights.items() if name.startswith(prefix)}
    try:
        module = model.get_submodule(part)
    except AttributeError:
        children = [name for name, _ in model.named_children()]
        raise ConfigError("[pretrain] " + unknown_name("part of the model", part, children)) from None
    if not part_weights:
        names = dict.fromkeys(name.split(".", 1)[0] for name in weights)
        raise ConfigError("[pretrain] " + unknown_name("part of the pre-trained model", part, names))
    wanted = module.state_dict()
    faults = [f"{prefix}{name} is missing" for name in wanted if name not in part_weights]
    faults += [f"{prefix}{name} is not expected" for name in part_weights if name not in wanted]
    for name, tensor in part_weights.items():
        if name in wanted and wanted[name].shape != tensor.shape:
            faults.append(f"{prefix}{name} is {tuple(tensor.shape)} and not {tuple(wanted[name].shape)}")
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise ConfigError(
            f"[pretrain] the pre-trained weights do not fit the model: {'; '.join(faults[:3])}{more}. Give both "
            "recipes the same network there, or name another part."
        )
    module.load_state_dict(part_weights)


def content_key(recipe: Recipe) -> str:
    """Return a checksum of everything that pre-trained weights depend on.

    Settings, the code of the recipe's file, versions, the first weights, training examples spread over the data, and
    the loss on them to three digits, which also notices other code of the network or the augmentations. To read all
    data would be surer, and cost as much as training.
    """
    seed, problem = recipe.options["seed"], recipe.problem
    with random_state_kept():
        model = build_model(recipe.model, seed)
        facts = {
            "format": _FORMAT,
            "settings": recipe.source["settings"],
            "code": recipe.source["code"],
            "versions": [__version__, str(torch.__version__)],
            "weights": _digest(model.state_dict()),
            "streams": {name: _look_at(problem, name, model, seed) for name in _own_streams(problem)},
        }
    return hashlib.sha256(encode(plain(facts))).hexdigest()[:32]


def _own_streams(problem: Problem) -> list[str]:
    return [name for name, stream in problem.stream_map.items() if problem.target in stream.tasks]


def _look_at(problem: Problem, name: str, model: nn.Module, seed: int) -> list[Any]:
    stream = problem.stream_map[name]
    count = stream.size
    indices = torch.linspace(0, count - 1, min(count, _EXAMPLES), dtype=torch.float64).long().tolist()
    batch = read_examples(stream, indices, seed)
    digest = _digest(batch)
    set_random_state(derive(seed, name, "look"))
    with torch.no_grad():
        loss = stream.losses(model.train(), move(batch, device_of(model)), [problem.target], Context(0, seed))
    value = loss.get(problem.target)
    return [count, stream.batch_size, digest, "" if value is None else f"{float(value):.3g}"]


def _digest(value: Any) -> str:
    """Return a checksum of tensors, arrays and numbers in any nesting; other objects count by their type."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous()
        content = value.reshape(-1).view(torch.uint8).numpy().tobytes()
        return hashlib.sha256(f"{value.dtype}{tuple(value.shape)}".encode() + content).hexdigest()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return hashlib.sha256(f"{value.dtype}{value.shape}".encode() + value.tobytes()).hexdigest()
    if isinstance(value, Mapping):
        return _digest([[str(name), _digest(item)] for name, item in value.items()])
    if isinstance(value, list | tuple):
        return hashlib.sha256("\n".join(map(_digest, value)).encode()).hexdigest()
    return repr(value) if isinstance(value, bool | int | float | str | None) else type(value).__qualname__


def _folder(key: str) -> Path:
    return cache_folder("pretrained") / key


def is_done(key: str) -> bool:
    """Whether the weights of a key are kept."""
    return (_folder(key) / "result.json").exists()


@contextmanager
def _locked(key: str, pretraining: Pretraining, on_event: OnEvent) -> Iterator[None]:
    """Hold the lock of a key, waiting for it as long as another process does."""
    path = _folder(key).with_suffix(".lock")
    with atomic_files.explained(f"make the folder {path.parent}"):
        make_private(path.parent)
        file = path.open("ab")
    with file:
        if not try_lock(file, "LOCK_EX"):
            on_event(Notice(text=f"another process is pre-training on {pretraining.name}: waiting for it"))
            while not try_lock(file, "LOCK_EX"):
                time.sleep(0.1)
        yield


def _read(key: str, on_event: OnEvent) -> dict[str, Tensor] | None:
    """Return the kept weights, or None where there are none yet; damaged ones are thrown away."""
    folder = _folder(key)
    if not is_done(key):
        return None
    try:
        check_private(folder)
        return RunFolder.open(folder, lock=False).model_tensors()
    except StoreError as error:
        on_event(Notice(text=f"the pre-training is done again: {error}", is_warning=True))
        atomic_files.discard(folder)
        return None


def _train(recipe: Recipe, key: str, pretraining: Pretraining, on_event: OnEvent) -> dict[str, Tensor]:
    folder = _folder(key)

    def tell(event: Event) -> None:
        if isinstance(event, PhaseStarted | RunResumed | StepProgress) and isinstance(recipe.steps, int):
            begins, name = not isinstance(event, StepProgress), pretraining.name
            on_event(PretrainingProgress(name=name, step=event.step, steps=recipe.steps, begins=begins))

    for again in (False, True):
        try:
            run = recipe.fit(folder=folder, resume=is_started(folder), on_event=tell, progress=False, workers=1)
            break
        except StoreError as error:  # what an earlier attempt left cannot be continued
            if again or not folder.exists():
                raise
            on_event(Notice(text=f"the pre-training is begun anew: {error}", is_warning=True))
            atomic_files.discard(folder)
    atomic_files.remove(folder / "checkpoints")
    assert run.model is not None
    return dict(run.model.state_dict())
