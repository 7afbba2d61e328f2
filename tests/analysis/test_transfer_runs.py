"""The training runs that analyses need."""

from __future__ import annotations

import pickle
from dataclasses import replace

import torch

import forkmerge as fm
from compare_problem import recipe
from forkmerge.analysis import transfer_runs


def test_a_run_that_was_sent_to_another_process_gives_the_same_result():
    source = transfer_runs.SeededSource(fm.load_recipe("compare_problem:recipe").source, "aux")
    run = transfer_runs.TransferRun(source, 1, "odd", 0.5, steps=3, maker=transfer_runs.forkmerge)
    here, sent = transfer_runs.do_transfer_runs([run, pickle.loads(pickle.dumps(run))])
    assert here.to_json() | {"seconds": 0} == sent.to_json() | {"seconds": 0}
    assert here.steps == 3
    assert set(here.relevance) == {"aux", "odd"}
    assert len(here.coefficients) == 2  # Δt is shortened like the run


def test_the_recipes_own_forkmerge_is_measured_with_other_branches():
    reference = {"accuracy": 0.5, "loss": 1.0}
    options = {"bn": "recompute", "checkpoint": "best_in_interval", "validate_every": 3, "prune_to": 2}
    search = fm.Fixed((0.5, 0.5))
    own = fm.ForkMerge(
        interval=3,
        search=search,
        reference=reference,
        refit=True,
        keep_branches=True,
        **{"mixtures": "mixed", **options},
    )
    mine = replace(recipe(), algorithm=own)
    pair = transfer_runs.forkmerge(mine, "aux", 0.5)
    assert {name: getattr(pair, name) for name in options} == options
    assert (pair.search, pair.reference, pair.refit, pair.keep_branches) == (search, reference, False, False)
    assert [dict(m.task_weights) for m in pair.constructor.build(mine.problem)] == [{"tgt": 1}, {"tgt": 1, "aux": 0.5}]
    assert (
        transfer_runs.forkmerge(mine, transfer_runs.EVERY, 1.0).search is None
    )  # two coefficients cannot merge three branches
    other = replace(mine, problem=mine.problem.with_target("aux"))
    assert transfer_runs.forkmerge(other, "tgt", 1.0).reference is None
    assert transfer_runs.forkmerge(replace(mine, algorithm=fm.Joint(select="best")), "aux", 1.0).select == "best"
    assert transfer_runs.shortened(mine, 2).algorithm == replace(own, interval=1, validate_every=1)


def test_half_of_a_run_has_the_rates_of_the_whole_and_ends_with_its_last_weights():
    schedule = fm.SchedulerOf("CosineAnnealingLR", T_max="100%")
    whole = replace(
        recipe(), options={"scheduler": schedule}, algorithm=fm.ForkMerge("mixed", interval=1, select="best")
    )
    half = transfer_runs.halfway(whole, 6)
    found = transfer_runs.fit_transfer_run(transfer_runs.TransferRun(recipe, 0), half)
    rest = {"model": whole.model, "optimizer": whole.optimizer, "seed": 0, "threads": 1}
    expected = fm.SingleTask().fit(whole.problem, steps=3, scheduler=schedule.over(6), **rest)
    annealed = fm.SingleTask().fit(whole.problem, steps=3, scheduler=schedule, **rest)
    assert half.steps == found.steps == 3
    weights, same, other = (run.model.state_dict() for run in (found, expected, annealed))
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert not all(torch.equal(weights[name], other[name]) for name in weights)
