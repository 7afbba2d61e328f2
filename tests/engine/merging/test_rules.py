"""Rules among the candidates of a search: what they choose, what they promise, and slow twins of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import forkmerge as fm
from forkmerge.engine.merging.arithmetic import Coefficients, vertices
from forkmerge.engine.merging.find_merge import MergeProblem, find_merge
from forkmerge.engine.merging.rules import RULES, CostTable, Rule, check_rule

NOISY = [name for name in RULES if name != "argmax"]


class TableMerge(MergeProblem):
    """Branches whose scores of examples are rows; those of a combination are a bent mean of the rows."""

    def __init__(self, rows: Sequence[Sequence[float]], bend: float, sample: Sequence[int] | None = None) -> None:
        super().__init__([f"b{i}" for i in range(len(rows))], on_sample=sample is not None)
        self.rows, self.bend, self.sample = rows, bend, sample

    def examples(self, coefficients: Coefficients) -> list[float]:
        spread = 1 - max(coefficients)
        columns = zip(*self.rows, strict=True)
        mixed = (sum(c * value for c, value in zip(coefficients, column, strict=True)) for column in columns)
        return [round(value + self.bend * spread * math.sin(7 * i + 1), 9) for i, value in enumerate(mixed)]

    def mean(self, coefficients: Coefficients, chosen: Sequence[int] | None = None) -> float:
        values = self.examples(coefficients)
        return math.fsum(values[i] for i in chosen or range(len(values))) / len(chosen or values)

    def score_branch(self, index: int) -> float:
        return self.mean(vertices(len(self.rows))[index])

    def sample_score_of_branch(self, index: int) -> float:
        return self.mean(vertices(len(self.rows))[index], self.sample)

    def score(self, coefficients: Coefficients) -> float:
        return self.mean(coefficients)

    def enter(self, candidates: Sequence[Coefficients], guides: Sequence[Coefficients]) -> list[Any]:
        from forkmerge.engine.merging.race import ScoredEntrant

        return [ScoredEntrant(self.mean(candidate, self.sample)) for candidate in candidates]

    def cost_table(self, points: Sequence[Coefficients], *, on_all: bool = False) -> CostTable:
        return table_of([self._part(point, on_all) for point in points])

    def _part(self, point: Coefficients, on_all: bool) -> list[float]:
        values = self.examples(point)
        return values if on_all or self.sample is None else [values[i] for i in self.sample]


def table_of(scores: Sequence[Sequence[float]]) -> CostTable:
    costs = -torch.tensor([list(row) for row in scores], dtype=torch.float64).unsqueeze(2)
    return CostTable(costs, torch.ones(costs.shape[1], 1, dtype=torch.float64), -torch.ones(1, dtype=torch.float64))


def paired_error(one: Sequence[float], other: Sequence[float]) -> float:
    """The twin of `standard_error`: that of a mean of differences, as a textbook has it."""
    differences = [a - b for a, b in zip(one, other, strict=True)]
    mean = math.fsum(differences) / len(differences)
    if len(differences) == 1:
        return 0.0
    variance = math.fsum((d - mean) ** 2 for d in differences) / (len(differences) - 1)
    return math.sqrt(variance / len(differences))


def nearest(candidates: Sequence[Coefficients], rows: Sequence[Sequence[float]], best: int) -> set[int]:
    """The twin of "one_standard_error": all candidates that it may choose."""
    means = [math.fsum(row) / len(row) for row in rows]
    close = [i for i in range(len(rows)) if means[best] - means[i] <= paired_error(rows[best], rows[i]) + 1e-12]
    distance = {i: math.dist(candidates[i], [1 / len(candidates[i])] * len(candidates[i])) for i in close}
    least = min(distance.values())
    nearby = [i for i in close if distance[i] < least + 1e-6]
    return {i for i in nearby if means[i] == max(means[j] for j in nearby)}


def averaged(candidates: Sequence[Coefficients], rows: Sequence[Sequence[float]], seed: int) -> Coefficients:
    """The twin of "bagged": one resample after another, one sum after another."""
    draw, size = torch.Generator().manual_seed(seed), len(rows[0])
    total = [0.0] * len(candidates[0])
    for _ in range(1000):
        chosen = torch.randint(size, (size,), generator=draw).tolist()
        sums = [math.fsum(row[i] for i in chosen) for row in rows]
        winners = [c for c, value in zip(candidates, sums, strict=True) if value == max(sums)]
        for k in range(len(total)):
            total[k] += sum(winner[k] for winner in winners) / len(winners) / 1000
    return tuple(total)


def grids(size: int, seed: int, *, whole: bool) -> tuple[list[Coefficients], list[list[float]]]:
    candidates: list[Coefficients] = [(1.0, 0.0), (0.0, 1.0), (0.8, 0.2), (0.5, 0.5), (0.2, 0.8)]
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(5, size, generator=draw).double() * 0.5 + torch.randn(size, generator=draw).double()
    return candidates, (values > 0).double().tolist() if whole else values.tolist()


@pytest.mark.parametrize("whole", [True, False])
def test_rules_choose_what_their_slow_twins_choose(whole: bool) -> None:
    for seed in range(12):
        candidates, rows = grids([1, 2, 9, 40][seed % 4], seed, whole=whole)
        if seed == 5:
            rows[3] = list(rows[0])  # two candidates that nothing tells apart
        scores = [math.fsum(row) / len(row) for row in rows]
        best, table = scores.index(max(scores)), table_of(rows)
        chosen = Rule("one_standard_error").choose(candidates, scores, best, table)
        assert candidates.index(chosen) in nearest(candidates, rows, best)
        bagged = Rule("bagged", seed).choose(candidates, scores, best, table)
        assert bagged == pytest.approx(averaged(candidates, rows, seed), abs=1e-9)
        assert Rule("argmax").choose(candidates, scores, best, table) == candidates[best]


def test_the_error_of_a_difference_is_the_textbook_s_and_that_of_a_ratio_is_near_the_bootstrap_s() -> None:
    _, rows = grids(30, 3, whole=False)
    assert table_of(rows).standard_error(0, 1) == pytest.approx(paired_error(rows[0], rows[1]), rel=1e-12)
    draw = torch.Generator().manual_seed(0)
    costs, counts = (
        torch.rand(2, 400, 2, generator=draw).double(),
        torch.randint(1, 9, (400, 2), generator=draw).double(),
    )
    slopes = torch.tensor([-1.0, -0.4], dtype=torch.float64)
    resampled = []
    for _ in range(2000):
        chosen = torch.randint(400, (400,), generator=draw)
        ratios = costs[:, chosen].sum(1) / counts[chosen].sum(0)
        resampled.append((ratios @ slopes).diff().item())
    spread = torch.tensor(resampled).std().item()
    assert CostTable(costs, counts, slopes).standard_error(0, 1) == pytest.approx(spread, rel=0.08)


def test_one_example_that_tells_two_candidates_apart_is_one_standard_error() -> None:
    for size in range(2, 60):
        rows = [[1.0] * size, [1.0] * (size - 1) + [0.0]]
        scores = [1.0, (size - 1) / size]
        assert Rule("one_standard_error").choose([(1.0, 0.0), (0.5, 0.5)], scores, 0, table_of(rows)) == (0.5, 0.5)
        two = [[1.0] * size, [1.0] * (size - 2) + [0.0] * 2]
        worse = Rule("one_standard_error").choose([(1.0, 0.0), (0.5, 0.5)], [1.0, 1 - 2 / size], 0, table_of(two))
        assert worse == (1.0, 0.0)


def test_with_many_examples_both_choose_the_best() -> None:
    draw = torch.Generator().manual_seed(1)
    noise, common = torch.randn(4, 20_000, generator=draw).double(), torch.randn(20_000, generator=draw).double()
    means = torch.tensor([[0.0], [0.1], [0.2], [0.15]], dtype=torch.float64)
    rows = (means + 0.3 * noise + common).tolist()
    candidates: list[Coefficients] = [(1.0, 0.0), (0.0, 1.0), (0.2, 0.8), (0.5, 0.5)]
    scores = [math.fsum(row) / len(row) for row in rows]
    for name in NOISY:
        assert Rule(name).choose(candidates, scores, 2, table_of(rows)) == (0.2, 0.8)


def test_a_candidate_without_a_finite_score_is_never_chosen() -> None:
    rows = [[0.0, 0.0], [-1.0, -math.inf], [0.0, 0.1]]
    for name in NOISY:
        chosen = Rule(name).choose([(1.0, 0.0), (0.5, 0.5), (0.0, 1.0)], [0.0, -math.inf, 0.05], 2, table_of(rows))
        assert chosen[0] < 0.5


def test_examples_without_labels_are_left_out_of_resamples() -> None:
    costs = torch.tensor([[[1.0], [0.0], [0.0]], [[0.0], [0.0], [0.0]]], dtype=torch.float64)
    counts = torch.tensor([[1.0], [0.0], [0.0]], dtype=torch.float64)
    table = CostTable(costs, counts, -torch.ones(1, dtype=torch.float64))
    assert Rule("bagged").choose([(1.0, 0.0), (0.0, 1.0)], [-1.0, 0.0], 1, table) == (0.0, 1.0)
    nothing = CostTable(costs, torch.zeros(3, 1, dtype=torch.float64), -torch.ones(1, dtype=torch.float64))
    assert Rule("bagged").choose([(1.0, 0.0), (0.0, 1.0)], [-1.0, 0.0], 1, nothing) == (0.0, 1.0)


def test_an_unknown_rule_and_one_without_candidates_are_refused() -> None:
    with pytest.raises(fm.ProblemError, match=r"'bagging'.*bagged"):
        Rule("bagging")
    with pytest.raises(fm.ProblemError, match="fixed coefficients are not searched"):
        check_rule("bagged", is_guarded=False)
    check_rule("argmax", is_guarded=False)


numbers = st.floats(-3, 3, allow_nan=False, width=16)


@st.composite
def merges(draw: Any) -> tuple[TableMerge, Any]:
    size, branches = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    values = st.sampled_from([0.0, 1.0]) if draw(st.booleans()) else numbers
    rows = draw(st.lists(st.lists(values, min_size=size, max_size=size), min_size=branches, max_size=branches))
    sample = draw(st.none() | st.lists(st.integers(0, size - 1), min_size=1, max_size=size, unique=True))
    search = draw(st.sampled_from([fm.Greedy(), fm.Grid(3), fm.Grid(2)]))
    return TableMerge(rows, draw(st.sampled_from([0.0, 0.3, -2.0])), sample), search


@settings(max_examples=300, deadline=None)
@given(merges(), st.sampled_from(RULES), st.integers(0, 3))
def test_no_rule_breaks_its_promise(merge_and_search: tuple[TableMerge, Any], name: str, seed: int) -> None:
    """Argmax is never worse than the best branch; the others never by more than a standard error of the difference."""
    problem, search = merge_and_search
    merge = find_merge(problem, search, Rule(name, seed))
    branches = [problem.score_branch(i) for i in range(len(problem.names))]
    best = branches.index(max(branches))
    assert merge.score == problem.mean(merge.vector)
    assert math.fsum(merge.vector) == pytest.approx(1)
    lag = branches[best] - merge.score
    error = paired_error(problem.examples(vertices(len(branches))[best]), problem.examples(merge.vector))
    assert lag <= (0 if name == "argmax" else error + 1e-12)


@settings(max_examples=60, deadline=None)
@given(merges(), st.sampled_from(NOISY))
def test_uniform_coefficients_are_a_candidate_and_every_candidate_has_a_score(
    merge_and_search: tuple[TableMerge, Any], name: str
) -> None:
    problem, search = merge_and_search
    merge = find_merge(problem, search, Rule(name))
    share = 1 / len(problem.names)
    assert any(all(abs(v - share) < 1e-9 for v in point.values()) for point, _ in merge.candidates)
    assert merge.unfinished == []


def test_a_problem_that_knows_no_costs_says_what_a_rule_needs() -> None:
    class Plain(MergeProblem):
        def score_branch(self, index: int) -> float:
            return 0.0

        def score(self, coefficients: Coefficients) -> float:
            return 1.0

    with pytest.raises(fm.ProblemError, match="add up over examples"):
        find_merge(Plain(["a", "b"]), fm.Grid(), Rule("bagged"))
    assert find_merge(Plain(["a", "b"]), fm.Fixed((0.3, 0.7)), Rule("bagged")).vector == (0.3, 0.7)
