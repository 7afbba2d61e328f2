"""What every solver does first: unusable tasks are found, and the others kept as they are."""

from __future__ import annotations

import numpy as np

from forkmerge.methods.solvers import clean
from forkmerge.methods.solvers._gramian import solve
from gramians import make_rng


def test_clean_names_the_unusable_tasks_and_keeps_the_others():
    gradients = make_rng(10).standard_normal((4, 6))
    gramian = gradients @ gradients.T
    same, bad = clean(gramian)
    assert same is gramian
    assert bad.tolist() == []
    spoilt = gramian.copy()
    spoilt[1] = spoilt[:, 1] = np.nan
    spoilt[3] = spoilt[:, 3] = 0
    cleaned, bad = clean(spoilt)
    assert bad.tolist() == [1, 3]
    np.testing.assert_array_equal(cleaned[np.ix_([0, 2], [0, 2])], gramian[np.ix_([0, 2], [0, 2])])
    assert not cleaned[[1, 3]].any()
    assert not cleaned[:, [1, 3]].any()
    clash = gramian.copy()
    clash[0, 2] = clash[2, 0] = np.inf
    assert clean(clash)[1].tolist() == [0, 2]
    assert clean(gramian.astype(np.float32))[0].dtype == np.float64


def test_a_gradient_whose_square_is_no_normal_number_counts_as_zero():
    smallest = np.finfo(np.float64).tiny
    assert clean(np.diag([1.0, smallest]))[1].tolist() == []
    assert clean(np.diag([1.0, smallest / 2]))[1].tolist() == [1]


def test_a_singular_system_is_solved_in_the_least_squares_sense():
    matrix = np.array([[1.0, 1.0], [1.0, 1.0]])
    np.testing.assert_allclose(solve(matrix, np.array([1.0, 3.0])), [1.0, 1.0])
    np.testing.assert_allclose(solve(2 * np.eye(2), np.array([1.0, 3.0])), [0.5, 1.5])
