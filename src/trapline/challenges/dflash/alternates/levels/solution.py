"""Tree decoding level by level: the best prefixes of every depth as arrays, merged at the end."""

import operator

import numpy as np


def build_tree(log_q, budget):
    """Of each depth at most `budget` prefixes can be among the `budget` heaviest: keep those."""
    log_q = _float_matrix(log_q, "log_q")
    if not (log_q < np.inf).all():
        raise ValueError("log_q holds NaN or +inf")
    budget = _count(budget)
    above = np.zeros(1)
    levels = []
    for row in log_q:
        sums = above[:, None] + row[None, :]
        flat = np.lexsort((np.arange(sums.size), -sums.ravel()))[:budget]
        flat = flat[np.isfinite(sums.ravel()[flat])]
        ups, tokens = np.unravel_index(flat, sums.shape)
        above = sums.ravel()[flat]
        levels.append((above, ups, tokens))
    return _merged(levels, budget)


def _merged(levels, budget):
    """One order over all levels: weight, then depth; within a level the order is right already."""
    weights = np.concatenate([level[0] for level in levels] or [np.zeros(0)])
    depths = np.concatenate([np.full(len(w), d) for d, (w, _, _) in enumerate(levels)] or [[]])
    places = np.concatenate([np.arange(len(w)) for w, _, _ in levels] or [[]])
    order = np.lexsort((places, depths, -weights))[:budget]
    index = {(-1, 0): -1}
    tokens, parents = [], []
    for number, entry in enumerate(order):
        depth, place = int(depths[entry]), int(places[entry])
        _, ups, level_tokens = levels[depth]
        index[depth, place] = number
        tokens.append(int(level_tokens[place]))
        parents.append(index[depth - 1, int(ups[place])])
    return np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64)


def tree_mask(parents, prefix_len):
    parents = _tree(parents)
    prefix_len = _count(prefix_len)
    size = len(parents) + 1
    step = np.zeros((size, size), dtype=bool)
    step[np.arange(1, size), parents + 1] = True
    reach = np.eye(size, dtype=bool)
    while True:
        wider = reach | (reach.astype(int) @ step.astype(int) > 0)
        if (wider == reach).all():
            break
        reach = wider
    return np.concatenate([np.ones((size, prefix_len), dtype=bool), reach], axis=1)


def verify_tree(tokens, parents, choices):
    parents = _tree(parents)
    tokens, choices = _ints(tokens), _ints(choices)
    if len(tokens) != len(parents) or len(choices) != len(parents) + 1:
        raise ValueError("tokens, parents and choices do not fit together")
    accepted = np.zeros(len(parents) + 1, dtype=bool)
    accepted[0] = True
    for node, parent in enumerate(parents):
        accepted[node + 1] = accepted[parent + 1] and tokens[node] == choices[parent + 1]
    path = [int(row) - 1 for row in np.flatnonzero(accepted)[1:]]
    return path, int(choices[path[-1] + 1 if path else 0])


def verify_sampled(tokens, parents, probs, uniforms):
    probs = _float_matrix(probs, "probs")
    uniforms = np.asarray(uniforms)
    if uniforms.dtype.kind != "f":
        raise ValueError("uniforms must be floats")
    if not (probs >= 0).all() or not probs.any(axis=1).all() or uniforms.shape != probs.shape[:1]:
        raise ValueError("probs and uniforms do not fit together")
    if not ((uniforms >= 0) & (uniforms < 1)).all():
        raise ValueError("uniforms must lie in [0, 1)")
    totals = np.add.accumulate(probs, axis=1)
    picks = (totals <= uniforms[:, None]).sum(axis=1)
    last = probs.shape[1] - 1 - (probs[:, ::-1] > 0).argmax(axis=1)
    return verify_tree(tokens, parents, np.minimum(picks, last))


def compact(kv, prefix_len, path):
    kv = np.asarray(kv)
    if kv.dtype.kind != "f" or kv.ndim < 2:
        raise ValueError("kv must be a float array with rows and columns")
    first = _count(prefix_len) + 1
    path = _ints(path)
    drafted = kv.shape[-2] - first
    if drafted < 0 or ((path < 0) | (path >= drafted)).any():
        raise ValueError("the path leaves the cache")
    parts = [kv[..., :first, :], np.take(kv, path + first, axis=-2)]
    return np.concatenate(parts, axis=-2)


def generate(target, drafter, prompt, *, max_new_tokens, eos_id, budget):
    prompt = [operator.index(token) for token in prompt]
    if not prompt:
        raise ValueError("there is no root")
    limit, eos_id = _count(max_new_tokens), operator.index(eos_id)
    budget = _count(budget)
    committed, from_draft, passes = [], [], 0
    while len(committed) < limit and (not committed or committed[-1] != eos_id):
        prefix = [*prompt, *committed]
        log_q = np.asarray(drafter.block(list(prefix)))
        tokens, parents = build_tree(log_q, budget)
        log_probs = _float_matrix(target.tree_log_probs(prefix, tokens, parents), "log_probs")
        passes += 1
        if log_probs.shape != (len(tokens) + 1, log_q.shape[1]) or np.isnan(log_probs).any():
            raise ValueError("tree_log_probs must answer (N+1, V) numbers")
        path, bonus = verify_tree(tokens, parents, np.argmax(log_probs, axis=1))
        for token, is_draft in [*((int(tokens[n]), True) for n in path), (bonus, False)]:
            if len(committed) < limit and (not committed or committed[-1] != eos_id):
                committed.append(token)
                from_draft.append(is_draft)
    return committed, {"target_passes": passes, "accepted": sum(from_draft)}


def _count(value):
    value = operator.index(value)
    if value < 0:
        raise ValueError("a count must not be negative")
    return value


def _float_matrix(values, name):
    values = np.asarray(values)
    if values.ndim != 2 or values.dtype.kind != "f":
        raise ValueError(f"{name} must be a matrix of floats")
    return values.astype(float)


def _ints(values):
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError("a list of integers is needed")
    return array.astype(np.int64)


def _tree(parents):
    parents = _ints(parents)
    if ((parents < -1) | (parents >= np.arange(len(parents)))).any():
        raise ValueError("a parent must come before its children")
    return parents
