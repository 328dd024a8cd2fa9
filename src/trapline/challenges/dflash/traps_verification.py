"""Bugs of greedy verification."""

import numpy as np

from trapline.arena.judge.traps import Mutant, edit, edits, insert_after, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.dflash import table
from trapline.challenges.dflash.situations import (
    VOCABULARY,
    WRITTEN,
    distinct,
)

# Parts of the gold solution that several mutants edit.
WALK = (
    "    path = []\n    node = -1\n    while (node, choices[node + 1]) in children:\n"
    "        node = children[node, choices[node + 1]]\n        path.append(node)\n"
)
VERDICT = "    return path, choices[node + 1]\n"


@trap(
    catches="node i is judged by row i, the row of the node before it",
    severity="critical",
    story="The pseudo-code given to the entrants took logits by position; two of five followed it, "
    "and a test with a chain cannot show it.",
    mutant=edit(
        WALK,
        "    path = []\n    node = -1\n    for number, token in enumerate(tokens):\n"
        "        if parents[number] == node and token == choices[number]:\n"
        "            node = number\n            path.append(number)\n",
    ),
    seen="a published answer",
)
def positional_logits(submission: Submission, rng: np.random.Generator) -> None:
    a, b, d, x, y = distinct(rng, 5)
    # Root → a, b; a → d. The target goes a, d; the row before d's own is b's, which says y.
    table.verify(submission, [a, b, d], [-1, -1, 0], [a, d, y, x], ([0, 2], x))


@trap(
    catches="all nodes of one depth are judged by one row",
    severity="critical",
    story="One entrant indexed the logits by depth: siblings' children shared a verdict.",
    mutant=edit(
        WALK,
        "    path = []\n    node = -1\n    while (node, choices[len(path)]) in children:\n"
        "        node = children[node, choices[len(path)]]\n        path.append(node)\n",
    ),
    seen="a published answer",
)
def depth_wise_logits(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, e, x, y = distinct(rng, 6)
    # Root → a, b; a → c → e. The target goes a, c, e; row 2 is b's, which says y.
    table.verify(submission, [a, b, c, e], [-1, -1, 0, 2], [a, c, y, e, x], ([0, 2, 3], x))


@trap(
    catches="a node is accepted because its own token matches although its parent was rejected",
    severity="critical",
    story="A child of a rejected node must be rejected too; without invalidating the subtree it "
    "passes.",
    mutant=edit(
        WALK,
        "    path = [\n        number\n        for number, token in enumerate(tokens)\n"
        "        if token == choices[parents[number] + 1]\n    ]\n"
        "    node = path[-1] if path else -1\n",
    ),
    also=[
        # The deepest of such nodes, with all that is above it.
        edit(
            WALK,
            "    depths, node = [0], -1\n"
            "    for number, parent in enumerate(parents):\n"
            "        depths.append(depths[parent + 1] + 1)\n"
            "        if tokens[number] == choices[parent + 1] and depths[-1] > depths[node + 1]:\n"
            "            node = number\n"
            "    path, above = [], node\n"
            "    while above >= 0:\n"
            "        path.insert(0, above)\n"
            "        above = parents[above]\n",
        )
    ],
    seen=WRITTEN,
)
def orphan_accepted(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, x = distinct(rng, 4)
    # a is rejected; its child c is what the target would have said after a.
    table.verify(submission, [b, a, c], [-1, -1, 1], [b, x, c, x], ([0], x))
    table.verify(submission, [a, c], [-1, 0], [b, c, x], ([], b))


@trap(
    catches="a node with the picked token is accepted wherever in the tree it hangs",
    severity="critical",
    story="The walk over the nodes compares tokens and forgets to compare parents; it shows where "
    "a token stands in two branches.",
    mutant=edit(
        WALK,
        "    path = []\n    node = -1\n    for number, token in enumerate(tokens):\n"
        "        if token == choices[node + 1]:\n"
        "            node = number\n            path.append(number)\n",
    ),
    seen=WRITTEN,
)
def node_of_another_branch(submission: Submission, rng: np.random.Generator) -> None:
    a, b, x, y = distinct(rng, 4)
    # Root → a, b; a → b. After a the target says b, which is the second of the two.
    table.verify(submission, [a, b, b], [-1, -1, 0], [a, b, y, x], ([0, 2], x))
    # Nothing hangs below a.
    table.verify(submission, [a, b], [-1, -1], [a, b, x], ([0], b))


@trap(
    catches="a child is looked up by its depth and its token, not by its parent: one below a "
    "rejected node of the same depth is accepted",
    severity="major",
    story="The walk keeps to the levels of the tree and forgets its branches; it shows where the "
    "accepted node has no child with the picked token and its neighbour has one.",
    mutant=edits(
        (
            "        children.setdefault((parent, token), node)\n",
            "        depths[node] = depths[parent] + 1\n"
            "        children.setdefault((depths[node], token), node)\n",
        ),
        ("    children = {}\n", "    children, depths = {}, {-1: -1}\n"),
        (
            WALK,
            "    path = []\n    node = -1\n    while (len(path), choices[node + 1]) in children:\n"
            "        node = children[len(path), choices[node + 1]]\n        path.append(node)\n",
        ),
    ),
    seen=WRITTEN,
)
def child_of_a_rejected_sibling(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, x = distinct(rng, 4)
    # Root → a, b; a → c. The target goes b and then says c, which hangs below a alone.
    table.verify(submission, [a, b, c], [-1, -1, 0], [b, x, c, x], ([1], c))
    # Both have a child c; b's is the second.
    table.verify(submission, [a, b, c, c], [-1, -1, 0, 1], [b, x, c, x, a], ([1, 3], a))


def _ends_at(condition: str) -> Mutant:
    """One sweep over the nodes, which ends where this holds."""
    return edit(
        WALK,
        "    path = []\n    node = -1\n    for number, token in enumerate(tokens):\n"
        f"        if {condition}:\n            break\n"
        "        if parents[number] == node and token == choices[node + 1]:\n"
        "            node = number\n            path.append(number)\n",
    )


def _others_come_last(submission: Submission, rng: np.random.Generator) -> None:
    """A control: the child of the rejected node is the last one."""
    a, b, c, d, x, y = distinct(rng, 6)
    table.verify(submission, [a, b, d, c], [-1, -1, 1, 0], [b, c, d, x, y], ([1, 2], x))


@trap(
    catches="the walk over the nodes ends at one that does not hang below the last accepted node, "
    "such as a child of a rejected one, though the branch goes on behind it",
    severity="major",
    story="Nodes come in the order of their weight, so those of other branches stand in between.",
    mutant=_ends_at("token == choices[parents[number] + 1] and parents[number] != node"),
    also=[
        _ends_at("parents[number] != node"),
        _ends_at("parents[number] > node"),
        _ends_at("parents[number] not in (-1, *path)"),
    ],
    seen=WRITTEN,
    control=_others_come_last,
)
def walk_ends_off_the_branch(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, d, x, y = distinct(rng, 6)
    # Root → a, b; a → c; b → d. c is what the target would have said after a, which is rejected.
    table.verify(submission, [a, b, c, d], [-1, -1, 0, 1], [b, c, d, x, y], ([1, 3], y))
    # Now a is accepted, and c hangs below b.
    table.verify(submission, [a, b, c, d], [-1, -1, 1, 0], [a, d, c, x, y], ([0, 3], y))


@trap(
    catches="only the node right after the last accepted one is looked at",
    severity="major",
    story="Verification that is right for chains and blind to branches.",
    mutant=edit(
        WALK,
        "    path = []\n    node = -1\n"
        "    while node + 1 < len(tokens) and tokens[node + 1] == choices[node + 1]:\n"
        "        node += 1\n        path.append(node)\n",
    ),
)
def chain_only_verification(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, x = distinct(rng, 4)
    # Between a and its child c stands a's sibling b.
    table.verify(submission, [a, b, c], [-1, -1, 0], [a, c, c, x], ([0, 2], x))


@trap(
    catches="only the first child of a node can be accepted",
    severity="major",
    story="The loop over children ends at the first that does not match.",
    mutant=edit(
        "        children.setdefault((parent, token), node)\n",
        "        if parent not in [above for above, _ in children]:\n"
        "            children[parent, token] = node\n",
    ),
    seen=WRITTEN,
)
def second_sibling_never_tried(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, x = distinct(rng, 4)
    table.verify(submission, [a, b, c], [-1, -1, -1], [c, x, c, a], ([2], a))


@trap(
    catches="a child is judged by its own row instead of its parent's",
    severity="critical",
    story="Row i + 1 says what follows node i; it says nothing about node i.",
    mutant=edit(
        WALK,
        "    path = []\n    node = -1\n    for number, token in enumerate(tokens):\n"
        "        if parents[number] == node and token == choices[number + 1]:\n"
        "            node = number\n            path.append(number)\n",
    ),
    seen=WRITTEN,
)
def child_judged_by_itself(submission: Submission, rng: np.random.Generator) -> None:
    a, b, x, y = distinct(rng, 4)
    table.verify(submission, [a, b], [-1, 0], [a, b, x], ([0, 1], x))
    table.verify(submission, [a, b], [-1, 0], [x, a, b], ([], x))
    table.verify(submission, [a, b], [-1, 0], [a, y, b], ([0], y))


@trap(
    catches="the bonus is always the target's pick at the root",
    severity="critical",
    story="Right exactly when every draft is rejected.",
    mutant=edit(VERDICT, "    return path, choices[0]\n"),
    seen=WRITTEN,
)
def bonus_of_the_root(submission: Submission, rng: np.random.Generator) -> None:
    a, b, x = distinct(rng, 3)
    table.verify(submission, [a, b], [-1, 0], [a, b, x], ([0, 1], x))


@trap(
    catches="the bonus is the pick at the last node of the tree",
    severity="major",
    story="Right exactly when the last node is the last accepted one.",
    mutant=edit(VERDICT, "    return path, choices[-1]\n"),
)
def bonus_of_the_last_row(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, x = distinct(rng, 4)
    table.verify(submission, [a, b, c], [-1, 0, -1], [a, x, b, c], ([0], x))


@trap(
    catches="the bonus is the last accepted token once more",
    severity="major",
    story="The pick that led to the last node instead of the pick at it.",
    mutant=edit(VERDICT, "    return path, tokens[node] if path else choices[0]\n"),
)
def bonus_repeats_the_path(submission: Submission, rng: np.random.Generator) -> None:
    a, b, x = distinct(rng, 3)
    table.verify(submission, [a, b], [-1, 0], [a, b, x], ([0, 1], x))


def bonus_of_equal_rows(submission: Submission, rng: np.random.Generator) -> None:
    """The row before the right one has the same pick, or nothing is accepted."""
    a, b, x = distinct(rng, 3)
    table.verify(submission, [a], [-1], [a, a], ([0], a))
    table.verify(submission, [a, b], [-1, -1], [x, a, b], ([], x))


@trap(
    catches="the bonus is read one row too early: the pick at row i for the last accepted node i, "
    "whose row is i + 1",
    severity="major",
    story="The root's row shifts all others by one. Where the row before is the parent's, its pick "
    "is the last accepted token.",
    mutant=edit(VERDICT, "    return path, choices[node] if path else choices[0]\n"),
    seen=WRITTEN,
    control=bonus_of_equal_rows,
)
def bonus_of_the_row_before(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, x, y = distinct(rng, 5)
    # Root → a, b; a → c. The row before c's own is b's, which says y.
    table.verify(submission, [a, b, c], [-1, -1, 0], [a, c, y, x], ([0, 2], x))


@trap(
    catches="at most one drafted token is accepted",
    severity="major",
    story="The walk stops after its first step, and speculation gains almost nothing.",
    mutant=insert_after(WALK, "        break\n"),
)
def one_node_a_pass(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, x = distinct(rng, 4)
    table.verify(submission, [a, b, c], [-1, 0, 1], [a, b, c, x], ([0, 1, 2], x))


@trap(
    catches="the path lists rows (node + 1) instead of nodes",
    severity="major",
    story="Off by the root: the compaction that follows takes the wrong rows.",
    mutant=edit(VERDICT, "    return [n + 1 for n in path], choices[node + 1]\n"),
)
def path_of_rows(submission: Submission, rng: np.random.Generator) -> None:
    a, b, x = distinct(rng, 3)
    table.verify(submission, [a, b], [-1, 0], [a, b, x], ([0, 1], x))


@trap(
    catches="the path lists tokens instead of node indices",
    severity="major",
    story="Tokens are enough to print the text, but not to compact the cache.",
    mutant=edit(VERDICT, "    return [tokens[n] for n in path], choices[node + 1]\n"),
)
def path_of_tokens(submission: Submission, rng: np.random.Generator) -> None:
    a, b, x = (3 + token for token in distinct(rng, 3))
    table.verify(submission, [a, b], [-1, 0], [a, b, x], ([0, 1], x))


@trap(
    catches="a tree without nodes fails",
    severity="minor",
    story="The pass is then plain decoding: an empty path, and the pick at the root.",
    mutant=insert_before(
        WALK, "    if not max(tokens) >= 0:\n        raise ValueError('negative tokens')\n"
    ),
)
def nothing_drafted(submission: Submission, rng: np.random.Generator) -> None:
    x = int(rng.integers(VOCABULARY))
    table.verify(submission, [], [], [x], ([], x))
