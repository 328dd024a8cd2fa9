"""Bugs of views with other strides, and of the dtypes that the forward pass hands back."""

import numpy as np

from trapline.arena.judge.traps import Mutant, edit, edits, insert_after, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_backward.cases import differentiates, draw, saved
from trapline.challenges.flash_attention_backward.situations import BLIND
from trapline.challenges.flash_attention_backward.solution_lines import CHECKED
from trapline.challenges.flash_attention_forward.cases import Arrays, Shape, agrees, attends

_ZEROS = "dq, dk, dv = (np.zeros(x.shape, x.dtype) for x in (q, k, v))"
_LIKE = "dq, dk, dv = (np.zeros_like(x) for x in (q, k, v))"
_RETURN = "    return out, lse\n"
_OUT = "out = np.zeros((B, H, T, D), q.dtype)"
_DQ = ("dq[b, h, rows] += ", "flat[b * H + h, rows] += ")
_DK = ("dk[b, g, cols] += ", "flat_k[b * G + g, cols] += ")
_DV = ("dv[b, g, cols] += ", "flat_v[b * G + g, cols] += ")
_FLAT = "\n    flat = dq.reshape(B * H, T, D)"
_FLAT_KEYS = "\n    flat_k, flat_v = dk.reshape(B * G, S, D), dv.reshape(B * G, S, D)"


def _contiguous(submission: Submission, rng: np.random.Generator) -> None:
    """Several batch entries and heads, in contiguous arrays; both passes."""
    arguments = draw(Shape(B=2, H=3, G=3, T=6, S=6), rng, True)
    attends(submission, *arguments[1:4], causal=True, tile=4)
    differentiates(submission, arguments, causal=True, tile=4)


def _transposed(rng: np.random.Generator) -> Arrays:
    """q, k, v (2, 3, 6, 4) as views of arrays (B, T, H, D)."""
    q, k, v = (rng.standard_normal((2, 6, 3, 4)).transpose(0, 2, 1, 3) for _ in range(3))
    return q, k, v


@trap(
    catches="a gradient is added to a copy where its input is a transposed view, and stays zero",
    severity="critical",
    story="zeros_like keeps the order of memory, and a reshape of such an array is a copy.",
    mutant=edits((_ZEROS, _LIKE + _FLAT), _DQ),
    also=[
        edits((_ZEROS, _LIKE + _FLAT_KEYS), _DK, _DV),
        edits((_ZEROS, _LIKE + _FLAT + _FLAT_KEYS), _DQ, _DK, _DV),
    ],
    seen=BLIND,
    control=_contiguous,
)
def gradient_lost_in_a_copy(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = _transposed(rng)
    dout = rng.standard_normal(q.shape)
    differentiates(submission, saved(dout, q, k, v, True), causal=True, tile=4)


@trap(
    catches="out is written into a copy where q is a transposed view, and stays zero",
    severity="major",
    story="zeros_like keeps the order of memory, and a reshape of such an array is a copy.",
    mutant=edits(
        (_OUT, "out = np.zeros_like(q)\n    flat = out.reshape(B * H, T, D)"),
        (
            "out[b, h, rows], lse[b, h, rows] = _attend",
            "flat[b * H + h, rows], lse[b, h, rows] = _attend",
        ),
    ),
    control=_contiguous,
)
def out_lost_in_a_copy(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = _transposed(rng)
    answer = submission.flash_attention(q, k, v, causal=True, tile=4)
    agrees(answer, q, k, v, True, submission.scope)


def _packed(name: str) -> Mutant:
    """The backward pass reads this array without its strides."""
    return insert_after(
        CHECKED,
        f"    packed = np.empty({name}.shape, {name}.dtype).strides\n"
        f"    {name} = np.lib.stride_tricks.as_strided({name}, strides=packed)\n",
    )


@trap(
    catches="the backward pass reads q, k or v as if it were contiguous",
    severity="major",
    story="A projection's output is a transposed view of (B, T, H, D).",
    mutant=_packed("q"),
    also=[_packed("k"), _packed("v")],
    control=_contiguous,
)
def strides_of_inputs_ignored(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = _transposed(rng)
    dout = rng.standard_normal(q.shape)
    differentiates(submission, saved(dout, q, k, v, True), causal=True, tile=4)
    flipped = q[:, :, ::2], k[:, ::-1], v[..., ::-1]
    differentiates(submission, saved(dout[:, :, :3], *flipped, False), tile=2)


@trap(
    catches="the backward pass reads out or lse as if it were contiguous",
    severity="major",
    story="They are taken for arrays of one's own forward pass, which are.",
    mutant=_packed("lse"),
    also=[_packed("out"), edits(*_packed("out").edits, *_packed("lse").edits)],
    control=_contiguous,
)
def strides_of_saved_ignored(submission: Submission, rng: np.random.Generator) -> None:
    dout, q, k, v, out, lse = draw(Shape(B=2, H=3, G=3, T=6, S=6), rng, True)
    out = out.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)
    lse = lse.transpose(0, 2, 1).copy().transpose(0, 2, 1)
    differentiates(submission, (dout, q, k, v, out, lse), causal=True, tile=4)


# --- dtypes ---------------------------------------------------------------------------------------


def _single(submission: Submission, rng: np.random.Generator) -> None:
    """The forward pass in float32."""
    attends(submission, *Shape(T=4, S=4).draw(rng, np.float32))


@trap(
    catches="lse is float32 although the inputs are float64",
    severity="major",
    story="lse is allocated in a fixed dtype, and gradients made from it have its accuracy.",
    mutant=edit(_RETURN, "    return out, lse.astype(np.float32)\n"),
    seen=BLIND,
    control=_single,
)
def forward_lse_in_single(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=4).draw(rng))


@trap(
    catches="out is float32 although the inputs are float64",
    severity="major",
    story="out is allocated in a fixed dtype.",
    mutant=edit(_RETURN, "    return out.astype(np.float32), lse\n"),
    also=[edit(_RETURN, "    return out.astype(np.float32), lse.astype(np.float32)\n")],
    control=_single,
)
def forward_out_in_single(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=4).draw(rng))
