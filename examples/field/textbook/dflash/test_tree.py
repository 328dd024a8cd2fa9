import itertools

import numpy as np
import pytest
from solution import build_tree, compact, generate, tree_mask, verify_sampled, verify_tree


def test_build_tree_takes_the_heaviest():
    log_q = np.array([[-0.5, -1.0, -9.0], [-1.0, -1.25, -9.0]])
    tokens, parents = build_tree(log_q, 6)
    assert tokens.tolist() == [0, 1, 0, 1, 0, 1]
    assert parents.tolist() == [-1, -1, 0, 0, 1, 1]


def test_build_tree_against_enumeration():
    log_q = np.log(np.random.default_rng(0).dirichlet(np.ones(4), size=3))
    weights = sorted(
        (
            sum(log_q[d, t] for d, t in enumerate(p))
            for n in (1, 2, 3)
            for p in itertools.product(range(4), repeat=n)
        ),
        reverse=True,
    )
    tokens, parents = build_tree(log_q, 15)
    got, depth = [], []
    for token, parent in zip(tokens, parents):
        d = 0 if parent < 0 else depth[parent] + 1
        depth.append(d)
        got.append((0.0 if parent < 0 else got[parent]) + log_q[d, token])
    assert np.allclose(got, weights[:15])


def test_mask():
    mask = tree_mask(np.array([-1, -1, 0]), 1)
    expected = [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 1, 0, 1]]
    assert mask.astype(int).tolist() == expected


def test_branching_and_subtree_invalidation():
    assert verify_tree([4, 5, 6], [-1, -1, 1], [5, 9, 6, 7]) == ([1, 2], 7)
    assert verify_tree([4, 6], [-1, 0], [5, 6, 9]) == ([], 5)
    assert verify_tree([4, 5, 6], [-1, -1, 0], [5, 6, 8, 9]) == ([1], 8)


def test_sampling():
    law = np.array([[0.0, 0.25, 0.75], [0.5, 0.5, 0.0]])
    assert verify_sampled([2], [-1], law, np.array([0.25, 0.5])) == ([0], 1)
    assert verify_sampled([2], [-1], law, np.array([0.0, 0.5])) == ([], 1)


def test_compact():
    kv = np.arange(12.0).reshape(6, 2)
    assert compact(kv, 1, [1, 3])[:, 0].tolist() == [0, 2, 6, 10]


class Target:
    def law(self, prefix):
        return np.random.default_rng(list(prefix)).random(4)

    def tree_log_probs(self, prefix, tokens, parents):
        branches = [list(prefix)]
        for token, parent in zip(tokens, parents):
            branches.append([*branches[parent + 1], int(token)])
        return np.stack([self.law(b) for b in branches])


class Drafter:
    def block(self, prefix):
        rows = []
        text = list(prefix)
        for _ in range(3):
            law = Target().law(text)
            rows.append(np.log(law))
            text.append(int(law.argmax()))
        return np.stack(rows)


@pytest.mark.parametrize("budget", [0, 1, 8])
def test_generate_is_lossless(budget):
    tokens, stats = generate(
        Target(), Drafter(), [1, 2], max_new_tokens=10, eos_id=99, budget=budget
    )
    text = [1, 2]
    for _ in range(10):
        text.append(int(Target().law(text).argmax()))
    assert tokens == text[2:]
    assert stats["target_passes"] <= 10
    if budget == 0:
        assert stats == {"target_passes": 10, "accepted": 0}


def test_bad_input():
    with pytest.raises(ValueError):
        build_tree(np.zeros(3), 2)
    with pytest.raises(ValueError):
        tree_mask(np.array([0]), 2)
    with pytest.raises(ValueError):
        compact(np.zeros((3, 2)), 1, [5])
