"""`fit`: the model that comes back, and what is refused before anything is trained."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
from torch import nn

import forkmerge as fm
from _asserts import assert_other_bits, assert_same_run
from forkmerge.algorithms.events import Merged
from problems import Refuse, fit, noisy_net, problem_with, seeded, shared_losses


def test_the_returned_model_is_independent_of_the_run() -> None:
    net = seeded(noisy_net)
    run = fit(net=net)
    assert run.model is net
    assert all(parameter.grad is None for parameter in net.parameters())
    starts = [p.untyped_storage().data_ptr() for p in net.parameters()]
    assert len(set(starts)) == len(starts)


def test_the_given_module_is_trained_and_returned() -> None:
    module = seeded(noisy_net)
    before = copy.deepcopy(module)
    run = fit(net=module)
    assert run.model is module
    assert_other_bits(before, module)


def local_problem() -> fm.Problem:
    return problem_with(lambda *arguments: shared_losses(*arguments))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be a positive integer, got 0"),
        ({"steps": 2.0}, r"steps must be a positive integer, got 2\.0"),
        ({"workers": 0}, "workers must be a positive integer, got 0"),
        ({"threads": 0}, "threads must be a positive integer, got 0"),
        ({"checkpoint_every": 0}, "checkpoint_every must be a positive integer, got 0"),
        ({"checkpoint_every": -5}, "checkpoint_every must be a positive integer, got -5"),
        ({"accumulate": 0}, "accumulate must be a positive integer, got 0"),
        ({"precision": "half"}, "precision must be float32, bfloat16 or float16, got 'half'"),
        ({"scheduler": fm.SchedulerOf("ReduceLROnPlateau")}, "ReduceLROnPlateau follows a metric"),
        (
            {"scheduler": lambda optimizer: 3},
            "scheduler must give a torch.optim.lr_scheduler.LRScheduler, got 3",
        ),
        ({"optimizer": lambda model: 3}, r"optimizer factory must return a torch\.optim\.Optimizer, got 3"),
        ({"optimizer": fm.OptimizerOf("LBFGS")}, "LBFGS needs a closure"),
        ({"net": 3}, "model must be a torch.nn.Module or a function that makes one, got 3"),
        ({"net": nn.LazyLinear(3)}, "is lazy and has no shape yet"),
        ({"workers": 2, "problem": local_problem()}, "worker processes need a problem.*module-level functions"),
    ],
)
def test_impossible_options_of_fit(refused: Refuse, options: dict[str, Any], message: str) -> None:
    refused(message, **options)


@pytest.mark.parametrize("second", [fm.ForkMerge("mixed", interval=4), fm.PostTrain()], ids=["ForkMerge", "PostTrain"])
def test_two_threads_cannot_be_inside_fit_at_once(second: fm.Algorithm) -> None:
    """They would change each other's random states, and so their bits."""
    alone, errors = fit(), list[BaseException]()

    def from_another_thread(event: Any) -> None:
        def train() -> None:
            try:
                fit(second, steps=4)
            except fm.ProblemError as error:
                errors.append(error)

        thread = threading.Thread(target=train)
        thread.start()
        thread.join()

    assert_same_run(fit(on_event=from_another_thread), alone)
    assert errors
    assert {str(error) for error in errors} == {str(errors[0])}
    assert "another thread of this process is inside fit" in str(errors[0])
    assert "one after the other" in str(errors[0])
    fit(second, steps=4)  # afterwards nothing is in the way


def test_a_fit_inside_a_fit_of_the_same_thread_changes_no_bit() -> None:
    alone = fit()
    assert_same_run(fit(on_event=lambda event: isinstance(event, Merged) and fit(steps=4)), alone)
