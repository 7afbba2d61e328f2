"""The tail of a round: every branch trains on the target alone while its learning rate falls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import forkmerge as fm
from _asserts import assert_close, assert_other_bits, assert_same_bits, assert_same_run
from forkmerge.algorithms.branches.tail import RoundSteps, tail_mixture
from forkmerge.algorithms.checkpoint import Phase
from naive_branches import naive_branches
from problems import (
    ADAM,
    SGD,
    TASKS,
    Stopped,
    domains_problem,
    examples,
    fit,
    noisy_net,
    plain_net,
    shared_problem,
    stop_at,
)

JOINT = {"tgt": 1.0, "aux": 1.0, "odd": 1.0}
TWO = {"alone": ({"tgt": 1.0}, 1.0), "joint": (JOINT, 1.0)}
COSINE = fm.SchedulerOf("CosineAnnealingLR", T_max=12)


class TestSteps:
    @pytest.mark.parametrize(
        ("tail", "steps", "expected"),
        [(0.5, 4, 2), (0.5, 1, 0), (0.5, 2, 1), (0.29, 100, 29), (0.95, 10, 9), (0.999, 3, 2), (0.1, 4, 0)],
    )
    def test_the_tail_is_a_rounded_share_and_never_the_whole_round(
        self, tail: float, steps: int, expected: int
    ) -> None:
        assert fm.ForkMerge("mixed", tail=tail).tail_steps(steps) == expected

    def test_without_the_option_there_is_none(self) -> None:
        steps = RoundSteps.of(fm.ForkMerge("mixed"), Phase.SEARCH, "tgt", 4, 8)
        segment = steps.segment(fm.Mixture("joint", JOINT), 4, 8)
        assert (segment.steps, segment.anneal, segment.mixture.task_weights) == (4, None, JOINT)

    def test_the_target_keeps_the_weight_it_has_in_the_mixture(self) -> None:
        assert tail_mixture(fm.Mixture("b", {"tgt": 2.0, "aux": 1.0}, 3), "tgt") == fm.Mixture("b", {"tgt": 2.0}, 3)
        assert tail_mixture(fm.Mixture("b", {"aux": 0.5}), "tgt").task_weights == {"tgt": 1.0}

    @pytest.mark.parametrize("tail", [0, 1, -0.5, 1.5, True, "half", float("nan")])
    def test_a_share_that_is_none_is_refused(self, tail: Any) -> None:
        with pytest.raises(fm.ProblemError, match="tail must be a share of a round's steps"):
            fm.ForkMerge("mixed", tail=tail)

    def test_an_unknown_fall_is_refused(self) -> None:
        with pytest.raises(fm.ProblemError, match="tail_anneal must be one of linear, none"):
            fm.ForkMerge("mixed", tail=0.5, tail_anneal="cosine")  # type: ignore[arg-type]


class TestTheSameAsAPlainLoop:
    @pytest.mark.parametrize("anneal", ["linear", "none"])
    @pytest.mark.parametrize("scheduler", [None, COSINE])
    @pytest.mark.parametrize("net", [plain_net, noisy_net])
    def test_rounds_of_two_branches(self, anneal: Any, scheduler: Any, net: Any) -> None:
        options: dict[str, Any] = {"interval": 5, "tail": 0.4, "tail_anneal": anneal}
        run = fit(
            fm.ForkMerge(search=fm.Fixed((0.25, 0.75)), **{"mixtures": "mixed", **options}),
            net=net,
            steps=12,
            scheduler=scheduler,
        )
        shares = [{"alone": 0.25, "joint": 0.75}] * 3
        twin = naive_branches(
            net, SGD, TWO, shares, steps=12, interval=5, tail=0.4, anneals=anneal == "linear", scheduler=scheduler
        )
        assert_close(run, twin, rtol=1e-4, atol=1e-5)

    def test_one_round_of_one_branch_is_one_schedule_over_the_run_to_the_bit(self) -> None:
        run = fit(fm.ForkMerge({"joint": {"tgt": 1.0}}, interval=12, tail=0.5), steps=12)
        fall = fm.SchedulerOf("LambdaLR", lr_lambda=lambda step: min((12 - step) / 6, 1.0))
        assert_same_bits(run, fit(fm.SingleTask(), steps=12, scheduler=fall))

    def test_a_refit_replays_it(self) -> None:
        run = fit(fm.ForkMerge("mixed", search=fm.Fixed((0.25, 0.75)), interval=5, tail=0.4, refit=True), steps=12)
        data = tuple(torch.cat(pair) for pair in zip(examples(16, 1), examples(24, 2), strict=True))
        twin = naive_branches(
            plain_net,
            SGD,
            TWO,
            [{"alone": 0.25, "joint": 0.75}] * 3,
            steps=12,
            interval=5,
            tail=0.4,
            inputs_and_labels=data,  # type: ignore[arg-type]
        )
        assert_close(run, twin, rtol=1e-4, atol=1e-5)


class TestWhatIsTrained:
    def test_the_tail_asks_for_no_loss_but_the_targets(self) -> None:
        asked: dict[int, set[str]] = {}

        def losses(model: Any, batch: Any, tasks: Any, context: fm.Context) -> Any:
            asked.setdefault(context.step, set()).update(tasks)
            inputs, labels = batch
            features = model.body(inputs)
            loss = torch.nn.functional.cross_entropy
            return {t: loss(model.heads[t](features), labels[:, TASKS.index(t)]) for t in tasks}

        stream = fm.Stream(torch.utils.data.TensorDataset(*examples(16, 1)), losses, TASKS, 8)
        problem = fm.Problem("tgt", {"all": stream}, shared_problem().target_validation)
        fit(fm.ForkMerge("per_auxiliary", interval=6, tail=0.5), problem, steps=12)
        full = {step for step in range(12) if step % 6 < 3}
        assert {step for step, tasks in asked.items() if tasks == set(TASKS)} == full
        assert all(tasks == {"tgt"} for step, tasks in asked.items() if step not in full)

    @pytest.mark.parametrize("method", ["PCGrad", "UW", "FAMO"])
    @pytest.mark.parametrize("weights", ["loss", "sampling"])
    def test_methods_rest_in_the_tail(self, method: str, weights: Any) -> None:
        options: dict[str, Any] = {"interval": 6, "tail": 0.5, "method": method}
        run = fit(fm.ForkMerge("per_auxiliary", **options), domains_problem(weights=weights), steps=12, optimizer=ADAM)
        for r in run.rounds:
            for name, branch in r.branches.items():
                assert set(branch.losses) == {"tgt", *([name] if name != "alone" else [])}

    def test_the_paper_and_the_default_have_none(self) -> None:
        assert fm.ForkMerge("mixed").tail is None
        assert fm.ForkMerge.paper().tail is None
        assert_other_bits(fit(fm.ForkMerge("mixed", interval=6)), fit(fm.ForkMerge("mixed", interval=6, tail=0.5)))

    @pytest.mark.parametrize(("anneal", "shares"), [("none", True), ("linear", False)])
    def test_the_floor_is_plain_single_task_training(self, anneal: Any, shares: bool) -> None:
        algorithm = fm.ForkMerge("mixed", search="fixed", interval=4, tail=0.5, tail_anneal=anneal, floor=True)
        run = fit(algorithm, steps=8)
        assert run.reference is not None
        assert_same_bits(run.reference, fit(fm.SingleTask(), steps=8))
        assert run.trained_steps["floor"] == (4 if shares else 8), "until it parts, a branch without a fall is it"


class TestResuming:
    ALGORITHM = fm.ForkMerge(
        fm.Rates("per_auxiliary", (1, 3)), interval=5, tail=0.4, refit=True, floor=True, checkpoint="best_in_interval"
    )

    def go(self, **options: Any) -> Any:
        return fit(self.ALGORITHM, net=noisy_net, steps=10, scheduler=COSINE, optimizer=ADAM, **options)

    def test_it_resumes_from_any_step_to_the_same_bits_and_on_workers(self, tmp_path: Path) -> None:
        whole = self.go()
        assert_same_run(self.go(workers=2), whole)
        for at in (9, 30, 47, 80):
            folder = tmp_path / str(at)
            with pytest.raises(Stopped):
                self.go(folder=folder, checkpoint_every=1, on_event=stop_at(at))
            assert_same_run(self.go(folder=folder, checkpoint_every=1, resume=True), whole)

    def test_a_folder_says_which_tail_it_was_started_with(self, tmp_path: Path) -> None:
        fit(fm.ForkMerge("mixed", interval=6, tail=0.5), folder=tmp_path / "run", steps=6)
        with pytest.raises(fm.StoreError, match=r"algorithm.tail was 0.5 and is 0.25 now"):
            fit(fm.ForkMerge("mixed", interval=6, tail=0.25), folder=tmp_path / "run", steps=6, resume=True)
