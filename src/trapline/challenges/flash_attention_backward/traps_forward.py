"""Bugs of the forward pass: scale, running sums, lse, and which queries and keys it reads."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, edits, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_backward.cases import differentiates, draw
from trapline.challenges.flash_attention_backward.situations import BLIND, ordinary, with_logits
from trapline.challenges.flash_attention_backward.solution_lines import (
    CHECKED,
    DSCORES,
    FORWARD_HEAD,
    RECOMPUTE,
    SCORES,
    UNBOUNDED,
    UNGUARDED,
    mask,
    with_saved,
)
from trapline.challenges.flash_attention_forward.cases import Shape, attends, pair

# Parts of the gold solution that several mutants edit.
_SCALED = "    q = q * D**-0.5\n"
_PEAK = "peak = np.full(rows, -np.inf, q.dtype)"
_OUT = "weighted / total[:, None]"
_LSE = "peak + np.log(total)"
_TOTAL = "total = total * correction + weights.sum(axis=1)"
_WEIGHTED = "weighted = weighted * correction[:, None] + weights @ v[cols]"
_RETURN = "    return out, lse\n"
_STOP = "stop = min(len(k), position + rows) if causal"


def _rescaled(scale: str) -> tuple[tuple[str, str], tuple[str, str], tuple[str, str]]:
    """The scale of the forward pass, and both scales of the backward pass."""
    return (
        (_SCALED, _SCALED.replace("D**-0.5", scale)),
        (SCORES, SCORES.replace("D**-0.5", scale)),
        (DSCORES, DSCORES.replace("D**-0.5", scale)),
    )


# --- the scale ------------------------------------------------------------------------------------


def _causal_square(submission: Submission, rng: np.random.Generator) -> None:
    """As many keys as queries."""
    attends(submission, *Shape(T=8, S=8).draw(rng), causal=True, tile=4)


def _scale_of_two(submission: Submission, rng: np.random.Generator) -> None:
    """Width 4, whose scale is a power of two."""
    ordinary(submission, rng)


_SINGLE = _rescaled("float(np.float32(D**-0.5))")


@trap(
    catches="the forward pass takes one sum of weights for a whole tile, instead of one for each "
    "row",
    severity="major",
    story="sum() without an axis.",
    mutant=edit("weights.sum(axis=1)", "weights.sum()"),
)
def forward_sum_shared_by_rows(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=4).draw(rng), tile=8)


@trap(
    catches="in the forward pass the offset S − T, or where a tile of queries starts by it, is not "
    "allowed to be negative: with more queries than keys its mask is aligned at the first key",
    severity="major",
    story="Queries that should see no key see some.",
    mutant=edit("start + S - T, causal", "start + max(0, S - T), causal"),
    also=[edit("start + S - T, causal", "max(0, start + S - T), causal")],
    control=_causal_square,
)
def forward_offset_never_negative(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=8, S=4).draw(rng), causal=True, tile=4)


@trap(
    catches="the scale D^-½ is rounded to float32, also in float64 calls",
    severity="major",
    story="Widths such as 4, 16 and 64 have a scale that float32 holds exactly.",
    mutant=edits(*_SINGLE[1:]),
    also=[edits(_SINGLE[0]), edits(*_SINGLE)],
    seen=BLIND,
    control=_scale_of_two,
)
def scale_in_single(submission: Submission, rng: np.random.Generator) -> None:
    arguments = draw(Shape(T=4, S=4, D=3), rng, False)
    attends(submission, *arguments[1:4], tile=4)
    differentiates(submission, arguments, tile=4)


def _wider(factor: str) -> tuple[tuple[str, str], ...]:
    """Queries are multiplied once more, as if the width were larger by this factor."""
    extra = f"q = q * ({factor}) ** -0.5"
    return (
        (
            "    _check(q, k, v, tile)\n    (B, H",
            f"    _check(q, k, v, tile)\n    H, G = q.shape[1], k.shape[1]\n    {extra}\n    (B, H",
        ),
        (CHECKED, CHECKED + f"    H, G = q.shape[1], k.shape[1]\n    {extra}\n"),
        ("    return dq, dk, dv\n", f"    return dq * ({factor}) ** -0.5, dk, dv\n"),
    )


@trap(
    catches="the scale comes from the width of all heads, or of all heads of a group, together",
    severity="major",
    story="The size of the model is taken for that of a head; one head hides it.",
    mutant=edits(*_wider("H"), UNBOUNDED),
    also=[edits(*_wider("H // G"), UNBOUNDED)],
    control=ordinary,
)
def scale_of_all_heads(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(H=6, G=3, T=4, S=4).draw(rng))


# --- the running softmax --------------------------------------------------------------------------


def _peak(start: str) -> tuple[str, str]:
    return _PEAK, _PEAK.replace("-np.inf", start)


@trap(
    catches="the running maximum starts at a number such as 0 or −1e9, and lower scores underflow",
    severity="major",
    story="The maximum must start at −inf: scores of any size are allowed, and rows whose scores "
    "all lie far below the start have a sum of 0.",
    mutant=edits(_peak("0.0"), UNGUARDED),
    also=[
        edits(_peak("0.0")),
        edits(_peak("-1e4"), UNGUARDED),
        edits(_peak("-1e4")),
        edits(_peak("-1e9"), UNGUARDED),
        edits(_peak("-1e9")),
        edits(_peak("-1e30"), UNGUARDED),
        edits(_peak("-1e30")),
    ],
    seen=BLIND,
    control=ordinary,
)
def maximum_starts_too_high(submission: Submission, rng: np.random.Generator) -> None:
    for low in (-2e3, -2e10):
        _, q, k, v, _, _ = with_logits(rng, [low] * 4, 4, False)
        attends(submission, q, k, v, tile=8)
    # Weights made from a rounded lse may be anything up to 1 here, but not 0 / 0.
    _, q, k, v, _, _ = with_logits(rng, [-1e200] * 4, 4, False)
    out, lse = pair(submission.flash_attention(q, k, v, tile=8))
    expect.array(out, shape=q.shape, dtype=q.dtype, what="out")
    expect.that(bool(np.isfinite(out).all()), "out is not finite")
    expect.close(lse, np.full(q.shape[:3], -1e200), atol=1e188, what="lse")


def _constant(size: str) -> list[Mutant]:
    """The constant in out alone, and in lse, too."""
    added = f"(total + {size})"
    out = (_OUT, f"weighted / {added}[:, None]")
    return [edits(out), edits(out, (_LSE, f"peak + np.log{added}"))]


@trap(
    catches="a small constant is added to the sum of the weights",
    severity="minor",
    story="A guard against 0 / 0 that changes every other result, too.",
    mutant=_constant("1e-6")[0],
    also=[
        _constant("1e-6")[1],
        *(form for size in ("1e-5", "1e-8", "1e-9", "1e-10", "1e-12") for form in _constant(size)),
    ],
)
def constant_in_the_denominator(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(T=4, S=1).draw(rng)
    answer = submission.flash_attention(q, k, v + 3.0, tile=4)
    out = expect.array(pair(answer)[0], shape=q.shape, dtype=q.dtype, what="out")
    # One key: its weight is 1, whatever its score.
    expect.close(out, np.broadcast_to(v + 3.0, q.shape), atol=1e-13, what="out")


def _narrow(line: str) -> tuple[str, str]:
    """A running sum that is rounded to float32 in every tile."""
    name, value = line.split(" = ", 1)
    return line, f"{name} = ({value}).astype(np.float32).astype(q.dtype)"


@trap(
    catches="the running sums of the forward pass are kept in float32, also in float64 calls",
    severity="major",
    story="Accumulators with a fixed dtype: out and lse are float64 with float32's accuracy.",
    mutant=edits(_narrow(_TOTAL)),
    also=[edits(_narrow(_WEIGHTED)), edits(_narrow(_TOTAL), _narrow(_WEIGHTED))],
    seen=BLIND,
)
def forward_sums_in_single(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=4).draw(rng))


# --- lse ------------------------------------------------------------------------------------------


@trap(
    catches="the maximum in lse is that of the unscaled dot products",
    severity="major",
    story="The scale is applied in the exponential only; out is right.",
    mutant=edit(_LSE, "peak * D**0.5 + np.log(total)"),
)
def forward_lse_of_unscaled_scores(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=4).draw(rng))


@trap(
    catches="lse is the maximum of the scores: the logarithm of the sum is missing or "
    "subtracted, or the sum itself is added",
    severity="major",
    story="The kernel saves its running maximum, and the backward pass needs the sum as well.",
    mutant=edit(_LSE, "peak"),
    also=[edit(_LSE, "peak - np.log(total)"), edit(_LSE, "peak + total")],
)
def forward_lse_without_the_sum(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=4).draw(rng))


# --- which queries and keys are read --------------------------------------------------------------


@trap(
    catches="the forward pass alone pairs query head h with another kv head, h mod G or h // G",
    severity="major",
    story="Heads interleaved instead of grouped; the backward pass pairs them rightly.",
    mutant=edit(FORWARD_HEAD, FORWARD_HEAD.replace("h // (H // G)", "h % G")),
    also=[edit(FORWARD_HEAD, FORWARD_HEAD.replace("h // (H // G)", "h // G"))],
    control=ordinary,
)
def forward_heads_interleaved(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(H=6, G=3, T=4, S=4).draw(rng))


_FIRST_BLIND = (
    _RETURN,
    "    if causal and 0 < S <= T - 1:\n"
    "        out[:, :, T - S], lse[:, :, T - S] = 0, -np.inf\n" + _RETURN,
)
_FIRST_UNHEARD = (
    "                dweights = dout[b, h, rows] @ v[b, g, cols].T\n",
    "                if causal and T > S:\n"
    "                    weights[position + np.arange(rows.stop - top) == 0] = 0\n"
    "                dweights = dout[b, h, rows] @ v[b, g, cols].T\n",
)


@trap(
    catches="with more queries than keys the first query that sees a key is taken for blind",
    severity="major",
    story="The first query that sees a key is number T − S, not T − S + 1.",
    mutant=edits(_FIRST_BLIND, _FIRST_UNHEARD),
    also=[edits(_FIRST_BLIND), edits(_FIRST_BLIND, RECOMPUTE)],
    control=ordinary,
)
def first_seeing_query_blind(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=6, S=4).draw(rng), causal=True, tile=8)


_EARLY = (_STOP, _STOP.replace("position + rows)", "position + rows - 1)"))
_EARLY_BACKWARD = mask(
    "    if causal:\n"
    "        scores[_hidden(position, rows, cols)] = -np.inf\n"
    "        scores[:, np.arange(cols.start, cols.stop) >= position + rows - 1] = -np.inf\n"
)


@trap(
    catches="the keys of a tile of queries end one key early: its last query misses its own key",
    severity="major",
    story="The index of the last visible key is taken for the end of the range.",
    mutant=edits(_EARLY, _EARLY_BACKWARD),
    also=[edits(_EARLY, RECOMPUTE), edits(_EARLY), *with_saved(_EARLY_BACKWARD)],
    control=ordinary,
)
def keys_end_one_early(submission: Submission, rng: np.random.Generator) -> None:
    arguments = draw(Shape(T=4, S=6), rng, True)
    attends(submission, *arguments[1:4], causal=True, tile=4)
    differentiates(submission, arguments, causal=True, tile=4)


@trap(
    catches="the forward pass refuses an empty problem, such as B = 0 or T = 0",
    severity="minor",
    story="Stacking nothing, or the maximum of nothing; the backward pass is right.",
    mutant=edit(_RETURN, "    if B == 0:\n        raise ValueError(q.shape)\n" + _RETURN),
    also=[
        edit(_RETURN, "    if T == 0:\n        raise ValueError(q.shape)\n" + _RETURN),
        # A step of 0 is refused by range().
        insert_before(
            "    out = np.zeros((B, H, T, D), q.dtype)\n", "    tile = min(tile, T, S)\n"
        ),
    ],
    seen=BLIND,
    control=ordinary,
)
def forward_refuses_empty(submission: Submission, rng: np.random.Generator) -> None:
    for shape in (Shape(B=0), Shape(T=0)):
        attends(submission, *shape.draw(rng), tile=4)
