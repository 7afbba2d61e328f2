"""One branch: what a step reads and computes, any optimizer and schedule, any module, in segments of any length."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR
from torch.utils.data import Dataset, TensorDataset

import forkmerge as fm
from forkmerge.engine.executors.shared_rows import from_wire, to_wire
from forkmerge.engine.training.branch import BranchResult, train_branch
from forkmerge.engine.training.model_binding import ModelBinding, check_module
from forkmerge.engine.training.state import State
from forkmerge.problem import example_order, randomness
from problems import (
    ADAM,
    SGD,
    TASKS,
    WIDTH,
    Augmented,
    Bag,
    Counted,
    Net,
    bits,
    conv_net,
    domains_problem,
    evaluation,
    examples,
    fit,
    frozen_net,
    noisy_net,
    plain_loop,
    plain_net,
    same_bits,
    seeded,
    shared_losses,
    shared_problem,
    tied_net,
)

WEIGHTS = {"tgt": 1.0, "aux": 0.5}


def train(
    net: nn.Module,
    problem: fm.Problem | None = None,
    weights: dict[str, float] | None = None,
    steps: int = 6,
    seed: int = 0,
    **options: Any,
) -> BranchResult:
    """Train a net in place for some steps."""
    training = fm.Training(**{"optimizer": SGD, **options})
    binding = training.binding(net)
    mixture = fm.Mixture("branch", weights or WEIGHTS)
    result = train_branch(
        binding, problem or shared_problem(), mixture, binding.initial(), steps=steps, training=training, seed=seed
    )
    binding.attach_weights(result.state)
    return result


def resumed_bits(
    net: Any, optimizer: Any, scheduler: Any = None, cuts: Sequence[int] = (0, 1, 4, 5, 10), **options: Any
) -> dict[str, Tensor]:
    """The bits after training in segments, each on a new module and optimizer, the state passing through bytes."""
    training = fm.Training(optimizer, scheduler, **options)

    def new_bench() -> ModelBinding:
        with randomness.random_state_kept():
            randomness.set_random_state(randomness.derive(0, "model"))
            return training.binding(net())

    binding = new_bench()
    state = binding.initial()
    for start, end in pairwise(cuts):
        binding = new_bench()
        state = binding.place(from_wire(to_wire(state)))
        mixture = fm.Mixture("branch", WEIGHTS)
        train_branch(binding, shared_problem(), mixture, state, steps=end - start, training=training, seed=0)
    binding.attach_weights(state)
    return bits(binding.model)


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
            found: dict[str, Any] = shared_losses(model, batch, tasks, context)
            if context.step % 2:
                if how == "absent":
                    del found["aux"]
                else:
                    found["aux"] = None
            return found

        def reference(model: nn.Module, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
            found = shared_losses(model, batch, tasks, context)
            if context.step % 2:
                found["aux"] = found["aux"] * 0.0
            return found

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
        assert same_bits(reference, often)
        assert not same_bits(once, often)

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
        assert same_bits(*nets)

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
        assert same_bits(net, reference)
        assert not same_bits(net, unclipped)

    def test_accumulating_two_micro_batches_is_one_batch_of_twice_the_size(self) -> None:
        nets = [seeded(plain_net).double(), seeded(plain_net).double()]
        inputs, labels = examples(16, 1)
        for net, (size, accumulate) in zip(nets, ((4, 2), (8, 1)), strict=True):
            stream = fm.Stream(TensorDataset(inputs.double(), labels), shared_losses, TASKS, size)
            problem = fm.Problem("tgt", {"all": stream}, evaluation())
            train(net, problem, steps=7, accumulate=accumulate, clip_norm=0.5)
        for name, tensor in bits(nets[0]).items():
            torch.testing.assert_close(tensor, bits(nets[1])[name], rtol=1e-10, atol=1e-12)

    def test_parameter_groups_keep_their_own_learning_rates(self) -> None:
        groups = fm.OptimizerOf("SGD", lr=0.1, momentum=0.9, group_lr={"body": 0.1, "heads.aux": 0.0})

        def by_hand(model: nn.Module) -> torch.optim.Optimizer:
            named = dict(model.named_parameters())
            pick = [
                {"params": [p for n, p in named.items() if n.startswith("body")], "lr": 0.1 * 0.1},
                {"params": [p for n, p in named.items() if n.startswith("heads.aux")], "lr": 0.0},
                {"params": [p for n, p in named.items() if n.startswith(("heads.tgt", "heads.odd"))]},
            ]
            return torch.optim.SGD(pick, lr=0.1, momentum=0.9)

        ours = resumed_bits(plain_net, groups, CosineOf10)
        assert same_bits(ours, plain_loop(plain_net, by_hand, WEIGHTS, 10, scheduler=CosineOf10))

    def test_parameters_that_no_loss_reaches_are_reported(self) -> None:
        assert train(seeded(plain_net)).untouched == ["heads.odd.weight", "heads.odd.bias"]
        run = fit(fm.SingleTask(), steps=4)
        assert any("heads.aux.weight" in note and "without gradient" in note for note in run.notes)


def CosineOf10(optimizer: torch.optim.Optimizer) -> CosineAnnealingLR:
    return CosineAnnealingLR(optimizer, T_max=10)


def warm_up_then_cosine(optimizer: torch.optim.Optimizer) -> SequentialLR:
    warm = LinearLR(optimizer, start_factor=0.1, total_iters=3)
    return SequentialLR(optimizer, [warm, CosineAnnealingLR(optimizer, T_max=7)], milestones=[3])


def inverse_root(step: int) -> float:
    return 1 / math.sqrt(1 + step)


def lambda_schedule(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, inverse_root)


SCHEDULERS = {
    "CosineAnnealingLR": CosineOf10,
    "StepLR": fm.SchedulerOf("StepLR", step_size=3),
    "MultiStepLR": fm.SchedulerOf("MultiStepLR", milestones=[2, 4, 4, 8]),
    "ExponentialLR": fm.SchedulerOf("ExponentialLR", gamma=0.9),
    "OneCycleLR": fm.SchedulerOf("OneCycleLR", max_lr=0.3, total_steps=11),
    "CyclicLR": fm.SchedulerOf("CyclicLR", base_lr=0.01, max_lr=0.3, step_size_up=3),
    "CosineAnnealingWarmRestarts": fm.SchedulerOf("CosineAnnealingWarmRestarts", T_0=4),
    "PolynomialLR": fm.SchedulerOf("PolynomialLR", total_iters=8),
    "SequentialLR": warm_up_then_cosine,
    "LambdaLR": lambda_schedule,
}


class TestSchedules:
    @pytest.mark.parametrize("name", SCHEDULERS)
    def test_a_schedule_over_segments_and_resumes_is_that_of_a_plain_loop(self, name: str) -> None:
        scheduler = SCHEDULERS[name]
        ours = resumed_bits(plain_net, SGD, scheduler)
        assert same_bits(ours, plain_loop(plain_net, SGD, WEIGHTS, 10, scheduler=scheduler))
        assert not same_bits(ours, plain_loop(plain_net, SGD, WEIGHTS, 10)), "the schedule should matter"

    def test_the_schedule_runs_on_across_merges(self) -> None:
        rates: list[float] = []

        class Watched(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                rates.append(self.param_groups[0]["lr"])
                return super().step(closure)

        def watched(model: nn.Module) -> torch.optim.Optimizer:
            return Watched(model.parameters(), lr=1.0)

        fit(
            fm.ForkMerge(interval=2, optimizer_state="reset"),
            optimizer=watched,
            scheduler=fm.SchedulerOf("StepLR", step_size=1, gamma=0.5),
            steps=6,
        )
        assert rates == [rate for first in (1.0, 0.25, 0.0625) for rate in [first, first / 2] * 2]

    def test_reduce_on_plateau_is_refused_by_name(self) -> None:
        with pytest.raises(fm.ProblemError, match=r"ReduceLROnPlateau follows a metric.*CosineAnnealingLR"):
            fm.Training(SGD, fm.SchedulerOf("ReduceLROnPlateau")).binding(plain_net())


def muon_on_matrices(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.02)


OPTIMIZERS: dict[str, Any] = {
    "SGD": fm.OptimizerOf("SGD", lr=0.1),
    "SGD momentum": SGD,
    "SGD nesterov foreach": fm.OptimizerOf("SGD", lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD fused": fm.OptimizerOf("SGD", lr=0.1, momentum=0.9, fused=True),
    "Adam": ADAM,
    "Adam amsgrad": fm.OptimizerOf("Adam", lr=0.01, amsgrad=True),
    "AdamW fused": fm.OptimizerOf("AdamW", lr=0.01, fused=True),
    "AdamW": fm.OptimizerOf("AdamW", lr=0.01, weight_decay=0.1),
    "NAdam": fm.OptimizerOf("NAdam", lr=0.01),
    "RAdam": fm.OptimizerOf("RAdam", lr=0.01),
    "Adamax": fm.OptimizerOf("Adamax", lr=0.01),
    "Adagrad": fm.OptimizerOf("Adagrad", lr=0.05),
    "Adadelta": fm.OptimizerOf("Adadelta", lr=1.0),
    "Adafactor": fm.OptimizerOf("Adafactor", lr=0.05),
    "ASGD": fm.OptimizerOf("ASGD", lr=0.05),
    "RMSprop": fm.OptimizerOf("RMSprop", lr=0.01, momentum=0.9, centered=True),
    "Rprop": fm.OptimizerOf("Rprop", lr=0.01),
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["Muon"] = muon_on_matrices


class TestOptimizers:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_any_optimizer_over_segments_and_resumes_is_that_of_a_plain_loop(self, name: str) -> None:
        optimizer = OPTIMIZERS[name]
        assert same_bits(resumed_bits(noisy_net, optimizer), plain_loop(noisy_net, optimizer, WEIGHTS, 10))

    @pytest.mark.parametrize("policy", ["keep", "average", "reset"])
    @pytest.mark.parametrize("name", ["Adam", "Adafactor", "NAdam", "SGD momentum"])
    def test_every_policy_for_optimizer_state_works_with(self, name: str, policy: Any) -> None:
        algorithm = fm.ForkMerge("per_auxiliary", interval=3, optimizer_state=policy, search="fixed")
        run = fit(algorithm, optimizer=OPTIMIZERS[name], steps=9)
        assert all(tensor.isfinite().all() for tensor in bits(run).values())

    def test_an_optimizer_that_needs_a_closure_is_refused_before_training(self) -> None:
        with pytest.raises(fm.ProblemError, match=r"LBFGS.*closure.*fm\.fork"):
            fit(optimizer=fm.OptimizerOf("LBFGS"))

    def test_an_optimizer_of_other_parameters_is_refused(self) -> None:
        other = plain_net()
        with pytest.raises(fm.ProblemError, match="not the model's"):
            fit(optimizer=lambda model: torch.optim.SGD(other.parameters(), lr=0.1))

    @pytest.mark.parametrize("given", [0.1, None])
    def test_an_optimizer_that_is_no_function_is_refused(self, given: Any) -> None:
        with pytest.raises(fm.ProblemError, match="optimizer must be a function of the model"):
            fit(optimizer=given)

    def test_an_optimizer_instance_is_refused_with_what_to_pass(self) -> None:
        net = plain_net()
        with pytest.raises(fm.ProblemError, match="optimizer must be a function of the model"):
            fit(net=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))


class TestMemoryFormats:
    def test_channels_last_computes_the_same_function(self) -> None:
        nets = [seeded(conv_net).double(), seeded(conv_net).double()]
        inputs, labels = examples(16, 1)
        stream = fm.Stream(TensorDataset(inputs.double(), labels), shared_losses, TASKS, 8)
        problem = fm.Problem("tgt", {"all": stream}, evaluation())
        for net, last in zip(nets, (True, False), strict=True):
            train(net, problem, channels_last=last)
        for name, tensor in bits(nets[0]).items():
            torch.testing.assert_close(tensor, bits(nets[1])[name], rtol=1e-9, atol=1e-12)

    def test_channels_last_weights_stay_channels_last_views_of_one_row(self) -> None:
        net = seeded(conv_net)
        result = train(net, channels_last=True, optimizer=SGD)
        weight, row = net.body[2].weight, result.state.rows["float32"]
        assert weight.is_contiguous(memory_format=torch.channels_last)
        assert not weight.is_contiguous()
        assert row.data_ptr() <= weight.data_ptr() < row.data_ptr() + row.nbytes

    def test_a_channels_last_run_survives_two_formats_of_storage(self) -> None:
        whole = resumed_bits(conv_net, SGD, cuts=(0, 10), channels_last=True)
        assert same_bits(whole, resumed_bits(conv_net, SGD, channels_last=True))

    def test_parameters_lie_at_aligned_places_of_one_row_per_dtype(self) -> None:
        net = Net(nn.Sequential(nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH).to(torch.bfloat16)))
        binding = fm.Training(SGD).binding(net)
        rows = binding.initial().rows
        assert set(rows) == {"float32", "bfloat16"}
        for place, parameter in zip(binding.layout.places, binding.layout.parameters, strict=True):
            assert place.offset * parameter.element_size() % 64 == 0
            row = rows[place.row]
            assert parameter.data_ptr() == row.data_ptr() + place.offset * row.element_size()


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
        assert not same_bits(net, exact)
        for name, tensor in bits(net).items():
            torch.testing.assert_close(tensor, bits(exact)[name], rtol=0.1, atol=0.05)

    def test_bfloat16_runs_do_not_depend_on_segments(self) -> None:
        whole = resumed_bits(noisy_net, ADAM, cuts=(0, 10), precision="bfloat16")
        assert same_bits(whole, resumed_bits(noisy_net, ADAM, precision="bfloat16"))

    def test_the_scaler_of_float16_is_part_of_a_branchs_state(self) -> None:
        whole = resumed_bits(plain_net, SGD, cuts=(0, 10), precision="float16")
        assert same_bits(whole, resumed_bits(plain_net, SGD, precision="float16"))
        state = train(seeded(plain_net), precision="float16").state
        assert state.scaler["scale"] == 65536.0
        assert state.scaler["_growth_tracker"] == 6

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="float16 training as it is meant needs a GPU")
    def test_float16_with_a_scaler_on_a_gpu_does_not_depend_on_segments(self) -> None:
        def gpu_net() -> nn.Module:
            return noisy_net().cuda()

        whole = resumed_bits(gpu_net, ADAM, cuts=(0, 10), precision="float16")
        assert same_bits(whole, resumed_bits(gpu_net, ADAM, precision="float16"))

    def test_half_precision_parameters_are_trained_and_merged_in_their_dtype(self) -> None:
        def half_net() -> nn.Module:
            return plain_net().to(torch.bfloat16)

        def losses(model: nn.Module, batch: Any, tasks: Any, context: fm.Context) -> Any:
            return shared_losses(model, (batch[0].bfloat16(), batch[1]), tasks, context)

        def predict(model: nn.Module, batch: Any) -> Any:
            return model(batch[0].bfloat16(), "tgt"), batch[1][:, 0]

        stream = fm.Stream(TensorDataset(*examples(16, 1)), losses, TASKS, 8)
        score = fm.Evaluation(TensorDataset(*examples(24, 2)), fm.accuracy, predict)
        run = fit(fm.ForkMerge(interval=4, search="fixed"), fm.Problem("tgt", [stream], score), half_net)
        assert {p.dtype for p in run.model.parameters()} == {torch.bfloat16}
        assert not same_bits(run, seeded(half_net))


class TestModules:
    def test_tied_parameters_are_one_parameter_in_the_row_and_stay_tied(self) -> None:
        net = seeded(tied_net)
        train(net)
        tied = net.body[1]
        assert tied.first.weight is tied.second.weight
        assert same_bits(resumed_bits(tied_net, ADAM), plain_loop(tied_net, ADAM, WEIGHTS, 10))

    def test_frozen_parameters_are_in_no_row_and_keep_their_memory(self) -> None:
        net = seeded(frozen_net)
        frozen = net.body[0].weight
        address, before = frozen.data_ptr(), frozen.clone()
        state = train(net).state
        trainable = sum(p.numel() for p in net.parameters() if p.requires_grad)
        assert state.rows["float32"].numel() < trainable + 16 * len(list(net.parameters()))
        assert frozen.data_ptr() == address
        assert torch.equal(frozen, before)

    def test_constant_buffers_are_shared_and_changing_ones_belong_to_the_branch(self) -> None:
        assert train(seeded(frozen_net)).state.buffers == {}
        assert set(train(seeded(noisy_net)).state.buffers) == {
            "body.1.running_mean",
            "body.1.running_var",
            "body.1.num_batches_tracked",
        }

    def test_a_buffer_that_two_modules_share_stays_shared(self) -> None:
        def net() -> nn.Module:
            made = noisy_net()
            for head in made.heads.values():
                head.register_buffer("mean", made.body[1].running_mean)
            return made

        module = seeded(net)
        run = fit(net=module)
        assert run.model.heads["tgt"].mean is run.model.body[1].running_mean

    @pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own Adagrad sets it off
    @pytest.mark.parametrize("optimizer", ["SGD", "SparseAdam", "Adagrad"])
    def test_sparse_gradients_give_the_bits_of_a_plain_loop(self, optimizer: str) -> None:
        def net() -> nn.Module:
            made = Net(Bag(sparse=True))
            if optimizer == "SparseAdam":
                made.heads.requires_grad_(False)
            return made

        make = fm.OptimizerOf(optimizer, lr=0.1)
        assert same_bits(resumed_bits(net, make), plain_loop(net, make, WEIGHTS, 10))

    def test_sparse_momentum_is_refused_with_what_to_do(self) -> None:
        with pytest.raises(fm.ProblemError, match=r"sparse 'momentum_buffer'.*'body\.table\.weight'.*sparse=False"):
            train(seeded(lambda: Net(Bag(sparse=True))), optimizer=fm.OptimizerOf("SGD", lr=0.1, momentum=0.9))

    def test_scalar_parameters_and_parameters_without_elements_are_fine(self) -> None:
        def net() -> nn.Module:
            made = plain_net()
            made.body.append(_Scaled())
            return made

        assert same_bits(resumed_bits(net, ADAM), plain_loop(net, ADAM, WEIGHTS, 10))
        assert same_bits(resumed_bits(net, OPTIMIZERS["NAdam"]), plain_loop(net, OPTIMIZERS["NAdam"], WEIGHTS, 10))

    def test_lazy_modules_are_refused_with_what_to_do(self) -> None:
        with pytest.raises(fm.ProblemError, match=r"'weight' is lazy.*run the model on one batch"):
            check_module(nn.LazyLinear(3))

    def test_data_parallel_modules_are_refused_with_what_to_pass(self) -> None:
        with pytest.raises(fm.ProblemError, match=r"wrapped in DataParallel: pass the module inside it, model\.module"):
            fit(net=nn.DataParallel(plain_net()))

    def test_distributed_modules_are_refused_with_what_to_pass(self) -> None:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            wrapped = nn.parallel.DistributedDataParallel(plain_net())
            with pytest.raises(fm.ProblemError, match=r"DistributedDataParallel: pass .* model\.module"):
                check_module(wrapped)
            mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
            sharded = torch.distributed.tensor.distribute_module(plain_net(), mesh)
            with pytest.raises(fm.ProblemError, match=r"sharded.*pass the plain module"):
                check_module(sharded)
        finally:
            torch.distributed.destroy_process_group()

    def test_a_model_without_trainable_parameters_is_refused(self) -> None:
        with pytest.raises(fm.ProblemError, match="no trainable parameter"):
            fm.Training(SGD).binding(plain_net().requires_grad_(False))

    def test_something_that_is_no_module_is_refused(self) -> None:
        with pytest.raises(fm.ProblemError, match=r"model must be a torch\.nn\.Module"):
            fit(net=3)
        with pytest.raises(fm.ProblemError, match=r"model must be a torch\.nn\.Module, got str"):
            fit(net=lambda: "net")


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.nothing = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.scale * inputs + self.nothing.sum()


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"precision": "float8"}, "precision must be float32, bfloat16 or float16, got 'float8'"),
            ({"accumulate": 0}, "accumulate must be a positive integer, got 0"),
            ({"clip_norm": -1.0}, r"clip_norm must be positive, got -1\.0"),
            ({"clip_norm": float("nan")}, "clip_norm must be positive, got nan"),
            ({"loader_workers": -1}, "loader_workers must be an integer ≥ 0, got -1"),
            ({"statistics": "mine"}, "statistics must be 'all' or 'target', got 'mine'"),
        ],
    )
    def test_impossible_options_are_refused(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(fm.ProblemError, match=message):
            fm.Training(SGD, **options)


class TestRunningStatistics:
    """BatchNorm uses a batch's own statistics in training: whom the running ones follow shows in evaluations only."""

    STILL = fm.OptimizerOf("SGD", lr=0.0)

    @staticmethod
    def run(weights: dict[str, float], statistics: str, optimizer: Any = SGD, **options: Any) -> dict[str, Tensor]:
        net = seeded(noisy_net)
        train(net, domains_problem(), weights, statistics=statistics, optimizer=optimizer, **options)
        return {name: value.clone() for name, value in net.state_dict().items()}

    @staticmethod
    def running(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value for name, value in state.items() if "running" in name or "tracked" in name}

    @pytest.mark.parametrize("method", [None, fm.methods.PCGrad(), fm.methods.UW()])
    def test_those_of_the_target_do_not_notice_an_auxiliary(self, method: Any) -> None:
        joint, alone = (
            self.run(weights, "target", self.STILL, method=method)
            for weights in ({"tgt": 1.0, "aux": 1.0}, {"tgt": 1.0})
        )
        assert same_bits(self.running(joint), self.running(alone))
        assert not same_bits(self.running(joint), self.running(self.run(WEIGHTS, "all", self.STILL, method=method)))

    def test_the_weights_learn_the_same(self) -> None:
        ours, theirs = (self.run(WEIGHTS, statistics) for statistics in ("target", "all"))
        learnt = [name for name in ours if name not in self.running(ours)]
        assert same_bits({name: ours[name] for name in learnt}, {name: theirs[name] for name in learnt})
        assert not same_bits(self.running(ours), self.running(theirs))

    def test_layers_of_an_auxiliary_alone_follow_it(self) -> None:
        counts = {}
        for statistics in ("target", "all"):
            net = seeded(noisy_net)
            net.heads["aux"] = nn.Sequential(nn.BatchNorm1d(WIDTH), net.heads["aux"])
            train(net, domains_problem(), WEIGHTS, statistics=statistics)
            counts[statistics] = [int(norm.num_batches_tracked) for norm in (net.body[1], net.heads["aux"][0])]
        assert counts == {"target": [6, 6], "all": [12, 6]}

    def test_cuts_between_segments_do_not_show(self) -> None:
        training, mixture = fm.Training(SGD, statistics="target"), fm.Mixture("branch", WEIGHTS)
        found = []
        for parts in ([6], [1, 3, 2]):
            binding = training.binding(seeded(noisy_net))
            state = binding.initial()
            for steps in parts:
                train_branch(binding, domains_problem(), mixture, state, steps=steps, training=training, seed=0)
            binding.attach_weights(state)
            found.append({name: value.clone() for name, value in binding.model.state_dict().items()})
        assert same_bits(*found)

    def test_compiled_layers_know_whom_they_follow(self) -> None:
        plain, compiled = (
            self.running(self.run(WEIGHTS, "target", self.STILL, compile=how)) for how in (False, "aot_eager")
        )
        for name, value in plain.items():
            torch.testing.assert_close(compiled[name], value)

    def test_a_branch_without_the_target_has_those_of_all(self) -> None:
        ours, theirs = (self.run({"aux": 1.0, "odd": 1.0}, statistics) for statistics in ("target", "all"))
        assert same_bits(ours, theirs)

    def test_a_layer_that_is_frozen_stays_as_it_is(self) -> None:
        net = seeded(noisy_net)
        net.body[1].track_running_stats = False
        train(net, domains_problem(), WEIGHTS, statistics="target")
        assert net.body[1].track_running_stats is False


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


def test_a_state_is_independent_of_the_bench_after_release() -> None:
    training = fm.Training(SGD)
    binding = training.binding(seeded(noisy_net))
    state = binding.initial()
    mixture = fm.Mixture("branch", WEIGHTS)
    train_branch(binding, shared_problem(), mixture, state, steps=2, training=training, seed=0)
    binding.release(state)
    held = bits(binding.model)
    for row in state.rows.values():
        row.fill_(torch.nan)
    assert same_bits(held, binding.model)
    assert binding.model.heads["tgt"].weight.grad is None


def test_states_survive_a_trip_through_bytes() -> None:
    state = train(seeded(noisy_net), optimizer=ADAM, scheduler=SCHEDULERS["MultiStepLR"]).state
    back = from_wire(to_wire(state))
    assert isinstance(back, State)
    assert back.step == state.step
    assert same_bits(back.rows, state.rows)
    assert same_bits(back.buffers, state.buffers)
    assert same_bits(back.optimizer_rows, state.optimizer_rows)
    assert back.optimizer_slots == state.optimizer_slots
    assert (back.groups, back.scheduler, back.scaler) == (state.groups, state.scheduler, state.scaler)


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
