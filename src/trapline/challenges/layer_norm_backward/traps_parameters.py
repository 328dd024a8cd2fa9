"""Bugs of dgamma and dbeta."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, edits, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.layer_norm_backward.cases import (
    Problem,
    Rng,
    check_forward,
    check_grads,
    forward,
    problem,
    three,
)
from trapline.challenges.layer_norm_backward.situations import (
    WRITTEN_BLIND,
    check_gradients,
    far_from_eps,
    ordinary_rows,
    plain,
)
from trapline.challenges.layer_norm_backward.solution_lines import CACHE, DBETA, DGAMMA, UNPACK

# Rows of dy outside the given slice do not count in dgamma and dbeta.
_FLAT = "all_dy = dy\n    dy = dy.reshape(-1, dy.shape[-1]){rows}\n"
_FLAT += "    all_hat, x_hat = x_hat, x_hat.reshape(-1, x_hat.shape[-1]){rows}\n    "
_BACK = "\n    dy, x_hat = all_dy, all_hat"
_ROWS = "axis=(0, 1))"
_GRADIENTS = "return dx.astype(dtype), dgamma.astype(dtype), dbeta.astype(dtype)"


def _some_rows(rows: str) -> list[Mutant]:
    """Both sums, dgamma alone, dbeta alone."""
    flat = _FLAT.format(rows=rows)
    dgamma, dbeta = (line.replace(_ROWS, "axis=0)") for line in (DGAMMA, DBETA))
    return [
        edits((DGAMMA, flat + dgamma), (DBETA, dbeta + _BACK)),
        edit(DGAMMA, flat + dgamma + _BACK),
        edit(DBETA, flat + dbeta + _BACK),
    ]


def _no_tail(end: str) -> Mutant:
    """Rows from this one on are left out of all three gradients: dx is 0 there, too."""
    lines = (
        "dy = np.ascontiguousarray(dy)",
        "flat = dy.reshape(-1, dy.shape[-1])",
        f"flat[{end} :] = 0.0",
        DGAMMA,
    )
    return edit(DGAMMA, "\n    ".join(lines))


def _either(dgamma: str, dbeta: str) -> list[Mutant]:
    """Both sums in another way, dgamma alone, dbeta alone."""
    one, other = (DGAMMA, dgamma), (DBETA, dbeta)
    return [edits(one, other), edit(*one), edit(*other)]


def _one_row(rng: Rng, row: int) -> Problem:
    """Many rows, of which one alone has an upstream gradient; 8209 is prime.

    A block of 2¹⁶ numbers does not hold them all.
    """
    p = plain(rng, (1, 8209, 8))
    dy = np.zeros_like(p.dy)
    dy[0, row] = p.dy[0, row]
    return p._replace(dy=dy)


_LAST_BLOCK = _some_rows("[-(all_dy.shape[0] * all_dy.shape[1]) % 64 - 64:]")
_LAST_ROW = _some_rows("[-1:]")
_LAST_ENTRY = _either(
    "dgamma = np.sum((dy * x_hat)[-1:], axis=(0, 1))", "dbeta = np.sum(dy[-1:], axis=(0, 1))"
)
_BLOCKS = ("len(flat) // 64 * 64", "max(len(flat) // 64, 1) * 64")
_WHOLE_BLOCKS = [
    *_some_rows("[: all_dy.shape[0] * all_dy.shape[1] // 64 * 64]"),
    *_some_rows("[: max(all_dy.shape[0] * all_dy.shape[1] // 64, 1) * 64]"),
    *(_no_tail(end) for end in _BLOCKS),
]


@trap(
    catches="dgamma summed over the batch only",
    severity="major",
    story="Code written for two axes (N, D) is used with three (B, T, D).",
    mutant=edit(DGAMMA, "dgamma = np.sum(dy * x_hat, axis=0)"),
)
def dgamma_over_one_axis(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, plain(rng, (3, 2, 4)), "dgamma")


@trap(
    catches="dbeta summed over the batch only",
    severity="major",
    story="Code written for two axes (N, D) is used with three (B, T, D).",
    mutant=edit(DBETA, "dbeta = np.sum(dy, axis=0)"),
)
def dbeta_over_one_axis(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, plain(rng, (3, 2, 4)), "dbeta")


@trap(
    catches="dgamma and dbeta both summed over the batch only",
    severity="major",
    story="Code written for two axes (N, D) is used with three (B, T, D).",
    mutant=edits(
        (DGAMMA, "dgamma = np.sum(dy * x_hat, axis=0)"), (DBETA, "dbeta = np.sum(dy, axis=0)")
    ),
)
def sums_over_the_batch_only(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, plain(rng, (3, 2, 4)), "dgamma", "dbeta")


@trap(
    catches="dgamma averaged over rows instead of summed",
    severity="major",
    story="A mean belongs to the loss, not to the layer: the learning rate changes with B · T.",
    mutant=edit(DGAMMA, f"rows = max(dy.shape[0] * dy.shape[1], 1)\n    {DGAMMA} / rows"),
)
def dgamma_averaged(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, plain(rng, (2, 3, 4)), "dgamma")


@trap(
    catches="dbeta averaged over rows instead of summed",
    severity="major",
    story="A mean belongs to the loss, not to the layer: the learning rate changes with B · T.",
    mutant=edit(DBETA, f"{DBETA} / max(dy.shape[0] * dy.shape[1], 1)"),
    seen=WRITTEN_BLIND,
)
def dbeta_averaged(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, plain(rng, (2, 3, 4)), "dbeta")


@trap(
    catches="dgamma and dbeta both averaged over rows instead of summed",
    severity="major",
    story="A mean belongs to the loss, not to the layer: the learning rate changes with B · T.",
    mutant=edits(
        (DGAMMA, f"rows = max(dy.shape[0] * dy.shape[1], 1)\n    {DGAMMA} / rows"),
        (DBETA, f"{DBETA} / rows"),
    ),
)
def sums_averaged(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, plain(rng, (2, 3, 4)), "dgamma", "dbeta")


@trap(
    catches="dgamma and dbeta averaged over the batch: summed, then divided by B",
    severity="major",
    story="A mean over examples belongs to the loss, not to the layer.",
    mutant=edits(
        (DGAMMA, f"{DGAMMA} / max(dy.shape[0], 1)"), (DBETA, f"{DBETA} / max(dy.shape[0], 1)")
    ),
)
def sums_divided_by_the_batch(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, plain(rng, (2, 3, 4)), "dgamma", "dbeta")


@trap(
    catches="dgamma as Σ dy · gamma · x_hat: gamma does not belong there",
    severity="critical",
    story="The product g = dy · gamma is used for all three gradients.",
    mutant=edit(DGAMMA, DGAMMA.replace("dy * x_hat", "dy * gamma * x_hat")),
    seen=WRITTEN_BLIND,
)
def dgamma_scaled(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, problem(rng, (2, 3, 4)), "dgamma")


@trap(
    catches="dbeta summed over dy · gamma",
    severity="major",
    story="The product g = dy · gamma is used for all three gradients.",
    mutant=edit(DBETA, "dbeta = np.sum(dy * gamma, axis=(0, 1))"),
)
def dbeta_scaled(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, problem(rng, (2, 3, 4)), "dbeta")


@trap(
    catches="dgamma and dbeta both summed over dy · gamma",
    severity="major",
    story="dy is multiplied by gamma first and used for all three gradients.",
    mutant=edits(
        (DGAMMA, DGAMMA.replace("dy * x_hat", "dy * gamma * x_hat")),
        (DBETA, "dbeta = np.sum(dy * gamma, axis=(0, 1))"),
    ),
)
def sums_of_g(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, problem(rng, (2, 3, 4)), "dgamma", "dbeta")


@trap(
    catches="dgamma as Σ dy · y instead of Σ dy · x_hat",
    severity="major",
    story="The output is cached instead of the normalised input; both are equal while gamma = 1 "
    "and beta = 0.",
    mutant=edits(
        (CACHE, CACHE.replace(", gamma", ", beta.copy(), gamma")),
        (UNPACK, "x_hat, rstd, beta, gamma = cache\n"),
        (DGAMMA, "dgamma = np.sum(dy * (gamma * x_hat + beta), axis=(0, 1))"),
    ),
)
def dgamma_from_output(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, plain(rng, (2, 3, 4)), "dgamma")


@trap(
    catches="dgamma as Σ dy · (x − mean): the division by the deviation is missing",
    severity="critical",
    story="Invisible on standard normal inputs, where x − mean and x_hat are nearly equal.",
    mutant=edit(DGAMMA, DGAMMA.replace("dy * x_hat", "dy * x_hat / rstd[..., None]")),
    seen=WRITTEN_BLIND,
)
def dgamma_from_centred(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, plain(rng, (2, 3, 4), spread=20.0), "dgamma")


@trap(
    catches="dgamma as Σ dy · x: the input is not normalised",
    severity="major",
    story="The gradient of a linear layer's weight is written for that of gamma.",
    mutant=edits(
        (CACHE, CACHE.replace("gamma.copy()", "gamma.copy(), np.mean(x, axis=-1)")),
        (UNPACK, "x_hat, rstd, gamma, mean = cache\n"),
        (
            DGAMMA,
            DGAMMA.replace("x_hat", "(x_hat / rstd[..., None] + mean[..., None])"),
        ),
    ),
)
def dgamma_from_x(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, plain(rng, (2, 3, 4), offset=2.0, spread=20.0), "dgamma")


@trap(
    catches="dgamma multiplied by 1 / √(var + eps), though x_hat is normalised already",
    severity="major",
    story="Invisible on standard normal inputs, where the factor is close to 1.",
    mutant=edit(DGAMMA, DGAMMA.replace("dy * x_hat", "dy * x_hat * rstd[..., None]")),
)
def dgamma_normalised_twice(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, plain(rng, (2, 3, 4), spread=20.0), "dgamma")


@trap(
    catches="dgamma and dbeta returned in the wrong order",
    severity="critical",
    story="Both have shape (D,), so that nothing but the numbers shows it.",
    mutant=edit(
        _GRADIENTS,
        "return dx.astype(dtype), dbeta.astype(dtype), dgamma.astype(dtype)",
    ),
    seen=WRITTEN_BLIND,
)
def dgamma_and_dbeta_exchanged(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, plain(rng, (2, 3, 4)), "dgamma", "dbeta")


def _returned(*gradients: str) -> Mutant:
    return edit(_GRADIENTS, "return " + ", ".join(f"{g}.astype(dtype)" for g in gradients))


@trap(
    catches="dx is not the first of the gradients that come back",
    severity="major",
    story="The order of another signature, such as that of gamma, beta and x.",
    mutant=_returned("dgamma", "dbeta", "dx"),
    also=[_returned("dgamma", "dx", "dbeta"), _returned("dbeta", "dgamma", "dx")],
)
def dx_not_first(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, plain(rng, (2, 3, 4)), "dx")


@trap(
    catches="dgamma and dbeta come back with further axes of length one, not as (D,)",
    severity="major",
    story="Sums that keep the axes they were taken over broadcast as well, until they are stored.",
    mutant=_returned("dx", "dgamma[None, None]", "dbeta[None, None]"),
    also=[_returned("dx", "dgamma[None]", "dbeta[None]")],
)
def parameter_gradients_keep_axes(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, plain(rng, (2, 3, 4)), "dgamma", "dbeta")


@trap(
    catches="dbeta as Σ dy · x_hat, which is dgamma",
    severity="major",
    story="One line is copied from the other and not changed.",
    mutant=edit(DBETA, DBETA.replace("np.sum(dy,", "np.sum(dy * x_hat,")),
)
def dbeta_from_x_hat(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, plain(rng, (2, 3, 4)), "dbeta")


@trap(
    catches="dgamma as Σ dy, which is dbeta",
    severity="major",
    story="One line is copied from the other and not changed.",
    mutant=edit(DGAMMA, DGAMMA.replace("dy * x_hat", "dy")),
)
def dgamma_without_x_hat(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, plain(rng, (2, 3, 4)), "dgamma")


@trap(
    catches="only the last entry of the batch counts in dgamma or dbeta",
    severity="major",
    story="The sums are cleared, or assigned instead of added to, for each entry of the batch.",
    mutant=_LAST_ENTRY[0],
    also=_LAST_ENTRY[1:],
    seen=WRITTEN_BLIND,
)
def sums_of_the_last_batch_entry(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, plain(rng, (3, 2, 4)), "dgamma", "dbeta")


@trap(
    catches="only the last row counts in dgamma or dbeta",
    severity="major",
    story="A loop over rows assigns where it should add.",
    mutant=_LAST_ROW[0],
    also=_LAST_ROW[1:],
)
def sums_of_the_last_row(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, plain(rng, (3, 2, 4)), "dgamma", "dbeta")


@trap(
    catches="each block of rows replaces the sum of dgamma or dbeta instead of adding to it",
    severity="major",
    story="Invisible as long as all rows fit into one block.",
    mutant=_LAST_BLOCK[0],
    also=_LAST_BLOCK[1:],
    seen=WRITTEN_BLIND,
    control=ordinary_rows,
)
def block_sums_overwritten(submission: Submission, rng: Rng) -> None:
    """The first row alone has a gradient, so that a block of any size loses it."""
    check_gradients(submission, _one_row(rng, 0), "dgamma", "dbeta")


@trap(
    catches="rows that do not fill the last block are skipped",
    severity="critical",
    story="The number of blocks is rounded down.",
    mutant=_WHOLE_BLOCKS[0],
    also=_WHOLE_BLOCKS[1:],
    seen=WRITTEN_BLIND,
)
def last_rows_skipped(submission: Submission, rng: Rng) -> None:
    """The last row alone has a gradient, and no block of several rows ends with it."""
    check_gradients(submission, _one_row(rng, -1), "dgamma", "dbeta")


@trap(
    catches="float32 gradients are summed over rows in float32, row after row",
    severity="minor",
    story="Rounding errors add up with the number of rows.",
    mutant=edit(
        DBETA,
        "dbeta = np.zeros(dy.shape[-1], dtype)\n"
        "    for row in dy.reshape(-1, dy.shape[-1]).astype(dtype):\n"
        "        dbeta += row",
    ),
    seen=WRITTEN_BLIND,
    control=ordinary_rows,
)
def rows_summed_in_float32(submission: Submission, rng: Rng) -> None:
    """To 2^24 in the first row the ones of the others add nothing, unless sums are wider."""
    p = far_from_eps(rng, (1, 4096, 2))
    dy = np.ones_like(p.dy)
    dy[0, 0] = 2.0**24
    p = p._replace(dy=dy)
    _, cache = forward(submission, p)
    _, _, dbeta = three(submission.layer_norm_backward(p.dy, cache))
    exact = np.full(2, 2.0**24 + 4095, np.float32)
    expect.close(dbeta, exact, rtol=2e-5, what="dbeta of 4096 rows")


@trap(
    catches="a division by gamma, which is 0 / 0 where gamma is 0: x_hat as (y − beta) / gamma, or "
    "dgamma or dbeta from dy · gamma",
    severity="major",
    story="'Memory-efficient' modes rebuild x_hat from y and cannot where a weight is zero.",
    mutant=edits(
        (CACHE, "(y.astype(x.dtype), rstd.astype(x.dtype), gamma.copy(), beta.copy())"),
        (UNPACK, "y, rstd, gamma, beta = cache\n    x_hat = (y - beta) / gamma\n"),
    ),
    also=_either(
        f"{DGAMMA.replace('dy * x_hat', 'dy * gamma * x_hat')} / gamma",
        f"{DBETA.replace('np.sum(dy', 'np.sum(dy * gamma')} / gamma",
    ),
    seen=WRITTEN_BLIND,
    control=ordinary_rows,
)
def zero_gamma(submission: Submission, rng: Rng) -> None:
    p = plain(rng, (2, 3, 6))
    p.gamma[rng.integers(6)] = 0.0
    y, cache = forward(submission, p)
    grads = three(submission.layer_norm_backward(p.dy, cache))
    check_forward(y, p)
    check_grads(grads, p, only=("dgamma", "dbeta"))
    expect.that(bool(np.all(np.isfinite(grads[0]))), "dx is not finite")
