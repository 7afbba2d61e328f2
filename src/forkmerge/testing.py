"""A conformance kit for methods: subclass `MethodConformance` in your own tests.

```python
from forkmerge.testing import MethodConformance

class TestMine(MethodConformance):
    method = Mine
```
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from forkmerge.engine.executors.state_bytes import from_wire, to_wire
from forkmerge.engine.training.branch import BranchResult, train_branch
from forkmerge.engine.training.optimizers import OptimizerOf
from forkmerge.engine.training.options import Mixture, Training
from forkmerge.engine.training.state import State
from forkmerge.methods import METHODS, LossMethod, Method, facts_of
from forkmerge.problem.definition import Context, Evaluation, Problem, Stream
from forkmerge.problem.metrics import accuracy
from forkmerge.problem.randomness import random_state_kept

TASKS = ("target", "helpful", "noise")


class SmallNet(nn.Module):
    """An encoder with BatchNorm and dropout, and a linear head per task."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 6))
        self.heads = nn.ModuleDict({task: nn.Linear(6, 3) for task in TASKS})

    def forward(self, x: Tensor, task: str = "target") -> Tensor:
        """Return a task's logits."""
        logits: Tensor = self.heads[task](self.encoder(x))
        return logits


@dataclass(frozen=True)
class SmallLosses:
    """Cross-entropies with something odd about one of them, if asked for.

    Args:
        declared: Whether the representation is declared with `context.shared`.
        missing: Whether labels come and go: two, one and three tasks in turn.
        odd: The task that is odd.
        how: "zero" (no gradient), "nan" (no finite loss) or "poison" (a finite loss without a finite gradient).
        since: The first odd step.
    """

    declared: bool = False
    missing: bool = False
    odd: str = ""
    how: str = ""
    since: int = 0

    def __call__(self, model: nn.Module, batch: Any, tasks: Sequence[str], context: Context) -> Mapping[str, Tensor]:
        """Return the losses asked for."""
        x, labels = batch
        encoder, heads = model.get_submodule("encoder"), model.get_submodule("heads")
        z = context.shared(encoder(x)) if self.declared else encoder(x)
        found = {}
        for task in tasks:
            if self.missing and task in TASKS[: (0, 2, 1)[context.step % 3]]:
                continue
            loss = cross_entropy(heads.get_submodule(task)(z), labels[:, TASKS.index(task)])
            found[task] = self._made_odd(loss) if task == self.odd and context.step >= self.since else loss
        return found

    def _made_odd(self, loss: Tensor) -> Tensor:
        if self.how == "zero":
            return loss * 0.0
        if self.how == "nan":
            return loss * torch.nan
        poisoned: Tensor = Poison.apply(loss)  # type: ignore[no-untyped-call]
        return poisoned


class Poison(torch.autograd.Function):
    """The identity, with a gradient of NaN."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:  # noqa: D102
        del ctx
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: D102
        del ctx
        return gradient * torch.nan


def small_problem(*, own_inputs: bool = False, **oddities: Any) -> Problem:
    """Return a problem of three tasks that share a stream, or have one each.

    Args:
        own_inputs: Whether every task reads its own batch.
        oddities: Options of `SmallLosses`.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 5, generator=generator)
    rule = torch.randn(5, 3, generator=generator)
    noisy = x @ rule + 0.7 * torch.randn(48, 3, generator=generator)
    columns = [noisy.argmax(1), (x @ rule).argmax(1), torch.randint(3, (48,), generator=generator)]
    labels = torch.stack(columns, 1)
    training, held_out = TensorDataset(x[:32], labels[:32]), TensorDataset(x[32:], labels[32:, 0])
    as_training = TensorDataset(x[32:], labels[32:])
    groups: list[tuple[str, ...]] = [(task,) for task in TASKS] if own_inputs else [TASKS]
    streams = [Stream(training, SmallLosses(**oddities), tasks, batch_size=8) for tasks in groups]
    return Problem("target", streams, Evaluation(held_out, accuracy, as_training=as_training))


def train_small(
    method: Method | None,
    problem: Problem | None = None,
    *,
    cuts: Sequence[int] = (0, 5),
    weights: Mapping[str, float] | None = None,
    optimizer: OptimizerOf | None = None,
    **options: Any,
) -> BranchResult:
    """Train a `SmallNet` with a method, in segments; between two of them the state becomes bytes and is read again.

    Args:
        method: The method; None sums the losses.
        problem: What to train on; None is `small_problem()`.
        cuts: The steps at which segments begin and end.
        weights: Task weights; None is 1 each.
        optimizer: None is SGD with momentum and weight decay.
        options: Further options of `Training`.
    """
    mixture = Mixture("branch", dict.fromkeys(TASKS, 1.0) if weights is None else weights)
    rule = optimizer or OptimizerOf("SGD", lr=0.05, momentum=0.9, weight_decay=1e-3)
    training = Training(optimizer=rule, method=method, **options)
    used = problem or small_problem()
    result: BranchResult | None = None
    for start, end in pairwise(cuts):
        with random_state_kept():
            torch.manual_seed(1)
            binding = training.binding(SmallNet())
        state = binding.initial() if result is None else binding.place(from_wire(to_wire(result.state)))
        new = train_branch(binding, used, mixture, state, steps=end - start, training=training, seed=3)
        for what, counts in (result.reports if result else {}).items():
            for task, count in counts.items():
                new.reports.setdefault(what, {})[task] = new.reports.get(what, {}).get(task, 0) + count
        result = new
    assert result is not None
    return result


def same_state(one: State, other: State) -> bool:
    """Whether two states have the same bits, the method's own state included."""
    (left, a), (right, b) = to_wire(one), to_wire(other)
    return bool(left == right and a == b)


class MethodConformance:
    """What every method must do. Set `method`, or override `make` for options.

    Attributes:
        method: The class under test.
    """

    method: ClassVar[type[Method]]

    def make(self) -> Method:
        """Return the method under test."""
        return self.method()

    def test_its_docstring_is_a_data_sheet(self) -> None:
        """State, Passes, Memory, Target, Heads and References are all said, and agree with the class."""
        kind = type(self.make())
        facts = facts_of(kind)
        missing = [
            key for key in ("summary", "state", "passes", "memory", "target", "heads", "paper") if not facts[key]
        ]
        assert not missing, f"the docstring of {kind.__name__} says nothing about {', '.join(missing)}"
        assert facts["target"].startswith("needed" if kind.needs_target else "not needed")
        assert facts["heads"].startswith("weighted" if kind.weighs_heads else "unweighted")

    def test_it_is_a_frozen_set_of_options(self) -> None:
        """Two of the same options are equal, and options cannot be changed."""
        made = self.make()
        assert made == self.make()
        for item in fields(made):  # type: ignore[arg-type]  # a method is a dataclass, or this fails
            try:
                setattr(made, item.name, None)
            except AttributeError:
                continue
            raise AssertionError(f"{item.name} of {type(made).__name__} can be changed: use @dataclass(frozen=True)")

    def test_it_trains_on_every_kind_of_problem(self) -> None:
        """Shared or own inputs, a declared representation, missing labels, micro-batches: all stay finite and move."""
        before = train_small(self.make(), cuts=(0, 0)).state
        for options in ({"own_inputs": True}, {"declared": True}, {"own_inputs": True, "missing": True}):
            for accumulate in (1, 2):
                result = train_small(self.make(), small_problem(**options), accumulate=accumulate, cuts=(0, 3))
                assert result.state.is_finite(), (options, accumulate)
                assert set(result.losses) == set(TASKS)
                assert not same_state(result.state.weights(), before.weights())

    def test_a_declared_representation_changes_the_cost_and_not_the_result(self) -> None:
        """Weights agree to rounding with and without `context.shared`."""
        plain = train_small(self.make(), small_problem(), cuts=(0, 3)).state
        declared = train_small(self.make(), small_problem(declared=True), cuts=(0, 3)).state
        for name, row in plain.rows.items():
            torch.testing.assert_close(declared.rows[name], row, rtol=1e-4, atol=1e-5)

    def test_interrupted_equals_uninterrupted(self) -> None:
        """Saved and read again in the middle, also with labels that come and go, it ends with the same bits."""
        for options in ({}, {"missing": True}):
            whole = train_small(self.make(), small_problem(**options), cuts=(0, 6)).state
            parts = train_small(self.make(), small_problem(**options), cuts=(0, 1, 3, 6)).state
            assert same_state(whole, parts), options

    def test_copies_do_the_same(self) -> None:
        """A deep copy and a pickled copy give the same bits, also after the method has been used."""
        made = self.make()
        first = train_small(made, cuts=(0, 3)).state
        for again in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):  # noqa: TID251 - its own bytes
            assert same_state(train_small(again, cuts=(0, 3)).state, first)

    def test_branches_do_not_see_each_other(self) -> None:
        """One object serves two branches in turn, and each ends as if it were alone."""
        made, weights = self.make(), {"target": 1.0, "noise": 0.5}
        first = train_small(made, cuts=(0, 3))
        train_small(made, weights=weights, cuts=(0, 3))
        assert same_state(train_small(made, cuts=(0, 3)).state, first.state)

    def test_a_zero_gradient_of_a_task_is_no_trouble(self) -> None:
        """The model stays finite; methods that see gradients report the task by its name."""
        for task in TASKS:
            result = train_small(self.make(), small_problem(odd=task, how="zero", since=1), cuts=(0, 3))
            assert result.state.is_finite(), task
            if not isinstance(self.make(), LossMethod):
                assert result.reports["zero"] == {task: 2}

    def test_a_task_without_finite_loss_or_gradient_is_left_out_and_reported(self) -> None:
        """The model stays finite, and the report names the task."""
        for task in TASKS:
            for how in ("nan", "poison"):
                result = train_small(self.make(), small_problem(odd=task, how=how, since=1), cuts=(0, 3))
                assert result.state.is_finite(), (how, task)
                assert result.reports["not finite"] == {task: 2}, (how, task)


def conformance_of_all() -> dict[str, type[MethodConformance]]:
    """Return one conformance class per method of ours, by the name of a test class."""
    return {
        f"Test{name}": type(f"Test{name}", (MethodConformance,), {"method": kind}) for name, kind in METHODS.items()
    }
