"""Auxiliary tasks made from the model alone, or from others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import forkmerge as fm
from _asserts import assert_close, assert_same_bits
from forkmerge.engine.training.branch import BranchResult, train_branch
from problems import (
    TASKS,
    Counted,
    domains_problem,
    evaluation,
    examples,
    fit,
    plain_net,
    seeded,
    shared_losses,
    shared_problem,
)

PLAIN = fm.OptimizerOf("SGD", lr=0.2)


def train(
    problem: fm.Problem, weights: dict[str, float], steps: int = 5, **options: Any
) -> tuple[nn.Module, BranchResult]:
    net = seeded(plain_net)
    training = fm.Training(**{"optimizer": PLAIN, **options})
    binding = training.binding(net)
    mixture = fm.Mixture("branch", weights)
    result = train_branch(binding, problem, mixture, binding.initial(), steps=steps, training=training, seed=0)
    binding.attach_weights(result.state)
    return net, result


class TestL2:
    def test_it_is_weight_decay_under_plain_descent(self) -> None:
        """Task weight λ and weight decay λ are the same step, for parameters that get a gradient."""
        weights = dict.fromkeys(TASKS, 1.0)
        decayed, _ = train(shared_problem(), weights, optimizer=fm.OptimizerOf("SGD", lr=0.2, weight_decay=0.05))
        as_task, _ = train(fm.with_l2(shared_problem()), {**weights, "l2": 0.05})
        assert_close(decayed, as_task, rtol=1e-5, atol=1e-6)

    def test_its_loss_is_half_the_squared_norm_of_what_is_trained(self) -> None:
        net = seeded(plain_net)
        square = sum(float(p.detach().square().sum()) for p in net.parameters())
        _, result = train(fm.with_l2(shared_problem(), name="ridge"), {"tgt": 1.0, "ridge": 0.1}, steps=1)
        assert result.losses["ridge"] == pytest.approx(square / 2, rel=1e-6)

    def test_it_reads_no_data_of_the_problem(self) -> None:
        data = {task: Counted() for task in TASKS}
        train(fm.with_l2(domains_problem(dict(data))), {"l2": 1.0}, steps=3)
        assert [held.reads for held in data.values()] == [0, 0, 0]

    @pytest.mark.parametrize("method", ["PCGrad", "GCS", "FAMO", "ARML"])
    def test_it_works_under_methods_and_in_branches(self, method: str) -> None:
        run = fit(fm.ForkMerge("per_auxiliary", interval=2, method=method), fm.with_l2(shared_problem()), steps=4)
        assert "l2" in run.rounds[0].branches
        assert run.score is not None

    def test_a_name_that_is_taken_is_refused(self) -> None:
        with pytest.raises(fm.ProblemError, match="already has a task 'aux'"):
            fm.with_l2(shared_problem(), name="aux")

    def test_a_stream_of_the_same_name_is_no_obstacle(self) -> None:
        problem = fm.with_l2(shared_problem(), name="all")
        assert problem.tasks == ("tgt", "aux", "odd", "all")
        assert len(problem.stream_map) == 2


class TestMerged:
    @pytest.mark.parametrize("make", [shared_problem, domains_problem])
    def test_one_task_of_several_trains_like_all_of_them(self, make: Any) -> None:
        together = fm.merge_auxiliaries(make(), "others", ["aux", "odd"], {"aux": 1.0, "odd": 0.3})
        assert together.tasks == ("tgt", "others")
        one, result = train(together, {"tgt": 1.0, "others": 0.5})
        apart, parts = train(make(), {"tgt": 1.0, "aux": 0.5, "odd": 0.15})
        assert_close(one, apart, rtol=1e-5, atol=1e-6)
        assert result.losses["others"] == pytest.approx(parts.losses["aux"] + 0.3 * parts.losses["odd"], rel=1e-5)

    @pytest.mark.parametrize("make", [shared_problem, domains_problem])
    def test_a_gradient_method_sees_one_task(self, make: Any) -> None:
        problem = fm.merge_auxiliaries(make(), "others", ["aux", "odd"])
        _, result = train(problem, {"tgt": 1.0, "others": 1.0}, method=fm.methods.OL_AUX(every=1))
        assert len(result.state.method["own"]["weights"]) == 2

    def test_weights_are_one_each_or_shares_of_one(self) -> None:
        """As the paper mixes auxiliaries: loss weights 1 each, sampling weights 1/K each."""
        for weights, share in (("loss", 1.0), ("sampling", 0.5)):
            problem = fm.merge_auxiliaries(domains_problem(weights=weights), "others", ["aux", "odd"])
            losses = problem.stream_map["aux"].losses
            assert losses.shares == {"aux": share}

    def test_a_batch_with_some_labels_gives_the_sum_over_these(self) -> None:
        def losses(model: nn.Module, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
            losses: dict[str, Tensor | None] = dict(shared_losses(model, batch, tasks, context))
            if context.step % 2:
                losses["odd"] = None
            if context.step == 3:
                losses = {"tgt": losses["tgt"]}
            return losses

        stream = fm.Stream(TensorDataset(*examples(16, 1)), losses, TASKS, 8)
        problem = fm.Problem("tgt", [stream], evaluation())
        one, _ = train(fm.merge_auxiliaries(problem, "others", ["aux", "odd"]), {"tgt": 1.0, "others": 1.0})
        apart, _ = train(problem, dict.fromkeys(TASKS, 1.0))
        assert_close(one, apart, rtol=1e-5, atol=1e-6)

    def test_a_part_of_weight_zero_is_not_asked_for(self) -> None:
        asked = []

        def losses(model: nn.Module, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
            asked.extend(tasks)
            return shared_losses(model, batch, tasks, context)

        stream = fm.Stream(TensorDataset(*examples(16, 1)), losses, TASKS, 8)
        problem = fm.merge_auxiliaries(fm.Problem("tgt", [stream], evaluation()), "x", ["aux", "odd"], {"odd": 0.0})
        train(problem, {"tgt": 1.0, "x": 1.0}, steps=1)
        assert set(asked) == {"tgt", "aux"}

    def test_worker_processes_can_take_it(self) -> None:
        problem = fm.merge_auxiliaries(fm.with_l2(shared_problem()), "others", ["aux", "odd"])
        algorithm = fm.ForkMerge("per_auxiliary", interval=2)
        assert_same_bits(fit(algorithm, problem, steps=2), fit(algorithm, problem, steps=2, workers=2))

    @pytest.mark.parametrize(
        ("tasks", "options", "message"),
        [
            (["tgt", "aux"], {}, "the target 'tgt'"),
            (["auxx"], {}, "Did you mean 'aux'"),
            ([], {}, "at least one"),
            (["aux"], {"weights": {"odd": 1.0}}, "unknown merged task 'odd'"),
            (["aux"], {"weights": {"aux": -1.0}}, "finite number ≥ 0"),
            (["aux"], {"weights": {"aux": 0.0}}, "every weight is 0"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, tasks: list[str], options: Any, message: str) -> None:
        with pytest.raises(fm.ProblemError, match=message):
            fm.merge_auxiliaries(shared_problem(), "others", tasks, **options)

    def test_a_merged_task_may_keep_the_name_of_a_part(self) -> None:
        assert fm.merge_auxiliaries(shared_problem(), "aux", ["aux", "odd"]).tasks == ("tgt", "aux")
