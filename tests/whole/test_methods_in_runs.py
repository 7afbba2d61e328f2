"""Methods in whole runs: stopped, in processes, in half precision, where weights are shares of steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from torch import nn
from torch.utils.data import TensorDataset

import forkmerge as fm
from _asserts import assert_same_bits, bits
from forkmerge.algorithms.events import CheckpointWritten
from forkmerge.engine.training.branch import train_branch
from forkmerge.methods import EW, FAMO, METHODS, AutoLambda, AuxiNash, LossMethod, Method, PCGrad
from forkmerge.testing import small_problem, train_small
from problems import Counted, diverge_from, domains_problem, evaluation, examples, fit, plain_net


@dataclass(frozen=True)
class Stop:
    """An observer that ends a run when it reaches a step."""

    at: int

    def __call__(self, event: Any) -> None:
        if isinstance(event, CheckpointWritten) and event.step == self.at:
            raise KeyboardInterrupt


class TestWholeRuns:
    @pytest.mark.parametrize("method", ["FAMO", "GradVac", "AutoLambda", "torchjd:FAMO", "torchjd:ExcessMTL"])
    def test_a_run_that_was_stopped_ends_with_the_same_bits(self, method: str, tmp_path: Any) -> None:
        options: dict[str, Any] = {"steps": 9, "checkpoint_every": 2}
        algorithm = fm.ForkMerge("per_auxiliary", interval=5, method=method)
        whole = fit(algorithm, **options)
        with pytest.raises(KeyboardInterrupt):
            fit(algorithm, **options, folder=tmp_path / "run", on_event=Stop(6))
        again = fit(algorithm, **options, folder=tmp_path / "run", resume=True)
        assert_same_bits(whole, again)
        assert whole.score == again.score

    @pytest.mark.parametrize("method", ["AuxiNash", "torchjd:FAMO"])
    def test_worker_processes_give_the_same_bits(self, method: str) -> None:
        algorithm = fm.ForkMerge("per_auxiliary", interval=2, method=method)
        assert_same_bits(fit(algorithm, steps=4), fit(algorithm, steps=4, workers=2))

    def test_a_branch_of_one_task_needs_no_method(self) -> None:
        """The target-only branch of ForkMerge is plain training whatever the method; so is SingleTask."""
        alone = fm.ForkMerge({"alone": {"tgt": 1.0}}, interval=4, method="NashMTL")
        assert_same_bits(fit(alone), fit(fm.SingleTask(interval=4)))

    def test_reports_reach_the_notes_of_a_run(self) -> None:
        stream = fm.Stream(TensorDataset(*examples(16, 1)), diverge_from(2, "aux"), ("tgt", "aux"), 8)
        run = fit(fm.Joint(method="PCGrad", interval=4), fm.Problem("tgt", [stream], evaluation()), steps=4)
        assert any("gradient of 'aux' was not finite" in note for note in run.notes)
        assert all(bool(value.isfinite().all()) for value in bits(run).values())
        assert run.score is not None

    @pytest.mark.parametrize("name", [name for name in METHODS if not issubclass(METHODS[name], LossMethod)])
    def test_gradients_may_be_compared_at_the_representation(self, name: str) -> None:
        method = AuxiNash(every=2) if name == "AuxiNash" else METHODS[name]()
        problem = small_problem(declared=True, missing=True)
        assert train_small(method, problem, gradients="representation").state.is_finite()

    @pytest.mark.parametrize("precision", ["bfloat16", "float16"])
    @pytest.mark.parametrize("method", [EW(), FAMO(), PCGrad(), AutoLambda(), AuxiNash(every=2)], ids=repr)
    def test_half_precision_trains(self, method: Method, precision: Any) -> None:
        result = train_small(method, precision=precision, cuts=(0, 2, 4))
        assert result.state.is_finite()
        assert not result.reports

    def test_every_method_runs_in_sampling_problems_too(self) -> None:
        """A method combines all tasks in every step; the weights are then loss weights."""
        run = fit(fm.Joint(method="MGDA"), domains_problem(weights="sampling"), steps=3)
        assert isinstance(run.model, nn.Module)

    @pytest.mark.parametrize(("tasks", "part"), [(("tgt", "aux"), 4), (("tgt", "aux", "odd"), 2)])
    def test_a_step_reads_one_batch_in_all_where_weights_are_shares_of_steps(self, tasks: Any, part: int) -> None:
        """So a method sees as many examples as training without one; of its second batch, too."""
        data = {task: Counted(1000) for task in ("tgt", "aux", "odd")}
        problem = domains_problem(dict(data), weights="sampling")
        training = fm.Training(optimizer=fm.OptimizerOf("SGD", lr=0.01), method=AutoLambda(look_at="second"))
        binding = training.binding(plain_net())
        mixture = fm.Mixture("all", dict.fromkeys(tasks, 1.0))
        train_branch(binding, problem, mixture, binding.initial(), steps=5, training=training, seed=0)
        assert {task: counted.reads for task, counted in data.items()} == {
            task: (2 * 5 * part if task in tasks else 0) for task in data
        }
