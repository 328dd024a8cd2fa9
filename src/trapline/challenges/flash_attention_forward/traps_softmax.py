"""Bugs of the online softmax and its tiles."""

import numpy as np

from trapline.arena.judge.traps import edit, edits, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_forward.cases import Shape, attends
from trapline.challenges.flash_attention_forward.situations import WRITTEN, with_logits
from trapline.challenges.flash_attention_forward.solution_lines import (
    KEY_LOOP,
    LSE,
    MASK,
    ORIGIN,
    QUERY_LOOP,
    UNANSWERED,
)

_WEIGHTS = "weights = np.exp(scores - origin[:, None])"
_STOP = "stop = min(len(k), position + rows) if causal else len(k)"


def one_row_a_tile(submission: Submission, rng: np.random.Generator) -> None:
    """Tiles of one query and one key."""
    attends(submission, *Shape(T=4, S=4).draw(rng), tile=1)


# --- the online softmax ---------------------------------------------------------------------------


@trap(
    catches="exp(m_new − m_old) instead of exp(m_old − m_new) when the running maximum grows",
    severity="critical",
    story="A published comparison calls this the most common bug of open implementations and says "
    "that forward tests cannot see it; with two tiles they can.",
    mutant=edit("np.exp(peak - origin)", "np.exp(np.where(peak == -np.inf, 0, origin - peak))"),
    also=[
        # Before the first key the maximum is −inf, and 0 · exp(∞) is not a number.
        edit("np.exp(peak - origin)", "np.exp(origin - peak)"),
        edits(("np.exp(peak - origin)", "np.exp(origin - peak)"), ("total > 0", "peak > -np.inf")),
    ],
    seen="a published comparison, which calls it the most common bug",
)
def rescale_direction(submission: Submission, rng: np.random.Generator) -> None:
    inputs = with_logits(rng, np.repeat([0.0, 1.0, 3.0], 4), 5, np.float64)
    attends(submission, *inputs, tile=4)


@trap(
    catches="the accumulated output keeps the weight of an outdated maximum",
    severity="critical",
    story="The sum is corrected and the output is not; a test with one tile cannot show it.",
    mutant=edit("= weighted * correction[:, None] + weights", "= weighted + weights"),
    seen=WRITTEN,
)
def output_not_rescaled(submission: Submission, rng: np.random.Generator) -> None:
    inputs = with_logits(rng, np.repeat([-1.0, 2.0], 4), 3, np.float64)
    attends(submission, *inputs, tile=4)


@trap(
    catches="the running sum keeps the weight of an outdated maximum",
    severity="critical",
    story="The output is corrected and the denominator is not: rows no longer sum to one.",
    mutant=edit("total = total * correction + weights", "total = total + weights"),
    seen=WRITTEN,
)
def sum_not_rescaled(submission: Submission, rng: np.random.Generator) -> None:
    inputs = with_logits(rng, np.repeat([-2.0, 2.0], 4), 3, np.float64)
    inputs[2][...] = 1.0
    attends(submission, *inputs, tile=4)


@trap(
    catches="neither the sum nor the output is corrected when the running maximum grows",
    severity="critical",
    story="Each tile is summed as if its maximum were the final one.",
    mutant=edit("correction = np.exp(peak - origin)", "correction = np.ones_like(peak)"),
    seen=WRITTEN,
)
def nothing_rescaled(submission: Submission, rng: np.random.Generator) -> None:
    inputs = with_logits(rng, np.repeat([-1.0, 1.0], 4), 4, np.float64)
    attends(submission, *inputs, tile=4)


@trap(
    catches="each tile subtracts its own maximum, so a later, lower tile overflows the correction",
    severity="critical",
    story="Mathematically equal and right on random data; a strong first key (an attention sink) "
    "followed by ordinary ones overflows.",
    mutant=edit("np.maximum(peak, scores.max(axis=1))", "scores.max(axis=1)"),
    also=[
        # Rows that a tile hides entirely keep their maximum.
        edit(
            "np.maximum(peak, scores.max(axis=1))",
            "np.where(scores.max(axis=1) == -np.inf, peak, scores.max(axis=1))",
        ),
    ],
    seen=WRITTEN,
)
def running_maximum_forgotten(submission: Submission, rng: np.random.Generator) -> None:
    inputs = with_logits(rng, np.repeat([2000.0, 0.0], 4), 3, np.float64)
    attends(submission, *inputs, tile=4)


def growing_logits_in_one_tile(submission: Submission, rng: np.random.Generator) -> None:
    inputs = with_logits(rng, np.repeat([0.0, 2000.0], 4), 3, np.float64)
    attends(submission, *inputs, tile=8)


@trap(
    catches="the maximum of the first tile is kept, so a later, higher tile overflows",
    severity="critical",
    story="The maximum is set once, when nothing was seen yet; scores grow by more than 700 only "
    "where a test makes them.",
    mutant=edit(
        "np.maximum(peak, scores.max(axis=1))",
        "np.where(peak == -np.inf, scores.max(axis=1), peak)",
    ),
    seen=WRITTEN,
    control=growing_logits_in_one_tile,
)
def maximum_of_the_first_tile(submission: Submission, rng: np.random.Generator) -> None:
    inputs = with_logits(rng, np.repeat([0.0, 2000.0], 4), 3, np.float64)
    attends(submission, *inputs, tile=4)


@trap(
    catches="one maximum for a whole tile, so that rows with low scores underflow",
    severity="critical",
    story="max() without an axis: right while all rows have scores of similar size; one query with "
    "large scores makes the others underflow.",
    mutant=edit("scores.max(axis=1)", "scores.max()"),
    seen=WRITTEN,
)
def maximum_shared_by_rows(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = with_logits(rng, np.array([2000.0, 1999.0, 2001.0, 2000.0]), 3, np.float64)
    q[0, 0, 0] = 0.0
    attends(submission, q, k, v, tile=2)


@trap(
    catches="one sum of weights for a whole tile, instead of one for each row",
    severity="major",
    story="sum() without an axis; with one query a tile it is right.",
    mutant=edit("weights.sum(axis=1)", "weights.sum()"),
    control=one_row_a_tile,
)
def sum_shared_by_rows(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=4).draw(rng), tile=8)


@trap(
    catches="NaN in a row whose first tile is fully masked: −inf − (−inf), or 0 / 0 where every "
    "tile divides by the sum so far",
    severity="major",
    story="A well-known hazard of the task: rows that have seen no key yet share a tile with rows "
    "that have. The answers do not tell the two apart.",
    mutant=edit(ORIGIN, "new_peak"),
    also=[edit("np.where(seen, total, 1)", "np.where(seen | (stop > 0), total, 1)")],
    seen=WRITTEN,
)
def fully_masked_tile_nan(submission: Submission, rng: np.random.Generator) -> None:
    for T, S, tile in ((12, 5, 8), (9, 3, 4), (6, 6, 2)):
        attends(submission, *Shape(T=T, S=S).draw(rng), causal=True, tile=tile)


@trap(
    catches="exp of raw logits overflows",
    severity="critical",
    story="Logits of ±10⁴ come from untrained or quantised models; a softmax without its maximum "
    "returns NaN there and is right everywhere else.",
    mutant=edits(
        (ORIGIN, "np.zeros_like(new_peak)"),
        ("np.exp(peak - origin)", "np.ones_like(peak)"),
        (LSE, "np.log(total)"),
    ),
    also=[
        # The maximum is divided out of exponentials that were taken of the raw scores.
        edit(_WEIGHTS, "weights = np.exp(scores) / np.exp(origin[:, None])"),
        edit("np.exp(peak - origin)", "np.exp(peak) / np.exp(origin)"),
    ],
    seen=WRITTEN,
)
def exponent_without_maximum(submission: Submission, rng: np.random.Generator) -> None:
    inputs = with_logits(rng, np.array([1e4, -1e4, 9999.0, 0.0, 9998.0, 1e4]), 3, np.float32)
    attends(submission, *inputs, tile=2)


def moderate_logits(submission: Submission, rng: np.random.Generator) -> None:
    """Logits whose exponentials neither overflow nor underflow."""
    inputs = with_logits(rng, np.array([3.0, 1.0, 2.0, 3.0]), 3, np.float64)
    attends(submission, *inputs, tile=2)


@trap(
    catches="lse is the logarithm of a sum that exp(maximum) has multiplied back: it overflows for "
    "large scores and is −inf for low ones, while out is right",
    severity="major",
    story="log(total · exp(peak)) leaves the domain that the maximum was subtracted for; "
    "peak + log(total) does not.",
    mutant=edit(LSE, "np.log(total * np.exp(peak))"),
    also=[
        edit(LSE, "np.log(total) + np.log(np.exp(peak))"),
        edit(LSE, "np.log(np.maximum(total * np.exp(peak), np.finfo(q.dtype).tiny))"),
    ],
    seen=WRITTEN,
    control=moderate_logits,
)
def lse_leaves_the_log_domain(submission: Submission, rng: np.random.Generator) -> None:
    for level in (2000.0, -2000.0):
        inputs = with_logits(rng, level + np.array([3.0, 1.0, 2.0, 3.0]), 3, np.float64)
        attends(submission, *inputs, tile=2)


@trap(
    catches="a running maximum that starts at a number such as 0 or −1e9 instead of −inf",
    severity="major",
    story="Zero looks like a harmless start; rows whose logits are all far below it underflow to "
    "zero.",
    mutant=edit("peak = np.full(rows, -np.inf, q.dtype)", "peak = np.zeros(rows, q.dtype)"),
    also=[
        edit("peak = np.full(rows, -np.inf, q.dtype)", f"peak = np.full(rows, {start}, q.dtype)")
        for start in ("-1e4", "-1e6", "-1e9", "-1e10")
    ],
    seen=WRITTEN,
)
def maximum_starts_at_zero(submission: Submission, rng: np.random.Generator) -> None:
    inputs = with_logits(rng, np.array([-1e4, -1e4 - 1, -1e4 + 1, -1e4, -1e4 - 2]), 3, np.float32)
    attends(submission, *inputs, tile=2)
    for low in (-3e6, -3e10):
        attends(submission, *with_logits(rng, np.full(5, low), 3, np.float64), tile=2)


@trap(
    catches="every tile is normalised by itself and the tiles are averaged",
    severity="major",
    story="The tile size becomes part of the result: right only when all keys fit in one tile, as "
    "they do in small tests.",
    mutant=edits(
        (
            "total = total * correction + weights.sum(axis=1)",
            "weights /= weights.sum(axis=1, keepdims=True)\n        total = total + 1",
        ),
        ("weighted = weighted * correction[:, None] + weights", "weighted = weighted + weights"),
    ),
)
def tiles_averaged(submission: Submission, rng: np.random.Generator) -> None:
    inputs = with_logits(rng, np.array([0.0, 0.0, 4.0, 4.0, 4.0]), 3, np.float64)
    for tile in (5, 2, 1):
        attends(submission, *inputs, tile=tile)


# --- tiles and edges ------------------------------------------------------------------------------


@trap(
    catches="keys behind the last whole tile are never read",
    severity="major",
    story="Test lengths are often powers of two; 300 keys in tiles of 97 leave a remainder.",
    mutant=edit(KEY_LOOP, "for start in range(0, stop - stop % tile, tile):"),
    also=[edit(_STOP, "stop = len(k) // tile * tile or len(k)")],
    seen=WRITTEN,
)
def last_key_tile_dropped(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=3, S=300).draw(rng), tile=97)


@trap(
    catches="queries behind the last whole tile stay zero",
    severity="major",
    story="The same error on the other axis: 300 queries in tiles of 97.",
    mutant=edits(UNANSWERED, (QUERY_LOOP, "for start in range(0, T - T % tile, tile):")),
)
def last_query_tile_dropped(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=300, S=3).draw(rng), tile=97)


@trap(
    catches="a tile larger than the sequence is refused or answered wrongly",
    severity="major",
    story="The default tile of 64 is larger than a prompt of five tokens.",
    mutant=edit("if tile < 1:", "if tile < 1 or tile > k.shape[2] > 0:"),
    seen=WRITTEN,
)
def tile_larger_than_sequence_refused(submission: Submission, rng: np.random.Generator) -> None:
    for causal in (False, True):
        attends(submission, *Shape(T=5, S=5).draw(rng), causal=causal, tile=100)


@trap(
    catches="tiles that are not a power of two are refused",
    severity="minor",
    story="A rule of GPU kernels applied to an interface that does not have it.",
    mutant=edit("if tile < 1:", "if tile < 1 or tile & (tile - 1):"),
)
def tile_must_be_power_of_two(submission: Submission, rng: np.random.Generator) -> None:
    inputs = Shape(T=11, S=11).draw(rng)
    for tile in (3, 7):
        attends(submission, *inputs, causal=True, tile=tile)


@trap(
    catches="the zeros that fill up the last tile take part in the softmax",
    severity="major",
    story="The tail is padded with zeros; a zero key has logit 0, which is large in a row whose "
    "real logits are negative.",
    mutant=edits(
        (
            "scores = q @ k[cols].T",
            "scores = np.zeros((rows, tile), q.dtype)\n"
            "        scores[:, : cols.stop - cols.start] = q @ k[cols].T",
        ),
        ("weights @ v[cols]", "weights[:, : cols.stop - cols.start] @ v[cols]"),
    ),
    also=(
        edits(
            (
                "scores = q @ k[cols].T",
                "scores = np.zeros((rows, min(tile, len(k))), q.dtype)\n"
                "        scores[:, : cols.stop - cols.start] = q @ k[cols].T",
            ),
            (MASK, MASK.replace("scores[", "scores[:, : cols.stop - cols.start][")),
            ("weights @ v[cols]", "weights[:, : cols.stop - cols.start] @ v[cols]"),
        ),
    ),
    seen=WRITTEN,
)
def padded_keys_counted(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *with_logits(rng, np.full(5, -6.0), 3, np.float64), tile=4)
