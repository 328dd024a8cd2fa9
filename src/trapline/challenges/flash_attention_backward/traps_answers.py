"""Bugs of what the two passes return: which results, in which order and layout."""

from typing import Any

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, edits, insert_after, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_backward.cases import differentiates, draw, triple
from trapline.challenges.flash_attention_backward.solution_lines import CHECKED, RECOMPUTE
from trapline.challenges.flash_attention_forward.cases import Shape, attends, form, pair

_GRADIENTS = "    return dq, dk, dv\n"
_RESULTS = "    return out, lse\n"
_LSE = "peak + np.log(total)"


def forward_results(submission: Submission, rng: np.random.Generator) -> tuple[Any, Any]:
    """Both results for three heads of five queries, so that no two axes are equally long."""
    inputs = Shape(B=2, H=3, G=3, T=5, S=5).draw(rng)
    return pair(submission.flash_attention(*inputs, tile=8))


def is_out(submission: Submission, out: Any) -> None:
    form(submission.scope, out, np.zeros((2, 3, 5, 4)), np.float64, "out")


def is_lse(submission: Submission, lse: Any) -> None:
    form(submission.scope, lse, np.zeros((2, 3, 5)), np.float64, "lse")


# --- gradients ------------------------------------------------------------------------------------


@trap(
    catches="the gradients come back in another order, in which dq is not the first",
    severity="major",
    story="With T = S and H = G all three have the same shape, so nothing else notices.",
    mutant=edit(_GRADIENTS, "    return dk, dq, dv\n"),
    also=[
        edit(_GRADIENTS, f"    return {order}\n")
        for order in ("dv, dk, dq", "dk, dv, dq", "dv, dq, dk")
    ],
)
def gradients_in_another_order(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=4), rng, False), tile=4)


@trap(
    catches="gradients come back in another layout than q, k and v, such as (B, T, H, D)",
    severity="major",
    story="Libraries disagree about where the heads are; one head hides it.",
    mutant=edit(_GRADIENTS, "    return tuple(x.transpose(0, 2, 1, 3) for x in (dq, dk, dv))\n"),
    also=[
        edit(
            _GRADIENTS,
            "    return tuple(x.reshape(-1, *x.shape[2:]) for x in (dq, dk, dv))\n",
        )
    ],
)
def gradients_in_another_layout(submission: Submission, rng: np.random.Generator) -> None:
    arguments = draw(Shape(B=2, H=3, G=3, T=5, S=5), rng, False)
    for grad in triple(submission.flash_attention_backward(*arguments, tile=8)):
        form(submission.scope, grad, arguments[1], np.float64, "a gradient")


# --- the forward pass -----------------------------------------------------------------------------


@trap(
    catches="the forward pass returns its results in the other order: (lse, out)",
    severity="major",
    story="A caller that unpacks out gets the log-sum-exp.",
    mutant=edit(_RESULTS, "    return lse, out\n"),
)
def forward_results_in_the_other_order(submission: Submission, rng: np.random.Generator) -> None:
    out, lse = forward_results(submission, rng)
    is_out(submission, out)
    is_lse(submission, lse)


@trap(
    catches="the forward pass returns out alone, without its log-sum-exp",
    severity="major",
    story="The backward pass makes what it needs again, and the caller was promised lse.",
    mutant=edit(_RESULTS, "    return out\n"),
    also=[edit(_RESULTS, f"    return {returned}\n") for returned in ("(out,)", "out, None")],
)
def forward_lse_not_returned(submission: Submission, rng: np.random.Generator) -> None:
    _, lse = forward_results(submission, rng)
    expect.that(isinstance(lse, np.ndarray), "lse is not an array")


_EXTRA_AXIS = (_RESULTS, "    return out, lse[..., None]\n")


@trap(
    catches="lse of the forward pass keeps an axis of length one: (B, H, T, 1)",
    severity="major",
    story="keepdims=True is right inside and not in the answer.",
    mutant=edits(_EXTRA_AXIS),
    also=[
        # The backward pass takes lse with that axis and without it.
        edits(_EXTRA_AXIS, (CHECKED, "    lse = lse.reshape(lse.shape[:3])\n" + CHECKED)),
    ],
)
def forward_lse_with_an_extra_axis(submission: Submission, rng: np.random.Generator) -> None:
    is_lse(submission, forward_results(submission, rng)[1])


@trap(
    catches="out of the forward pass comes back in another layout than (B, H, T, D), such as "
    "(B, T, H, D) or (B, T, H·D)",
    severity="major",
    story="Libraries disagree about where the heads are, and a layer joins them in the end.",
    mutant=edit(_RESULTS, "    return out.transpose(0, 2, 1, 3), lse\n"),
    also=[
        edit(_RESULTS, f"    return {returned}\n")
        for returned in (
            "out.transpose(0, 2, 1, 3), lse.transpose(0, 2, 1)",
            "out.transpose(0, 2, 1, 3).reshape(B, T, H * D), lse",
            "out.reshape(B * H, T, D), lse.reshape(B * H, T)",
        )
    ],
)
def forward_out_in_another_layout(submission: Submission, rng: np.random.Generator) -> None:
    is_out(submission, forward_results(submission, rng)[0])


@trap(
    catches="lse of the forward pass is a sum of exponentials: its logarithm is missing altogether",
    severity="major",
    story="The denominator of the softmax is returned as it is.",
    mutant=edit(_RESULTS, "    return out, np.exp(lse)\n"),
    also=[edit(_LSE, "np.exp(peak) * total"), edit(_LSE, "total")],
)
def forward_lse_is_the_sum(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=4).draw(rng), tile=4)


_NEGATED = (_RESULTS, "    return out, -lse\n")


@trap(
    catches="lse of the forward pass has the other sign as a whole: the logarithm of 1 / sum",
    severity="major",
    story="What is added to a score to get the logarithm of its weight is −lse.",
    mutant=edits(_NEGATED),
    also=[
        edit(_LSE, f"-({_LSE})"),
        # The backward pass is right with any lse: it makes its own.
        edits(_NEGATED, (RECOMPUTE[0], RECOMPUTE[1] + "    lse = -lse\n")),
    ],
)
def forward_lse_negated(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=4).draw(rng), tile=4)


# --- empty problems -------------------------------------------------------------------------------


def _empty_gradients(answer: str) -> Mutant:
    """An early return where there is nothing to differentiate."""
    return insert_after(CHECKED, f"    if not q.size or not k.size:\n        return {answer}\n")


@trap(
    catches="gradients of an empty problem have another dtype or shape, or are not arrays of zeros",
    severity="minor",
    story="An early return makes its arrays without the dtype of the inputs, or hands these back.",
    mutant=_empty_gradients("tuple(np.zeros(x.shape) for x in (q, k, v))"),
    also=[
        _empty_gradients("np.zeros_like(q), None, None"),
        _empty_gradients("np.zeros_like(q), k, v"),
        _empty_gradients("q, np.zeros_like(k), np.zeros_like(v)"),
        _empty_gradients("q, k, v"),
        _empty_gradients("tuple(np.zeros(0, q.dtype) for _ in range(3))"),
        _empty_gradients("tuple(np.zeros_like(q) for _ in range(3))"),
    ],
)
def empty_gradients_of_another_form(submission: Submission, rng: np.random.Generator) -> None:
    for shape in (Shape(B=0), Shape(T=0), Shape(S=0)):
        arguments = draw(shape, rng, False, np.float32)
        answer = triple(submission.flash_attention_backward(*arguments))
        for grad, like in zip(answer, arguments[1:4], strict=True):
            form(submission.scope, grad, like, np.float32, "a gradient")
            expect.equal(grad, np.zeros(like.shape, grad.dtype), "a gradient")
