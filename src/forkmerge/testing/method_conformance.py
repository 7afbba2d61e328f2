"""What every method must do: subclass `MethodConformance` in your own tests."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields
from typing import ClassVar

import torch

from forkmerge.methods import METHODS, LossMethod, Method, facts_of
from forkmerge.testing.small_training import TASKS, same_state, small_problem, train_small


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
