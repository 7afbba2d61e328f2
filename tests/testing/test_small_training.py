"""The small problem, network and training that conformance kits try things on."""

from __future__ import annotations

import pytest
import torch

from _asserts import assert_same_state
from forkmerge.methods import EW
from forkmerge.problem.definition import Context
from forkmerge.testing import TASKS, SmallLosses, SmallNet, same_state, small_problem, train_small

BATCH = torch.randn(8, 5, generator=torch.Generator().manual_seed(0)), torch.arange(24).view(8, 3) % 3


def gradients(losses: SmallLosses, task: str) -> list[torch.Tensor]:
    """The gradients of a task's loss at step 4."""
    torch.manual_seed(0)
    net = SmallNet()
    loss = losses(net, BATCH, TASKS, Context(4, 0))[task]
    return [part for part in torch.autograd.grad(loss, list(net.parameters()), allow_unused=True) if part is not None]


def test_an_oddity_strikes_its_task_alone_and_from_its_step_on() -> None:
    plain = gradients(SmallLosses(), "noise")
    for how in ("zero", "nan", "poison"):
        odd = SmallLosses(odd="noise", how=how, since=4)
        later = SmallLosses(odd="noise", how=how, since=5)
        assert all(torch.equal(a, b) for a, b in zip(gradients(later, "noise"), plain, strict=True))
        assert all(part.isfinite().all() and part.any() for part in gradients(odd, "helpful"))
        struck = gradients(odd, "noise")
        assert all((not part.any()) if how == "zero" else part.isnan().all() for part in struck), how


def test_a_poisoned_loss_is_finite_itself() -> None:
    losses = SmallLosses(odd="noise", how="poison")(SmallNet(), BATCH, TASKS, Context(0, 0))
    assert losses["noise"].isfinite()
    assert SmallLosses(odd="noise", how="nan")(SmallNet(), BATCH, TASKS, Context(0, 0))["noise"].isnan()


def test_labels_come_and_go_if_asked_for() -> None:
    net = SmallNet()
    present = [set(SmallLosses(missing=True)(net, BATCH, TASKS, Context(step, 0))) for step in range(3)]
    assert present == [set(TASKS), {"noise"}, {"helpful", "noise"}]


@pytest.mark.parametrize(("own_inputs", "streams"), [(False, 1), (True, 3)])
def test_tasks_share_a_stream_or_have_one_each(own_inputs: bool, streams: int) -> None:
    problem = small_problem(own_inputs=own_inputs)
    assert len(problem.stream_map) == streams
    assert problem.tasks == TASKS


def test_segments_are_one_training_and_reports_add_up() -> None:
    problem = small_problem(odd="noise", how="nan", since=1)
    whole, parts = (train_small(EW(), problem, cuts=cuts) for cuts in ((0, 6), (0, 2, 3, 6)))
    assert_same_state(whole.state, parts.state)
    assert whole.reports == parts.reports == {"not finite": {"noise": 5}}
    assert not same_state(whole.state, train_small(EW(), problem, cuts=(0, 5)).state)
