import numpy as np
from solution import build_tree, verify_tree


def test_tree():
    tokens, parents = build_tree(np.log(np.array([[0.7, 0.3], [0.6, 0.4]])), 3)
    assert len(tokens) == 3


def test_chain():
    path, bonus = verify_tree([1, 2], [-1, 0], [1, 2, 5])
    assert path == [0, 1]
    assert bonus == 5
