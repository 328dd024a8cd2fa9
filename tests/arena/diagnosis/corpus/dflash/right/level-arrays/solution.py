"""Speculative decoding with draft trees, level by level on whole arrays."""

from numbers import Integral

import numpy as np


def _natural(n, what):
    if isinstance(n, bool) or not isinstance(n, Integral):
        raise TypeError(f"{what}: an integer is needed")
    if n < 0:
        raise ValueError(f"{what}: must be 0 or more")
    return int(n)


def _real(a, ndim, what):
    a = np.asarray(a)
    if a.dtype.kind != "f":
        raise TypeError(f"{what}: floating-point numbers are needed")
    if a.ndim != ndim:
        raise ValueError(f"{what}: {ndim} axes are needed")
    return a


def _whole(a, what):
    if isinstance(a, (list, tuple)) and len(a) == 0:
        a = np.zeros(0, np.int64)
    a = np.asarray(a)
    if a.dtype.kind not in "iu":
        raise TypeError(f"{what}: integers are needed")
    if a.ndim != 1:
        raise ValueError(f"{what}: one axis is needed")
    return a.astype(np.int64)


def _links(parents):
    p = _whole(parents, "parents")
    if ((p < -1) | (p >= np.arange(p.size))).any():
        raise ValueError("parents: every parent comes before its children")
    return p


def _best(row, k):
    """Tokens of the k largest finite entries, falling, on a tie the lower token first."""
    if k < row.size:
        edge = np.partition(row, row.size - k)[row.size - k]
        sure = np.flatnonzero(row > edge)
        tied = np.flatnonzero(row == edge)[: k - sure.size]
        chosen = np.sort(np.concatenate((sure, tied)))
    else:
        chosen = np.arange(row.size)
    chosen = chosen[row[chosen] > -np.inf]
    return chosen[np.argsort(-row[chosen], kind="stable")]


def build_tree(log_q, budget):
    """The `budget` heaviest prefixes of a draft log_q (L, V), as (tokens, parents), int64 (N,)."""
    q = _real(log_q, 2, "log_q")
    k = _natural(budget, "budget")
    if (np.isnan(q) | np.isposinf(q)).any():
        raise ValueError("log_q: NaN or +inf")
    weight, token, parent = [], [], []
    above = np.zeros(1)  # weights of the last level, falling
    offset, size = -1, 0  # number of its first node; how many nodes there are by now
    for row in q if k and q.shape[1] else ():
        best = _best(row, k)
        gain = row[best].astype(np.float64)
        # the j-th child of the i-th parent has (i+1)(j+1)-1 others of this level before it
        width = np.minimum(k // np.arange(1, above.size + 1), best.size)
        up = np.repeat(np.arange(above.size), width)
        rank = np.arange(up.size) - np.repeat(np.cumsum(width) - width, width)
        total = above[up] + gain[rank]
        order = np.lexsort((best[rank], up, -total))[:k]
        if order.size == 0:
            break
        weight.append(total[order])
        token.append(best[rank[order]])
        parent.append(up[order] + offset)
        above, offset, size = total[order], size, size + order.size
    if not weight:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    final = np.argsort(-np.concatenate(weight), kind="stable")[:k]
    place = np.full(size + 1, -1, np.int64)  # the last entry is the root's, index -1
    place[final] = np.arange(final.size)
    tokens = np.concatenate(token)[final].astype(np.int64)
    return tokens, place[np.concatenate(parent)[final]]


def tree_mask(parents, prefix_len):
    """Who may look at whom, bool (N+1, prefix_len+N+1)."""
    p = _links(parents)
    m = _natural(prefix_len, "prefix_len")
    n = p.size
    mask = np.zeros((n + 1, m + n + 1), bool)
    mask[:, : m + 1] = True
    who, at = np.arange(n), np.arange(n)
    while who.size:
        mask[who + 1, m + 1 + at] = True
        at = p[at]
        who, at = who[at >= 0], at[at >= 0]
    return mask


def _descend(t, p, picks):
    path, end = [], -1
    for i in np.flatnonzero(t == picks[p + 1]).tolist():
        if p[i] == end:
            path.append(i)
            end = i
    return path, int(picks[end + 1])


def _tree(tokens, parents):
    t, p = _whole(tokens, "tokens"), _links(parents)
    if t.size != p.size:
        raise ValueError("tokens and parents: different lengths")
    return t, p


def verify_tree(tokens, parents, choices):
    """The accepted (path, bonus) given the target's picks (N+1,) at the root and the nodes."""
    t, p = _tree(tokens, parents)
    c = _whole(choices, "choices")
    if c.size != t.size + 1:
        raise ValueError("choices: N+1 are needed")
    return _descend(t, p, c)


def verify_sampled(tokens, parents, probs, uniforms):
    """As verify_tree, with the picks sampled from probs (N+1, V) by the numbers uniforms (N+1,)."""
    t, p = _tree(tokens, parents)
    law = _real(probs, 2, "probs").astype(np.float64)
    u = _real(uniforms, 1, "uniforms")
    if not len(law) == u.size == t.size + 1:
        raise ValueError("probs, uniforms: N+1 rows are needed")
    if not np.all((law >= 0) & (law < np.inf)):
        raise ValueError("probs: negative, NaN or infinite")
    possible = law > 0
    if not possible.any(1).all():
        raise ValueError("probs: a law without a possible token")
    if not np.all((u >= 0) & (u < 1)):
        raise ValueError("uniforms: outside [0, 1)")
    over = np.cumsum(law, axis=1) > u[:, None]
    last = law.shape[1] - 1 - possible[:, ::-1].argmax(1)
    picks = np.where(over.any(1), over.argmax(1), last)
    return _descend(t, p, picks)


def compact(kv, prefix_len, path):
    """The committed rows of a cache kv (..., prefix_len+N+1, D)."""
    kv = np.asarray(kv)
    m = _natural(prefix_len, "prefix_len")
    nodes = _whole(path, "path")
    if kv.ndim < 2 or kv.shape[-2] < m + 1:
        raise ValueError("kv: (..., prefix_len+N+1, D) is needed")
    if ((nodes < 0) | (nodes >= kv.shape[-2] - m - 1)).any():
        raise ValueError("path: leaves the cache")
    rows = np.concatenate((np.arange(m + 1), nodes + m + 1))
    return np.take(kv, rows, axis=-2)


def generate(target, drafter, prompt, *, max_new_tokens, eos_id, budget):
    """The target's greedy continuation of the prompt, as (tokens, stats)."""
    left = _natural(max_new_tokens, "max_new_tokens")
    budget = _natural(budget, "budget")
    prompt = _whole(prompt, "prompt").tolist()
    if not prompt:
        raise ValueError("prompt: empty")
    out, passes, accepted = [], 0, 0
    while left > 0:
        q = _real(drafter.block(prompt + out), 2, "log_q")
        tokens, parents = build_tree(q, budget)
        logp = _real(target.tree_log_probs(prompt + out, tokens, parents), 2, "target")
        passes += 1
        if logp.shape != (tokens.size + 1, q.shape[1]) or not logp.size:
            raise ValueError("target: (N+1, V) is needed")
        if np.isnan(logp).any():
            raise ValueError("target: NaN")
        path, bonus = verify_tree(tokens, parents, np.argmax(logp, axis=1))
        new = [*tokens[path].tolist(), bonus][:left]
        if eos_id in new:
            new = new[: new.index(eos_id) + 1]
            left = len(new)
        left -= len(new)
        accepted += min(len(path), len(new))
        out += new
    return out, {"target_passes": passes, "accepted": accepted}
