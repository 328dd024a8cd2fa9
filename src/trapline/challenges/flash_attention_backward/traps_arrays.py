"""Bugs in the handling of arrays: layouts, dtypes, empty arrays, arrays to refuse."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, edits, insert_after, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_backward.cases import (
    Saved,
    differentiates,
    draw,
    saved,
    saved_in_scope,
)
from trapline.challenges.flash_attention_backward.situations import BLIND, ordinary, with_logits
from trapline.challenges.flash_attention_backward.solution_lines import (
    BACKWARD_HEAD,
    CHECKED,
    DSCORES,
    FORWARD_HEAD,
    RECOMPUTE,
    ROW_LOOP,
    SCORES,
    UNHEARD,
)
from trapline.challenges.flash_attention_forward.cases import REFUSALS, Shape, attends

_DELTA = "(dout * out).sum(axis=-1)"
_LEVEL = "np.where(lse == -np.inf, 0, lse)"
_ZEROS = "dq, dk, dv = (np.zeros(x.shape, x.dtype) for x in (q, k, v))"
_FORWARD_CHECKED = "    _check(q, k, v, tile)\n    (B, H"

_OUT, _LSE = "np.zeros((B, H, T, D), q.dtype)", "np.zeros((B, H, T), q.dtype)"

# --- arrays as they come --------------------------------------------------------------------------


def _grouped_rows(submission: Submission, rng: np.random.Generator) -> None:
    """Two query heads for each key/value head, in contiguous arrays."""
    differentiates(submission, draw(Shape(H=4, G=2, T=4, S=4), rng, False), tile=4)


def _single(submission: Submission, rng: np.random.Generator) -> None:
    """Everything in float32."""
    differentiates(submission, draw(Shape(T=4, S=4), rng, False, np.float32), tile=4)


def survives(submission: Submission, arguments: Saved, *which: str) -> None:
    """After a backward call, these arguments are what they were."""
    arguments = saved_in_scope(submission.scope, arguments, True)
    _, after = submission.observe("flash_attention_backward", *arguments, causal=True, tile=4)
    names = ("dout", "q", "k", "v", "out", "lse")
    for name, left, given in zip(names, after, arguments, strict=True):
        if name in which:
            expect.equal(left, given, f"{name} after the call")


@trap(
    catches="out is used as scratch space for dO·O",
    severity="major",
    story="The caller still needs out; an in-place product saves memory and destroys it.",
    mutant=edit("(dout * out).sum", "np.multiply(dout, out, out=out).sum"),
    seen=BLIND,
)
def out_overwritten(submission: Submission, rng: np.random.Generator) -> None:
    for H in (1, 2):  # folded heads may be a copy, one head is not
        survives(submission, draw(Shape(H=H, T=6, S=6), rng, True), "out")


@trap(
    catches="−inf in lse is replaced in place",
    severity="major",
    story="Modifying an argument instead of a copy: the second backward call sees rows that look "
    "visible.",
    mutant=edit(
        "    finite = np.where(lse == -np.inf, 0, lse)\n",
        "    lse[lse == -np.inf] = 0\n    finite = lse\n",
    ),
    seen=BLIND,
    control=ordinary,
)
def lse_overwritten(submission: Submission, rng: np.random.Generator) -> None:
    for H in (1, 2):  # folded heads may be a copy, one head is not
        survives(submission, draw(Shape(H=H, T=8, S=5), rng, True), "lse")


@trap(
    catches="rows of dout whose queries see no key are set to zero in place",
    severity="major",
    story="Such rows contribute nothing, but other branches still need the upstream gradient.",
    mutant=insert_after(CHECKED, "    dout[lse == -np.inf] = 0\n"),
    seen=BLIND,
    control=ordinary,
)
def blind_rows_of_dout_zeroed(submission: Submission, rng: np.random.Generator) -> None:
    for H in (1, 2):  # folded heads may be a copy, one head is not
        survives(submission, draw(Shape(H=H, T=8, S=5), rng, True), "dout")


@trap(
    catches="dout is scaled in place",
    severity="major",
    story="The upstream gradient is used by other branches too.",
    mutant=edits(
        (CHECKED, CHECKED + "    dout *= q.shape[3] ** -0.5\n"),
        (DSCORES, "dscores = weights * (dweights - delta[b, h, rows, None])"),
        ("weights.T @ dout[b, h, rows]", "weights.T @ dout[b, h, rows] * D**0.5"),
    ),
)
def dout_scaled_in_place(submission: Submission, rng: np.random.Generator) -> None:
    # Width 3: dividing by its scale again does not give back every number.
    survives(submission, draw(Shape(T=64, S=64, D=3), rng, True), "dout")


@trap(
    catches="dout is read as if it were contiguous",
    severity="major",
    story="The gradient of a transposed view is a transposed view; that of a sum is one number "
    "with strides of zero.",
    mutant=insert_after(
        CHECKED,
        "    packed = np.empty(dout.shape, dout.dtype).strides\n"
        "    dout = np.lib.stride_tricks.as_strided(dout, strides=packed)\n",
    ),
    control=ordinary,
)
def strides_of_dout_ignored(submission: Submission, rng: np.random.Generator) -> None:
    dout = rng.standard_normal((2, 6, 3, 4)).transpose(0, 2, 1, 3)
    q, k, v = Shape(B=2, H=3, G=3, T=6, S=6).draw(rng)
    differentiates(submission, saved(dout, q, k, v, True), causal=True, tile=4)
    ones = np.broadcast_to(np.float64(1.5), q.shape)
    differentiates(submission, saved(ones, q, k, v, True), causal=True, tile=4)
    shorter = Shape(B=2, H=3, G=3, T=3, S=6).draw(rng)
    differentiates(submission, saved(dout[:, :, ::-2], *shorter, False), tile=2)


@trap(
    catches="heads are folded into rows in the order of memory, which mixes up Fortran arrays",
    severity="major",
    story="reshape with order='A' or 'K' follows the layout of the array, not its indices.",
    seen=BLIND,
    mutant=insert_after(
        CHECKED,
        "    folded = len(q), k.shape[1], q.shape[1] // k.shape[1] * q.shape[2], q.shape[3]\n"
        "    dout = dout.reshape(folded, order='A').reshape(dout.shape)\n",
    ),
    control=_grouped_rows,
)
def folded_in_memory_order(submission: Submission, rng: np.random.Generator) -> None:
    dout, q, k, v, out, lse = draw(Shape(H=4, G=2, T=4, S=4), rng, False)
    differentiates(submission, (np.asfortranarray(dout), q, k, v, out, lse), tile=4)


@trap(
    catches="float64 inputs give a gradient in float32",
    severity="major",
    story="An accumulator is allocated in a fixed dtype.",
    seen=BLIND,
    mutant=edit(_ZEROS, _ZEROS + "\n    dq = dq.astype(np.float32)"),
    also=(edit(_ZEROS, _ZEROS.replace("x.dtype", "np.float32")),),
    control=_single,
)
def gradients_in_single(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=4), rng, False), tile=4)


def _summed_in_single(names: str) -> Mutant:
    """These gradients are summed in float32 and have their dtype in the end."""
    narrow = "".join(f"    {name} = {name}.astype(np.float32)\n" for name in names.split(", "))
    widened = "".join(f"    {name} = {name}.astype(q.dtype)\n" for name in names.split(", "))
    returned = "    return dq, dk, dv\n"
    return edits((_ZEROS, f"{_ZEROS}\n{narrow}".rstrip()), (returned, widened + returned))


@trap(
    catches="float64 gradients pass through float32: products, sums, lse or the row sums of "
    "dout · out",
    severity="major",
    story="Gradients compared with finite differences then agree to 1e-7 only.",
    mutant=edit(
        "dout[b, h, rows] @ v[b, g, cols].T",
        "(dout[b, h, rows] @ v[b, g, cols].T).astype(np.float32)",
    ),
    also=[
        edit(_DELTA, "(dout * out).astype(np.float32).sum(axis=-1)"),
        edit(_LEVEL, _LEVEL + ".astype('f4')"),
        edits((_LEVEL, _LEVEL + ".astype('f4')"), (_DELTA, f"{_DELTA}.astype(np.float32)")),
        edit(_DELTA, f"{_DELTA}.astype(np.float32)"),
        _summed_in_single("dk, dv"),
        _summed_in_single("dq"),
        _summed_in_single("dq, dk, dv"),
    ],
    seen=BLIND,
)
def double_through_single(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=6, S=6), rng, False), tile=4)


@trap(
    catches="an axis of size one disappears on the way",
    severity="major",
    story="squeeze() removes the intended axis and every other axis of length one.",
    mutant=edit(SCORES, "scores = np.squeeze(q @ k[cols].T) * D**-0.5"),
    control=ordinary,
)
def axes_of_one_squeezed(submission: Submission, rng: np.random.Generator) -> None:
    for causal in (False, True):
        for shape in (Shape(T=1, S=1, D=1), Shape(T=3, S=1, D=2), Shape(T=1, S=3, D=1)):
            differentiates(submission, draw(shape, rng, causal), causal=causal, tile=2)


@trap(
    catches="float32 inputs give float64 gradients",
    severity="minor",
    story="An allocation without a dtype; the optimiser's state doubles in size.",
    mutant=edit("(np.zeros(x.shape, x.dtype) for x", "(np.zeros(x.shape) for x"),
    also=[
        edit(_ZEROS, _ZEROS.replace("x.dtype", "q.dtype if x is q else float")),
        edit(_ZEROS, _ZEROS.replace("x.dtype", "float if x is q else q.dtype")),
    ],
    seen=BLIND,
    control=ordinary,
)
def gradients_in_double(submission: Submission, rng: np.random.Generator) -> None:
    # One query and one key: nothing is rounded, so that only the dtype can differ.
    differentiates(submission, draw(Shape(T=1, S=1), rng, False, np.float32), tile=4)


# --- nothing there --------------------------------------------------------------------------------


# A step of zero: ValueError.
_CLAMPED = "    tile = min(tile, k.shape[2])\n"
_CLAMPED_FORWARD = (_FORWARD_CHECKED, _FORWARD_CHECKED.replace("    (B", _CLAMPED + "    (B"))
_CLAMPED_BACKWARD = (CHECKED, CHECKED + _CLAMPED)


def _unswept(when: str = "") -> tuple[tuple[str, str], tuple[str, str]]:
    """What the sweep over the tiles leaves behind is missing without keys, if this holds, too, in
    the forward and in the backward pass: UnboundLocalError."""
    summed, returned = "    seen = total > 0\n", "    return dq, dk, dv\n"
    return (
        (summed, f"    if not len(k){when}:\n        total += scores.sum(axis=1)\n{summed}"),
        (returned, f"    if B * T and not S{when}:\n        dq += weights.sum()\n{returned}"),
    )


@trap(
    catches="S = 0 raises, in one pass or in both, instead of giving zeros and empty arrays",
    severity="major",
    story="A tile clamped to the number of keys gives a step of zero; or a sweep over no tiles "
    "leaves nothing behind.",
    mutant=edits(_CLAMPED_BACKWARD),
    also=[
        edits(_CLAMPED_FORWARD),
        edits(_CLAMPED_FORWARD, _CLAMPED_BACKWARD),
        *(edits(one) for one in _unswept()),
        edits(*_unswept()),
        edits(*_unswept(" and causal")),
    ],
    seen=BLIND,
    control=ordinary,
)
def no_keys(submission: Submission, rng: np.random.Generator) -> None:
    for causal in (False, True):
        arguments = draw(Shape(T=3, S=0), rng, causal)
        differentiates(submission, arguments, causal=causal, tile=4)
        attends(submission, *arguments[1:4], causal=causal, tile=4)


@trap(
    catches="T = 0 raises or gives NaN instead of zeros for dk and dv",
    severity="major",
    story="A well-known kernel gave NaN for zero queries.",
    mutant=edit(ROW_LOOP, "            for top in range(0, T, min(tile, T)):\n"),
    seen="a public issue: Dao-AILab/flash-attention#2421",
    control=ordinary,
)
def no_queries(submission: Submission, rng: np.random.Generator) -> None:
    for causal in (False, True):
        differentiates(submission, draw(Shape(T=0, S=3), rng, causal), causal=causal, tile=4)


@trap(
    catches="B = 0 raises (stacking nothing) instead of giving empty arrays",
    severity="minor",
    story="The last rank of a sharded run gets an empty batch.",
    mutant=insert_after(CHECKED, "    dout = np.stack(list(dout))\n"),
    control=ordinary,
)
def no_batch(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(B=0, H=2, G=2), rng, False), tile=4)


# --- what must be refused -------------------------------------------------------------------------


def _uneven(last: str, *, forward: bool = True, backward: bool = True) -> Mutant:
    """These passes accept any H, and `last` says what becomes of the heads beyond whole groups."""
    pairs = [_ANY_HEADS]
    for head, accepts in ((FORWARD_HEAD, forward), (BACKWARD_HEAD, backward)):
        found = "        g = h // (H // G)\n"
        refusal = f"        if H % G:\n            raise ValueError(H)\n{found}"
        pairs.append((head, head.replace(found, found + last if accepts else refusal)))
    return edits(*pairs)


_ANY_HEADS = (" or q.shape[1] % k.shape[1]", "")
_LEFT_OUT = "        if g >= G:\n            continue\n"
_IN_THE_LAST_GROUP = "        g = min(g, G - 1)\n"


@trap(
    catches="an H that is not a multiple of G does not raise ValueError, in one pass or in both",
    severity="major",
    story="Integer division rounds: heads are left out, or a head's gradient is added to the wrong "
    "key head. One of two passes may lack the check.",
    mutant=edits(_ANY_HEADS),
    also=[
        _uneven(_LEFT_OUT),
        _uneven(_LEFT_OUT, forward=False),
        _uneven(_LEFT_OUT, backward=False),
        _uneven(_IN_THE_LAST_GROUP),
        _uneven(_IN_THE_LAST_GROUP, forward=False),
        _uneven(_IN_THE_LAST_GROUP, backward=False),
    ],
    dimension="robustness",
    seen=BLIND,
    control=ordinary,
)
def uneven_groups_accepted(submission: Submission, rng: np.random.Generator) -> None:
    dout, q, _, _, out, lse = draw(Shape(H=3, G=3), rng, False)
    _, k, v = Shape(G=2).draw(rng)
    expect.raises(ValueError, submission.flash_attention_backward, dout, q, k, v, out, lse)
    expect.raises(ValueError, submission.flash_attention, q, k, v)


@trap(
    catches="a negative tile makes every loop empty and gives zero gradients",
    severity="minor",
    story="range(0, T, -3) is legal and empty: the model silently does not learn.",
    mutant=edit("if tile < 1:", "if tile == 0:"),
    seen=BLIND,
    dimension="robustness",
    control=ordinary,
)
def negative_tile_accepted(submission: Submission, rng: np.random.Generator) -> None:
    arguments = draw(Shape(), rng, False)
    for tile in (-3, 0):
        expect.raises(REFUSALS, submission.flash_attention_backward, *arguments, tile=tile)


@trap(
    catches="a dout that does not fit q is broadcast or cut off instead of refused",
    severity="minor",
    story="Padded gradients against unpadded inputs: slicing hides the mismatch.",
    mutant=edit("dout.shape != q.shape or ", ""),
    seen=BLIND,
    dimension="robustness",
    control=ordinary,
)
def dout_of_other_shape_accepted(submission: Submission, rng: np.random.Generator) -> None:
    dout, q, k, v, out, lse = draw(Shape(B=2, T=6, S=6), rng, False)
    for other in (dout[:1], dout[:, :, :1], dout[..., :1]):
        expect.raises(REFUSALS, submission.flash_attention_backward, other, q, k, v, out, lse)


@trap(
    catches="an out that does not fit q is broadcast instead of refused",
    severity="minor",
    story="A width or a length of 1 is broadcast silently.",
    mutant=edit("out.shape != q.shape or lse", "lse"),
    seen=BLIND,
    dimension="robustness",
    control=ordinary,
)
def out_of_other_shape_accepted(submission: Submission, rng: np.random.Generator) -> None:
    dout, q, k, v, out, lse = draw(Shape(T=6, S=6), rng, False)
    for other in (out[:, :, :1], out[..., :1]):
        expect.raises(REFUSALS, submission.flash_attention_backward, dout, q, k, v, other, lse)


@trap(
    catches="an lse whose shape does not fit q is accepted",
    severity="minor",
    story="Some kernels save lse padded to a multiple of the tile, which is another layout.",
    mutant=edits((" or lse.shape != q.shape[:3]", ""), RECOMPUTE),
    dimension="robustness",
    seen=BLIND,
    control=ordinary,
)
def lse_of_other_shape_accepted(submission: Submission, rng: np.random.Generator) -> None:
    dout, q, k, v, out, lse = draw(Shape(H=2, G=2, T=6, S=6), rng, False)
    padded, doubled = np.pad(lse, ((0, 0), (0, 0), (0, 2))), np.concatenate([lse, lse])
    for other in (padded, doubled, lse.swapaxes(1, 2), lse[..., None]):
        expect.raises(REFUSALS, submission.flash_attention_backward, dout, q, k, v, out, other)


@trap(
    catches="whether dout, out and lse fit q is not checked, or only by their number of axes",
    severity="minor",
    story="They came from the forward pass, it is said; rows beyond those of q are ignored.",
    mutant=edit(CHECKED, ""),
    also=[
        edits((CHECKED, ""), UNHEARD),
        # What is longer is cut off, what has one batch entry is broadcast.
        edits(
            (
                "if dout.shape != q.shape or out.shape != q.shape or lse.shape != q.shape[:3]:",
                "if (dout.ndim, out.ndim, lse.ndim) != (4, 4, 3):",
            ),
            ("_heard(dout, lse)\n", "_heard(dout, lse[:, :, : dout.shape[2]])\n"),
        ),
    ],
    dimension="robustness",
    seen=BLIND,
    control=ordinary,
)
def saved_arrays_unchecked(submission: Submission, rng: np.random.Generator) -> None:
    dout, q, k, v, out, lse = draw(Shape(T=6, S=6), rng, False)
    longer = [np.concatenate([x, x[:, :, :2]], axis=2) for x in (dout, out, lse)]
    call = longer[0], q, k, v, longer[1], longer[2]
    expect.raises(REFUSALS, submission.flash_attention_backward, *call)


@trap(
    catches="neither the dtype nor the shape of dout, out and lse is checked: they are reshaped, "
    "and of another shape anything of the same size is accepted",
    severity="minor",
    story="Only q, k and v are looked at; with heads and queries exchanged the numbers fit.",
    mutant=edit(
        CHECKED,
        "    dout = np.reshape(dout, (*q.shape[:3], *dout.shape[3:]))\n"
        "    out = np.reshape(out, (*q.shape[:3], *out.shape[3:]))\n"
        "    lse = np.reshape(lse, q.shape[:3])\n",
    ),
    also=[
        edit(
            CHECKED,
            "    dout, out = np.reshape(dout, q.shape), np.reshape(out, q.shape)\n"
            "    lse = np.reshape(lse, q.shape[:3])\n",
        ),
        # out is not used.
        edit(
            CHECKED,
            "    dout, lse = np.reshape(dout, q.shape), np.reshape(lse, q.shape[:3])\n"
            "    out = flash_attention(q, k, v, causal=causal, tile=tile)[0]\n",
        ),
    ],
    dimension="robustness",
    seen=BLIND,
    control=ordinary,
)
def saved_arrays_reshaped(submission: Submission, rng: np.random.Generator) -> None:
    dout, q, k, v, out, lse = draw(Shape(H=2, G=2, T=3, S=3), rng, False)
    exchanged = dout.swapaxes(1, 2).copy()
    expect.raises(REFUSALS, submission.flash_attention_backward, exchanged, q, k, v, out, lse)


@trap(
    catches="integer gradients are accepted",
    severity="minor",
    story="np.ones with an integer dtype as upstream gradient passes every multiplication.",
    mutant=edit('kind == "f" for x in (dout', 'kind in "fiu" for x in (dout'),
    seen=BLIND,
    dimension="robustness",
    control=ordinary,
)
def integers_accepted(submission: Submission, rng: np.random.Generator) -> None:
    _, q, k, v, out, lse = draw(Shape(), rng, False)
    ones = np.ones(q.shape, np.int64)
    expect.raises(REFUSALS, submission.flash_attention_backward, ones, q, k, v, out, lse)


@trap(
    catches="integer q, k and v are accepted and give truncated results",
    severity="minor",
    story="The results have the dtype of q, so that fractions are cut off.",
    mutant=edit('kind == "f" for x in (q, k, v))', 'kind in "fiu" for x in (q, k, v))'),
    dimension="robustness",
    seen=BLIND,
    control=ordinary,
)
def integer_inputs_accepted(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = (np.rint(3 * x).astype(np.int64) for x in Shape().draw(rng))
    expect.raises(REFUSALS, submission.flash_attention, q, k, v)


@trap(
    catches="complex q, k and v are accepted",
    severity="minor",
    story="A test for integers alone lets complex numbers pass.",
    mutant=edit('kind == "f" for x in (q, k, v))', 'kind in "fc" for x in (q, k, v))'),
    dimension="robustness",
    control=ordinary,
)
def complex_inputs_accepted(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = (x.astype(np.complex128) for x in Shape().draw(rng))
    expect.raises(REFUSALS, submission.flash_attention, q, k, v)


#: Each pass with q, or k, scaled in the caller's memory; the answers stay right.
_UNSCALED_SUM = (DSCORES, "dscores = weights * (dweights - delta[b, h, rows, None])")
_Q_IN_FORWARD = (
    (_FORWARD_CHECKED, _FORWARD_CHECKED.replace("\n", "\n    q *= q.shape[3] ** -0.5\n")),
    ("    q = q * D**-0.5\n", ""),
)
_Q_IN_BACKWARD = (
    (CHECKED, CHECKED + "    q *= q.shape[3] ** -0.5\n"),
    (SCORES, "scores = q @ k[cols].T"),
    _UNSCALED_SUM,
    ("dscores @ k[b, g, cols]", "dscores @ k[b, g, cols] * D**-0.5"),
)
_K_IN_FORWARD = (
    (_FORWARD_CHECKED, _FORWARD_CHECKED.replace("\n", "\n    k *= k.shape[3] ** -0.5\n")),
    ("    q = q * D**-0.5\n", ""),
)
_K_IN_BACKWARD = (
    (CHECKED, CHECKED + "    k *= k.shape[3] ** -0.5\n"),
    (SCORES, "scores = q @ k[cols].T"),
    _UNSCALED_SUM,
    ("dscores.T @ q[b, h, rows]", "dscores.T @ q[b, h, rows] * D**-0.5"),
)


def survives_both(submission: Submission, rng: np.random.Generator, *which: str) -> None:
    """After a call of either pass, these of q, k and v are what they were."""
    arguments = draw(Shape(T=6, S=6, D=3), rng, True)
    given = dict(zip(("q", "k", "v"), arguments[1:4], strict=True))
    _, after = submission.observe("flash_attention", *given.values(), causal=True, tile=8)
    for (name, before), left in zip(given.items(), after, strict=True):
        if name in which:
            expect.equal(left, before, f"{name} after the forward pass")
    survives(submission, arguments, *which)


@trap(
    catches="q is scaled in place, so the caller's array changes",
    severity="critical",
    story="A reshaped or asarray'd q is still the caller's memory.",
    mutant=edits(*_Q_IN_FORWARD, *_Q_IN_BACKWARD),
    also=[edits(*_Q_IN_FORWARD), edits(*_Q_IN_BACKWARD)],
    seen=BLIND,
    control=ordinary,
)
def q_scaled_in_place(submission: Submission, rng: np.random.Generator) -> None:
    survives_both(submission, rng, "q")


@trap(
    catches="k or v is changed in place, such as keys that are scaled",
    severity="major",
    story="A reshaped or asarray'd k is still the caller's memory.",
    mutant=edits(*_K_IN_FORWARD),
    also=[edits(*_K_IN_BACKWARD)],
    control=ordinary,
)
def keys_changed_in_place(submission: Submission, rng: np.random.Generator) -> None:
    survives_both(submission, rng, "k", "v")


@trap(
    catches="the caller's lse is overwritten where scores are large",
    severity="major",
    story="The saved lse serves as the array of row maxima; without a copy the caller loses it.",
    mutant=edit(
        "    return dq, dk, dv\n",
        "    for b, h in np.ndindex(B, H):\n"
        "        if np.max(np.abs(lse[b, h]), initial=0) > 8 and S >= T:\n"
        "            scores = q[b, h] @ k[b, h // (H // G)].T * D**-0.5\n"
        "            scores[_hidden(S - T, T, slice(0, S)) & causal] = -np.inf\n"
        "            lse[b, h] = scores.max(axis=1)\n"
        "    return dq, dk, dv\n",
    ),
    seen=BLIND,
    control=ordinary,
)
def large_lse_overwritten(submission: Submission, rng: np.random.Generator) -> None:
    survives(submission, with_logits(rng, [30.0, 31.0, 29.0, 30.0], 4, True), "lse")


def _pooled(*pairs: tuple[str, str]) -> Mutant:
    """These arrays of an answer come from a pool by shape and dtype."""
    imported = "import numpy as np\n"
    return edits((imported, f"{imported}\n_POOL = {{}}\n"), *pairs)


def _gradients(names: str) -> tuple[str, str]:
    """The gradients with these names are cleared and used again."""
    taken = "_POOL.setdefault((name, x.shape, x.dtype), np.zeros(x.shape, x.dtype))"
    return (
        _ZEROS,
        f"dq, dk, dv = ({taken} if name in {names!r} else np.zeros(x.shape, x.dtype)\n"
        "                  for name, x in zip('qkv', (q, k, v)))\n"
        "    for x in (dq, dk, dv):\n        x.fill(0)",
    )


_FORWARD_POOLS = (
    (_OUT, f"_POOL.setdefault((B, H, T, D, q.dtype), {_OUT})"),
    (_LSE, f"_POOL.setdefault((B, H, T, q.dtype), {_LSE})"),
)


@trap(
    catches="the arrays of an earlier answer, gradients or out and lse, are used again and "
    "overwritten",
    severity="major",
    keeps_state=True,
    story="Accumulators come from a pool keyed by shape: a caller that keeps the gradients of two "
    "layers finds those of the second in both.",
    mutant=_pooled(_gradients("qkv")),
    also=[
        *(_pooled(_gradients(name)) for name in "qkv"),
        *(_pooled(pool) for pool in _FORWARD_POOLS),
        _pooled(*_FORWARD_POOLS, _gradients("qkv")),
    ],
    seen=BLIND,
)
def answer_overwritten_later(submission: Submission, rng: np.random.Generator) -> None:
    for _ in range(2):
        arguments = draw(Shape(T=4, S=4), rng, False)
        calls = {"flash_attention": arguments[1:4], "flash_attention_backward": arguments}
        for entry, inputs in calls.items():
            _, shared = submission.sharing(entry, *inputs)
            expect.that(not shared.earlier_answer, "an answer lies in the memory of an earlier one")
