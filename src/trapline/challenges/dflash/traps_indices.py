"""A bound, an index or an array that is nearly the right one."""

import numpy as np

from trapline.arena.judge.traps import Mutant, edit, edits, insert_after, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.dflash import table
from trapline.challenges.dflash.situations import (
    VOCABULARY,
    WRITTEN,
    cache,
    distinct,
    rising,
    story_of,
)
from trapline.challenges.dflash.solution_lines import BLOCK, INHERIT, PUSH
from trapline.challenges.dflash.traps_committing import KEPT, same_rows
from trapline.challenges.dflash.traps_generating import COUNT
from trapline.challenges.dflash.traps_mask import MASK, family_mask, same_mask
from trapline.challenges.dflash.traps_sampling import ALMOST_ONE, EXCEEDING, LAST, TENTHS, sampled

# --- build_tree -----------------------------------------------------------------------------------

_POSSIBLE = "candidates = candidates[row[candidates] > -np.inf]"
_WIDE = "    return log_q.astype(np.float64)\n"


def _unlikely(submission: Submission, rng: np.random.Generator, far: float) -> None:
    """Two tokens of each row are this far below the first one."""
    a, b, c = rising(rng, 3)
    row = {a: -0.5, b: -far, c: -far - 1.0}
    log_q = table.log_q_of([row, row], VOCABULARY, np.float64)
    table.same_tree(submission, log_q, 12)


@trap(
    catches="a token of small probability is left out of the tree, or its log-probability is "
    "raised to a bound",
    severity="major",
    story="A threshold or a floor stands for probability 0, or exp and log are taken in between.",
    mutant=edit(_POSSIBLE, _POSSIBLE.replace("-np.inf", "-1e3")),
    also=[
        edit(_POSSIBLE, "candidates = candidates[np.exp(row[candidates]) > 0.0]"),
        edit(_POSSIBLE, "candidates = candidates[np.exp(row[candidates]) > 1e-6]"),
        edit(_POSSIBLE, "candidates = candidates[np.exp(row[candidates]) > 1e-12]"),
        edit(_WIDE, "    return np.maximum(log_q.astype(np.float64), -100.0)\n"),
        edit(_WIDE, "    return np.maximum(log_q.astype(np.float64), -1e3)\n"),
        edit(_WIDE, "    return np.log(np.exp(log_q.astype(np.float64)) + 1e-30)\n"),
    ],
    control=lambda submission, rng: _unlikely(submission, rng, 2.0),
)
def unlikely_token_left_out(submission: Submission, rng: np.random.Generator) -> None:
    for far in (40.0, 2000.0):
        _unlikely(submission, rng, far)


def _nearly_equal(submission: Submission, rng: np.random.Generator, apart: float) -> None:
    """A prefix of two tokens is heavier than a single token by this much."""
    a, b = distinct(rng, 2)
    log_q = np.full((2, VOCABULARY), -np.inf)
    log_q[0, a], log_q[0, b], log_q[1, a] = -1.0, -2.0 - apart, -1.0
    table.same_tree(submission, log_q, 2, ([a, a], [-1, 0]))


@trap(
    catches="weights are rounded before they are compared: a slightly heavier prefix counts "
    "as equally heavy",
    severity="minor",
    story="A tolerance that is to make ties robust.",
    mutant=edit(PUSH, PUSH.replace("-(above + value)", "round(-(above + value), 6)")),
    also=[
        edit(PUSH, PUSH.replace("-(above + value)", f"round(-(above + value), {digits})"))
        for digits in (3, 9, 12)
    ],
    control=lambda submission, rng: _nearly_equal(submission, rng, 0.25),
)
def weights_rounded(submission: Submission, rng: np.random.Generator) -> None:
    _nearly_equal(submission, rng, 2.0**-45)


# --- tree_mask ------------------------------------------------------------------------------------

_OWN = "        mask[node + 1, prefix_len + 1 + node] = True\n"


@trap(
    catches="the column of a node is off by one: it is that of the root or the node before it",
    severity="major",
    story="The root has a column of its own between the prefix and the nodes.",
    mutant=edit(_OWN, _OWN.replace("prefix_len + 1 + node", "prefix_len + node")),
    also=[
        edits(
            (_OWN, _OWN.replace("prefix_len + 1 + node", "prefix_len + node")),
            (MASK, "    mask[:, prefix_len] = True\n" + MASK),
        )
    ],
)
def mask_columns_shifted(submission: Submission, rng: np.random.Generator) -> None:
    family_mask(submission, rng)


@trap(
    catches="the mask has a row or a column too many",
    severity="major",
    story="The root is counted as part of the prefix and once more, or room is left for the bonus.",
    mutant=edit("(count + 1, prefix_len + 1 + count)", "(count + 1, prefix_len + 2 + count)"),
    also=[
        edit("(count + 1, prefix_len + 1 + count)", "(count + 2, prefix_len + 1 + count)"),
        edit("(count + 1, prefix_len + 1 + count)", "(count + 2, prefix_len + 2 + count)"),
        edit(MASK, "    full = np.zeros((mask.shape[1], mask.shape[1]), dtype=bool)\n"
             "    full[prefix_len:] = mask\n    return full\n"),
    ],
)  # fmt: skip
def mask_too_large(submission: Submission, rng: np.random.Generator) -> None:
    family_mask(submission, rng)


def _leaf_zero(submission: Submission, rng: np.random.Generator) -> None:
    same_mask(submission, np.array([-1, -1, 1, 2]), int(rng.integers(1, 6)))


@trap(
    catches="node 0 is taken for the root: its children do not see it",
    severity="major",
    story="`if parent` or `parent > 0` asks whether there is a parent, and 0 is one.",
    mutant=edit(INHERIT, "        mask[node + 1] = mask[parent + 1 if parent > 0 else 0]\n"),
    seen=WRITTEN,
    control=_leaf_zero,
)
def mask_without_node_zero(submission: Submission, rng: np.random.Generator) -> None:
    family_mask(submission, rng)


@trap(
    catches="a node below the root sees what the node before it sees, not the root alone",
    severity="major",
    story="The row before is copied, and replaced only where the parent is a node.",
    mutant=edit(
        INHERIT, "        mask[node + 1] = mask[parent + 1] if parent >= 0 else mask[node]\n"
    ),
)
def mask_of_roots_accumulated(submission: Submission, rng: np.random.Generator) -> None:
    family_mask(submission, rng)


@trap(
    catches="the mask is symmetric: nodes see their children or descendants, too",
    severity="major",
    story="Both entries of an edge are set.",
    mutant=insert_after(INHERIT, "        mask[parent + 1, prefix_len + 1 + node] = True\n"),
    also=[
        insert_before(
            MASK,
            "    tree = mask[1:, prefix_len + 1 :]\n"
            "    mask[1:, prefix_len + 1 :] = tree | tree.T\n",
        ),
        insert_before(MASK, "    mask[:, prefix_len:] |= mask[:, prefix_len:].T.copy()\n"),
    ],
)
def mask_symmetric(submission: Submission, rng: np.random.Generator) -> None:
    family_mask(submission, rng)


# --- verification ---------------------------------------------------------------------------------


def _chain(submission: Submission, length: int) -> None:
    """A branch of this length, all of it what the target picks."""
    tokens = [node % VOCABULARY for node in range(length)]
    bonus = length % VOCABULARY
    table.verify(
        submission,
        tokens,
        [node - 1 for node in range(length)],
        [*tokens, bonus],
        (list(range(length)), bonus),
    )


def _cut_path(most: int) -> Mutant:
    return edit(
        "    while (node, choices[node + 1]) in children:\n",
        f"    while (node, choices[node + 1]) in children and len(path) < {most}:\n",
    )


@trap(
    catches="no more than so many nodes of a branch are accepted",
    severity="major",
    story="A loop over a fixed number of levels.",
    mutant=_cut_path(4),
    also=[_cut_path(most) for most in (3, 5, 8, 16, 32)],
    control=lambda submission, rng: _chain(submission, 2),
)
def path_cut_short(submission: Submission, rng: np.random.Generator) -> None:  # noqa: ARG001
    _chain(submission, 40)


@trap(
    catches="numbers are rounded to float32 before they are compared, also where they are float64",
    severity="minor",
    story="A number just below a cumulative probability is then equal to it.",
    mutant=edit(EXCEEDING, EXCEEDING.replace("> uniform", "> np.float32(uniform)")),
    also=[edit(EXCEEDING, EXCEEDING.replace("> uniform", "> float(np.float32(uniform))"))],
)
def numbers_in_single(submission: Submission, rng: np.random.Generator) -> None:  # noqa: ARG001
    sampled(submission, [], [], [[0.5, 0.25, 0.25]], [0.5 - 2.0**-40], ([], 0))


@trap(
    catches="the cumulative probability of a token leaves out its own: the pick is one token too "
    "late",
    severity="major",
    story="An exclusive cumulative sum, or an index behind the one that was found.",
    mutant=edit(EXCEEDING, EXCEEDING.replace("np.cumsum(row)", "np.cumsum(row) - row")),
    also=[edit(EXCEEDING, EXCEEDING + "    exceeding = exceeding[1:]\n")],
)
def pick_one_too_late(submission: Submission, rng: np.random.Generator) -> None:
    law = [[0.25, 0.25, 0.25, 0.25]]
    want = int(rng.integers(3))
    sampled(submission, [], [], law, [0.25 * want + 0.125], ([], want))


@trap(
    catches="verify_sampled fails where rounding leaves the total below the number",
    severity="major",
    story="An empty list of candidates is indexed, or taken for bad input.",
    mutant=edit(LAST, '    raise ValueError("not a law")\n'),
    also=[edit(LAST, "    return int(exceeding[0])\n")],
)
def rounding_refused(submission: Submission, rng: np.random.Generator) -> None:  # noqa: ARG001
    sampled(submission, [], [], [TENTHS], [ALMOST_ONE], ([], 9))


# --- compact --------------------------------------------------------------------------------------


@trap(
    catches="the committed cache keeps its old size: rejected or empty rows stay behind the "
    "committed ones",
    severity="major",
    story="The rows are moved to the front, and the length is left to the caller.",
    mutant=edit(
        KEPT,
        "    out = np.zeros_like(kv)\n"
        "    out[..., : len(rows), :] = kv[..., rows, :]\n"
        "    return out\n",
    ),
    also=[
        edit(KEPT, "    out = kv.copy()\n"
             "    out[..., : len(rows), :] = kv[..., rows, :]\n"
             "    return out\n"),
        edit(KEPT, "    rest = kv[..., first + len(nodes) :, :]\n"
             "    return np.concatenate([kv[..., rows, :], rest], axis=-2)\n"),
    ],
)  # fmt: skip
def cache_keeps_its_size(submission: Submission, rng: np.random.Generator) -> None:
    same_rows(submission, cache(rng, 2, 3, 4 + 1 + 6, 5), 4, [0, 2])


@trap(
    catches="compact answers the rows of the path alone, or those from the root on, without the "
    "prefix",
    severity="major",
    story="Only what is new is committed to a cache kept elsewhere; the contract asks for all.",
    mutant=edit(KEPT, "    return kv[..., rows[prefix_len:], :]\n"),
    also=[edit(KEPT, "    return kv[..., rows[first:], :]\n")],
)
def cache_without_its_prefix(submission: Submission, rng: np.random.Generator) -> None:
    same_rows(submission, cache(rng, 2, 3, 4 + 1 + 6, 5), 4, [0, 2])


# --- generate -------------------------------------------------------------------------------------

_DRAFTED = "        drafted = [int(tokens[node]) for node in path]\n"


def _right_is_second(
    submission: Submission, rng: np.random.Generator, right: float, *compare: str
) -> None:
    """Every round drafts two tokens a position; the right one has this weight, the other -1."""
    prompt, script, eos, law = story_of(rng)

    def draft(prefix: table.Prefix) -> np.ndarray:
        done = len(prefix) - len(prompt)
        log_q = np.full((2, VOCABULARY), -9.0)
        for depth in range(2):
            told = script[done + depth] if done + depth < len(script) else 0
            log_q[depth, told] = right
            log_q[depth, (told + 1) % VOCABULARY] = -1.0
        return log_q

    table.run(
        submission,
        law,
        draft,
        prompt,
        compare=compare,
        max_new_tokens=8,
        eos_id=eos,
        budget=6,
    )


@trap(
    catches="as many nodes as were accepted are committed from the front of the tree, not those of "
    "the path",
    severity="major",
    story="The length of the path is used, and not its nodes: right for a chain.",
    mutant=edit(_DRAFTED, "        drafted = [int(t) for t in tokens[: len(path)]]\n"),
    control=lambda submission, rng: _right_is_second(submission, rng, -0.25),
)
def first_nodes_committed(submission: Submission, rng: np.random.Generator) -> None:
    _right_is_second(submission, rng, -1.5)


@trap(
    catches="`accepted` is the number of the last round alone",
    severity="minor",
    story="It is set where it is to be added to.",
    mutant=edit(COUNT, COUNT.replace("+=", "=")),
)
def accepted_of_the_last_round(submission: Submission, rng: np.random.Generator) -> None:
    _right_is_second(submission, rng, -0.25, "accepted")


def _deep_draft(submission: Submission, rng: np.random.Generator, depth: int) -> None:
    """Perfect drafts of this depth, and how many tokens were accepted."""
    prompt, _, eos, law = story_of(rng, 40)
    perfect = table.perfect_draft(law, depth, VOCABULARY)

    def draft(prefix: table.Prefix) -> np.ndarray:
        """Sure of one continuation: all other tokens have probability 0."""
        log_q = perfect(prefix)
        return np.where(log_q < log_q.max(), -np.inf, log_q)

    settings = {"max_new_tokens": 38, "eos_id": eos, "budget": depth}
    table.run(submission, law, draft, prompt, compare=["passes", "accepted"], **settings)


@trap(
    catches="generate uses only the first rows of a block, however many it has",
    severity="major",
    story="A fixed number of drafted tokens a round from another setting.",
    mutant=edit(BLOCK, BLOCK.replace("build_tree(block,", "build_tree(block[:4],")),
    also=[
        edit(BLOCK, BLOCK.replace("build_tree(block,", f"build_tree(block[:{rows}],"))
        for rows in ("1", "2", "8", "16")
    ],
    control=lambda submission, rng: _deep_draft(submission, rng, 1),
)
def deep_draft_cut(submission: Submission, rng: np.random.Generator) -> None:
    _deep_draft(submission, rng, 18)


@trap(
    catches="generate drafts one node fewer than its budget",
    severity="minor",
    story="The root is counted as a node.",
    mutant=edit(BLOCK, BLOCK.replace(", budget)", ", max(budget - 1, 0))")),
    also=[edit(BLOCK, BLOCK.replace(", budget)", ", budget // 2)"))],
)
def budget_of_generate_too_small(submission: Submission, rng: np.random.Generator) -> None:
    _deep_draft(submission, rng, 2)
