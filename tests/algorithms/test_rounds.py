"""The rounds of a run: where they end, and which model is returned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import forkmerge as fm
from _asserts import assert_other_bits, assert_same_bits, assert_same_run, bits
from forkmerge.algorithms.events import ProbeScored
from forkmerge.algorithms.events.run_events import record_line
from forkmerge.algorithms.run_record import Run
from forkmerge.engine.executors.branch_execution import BranchExecution
from forkmerge.engine.storage.run_folder import RunFolder
from forkmerge.engine.training.state import State
from forkmerge.problem.metrics import Criterion
from problems import (
    SGD,
    TASKS,
    domains_problem,
    fit,
    minus_loss,
    noisy_net,
    plain_net,
    quadratic_run,
    seeded,
    shared_problem,
)


class TestRounds:
    def test_the_last_round_is_shortened_to_end_at_the_last_step(self) -> None:
        run = fit(fm.ForkMerge("mixed", interval=5), steps=12)
        assert [(r.index, r.start, r.end) for r in run.rounds] == [(1, 0, 5), (2, 5, 10), (3, 10, 12)]

    def test_five_rounds_unless_an_interval_is_given(self) -> None:
        assert [r.end for r in fit(fm.ForkMerge("mixed"), steps=20).rounds] == [4, 8, 12, 16, 20]

    def test_an_interval_longer_than_the_run_is_one_round(self) -> None:
        assert [r.end for r in fit(fm.ForkMerge("mixed", interval=99), steps=5).rounds] == [5]

    def test_another_seed_is_another_run_and_the_same_seed_the_same(self) -> None:
        runs = [fit(net=noisy_net, seed=seed) for seed in (1, 1, 2)]
        assert_same_run(runs[0], runs[1])
        assert_other_bits(runs[0], runs[2])

    def test_unpaired_branches_are_trained_on_batches_of_their_own(self) -> None:
        copies = {"one": {"tgt": 1.0}, "two": {"tgt": 1.0}}
        paired, unpaired = (fit(fm.ForkMerge(copies, interval=6), paired=p, steps=6) for p in (True, False))
        scores = [{b.score for b in run.rounds[0].branches.values()} for run in (paired, unpaired)]
        assert [len(values) for values in scores] == [1, 2]

    def test_a_multi_domain_problem_runs_end_to_end(self) -> None:
        run = fit(fm.ForkMerge("per_auxiliary", interval=4), domains_problem(), noisy_net)
        assert set(run.relevance) == set(TASKS)

    def test_a_sampling_problem_runs_end_to_end(self) -> None:
        run = fit(fm.ForkMerge("mixed", interval=6), shared_problem(weights="sampling"))
        assert run.rounds[0].branches["joint"].task_weights == {"tgt": 1.0, "aux": 0.5, "odd": 0.5}

    def test_what_is_observed_is_what_is_recorded(self, tmp_path: Path) -> None:
        events: list[Any] = []
        fit(fm.ForkMerge("mixed", interval=6), folder=tmp_path / "run", on_event=events.append)
        folder = RunFolder.open(tmp_path / "run", lock=False)
        recorded = list(folder.records())
        rounds = ["segment", "segment", "round"]
        assert [e["event"] for e in recorded] == ["start", *rounds, *rounds, "end"]
        seen = [json.loads(json.dumps(line)) for line in map(record_line, events) if line is not None]
        assert seen == [e for e in recorded if e["event"] not in ("start", "end")]

    def test_kept_branches_are_the_weights_that_entered_each_merge(self, tmp_path: Path) -> None:
        algorithm = fm.ForkMerge("mixed", interval=6, keep_branches=True, search=fm.Fixed((0.25, 0.75)))
        run = fit(algorithm, folder=tmp_path / "run", steps=6)
        kept = RunFolder.open(tmp_path / "run", lock=False).load_branches(1)
        assert set(kept) == {"alone", "joint"}
        rows = {name: State.from_value(value).rows["float32"] for name, value in kept.items()}
        binding = fm.Training(SGD).binding(seeded(plain_net))
        for part in binding.layout.slices:
            expected = 0.25 * part.view(rows["alone"]) + 0.75 * part.view(rows["joint"])
            torch.testing.assert_close(bits(run)[part.name], expected)


class TestSelection:
    # The merges overshoot: validation is best after round 1.
    def run(self, **options: Any) -> Run:
        algorithm = fm.ForkMerge({"alone": {"tgt": 1.0}, "copy": {"tgt": 1.0}}, interval=1, **options)
        return quadratic_run(algorithm, {"tgt": (1.0, 0.0)}, (0.5, 0.0), lr=0.5, steps=3)

    def test_last_returns_the_last_merge(self) -> None:
        run = self.run()
        assert (run.final, run.score) == ("last merge", run.rounds[-1].score)
        assert run.model.theta[0].item() == 0.875

    def test_best_returns_the_best_merge_on_validation(self) -> None:
        run = self.run(select="best")
        assert run.final == "best merge"
        assert run.score == max(r.score for r in run.rounds) == 0.0
        assert run.metrics == {"point_score": 0.0}
        assert run.model.theta[0].item() == 0.5

    def test_a_refit_of_the_best_merge_ends_where_it_was_found(self) -> None:
        run = self.run(select="best", refit=True)
        assert [(r.phase, r.end) for r in run.rounds] == [("search", 1), ("search", 2), ("search", 3), ("refit", 1)]
        assert run.final == "refit"


class TestNestedTopK:
    def test_branches_are_built_from_short_ranking_runs_that_leave_no_trace(self) -> None:
        events: list[Any] = []
        run = fit(fm.ForkMerge(fm.NestedTopK(probe_steps=3), interval=4), net=noisy_net, on_event=events.append)
        assert set(run.probes) == {"aux", "odd"}
        probes = {task: fit(fm.Joint({"tgt": 1.0, task: 1.0}), net=noisy_net, steps=3).score for task in run.probes}
        assert run.probes == probes
        ranked = sorted(probes, key=lambda task: -probes[task])
        nested = {"alone": [], "top 1": ranked[:1], "top 2": ranked}
        branches = {name: {"tgt": 1.0, **dict.fromkeys(tasks, 1.0)} for name, tasks in nested.items()}
        assert [list(r.branches) for r in run.rounds] == [list(nested)] * 3
        assert_same_bits(run, fit(fm.ForkMerge(branches, interval=4), net=noisy_net))
        assert [e.branch for e in events if isinstance(e, ProbeScored)] == ["aux", "odd"]


def test_ranking_runs_train_with_the_scaled_weights() -> None:
    seen: list[float] = []

    real = BranchExecution.train

    def train(self: BranchExecution, segments: Any, *rest: Any) -> Any:
        seen.extend(s.mixture.task_weights.get(task, 0) for s in segments for task in TASKS[1:])
        return real(self, segments, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BranchExecution, "train", train)
        fit(fm.ForkMerge(fm.NestedTopK(probe_steps=1), interval=1, auxiliary_scale=0.5), domains_problem(), steps=1)
    assert {weight for weight in seen if weight} == {0.5}


TWO = {"minus_loss": minus_loss, "accuracy": fm.accuracy}


class TestSeveralMetricsInARun:
    def test_the_target_only_branch_of_round_one_is_the_reference_of_all_rounds(self) -> None:
        run = fit(fm.ForkMerge("per_auxiliary", interval=4), shared_problem(metrics=TWO))
        first = run.rounds[0].branches["alone"]
        assert first.score == 0.0
        criterion = Criterion({"minus_loss": 1, "accuracy": 1}).with_reference(first.metrics)
        for finished in run.rounds:
            for branch in finished.branches.values():
                assert branch.score == pytest.approx(criterion.score(branch.metrics))
        assert run.score == pytest.approx(criterion.score(run.metrics))

    def test_a_reference_of_the_user_is_used_instead(self) -> None:
        reference = {"minus_loss": -1.0, "accuracy": 0.5}
        run = fit(fm.ForkMerge("mixed", interval=4, reference=reference), shared_problem(metrics=TWO))
        first = run.rounds[0].branches["alone"]
        expected = ((first.metrics["minus_loss"] + 1) + (first.metrics["accuracy"] - 0.5) / 0.5) / 2
        assert first.score == pytest.approx(expected)

    def test_a_zero_reference_of_the_target_only_branch_names_the_metric(self) -> None:
        problem = shared_problem(metrics={"minus_loss": minus_loss, "zero": lambda p, t: 0.0})
        with pytest.raises(fm.ProblemError, match=r"reference value of metric 'zero' is 0\.0"):
            fit(problem=problem)

    @pytest.mark.parametrize(
        "algorithm", [fm.Joint(), fm.SingleTask(), fm.Joint(refit=True), fm.Joint(select="best", refit=True)]
    )
    def test_a_run_of_one_branch_is_its_own_reference(self, algorithm: fm.Algorithm) -> None:
        run = fit(algorithm, shared_problem(metrics=TWO))
        if run.searched:
            assert run.rounds[0].score == 0.0

    def test_branches_without_a_target_only_one_need_a_reference_before_training(self) -> None:
        branches = {"a": {"tgt": 1.0, "aux": 1.0}, "b": {"tgt": 1.0, "odd": 1.0}}
        problem = shared_problem(metrics=TWO)
        with pytest.raises(fm.ProblemError, match=r"2 metrics and no branch trains on it alone: pass reference="):
            fit(fm.ForkMerge(branches), problem)
        reference = {"minus_loss": -1.0, "accuracy": 0.5}
        assert fit(fm.ForkMerge(branches, reference=reference), problem).score is not None

    def test_ranking_runs_need_a_reference_before_training(self) -> None:
        algorithm = fm.ForkMerge(fm.NestedTopK(probe_steps=2), interval=4)
        with pytest.raises(fm.ProblemError, match=r"ranking runs are scored before round 1.*pass reference="):
            fit(algorithm, shared_problem(metrics=TWO))
