"""Further slips: siblings of known bugs in trees, masks, verification and generation."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import edit, edits, insert_after, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.dflash import table
from trapline.challenges.dflash.situations import (
    VOCABULARY,
    WRITTEN,
    cache,
    distinct,
    float_type,
    story_of,
)
from trapline.challenges.dflash.solution_lines import BLOCK, LOOP, POP, PUSH
from trapline.challenges.dflash.traps_generating import ASKED, COUNT, FRESH, OUTPUT, told
from trapline.challenges.dflash.traps_mask import MASK, family_mask
from trapline.challenges.dflash.traps_sampling import PICKS, sampled
from trapline.challenges.dflash.traps_tree import SIBLING, TREE, WHILE, two_good_roots
from trapline.challenges.dflash.traps_verification import VERDICT, WALK

_CHILD = "        offer(-negative, depth + 1, len(tokens) - 1, 0)\n"
_OFFER = (
    "        if depth < len(ranked) and rank < len(ranked[depth]):\n"
    "            value, token = ranked[depth][rank]\n"
)
_LEVELS = (
    "    depths = []\n"
    "    for parent in parents:\n"
    "        depths.append(depths[parent] + 1 if parent >= 0 else 0)\n"
)

# --- build_tree -----------------------------------------------------------------------------------


def good_roots(submission: Submission, rng: np.random.Generator, budget: int = 6) -> None:
    log_q, tokens, parents = two_good_roots(rng)
    table.same_tree(submission, log_q, budget, (tokens[:budget], parents[:budget]))


@trap(
    catches="the next sibling's weight is added to that of the node just taken instead of to their "
    "parent's",
    severity="critical",
    story="Second and later children are far too light, and the tree is nearly a chain.",
    mutant=edit(SIBLING, "        offer(-negative, depth, parent, rank + 1)\n"),
    seen=WRITTEN,
)
def sibling_below_its_sibling(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, d = distinct(rng, 4)
    rows = [{a: -1.0, b: -1.25, c: -1.5}, {d: -1.0}]
    log_q = table.log_q_of(rows, VOCABULARY, float_type(rng))
    want = ([a, b, c, d, d, d], [-1, -1, -1, 0, 1, 2])
    table.same_tree(submission, log_q, 6, want)


@trap(
    catches="the tree has one node more than the budget",
    severity="major",
    story="The loop goes on while there are at most `budget` nodes.",
    mutant=edit(WHILE, WHILE.replace("< budget", "<= budget")),
    seen=WRITTEN,
)
def one_node_too_many(submission: Submission, rng: np.random.Generator) -> None:
    good_roots(submission, rng, 3)


@trap(
    catches="the budget is applied to every level, not to the tree",
    severity="critical",
    story="The tree can have L times as many nodes as allowed.",
    mutant=edits(
        (WHILE, "    levels = []\n    while heap:\n"),
        (
            POP,
            POP + "        if levels.count(depth) >= budget:\n            continue\n"
            "        levels.append(depth)\n",
        ),
    ),
    seen=WRITTEN,
)
def budget_for_every_level(submission: Submission, rng: np.random.Generator) -> None:
    good_roots(submission, rng, 2)


@trap(
    catches="shallow prefixes are taken before heavier deep ones",
    severity="critical",
    story="Ordered by depth first, the tree fills up with unlikely shallow nodes.",
    mutant=edits(
        (PUSH, PUSH.replace("(-(above + value), depth,", "(depth, -(above + value),")),
        (POP, POP.replace("negative, depth,", "depth, negative,")),
    ),
    seen=WRITTEN,
)
def shallow_before_heavy(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, d = distinct(rng, 4)
    rows = [{a: -0.5, b: -4.0, c: -5.0}, {d: -0.5}]
    log_q = table.log_q_of(rows, VOCABULARY, float_type(rng))
    table.same_tree(submission, log_q, 2, ([a, d], [-1, 0]))


@trap(
    catches="parents are ranks within their level instead of indices of nodes",
    severity="critical",
    story="Right as long as the first level comes first, as a whole.",
    mutant=insert_before(
        TREE,
        _LEVELS + "    ranks = [depths[:node].count(depth) for node, depth in enumerate(depths)]\n"
        "    parents = [ranks[parent] if parent >= 0 else -1 for parent in parents]\n",
    ),
    seen=WRITTEN,
)
def parents_within_their_level(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, d = distinct(rng, 4)
    rows = [{a: -0.5, b: -3.0}, {c: -0.5}, {d: -0.5}]
    log_q = table.log_q_of(rows, VOCABULARY, float_type(rng))
    table.same_tree(submission, log_q, 5, ([a, c, d, b, c], [-1, 0, 1, -1, 3]))


@trap(
    catches="a node's children are drawn from the row of its own depth instead of the next row",
    severity="critical",
    story="Depth 1 has row 0, and so has depth 2.",
    mutant=edit(_OFFER, _OFFER.replace("ranked[depth]", "ranked[max(depth - 1, 0)]")),
    seen=WRITTEN,
)
def children_from_own_row(submission: Submission, rng: np.random.Generator) -> None:
    good_roots(submission, rng)


@trap(
    catches="the row of the draft is chosen by the node's index instead of its depth",
    severity="major",
    story="Index and depth agree along a chain, and nowhere else.",
    mutant=edits(
        (
            _OFFER,
            "        row = min(parent + 1, len(ranked) - 1)\n"
            "        if depth < len(ranked) and rank < len(ranked[row]):\n"
            "            value, token = ranked[row][rank]\n",
        ),
    ),
)
def draft_row_by_index(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, d, e, f = distinct(rng, 6)
    rows = [{a: -0.5, b: -1.0}, {c: -1.0, d: -1.25}, {e: -9.0, f: -9.5}]
    log_q = table.log_q_of(rows, VOCABULARY, float_type(rng))
    table.same_tree(submission, log_q, 6, ([a, b, c, d, c, d], [-1, -1, 0, 0, 1, 1]))


@trap(
    catches="the last row of the draft is never used",
    severity="major",
    story="A bound that is one too small: the tree has L − 1 levels.",
    mutant=edit(_OFFER, _OFFER.replace("depth < len(ranked)", "depth < max(len(ranked) - 1, 1)")),
)
def last_draft_row_unused(submission: Submission, rng: np.random.Generator) -> None:
    good_roots(submission, rng)


@trap(
    catches="only the likeliest child of a node has children of its own",
    severity="major",
    story="Siblings are added as leaves beside one chain.",
    mutant=edit(_CHILD, "        if not rank:\n    " + _CHILD),
)
def siblings_are_leaves(submission: Submission, rng: np.random.Generator) -> None:
    good_roots(submission, rng)


@trap(
    catches="nodes are weighed by their own probability, not by that of the whole prefix",
    severity="major",
    story="A sure token below an unlikely one looks heavy.",
    mutant=edit(PUSH, PUSH.replace("-(above + value)", "-value")),
    seen=WRITTEN,
)
def weight_of_the_node_alone(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c = distinct(rng, 3)
    log_q = table.log_q_of([{a: -2.0, b: -2.5}, {c: -1.0}], VOCABULARY, float_type(rng))
    table.same_tree(submission, log_q, 4, ([a, b, c, c], [-1, -1, 0, 1]))


@trap(
    catches="weights are divided by the length of the prefix",
    severity="major",
    story="The mean log-probability of beam search in place of the product.",
    mutant=edits(
        (PUSH, PUSH.replace("-(above + value)", "-(above + value) / (depth + 1)")),
        (_CHILD, "        offer(-negative * (depth + 1), depth + 1, len(tokens) - 1, 0)\n"),
    ),
)
def weights_by_length(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c = distinct(rng, 3)
    log_q = table.log_q_of([{a: -2.0, b: -2.5}, {c: -1.0}], VOCABULARY, float_type(rng))
    table.same_tree(submission, log_q, 4, ([a, b, c, c], [-1, -1, 0, 1]))


@trap(
    catches="the tree comes as int32 arrays",
    severity="minor",
    story="The contract says int64.",
    mutant=edit(TREE, TREE.replace("int64", "int32")),
)
def tree_in_int32(submission: Submission, rng: np.random.Generator) -> None:
    good_roots(submission, rng, 3)


@trap(
    catches="the tree comes as lists instead of arrays",
    severity="minor",
    story="The contract says two int64 arrays.",
    mutant=edit(TREE, "    return tokens, parents\n"),
)
def tree_of_lists(submission: Submission, rng: np.random.Generator) -> None:
    good_roots(submission, rng, 3)


# --- tree_mask ------------------------------------------------------------------------------------


@trap(
    catches="no row sees the root, the root not even itself",
    severity="critical",
    story="The columns that all rows share end before the root's.",
    mutant=insert_before(MASK, "    mask[:, prefix_len] = False\n"),
    seen=WRITTEN,
)
def mask_without_root_column(submission: Submission, rng: np.random.Generator) -> None:
    family_mask(submission, rng)


@trap(
    catches="the root does not see itself",
    severity="major",
    story="Its row is filled up to the prefix only.",
    mutant=insert_before(MASK, "    mask[0, prefix_len] = False\n"),
)
def mask_root_blind_to_itself(submission: Submission, rng: np.random.Generator) -> None:
    family_mask(submission, rng)


@trap(
    catches="the mask is inverted: True means hidden",
    severity="major",
    story="Libraries differ in this; the contract says whether a row sees a column.",
    mutant=edit(MASK, "    return ~mask\n"),
)
def mask_inverted(submission: Submission, rng: np.random.Generator) -> None:
    family_mask(submission, rng)


@trap(
    catches="the mask has no row for the root",
    severity="major",
    story="N rows for N nodes.",
    mutant=edit(MASK, "    return mask[1:]\n"),
)
def mask_without_root_row(submission: Submission, rng: np.random.Generator) -> None:
    family_mask(submission, rng)


@trap(
    catches="the mask has no columns for the committed prefix",
    severity="major",
    story="Only the tree's own square is returned.",
    mutant=edit(MASK, "    return mask[:, prefix_len:]\n"),
)
def mask_without_prefix_columns(submission: Submission, rng: np.random.Generator) -> None:
    family_mask(submission, rng)


@trap(
    catches="a node sees its siblings",
    severity="major",
    story="All children of one parent share their parent's row, and write themselves into it.",
    mutant=insert_before(
        MASK,
        "    for node, parent in enumerate(parents):\n"
        "        for other, above in enumerate(parents):\n"
        "            if above == parent:\n"
        "                mask[node + 1, prefix_len + 1 + other] = True\n",
    ),
)
def mask_with_siblings(submission: Submission, rng: np.random.Generator) -> None:
    family_mask(submission, rng)


# --- verify_tree ----------------------------------------------------------------------------------


@trap(
    catches="only the last child of a node can be accepted",
    severity="critical",
    story="The table of children is replaced instead of extended.",
    mutant=edit(
        "        children.setdefault((parent, token), node)\n",
        "        children = {edge: n for edge, n in children.items() if edge[0] != parent}\n"
        "        children[parent, token] = node\n",
    ),
    seen=WRITTEN,
)
def only_the_last_child(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, x = distinct(rng, 4)
    table.verify(submission, [a, b, c], [-1, -1, -1], [a, x, b, c], ([0], x))


@trap(
    catches="the longest run of agreeing nodes counts although the node above it was rejected",
    severity="critical",
    story="The length of a branch is counted from its last rejected node.",
    mutant=edit(
        WALK,
        "    lengths = [1] + [0] * len(tokens)\n"
        "    for number, token in enumerate(tokens):\n"
        "        if token == choices[parents[number] + 1]:\n"
        "            lengths[number + 1] = lengths[parents[number] + 1] + 1\n"
        "    node = lengths.index(max(lengths)) - 1\n"
        "    path, above = [], node\n"
        "    while above >= 0:\n"
        "        path.insert(0, above)\n"
        "        above = parents[above]\n",
    ),
    seen=WRITTEN,
)
def orphan_branch_accepted(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, d, x = distinct(rng, 5)
    # a is rejected; c and d below it are what the target would have said after a and after c.
    table.verify(submission, [a, c, d], [-1, 0, 1], [b, c, d, x], ([], b))


@trap(
    catches="the bonus is read from the row of the path's length instead of its last node's",
    severity="major",
    story="Rows counted by depth: right for a chain.",
    mutant=edit(VERDICT, "    return path, choices[len(path)]\n"),
    seen=WRITTEN,
)
def bonus_by_depth(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, x, y = distinct(rng, 5)
    table.verify(submission, [a, b, c], [-1, -1, 1], [b, x, c, y], ([1, 2], y))


@trap(
    catches="picks and bonus are read by depth: all nodes of one depth share a row",
    severity="major",
    story="The walk counts its steps and uses the count as an index.",
    mutant=edits(
        (
            WALK,
            "    path = []\n    node = -1\n    while (node, choices[len(path)]) in children:\n"
            "        node = children[node, choices[len(path)]]\n        path.append(node)\n",
        ),
        (VERDICT, "    return path, choices[len(path)]\n"),
    ),
    seen=WRITTEN,
)
def rows_counted_by_depth(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, e, x, y = distinct(rng, 6)
    table.verify(submission, [a, b, c, e], [-1, -1, 0, 2], [a, c, y, e, x], ([0, 2, 3], x))


@trap(
    catches="the path runs from the last node up to the root",
    severity="major",
    story="Climbing by parents gives the reverse order.",
    mutant=edit(VERDICT, "    return path[::-1], choices[node + 1]\n"),
)
def path_reversed(submission: Submission, rng: np.random.Generator) -> None:
    a, b, x = distinct(rng, 3)
    table.verify(submission, [a, b], [-1, 0], [a, b, x], ([0, 1], x))


@trap(
    catches="the path begins with the root",
    severity="major",
    story="The root is not a node: −1 stands for it in `parents` only.",
    mutant=edit(VERDICT, "    return [-1, *path], choices[node + 1]\n"),
)
def path_with_the_root(submission: Submission, rng: np.random.Generator) -> None:
    a, b, x = distinct(rng, 3)
    table.verify(submission, [a, b], [-1, 0], [a, b, x], ([0, 1], x))


@trap(
    catches="the last accepted node is not in the path",
    severity="major",
    story="The walk stops one step early; the bonus is then the token of that node.",
    mutant=edit(
        VERDICT,
        "    node = parents[node] if path else node\n    return path[:-1], choices[node + 1]\n",
    ),
)
def last_node_refused(submission: Submission, rng: np.random.Generator) -> None:
    a, b, x = distinct(rng, 3)
    table.verify(submission, [a, b], [-1, 0], [a, b, x], ([0, 1], x))


# --- verify_sampled -------------------------------------------------------------------------------


@trap(
    catches="a row uses the number of the row before it",
    severity="major",
    story="Numbers are counted by nodes, picks by rows.",
    mutant=edit(PICKS, "    uniforms = uniforms[-1:] + uniforms[:-1]\n" + PICKS),
)
def numbers_shifted(submission: Submission, rng: np.random.Generator) -> None:
    law = [[0.5, 0.5], [0.5, 0.5]]
    sampled(submission, [0], [-1], law, [0.25, 0.75], ([0], 1), float_type(rng))


@trap(
    catches="the law is inverted from its far end: 1 − u instead of u",
    severity="major",
    story="As random, but not what the contract says.",
    mutant=edit(PICKS, PICKS.replace("pick(row, uniform)", "pick(row, 1.0 - uniform)")),
)
def numbers_reversed(submission: Submission, rng: np.random.Generator) -> None:
    sampled(submission, [], [], [[0.25, 0.25, 0.5]], [0.125], ([], 0), float_type(rng))


# --- compact --------------------------------------------------------------------------------------


@trap(
    catches="a cache without leading axes, (rows, D), is not compacted along its rows",
    severity="major",
    story="kv[:, rows] takes the second axis, whatever the rank.",
    mutant=edit("    return kv[..., rows, :]\n", "    return kv[:, rows]\n"),
    also=[
        edit(
            "or kv.ndim < 2:\n        raise TypeError", "or kv.ndim < 3:\n        raise ValueError"
        )
    ],
    seen=WRITTEN,
)
def cache_of_rank_two(submission: Submission, rng: np.random.Generator) -> None:
    kv = cache(rng, 7, 7)
    expect.equal(submission.compact(kv, 2, [1, 3]), kv[[0, 1, 2, 4, 6]], "the committed rows")


# --- generate -------------------------------------------------------------------------------------


@trap(
    catches="the target's correction is committed twice",
    severity="critical",
    story="After a rejection the correction is appended as the last accepted token and once more "
    "as the bonus.",
    mutant=edit(
        FRESH,
        FRESH.replace("[*drafted, bonus]", "[*drafted, bonus, bonus]"),
    ),
    seen="a published answer",
)
def correction_said_twice(submission: Submission, rng: np.random.Generator) -> None:
    told(submission, rng, table.hopeless_draft, 2, max_new_tokens=6, budget=3)


@trap(
    catches="generation stops when the tree contains EOS, accepted or not",
    severity="major",
    story="The drafted tokens are searched instead of the committed ones.",
    mutant=insert_before(
        "        output += fresh\n", "        if eos_id in tokens:\n            limit = 0\n"
    ),
)
def end_drafted_is_enough(submission: Submission, rng: np.random.Generator) -> None:
    prompt, _, eos, law = story_of(rng)

    def draft(prefix: table.Prefix) -> np.ndarray:  # noqa: ARG001 - always the same proposal
        return table.one_hot([eos], VOCABULARY)

    table.run(submission, law, draft, prompt, max_new_tokens=5, eos_id=eos, budget=1)


@trap(
    catches="max_new_tokens counts the prompt",
    severity="major",
    story="A total length and a number of new tokens are different limits.",
    mutant=insert_before("    output = []\n", "    limit = max(0, limit - len(prefix))\n"),
)
def limit_counts_the_prompt(submission: Submission, rng: np.random.Generator) -> None:
    told(submission, rng, table.hopeless_draft, 1, max_new_tokens=6, budget=2)


@trap(
    catches="one token fewer than max_new_tokens is generated",
    severity="major",
    story="The loop ends at limit − 1.",
    mutant=edits(
        (LOOP, LOOP.replace("< limit", "< limit - 1")),
        (FRESH, FRESH.replace("limit - len(output)", "limit - 1 - len(output)")),
    ),
)
def stops_one_short(submission: Submission, rng: np.random.Generator) -> None:
    told(submission, rng, table.hopeless_draft, 1, max_new_tokens=5, budget=2)


@trap(
    catches="generation ends when no draft is accepted",
    severity="major",
    story="An empty path is taken for the end.",
    mutant=insert_after("        output += fresh\n", "        if not path:\n            break\n"),
)
def rejection_gives_up(submission: Submission, rng: np.random.Generator) -> None:
    told(submission, rng, table.hopeless_draft, 1, max_new_tokens=5, budget=2)


@trap(
    catches="the accepted tokens are committed without the bonus, and the bonus without them",
    severity="major",
    story="Only the bonus of each round reaches the output.",
    mutant=edit(FRESH, FRESH.replace("[*drafted, bonus]", "[bonus]")),
)
def accepted_tokens_not_committed(submission: Submission, rng: np.random.Generator) -> None:
    told(submission, rng, table.perfect_draft, 2, max_new_tokens=6, budget=2)


@trap(
    catches="the target is given only what was generated, without the prompt",
    severity="major",
    story="The prompt is used for the first pass and forgotten.",
    mutant=edit(ASKED, ASKED.replace("prefix + output", "output or prefix")),
)
def target_without_the_prompt(submission: Submission, rng: np.random.Generator) -> None:
    told(submission, rng, table.perfect_draft, 2, max_new_tokens=6, budget=2)


@trap(
    catches="the drafter is given the prefix without its last token",
    severity="major",
    story="Its first row then proposes the root again, and nothing is accepted.",
    mutant=edit(BLOCK, BLOCK.replace("prefix + output", "(prefix + output)[:-1] or prefix")),
    seen=WRITTEN,
)
def drafter_without_the_root(submission: Submission, rng: np.random.Generator) -> None:
    got = told(submission, rng, table.perfect_draft, 2, max_new_tokens=9, budget=2)
    expect.equal(got.draft_prefixes[:3], got.target_prefixes[:3], "what the drafter was shown")


@trap(
    catches="the drafter is given only the last token",
    severity="major",
    story="The output is right, and the acceptance rate drops.",
    mutant=edit(BLOCK, BLOCK.replace("prefix + output", "(prefix + output)[-1:]")),
)
def drafter_sees_the_last_token(submission: Submission, rng: np.random.Generator) -> None:
    got = told(submission, rng, table.perfect_draft, 2, max_new_tokens=9, budget=2)
    expect.equal(got.draft_prefixes[:3], got.target_prefixes[:3], "what the drafter was shown")


@trap(
    catches="`accepted` counts all drafted nodes, accepted or not",
    severity="major",
    story="The size of the trees says nothing about how good they were.",
    mutant=edit(COUNT, "        accepted += len(tokens)\n"),
)
def accepted_counts_the_tree(submission: Submission, rng: np.random.Generator) -> None:
    told(submission, rng, table.hopeless_draft, 2, compare=["accepted"], max_new_tokens=4, budget=3)


@trap(
    catches="`accepted` counts rounds with an accepted draft, not tokens",
    severity="minor",
    story="One is added where the length of the branch is due.",
    mutant=edit(COUNT, "        accepted += bool(drafted)\n"),
)
def accepted_counts_rounds(submission: Submission, rng: np.random.Generator) -> None:
    told(submission, rng, table.perfect_draft, 3, compare=["accepted"], max_new_tokens=8, budget=3)


@trap(
    catches="`target_passes` counts the returned tokens",
    severity="minor",
    story="The two are equal only where nothing is accepted.",
    mutant=edit(OUTPUT, "    passes = len(output)\n" + OUTPUT),
)
def passes_count_tokens(submission: Submission, rng: np.random.Generator) -> None:
    told(
        submission,
        rng,
        table.perfect_draft,
        3,
        compare=["target_passes"],
        max_new_tokens=8,
        budget=3,
    )
