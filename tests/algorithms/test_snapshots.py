"""Which weights of a branch enter a merge: its last, or its best on validation."""

from __future__ import annotations

from typing import Any

import forkmerge as fm
from forkmerge.algorithms.run_record import Run
from problems import fit, noisy_net, quadratic_run


class TestCheckpointPolicies:
    # θ runs 0, .5, .75, .875, … towards 1 while validation wants .5: step 1 is the best there will ever be.
    def entered(self, policy: Any) -> tuple[list[int], Run]:
        branches = {"alone": {"tgt": 1.0}}
        algorithm = fm.ForkMerge(branches, interval=3, checkpoint=policy, validate_every=1)
        run = quadratic_run(algorithm, {"tgt": (1.0, 0.0)}, (0.5, 0.0), lr=0.5, steps=9)
        return [r.branches["alone"].entered_step for r in run.rounds], run

    def test_last_takes_the_weights_at_the_end_of_the_round(self) -> None:
        steps, run = self.entered("last")
        assert steps == [3, 6, 9]
        assert run.model.theta[0].item() == 1 - 0.5**9

    def test_best_in_interval_takes_the_best_since_the_fork(self) -> None:
        steps, run = self.entered("best_in_interval")
        assert steps == [1, 4, 7]
        assert run.model.theta[0].item() == 1 - 0.5**3

    def test_best_so_far_takes_the_best_since_the_start_even_from_before_a_merge(self) -> None:
        steps, run = self.entered("best_so_far")
        assert steps == [1, 1, 1]
        assert run.model.theta[0].item() == 0.5

    def test_scores_are_those_of_what_entered(self) -> None:
        mixtures = {"alone": {"tgt": 1.0}, "joint": {"tgt": 1.0, "odd": 1.0}}
        algorithm = fm.ForkMerge(mixtures, interval=6, checkpoint="best_in_interval", validate_every=2)
        (only,) = fit(algorithm, net=noisy_net, steps=6).rounds
        for name, weights in mixtures.items():
            followed = fit(fm.Joint(weights, interval=2), net=noisy_net, steps=6)
            scores = {r.end: r.score for r in followed.rounds}
            branch = only.branches[name]
            assert branch.entered_step == max(scores, key=scores.__getitem__)
            assert branch.score == max(scores.values())
