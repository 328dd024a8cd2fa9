"""Bugs of what is returned: which results, in which order, layout and dtype."""

from typing import Any

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, edits, insert_after, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_forward.cases import Shape, form, pair
from trapline.challenges.flash_attention_forward.solution_lines import LSE
from trapline.challenges.flash_attention_forward.traps_scale import lse_is_right

_RESULTS = "    return out, lse\n"
_EMPTY = f"{LSE}, -np.inf)"
_OUT, _LSE = "np.zeros((B, H, T, D), q.dtype)", "np.zeros((B, H, T), q.dtype)"


#: Three heads of five queries, so that no two axes are equally long.
_SHAPE = Shape(B=2, H=3, G=3, T=5, S=5)


def answered(
    submission: Submission, rng: np.random.Generator, dtype: type = np.float64
) -> tuple[Any, Any]:
    """Both results, whatever they are."""
    return pair(submission.flash_attention(*_SHAPE.draw(rng, dtype), tile=8))


def is_out(submission: Submission, out: Any, dtype: type = np.float64) -> None:
    form(submission.scope, out, np.zeros((2, 3, 5, 4)), dtype, "out")


def is_lse(submission: Submission, lse: Any, dtype: type = np.float64) -> None:
    form(submission.scope, lse, np.zeros((2, 3, 5)), dtype, "lse")


def singles(submission: Submission, rng: np.random.Generator) -> None:
    """The same in float32."""
    out, lse = answered(submission, rng, np.float32)
    is_out(submission, out, np.float32)
    is_lse(submission, lse, np.float32)


# --- which results --------------------------------------------------------------------------------


@trap(
    catches="the two results are returned in the other order: (lse, out)",
    severity="major",
    story="A caller that unpacks out gets the log-sum-exp.",
    mutant=edit(_RESULTS, "    return lse, out\n"),
)
def results_in_the_other_order(submission: Submission, rng: np.random.Generator) -> None:
    out, lse = answered(submission, rng)
    is_out(submission, out)
    is_lse(submission, lse)


@trap(
    catches="only out is returned, without its log-sum-exp",
    severity="major",
    story="Attention as layers know it has one result; this one has two.",
    mutant=edit(_RESULTS, "    return out\n"),
    also=[edit(_RESULTS, f"    return {returned}\n") for returned in ("(out,)", "out, None")],
)
def lse_not_returned(submission: Submission, rng: np.random.Generator) -> None:
    _, lse = answered(submission, rng)
    expect.that(isinstance(lse, np.ndarray), "lse is not an array")


@trap(
    catches="lse is a sum of exponentials: its logarithm is missing altogether",
    severity="major",
    story="The denominator of the softmax is returned as it is.",
    mutant=edit(_RESULTS, "    return out, np.exp(lse)\n"),
    also=[
        edit(LSE, "np.exp(peak) * total"),
        edit(LSE, "total"),
        edit(_EMPTY, "total, 0)"),
    ],
)
def lse_is_the_sum(submission: Submission, rng: np.random.Generator) -> None:
    lse_is_right(submission, rng, [3.0, 3.0])


@trap(
    catches="lse has the other sign as a whole: it is the logarithm of 1 / sum",
    severity="major",
    story="What is added to a score to get the logarithm of its weight is −lse.",
    mutant=edit(_RESULTS, "    return out, -lse\n"),
    also=[edit(LSE, f"-({LSE})")],
)
def lse_negated(submission: Submission, rng: np.random.Generator) -> None:
    lse_is_right(submission, rng, [-2.0, -2.0])


# --- layout ---------------------------------------------------------------------------------------


@trap(
    catches="out comes back in another layout than (B, H, T, D), such as (B, T, H, D) or "
    "(B, T, H·D)",
    severity="major",
    story="Libraries disagree about where the heads are, and a layer joins them in the end.",
    mutant=edit(_RESULTS, "    return out.transpose(0, 2, 1, 3), lse\n"),
    also=[
        edit(_RESULTS, f"    return {returned}\n")
        for returned in (
            "out.transpose(0, 2, 1, 3), lse.transpose(0, 2, 1)",
            "out.transpose(0, 1, 3, 2), lse",
            "out.transpose(0, 2, 1, 3).reshape(B, T, H * D), lse",
            "out.reshape(B * H, T, D), lse",
            "out.reshape(B * H, T, D), lse.reshape(B * H, T)",
        )
    ],
)
def out_in_another_layout(submission: Submission, rng: np.random.Generator) -> None:
    out, _ = answered(submission, rng)
    is_out(submission, out)


@trap(
    catches="lse comes back in another layout than (B, H, T), such as (B, T, H)",
    severity="major",
    story="The kernel counts batches and heads as one axis, or writes a row of all heads at a "
    "time.",
    mutant=edit(_RESULTS, "    return out, lse.transpose(0, 2, 1)\n"),
    also=[edit(_RESULTS, "    return out, lse.reshape(B * H, T)\n")],
)
def lse_in_another_layout(submission: Submission, rng: np.random.Generator) -> None:
    _, lse = answered(submission, rng)
    is_lse(submission, lse)


# --- dtype ----------------------------------------------------------------------------------------


@trap(
    catches="out of float64 inputs comes back in float32",
    severity="major",
    story="A buffer with a dtype of its own instead of that of q.",
    mutant=edit(_OUT, "np.zeros((B, H, T, D), np.float32)"),
    control=singles,
)
def out_in_single(submission: Submission, rng: np.random.Generator) -> None:
    out, _ = answered(submission, rng)
    is_out(submission, out)


@trap(
    catches="float64 inputs give both results in float32",
    severity="major",
    story="Everything is converted to float32 as on a GPU, and nothing is converted back.",
    mutant=edits(
        (_OUT, "np.zeros((B, H, T, D), np.float32)"), (_LSE, "np.zeros((B, H, T), np.float32)")
    ),
    control=singles,
)
def results_in_single(submission: Submission, rng: np.random.Generator) -> None:
    out, lse = answered(submission, rng)
    is_out(submission, out)
    is_lse(submission, lse)


# --- empty problems -------------------------------------------------------------------------------


def _empty_answer(answer: str) -> Mutant:
    """An early return where there is nothing to attend to."""
    return insert_after(
        "    _check(q, k, v, tile)\n",
        f"    if not q.size or not k.size:\n        return {answer}\n",
    )


@trap(
    catches="an empty problem is answered with arrays of another dtype or shape",
    severity="minor",
    story="An early return makes its arrays without the dtype of q, or flat.",
    mutant=_empty_answer("np.zeros(q.shape), np.full(q.shape[:3], -np.inf)"),
    also=[
        _empty_answer("np.zeros_like(q), np.full(q.shape[:3], -np.inf)"),
        _empty_answer("np.zeros_like(q), np.zeros(0, q.dtype)"),
        _empty_answer("np.zeros(0, q.dtype), np.zeros(0, q.dtype)"),
        _empty_answer("np.zeros_like(q), np.full((*q.shape[:3], 1), -np.inf, q.dtype)"),
    ],
    control=singles,
)
def empty_answers_of_another_form(submission: Submission, rng: np.random.Generator) -> None:
    for shape in (Shape(B=0), Shape(T=0), Shape(S=0)):
        q, k, v = shape.draw(rng, np.float32)
        out, lse = pair(submission.flash_attention(q, k, v))
        form(submission.scope, out, q, q.dtype, "out")
        form(submission.scope, lse, q[..., 0], q.dtype, "lse")
