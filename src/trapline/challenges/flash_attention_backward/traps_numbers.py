"""Bugs of the forward pass and of extreme numbers."""

from typing import Any

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, edits, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_backward.cases import (
    NAMES,
    Saved,
    differentiates,
    draw,
    saved,
    triple,
)
from trapline.challenges.flash_attention_backward.situations import BLIND, ordinary, with_logits
from trapline.challenges.flash_attention_backward.solution_lines import (
    FORWARD_MASK,
    RECOMPUTE,
    UNBOUNDED,
    WEIGHTS,
)
from trapline.challenges.flash_attention_forward.cases import REFUSALS, Shape, attends, pair

# --- the forward pass it rests on -----------------------------------------------------------------


@trap(
    catches="exp(m_new − m_old) instead of exp(m_old − m_new) in the forward pass",
    severity="major",
    story="Said to show only in the backward pass; with two tiles it shows in out and in lse.",
    mutant=edit("np.exp(peak - origin)", "np.exp(np.where(peak == -np.inf, 0, origin - peak))"),
    also=[
        # Before the first key the maximum is −inf, and 0 · exp(∞) is not a number.
        edit("np.exp(peak - origin)", "np.exp(origin - peak)"),
        edits(("np.exp(peak - origin)", "np.exp(origin - peak)"), ("total > 0", "peak > -np.inf")),
    ],
)
def forward_rescale_direction(submission: Submission, rng: np.random.Generator) -> None:
    _, q, k, v, _, _ = with_logits(rng, [0.0, 0.0, 1.0, 1.0, 3.0, 3.0], 3, False)
    attends(submission, q, k, v, tile=2)


@trap(
    catches="the forward pass keeps the maximum of its first tile, so that a higher one overflows",
    severity="critical",
    story="The maximum is set once, when nothing was seen yet; random scores never grow that much.",
    mutant=edit(
        "np.maximum(peak, scores.max(axis=1))",
        "np.where(peak == -np.inf, scores.max(axis=1), peak)",
    ),
    seen=BLIND,
    control=ordinary,
)
def forward_maximum_of_the_first_tile(submission: Submission, rng: np.random.Generator) -> None:
    _, q, k, v, _, _ = with_logits(rng, [0.0, 0.0, 2000.0, 2000.0], 3, False)
    attends(submission, q, k, v, tile=2)


@trap(
    catches="one maximum for a whole tile of queries, so that rows with low scores underflow",
    severity="major",
    story="max() without an axis: one query with large scores makes the others underflow, and "
    "their lse is −inf.",
    mutant=edit("scores.max(axis=1)", "scores.max()"),
    control=ordinary,
)
def forward_maximum_shared_by_rows(submission: Submission, rng: np.random.Generator) -> None:
    _, q, k, v, _, _ = with_logits(rng, [2000.0, 1999.0, 2001.0], 3, False)
    q[0, 0, 1] = 0.0
    attends(submission, q, k, v, tile=2)


@trap(
    catches="NaN in out or lse of rows that see no key",
    severity="critical",
    story="−inf − (−inf) where empty and other rows share a tile; the backward pass inherits it.",
    mutant=edit("np.where(new_peak == -np.inf, 0, new_peak)", "new_peak"),
    seen=BLIND,
    control=ordinary,
)
def forward_empty_rows_nan(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=9, S=4).draw(rng), causal=True, tile=8)


@trap(
    catches="lse lacks the maximum that was subtracted",
    severity="major",
    story="out is right, but a backward pass that uses lse is not.",
    mutant=edit("peak + np.log(total)", "np.log(total)"),
    seen=BLIND,
)
def forward_lse_without_maximum(submission: Submission, rng: np.random.Generator) -> None:
    _, q, k, v, _, _ = with_logits(rng, [5.0, 4.0, 5.0, 3.0], 2, False)
    attends(submission, q, k, v, tile=2)


@trap(
    catches="the forward mask is aligned to the first key",
    severity="critical",
    story="Two queries on six keys: query 0 must see five.",
    mutant=edit("start + S - T, causal", "start, causal"),
    seen=BLIND,
    control=ordinary,
)
def forward_mask_aligned_top_left(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=2, S=6).draw(rng), causal=True, tile=4)


@trap(
    catches="−1e9 as mask: a row without keys becomes the mean of all values",
    severity="major",
    story="A finite sentinel minus itself is 0, so a fully masked row gets equal weights.",
    mutant=edit(FORWARD_MASK, FORWARD_MASK.replace("-np.inf", "-1e9")),
    control=ordinary,
)
def forward_finite_mask(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(T=7, S=4).draw(rng)
    out, lse = pair(submission.flash_attention(q, k, v + 3.0, causal=True, tile=8))
    expect.array(lse, shape=(1, 1, 7), dtype=np.float64, what="lse")
    expect.array(out, shape=(1, 1, 7, 4), dtype=np.float64, what="out")
    expect.equal(out[:, :, :3], np.zeros((1, 1, 3, 4)), "an empty row")
    expect.that(bool(np.all(lse[..., :3] == -np.inf)), "lse of an empty row is not −inf")


# --- the ends of the numbers ----------------------------------------------------------------------


def finite(answer: Any, arguments: Saved) -> None:
    """Gradients of the right shapes and dtypes, without infinities and NaN."""
    for name, got, like in zip(NAMES, triple(answer), arguments[1:4], strict=True):
        expect.array(got, shape=like.shape, dtype=like.dtype, what=name)
        expect.that(bool(np.isfinite(got).all()), f"{name} is not finite")


_BOUNDED = "(np.minimum(weights, 1) * (dweights - delta[b, h, rows, None]) * D**-0.5)"
_DQ, _BOUNDED_DQ = "+= dscores @ k", f"+= {_BOUNDED} @ k"
_DK, _BOUNDED_DK = "dscores.T @ q", f"{_BOUNDED}.T @ q"
_DV, _BOUNDED_DV = "weights.T @ dout[b, h, rows]", "np.minimum(weights, 1).T @ dout[b, h, rows]"


def _capped(largest: str) -> Mutant:
    """The exponent of a weight has this bound, not 0."""
    return edit(WEIGHTS, WEIGHTS.replace(", 0)", f", {largest})"))


@trap(
    catches="weights exp(s − lse) may exceed 1, and they or products with them overflow where s "
    "and lse are rounded far apart",
    severity="major",
    story="float32 numbers near 10¹² are 65536 apart, and the saved lse may be one step below a "
    "recomputed score. Without a bound, the weight becomes inf; an exponent that is clamped "
    "where exp would overflow (at 88 instead of 0) gives 10³⁸, and its products are inf.",
    mutant=edit(WEIGHTS, "return np.exp(scores - finite[:, None])"),
    also=[
        _capped("88"),
        _capped("np.log(np.finfo(scores.dtype).max)"),
        # One of two sweeps takes sums of its own, which fit its scores.
        edits(UNBOUNDED, (_DQ, _BOUNDED_DQ)),
        edits(UNBOUNDED, (_DQ, _BOUNDED_DQ), (_DK, _BOUNDED_DK)),
        edits(UNBOUNDED, (_DK, _BOUNDED_DK), (_DV, _BOUNDED_DV)),
    ],
    seen=BLIND,
    control=ordinary,
)
def huge_scores_overflow(submission: Submission, rng: np.random.Generator) -> None:
    for arguments in (_one_step_apart(1), _one_step_apart(2), _of_huge_scores(rng)):
        finite(submission.flash_attention_backward(*arguments, tile=16), arguments)


def _one_step_apart(keys: int) -> Saved:
    """One or two keys whose scaled scores are 10¹² and a saved lse one step of float32 below them.

    Two keys lie on two axes: infinite parts of dq do not meet. With one key dq and dk are 0 where
    the weight is bounded: it does not matter how the weights are made again.
    """
    q, k, v, dout = (np.zeros((1, 1, n, 4), np.float32) for n in (1, keys, keys, 1))
    q[..., :2], k[0, 0, range(keys), range(keys)] = 2e6, 1e6
    v[0, 0, :, 0], dout[..., 0] = (1, 2)[:keys], 1
    _, _, _, _, out, lse = saved(dout, q, k, v, False)
    return dout, q, k, v, out, np.full_like(lse, 1e12 - 65536)


def _of_huge_scores(rng: np.random.Generator) -> Saved:
    """Arguments whose scaled scores are about 10¹², in float32."""
    q, k, v = Shape(T=128, S=8, D=3).draw(rng, np.float32)
    dout = rng.standard_normal(q.shape).astype(np.float32)
    return saved(dout, 1e6 * q, 1e6 * k, v, False)


def _rows_without_keys(submission: Submission, rng: np.random.Generator) -> None:
    """Three of seven queries see no key; dout is ordinary."""
    arguments = draw(Shape(H=2, G=1, T=7, S=4), rng, True, np.float32)
    for tile in (2, 16):
        differentiates(submission, arguments, causal=True, tile=tile)


@trap(
    catches="dout of a row without keys overflows in a product before its weight 0 is applied",
    severity="major",
    story="The gradient of a padded row may hold any value; 0 · inf is NaN and reaches all of dk.",
    mutant=edit("    dout = _heard(dout, lse)\n", ""),
    seen=BLIND,
    control=_rows_without_keys,
)
def empty_rows_overflow(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(H=2, G=1, T=7, S=4).draw(rng, np.float32)
    dout = rng.standard_normal(q.shape).astype(np.float32)
    dout[:, :, :3] = 3e38
    arguments = saved(dout, q, k, np.abs(v) + np.float32(1.0), True)
    for tile in (2, 16):
        differentiates(submission, arguments, causal=True, tile=tile)


@trap(
    catches="−1e30 stands for −inf somewhere, and rows with finite scores below it count as empty",
    severity="major",
    story="lse < −1e30 is a common test for an empty row; the constant comes from another dtype's "
    "range.",
    mutant=edit("np.where(lse == -np.inf, 0, lse)", "np.where(lse < -1e30, 0, lse)"),
    control=ordinary,
)
def scores_below_sentinel(submission: Submission, rng: np.random.Generator) -> None:
    # The first key has all the weight, so that it gets all of dout; that takes scores which are
    # exact in every way of scaling, since the saved lse is compared with them.
    arguments = with_logits(rng, [-1e200 * s for s in range(1, 7)], 6, True, width=16)
    want = np.zeros((1, 1, 6, 16))
    want[:, :, 0] = arguments[0].sum(axis=2)
    for tile in (4, 16):
        answer = submission.flash_attention_backward(*arguments, causal=True, tile=tile)
        finite(answer, arguments)
        expect.close(answer[2], want, atol=1e-12, what="dv")


@trap(
    catches="a row whose out is 0 is taken for one that sees no key",
    severity="major",
    story="An empty row has out 0, but so has every row whose values are zero: a layer whose value "
    "projection starts at zero would never learn.",
    mutant=edit("_heard(dout, lse)", "_heard(dout, np.where(out.any(axis=-1), lse, -np.inf))"),
    control=ordinary,
)
def zero_output_taken_for_empty_row(submission: Submission, rng: np.random.Generator) -> None:
    dout, q, k, v, _, _ = draw(Shape(H=2, G=1, T=6, S=6), rng, True)
    differentiates(submission, saved(dout, q, k, 0 * v, True), causal=True, tile=4)


@trap(
    catches="weights below 1e-8 are set to 0, also in float64",
    severity="minor",
    story="The threshold is below float32's rounding error; in float64 it costs half of the "
    "digits.",
    mutant=edit(
        WEIGHTS,
        WEIGHTS.replace("return", "weights =")
        + "\n    return np.where(weights < 1e-8, 0, weights)",
    ),
    control=ordinary,
)
def small_weights_dropped(submission: Submission, rng: np.random.Generator) -> None:
    arguments = with_logits(rng, [0.0, -19.0, -19.5, -20.0], 3, False)
    differentiates(submission, arguments, tile=2)


@trap(
    catches="an integer out or lse is accepted, because only dout is checked",
    severity="minor",
    story="Saved arrays are trusted, but the caller may pass any array.",
    mutant=edit("for x in (dout, out, lse))", "for x in (dout,))"),
    dimension="robustness",
    control=ordinary,
)
def integers_in_saved_accepted(submission: Submission, rng: np.random.Generator) -> None:
    *inputs, out, lse = draw(Shape(), rng, False)
    for kept in ((np.rint(out).astype(np.int64), lse), (out, np.rint(lse).astype(np.int64))):
        expect.raises(REFUSALS, submission.flash_attention_backward, *inputs, *kept)


def _never_checked(*names: str) -> Mutant:
    """Of these saved arrays neither dtype nor shape is looked at; both are made again."""
    kinds = ", ".join(name for name in ("dout", "out", "lse") if name not in names)
    shapes = {"out": "out.shape != q.shape", "lse": "lse.shape != q.shape[:3]"}
    return edits(
        ("for x in (dout, out, lse))", f"for x in ({kinds},))"),
        *((f" or {shapes[name]}", "") for name in names),
        RECOMPUTE,
    )


@trap(
    catches="the checks of the backward pass do not look at lse, or at out, at all: neither at its "
    "shape nor at its dtype",
    severity="minor",
    story="The pass computes both again and never reads them, so a wrong one goes unnoticed.",
    mutant=_never_checked("lse"),
    also=[_never_checked("out"), _never_checked("out", "lse")],
    dimension="robustness",
    seen=BLIND,
    control=ordinary,
)
def saved_array_never_checked(submission: Submission, rng: np.random.Generator) -> None:
    """Integers of another shape: a check of either refuses them."""
    *inputs, out, lse = draw(Shape(T=6, S=6), rng, False)
    wider, longer = np.ones((1, 1, 6, 5), np.int64), np.ones((1, 1, 8), np.int64)
    for kept in ((out, longer), (wider, lse)):
        expect.raises(REFUSALS, submission.flash_attention_backward, *inputs, *kept)
