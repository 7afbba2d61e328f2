"""Every word of a whole run makes an algorithm, and is explained."""

from __future__ import annotations

from dataclasses import replace

import pytest

import forkmerge as fm
from compare_problem import recipe
from forkmerge.experiments.compared.method_words import ABOUT, IN_TURN, RUNS, WIN_STAY, WIN_STAY_ALL
from forkmerge.experiments.compared_methods import compared_method_from, equal_compute_words


@pytest.mark.parametrize("word", RUNS)
def test_a_word_makes_an_algorithm_and_is_explained(word):
    method = compared_method_from(word)
    assert method.label == RUNS[word][0]
    assert isinstance(method.algorithm(recipe(), refit=False), fm.Algorithm)
    assert len(ABOUT[word]) > 10


def test_win_stay_of_all_is_what_forkmerge_does_when_no_branches_are_named():
    problem = recipe().problem
    made = compared_method_from(WIN_STAY_ALL).algorithm(recipe(), refit=False).settings(problem)
    assert made.mixtures == fm.PerAuxiliary(joint="sampled")
    assert (made.per_round, made.turns, made.auxiliary_scale) == (1, "win_stay_all", 2.0)
    assert made == fm.ForkMerge(interval=recipe().algorithm.interval).settings(problem)


def test_win_stay_keeps_the_target_alone_in_every_round():
    problem = recipe().problem
    made = compared_method_from(WIN_STAY).algorithm(recipe(), refit=False).settings(problem)
    assert made.mixtures == fm.PerAuxiliary(joint="sampled")
    assert (made.per_round, made.turns, made.auxiliary_scale) == (1, "win_stay", 1.0)


def test_pruning_that_a_recipe_names_is_of_its_own_branches():
    own = replace(recipe(), algorithm=fm.ForkMerge("per_auxiliary", interval=4, prune_to=2, prune_after=3))
    made = compared_method_from(WIN_STAY).algorithm(own, refit=False).settings(own.problem)
    assert (made.per_round, made.prune_to, made.prune_after) == (1, None, 1)


def test_in_turn_has_no_joint_branch():
    problem = recipe().problem
    made = compared_method_from(IN_TURN).algorithm(recipe(), refit=False).settings(problem)
    assert made.mixtures == fm.PerAuxiliary()
    assert (made.per_round, made.turns) == (1, "rotation")
    assert made == fm.ForkMerge(interval=recipe().algorithm.interval, turns="rotation").settings(problem)


def test_the_other_forms_train_all_their_branches_and_take_the_best_candidate():
    for word in ("forkmerge", "forkmerge-aux"):
        made = compared_method_from(word).algorithm(recipe(), refit=False).settings(recipe().problem)
        assert (made.per_round, made.rule, made.search_by) == (None, "argmax", None)


def test_equal_compute_of_branches_that_take_turns_has_no_merge_at_the_end_alone():
    for word in (WIN_STAY_ALL, WIN_STAY, IN_TURN):
        method = compared_method_from(word)
        words = equal_compute_words([method], {method.word: 2}, {method.word: ""})
        assert f"{IN_TURN}-uniform" in words
        assert f"{word}-once" not in words
        assert "stl-average:2" in words
