"""BatchNorm statistics of a merge: averaged like parameters, or recomputed on the target's training data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import forkmerge as fm
from _asserts import assert_same_bits
from branch_states import TRAINING, make_branches
from forkmerge.algorithms.run_record import Run
from forkmerge.engine.merging.batchnorm_policy import recompute_statistics, refresh_with
from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.engine.training.state import State
from forkmerge.problem.batches import batches
from forkmerge.problem.randomness import derive
from problems import (
    SGD,
    TASKS,
    Net,
    domains_problem,
    evaluation,
    examples,
    fit,
    noisy_net,
    plain_net,
    problem_with,
    shared_losses,
    shared_problem,
)


def mean_of(run: Run) -> torch.Tensor:
    return run.model.body[1].running_mean


class TestBatchNormPolicies:
    def test_average_combines_statistics_like_parameters(self) -> None:
        merged = fit(fm.ForkMerge("mixed", interval=4, search=fm.Fixed((0.3, 0.7))), net=noisy_net, steps=4)
        alone, joint = (fit(fm.Joint(w), net=noisy_net, steps=4) for w in ({"tgt": 1.0}, dict.fromkeys(TASKS, 1.0)))
        torch.testing.assert_close(mean_of(merged), 0.3 * mean_of(alone) + 0.7 * mean_of(joint))

    def test_recompute_takes_them_from_the_targets_training_data(self) -> None:
        inputs, labels = examples(16, 1)
        stream = fm.Stream(TensorDataset(inputs, labels), shared_losses, TASKS, batch_size=16)
        problem = fm.Problem("tgt", {"all": stream}, evaluation())
        algorithm = fm.ForkMerge("mixed", interval=4, search=fm.Fixed((0.3, 0.7)), bn="recompute", bn_batches=3)
        run = fit(algorithm, problem, noisy_net, steps=4)
        norm = run.model.body[1]
        before = run.model.body[0](inputs).detach()  # every batch is the whole data set
        torch.testing.assert_close(norm.running_mean, before.mean(0))
        torch.testing.assert_close(norm.running_var, before.var(0))
        assert norm.num_batches_tracked == 4
        assert norm.momentum == 0.1

    def test_recompute_leaves_a_single_branch_as_it_is(self) -> None:
        one, other = (
            fit(fm.ForkMerge("mixed", interval=4, search=fm.Fixed((0.0, 1.0)), bn=bn), net=noisy_net)
            for bn in ("average", "recompute")
        )
        assert_same_bits(one, other)

    def test_recompute_without_batchnorm_changes_nothing(self) -> None:
        one, other = (fit(fm.ForkMerge("mixed", interval=4, search="fixed", bn=bn)) for bn in ("average", "recompute"))
        assert_same_bits(one, other)

    @pytest.mark.parametrize("bn", ["average", "recompute"])
    def test_candidates_are_scored_exactly_as_they_are_installed(self, bn: Any) -> None:
        problem = shared_problem()
        algorithm = fm.ForkMerge("per_auxiliary", interval=6, bn=bn)
        run = fit(algorithm, problem, noisy_net, steps=18)
        assert any(0 < share < 1 for c in run.coefficients for share in c.values())
        installed = fm.measure(run.model, problem.target_validation)
        assert installed == {"minus_loss": run.rounds[-1].score} == run.metrics
        for finished in run.rounds:
            chosen = [c.score for c in finished.candidates if c.coefficients == finished.coefficients]
            assert chosen == [finished.score]


class TwoNorms(Net):
    """A second BatchNorm, which only the loss of "aux" passes, and a third without statistics."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=0.3)))
        self.heads["aux"] = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3))
        self.heads["odd"] = nn.Sequential(nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3))


class TestRecomputeStatistics:
    def recompute(self, binding: ModelBinding, state: State, problem: fm.Problem, **options: Any) -> None:
        recompute_statistics(binding, state, problem, **{"training": TRAINING, "seed": 5, "count": 2, **options})

    def test_they_are_the_average_over_batches_that_the_seed_and_the_step_choose(self) -> None:
        problem = shared_problem(TensorDataset(*examples(64, 1)))
        seen = set()
        for seed, step, count in [(5, 7, 1), (5, 7, 3), (5, 8, 3), (6, 7, 3)]:
            binding, (state,) = make_branches(1)
            state.step = step
            self.recompute(binding, state, problem, seed=seed, count=count)
            binding.attach_weights(state)
            feed = batches(
                "all", problem.stream_map["all"], range(count), derive(seed, "bn", step), torch.device("cpu")
            )
            inputs = [binding.model.body[0](batch[0]).detach() for batch in feed]
            mean = torch.stack([values.mean(0) for values in inputs]).mean(0)
            torch.testing.assert_close(state.buffers["body.1.running_mean"], mean)
            torch.testing.assert_close(
                state.buffers["body.1.running_var"], torch.stack([values.var(0) for values in inputs]).mean(0)
            )
            seen.add(tuple(mean.tolist()))
        assert len(seen) == 4

    def test_every_batch_has_a_seed_of_its_own_and_the_losses_see_the_target_and_the_step(self) -> None:
        calls: list[tuple[Any, ...]] = []

        def losses(model: nn.Module, batch: Any, tasks: Any, context: fm.Context) -> dict[str, Tensor]:
            modes = [model.training, model.body[1].training, model.body[3].training]
            calls.append((list(tasks), context.step, context.seed, torch.rand(1).item(), modes))
            return shared_losses(model, batch, tasks, context)

        binding, (state,) = make_branches(1)
        torch.manual_seed(3)
        expected = torch.rand(1)
        torch.manual_seed(3)
        self.recompute(binding, state, problem_with(losses))
        assert torch.equal(torch.rand(1), expected)  # the caller's random state goes on as it would have
        for position, call in enumerate(calls):
            seed = derive(derive(5, "bn", 7), "all", position)
            torch.manual_seed(seed)
            assert call == (["tgt"], 7, seed, torch.rand(1).item(), [False, True, False])
        assert len(calls) == 2

    def test_streams_without_the_target_are_not_read(self) -> None:
        binding, (state,) = make_branches(1)
        _, (twin,) = make_branches(1)
        self.recompute(binding, state, domains_problem())
        only = fm.Problem("tgt", [domains_problem().stream_map["tgt"]], evaluation())
        self.recompute(binding, twin, only)
        assert_same_bits(state.buffers, twin.buffers)

    def test_layers_that_the_target_does_not_reach_keep_theirs_and_nothing_else_changes(self) -> None:
        binding, (state,) = make_branches(1, TwoNorms)
        before = state.clone()
        self.recompute(binding, state, shared_problem())
        assert_same_bits(state.rows, before.rows)
        changed = {name for name in before.buffers if not torch.equal(state.buffers[name], before.buffers[name])}
        assert changed == {"body.1.running_mean", "body.1.running_var"}
        assert list(state.buffers) == list(before.buffers)
        assert binding.model.body[1].momentum == 0.3
        assert binding.model.training

    def test_batches_run_in_the_precision_of_training(self) -> None:
        seen = []

        def losses(model: nn.Module, batch: Any, tasks: Any, context: fm.Context) -> dict[str, Tensor]:
            seen.append(torch.is_autocast_enabled("cpu"))
            return shared_losses(model, batch, tasks, context)

        for precision in ("float32", "bfloat16"):
            binding, (state,) = make_branches(1)
            self.recompute(
                binding, state, problem_with(losses), training=fm.Training(SGD, precision=precision), count=1
            )
        assert seen == [False, True]

    def test_a_model_without_batchnorm_is_attached_and_not_run(self) -> None:
        binding, (state,) = make_branches(1, plain_net)
        self.recompute(binding, state, problem_with(lambda *arguments: pytest.fail("it ran")))
        parameter = binding.model.get_parameter("body.0.weight")
        assert parameter.data_ptr() == state.rows["float32"].data_ptr()

    def test_refresh_with_recomputes_with_what_it_was_given(self) -> None:
        problem = shared_problem()
        binding, (state,) = make_branches(1)
        _, (twin,) = make_branches(1)
        refresh_with(binding, problem, training=TRAINING, seed=5, count=2)(state)
        self.recompute(binding, twin, problem)
        assert_same_bits(state.buffers, twin.buffers)
