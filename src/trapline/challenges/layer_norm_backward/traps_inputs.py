"""Bugs in the handling of inputs."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, edits, insert_after, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.layer_norm_backward.cases import (
    Rng,
    cache_parts,
    check_both,
    forward,
    problem,
)
from trapline.challenges.layer_norm_backward.situations import (
    WRITTEN_BLIND,
    check_gradients,
    check_y,
    exact_in_float32,
    ordinary_float32,
    ordinary_rows,
    plain,
)
from trapline.challenges.layer_norm_backward.solution_lines import DX, VAR, G, Y

# Parts of the gold solution that several mutants edit.
_WIDE = "wide = x.astype(np.float64)"
_WIDEN_DY = "    dy = dy.astype(np.float64)\n"
_SCALED = "    dy *= gamma\n    g = dy\n"
_RETURN = "return dx.astype(dtype), dgamma.astype(dtype), dbeta.astype(dtype)"
#: Columns of float64 arrays are views: the first one is subtracted from x twice, once in place, and
#: gamma is multiplied into dy in place.
_COLUMNS_IN_PLACE = edits(
    (
        f"    {Y}\n",
        "    if x.dtype == np.float64:\n"
        "        first = x[..., :1].copy()\n"
        "        x -= first\n"
        "        x_hat = (centred - first) * rstd[..., None]\n"
        f"    {Y}\n",
    ),
    (_WIDEN_DY, "    given = dy\n" + _WIDEN_DY),
    (
        DX,
        f"if dtype == np.float64:\n        given *= gamma\n        g = g * gamma\n    {DX}",
    ),
)


@trap(
    catches="x centred in place",
    severity="major",
    story="`x -= mean` changes the array that the residual branch still needs.",
    mutant=insert_before(_WIDE, "x -= np.mean(x, axis=-1, keepdims=True)\n    "),
    also=[_COLUMNS_IN_PLACE],
    seen=WRITTEN_BLIND,
    control=ordinary_rows,
)
def x_modified(submission: Submission, rng: Rng) -> None:
    p = plain(rng, offset=2.0)
    _, after = submission.observe("layer_norm_forward", *p.args)
    expect.equal(after[0], p.x, "x after the call")


@trap(
    catches="gamma or beta changed by the forward pass",
    severity="major",
    story="An operation in place changes a parameter of the layer.",
    mutant=edit(Y, f"{Y}\n    beta += 1.0"),
    control=ordinary_rows,
)
def parameters_modified(submission: Submission, rng: Rng) -> None:
    p = problem(rng)
    _, after = submission.observe("layer_norm_forward", *p.args)
    expect.equal(after[1], p.gamma, "gamma after the call")
    expect.equal(after[2], p.beta, "beta after the call")


@trap(
    catches="dy overwritten in place: multiplied by gamma, or turned into dx",
    severity="major",
    story="`dy *= gamma` changes an array that another branch of the graph still needs.",
    mutant=edits(
        (_WIDEN_DY, ""),
        (G, _SCALED),
    ),
    also=[
        # float64 alone, in every step.
        edits(
            (_WIDEN_DY, _WIDEN_DY.replace("float64", "float64, copy=False")),
            (G, _SCALED),
            (DX, "g -= mean_g\n    g -= x_hat * mean_gx\n    g *= rstd[..., None]\n    dx = g"),
        ),
    ],
    seen=WRITTEN_BLIND,
    control=ordinary_rows,
)
def dy_modified(submission: Submission, rng: Rng) -> None:
    p = problem(rng)
    _, cache = forward(submission, p)
    _, after = submission.observe("layer_norm_backward", p.dy, cache)
    expect.equal(after[0], p.dy, "dy after the call")


@trap(
    catches="backward uses the cache as a scratch buffer: a second backward differs",
    severity="major",
    story="Retained graphs call backward twice; the second gradient is silently wrong.",
    mutant=edit(
        DX, "x_hat *= mean_gx.astype(dtype)\n    dx = rstd[..., None] * (g - mean_g - x_hat)"
    ),
    seen=WRITTEN_BLIND,
    control=ordinary_rows,
)
def cache_modified(submission: Submission, rng: Rng) -> None:
    p = plain(rng)
    _, cache = forward(submission, p)
    _, after = submission.observe("layer_norm_backward", p.dy, cache)
    before, left = cache_parts(cache), cache_parts(after[1])
    unchanged = len(before) == len(left) and all(map(np.array_equal, before, left))
    expect.that(unchanged, "the cache differs after the call")


@trap(
    catches="the statistics of float64 inputs are computed in float32",
    severity="major",
    story="With a float32 path for float64 inputs, gradient checks fail at 1e-3.",
    mutant=edit(_WIDE, _WIDE.replace("float64", "float32")),
)
def float64_computed_in_float32(submission: Submission, rng: Rng) -> None:
    check_y(submission, plain(rng, (2, 3, 16)))


@trap(
    catches="the gradients of float64 inputs are computed in float32",
    severity="major",
    story="With a float32 path for float64 inputs, gradient checks fail at 1e-3.",
    mutant=edit(_WIDEN_DY, "    dy = dy.astype(np.float32)\n    gamma = gamma.astype(dy.dtype)\n"),
)
def gradients_computed_in_float32(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, plain(rng, (2, 3, 16)), "dbeta")


@trap(
    catches="float64 y for float32 inputs",
    severity="major",
    story="One float64 scalar doubles the memory of everything after it.",
    mutant=edit("return y.astype(x.dtype), (", "return y, ("),
    control=ordinary_rows,
)
def float32_widened(submission: Submission, rng: Rng) -> None:
    check_y(submission, exact_in_float32(rng))


@trap(
    catches="float64 gradients for float32 inputs",
    severity="major",
    story="Sums in float64 are right; the results are not converted back.",
    mutant=edit(_RETURN, "return dx, dgamma, dbeta"),
    seen=WRITTEN_BLIND,
    control=ordinary_rows,
)
def gradients_widened(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, exact_in_float32(rng), "dx", "dgamma", "dbeta")


@trap(
    catches="float64 dgamma and dbeta for float32 inputs",
    severity="major",
    story="Sums in float64 are right; the results are not converted back.",
    mutant=edit(_RETURN, "return dx.astype(dtype), dgamma, dbeta"),
    control=ordinary_rows,
)
def parameter_gradients_widened(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, exact_in_float32(rng), "dgamma", "dbeta")


@trap(
    catches="squares of float32 values around 1e25 overflow: y is 0",
    severity="major",
    story="float32 ends at 3e38, so that squares overflow from 2e19 on.",
    mutant=edit(_WIDE, "wide = x"),
    seen=WRITTEN_BLIND,
    control=ordinary_float32,
)
def huge_float32(submission: Submission, rng: Rng) -> None:
    check_y(submission, plain(rng, (2, 3, 8), np.float32, spread=1e25))


@trap(
    catches="the buffer of x read in memory order whatever its strides",
    severity="major",
    story="Kernels that take a pointer and a width read a transposed view as if it were packed.",
    mutant=edit(_WIDE, _WIDE.replace("x.", "x.ravel(order='K').reshape(x.shape).")),
    control=ordinary_rows,
)
def strided_x(submission: Submission, rng: Rng) -> None:
    p = plain(rng, (3, 4, 6))
    turned = np.ascontiguousarray(p.x.transpose(1, 0, 2)).transpose(1, 0, 2)
    folded = np.asfortranarray(p.x)
    for x in (turned, folded, p.x[::-1, ::2], p.x[:, :, ::-1]):
        check_y(submission, p._replace(x=x))


def _through_a_reshape(name: str, like: str) -> str:
    """Fills an array of another's layout through a reshape, which may be a copy of it."""
    rows = f"reshape(-1, {like}.shape[-1])"
    lines = f"filled = np.zeros_like({like})", f"filled.{rows}[...] = {name}.{rows}"
    return "\n    ".join(("", *lines, f"{name} = filled"))


@trap(
    catches="y gets the layout of x and is filled through a reshape: where x is a transposed view, "
    "that is a copy, and y stays 0",
    severity="major",
    story="`reshape` is a view of a packed array and a copy of any other.",
    mutant=insert_after(Y, _through_a_reshape("y", "x")),
    seen=WRITTEN_BLIND,
    control=ordinary_rows,
)
def y_written_into_a_copy(submission: Submission, rng: Rng) -> None:
    p = plain(rng, (3, 4, 6))
    check_y(submission, p._replace(x=np.asfortranarray(p.x)))


@trap(
    catches="dx gets the layout of dy and is filled through a reshape: where dy is a transposed "
    "view, that is a copy, and dx stays 0",
    severity="major",
    story="`reshape` is a view of a packed array and a copy of any other.",
    mutant=insert_after(DX, _through_a_reshape("dx", "dy")),
    seen=WRITTEN_BLIND,
    control=ordinary_rows,
)
def dx_written_into_a_copy(submission: Submission, rng: Rng) -> None:
    p = plain(rng, (3, 4, 6))
    check_gradients(submission, p._replace(dy=np.asfortranarray(p.dy)), "dx")


@trap(
    catches="the buffer of dy read in memory order whatever its strides",
    severity="major",
    story="The gradient of a sum arrives as a broadcast view with stride 0.",
    mutant=edit(_WIDEN_DY, "    dy = dy.ravel(order='K').reshape(dy.shape).astype(np.float64)\n"),
    seen=WRITTEN_BLIND,
    control=ordinary_rows,
)
def strided_dy(submission: Submission, rng: Rng) -> None:
    p = plain(rng, (3, 4, 6))
    for dy in (
        np.asfortranarray(p.dy),
        np.broadcast_to(p.dy[:1, :1], p.dy.shape),
        p.dy[:, :, ::-1],
    ):
        check_gradients(submission, p._replace(dy=dy), "dx", "dgamma", "dbeta")


def _whole_blocks(count: str) -> Mutant:
    lines = (
        "y = np.ascontiguousarray(y)",
        "rows = y.shape[0] * y.shape[1]",
        f"y.reshape(-1, y.shape[-1])[{count} * 64 :] = 0.0",
    )
    return insert_after(Y, "\n    ".join(("", *lines)))


@trap(
    catches="rows that do not fill the last block are skipped in the forward pass: y stays 0 there",
    severity="major",
    story="The number of blocks is rounded down.",
    mutant=_whole_blocks("rows // 64"),
    also=[_whole_blocks("max(rows // 64, 1)")],
    seen=WRITTEN_BLIND,
)
def last_rows_of_y_skipped(submission: Submission, rng: Rng) -> None:
    """8209 rows fill blocks of no size but 1 and 8209."""
    check_y(submission, plain(rng, (1, 8209, 8)))


def _no_rows_in_a_block(behind: str, like: str, use: str) -> Mutant:
    """A block of 2^15 elements holds no row of more features."""
    return insert_after(behind, "\n    " + use.format(height=f"(2**15 // {like}.shape[-1])"))


@trap(
    catches="a row with more features than a block has elements is refused or stays 0: the number "
    "of rows in a block is rounded down to none",
    severity="minor",
    story="Blocks of 2^15 elements hold one row at least only if the code says so.",
    mutant=_no_rows_in_a_block(Y, "x", "range(0, 1, {height})"),
    also=[
        _no_rows_in_a_block(Y, "x", "1 // {height}"),
        _no_rows_in_a_block(Y, "x", "y *= min(1, {height})"),
        _no_rows_in_a_block(DX, "dy", "range(0, 1, {height})"),
        _no_rows_in_a_block(DX, "dy", "1 // {height}"),
        _no_rows_in_a_block(
            DX, "dy", "dx, dgamma, dbeta = (d * min(1, {height}) for d in (dx, dgamma, dbeta))"
        ),
        _no_rows_in_a_block(DX, "dy", "dx *= min(1, {height})"),
    ],
    seen=WRITTEN_BLIND,
    control=ordinary_rows,
)
def rows_longer_than_a_block(submission: Submission, rng: Rng) -> None:
    """Longer than blocks of up to 2^16 elements."""
    check_both(submission, plain(rng, (1, 1, 70_000)))


def _parts_of_dgamma(joined: str) -> Mutant:
    """The sums of blocks of rows, collected in a list that is empty without rows."""
    return edit(
        "    dgamma = np.sum(dy * x_hat, axis=(0, 1))\n",
        "    rows = (dy * x_hat).reshape(-1, dy.shape[-1])\n"
        "    blocks = range(0, len(rows), 64)\n"
        "    parts = [rows[start : start + 64].sum(axis=0, keepdims=True) for start in blocks]\n"
        f"    dgamma = {joined}.reshape(-1, dy.shape[-1]).sum(axis=0)\n",
    )


@trap(
    catches="an empty batch crashes, or its dgamma is not D zeros",
    severity="major",
    story="The last shard of a batch can be empty.",
    mutant=insert_before(_WIDE, "np.max(np.abs(x))\n    "),
    also=[_parts_of_dgamma(f"np.{join}(parts)") for join in ("stack", "concatenate")],
    seen=WRITTEN_BLIND,
    control=ordinary_rows,
)
def no_rows(submission: Submission, rng: Rng) -> None:
    for shape in ((0, 2, 5), (2, 0, 5)):
        check_both(submission, plain(rng, shape))


@trap(
    catches="axes of length 1 squeezed away",
    severity="major",
    story="`squeeze()` after a reduction also removes a batch axis of length 1.",
    mutant=edit(VAR, VAR.replace("axis=-1)", "axis=-1, keepdims=True).squeeze()")),
    control=ordinary_rows,
)
def batch_of_one(submission: Submission, rng: Rng) -> None:
    for shape in ((3, 1, 4), (1, 3, 4), (1, 1, 4)):
        check_both(submission, plain(rng, shape))


@trap(
    catches="rows of a single feature (D = 1) are refused",
    severity="major",
    story="Their deviation is 0, which eps is there for.",
    mutant=insert_after(
        "    width = x.shape[-1]\n",
        "    if width < 2:\n        raise ValueError('a row needs two features')\n",
    ),
    control=ordinary_rows,
)
def single_feature_refused(submission: Submission, rng: Rng) -> None:
    check_both(submission, plain(rng, (2, 3, 1)))
