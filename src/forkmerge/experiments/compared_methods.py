"""The methods that `forkmerge compare` can compare: from a word to an algorithm for a recipe."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from forkmerge.algorithms import Algorithm, ForkMerge, Joint, JointThenAlone, PostTrain, SingleTask, WeightGrid
from forkmerge.algorithms.branches import rotation
from forkmerge.algorithms.equal_compute import Averaged, BestOf, Scaled
from forkmerge.algorithms.forkmerge import AUTHORS_SCRIPTS
from forkmerge.algorithms.mixtures import Mixed, Mixtures, PerAuxiliary
from forkmerge.engine.merging.rules import ARGMAX
from forkmerge.engine.merging.searches import Fixed
from forkmerge.errors import ConfigError, ForkMergeError, unknown_name
from forkmerge.experiments.compared.method_words import BASELINE, IN_TURN, REPEATED, RUNS, WIN_STAY, WIN_STAY_ALL
from forkmerge.experiments.recipe import Recipe
from forkmerge.methods import METHODS, method_from
from forkmerge.methods.option_syntax import show_options, split_options, split_words
from forkmerge.methods.registry import FLAVOURS, TORCHJD, method_key, split_flavour
from forkmerge.problem.definition import Problem

PAPER = (
    *("stl", "ew", "uw", "dwa", "mgda", "gradnorm", "pcgrad", "imtl", "cagrad", "nashmtl"),
    *("gcs", "ol_aux", "arml", "autolambda", "posttrain", "forkmerge"),
)
"""The sixteen methods of the paper's main tables."""

_GROUPS = {
    "paper": PAPER,
    "originals": PAPER,
    "authors_scripts": tuple(f"authors_scripts:{word}" for word in PAPER),
}
_OURS = ("grid", "posttrain", "forkmerge", "forkmerge-aux", WIN_STAY_ALL, WIN_STAY, IN_TURN, "forkmerge-uniform")
_BRANCHES: dict[str, Callable[[], Mixtures | None]] = {
    "forkmerge": Mixed,
    "forkmerge-aux": PerAuxiliary,
    WIN_STAY_ALL: lambda: None,  # which leaves it to ForkMerge
    WIN_STAY: lambda: None,
    IN_TURN: lambda: None,
}
_TURNS = {WIN_STAY_ALL: None, WIN_STAY: rotation.WIN_STAY, IN_TURN: rotation.ROTATION}
"""How branches take turns in forms that leave all else to ForkMerge; None leaves that to it, too."""
_COUNTED = re.compile(rf"({'|'.join(REPEATED)})-(best|average):([1-9]\d*)")
_SEARCHING = (
    *("search", "search_by", "search_examples", "confidence", "rule"),
    *("prune_to", "prune_after", "prune_keeps", "previous_merges", "layer_groups"),
)
"""Options that say how ForkMerge finds coefficients, and what follows from these: not for equal ones."""
_EQUAL_COMPUTE = ("stl-best", "posttrain-best", "stl-average", "posttrain-average", "joint-then-alone-average")
_LEFT_TO_FORKMERGE = {
    **dict.fromkeys(("rule", "turns", "per_round", "search_by", "validation_examples", "prune_to")),
    "prune_after": 1,
}
"""Options that ForkMerge chooses itself where nobody names its branches."""
SELECTING = ("checkpoint", "interval", "select", "validate_every")
"""Options that say which weights of a training are used, by their validation."""
_WITH_METHOD = (*(word for word in RUNS if word.startswith("forkmerge")), "posttrain", "joint-then-alone", "grid")


@dataclass(frozen=True)
class ComparedMethod:
    """A method in a comparison.

    Args:
        word: What the user types, in its canonical form.
        label: How tables call it.
        base: The kind of whole run.
        method: How tasks are combined inside it, by name.
        count: The number of runs, where there are several.
        auxiliary: The one auxiliary that it trains with, where it is about one.
        options: Options of its algorithm, its method or the optimizer (`lr`), as in `with_setting`.
        scripts: Whether it is run as in the authors' scripts, which return the best model on validation.
    """

    word: str
    label: str
    base: str
    method: str | None = None
    count: int = 1
    auxiliary: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    scripts: bool = False

    def prepare(self, recipe: Recipe, *, refit: bool) -> Recipe:
        """Return the recipe with this method, whose options the recipe's own algorithm gives as far as all share them.

        Those are the steps between validations and which model is returned; ForkMerge takes all its options from
        the recipe's, if that is ForkMerge, but for branches, search, method and reference.

        Args:
            recipe: The recipe, with its target set.
            refit: Whether to train on training ∪ validation data.
        """
        prepared = replace(recipe, algorithm=self._algorithm(recipe, refit))
        try:
            return with_setting(prepared, dict(self.options))
        except ForkMergeError as error:
            raise ConfigError(f"{self.word}: {error}") from None
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.word} has an option that cannot be: {error}.") from None

    def algorithm(self, recipe: Recipe, *, refit: bool) -> Algorithm:
        """Return the algorithm of the prepared recipe."""
        return self.prepare(recipe, refit=refit).algorithm

    def _algorithm(self, recipe: Recipe, refit: bool) -> Algorithm:
        if self.base == "recipe":
            return replace(recipe.algorithm, refit=refit)  # type: ignore[type-var]  # every algorithm is a dataclass
        own = recipe.algorithm
        common = {**recipe.shared_options, **({"select": "best"} if self.scripts else {}), "refit": refit}
        if self.base.startswith("forkmerge"):
            return self._forkmerge(recipe, refit)
        if self.base == "posttrain":
            share = own.pretrain_steps if isinstance(own, PostTrain) else None
            return PostTrain(share, method=self.method, **common)
        if self.base == "joint-then-alone":
            return JointThenAlone(method=self.method, **common)
        if self.base == "grid":
            values = own.values if isinstance(own, WeightGrid) else WeightGrid().values
            return WeightGrid(values, self.method, **common)
        word, _, how = self.base.rpartition("-")
        if how in ("best", "average"):
            inner = COMPARED_METHODS[word].algorithm(recipe, refit=refit)
            policy = {name: getattr(own, name) for name in ("bn", "bn_batches") if hasattr(own, name)}
            return BestOf(inner, self.count) if how == "best" else Averaged(inner, self.count, **policy)
        if self.base == "stl":
            return SingleTask(**common)
        return Joint(self._task_weights(recipe.problem), self.method, **common)

    def _task_weights(self, problem: Problem) -> dict[str, float] | None:
        """Return the weights of all tasks; None for equal ones."""
        if self.auxiliary is not None:
            if self.auxiliary not in problem.auxiliaries:
                raise ConfigError(f"{self.word}: " + unknown_name("auxiliary", self.auxiliary, problem.auxiliaries))
            return {problem.target: 1.0, self.auxiliary: 1.0}
        if self.base != "proportional":
            return None
        sizes = {task: sum(s.size for s in problem.stream_map.values() if task in s.tasks) for task in problem.tasks}
        return {task: size / sizes[problem.target] for task, size in sizes.items()}

    def _forkmerge(self, recipe: Recipe, refit: bool) -> ForkMerge:
        mixtures = _BRANCHES[_branches_word(self.base)]()
        own = recipe.algorithm
        turns = (own.per_round if isinstance(own, ForkMerge) and own.mixtures is None else None) or 1
        count = turns + 1 if mixtures is None else len(mixtures.build(recipe.problem, {}))
        # Reference metrics belong to one target; without them the target-only branch of round 1 gives them.
        made = recipe.forkmerge(mixtures, count, method=self.method, reference=None, refit=refit)
        changes = dict(AUTHORS_SCRIPTS) if self.scripts else {}
        if mixtures is None and isinstance(own, ForkMerge) and own.mixtures is not None:
            changes |= _LEFT_TO_FORKMERGE  # what the recipe has of these belongs to the branches that it names
            changes["auxiliary_scale"] = None if own.auxiliary_scale == 1 else own.auxiliary_scale
        if mixtures is None:
            changes["turns"] = _TURNS[_branches_word(self.base)]
        if self.base.endswith("-uniform"):
            changes |= {"search": Fixed(), "rule": ARGMAX, "previous_merges": None, "layer_groups": None}
        if self.base.endswith("-once"):
            changes["interval"] = recipe.steps
        return replace(made, **changes)


def _branches_word(base: str) -> str:
    """Return the word of the form of ForkMerge whose branches another one has."""
    return base.removesuffix("-uniform").removesuffix("-once")


COMPARED_METHODS = {word: ComparedMethod(word, label, word) for word, (label, _) in RUNS.items()}


def compared_methods_from(text: str) -> list[ComparedMethod]:
    """Return the methods of a comma-separated list of words, each once; some words stand for many.

    `paper` and `originals` are the sixteen of the paper's tables, each as in its own paper; `authors_scripts` the same
    as in the scripts of ForkMerge's authors; `all` are all methods of ours.

    A word may have options, `WORD[key=value,…]`: those of its algorithm or method, and `lr`.

    Example:
        >>> [method.label for method in compared_methods_from("stl, PC-Grad, forkmerge+pcgrad")]
        ['STL', 'PCGrad', 'ForkMerge + PCGrad']
    """
    methods: dict[str, ComparedMethod] = {}
    for word in split_words(text):
        group = _GROUPS.get(word.lower()) or (everything() if word.lower() == "all" else [word])
        for member in map(compared_method_from, group):
            methods.setdefault(member.word, member)
    if not methods:
        raise ConfigError("--methods names no method: write e.g. --methods stl,ew,forkmerge.")
    return list(methods.values())


def everything() -> list[str]:
    """Return the words of all methods of ours."""
    return ["stl", "ew", *(name for name in METHODS if method_key(name) != "ew"), *_OURS]


def compared_method_from(word: str) -> ComparedMethod:
    """Return the method that a word names; case, "-" and "_" do not matter in names of methods."""
    plain, options = split_options(word)
    method = _without_options(plain)
    if not options:
        return method
    shown = show_options(options)
    return replace(method, word=method.word + shown, label=method.label + shown, options=tuple(sorted(options.items())))


def _without_options(word: str) -> ComparedMethod:
    flavour, name = split_flavour(word)
    if not flavour:
        return _without_flavour(word)
    method = _without_flavour(name)
    if flavour == "originals":
        return method
    if method.word == BASELINE:
        return compared_method_from(f"{BASELINE}[select=best]")  # what the others are compared with, then
    if method.base == "recipe" or method.count > 1 or str(method.method).startswith(TORCHJD):
        raise ConfigError(f"--methods: {name!r} is not in the authors' scripts: write it without {flavour}:.")
    named = None if method.method is None else f"{flavour}:{method.method}"
    word, label = f"{flavour}:{method.word}", f"{method.label}, authors' scripts"
    return replace(method, word=word, label=label, method=named, scripts=True)


def _without_flavour(word: str) -> ComparedMethod:
    lower = word.lower()
    if lower in COMPARED_METHODS:
        return COMPARED_METHODS[lower]
    if counted := _COUNTED.fullmatch(lower):
        what, how, count = counted[1], counted[2], int(counted[3])
        return ComparedMethod(lower, f"{RUNS[what][0]}, {how} of {count}", f"{what}-{how}", count=count)
    if lower.startswith("with:"):
        name = word[len("with:") :]
        return ComparedMethod(f"with:{name}", f"with {name}", "with", auxiliary=name)
    base, plus, method = word.partition("+")
    if plus:
        if base.lower() not in _WITH_METHOD:
            raise ConfigError("--methods: " + unknown_name("algorithm to combine with a method", base, _WITH_METHOD))
        name = _method_name(method)
        return ComparedMethod(f"{base.lower()}+{_word(name)}", f"{RUNS[base.lower()][0]} + {name}", base.lower(), name)
    name = _method_name(word)
    return ComparedMethod(_word(name), name, "joint", name)


def _method_name(text: str) -> str:
    """Return the exact name of a method."""
    if text.lower().startswith("torchjd:"):
        name = "torchjd:" + text.partition(":")[2]
        method_from(name)  # refuses what does not exist
        return name
    names = {method_key(name): name for name in METHODS}
    if method_key(text) not in names:
        words = [
            *COMPARED_METHODS,
            *(_word(name) for name in METHODS),
            "with:TASK",
            "torchjd:NAME",
            "forkmerge+METHOD",
            "originals:WORD",
            "authors_scripts:WORD",
            "paper",
            *FLAVOURS,
            "all",
        ]
        raise ConfigError("--methods: " + unknown_name("method", text.lower(), dict.fromkeys(words)))
    return names[method_key(text)]


def _word(name: str) -> str:
    return name if name.startswith("torchjd:") else name.lower()


def equal_compute_words(
    chosen: Sequence[ComparedMethod], branches: Mapping[str, int], selections: Mapping[str, str]
) -> list[str]:
    """Return what the compute of the chosen forms of ForkMerge would have bought otherwise, with models selected alike.

    Args:
        chosen: The methods asked for.
        branches: B by word.
        selections: The options, as text, of single-task training whose model is selected as a method's, by word.
    """
    forked = [member for member in chosen if member.base in _BRANCHES]
    plain = [m for m in forked if m.method is None]
    uniform = dict.fromkeys((WIN_STAY, WIN_STAY_ALL), IN_TURN)  # equal coefficients would let the first stay for ever
    words = [f"{uniform.get(m.base, m.base)}-uniform{show_options(_without(m, *_SEARCHING))}" for m in plain]
    words = words or ["forkmerge-uniform"]
    # Where branches take turns, one round would have two of them.
    once = [m for m in plain if m.base not in (WIN_STAY_ALL, WIN_STAY, IN_TURN)]
    words += [f"{m.base}-once{show_options(_without(m, 'interval'))}" for m in once] or ["forkmerge-once"]
    for count, selection in sorted({(branches[m.word], selections[m.word]) for m in forked} or {(2, "")}):
        words += [f"{word}:{count}{selection}" for word in _EQUAL_COMPUTE]
    return words


def _without(method: ComparedMethod, *keys: str) -> dict[str, Any]:
    """Return a method's options but for some."""
    return {key: value for key, value in method.options if key not in keys}


def takes(method: ComparedMethod, recipe: Recipe, key: str) -> bool:
    """Whether an option means anything to a method and is not fixed; `interval` is Δt, so ForkMerge's alone."""
    if key in dict(method.options):
        return False
    if key == "lr":
        return True
    algorithm = method.algorithm(recipe, refit=False)
    if key == "interval":
        return isinstance(algorithm, ForkMerge)
    return _owner(algorithm, key) is not None


def with_setting(recipe: Recipe, setting: Mapping[str, Any]) -> Recipe:
    """Return a recipe with options of its optimizer (`lr`), algorithm or method changed."""
    for key, value in setting.items():
        if key == "lr":
            if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
                raise ConfigError(f"learning rates are positive numbers, got lr={value!r}.")
            recipe = replace(recipe, optimizer=Scaled(recipe.optimizer, lr=value))
        else:
            recipe = replace(recipe, algorithm=_changed(recipe.algorithm, key, value))
    return recipe


def _changed(algorithm: Any, key: str, value: Any) -> Any:
    owner = _owner(algorithm, key)
    if owner is None:
        names = ["lr", *_options(algorithm)]
        raise ConfigError(f"{type(algorithm).__name__} has no option {key!r}: " + unknown_name("option", key, names))
    if owner == "":
        return replace(algorithm, **{key: value})
    return replace(algorithm, **{owner: _changed(getattr(algorithm, owner), key, value)})


def _options(value: Any) -> list[str]:
    """Return the options of an algorithm, and of the method or algorithm inside it."""
    if not is_dataclass(value):
        return []
    inner = [name for owner in ("method", "algorithm") for name in _options(getattr(value, owner, None))]
    return list(dict.fromkeys([*(item.name for item in fields(value)), *inner]))


def _owner(value: Any, key: str) -> str | None:
    """Where an option stands: here (""), in the method or algorithm inside, or nowhere."""
    if not is_dataclass(value):
        return None
    if key in (item.name for item in fields(value)):
        return ""
    inner = (name for name in ("method", "algorithm") if _owner(getattr(value, name, None), key) is not None)
    return next(inner, None)
