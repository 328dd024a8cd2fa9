"""Speculative decoding with draft trees, built from lanes of waiting children.

Nodes are emitted heaviest first, so the children of one rank at one depth become available in the order of
their parents: a lane (depth, rank) is a first-in first-out line, described by one counter. Only lanes whose counter
is behind that of the next better rank can hold the heaviest waiting child; these are the corners.
"""

import operator

import numpy as np


def _count(value, name):
    """`value` as a non-negative Python int."""
    number = operator.index(value)
    if number < 0:
        raise ValueError(f"{name} must not be negative")
    return number


def _floats(values, rank, name):
    array = np.asarray(values)
    if array.dtype.kind != "f":
        raise TypeError(f"{name} must be floating-point")
    if array.ndim != rank:
        raise ValueError(f"{name} must have {rank} axes")
    return array.astype(np.float64)


def _integers(values, name):
    array = np.asarray(values)
    if array.size == 0 and not isinstance(values, np.ndarray):
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers")
    if array.ndim != 1:
        raise ValueError(f"{name} must have one axis")
    return array.astype(np.int64)


def _parents(values):
    parents = _integers(values, "parents")
    if np.any(parents < -1) or np.any(parents >= np.arange(parents.size)):
        raise ValueError("a parent must come before its children")
    return parents


def _tree(tokens, parents):
    tokens, parents = _integers(tokens, "tokens"), _parents(parents)
    if tokens.shape != parents.shape:
        raise ValueError("tokens and parents differ in length")
    return tokens, parents


class _Depth:
    """One depth of the growing tree: its law from the likeliest token down, its lanes and its emitted nodes."""

    def __init__(self, law, width):
        order = np.argsort(-law, kind="stable")[:width]
        order = order[law[order] > -np.inf]
        self.ranked_tokens = order.tolist()
        self.ranked_logs = law[order].tolist()
        self.served = [0] * len(self.ranked_tokens)
        self.nodes = []
        self.weights = []

    def is_corner(self, rank, parents_ready):
        """Whether the lane's first waiting child exists and is no later sibling of another waiting child."""
        ahead = self.served[rank - 1] if rank else parents_ready
        return self.served[rank] < ahead


class _Lanes:
    """The heads of all corner lanes, by (depth, rank)."""

    def __init__(self, laws, width):
        root = _Depth(np.empty(0), 0)
        root.nodes.append(-1)
        root.weights.append(0.0)
        self.depths = [root] + [_Depth(law, width) for law in laws]
        self.heads = {}
        self.refresh(1, 0)

    def refresh(self, depth, rank):
        """Set or clear the head of a lane after something before it has moved."""
        if depth >= len(self.depths) or rank >= len(self.depths[depth].served):
            return
        above, here = self.depths[depth - 1], self.depths[depth]
        if not here.is_corner(rank, len(above.nodes)):
            self.heads.pop((depth, rank), None)
            return
        first = here.served[rank]
        weight = above.weights[first] + here.ranked_logs[rank]
        self.heads[depth, rank] = (-weight, depth, above.nodes[first], here.ranked_tokens[rank])

    def emit(self, index):
        """Take the first of all heads as node `index`; answers its token and parent."""
        depth, rank = min(self.heads, key=self.heads.get)
        cost, _, parent, token = self.heads[depth, rank]
        here = self.depths[depth]
        here.served[rank] += 1
        here.nodes.append(index)
        here.weights.append(-cost)
        self.refresh(depth, rank)
        self.refresh(depth, rank + 1)
        self.refresh(depth + 1, 0)
        return token, parent


def build_tree(log_q, budget):
    """The `budget` heaviest prefixes of a draft log_q (L, V), as (tokens, parents), int64 (N,)."""
    budget = _count(budget, "budget")
    laws = _floats(log_q, 2, "log_q")
    if np.any(np.isnan(laws)) or np.any(laws == np.inf):
        raise ValueError("log_q must not hold NaN or +inf")
    lanes = _Lanes(laws, budget)
    emitted = []
    while lanes.heads and len(emitted) < budget:
        emitted.append(lanes.emit(len(emitted)))
    pairs = np.array(emitted, dtype=np.int64).reshape(-1, 2)
    return pairs[:, 0].copy(), pairs[:, 1].copy()


def _climb(parents):
    """All nodes climb to the root together: yields (climbers, where they stand) step by step."""
    climbers = np.arange(parents.size)
    places = climbers
    while climbers.size:
        yield climbers, places
        above = parents[places]
        climbers, places = climbers[above >= 0], above[above >= 0]


def tree_mask(parents, prefix_len):
    """Who may look at whom, bool (N+1, prefix_len+N+1)."""
    parents = _parents(parents)
    shared = _count(prefix_len, "prefix_len") + 1
    mask = np.zeros((parents.size + 1, shared + parents.size), dtype=bool)
    mask[:, :shared] = True
    for climbers, places in _climb(parents):
        mask[climbers + 1, shared + places] = True
    return mask


def _agreeing_branch(tokens, parents, choices):
    """A node survives if it and all above it were picked; the survivors are one branch, in order."""
    disagrees = tokens != choices[parents + 1]
    lost = np.zeros(tokens.size, dtype=bool)
    for climbers, places in _climb(parents):
        lost[climbers] |= disagrees[places]
    path = np.flatnonzero(~lost).tolist()
    last_row = path[-1] + 1 if path else 0
    return path, int(choices[last_row])


def verify_tree(tokens, parents, choices):
    """The accepted (path, bonus) given the target's picks (N+1,) at the root and the nodes."""
    tokens, parents = _tree(tokens, parents)
    choices = _integers(choices, "choices")
    if choices.size != tokens.size + 1:
        raise ValueError("choices must have one entry more than the tree has nodes")
    return _agreeing_branch(tokens, parents, choices)


def _sampled_picks(laws, numbers):
    """For every row the first token whose cumulative probability exceeds its number."""
    exceeds = np.cumsum(laws, axis=1) > numbers[:, None]
    last_possible = laws.shape[1] - 1 - np.argmax(laws[:, ::-1] > 0, axis=1)
    return np.where(exceeds.any(axis=1), np.argmax(exceeds, axis=1), last_possible)


def verify_sampled(tokens, parents, probs, uniforms):
    """As verify_tree, with the picks sampled from probs (N+1, V) by the numbers uniforms (N+1,)."""
    tokens, parents = _tree(tokens, parents)
    laws, numbers = _floats(probs, 2, "probs"), _floats(uniforms, 1, "uniforms")
    if not laws.shape[0] == numbers.size == tokens.size + 1:
        raise ValueError("probs and uniforms must have one row more than the tree has nodes")
    if not np.all(laws >= 0):
        raise ValueError("probabilities must be numbers, not negative")
    if not np.all((laws > 0).any(axis=1)):
        raise ValueError("a law without any possible token")
    if not np.all((numbers >= 0) & (numbers < 1)):
        raise ValueError("uniforms must lie in [0, 1)")
    return _agreeing_branch(tokens, parents, _sampled_picks(laws, numbers))


def compact(kv, prefix_len, path):
    """The committed rows of a cache kv (..., prefix_len+N+1, D)."""
    cache = np.asarray(kv)
    shared = _count(prefix_len, "prefix_len") + 1
    path = _integers(path, "path")
    if cache.ndim < 2:
        raise ValueError("kv must have at least two axes")
    nodes = cache.shape[-2] - shared
    if nodes < 0:
        raise ValueError("kv is shorter than the prefix and the root")
    if np.any(path < 0) or np.any(path >= nodes):
        raise ValueError("the path leaves the cache")
    rows = np.concatenate([np.arange(shared), shared + path])
    return np.take(cache, rows, axis=-2)


class _Transcript:
    """What has been generated so far and when it is finished."""

    def __init__(self, limit, eos_id):
        self.limit = limit
        self.eos_id = eos_id
        self.tokens = []
        self.accepted = 0

    @property
    def finished(self):
        return len(self.tokens) >= self.limit or (bool(self.tokens) and self.tokens[-1] == self.eos_id)

    def commit(self, drafted, bonus):
        """Add the drafted tokens and the bonus, as far as the text goes on."""
        for token in drafted:
            if self.finished:
                return
            self.tokens.append(token)
            self.accepted += 1
        if not self.finished:
            self.tokens.append(bonus)


def _greedy_picks(answer, shape):
    """The likeliest token of each row, the lower one on a tie."""
    logs = _floats(answer, 2, "the target's answer")
    if logs.shape != shape or shape[1] == 0:
        raise ValueError("the target's answer must be (N+1, V) with the V of the draft")
    if np.any(np.isnan(logs)):
        raise ValueError("NaN in the target's answer")
    return np.argmax(logs, axis=1)


def generate(target, drafter, prompt, *, max_new_tokens, eos_id, budget):
    """The target's greedy continuation of the prompt, as (tokens, stats)."""
    budget = _count(budget, "budget")
    start = [operator.index(token) for token in prompt]
    if not start:
        raise ValueError("the prompt is empty")
    transcript = _Transcript(_count(max_new_tokens, "max_new_tokens"), eos_id)
    passes = 0
    while not transcript.finished:
        draft = np.asarray(drafter.block(start + transcript.tokens))
        tokens, parents = build_tree(draft, budget)
        answer = target.tree_log_probs(start + transcript.tokens, tokens.copy(), parents.copy())
        passes += 1
        picks = _greedy_picks(answer, (tokens.size + 1, draft.shape[1]))
        path, bonus = _agreeing_branch(tokens, parents, picks)
        transcript.commit(tokens[path].tolist(), bonus)
    return transcript.tokens, {"target_passes": passes, "accepted": transcript.accepted}
