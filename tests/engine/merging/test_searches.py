"""Every search against brute force, and the promises that hold for all of them."""

from __future__ import annotations

import doctest
import itertools
import math
import pickle
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkmerge.engine.merging import searches
from forkmerge.engine.merging.arithmetic import Coefficients, check_coefficients, vertices
from forkmerge.engine.merging.candidates import Candidates, Score
from forkmerge.engine.merging.searches import Binary, Fixed, Greedy, Grid, Search, Sums, best_of, search_from_name
from forkmerge.errors import ProblemError

# Few values make ties frequent; the others are what a diverged branch or a broken metric returns.
RAW_SCORES = (0.0, 1.0, 2.0, 3.0, -math.inf, math.nan)


SEEDS = st.integers(0, 2**32)


GUARDED = (Grid(), Grid(3), Greedy(), Greedy((0.5, 1)), Binary(), Binary(1))


def random_score(seed: int, values: tuple[float, ...] = RAW_SCORES) -> Score:
    """Give every candidate a value that depends on nothing but the seed and the candidate."""

    def score(coefficients: Coefficients) -> float:
        key = tuple(round(value * 1e9) for value in coefficients)
        return values[hash((seed, *key)) % len(values)]

    return score


def smooth_score(seed: int) -> Score:
    """Fall off with the distance from one point of the simplex, the usual shape of a score."""

    def score(coefficients: Coefficients) -> float:
        raw = [1 + hash((seed, k)) % 97 for k in range(len(coefficients))]
        return -sum((c - r / sum(raw)) ** 2 for c, r in zip(coefficients, raw, strict=True))

    return score


def without_nan(value: float) -> float:
    return -math.inf if math.isnan(value) else value


def naive_grid(score: Score, branches: int, resolution: int) -> Coefficients:
    """Try all tuples of multiples of 1/resolution, filter those that sum to 1, sort by the tie rule."""
    points = itertools.product(range(resolution + 1), repeat=branches)
    simplex = sorted((p for p in points if sum(p) == resolution), key=lambda p: p[::-1])
    scored = [(without_nan(score(c)), c) for c in (tuple(i / resolution for i in p) for p in simplex)]
    best = max(value for value, _ in scored)
    return next(c for value, c in scored if value == best)


def naive_binary(score: Score, iterations: int) -> Coefficients:
    """Halve in exact fractions and look every score up again."""

    def at(point: Fraction) -> float:
        return without_nan(score((float(1 - point), float(point))))

    low, high = Fraction(0), Fraction(1)
    met = {low, high}
    for _ in range(iterations):
        middle = (low + high) / 2
        met.add(middle)
        if at(high) > at(low):
            low = middle
        else:
            high = middle
    best = min(met, key=lambda point: (-at(point), point))
    return (float(1 - best), float(best))


def naive_greedy(score: Score, branches: int, alphas: tuple[float, ...]) -> Coefficients:
    """Write Algorithm 3 down line by line in ranked order, α = 0 included, evaluating everything anew."""

    def unranked(weights: list[float]) -> Coefficients:
        total = math.fsum(weights)
        by_branch = dict(zip(ranked, (weight / total for weight in weights), strict=False))
        return tuple(by_branch.get(b, 0.0) for b in range(branches))

    def value(weights: list[float]) -> float:
        return without_nan(score(unranked(weights)))

    ranked = sorted(range(branches), key=lambda b: (-without_nan(score(vertices(branches)[b])), b))
    weights = [1.0]
    for b in range(2, branches + 1):
        upper = math.fsum(weights) / (b - 1)
        tried = [(value([*weights, alpha * upper]), -alpha) for alpha in sorted({0.0, *alphas})]
        weights.append(-max(tried)[1] * upper)
    return unranked(weights)


@given(seed=SEEDS, branches=st.integers(2, 4), resolution=st.integers(1, 6))
def test_grid_equals_full_enumeration(seed: int, branches: int, resolution: int) -> None:
    for score in (random_score(seed), smooth_score(seed)):
        assert Grid(resolution).search(score, branches) == naive_grid(score, branches, resolution)


@given(seed=SEEDS, iterations=st.integers(1, 8))
def test_binary_equals_halving_in_exact_fractions(seed: int, iterations: int) -> None:
    for score in (random_score(seed), smooth_score(seed)):
        assert Binary(iterations).search(score, 2) == naive_binary(score, iterations)


@given(
    seed=SEEDS,
    branches=st.integers(2, 6),
    alphas=st.sampled_from([(0, 0.2, 0.4, 0.6, 0.8, 1), (0.5, 1), (0.25,), (0,), (1, 0.3, 0.3)]),
)
def test_greedy_equals_algorithm_3_written_literally(seed: int, branches: int, alphas: tuple[float, ...]) -> None:
    for score in (random_score(seed), random_score(seed, tuple(range(1000))), smooth_score(seed)):
        assert Greedy(alphas).search(score, branches) == naive_greedy(score, branches, alphas)


@given(seed=SEEDS)
def test_greedy_over_two_branches_is_exhaustive_over_the_coefficients_of_the_worse(seed: int) -> None:
    for raw in (random_score(seed), smooth_score(seed)):
        score = Candidates(raw)
        better, worse = (0, 1) if score((1.0, 0.0)) >= score((0.0, 1.0)) else (1, 0)
        answer = Greedy().search(score, 2)
        options = [alpha / (1 + alpha) for alpha in (0, 0.2, 0.4, 0.6, 0.8, 1)]
        points = [(1 - share, share)[:: 1 if better == 0 else -1] for share in options]
        best = max(points, key=score)
        assert answer[worse] == pytest.approx(best[worse], abs=1e-12)
        assert score(answer) == score(best)


def test_greedy_tries_the_published_coefficients_with_two_branches() -> None:
    score = Candidates(lambda coefficients: 1.0 - coefficients[1])
    Greedy().search(score, 2)
    shares = [coefficients[1] for coefficients, _ in score.tried[2:]]
    assert shares == pytest.approx([0.167, 0.286, 0.375, 0.444, 0.5], abs=5e-4)


def test_greedy_bounds_a_later_branch_by_the_mean_of_those_before() -> None:
    # Branch 1 ranks first, branch 0 is given half of it (α = 0.5), so U = 0.75 for branch 2.
    wanted: dict[Coefficients, float] = {(0.0, 1.0, 0.0): 9.0, (1.0, 0.0, 0.0): 8.0, (0.0, 0.0, 1.0): 7.0}
    half = tuple(value / 1.5 for value in (0.5, 1.0, 0.0))
    full = tuple(value / 2.25 for value in (0.5, 1.0, 0.75))
    score = Candidates(lambda coefficients: 11.0 if math.dist(coefficients, full) < 1e-9 else 0.0)
    scored = Candidates(score, branch_scores={**wanted, half: 10.0})
    assert Greedy((0.5, 1)).search(scored, 3) == pytest.approx(full)


def test_grid_over_two_branches_tries_the_six_published_points() -> None:
    Grid().search(score := Candidates(lambda coefficients: 0.0), 2)
    assert [coefficients[1] for coefficients, _ in score.tried] == [0, 0.2, 0.4, 0.6, 0.8, 1]


@pytest.mark.parametrize("search", GUARDED, ids=repr)
def test_ties_go_to_the_target_alone(search: Search) -> None:
    branches = 2 if isinstance(search, Binary) else 4
    for constant in (0.0, -math.inf, math.nan):
        assert search.search(lambda coefficients, constant=constant: constant, branches) == vertices(branches)[0]


@pytest.mark.parametrize("search", GUARDED, ids=repr)
@given(seed=SEEDS, branches=st.integers(1, 4))
def test_the_answer_is_never_worse_than_the_best_single_branch(search: Search, seed: int, branches: int) -> None:
    branches = min(branches, 2) if isinstance(search, Binary) else branches
    score = Candidates(random_score(seed))
    answer = best_of(search, score, branches)
    assert check_coefficients(answer, branches) == answer
    assert score(answer) >= max(score(vertex) for vertex in vertices(branches))


@pytest.mark.parametrize("search", GUARDED, ids=repr)
@given(seed=SEEDS, branches=st.integers(1, 4))
def test_no_candidate_is_evaluated_twice_and_the_bound_holds(search: Search, seed: int, branches: int) -> None:
    branches = min(branches, 2) if isinstance(search, Binary) else branches
    evaluated: list[Coefficients] = []
    raw = random_score(seed)

    def evaluate(coefficients: Coefficients) -> float:
        evaluated.append(tuple(round(value, 9) for value in coefficients))
        return raw(coefficients)

    search.search(evaluate, branches)
    assert len(set(evaluated)) == len(evaluated) <= search.evaluations(branches)
    evaluated.clear()
    score = Candidates(evaluate)
    best_of(search, score, branches)
    assert len(set(evaluated)) == len(evaluated) == len(score.tried) <= search.evaluations(branches)


@pytest.mark.parametrize("search", [*GUARDED, Fixed(), Fixed((1.0,))], ids=repr)
def test_one_branch_needs_no_evaluation(search: Search) -> None:
    def fail(coefficients: Coefficients) -> float:
        raise AssertionError("evaluated")

    assert best_of(search, Candidates(fail), 1) == (1.0,)
    assert search.evaluations(1) == 0


class Answering(Search):
    """A guarded search of somebody else that answers without looking."""

    def __init__(self, answer: Coefficients) -> None:
        self.answer = answer

    def search(self, score: Score, branches: int) -> Coefficients:
        return self.answer

    def evaluations(self, branches: int) -> int:
        return 0


def test_an_unguarded_worse_answer_stays_and_a_guarded_one_is_replaced() -> None:
    def score(coefficients: Coefficients) -> float:
        return max(coefficients) + 0.1 * coefficients[1]

    assert best_of(Answering((0.4, 0.3, 0.3)), Candidates(score), 3) == (0.0, 1.0, 0.0)
    unscored = Candidates(score)
    assert best_of(Fixed(), unscored, 3) == (1 / 3,) * 3
    assert unscored.tried == []
    assert Fixed((0.5, 0.25, 0.25)).search(score, 3) == (0.5, 0.25, 0.25)


@pytest.mark.parametrize(
    ("answer", "message"), [((0.5, 0.5), "expected 3"), ((0.5, 0.5, 0.5), "sum to 1.5"), (None, "numbers")]
)
def test_a_bad_answer_of_a_search_is_refused(answer: Coefficients, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        best_of(Answering(answer), Candidates(lambda coefficients: 0.0), 3)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Grid(0), "resolution must be a whole number of at least 1, got 0"),
        (lambda: Grid(True), "resolution"),
        (lambda: search_from_name("grid", resolution=2.5), "resolution"),
        (lambda: Binary(0), "iterations must be a whole number of at least 1"),
        (lambda: Greedy(()), "alphas must be numbers from 0 to 1"),
        (lambda: Greedy((0, 1.5)), "alphas"),
        (lambda: Greedy((0, math.nan)), "alphas"),
        (lambda: search_from_name("greedy", alphas="0"), "alphas"),
        (lambda: search_from_name("greedy", alphas=0.5), "alphas"),
        (lambda: search_from_name("greedy", alphas=[None]), "alphas"),
        (lambda: Fixed((0.5, 0.6)), r"sum to 1, got \(0.5, 0.6\), which sum to 1.1"),
        (lambda: Fixed((1.5, -0.5)), "not negative"),
        (lambda: Fixed((math.nan, 1.0)), "finite"),
        (lambda: Fixed((math.inf, 0.0)), "finite"),
        (lambda: Fixed(()), "sum to 1"),
        (lambda: search_from_name("fixed", coefficients=["a", "b"]), "must be numbers"),
        (lambda: Fixed((0.5, 0.5)).check(3), "expected 3 coefficients, one per branch, got 2"),
        (lambda: Fixed((0.5, 0.5)).search(smooth_score(0), 1), "expected 1 coefficients"),
        (lambda: Binary().check(3), r"two branches, got 3: use Greedy\(\)"),
        (lambda: Binary().search(smooth_score(0), 3), "two branches"),
        (lambda: Grid().check(0), "at least one branch, got 0"),
        (lambda: search_from_name("gird"), "unknown search 'gird'. Did you mean 'grid'"),
        (
            lambda: search_from_name("greedy", alpha=[1]),
            "unknown option of the greedy search 'alpha'.*'alphas'",
        ),
        (lambda: search_from_name("binary", resolution=3), "Known: iterations"),
    ],
)
def test_bad_arguments_are_named(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        build()


def test_coefficients_summing_to_one_by_hand_are_accepted() -> None:
    assert Fixed((0.3333333, 0.3333333, 0.3333333)).search(smooth_score(0), 3) == (0.3333333,) * 3
    assert math.copysign(1, check_coefficients((1, -0.0))[1]) == 1


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("grid", {}, Grid(5)),
        ("grid", {"resolution": 10}, Grid(10)),
        ("binary", {"iterations": 3}, Binary(3)),
        ("greedy", {"alphas": [1, 0, 0.5]}, Greedy((0.0, 0.5, 1.0))),
        ("fixed", {"coefficients": [0.5, 0.5]}, Fixed((0.5, 0.5))),
        ("fixed", {}, Fixed()),
    ],
)
def test_searches_are_built_by_name_and_survive_pickle_and_repr(
    name: str, options: dict[str, object], expected: Search
) -> None:
    search = search_from_name(name, **options)
    assert search == expected
    assert hash(search) == hash(expected)
    assert pickle.loads(pickle.dumps(search)) == search
    assert eval(repr(search), {kind.__name__: kind for kind in searches.SEARCHES.values()}) == search


def test_a_search_is_read_from_a_search_a_name_or_a_table() -> None:
    assert searches.search_from(None) is None
    assert searches.search_from(Grid(3)) == searches.search_from({"name": "grid", "resolution": 3}) == Grid(3)
    assert searches.search_from("greedy") == Greedy()
    with pytest.raises(ProblemError, match="search must be a search, its name or"):
        searches.search_from(3)


def test_docstring_examples_hold() -> None:
    result = doctest.testmod(searches)
    assert result.attempted > 0
    assert result.failed == 0


class TestSums:
    def test_every_candidate_of_greedy_search_is_tried_with_every_total(self) -> None:
        tried: list[tuple[float, ...]] = []

        def score(coefficients: tuple[float, ...]) -> float:
            tried.append(coefficients)
            return -sum((value - goal) ** 2 for value, goal in zip(coefficients, (1.2, 0.0, 0.8), strict=True))

        search = Sums(totals=(2.0, 1.5))
        answer = search.search(score, 3)
        assert answer == pytest.approx((1.25, 0.0, 0.75))
        assert len(tried) == len(set(tried)) <= search.evaluations(3) == 3 + 2 + 2 * 5 * 3
        assert {round(sum(point), 9) for point in tried} == {1.0, 1.5, 2.0}

    def test_best_of_takes_sums_from_it_only(self) -> None:
        score = Candidates(lambda coefficients: sum(coefficients))
        assert best_of(Sums(totals=(3.0,)), score, 2) == (3.0, 0.0)

    def test_it_is_found_by_name_and_its_totals_are_checked(self) -> None:
        assert search_from_name("sums", totals=[2]) == Sums(totals=(1.0, 2.0))
        for bad in ((0.5,), (float("inf"),), "12", 3, ("a",)):
            with pytest.raises(ProblemError, match="totals must be"):
                Sums(totals=bad)
        assert Sums().search(lambda coefficients: 0.0, 1) == (1.0,)
