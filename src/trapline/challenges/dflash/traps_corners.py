"""Bugs in rarely visited parts of the contract."""

from typing import Any

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import edit, edits, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.dflash import table
from trapline.challenges.dflash.situations import (
    VOCABULARY,
    WRITTEN,
    distinct,
    float_type,
    rising,
    story_of,
)
from trapline.challenges.dflash.solution_lines import BLOCK, INHERIT, LOOP, POP, PUSH

_TREE = '    budget = whole(budget, "budget", least=0)\n    ranked'
_CACHE = '    prefix_len = whole(prefix_len, "prefix_len", least=0)\n    first'
_GENERATE = '    budget = whole(budget, "budget", least=0)\n    if'
_MASK = '    prefix_len = whole(prefix_len, "prefix_len", least=0)\n    count'
_LIMIT = '"max_new_tokens", least=0'
_NODES = "    parents = checked_parents(parents)\n    prefix_len = whole"
_COLUMNS_WALKED = (
    "        mask[node + 1, : prefix_len + 1] = True\n"
    "        above = narrow[node]\n"
    "        while above >= 0:\n"
    "            mask[node + 1, prefix_len + 1 + above] = True\n"
    "            above = narrow[above]\n"
)


@trap(
    catches="between equal weights the lower parent is preferred before the lower depth",
    severity="minor",
    story="A heap of (weight, parent, token): nodes are numbered by weight, so a low number can "
    "be deep.",
    mutant=edits(
        (PUSH, PUSH.replace("depth, parent, token,", "parent, token, depth,")),
        (POP, POP.replace("depth, parent, token,", "parent, token, depth,")),
    ),
    seen=WRITTEN,
)
def tie_parent_before_depth(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, d = distinct(rng, 4)
    rows = [{a: -0.5, b: -1.0}, {c: -0.25}, {d: -0.5}]
    log_q = table.log_q_of(rows, VOCABULARY, float_type(rng))
    table.same_tree(submission, log_q, 5, ([a, c, b, c, d], [-1, 0, -1, 2, 1]))


@trap(
    catches="a node far down its branch does not see the first of its ancestors",
    severity="major",
    story="A fixed number of doublings follows ancestors only so far.",
    mutant=edit(
        INHERIT,
        "        mask[node + 1, : prefix_len + 1] = True\n"
        "        for _ in range(64):\n"
        "            if parent >= 0:\n"
        "                mask[node + 1, prefix_len + 1 + parent] = True\n"
        "                parent = parents[parent]\n",
    ),
)
def mask_of_a_long_branch(submission: Submission, rng: np.random.Generator) -> None:
    prefix_len = int(rng.integers(1, 4))
    chain = np.arange(-1, 69)
    want = np.tri(71, prefix_len + 71, prefix_len, dtype=bool)
    expect.equal(submission.tree_mask(chain, prefix_len), want, "the mask of a chain")


def _wide_tree(nodes: int, dtype: Any, prefix_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Everything hangs below the root, only the last node below the one before it; and its mask."""
    parents = np.full(nodes, -1, dtype=dtype)
    parents[-1] = nodes - 2
    want = np.eye(nodes + 1, prefix_len + nodes + 1, prefix_len, dtype=bool)
    want[:, : prefix_len + 1] = True
    want[-1, -2] = True
    return parents, want


def small_wide_trees(submission: Submission, rng: np.random.Generator) -> None:
    _wide_trees(submission, rng, ((127, np.int64), (127, np.int8)))


@trap(
    catches="rows or columns of the mask are numbered in a narrow integer, such as the dtype of "
    "the parents, and wrap round",
    severity="major",
    story="parents + 1 of int8 parents makes row 128 negative, and the last nodes of a tree see "
    "what another row sees.",
    mutant=edits(
        (_NODES, "    narrow = np.asarray(parents)\n" + _NODES),
        (INHERIT, "        mask[node + 1] = mask[int(narrow[node : node + 1][0] + 1)]\n"),
    ),
    also=[
        edit(INHERIT, "        mask[node + 1] = mask[(parent + 1) % 256]\n"),
        # Columns, in a walk through the parents as they came.
        edits(
            (_NODES, "    narrow = np.asarray(parents)\n" + _NODES),
            (INHERIT, _COLUMNS_WALKED),
        ),
    ],
    seen=WRITTEN,
    control=small_wide_trees,
)
def narrow_parents_wrap(submission: Submission, rng: np.random.Generator) -> None:
    _wide_trees(submission, rng, ((300, np.int64), (129, np.int8)))


def _wide_trees(
    submission: Submission, rng: np.random.Generator, sizes: tuple[tuple[int, Any], ...]
) -> None:
    prefix_len = int(rng.integers(3))
    for nodes, dtype in sizes:
        parents, want = _wide_tree(nodes, dtype, prefix_len)
        expect.equal(submission.tree_mask(parents, prefix_len), want, "the mask of a wide tree")


@trap(
    catches="the target's float64 log-probabilities are compared in float32",
    severity="minor",
    story="Two tokens that differ in the tenth digit become a tie, and the wrong one is picked.",
    mutant=edit("    return log_probs.argmax", "    return log_probs.astype(np.float32).argmax"),
    seen=WRITTEN,
)
def picks_in_float32(submission: Submission, rng: np.random.Generator) -> None:
    low, high, eos = (*rising(rng, 2), VOCABULARY)
    values = np.full(VOCABULARY + 1, -9.0)
    values[low], values[high] = -1.0 - 2.0**-40, -1.0
    draft = table.log_q_of([{low: -1.0, high: -1.0}], VOCABULARY + 1, np.float64)
    settings: dict[str, Any] = {"max_new_tokens": 3, "eos_id": eos, "budget": 2}
    table.run(submission, lambda _: values, lambda _: draft, (low,), **settings)


@trap(
    catches="later blocks are cut to the length of the first one",
    severity="major",
    story="The depth of the tree is read once, from the first block.",
    mutant=edits(
        (LOOP, "    depth = None\n" + LOOP),
        (
            BLOCK,
            "        block = drafter.block(prefix + output)\n"
            "        depth = len(block) if depth is None else depth\n"
            "        tokens, parents = build_tree(block[:depth], budget)\n",
        ),
    ),
)
def draft_length_remembered(submission: Submission, rng: np.random.Generator) -> None:
    prompt, _, eos, law = story_of(rng)
    full = table.perfect_draft(law, 3, VOCABULARY)

    def growing(prefix: table.Prefix) -> np.ndarray:
        return np.asarray(full(prefix)[: len(prefix) - len(prompt)])

    table.run(
        submission, law, growing, prompt, compare=["passes"], max_new_tokens=9, eos_id=eos, budget=3
    )


_LENGTHS = (_TREE, _MASK, _CACHE, _LIMIT, _GENERATE)


@trap(
    catches="a budget, a prefix or a limit of 0 is refused",
    severity="major",
    story="The check asks for more than 0 where it means at least 0.",
    mutant=edit(_TREE, _TREE.replace("=0", "=1")),
    also=[
        edit(_CACHE, _CACHE.replace("=0", "=1")),
        edit(_LIMIT, _LIMIT.replace("=0", "=1")),
        edit(_GENERATE, _GENERATE.replace("=0", "=1")),
        edits(*((line, line.replace("=0", "=1")) for line in _LENGTHS)),
    ],
)
def zero_refused(submission: Submission, rng: np.random.Generator) -> None:
    tokens, parents = submission.build_tree(np.log(rng.dirichlet(np.ones(4), 2)), 0)
    expect.equal((len(tokens), len(parents)), (0, 0), "the sizes of a tree without a budget")
    kv = rng.standard_normal((2, 4, 3))
    expect.equal(submission.compact(kv, 0, [1, 2]), kv[:, [0, 2, 3]], "the committed rows")
    prompt, _, eos, law = story_of(rng)
    draft = table.perfect_draft(law, 3, VOCABULARY)
    for limit, budget in ((0, 3), (3, 0)):
        settings: dict[str, Any] = {"max_new_tokens": limit, "eos_id": eos, "budget": budget}
        table.run(submission, law, draft, prompt, **settings)


@trap(
    catches="a draft with a token of probability 0 (-inf) is refused",
    severity="major",
    story="isfinite in place of a test for NaN and +inf; masked vocabularies have -inf everywhere.",
    mutant=edit(
        "    if np.isnan(log_q).any() or np.isposinf(log_q).any():\n",
        "    if not np.isfinite(log_q).all():\n",
    ),
    seen=WRITTEN,
)
def impossible_draft_refused(submission: Submission, rng: np.random.Generator) -> None:
    a, b = distinct(rng, 2)
    log_q = table.log_q_of([{a: -1.0, b: -2.0}], VOCABULARY, float_type(rng))
    table.same_tree(submission, log_q, 2, ([a, b], [-1, -1]))


@trap(
    catches="an answer of the target with a token of probability 0 (-inf) is refused",
    severity="major",
    story="isfinite in place of a test for NaN; a target that cannot say a token answers -inf.",
    mutant=edit(
        "    if np.isnan(log_probs).any():\n", "    if not np.isfinite(log_probs).all():\n"
    ),
)
def impossible_pick_refused(submission: Submission, rng: np.random.Generator) -> None:
    prompt, _, eos, law = story_of(rng)

    def certain(prefix: table.Prefix) -> np.ndarray:
        values = law(prefix)
        return np.where(values == values.max(), values, -np.inf)

    draft = table.perfect_draft(law, 2, VOCABULARY)
    table.run(submission, certain, draft, prompt, max_new_tokens=4, eos_id=eos, budget=2)


@trap(
    catches="a law with a token of probability 0 is refused",
    severity="major",
    story="Greater than 0 is asked for where only negative probabilities are wrong.",
    mutant=insert_before(
        "    return probs.astype(np.float64)\n",
        "    if not (probs > 0.0).all():\n        raise ValueError('not a law')\n",
    ),
)
def zero_probability_refused(submission: Submission, rng: np.random.Generator) -> None:
    law = np.zeros((2, VOCABULARY), dtype=float_type(rng))
    a, b = distinct(rng, 2)
    law[0, a], law[1, b] = 1.0, 1.0
    got = submission.verify_sampled(np.array([a]), np.array([-1]), law, law[:, 0] * 0)
    table.same_verdict(got, ([0], b))
