"""What ranking and search take of training: of many validation examples as many are looked at as cost a tenth of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

import forkmerge as fm
from forkmerge.algorithms.branches.search_share import LEAST, affordable_examples, search_notes
from problems import domains_problem, evaluation, fit, noisy_net, shared_problem


def problem_with(examples: int, **options: object) -> fm.Problem:
    return replace(shared_problem(metrics=fm.nll, **options), validation=evaluation(examples, metrics=fm.nll))


def passes(algorithm: fm.ForkMerge, branches: int) -> int:
    """How many passes over validation data a merge takes at most: one per branch and candidate."""
    return algorithm.evaluations(branches, 1) + 1


def test_as_many_examples_as_cost_a_tenth_of_a_rounds_training() -> None:
    algorithm = fm.ForkMerge("mixed", interval=1000)
    seen = affordable_examples(algorithm, problem_with(5000), 4000)
    trained = 3 * 1000 * 2 * 8  # a step is three passes: two branches, eight examples a step
    assert seen == int(0.1 * trained / passes(algorithm, 2))
    assert LEAST < seen < 5000
    assert affordable_examples(algorithm, problem_with(seen), 4000) is None


def test_never_fewer_than_decide_anything() -> None:
    assert affordable_examples(fm.ForkMerge("mixed", interval=1), problem_with(5000), 10) == LEAST
    assert affordable_examples(fm.ForkMerge("mixed", interval=1), problem_with(LEAST), 10) is None


def test_a_joint_branch_that_reads_one_stream_per_step_trains_on_less() -> None:
    problem = replace(domains_problem(), validation=evaluation(100_000))
    every, one = (
        affordable_examples(fm.ForkMerge(fm.PerAuxiliary(joint=joint), interval=5000), problem, 5000)
        for joint in (True, "sampled")
    )
    assert every is not None
    assert one is not None
    assert every > one


def test_a_rule_that_takes_much_of_training_is_noted_also_of_the_least_that_a_search_sees() -> None:
    named = {"interval": 2, "rule": "one_standard_error"}
    problem = problem_with(400)
    note = [note for note in fit(fm.ForkMerge("mixed", **named), problem, noisy_net).notes if "of training" in note]
    assert note
    assert "rule='one_standard_error' looks at 400 validation examples" in note[0]
    least = fm.ForkMerge("mixed", **named, validation_examples=LEAST)
    assert any(f"looks at {LEAST} validation examples" in note for note in fit(least, problem, noisy_net).notes)
    argmax = fm.ForkMerge("mixed", interval=2)
    assert search_notes(argmax, problem, argmax.branches(problem, {}), 4, 1, 1) == []


def test_a_run_says_how_many_examples_its_scores_are_of() -> None:
    run = fit(fm.ForkMerge("mixed", interval=4, validation_examples=50), problem_with(400), noisy_net)
    assert any("scores of rounds are of 50 of the 400 validation examples" in note for note in run.notes)
    assert not any(
        "scores of rounds" in note for note in fit(fm.ForkMerge("mixed"), problem_with(400), noisy_net).notes
    )


def test_scores_of_a_search_are_of_its_sample_and_what_is_returned_is_measured_on_all() -> None:
    problem = problem_with(400)
    algorithm = fm.ForkMerge("mixed", interval=4, validation_examples=50, floor=True)
    run = fit(algorithm, problem, noisy_net)
    whole = fit(fm.ForkMerge("mixed", interval=4), problem, noisy_net)
    last = run.rounds[-1]
    assert run.metrics["nll"] != pytest.approx(last.metrics["nll"], abs=1e-9)
    assert run.metrics["nll"] == pytest.approx(fm.measure(run.model, problem.target_validation)["nll"], rel=1e-5)
    assert whole.metrics["nll"] == pytest.approx(fm.measure(whole.model, problem.target_validation)["nll"], rel=1e-5)


@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_what_is_no_number_of_examples_is_refused(value: object) -> None:
    with pytest.raises(fm.ProblemError, match="validation_examples must be a positive integer"):
        fm.ForkMerge("mixed", validation_examples=value)  # type: ignore[arg-type]
