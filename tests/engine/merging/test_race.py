"""The race returns what the full loop returns, having looked at less."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import forkmerge as fm
from forkmerge.algorithms import validation
from forkmerge.engine.merging import candidates as candidates_module
from forkmerge.engine.merging.arithmetic import Coefficients, vertices
from forkmerge.engine.merging.candidates import Candidates
from forkmerge.engine.merging.find_merge import find_merge
from forkmerge.engine.merging.race import Entrant, ScoredEntrant, race
from forkmerge.engine.merging.race_over_examples import ExampleRace, turn_length
from forkmerge.engine.merging.searches import Binary, Greedy, Grid, Search, best_of
from forkmerge.problem.exact_sum import add_exactly, rounded
from forkmerge.problem.metrics import Criterion
from forkmerge.problem.scoring import CostReader, evaluating
from problems import (
    SGD,
    Augmented,
    ScoredMerge,
    Stopped,
    conv_net,
    examples,
    facts,
    fit,
    noisy_net,
    plain_net,
    predict_target,
    same_bits,
    seeded,
    shared_problem,
)

SEARCHES = (Grid(), Binary(), Greedy(), Greedy((0.5, 1)), Grid(3))


def full_loop(entrants: Sequence[Entrant]) -> int:
    """The twin of `race`: every candidate to its end, then the first of the best."""
    for entrant in entrants:
        while not entrant.is_complete:
            entrant.extend()
    return max(range(len(entrants)), key=lambda i: entrants[i].bound)


class Listed(Entrant):
    """A candidate whose costs are written down."""

    def __init__(self, costs: Sequence[float], step: int) -> None:
        self.costs, self.step, self.done = costs, step, 0
        self.bound, self.is_complete = 0.0, not costs

    def extend(self) -> None:
        assert not self.is_complete
        self.done += self.step
        self.bound, self.is_complete = -rounded(self.costs[: self.done]), self.done >= len(self.costs)

    def ask(self) -> None:
        pass

    def lose(self, winner: float, *, is_preferred: bool) -> None:
        pass


COSTS = (0.0, 0.0, 1.0, 1.0, 0.1, 0.3, 1e-30, 1e30, math.inf)


class TestTheRaceItself:
    @pytest.mark.parametrize("seed", range(300))
    def test_it_is_the_argmax_of_the_full_loop_ties_included(self, seed: int) -> None:
        draw = random.Random(seed)
        values = draw.choice([COSTS, (0.0, 1.0), (0.0,), (math.inf,), (0.0, 0.1, 0.2, 0.3)])
        size, count, step = draw.choice([1, 2, 7, 40]), draw.randint(1, 8), draw.randint(1, 5)
        table = [[draw.choice(values) for _ in range(size)] for _ in range(count)]
        if draw.random() < 0.3:
            table = [table[0]] * count
        first = race([Listed(costs, step) for costs in table])
        assert first == full_loop([Listed(costs, step) for costs in table])

    def test_a_complete_leader_ends_it_before_anybody_is_extended(self) -> None:
        others = [Listed([1.0, 1.0], 1), Listed([0.0, 0.0], 1)]
        assert race([ScoredEntrant(0.0), *others]) == 0
        assert [other.done for other in others] == [0, 0]
        assert race([others[0], ScoredEntrant(0.0)]) == 1  # it would win a tie, so one cost has to be seen
        assert others[0].done == 1

    @pytest.mark.parametrize("order", list(permutations([0, 0, 1, 1, 2])), ids=str)
    def test_an_entrant_given_twice_runs_once(self, order: tuple[int, ...]) -> None:
        entrants = [Listed(costs, 1) for costs in ([3.0, 0.0], [1.0, 0.0], [0.0, 1.0])]
        assert race([entrants[i] for i in order]) == min(order.index(1), order.index(2))

    def test_what_was_evaluated_before_is_not_evaluated_again(self) -> None:
        slow, fast = Listed([1.0] * 9, 1), Listed([0.0] * 9, 1)
        race([slow, ScoredEntrant(-3.5)])
        assert slow.done == 4
        race([slow, fast])
        assert (slow.done, fast.done) == (4, 9)

    @given(st.lists(st.lists(st.floats(0, allow_nan=False)), max_size=4))
    def test_a_running_sum_is_the_sum_of_everything_rounded_once(self, parts: list[list[float]]) -> None:
        total: list[float] = []
        for part in parts:
            total = add_exactly(total, part)
        assert rounded(total) == rounded([value for part in parts for value in part])


class Table(nn.Module):
    """Logits [V, 3] as parameters; the input of an example is its index."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(size, 3))

    def forward(self, index: Tensor) -> Tensor:
        return self.logits[index]


def absolute(predictions: Tensor, targets: Tensor) -> Tensor:
    return (predictions[:, 0].double() - targets).abs()


METRICS: dict[str, Any] = {
    "accuracy": fm.accuracy,
    "nll": fm.nll,
    "uneven": fm.MeanCost(absolute, lambda targets: 1.0 + targets, name="uneven"),
    "several": {"accuracy": fm.accuracy, "nll": fm.nll},
}


class Bout:
    """B branches of logits that agree on most examples, and everything needed to search their best combination."""

    def __init__(self, seed: int, metrics: Any, *, size: int, branches: int, part: int | None = None) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.model = Table(size)
        classes = torch.randint(3, (size,), generator=draw)
        common = 2 * torch.nn.functional.one_hot(classes, 3) + torch.randn(size, 3, generator=draw)
        noise = [0.0, 0.7, 2.0][seed % 3]
        self.logits = [common + noise * torch.randn(size, 3, generator=draw) for _ in range(branches)]
        if seed % 7 == 3:
            self.logits[-1][seed % size] = math.nan
        data = TensorDataset(torch.arange(size), classes)
        self.evaluation = fm.Evaluation(data, metrics, batch_size=[3, 8, 16, 64][seed % 4])
        self.reader = CostReader(self.evaluation, 0)
        self.criterion = Criterion(self.evaluation.directions)
        if self.criterion.needs_reference:
            self.criterion = self.criterion.with_reference({"accuracy": 0.5, "nll": 0.7})
        self.indices = sorted(random.Random(seed).sample(range(size), part)) if part else None
        self.placed: list[Coefficients] = []

    def place(self, coefficients: Coefficients) -> nn.Module:
        self.placed.append(coefficients)
        with torch.no_grad():
            total = sum(c * logits for c, logits in zip(coefficients, self.logits, strict=True) if c)
            self.model.logits.copy_(total)
        return self.model

    def course(self, turn: int = 1) -> ExampleRace:
        singles = vertices(len(self.logits))
        costs = {v: self.reader.read(self.place(v), range(len(self.model.logits))) for v in singles}
        self.placed = []
        return ExampleRace(self.reader, self.criterion, self.place, branch_costs=costs, indices=self.indices, turn=turn)

    def score(self, coefficients: Coefficients) -> float:
        values = fm.measure(self.place(coefficients), self.evaluation, indices=self.indices)
        return self.criterion.score(values)

    def search(self, search: Search, turn: int = 1) -> tuple[Coefficients, Candidates, ExampleRace]:
        course = self.course(turn)
        scores = {v: self.score(v) for v in vertices(len(self.logits))}
        tried = Candidates(self.score, branch_scores=scores, enter=course.enter)
        with evaluating(self.model):
            return best_of(search, tried, len(self.logits)), tried, course


def bouts(metric: str, search: Search, seed: int) -> Callable[[], Bout]:
    size = [1, 5, 64, 97][seed % 5 % 4]
    branches = 2 if isinstance(search, Binary) else 2 + seed % 2
    part = max(size // 2, 1) if seed % 3 == 1 else None
    return partial(Bout, seed, METRICS[metric], size=size, branches=branches, part=part)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("search", SEARCHES, ids=repr)
class TestSearchesRace:
    def test_they_find_what_full_passes_find(self, metric: str, search: Search) -> None:
        """Rows of a table cost the same in any batch, so plain passes in file order are a twin, too."""
        for seed in range(10):
            bout = bouts(metric, search, seed)()
            answer, tried, course = bout.search(search, turn=1 + seed % 3)
            twin = Candidates(bout.score, branch_scores=dict(tried.tried[: len(bout.logits)]))
            assert answer == best_of(search, twin, len(bout.logits))
            assert tried(answer) == twin(answer)
            assert [c for c, _ in tried.tried] == [c for c, _ in twin.tried]
            for place, ((_, bound), (_, score)) in enumerate(zip(tried.tried, twin.tried, strict=True)):
                assert bound >= score if place in tried.unfinished else bound == score
            if 1.0 not in answer:
                values = fm.measure(bout.place(answer), bout.evaluation, indices=bout.indices)
                assert course.metrics(answer) == values
            counts = course.examples
            assert counts["bound"] <= counts["evaluated"] <= counts["full"]

    def test_they_find_what_the_full_loop_in_the_same_order_finds(
        self, metric: str, search: Search, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for seed in range(5):
            make = bouts(metric, search, seed)
            answer, tried, _ = make().search(search)
            with monkeypatch.context() as patch:
                patch.setattr(candidates_module, "race", full_loop)
                expected, twin, course = make().search(search)
            assert answer == expected
            assert tried(answer) == twin(answer)
            assert twin.unfinished == []
            assert course.examples["evaluated"] == course.examples["full"]


class TestCourse:
    def test_the_bound_is_the_winner_and_the_shortest_prefixes_that_prove_the_rest_worse(self) -> None:
        """One example per chunk: the race evaluates exactly the bound."""
        for seed in range(5):
            bout = Bout(seed, fm.accuracy, size=40, branches=3)
            bout.reader.chunk = 1
            for search in (Greedy(), Grid()):
                _, _, course = bout.search(search)
                assert course.examples["evaluated"] == course.examples["bound"]

    def test_single_branches_are_never_evaluated(self) -> None:
        bout = Bout(4, fm.accuracy, size=97, branches=3)
        bout.search(Grid())
        assert bout.placed
        mixed = Bout(4, fm.accuracy, size=97, branches=3)
        course = mixed.course()
        tried = Candidates(mixed.score, branch_scores=dict.fromkeys(vertices(3), 0.0), enter=course.enter)
        with evaluating(mixed.model):
            Greedy().search(tried, 3)
        assert not any(1.0 in coefficients for coefficients in mixed.placed)

    def test_hard_examples_come_first_and_of_equals_the_first(self) -> None:
        bout = Bout(1, fm.MeanCost(absolute, name="error"), size=97, branches=2)
        course = bout.course()
        (runner,) = course.enter([(0.5, 0.5)], vertices(2))
        hardness = sum(course._branch_costs[v].costs[:, 0] for v in vertices(2))
        assert runner.order == sorted(range(97), key=lambda i: (-hardness[i], i))

    def test_a_candidate_that_is_not_finite_is_not_evaluated_and_cannot_win(self) -> None:
        bout = Bout(1, fm.accuracy, size=97, branches=2)
        course = bout.course()
        course.model_of = lambda coefficients: None
        tried = Candidates(bout.score, branch_scores=dict.fromkeys(vertices(2), 0.0), enter=course.enter)
        assert best_of(Grid(), tried, 2) == (1.0, 0.0)
        assert course.examples["evaluated"] == 0
        assert course.metrics((0.8, 0.2)) == {}

    def test_counts_that_depend_on_the_model_are_refused(self) -> None:
        bout = Bout(1, fm.accuracy, size=97, branches=2)
        course = bout.course()
        course.counts = course.counts + 1
        refusal = pytest.raises(fm.ProblemError, match="`count` of a MeanCost must depend on targets only")
        with refusal, evaluating(bout.model):
            course.enter([(0.5, 0.5)], ())[0].extend()

    def test_turns_are_short_where_a_forward_pass_is_dear_and_whole_passes_where_it_is_cheap(self) -> None:
        def reader(inputs: Tensor) -> CostReader:
            labels = torch.zeros(len(inputs), dtype=torch.long)
            return CostReader(fm.Evaluation(TensorDataset(inputs, labels), fm.accuracy, batch_size=10), 0)

        conv = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        images, words = torch.randn(100, 3, 16, 16), torch.zeros(100, 4, dtype=torch.long)
        assert turn_length(conv, reader(images), sum(p.numel() for p in conv.parameters())) == 1
        lookup = nn.Sequential(nn.Embedding(100_000, 8), nn.Flatten(), nn.Linear(32, 3))
        assert turn_length(lookup, reader(words), sum(p.numel() for p in lookup.parameters())) == 10


def patched(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> Any:
    """Run with the full loop instead of the race."""
    with monkeypatch.context() as patch:
        patch.setattr(candidates_module, "race", full_loop)
        return run()


def decided(run: Any) -> dict[str, Any]:
    """What a run found, without what losers' scores are known to be."""
    data = facts(run)
    for finished in data["rounds"]:
        finished.pop("examples")
        finished["candidates"] = [candidate["coefficients"] for candidate in finished["candidates"]]
    return data


def problem(metrics: Any = fm.nll, dataset: Any = None, **options: Any) -> fm.Problem:
    data = dataset or TensorDataset(*examples(101, 2))
    settings = {"batch_size": 8, **options}
    return shared_problem(validation=fm.Evaluation(data, metrics, predict_target, **settings))


ALGORITHMS: dict[str, fm.Algorithm] = {
    "greedy": fm.ForkMerge("per_auxiliary", interval=4),
    "grid": fm.ForkMerge(interval=4, search=fm.Grid(10)),
    "binary": fm.ForkMerge(interval=4, search="binary"),
    "sub-sample": fm.ForkMerge("per_auxiliary", interval=4, search_examples=37),
    "recompute": fm.ForkMerge("per_auxiliary", interval=4, bn="recompute", bn_batches=2),
    "snapshots": fm.ForkMerge("per_auxiliary", interval=4, checkpoint="best_so_far", validate_every=2, select="best"),
    "floor": fm.ForkMerge("per_auxiliary", interval=4, floor=True, refit=True),
}


class TestInARun:
    @pytest.mark.parametrize(
        ("name", "metric"), [("greedy", "accuracy"), ("recompute", "accuracy"), *((name, "nll") for name in ALGORITHMS)]
    )
    def test_a_run_is_the_one_of_the_full_loop_bit_for_bit(
        self, name: str, metric: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def run() -> Any:
            return fit(ALGORITHMS[name], problem(METRICS[metric]), noisy_net)

        raced, twin = run(), patched(monkeypatch, run)
        assert same_bits(raced, twin)
        assert decided(raced) == decided(twin)
        for one, other in zip(raced.searched, twin.searched, strict=True):
            assert one.examples["bound"] <= one.examples["evaluated"] <= other.examples["evaluated"]
            assert other.examples["evaluated"] == other.examples["full"] == one.examples["full"]
            for left, right in zip(one.candidates, other.candidates, strict=True):
                assert not right.is_bound
                assert left.score >= right.score if left.is_bound else left.score == right.score
        assert any(c.is_bound for finished in raced.searched for c in finished.candidates)

    @pytest.mark.parametrize("net", [plain_net, conv_net])
    def test_a_run_is_the_one_of_a_metric_that_does_not_add_up(self, net: Callable[[], nn.Module]) -> None:
        def share(predictions: Tensor, targets: Tensor) -> float:
            return fm.accuracy(predictions, targets)

        algorithm = fm.ForkMerge("per_auxiliary", interval=4)
        raced = fit(algorithm, problem({"share": fm.accuracy}), net)
        plain = fit(algorithm, problem({"share": share}), net)
        assert same_bits(raced, plain)
        assert decided(raced) == decided(plain)
        assert [finished.examples for finished in plain.rounds] == [{}] * 3

    def test_data_sets_that_draw_for_every_example_race_as_well(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def run() -> Any:
            return fit(fm.ForkMerge("per_auxiliary", interval=4), problem(dataset=Augmented(61, 2)))

        raced = run()
        assert decided(raced) == decided(patched(monkeypatch, run))
        # Whichever chunk an example is in, it is drawn alike.
        evaluation = problem(dataset=Augmented(61, 2)).target_validation
        assert raced.metrics["nll"] == pytest.approx(fm.measure(raced.model, evaluation)["nll"], rel=1e-6)

    def test_several_metrics_race_where_all_add_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        metrics = {"accuracy": fm.accuracy, "nll": fm.nll}

        def run() -> Any:
            return fit(fm.ForkMerge("per_auxiliary", interval=4), problem(metrics))

        raced = run()
        assert decided(raced) == decided(patched(monkeypatch, run))
        assert raced.rounds[0].examples
        mixed = fit(fm.ForkMerge("per_auxiliary", interval=4), problem({**metrics, "plain": lambda p, t: 1.0}))
        assert not mixed.rounds[0].examples

    def test_a_metric_used_against_its_direction_takes_full_passes(self) -> None:
        run = fit(fm.ForkMerge(interval=6), problem(fm.nll, higher_is_better={"nll": True}))
        assert not run.rounds[0].examples

    def test_predictions_that_are_not_by_example_take_full_passes(self) -> None:
        def labelled(model: nn.Module, batch: Any) -> Any:
            logits, targets = predict_target(model, batch)
            return logits[targets > 0], targets[targets > 0]

        validation = fm.Evaluation(TensorDataset(*examples(40, 2)), fm.accuracy, labelled, batch_size=7)
        run = fit(problem=shared_problem(validation=validation))
        assert not run.rounds[0].examples
        inputs, labels = examples(40, 2)
        logits, targets = labelled(run.model.eval(), (inputs, labels))
        assert run.metrics == {"accuracy": fm.accuracy(logits, targets)} == fm.measure(run.model, validation)

    def test_a_run_that_was_killed_ends_with_the_same_bits(self, tmp_path: Any) -> None:
        def stop(event: Any) -> None:
            if event["event"] == "round" and event["round"] == 2:
                raise Stopped

        for name in ("snapshots", "floor"):
            whole = fit(ALGORITHMS[name], problem(), noisy_net)
            with pytest.raises(Stopped):
                fit(ALGORITHMS[name], problem(), noisy_net, folder=tmp_path / name, observe=stop)
            again = fit(ALGORITHMS[name], problem(), noisy_net, folder=tmp_path / name, resume=True)
            assert same_bits(whole, again)
            assert facts(whole) == facts(again)

    @pytest.mark.parametrize("checkpoint", ["last", "best_in_interval"])
    def test_nothing_is_measured_twice(self, checkpoint: Any) -> None:
        seen: list[int] = []

        def predict(model: nn.Module, batch: Any) -> Any:
            seen.append(len(batch[0]))
            return predict_target(model, batch)

        data = TensorDataset(*examples(40, 2))
        for metric, passes in ((fm.accuracy, 1), (lambda p, t: fm.accuracy(p, t), 4)):
            validation = fm.Evaluation(data, metric, predict, batch_size=40)
            algorithm = fm.ForkMerge(interval=6, checkpoint=checkpoint)
            seen.clear()
            run = fit(algorithm, shared_problem(validation=validation), steps=6)
            ranked = 1 + 2 * (1 if checkpoint == "last" else 6 // algorithm.settings(problem()).validate_every_of(6))
            evaluated = run.rounds[0].examples.get("evaluated", 40 * passes)
            counting = 1 if run.rounds[0].examples else 0  # the chunk whose operations are counted
            assert len(seen) == ranked + evaluated // 40 + counting

    def test_a_branch_that_predicts_nan_is_left_out_where_costs_are_not_finite(self) -> None:
        broken: list[Tensor] = []

        def predict(model: nn.Module, batch: Any) -> Any:
            logits, targets = predict_target(model, batch)
            weight = model.heads["tgt"].weight.detach()
            if len(broken) < 1:
                broken.append(weight.clone())  # the model before training
            return (logits * torch.nan if torch.equal(weight, broken[0]) else logits), targets

        validation = fm.Evaluation(TensorDataset(*examples(24, 2)), fm.nll, predict)
        branches = {"alone": {"tgt": 1.0}, "idle": {"odd": 1.0}}
        run = fit(fm.ForkMerge(branches, interval=4), shared_problem(validation=validation), steps=4)
        assert run.rounds[0].branches["idle"].fault == "its validation score is not finite"
        assert run.coefficients == [{"alone": 1.0, "idle": 0.0}]


class TestFullPassesAtOnce:
    def test_searches_hand_over_all_candidates_that_do_not_depend_on_one_another(self) -> None:
        calls: list[list[Coefficients]] = []

        def many(candidates: Sequence[Coefficients]) -> list[float]:
            calls.append(list(candidates))
            return [-abs(c[0] - 0.4) - abs(c[-1] - 0.3) for c in candidates]

        class Many(ScoredMerge):
            def enter(self, candidates: Sequence[Coefficients], guides: Sequence[Coefficients]) -> list[Entrant]:
                return [ScoredEntrant(score) for score in many(candidates)]

        problem = Many(["a", "bad", "b", "c"], lambda coefficients: -2.0, faults={"bad": "it diverged"})
        merge = find_merge(problem, Greedy())
        assert [len(call) for call in calls] == [5, 5]
        assert all(len(c) == 4 and c[1] == 0 for call in calls for c in call)
        assert merge.coefficients["bad"] == 0
        assert merge.score == max(score for _, score in merge.candidates)
        calls.clear()
        score = Candidates(enter=lambda candidates, guides: [ScoredEntrant(s) for s in many(candidates)])
        assert Grid().search(score, 2) == (0.6, 0.4)
        assert [len(call) for call in calls] == [6]

    def test_equal_candidates_are_handed_over_once(self) -> None:
        calls: list[list[Coefficients]] = []

        def many(candidates: Sequence[Coefficients]) -> list[float]:
            calls.append(list(candidates))
            return [0.0] * len(candidates)

        score = Candidates(enter=lambda candidates, guides: [ScoredEntrant(s) for s in many(candidates)])
        assert score.best_among([(0.3, 0.7), (0.1 + 0.2, 0.7), (1.0, 0.0)]) == (0.3, 0.7)
        assert calls == [[(0.3, 0.7), (1.0, 0.0)]]

    def test_candidates_given_twice_are_tried_in_the_order_they_came(self) -> None:
        score = Candidates(lambda c: -c[0])
        assert score.best_among([(0.5, 0.5), (0.2, 0.8), (0.5, 0.5)]) == (0.2, 0.8)
        assert [c for c, _ in score.tried] == [(0.5, 0.5), (0.2, 0.8)]


def test_the_operations_of_a_chunk_are_counted_once_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(validation, "turn_length", lambda *rest: calls.append(1) or 1)
    fit(fm.ForkMerge("per_auxiliary", interval=4), problem(), seeded(plain_net), optimizer=SGD)
    assert calls == [1]


def test_certainty_is_the_share_of_resamples_that_are_won():
    bout = Bout(1, fm.nll, size=60, branches=2)
    course = bout.course()
    with evaluating(bout.model):
        both = [course.certainty(*pair, seed=5) for pair in (((1.0, 0.0), (0.0, 1.0)), ((0.0, 1.0), (1.0, 0.0)))]
        mixed = course.certainty((0.5, 0.5), (0.5, 0.5), seed=5)
    assert sum(both) == 1.0  # nothing ties
    assert mixed == 0.0  # nothing beats itself
    costs = [course._all_costs(each)[:, 0] for each in ((1.0, 0.0), (0.0, 1.0))]
    gaps = (costs[1] - costs[0]).double()
    z = gaps.mean() / (gaps.std(correction=0) / len(gaps) ** 0.5)
    assert both[0] == pytest.approx(torch.distributions.Normal(0.0, 1.0).cdf(z).item(), abs=0.05)
