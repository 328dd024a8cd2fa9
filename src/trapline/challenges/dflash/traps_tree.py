"""Bugs of building the tree."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, edits, insert_after, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.dflash import table
from trapline.challenges.dflash.situations import (
    VOCABULARY,
    WRITTEN,
    distinct,
    float_type,
    rising,
)
from trapline.challenges.dflash.solution_lines import POP, PUSH, RANKED

# Parts of the gold solution that several mutants edit.
SIBLING = "        offer(above, depth, parent, rank + 1)\n"
WHILE = "    while heap and len(tokens) < budget:\n"
TREE = "    return np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64)\n"
_DRAFT = "    return log_q.astype(np.float64)\n"
_BEST = '    best = candidates[np.argsort(-row[candidates], kind="stable")[:count]]\n'
#: The heaviest of every level are sorted together once all levels are there, so that a child as
#: heavy as its parent comes before it.
_LEVELS_MERGED = edits(
    (WHILE, "    depths, weights = [], []\n    while heap:\n"),
    (
        POP,
        POP + "        if depths.count(depth) >= budget:\n            continue\n"
        "        depths.append(depth)\n        weights.append(-negative)\n",
    ),
    (
        TREE,
        "    order = np.lexsort((-np.array(depths), -np.array(weights)))[:budget].tolist()\n"
        "    places = {-1: -1, **{node: place for place, node in enumerate(order)}}\n"
        "    tokens = [tokens[node] for node in order]\n"
        "    parents = [places.get(parents[node], -1) for node in order]\n" + TREE,
    ),
)


def two_good_roots(rng: np.random.Generator) -> tuple[np.ndarray, list[int], list[int]]:
    """Depth 1: a -0.5, b -1; depth 2: c -1, d -1.25. Heaviest: a, b, ac, ad, bc, bd."""
    a, b, c, d = distinct(rng, 4)
    log_q = table.log_q_of([{a: -0.5, b: -1.0}, {c: -1.0, d: -1.25}], VOCABULARY, float_type(rng))
    return log_q, [a, b, c, d, c, d], [-1, -1, 0, 0, 1, 1]


@trap(
    catches="the tree is the chain of most likely tokens",
    severity="major",
    story="A single chain is the original scheme; the task asks for the heaviest prefixes.",
    mutant=edit(SIBLING, ""),
)
def chain_instead_of_tree(submission: Submission, rng: np.random.Generator) -> None:
    log_q, tokens, parents = two_good_roots(rng)
    for budget in (2, 3, 5):
        table.same_tree(submission, log_q, budget, (tokens[:budget], parents[:budget]))


@trap(
    catches="below the first level only the best token of a depth is used",
    severity="major",
    story="Siblings at the root and single chains below them: most of the tree is missing.",
    mutant=insert_before(SIBLING, "        if not depth:\n    "),
)
def only_one_branch_grows(submission: Submission, rng: np.random.Generator) -> None:
    log_q, tokens, parents = two_good_roots(rng)
    table.same_tree(submission, log_q, 6, (tokens, parents))


@trap(
    catches="every level gets the same number of nodes instead of the heaviest overall",
    severity="major",
    story="A fixed top-k at each depth spends the budget on prefixes that will never be reached.",
    mutant=edit(
        RANKED, "    ranked = [ranking(row, max(1, budget // len(log_q))) for row in log_q]\n"
    ),
)
def fixed_width_levels(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, d = distinct(rng, 4)
    rows = [{a: -1.0, b: -1.25, c: -1.5, d: -1.75}, {a: -4.0, b: -4.0}]
    log_q = table.log_q_of(rows, VOCABULARY, float_type(rng))
    table.same_tree(submission, log_q, 4, ([a, b, c, d], [-1] * 4))


@trap(
    catches="a depth offers only a handful of its tokens, however flat it is",
    severity="major",
    story="A top-k of fixed size before the search: enough for peaked rows, wrong for flat ones.",
    mutant=edit(RANKED, RANKED.replace("budget", "min(budget, 32)")),
    seen=WRITTEN,
)
def siblings_cut_short(submission: Submission, rng: np.random.Generator) -> None:
    vocabulary, budget = 160, 140
    tokens = distinct(rng, budget, vocabulary)
    row = {token: -1.0 - rank / 64 for rank, token in enumerate(tokens)}
    log_q = table.log_q_of([row], vocabulary, float_type(rng))
    table.same_tree(submission, log_q, budget, (tokens, [-1] * budget))


@trap(
    catches="the tree has one node fewer than the budget",
    severity="major",
    story="The root is the last committed token; it is verified for free and is not a node.",
    mutant=edit(WHILE, WHILE.replace("< budget", "< budget - 1")),
)
def root_counted_in_the_budget(submission: Submission, rng: np.random.Generator) -> None:
    log_q, tokens, parents = two_good_roots(rng)
    for budget in (1, 4):
        table.same_tree(submission, log_q, budget, (tokens[:budget], parents[:budget]))


@trap(
    catches="nodes come level by level instead of heaviest first",
    severity="major",
    story="Cutting such a tree at half its size loses the deep, likely branch.",
    mutant=insert_before(
        TREE,
        "    depths = []\n"
        "    for parent in parents:\n"
        "        depths.append(depths[parent] + 1 if parent >= 0 else 0)\n"
        "    order = np.argsort(depths, kind='stable').tolist()\n"
        "    places = {-1: -1, **{node: place for place, node in enumerate(order)}}\n"
        "    tokens = [tokens[node] for node in order]\n"
        "    parents = [places[parents[node]] for node in order]\n",
    ),
)
def breadth_first_order(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c = distinct(rng, 3)
    log_q = table.log_q_of([{a: -0.5, b: -3.0}, {c: -0.5}], VOCABULARY, float_type(rng))
    table.same_tree(submission, log_q, 3, ([a, c, b], [-1, 0, -1]))


@trap(
    catches="row d of the draft is used for depth d instead of depth d + 1",
    severity="major",
    story="In one drafter the first slot is the anchor rather than a prediction; here every row is "
    "a prediction.",
    mutant=edit(RANKED, RANKED.replace("in log_q", "in log_q[1:]")),
)
def first_draft_row_skipped(submission: Submission, rng: np.random.Generator) -> None:
    log_q, tokens, parents = two_good_roots(rng)
    table.same_tree(submission, log_q, 4, (tokens[:4], parents[:4]))


@trap(
    catches="the root is 0 and nodes count from 1 in `parents`",
    severity="major",
    story="Row numbers and node numbers differ by one and are easily mixed up.",
    mutant=edit("        parents.append(parent)\n", "        parents.append(parent + 1)\n"),
)
def parents_count_from_one(submission: Submission, rng: np.random.Generator) -> None:
    log_q, tokens, parents = two_good_roots(rng)
    table.same_tree(submission, log_q, 3, (tokens[:3], parents[:3]))


def _kept(key: str) -> Mutant:
    """The ranked rows are kept from call to call."""
    kept = RANKED.replace("ranked = ", f"ranked = _KEPT.setdefault({key}, ").rstrip("\n") + ")\n"
    return edits((RANKED, kept), ("def build_tree(", "_KEPT = {}\n\n\ndef build_tree("))


@trap(
    catches="rows that were ranked for an earlier call are used again for other laws",
    severity="critical",
    story="A cache keyed by shape and budget: the second tree is that of the first law.",
    mutant=_kept("(log_q.shape, budget)"),
    also=[_kept("log_q.shape")],
    seen=WRITTEN,
    keeps_state=True,
)
def tree_kept_between_calls(submission: Submission, rng: np.random.Generator) -> None:
    clean = submission.clean()
    for _ in range(2):
        a, b, c = distinct(rng, 3)
        log_q = table.log_q_of([{a: -0.5, b: -1.0, c: -2.0}], VOCABULARY, np.float64)
        table.same_tree(clean, log_q, 3, ([a, b, c], [-1, -1, -1]))


@trap(
    catches="between equally heavy prefixes the deeper one comes first",
    severity="minor",
    story="A sure token (log-probability 0) makes a child as heavy as its parent.",
    mutant=edits(
        (PUSH, PUSH.replace(", depth, parent", ", -depth, parent")),
        (POP, POP + "        depth = -depth\n"),
    ),
    also=[_LEVELS_MERGED],
    seen=WRITTEN,
)
def tie_deeper_first(submission: Submission, rng: np.random.Generator) -> None:
    a, b = rising(rng, 2)
    c = int(rng.integers(VOCABULARY))
    log_q = table.log_q_of([{a: -1.0, b: -1.0}, {c: 0.0}], VOCABULARY, float_type(rng))
    table.same_tree(submission, log_q, 4, ([a, b, c, c], [-1, -1, 0, 1]))


@trap(
    catches="between equally heavy prefixes of one depth the one below the later node comes first",
    severity="minor",
    story="The order of ties decides what a smaller budget keeps, so the contract fixes it.",
    mutant=edits(
        (PUSH, PUSH.replace("depth, parent", "depth, -parent")),
        (POP, POP + "        parent = -parent\n"),
    ),
)
def tie_higher_parent_first(submission: Submission, rng: np.random.Generator) -> None:
    a, b = rising(rng, 2)
    c = int(rng.integers(VOCABULARY))
    log_q = table.log_q_of([{a: -1.0, b: -1.0}, {c: -0.5}], VOCABULARY, float_type(rng))
    table.same_tree(submission, log_q, 3, ([a, b, c], [-1, -1, 0]))


@trap(
    catches="between equally heavy siblings the higher token comes first",
    severity="minor",
    story="A reversed ascending sort reverses the ties with it.",
    mutant=insert_before(_BEST, "    candidates = candidates[::-1]\n"),
    also=[
        # Of the tokens that were chosen rightly.
        insert_after(
            _BEST,
            "    best = np.sort(best)\n"
            "    best = best[np.argsort(row[best], kind='stable')[::-1]]\n",
        )
    ],
    seen=WRITTEN,
)
def tie_higher_token_first(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, d = rising(rng, 4)
    row = {a: -1.0, b: -1.0, c: -1.0, d: -1.0}
    log_q = table.log_q_of([row], VOCABULARY, float_type(rng))
    for budget in (2, 4):
        table.same_tree(submission, log_q, budget, ([a, b, c, d][:budget], [-1] * budget))


@trap(
    catches="between equally heavy prefixes of one depth the lower token decides before the parent",
    severity="minor",
    story="The rule says lower parent first, and only then lower token.",
    mutant=edits(
        (PUSH, PUSH.replace("parent, token", "token, parent")),
        (POP, POP.replace("parent, token", "token, parent")),
    ),
    seen=WRITTEN,
)
def token_before_parent_in_ties(submission: Submission, rng: np.random.Generator) -> None:
    low, high = rising(rng, 2)
    a, b = rising(rng, 2)
    rows = [{a: -1.0, b: -1.5}, {high: -1.0, low: -0.5}]
    log_q = table.log_q_of(rows, VOCABULARY, float_type(rng))
    # a -1, b -1.5, a·low -1.5, then a·high -2 and b·low -2: the first has the lower parent.
    want = ([a, b, low, high, low], [-1, -1, 0, 0, 1])
    table.same_tree(submission, log_q, 5, want)


@trap(
    catches="weights are products of probabilities, which become 0 for unlikely prefixes",
    severity="major",
    story="exp(-800) is 0 in float64: from there on all prefixes look alike.",
    mutant=edits(
        (PUSH, PUSH.replace("-(above + value)", "-(above * np.exp(value))")),
        ("    offer(0.0, 0, -1, 0)\n", "    offer(1.0, 0, -1, 0)\n"),
    ),
    seen=WRITTEN,
)
def weights_underflow(submission: Submission, rng: np.random.Generator) -> None:
    worse, better = rising(rng, 2)
    rows = [{worse: -401.0, better: -400.0}, {worse: -403.0, better: -400.0}]
    log_q = table.log_q_of(rows, VOCABULARY, float_type(rng))
    want = ([better, worse, better, better, worse, worse], [-1, -1, 0, 1, 0, 1])
    table.same_tree(submission, log_q, 6, want)


@trap(
    catches="weights are summed in float32",
    severity="minor",
    story="Drafts in half or single precision are normal; their sums need more precision.",
    mutant=edit(PUSH, PUSH.replace("-(above + value)", "-float(np.float32(above + value))")),
    also=[
        # So is what they are sums of.
        edits(
            (PUSH, PUSH.replace("-(above + value)", "-float(np.float32(above + value))")),
            (_DRAFT, _DRAFT.replace("np.float64", "np.float32).astype(np.float64")),
        )
    ],
    seen=WRITTEN,
)
def weights_in_float32(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c = distinct(rng, 3)
    big = -(2.0**24)
    log_q = table.log_q_of([{a: big, b: big - 2.0}, {c: -1.5}], VOCABULARY, np.float32)
    table.same_tree(submission, log_q, 3, ([a, c, b], [-1, 0, -1]))


def _far_apart(submission: Submission, rng: np.random.Generator) -> None:
    """Two tokens whose log-probabilities differ in every dtype."""
    a, b = rising(rng, 2)
    log_q = table.log_q_of([{a: -1.5, b: -1.0}], VOCABULARY, np.float64)
    table.same_tree(submission, log_q, 2, ([b, a], [-1, -1]))


@trap(
    catches="log-probabilities of float64 are rounded to float32 before they are compared",
    severity="minor",
    story="The draft is converted to the dtype of most models, and close tokens become ties.",
    mutant=edit(_DRAFT, _DRAFT.replace("np.float64", "np.float32).astype(np.float64")),
    seen=WRITTEN,
    control=_far_apart,
)
def draft_rounded_to_float32(submission: Submission, rng: np.random.Generator) -> None:
    a, b = rising(rng, 2)
    log_q = table.log_q_of([{a: -1.0 - 2.0**-30, b: -1.0}], VOCABULARY, np.float64)
    table.same_tree(submission, log_q, 2, ([b, a], [-1, -1]))


@trap(
    catches="the rows of the draft are put through a softmax again",
    severity="major",
    story="Log-probabilities taken for logits: rows with mass missing change weight by depth.",
    mutant=insert_before(
        RANKED, "    log_q = log_q - np.log(np.exp(log_q).sum(axis=1, keepdims=True))\n"
    ),
    seen=WRITTEN,
)
def draft_normalised(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c = distinct(rng, 3)
    log_q = table.log_q_of([{a: -1.0, b: -3.0}, {c: -4.0}], VOCABULARY, float_type(rng))
    table.same_tree(submission, log_q, 3, ([a, b, c], [-1, -1, 0]))


@trap(
    catches="a budget above the number of possible prefixes fails",
    severity="major",
    story="The heap becomes empty, and the next pop raises an error.",
    mutant=edit(WHILE, WHILE.replace("heap and ", "")),
)
def budget_over_all_prefixes(submission: Submission, rng: np.random.Generator) -> None:
    log_q, tokens, parents = two_good_roots(rng)
    table.same_tree(submission, log_q, 50, (tokens, parents))
    empty = np.zeros((0, VOCABULARY), dtype=float_type(rng))
    table.same_tree(submission, empty, 3, ([], []))


@trap(
    catches="a budget of 0 still gives a node or fails",
    severity="minor",
    story="A budget of 0 switches speculation off and means plain decoding.",
    mutant=insert_before(RANKED, "    budget = max(budget, 1)\n"),
)
def budget_zero(submission: Submission, rng: np.random.Generator) -> None:
    log_q, _, _ = two_good_roots(rng)
    table.same_tree(submission, log_q, 0, ([], []))


@trap(
    catches="the caller's draft is overwritten",
    severity="major",
    story="A token is marked as taken by writing -inf into the caller's array.",
    mutant=edit(
        "    log_q = checked_log_q(log_q)\n",
        "    given, log_q = log_q, checked_log_q(log_q)\n    given -= given.max()\n",
    ),
)
def draft_modified(submission: Submission, rng: np.random.Generator) -> None:
    log_q, _, _ = two_good_roots(rng)
    wide = log_q.astype(np.float64)
    before = wide.copy()
    _, after = submission.observe("build_tree", wide, 4)
    expect.equal(after[0], before, "log_q after the call")


@trap(
    catches="the least likely token that the budget allows at a depth is left out",
    severity="major",
    story="The count is one short, or what equals the cut of a partition is not taken.",
    mutant=edit(RANKED, RANKED.replace("budget", "max(budget - 1, 1)")),
    also=[edit("np.flatnonzero(row >= cut)", "np.flatnonzero(row > cut)")],
)
def siblings_one_short(submission: Submission, rng: np.random.Generator) -> None:
    tokens = distinct(rng, 6)
    row = {token: -1.0 - rank / 8 for rank, token in enumerate(tokens)}
    log_q = table.log_q_of([row, {tokens[0]: -4.0}], VOCABULARY, float_type(rng))
    for budget in (2, 5):
        table.same_tree(submission, log_q, budget, (tokens[:budget], [-1] * budget))


@trap(
    catches="parents are numbered level by level, as the tree was built, not as it is returned",
    severity="major",
    story="The nodes are sorted in the end, and their parents are not renumbered.",
    mutant=insert_before(
        TREE,
        "    depths = []\n"
        "    for parent in parents:\n"
        "        depths.append(depths[parent] + 1 if parent >= 0 else 0)\n"
        "    places = np.argsort(np.argsort(depths, kind='stable'), kind='stable').tolist()\n"
        "    parents = [places[parent] if parent >= 0 else -1 for parent in parents]\n",
    ),
)
def parents_not_renumbered(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, d = distinct(rng, 4)
    rows = [{a: -0.5, b: -1.25}, {c: -0.5}, {d: -4.0}]
    log_q = table.log_q_of(rows, VOCABULARY, float_type(rng))
    table.same_tree(submission, log_q, 5, ([a, c, b, c, d], [-1, 0, -1, 2, 1]))
