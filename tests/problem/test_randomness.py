"""Seeds that are functions of their parts, and random states that come back."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from forkmerge.problem import randomness
from problems import Augmented, fit, noisy_net, shared_problem


class TestDerivedSeeds:
    def test_a_seed_depends_on_every_part_and_on_their_boundaries(self) -> None:
        keys = [(0,), (1,), (0, "a"), (0, "b"), (0, "a", "b"), (0, "ab"), (0, "b", "a"), (0, 1), (0, 1, 1), (0, 11)]
        assert len({randomness.derive(*key) for key in keys}) == len(keys)

    def test_a_seed_is_the_same_in_every_process_and_release(self) -> None:
        # A golden value: if it changes, no stored run can be resumed to the same bits.
        assert randomness.derive(0, "stream", 3) == 1004608956487508955

    def test_a_seed_fits_every_generator(self) -> None:
        for part in range(200):
            assert 0 <= randomness.derive(-5, part) < 2**63

    def test_uniform_numbers_fill_the_unit_interval(self) -> None:
        drawn = [randomness.uniform(0, "u", i) for i in range(2000)]
        assert min(drawn) >= 0
        assert max(drawn) < 1
        assert abs(sum(drawn) / len(drawn) - 0.5) < 0.03


class TestRandomStates:
    def test_the_caller_gets_all_three_states_back_also_after_an_error(self) -> None:
        torch.manual_seed(1), np.random.seed(1), random.seed(1)  # noqa: NPY002
        expected = [torch.rand(1).item(), np.random.rand(), random.random()]  # noqa: NPY002
        torch.manual_seed(1), np.random.seed(1), random.seed(1)  # noqa: NPY002
        with pytest.raises(RuntimeError), randomness.random_state_kept():  # noqa: PT012
            randomness.set_random_state(123)
            torch.rand(9)
            raise RuntimeError
        assert [torch.rand(1).item(), np.random.rand(), random.random()] == expected  # noqa: NPY002

    def test_setting_a_state_seeds_torch_numpy_and_random(self) -> None:
        with randomness.random_state_kept():
            drawn = []
            for _ in range(2):
                randomness.set_random_state(2**62 + 1)
                drawn.append([torch.rand(1).item(), np.random.rand(), random.random()])  # noqa: NPY002
        assert drawn[0] == drawn[1]

    def test_fit_gives_the_caller_its_random_state_back(self) -> None:
        torch.manual_seed(1), np.random.seed(1), random.seed(1)  # noqa: NPY002
        before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
        fit(problem=shared_problem(Augmented()), net=noisy_net)
        after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
        assert torch.equal(before[0], after[0])
        assert before[1:] == after[1:]
