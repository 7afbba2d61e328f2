"""ForkMerge in one's own loop: nothing given is touched, every branch is whole, and a merge is a merge."""

from __future__ import annotations

import copy
import io
import math
import warnings
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import forkmerge as fm
from _asserts import assert_close, assert_other_bits, assert_same_bits, bits, same_bits
from forked_training import BRANCHES, CONTEXT, HELD_OUT, INPUTS, LABELS, branch_bits, score, sgd, step, train
from problems import (
    Augmented,
    Bag,
    Net,
    conv_net,
    fit,
    frozen_net,
    minus_loss,
    noisy_net,
    plain_net,
    predict_target,
    seeded,
    shared_losses,
    shared_problem,
    tied_net,
)


class TestForking:
    @pytest.mark.parametrize("net", [plain_net, noisy_net, conv_net, tied_net, frozen_net])
    def test_what_was_given_is_left_alone_through_training_and_merging(self, net: Any) -> None:
        model = seeded(net)
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        weights, state = bits(model), copy.deepcopy(optimizer.state_dict())
        forked = fm.fork(model, optimizer, BRANCHES, scheduler=scheduler)
        train(forked)
        forked.merge(score)
        train(forked)
        assert_same_bits(weights, model)
        assert optimizer.state_dict() == state
        assert scheduler.last_epoch == 0

    def test_branches_start_as_independent_copies(self) -> None:
        forked = fm.fork(model := seeded(noisy_net), sgd(model), BRANCHES)
        one, other = forked
        assert_same_bits(one.model, other.model)
        step(one)
        assert_same_bits(other.model, model)
        assert_other_bits(one.model, model)

    def test_lbfgs_works_in_an_own_loop(self) -> None:
        model = seeded(plain_net)
        forked = fm.fork(model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4), BRANCHES)
        before = score(model)
        for _ in range(2):
            for branch in forked:

                def closure(branch: Any = branch) -> Any:
                    branch.optimizer.zero_grad()
                    loss = shared_losses(branch.model, (INPUTS, LABELS), ["tgt"], CONTEXT)["tgt"]
                    loss.backward()
                    return loss

                branch.optimizer.step(closure)
                assert all(p is q for p, q in zip(branch.optimizer._params, branch.model.parameters(), strict=True))
            assert forked.merge(score).score > before
        assert_same_bits(model, seeded(plain_net))

    def test_sparse_gradients_work(self) -> None:
        model = seeded(lambda: Net(Bag(sparse=True)))
        forked = fm.fork(model, torch.optim.SGD(model.parameters(), lr=0.3), BRANCHES)
        train(forked)
        assert math.isfinite(forked.merge(score).score)

    def test_branches_are_reached_by_name_in_order(self) -> None:
        forked = fm.fork(model := plain_net(), sgd(model), BRANCHES)
        assert [branch.name for branch in forked] == ["alone", "joint"]
        assert len(forked) == 2
        assert forked["joint"].task_weights == {"tgt": 1.0, "odd": 0.5}
        assert repr(forked["joint"]) == "ForkedBranch('joint', {'tgt': 1.0, 'odd': 0.5}, lr_scale=1)"
        with pytest.raises(fm.ProblemError, match=r"unknown branch 'jont'\. Did you mean 'joint'\?"):
            forked["jont"]


class TestMerging:
    def test_the_documented_loop_gives_what_fit_gives(self) -> None:
        """The same batches and steps by hand and by `fit`: the same coefficients, scores and bits."""
        run = fit(fm.ForkMerge(BRANCHES, interval=4), seeded_problem(), lambda: seeded(plain_net), optimizer=sgd)
        model = seeded(plain_net)
        forked = fm.fork(model, sgd(model), BRANCHES)
        from forkmerge.problem.example_order import batch_indices

        merges = []
        for number in range(3):
            for branch in forked:
                for index in range(4 * number, 4 * number + 4):
                    chosen = batch_indices(16, 8, index, 0, "all")
                    step(branch, (INPUTS[chosen], LABELS[chosen]))
            merges.append(forked.merge(score))
        assert [o.coefficients for o in merges] == run.coefficients
        assert [o.score for o in merges] == [r.score for r in run.rounds]
        assert [o.relevance for o in merges] == [r.relevance for r in run.rounds]
        assert_same_bits(forked.merged_into(model), run)

    def test_an_outcome_tells_everything_that_was_tried(self) -> None:
        forked = fm.fork(model := seeded(plain_net), sgd(model), BRANCHES)
        train(forked)
        alone = {branch.name: score(branch.model) for branch in forked}
        merge = forked.merge(score)
        assert merge.branch_scores == alone
        assert len(merge.candidates) == 6
        assert max(value for _, value in merge.candidates) == merge.score
        assert merge.relevance["odd"] == 0.5 * merge.coefficients["joint"]
        assert merge.faults == {}
        for branch in forked:
            assert score(branch.model) == merge.score

    def test_all_branches_go_on_from_the_merge(self) -> None:
        forked = fm.fork(model := seeded(noisy_net), sgd(model), BRANCHES, search=fm.Fixed((0.25, 0.75)))
        train(forked)
        before = branch_bits(forked)
        forked.merge(score)
        merged = fm.merge_states(before, {"alone": 0.25, "joint": 0.75})
        for branch in forked:
            assert_same_bits(bits(branch.model), merged)

    def test_merge_can_also_write_into_a_model(self) -> None:
        model, target = seeded(noisy_net), seeded(noisy_net, seed=7)
        forked = fm.fork(model, sgd(model), BRANCHES)
        train(forked)
        forked.merge(score, into=target)
        assert_same_bits(target, forked["alone"].model)
        step(forked["alone"])
        assert not same_bits(target, forked["alone"].model), "the model given shares no memory with a branch"

    def test_before_the_first_merge_the_merged_model_is_the_fork_point(self) -> None:
        model = seeded(noisy_net)
        forked = fm.fork(model, sgd(model), BRANCHES)
        train(forked)
        assert_same_bits(forked.merged_into(seeded(noisy_net, seed=7)), model)

    def test_a_model_that_does_not_fit_is_named(self) -> None:
        forked = fm.fork(model := plain_net(), sgd(model), BRANCHES)
        with pytest.raises(fm.ProblemError, match=r"'the fork' and 'the model given' .*'body\.1\.weight' is"):
            forked.merged_into(noisy_net())

    def test_branches_with_different_parameters_are_named_before_anything_is_scored(self) -> None:
        forked = fm.fork(model := plain_net(), sgd(model), BRANCHES)
        forked["joint"].model.extra = nn.Linear(2, 2)
        calls: list[int] = []
        with pytest.raises(fm.ProblemError, match=r"'the fork' and 'joint' have different parameters: 'extra\.weight'"):
            forked.merge(lambda m: calls.append(1) or 0.0)
        assert calls == []

    def test_more_branches_are_searched_greedily_and_the_search_can_be_chosen(self) -> None:
        three = {**BRANCHES, "aux": {"tgt": 1.0, "aux": 1.0}}
        forked = fm.fork(model := seeded(plain_net), sgd(model), three)
        train(forked)
        assert len(forked.merge(score).candidates) <= fm.Greedy().evaluations(3)
        train(forked)
        assert forked.merge(score, search="fixed").coefficients == pytest.approx(dict.fromkeys(three, 1 / 3))
        with pytest.raises(fm.ProblemError, match="binary search merges two branches, got 3"):
            forked.merge(score, search="binary")
        with pytest.raises(fm.ProblemError, match="binary search merges two branches, got 3"):
            fm.fork(model, sgd(model), three, search="binary")

    def test_a_merge_without_training_is_an_error_that_says_what_to_train(self) -> None:
        forked = fm.fork(model := seeded(plain_net), sgd(model), BRANCHES)
        with pytest.raises(fm.ProblemError, match=r"no branch has changed since the last merge: train branch\.model"):
            forked.merge(score)

    @pytest.mark.parametrize("bad", [None, torch.zeros(2, 2), "high"])
    def test_a_score_that_is_not_a_number_is_named(self, bad: Any) -> None:
        forked = fm.fork(model := seeded(plain_net), sgd(model), BRANCHES)
        train(forked)
        with pytest.raises(fm.ProblemError, match="score must return one number"):
            forked.merge(lambda m: bad)

    def test_the_merge_is_never_below_the_best_branch(self) -> None:
        forked = fm.fork(model := seeded(noisy_net), sgd(model), BRANCHES)
        for _ in range(4):
            train(forked, dropout=True)
            merge = forked.merge(score)
            assert merge.score >= max(merge.branch_scores.values())

    def test_scoring_happens_in_evaluation_mode_and_modes_and_random_states_come_back(self) -> None:
        forked = fm.fork(model := seeded(noisy_net), sgd(model), BRANCHES)
        train(forked)
        forked["alone"].model.body[1].eval()
        torch.manual_seed(3)
        before = torch.get_rng_state()

        def noisy_score(m: nn.Module) -> float:
            assert not m.training
            assert not torch.is_grad_enabled()
            torch.rand(1)
            return score(m)

        forked.merge(noisy_score)
        assert torch.equal(torch.get_rng_state(), before)
        assert forked["alone"].model.body[3].training
        assert not forked["alone"].model.body[1].training

    def test_refresh_is_called_on_every_combination_before_it_is_scored(self) -> None:
        forked = fm.fork(model := seeded(noisy_net), sgd(model), BRANCHES, search=fm.Fixed((0.5, 0.5)))
        train(forked)

        def refresh(m: nn.Module) -> None:
            m.body[1].running_mean.fill_(7.0)

        forked.merge(score, refresh=refresh)
        for branch in forked:
            assert branch.model.body[1].running_mean.tolist() == [7.0] * 8

    def test_a_score_that_fails_leaves_every_branch_and_the_last_merge_as_they_were(self) -> None:
        forked = fm.fork(model := seeded(noisy_net), sgd(model), BRANCHES)
        train(forked, dropout=True)
        before, calls = branch_bits(forked), []

        def failing(m: nn.Module) -> float:
            calls.append(1)
            if len(calls) == 4:
                raise KeyboardInterrupt
            return score(m)

        with pytest.raises(KeyboardInterrupt):
            forked.merge(failing)
        for branch in forked:
            assert_same_bits(bits(branch.model), before[branch.name])
        assert_same_bits(forked.merged_into(seeded(noisy_net, 9)), model)
        fresh = fm.fork(model, sgd(model), BRANCHES)
        train(fresh, dropout=True)
        assert forked.merge(score) == fresh.merge(score)

    def test_parameters_that_were_given_other_memory_are_still_merged_and_saved(self) -> None:
        forked = fm.fork(model := seeded(plain_net), sgd(model), BRANCHES, search=fm.Fixed((0.0, 1.0)))
        joint = forked["joint"].model
        vector = torch.linspace(-1, 1, sum(p.numel() for p in joint.parameters()))
        nn.utils.vector_to_parameters(vector, joint.parameters())  # assigns .data
        stored = forked.state_dict()
        forked.merge(score, allow_unequal_steps=True)
        again = fm.fork(model, sgd(model), BRANCHES, search=fm.Fixed((0.0, 1.0)))
        again.load_state_dict(stored)
        again.merge(score, allow_unequal_steps=True)
        for held in (forked, again):
            weights = nn.utils.parameters_to_vector(held["alone"].model.parameters())
            assert torch.equal(weights.detach(), vector)


def seeded_problem() -> fm.Problem:
    validation = fm.Evaluation(TensorDataset(*HELD_OUT), minus_loss, predict_target)
    return shared_problem(validation=validation)


class TestOptimizerPolicies:
    def momentum(self, branch: Any) -> torch.Tensor:
        return branch.optimizer.state[branch.model.body[0].weight]["momentum_buffer"]

    def forked(self, policy: Any) -> fm.Fork:
        model = seeded(plain_net)
        forked = fm.fork(model, sgd(model), BRANCHES, search=fm.Fixed((0.25, 0.75)), optimizer_state=policy)
        train(forked)
        return forked

    def test_keep_leaves_every_branch_its_own(self) -> None:
        forked = self.forked("keep")
        before = {branch.name: self.momentum(branch).clone() for branch in forked}
        forked.merge(score)
        for branch in forked:
            assert torch.equal(self.momentum(branch), before[branch.name])

    def test_average_gives_all_the_same(self) -> None:
        forked = self.forked("average")
        one, other = (self.momentum(branch).clone() for branch in forked)
        forked.merge(score)
        for branch in forked:
            torch.testing.assert_close(self.momentum(branch), 0.25 * one + 0.75 * other)

    def test_reset_forgets_it(self) -> None:
        forked = self.forked("reset")
        forked.merge(score)
        for branch in forked:
            assert len(branch.optimizer.state) == 0

    def test_another_policy_is_refused(self) -> None:
        with pytest.raises(fm.ProblemError, match="optimizer_state must be keep, average or reset, got 'drop'"):
            fm.fork(model := plain_net(), sgd(model), BRANCHES, optimizer_state="drop")  # type: ignore[arg-type]


class TestRates:
    """Branches that differ in their learning rate as well."""

    FAST: ClassVar = {"alone": {"tgt": 1.0}, "fast": {"task_weights": {"tgt": 1.0, "odd": 0.5}, "lr_scale": 3}}

    def test_a_branch_steps_at_its_own_rate_and_the_schedule_goes_on_as_before(self) -> None:
        model = seeded(plain_net)
        optimizer = sgd(model, lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        forked = fm.fork(model, optimizer, self.FAST, scheduler=scheduler)
        train(forked, steps=4)
        twin = seeded(plain_net)
        faster = sgd(twin, lr=0.3)
        schedule = torch.optim.lr_scheduler.ExponentialLR(faster, 0.5)
        plain = fm.fork(twin, faster, {"fast": {"tgt": 1.0, "odd": 0.5}}, scheduler=schedule)
        train(plain, steps=4)
        assert_close(forked["fast"].model, plain["fast"].model, rtol=1e-5, atol=1e-7)
        assert [b.optimizer.param_groups[0]["lr"] for b in forked] == [0.1 * 0.5**4] * 2
        assert repr(forked["fast"]) == "ForkedBranch('fast', {'tgt': 1.0, 'odd': 0.5}, lr_scale=3)"
        assert forked.merge(score=score, search=fm.Fixed((0.5, 0.5))).relevance == {"tgt": 2.0, "odd": 0.75}

    def test_it_goes_on_from_a_state_dict_to_the_same_bits(self) -> None:
        def made() -> fm.Fork:
            model = seeded(plain_net)
            return fm.fork(model, sgd(model, lr=0.1), self.FAST)

        whole, first, second = made(), made(), made()
        for _ in range(2):
            train(whole)
            whole.merge(score=score)
        train(first)
        first.merge(score=score)
        second.load_state_dict(first.state_dict())
        train(second)
        second.merge(score=score)
        for one, other in zip(branch_bits(whole).values(), branch_bits(second).values(), strict=True):
            assert_same_bits(one, other)

    def test_mixtures_may_be_given_themselves_and_streams_in_turn_are_refused(self) -> None:
        model = plain_net()
        forked = fm.fork(model, sgd(model), [fm.Mixture("alone", {"tgt": 1.0}), fm.Mixture("fast", {"tgt": 1.0}, 3)])
        assert [branch.lr_scale for branch in forked] == [1.0, 3.0]
        with pytest.raises(fm.ProblemError, match="branch 'b': your own loop reads the data"):
            fm.fork(model, sgd(model), [fm.Mixture("b", {"tgt": 1.0}, auxiliary_streams="one")])


class TestStateDicts:
    OPTIMIZERS = (
        lambda m: sgd(m),
        lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
        lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
        lambda m: torch.optim.Adafactor(m.parameters(), lr=0.05),
    )

    def new(self, optimizer: Any) -> fm.Fork:
        model = seeded(noisy_net)
        used = optimizer(model)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(used, [2, 5])
        return fm.fork(model, used, BRANCHES, scheduler=scheduler, search=fm.Fixed((0.4, 0.6)))

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("moment", ["between rounds", "inside a round"])
    def test_saved_with_torch_and_loaded_safely_it_goes_on_to_the_same_bits(self, optimizer: Any, moment: str) -> None:
        forked = self.new(optimizer)
        train(forked, 3, dropout=True)
        forked.merge(score)
        if moment == "inside a round":
            train(forked, 2, dropout=True)
        file = io.BytesIO()
        torch.save(forked.state_dict(), file)
        file.seek(0)
        again = self.new(optimizer)
        train(again, 1)  # whatever it did before is forgotten
        again.load_state_dict(torch.load(file, weights_only=True))
        assert_same_bits(again.merged_into(seeded(noisy_net, 5)), forked.merged_into(seeded(noisy_net, 6)))
        for held in (forked, again):
            train(held, 3, dropout=True)
            held.merge(score)
            train(held, 1, dropout=True)
        for branch in forked:
            assert_same_bits(branch.model, again[branch.name].model)
            assert branch.scheduler.state_dict() == again[branch.name].scheduler.state_dict()

    def test_paired_loaders_go_on_where_they_were(self) -> None:
        loader = DataLoader(Augmented(), batch_size=4, shuffle=True)
        forked = self.new(sgd)
        train(forked)
        forked.merge(score)
        list(forked["alone"].paired(loader))
        again = self.new(sgd)
        again.load_state_dict(forked.state_dict())
        one, other = ([x.tolist() for x, _ in held["alone"].paired(loader)] for held in (forked, again))
        assert one == other

    def test_a_state_dict_is_a_copy(self) -> None:
        forked = self.new(sgd)
        stored = forked.state_dict()
        before = copy.deepcopy(stored)
        train(forked)
        forked.merge(score)
        row = stored["branches"]["alone"]["state"]["rows"]["float32"]
        assert torch.equal(row, before["branches"]["alone"]["state"]["rows"]["float32"])
        again = self.new(sgd)
        again.load_state_dict(stored)
        train(again)
        assert torch.equal(row, before["branches"]["alone"]["state"]["rows"]["float32"])

    def test_the_scaler_is_saved(self) -> None:
        def new() -> fm.Fork:
            model = seeded(plain_net)
            return fm.fork(model, sgd(model), BRANCHES, scaler=torch.amp.GradScaler("cpu", init_scale=8.0))

        forked, again = new(), new()
        for branch in forked:
            branch.scaler.scale(torch.ones(1))  # the scale is made at the first use
        forked["joint"].scaler.update(2.0)
        again.load_state_dict(forked.state_dict())
        assert (again["alone"].scaler.get_scale(), again["joint"].scaler.get_scale()) == (8.0, 2.0)

    def test_other_branches_are_refused(self) -> None:
        forked = self.new(sgd)
        model = seeded(noisy_net)
        other = fm.fork(model, sgd(model), {"alone": {"tgt": 1.0}, "pair": {"tgt": 1.0}})
        with pytest.raises(fm.ProblemError, match="the state has branches alone, joint, this fork alone, pair"):
            other.load_state_dict(forked.state_dict())

    def test_a_state_that_is_not_a_fork_s_is_refused_and_changes_nothing(self) -> None:
        forked = self.new(sgd)
        before = branch_bits(forked)
        for foreign in (seeded(noisy_net).state_dict(), {"branches": {"alone": 1}, "merged": {}}, [1], {}):
            with pytest.raises(fm.ProblemError, match="this is not a fork's state: load_state_dict takes what"):
                forked.load_state_dict(foreign)
        model = seeded(plain_net)
        other = fm.fork(model, sgd(model), BRANCHES).state_dict()
        with pytest.raises(
            fm.ProblemError, match=r"another model: parameter 'body.1.weight' is missing in it and \[8\]"
        ):
            forked.load_state_dict(other)
        del other["parameters"]  # as of an earlier version
        with pytest.raises(fm.ProblemError, match=r"branch 'alone' is that of another model: it has \d+ parameters"):
            forked.load_state_dict(other)
        assert same_bits(branch_bits(forked)["joint"], before["joint"])

    def test_a_state_of_other_shapes_is_refused_also_where_rows_are_padded_to_one_size(self) -> None:
        forks = []
        for width in (4, 5):
            model = torch.nn.Linear(width, 3)
            forks.append(fm.fork(model, sgd(model), BRANCHES))
        with pytest.raises(fm.ProblemError, match=r"another model: parameter 'weight' is \[3, 5\] in it and \[3, 4\]"):
            forks[0].load_state_dict(forks[1].state_dict())


class TestBadBranches:
    def test_a_branch_of_nan_gets_coefficient_zero_is_named_and_starts_anew(self) -> None:
        forked = fm.fork(model := seeded(noisy_net), sgd(model), BRANCHES)
        train(forked)
        alone = bits(forked["alone"].model)
        with torch.no_grad():
            forked["joint"].model.heads["odd"].bias[0] = torch.nan
        forked["joint"].optimizer.state[forked["joint"].model.body[0].weight]["momentum_buffer"].fill_(torch.nan)
        merge = forked.merge(score)
        assert merge.coefficients == {"alone": 1.0, "joint": 0.0}
        assert merge.faults == {"joint": "it has parameters that are not finite"}
        assert merge.branch_scores["joint"] == -math.inf
        for branch in forked:
            assert_same_bits(bits(branch.model), alone)
        train(forked)
        assert all(t.isfinite().all() for name in BRANCHES for t in bits(forked[name].model).values())

    def test_a_branch_whose_score_is_nan_is_named(self) -> None:
        forked = fm.fork(model := seeded(plain_net), sgd(model), BRANCHES)
        train(forked)
        calls: list[int] = []

        def first_fails(m: nn.Module) -> float:
            calls.append(1)
            return math.nan if len(calls) == 1 else score(m)

        merge = forked.merge(first_fails)
        assert merge.coefficients == {"alone": 0.0, "joint": 1.0}
        assert merge.faults == {"alone": "its validation score is not finite"}

    def test_if_all_are_bad_the_last_good_weights_are_kept(self) -> None:
        forked = fm.fork(model := seeded(noisy_net), sgd(model), BRANCHES)
        train(forked)
        good = forked.merge(score)
        assert good.coefficients
        kept = bits(forked["alone"].model)
        train(forked)
        for branch in forked:
            branch.model.body[0].weight.data.fill_(math.nan)
        merge = forked.merge(score)
        assert merge.coefficients == {}
        assert set(merge.faults) == set(BRANCHES)
        for branch in forked:
            assert_same_bits(bits(branch.model), kept)
            assert len(branch.optimizer.state) == 0
        assert_same_bits(forked.merged_into(seeded(noisy_net, 3)), kept)


class TestBadInput:
    def test_what_cannot_be_forked_is_refused(self) -> None:
        model = plain_net()
        optimizer = sgd(model)
        with pytest.raises(fm.ProblemError, match="there is no branch to fork"):
            fm.fork(model, optimizer, {})
        with pytest.raises(fm.ProblemError, match=r"DataParallel: pass the module inside it"):
            fm.fork(nn.DataParallel(model), optimizer, BRANCHES)
        with pytest.raises(fm.ProblemError, match=r"branch name '\.\./x' would leave its folder"):
            fm.fork(model, optimizer, {"../x": {"tgt": 1.0}})
        with pytest.raises(fm.ProblemError, match="no trainable parameter"):
            fm.fork(plain_net().requires_grad_(False), optimizer, BRANCHES)

    def test_a_scheduler_that_follows_a_metric_is_refused_by_name(self) -> None:
        model = plain_net()
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        with pytest.raises(fm.ProblemError, match="ReduceLROnPlateau follows a metric"):
            fm.fork(model, optimizer, BRANCHES, scheduler=scheduler)

    def test_an_optimizer_of_another_model_is_refused(self) -> None:
        with pytest.raises(fm.ProblemError, match="not the model's: build it from the model given"):
            fm.fork(plain_net(), sgd(plain_net()), BRANCHES)

    def test_a_scheduler_of_another_optimizer_is_refused(self) -> None:
        model = plain_net()
        other = torch.optim.lr_scheduler.StepLR(sgd(model), 3)
        with pytest.raises(fm.ProblemError, match="the scheduler given drives another optimizer"):
            fm.fork(model, sgd(model), BRANCHES, scheduler=other)

    @pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, "1"])
    def test_a_weight_that_cannot_be_reported_is_refused(self, weight: Any) -> None:
        model = plain_net()
        with pytest.raises(fm.ProblemError, match="branch 'a': the weight of task 'tgt' must be a finite number ≥ 0"):
            fm.fork(model, sgd(model), {"a": {"tgt": weight}})


def test_the_example_of_the_design_runs() -> None:
    model = seeded(noisy_net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    loader = DataLoader(TensorDataset(INPUTS, LABELS), batch_size=8, shuffle=True)
    forked = fm.fork(model, optimizer, BRANCHES, scheduler=scheduler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            for branch in forked:
                for batch in branch.paired(loader):
                    step(branch, batch)
            merge = forked.merge(score=score)
    assert sum(merge.coefficients.values()) == pytest.approx(1)
    assert forked.merged_into(model) is model
    assert score(model.eval()) == merge.score


def test_branches_as_a_list() -> None:
    model = plain_net()
    with pytest.raises(fm.ProblemError, match=r"branches must be .* got list"):
        fm.fork(model, torch.optim.SGD(model.parameters(), lr=0.1), ["alone"])


def test_a_branch_without_task_weights() -> None:
    model = plain_net()
    with pytest.raises(fm.ProblemError, match=r"branch 'a': task weights must be \{task: weight\}, got 1\.0"):
        fm.fork(model, sgd(model), {"a": 1.0})
