"""One module lent to the branches in turn: the bits of the copying fork, and no silent mistake that it invites."""

from __future__ import annotations

import io
import math
import random
from typing import Any

import pytest
import torch
from torch import nn

import forkmerge as fm
from _asserts import assert_other_bits, assert_same_bits, bits
from forked_training import BRANCHES, CONTEXT, INPUTS, LABELS, score, sgd, step, train
from problems import conv_net, frozen_net, noisy_net, plain_net, seeded, shared_losses, tied_net

THREE = {**BRANCHES, "fast": {"task_weights": {"tgt": 1.0, "aux": 1.0}, "lr_scale": 2}}


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


OPTIMIZERS = {
    "momentum": sgd,
    "plain": lambda m: torch.optim.SGD(trained(m), lr=0.2),
    "adam": lambda m: torch.optim.Adam(trained(m), lr=0.01, amsgrad=True),
    "fused": lambda m: torch.optim.AdamW(trained(m), lr=0.01, fused=True),
    "adafactor": lambda m: torch.optim.Adafactor(trained(m), lr=0.05),
    "groups": lambda m: torch.optim.RMSprop([{"params": trained(m)[:1], "lr": 0.02}, {"params": trained(m)[1:]}]),
}
SCHEDULERS = {
    "none": lambda o: None,
    "steps": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 4]),
    "chained": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: 1 / (t + 1)),
}
CASES = {
    "net": [plain_net, noisy_net, conv_net, tied_net, frozen_net],
    "optimizer": sorted(OPTIMIZERS),
    "scheduler": sorted(SCHEDULERS),
    "scaled": [False, True],
    "warm": [False, True],
    "policy": ["keep", "average", "reset"],
    "search": [fm.Fixed((0.2, 0.3, 0.5)), fm.Fixed((0.0, 1.0, 0.0)), fm.Greedy(), fm.Grid(2)],
    "in_turn": [False, True],
    "saved_after": [None, 0, 1, 2],
}


class Trial:
    """A fork in either form, trained and merged by one and the same loop."""

    def __init__(self, case: dict[str, Any], *, in_place: bool) -> None:
        self.case, self.in_place = case, in_place
        self.forked = self.made()

    def made(self) -> fm.Fork:
        case, model = self.case, seeded(self.case["net"])
        self.model = model
        optimizer = OPTIMIZERS[case["optimizer"]](model)
        if case["warm"]:
            torch.manual_seed(5)  # of dropout
            shared_losses(model.train(), (INPUTS, LABELS), ["tgt"], CONTEXT)["tgt"].backward()
            optimizer.step()
        scheduler = SCHEDULERS[case["scheduler"]](optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) if case["scaled"] else None
        options = {"search": case["search"], "optimizer_state": case["policy"], "in_place": self.in_place}
        return fm.fork(model, optimizer, THREE, scheduler=scheduler, scaler=scaler, **options)

    def one_step(self, branch: Any, index: int) -> None:
        torch.manual_seed(index)
        if branch.scaler is None:
            step(branch)
            return
        branch.model.train()
        losses = shared_losses(branch.model, (INPUTS, LABELS), list(branch.task_weights), CONTEXT)
        branch.optimizer.zero_grad()
        branch.scaler.scale(sum(w * losses[t] for t, w in branch.task_weights.items())).backward()
        if branch.name == "joint" and index == 1:
            next(p for p in branch.model.parameters() if p.grad is not None).grad.fill_(torch.inf)
        branch.scaler.step(branch.optimizer)
        branch.scaler.update()
        if branch.scheduler is not None:
            branch.scheduler.step()

    def train(self, indices: range) -> None:
        if self.case["in_turn"]:
            for index in indices:
                for branch in self.forked:
                    self.one_step(branch, index)
        else:
            for branch in self.forked:
                for index in indices:
                    self.one_step(branch, index)

    def reload(self) -> None:
        file = io.BytesIO()
        torch.save(self.forked.state_dict(), file)
        file.seek(0)
        self.forked = self.made()
        self.forked.load_state_dict(torch.load(file, weights_only=True))

    def seen(self) -> list[Any]:
        """Everything a branch has, in order."""
        return [
            (
                bits(branch.model),
                branch.optimizer.state_dict(),
                branch.scheduler and branch.scheduler.state_dict(),
                branch.scaler and branch.scaler.state_dict(),
            )
            for branch in self.forked
        ]

    def run(self) -> list[Any]:
        record: list[Any] = []
        for number in range(2):
            self.train(range(2))
            if self.case["saved_after"] == number:
                self.reload()
            self.train(range(2, 3))
            record += self.seen()
            record.append(self.forked.merge(score))
            if self.case["saved_after"] == 2:
                self.reload()
            record += [bits(self.forked.merged_into(seeded(self.case["net"], 7))), *self.seen()]
        return record


def assert_equal(left: Any, right: Any) -> None:
    """The same values and bits, wherever tensors are."""
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_equal(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_equal(one, other)
    else:
        assert left == right


def test_it_has_the_bits_of_the_copying_fork() -> None:
    draw = random.Random(0)
    for _ in range(40):
        case = {name: draw.choice(options) for name, options in CASES.items()}
        lent = Trial(case, in_place=True)
        assert_equal(lent.run(), Trial(case, in_place=False).run())
        assert_same_bits(lent.model, lent.forked.merged_into(seeded(case["net"])))


def in_place(net: Any = noisy_net, **options: Any) -> tuple[nn.Module, fm.Fork]:
    model = seeded(net)
    return model, fm.fork(model, sgd(model), BRANCHES, in_place=True, **options)


class TestLending:
    def test_every_branch_has_the_model_that_was_forked_and_outside_it_shows_the_last_merge(self) -> None:
        model, forked = in_place(search=fm.Fixed((0.25, 0.75)))
        start, own = bits(model), {}
        parameters = list(model.parameters())
        for branch in forked:
            assert branch.model is model
            assert_same_bits(model, start)
            step(branch)
            own[branch.name] = bits(model)
        assert_same_bits(model, start)
        assert_other_bits(own["alone"], own["joint"])
        for branch in forked:
            assert_same_bits(model, own[branch.name])
        forked.merge(score)
        merged = fm.merge_states(own, {"alone": 0.25, "joint": 0.75})
        assert_same_bits(bits(model), merged)
        for branch in forked:
            assert_same_bits(bits(branch.model), merged)
        assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))

    def test_a_loop_that_is_left_or_fails_hands_the_module_back(self) -> None:
        model, forked = in_place()
        start = bits(model)
        for branch in forked:
            step(branch)
            break
        assert_same_bits(model, start)

        def interrupted() -> None:
            for branch in forked:
                step(branch)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert_same_bits(model, start)
        assert [branch._steps for branch in forked] == [2, 0]

    def test_frozen_parameters_are_never_touched(self) -> None:
        model, forked = in_place(frozen_net)
        frozen = model.body[0].weight
        pointer, version = frozen.data_ptr(), frozen._version
        train(forked)
        forked.merge(score)
        assert (frozen.data_ptr(), frozen._version) == (pointer, version)

    def test_a_score_that_fails_leaves_all_as_it_was(self) -> None:
        model, forked = in_place()
        train(forked, dropout=True)
        shown, calls = bits(model), []

        def failing(m: nn.Module) -> float:
            calls.append(1)
            if len(calls) == 4:
                raise KeyboardInterrupt
            return score(m)

        with pytest.raises(KeyboardInterrupt):
            forked.merge(failing)
        assert_same_bits(model, shown)
        _, fresh = in_place()
        train(fresh, dropout=True)
        assert forked.merge(score) == fresh.merge(score)

    def test_a_faulty_branch_starts_anew(self) -> None:
        model, forked = in_place()
        train(forked)
        for branch in forked:
            if branch.name == "joint":
                branch.model.heads["odd"].bias.data[0] = math.nan
        merge = forked.merge(score)
        assert merge.faults == {"joint": "it has parameters that are not finite"}
        assert all(tensor.isfinite().all() for tensor in bits(model).values())

    def test_a_state_of_the_copying_fork_goes_on_in_place_and_the_other_way_round(self) -> None:
        def made(is_lent: bool) -> fm.Fork:
            model = seeded(noisy_net)
            return fm.fork(model, sgd(model), BRANCHES, search=fm.Fixed((0.4, 0.6)), in_place=is_lent)

        ends = []
        for before, after in [(True, True), (False, False), (True, False), (False, True)]:
            forked = made(before)
            train(forked, dropout=True)
            stored, forked = forked.state_dict(), made(after)
            forked.load_state_dict(stored)
            train(forked, dropout=True)
            ends.append((forked.merge(score), bits(forked.merged_into(seeded(noisy_net, 4)))))
        for merge, weights in ends[1:]:
            assert merge == ends[0][0]
            assert_same_bits(weights, ends[0][1])

    def test_a_state_may_be_taken_while_a_branch_has_the_module(self) -> None:
        _, forked = in_place()
        for branch in forked:
            step(branch)
            stored = forked.state_dict()
        _, again = in_place()
        again.load_state_dict(stored)
        assert forked.merge(score) == again.merge(score)

    def test_memory_is_one_row_of_weights_per_branch_one_merge_and_one_gradient(self) -> None:
        width = 64
        model = nn.Linear(width, width, bias=False)
        optimizer = torch.optim.Adam(model.parameters())
        four = {name: {"tgt": 1.0} for name in "abcd"}

        def held(is_lent: bool) -> float:
            forked = fm.fork(model, optimizer, four, in_place=is_lent)
            for branch in forked:
                branch.model(torch.ones(1, width)).sum().backward()
                branch.optimizer.step()
            rows = [t for b in forked._models.branches for t in (b._state.rows, b._state.optimizer_rows)]
            tensors = [*(t for row in rows for t in row.values()), *forked._merged.rows.values()]
            tensors += [b._lent["model"].weight if is_lent else b.model.weight for b in forked._models.branches]
            tensors += [model.weight, *(w.grad for w in tensors if w.grad is not None)]
            forked.state_dict()  # adopts the optimizer's tensors
            rows = [t for b in forked._models.branches for t in b._state.optimizer_rows.values()]
            return sum({t.data_ptr(): t.numel() for t in (*tensors, *rows)}.values()) / width**2

        copied = held(False)
        lent = held(True)
        assert copied == 4 + 4 + 8 + 2  # weights, gradients, Adam's; the merge and the model itself
        assert lent == 4 + 8 + 1  # between turns there is no gradient; inside one there is one


class TestGradients:
    def test_gradients_that_were_not_stepped_with_stay_with_their_branch(self) -> None:
        """Accumulated over turns as over a copy."""
        results = []
        for is_lent in (True, False):
            model = seeded(plain_net)
            forked = fm.fork(model, sgd(model), BRANCHES, in_place=is_lent, search=fm.Fixed((0.5, 0.5)))
            for index in range(5):
                for branch in forked:
                    shared_losses(branch.model, (INPUTS[index:], LABELS[index:]), ["tgt"], CONTEXT)["tgt"].backward()
                    if index % 3 == 2:
                        branch.optimizer.step()
                        branch.optimizer.zero_grad()
            forked.merge(score)
            results.append(bits(forked.merged_into(seeded(plain_net, 3))))
        assert_same_bits(*results)

    def test_those_that_were_are_dropped(self) -> None:
        model, forked = in_place()
        train(forked)
        assert all(parameter.grad is None for parameter in model.parameters())
        for _ in forked:
            assert all(parameter.grad is None for parameter in model.parameters())


class TestTrainersThatOwnTheOptimizer:
    def test_what_a_scheduler_outside_sets_holds_for_all_branches(self) -> None:
        results = []
        for is_lent in (True, False):
            model = seeded(plain_net)
            optimizer = sgd(model)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=8)
            forked = fm.fork(
                model,
                optimizer,
                BRANCHES,
                in_place=is_lent,
                scheduler=None if is_lent else scheduler,
                search=fm.Fixed((0.5, 0.5)),
            )
            for index in range(6):
                for branch in forked:
                    step(branch)
                if is_lent:
                    scheduler.step()
                if index == 3:
                    forked.merge(score)
            results.append([bits(branch.model) for branch in forked])
        for one, other in zip(*results, strict=True):
            assert_same_bits(one, other)

    def test_a_checkpoint_of_the_optimizer_outside_has_the_first_branch_s_state(self) -> None:
        model = seeded(plain_net)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        forked = fm.fork(model, optimizer, BRANCHES, in_place=True)
        states = []
        for branch in forked:
            step(branch)
            states.append({k: v["exp_avg"].clone() for k, v in branch.optimizer.state_dict()["state"].items()})
        shown = optimizer.state_dict()["state"]
        assert all(torch.equal(shown[key]["exp_avg"], value) for key, value in states[0].items())


class TestRefusals:
    def test_two_branches_at_once(self) -> None:
        _, forked = in_place()
        one, _ = forked
        with pytest.raises(
            fm.ProblemError, match=r"branch 'alone' does not have the model now.* fork without in_place"
        ):
            step(one)
        with pytest.raises(fm.ProblemError, match="branch 'joint' does not have the optimizer now"):
            forked["joint"].optimizer.step()
        with pytest.raises(AttributeError, match="no attribute 'modle'"):
            _ = one.modle
        with pytest.raises(fm.ProblemError, match="branch 'alone' has the module: a second loop over the fork has to"):
            list(zip(forked, forked, strict=True))

    @pytest.mark.parametrize("action", ["merge", "load_state_dict", "merged_into"])
    def test_what_needs_the_module_while_a_branch_has_it(self, action: str) -> None:
        model, forked = in_place()
        train(forked)
        argument = {"merge": score, "load_state_dict": forked.state_dict(), "merged_into": model}[action]
        turns = iter(forked)
        next(turns)
        with pytest.raises(fm.ProblemError, match=f"branch 'alone' has the module: {action} has to wait"):
            getattr(forked, action)(argument)
        list(turns)
        forked.merge(score)

    def test_steps_and_changes_of_the_weights_outside_a_turn(self) -> None:
        model = seeded(plain_net)
        optimizer = sgd(model)
        forked = fm.fork(model, optimizer, BRANCHES, in_place=True)
        shared_losses(model, (INPUTS, LABELS), ["tgt"], CONTEXT)["tgt"].backward()
        with pytest.raises(fm.ProblemError, match="the optimizer was stepped while no branch had the module"):
            optimizer.step()
        with pytest.raises(fm.ProblemError, match=r"'body\.0\.weight' got a gradient while no branch had the module"):
            train(forked)
        optimizer.zero_grad()
        train(forked)
        with torch.no_grad():
            model.body[0].bias.add_(1)
        with pytest.raises(fm.ProblemError, match=r"'body\.0\.bias' was changed while no branch had the module"):
            train(forked)
        with pytest.raises(fm.ProblemError, match=r"'body\.0\.bias' was changed while no branch had the module"):
            forked.merge(score)

    def test_other_memory_is_no_change_unless_its_values_are_other(self) -> None:
        model, forked = in_place(plain_net)
        train(forked)
        model.body[0].weight.data = model.body[0].weight.data.clone()
        train(forked)
        model.body[0].weight.data = model.body[0].weight.data + 1
        with pytest.raises(fm.ProblemError, match=r"'body\.0\.weight' was changed while no branch had the module"):
            train(forked)

    def test_a_scheduler_of_the_fork_that_is_stepped_outside(self) -> None:
        model = seeded(plain_net)
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        forked = fm.fork(model, optimizer, BRANCHES, scheduler=scheduler, in_place=True)
        train(forked)
        scheduler.step()
        with pytest.raises(fm.ProblemError, match=r"the scheduler was stepped while no branch .* not passed to fork"):
            train(forked)

    def test_a_backward_pass_through_the_turn_of_another_branch(self) -> None:
        """The graph holds the module's weights, which are another branch's by then: torch itself refuses."""
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        forked = fm.fork(model, sgd(model), BRANCHES, in_place=True)
        losses = [branch.model(torch.ones(1, 2)).sum() for branch in forked]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            losses[0].backward()

    def test_parameters_that_are_new(self) -> None:
        model, forked = in_place(plain_net)
        train(forked)
        model.extra = nn.Linear(2, 2)
        with pytest.raises(fm.ProblemError, match=r"'the fork' and 'the module' have different parameters: 'extra"):
            forked.merge(score)

    def test_a_merge_without_training(self) -> None:
        _, forked = in_place()
        with pytest.raises(fm.ProblemError, match="no branch has changed since the last merge"):
            forked.merge(score)
