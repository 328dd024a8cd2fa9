"""The bugs of tree decoding, each in the smallest situation that shows it.

Weights are multiples of a power of two, so that sums and ties are exact in every dtype. Rows of
choices, probabilities and masks: 0 is the root, i + 1 is node i.
"""

from typing import Any

import numpy as np

from trapline.arena import expect
from trapline.arena.proxy import Stub, Submission
from trapline.arena.traps import trap
from trapline.challenges.dflash import table
from trapline.gold.tree_decoding import oracle

VOCABULARY = 7
BAD = (ValueError, TypeError)


def distinct(rng: np.random.Generator, count: int, vocabulary: int = VOCABULARY) -> list[int]:
    """Different token ids in random order."""
    return [int(t) for t in rng.permutation(vocabulary)[:count]]


def rising(rng: np.random.Generator, count: int) -> list[int]:
    """Different token ids, lower ones first, for where the order of ids decides."""
    return sorted(distinct(rng, count))


def refused(submission: Submission, entry: str, *args: Any, **settings: Any) -> None:
    """The call raises ValueError or TypeError."""
    expect.raises(BAD, lambda: submission.call(entry, args, settings))


def float_type(rng: np.random.Generator) -> Any:
    return np.float32 if rng.integers(2) else np.float64


# --- building the tree ---------------------------------------------------------------


def two_good_roots(rng: np.random.Generator) -> tuple[np.ndarray, list[int], list[int]]:
    """Depth 1: a -0.5, b -1; depth 2: c -1, d -1.25. Heaviest: a, b, ac, ad, bc, bd."""
    a, b, c, d = distinct(rng, 4)
    log_q = table.log_q_of([{a: -0.5, b: -1.0}, {c: -1.0, d: -1.25}], VOCABULARY, float_type(rng))
    return log_q, [a, b, c, d, c, d], [-1, -1, 0, 0, 1, 1]


@trap(
    "chain-instead-of-tree",
    catches="the tree is the chain of most likely tokens",
    severity="critical",
    story="A single chain is the original scheme; the task asks for the heaviest prefixes.",
)
def chain_instead_of_tree(submission: Submission, rng: np.random.Generator) -> None:
    log_q, tokens, parents = two_good_roots(rng)
    for budget in (2, 3, 5):
        table.same_tree(submission, log_q, budget, (tokens[:budget], parents[:budget]))


@trap(
    "only-one-branch-grows",
    catches="below the first level only the best token of a depth is used",
    severity="critical",
    story="Siblings at the root and single chains below them: most of the tree is missing.",
)
def only_one_branch_grows(submission: Submission, rng: np.random.Generator) -> None:
    log_q, tokens, parents = two_good_roots(rng)
    table.same_tree(submission, log_q, 6, (tokens, parents))


@trap(
    "fixed-width-levels",
    catches="every level gets the same number of nodes instead of the heaviest overall",
    severity="critical",
    story="A fixed top-k at each depth spends the budget on prefixes that will never be reached.",
)
def fixed_width_levels(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, d = distinct(rng, 4)
    rows = [{a: -1.0, b: -1.25, c: -1.5, d: -1.75}, {a: -4.0, b: -4.0}]
    log_q = table.log_q_of(rows, VOCABULARY, float_type(rng))
    table.same_tree(submission, log_q, 4, ([a, b, c, d], [-1] * 4))


@trap(
    "siblings-cut-short",
    catches="a depth offers only a handful of its tokens, however flat it is",
    severity="major",
    story="A top-k of fixed size before the search: enough for peaked rows, wrong for flat ones.",
)
def siblings_cut_short(submission: Submission, rng: np.random.Generator) -> None:
    vocabulary = 40
    tokens = distinct(rng, 30, vocabulary)
    row = {token: -1.0 - rank / 64 for rank, token in enumerate(tokens)}
    log_q = table.log_q_of([row, {0: -8.0}], vocabulary, float_type(rng))
    table.same_tree(submission, log_q, 30, (tokens, [-1] * 30))


@trap(
    "root-counted-in-the-budget",
    catches="the tree has one node fewer than the budget",
    severity="major",
    story="The root is the last committed token; it is verified for free and is not a node.",
)
def root_counted(submission: Submission, rng: np.random.Generator) -> None:
    log_q, tokens, parents = two_good_roots(rng)
    for budget in (1, 4):
        table.same_tree(submission, log_q, budget, (tokens[:budget], parents[:budget]))


@trap(
    "breadth-first-order",
    catches="nodes come level by level instead of heaviest first",
    severity="major",
    story="Whoever cuts such a tree at half its size loses the deep, likely branch.",
)
def breadth_first_order(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c = distinct(rng, 3)
    log_q = table.log_q_of([{a: -0.5, b: -3.0}, {c: -0.5}], VOCABULARY, float_type(rng))
    table.same_tree(submission, log_q, 3, ([a, c, b], [-1, 0, -1]))


@trap(
    "first-draft-row-skipped",
    catches="row d of the draft is used for depth d instead of depth d + 1",
    severity="critical",
    story="In one drafter the first slot is the anchor, no prediction; here every row is one.",
)
def first_row_skipped(submission: Submission, rng: np.random.Generator) -> None:
    log_q, tokens, parents = two_good_roots(rng)
    table.same_tree(submission, log_q, 4, (tokens[:4], parents[:4]))


@trap(
    "parents-count-from-one",
    catches="the root is 0 and nodes count from 1 in `parents`",
    severity="critical",
    story="Row numbers and node numbers differ by one, and are mixed up all the time.",
)
def parents_count_from_one(submission: Submission, rng: np.random.Generator) -> None:
    log_q, tokens, parents = two_good_roots(rng)
    table.same_tree(submission, log_q, 3, (tokens[:3], parents[:3]))


@trap(
    "tie-deeper-first",
    catches="between equally heavy prefixes the deeper one comes first",
    severity="minor",
    story="A sure token (log-probability 0) makes a child as heavy as its parent.",
)
def tie_deeper_first(submission: Submission, rng: np.random.Generator) -> None:
    a, b = rising(rng, 2)
    c = int(rng.integers(VOCABULARY))
    log_q = table.log_q_of([{a: -1.0, b: -1.0}, {c: 0.0}], VOCABULARY, float_type(rng))
    table.same_tree(submission, log_q, 4, ([a, b, c, c], [-1, -1, 0, 1]))


@trap(
    "tie-higher-parent-first",
    catches="between equally heavy prefixes of one depth the one below the later node comes first",
    severity="minor",
    story="The order of ties decides what a smaller budget keeps; it must not be left to chance.",
)
def tie_higher_parent_first(submission: Submission, rng: np.random.Generator) -> None:
    a, b = rising(rng, 2)
    c = int(rng.integers(VOCABULARY))
    log_q = table.log_q_of([{a: -1.0, b: -1.0}, {c: -0.5}], VOCABULARY, float_type(rng))
    table.same_tree(submission, log_q, 3, ([a, b, c], [-1, -1, 0]))


@trap(
    "tie-higher-token-first",
    catches="between equally heavy siblings the higher token comes first",
    severity="minor",
    story="A reversed ascending sort reverses the ties with it.",
)
def tie_higher_token_first(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, d = rising(rng, 4)
    row = {a: -1.0, b: -1.0, c: -1.0, d: -1.0}
    log_q = table.log_q_of([row], VOCABULARY, float_type(rng))
    for budget in (2, 4):
        table.same_tree(submission, log_q, budget, ([a, b, c, d][:budget], [-1] * budget))


@trap(
    "token-before-parent-in-ties",
    catches="between equally heavy prefixes of one depth the lower token decides before the parent",
    severity="minor",
    story="The rule says lower parent first, and only then lower token.",
)
def token_before_parent(submission: Submission, rng: np.random.Generator) -> None:
    low, high = rising(rng, 2)
    a, b = rising(rng, 2)
    rows = [{a: -1.0, b: -1.5}, {high: -1.0, low: -0.5}]
    log_q = table.log_q_of(rows, VOCABULARY, float_type(rng))
    # a -1, b -1.5, a·low -1.5, then a·high -2 and b·low -2: the first has the lower parent.
    want = ([a, b, low, high, low], [-1, -1, 0, 0, 1])
    table.same_tree(submission, log_q, 5, want)


@trap(
    "weights-underflow",
    catches="weights are products of probabilities, which become 0 for unlikely prefixes",
    severity="major",
    story="exp(-800) is 0 in float64: from there on all prefixes look alike.",
)
def weights_underflow(submission: Submission, rng: np.random.Generator) -> None:
    worse, better = rising(rng, 2)
    rows = [{worse: -401.0, better: -400.0}, {worse: -403.0, better: -400.0}]
    log_q = table.log_q_of(rows, VOCABULARY, float_type(rng))
    want = ([better, worse, better, better, worse, worse], [-1, -1, 0, 1, 0, 1])
    table.same_tree(submission, log_q, 6, want)


@trap(
    "weights-in-float32",
    catches="weights are summed in float32",
    severity="minor",
    story="A draft in half or single precision is normal; its sums deserve better.",
)
def weights_in_float32(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c = distinct(rng, 3)
    big = -(2.0**24)
    log_q = table.log_q_of([{a: big, b: big - 2.0}, {c: -1.5}], VOCABULARY, np.float32)
    table.same_tree(submission, log_q, 3, ([a, c, b], [-1, 0, -1]))


@trap(
    "draft-normalised",
    catches="the rows of the draft are put through a softmax again",
    severity="major",
    story="Log-probabilities taken for logits: rows with mass missing change weight by depth.",
)
def draft_normalised(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c = distinct(rng, 3)
    log_q = table.log_q_of([{a: -1.0, b: -3.0}, {c: -4.0}], VOCABULARY, float_type(rng))
    table.same_tree(submission, log_q, 3, ([a, b, c], [-1, -1, 0]))


@trap(
    "budget-over-all-prefixes",
    catches="a budget above the number of possible prefixes fails",
    severity="major",
    story="The heap runs dry, and its next pop is an error.",
)
def budget_over_all(submission: Submission, rng: np.random.Generator) -> None:
    log_q, tokens, parents = two_good_roots(rng)
    table.same_tree(submission, log_q, 50, (tokens, parents))
    empty = np.zeros((0, VOCABULARY), dtype=float_type(rng))
    table.same_tree(submission, empty, 3, ([], []))


@trap(
    "budget-zero",
    catches="a budget of 0 still gives a node or fails",
    severity="minor",
    story="Speculation switched off is a setting, and means plain decoding.",
)
def budget_zero(submission: Submission, rng: np.random.Generator) -> None:
    log_q, _, _ = two_good_roots(rng)
    table.same_tree(submission, log_q, 0, ([], []))


@trap(
    "draft-modified",
    catches="the caller's draft is overwritten",
    severity="major",
    story="Marking a token as taken by writing -inf into somebody else's array.",
)
def draft_modified(submission: Submission, rng: np.random.Generator) -> None:
    log_q, _, _ = two_good_roots(rng)
    wide = log_q.astype(np.float64)
    before = wide.copy()
    _, after = submission.observe("build_tree", wide, 4)
    expect.equal(after[0], before, "log_q after the call")


@trap(
    "bad-drafts-accepted",
    catches="NaN, +inf, integers or a wrong rank are taken for a draft",
    severity="minor",
    story="NaN compares false with everything and comes out as the heaviest.",
)
def bad_drafts(submission: Submission, rng: np.random.Generator) -> None:
    log_q, _, _ = two_good_roots(rng)
    row, column = int(rng.integers(2)), int(rng.integers(VOCABULARY))
    for bad in (np.nan, np.inf):
        spoilt = log_q.copy()
        spoilt[row, column] = bad
        refused(submission, "build_tree", spoilt, 3)
    refused(submission, "build_tree", log_q[0], 3)
    refused(submission, "build_tree", np.zeros((2, 3), dtype=np.int64), 3)


@trap(
    "negative-budget-accepted",
    catches="a negative or fractional budget is accepted",
    severity="minor",
    story="A slice with a negative end quietly means something else.",
)
def negative_budget(submission: Submission, rng: np.random.Generator) -> None:
    log_q, _, _ = two_good_roots(rng)
    refused(submission, "build_tree", log_q, -1 - int(rng.integers(3)))
    refused(submission, "build_tree", log_q, 2.5)
    target = Stub(tree_log_probs=lambda prefix, tokens, parents: np.zeros((len(tokens) + 1, 7)))
    drafter = Stub(block=lambda prefix: np.full((1, 7), -2.0))
    for limit in (0, 2):
        settings = {"max_new_tokens": limit, "eos_id": 1, "budget": -1}
        refused(submission, "generate", target, drafter, [1], **settings)


# --- the mask ------------------------------------------------------------------------

#: Root → 0, 1; 0 → 2, 3; 2 → 4; 1 → 5: siblings, cousins and a branch of three.
FAMILY = np.array([-1, -1, 0, 0, 2, 1])


def same_mask(submission: Submission, parents: np.ndarray, prefix_len: int) -> np.ndarray:
    got = submission.tree_mask(parents, prefix_len)
    expect.equal(got, oracle.tree_mask(parents.tolist(), prefix_len), "the mask")
    return np.asarray(got)


def family_mask(submission: Submission, rng: np.random.Generator) -> None:
    same_mask(submission, FAMILY, int(rng.integers(1, 6)))


@trap(
    "mask-causal",
    catches="every node sees all nodes before it, its siblings among them",
    severity="critical",
    story="A triangle instead of ancestors: logits of a node then depend on its rejected siblings.",
)
def mask_causal(submission: Submission, rng: np.random.Generator) -> None:
    family_mask(submission, rng)


@trap(
    "mask-without-self",
    catches="a node does not see itself",
    severity="critical",
    story="Ancestors are not the whole of it: the token must be read as well.",
)
def mask_without_self(submission: Submission, rng: np.random.Generator) -> None:
    family_mask(submission, rng)


@trap(
    "mask-parent-only",
    catches="a node sees its parent but no older ancestor",
    severity="critical",
    story="One step up the tree looks right at depth 2 and is wrong from depth 3 on.",
)
def mask_parent_only(submission: Submission, rng: np.random.Generator) -> None:
    family_mask(submission, rng)


@trap(
    "mask-without-root",
    catches="the nodes do not see the root",
    severity="critical",
    story="The root is in neither the prefix nor the tree's arrays, and falls between them.",
)
def mask_without_root(submission: Submission, rng: np.random.Generator) -> None:
    family_mask(submission, rng)


@trap(
    "mask-without-prefix",
    catches="the nodes do not see the committed prefix",
    severity="critical",
    story="A tree mask put over the whole attention instead of its last columns.",
)
def mask_without_prefix(submission: Submission, rng: np.random.Generator) -> None:
    family_mask(submission, rng)


@trap(
    "mask-root-sees-drafts",
    catches="the root sees the drafted nodes",
    severity="critical",
    story="The root's own logits then depend on guesses about what follows it.",
)
def mask_root_sees_drafts(submission: Submission, rng: np.random.Generator) -> None:
    family_mask(submission, rng)


@trap(
    "mask-transposed",
    catches="nodes see their descendants instead of their ancestors",
    severity="critical",
    story="Rows are queries and columns are keys; the other way round nothing is lost in shape.",
)
def mask_transposed(submission: Submission, rng: np.random.Generator) -> None:
    family_mask(submission, rng)


@trap(
    "mask-prefix-counts-the-root",
    catches="prefix_len is taken to include the root, so a column is missing",
    severity="major",
    story="Two conventions for the length of the committed part differ by exactly the root.",
)
def mask_prefix_counts_root(submission: Submission, rng: np.random.Generator) -> None:
    family_mask(submission, rng)


@trap(
    "mask-not-boolean",
    catches="the mask is made of numbers",
    severity="minor",
    story="0 and 1 added to scores mask nothing; 0 and -inf as booleans mask the wrong half.",
)
def mask_not_boolean(submission: Submission, rng: np.random.Generator) -> None:
    family_mask(submission, rng)


@trap(
    "mask-of-nothing",
    catches="an empty tree or an empty prefix fails",
    severity="minor",
    story="The first token after a one-token prompt, and a draft without a node.",
)
def mask_of_nothing(submission: Submission, rng: np.random.Generator) -> None:
    empty = np.zeros(0, dtype=np.int64)
    same_mask(submission, empty, 0)
    same_mask(submission, empty, int(rng.integers(1, 5)))
    same_mask(submission, FAMILY, 0)


@trap(
    "impossible-parents-accepted",
    catches="a parent that does not come before its child, or does not exist, is accepted",
    severity="minor",
    story="A negative index other than -1 reads from the end of the array without a word.",
)
def impossible_parents(submission: Submission, rng: np.random.Generator) -> None:
    place = int(rng.integers(1, 6))
    for bad in (-2, place, place + 1, 6):
        parents = FAMILY.copy()
        parents[place] = bad
        refused(submission, "tree_mask", parents, 2)
        refused(submission, "verify_tree", np.arange(6), parents, np.arange(7))


# --- verification --------------------------------------------------------------------


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


# --- sampling ------------------------------------------------------------------------


def sampled(
    submission: Submission,
    tokens: list[int],
    parents: list[int],
    probs: list[list[float]],
    uniforms: list[float],
    want: tuple[list[int], int],
    dtype: Any = np.float64,
) -> None:
    law = np.array(probs, dtype=dtype)
    numbers = np.array(uniforms, dtype=dtype)
    tree = np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64)
    table.same_verdict(submission.verify_sampled(*tree, law, numbers), want)


@trap(
    "biased-by-redrawing",
    catches="a child is accepted or rejected by a draw of its own instead of the node's one sample",
    severity="critical",
    story="Drawing anew for each child biases the output by more than a tenth in a small study, "
    "while looking like rejection sampling.",
)
def biased_by_redrawing(submission: Submission, rng: np.random.Generator) -> None:
    # Children 0 and 1 of the root; its sample says 2, whatever the children's numbers are.
    law = [[0.25, 0.25, 0.5], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    small = float(rng.integers(1, 8)) / 64
    sampled(submission, [0, 1], [-1, -1], law, [0.75, small, small], ([], 2), float_type(rng))


@trap(
    "greedy-instead-of-sampled",
    catches="the pick is the most likely token, not the sample",
    severity="critical",
    story="Argmax matching at a temperature above 0: output that looks greedy.",
)
def greedy_instead(submission: Submission, rng: np.random.Generator) -> None:
    law = [[0.25, 0.5, 0.25], [0.25, 0.25, 0.5]]
    sampled(submission, [2], [-1], law, [0.875, 0.125], ([0], 0), float_type(rng))


@trap(
    "one-number-for-all",
    catches="the root's number decides at every node",
    severity="critical",
    story="Then the samples along a path are not independent.",
)
def one_number(submission: Submission, rng: np.random.Generator) -> None:
    law = [[0.5, 0.5], [0.5, 0.5]]
    sampled(submission, [0], [-1], law, [0.25, 0.75], ([0], 1), float_type(rng))


@trap(
    "numbers-by-depth",
    catches="the nodes of one depth share a number",
    severity="critical",
    story="The walk counts its steps and uses the count as an index.",
)
def numbers_by_depth(submission: Submission, rng: np.random.Generator) -> None:
    law = [[0.5, 0.5]] * 3
    sampled(submission, [0, 1], [-1, -1], law, [0.75, 0.25, 0.875], ([1], 1), float_type(rng))


@trap(
    "only-children-sampled",
    catches="the sample is drawn among the children's tokens only",
    severity="critical",
    story="What the drafter did not think of can then never be said.",
)
def only_children(submission: Submission, rng: np.random.Generator) -> None:
    law = [[0.25, 0.25, 0.5], [0.5, 0.25, 0.25]]
    sampled(submission, [0], [-1], law, [0.625, 0.25], ([], 2), float_type(rng))


@trap(
    "sorted-by-probability",
    catches="the cumulative sum runs over tokens sorted by probability",
    severity="major",
    story="How top-p is written; the contract goes by token order.",
)
def sorted_by_probability(submission: Submission, rng: np.random.Generator) -> None:
    law = [[0.125, 0.25, 0.625]]
    sampled(submission, [], [], law, [0.25], ([], 1), float_type(rng))


@trap(
    "boundary-belongs-below",
    catches="a number equal to a cumulative probability picks the token below it",
    severity="minor",
    story="`searchsorted` from the left: reaching is not exceeding.",
)
def boundary(submission: Submission, rng: np.random.Generator) -> None:
    law = [[0.25, 0.25, 0.5], [0.5, 0.5, 0.0]]
    sampled(submission, [1], [-1], law, [0.25, 0.5], ([0], 1), float_type(rng))


@trap(
    "impossible-token-at-zero",
    catches="the number 0 picks a first token of probability 0",
    severity="major",
    story="A number of exactly 0 comes once in sixteen million draws and says the unsayable.",
)
def impossible_at_zero(submission: Submission, rng: np.random.Generator) -> None:
    law = [[0.0, 0.0, 0.5, 0.5]]
    sampled(submission, [], [], law, [0.0], ([], 2), float_type(rng))


TENTHS = [0.1] * 10 + [0.0, 0.0]
ALMOST_ONE = float(np.nextafter(1.0, 0.0))


@trap(
    "rounding-falls-off-the-end",
    catches="when rounding leaves the total below the number, an impossible token is picked",
    severity="major",
    story="Ten times 0.1 is less than 1 in binary; a clipped or wrapped index says an impossible "
    "token.",
)
def off_the_end(submission: Submission, rng: np.random.Generator) -> None:  # noqa: ARG001
    sampled(submission, [], [], [TENTHS], [ALMOST_ONE], ([], 9))


@trap(
    "rounding-starts-again",
    catches="when rounding leaves the total below the number, the first token is picked",
    severity="major",
    story="argmax over an all-false array is 0.",
)
def starts_again(submission: Submission, rng: np.random.Generator) -> None:  # noqa: ARG001
    sampled(submission, [9], [-1], [TENTHS, TENTHS], [ALMOST_ONE, 0.0], ([0], 0))


@trap(
    "bad-laws-accepted",
    catches="negative or NaN probabilities, or numbers outside [0, 1), are accepted",
    severity="minor",
    story="A number of exactly 1 comes from rounding to float32, and exceeds every sum.",
)
def bad_laws(submission: Submission, rng: np.random.Generator) -> None:
    tokens, parents = np.array([1]), np.array([-1])
    law = np.array([[0.5, 0.5], [0.5, 0.5]])
    place = int(rng.integers(2)), int(rng.integers(2))
    for bad in (-0.25, np.nan):
        spoilt = law.copy()
        spoilt[place] = bad
        fair = np.array([0.25, 0.25])
        refused(submission, "verify_sampled", tokens, parents, spoilt, fair)
    for number in (1.0, -0.125, np.nan):
        spoilt = np.array([0.25, 0.25])
        spoilt[place[0]] = number
        refused(submission, "verify_sampled", tokens, parents, law, spoilt)
    one = np.array([0.25])
    refused(submission, "verify_sampled", tokens, parents, law, one)


# --- committing the cache ------------------------------------------------------------


def cache(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(float_type(rng))


def same_rows(submission: Submission, kv: np.ndarray, prefix_len: int, path: list[int]) -> None:
    got = submission.compact(kv, prefix_len, path)
    expect.equal(got, oracle.compact(kv, prefix_len, path), "the committed rows")


@trap(
    "cache-not-compacted",
    catches="the first rows after the root are kept instead of the accepted ones",
    severity="critical",
    story="Cropping to the right length keeps a rejected sibling's keys; rounds later the text is "
    "gibberish.",
)
def not_compacted(submission: Submission, rng: np.random.Generator) -> None:
    same_rows(submission, cache(rng, 2, 3, 4 + 1 + 6, 5), 4, [1, 3, 5])


@trap(
    "cache-rows-off-by-one",
    catches="node i is read from the row of node i - 1",
    severity="critical",
    story="The root has a row of its own between prefix and nodes.",
)
def rows_off_by_one(submission: Submission, rng: np.random.Generator) -> None:
    same_rows(submission, cache(rng, 2, 3, 4 + 1 + 6, 5), 4, [0, 2])


@trap(
    "root-row-lost",
    catches="the root's row is not committed",
    severity="critical",
    story="The last committed token has no keys in the cache before its pass; after it they must "
    "stay.",
)
def root_row_lost(submission: Submission, rng: np.random.Generator) -> None:
    same_rows(submission, cache(rng, 3, 2 + 1 + 4, 2), 2, [1, 2])
    same_rows(submission, cache(rng, 3, 2 + 1 + 4, 2), 2, [])


@trap(
    "row-for-the-bonus",
    catches="a row is kept for the bonus token, which has none yet",
    severity="major",
    story="The bonus is the next root: its keys are computed in the next pass.",
)
def row_for_the_bonus(submission: Submission, rng: np.random.Generator) -> None:
    same_rows(submission, cache(rng, 3, 2 + 1 + 5, 2), 2, [0, 2])


@trap(
    "path-sorted",
    catches="the path's rows are put into index order",
    severity="minor",
    story="A path is in the order of its tokens, whatever the indices are.",
)
def path_sorted(submission: Submission, rng: np.random.Generator) -> None:
    same_rows(submission, cache(rng, 3, 2 + 1 + 5, 2), 2, [4, 1, 3])


@trap(
    "one-layout-only",
    catches="the rows are looked for in a fixed axis, not the last but one",
    severity="major",
    story="Caches come as (rows, D), (heads, rows, D) and (layers, batch, heads, rows, D).",
)
def one_layout_only(submission: Submission, rng: np.random.Generator) -> None:
    for lead in ((), (7,), (2, 7, 7), (7, 1, 2, 3)):
        same_rows(submission, cache(rng, *lead, 7, 3), 2, [1, 3])


@trap(
    "empty-path-fails",
    catches="a path without nodes fails",
    severity="major",
    story="np.array([]) is an array of floats, and floats are no index: it fails when every draft "
    "is rejected.",
)
def empty_path(submission: Submission, rng: np.random.Generator) -> None:
    same_rows(submission, cache(rng, 2, 3 + 1 + 4, 2), 3, [])
    same_rows(submission, cache(rng, 2, 0 + 1 + 4, 2), 0, [])


@trap(
    "cache-moved-in-place",
    catches="the rows are moved inside the caller's cache",
    severity="major",
    story="A gather in place overwrites rows that are still to be read, and the caller's data.",
)
def moved_in_place(submission: Submission, rng: np.random.Generator) -> None:
    kv = cache(rng, 2, 2 + 1 + 5, 3)
    before = kv.copy()
    _, after = submission.observe("compact", kv, 2, [1, 4])
    expect.equal(after[0], before, "the cache after the call")


@trap(
    "cache-dtype-changed",
    catches="the committed cache has another dtype",
    severity="minor",
    story="float64 in a float32 cache doubles its size.",
)
def dtype_changed(submission: Submission, rng: np.random.Generator) -> None:
    for dtype in (np.float32, np.float16):
        same_rows(submission, rng.standard_normal((2, 6, 3)).astype(dtype), 1, [0, 2])


@trap(
    "path-outside-the-cache",
    catches="a node that does not exist is taken from the wrong end of the cache",
    severity="minor",
    story="A negative index is valid Python.",
)
def path_outside(submission: Submission, rng: np.random.Generator) -> None:
    kv = cache(rng, 2, 2 + 1 + 3, 2)
    for path in ([-1], [0, 3], [0, -2]):
        refused(submission, "compact", kv, 2, path)
    refused(submission, "compact", kv, 6, [])
    refused(submission, "compact", kv, -1, [0])


# --- generating ----------------------------------------------------------------------


def story_of(
    rng: np.random.Generator, length: int = 12
) -> tuple[tuple[int, ...], list[int], int, oracle.Law]:
    """A prompt, what the target will say after it, an EOS that it does not say, and the target."""
    eos = int(rng.integers(VOCABULARY))
    others = [token for token in range(VOCABULARY) if token != eos]
    prompt = tuple(int(rng.choice(others)) for _ in range(3))
    script = [int(rng.choice(others)) for _ in range(length)]
    return prompt, script, eos, table.scripted_law(VOCABULARY, prompt, script)


@trap(
    "drafts-not-verified",
    catches="drafted tokens are taken as they come",
    severity="critical",
    story="Fast and wrong: the output is the drafter's.",
)
def drafts_not_verified(submission: Submission, rng: np.random.Generator) -> None:
    prompt, _, eos, law = story_of(rng)
    draft = table.hopeless_draft(law, 3, VOCABULARY)
    table.run(submission, law, draft, prompt, max_new_tokens=6, eos_id=eos, budget=4)


@trap(
    "committed-prefix-wrong",
    catches="the next pass continues from the bonus without the accepted tokens before it",
    severity="critical",
    story="Cache and text drift apart after the first accepted draft.",
)
def committed_prefix_wrong(submission: Submission, rng: np.random.Generator) -> None:
    prompt, _, eos, law = story_of(rng)
    draft = table.perfect_draft(law, 2, VOCABULARY)
    table.run(
        submission, law, draft, prompt, compare=["passes"], max_new_tokens=9, eos_id=eos, budget=2
    )


@trap(
    "prefix-without-root",
    catches="the target is given the prefix without its last token",
    severity="critical",
    story="The root belongs to the prefix that the target sees, and not to the tree.",
)
def prefix_without_root(submission: Submission, rng: np.random.Generator) -> None:
    prompt, _, eos, law = story_of(rng)
    draft = table.perfect_draft(law, 2, VOCABULARY)
    table.run(
        submission, law, draft, prompt, compare=["passes"], max_new_tokens=4, eos_id=eos, budget=2
    )


@trap(
    "drafter-left-behind",
    catches="the drafter is asked about the prompt again, not about what has been generated",
    severity="major",
    story="Accepted tokens that never reach the drafter: output right, acceptance gone.",
)
def drafter_left_behind(submission: Submission, rng: np.random.Generator) -> None:
    prompt, _, eos, law = story_of(rng)
    draft = table.perfect_draft(law, 2, VOCABULARY)
    got = table.run(submission, law, draft, prompt, max_new_tokens=9, eos_id=eos, budget=2)
    expect.equal(got.draft_prefixes[:3], got.target_prefixes[:3], "what the drafter was shown")


@trap(
    "bonus-thrown-away",
    catches="after accepted drafts the target's own next token is not used",
    severity="major",
    story="It comes back in the next pass: the output is right and a pass is wasted each time.",
)
def bonus_thrown_away(submission: Submission, rng: np.random.Generator) -> None:
    prompt, _, eos, law = story_of(rng)
    draft = table.perfect_draft(law, 2, VOCABULARY)
    table.run(
        submission, law, draft, prompt, compare=["passes"], max_new_tokens=9, eos_id=eos, budget=2
    )


@trap(
    "end-inside-a-branch",
    catches="tokens after an EOS in the middle of an accepted branch are kept",
    severity="critical",
    story="Only the last token of a round was compared with EOS.",
)
def end_inside(submission: Submission, rng: np.random.Generator) -> None:
    prompt, script, eos, _ = story_of(rng)
    script[1] = eos
    law = table.scripted_law(VOCABULARY, prompt, script)
    draft = table.perfect_draft(law, 3, VOCABULARY)
    table.run(submission, law, draft, prompt, max_new_tokens=10, eos_id=eos, budget=4)


@trap(
    "end-at-once",
    catches="an EOS as the very first token does not end the generation",
    severity="critical",
    story="A stop test that begins at the second token.",
)
def end_at_once(submission: Submission, rng: np.random.Generator) -> None:
    prompt, script, eos, _ = story_of(rng)
    script[0] = eos
    law = table.scripted_law(VOCABULARY, prompt, script)
    for draft in (
        table.perfect_draft(law, 2, VOCABULARY),
        table.hopeless_draft(law, 1, VOCABULARY),
    ):
        table.run(submission, law, draft, prompt, max_new_tokens=5, eos_id=eos, budget=2)


@trap(
    "runs-past-the-limit",
    catches="more than max_new_tokens come back",
    severity="critical",
    story="A whole branch is appended before the length is tested.",
)
def past_the_limit(submission: Submission, rng: np.random.Generator) -> None:
    prompt, _, eos, law = story_of(rng)
    draft = table.perfect_draft(law, 3, VOCABULARY)
    for limit in (1, 3, 6):
        table.run(submission, law, draft, prompt, max_new_tokens=limit, eos_id=eos, budget=4)


@trap(
    "accepted-counts-what-was-cut",
    catches="`accepted` counts drafted tokens that are not in the output",
    severity="major",
    story="Acceptance figures that include what lay behind the end flatter the drafter.",
)
def accepted_counts_cut(submission: Submission, rng: np.random.Generator) -> None:
    prompt, script, eos, _ = story_of(rng)
    script[1] = eos
    law = table.scripted_law(VOCABULARY, prompt, script)
    draft = table.perfect_draft(law, 3, VOCABULARY)
    table.run(
        submission,
        law,
        draft,
        prompt,
        compare=["accepted"],
        max_new_tokens=10,
        eos_id=eos,
        budget=4,
    )
    table.run(
        submission, law, draft, prompt, compare=["accepted"], max_new_tokens=1, eos_id=eos, budget=4
    )


@trap(
    "accepted-counts-the-bonus",
    catches="`accepted` counts the target's own tokens",
    severity="major",
    story="Figures with and without the bonus differ by one a pass and are compared all the same.",
)
def accepted_counts_bonus(submission: Submission, rng: np.random.Generator) -> None:
    prompt, _, eos, law = story_of(rng)
    draft = table.hopeless_draft(law, 2, VOCABULARY)
    table.run(
        submission, law, draft, prompt, compare=["accepted"], max_new_tokens=4, eos_id=eos, budget=3
    )


@trap(
    "passes-miscounted",
    catches="`target_passes` is not the number of calls of the target",
    severity="minor",
    story="A pass for a prefill that never happened, or one a token.",
)
def passes_miscounted(submission: Submission, rng: np.random.Generator) -> None:
    prompt, _, eos, law = story_of(rng)
    draft = table.perfect_draft(law, 3, VOCABULARY)
    table.run(
        submission,
        law,
        draft,
        prompt,
        compare=["target_passes"],
        max_new_tokens=8,
        eos_id=eos,
        budget=3,
    )


@trap(
    "tie-higher-token-said",
    catches="of two equally likely tokens the target's pick is the higher one",
    severity="minor",
    story="A sort in the place of an argmax.",
)
def tie_higher_said(submission: Submission, rng: np.random.Generator) -> None:
    low, high = rising(rng, 2)
    eos = next(token for token in range(VOCABULARY) if token not in (low, high))

    def law(prefix: table.Prefix) -> np.ndarray:
        values = np.full(VOCABULARY, -6.0)
        values[[low, high]] = -1.0 - len(prefix) / 8
        return values

    draft = table.hopeless_draft(law, 1, VOCABULARY)
    got = table.run(submission, law, draft, [high], max_new_tokens=3, eos_id=eos, budget=2)
    expect.equal(got.tokens, [low] * 3, "the output")


@trap(
    "end-left-out",
    catches="the EOS token is missing from the output",
    severity="major",
    story="The contract ends at and includes it.",
)
def end_left_out(submission: Submission, rng: np.random.Generator) -> None:
    prompt, script, eos, _ = story_of(rng)
    script[3] = eos
    law = table.scripted_law(VOCABULARY, prompt, script)
    draft = table.perfect_draft(law, 2, VOCABULARY)
    table.run(submission, law, draft, prompt, max_new_tokens=10, eos_id=eos, budget=2)


@trap(
    "prompt-in-the-output",
    catches="the output begins with the prompt",
    severity="major",
    story="Generation interfaces differ in this; the contract says without.",
)
def prompt_in_output(submission: Submission, rng: np.random.Generator) -> None:
    prompt, _, eos, law = story_of(rng)
    draft = table.perfect_draft(law, 2, VOCABULARY)
    table.run(submission, law, draft, prompt, max_new_tokens=4, eos_id=eos, budget=2)


@trap(
    "end-in-the-prompt",
    catches="a prompt that ends with EOS generates nothing",
    severity="major",
    story="Chat prompts end with an end-of-turn token all the time.",
)
def end_in_the_prompt(submission: Submission, rng: np.random.Generator) -> None:
    prompt, script, eos, _ = story_of(rng)
    prompt = (*prompt, eos)
    law = table.scripted_law(VOCABULARY, prompt, script)
    draft = table.perfect_draft(law, 2, VOCABULARY)
    table.run(submission, law, draft, prompt, max_new_tokens=5, eos_id=eos, budget=2)


@trap(
    "generating-modifies-the-prompt",
    catches="generated tokens are appended to the caller's prompt",
    severity="major",
    story="`prefix = prompt` is a second name, not a copy.",
)
def modifies_the_prompt(submission: Submission, rng: np.random.Generator) -> None:
    prompt, _, eos, law = story_of(rng)
    draft = table.perfect_draft(law, 2, VOCABULARY)

    def rows(prefix: Any, tokens: Any, parents: Any) -> np.ndarray:
        branches: list[tuple[int, ...]] = [tuple(prefix)]
        for token, parent in zip(np.asarray(tokens), np.asarray(parents), strict=True):
            branches.append((*branches[int(parent) + 1], int(token)))
        return np.stack([law(branch) for branch in branches])

    target, drafter = Stub(tree_log_probs=rows), Stub(block=lambda prefix: draft(tuple(prefix)))
    settings = {"max_new_tokens": 5, "eos_id": eos, "budget": 2}
    _, after = submission.observe("generate", target, drafter, list(prompt), **settings)
    expect.equal(after[2], list(prompt), "the prompt after the call")


@trap(
    "text-kept-between-calls",
    catches="a second call continues where the first one ended",
    severity="critical",
    story="A default argument or a module variable that lives on.",
)
def kept_between_calls(submission: Submission, rng: np.random.Generator) -> None:
    prompt, _, eos, law = story_of(rng)
    draft = table.perfect_draft(law, 2, VOCABULARY)
    for limit in (4, 4, 2):
        table.run(submission, law, draft, prompt, max_new_tokens=limit, eos_id=eos, budget=2)


@trap(
    "pass-after-the-end",
    catches="the target is called again although the output is complete",
    severity="minor",
    story="The stop test comes one call too late; the extra pass is thrown away and paid for.",
)
def pass_after_the_end(submission: Submission, rng: np.random.Generator) -> None:
    prompt, script, eos, law = story_of(rng)
    draft = table.hopeless_draft(law, 2, VOCABULARY)
    table.run(
        submission, law, draft, prompt, compare=["passes"], max_new_tokens=3, eos_id=eos, budget=2
    )
    script[2] = eos
    ending = table.scripted_law(VOCABULARY, prompt, script)
    table.run(
        submission,
        ending,
        table.hopeless_draft(ending, 2, VOCABULARY),
        prompt,
        compare=["passes"],
        max_new_tokens=9,
        eos_id=eos,
        budget=2,
    )


@trap(
    "nothing-to-generate",
    catches="max_new_tokens of 0 generates a token or calls a model",
    severity="minor",
    story="A loop that tests its condition at the end.",
)
def nothing_to_generate(submission: Submission, rng: np.random.Generator) -> None:
    prompt, _, eos, law = story_of(rng)
    draft = table.perfect_draft(law, 2, VOCABULARY)
    table.run(
        submission, law, draft, prompt, compare=["passes"], max_new_tokens=0, eos_id=eos, budget=2
    )


@trap(
    "budget-ignored-by-generate",
    catches="the target is given more nodes than the budget allows",
    severity="major",
    story="The budget is what the verification costs; a pass with more nodes is a slower pass.",
)
def budget_ignored(submission: Submission, rng: np.random.Generator) -> None:
    prompt, _, eos, law = story_of(rng)
    draft = table.noisy_draft(int(rng.integers(2**31)), law, 2, VOCABULARY)
    for budget in (0, 1, 5):
        table.run(
            submission,
            law,
            draft,
            prompt,
            compare=["nodes"],
            max_new_tokens=5,
            eos_id=eos,
            budget=budget,
        )


@trap(
    "empty-block-gives-up",
    catches="a drafter without a proposal ends the generation",
    severity="major",
    story="No node means one token a pass, not none.",
)
def empty_block(submission: Submission, rng: np.random.Generator) -> None:
    prompt, _, eos, law = story_of(rng)

    def silent(prefix: table.Prefix) -> np.ndarray:  # noqa: ARG001 - it has nothing to say
        return np.zeros((0, VOCABULARY))

    table.run(submission, law, silent, prompt, max_new_tokens=4, eos_id=eos, budget=3)
    impossible = np.full((2, VOCABULARY), -np.inf)
    table.run(submission, law, lambda _: impossible, prompt, max_new_tokens=3, eos_id=eos, budget=3)


@trap(
    "only-the-chain-is-drafted",
    catches="generate verifies the most likely chain instead of the tree",
    severity="critical",
    story="The tree exists, is tested, and is not used where it counts.",
)
def only_the_chain(submission: Submission, rng: np.random.Generator) -> None:
    prompt, script, eos, law = story_of(rng)

    def second_best(prefix: table.Prefix) -> np.ndarray:
        """The right token is the second choice at every position."""
        done = len(prefix) - len(prompt)
        log_q = np.full((2, VOCABULARY), -9.0)
        for depth in range(2):
            right = script[done + depth] if done + depth < len(script) else 0
            log_q[depth, right] = -1.0
            log_q[depth, (right + 1) % VOCABULARY] = -0.5
        return log_q

    table.run(
        submission,
        law,
        second_best,
        prompt,
        compare=["passes"],
        max_new_tokens=6,
        eos_id=eos,
        budget=6,
    )


@trap(
    "rootless-prompt-accepted",
    catches="an empty prompt is accepted although there is no root",
    severity="minor",
    story="prefix[-1] of nothing fails somewhere else, later, with another error.",
)
def rootless_prompt(submission: Submission, rng: np.random.Generator) -> None:
    eos = int(rng.integers(VOCABULARY))
    target = Stub(tree_log_probs=lambda prefix, tokens, parents: np.zeros((len(tokens) + 1, 7)))
    drafter = Stub(block=lambda prefix: np.full((1, 7), -2.0))
    settings = {"max_new_tokens": 3, "eos_id": eos, "budget": 2}
    refused(submission, "generate", target, drafter, [], **settings)


@trap(
    "bad-target-answers-accepted",
    catches="an answer of the target with the wrong rows or with NaN goes unnoticed",
    severity="major",
    story="NaN is what argmax likes best.",
)
def bad_target_answers(submission: Submission, rng: np.random.Generator) -> None:
    settings = {"max_new_tokens": 3, "eos_id": int(rng.integers(VOCABULARY)), "budget": 2}
    drafter = Stub(block=lambda prefix: np.full((1, VOCABULARY), -2.0))

    def answered(answer: Any) -> None:
        target = Stub(tree_log_probs=lambda prefix, tokens, parents: answer(len(tokens) + 1))
        refused(submission, "generate", target, drafter, [1, 2], **settings)

    def one_nan(rows: int) -> np.ndarray:
        """In the last row, which verification does not come to."""
        values = np.full((rows, VOCABULARY), -2.0)
        values[-1, -1] = np.nan
        return values

    answered(lambda rows: np.full((rows - 1, VOCABULARY), -2.0))
    answered(lambda rows: np.full((rows + 1, VOCABULARY), -2.0))
    answered(lambda rows: np.full((rows, VOCABULARY), np.nan))
    answered(one_nan)
    answered(lambda rows: np.full((rows, VOCABULARY), -2))
    answered(lambda rows: np.full((rows, VOCABULARY), -2.0 + 0.0j))


@trap(
    "tie-parent-before-depth",
    catches="between equal weights the lower parent is preferred before the lower depth",
    severity="minor",
    story="A heap of (weight, parent, token): nodes are numbered by weight, so a low number can "
    "be deep.",
)
def tie_parent_before_depth(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, d = distinct(rng, 4)
    rows = [{a: -0.5, b: -1.0}, {c: -0.25}, {d: -0.5}]
    log_q = table.log_q_of(rows, VOCABULARY, float_type(rng))
    table.same_tree(submission, log_q, 5, ([a, c, b, c, d], [-1, 0, -1, 2, 1]))


@trap(
    "mask-of-a-long-branch",
    catches="a node far down its branch does not see the first of its ancestors",
    severity="major",
    story="A fixed number of doublings follows ancestors only so far; a narrow integer for row "
    "numbers does the same.",
)
def mask_of_a_long_branch(submission: Submission, rng: np.random.Generator) -> None:
    prefix_len = int(rng.integers(3))
    chain = np.arange(-1, 69)
    want = np.tri(71, prefix_len + 71, prefix_len, dtype=bool)
    expect.equal(submission.tree_mask(chain, prefix_len), want, "the mask of a chain")
    for nodes, dtype in ((300, np.int64), (129, np.int8)):
        # Everything hangs below the root, only the last node below the one before it.
        parents = np.full(nodes, -1, dtype=dtype)
        parents[-1] = nodes - 2
        want = np.eye(nodes + 1, prefix_len + nodes + 1, prefix_len, dtype=bool)
        want[:, : prefix_len + 1] = True
        want[-1, -2] = True
        expect.equal(submission.tree_mask(parents, prefix_len), want, "the mask of a wide tree")


@trap(
    "picks-in-float32",
    catches="the target's float64 log-probabilities are compared in float32",
    severity="minor",
    story="Two tokens that differ in the tenth digit become a tie, and the wrong one is said.",
)
def picks_in_float32(submission: Submission, rng: np.random.Generator) -> None:
    low, high, eos = (*rising(rng, 2), VOCABULARY)
    values = np.full(VOCABULARY + 1, -9.0)
    values[low], values[high] = -1.0 - 2.0**-40, -1.0
    draft = table.log_q_of([{low: -1.0, high: -1.0}], VOCABULARY + 1, np.float64)
    settings: dict[str, Any] = {"max_new_tokens": 3, "eos_id": eos, "budget": 2}
    table.run(submission, lambda _: values, lambda _: draft, (low,), **settings)


@trap(
    "draft-length-remembered",
    catches="later blocks are cut to the length of the first one",
    severity="major",
    story="The depth of the tree is read off once, before the drafter has warmed up.",
)
def draft_length_remembered(submission: Submission, rng: np.random.Generator) -> None:
    prompt, _, eos, law = story_of(rng)
    full = table.perfect_draft(law, 3, VOCABULARY)

    def growing(prefix: table.Prefix) -> np.ndarray:
        return np.asarray(full(prefix)[: len(prefix) - len(prompt)])

    table.run(
        submission, law, growing, prompt, compare=["passes"], max_new_tokens=9, eos_id=eos, budget=3
    )


@trap(
    "complex-arrays-accepted",
    catches="complex or integer arrays are accepted where floating ones are due",
    severity="minor",
    story="Complex numbers are ordered and cast with no more than a warning.",
)
def complex_arrays(submission: Submission, rng: np.random.Generator) -> None:
    tokens, parents = np.array([1]), np.array([-1])
    law, fair = np.full((2, 2), 0.5), np.array([0.25, 0.25])
    for wrong in (np.complex128, np.int64):
        refused(submission, "build_tree", np.zeros((2, 3), dtype=wrong), 2)
        ones = np.ones((2, 2), dtype=wrong)
        refused(submission, "verify_sampled", tokens, parents, ones, fair)
        zeros = np.zeros(2, dtype=wrong)
        refused(submission, "verify_sampled", tokens, parents, law, zeros)
        refused(submission, "compact", cache(rng, 2, 4, 3).astype(wrong), 1, [0])
