"""The branches a run forks into, and what each task weighs in a merge."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forkmerge as fm
from forkmerge.algorithms.mixtures import (
    check_mixtures,
    is_target_only,
    mixtures_from,
    reference_branch,
    scale_auxiliaries,
)
from problems import Refuse, domains_problem, fit, quadratic_problem, shared_problem


def weights(mixtures: list[fm.Mixture]) -> dict[str, dict[str, float]]:
    return {mixture.name: dict(mixture.task_weights) for mixture in mixtures}


class TestConstructors:
    def test_mixed_is_the_target_alone_and_all_auxiliaries_together(self) -> None:
        assert weights(fm.Mixed().build(shared_problem())) == {
            "alone": {"tgt": 1.0},
            "joint": {"tgt": 1.0, "aux": 1.0, "odd": 1.0},
        }

    def test_sampling_weights_share_one_among_the_auxiliaries(self) -> None:
        built = fm.Mixed().build(shared_problem(weights="sampling"))
        assert weights(built)["joint"] == {"tgt": 1.0, "aux": 0.5, "odd": 0.5}

    def test_per_auxiliary_is_k_plus_one_branches(self) -> None:
        assert weights(fm.PerAuxiliary().build(domains_problem())) == {
            "alone": {"tgt": 1.0},
            "aux": {"tgt": 1.0, "aux": 1.0},
            "odd": {"tgt": 1.0, "odd": 1.0},
        }

    def test_the_auxiliaries_follow_the_target_that_is_chosen(self) -> None:
        problem = domains_problem(validation=dict.fromkeys(("tgt", "odd"), domains_problem().target_validation))
        assert list(weights(fm.PerAuxiliary().build(problem.with_target("odd")))) == ["alone", "tgt", "aux"]

    def test_groups_give_one_branch_each_after_the_target_alone(self) -> None:
        built = fm.Groups({"both": ["aux", "odd"], "first": ["aux"]}).build(shared_problem())
        assert weights(built) == {
            "alone": {"tgt": 1.0},
            "both": {"tgt": 1.0, "aux": 1.0, "odd": 1.0},
            "first": {"tgt": 1.0, "aux": 1.0},
        }

    def test_given_branches_are_taken_as_they_are(self) -> None:
        branches = {"a": {"tgt": 0.5}, "b": {"odd": 2.0}}
        assert weights(fm.Given(branches).build(shared_problem())) == branches
        listed = [fm.Mixture(name, vector) for name, vector in branches.items()]
        assert fm.Given(listed).build(shared_problem()) == listed

    def test_given_branches_may_have_options_of_their_own(self) -> None:
        branches = {"a": {"tgt": 1.0}, "b": {"task_weights": {"tgt": 1.0, "odd": 2.0}, "lr_scale": 3}}
        assert fm.Given(branches).build(shared_problem()) == [
            fm.Mixture("a", {"tgt": 1.0}),
            fm.Mixture("b", {"tgt": 1.0, "odd": 2.0}, lr_scale=3.0),
        ]
        with pytest.raises(fm.ProblemError, match="branch 'b': unknown option of a branch 'lr_scal'"):
            fm.Given({"b": {"task_weights": {"tgt": 1.0}, "lr_scal": 3}}).build(shared_problem())

    def test_a_task_may_be_called_task_weights(self) -> None:
        assert fm.Given({"b": {"task_weights": 0.5}}).build(shared_problem())[0].task_weights == {"task_weights": 0.5}

    def test_per_auxiliary_may_have_one_more_branch_with_all(self) -> None:
        *others, joint = fm.PerAuxiliary(joint=True).build(domains_problem())
        assert others == fm.PerAuxiliary().build(domains_problem())
        assert joint == fm.Mixed().build(domains_problem())[1]
        *_, sampled = fm.PerAuxiliary(joint="sampled").build(domains_problem())
        assert sampled == fm.Mixture("joint", {"tgt": 1.0, "aux": 1.0, "odd": 1.0}, auxiliary_streams="one")
        for wrong in ("yes", 1, None):
            with pytest.raises(fm.ProblemError, match="joint must be True, False or 'sampled'"):
                fm.PerAuxiliary(joint=wrong)  # type: ignore[arg-type]

    def test_of_one_auxiliary_the_joint_branch_would_be_its_own(self) -> None:
        built = fm.PerAuxiliary(joint=True).build(quadratic_problem({"tgt": (0, 0), "aux": (1, 1)}, (0, 0)))
        assert [mixture.name for mixture in built] == ["alone", "aux"]

    def test_rates_are_the_branches_of_another_constructor_at_several_rates(self) -> None:
        built = mixtures_from("rates").build(shared_problem(), {})
        assert [(mixture.name, mixture.lr_scale) for mixture in built] == [
            ("alone", 1.0),
            ("joint", 1.0),
            ("alone ×3", 3.0),
            ("joint ×3", 3.0),
        ]
        assert built[:2] == fm.Mixed().build(shared_problem())
        halves = mixtures_from({"name": "rates", "mixtures": "per_auxiliary", "lr_scales": [1, 0.5]})
        assert [m.name for m in halves.build(shared_problem(), {})][3:] == ["alone ×0.5", "aux ×0.5", "odd ×0.5"]

    def test_rates_of_branches_that_have_probes_have_them_too(self) -> None:
        nested = fm.NestedTopK(probe_steps=5)
        rates = fm.Rates(nested)
        assert (rates.probe_steps, rates.probes(shared_problem())) == (5, nested.probes(shared_problem()))
        assert len(rates.build(shared_problem(), {"aux": 0.0, "odd": 1.0})) == 6

    @pytest.mark.parametrize("scales", [[], [1, 1], [0, 1], [-1], "13", 3, [True, "3"]])
    def test_rates_that_are_none_are_refused(self, scales: Any) -> None:
        with pytest.raises(fm.ProblemError, match="lr_scale"):
            fm.Rates(lr_scales=scales)

    def test_the_target_only_branch_is_the_one_at_the_runs_own_rate(self) -> None:
        fast = fm.Mixture("alone ×3", {"tgt": 1.0}, lr_scale=3)
        assert not is_target_only(fast, "tgt")
        both = [fast, fm.Mixture("alone", {"tgt": 1.0})]
        assert reference_branch(both, "tgt") == 1
        assert reference_branch([fm.Mixture("aux", {"aux": 1.0}), fast], "tgt") == 1

    def test_nested_top_k_adds_auxiliaries_in_the_order_of_their_probes(self) -> None:
        nested = fm.NestedTopK(probe_steps=5)
        problem = shared_problem()
        assert weights(nested.probes(problem)) == {"aux": {"tgt": 1.0, "aux": 1.0}, "odd": {"tgt": 1.0, "odd": 1.0}}
        assert weights(nested.build(problem, {"aux": 0.1, "odd": 0.7})) == {
            "alone": {"tgt": 1.0},
            "top 1": {"tgt": 1.0, "odd": 1.0},
            "top 2": {"tgt": 1.0, "odd": 1.0, "aux": 1.0},
        }

    def test_nested_top_k_takes_only_the_sizes_asked_for(self) -> None:
        built = fm.NestedTopK(probe_steps=5, sizes=[2]).build(shared_problem(), {"aux": 1.0, "odd": 0.0})
        assert list(weights(built)) == ["alone", "top 2"]

    def test_of_equal_probes_the_order_of_the_streams_decides(self) -> None:
        built = fm.NestedTopK(probe_steps=5).build(shared_problem(), {"aux": 0.5, "odd": 0.5})
        assert weights(built)["top 1"] == {"tgt": 1.0, "aux": 1.0}


class TestNames:
    @pytest.mark.parametrize(
        ("branches", "expected"),
        [
            ("mixed", fm.Mixed()),
            ("per_auxiliary", fm.PerAuxiliary()),
            ({"name": "nested_top_k", "probe_steps": 3}, fm.NestedTopK(3)),
            ({"name": "groups", "groups": {"g": ["aux"]}}, fm.Groups({"g": ["aux"]})),
            ({"a": {"tgt": 1.0}}, fm.Given({"a": {"tgt": 1.0}})),
            (fm.Mixed(), fm.Mixed()),
            # A branch may be called "name": a mapping of mappings is always the branches themselves.
            ({"name": {"tgt": 1.0}}, fm.Given({"name": {"tgt": 1.0}})),
        ],
    )
    def test_a_constructor_can_be_named_or_given(self, branches: Any, expected: fm.Mixtures) -> None:
        assert mixtures_from(branches) == expected

    def test_an_unknown_name_offers_the_closest(self) -> None:
        with pytest.raises(fm.ConfigError, match=r"'per_auxilary'\. Did you mean 'per_auxiliary'\?"):
            fm.ForkMerge("per_auxilary")

    def test_an_unknown_option_is_named(self) -> None:
        with pytest.raises(fm.ConfigError, match=r"mixtures 'mixed': .*'size'"):
            fm.ForkMerge({"name": "mixed", "size": 3})


class TestChecks:
    @pytest.mark.parametrize(
        ("branches", "message"),
        [
            ({}, "no branch to train"),
            ({"a": {"tgt": -1.0}}, r"branch 'a': the weight of task 'tgt' must be a finite number ≥ 0, got -1\.0"),
            ({"a": {"tgt": math.nan}}, "finite number ≥ 0, got nan"),
            ({"a": {"tgt": math.inf}}, "finite number ≥ 0, got inf"),
            ({"a": {"tgt": "1"}}, "finite number ≥ 0, got '1'"),
            ({"a": {"tgt": True}}, "finite number ≥ 0, got True"),
            ({"a": {"tgt": 0.0, "aux": 0}}, "branch 'a' gives every task weight 0"),
            ({"a": {"axu": 1.0}}, r"branch 'a': unknown task 'axu'\. Did you mean 'aux'\? Known: tgt, aux, odd\."),
            ([fm.Mixture("a", {"tgt": 1.0}), fm.Mixture("a", {"aux": 1.0})], "two branches are named 'a'"),
        ],
    )
    def test_what_cannot_be_trained_is_refused(self, branches: Any, message: str) -> None:
        problem = shared_problem()
        with pytest.raises(fm.ProblemError, match=message):
            check_mixtures(problem, fm.Given(branches).build(problem))

    def test_a_branch_name_that_would_leave_its_folder_is_refused(self) -> None:
        for name in ("", " ", "../up", "a/b", "a\\b", ".hidden", "a:b", "a\nb", "x" * 101, " a", None, 3):
            with pytest.raises(fm.ProblemError, match="branch name"):
                fm.Mixture(name, {"tgt": 1.0})

    def test_an_auxiliary_task_may_not_take_the_name_of_the_target_only_branch(self) -> None:
        with pytest.raises(fm.ProblemError, match="two branches are named 'alone'"):
            check_mixtures(shared_problem(), fm.Groups({"alone": ["aux"]}).build(shared_problem()))

    def test_a_group_with_an_unknown_task_offers_the_closest(self) -> None:
        with pytest.raises(fm.ProblemError, match=r"branch 'g': unknown auxiliary task 'od'\. Did you mean 'odd'"):
            fm.Groups({"g": ["od"]}).build(shared_problem())

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"probe_steps": 0}, "probe_steps must be a positive integer, got 0"),
            ({"probe_steps": 2.5}, r"probe_steps must be a positive integer, got 2\.5"),
            ({"probe_steps": 2, "sizes": [0]}, r"sizes must be positive integers, got \[0\]"),
        ],
    )
    def test_nested_top_k_refuses_impossible_options(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(fm.ProblemError, match=message):
            fm.NestedTopK(**options)

    def test_nested_top_k_refuses_more_auxiliaries_than_there_are_before_training(self) -> None:
        with pytest.raises(fm.ProblemError, match="sizes asks for the top 3 of only 2 auxiliary tasks"):
            fit(fm.ForkMerge(fm.NestedTopK(probe_steps=2, sizes=[1, 3])))


class TestTargetOnly:
    @pytest.mark.parametrize(
        ("vector", "expected"),
        [
            ({"tgt": 0.5}, True),
            ({"tgt": 1.0, "aux": 0.0}, True),
            ({"tgt": 1.0, "aux": 0.1}, False),
            ({"aux": 1}, False),
        ],
    )
    def test_a_branch_is_target_only_if_no_other_task_has_weight(self, vector: Any, expected: bool) -> None:
        assert is_target_only(fm.Mixture("a", vector), "tgt") is expected


class TestScale:
    def test_only_auxiliary_weights_are_scaled(self) -> None:
        scaled = scale_auxiliaries(fm.Mixture("a", {"tgt": 2.0, "aux": 1.0, "odd": 0.5}), "tgt", 3.0)
        assert scaled == fm.Mixture("a", {"tgt": 2.0, "aux": 3.0, "odd": 1.5})


vectors = st.dictionaries(st.sampled_from("abc"), st.floats(0, 10), min_size=1)


class TestRelevance:
    def test_it_is_the_task_weights_averaged_with_the_coefficients(self) -> None:
        mixtures = [fm.Mixture("one", {"t": 1.0}), fm.Mixture("two", {"t": 1.0, "a": 0.5})]
        assert fm.task_relevance({"one": 0.25, "two": 0.75}, mixtures) == {"t": 1.0, "a": 0.375}

    def test_a_branch_without_a_coefficient_counts_nothing(self) -> None:
        mixtures = [fm.Mixture("one", {"t": 1.0}), fm.Mixture("gone", {"a": 2.0})]
        assert fm.task_relevance({"one": 1.0}, mixtures) == {"t": 1.0, "a": 0.0}

    @given(st.lists(vectors, min_size=1, max_size=4), st.data())
    def test_it_is_the_matrix_product_of_coefficients_and_task_weights(self, rows: list[Any], data: Any) -> None:
        raw = data.draw(st.lists(st.floats(0.01, 1), min_size=len(rows), max_size=len(rows)))
        shares = [value / sum(raw) for value in raw]
        mixtures = [fm.Mixture(f"b{i}", row) for i, row in enumerate(rows)]
        relevance = fm.task_relevance({f"b{i}": share for i, share in enumerate(shares)}, mixtures)
        for task in set().union(*rows):
            expected = sum(share * row.get(task, 0.0) for share, row in zip(shares, rows, strict=True))
            assert relevance[task] == pytest.approx(expected)


class TestRuns:
    @pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, "1", None])
    def test_negative_or_non_finite_weights(self, refused: Refuse, weight: Any) -> None:
        branches = {"alone": {"tgt": 1.0}, "bad": {"tgt": 1.0, "odd": weight}}
        refused("branch 'bad': the weight of task 'odd' must be a finite number ≥ 0, got", fm.ForkMerge(branches))

    def test_joint_weights_too(self, refused: Refuse) -> None:
        refused("the weight of task 'tgt' must be a finite number ≥ 0, got -1", fm.Joint({"tgt": -1.0}))
        refused("branch 'joint' gives every task weight 0", fm.Joint({"tgt": 0.0}))
        refused("unknown task 'od'. Did you mean 'odd'", fm.Joint({"od": 1.0}))

    def test_a_branch_of_an_unknown_task(self, refused: Refuse) -> None:
        refused(r"branch 'b': unknown task 'auxx'\. Did you mean 'aux'", fm.ForkMerge({"b": {"auxx": 1.0}}))

    def test_no_branch_at_all(self, refused: Refuse) -> None:
        refused("there is no branch to train", fm.ForkMerge({}))
