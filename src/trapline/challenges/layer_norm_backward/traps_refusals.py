"""Bad input that is accepted."""

import numpy as np

from trapline.arena.errors import SubmissionRaised
from trapline.arena.judge import expect
from trapline.arena.judge.traps import edit, edits, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.layer_norm_backward.cases import REFUSAL, Problem, Rng, forward, problem
from trapline.challenges.layer_norm_backward.situations import WRITTEN_BLIND, plain

# Parts of the gold solution that several mutants edit.
_FLOATS = "if array.dtype not in (np.float32, np.float64):"
_SHAPES = "gamma.shape != (width,) or beta.shape != (width,)"
_DY_SHAPE = "if dy.shape != x_hat.shape:"
_EPS = "if not 0.0 < eps < np.inf:"


def _refuses(submission: Submission, p: Problem) -> None:
    expect.raises(REFUSAL, submission.layer_norm_forward, *p.args)


def _refuses_dy(submission: Submission, p: Problem, dy: np.ndarray) -> None:
    _, cache = forward(submission, p)
    expect.raises(REFUSAL, submission.layer_norm_backward, dy, cache)


@trap(
    catches="a gamma of length 1 is accepted for any D",
    severity="minor",
    story="A checkpoint of another width then loads silently.",
    mutant=edit(_SHAPES, "gamma.shape not in ((width,), (1,)) or beta.shape != (width,)"),
    also=[edit(_SHAPES, "beta.shape != (width,)")],
    seen=WRITTEN_BLIND,
    dimension="robustness",
)
def gamma_broadcast(submission: Submission, rng: Rng) -> None:
    p = problem(rng)
    _refuses(submission, p._replace(gamma=p.gamma[:1]))


@trap(
    catches="a beta of length 1 is accepted for any D",
    severity="minor",
    story="A checkpoint of another width then loads silently.",
    mutant=edit(_SHAPES, "gamma.shape != (width,) or beta.shape not in ((width,), (1,))"),
    also=[edit(_SHAPES, "gamma.shape != (width,)")],
    dimension="robustness",
    seen=WRITTEN_BLIND,
)
def beta_broadcast(submission: Submission, rng: Rng) -> None:
    p = problem(rng)
    _refuses(submission, p._replace(beta=p.beta[:1]))


@trap(
    catches="a gamma of shape (1, D) is accepted",
    severity="minor",
    story="Broadcasting hides that the parameter has an axis too many.",
    mutant=edit(_SHAPES, "gamma.shape not in ((width,), (1, width)) or beta.shape != (width,)"),
    seen=WRITTEN_BLIND,
    dimension="robustness",
)
def gamma_of_rank_2(submission: Submission, rng: Rng) -> None:
    p = problem(rng)
    _refuses(submission, p._replace(gamma=p.gamma[None]))


@trap(
    catches="a beta of shape (1, D) is accepted",
    severity="minor",
    story="Broadcasting hides that the parameter has an axis too many.",
    mutant=edit(_SHAPES, "gamma.shape != (width,) or beta.shape not in ((width,), (1, width))"),
    seen=WRITTEN_BLIND,
    dimension="robustness",
)
def beta_of_rank_2(submission: Submission, rng: Rng) -> None:
    p = problem(rng)
    _refuses(submission, p._replace(beta=p.beta[None]))


@trap(
    catches="the shapes of gamma and beta are not checked: what broadcasts is accepted",
    severity="minor",
    story="A checkpoint of another width then loads silently.",
    mutant=edit(f"if {_SHAPES}:", "if width < 0:"),
    dimension="robustness",
)
def parameter_shapes_unchecked(submission: Submission, rng: Rng) -> None:
    p = problem(rng)
    _refuses(submission, p._replace(gamma=p.gamma[:1], beta=p.beta[None]))


@trap(
    catches="a dy of shape (1, T, D) is accepted and broadcast",
    severity="minor",
    story="A loss reduced over one axis too many returns a gradient of shape (1, T, D).",
    mutant=edit(_DY_SHAPE, "if dy.ndim != 3 or dy.shape[1:] != x_hat.shape[1:]:"),
    seen=WRITTEN_BLIND,
    dimension="robustness",
)
def dy_broadcast(submission: Submission, rng: Rng) -> None:
    p = plain(rng)
    _refuses_dy(submission, p, p.dy[:1])


@trap(
    catches="the shape of dy is not checked: what broadcasts is accepted",
    severity="minor",
    story="A loss reduced over one axis too many returns a gradient of another shape.",
    mutant=edit(_DY_SHAPE, "if dy.ndim > 3:"),
    dimension="robustness",
)
def dy_shape_unchecked(submission: Submission, rng: Rng) -> None:
    p = plain(rng)
    _refuses_dy(submission, p, p.dy[:, :, :1])


@trap(
    catches="a dy with as many elements as x, but of another shape, is accepted",
    severity="minor",
    story="dy is reshaped to rows before its shape is compared.",
    mutant=edit(
        _DY_SHAPE,
        "if dy.size == x_hat.size and dy.shape[-1:] == x_hat.shape[-1:]:\n"
        "        dy = dy.reshape(x_hat.shape)\n"
        f"    {_DY_SHAPE}",
    ),
    seen=WRITTEN_BLIND,
    dimension="robustness",
)
def dy_of_another_order(submission: Submission, rng: Rng) -> None:
    """Axes (T, B, D) and (B · T, D)."""
    p = plain(rng)
    B, T, D = p.dy.shape
    for shape in ((T, B, D), (B * T, D)):
        _refuses_dy(submission, p, p.dy.reshape(shape))


@trap(
    catches="an axis of length 1 passes for any length, in parameters and in dy",
    severity="minor",
    story="One shape check for all arrays follows the rules of broadcasting.",
    mutant=edits(
        (_SHAPES, "{gamma.shape, beta.shape} - {(width,), (1,)}"),
        (_DY_SHAPE, "if any(n not in (w, 1) for n, w in zip(dy.shape, x_hat.shape)):"),
    ),
    dimension="robustness",
    seen=WRITTEN_BLIND,
)
def length_one_accepted(submission: Submission, rng: Rng) -> None:
    p = problem(rng)
    _refuses(submission, p._replace(gamma=p.gamma[:1]))


@trap(
    catches="x of rank 2 or 4 accepted",
    severity="minor",
    story="With the batch axis missing, T is taken for D.",
    mutant=edit("if x.ndim != 3:", "if x.ndim < 1:"),
    dimension="robustness",
)
def rank_ignored(submission: Submission, rng: Rng) -> None:
    p = problem(rng)
    _refuses(submission, p._replace(x=p.x[0]))


@trap(
    catches="x of rank 4 accepted",
    severity="minor",
    story="The contract has three axes; code for any number of leading axes takes more.",
    mutant=edit("if x.ndim != 3:", "if x.ndim < 3:"),
    dimension="robustness",
)
def rank_4_accepted(submission: Submission, rng: Rng) -> None:
    p = problem(rng)
    _refuses(submission, p._replace(x=p.x[None]))


@trap(
    catches="integer or complex inputs are computed instead of refused",
    severity="minor",
    story="Token ids are then normalised instead of their embeddings.",
    mutant=edit(_FLOATS, "if array.dtype == object:"),
    dimension="robustness",
)
def dtypes_unchecked(submission: Submission, rng: Rng) -> None:
    p = problem(rng)
    for dtype in (np.complex128, np.int32):
        x, gamma, beta = (value.astype(dtype) for value in (p.x, p.gamma, p.beta))
        expect.raises(REFUSAL, submission.layer_norm_forward, x, gamma, beta)


@trap(
    catches="integer inputs are computed instead of refused",
    severity="minor",
    story="Token ids are then normalised instead of their embeddings, and y is cut to integers.",
    mutant=edit(_FLOATS, "if array.dtype.kind not in 'fiu':"),
    dimension="robustness",
    seen=WRITTEN_BLIND,
)
def integers_accepted(submission: Submission, rng: Rng) -> None:
    p = problem(rng)
    x, gamma, beta = (np.ceil(value).astype(np.int32) for value in (p.x, p.gamma, p.beta))
    expect.raises(REFUSAL, submission.layer_norm_forward, x, gamma, beta)


@trap(
    catches="complex inputs are computed instead of refused",
    severity="minor",
    story="The imaginary part is dropped on the way.",
    mutant=edit(_FLOATS, "if array.dtype.kind not in 'fc':"),
    dimension="robustness",
)
def complex_accepted(submission: Submission, rng: Rng) -> None:
    p = problem(rng)
    x, gamma, beta = (value.astype(np.complex128) for value in (p.x, p.gamma, p.beta))
    expect.raises(REFUSAL, submission.layer_norm_forward, x, gamma, beta)


@trap(
    catches="an integer dy is computed instead of refused",
    severity="minor",
    story="The forward pass checks its arrays, the backward pass does not.",
    mutant=edit("    _require_floats(dy=dy)\n", ""),
    dimension="robustness",
)
def integer_dy_accepted(submission: Submission, rng: Rng) -> None:
    p = problem(rng)
    _refuses_dy(submission, p, np.ceil(p.dy).astype(np.int64))


@trap(
    catches="an epsilon of 0, below 0, infinite or NaN is accepted",
    severity="minor",
    story="A sign error in a configuration file makes NaN of every activation.",
    mutant=edit(_EPS, "if isinstance(eps, str):"),
    dimension="robustness",
)
def eps_unchecked(submission: Submission, rng: Rng) -> None:
    _refuses(submission, problem(rng, eps=-1e-5))


@trap(
    catches="an epsilon of 0 is accepted",
    severity="minor",
    story="Constant rows are then divided by 0.",
    mutant=edit(_EPS, "if not 0.0 <= eps < np.inf:"),
    seen=WRITTEN_BLIND,
    dimension="robustness",
)
def zero_eps_accepted(submission: Submission, rng: Rng) -> None:
    _refuses(submission, problem(rng, eps=0.0))


@trap(
    catches="a negative epsilon is accepted",
    severity="minor",
    story="A sign error in a configuration file makes NaN of every activation.",
    mutant=edit(_EPS, "if not np.isfinite(eps) or eps == 0.0:"),
    dimension="robustness",
)
def negative_eps_accepted(submission: Submission, rng: Rng) -> None:
    _refuses(submission, problem(rng, eps=-1e-5))


@trap(
    catches="an infinite epsilon is accepted",
    severity="minor",
    story="Every output collapses to beta.",
    mutant=edit(_EPS, "if not 0.0 < eps:"),
    dimension="robustness",
    seen=WRITTEN_BLIND,
)
def infinite_eps_accepted(submission: Submission, rng: Rng) -> None:
    _refuses(submission, problem(rng, eps=np.inf))


@trap(
    catches="an epsilon that is NaN is accepted",
    severity="minor",
    story="`eps <= 0` is false for NaN.",
    mutant=edit(_EPS, "if eps <= 0.0 or eps == np.inf:"),
    dimension="robustness",
)
def nan_eps_accepted(submission: Submission, rng: Rng) -> None:
    _refuses(submission, problem(rng, eps=np.nan))


@trap(
    catches="an epsilon that is infinite or NaN is accepted: only its sign is checked",
    severity="minor",
    story="`eps <= 0` is false for NaN and for infinity.",
    mutant=edit(_EPS, "if eps <= 0.0:"),
    seen=WRITTEN_BLIND,
    dimension="robustness",
)
def only_the_sign_of_eps_checked(submission: Submission, rng: Rng) -> None:
    _refuses(submission, problem(rng, eps=np.nan))


@trap(
    catches="an epsilon of 0, infinity or NaN is accepted: only negative ones are refused",
    severity="minor",
    story="`eps < 0` lets 0 through, and is false for NaN.",
    mutant=edit(_EPS, "if eps < 0.0:"),
    dimension="robustness",
)
def only_negative_eps_refused(submission: Submission, rng: Rng) -> None:
    _refuses(submission, problem(rng, eps=0.0))


@trap(
    catches="shapes are compared by their number of elements alone: dy, gamma and beta of another "
    "shape are accepted",
    severity="minor",
    story="One check of sizes for all arrays, which are reshaped to rows afterwards.",
    mutant=edits(
        (_SHAPES, "gamma.size != width or beta.size != width"),
        (
            _DY_SHAPE,
            f"if dy.size == x_hat.size:\n        dy = dy.reshape(x_hat.shape)\n    {_DY_SHAPE}",
        ),
    ),
    dimension="robustness",
    seen=WRITTEN_BLIND,
)
def shapes_compared_by_size(submission: Submission, rng: Rng) -> None:
    """Fails only if nothing is refused: one array alone is another bug."""
    p = plain(rng)
    _, cache = forward(submission, p)
    B, T, D = p.dy.shape
    for entry, args in (
        ("layer_norm_forward", p._replace(gamma=p.gamma[None]).args),
        ("layer_norm_forward", p._replace(beta=p.beta[None]).args),
        ("layer_norm_backward", (p.dy.reshape(T, B, D), cache)),
    ):
        try:
            getattr(submission, entry)(*args)
        except SubmissionRaised:
            return
    shapes = "gamma and beta of shape (1, D), dy of shape (T, B, D)"
    expect.that(False, f"accepted what ValueError or TypeError should refuse: {shapes}")
