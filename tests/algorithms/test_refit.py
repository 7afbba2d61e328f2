"""The refit: the merges that were found are replayed on training and validation data, without any search."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import TensorDataset

import forkmerge as fm
from _asserts import assert_other_bits, assert_same_bits, assert_same_run, bits
from forkmerge.algorithms.run_record import Run
from problems import (
    ADAM,
    Stopped,
    diverging_problem,
    domains_problem,
    examples,
    fit,
    minus_loss,
    noisy_net,
    predict_target,
    quadratic_run,
    shared_problem,
    stop_at,
    union_problem,
)


class Replay(fm.Search):
    """Answers with the coefficients of an earlier run, round by round."""

    guarded: ClassVar[bool] = False

    def __init__(self, run: Run) -> None:
        self.rounds = iter([tuple(r.coefficients[name] for name in r.branches) for r in run.searched])

    def search(self, score: Any, branches: int) -> tuple[float, ...]:
        return next(self.rounds)

    def evaluations(self, branches: int) -> int:
        return 0


class TestRefit:
    def test_it_trains_on_training_and_validation_data_of_the_target(self) -> None:
        union = union_problem().stream_map["all"].dataset
        inputs = torch.cat([examples(16, 1)[0], examples(24, 2)[0]])
        assert torch.equal(union.tensors[0], inputs)

    def test_other_streams_keep_their_data(self) -> None:
        union = domains_problem().with_validation_labels()
        assert [len(stream.dataset) for stream in union.stream_map.values()] == [20 + 24, 30, 40]

    @pytest.mark.parametrize("bn", ["average", "recompute"])
    def test_it_is_the_found_run_replayed_on_the_union_without_search(self, bn: Any) -> None:
        options: dict[str, Any] = {"interval": 4, "bn": bn, "prune_to": 2}
        run = fit(fm.ForkMerge("per_auxiliary", refit=True, **options), net=noisy_net, steps=10)
        assert run.final == "refit"
        replayed = [r for r in run.rounds if r.phase == "refit"]
        assert [r.end for r in replayed] == [4, 8, 10]
        for searched, refitted in zip(run.searched, replayed, strict=True):
            assert refitted.coefficients == searched.coefficients
            assert set(refitted.kept) <= set(searched.kept)
            assert sorted([*refitted.branches, *refitted.skipped]) == sorted(searched.branches)
            assert refitted.candidates == []
            assert refitted.score is None
        twin = fit(fm.ForkMerge("per_auxiliary", search=Replay(run), **options), union_problem(), noisy_net, steps=10)
        assert_same_bits(run, twin)

    def test_no_validation_pass_happens_in_it(self) -> None:
        calls: list[int] = []

        def counted(predictions: Any, targets: Any) -> float:
            calls.append(1)
            return minus_loss(predictions, targets)

        counts = []
        for refit in (False, True):
            calls.clear()
            fit(fm.ForkMerge("mixed", interval=4, refit=refit), shared_problem(metrics={"m": counted}))
            counts.append(len(calls))
        assert counts[0] == counts[1]

    def test_the_score_reported_is_that_of_the_search(self) -> None:
        searched, refitted = (fit(fm.ForkMerge("mixed", interval=4, refit=refit)) for refit in (False, True))
        assert (refitted.score, refitted.metrics) == (searched.score, searched.metrics)
        assert_other_bits(searched, refitted)

    @pytest.mark.parametrize("policy", ["best_in_interval", "best_so_far"])
    def test_checkpoint_steps_are_replayed(self, policy: Any) -> None:
        algorithm = fm.ForkMerge("per_auxiliary", interval=6, refit=True, checkpoint=policy, validate_every=2)
        run = fit(algorithm, net=noisy_net, steps=15, optimizer=fm.OptimizerOf("SGD", lr=1.0, momentum=0.9))
        entered = [[b.entered_step for b in r.branches.values()] for r in run.searched]
        refitted = [r for r in run.rounds if r.phase == "refit"]
        for searched, replayed in zip(run.searched, refitted, strict=True):
            assert {name: searched.branches[name].entered_step for name in replayed.branches} == {
                name: branch.entered_step for name, branch in replayed.branches.items()
            }
        assert any(step < r.end for r, steps in zip(run.searched, entered, strict=True) for step in steps)

    def test_as_training_is_the_form_that_is_joined(self) -> None:
        inputs, labels = examples(24, 2)
        validation = fm.Evaluation(
            TensorDataset(inputs, labels[:, 0]), minus_loss, as_training=TensorDataset(inputs, labels)
        )
        run = fit(fm.ForkMerge("mixed", interval=4, refit=True), shared_problem(validation=validation))
        assert_same_bits(run, fit(fm.ForkMerge("mixed", interval=4, refit=True)))

    @staticmethod
    def poisoned() -> fm.Problem:
        """Validation examples that spoil training, but not the first of them, which is tried beforehand."""
        inputs, labels = examples(24, 2)
        bad = inputs.clone()
        bad[1:] = torch.inf
        validation = fm.Evaluation(
            TensorDataset(inputs, labels), minus_loss, predict_target, as_training=TensorDataset(bad, labels)
        )
        return shared_problem(validation=validation)

    def test_a_refit_that_diverges_returns_the_searched_model_with_a_note(self) -> None:
        run = fit(fm.ForkMerge("mixed", interval=4, refit=True), self.poisoned())
        searched = fit(fm.ForkMerge("mixed", interval=4))
        assert_same_bits(run, searched)
        assert run.final == "last merge"
        assert run.score == searched.score
        assert any("refit given up at step 4: branch" in note for note in run.notes)

    def test_a_refit_without_search_that_diverges_at_once_fails(self) -> None:
        with pytest.raises(fm.RunFailed, match="nothing was learned: refit given up at step 3: branch 'alone'"):
            fit(fm.SingleTask(refit=True), self.poisoned())

    @pytest.mark.parametrize("algorithm", [fm.SingleTask(refit=True), fm.Joint({"tgt": 1.0}, refit=True)])
    def test_one_branch_needs_no_search_and_trains_once_on_the_union(self, algorithm: Any) -> None:
        run = fit(algorithm)
        assert {r.phase for r in run.rounds} == {"refit"}
        assert_same_bits(run, fit(fm.SingleTask(), union_problem()))
        assert run.score is None
        assert run.metrics == {}

    def test_one_branch_with_its_best_step_is_refitted_to_that_step(self) -> None:
        # θ runs .5, .75, … towards 1 and validation wants .75; the refit pulls towards both, with mean .875.
        algorithm = fm.SingleTask(interval=1, select="best", refit=True)
        run = quadratic_run(algorithm, {"tgt": (1.0, 0.0)}, (0.75, 0.0), lr=0.5, steps=4)
        assert [(r.phase, r.end) for r in run.rounds if r.phase == "refit"] == [("refit", 1), ("refit", 2)]
        assert run.score == 0.0

    def test_a_replayed_round_in_which_every_branch_was_faulty_keeps_its_state(self) -> None:
        problem = diverging_problem(4, "tgt")
        run = fit(fm.ForkMerge("mixed", interval=4, refit=True), problem)
        assert run.rounds[1].coefficients == {}
        assert run.final == "refit"
        assert all(tensor.isfinite().all() for tensor in bits(run).values())


class Told(fm.Search):
    """Takes whatever it was told, one vector per round, whatever the scores are."""

    guarded: ClassVar[bool] = False

    def __init__(self, vectors: list[tuple[float, ...]]) -> None:
        self.vectors = iter(vectors)

    def search(self, score: Any, branches: int) -> tuple[float, ...]:
        return next(self.vectors)

    def evaluations(self, branches: int) -> int:
        return 0


ODD_NEVER = [(0.5, 0.5, 0.0), (0.25, 0.75, 0.0), (1.0, 0.0, 0.0), (0.5, 0.5, 0.0)]
AUX_EARLY = [(0.5, 0.25, 0.25), (0.0, 1.0, 0.0), (0.5, 0.0, 0.5), (1.0, 0.0, 0.0)]
ALONE_EARLY = [(1.0, 0.0, 0.0), (1.0, 0.0, 0.0), (0.0, 0.5, 0.5), (0.0, 0.0, 1.0)]
ALONE_NEVER = [(0.0, 0.5, 0.5), (0.0, 1.0, 0.0), (0.0, 0.5, 0.5), (0.0, 0.0, 1.0)]


def trained(run: Run) -> dict[str, list[int]]:
    """The rounds of the refit, counted from 0, in which each branch was trained."""
    rounds = [r for r in run.rounds if r.phase == "refit"]
    names = dict.fromkeys(name for r in run.searched for name in r.branches)
    return {name: [i for i, r in enumerate(rounds) if name in r.branches] for name in names}


def every_branch(run: Any, first: int, names: Any) -> list[str]:
    """The slow twin of `taken_branches`: a refit that leaves out nothing."""
    return list(names)


class TestSkippedBranches:
    """A branch of which no later merge takes anything is not trained, and no bit depends on that."""

    def test_a_branch_is_trained_up_to_the_last_merge_that_takes_something_of_it(self) -> None:
        run = fit(fm.ForkMerge("per_auxiliary", interval=3, search=Told(AUX_EARLY), refit=True))
        assert trained(run) == {"alone": [0, 1, 2, 3], "aux": [0, 1], "odd": [0, 1, 2]}
        skipped = [r.skipped for r in run.rounds if r.phase == "refit"]
        assert skipped == [[], [], ["aux"], ["aux", "odd"]]
        assert run.trained_steps == {"alone": 24, "aux": 12 + 6, "odd": 12 + 9}

    def test_the_bits_are_those_of_a_refit_that_trains_all_branches_under_every_policy(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        policies: dict[str, Sequence[Any]] = {
            "checkpoint": ("last", "best_in_interval", "best_so_far"),
            "optimizer_state": ("keep", "average", "reset"),
            "bn": ("average", "recompute"),
            "floor": (False, True),
        }
        # These take turns: each stands beside every policy above in some run.
        scripts = cycle([ODD_NEVER, AUX_EARLY, ALONE_EARLY, ALONE_NEVER])
        methods, paired = cycle([None, "PCGrad", None, "UW", "DWA"]), cycle([True, True, False])
        statistics, pruning = cycle(["all", "target", "all"]), cycle([None, None, 2, None, None, None, None])
        seen = set()
        for values in product(*policies.values()):
            script, chosen, prune_to = next(scripts), dict(zip(policies, values, strict=True)), next(pruning)
            if prune_to is not None:
                script = [script[0], *((1.0, 0.0), (0.5, 0.5), (0.0, 1.0))]
            chosen |= {"prune_to": prune_to, "method": next(methods)}
            options = {"paired": next(paired), "statistics": next(statistics), "optimizer": ADAM}
            runs = []
            for twin in (None, every_branch):
                algorithm = fm.ForkMerge(
                    "per_auxiliary",
                    interval=2,
                    search=Told(script),
                    validate_every=1,
                    bn_batches=2,
                    refit=True,
                    **chosen,
                )
                with monkeypatch.context() as patch:
                    if twin is not None:
                        patch.setattr("forkmerge.algorithms.refit.taken_branches", twin)
                    runs.append(fit(algorithm, domains_problem(), noisy_net, steps=8, **options))
            assert_same_bits(*runs)
            assert (runs[0].reference is None) == (runs[1].reference is None) == (not chosen["floor"])
            if runs[0].reference is not None and runs[1].reference is not None:
                assert_same_bits(runs[0].reference, runs[1].reference)
            assert sum(runs[0].trained_steps.values()) <= sum(runs[1].trained_steps.values())
            seen.add(sum(runs[0].trained_steps.values()) < sum(runs[1].trained_steps.values()))
            assert not any("without gradient" in note for note in runs[0].notes), "the search has looked at all"
        assert seen == {True, False}, "with a floor, its own branch may take the place of the one left out"

    @pytest.mark.parametrize("script", [ODD_NEVER, AUX_EARLY, ALONE_EARLY])
    def test_the_bits_are_those_of_a_plain_run_on_the_union_with_these_coefficients(self, script: Any) -> None:
        options: dict[str, Any] = {"interval": 3, "optimizer_state": "average"}
        run = fit(fm.ForkMerge("per_auxiliary", search=Told(script), refit=True, **options), net=noisy_net)
        twin = fit(fm.ForkMerge("per_auxiliary", search=Told(script), **options), union_problem(), noisy_net)
        assert_same_bits(run, twin)
        assert sum(run.trained_steps.values()) < 2 * sum(twin.trained_steps.values())

    def test_after_the_best_merge_nothing_counts(self) -> None:
        script = [(0.5, 0.5, 0.0), (0.0, 0.0, 1.0), (0.0, 0.0, 1.0), (0.0, 0.0, 1.0)]
        run = fit(
            fm.ForkMerge("per_auxiliary", interval=3, search=Told(script), refit=True, select="best"),
            optimizer=fm.OptimizerOf("SGD", lr=0.3),
        )
        end = run.last_step
        if end == 3:
            assert trained(run) == {"alone": [0], "aux": [0], "odd": []}
        else:
            assert trained(run)["odd"] == list(range(end // 3))

    def test_a_round_without_any_usable_branch_leaves_out_nobody_for_good(self) -> None:
        problem = diverging_problem(4, "tgt")
        run = fit(fm.ForkMerge("per_auxiliary", interval=4, refit=True), problem)
        assert [r.coefficients for r in run.searched][1:] == [{}, {}]
        assert run.final == "refit"

    def test_workers_and_resumes_skip_the_same(self, tmp_path: Path) -> None:
        algorithm = fm.ForkMerge("per_auxiliary", interval=3, search=fm.Greedy(), refit=True, floor=True)
        whole = fit(algorithm, net=noisy_net)
        assert any(r.skipped for r in whole.rounds)
        assert_same_run(fit(algorithm, net=noisy_net, workers=2), whole)
        for at in (20, 41, 60):
            folder = tmp_path / str(at)
            with pytest.raises(Stopped):
                fit(algorithm, net=noisy_net, folder=folder, checkpoint_every=2, on_event=stop_at(at))
            assert_same_run(fit(algorithm, net=noisy_net, folder=folder, checkpoint_every=2, resume=True), whole)


class TestFixedCoefficients:
    """Coefficients that are known beforehand need no search before a refit."""

    @pytest.mark.parametrize("fixed", [None, (0.5, 0.25, 0.25), (0.5, 0.0, 0.5)])
    def test_there_is_no_search_and_the_bits_are_those_of_the_merges_on_the_union(self, fixed: Any) -> None:
        options: dict[str, Any] = {"mixtures": "per_auxiliary", "interval": 4, "search": fm.Fixed(fixed)}
        run = fit(fm.ForkMerge(**{"mixtures": "mixed", **options}, refit=True), net=noisy_net)
        twin = fit(fm.ForkMerge(**{"mixtures": "mixed", **options}), union_problem(), noisy_net)
        assert_same_bits(run, twin)
        assert {r.phase for r in run.rounds} == {"refit"}
        assert (run.score, run.final) == (None, "refit")
        assert run.relevance == {task: pytest.approx(share) for task, share in twin.relevance.items() if share}
        names = [n for n, share in zip(("alone", "aux", "odd"), fixed or (1, 1, 1), strict=True) if share]
        assert run.trained_steps == dict.fromkeys(names, 12)

    @pytest.mark.parametrize(
        "option",
        [
            {"select": "best"},
            {"floor": True},
            {"checkpoint": "best_in_interval"},
            {"confidence": 0.8},
            {"search": fm.Greedy()},
        ],
    )
    def test_whatever_is_chosen_on_validation_data_still_needs_the_search(self, option: dict[str, Any]) -> None:
        settings: dict[str, Any] = {"search": "fixed", "interval": 4, "refit": True, **option}
        run = fit(fm.ForkMerge("per_auxiliary", **settings), shared_problem(metrics=fm.accuracy))
        assert {r.phase for r in run.rounds} == {"search", "refit"}

    def test_a_branch_that_diverges_gives_its_part_to_the_others(self) -> None:
        run = fit(fm.ForkMerge("per_auxiliary", search="fixed", interval=4, refit=True), diverging_problem(6, "odd"))
        shares = [{name: round(share, 3) for name, share in r.coefficients.items()} for r in run.rounds]
        thirds = dict.fromkeys(("alone", "aux", "odd"), 0.333)
        assert shares == [thirds, *[{"alone": 0.5, "aux": 0.5, "odd": 0.0}] * 2]
        assert any("branch 'odd' got coefficient 0" in note for note in run.notes)
        assert all(tensor.isfinite().all() for tensor in bits(run).values())

    def test_it_resumes_from_anywhere_and_on_workers(self, tmp_path: Path) -> None:
        algorithm = fm.ForkMerge("per_auxiliary", interval=4, search=fm.Fixed((0.5, 0.0, 0.5)), refit=True)
        whole = fit(algorithm, net=noisy_net)
        assert_same_run(fit(algorithm, net=noisy_net, workers=2), whole)
        for at in (3, 11):
            folder = tmp_path / str(at)
            with pytest.raises(Stopped):
                fit(algorithm, net=noisy_net, folder=folder, checkpoint_every=2, on_event=stop_at(at))
            assert_same_run(fit(algorithm, net=noisy_net, folder=folder, checkpoint_every=2, resume=True), whole)


class ToldSums(Told):
    """Coefficients that may sum to more than 1."""

    beyond_one: ClassVar[bool] = True


@pytest.mark.parametrize("optimizer_state", ["keep", "average", "reset"])
def test_sums_of_updates_are_replayed_without_the_branches_that_they_leave_out(
    optimizer_state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = [(1.0, 0.5, 0.0), (0.0, 1.5, 0.0), (1.0, 1.0, 0.0), (2.0, 0.0, 0.0)]
    runs = []
    for twin in (None, every_branch):
        algorithm = fm.ForkMerge(
            "per_auxiliary", interval=3, search=ToldSums(script), refit=True, optimizer_state=optimizer_state
        )
        with monkeypatch.context() as patch:
            if twin is not None:
                patch.setattr("forkmerge.algorithms.refit.taken_branches", twin)
            runs.append(fit(algorithm, net=noisy_net))
    assert_same_bits(*runs)
    assert trained(runs[0]) == {"alone": [0, 1, 2, 3], "aux": [0, 1, 2], "odd": []}
