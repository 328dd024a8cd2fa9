import numpy as np
import pytest
from scipy.optimize import minimize

from trapline.arena.standings.bradley_terry import RIDGE, fit


def _by_a_general_optimiser(points):
    def loss(theta):
        ahead = theta[:, None] - theta[None, :]
        return np.sum(points * np.logaddexp(0.0, -ahead)) + 0.5 * RIDGE * theta @ theta

    start = np.zeros(len(points))
    return minimize(loss, start, method="BFGS", options={"gtol": 1e-9}).x


@pytest.mark.parametrize("entrants", [2, 3, 7])
def test_fit_maximises_the_likelihood(entrants):
    rng = np.random.default_rng(entrants)
    points = rng.integers(0, 5, (4, entrants, entrants)) / 2.0
    points[:, range(entrants), range(entrants)] = 0.0
    expected = [_by_a_general_optimiser(table) for table in points]
    np.testing.assert_allclose(fit(points), expected, atol=1e-5)


def test_strengths_are_finite_without_wins_or_losses():
    points = np.array([[[0.0, 8, 8], [0, 0, 4], [0, 4, 0]]])
    theta = fit(points)[0]
    assert np.all(np.isfinite(theta))
    assert theta[0] > theta[1]
    assert theta[1] == pytest.approx(theta[2])


def test_entrant_without_opponents_has_strength_zero():
    points = np.array([[[0.0, 3, 0], [1, 0, 0], [0, 0, 0]]])
    assert fit(points)[0, 2] == pytest.approx(0.0, abs=1e-9)


def test_diagonal_points_change_nothing():
    points = np.array([[[0.0, 3, 1], [1, 0, 2], [2, 2, 0]]])
    assert fit(points + 5 * np.eye(3)) == pytest.approx(fit(points), abs=1e-7)


def test_many_results_in_one_direction_do_not_overflow():
    points = np.zeros((1, 100, 100))
    points[0][np.triu_indices(100, 1)] = 1000.0
    theta = fit(points)[0]
    assert np.all(np.isfinite(theta))
    assert np.all(np.diff(theta) < 0)


def test_an_empty_field_has_no_strengths():
    assert fit(np.zeros((1, 0, 0))).shape == (1, 0)
