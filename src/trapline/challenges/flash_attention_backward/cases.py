"""The contract of `flash_attention_backward` and its forward, and what is measured of them."""

from typing import Any

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.remembered import remembered
from trapline.arena.judge.traps import Call, Precision, case, robustness
from trapline.arena.process.proxy import Submission
from trapline.arena.scope import WHOLE, Scope
from trapline.challenges.flash_attention_forward.cases import (
    REFUSALS,
    Arrays,
    Shape,
    attends,
    form,
    in_scope,
    pair,
    rounding,
)
from trapline.challenges.flash_attention_forward.cases import agrees as attention_agrees
from trapline.gold.attention import oracle

attention = remembered(oracle.attention)
attention_backward = remembered(oracle.attention_backward)
#: dout, q, k, v, out, lse: the arguments of the backward pass.
Saved = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
NAMES = ("dq", "dk", "dv")
#: Checks that take seconds: mutants of other bugs are not asked them.
SLOW = frozenset(
    {
        "score-matrix-in-memory",
        "mask-for-all-pairs",
        "forward-score-matrix-in-memory",
        "forward-mask-for-all-pairs",
        "gradient-parts-collected",
    }
)


def saved(dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> Saved:
    """The arguments of a backward pass, with out and lse from the oracle in the inputs' dtype."""
    out, lse = attention(q, k, v, causal=causal)
    return dout, q, k, v, out.astype(q.dtype), lse.astype(q.dtype)


def saved_in_scope(scope: Scope, arguments: Saved, causal: bool) -> Saved:
    """The same situation within what the prompt asks for: equal heads, equal lengths."""
    dout, q, k, v, _, _ = arguments
    narrow = in_scope(scope, q, k, v)
    if all(new.shape == old.shape for new, old in zip(narrow, (q, k, v), strict=True)):
        return arguments
    rows = np.arange(narrow[0].shape[2]) % q.shape[2]
    return saved(np.take(dout, rows, axis=2), *narrow, causal)


def draw(shape: Shape, rng: np.random.Generator, causal: bool, dtype: Any = np.float64) -> Saved:
    """The arguments of a backward pass with standard normal inputs."""
    q, k, v = shape.draw(rng, dtype)
    return saved(rng.standard_normal(q.shape).astype(dtype), q, k, v, causal)


@remembered
def reach(dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> Arrays:
    """The gradients' sums with every term taken positive: what rounding errors are relative to."""
    (H, T, D), (G, S) = q.shape[1:], k.shape[1:3]
    wide_k, wide_v = (np.repeat(x.astype(np.float64), H // G, axis=1) for x in (k, v))
    seen = oracle.visible(np.arange(T), np.arange(S), S - T, causal, None)
    lse = attention(q, k, v, causal=causal)[1][..., None]
    scores = q.astype(np.float64) @ wide_k.swapaxes(2, 3) * D**-0.5
    weights = np.exp(np.where(seen, scores - np.where(np.isneginf(lse), 0.0, lse), -np.inf))
    slopes = np.abs(dout).astype(np.float64) @ np.abs(wide_v).swapaxes(2, 3)
    dscores = weights * (slopes + (weights * slopes).sum(axis=-1, keepdims=True)) * D**-0.5
    per_head = (
        dscores @ np.abs(wide_k),
        dscores.swapaxes(2, 3) @ np.abs(q),
        weights.swapaxes(2, 3) @ np.abs(dout),
    )
    grouped = [x.reshape(len(x), G, H // G, S, D).sum(axis=2) for x in per_head[1:]]
    return per_head[0], grouped[0], grouped[1]


def agrees(answer: Any, arguments: Saved, causal: bool, scope: Scope = WHOLE) -> None:
    """The answer is (dq, dk, dv) of the right shapes, dtypes and values."""
    dout, q, k, v, _, _ = arguments
    got = triple(answer)
    want = attention_backward(dout, q, k, v, causal=causal)
    # Rounding of the weights, of the row-wise dot product and of sums over all rows of a group.
    rows = q.shape[1] // k.shape[1] * q.shape[2]
    eps = float(np.finfo(q.dtype).eps)
    slack = max(2.0 * rounding(q, k) + 4.0 * eps * (rows + q.shape[3]), scope.tolerance)
    sizes = reach(dout, q, k, v, causal)
    for name, given, wanted, size in zip(NAMES, got, want, sizes, strict=True):
        form(scope, given, wanted, q.dtype, name)
        expect.close(given, wanted, atol=slack * float(np.max(size, initial=1e-3)), what=name)


def triple(answer: Any) -> tuple[Any, Any, Any]:
    """The three parts of an answer."""
    right = isinstance(answer, tuple | list) and len(answer) == 3
    expect.that(right, "the answer is not (dq, dk, dv)")
    return answer[0], answer[1], answer[2]


def differentiates(
    submission: Submission, arguments: Saved, *, causal: bool = False, tile: int = 64
) -> None:
    """The submission's gradients of these arguments are right."""
    arguments = saved_in_scope(submission.scope, arguments, causal)
    answer = submission.flash_attention_backward(*arguments, causal=causal, tile=tile)
    agrees(answer, arguments, causal, submission.scope)


@case
def forward(submission: Submission, rng: np.random.Generator) -> None:
    """out and lse: full and causal, both dtypes, grouped heads, T ≠ S, rows without keys."""
    for causal in (False, True):
        for dtype in (np.float64, np.float32):
            inputs = Shape(B=2, H=4, G=2, T=20, S=20, D=8).draw(rng, dtype)
            attends(submission, *inputs, causal=causal, tile=8)
        for T, S in ((3, 17), (17, 3), (5, 0), (0, 5)):
            if T * S or submission.scope.has("empty_inputs"):
                attends(submission, *Shape(T=T, S=S).draw(rng), causal=causal, tile=4)


@case
def full_gradients(submission: Submission, rng: np.random.Generator) -> None:
    """Every query sees every key; several tiles a side, in both dtypes."""
    for dtype in (np.float64, np.float32):
        arguments = draw(Shape(B=2, H=3, G=3, T=20, S=20, D=8), rng, False, dtype)
        differentiates(submission, arguments, tile=8)


@case
def causal_gradients(submission: Submission, rng: np.random.Generator) -> None:
    """A query sees no later key; several tiles a side, in both dtypes."""
    for dtype in (np.float64, np.float32):
        arguments = draw(Shape(B=2, H=2, G=2, T=20, S=20, D=8), rng, True, dtype)
        differentiates(submission, arguments, causal=True, tile=8)


@case
def gradients_are_derivatives(submission: Submission, rng: np.random.Generator) -> None:
    """Small steps of the submission's own forward agree with its own gradients."""
    inputs = in_scope(submission.scope, *Shape(H=2, G=1, T=5, S=6).draw(rng))
    dout = rng.standard_normal(inputs[0].shape)

    def value(*moved: np.ndarray) -> float:
        out, _ = pair(submission.flash_attention(*moved, causal=True, tile=4))
        return float(np.sum(dout * expect.array(out, shape=dout.shape, dtype=dout.dtype)))

    out, lse = pair(submission.flash_attention(*inputs, causal=True, tile=4))
    answer = submission.flash_attention_backward(dout, *inputs, out, lse, causal=True, tile=4)
    for which, (name, grad) in enumerate(zip(NAMES, triple(answer), strict=True)):
        expect.array(grad, shape=inputs[which].shape, dtype=np.float64, what=name)
        direction = rng.standard_normal(grad.shape)
        direction /= np.linalg.norm(direction)
        slope = 0.0
        # Central differences of two sizes, combined so that their leading errors cancel.
        for size, factor in ((1e-3, 4 / 3), (2e-3, -1 / 3)):
            up, down = list(inputs), list(inputs)
            up[which], down[which] = up[which] + size * direction, down[which] - size * direction
            slope += factor * (value(*up) - value(*down)) / (2 * size)
        got = float(np.sum(grad * direction))
        expect.that(
            abs(got - slope) <= 1e-6 * (1.0 + abs(slope)),
            f"{name} along a random direction is {got:.9g}, small steps say {slope:.9g}",
        )


@case
def gradients_of_unequal_lengths(submission: Submission, rng: np.random.Generator) -> None:
    """T ≠ S both ways; rows that see no key neither get nor give a gradient."""
    for T, S in ((5, 19), (19, 5), (1, 23), (23, 1)):
        for causal in (False, True):
            arguments = draw(Shape(T=T, S=S), rng, causal)
            differentiates(submission, arguments, causal=causal, tile=4)


@case
def gradients_of_grouped_heads(submission: Submission, rng: np.random.Generator) -> None:
    """dk and dv are summed over all query heads of a group."""
    for H, G in ((6, 3), (8, 2), (5, 1)):
        arguments = draw(Shape(B=2, H=H, G=G, T=7, S=9), rng, True)
        differentiates(submission, arguments, causal=True, tile=4)


@case
def tile_is_only_a_size_of_work(submission: Submission, rng: np.random.Generator) -> None:
    """One row at a time or everything at once: the same gradients up to rounding."""
    for causal in (False, True):
        arguments = draw(Shape(T=11, S=14), rng, causal)
        for tile in (1, 3, 7, 11, 14, 64):
            differentiates(submission, arguments, causal=causal, tile=tile)


@case
def defaults(submission: Submission, rng: np.random.Generator) -> None:
    """Without `causal` and `tile` it is full attention, also beyond one tile of 64."""
    arguments = draw(Shape(T=66, S=70, D=3), rng, False)
    agrees(submission.flash_attention_backward(*arguments), arguments, causal=False)
    q, k, v = arguments[1:4]
    attention_agrees(submission.flash_attention(q, k, v), q, k, v, causal=False)


@case
def empty_inputs(submission: Submission, rng: np.random.Generator) -> None:
    """No batch, no query or no key is an ordinary call."""
    for shape in (Shape(B=0), Shape(T=0), Shape(S=0), Shape(T=0, S=0)):
        for causal in (False, True):
            arguments = draw(shape, rng, causal, np.float32)
            differentiates(submission, arguments, causal=causal, tile=4)


@robustness
def bad_input_is_refused(submission: Submission, rng: np.random.Generator) -> None:
    """Ranks, shapes and dtypes that do not fit are refused, forward and backward."""
    dout, q, k, v, out, lse = draw(Shape(B=2, H=4, G=2, T=5, S=6, D=4), rng, False)
    wrong = [
        (dout, q[0], k, v, out, lse),
        (dout, q[None], k, v, out, lse),
        (dout, q, k[0], v[0], out, lse),
        (dout, q, k[..., :3], v[..., :3], out, lse),
        (dout, q, k, v[:, :, :5], out, lse),
        (dout, q, k[:1], v[:1], out, lse),
        (dout, q.astype(np.int64), k.astype(np.int64), v.astype(np.int64), out, lse),
        (dout[..., :3], q, k, v, out, lse),
        (dout, q, k, v, out[:, :, :4], lse),
        (dout, q, k, v, out, lse[:, :3]),
    ]
    for arrays in wrong:
        expect.raises(REFUSALS, submission.flash_attention_backward, *arrays)
        if arrays[1] is not q or arrays[2] is not k or arrays[3] is not v:
            inputs = arrays[1:4]
            expect.raises(REFUSALS, submission.flash_attention, *inputs)


@case
def calls_are_independent(submission: Submission, rng: np.random.Generator) -> None:
    """The same shapes with other values, then a smaller problem, then the first again."""
    first = draw(Shape(T=10, S=10), rng, True)
    second = draw(Shape(T=10, S=10), rng, True)
    small = draw(Shape(T=3, S=3), rng, True)
    for arguments in (first, second, small, first):
        attends(submission, *arguments[1:4], causal=True, tile=4)
        differentiates(submission, arguments, causal=True, tile=4)


# --- measures -----------------------------------------------------------------------------------


def precision(submission: Submission, rng: np.random.Generator) -> list[Precision]:
    """float32, logits of several units, many tiles; against untiled float32 gradients."""
    found = []
    for causal in (False, True):
        q, k, v = Shape(H=2, G=1, T=128, S=128, D=32).draw(rng, np.float32)
        arguments = saved(rng.standard_normal(q.shape).astype(q.dtype), 2 * q, k, v, causal)
        answer = submission.flash_attention_backward(*arguments, causal=causal, tile=32)
        exact = oracle.attention_backward(*arguments[:4], causal=causal)
        careful = _untiled(*arguments, causal=causal)
        parts = zip(triple(answer), exact, careful, strict=True)
        found += [Precision(got, truth, same) for got, truth, same in parts]
    return found


def _untiled(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    causal: bool,
) -> Arrays:
    """The textbook formula in the inputs' own dtype."""
    (H, T, D), (G, S) = q.shape[1:], k.shape[1:3]
    wide_k, wide_v = np.repeat(k, H // G, axis=1), np.repeat(v, H // G, axis=1)
    weights = np.exp(q @ wide_k.swapaxes(2, 3) * D**-0.5 - lse[..., None])
    if causal:
        weights = np.tril(weights, k=S - T)
    dweights = dout @ wide_v.swapaxes(2, 3)
    dscores = weights * (dweights - (dout * out).sum(axis=-1, keepdims=True)) * D**-0.5
    per_head = dscores.swapaxes(2, 3) @ q, weights.swapaxes(2, 3) @ dout
    dk, dv = (x.reshape(len(x), G, H // G, S, D).sum(axis=2) for x in per_head)
    return dscores @ wide_k, dk, dv


#: Of a call of `speed`: five products of half of the scores, two operations each.
OPERATIONS = 10 * 2 * 384 * 384 * 64 // 2


def speed(submission: Submission, rng: np.random.Generator) -> Call:  # noqa: ARG001
    """Two heads over one, causal, 384 positions, float32."""
    arguments = draw(Shape(H=2, G=1, T=384, S=384, D=64), rng, True, np.float32)
    return Call(
        "flash_attention_backward",
        arguments,
        {"causal": True, "tile": 64},
        check=lambda answer: agrees(answer, arguments, causal=True),
    )


def memory(submission: Submission, rng: np.random.Generator, size: int) -> Call:
    """T = S = size: a score matrix has size² elements, everything else is linear and small."""
    q, k, v = Shape(T=size, S=size, D=4).draw(rng, np.float32)
    weights = np.tril(np.exp(q @ k.swapaxes(2, 3) * np.float32(0.5)))
    total = weights.sum(axis=-1)
    out, lse = weights @ v / total[..., None], np.log(total)
    arguments = rng.standard_normal(q.shape).astype(q.dtype), q, k, v, out, lse
    some = [int(place) for place in rng.choice(size, 4, replace=False)]
    return Call(
        "flash_attention_backward",
        arguments,
        {"causal": True, "tile": 64},
        check=lambda answer: _agrees_in_places(answer, arguments, some, submission.scope),
    )


def _agrees_in_places(answer: Any, arguments: Saved, some: list[int], scope: Scope) -> None:
    """Gradients of a few positions, each made from the saved out and lse alone."""
    dout, q, k, v, out, lse = arguments
    got = triple(answer)
    for name, one in zip(NAMES, got, strict=True):
        form(scope, one, q, q.dtype, name)
    for place in some:
        here, past, rest = slice(place, place + 1), slice(place + 1), slice(place, None)
        dq, _, _ = oracle.attention_backward_tiled(
            *(dout[:, :, here], q[:, :, here], k[:, :, past], v[:, :, past]),
            *(out[:, :, here], lse[:, :, here]),
            tile=1024,
        )
        _, dk, dv = oracle.attention_backward_tiled(
            *(dout[:, :, rest], q[:, :, rest], k[:, :, here], v[:, :, here]),
            *(out[:, :, rest], lse[:, :, rest]),
            tile=1024,
        )
        for name, one, want in zip(NAMES, got, (dq, dk, dv), strict=True):
            expect.close(one[:, :, here], want, atol=1e-2, what=name)
