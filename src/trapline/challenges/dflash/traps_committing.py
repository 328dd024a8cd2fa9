"""Bugs of committing the cache."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import edit, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.dflash.situations import (
    WRITTEN,
    cache,
)
from trapline.gold.tree_decoding import oracle

# Parts of the gold solution that several mutants edit.
_ROWS = "    rows = [*range(first), *(first + node for node in nodes)]\n"
KEPT = "    return kv[..., rows, :]\n"


def same_rows(submission: Submission, kv: np.ndarray, prefix_len: int, path: list[int]) -> None:
    got = submission.compact(kv, prefix_len, path)
    expect.equal(got, oracle.compact(kv, prefix_len, path), "the committed rows")


@trap(
    catches="the first rows after the root are kept instead of the accepted ones",
    severity="major",
    story="Cropping to the right length keeps a rejected sibling's keys; rounds later the text is "
    "gibberish.",
    mutant=edit(_ROWS, "    rows = [*range(first + len(nodes))]\n"),
)
def cache_not_compacted(submission: Submission, rng: np.random.Generator) -> None:
    same_rows(submission, cache(rng, 2, 3, 4 + 1 + 6, 5), 4, [1, 3, 5])


@trap(
    catches="node i is read from the row of node i - 1",
    severity="critical",
    story="The root has a row of its own between prefix and nodes.",
    mutant=edit(_ROWS, _ROWS.replace("first + node", "first - 1 + node")),
    seen=WRITTEN,
)
def cache_rows_off_by_one(submission: Submission, rng: np.random.Generator) -> None:
    same_rows(submission, cache(rng, 2, 3, 4 + 1 + 6, 5), 4, [0, 2])


@trap(
    catches="the root's row is not committed",
    severity="major",
    story="The last committed token has no keys in the cache before its pass; after it they must "
    "remain.",
    mutant=edit(
        _ROWS, _ROWS.replace("range(first)", "range(prefix_len)") + "    rows = rows or [0]\n"
    ),
    seen=WRITTEN,
)
def root_row_lost(submission: Submission, rng: np.random.Generator) -> None:
    same_rows(submission, cache(rng, 3, 2 + 1 + 4, 2), 2, [1, 2])
    same_rows(submission, cache(rng, 3, 2 + 1 + 4, 2), 2, [])


@trap(
    catches="a row is kept for the bonus token, which has none yet",
    severity="major",
    story="The bonus is the next root: its keys are computed in the next pass.",
    mutant=edit(KEPT, "    return kv[..., [*rows, min(max(rows) + 1, kv.shape[-2] - 1)], :]\n"),
    also=[
        edit(
            KEPT,
            "    blank = np.zeros_like(kv[..., :1, :])\n"
            "    return np.concatenate([kv[..., rows, :], blank], axis=-2)\n",
        )
    ],
)
def row_for_the_bonus(submission: Submission, rng: np.random.Generator) -> None:
    same_rows(submission, cache(rng, 3, 2 + 1 + 5, 2), 2, [0, 2])


@trap(
    catches="the path's rows are sorted by index",
    severity="minor",
    story="A path is in the order of its tokens, whatever the indices are.",
    mutant=edit(_ROWS, _ROWS.replace("in nodes", "in sorted(nodes)")),
    seen=WRITTEN,
)
def path_sorted(submission: Submission, rng: np.random.Generator) -> None:
    same_rows(submission, cache(rng, 3, 2 + 1 + 5, 2), 2, [4, 1, 3])


@trap(
    catches="the rows are taken along a fixed axis instead of the last but one",
    severity="major",
    story="Caches come as (rows, D), (heads, rows, D) and (layers, batch, heads, rows, D).",
    mutant=edit(KEPT, "    return np.take(kv, rows, axis=min(1, kv.ndim - 2))\n"),
    seen=WRITTEN,
)
def one_layout_only(submission: Submission, rng: np.random.Generator) -> None:
    for lead in ((2, 7, 7), (7, 7, 2, 3)):
        same_rows(submission, cache(rng, *lead, 7, 3), 2, [1, 3])


@trap(
    catches="a path without nodes fails",
    severity="major",
    story="np.array([]) has dtype float64 and is not a valid index: it fails when every draft is "
    "rejected.",
    mutant=edit(
        KEPT,
        "    below = kv[..., np.array(nodes) + first, :]\n"
        "    return np.concatenate([kv[..., :first, :], below], axis=-2)\n",
    ),
    also=[edit(_ROWS, "    if not nodes:\n        raise ValueError('nothing accepted')\n" + _ROWS)],
)
def empty_path_fails(submission: Submission, rng: np.random.Generator) -> None:
    same_rows(submission, cache(rng, 2, 3 + 1 + 4, 2), 3, [])
    same_rows(submission, cache(rng, 2, 0 + 1 + 4, 2), 0, [])


@trap(
    catches="the rows are moved inside the caller's cache",
    severity="major",
    story="A gather in place overwrites rows that are still to be read, and the caller's data.",
    mutant=edit(
        KEPT,
        "    kv[..., : len(rows), :] = kv[..., rows, :]\n    return kv[..., : len(rows), :]\n",
    ),
    seen=WRITTEN,
)
def cache_moved_in_place(submission: Submission, rng: np.random.Generator) -> None:
    kv = cache(rng, 2, 2 + 1 + 5, 3)
    before = kv.copy()
    _, after = submission.observe("compact", kv, 2, [1, 4])
    expect.equal(after[0], before, "the cache after the call")


@trap(
    catches="the committed cache has another dtype",
    severity="minor",
    story="float64 in a float32 cache doubles its size.",
    mutant=edit(KEPT, "    return kv[..., rows, :].astype(np.float64)\n"),
    also=[edit(KEPT, "    return kv[..., rows, :].astype(np.float32)\n")],
    seen=WRITTEN,
)
def cache_dtype_changed(submission: Submission, rng: np.random.Generator) -> None:
    for dtype in (np.float32, np.float16):
        same_rows(submission, rng.standard_normal((2, 6, 3)).astype(dtype), 1, [0, 2])
