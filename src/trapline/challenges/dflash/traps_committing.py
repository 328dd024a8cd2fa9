"""Bugs of committing the cache."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.dflash.situations import (
    cache,
    refused,
)
from trapline.gold.tree_decoding import oracle


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
