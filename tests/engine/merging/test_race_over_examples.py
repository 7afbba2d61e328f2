"""Candidates raced over validation examples: what full passes find, from fewer examples."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import forkmerge as fm
from forkmerge.engine.merging import candidates as candidates_module
from forkmerge.engine.merging.arithmetic import Coefficients, vertices
from forkmerge.engine.merging.candidates import Candidates
from forkmerge.engine.merging.race_over_examples import ExampleRace, count_operations, turn_length
from forkmerge.engine.merging.searches import Binary, Greedy, Grid, Search, best_of
from forkmerge.problem.metrics import Criterion
from forkmerge.problem.scoring import CostReader, evaluating
from race_twin import full_loop

SEARCHES = (Grid(), Binary(), Greedy(), Greedy((0.5, 1)), Grid(3))


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
        self.asked: list[Coefficients] = []

    def model_of(self, coefficients: Coefficients) -> nn.Module:
        self.asked.append(coefficients)
        with torch.no_grad():
            total = sum(c * logits for c, logits in zip(coefficients, self.logits, strict=True) if c)
            self.model.logits.copy_(total)
        return self.model

    def race(self, turn: int = 1) -> ExampleRace:
        singles = vertices(len(self.logits))
        costs = {v: self.reader.read(self.model_of(v), range(len(self.model.logits))) for v in singles}
        self.asked = []
        return ExampleRace(
            self.reader, self.criterion, self.model_of, branch_costs=costs, indices=self.indices, turn=turn
        )

    def score(self, coefficients: Coefficients) -> float:
        values = fm.measure(self.model_of(coefficients), self.evaluation, indices=self.indices)
        return self.criterion.score(values)

    def search(self, search: Search, turn: int = 1) -> tuple[Coefficients, Candidates, ExampleRace]:
        race = self.race(turn)
        scores = {v: self.score(v) for v in vertices(len(self.logits))}
        tried = Candidates(self.score, branch_scores=scores, enter=race.enter)
        with evaluating(self.model):
            return best_of(search, tried, len(self.logits)), tried, race


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
            answer, tried, race = bout.search(search, turn=1 + seed % 3)
            twin = Candidates(bout.score, branch_scores=dict(tried.tried[: len(bout.logits)]))
            assert answer == best_of(search, twin, len(bout.logits))
            assert tried(answer) == twin(answer)
            assert [c for c, _ in tried.tried] == [c for c, _ in twin.tried]
            for position, ((_, bound), (_, score)) in enumerate(zip(tried.tried, twin.tried, strict=True)):
                assert bound >= score if position in tried.unfinished else bound == score
            if 1.0 not in answer:
                values = fm.measure(bout.model_of(answer), bout.evaluation, indices=bout.indices)
                assert race.metrics(answer) == values
            counts = race.examples
            assert counts["bound"] <= counts["evaluated"] <= counts["full"]

    def test_they_find_what_the_full_loop_in_the_same_order_finds(
        self, metric: str, search: Search, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for seed in range(5):
            make = bouts(metric, search, seed)
            answer, tried, _ = make().search(search)
            with monkeypatch.context() as patch:
                patch.setattr(candidates_module, "race", full_loop)
                expected, twin, race = make().search(search)
            assert answer == expected
            assert tried(answer) == twin(answer)
            assert twin.unfinished == []
            assert race.examples["evaluated"] == race.examples["full"]


class TestExampleRace:
    def test_the_bound_is_the_winner_and_the_shortest_prefixes_that_prove_the_rest_worse(self) -> None:
        """One example per chunk: the race evaluates exactly the bound."""
        for seed in range(5):
            bout = Bout(seed, fm.accuracy, size=40, branches=3)
            bout.reader.chunk = 1
            for search in (Greedy(), Grid()):
                _, _, race = bout.search(search)
                assert race.examples["evaluated"] == race.examples["bound"]

    def test_single_branches_are_never_evaluated(self) -> None:
        bout = Bout(4, fm.accuracy, size=97, branches=3)
        bout.search(Grid())
        assert bout.asked
        mixed = Bout(4, fm.accuracy, size=97, branches=3)
        race = mixed.race()
        tried = Candidates(mixed.score, branch_scores=dict.fromkeys(vertices(3), 0.0), enter=race.enter)
        with evaluating(mixed.model):
            Greedy().search(tried, 3)
        assert not any(1.0 in coefficients for coefficients in mixed.asked)

    def test_hard_examples_come_first_and_of_equals_the_first(self) -> None:
        bout = Bout(1, fm.MeanCost(absolute, name="error"), size=97, branches=2)
        race = bout.race()
        (entrant,) = race.enter([(0.5, 0.5)], vertices(2))
        hardness = sum(race._branch_costs[v].costs[:, 0] for v in vertices(2))
        assert entrant.order == sorted(range(97), key=lambda i: (-hardness[i], i))

    def test_a_candidate_that_is_not_finite_is_not_evaluated_and_cannot_win(self) -> None:
        bout = Bout(1, fm.accuracy, size=97, branches=2)
        race = bout.race()
        race.model_of = lambda coefficients: None
        tried = Candidates(bout.score, branch_scores=dict.fromkeys(vertices(2), 0.0), enter=race.enter)
        assert best_of(Grid(), tried, 2) == (1.0, 0.0)
        assert race.examples["evaluated"] == 0
        assert race.metrics((0.8, 0.2)) == {}

    def test_counts_that_depend_on_the_model_are_refused(self) -> None:
        bout = Bout(1, fm.accuracy, size=97, branches=2)
        race = bout.race()
        race.counts = race.counts + 1
        message = r"^the counts of a metric differ between models: `count` of a MeanCost must depend on targets only\.$"
        refusal = pytest.raises(fm.ProblemError, match=message)
        with refusal, evaluating(bout.model):
            race.enter([(0.5, 0.5)], ())[0].extend()

    def test_a_model_that_draws_draws_by_the_place_in_the_order(self) -> None:
        bout = Bout(1, fm.nll, size=40, branches=2)
        forward = bout.model.forward
        bout.model.forward = lambda index: forward(index) + torch.rand(len(index), 3)
        for turn in (1, 2):
            race = bout.race(turn)
            (entrant,) = race.enter([(0.5, 0.5)], vertices(2))
            with bout.reader.ready(bout.model):
                while not entrant.is_complete:
                    entrant.extend()
            whole = bout.reader.read(bout.model_of((0.5, 0.5)), entrant.order)
            assert torch.equal(entrant.rows.costs[entrant.order], whole.costs)
            assert torch.equal(entrant.rows.rank[entrant.order], whole.rank)

    def test_a_turn_is_some_chunks_and_bounds_fall_to_the_score(self) -> None:
        bout = Bout(1, fm.nll, size=40, branches=2)
        for turn in (1, 3):
            race = bout.race(turn)
            (entrant,) = race.enter([(0.5, 0.5)], ())
            assert entrant.order == list(range(40))
            assert entrant.bound == bout.criterion.score({"nll": 0.0})
            bounds, sizes = [entrant.bound], [0]
            with evaluating(bout.model):
                while not entrant.is_complete:
                    assert race.metrics((0.5, 0.5)) == {}
                    entrant.extend()
                    bounds.append(entrant.bound)
                    sizes.append(entrant.done)
            assert bounds == sorted(bounds, reverse=True)
            assert sizes == [*range(0, 40, turn * bout.reader.chunk), 40]
            assert entrant.bound == bout.score((0.5, 0.5)) == bout.criterion.score(race.metrics((0.5, 0.5)))
            assert race.metrics((0.2, 0.8)) == {}
            assert race.examples == {"evaluated": 40, "bound": 0, "full": 40}
            entrant.ask()
            assert race.examples == {"evaluated": 40, "bound": 40, "full": 40}

    def test_a_loser_needs_as_many_examples_as_prove_it_and_never_fewer_than_before(self) -> None:
        bout = Bout(1, fm.accuracy, size=40, branches=2)
        race = bout.race()
        (entrant,) = race.enter([(0.5, 0.5)], vertices(2))
        with evaluating(bout.model):
            while not entrant.is_complete:
                entrant.extend()
        costs = entrant.rows.costs[entrant.order, 0].tolist()
        errors = int(sum(costs))
        assert errors > 2
        for lost, is_preferred in ((1, False), (2, False), (2, True), (1, True)):
            winner = 1 - lost / 40 if is_preferred else 1 - (lost - 0.5) / 40
            before = entrant.needed
            entrant.lose(winner, is_preferred=is_preferred)
            enough = next(n for n in range(41) if sum(costs[:n]) >= lost + is_preferred)
            assert entrant.needed == max(before, enough)

    def test_several_metrics_rank_examples_in_units_of_their_means(self) -> None:
        bout = Bout(2, METRICS["several"], size=30, branches=2)
        bout.logits[1][:, 0] *= 100  # so that the metrics have different units
        race = bout.race()
        (entrant,) = race.enter([(0.5, 0.5)], vertices(2))
        rank = sum(race._branch_costs[v].rank for v in vertices(2))
        hardness = (rank / rank.mean(0)).sum(1).tolist()
        assert entrant.order == sorted(range(30), key=lambda i: (-hardness[i], i))

    def test_turns_are_short_where_a_forward_pass_is_dear_and_whole_passes_where_it_is_cheap(self) -> None:
        def reader(inputs: Tensor) -> CostReader:
            labels = torch.zeros(len(inputs), dtype=torch.long)
            return CostReader(fm.Evaluation(TensorDataset(inputs, labels), fm.accuracy, batch_size=10), 0)

        conv = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        images, words = torch.randn(100, 3, 16, 16), torch.zeros(100, 4, dtype=torch.long)
        assert turn_length(conv, reader(images), sum(p.numel() for p in conv.parameters())) == 1
        lookup = nn.Sequential(nn.Embedding(100_000, 8), nn.Flatten(), nn.Linear(32, 3))
        assert turn_length(lookup, reader(words), sum(p.numel() for p in lookup.parameters())) == 10
        # A chunk takes 500,000 multiply-adds and those of its ten examples; a merged number counts as 60.
        work = 500_000 + 10 * 32 * 3
        for chunks in (1, 2, 3, 9):
            assert turn_length(lookup, reader(words), chunks * work // 60) == chunks
            assert turn_length(lookup, reader(words), chunks * work // 60 + 1) == chunks + 1
        assert turn_length(lookup, reader(words), 0) == 1
        assert turn_length(lookup, reader(words[:95]), 10**9) == 10


class TestCountOperations:
    def test_a_layer_takes_its_weights_once_for_each_number_of_an_output_channel(self) -> None:
        inputs = {1: torch.zeros(5, 4, 9), 2: torch.zeros(5, 4, 9, 9), 3: torch.zeros(5, 4, 9, 9, 9)}
        for dims in (1, 2, 3):
            forward = getattr(nn, f"Conv{dims}d")(4, 6, 3)
            back = getattr(nn, f"ConvTranspose{dims}d")(4, 6, 3)
            assert count_operations(forward, lambda m=forward, x=inputs[dims]: m(x)) == 5 * 7**dims * 4 * 6 * 3**dims
            assert count_operations(back, lambda m=back, x=inputs[dims]: m(x)) == 5 * 11**dims * 4 * 6 * 3**dims
        linear = nn.Linear(4, 6)
        assert count_operations(linear, lambda: linear(torch.zeros(5, 2, 4))) == 5 * 2 * 4 * 6
        assert count_operations(linear, lambda: None) == 0

    def test_layers_count_as_often_as_they_run_and_others_do_not(self) -> None:
        net = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.BatchNorm1d(3), nn.ReLU())
        shared = nn.Sequential(net, net[1])
        assert count_operations(shared, lambda: shared(torch.zeros(5, 3, dtype=torch.long))) == 2 * 5 * 3 * 64

    def test_no_hook_stays_even_if_the_call_fails(self) -> None:
        linear = nn.Linear(4, 6)
        with pytest.raises(RuntimeError):
            count_operations(linear, lambda: linear(torch.zeros(5, 3)))
        assert not linear._forward_hooks

    def test_a_layer_whose_answer_is_no_tensor_counts_nothing(self) -> None:
        class Both(nn.Linear):
            def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
                return super().forward(inputs), inputs

        both = Both(4, 6)
        assert count_operations(both, lambda: both(torch.zeros(5, 4))) == 0


def test_certainty_counts_the_draws_that_one_candidate_wins_with_replacement():
    bout = Bout(1, METRICS["uneven"], size=31, branches=2, part=12)
    race = bout.race()
    ours, theirs = (0.5, 0.5), (0.0, 1.0)
    with evaluating(bout.model):
        share = race.certainty(ours, theirs, seed=5, resamples=50)
    draw, wins = torch.Generator().manual_seed(5), 0
    rows = {each: race._all_costs(each)[race.indices, 0] for each in (ours, theirs)}
    for _ in range(50):
        chosen = torch.randint(12, (12,), generator=draw)
        total = race.counts[race.indices][chosen].sum()
        means = [(rows[each][chosen].sum() / total).item() for each in (ours, theirs)]
        wins += means[0] < means[1]
    assert 0 < wins < 50
    assert share == wins / 50
    assert race.certainty(ours, theirs, seed=5) == race.certainty(ours, theirs, seed=5, resamples=1000)


def test_certainty_is_the_share_of_resamples_that_are_won():
    bout = Bout(1, fm.nll, size=60, branches=2)
    race = bout.race()
    with evaluating(bout.model):
        both = [race.certainty(*pair, seed=5) for pair in (((1.0, 0.0), (0.0, 1.0)), ((0.0, 1.0), (1.0, 0.0)))]
        mixed = race.certainty((0.5, 0.5), (0.5, 0.5), seed=5)
    assert sum(both) == 1.0  # nothing ties
    assert mixed == 0.0  # nothing beats itself
    costs = [race._all_costs(each)[:, 0] for each in ((1.0, 0.0), (0.0, 1.0))]
    gaps = (costs[1] - costs[0]).double()
    z = gaps.mean() / (gaps.std(correction=0) / len(gaps) ** 0.5)
    assert both[0] == pytest.approx(torch.distributions.Normal(0.0, 1.0).cdf(z).item(), abs=0.05)
