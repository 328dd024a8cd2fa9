"""The torch forms against the heap and the oracle: the same trees, masks, verdicts."""

import numpy as np
import pytest
import torch

from trapline.gold import build_tree, tree_mask, verify_tree
from trapline.gold.tree_decoding import numpy_tree, oracle, reference
from trapline.gold.tree_decoding.api import (
    chain_tree,
    verify_rejection,
    verify_sampled,
    wide_tree,
)


def random_draft(rng, rows=3):
    depths, vocabulary, levels = (int(rng.integers(*ends)) for ends in ((0, 6), (1, 8), (2, 40)))
    log_q = -rng.integers(0, levels, (rows, depths, vocabulary)) / 8.0
    log_q[rng.random(log_q.shape) < 0.2] = -np.inf
    return log_q


def same_as_the_heap(log_q, budget, dtype):
    tokens, parents = reference.heaviest_prefixes(torch.tensor(log_q, dtype=dtype), budget)
    for row, got_tokens, got_parents in zip(log_q, tokens, parents, strict=True):
        want = numpy_tree.heaviest_prefixes(row, budget)
        nodes = len(want[0])
        assert got_tokens[:nodes].tolist() == want[0].tolist()
        assert got_parents[:nodes].tolist() == want[1].tolist()
        assert (got_tokens[nodes:] == reference.PAD).all()
        assert (got_parents[nodes:] == -1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(60))
def test_levels_equal_the_heap_with_ties(seed, dtype):
    rng = np.random.default_rng(seed)
    same_as_the_heap(random_draft(rng), int(rng.integers(1, 70)), dtype)


@pytest.mark.full
def test_levels_equal_the_heap_many_times():
    rng = np.random.default_rng(1)
    for _ in range(5_000):
        same_as_the_heap(random_draft(rng), int(rng.integers(1, 70)), torch.float64)


def test_levels_equal_the_heap_for_a_large_draft():
    logits = torch.randn(2, 15, 1000, generator=torch.Generator().manual_seed(0)) * 3
    log_q = torch.log_softmax(logits, dim=-1)
    same_as_the_heap(log_q.numpy(), 256, torch.float32)


def test_signed_zeros_are_ranked_by_token():
    log_q = torch.tensor([[[-0.0, 0.0, -1.0, -torch.inf, -1.0]]])
    _, order = reference.ranked(log_q, 5)
    assert order[0, 0].tolist() == [0, 1, 2, 4, 3]


def test_chains_and_fixed_widths_are_trees_too():
    log_q = -np.random.default_rng(0).integers(1, 30, (4, 6)) / 8.0
    for make in (chain_tree, lambda q: wide_tree(q, (3, 2, 1))):
        ours, fast = make(log_q), make(torch.tensor(log_q))
        assert ours.tokens.tolist() == fast.tokens.tolist()
        assert ours.parents.tolist() == fast.parents.tolist()
    assert chain_tree(log_q).parents.tolist() == [-1, 0, 1, 2]
    assert wide_tree(log_q, (2, 2)).parents.tolist() == [-1, -1, 0, 0, 1, 1]
    # A width of one everywhere is the chain.
    assert wide_tree(log_q, (1, 1, 1, 1)).tokens.tolist() == chain_tree(log_q).tokens.tolist()


def random_tree(rng, nodes, vocabulary):
    edges = {}
    while len(edges) < nodes:
        edges.setdefault((int(rng.integers(-1, len(edges))), int(rng.integers(vocabulary))), None)
    parents, tokens = zip(*edges, strict=True) if edges else ((), ())
    return np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64)


def unpadded(path):
    return [node for node in path.tolist() if node >= 0]


@pytest.mark.parametrize("seed", range(40))
def test_masks_and_verdicts_equal_the_oracle(seed):
    rng = np.random.default_rng(seed)
    tokens, parents = random_tree(rng, int(rng.integers(0, 14)), 3)
    rows = torch.tensor(tokens), torch.tensor(parents)
    np.testing.assert_array_equal(tree_mask(rows[1], seed % 4), tree_mask(parents, seed % 4))
    assert reference.depths(reference.ancestors(rows[1][None]))[0].tolist() == (
        numpy_tree.depths(parents).tolist()
    )
    choices = rng.integers(0, 3, len(tokens) + 1)
    path, bonus = verify_tree(*rows, torch.tensor(choices))
    assert (unpadded(path), int(bonus)) == verify_tree(tokens, parents, choices)
    probs = rng.multinomial(32, np.full(3, 1 / 3), size=len(tokens) + 1) / 32
    uniforms = rng.integers(0, 64, len(tokens) + 1) / 64
    path, bonus = verify_sampled(*rows, torch.tensor(probs), torch.tensor(uniforms))
    assert (unpadded(path), int(bonus)) == verify_sampled(tokens, parents, probs, uniforms)


def test_padding_is_never_accepted():
    tokens, parents = torch.tensor([[4, -1, -1]]), torch.tensor([[-1, -1, -1]])
    seen = reference.ancestors(parents)
    done = reference.accepted_branch(tokens, parents, seen, torch.tensor([[4, 2, 0, 0]]), 3)
    assert (done.path.tolist(), done.length.tolist(), done.bonus.tolist()) == (
        [[0, -1, -1]],
        [1],
        [2],
    )


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("seed", range(15))
def test_rejection_equals_the_oracle(seed, replacement):
    rng = np.random.default_rng(seed)
    tokens, parents = random_tree(rng, int(rng.integers(0, 9)), 4)
    draft, target = rng.dirichlet(np.ones(4), (2, len(tokens) + 1))
    uniforms = rng.random(len(tokens) + 1)
    want = verify_rejection(tokens, parents, draft, target, uniforms, replacement=replacement)
    tensors = [torch.tensor(x) for x in (tokens, parents, draft, target, uniforms)]
    path, bonus = verify_rejection(*tensors, replacement=replacement)
    assert (unpadded(path), int(bonus)) == want


def test_rows_of_a_batch_are_independent():
    rng = np.random.default_rng(3)
    log_q = torch.tensor(-rng.integers(1, 30, (4, 3, 5)) / 8.0)
    together = build_tree(log_q, 9)
    for row in range(4):
        alone = build_tree(log_q[row], 9)
        assert torch.equal(together.tokens[row], alone.tokens)
        assert torch.equal(together.parents[row], alone.parents)


def test_rejection_with_equal_distributions_accepts_everything():
    class Sure:
        def coin(self, node, probability):
            return probability >= 1.0

        def draw(self, law):
            return int(np.argmax(law))

    law = np.tile([0.25, 0.75], (3, 1))
    assert oracle.verify_rejection([1, 0], [-1, 0], law, law, Sure(), replacement=True) == (
        [0, 1],
        1,
    )


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (wide_tree, (np.zeros((2, 3)), (1, 1, 1))),
        (wide_tree, (np.zeros((2, 3)), (4,))),
        (wide_tree, (torch.zeros(2, 3), (0,))),
        (build_tree, (torch.zeros(3), 2)),
        (build_tree, (torch.zeros(2, 3), 0)),
        (build_tree, (torch.zeros(2, 3, dtype=torch.int64), 2)),
        (verify_tree, (torch.tensor([1]), torch.tensor([-1]), torch.tensor([1]))),
        (verify_rejection, ([1], [-1], np.ones((1, 2)), np.ones((1, 2)), [0.5])),
        (verify_rejection, ([7], [-1], np.ones((2, 2)), np.ones((2, 2)), [0.5, 0.5])),
        (verify_rejection, ([1], [0], np.ones((2, 2)), np.ones((2, 2)), [0.5, 0.5])),
        (verify_rejection, ([1], [-1], np.ones((2, 2)), np.ones((2, 2)), [0.5, 1.0])),
    ],
)
def test_bad_input_is_refused(function, args):
    with pytest.raises((ValueError, TypeError)):
        function(*args)
