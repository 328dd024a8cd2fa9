# ruff: noqa: B905, E501, SIM300
"""Draft trees level by level, with whole-array NumPy and no heap."""

import operator

import numpy as np


def _nonneg(x):
    x = operator.index(x)
    if x < 0:
        raise ValueError("negative size")
    return x


def _ivec(x):
    given = isinstance(x, np.ndarray)
    x = np.asarray(x)
    if x.ndim != 1:
        raise ValueError("need a vector")
    if not given and x.size == 0:
        return np.zeros(0, np.int64)
    if x.dtype.kind not in "iu":
        raise TypeError("need integers")
    return x.astype(np.int64)


def _fmat(x, ndim=2):
    x = np.asarray(x)
    if x.ndim != ndim:
        raise ValueError("wrong rank")
    if x.dtype.kind != "f":
        raise TypeError("need floating-point numbers")
    return x.astype(np.float64)


def _pvec(parents):
    parents = _ivec(parents)
    if np.any(parents < -1) or np.any(parents >= np.arange(parents.size)):
        raise ValueError("parents must come before children")
    return parents


def _next_level(weights, law, budget):
    """The best children of one level: their weights, the ranks of their parents, their tokens."""
    tokens = np.argsort(-law, kind="stable")
    tokens = tokens[: min(budget, np.count_nonzero(law > -np.inf))]
    # The child (parent rank r, token rank c) has (r + 1)(c + 1) - 1 children before it in its level at least.
    fan = np.minimum(budget // np.arange(1, weights.size + 1), tokens.size)
    parent = np.repeat(np.arange(weights.size), fan)
    place = np.arange(parent.size) - np.repeat(np.cumsum(fan) - fan, fan)
    weight = weights[parent] + law[tokens[place]]
    best = np.lexsort((tokens[place], parent, -weight))[:budget]
    return weight[best], parent[best], tokens[place[best]]


def build_tree(log_q, budget):
    log_q, budget = _fmat(log_q), min(_nonneg(budget), 2**62)
    if np.isnan(log_q).any() or np.any(log_q == np.inf):
        raise ValueError("NaN or +inf in log_q")
    levels = []
    weights = np.zeros(1)
    for law in log_q:
        if budget == 0 or weights.size == 0:
            break
        weights, parent, token = _next_level(weights, law, budget)
        levels.append((weights, parent, token))
    if not levels:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    weight, parent, token = (np.concatenate(part) for part in zip(*levels))
    sizes = [len(level[0]) for level in levels]
    depth = np.repeat(np.arange(len(sizes)), sizes)
    start = np.concatenate([[0], np.cumsum(sizes)])
    # lexsort is stable and every level is in order already
    order = np.lexsort((depth, -weight))[:budget]
    final = np.full(weight.size, -1)
    final[order] = np.arange(order.size)
    above = start[np.maximum(depth[order] - 1, 0)] + parent[order]
    parents = np.where(depth[order] == 0, -1, final[above])
    return token[order].astype(np.int64), parents.astype(np.int64)


def tree_mask(parents, prefix_len):
    parents, prefix_len = _pvec(parents), _nonneg(prefix_len)
    n = parents.size
    mask = np.zeros((n + 1, prefix_len + n + 1), bool)
    mask[:, : prefix_len + 1] = True
    own = mask[:, prefix_len:]
    for i in range(n):
        own[i + 1] = own[parents[i] + 1]
        own[i + 1, i + 1] = True
    return mask


def verify_tree(tokens, parents, choices):
    tokens, parents, choices = _ivec(tokens), _pvec(parents), _ivec(choices)
    if tokens.size != parents.size or choices.size != tokens.size + 1:
        raise ValueError("lengths do not fit")
    agrees = tokens == choices[parents + 1]
    path = np.zeros(0, np.int64)
    end = -1
    while True:
        below = np.flatnonzero(agrees & (parents == end))
        if below.size == 0:
            return path, int(choices[end + 1])
        end = int(below[0])
        path = np.append(path, end)


def verify_sampled(tokens, parents, probs, uniforms):
    probs, uniforms = _fmat(probs), _fmat(uniforms, 1)
    if len(probs) != len(uniforms):
        raise ValueError("lengths do not fit")
    possible = probs > 0
    if not np.all(probs >= 0) or not np.all(possible.any(axis=1)):
        raise ValueError("not a law")
    if not np.all((0 <= uniforms) & (uniforms < 1)):
        raise ValueError("numbers outside [0, 1)")
    reached = np.cumsum(probs, axis=1) > uniforms[:, None]
    last = probs.shape[1] - 1 - np.argmax(possible[:, ::-1], axis=1)
    return verify_tree(tokens, parents, np.where(reached.any(axis=1), reached.argmax(axis=1), last))


def compact(kv, prefix_len, path):
    kv, prefix_len, path = np.asarray(kv), _nonneg(prefix_len), _ivec(path)
    if kv.ndim < 2:
        raise ValueError("kv needs two axes or more")
    nodes = kv.shape[-2] - 1 - prefix_len
    if nodes < 0 or np.any(path < 0) or np.any(path >= nodes):
        raise ValueError("outside of the cache")
    return kv[..., np.concatenate([np.arange(prefix_len + 1), path + prefix_len + 1]), :]


def generate(target, drafter, prompt, *, max_new_tokens, eos_id, budget):
    prompt = _ivec(prompt)
    if prompt.size == 0:
        raise ValueError("empty prompt")
    max_new_tokens, budget = _nonneg(max_new_tokens), _nonneg(budget)
    out = np.zeros(0, np.int64)
    passes = accepted = 0
    while out.size < max_new_tokens and not np.any(out == eos_id):
        prefix = np.concatenate([prompt, out])
        log_q = _fmat(drafter.block(prefix.tolist()))
        tokens, parents = build_tree(log_q, budget)
        law = _fmat(target.tree_log_probs(prefix.tolist(), tokens, parents))
        passes += 1
        if (
            law.shape != (tokens.size + 1, log_q.shape[1])
            or law.shape[1] == 0
            or np.isnan(law).any()
        ):
            raise ValueError("bad answer of the target")
        path, bonus = verify_tree(tokens, parents, np.argmax(law, axis=1))
        fresh = np.append(tokens[path], bonus)[: max_new_tokens - out.size]
        stop = np.flatnonzero(fresh == eos_id)
        if stop.size:
            fresh = fresh[: stop[0] + 1]
        accepted += min(path.size, fresh.size)
        out = np.append(out, fresh)
    return out.tolist(), {"target_passes": passes, "accepted": accepted}
