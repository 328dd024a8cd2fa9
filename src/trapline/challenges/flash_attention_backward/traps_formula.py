"""Bugs of the formula: sums, the derivative of the softmax, scale, recomputed weights."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, edits, insert_after, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_backward.cases import agrees, differentiates, draw, triple
from trapline.challenges.flash_attention_backward.situations import (
    BLIND,
    grouped,
    ordinary,
    with_logits,
)
from trapline.challenges.flash_attention_backward.solution_lines import (
    DSCORES,
    ROW_LOOP,
    SCORES,
    UNBOUNDED,
    WEIGHTS,
    mask,
)
from trapline.challenges.flash_attention_forward.cases import Shape

# Parts of the gold solution that several mutants edit.
_RETURN = "    return dq, dk, dv\n"
_CALL = "_weights(q[b, h, rows], k[b, g], "
_DELTA = "    delta = (dout * out).sum(axis=-1)\n"
_DWEIGHTS = "                dweights = dout[b, h, rows] @ v[b, g, cols].T\n"
_DQ_DSCORES = "dq[b, h, rows] += dscores @"
_TILE_SUM = "(weights * dweights).sum(axis=1, keepdims=True)"
_TILE_MEAN = f"{_TILE_SUM} / np.maximum(weights.sum(axis=1, keepdims=True), 1e-300)"


def _with_delta(delta: str, *, dq_alone: bool, before: tuple[tuple[str, str], ...] = ()) -> Mutant:
    """These row sums take the place of D, in dq alone or in dk, too."""
    dscores = f"(weights * (dweights - {delta}) * D**-0.5)"
    place = (_DQ_DSCORES, f"dq[b, h, rows] += {dscores} @")
    return edits(*before, place if dq_alone else (DSCORES, f"dscores = {dscores}"))


# --- sums over groups, tiles, rows ----------------------------------------------------------------


@trap(
    catches="dk keeps the last query head of a group instead of the sum over the group",
    severity="critical",
    story="Key heads are shared in the forward pass, so their gradient is a sum; an assignment per "
    "head overwrites it, and tests with H = G never see it.",
    mutant=insert_before(ROW_LOOP, "            dk[b, g, cols] = 0\n"),
    seen=BLIND,
    control=ordinary,
)
def dk_of_last_head_only(submission: Submission, rng: np.random.Generator) -> None:
    grouped(submission, rng)


@trap(
    catches="dv keeps the last query head of a group instead of the sum over the group",
    severity="major",
    story="The same overwrite on the values' side.",
    mutant=insert_before(ROW_LOOP, "            dv[b, g, cols] = 0\n"),
    seen=BLIND,
    control=ordinary,
)
def dv_of_last_head_only(submission: Submission, rng: np.random.Generator) -> None:
    grouped(submission, rng)


@trap(
    catches="dk is the mean over the group instead of the sum",
    severity="major",
    story="Averaging looks plausible; the effective learning rate of every key projection drops.",
    mutant=edit(_RETURN, "    return dq, dk / (H // G), dv\n"),
    seen=BLIND,
    control=ordinary,
)
def dk_averaged_over_group(submission: Submission, rng: np.random.Generator) -> None:
    grouped(submission, rng)


@trap(
    catches="dv is the mean over the group instead of the sum",
    severity="major",
    story="As for dk: the forward pass copied the head, so the backward pass must add.",
    mutant=edit(_RETURN, "    return dq, dk, dv / (H // G)\n"),
    seen=BLIND,
    control=ordinary,
)
def dv_averaged_over_group(submission: Submission, rng: np.random.Generator) -> None:
    grouped(submission, rng)


@trap(
    catches="dq holds the contribution of the last tile of keys only",
    severity="major",
    story="With keys in the outer loop dq is touched once per key tile and must accumulate.",
    mutant=edit("dq[b, h, rows] += ", "dq[b, h, rows] = "),
    seen=BLIND,
)
def dq_of_last_key_tile_only(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=8), rng, False), tile=4)


@trap(
    catches="dk holds the contribution of the last tile of queries only",
    severity="critical",
    story="A small test has only one tile of queries.",
    mutant=edit("dk[b, g, cols] += ", "dk[b, g, cols] = "),
    seen=BLIND,
)
def dk_of_last_query_tile_only(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=8, S=4), rng, False), tile=4)


@trap(
    catches="dv holds the contribution of the last tile of queries only",
    severity="major",
    story="A small test has only one tile of queries.",
    mutant=edit("dv[b, g, cols] += ", "dv[b, g, cols] = "),
    seen=BLIND,
)
def dv_of_last_query_tile_only(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=8, S=4), rng, False), tile=4)


# --- the softmax's derivative ---------------------------------------------------------------------


@trap(
    catches="dS = P·dP without the row sum D = rowsum(dO·O)",
    severity="critical",
    story="The Jacobian of the softmax is diag(p) − ppᵀ, and its second term is the one that is "
    "easily lost.",
    mutant=edit(DSCORES, "dscores = weights * dweights * D**-0.5"),
    seen=BLIND,
)
def delta_missing(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=5), rng, False))


@trap(
    catches="every tile of queries uses the D of the first rows",
    severity="major",
    story="A vector indexed by the row inside the tile instead of the row in the sequence.",
    mutant=edit("delta[b, h, rows, None]", "delta[b, h, : rows.stop - rows.start, None]"),
)
def delta_of_first_rows(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=8, S=4), rng, False), tile=4)


@trap(
    catches="all heads use the D of the first",
    severity="major",
    story="D has one number per row and head; with one stride missing, head 0 is used for all.",
    mutant=edit("delta[b, h, rows, None]", "delta[b, 0, rows, None]"),
    control=ordinary,
)
def delta_of_first_head(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(H=3, G=3, T=4, S=4), rng, True), causal=True)


@trap(
    catches="D is the mean over the width instead of the sum",
    severity="critical",
    story="mean for sum in a one-line reduction; D = 1 hides it.",
    mutant=edit("(dout * out).sum(axis=-1)", "(dout * out).mean(axis=-1)"),
    seen=BLIND,
)
def delta_averaged(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=4, D=6), rng, False))


@trap(
    catches="D is summed over the keys of the current tile only",
    severity="critical",
    story="Σ p·dp over all keys is what the formula says; inside a tiled loop it becomes a sum "
    "over the tile, right whenever one tile holds all keys.",
    mutant=_with_delta(_TILE_SUM, dq_alone=False),
    also=[
        _with_delta(_TILE_SUM, dq_alone=True),
        # The weights are divided by their sum over the tile: a sum of covariances of tiles.
        _with_delta(_TILE_MEAN, dq_alone=False),
        _with_delta(_TILE_MEAN, dq_alone=True),
    ],
    seen="a published prompt",
)
def delta_over_one_tile_of_keys(submission: Submission, rng: np.random.Generator) -> None:
    arguments = draw(Shape(T=5, S=9), rng, False)
    for tile in (16, 4):
        differentiates(submission, arguments, tile=tile)


# The sums of p and of p·dp over the keys of the tiles so far.
_SO_FAR = (
    (_DELTA, f"{_DELTA}    met = np.zeros((2, B, H, T, 1))\n"),
    (
        _DWEIGHTS,
        f"{_DWEIGHTS}                met[0, b, h, rows, 0] += weights.sum(axis=1)\n"
        "                met[1, b, h, rows, 0] += (weights * dweights).sum(axis=1)\n"
        "                mass, gain = met[:, b, h, rows]\n",
    ),
)
_SUM_SO_FAR, _MEAN_SO_FAR = "gain", "gain / np.where(mass > 0, mass, 1)"


def _one_tile_of_keys(submission: Submission, rng: np.random.Generator) -> None:
    """The tile holds all keys."""
    differentiates(submission, draw(Shape(T=5, S=9), rng, False), tile=16)


@trap(
    catches="D of a tile comes from the keys met so far, not from all keys",
    severity="critical",
    story="A running sum or mean of p·dp is complete in the last tile only: what earlier tiles "
    "gave to dq, or to dk, has to be centred anew when it moves.",
    mutant=_with_delta(_MEAN_SO_FAR, dq_alone=True, before=_SO_FAR),
    also=[
        _with_delta(_MEAN_SO_FAR, dq_alone=False, before=_SO_FAR),
        _with_delta(_SUM_SO_FAR, dq_alone=True, before=_SO_FAR),
        _with_delta(_SUM_SO_FAR, dq_alone=False, before=_SO_FAR),
    ],
    seen=BLIND,
    control=_one_tile_of_keys,
)
def delta_of_the_tiles_so_far(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=5, S=9), rng, False), tile=3)


@trap(
    catches="dS has the opposite sign, so that dq and dk have the wrong direction",
    severity="major",
    story="dv is right, and a test that checks only dv passes.",
    mutant=edit("(dweights - delta[b, h, rows, None])", "(delta[b, h, rows, None] - dweights)"),
)
def delta_with_wrong_sign(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=4), rng, True), causal=True)


# --- scale ----------------------------------------------------------------------------------------


@trap(
    catches="dq lacks the factor D^-½",
    severity="critical",
    story="The scale enters the scores, so it leaves through both dq and dk.",
    mutant=insert_after("dq[b, h, rows] += dscores @ k[b, g, cols]", " * D**0.5"),
    seen=BLIND,
)
def dq_without_scale(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=4, D=9), rng, False))


@trap(
    catches="dk lacks the factor D^-½",
    severity="critical",
    story="Kernels that keep a scaled q get dk right by luck and lose it when q is loaded afresh.",
    mutant=insert_after("dk[b, g, cols] += dscores.T @ q[b, h, rows]", " * D**0.5"),
    seen=BLIND,
)
def dk_without_scale(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=4, D=9), rng, False))


@trap(
    catches="dk is scaled once through q and once more at the end",
    severity="critical",
    story="q is scaled when it is loaded, and the gradient is scaled again as the formula says.",
    mutant=insert_after("dk[b, g, cols] += dscores.T @ q[b, h, rows]", " * D**-0.5"),
    seen=BLIND,
)
def dk_scaled_twice(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=4, D=9), rng, False))


@trap(
    catches="the weights are recomputed from unscaled scores",
    severity="major",
    story="Forward and backward must take the same path to a score, or probabilities exceed one.",
    mutant=edit(SCORES, "scores = q @ k[cols].T"),
    also=[edits((SCORES, "scores = q @ k[cols].T"), UNBOUNDED)],
)
def weights_of_unscaled_scores(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=6, D=16), rng, False))


# --- the weights made again -----------------------------------------------------------------------


@trap(
    catches="the recomputed weights are not divided by their sum",
    severity="critical",
    story="exp(s − max) looks like the forward pass; without the sum it is not a probability.",
    mutant=edit(
        WEIGHTS, "return np.exp(scores - scores.max(axis=1, keepdims=True, initial=-1e300))"
    ),
    seen=BLIND,
)
def weights_not_normalised(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=6), rng, False))


@trap(
    catches="where scores are large, the recomputed weights are not divided by their sum",
    severity="major",
    story="Large rows take another path, with their own maximum, and its sum is forgotten.",
    mutant=edit(
        WEIGHTS,
        "peak = scores.max(axis=1, initial=-1e300)\n"
        "    return np.exp(scores - np.where(np.abs(finite) > 8, peak, finite)[:, None])",
    ),
    seen=BLIND,
    control=ordinary,
)
def large_rows_not_normalised(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, with_logits(rng, [30.0, 29.5, 31.0, 30.5], 3, False), tile=4)


@trap(
    catches="lse is taken for a base-2 logarithm",
    severity="major",
    story="Kernels keep lse in base 2; a backward pass by another author may expect base e.",
    mutant=edit(WEIGHTS, "return np.exp2(scores - finite[:, None])"),
)
def weights_in_base_two(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=6), rng, False))


@trap(
    catches="exp(s) / exp(lse) overflows where exp(s − lse) does not",
    severity="major",
    story="The same number on paper; with scores of a thousand it is inf / inf.",
    mutant=edit(WEIGHTS, "return np.exp(scores) / np.exp(finite)[:, None]"),
    control=ordinary,
)
def weights_by_division(submission: Submission, rng: np.random.Generator) -> None:
    for shift in (3000.0, -3000.0):
        logits = [shift, shift - 1.0, shift + 1.0, shift, shift - 2.0]
        differentiates(submission, with_logits(rng, logits, 3, False), tile=2)


def more_queries_than_keys(submission: Submission, rng: np.random.Generator, tile: int) -> None:
    """Nine queries, four keys, causal: five rows see nothing, and their dout must not matter."""
    arguments = draw(Shape(T=9, S=4), rng, True)
    # With both signs in every column, so that infinite weights always add up to NaN.
    signs = np.array([100.0, -100.0, 100.0, -100.0, 100.0])
    arguments[0][:, :, :5] = np.abs(arguments[0][:, :, :5]) * signs[:, None]
    answer = submission.flash_attention_backward(*arguments, causal=True, tile=tile)
    dq = expect.array(triple(answer)[0], shape=(1, 1, 9, 4), dtype=np.float64, what="dq")
    expect.equal(dq[:, :, :5], np.zeros((1, 1, 5, 4)), "dq of an empty row")
    agrees(answer, arguments, causal=True)


@trap(
    catches="rows with lse = −inf turn into NaN gradients",
    severity="critical",
    story="−inf − (−inf), this time from the saved lse; a NaN in one row reaches all of dk and dv.",
    mutant=edit("np.where(lse == -np.inf, 0, lse)", "lse"),
    also=[
        # Scores of hidden keys have no gradient, so that dv alone is NaN.
        edits(
            ("np.where(lse == -np.inf, 0, lse)", "lse"),
            (
                DSCORES,
                DSCORES + "\n                if causal:\n"
                "                    hidden = _hidden(position, rows.stop - top, cols)\n"
                "                    dscores[hidden] = 0",
            ),
        )
    ],
    seen=BLIND,
    control=ordinary,
)
def empty_rows_nan(submission: Submission, rng: np.random.Generator) -> None:
    more_queries_than_keys(submission, rng, 16)


@trap(
    catches="a backward pass whose lse holds −inf is refused, although such rows have no gradient",
    severity="major",
    story="A check that everything is finite meets the one infinity that the contract has.",
    mutant=insert_before(
        "    if dout.shape != q.shape or out.shape",
        "    if not np.isfinite(lse).all():\n        raise ValueError('lse must be finite')\n",
    ),
    seen=BLIND,
    control=ordinary,
)
def infinite_lse_refused(submission: Submission, rng: np.random.Generator) -> None:
    more_queries_than_keys(submission, rng, 4)


@trap(
    catches="a finite mask minus a very negative lse: exp overflows in empty rows",
    severity="major",
    story="exp(s − lse) with lse near −inf is inf; the mask must be applied before the "
    "subtraction.",
    mutant=edits(
        mask("    if causal:\n        scores[_hidden(position, rows, cols)] = -1e9\n"),
        ("np.where(lse == -np.inf, 0, lse)", "np.maximum(lse, -1e10)"),
        (WEIGHTS, "return np.exp(scores - finite[:, None])"),
        ("    dout = _heard(dout, lse)\n", ""),
    ),
    control=ordinary,
)
def empty_rows_infinite(submission: Submission, rng: np.random.Generator) -> None:
    more_queries_than_keys(submission, rng, 8)


# --- further slips --------------------------------------------------------------------------------


@trap(
    catches="D is summed over the query heads of a group, so that heads mix",
    severity="critical",
    story="One index too few in the reduction; H = G hides it.",
    mutant=insert_after(
        "    delta = (dout * out).sum(axis=-1)\n",
        "    shared = delta.reshape(B, G, H // G, T).sum(axis=2)\n"
        "    delta = np.repeat(shared, H // G, axis=1)\n",
    ),
    seen=BLIND,
    control=ordinary,
)
def delta_summed_over_group(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(H=2, G=1, T=4, S=4), rng, False))


@trap(
    catches="the gradient of the weights overwrites the weights, so that dS is a square",
    severity="critical",
    story="Two matrices share one buffer, and the second is written before the first is used.",
    mutant=edit(DSCORES, "dscores = (dweights - delta[b, h, rows, None]) ** 2 * D**-0.5"),
    seen=BLIND,
)
def weights_overwritten(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=4), rng, False))


@trap(
    catches="dk or dv of a query head, or both, are added to key/value head h mod G",
    severity="critical",
    story="Reading and writing a group are two places, and only one of them is right.",
    mutant=edits(
        ("dk[b, g, cols] += ", "dk[b, h % G, cols] += "),
        ("dv[b, g, cols] += ", "dv[b, h % G, cols] += "),
    ),
    also=[edit(f"{name}[b, g, cols] += ", f"{name}[b, h % G, cols] += ") for name in ("dk", "dv")],
    seen=BLIND,
    control=ordinary,
)
def gradients_to_wrong_head(submission: Submission, rng: np.random.Generator) -> None:
    grouped(submission, rng)


@trap(
    catches="dk and dv are returned for every query head instead of summed over groups",
    severity="major",
    story="The keys were repeated for the computation, and so are their gradients.",
    mutant=edit(
        _RETURN,
        "    return dq, np.repeat(dk, H // G, axis=1), np.repeat(dv, H // G, axis=1)\n",
    ),
    control=ordinary,
)
def gradients_of_repeated_heads(submission: Submission, rng: np.random.Generator) -> None:
    grouped(submission, rng)


@trap(
    catches="dk and dv are returned in the wrong order",
    severity="major",
    story="Both have the same shape, so nothing else notices.",
    mutant=edit(_RETURN, "    return dq, dv, dk\n"),
    seen=BLIND,
)
def dk_and_dv_swapped(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=4), rng, False))


@trap(
    catches="dv is formed with the gradient of the scores instead of the weights",
    severity="critical",
    story="The same buffer holds first the weights and then dS; dv is taken from it too late.",
    mutant=edit("weights.T @ dout[b, h, rows]", "dscores.T @ dout[b, h, rows]"),
    also=[edit("weights.T @ dout[b, h, rows]", "dscores.T @ dout[b, h, rows] * D**0.5")],
    seen=BLIND,
)
def dv_from_dscores(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=5), rng, False))


@trap(
    catches="dq is scaled twice",
    severity="major",
    story="dS carries the scale already.",
    mutant=insert_after("dq[b, h, rows] += dscores @ k[b, g, cols]", " * D**-0.5"),
    seen=BLIND,
)
def dq_scaled_twice(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=4, D=9), rng, False))


@trap(
    catches="neither dq nor dk has the factor D^-½",
    severity="major",
    story="The scale is part of the scores and is forgotten in their derivative.",
    mutant=edit(DSCORES, "dscores = weights * (dweights - delta[b, h, rows, None])"),
)
def dscores_without_scale(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=4, D=9), rng, False))


@trap(
    catches="dv is multiplied by the scale",
    severity="major",
    story="The values do not pass through the scores.",
    mutant=insert_after("dv[b, g, cols] += weights.T @ dout[b, h, rows]", " * D**-0.5"),
    seen=BLIND,
)
def dv_scaled(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=4, D=9), rng, False))


@trap(
    catches="D is subtracted after the multiplication by the weights: P·dP − D",
    severity="major",
    story="A bracket is missing.",
    mutant=edit(DSCORES, "dscores = (weights * dweights - delta[b, h, rows, None]) * D**-0.5"),
    seen=BLIND,
)
def delta_outside_the_product(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=4), rng, False))


@trap(
    catches="all rows of a batch use the lse of the first",
    severity="major",
    story="One index too few; B = 1 hides it.",
    mutant=edit(f"{_CALL}lse[b,", f"{_CALL}lse[0,"),
    also=[edits((f"{_CALL}lse[b,", f"{_CALL}lse[0,"), UNBOUNDED)],
    control=ordinary,
)
def batch_shares_lse(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(B=2, T=4, S=4), rng, False))


@trap(
    catches="all heads use the lse of the first",
    severity="major",
    story="One index too few; H = 1 hides it.",
    mutant=edit(f"{_CALL}lse[b, h,", f"{_CALL}lse[b, 0,"),
    also=[edits((f"{_CALL}lse[b, h,", f"{_CALL}lse[b, 0,"), UNBOUNDED)],
    control=ordinary,
)
def heads_share_lse(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(H=2, G=2, T=4, S=4), rng, False))


# --- a factor taken for another -------------------------------------------------------------------


@trap(
    catches="dq is formed with the values instead of the keys",
    severity="major",
    story="Keys and values have the same shape, so that nothing complains.",
    mutant=edit("dscores @ k[b, g, cols]", "dscores @ v[b, g, cols]"),
    seen=BLIND,
)
def dq_from_the_values(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=4), rng, False))


@trap(
    catches="dk is formed with dout instead of the queries",
    severity="major",
    story="Queries and dout have the same shape, so that nothing complains.",
    mutant=edit("dscores.T @ q[b, h, rows]", "dscores.T @ dout[b, h, rows]"),
)
def dk_from_dout(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=4), rng, False))


@trap(
    catches="dv is formed with the queries instead of dout",
    severity="major",
    story="Queries and dout have the same shape, so that nothing complains.",
    mutant=edit("weights.T @ dout[b, h, rows]", "weights.T @ q[b, h, rows]"),
)
def dv_from_the_queries(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=4), rng, False))


@trap(
    catches="the gradient of the weights is formed with the keys instead of the values",
    severity="major",
    story="dP = dO·Kᵀ: the shapes fit, and the right factor is V.",
    mutant=edit("dout[b, h, rows] @ v[b, g, cols].T", "dout[b, h, rows] @ k[b, g, cols].T"),
)
def dweights_from_the_keys(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=4), rng, False))


@trap(
    catches="delta is the row sum of one factor instead of dout · out: of dout, of out, of dout · "
    "dout or of out · out",
    severity="major",
    story="Both arrays have the same shape, so that nothing complains.",
    mutant=edit("delta = (dout * out).sum(axis=-1)", "delta = (out * out).sum(axis=-1)"),
    also=[
        edit("delta = (dout * out).sum(axis=-1)", f"delta = {factor}.sum(axis=-1)")
        for factor in ("(dout * dout)", "dout", "out")
    ],
)
def delta_of_one_factor(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=4), rng, False))
