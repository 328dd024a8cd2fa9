"""The traps of layer_norm_backward on the GPU: one named bug each, in a small situation."""

import numpy as np

from trapline.arena.gpu import mutants
from trapline.arena.gpu.checks import Rng, far_apart, leaves_inputs_alone, spaced
from trapline.arena.gpu.common_traps import EntryTraps, read_as_float16, seen_on_cpu
from trapline.arena.gpu.contract import rounded
from trapline.arena.judge.traps import edit, edits, insert_after, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.layer_norm_backward.gpu.cases import (
    Problem,
    ask,
    backward,
    backward_arguments,
    forward,
    problem,
)

# Lines of the gold solution that several mutants edit.
_VARIANCE = "variance = tl.sum(centred * centred, 0) / D"
_RESULT = "(weighted - along_ones - normal * along_normal) * rstd"
_LAST = "        parts, dgamma, dbeta, programs, D, ROWS=64, COLUMNS=columns, num_warps=4\n    )\n"
_PARTS = "torch.empty((programs, 2, D), dtype=torch.float32, device=x.device)"


def one_tile(submission: Submission, rng: Rng) -> None:
    """Rows of a power of two, with a mean near 0."""
    ask(submission, problem(rng, 2, 16, shift=0.0))


def forward_only(submission: Submission, rng: Rng) -> None:
    forward(submission, problem(rng, 2, 16))


def backward_only(submission: Submission, rng: Rng) -> None:
    backward(submission, problem(rng, 2, 16))


@trap(
    catches="the variance as the mean of squares minus the square of the mean",
    severity="major",
    story="The two cancel where the mean is large: nothing of the variance is left.",
    mutant=edit(_VARIANCE, "variance = tl.sum(values * values, 0) / D - mean * mean"),
    control=backward_only,
)
def variance_cancels(submission: Submission, rng: Rng) -> None:
    forward(submission, problem(rng, 3, 64, shift=3e4))


@trap(
    catches="lanes beyond the end of a row count in the variance",
    severity="major",
    story="They hold 0, which lies as far from the mean as the mean from 0.",
    mutant=edit("centred = tl.where(inside, values - mean, 0.0)", "centred = values - mean"),
    control=one_tile,
)
def tail_lanes_counted(submission: Submission, rng: Rng) -> None:
    for width in (3, 37, 129):
        forward(submission, problem(rng, 2, width, shift=4.0))


@trap(
    catches="the variance divided by D − 1",
    severity="major",
    story="The unbiased estimator is the default of some libraries.",
    mutant=edit(_VARIANCE, "variance = tl.sum(centred * centred, 0) / (D - 1)"),
    control=backward_only,
    seen=seen_on_cpu("unbiased-variance"),
)
def unbiased_variance(submission: Submission, rng: Rng) -> None:
    forward(submission, problem(rng, 2, 5))


@trap(
    catches="eps added to the standard deviation instead of the variance",
    severity="major",
    story="The two agree where the variance is 1, and differ a hundredfold in a constant row.",
    mutant=edit("1.0 / tl.sqrt_rn(variance + eps)", "1.0 / (tl.sqrt_rn(variance) + eps)"),
    control=backward_only,
    seen=seen_on_cpu("eps-outside-the-root"),
)
def eps_outside_the_root(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 3, 16)
    p.x[1] = 2.0
    forward(submission, p)
    forward(submission, problem(rng, 2, 16)._replace(eps=0.25))


@trap(
    catches="mean and deviation rounded to the dtype of x",
    severity="major",
    story="They are float32 whatever x is; the backward pass needs the digits.",
    mutant=edit(
        "tl.store(means + row, mean)", "tl.store(means + row, mean.to(x.dtype.element_ty))"
    ),
    control=backward_only,
)
def mean_rounded_to_half(submission: Submission, rng: Rng) -> None:
    forward(submission, problem(rng, 4, 33, "float16", shift=700.0))


@trap(
    catches="dx without the mean of the weighted gradient",
    severity="critical",
    story="y does not change when a constant is added to x; dx must sum to 0.",
    mutant=edit(_RESULT, "(weighted - normal * along_normal) * rstd"),
    control=forward_only,
    seen=seen_on_cpu("mean-term-missing"),
)
def mean_term_missing(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 2, 12)
    backward(submission, p._replace(dy=rounded(p.dy + 3.0, "float32")))


@trap(
    catches="dx without the part along the normalised row",
    severity="major",
    story="y does not change when x is scaled; dx must be orthogonal to the normalised row.",
    mutant=edit(_RESULT, "(weighted - along_ones) * rstd"),
    control=forward_only,
)
def projection_missing(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 2, 12)
    backward(submission, p._replace(dy=rounded(p.dy + 2.0 * p.x, "float32")))


@trap(
    catches="gamma applied after the row's sums, not before",
    severity="major",
    story="Both sums are of dy · gamma; with gamma 1 everywhere it does not show.",
    mutant=edits(
        ("along_ones = tl.sum(weighted, 0) / D", "along_ones = weight * tl.sum(gradient, 0) / D"),
        (
            "along_normal = tl.sum(weighted * normal, 0) / D",
            "along_normal = weight * tl.sum(gradient * normal, 0) / D",
        ),
    ),
    control=forward_only,
)
def gamma_after_the_sums(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 2, 10)
    p.gamma[::2] = 5.0
    backward(submission, p)


@trap(
    catches="rows beyond the first of each program are left out of dgamma and dbeta",
    severity="major",
    story="Sums are kept in registers, and started again with every row.",
    mutant=edits(
        ("        dgamma += gradient * normal\n", "        dgamma = gradient * normal\n"),
        ("        dbeta += gradient\n", "        dbeta = gradient\n"),
    ),
    control=one_tile,
)
def later_rows_not_summed(submission: Submission, rng: Rng) -> None:
    backward(submission, problem(rng, 266, 5))


@trap(
    catches="dgamma and dbeta are summed in half precision",
    severity="major",
    story="Sums of thousands of rows lose all but three digits, or overflow at 65504.",
    mutant=edit(
        "        total += tl.sum(tl.load(parts + rows[:, None] * 2 * D + columns, mask=there, "
        "other=0.0), 0)\n",
        "        part = tl.load(parts + rows[:, None] * 2 * D + columns, mask=there, other=0.0)\n"
        "        total += tl.sum(part, 0)\n"
        "    total = total.to(tl.float16).to(tl.float32)\n",
    ),
    control=forward_only,
)
def sums_in_half(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 3, 6)
    p.dy[:] = np.array([1.0 + 2.0**-12, 7e4, 1.0], np.float32)[:, None]
    backward(submission, p)


@trap(
    catches="sums of an earlier call are added to those of this one",
    severity="major",
    story="Partial sums in a workspace that is cleared when it is allocated, and never again.",
    mutant=edits(
        (
            _PARTS,
            "_PARTS.setdefault((programs, D), torch.zeros((programs, 2, D), device=x.device))",
        ),
        (
            "    tl.store(mine, dgamma, mask=inside)\n",
            "    dgamma += tl.load(mine, mask=inside, other=0.0)\n"
            "    tl.store(mine, dgamma, mask=inside)\n",
        ),
        ("def _warps(block):", "_PARTS = {}\n\n\ndef _warps(block):"),
    ),
    control=forward_only,
)
def workspace_not_cleared(submission: Submission, rng: Rng) -> None:
    for rows in (3, 9, 3, 3):
        backward(submission, problem(rng, rows, 7))


@trap(
    catches="the row stride of x is taken to be D",
    severity="major",
    story="A slice of a wider matrix has rows further apart.",
    mutant=edit("mean, rstd, D, x.stride(0), eps", "mean, rstd, D, D, eps"),
    control=one_tile,
)
def row_stride_ignored(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 3, 19)
    forward(submission, p._replace(x=spaced(p.x, 13)))


@trap(
    catches="dy is read with the row stride of x",
    severity="major",
    story="Only one of the two is a slice of something wider.",
    mutant=edit("D, dy.stride(0), x.stride(0)", "D, x.stride(0), x.stride(0)"),
    control=one_tile,
)
def strides_confused(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 3, 19)
    backward(submission, p._replace(x=spaced(p.x, 13)))
    backward(submission, p._replace(dy=spaced(p.dy, 5)))


@trap(
    catches="with no rows dgamma and dbeta are not written",
    severity="major",
    story="A sum over nothing is 0; an early return leaves what was in the memory.",
    mutant=insert_after(
        "def layer_norm_backward(dy, x, gamma, mean, rstd, dx, dgamma, dbeta):\n"
        "    rows, D = x.shape\n",
        "    if rows == 0:\n        return\n",
    ),
    control=one_tile,
)
def no_rows_no_sums(submission: Submission, rng: Rng) -> None:
    backward(submission, problem(rng, 0, 7))


_SHARED = EntryTraps(
    "layer_norm_backward", _LAST, 3, lambda rng: problem(rng, 4, 11), backward, forward_only
)


stale_answer = _SHARED.stale_answer()


def _with_other_value(p: Problem, rng: Rng) -> Problem:
    p.dy[2, 1 + rng.integers(9)] += 9.0
    return p


remembered_by_fingerprint = _SHARED.remembered_by_fingerprint(_with_other_value)


@trap(
    catches="dy is overwritten",
    severity="major",
    story="dx is computed in place, in memory that belongs to the caller.",
    mutant=mutants.modified_input(_LAST, "layer_norm_backward", 0),
    control=forward_only,
)
def inputs_modified(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 3, 10)
    leaves_inputs_alone(submission, "layer_norm_forward", p.x, p.gamma, p.beta, p.eps)
    leaves_inputs_alone(submission, "layer_norm_backward", *backward_arguments(p))


@trap(
    catches="rows beyond 65535 are never computed",
    severity="major",
    story="Rows in the second or third dimension of a launch, which end at 65535.",
    mutant=edit("_forward_kernel[(rows,)]", "_forward_kernel[(min(rows, 65535),)]"),
    control=one_tile,
)
def rows_beyond_65535(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, 65600, 8, "float16"))


@trap(
    catches="offsets of 32 bits: rows beyond 2³¹ elements are read from elsewhere",
    severity="major",
    story="row * stride overflows an int; 524288 rows of 4096 suffice.",
    mutant=edits(
        ("    row = tl.program_id(0).to(tl.int64)\n", "    row = tl.program_id(0)\n"),
        (
            "tl.load(x + row * x_stride + lanes, mask=inside, other=0.0).to(tl.float32)\n    mean",
            "tl.load(x + row * x_stride.to(tl.int32) + lanes, mask=inside, other=0.0)\n"
            "    values = values.to(tl.float32)\n    mean",
        ),
    ),
    control=one_tile,
)
def two_billion_elements_apart(submission: Submission, rng: Rng) -> None:
    """Two rows whose distance exceeds 2³¹ elements; what lies between them is never touched."""
    p = problem(rng, 2, 300, "float16")
    forward(submission, p._replace(x=far_apart(p.x)))


bfloat16_read_as_float16 = read_as_float16(
    lambda submission, rng: forward(submission, problem(rng, 2, 24, "bfloat16")),
    insert_after(
        "def layer_norm_forward(x, gamma, beta, eps, y, mean, rstd):\n",
        "    if x.element_size() == 2:\n        x = x.view(torch.float16)\n",
    ),
    one_tile,
)


wrong_stream = _SHARED.wrong_stream()
