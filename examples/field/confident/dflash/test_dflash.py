"""Seven tests for every component of DFlash."""

import numpy as np
import pytest
from solution import build_tree, compact, generate, tree_mask, verify_sampled, verify_tree


def test_tree_is_heaviest_first():
    log_q = np.log(np.array([[0.6, 0.3, 0.1], [0.7, 0.2, 0.1]]))
    tokens, parents = build_tree(log_q, 3)
    assert tokens.tolist() == [0, 0, 1]
    assert parents.tolist() == [-1, 0, -1]


def test_mask_shape_and_ancestors():
    mask = tree_mask(np.array([-1, 0, 1]), 2)
    assert mask.shape == (4, 6)
    assert mask[3].all()
    assert not mask[1, 4]


def test_full_acceptance():
    path, bonus = verify_tree([1, 2, 3], [-1, 0, 1], [1, 2, 3, 4])
    assert path == [0, 1, 2]
    assert bonus == 4


def test_partial_acceptance():
    path, bonus = verify_tree([1, 2, 3], [-1, 0, 1], [1, 2, 9, 4])
    assert path == [0, 1]
    assert bonus == 9


def test_full_rejection():
    assert verify_tree([1, 2], [-1, 0], [7, 2, 3]) == ([], 7)


def test_sampling_accepts_certain_tokens():
    probs = np.eye(3)[[1, 2]]
    path, bonus = verify_sampled([1], [-1], probs, np.array([0.5, 0.5]))
    assert path == [0]
    assert bonus == 2


def test_compact():
    kv = np.arange(10.0).reshape(5, 2)
    assert compact(kv, 1, [2])[:, 0].tolist() == [0, 2, 8]


class ChainModel:
    def tree_log_probs(self, prefix, tokens, parents):
        last = [prefix[-1], *tokens]
        return np.eye(10)[[(t + 1) % 10 for t in last]]

    def block(self, prefix):
        return np.log(np.eye(10)[[(prefix[-1] + k) % 10 for k in (1, 2, 3)]] + 1e-9)


def test_golden_generation():
    model = ChainModel()
    tokens, stats = generate(model, model, [0], max_new_tokens=8, eos_id=99, budget=3)
    assert tokens == [1, 2, 3, 4, 5, 6, 7, 8]
    assert stats["target_passes"] == 2


def test_generation_stops_at_eos():
    model = ChainModel()
    tokens, _ = generate(model, model, [0], max_new_tokens=8, eos_id=2, budget=3)
    assert tokens == [1, 2]


def test_bad_budget():
    with pytest.raises(ValueError):
        build_tree(np.zeros((2, 2)), -1)
