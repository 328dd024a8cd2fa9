"""Bugs of greedy verification."""

import numpy as np

from trapline.arena.judge.traps import trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.dflash import table
from trapline.challenges.dflash.situations import (
    VOCABULARY,
    distinct,
    refused,
)


@trap(
    "positional-logits",
    catches="node i is judged by row i, the row of whatever stands before it",
    severity="critical",
    story="The pseudo-code that entrants were given took logits by position; two of five followed "
    "it, and no test with a chain could show it.",
)
def positional_logits(submission: Submission, rng: np.random.Generator) -> None:
    a, b, d, x = distinct(rng, 4)
    # Root → a, b; b → d. The target: b after the root, d after a and after b.
    table.verify(submission, [a, b, d], [-1, -1, 1], [b, d, d, x], ([1, 2], x))


@trap(
    "depth-wise-logits",
    catches="all nodes of one depth are judged by one row",
    severity="critical",
    story="One entrant indexed the logits by depth: siblings' children shared a verdict.",
)
def depth_wise_logits(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, d, x = distinct(rng, 5)
    # Root → a, b; a → c; b → d. The target goes b, d; the row of depth 1 is a's, which says b.
    table.verify(submission, [a, b, c, d], [-1, -1, 0, 1], [b, b, d, d, x], ([1, 3], x))


@trap(
    "orphan-accepted",
    catches="a node is accepted because its own token matches although its parent was rejected",
    severity="critical",
    story="Subtree invalidation was the point of the exercise; without it a child of a rejected "
    "node comes through.",
)
def orphan_accepted(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, x = distinct(rng, 4)
    # a is rejected; its child c is what the target would have said after a.
    table.verify(submission, [b, a, c], [-1, -1, 1], [b, x, c, x], ([0], x))
    table.verify(submission, [a, c], [-1, 0], [b, c, x], ([], b))


@trap(
    "chain-only-verification",
    catches="only the node right after the last accepted one is looked at",
    severity="critical",
    story="Verification that is right for chains and blind to branches.",
)
def chain_only(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, x = distinct(rng, 4)
    # Between a and its child c stands a's sibling b.
    table.verify(submission, [a, b, c], [-1, -1, 0], [a, c, c, x], ([0, 2], x))


@trap(
    "second-sibling-never-tried",
    catches="only the first child of a node can be accepted",
    severity="critical",
    story="The loop over children ends at the first that does not match.",
)
def second_sibling(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, x = distinct(rng, 4)
    table.verify(submission, [a, b, c], [-1, -1, -1], [c, x, c, a], ([2], a))


@trap(
    "child-judged-by-itself",
    catches="a child is judged by its own row instead of its parent's",
    severity="critical",
    story="Row i + 1 says what follows node i; it says nothing about node i.",
)
def judged_by_itself(submission: Submission, rng: np.random.Generator) -> None:
    a, b, x, y = distinct(rng, 4)
    table.verify(submission, [a, b], [-1, 0], [a, b, x], ([0, 1], x))
    table.verify(submission, [a, b], [-1, 0], [x, a, b], ([], x))
    table.verify(submission, [a, b], [-1, 0], [a, y, b], ([0], y))


@trap(
    "bonus-of-the-root",
    catches="the bonus is always the target's pick at the root",
    severity="critical",
    story="Right exactly when every draft is rejected.",
)
def bonus_of_the_root(submission: Submission, rng: np.random.Generator) -> None:
    a, b, x = distinct(rng, 3)
    table.verify(submission, [a, b], [-1, 0], [a, b, x], ([0, 1], x))


@trap(
    "bonus-of-the-last-row",
    catches="the bonus is the pick at the last node of the tree",
    severity="critical",
    story="Right exactly when the last node is the last accepted one.",
)
def bonus_of_the_last_row(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, x = distinct(rng, 4)
    table.verify(submission, [a, b, c], [-1, 0, -1], [a, x, b, c], ([0], x))


@trap(
    "bonus-repeats-the-path",
    catches="the bonus is the last accepted token once more",
    severity="critical",
    story="The pick that led to the last node instead of the pick at it.",
)
def bonus_repeats(submission: Submission, rng: np.random.Generator) -> None:
    a, b, x = distinct(rng, 3)
    table.verify(submission, [a, b], [-1, 0], [a, b, x], ([0, 1], x))


@trap(
    "one-node-a-pass",
    catches="at most one drafted token is accepted",
    severity="major",
    story="The walk stops after its first step, and speculation gains next to nothing.",
)
def one_node_a_pass(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, x = distinct(rng, 4)
    table.verify(submission, [a, b, c], [-1, 0, 1], [a, b, c, x], ([0, 1, 2], x))


@trap(
    "path-of-rows",
    catches="the path lists rows (node + 1) instead of nodes",
    severity="major",
    story="Off by the root: the compaction that follows takes the wrong rows.",
)
def path_of_rows(submission: Submission, rng: np.random.Generator) -> None:
    a, b, x = distinct(rng, 3)
    table.verify(submission, [a, b], [-1, 0], [a, b, x], ([0, 1], x))


@trap(
    "path-of-tokens",
    catches="the path lists tokens instead of node indices",
    severity="major",
    story="Enough to print the text, useless to commit the cache.",
)
def path_of_tokens(submission: Submission, rng: np.random.Generator) -> None:
    a, b, x = (3 + token for token in distinct(rng, 3))
    table.verify(submission, [a, b], [-1, 0], [a, b, x], ([0, 1], x))


@trap(
    "nothing-drafted",
    catches="a tree without nodes fails",
    severity="minor",
    story="Then the pass is plain decoding: no path, and the root's pick.",
)
def nothing_drafted(submission: Submission, rng: np.random.Generator) -> None:
    x = int(rng.integers(VOCABULARY))
    table.verify(submission, [], [], [x], ([], x))


@trap(
    "wrong-choice-count-accepted",
    catches="choices without a row for the root, or with one too many, are accepted",
    severity="minor",
    story="N rows for N nodes is the sign of positional logits.",
)
def wrong_choice_count(submission: Submission, rng: np.random.Generator) -> None:
    tokens, parents = np.array([5, 6, 5]), np.array([-1, -1, 1])
    for count in (3, 5):
        choices = rng.integers(0, VOCABULARY, count)
        choices[0] = 0
        refused(submission, "verify_tree", tokens, parents, choices)
    refused(submission, "verify_tree", tokens[:2], parents, np.zeros(4, np.int64))
