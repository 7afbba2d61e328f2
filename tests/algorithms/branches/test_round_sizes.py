"""Branches and steps are counted before anything is trained."""

from __future__ import annotations

import pytest

import forkmerge as fm
from forkmerge.algorithms.branches.round_sizes import branch_count, count_steps
from forkmerge.algorithms.equal_compute import Averaged, BestOf
from problems import shared_problem


@pytest.mark.parametrize(
    ("algorithm", "branches"),
    [
        (fm.SingleTask(), 1),
        (fm.Joint(), 1),
        (fm.ForkMerge("mixed"), 2),
        (fm.ForkMerge("per_auxiliary"), 3),
        (fm.ForkMerge(fm.NestedTopK(probe_steps=3, sizes=(1,))), 2),
        (BestOf(fm.SingleTask(), 4), 4),
        (BestOf(fm.PostTrain(), 3), 3),
        (BestOf(fm.ForkMerge("per_auxiliary"), 2), 2),
        (Averaged(fm.SingleTask(), 5), 5),
    ],
)
def test_branches_are_counted_and_so_are_the_runs_that_take_their_place(algorithm: fm.Algorithm, branches: int) -> None:
    assert branch_count(algorithm, shared_problem()) == branches


@pytest.mark.parametrize(
    ("algorithm", "steps"),
    [
        (fm.SingleTask(), 10),
        (fm.SingleTask(refit=True), 10),
        (fm.SingleTask(select="best", refit=True), 20),
        (fm.ForkMerge("per_auxiliary", floor=True), 38),
        (fm.ForkMerge(fm.NestedTopK(probe_steps=3, sizes=(1,))), 2 * 3 + 20),
        (BestOf(fm.SingleTask(), 4), 40),
        (BestOf(fm.SingleTask(refit=True), 4), 50),
        (BestOf(fm.SingleTask(select="best", refit=True), 4), 40 + 20),
        (BestOf(fm.PostTrain(refit=True), 4), 40 + 5 * 2 + 5),
        (BestOf(fm.ForkMerge("per_auxiliary"), 2), 60),
        (Averaged(fm.SingleTask(), 3), 30),
        (Averaged(fm.SingleTask(refit=True), 3), 30),
        (Averaged(fm.SingleTask(select="best", refit=True), 3), 60),
        (Averaged(fm.PostTrain(refit=True), 3), 45),
        (fm.JointThenAlone(), 10),
        (fm.JointThenAlone(select="best", refit=True), 20),
    ],
)
def test_steps_are_counted_without_training(algorithm: fm.Algorithm, steps: int) -> None:
    assert count_steps(algorithm, shared_problem(), 10) == steps
