"""Strengths from pairwise results: Bradley–Terry, ties as half wins, kept finite by a ridge.

Entrant i beats j with probability 1 / (1 + exp(θj − θi)). Without the ridge, an entrant that never
wins has θ = −∞; with it the log-likelihood is strictly concave, every strength is finite, and an
entrant without opponents stays at 0. Adding a loss lowers its entrant relative to all others: the
Hessian is a graph Laplacian plus the ridge, so the response to the loss is lowest at the loser.
"""

import numpy as np
from numpy.typing import NDArray

#: Penalty ½·RIDGE·θ²: weak against one real result, strong enough to keep the strengths finite.
RIDGE = 0.1
#: Strengths closer than this are equal.
EQUAL = 1e-6
_LONGEST_STEP = 2.0
#: Relative error of a step: the next step repairs it.
_SOLVED = 1e-4
_LAST_STEP = EQUAL**0.5 / 10
_MAX_STEPS = 100

Floats = NDArray[np.float64]


def fit(points: Floats, start: Floats | None = None, ridge: float = RIDGE) -> Floats:
    """Strengths (R, E) from points (R, E, E): what row took from column, 1 a win and ½ a tie.

    Newton's method on all R tables at once. What an entrant took from itself changes nothing.
    """
    games = points + points.swapaxes(1, 2)
    taken = points.sum(axis=2)
    theta = np.zeros(taken.shape) if start is None else np.broadcast_to(start, taken.shape).copy()
    for _ in range(_MAX_STEPS):
        step = _newton_step(theta, games, taken, ridge)
        theta += step
        # Newton's error is of the order of its last step squared.
        if np.max(np.abs(step), initial=0.0) < _LAST_STEP:
            break
    return theta


def _newton_step(theta: Floats, games: Floats, taken: Floats, ridge: float) -> Floats:
    odds = np.exp(theta)
    chance = odds[:, :, None] + odds[:, None, :]
    np.divide(odds[:, :, None], chance, out=chance)
    expected = games * chance
    gradient = taken - expected.sum(axis=2) - ridge * theta
    curvature = np.subtract(1.0, chance, out=chance)
    curvature *= expected
    step = _solve(curvature, curvature.sum(axis=2) + ridge, gradient)
    longest = np.max(np.abs(step), axis=1, keepdims=True, initial=0.0)
    # Far from the summit a full step can overshoot.
    step *= np.minimum(1.0, _LONGEST_STEP / np.maximum(longest, _LONGEST_STEP))
    return step


def _solve(links: Floats, diagonal: Floats, right: Floats) -> Floats:
    """x with diagonal·x − links @ x = right, by conjugate gradients scaled with the diagonal.

    A dozen products are enough here, and unlike a direct solver they start no threads, which on a
    busy machine cost more than the whole fit.
    """
    x = np.zeros_like(right)
    residual = right.copy()
    scaled = residual / diagonal
    direction = scaled.copy()
    product = np.einsum("re,re->r", residual, scaled)
    goal = _SOLVED**2 * product
    for _ in range(4 * right.shape[1]):
        if np.all(product <= goal):
            break
        image = diagonal * direction - np.einsum("rij,rj->ri", links, direction)
        length = _ratio(product, np.einsum("re,re->r", direction, image))
        x += length * direction
        residual -= length * image
        scaled = residual / diagonal
        following = np.einsum("re,re->r", residual, scaled)
        direction = scaled + _ratio(following, product) * direction
        product = following
    return x


def _ratio(part: Floats, whole: Floats) -> Floats:
    """Column of part / whole, 0 where a table is solved already."""
    ratio: Floats = np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)[:, None]
    return ratio
