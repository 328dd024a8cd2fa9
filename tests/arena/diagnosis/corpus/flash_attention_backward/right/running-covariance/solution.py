"""Softmax attention and its gradients as running moments of the attention weights.

For one query the weights p are a distribution over the keys.  The output is a mean under it, and the gradient of the
query is a covariance:

    out = E[v]        dq = scale * Cov(g, k) = scale * E[(g - E[g]) k]        with g = dout . v

Both are updated tile by tile; when E[g] moves, the covariance met so far is centred anew.  The sweep over the keys
leaves peak, mass and E[g] of every query behind, and these are all that the gradients of the keys and values need.
Queries that see no key come first in their sequence.  They are cut off before any work starts, so every query that
is left sees at least key 0.
"""

from collections import namedtuple

import numpy as np

Problem = namedtuple("Problem", "queries keys values reach tile blind")
Weights = namedtuple("Weights", "peak mass")


def flash_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, tile: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of q (B,H,T,D) over k, v (B,G,S,D): out (B,H,T,D) and its log-sum-exp (B,H,T)."""
    q, k, v = (np.asarray(array) for array in (q, k, v))
    check_problem(q, k, v, tile)
    problem = make_problem(q, k, v, causal, tile)
    out = np.zeros(q.shape, dtype=q.dtype)
    lse = np.full(q.shape[:-1], -np.inf, dtype=q.dtype)
    grouped_out, grouped_lse = by_group(out, k.shape[1]), by_group(lse, k.shape[1])
    with np.errstate(over="ignore", under="ignore"):
        for rows in stretches(problem.queries.shape[-2], problem.tile):
            weights, mean_value = mean_over_keys(problem, rows)
            place = slice(problem.blind + rows.start, problem.blind + rows.stop)
            grouped_out[..., place, :] = mean_value
            grouped_lse[..., place] = (weights.peak + np.log(weights.mass))[..., 0]
    return out, lse


def flash_attention_backward(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    *,
    causal: bool = False,
    tile: int = 64,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients dq (B,H,T,D), dk and dv (B,G,S,D) of flash_attention's out along dout."""
    dout, q, k, v, out, lse = (np.asarray(array) for array in (dout, q, k, v, out, lse))
    check_problem(q, k, v, tile)
    check_companion("dout", dout, q.shape)
    check_companion("out", out, q.shape)
    check_companion("lse", lse, q.shape[:-1])

    problem = make_problem(q, k, v, causal, tile)
    slopes = by_group(dout, k.shape[1])[..., problem.blind :, :]
    scale = q.shape[-1] ** -0.5
    dq, dk, dv = (np.zeros(array.shape, dtype=q.dtype) for array in (q, k, v))
    grouped_dq = by_group(dq, k.shape[1])[..., problem.blind :, :]
    with np.errstate(over="ignore", under="ignore"):
        for rows in stretches(problem.queries.shape[-2], problem.tile):
            slope = slopes[..., rows, :]
            weights, mean_gain, covariance = covariance_over_keys(problem, rows, slope)
            grouped_dq[..., rows, :] = scale * covariance
            scatter_to_keys(problem, rows, slope, weights, mean_gain, dk, dv)
    return dq, dk, dv


def check_problem(q, k, v, tile):
    """Refuse what is no attention problem."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 4:
            raise ValueError(f"{name} needs four axes, not {array.ndim}")
        if array.dtype.kind != "f":
            raise TypeError(f"{name} must be of a real floating dtype, not {array.dtype}")
    if k.shape != v.shape:
        raise ValueError(f"k and v differ in shape: {k.shape} and {v.shape}")
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(f"q and k differ in batch or width: {q.shape} and {k.shape}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(f"{q.shape[1]} query heads do not divide into {k.shape[1]} groups")
    if tile < 1:
        raise ValueError(f"tile must be at least 1, not {tile}")


def check_companion(name, array, shape):
    """Refuse an array that does not belong to queries of this shape."""
    if array.shape != shape:
        raise ValueError(f"{name} must have the shape {shape}, not {array.shape}")
    if array.dtype.kind != "f":
        raise TypeError(f"{name} must be of a real floating dtype, not {array.dtype}")


def by_group(array, groups):
    """Split the head axis into (groups, heads of a group)."""
    batch, heads, *rest = array.shape
    return array.reshape(batch, groups, heads // groups, *rest)


def make_problem(q, k, v, causal, tile):
    """Scale the queries that see something, split their heads by group, and note the last key that each one sees."""
    queries, keys = q.shape[2], k.shape[2]
    if causal:
        blind = max(queries - keys, 0)
        reach = np.arange(blind, queries) + (keys - queries)
    else:
        blind = 0 if keys else queries
        reach = np.full(queries - blind, keys - 1)
    return Problem(
        queries=by_group(q, k.shape[1])[..., blind:, :] * q.shape[-1] ** -0.5,
        keys=k[:, :, None],
        values=v[:, :, None],
        reach=reach,
        tile=min(tile, max(queries, keys, 1)),
        blind=blind,
    )


def stretches(length, tile):
    """Cut the positions 0 .. length - 1 into slices of at most `tile`."""
    for start in range(0, length, tile):
        yield slice(start, min(start + tile, length))


def flipped(array):
    """Swap the last two axes."""
    return array.swapaxes(-1, -2)


def visible_tiles(problem, rows):
    """Yield (columns, scores) for every tile of keys that some query of `rows` sees, from the left to the right."""
    reach = problem.reach[rows, None]
    for columns in stretches(int(reach[-1, 0]) + 1, problem.tile):
        scores = problem.queries[..., rows, :] @ flipped(problem.keys[..., columns, :])
        scores[..., np.arange(columns.start, columns.stop) > reach] = -np.inf
        yield columns, scores


def running_shares(problem, rows):
    """Yield (columns, weights, kept, shares) for every visible tile.

    `shares` are the weights of the tile's keys among all keys up to there, `kept` is what the earlier ones hold.
    """
    peak, mass = -np.inf, 0
    for columns, scores in visible_tiles(problem, rows):
        new_peak = np.maximum(peak, scores.max(axis=-1, keepdims=True))
        shares = np.exp(scores - new_peak)
        earlier = mass * np.exp(peak - new_peak)
        peak, mass = new_peak, earlier + shares.sum(axis=-1, keepdims=True)
        shares /= mass
        yield columns, Weights(peak, mass), earlier / mass, shares


def mean_over_keys(problem, rows):
    """The weights of some queries and their mean value."""
    mean_value = 0
    for columns, weights, kept, shares in running_shares(problem, rows):
        mean_value = kept * mean_value + shares @ problem.values[..., columns, :]
    return weights, mean_value


def covariance_over_keys(problem, rows, slope):
    """The weights of some queries, their mean gain, and their covariance of gain and key."""
    mean_gain, mean_key, covariance = 0, 0, 0
    for columns, weights, kept, shares in running_shares(problem, rows):
        key = problem.keys[..., columns, :]
        gain = slope @ flipped(problem.values[..., columns, :])
        old_mean_gain = mean_gain
        mean_gain = kept * old_mean_gain + (shares * gain).sum(axis=-1, keepdims=True)
        recentred = covariance + (old_mean_gain - mean_gain) * mean_key
        covariance = kept * recentred + (shares * (gain - mean_gain)) @ key
        mean_key = kept * mean_key + shares @ key
    return weights, mean_gain, covariance


def scatter_to_keys(problem, rows, slope, weights, mean_gain, dk, dv):
    """Add what some queries contribute to the gradients of all keys and values they see."""
    for columns, scores in visible_tiles(problem, rows):
        shares = np.exp(np.minimum(scores - weights.peak, 0)) / weights.mass
        gain = slope @ flipped(problem.values[..., columns, :])
        pull = shares * (gain - mean_gain)
        dv[..., columns, :] += (flipped(shares) @ slope).sum(axis=2)
        dk[..., columns, :] += (flipped(pull) @ problem.queries[..., rows, :]).sum(axis=2)
