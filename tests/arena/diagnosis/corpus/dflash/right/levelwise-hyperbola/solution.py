"""Speculative decoding with draft trees. The contract is in prompt.md.

The tree is built level by level with array operations, not with a heap: in a level, the prefix made of
the i-th best parent and the j-th best token (from 0) has (i+1)(j+1)-1 prefixes before it, so only the pairs
with (i+1)(j+1) <= budget can be in the tree.
"""

import operator

import numpy as np

MAX_COUNT = 2**62


def build_tree(log_q, budget):
    """The `budget` heaviest prefixes of a draft log_q (L, V), as (tokens, parents), int64 (N,)."""
    log_q = float_array(log_q, "log_q", 2)
    budget = min(count(budget, "budget"), MAX_COUNT)
    if np.isnan(log_q).any() or np.isposinf(log_q).any():
        raise ValueError("log_q must not hold NaN or +inf")

    levels = []  # for every depth (weights, tokens, parent ranks in the level above), best first
    weights = np.zeros(1)  # the root
    heaviest = np.zeros(0)  # the weights of the best prefixes so far, at most `budget` of them
    cutoff = -np.inf  # deeper prefixes must be heavier than this
    for row in log_q if budget else ():
        weights, tokens, parent_ranks = next_level(weights, row.astype(np.float64), budget, cutoff)
        if len(weights) == 0:
            break
        levels.append((weights, tokens, parent_ranks))
        heaviest = largest(np.concatenate([heaviest, weights]), budget)
        if len(heaviest) == budget:
            cutoff = heaviest.min()
    return join_levels(levels, budget)


def next_level(parent_weights, row, budget, cutoff):
    """The heaviest prefixes one deeper than their parents, in the order of the contract."""
    ranked = best_tokens(row, budget)
    n_parents = min(len(parent_weights), budget)
    limits = np.minimum(budget // np.arange(1, n_parents + 1), len(ranked))
    parents = np.repeat(np.arange(n_parents), limits)
    places = np.arange(len(parents)) - np.repeat(np.cumsum(limits) - limits, limits)
    with np.errstate(over="ignore"):
        weights = parent_weights[parents] + row[ranked][places]
    heavy = np.flatnonzero(weights > cutoff)
    weights, parents, tokens = weights[heavy], parents[heavy], ranked[places[heavy]]
    order = np.lexsort((tokens, parents, -weights))[:budget]
    return weights[order], tokens[order], parents[order]


def best_tokens(row, most):
    """The at most `most` likeliest possible tokens, likeliest first, between equals the lower first."""
    if most < len(row):
        bound = np.partition(row, len(row) - most)[len(row) - most]
        above = np.flatnonzero(row > bound)
        equal = np.flatnonzero(row == bound)[: most - len(above)]
        tokens = np.sort(np.concatenate([above, equal]))
    else:
        tokens = np.arange(len(row))
    tokens = tokens[row[tokens] > -np.inf]
    return tokens[np.argsort(-row[tokens], kind="stable")]


def largest(values, most):
    """The at most `most` largest values, in any order."""
    if len(values) <= most:
        return values
    return np.partition(values, len(values) - most)[len(values) - most :]


def join_levels(levels, budget):
    """One tree of all levels, the heaviest prefix first, as (tokens, parents)."""
    if not levels:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    sizes = [len(level[0]) for level in levels]
    starts = np.cumsum(sizes) - sizes
    weights = np.concatenate([level[0] for level in levels])
    tokens = np.concatenate([level[1] for level in levels])
    above = np.concatenate(
        [np.full(sizes[0], -1), *(start + level[2] for start, level in zip(starts, levels[1:]))]
    )
    # levels stand in order of depth and are sorted, so a stable sort breaks all ties correctly
    chosen = np.argsort(-weights, kind="stable")[:budget]
    index = np.full(len(weights) + 1, -1, np.int64)  # its last entry is that of the root
    index[chosen] = np.arange(len(chosen))
    return tokens[chosen].astype(np.int64), index[above[chosen]]


def tree_mask(parents, prefix_len):
    """Who may look at whom, bool (N+1, prefix_len+N+1)."""
    prefix_len = count(prefix_len, "prefix_len")
    parents = parent_array(parents)
    size = len(parents)
    mask = np.zeros((size + 1, prefix_len + size + 1), dtype=bool)
    mask[0, : prefix_len + 1] = True
    rows_above = parents + 1
    for node in range(size):
        mask[node + 1] = mask[rows_above[node]]
        mask[node + 1, prefix_len + 1 + node] = True
    return mask


def verify_tree(tokens, parents, choices):
    """The accepted (path, bonus) given the target's picks (N+1,) at the root and the nodes."""
    tokens, parents = tree_arrays(tokens, parents)
    choices = int_array(choices, "choices")
    if len(choices) != len(tokens) + 1:
        raise ValueError(f"{len(tokens)} nodes need {len(tokens) + 1} choices, not {len(choices)}")
    return follow(tokens.tolist(), parents.tolist(), choices.tolist())


def follow(tokens, parents, choices):
    """Walks down the tree along the picks: (path, bonus)."""
    path = []
    current = -1
    for node, (token, parent) in enumerate(zip(tokens, parents)):
        if parent == current and token == choices[current + 1]:
            path.append(node)
            current = node
    return path, choices[current + 1]


def verify_sampled(tokens, parents, probs, uniforms):
    """As verify_tree, with the picks sampled from probs (N+1, V) by the numbers uniforms (N+1,)."""
    tokens, parents = tree_arrays(tokens, parents)
    probs = float_array(probs, "probs", 2)
    uniforms = float_array(uniforms, "uniforms", 1)
    if not len(probs) == len(uniforms) == len(tokens) + 1:
        raise ValueError(f"{len(tokens)} nodes, {len(probs)} laws and {len(uniforms)} numbers")
    if not (probs >= 0).all() or np.isinf(probs).any():
        raise ValueError("probabilities must be finite and not negative")
    if not (probs > 0).any(axis=1).all():
        raise ValueError("a law has no possible token")
    if not ((uniforms >= 0) & (uniforms < 1)).all():
        raise ValueError("uniforms must be in [0, 1)")
    choices = [sample(law, number) for law, number in zip(probs, uniforms)]
    return follow(tokens.tolist(), parents.tolist(), choices)


def sample(law, number):
    """The first token whose cumulative probability exceeds the number, else the last possible one."""
    cumulative = np.cumsum(law, dtype=np.float64)
    token = int(np.searchsorted(cumulative, np.float64(number), side="right"))
    last_possible = int(np.flatnonzero(law)[-1])
    return min(token, last_possible)


def compact(kv, prefix_len, path):
    """The committed rows of a cache kv (..., prefix_len+N+1, D)."""
    kv = np.asarray(kv)
    prefix_len = count(prefix_len, "prefix_len")
    if kv.ndim < 2:
        raise ValueError("kv must have at least 2 axes")
    path = int_array(path, "path", empty_is_fine=True)
    size = kv.shape[-2] - prefix_len - 1
    if size < 0:
        raise ValueError(f"a cache of {kv.shape[-2]} rows has no prefix of {prefix_len} and a root")
    if len(path) and (path.min() < 0 or path.max() >= size):
        raise ValueError(f"the path leaves the {size} nodes of the cache")
    rows = np.concatenate([np.arange(prefix_len + 1), prefix_len + 1 + path])
    return kv[..., rows, :]


def generate(target, drafter, prompt, *, max_new_tokens, eos_id, budget):
    """The target's greedy continuation of the prompt, as (tokens, stats)."""
    max_new_tokens = count(max_new_tokens, "max_new_tokens")
    budget = count(budget, "budget")
    if len(prompt) == 0:
        raise ValueError("the prompt is empty")
    prompt = [operator.index(token) for token in prompt]
    generated = []
    passes = accepted = 0
    finished = False
    while not finished and len(generated) < max_new_tokens:
        prefix = prompt + generated
        log_q = drafter.block(list(prefix))
        tokens, parents = build_tree(log_q, budget)
        choices = target_choices(target, prefix, tokens, parents, log_q.shape[1])
        passes += 1
        path, bonus = follow(tokens.tolist(), parents.tolist(), choices)
        new = [int(tokens[node]) for node in path] + [bonus]
        new = new[: max_new_tokens - len(generated)]
        if eos_id in new:
            new = new[: new.index(eos_id) + 1]
            finished = True
        accepted += min(len(path), len(new))
        generated += new
    return generated, {"target_passes": passes, "accepted": accepted}


def target_choices(target, prefix, tokens, parents, vocabulary):
    """One pass of the target: its most likely token after the root and after each node."""
    size = len(tokens)
    answer = float_array(target.tree_log_probs(prefix, tokens.copy(), parents.copy()), "answer", 2)
    if answer.shape != (size + 1, vocabulary) or vocabulary == 0:
        raise ValueError(f"the target's answer to {size} nodes has the shape {answer.shape}")
    if np.isnan(answer).any():
        raise ValueError("the target's answer holds NaN")
    return answer.argmax(axis=1).tolist()


def count(value, name):
    """A non-negative int; a fraction is a TypeError."""
    value = operator.index(value)
    if value < 0:
        raise ValueError(f"{name} must not be negative")
    return value


def float_array(array, name, rank):
    """The array, if it is a floating-point one of this rank."""
    array = np.asarray(array)
    if array.dtype.kind != "f":
        raise TypeError(f"{name} must be floating-point, not {array.dtype}")
    if array.ndim != rank:
        raise ValueError(f"{name} must have {rank} axes, not {array.ndim}")
    return array


def int_array(array, name, *, empty_is_fine=False):
    """The integer vector as int64; an empty list, which has no dtype, is one too."""
    empty_is_fine = empty_is_fine or not isinstance(array, np.ndarray)
    array = np.asarray(array)
    if array.ndim != 1:
        raise ValueError(f"{name} must have 1 axis, not {array.ndim}")
    if array.dtype.kind not in "iu" and not (empty_is_fine and array.size == 0):
        raise TypeError(f"{name} must be integers, not {array.dtype}")
    if array.dtype.kind == "u" and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} exceeds 64-bit integers")
    return array.astype(np.int64)


def parent_array(parents):
    """The parents as int64, every one of them before its children."""
    parents = int_array(parents, "parents")
    if (parents < -1).any() or (parents >= np.arange(len(parents))).any():
        raise ValueError("a parent must be -1 or come before its children")
    return parents


def tree_arrays(tokens, parents):
    """Tokens and parents of a tree, as int64 of one length."""
    tokens, parents = int_array(tokens, "tokens"), parent_array(parents)
    if len(tokens) != len(parents):
        raise ValueError(f"{len(tokens)} tokens and {len(parents)} parents")
    return tokens, parents
