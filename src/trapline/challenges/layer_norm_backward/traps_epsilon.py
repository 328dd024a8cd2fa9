"""Bugs in the use of eps, in both passes."""

from trapline.arena.judge.traps import edit, edits, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.layer_norm_backward.cases import Rng, check_forward
from trapline.challenges.layer_norm_backward.situations import (
    WRITTEN_BLIND,
    check_gradients,
    check_y,
    far_from_eps,
    ordinary_rows,
    plain,
)
from trapline.challenges.layer_norm_backward.solution_lines import CACHE, DX, UNPACK, VAR

# Parts of the gold solution that several mutants edit.
_RSTD = "rstd = 1.0 / np.sqrt(var + eps)"
_CACHE_WITH_EPS = (CACHE, CACHE.replace("gamma.copy()", "gamma.copy(), float(eps)"))
_UNPACK_EPS = UNPACK.replace("gamma", "gamma, eps") + "    var = 1.0 / rstd**2.0 - eps\n"


def _far_from_eps(submission: Submission, rng: Rng) -> None:
    """Rows so wide that the handling of eps cannot be seen."""
    check_gradients(submission, far_from_eps(rng), "dx")


def _forward_far_from_eps(submission: Submission, rng: Rng) -> None:
    check_y(submission, far_from_eps(rng))


@trap(
    catches="a row without spread is divided by its standard deviation of 0, or by another measure "
    "of its spread, such as its largest deviation, before eps is added",
    severity="major",
    story="Padding positions carry constant rows; without epsilon they become NaN.",
    mutant=edit(_RSTD, "rstd = 1.0 / np.sqrt(var)"),
    also=[
        # Scaled by the largest deviation against overflow: 0 / 0, which eps comes too late for.
        edit(
            VAR,
            "size = np.max(np.abs(centred), axis=-1, keepdims=True, initial=0.0)\n"
            "    var = np.mean((centred / size) ** 2, axis=-1) * size[..., 0] ** 2",
        ),
    ],
    seen=WRITTEN_BLIND,
)
def constant_row(submission: Submission, rng: Rng) -> None:
    p = plain(rng, (2, 3, 8))
    p.x[:, 1] = rng.integers(-4, 5)
    p.x[0, 2] = 0.0
    check_y(submission, p)


@trap(
    catches="dx of a row without spread is 0, as if 1 / √(var + eps) were 0 there",
    severity="major",
    story="A guard against dividing by a deviation of 0, where eps has made one unnecessary.",
    seen=WRITTEN_BLIND,
    mutant=edit(
        DX, DX.replace("rstd[..., None]", "np.any(x_hat, axis=-1, keepdims=True) * rstd[..., None]")
    ),
    control=ordinary_rows,
)
def constant_row_without_gradient(submission: Submission, rng: Rng) -> None:
    p = plain(rng, (2, 3, 8))
    p.x[:, 1] = rng.integers(-4, 5)
    check_gradients(submission, p, "dx")


@trap(
    catches="1 / (√var + eps) instead of 1 / √(var + eps)",
    severity="critical",
    story="Adam adds its epsilon outside the root; layer norm does not.",
    mutant=edit(_RSTD, "rstd = 1.0 / (np.sqrt(var) + eps)"),
    seen=WRITTEN_BLIND,
)
def eps_outside_the_root(submission: Submission, rng: Rng) -> None:
    check_y(submission, plain(rng, spread=0.5, eps=0.1))


@trap(
    catches="1 / (√var + √eps) instead of 1 / √(var + eps)",
    severity="major",
    story="The root of a sum is not the sum of the roots.",
    mutant=edit(_RSTD, "rstd = 1.0 / (np.sqrt(var) + np.sqrt(eps))"),
    seen="an answer of another author",
)
def root_of_each_summand(submission: Submission, rng: Rng) -> None:
    check_y(submission, plain(rng, spread=0.5, eps=0.1))


@trap(
    catches="√(var + eps²): eps is squared, as if it were added to the deviation in a hypotenuse",
    severity="critical",
    story="With eps = 1e-5 it disappears: constant rows get a gradient 300 times too large.",
    mutant=edit(_RSTD, "rstd = 1.0 / np.sqrt(var + float(eps) ** 2)"),
    seen=WRITTEN_BLIND,
)
def eps_squared(submission: Submission, rng: Rng) -> None:
    check_y(submission, plain(rng, spread=0.5, eps=0.1))


@trap(
    catches="eps added twice: to the variance, and again to its root",
    severity="major",
    story="Two habits of guarding a division meet in one line.",
    mutant=edit(_RSTD, "rstd = 1.0 / (np.sqrt(var + eps) + eps)"),
)
def eps_added_twice(submission: Submission, rng: Rng) -> None:
    check_y(submission, plain(rng, spread=0.5, eps=0.1))


@trap(
    catches="a multiple of eps is added to the variance instead of eps: 2 eps, 4 eps, eps / D, …",
    severity="major",
    story="A row is halved and eps is not, or eps is added to the sum of squares before it is "
    "divided by D. With eps = 1e-5 and a variance of 1 that moves y in its fifth digit.",
    mutant=edit(_RSTD, "rstd = 1.0 / np.sqrt(var + 4.0 * eps)"),
    also=[
        edit(_RSTD, f"rstd = 1.0 / np.sqrt(var + {multiple})")
        for multiple in ("2.0 * eps", "0.5 * eps", "0.25 * eps", "eps / x.shape[-1]")
    ],
    seen=WRITTEN_BLIND,
    control=_forward_far_from_eps,
)
def multiple_of_eps(submission: Submission, rng: Rng) -> None:
    check_y(submission, plain(rng, spread=0.5, eps=0.1))


@trap(
    catches="max(var, eps) instead of var + eps",
    severity="major",
    story="A clamp looks like the same protection and changes every row of small variance.",
    mutant=edit(_RSTD, "rstd = 1.0 / np.sqrt(np.maximum(var, eps))"),
)
def eps_as_a_floor(submission: Submission, rng: Rng) -> None:
    check_y(submission, plain(rng, spread=0.3, eps=0.05))


@trap(
    catches="the default epsilon used whatever the caller passes",
    severity="major",
    story="A configured epsilon of 1e-12 is lost in a kernel with a constant in it.",
    mutant=edit(_RSTD, "rstd = 1.0 / np.sqrt(var + 1e-5)"),
    control=ordinary_rows,
)
def eps_ignored(submission: Submission, rng: Rng) -> None:
    check_y(submission, plain(rng, spread=0.5, eps=0.5))


@trap(
    catches="a default epsilon other than 1e-5",
    severity="major",
    story="Other layers and libraries have 1e-6, 1e-8 or 1e-12.",
    mutant=edit("beta: Array, eps: float = 1e-5", "beta: Array, eps: float = 1e-6"),
    also=[
        edit("beta: Array, eps: float = 1e-5", f"beta: Array, eps: float = {eps}")
        for eps in ("1e-8", "1e-12", "1e-7", "1e-4", "1e-3")
    ],
    control=ordinary_rows,
)
def another_default_eps(submission: Submission, rng: Rng) -> None:
    p = plain(rng, spread=1e-3)
    y, _ = submission.layer_norm_forward(p.x, p.gamma, p.beta)
    check_forward(y, p)


@trap(
    catches="the backward pass normalises x again with eps = 1e-5, whatever the forward pass had",
    severity="major",
    story="The cache keeps x and not eps, so the backward pass falls back on the default.",
    mutant=edits(
        _CACHE_WITH_EPS,
        (
            UNPACK,
            _UNPACK_EPS
            + "    x_hat = x_hat / rstd[..., None]\n"
            + "    rstd = 1.0 / np.sqrt(np.maximum(var, 0.0) + 1e-5)\n"
            + "    x_hat = x_hat * rstd[..., None]\n",
        ),
    ),
    seen=WRITTEN_BLIND,
    control=ordinary_rows,
)
def backward_with_the_default_eps(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, plain(rng, spread=0.5, eps=0.5), "dx", "dgamma")


@trap(
    catches="the factor 1 / √(var + eps) of dx is computed with eps = 1e-5, whatever the forward "
    "pass had",
    severity="major",
    story="The cache keeps the variance and not eps.",
    mutant=edits(
        _CACHE_WITH_EPS,
        (UNPACK, _UNPACK_EPS + "    rstd = 1.0 / np.sqrt(np.maximum(var, 0.0) + 1e-5)\n"),
    ),
    seen=WRITTEN_BLIND,
    control=ordinary_rows,
)
def rstd_with_the_default_eps(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, plain(rng, spread=0.5, eps=0.5), "dx")


@trap(
    catches="the factor of dx is 1 / √var: the backward pass leaves eps out",
    severity="major",
    story="Invisible where the variance is much larger than eps; constant rows get infinities.",
    mutant=edits(
        _CACHE_WITH_EPS,
        (UNPACK, _UNPACK_EPS + "    rstd = 1.0 / np.sqrt(np.maximum(var, 0.0))\n"),
    ),
    seen=WRITTEN_BLIND,
)
def rstd_without_eps(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, plain(rng, spread=0.5, eps=0.5), "dx")


@trap(
    catches="the backward pass adds eps again to a deviation that holds it: √(var + 2 eps)",
    severity="major",
    story="The cache keeps √(var + eps), and the backward pass takes it for √var.",
    mutant=edits(
        _CACHE_WITH_EPS,
        (UNPACK, _UNPACK_EPS + "    rstd = 1.0 / np.sqrt(1.0 / rstd**2.0 + eps)\n"),
    ),
    also=[
        edits(
            _CACHE_WITH_EPS,
            (
                UNPACK,
                _UNPACK_EPS
                + "    x_hat = x_hat / rstd[..., None]\n"
                + "    rstd = 1.0 / np.sqrt(1.0 / rstd**2.0 + eps)\n"
                + "    x_hat = x_hat * rstd[..., None]\n",
            ),
        )
    ],
    seen=WRITTEN_BLIND,
    control=_far_from_eps,
)
def eps_added_again_backward(submission: Submission, rng: Rng) -> None:
    check_gradients(submission, plain(rng, spread=0.5, eps=0.5), "dx")


@trap(
    catches="eps is scaled with the spread of the row, by another factor than its variance",
    severity="major",
    story="A row is divided by its size so that its squares cannot overflow; eps then takes the "
    "square of that factor, too.",
    seen=WRITTEN_BLIND,
    mutant=edit(
        _RSTD,
        "size = 2.0 ** np.frexp(np.max(np.abs(centred), axis=-1, initial=0.0))[1]\n"
        "    rstd = 1.0 / np.sqrt(var + eps * size)",
    ),
    also=[
        edit(
            _RSTD,
            "size = np.max(np.abs(centred), axis=-1, initial=0.0)\n"
            "    rstd = 1.0 / np.sqrt(var + eps * np.where(size > 0.0, size, 1.0))",
        ),
    ],
)
def eps_scaled_with_the_row(submission: Submission, rng: Rng) -> None:
    check_y(submission, plain(rng, spread=20.0, eps=0.1))
