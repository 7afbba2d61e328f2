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
from forkmerge.engine.merging.race_over_examples import ExampleRace, turn_length
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
        refusal = pytest.raises(fm.ProblemError, match="`count` of a MeanCost must depend on targets only")
        with refusal, evaluating(bout.model):
            race.enter([(0.5, 0.5)], ())[0].extend()

    def test_turns_are_short_where_a_forward_pass_is_dear_and_whole_passes_where_it_is_cheap(self) -> None:
        def reader(inputs: Tensor) -> CostReader:
            labels = torch.zeros(len(inputs), dtype=torch.long)
            return CostReader(fm.Evaluation(TensorDataset(inputs, labels), fm.accuracy, batch_size=10), 0)

        conv = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        images, words = torch.randn(100, 3, 16, 16), torch.zeros(100, 4, dtype=torch.long)
        assert turn_length(conv, reader(images), sum(p.numel() for p in conv.parameters())) == 1
        lookup = nn.Sequential(nn.Embedding(100_000, 8), nn.Flatten(), nn.Linear(32, 3))
        assert turn_length(lookup, reader(words), sum(p.numel() for p in lookup.parameters())) == 10


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
