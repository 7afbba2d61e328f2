"""The properties the engine promises, each under its own name."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import forkmerge as fm
from forkmerge.engine.merging.blend import blend_weights
from forkmerge.engine.merging.find_merge import find_merge
from forkmerge.engine.training.branch import train_branch
from forkmerge.engine.training.model_binding import ModelBinding
from forkmerge.engine.training.state import State
from problems import (
    ADAM,
    SGD,
    TASKS,
    Augmented,
    ScoredMerge,
    Stopped,
    Untouchable,
    bits,
    conv_net,
    domains_problem,
    evaluation,
    facts,
    fit,
    noisy_net,
    plain_loop,
    plain_net,
    same_bits,
    seeded,
    shared_losses,
    shared_problem,
    tied_net,
)

SEED = 3


def one_head(model: nn.Module, batch: Any, tasks: Sequence[str], context: fm.Context) -> dict[str, Tensor]:
    """All tasks on one head, so that every branch trains every parameter."""
    logits, labels = model.heads["tgt"](model.body(batch[0].double())), batch[1]
    return {task: nn.functional.cross_entropy(logits, labels[:, TASKS.index(task)]) for task in tasks}


def own_heads(model: nn.Module, batch: Any, tasks: Sequence[str], context: fm.Context) -> dict[str, Tensor]:
    return shared_losses(model, (batch[0].double(), batch[1]), tasks, context)


def train(
    binding: ModelBinding,
    state: State,
    weights: dict[str, float],
    steps: int,
    training: fm.Training,
    problem: fm.Problem,
) -> State:
    mixture = fm.Mixture("branch", weights)
    return train_branch(binding, problem, mixture, state, steps=steps, training=training, seed=SEED).state


def one_step_apart(
    optimizer: fm.OptimizerOf, auxiliaries: dict[str, float], losses: Any = one_head
) -> dict[str, float]:
    """Distance between a merge after Δt = 1 and one step on g_tgt + Σ λ_k g_k, by parameter, in units of that step.

    The branches start from a common state with momentum in its buffers.
    """
    training = fm.Training(optimizer)
    stream = fm.Stream(shared_problem().stream_map["all"].dataset, losses, TASKS, 8)
    problem = fm.Problem("tgt", {"all": stream}, evaluation())
    binding = training.binding(seeded(plain_net).double())
    start = train(binding, binding.initial(), {"tgt": 1.0, "aux": 1.0, "odd": 0.5}, 5, training, problem)
    plans: list[dict[str, float]] = [{"tgt": 1.0}, *({"tgt": 1.0, task: 1.0} for task in auxiliaries)]
    branches = [train(binding, start.clone(), plan, 1, training, problem) for plan in plans]
    coefficients = (1 - sum(auxiliaries.values()), *auxiliaries.values())
    merged = blend_weights(binding, branches, coefficients, start.weights())
    direct = train(binding, start.clone(), {"tgt": 1.0, **auxiliaries}, 1, training, problem)
    before, after, blended = (
        {place.name: place.view(state.rows["float64"]) for place in binding.layout.places}
        for state in (start, direct, merged)
    )
    length = max((after[name] - before[name]).norm().item() for name in after)
    assert length > 1e-3
    return {name: (blended[name] - after[name]).norm().item() / length for name in after}


class TestOneStepIdentity:
    """Δt = 1 and equal batches: merging branches is one step on the weighted gradient (Eq. 7, 8)."""

    @pytest.mark.parametrize("weight", [0.2, 0.5, 0.9])
    def test_merge_of_two_sgd_branches_is_one_step_with_the_coefficient_as_task_weight(self, weight: float) -> None:
        assert max(one_step_apart(SGD, {"aux": weight}).values()) < 1e-12

    def test_merge_of_k_plus_one_sgd_branches_is_one_step_with_all_coefficients_as_task_weights(self) -> None:
        assert max(one_step_apart(SGD, {"aux": 0.3, "odd": 0.5}).values()) < 1e-12

    def test_nesterov_momentum_keeps_the_identity(self) -> None:
        nesterov = fm.OptimizerOf("SGD", lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2)
        assert max(one_step_apart(nesterov, {"aux": 0.4}).values()) < 1e-12

    def test_with_heads_of_their_own_it_holds_for_all_that_every_branch_trains(self) -> None:
        # The target-only branch leaves another task's head alone, its momentum and weight decay included.
        apart = one_step_apart(SGD, {"aux": 0.3, "odd": 0.5}, own_heads)
        trained = [name for name in apart if name.startswith(("body", "heads.tgt"))]
        assert len(trained) == 4
        assert max(apart[name] for name in trained) < 1e-12

    def test_with_heads_of_their_own_and_neither_momentum_nor_decay_it_holds_for_everything(self) -> None:
        plain = fm.OptimizerOf("SGD", lr=0.1)
        assert max(one_step_apart(plain, {"aux": 0.3, "odd": 0.5}, own_heads).values()) < 1e-12

    @pytest.mark.parametrize("auxiliaries", [{"aux": 0.4}, {"aux": 0.3, "odd": 0.5}])
    def test_adam_does_not_have_the_identity(self, auxiliaries: dict[str, float]) -> None:
        assert max(one_step_apart(ADAM, auxiliaries).values()) > 1e-3


class TestVertices:
    @pytest.mark.parametrize("net", [noisy_net, tied_net, conv_net])
    @pytest.mark.parametrize("place", [0, 1, 2])
    def test_a_coefficient_of_one_installs_that_branch_bit_for_bit(self, net: Any, place: int) -> None:
        vertex = tuple(float(i == place) for i in range(3))
        merged = fit(fm.ForkMerge("per_auxiliary", interval=4, search=fm.Fixed(vertex)), net=net, steps=4)
        mixture = [{"tgt": 1.0}, {"tgt": 1.0, "aux": 1.0}, {"tgt": 1.0, "odd": 1.0}][place]
        alone = fit(fm.Joint(mixture), net=net, steps=4)
        assert same_bits(merged, alone)


class TestNeverBelowTheBestBranch:
    @pytest.mark.parametrize("search", [fm.Grid(), fm.Grid(3), fm.Greedy(), fm.Binary()])
    @pytest.mark.parametrize("examples_used", [None, 3])
    def test_merged_validation_score_is_at_least_every_branch(self, search: fm.Search, examples_used: int) -> None:
        mixtures = "mixed" if isinstance(search, fm.Binary) else "per_auxiliary"
        algorithm = fm.ForkMerge(mixtures, interval=3, search=search, search_examples=examples_used)
        for seed in range(2):
            for finished in fit(algorithm, net=noisy_net, seed=seed).rounds:
                assert finished.score >= max(branch.score for branch in finished.branches.values())

    def test_a_search_that_answers_badly_is_overruled(self) -> None:
        class Wrong(fm.Search):
            def search(self, score: Any, branches: int) -> tuple[float, ...]:
                return (0.5, 0.5)

            def evaluations(self, branches: int) -> int:
                return 3

        scores = {(1.0, 0.0): 2.0, (0.0, 1.0): 1.0, (0.5, 0.5): 0.0}
        merge = find_merge(ScoredMerge(["a", "b"], scores.__getitem__), Wrong())
        assert (merge.coefficients, merge.score) == ({"a": 1.0, "b": 0.0}, 2.0)


class TestWhatAMergeKeeps:
    def test_integer_buffers_keep_their_dtype_and_come_from_the_heaviest_branch(self) -> None:
        algorithm = fm.ForkMerge(interval=4, search=fm.Fixed((0.3, 0.7)))
        counter = fit(algorithm, net=noisy_net).model.body[1].num_batches_tracked
        assert counter.dtype == torch.int64
        assert counter == 12

    def test_tied_parameters_stay_tied(self) -> None:
        layers = fit(fm.ForkMerge(interval=4, search="fixed"), net=tied_net).model.body[1]
        assert layers.first.weight is layers.second.weight
        assert layers.first.weight.data_ptr() == layers.second.weight.data_ptr()

    def test_key_mismatches_are_named(self) -> None:
        one, other = bits(seeded(plain_net)), bits(seeded(plain_net))
        del other["heads.odd.bias"]
        with pytest.raises(fm.ProblemError, match=r"'a' and 'b' .*'heads\.odd\.bias' is \(3,\) in one and missing"):
            fm.merge_states({"a": one, "b": other}, {"a": 0.5, "b": 0.5})


WEIGHTS = {"tgt": 1.0, "aux": 0.7, "odd": 0.25}


class TestOneBranch:
    @pytest.mark.parametrize("net", [noisy_net, conv_net, tied_net])
    @pytest.mark.parametrize("optimizer", [SGD, ADAM])
    def test_forkmerge_with_one_branch_is_plain_joint_training_bit_for_bit(self, net: Any, optimizer: Any) -> None:
        ours = fit(fm.ForkMerge({"joint": WEIGHTS}, interval=5), net=net, optimizer=optimizer, seed=SEED)
        assert same_bits(ours, plain_loop(net, optimizer, WEIGHTS, 12, seed=SEED))

    def test_so_is_joint_with_clipping_and_a_schedule(self) -> None:
        schedule = fm.SchedulerOf("CosineAnnealingLR", T_max=12)
        ours = fit(fm.Joint(WEIGHTS), net=noisy_net, seed=SEED, clip_norm=0.5, scheduler=schedule)
        assert same_bits(ours, plain_loop(noisy_net, SGD, WEIGHTS, 12, clip=0.5, scheduler=schedule, seed=SEED))

    def test_single_task_is_the_loop_over_the_target_alone(self) -> None:
        ours = fit(fm.SingleTask(), net=noisy_net, seed=SEED)
        assert same_bits(ours, plain_loop(noisy_net, SGD, {"tgt": 1.0}, 12, seed=SEED))


class TestCopies:
    @pytest.mark.parametrize("coefficients", [(0.2, 0.5, 0.3), None])
    def test_k_copies_merge_bit_for_bit_to_the_copy(self, coefficients: Any) -> None:
        copies = {name: {"tgt": 1.0, "aux": 0.5} for name in ("one", "two", "three")}
        merged = fit(fm.ForkMerge(copies, interval=4, search=fm.Fixed(coefficients)), net=noisy_net)
        assert same_bits(merged, fit(fm.Joint({"tgt": 1.0, "aux": 0.5}, interval=4), net=noisy_net))


class TestGreedyOverTwo:
    def test_greedy_is_exhaustive_search_over_the_normalised_coefficients_of_the_worse_branch(self) -> None:
        run = fit(fm.ForkMerge(interval=6, search=fm.Greedy()), net=noisy_net, steps=6)
        (only,) = run.rounds
        names = sorted(only.branches, key=lambda name: -only.branches[name].score)
        exhaustive = []
        for alpha in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
            worse = alpha / (1 + alpha)
            share = {names[0]: 1 - worse, names[1]: worse}
            fixed = fm.Fixed((share["alone"], share["joint"]))
            score = fit(fm.ForkMerge(interval=6, search=fixed), net=noisy_net, steps=6).score
            exhaustive.append((score, -worse))
        best, worse = max(exhaustive)
        assert run.score == pytest.approx(best, abs=1e-12)
        assert only.coefficients[names[1]] == pytest.approx(-worse)


BUSY = fm.ForkMerge("per_auxiliary", interval=6, floor=True, refit=True)


def busy_problem() -> fm.Problem:
    return shared_problem(Augmented())


@pytest.fixture(scope="module")
def undisturbed() -> Any:
    run = fit(BUSY, busy_problem(), noisy_net, steps=15)
    assert any(0 < value < 1 for c in run.coefficients for value in c.values()), "the run should really merge"
    return run


def agrees(run: Any, other: Any) -> bool:
    return same_bits(run, other) and facts(run) == facts(other)


class TestTheSameRun:
    def test_two_spawned_processes_give_the_bits_of_the_serial_run(self, undisturbed: Any) -> None:
        assert agrees(undisturbed, fit(BUSY, busy_problem(), noisy_net, steps=15, workers=2))

    @pytest.mark.parametrize("workers", [1, 2])
    def test_loader_workers_do_not_change_a_bit(self, undisturbed: Any, workers: int) -> None:
        assert agrees(undisturbed, fit(BUSY, busy_problem(), noisy_net, steps=15, loader_workers=workers))

    @pytest.mark.parametrize("every", [1, 5])
    def test_segment_length_does_not_change_a_bit(self, undisturbed: Any, every: int, tmp_path: Path) -> None:
        cut = fit(BUSY, busy_problem(), noisy_net, steps=15, folder=tmp_path / "run", checkpoint_every=every)
        assert same_bits(undisturbed, cut)
        assert cut.coefficients == undisturbed.coefficients
        assert [r.candidates for r in cut.rounds] == [r.candidates for r in undisturbed.rounds]

    @pytest.mark.parametrize("at", [5, 14])  # test_resume.py goes through many more
    def test_killed_and_resumed_gives_the_same_bits(self, undisturbed: Any, at: int, tmp_path: Path) -> None:
        count = 0

        def stop(event: Any) -> None:
            nonlocal count
            count += 1
            if count == at:
                raise Stopped

        options: dict[str, Any] = {"steps": 15, "folder": tmp_path / "run"}
        with pytest.raises(Stopped):
            fit(BUSY, busy_problem(), noisy_net, observe=stop, **options)
        assert agrees(undisturbed, fit(BUSY, busy_problem(), noisy_net, resume=True, **options))

    def test_training_in_segments_of_any_length_is_training_at_once(self) -> None:
        training, problem = fm.Training(ADAM, fm.SchedulerOf("StepLR", step_size=3)), busy_problem()
        go = partial(train, training=training, problem=problem, weights={"tgt": 1.0, "odd": 0.5})
        binding = training.binding(seeded(noisy_net))
        first = binding.initial()
        whole = go(binding, first.clone(), steps=9)
        parts = first.clone()
        for start, end in pairwise((0, 1, 4, 5, 9)):
            other = go(binding, first.clone(), steps=2)  # another branch at work on the same binding in between
            parts = go(binding, parts, steps=end - start)
        assert other.step == 2
        for name, row in whole.rows.items():
            assert torch.equal(row, parts.rows[name])
        assert same_bits(whole.buffers, parts.buffers)
        assert same_bits(whole.optimizer_rows, parts.optimizer_rows)


class TestTheTestSplit:
    @pytest.mark.parametrize("make", [shared_problem, domains_problem])
    def test_the_test_split_is_never_read_during_fit(self, make: Any, tmp_path: Path) -> None:
        sealed = fm.Evaluation(Untouchable(), fm.accuracy)
        problem = make(test=dict.fromkeys(TASKS, sealed))
        algorithm = fm.ForkMerge("per_auxiliary", interval=4, refit=True, floor=True, bn="recompute", search_examples=5)
        run = fit(algorithm, problem, noisy_net, folder=tmp_path / "run")
        assert run.test is None
        assert problem.sealed().evaluations("test") == {}
        with pytest.raises(AssertionError, match="sealed"):
            fm.measure(run.model, problem.evaluations("test")["tgt"])


def test_the_given_module_is_trained_and_returned() -> None:
    module = seeded(noisy_net)
    before = copy.deepcopy(module)
    run = fit(net=module)
    assert run.model is module
    assert not same_bits(before, module)
