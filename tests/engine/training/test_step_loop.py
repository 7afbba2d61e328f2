"""The steps of a branch: which examples and losses they ask for, what they add up, and in which precision."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import forkmerge as fm
from _asserts import assert_other_bits, assert_same_bits, assert_same_run, assert_same_state, bits
from branch_training import WEIGHTS, resumed_bits, train
from forkmerge.engine.training.branch import train_branch
from forkmerge.problem import example_order
from problems import (
    ADAM,
    SGD,
    TASKS,
    Augmented,
    Counted,
    Point,
    Stopped,
    domains_problem,
    evaluation,
    examples,
    fit,
    noisy_net,
    plain_loop,
    plain_net,
    quadratic_problem,
    seeded,
    shared_losses,
    shared_problem,
    stop_at,
)


class TestWeightZero:
    def test_the_data_of_a_task_of_weight_zero_is_not_read(self) -> None:
        data = {task: Counted() for task in TASKS}
        train(seeded(plain_net), domains_problem(dict(data)), {"tgt": 1.0, "aux": 0.0}, steps=5)
        assert {task: held.reads for task, held in data.items()} == {"tgt": 40, "aux": 0, "odd": 0}

    def test_the_loss_of_a_task_of_weight_zero_is_not_asked_for(self) -> None:
        asked: Counter[str] = Counter()

        def losses(model: nn.Module, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
            asked.update(tasks)
            return shared_losses(model, batch, tasks, context)

        stream = fm.Stream(TensorDataset(*examples(16, 1)), losses, TASKS, 8)
        train(seeded(plain_net), fm.Problem("tgt", [stream], evaluation()), {"tgt": 1.0, "odd": 0.5}, steps=5)
        assert asked == {"tgt": 5, "odd": 5}

    def test_a_whole_run_reads_an_auxiliary_only_for_the_branches_that_train_on_it(self) -> None:
        data = {task: Counted() for task in TASKS}
        fit(fm.SingleTask(interval=6), domains_problem(dict(data)), steps=6)
        assert data["aux"].reads == data["odd"].reads == 0
        assert data["tgt"].reads > 0

    def test_its_head_stays_as_it_was(self) -> None:
        net = seeded(plain_net)
        before = bits(net)
        train(net, weights={"tgt": 1.0})
        after = bits(net)
        assert torch.equal(before["heads.odd.weight"], after["heads.odd.weight"])
        assert not torch.equal(before["heads.tgt.weight"], after["heads.tgt.weight"])


class TestMissingLabels:
    @pytest.mark.parametrize("how", ["absent", "none"])
    def test_a_batch_without_a_label_trains_on_the_other_tasks(self, how: str) -> None:
        def losses(model: nn.Module, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
            values: dict[str, Any] = shared_losses(model, batch, tasks, context)
            if context.step % 2:
                if how == "absent":
                    del values["aux"]
                else:
                    values["aux"] = None
            return values

        def reference(model: nn.Module, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
            values = shared_losses(model, batch, tasks, context)
            if context.step % 2:
                values["aux"] = values["aux"] * 0.0
            return values

        nets = [seeded(plain_net), seeded(plain_net)]
        plain = fm.OptimizerOf("SGD", lr=0.3)  # a zero gradient and none are the same without momentum or decay
        for net, function in zip(nets, (losses, reference), strict=True):
            stream = fm.Stream(TensorDataset(*examples(16, 1)), function, TASKS, 8)
            result = train(net, fm.Problem("tgt", [stream], evaluation()), steps=6, optimizer=plain)
            assert set(result.losses) == {"tgt", "aux"}
        for name, tensor in bits(nets[0]).items():
            torch.testing.assert_close(tensor, bits(nets[1])[name])

    def test_the_recorded_loss_is_the_mean_over_batches_that_had_one(self) -> None:
        def losses(model: nn.Module, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
            base = 0.0 * shared_losses(model, batch, ("tgt",), context)["tgt"]
            return {"tgt": base + 1.0, "aux": None if context.step < 4 else base + context.step}

        stream = fm.Stream(TensorDataset(*examples(16, 1)), losses, TASKS, 8)
        result = train(seeded(plain_net), fm.Problem("tgt", [stream], evaluation()), steps=6)
        assert result.losses == pytest.approx({"tgt": 1.0, "aux": 4.5})

    def test_a_step_without_any_label_changes_nothing_but_the_step_counter(self) -> None:
        def losses(model: nn.Module, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
            return {} if context.step else shared_losses(model, batch, tasks, context)

        stream = fm.Stream(TensorDataset(*examples(16, 1)), losses, TASKS, 8)
        problem = fm.Problem("tgt", [stream], evaluation())
        once, often = seeded(plain_net), seeded(plain_net)
        train(once, problem, steps=1)
        assert train(often, problem, steps=4, clip_norm=0.5).state.step == 4
        train(reference := seeded(plain_net), problem, steps=1, clip_norm=0.5)
        assert_same_bits(reference, often)
        assert_other_bits(once, often)

    def test_the_schedule_goes_on_over_a_step_without_any_label(self) -> None:
        def losses(model: nn.Module, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
            return {} if context.step % 2 else shared_losses(model, batch, tasks, context)

        stream = fm.Stream(TensorDataset(*examples(16, 1)), losses, TASKS, 8)
        problem = fm.Problem("tgt", [stream], evaluation())
        state = train(seeded(plain_net), problem, steps=4, scheduler=fm.SchedulerOf("StepLR", step_size=1)).state
        assert state.scheduler["last_epoch"] == 4
        assert state.groups[0]["lr"] == pytest.approx(0.3 * 0.1**4)


class TestWeights:
    def test_a_loss_weight_multiplies_the_gradient(self) -> None:
        plain = fm.OptimizerOf("SGD", lr=0.1)
        start = bits(seeded(plain_net))
        moved = {}
        for weight in (1.0, 0.25):
            net = seeded(plain_net)
            train(net, weights={"odd": weight}, steps=1, optimizer=plain)
            moved[weight] = bits(net)["body.0.weight"] - start["body.0.weight"]
        torch.testing.assert_close(moved[0.25], 0.25 * moved[1.0])

    def test_a_sampling_weight_is_the_share_of_steps_that_train_on_the_task_alone(self) -> None:
        asked: list[tuple[str, ...]] = []

        def losses(model: nn.Module, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
            asked.append(tuple(tasks))
            return shared_losses(model, batch, tasks, context)

        stream = fm.Stream(TensorDataset(*examples(16, 1)), losses, TASKS, 8)
        problem = fm.Problem("tgt", [stream], evaluation(), weights="sampling")
        train(seeded(plain_net), problem, {"tgt": 3.0, "aux": 1.0, "odd": 0.0}, steps=200)
        counts = Counter(asked)
        assert set(counts) == {("tgt",), ("aux",)}
        assert counts["tgt",] / 200 == pytest.approx(0.75, abs=0.08)

    def test_a_sampled_step_is_one_unweighted_step_on_that_task(self) -> None:
        problem = shared_problem(weights="sampling")
        weights = {"tgt": 0.3, "aux": 0.7}
        picked = [example_order.pick_task(("tgt", "aux"), (0.3, 0.7), 0, step) for step in range(6)]
        assert len(set(picked)) == 2
        ours = train(seeded(plain_net), problem, weights)
        net = seeded(plain_net)
        training = fm.Training(SGD)
        binding = training.binding(net)
        state = binding.initial()
        for task in picked:
            mixture = fm.Mixture("one", {task: 1.0})
            train_branch(binding, shared_problem(), mixture, state, steps=1, training=training, seed=0)
        assert torch.equal(ours.state.rows["float32"], state.rows["float32"])

    def test_only_the_data_of_the_picked_task_is_read(self) -> None:
        data = {task: Counted() for task in TASKS}
        problem = domains_problem(dict(data), weights="sampling")
        train(seeded(plain_net), problem, {"tgt": 1.0, "aux": 1.0}, steps=10)
        assert data["tgt"].reads + data["aux"].reads == 80
        assert data["tgt"].reads > 0
        assert data["aux"].reads > 0
        assert data["odd"].reads == 0


class TestStreamsInTurn:
    """A branch that reads one auxiliary stream per step."""

    JOINT: ClassVar = {"tgt": 1.0, "aux": 0.5, "odd": 2.0}

    def test_every_step_reads_the_target_and_every_k_steps_each_other_stream_once(self) -> None:
        data = {task: Counted(20 + 10 * i, 10 + i) for i, task in enumerate(TASKS)}
        training = fm.Training(SGD)
        binding = training.binding(seeded(plain_net))
        mixture, state = fm.Mixture("joint", self.JOINT, auxiliary_streams="one"), binding.initial()
        seen = []
        for _ in range(12):
            before = {task: dataset.reads for task, dataset in data.items()}
            train_branch(binding, domains_problem(data), mixture, state, steps=1, training=training, seed=0)
            seen.append({task for task, dataset in data.items() if dataset.reads > before[task]})
        assert all(len(read) == 2 and "tgt" in read for read in seen)
        assert all(one | other == set(TASKS) for one, other in zip(seen[::2], seen[1::2], strict=True))
        assert len(set(map(frozenset, seen[::2]))) == 2, "in an order drawn anew"

    def test_a_step_is_the_step_on_the_target_and_twice_that_stream(self) -> None:
        training = fm.Training(fm.OptimizerOf("SGD", lr=0.1))
        binding = training.binding(seeded(plain_net))
        one = fm.Mixture("joint", self.JOINT, auxiliary_streams="one")
        state = binding.initial()
        losses = train_branch(binding, domains_problem(), one, state, steps=1, training=training, seed=0).losses
        (drawn,) = set(losses) - {"tgt"}
        binding = training.binding(seeded(plain_net))
        twin = binding.initial()
        weights = {"tgt": 1.0, drawn: 2 * self.JOINT[drawn]}
        train_branch(binding, domains_problem(), fm.Mixture("joint", weights), twin, steps=1, training=training, seed=0)
        assert_same_state(state, twin)

    def test_over_k_steps_of_a_fixed_model_the_gradients_add_up_to_those_of_all_streams(self) -> None:
        # Plain descent on losses that are linear in the weights: the sum of steps is the sum of gradients.
        def linear(model: Any, batch: Any, tasks: Any, context: fm.Context) -> Any:
            return {tasks[0]: {"tgt": 1.0, "aux": 3.0, "odd": -5.0}[tasks[0]] * model.theta.sum()}

        streams = [fm.Stream(TensorDataset(torch.zeros(1)), linear, task, 1) for task in TASKS]
        problem = fm.Problem("tgt", streams, quadratic_problem({"tgt": (0, 0)}, (0, 0)).target_validation)
        moved = []
        for which in ("one", "all"):
            mixture = fm.Mixture("joint", self.JOINT, auxiliary_streams=which)
            run = fm.ForkMerge([mixture], search="fixed", interval=8).fit(
                problem, model=Point, optimizer=fm.OptimizerOf("SGD", lr=0.5), steps=8, threads=1
            )
            moved.append(run.model.theta.tolist())
        assert moved[0] == moved[1] == [-0.5 * 8 * (1 + 1.5 - 10)] * 2

    def test_tasks_in_the_targets_own_stream_are_trained_in_every_step(self) -> None:
        one, every = (fm.Mixture("joint", self.JOINT, auxiliary_streams=which) for which in ("one", "all"))
        assert_same_bits(*(fit(fm.ForkMerge([m], search="fixed")) for m in (one, every)))

    def test_sampling_weights_draw_one_task_per_step_anyway(self) -> None:
        problem = domains_problem(weights="sampling")
        one, every = (fm.Mixture("joint", self.JOINT, auxiliary_streams=which) for which in ("one", "all"))
        assert_same_bits(*(fit(fm.ForkMerge([m], search="fixed"), problem) for m in (one, every)))

    def test_workers_segments_and_resumes_do_not_change_the_bits(self, tmp_path: Path) -> None:
        algorithm = fm.ForkMerge(fm.PerAuxiliary(joint="sampled"), interval=6, refit=True)
        whole = fit(algorithm, domains_problem(), noisy_net)
        assert_same_run(fit(algorithm, domains_problem(), noisy_net, workers=2), whole)
        with pytest.raises(Stopped):
            fit(algorithm, domains_problem(), noisy_net, folder=tmp_path, checkpoint_every=1, on_event=stop_at(21))
        resumed = fit(algorithm, domains_problem(), noisy_net, folder=tmp_path, checkpoint_every=1, resume=True)
        assert_same_run(resumed, whole)


class TestBatches:
    def test_paired_branches_see_the_same_batch_of_a_stream_at_a_step_whatever_else_they_train_on(self) -> None:
        seen: dict[str, list[Any]] = {"one": [], "other": []}
        for name, weights in (("one", {"tgt": 1.0}), ("other", {"tgt": 1.0, "odd": 1.0})):

            def losses(model: nn.Module, batch: Any, tasks: Any, context: fm.Context, name: str = name) -> Any:
                seen[name].append((batch[0].tolist(), torch.rand(1).item(), context.generator.initial_seed()))
                return shared_losses(model, batch, tasks, context)

            stream = fm.Stream(Augmented(), losses, TASKS, 8)
            train(seeded(plain_net), fm.Problem("tgt", [stream], evaluation()), weights)
        assert seen["one"] == seen["other"]

    def test_unpaired_branches_see_their_own_batches(self) -> None:
        data = TensorDataset(*examples(16, 1))
        seen: dict[str, list[Any]] = {}

        def losses(model: nn.Module, batch: Any, tasks: Any, context: fm.Context) -> Any:
            seen.setdefault(current, []).append(batch[0].tolist())
            return shared_losses(model, batch, tasks, context)

        problem = fm.Problem("tgt", [fm.Stream(data, losses, TASKS, 8)], evaluation())
        training = fm.Training(SGD, paired=False)
        binding = training.binding(seeded(plain_net))
        state = binding.initial()
        for current in ("one", "other", "one again"):
            mixture = fm.Mixture(current.removesuffix(" again"), WEIGHTS)
            train_branch(binding, problem, mixture, state.clone(), steps=3, training=training, seed=0)
        assert seen["one"] == seen["one again"]
        assert seen["one"] != seen["other"]

    def test_an_own_collate_function_makes_the_batch(self) -> None:
        def collate(rows: list[Any]) -> dict[str, Any]:
            return {"x": torch.stack([x for x, _ in rows]), "y": torch.stack([y for _, y in rows]), "size": len(rows)}

        def losses(model: nn.Module, batch: Any, tasks: Any, context: fm.Context) -> Any:
            assert batch["size"] == 8
            return shared_losses(model, (batch["x"], batch["y"]), tasks, context)

        nets = [seeded(plain_net), seeded(plain_net)]
        data = TensorDataset(*examples(16, 1))
        for net, stream in zip(
            nets, (fm.Stream(data, losses, TASKS, 8, collate), fm.Stream(data, shared_losses, TASKS, 8)), strict=True
        ):
            train(net, fm.Problem("tgt", {"all": stream}, evaluation()))
        assert_same_bits(*nets)

    def test_a_batch_larger_than_the_data_set_is_filled_from_the_next_epoch(self) -> None:
        sizes: list[int] = []

        def losses(model: nn.Module, batch: Any, tasks: Any, context: fm.Context) -> Any:
            sizes.append(len(batch[0]))
            return shared_losses(model, batch, tasks, context)

        stream = fm.Stream(TensorDataset(*examples(5, 1)), losses, TASKS, 16)
        train(seeded(plain_net), fm.Problem("tgt", [stream], evaluation()), steps=3)
        assert sizes == [16, 16, 16]

    def test_the_context_holds_the_step_and_a_generator_of_this_call(self) -> None:
        seen: list[tuple[int, float]] = []

        def losses(model: nn.Module, batch: Any, tasks: Any, context: fm.Context) -> Any:
            seen.append((context.step, torch.rand(1, generator=context.generator).item()))
            return shared_losses(model, batch, tasks, context)

        stream = fm.Stream(TensorDataset(*examples(16, 1)), losses, TASKS, 8)
        for _ in range(2):
            train(seeded(plain_net), fm.Problem("tgt", [stream], evaluation()), steps=4)
        assert seen[:4] == seen[4:]
        assert [step for step, _ in seen[:4]] == [0, 1, 2, 3]
        assert len({value for _, value in seen[:4]}) == 4


class TestGradients:
    def test_clipping_is_torchs_own(self) -> None:
        net = seeded(plain_net)
        train(net, steps=7, clip_norm=0.05)
        unclipped = seeded(plain_net)
        train(unclipped, steps=7)
        reference = plain_loop(lambda: seeded(plain_net), SGD, WEIGHTS, 7, clip=0.05)
        assert_same_bits(net, reference)
        assert_other_bits(net, unclipped)

    def test_accumulating_two_micro_batches_is_one_batch_of_twice_the_size(self) -> None:
        nets = [seeded(plain_net).double(), seeded(plain_net).double()]
        inputs, labels = examples(16, 1)
        for net, (size, accumulate) in zip(nets, ((4, 2), (8, 1)), strict=True):
            stream = fm.Stream(TensorDataset(inputs.double(), labels), shared_losses, TASKS, size)
            problem = fm.Problem("tgt", {"all": stream}, evaluation())
            train(net, problem, steps=7, accumulate=accumulate, clip_norm=0.5)
        for name, tensor in bits(nets[0]).items():
            torch.testing.assert_close(tensor, bits(nets[1])[name], rtol=1e-10, atol=1e-12)

    def test_parameters_that_no_loss_reaches_are_reported(self) -> None:
        assert train(seeded(plain_net)).untouched == ["heads.odd.weight", "heads.odd.bias"]
        run = fit(fm.SingleTask(), steps=4)
        assert any("heads.aux.weight" in note and "without gradient" in note for note in run.notes)


class TestPrecision:
    def test_bfloat16_autocast_trains_float32_weights(self) -> None:
        seen: set[torch.dtype] = set()

        def losses(model: nn.Module, batch: Any, tasks: Any, context: fm.Context) -> Any:
            seen.add(model.body(batch[0]).dtype)
            return shared_losses(model, batch, tasks, context)

        stream = fm.Stream(TensorDataset(*examples(16, 1)), losses, TASKS, 8)
        net, exact = seeded(plain_net), seeded(plain_net)
        train(net, fm.Problem("tgt", {"all": stream}, evaluation()), precision="bfloat16")
        train(exact)
        assert seen == {torch.bfloat16}
        assert {p.dtype for p in net.parameters()} == {torch.float32}
        assert_other_bits(net, exact)
        for name, tensor in bits(net).items():
            torch.testing.assert_close(tensor, bits(exact)[name], rtol=0.1, atol=0.05)

    def test_bfloat16_runs_do_not_depend_on_segments(self) -> None:
        whole = resumed_bits(noisy_net, ADAM, cuts=(0, 10), precision="bfloat16")
        assert_same_bits(whole, resumed_bits(noisy_net, ADAM, precision="bfloat16"))

    def test_the_scaler_of_float16_is_part_of_a_branchs_state(self) -> None:
        whole = resumed_bits(plain_net, SGD, cuts=(0, 10), precision="float16")
        assert_same_bits(whole, resumed_bits(plain_net, SGD, precision="float16"))
        state = train(seeded(plain_net), precision="float16").state
        assert state.scaler["scale"] == 65536.0
        assert state.scaler["_growth_tracker"] == 6

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="float16 training as it is meant needs a GPU")
    def test_float16_with_a_scaler_on_a_gpu_does_not_depend_on_segments(self) -> None:
        def gpu_net() -> nn.Module:
            return noisy_net().cuda()

        whole = resumed_bits(gpu_net, ADAM, cuts=(0, 10), precision="float16")
        assert_same_bits(whole, resumed_bits(gpu_net, ADAM, precision="float16"))

    def test_half_precision_parameters_are_trained_and_merged_in_their_dtype(self) -> None:
        def half_net() -> nn.Module:
            return plain_net().to(torch.bfloat16)

        def losses(model: nn.Module, batch: Any, tasks: Any, context: fm.Context) -> Any:
            return shared_losses(model, (batch[0].bfloat16(), batch[1]), tasks, context)

        def predict(model: nn.Module, batch: Any) -> Any:
            return model(batch[0].bfloat16(), "tgt"), batch[1][:, 0]

        stream = fm.Stream(TensorDataset(*examples(16, 1)), losses, TASKS, 8)
        score = fm.Evaluation(TensorDataset(*examples(24, 2)), fm.accuracy, predict)
        run = fit(fm.ForkMerge("mixed", interval=4, search="fixed"), fm.Problem("tgt", [stream], score), half_net)
        assert {p.dtype for p in run.model.parameters()} == {torch.bfloat16}
        assert_other_bits(run, seeded(half_net))


class _Slow(Dataset[Any]):
    """Notes the process that reads."""

    def __init__(self) -> None:
        self.inputs, self.labels = examples(16, 1)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.inputs[index], self.labels[index], os.getpid()


def test_loader_workers_read_the_examples() -> None:
    pids: set[int] = set()

    def losses(model: nn.Module, batch: Any, tasks: Any, context: fm.Context) -> Any:
        pids.update(batch[2].tolist())
        return shared_losses(model, batch[:2], tasks, context)

    problem = fm.Problem("tgt", [fm.Stream(_Slow(), losses, TASKS, 8)], evaluation())
    train(seeded(plain_net), problem, steps=4, loader_workers=2)
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_streams_of_their_own_are_read_side_by_side() -> None:
    """A step of a multi-domain branch is the sum of the domains' weighted gradients."""
    plain = fm.OptimizerOf("SGD", lr=0.1)
    problem = domains_problem()
    net, start = seeded(plain_net), bits(seeded(plain_net))
    train(net, problem, {"tgt": 1.0, "aux": 0.5}, steps=1, optimizer=plain)
    moved = {}
    for task in ("tgt", "aux"):
        single = seeded(plain_net)
        train(single, problem, {task: 1.0}, steps=1, optimizer=plain)
        moved[task] = bits(single)["body.0.weight"] - start["body.0.weight"]
    expected = start["body.0.weight"] + moved["tgt"] + 0.5 * moved["aux"]
    torch.testing.assert_close(bits(net)["body.0.weight"], expected)
