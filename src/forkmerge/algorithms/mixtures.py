"""Which branches a run forks into: constructors that return a list of mixtures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from forkmerge.engine.training.options import Mixture, mixtures_of
from forkmerge.errors import ConfigError, ProblemError, check_count, is_count, unknown_name
from forkmerge.problem.definition import Problem, check_task_weights

ALONE, JOINT = "alone", "joint"


class Mixtures(ABC):
    """A way to construct branches.

    Attributes:
        probe_steps: Steps of each probe, for constructors that have some.
    """

    probe_steps: int = 0

    def probes(self, problem: Problem) -> list[Mixture]:
        """Short runs to be scored before the branches can be built; none for most constructors."""
        del problem
        return []

    @abstractmethod
    def build(self, problem: Problem, probe_scores: Mapping[str, float]) -> list[Mixture]:
        """Return the branches, given the validation score of every probe by its name."""


@dataclass(frozen=True)
class Mixed(Mixtures):
    """Target alone, and the target with all auxiliaries mixed (Alg. 1, B = 2).

    As loss weights every auxiliary has weight 1; as sampling weights they share one, 1/K each.
    """

    def build(self, problem: Problem, probe_scores: Mapping[str, float] | None = None) -> list[Mixture]:
        """Return the two branches."""
        return [_alone(problem), _with(problem, JOINT, problem.auxiliaries)]


@dataclass(frozen=True)
class PerAuxiliary(Mixtures):
    """Target alone, and one branch per auxiliary: ω^k_i = 1[i = k or i = 0] (Eq. 11, B = K + 1).

    Args:
        joint: Whether there is one more branch, with all auxiliaries at once. "sampled" lets it read one of their
            streams per step instead of all (`Mixture(auxiliary_streams="one")`), so that it costs as much as the others
            where auxiliaries bring their own inputs.
    """

    joint: bool | Literal["sampled"] = False

    def __post_init__(self) -> None:
        if not isinstance(self.joint, bool) and self.joint != "sampled":
            raise ProblemError(f"joint must be True, False or 'sampled', got {self.joint!r}.")

    def build(self, problem: Problem, probe_scores: Mapping[str, float] | None = None) -> list[Mixture]:
        """Return the K + 1 branches, and the joint one if asked for; of one auxiliary that would be its own branch."""
        branches = [_alone(problem), *(_with(problem, task, [task]) for task in problem.auxiliaries)]
        if self.joint and len(problem.auxiliaries) > 1:
            joint = _with(problem, JOINT, problem.auxiliaries)
            branches.append(replace(joint, auxiliary_streams="one") if self.joint == "sampled" else joint)
        return branches


@dataclass(frozen=True)
class Groups(Mixtures):
    """Target alone, and the target with each given group of auxiliaries, e.g. from a task-grouping method.

    Args:
        groups: `{branch name: auxiliaries}`.
    """

    groups: Mapping[str, Sequence[str]]

    def build(self, problem: Problem, probe_scores: Mapping[str, float] | None = None) -> list[Mixture]:
        """Return one branch per group after the target-only one."""
        return [_alone(problem), *(_with(problem, name, tasks) for name, tasks in self.groups.items())]


@dataclass(frozen=True)
class Given(Mixtures):
    """Any branches at all: the general form ν^1 … ν^B (Alg. 2).

    Args:
        branches: `{branch name: {task: weight}}`, `{branch name: {"task_weights": {task: weight}, "lr_scale": 3}}` or a
            sequence of `Mixture`s.
    """

    branches: Mapping[str, Mapping[str, Any]] | Sequence[Mixture]

    def build(self, problem: Problem, probe_scores: Mapping[str, float] | None = None) -> list[Mixture]:
        """Return the branches as given."""
        return mixtures_of(self.branches)


@dataclass(frozen=True)
class NestedTopK(Mixtures):
    """Target alone, target + best auxiliary, target + best two, …: the authors' released variant.

    Auxiliaries are ranked by a short joint run of the target with each of them, scored on validation.

    Args:
        probe_steps: Steps of each ranking run.
        sizes: How many of the best auxiliaries each branch gets; all of 1 … K where None.
    """

    probe_steps: int
    sizes: Sequence[int] | None = None

    def __post_init__(self) -> None:
        check_count("probe_steps", self.probe_steps)
        if self.sizes is not None and not all(map(is_count, self.sizes)):
            raise ProblemError(f"sizes must be positive integers, got {self.sizes!r}.")

    def probes(self, problem: Problem) -> list[Mixture]:
        """Return the ranking runs, target + one auxiliary each."""
        return [_with(problem, task, [task]) for task in problem.auxiliaries]

    def build(self, problem: Problem, probe_scores: Mapping[str, float]) -> list[Mixture]:
        """Return the nested branches, auxiliaries in descending order of their probe's score."""
        ranked = sorted(problem.auxiliaries, key=lambda task: -probe_scores[task])
        sizes = self.sizes if self.sizes is not None else range(1, len(ranked) + 1)
        if max(sizes, default=0) > len(ranked):
            raise ProblemError(f"sizes asks for the top {max(sizes)} of only {len(ranked)} auxiliary tasks.")
        return [_alone(problem), *(_with(problem, f"top {size}", ranked[:size]) for size in sizes)]


@dataclass(frozen=True)
class Rates(Mixtures):
    """Every branch of another constructor at several learning rates: {alone, joint} × {lr, 3 lr} by default.

    How fast a branch moves often matters more than what it is trained on; one search decides both.

    Args:
        mixtures: The other constructor, its name, or branches.
        lr_scales: Factors on the learning rate; a branch at another one than 1 is called, say, "joint ×3".
    """

    mixtures: Mixtures | str | Mapping[str, Any] | Sequence[Mixture] = field(default_factory=Mixed)
    lr_scales: Sequence[float] = (1.0, 3.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mixtures", mixtures_from(self.mixtures))
        scales = self.lr_scales
        if not isinstance(scales, list | tuple) or not scales or len(set(scales)) < len(scales):
            raise ProblemError(f"lr_scales must be different factors, such as [1, 3], got {scales!r}.")
        for scale in scales:
            Mixture("rates", {}, scale)
        object.__setattr__(self, "lr_scales", tuple(map(float, scales)))
        object.__setattr__(self, "probe_steps", self._base.probe_steps)

    @property
    def _base(self) -> Mixtures:
        assert isinstance(self.mixtures, Mixtures)
        return self.mixtures

    def probes(self, problem: Problem) -> list[Mixture]:
        """Return those of the other constructor."""
        return self._base.probes(problem)

    def build(self, problem: Problem, probe_scores: Mapping[str, float]) -> list[Mixture]:
        """Return its branches at the first rate, then at the next."""
        branches = self._base.build(problem, probe_scores)
        return [
            branch
            if scale == 1
            else replace(branch, name=f"{branch.name} ×{scale:g}", lr_scale=branch.lr_scale * scale)
            for scale in self.lr_scales
            for branch in branches
        ]


def _alone(problem: Problem) -> Mixture:
    return Mixture(ALONE, {problem.target: 1.0})


def _with(problem: Problem, name: str, auxiliaries: Sequence[str]) -> Mixture:
    for task in auxiliaries:
        if task not in problem.auxiliaries:
            raise ProblemError(f"branch {name!r}: " + unknown_name("auxiliary task", task, problem.auxiliaries))
    weight = 1.0 if problem.weights == "loss" else 1.0 / max(len(auxiliaries), 1)
    return Mixture(name, {problem.target: 1.0, **dict.fromkeys(auxiliaries, weight)})


def is_target_only(mixture: Mixture, target: str) -> bool:
    """Whether a branch trains on the target and nothing else, at the run's own learning rate."""
    return [task for task, weight in mixture.task_weights.items() if weight > 0] == [target] and mixture.lr_scale == 1


def reference_branch(mixtures: Sequence[Mixture], target: str) -> int | None:
    """Return the branch that several metrics are compared with: the target-only one, or the only one there is.

    Where no branch is trained on the target at the run's own learning rate, the first at another one will do.
    """
    if len(mixtures) == 1:
        return 0
    for candidates in (mixtures, [replace(mixture, lr_scale=1.0) for mixture in mixtures]):
        for index, mixture in enumerate(candidates):
            if is_target_only(mixture, target):
                return index
    return None


def scale_auxiliaries(mixture: Mixture, target: str, factor: float) -> Mixture:
    """Multiply every auxiliary weight, so that the best λ lies in [0, 1] (section 4.1 of the paper)."""
    weights = {task: w if task == target else w * factor for task, w in mixture.task_weights.items()}
    return replace(mixture, task_weights=weights)


def check_mixtures(problem: Problem, mixtures: Sequence[Mixture]) -> None:
    """Refuse an empty list, branches of one name, and weights that cannot be trained with."""
    if not mixtures:
        raise ProblemError("there is no branch to train: give at least one mixture.")
    names = [mixture.name for mixture in mixtures]
    for name in names:
        if names.count(name) > 1:
            raise ProblemError(f"two branches are named {name!r}: give each its own name.")
    for mixture in mixtures:
        check_task_weights(problem, mixture.name, mixture.task_weights)


_NAMED: dict[str, type[Mixtures]] = {
    "mixed": Mixed,
    "per_auxiliary": PerAuxiliary,
    "groups": Groups,
    "given": Given,
    "nested_top_k": NestedTopK,
    "rates": Rates,
}


def mixtures_from(value: Any) -> Mixtures:
    """Return a constructor from a constructor, its name, `{"name": …, **options}`, or the branches themselves."""
    if isinstance(value, Mixtures):
        return value
    if isinstance(value, str):
        value = {"name": value}
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        options = {key: option for key, option in value.items() if key != "name"}
        if value["name"] not in _NAMED:
            raise ConfigError("mixtures: " + unknown_name("constructor", value["name"], _NAMED))
        try:
            return _NAMED[value["name"]](**options)
        except TypeError as error:
            raise ConfigError(f"mixtures {value['name']!r}: {error}.") from None
    return Given(value)
