"""From a TOML file or `module:function` to everything a run needs."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from forkmerge.algorithms import Algorithm, ForkMerge, Joint, JointThenAlone, PostTrain, SingleTask, WeightGrid
from forkmerge.algorithms.fit import ModelOrFactory
from forkmerge.algorithms.run_record import Run
from forkmerge.engine.executors.executor_options import ExecutorOptions
from forkmerge.engine.merging.searches import Search, fitting
from forkmerge.engine.storage.json_codec import encode, plain
from forkmerge.engine.training.model_binding import OptimizerFactory
from forkmerge.engine.training.optimizers import OptimizerOf, SchedulerOf
from forkmerge.engine.training.options import Training
from forkmerge.errors import ConfigError, check_keys, unknown_name
from forkmerge.experiments.compare_options import KEYS as COMPARE_KEYS
from forkmerge.experiments.execution import execution_from
from forkmerge.problem.definition import Problem
from forkmerge.problem.held_out import hold_out_validation
from forkmerge.problem.randomness import derive, random_state_kept, set_random_state

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_KINDS: tuple[type[Algorithm], ...] = (ForkMerge, Joint, SingleTask, PostTrain, JointThenAlone, WeightGrid)
ALGORITHMS: dict[str, type[Algorithm]] = {cls.__name__: cls for cls in _KINDS}
_KEYS = (
    *("recipe", "arguments", "target", "steps", "seed", "optimizer", "scheduler", "training", "algorithm"),
    *("pretrain", "development", "hold_out"),
)
_OWN_TABLES = ("optimizer", "scheduler", "method")  # options of training that stand elsewhere in a recipe
_TRAINING = (
    *(item.name for item in fields(Training) if item.name not in _OWN_TABLES),
    *("threads", "devices", "checkpoint_every"),
)


@dataclass(frozen=True)
class Recipe:
    """A problem and how to train on it.

    Args:
        problem: What to learn.
        model: The module, or a function that makes it.
        optimizer: Makes the optimizer from the model.
        steps: Training steps.
        algorithm: How to train; `ForkMerge()` unless said otherwise.
        options: Further arguments of `fit`, such as `scheduler` or `clip_norm`.
        source: Where the recipe came from, for `forkmerge resume` and worker processes.
        executor: Where it is carried out; None for this machine.
    """

    problem: Problem
    model: ModelOrFactory
    optimizer: OptimizerFactory
    steps: int
    algorithm: Algorithm = field(default_factory=ForkMerge)
    options: Mapping[str, Any] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)
    executor: ExecutorOptions | None = None

    @property
    def shared_options(self) -> dict[str, Any]:
        """The options of the algorithm that every other one has, too: steps between validations, the model returned."""
        return {name: getattr(self.algorithm, name) for name in ("interval", "select") if hasattr(self.algorithm, name)}

    def forkmerge(self, mixtures: Any, branches: int, **changes: Any) -> ForkMerge:
        """Return ForkMerge with other branches and the recipe's own options, if that is what it trains with.

        Args:
            mixtures: The branches, or what makes them.
            branches: How many there are: a search that cannot serve so many gives way to the default.
            **changes: Other options.
        """
        own = self.algorithm if isinstance(self.algorithm, ForkMerge) else ForkMerge(**self.shared_options)
        search = fitting(own.search, branches) if isinstance(own.search, Search) else None
        return replace(own, **{"mixtures": mixtures, "search": search, "keep_branches": False, **changes})

    def fit(self, **options: Any) -> Run:
        """Run the recipe; options override the recipe's own (see `Algorithm.fit`)."""
        rebuild = partial(_rebuild_problem, dict(self.source)) if self.source else None
        where = {} if self.executor is None or "workers" in options else {"executor": self.executor}
        return self.algorithm.fit(
            self.problem,
            model=self.model,
            optimizer=self.optimizer,
            source=self.source,
            rebuild=rebuild,
            **{"steps": self.steps, **self.options, **where, **options},
        )


def load_recipe(reference: str | Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Return the recipe in a TOML file, or made by `module:function`, with some keys overridden.

    Modules are looked for beside the TOML file and in the current folder first. A [compare] table is for `forkmerge
    compare`: it is checked here and no part of the recipe. Neither is an [execution] table: where a recipe is carried
    out changes no bit of it.
    """
    settings, folder = read_settings(reference, overrides)
    check_keys("[compare]", settings.pop("compare", {}), COMPARE_KEYS)
    execution = settings.pop("execution", {})
    source = {"settings": settings, "folders": list(dict.fromkeys([str(folder), str(Path.cwd())]))}
    return recipe_from({**source, **({"execution": execution} if execution else {})})


def read_settings(reference: str | Path, overrides: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], Path]:
    """Return the keys of a TOML file, or of `module:function`, with some overridden, and where its modules are."""
    text = str(reference)
    if text.endswith(".toml"):
        path = Path(text)
        try:
            settings = tomllib.loads(path.read_text("utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {text}: {error.strerror}.") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{text} is not valid TOML: {error}.") from None
        folder = path.resolve().parent
    else:
        settings, folder = {"recipe": text}, Path.cwd()
    return _merge(settings, overrides or {}), folder


def recipe_from(source: Mapping[str, Any]) -> Recipe:
    """Return the recipe that a source describes, as stored with a run."""
    settings = dict(source["settings"])
    check_keys("a recipe", settings, _KEYS)
    if "recipe" not in settings:
        raise ConfigError("a recipe file needs recipe = 'module:function', which returns a forkmerge.Recipe.")
    function = _find_function(str(settings["recipe"]), source["folders"])
    arguments = _table("arguments", settings.get("arguments", {}))
    if "target" in settings and "target" in inspect.signature(function).parameters:
        arguments["target"] = settings["target"]  # steps or data may depend on it
    recipe = _call(function, arguments, str(settings["recipe"]))
    if not isinstance(recipe, Recipe):
        raise ConfigError(f"{settings['recipe']} must return a forkmerge.Recipe, got {type(recipe).__name__}.")
    recipe = _override(recipe, settings)
    if "pretrain" in settings:
        from forkmerge.experiments.pretraining import Pretrained, pretraining_from  # it imports this module

        before = pretraining_from(settings["pretrain"], list(source["folders"]))
        recipe = replace(recipe, model=Pretrained(recipe.model, before, source.get("pretrained")))
    executor = execution_from(source.get("execution", {})) or recipe.executor
    return replace(recipe, source={**source, "code": _code_hash(function)}, executor=executor)


def source_for(source: Mapping[str, Any], seed: int, target: str | None = None) -> dict[str, Any]:
    """Return a source with a target and a seed, which the recipe's function gets, too, if it takes one."""
    settings = {**source["settings"], "seed": seed, **({} if target is None else {"target": target})}
    function = _find_function(str(settings["recipe"]), list(source["folders"]))
    if "seed" in inspect.signature(function).parameters:
        settings["arguments"] = {**settings.get("arguments", {}), "seed": seed}
    return {**source, "settings": settings}


def data_key(source: Mapping[str, Any]) -> str:
    """Return a checksum of what the training data that a source gives depend on.

    The target is part of it only where the recipe's function takes it: then data may depend on it, too.
    """
    settings = dict(source["settings"])
    function = _find_function(str(settings["recipe"]), list(source["folders"]))
    if "target" not in inspect.signature(function).parameters:
        settings.pop("target", None)
    settings.pop("algorithm", None)
    about = {"settings": settings, **{key: source.get(key) for key in ("folders", "code", "pretrained")}}
    return hashlib.sha256(encode(plain(about))).hexdigest()[:32]


def seeded_recipe(source: Mapping[str, Any], seed: int, target: str | None = None) -> Recipe:
    """Return the recipe of a seed; data or weights that its function draws at random depend on the seed alone."""
    with random_state_kept():
        set_random_state(derive(seed, "recipe"))
        return recipe_from(source_for(source, seed, target))


def _override(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
    changes: dict[str, Any] = {}
    options = dict(recipe.options)
    if "target" in settings:
        changes["problem"] = recipe.problem.with_target(settings["target"])
    if not isinstance(settings.get("development", False), bool):
        raise ConfigError(f"development must be true or false, got {settings['development']!r}.")
    if settings.get("development"):
        changes["problem"] = changes.get("problem", recipe.problem).for_development()
    if "hold_out" in settings:
        changes["problem"] = hold_out_validation(changes.get("problem", recipe.problem), settings["hold_out"])
    if "steps" in settings:
        changes["steps"] = settings["steps"]
    if "seed" in settings:
        options["seed"] = settings["seed"]
    if "optimizer" in settings:
        changes["optimizer"] = _optimizer(settings["optimizer"], recipe.optimizer)
    if "scheduler" in settings:
        kind, rest = _named("scheduler", settings["scheduler"])
        options["scheduler"] = SchedulerOf(kind, **rest)
    if "training" in settings:
        check_keys("[training]", _table("training", settings["training"]), _TRAINING)
        options.update(settings["training"])
    if "algorithm" in settings:
        changes["algorithm"] = algorithm_from(settings["algorithm"], recipe.algorithm)
    return replace(recipe, options=options, **changes)


def algorithm_from(value: str | Mapping[str, Any], default: Algorithm) -> Algorithm:
    """Return an algorithm from its name or `{"name": …, **options}`.

    Options alone change the recipe's own algorithm; a name starts from that algorithm's defaults.
    """
    options = {"name": value} if isinstance(value, str) else _table("algorithm", value)
    name = options.pop("name", None)
    preset = options.pop("preset", None)
    kind = type(default) if name is None else ALGORITHMS.get(name)
    if kind is None:
        raise ConfigError("[algorithm] " + unknown_name("algorithm", name, ALGORITHMS))
    names = [item.name for item in fields(kind)]  # type: ignore[arg-type]  # every algorithm is a dataclass
    check_keys(f"[algorithm] {kind.__name__}", options, names)
    if preset is not None:
        if kind is not ForkMerge or preset not in ("paper", "authors_scripts"):
            raise ConfigError("[algorithm] " + unknown_name("preset", preset, ("paper", "authors_scripts")))
        made: Algorithm = getattr(ForkMerge, preset)(**options)
        return made
    return replace(default, **options) if kind is type(default) and name is None else kind(**options)  # type: ignore[type-var]


def _merge(settings: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Override keys, and inside tables single entries; a table that names something else replaces the old one."""
    merged = dict(settings)
    for key, value in overrides.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and value.get("name") in (None, old.get("name")):
            value = {**old, **value}
        merged[key] = value
    return merged


def _optimizer(value: Any, own: OptimizerFactory) -> OptimizerOf:
    """Return the optimizer of a table; options without a name change the recipe's own."""
    if isinstance(value, Mapping) and "name" not in value and isinstance(own, OptimizerOf):
        return OptimizerOf(own.kind, **{"group_lr": own.group_lr, **own.options, **value})
    kind, options = _named("optimizer", value)
    return OptimizerOf(kind, **options)


def _named(what: str, value: Any) -> tuple[str, dict[str, Any]]:
    options = {"name": value} if isinstance(value, str) else _table(what, value)
    if "name" not in options:
        example = "Adam" if what == "optimizer" else "CosineAnnealingLR"
        raise ConfigError(f"[{what}] needs a name, e.g. name = {example!r}.")
    return str(options.pop("name")), options


def _table(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"[{name}] must be a table such as --set {name}.key=value sets, got {value!r}.")
    return dict(value)


def _find_function(reference: str, folders: list[str]) -> Callable[..., Any]:
    module_name, _, name = reference.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{reference!r} is neither a .toml file nor 'module:function': try my_problem:recipe.")
    if module_name.endswith(".py"):
        raise ConfigError(f"{reference!r} names a file: write {module_name[:-3].replace('/', '.')}:{name}.")
    for folder in reversed(folders):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name not in (module_name, module_name.split(".", 1)[0]):
            raise
        raise ConfigError(f"no module named {module_name!r} in {', '.join(folders)} or the environment.") from None
    function = getattr(module, name, None)
    if not callable(function):
        own = (n for n, item in vars(module).items() if inspect.isfunction(item) and item.__module__ == module_name)
        public = [n for n in own if not n.startswith("_")]
        raise ConfigError(f"module {module_name!r}: " + unknown_name("function", name, public))
    result: Callable[..., Any] = function
    return result


def _call(function: Callable[..., Any], arguments: Mapping[str, Any], reference: str) -> Any:
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        parameters = list(inspect.signature(function).parameters)
        raise ConfigError(f"[arguments] do not fit {reference}: {error}. It takes: {', '.join(parameters)}.") from None
    return function(**arguments)


def _code_hash(function: Callable[..., Any]) -> str:
    """Checksum of the file a function stands in, to notice that a run is resumed with other code."""
    try:
        return hashlib.sha256(Path(inspect.getfile(function)).read_bytes()).hexdigest()
    except (OSError, TypeError):
        return ""


def _rebuild_problem(source: Mapping[str, Any]) -> Problem:
    return recipe_from(source).problem.sealed()
