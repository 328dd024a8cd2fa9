"""Tree decoding against brute force, hand-made trees and plain decoding."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from solution import build_tree, compact, generate, tree_mask, verify_sampled, verify_tree

#: Root → 0, 1; 0 → 2, 3; 2 → 4; 1 → 5.
FAMILY = np.array([-1, -1, 0, 0, 2, 1])
INF = np.inf


def draft(rng, depths, vocabulary, levels=5):
    return -rng.integers(1, levels, (depths, vocabulary)) / 4.0


def brute_force(log_q, budget):
    """All prefixes sorted by weight and depth, then inserted in the order of the tie rule."""
    depths, vocabulary = log_q.shape
    weights = {
        prefix: sum(log_q[d, t] for d, t in enumerate(prefix))
        for depth in range(1, depths + 1)
        for prefix in itertools.product(range(vocabulary), repeat=depth)
    }
    index, parents = {(): -1}, []
    while weights and len(parents) < budget:
        open_ = [p for p in weights if p[:-1] in index and weights[p] > -INF]
        if not open_:
            break
        best = min(open_, key=lambda p: (-weights[p], len(p), index[p[:-1]], p[-1]))
        index[best] = len(parents)
        parents.append(index[best[:-1]])
        del weights[best]
    return [prefix[-1] for prefix in list(index)[1:]], parents


def branch(parents, node):
    return [] if node < 0 else [*branch(parents, parents[node]), node]


@pytest.mark.parametrize("seed", range(6))
def test_the_tree_is_the_heaviest_prefixes_in_order(seed):
    rng = np.random.default_rng(seed)
    log_q = draft(rng, int(rng.integers(1, 4)), 4)
    log_q[rng.random(log_q.shape) < 0.15] = -INF
    for budget in (1, 5, 12, 200):
        tokens, parents = build_tree(log_q.astype(np.float32), budget)
        assert (tokens.tolist(), parents.tolist()) == brute_force(log_q, budget)
        assert tokens.dtype == parents.dtype == np.int64


def test_ties_go_to_lower_depth_then_lower_parent_then_lower_token():
    log_q = np.array([[-1.0, -1.0, -INF], [0.0, -0.5, -0.5]])
    tokens, parents = build_tree(log_q, 8)
    assert tokens.tolist() == [0, 1, 0, 0, 1, 2, 1, 2]
    assert parents.tolist() == [-1, -1, 0, 1, 0, 0, 1, 1]


def test_many_equal_siblings_stay_in_order():
    log_q = -np.random.default_rng(0).integers(1, 4, (1, 300)) / 2.0
    order = sorted(range(300), key=lambda token: (-log_q[0, token], token))
    assert build_tree(log_q, 100)[0].tolist() == order[:100]


def test_weights_are_sums_in_float64():
    big = -(2.0**24)
    log_q = np.array([[big, big - 2.0], [-1.5, -INF]], dtype=np.float32)
    assert build_tree(log_q, 3)[1].tolist() == [-1, 0, -1]
    deep = np.full((2, 2), -500.0)
    deep[:, 1] = -400.0
    deep[0, 0] = -450.0
    assert build_tree(deep, 4)[0].tolist() == [1, 0, 1, 1]


def test_small_budgets_and_empty_drafts():
    for log_q, budget in ((np.full((2, 3), -1.0), 0), (np.zeros((0, 3)), 4)):
        tokens, parents = build_tree(log_q, budget)
        assert tokens.shape == parents.shape == (0,)


@pytest.mark.parametrize("prefix_len", [0, 1, 4])
@pytest.mark.parametrize("parents", [FAMILY, FAMILY[:0], FAMILY[:1]])
def test_a_row_sees_its_own_branch_and_nothing_else(parents, prefix_len):
    mask = tree_mask(parents, prefix_len)
    count = len(parents)
    assert mask.shape == (count + 1, prefix_len + count + 1)
    assert mask.dtype == bool
    for node in range(-1, count):
        seen = np.flatnonzero(mask[node + 1]).tolist()
        below = [prefix_len + 1 + n for n in branch(parents.tolist(), node)]
        assert seen == sorted([*range(prefix_len + 1), *below])


def test_children_are_judged_by_their_parents_row():
    # Root → a 0, b 1; b → d 2.
    assert verify_tree([4, 5, 6], [-1, -1, 1], [5, 9, 6, 7]) == ([1, 2], 7)
    assert verify_tree([4, 5, 6, 7], [-1, -1, 0, 1], [5, 6, 7, 9, 9]) == ([1, 3], 9)


def test_a_rejected_node_takes_its_subtree_with_it():
    assert verify_tree([4, 6], [-1, 0], [5, 6, 9]) == ([], 5)
    assert verify_tree([4, 5, 6], [-1, -1, 0], [5, 6, 8, 9]) == ([1], 8)


def test_the_bonus_comes_from_the_last_accepted_row():
    assert verify_tree([1, 2], [-1, 0], [1, 2, 3]) == ([0, 1], 3)
    assert verify_tree([1, 2], [-1, 0], [1, 5, 3]) == ([0], 5)
    assert verify_tree([], [], [6]) == ([], 6)


def test_samples_invert_the_law():
    law = np.array([[0.25, 0.25, 0.5], [0.5, 0.0, 0.5]])
    tree = [1], [-1]
    assert verify_sampled(*tree, law, np.array([0.25, 0.5])) == ([0], 2)
    assert verify_sampled(*tree, law, np.array([0.75, 0.0])) == ([], 2)
    assert verify_sampled(*tree, law, np.array([0.0, 0.0])) == ([], 0)
    assert verify_sampled([], [], np.array([[0.0, 1.0]]), np.array([0.0])) == ([], 1)


def test_rounding_never_picks_an_impossible_token():
    law = np.array([[0.1] * 10 + [0.0, 0.0]])
    assert verify_sampled([], [], law, np.array([np.nextafter(1.0, 0.0)])) == ([], 9)


def test_every_token_is_said_in_proportion():
    law = np.array([[1, 2, 5], [8, 0, 0]]) / 8.0
    said = [0, 0, 0]
    for step in range(8):
        path, bonus = verify_sampled([2], [-1], law, np.array([(step + 0.5) / 8, 0.5]))
        said[2 if path else bonus] += 1
    assert said == [1, 2, 5]


@pytest.mark.parametrize("lead", [(), (2,), (3, 0, 2), (2, 1, 3)])
def test_compaction_keeps_prefix_root_and_path(lead):
    kv = np.random.default_rng(1).standard_normal((*lead, 9, 4)).astype(np.float32)
    before = kv.copy()
    for path in ([], [0], [1, 4, 5], [5, 2]):
        kept = compact(kv, 2, path)
        np.testing.assert_array_equal(kept, kv[..., [0, 1, 2, *(3 + n for n in path)], :])
        assert kept.dtype == np.float32
    np.testing.assert_array_equal(compact(kv, 0, [1]), kv[..., [0, 2], :])
    np.testing.assert_array_equal(kv, before)


class Models:
    """A target whose law depends on the whole prefix, and a drafter that is right now and then."""

    def __init__(self, seed, vocabulary=5, depth=3, right=0.7):
        self.seed, self.vocabulary, self.depth, self.right = seed, vocabulary, depth, right
        self.prefixes = []
        self.nodes = []

    def law(self, prefix):
        return np.random.default_rng([self.seed, *prefix]).random(self.vocabulary)

    def tree_log_probs(self, prefix, tokens, parents):
        self.prefixes.append(list(prefix))
        self.nodes.append(len(tokens))
        branches = [list(prefix)]
        for token, parent in zip(tokens, parents, strict=True):
            branches.append([*branches[parent + 1], int(token)])
        return np.log(np.stack([self.law(text) for text in branches]))

    def block(self, prefix):
        rng = np.random.default_rng([self.seed + 1, *prefix])
        text, rows = list(prefix), []
        for _ in range(self.depth):
            best = int(self.law(text).argmax())
            rows.append(np.where(np.arange(self.vocabulary) == best, -0.5, -3.0))
            if rng.random() > self.right:
                rows[-1] = np.full(self.vocabulary, -2.0)
            text.append(best)
        return np.reshape(rows, (self.depth, self.vocabulary))

    def alone(self, prompt, limit, eos):
        text = list(prompt)
        while len(text) - len(prompt) < limit:
            text.append(int(self.law(text).argmax()))
            if text[-1] == eos:
                break
        return text[len(prompt) :]


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("budget", [0, 1, 6])
def test_the_output_is_what_the_target_says_alone(depth, budget):
    for seed in range(4):
        for limit, eos in ((0, 0), (1, 0), (9, 0), (9, 4)):
            models = Models(seed, depth=depth)
            prompt = [seed % 5, eos]
            tokens, stats = generate(
                models, models, prompt, max_new_tokens=limit, eos_id=eos, budget=budget
            )
            assert tokens == models.alone(prompt, limit, eos)
            assert prompt == [seed % 5, eos]
            assert stats["target_passes"] == len(models.prefixes)
            assert max(models.nodes, default=0) <= budget
            grown = [len(p) - 2 for p in models.prefixes] + [len(tokens)]
            steps = np.diff(grown)
            assert (steps > 0).all()
            assert all(p == prompt + tokens[: len(p) - 2] for p in models.prefixes)
            # Every pass gives one token of the target's own, the last perhaps cut off.
            assert len(tokens) - stats["accepted"] in (len(steps), len(steps) - 1)


def test_a_perfect_drafter_is_used_to_the_full():
    models = Models(3, right=1.0)
    tokens, stats = generate(models, models, [1], max_new_tokens=8, eos_id=99, budget=3)
    assert tokens == models.alone([1], 8, 99)
    assert stats == {"target_passes": 2, "accepted": 6}


def test_an_end_inside_a_branch_ends_everything():
    models = Models(3, right=1.0)
    full = models.alone([1], 8, 99)
    eos = full[1] if full[1] != full[0] else full[0]
    tokens, stats = generate(models, models, [1], max_new_tokens=8, eos_id=eos, budget=3)
    assert tokens == full[: full.index(eos) + 1]
    assert stats == {"target_passes": 1, "accepted": len(tokens)}


def test_ties_are_said_as_the_lower_token():
    target = SimpleNamespace(tree_log_probs=lambda p, t, q: np.zeros((len(t) + 1, 4)))
    drafter = SimpleNamespace(block=lambda prefix: np.full((1, 4), -2.0))
    tokens, _ = generate(target, drafter, [3], max_new_tokens=3, eos_id=2, budget=1)
    assert tokens == [0, 0, 0]


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (build_tree, (np.zeros(3), 2)),
        (build_tree, (np.zeros((2, 3), dtype=int), 2)),
        (build_tree, (np.full((2, 3), np.nan), 2)),
        (build_tree, (np.full((2, 3), np.inf), 2)),
        (build_tree, (np.zeros((2, 3)), -1)),
        (build_tree, (np.zeros((2, 3)), 1.5)),
        (build_tree, (np.zeros((2, 3)), True)),
        (tree_mask, (np.array([0]), 1)),
        (tree_mask, (np.array([-2]), 1)),
        (tree_mask, (np.array([-1.0]), 1)),
        (tree_mask, (np.array([[-1]]), 1)),
        (tree_mask, (np.array([-1]), -1)),
        (verify_tree, ([1], [-1], [1])),
        (verify_tree, ([1, 2], [-1], [1, 2])),
        (verify_sampled, ([], [], np.full((1, 2), 0.5), np.array([1.0]))),
        (verify_sampled, ([], [], np.full((1, 2), 0.5), np.array([-0.1]))),
        (verify_sampled, ([], [], np.full((1, 2), 0.5), np.array([0]))),
        (verify_sampled, ([], [], np.full((1, 2), 0.5), np.array([0.1 + 0j]))),
        (verify_sampled, ([], [], np.full((1, 2), 0.5), np.array([0.1, 0.1]))),
        (verify_sampled, ([], [], np.array([[-0.5, 1.5]]), np.array([0.1]))),
        (verify_sampled, ([], [], np.zeros((1, 2)), np.array([0.1]))),
        (verify_sampled, ([], [], np.array([[0, 1]]), np.array([0.1]))),
        (verify_sampled, ([], [], np.ones(2), np.array([0.1]))),
        (compact, (np.zeros((4, 2)), 2, [1])),
        (compact, (np.zeros((4, 2)), 2, [-1])),
        (compact, (np.zeros((4, 2)), 4, [])),
        (compact, (np.zeros((4, 2)), -1, [])),
        (compact, (np.zeros((4, 2), dtype=int), 1, [])),
        (compact, (np.zeros(4), 1, [])),
    ],
)
def test_bad_input_is_refused(function, args):
    with pytest.raises((ValueError, TypeError)):
        function(*args)


@pytest.mark.parametrize(
    ("prompt", "change", "answer"),
    [
        ([], {}, None),
        ([1], {"max_new_tokens": -1}, None),
        ([1], {"budget": -1}, None),
        ([1], {"budget": -1, "max_new_tokens": 0}, None),
        ([1], {}, np.zeros((1, 4))),
        ([1], {}, np.zeros((3, 4))),
        ([1], {}, np.zeros((2, 3))),
        ([1], {}, np.zeros((2, 5))),
        ([1], {}, np.zeros(4)),
        ([1], {}, np.full((2, 4), np.nan)),
        ([1], {}, np.zeros((2, 4), dtype=int)),
        ([1], {}, np.zeros((2, 4), dtype=complex)),
    ],
)
def test_bad_requests_and_broken_targets_are_refused(prompt, change, answer):
    fine = np.zeros((2, 4)) if answer is None else answer
    target = SimpleNamespace(tree_log_probs=lambda prefix, tokens, parents: fine)
    drafter = SimpleNamespace(block=lambda prefix: np.full((1, 4), -2.0))
    settings = {"max_new_tokens": 3, "eos_id": 1, "budget": 1, **change}
    with pytest.raises((ValueError, TypeError)):
        generate(target, drafter, prompt, **settings)
