"""Bugs of the tree's attention mask."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import edit, edits, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.dflash.situations import WRITTEN
from trapline.challenges.dflash.solution_lines import INHERIT
from trapline.gold.tree_decoding import oracle

# Parts of the gold solution that several mutants edit.
MASK = "    return mask\n"

#: Root → 0, 1; 0 → 2, 3; 2 → 4; 1 → 5: siblings, cousins and a branch of three.
FAMILY = np.array([-1, -1, 0, 0, 2, 1])


def same_mask(submission: Submission, parents: np.ndarray, prefix_len: int) -> np.ndarray:
    got = submission.tree_mask(parents, prefix_len)
    expect.equal(got, oracle.tree_mask(parents.tolist(), prefix_len), "the mask")
    return np.asarray(got)


def family_mask(submission: Submission, rng: np.random.Generator) -> None:
    same_mask(submission, FAMILY, int(rng.integers(1, 6)))


@trap(
    catches="every node sees all nodes before it, its siblings among them",
    severity="critical",
    story="A triangle instead of ancestors: logits of a node then depend on its rejected siblings.",
    mutant=edit(INHERIT, "        mask[node + 1] = mask[node]\n"),
    seen=WRITTEN,
)
def mask_causal(submission: Submission, rng: np.random.Generator) -> None:
    family_mask(submission, rng)


@trap(
    catches="a node does not see itself",
    severity="critical",
    story="Ancestors alone are not enough: a node must also see its own token.",
    mutant=insert_before(
        MASK, "    mask[np.arange(1, count + 1), prefix_len + np.arange(1, count + 1)] = False\n"
    ),
    seen=WRITTEN,
)
def mask_without_self(submission: Submission, rng: np.random.Generator) -> None:
    family_mask(submission, rng)


@trap(
    catches="a node sees its parent but no older ancestor",
    severity="critical",
    story="One step up the tree looks right at depth 2 and is wrong from depth 3 on.",
    mutant=edit(
        INHERIT,
        "        mask[node + 1, : prefix_len + 1] = True\n"
        "        mask[node + 1, prefix_len + 1 + parent] = True\n",
    ),
    seen=WRITTEN,
)
def mask_parent_only(submission: Submission, rng: np.random.Generator) -> None:
    family_mask(submission, rng)


def long_branch(rng: np.random.Generator) -> tuple[list[int], int]:
    """The parents of a branch of three to five nodes, and the length of a prefix."""
    return list(range(-1, int(rng.integers(2, 5)))), int(rng.integers(1, 6))


def deepest_node_last(submission: Submission, rng: np.random.Generator) -> None:
    parents, prefix_len = long_branch(rng)
    same_mask(submission, np.array(parents), prefix_len)


@trap(
    catches="the walk up to the ancestors ends for all nodes once the last node has arrived at the "
    "root, as if it were the deepest",
    severity="major",
    story="Nodes come in the order of their weight: a deep one may stand before a shallow one.",
    mutant=edits(
        (INHERIT, "        mask[node + 1, : prefix_len + 1] = True\n"),
        (
            MASK,
            "    above = np.array([0, *(parent + 1 for parent in parents)])\n"
            "    rows = seen = np.arange(count + 1)\n"
            "    while seen[-1]:\n"
            "        mask[rows, prefix_len + seen] = True\n"
            "        seen = above[seen]\n" + MASK,
        ),
    ),
    seen=WRITTEN,
    control=deepest_node_last,
)
def mask_ends_with_the_last_node(submission: Submission, rng: np.random.Generator) -> None:
    parents, prefix_len = long_branch(rng)
    same_mask(submission, np.array([*parents, -1]), prefix_len)


@trap(
    catches="a node takes over what another node than its parent sees: a row number is off by one",
    severity="critical",
    story="Row 0 is the root's, so that node i has row i + 1; a branch loses or swaps its "
    "ancestors.",
    mutant=edit(INHERIT, "        mask[node + 1] = mask[max(parent, 0)]\n"),
    also=[
        edit(
            INHERIT,
            "        mask[node + 1] = mask[parent]\n"
            "        mask[node + 1, : prefix_len + 1] = True\n",
        ),
        edit(INHERIT, "        mask[node + 1] = mask[parent]\n"),
        edit(INHERIT, "        mask[node + 1] = mask[min(parent + 2, node)]\n"),
    ],
    seen=WRITTEN,
)
def mask_of_another_row(submission: Submission, rng: np.random.Generator) -> None:
    family_mask(submission, rng)


@trap(
    catches="the nodes do not see the root",
    severity="major",
    story="The root is in neither the prefix nor the arrays of the tree and is easily left out.",
    mutant=insert_before(MASK, "    mask[1:, prefix_len] = False\n"),
    seen=WRITTEN,
)
def mask_without_root(submission: Submission, rng: np.random.Generator) -> None:
    family_mask(submission, rng)


@trap(
    catches="the nodes do not see the committed prefix",
    severity="major",
    story="A tree mask is applied to the whole attention instead of its last columns.",
    mutant=insert_before(MASK, "    mask[1:, :prefix_len] = False\n"),
)
def mask_without_prefix(submission: Submission, rng: np.random.Generator) -> None:
    family_mask(submission, rng)


@trap(
    catches="the root sees the drafted nodes",
    severity="major",
    story="The root's own logits then depend on guesses about what follows it.",
    mutant=insert_before(MASK, "    mask[0] = True\n"),
    seen=WRITTEN,
)
def mask_root_sees_drafts(submission: Submission, rng: np.random.Generator) -> None:
    family_mask(submission, rng)


@trap(
    catches="nodes see their descendants instead of their ancestors",
    severity="major",
    story="Rows are queries and columns are keys; transposed, the shape is still right.",
    mutant=insert_before(MASK, "    mask[:, prefix_len:] = mask[:, prefix_len:].T.copy()\n"),
)
def mask_transposed(submission: Submission, rng: np.random.Generator) -> None:
    family_mask(submission, rng)


@trap(
    catches="prefix_len is taken to include the root, so a column is missing",
    severity="major",
    story="Two conventions for the length of the committed part differ by exactly the root.",
    mutant=edit(MASK, "    return mask[:, 1:]\n"),
)
def mask_prefix_counts_the_root(submission: Submission, rng: np.random.Generator) -> None:
    family_mask(submission, rng)


@trap(
    catches="the mask is made of numbers",
    severity="minor",
    story="0 and 1 added to scores mask nothing; 0 and -inf read as booleans mask the wrong half.",
    mutant=edit(MASK, "    return mask.astype(np.float64)\n"),
)
def mask_not_boolean(submission: Submission, rng: np.random.Generator) -> None:
    family_mask(submission, rng)


@trap(
    catches="an empty tree or an empty prefix fails",
    severity="minor",
    story="It happens at the first token after a one-token prompt, and for a draft without nodes.",
    mutant=edit(
        '    prefix_len = whole(prefix_len, "prefix_len", least=0)\n    count',
        '    prefix_len = whole(prefix_len, "prefix_len", least=1)\n    count',
    ),
)
def mask_of_nothing(submission: Submission, rng: np.random.Generator) -> None:
    empty = np.zeros(0, dtype=np.int64)
    same_mask(submission, empty, 0)
    same_mask(submission, empty, int(rng.integers(1, 5)))
    same_mask(submission, FAMILY, 0)
