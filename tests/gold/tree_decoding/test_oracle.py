"""The oracle of tree decoding against second, independent statements."""

import itertools

import numpy as np
import pytest

from trapline.gold.tree_decoding import oracle


def eighths(rng, *shape, levels=200):
    return -rng.integers(1, levels, shape) / 8.0


@pytest.mark.parametrize("seed", range(4))
def test_without_ties_the_tree_is_the_sorted_list_of_prefixes(seed):
    log_q = -np.random.default_rng(seed).random((3, 4)) * 4
    weights = {
        prefix: sum(log_q[d, t] for d, t in enumerate(prefix))
        for depth in (1, 2, 3)
        for prefix in itertools.product(range(4), repeat=depth)
    }
    ordered = sorted(weights, key=lambda prefix: -weights[prefix])[:20]
    tokens, parents = oracle.build_tree(log_q, 20)
    spelled = [
        tuple(tokens[n] for n in oracle.ancestors(parents.tolist(), node)) for node in range(20)
    ]
    assert spelled == ordered


def test_no_tree_has_a_larger_sum_of_weights():
    """Every tree of three nodes, brute force: the heaviest prefixes have the largest sum."""
    log_q = eighths(np.random.default_rng(0), 2, 3)
    weights = oracle.all_prefixes(log_q)
    trees = [
        chosen
        for chosen in itertools.combinations(weights, 3)
        if all(not p[:-1] or p[:-1] in chosen for p in chosen)
    ]
    best = max(sum(np.exp(weights[p]) for p in chosen) for chosen in trees)
    tokens, parents = oracle.build_tree(log_q, 3)
    branches = [oracle.ancestors(parents.tolist(), n) for n in range(3)]
    ours = sum(np.exp(weights[tuple(tokens[n] for n in branch)]) for branch in branches)
    assert ours == pytest.approx(best, rel=1e-12)


def test_impossible_prefixes_are_left_out():
    log_q = np.array([[-1.0, -np.inf], [-np.inf, -np.inf]])
    assert [values.tolist() for values in oracle.build_tree(log_q, 9)] == [[0], [-1]]


def test_a_masked_forward_reads_each_nodes_own_branch():
    """A toy attention: with the mask a node reads exactly prefix, root, branch."""
    parents = [-1, -1, 0, 0, 2, 1]
    columns = [*"pq", "R", *"abcdef"]
    mask = oracle.tree_mask(parents, 2)
    read = ["".join(c for c, seen in zip(columns, row, strict=True) if seen) for row in mask]
    assert read == ["pqR", "pqRa", "pqRb", "pqRac", "pqRad", "pqRace", "pqRbf"]


def test_verification_follows_parents():
    assert oracle.verify_tree([4, 5, 6], [-1, -1, 1], [5, 9, 6, 7]) == ([1, 2], 7)
    assert oracle.verify_tree([4, 6], [-1, 0], [5, 6, 9]) == ([], 5)
    assert oracle.verify_tree([], [], [3]) == ([], 3)


def test_samples_over_an_even_grid_follow_the_distribution():
    law = np.array([3, 0, 1, 4]) / 8
    picks = [oracle.pick(law, (step + 0.5) / 8) for step in range(8)]
    assert np.bincount(picks, minlength=4).tolist() == [3, 0, 1, 4]
    assert oracle.pick(np.array([0.1] * 10 + [0.0]), np.nextafter(1.0, 0.0)) == 9


def test_compaction():
    kv = np.arange(2 * 6 * 1.0).reshape(2, 6, 1)
    assert oracle.compact(kv, 1, [0, 3])[..., 0].tolist() == [[0, 1, 2, 5], [6, 7, 8, 11]]


@pytest.mark.parametrize("budget", [0, 1, 4, 40])
def test_generation_is_greedy_with_any_drafter(budget):
    def law(prefix):
        return np.random.default_rng([5, *prefix]).random(4)

    def draft(prefix):
        return eighths(np.random.default_rng([6, *prefix]), 3, 4)

    done = oracle.generate(law, draft, [1, 2], max_new_tokens=9, eos_id=3, budget=budget)
    assert done.tokens == oracle.greedy(law, [1, 2], 9, 3)
    assert done.target_passes == len(done.prefixes)
    lengths = [len(prefix) - 2 for prefix in done.prefixes]
    assert lengths == sorted(set(lengths))
    if budget == 0:
        assert (done.accepted, done.target_passes) == (0, len(done.tokens))
