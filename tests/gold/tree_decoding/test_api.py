"""The library's tree decoding against its oracle, and what it refuses."""

import numpy as np
import pytest

from trapline.gold import build_tree, tree_mask, verify_tree
from trapline.gold.tree_decoding import numpy_tree, oracle
from trapline.gold.tree_decoding.api import compact, verify_sampled


def random_tree(rng, nodes, vocabulary):
    edges = {}
    while len(edges) < nodes:
        edge = int(rng.integers(-1, len(edges))), int(rng.integers(vocabulary))
        edges.setdefault(edge, None)
    parents, tokens = zip(*edges, strict=True) if edges else ((), ())
    return np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64)


@pytest.mark.parametrize("levels", [3, 60])
@pytest.mark.parametrize("seed", range(5))
def test_trees_equal_the_oracle(seed, levels):
    rng = np.random.default_rng(seed)
    log_q = -rng.integers(1, levels, (int(rng.integers(1, 4)), 5)) / 8.0
    log_q[rng.random(log_q.shape) < 0.2] = -np.inf
    for budget in (1, 7, 30):
        got = build_tree(log_q.astype(np.float32), budget)
        want = oracle.build_tree(log_q, budget)
        np.testing.assert_array_equal(got.tokens, want[0])
        np.testing.assert_array_equal(got.parents, want[1])


def test_large_tree_contains_the_heaviest_nodes():
    log_q = np.log(np.random.default_rng(0).dirichlet(np.full(200, 0.1), size=6) + 1e-12)
    tokens, parents = build_tree(log_q, 300)
    depth = numpy_tree.depths(parents)
    weights = np.zeros(301)
    for node in range(300):
        weights[node + 1] = weights[parents[node] + 1] + log_q[depth[node + 1] - 1, tokens[node]]
    assert (np.diff(weights[1:]) <= 1e-12).all()
    taken = set(zip(parents.tolist(), tokens.tolist(), strict=True))
    for node in range(-1, 300):
        if depth[node + 1] < 6:
            row = weights[node + 1] + log_q[depth[node + 1]]
            left = [row[token] for token in range(200) if (node, token) not in taken]
            assert max(left) <= weights[-1] + 1e-12


@pytest.mark.parametrize("seed", range(5))
def test_masks_verdicts_and_caches_equal_the_oracle(seed):
    rng = np.random.default_rng(seed)
    tokens, parents = random_tree(rng, int(rng.integers(0, 14)), 4)
    lists = tokens.tolist(), parents.tolist()
    mask = tree_mask(parents, seed)
    np.testing.assert_array_equal(mask, oracle.tree_mask(lists[1], seed))
    choices = rng.integers(0, 4, len(tokens) + 1)
    verdict = verify_tree(tokens, parents, choices)
    assert verdict == oracle.verify_tree(*lists, choices.tolist())
    probs = rng.multinomial(32, np.full(4, 0.25), size=len(tokens) + 1) / 32
    uniforms = rng.integers(0, 64, len(tokens) + 1) / 64
    sampled = verify_sampled(tokens, parents, probs, uniforms)
    assert sampled == oracle.verify_sampled(*lists, probs, uniforms)
    kv = rng.standard_normal((2, seed + 1 + len(tokens), 3))
    kept = compact(kv, seed, verdict.path)
    np.testing.assert_array_equal(kept, oracle.compact(kv, seed, verdict.path))


def test_rounding_never_emits_impossible_tokens():
    law = np.array([[0.1] * 10 + [0.0, 0.0]])
    assert verify_sampled([], [], law, np.array([np.nextafter(1.0, 0.0)])).bonus == 9


def test_depths():
    assert numpy_tree.depths(np.array([-1, -1, 0, 2])).tolist() == [0, 1, 1, 2, 3]


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (build_tree, (np.zeros(3), 2)),
        (build_tree, (np.zeros((2, 3), dtype=int), 2)),
        (build_tree, (np.full((2, 3), np.nan), 2)),
        (build_tree, (np.zeros((2, 3)), -1)),
        (build_tree, (np.zeros((2, 3)), 0)),
        (build_tree, (np.zeros((2, 3)), 1.5)),
        (tree_mask, (np.array([0]), 1)),
        (tree_mask, (np.array([-2]), 1)),
        (tree_mask, (np.array([-1.0]), 1)),
        (tree_mask, (np.array([-1]), -1)),
        (verify_tree, ([1], [-1], [1])),
        (verify_tree, ([1, 2], [-1], [1, 2])),
        (verify_sampled, ([], [], np.full((1, 2), 0.5), np.array([1.0]))),
        (verify_sampled, ([], [], np.full((1, 2), 0.5), np.array([0.1, 0.1]))),
        (verify_sampled, ([], [], np.array([[-0.5, 1.5]]), np.array([0.1]))),
        (compact, (np.zeros((4, 2)), 2, [1])),
        (compact, (np.zeros((4, 2)), 2, [-1])),
        (compact, (np.zeros((4, 2)), 4, [])),
        (compact, (np.zeros(4), 1, [])),
    ],
)
def test_bad_input_is_refused(function, args):
    with pytest.raises((ValueError, TypeError)):
        function(*args)
