"""The contract of flash_attention_backward on the GPU, and its measures."""

from typing import Any, NamedTuple

import numpy as np

from trapline.arena.gpu.checks import (
    EPS,
    FLOAT32_EPS,
    Rng,
    near,
    noise,
    padded,
    repeats_bit_for_bit,
)
from trapline.arena.gpu.contract import Entry, Output, Timed, dtype_name, rounded
from trapline.arena.judge.traps import Precision, case
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_forward.gpu import oracle
from trapline.challenges.flash_attention_forward.gpu.cases import Sizes
from trapline.challenges.flash_attention_forward.gpu.cases import problem as forward_problem

Array = np.ndarray
DTYPES = ("float32", "float16")
#: Weights and slopes may be rounded to float16 on the way, where small ones lose digits.
HALF_FLOOR = {"float32": 0.0, "float16": 2.0**-24, "bfloat16": 0.0}


def _outputs(_dout: Array, q: Array, k: Array, v: Array, *_: Any) -> tuple[Output, ...]:
    return tuple(Output(part.shape, dtype_name(part)) for part in (q, k, v))


ENTRIES = {"flash_attention_backward": Entry(_outputs)}


class Problem(NamedTuple):
    dout: Array
    q: Array
    k: Array
    v: Array
    causal: bool = False


class Gradients(NamedTuple):
    """Exact gradients, and the sizes that the law of tolerance is relative to."""

    values: tuple[Array, Array, Array]
    sizes: tuple[Array, Array, Array]
    steepness: float


def problem(rng: Rng, sizes: Sizes, dtype: str = "float32", causal: bool = False) -> Problem:
    q, k, v, _ = forward_problem(rng, sizes, dtype)
    return Problem(rounded(rng.standard_normal(q.shape), dtype), q, k, v, causal)


def arguments(p: Problem) -> tuple[Any, ...]:
    """The problem with the results of a forward pass, rounded as such a pass gives them."""
    saved = oracle.attention(p.q, p.k, p.v, p.causal)
    out = rounded(np.ascontiguousarray(saved.out), dtype_name(p.q))
    lse = np.ascontiguousarray(saved.lse, np.float32)
    return p.dout, p.q, p.k, p.v, out, lse, p.causal


def gradients(p: Problem) -> Gradients:
    saved = oracle.attention(p.q, p.k, p.v, p.causal)
    dout, q, k, v = (np.asarray(part, np.float64) for part in p[:4])
    heads, scale = q.shape[1] // max(k.shape[1], 1), q.shape[3] ** -0.5
    k, v = np.repeat(k, heads, axis=1), np.repeat(v, heads, axis=1)
    weights = saved.weights
    toward = np.einsum("bhtd,bhsd->bhts", dout, v)
    minus = (saved.out * dout).sum(axis=3)
    slopes = weights * (toward - minus[..., None]) * scale
    exact = _three(slopes, weights, q, k, dout, heads)
    floor = HALF_FLOOR[dtype_name(p.q)]
    reach = np.einsum("bhtd,bhsd->bhts", np.abs(dout), np.abs(v))
    reach += (np.abs(saved.out) * np.abs(dout)).sum(axis=3)[..., None]
    size = _three(
        weights * reach * scale + floor, weights + floor, np.abs(q), np.abs(k), np.abs(dout), heads
    )
    return Gradients(exact, size, float(saved.steepness.max(initial=1.0)))


def _three(
    slopes: Array, weights: Array, q: Array, k: Array, dout: Array, heads: int
) -> tuple[Array, Array, Array]:
    """dq, and dk and dv summed over the query heads of a group."""

    def grouped(x: Array) -> Array:
        B, H, S, D = x.shape
        return np.asarray(x.reshape(B, H // heads, heads, S, D).sum(axis=2))

    dq = np.einsum("bhts,bhsd->bhtd", slopes, k)
    dk = grouped(np.einsum("bhts,bhtd->bhsd", slopes, q))
    return dq, dk, grouped(np.einsum("bhts,bhtd->bhsd", weights, dout))


def check(answer: Any, p: Problem) -> None:
    want, dtype = gradients(p), dtype_name(p.q)
    lost = 4 * EPS[dtype] + 64 * FLOAT32_EPS * want.steepness
    for name, got, exact, size in zip(
        ("dq", "dk", "dv"), answer, want.values, want.sizes, strict=True
    ):
        near(got, exact, dtype=dtype, slack=lost * size, what=name)


def ask(submission: Submission, p: Problem) -> None:
    check(submission.flash_attention_backward(*arguments(p)), p)


@case
def matches_float64(submission: Submission, rng: Rng) -> None:
    for dtype in DTYPES:
        ask(submission, problem(rng, Sizes(B=2, H=2, G=2, T=9, S=20), dtype))
        ask(submission, problem(rng, Sizes(T=36, S=36, D=32), dtype, causal=True))


@case
def matches_float64_in_bfloat16(submission: Submission, rng: Rng) -> None:
    for causal in (False, True):
        ask(submission, problem(rng, Sizes(2, 4, 2, 200, 200, 128), "bfloat16", causal))
        ask(submission, problem(rng, Sizes(1, 2, 2, 130, 159, 64), "bfloat16", causal))


@case
def many_tiles(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(T=70, S=100), "float16"))
    ask(submission, problem(rng, Sizes(T=40, S=70), causal=True))


@case
def grouped_heads(submission: Submission, rng: Rng) -> None:
    for heads, groups in ((4, 2), (3, 1)):
        ask(submission, problem(rng, Sizes(H=heads, G=groups), "float16", causal=True))


@case
def one_query_or_one_key(submission: Submission, rng: Rng) -> None:
    for T, S in ((1, 1), (1, 20), (20, 1)):
        ask(submission, problem(rng, Sizes(T=T, S=S), causal=T == 1))


@case
def any_width(submission: Submission, rng: Rng) -> None:
    for width in (8, 24, 256):
        ask(submission, problem(rng, Sizes(T=6, S=9, D=width), "float16"))


@case
def views_with_strides(submission: Submission, rng: Rng) -> None:
    p = problem(rng, Sizes(B=2, H=2, G=2, T=5, S=5))
    dout, q, k, v = (
        np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in p[:4]
    )
    ask(submission, Problem(dout, q, k, v, True))
    ask(submission, p._replace(q=padded(p.q, 8), k=padded(p.k, 16), v=padded(p.v, 24)))


@case
def queries_without_keys(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(T=20, S=7), causal=True))


@case
def no_queries_or_no_keys(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(T=0)))
    ask(submission, problem(rng, Sizes(S=0)))
    ask(submission, problem(rng, Sizes(B=0)))


@case
def repeated_calls_agree_in_every_bit(submission: Submission, rng: Rng) -> None:
    p = problem(rng, Sizes(H=2, T=20, S=40))
    repeats_bit_for_bit(submission, "flash_attention_backward", *arguments(p))


def precision(submission: Submission, rng: Rng) -> list[Precision]:
    """float32 and float16, compared with float32 in NumPy."""
    measured = []
    for dtype in DTYPES:
        p = problem(rng, Sizes(H=2, G=2, T=96, S=96, D=64), dtype)
        given = arguments(p)
        answers = submission.flash_attention_backward(*given)
        measured += [
            Precision(got, exact, careful.astype(got.dtype))
            for got, exact, careful in zip(
                answers, gradients(p).values, _careful(given), strict=True
            )
        ]
    return measured


def _careful(given: tuple[Any, ...]) -> tuple[Array, Array, Array]:
    """In float32; weights and slopes are rounded to the dtype before they are multiplied."""
    dtype = given[1].dtype
    dout, q, k, v, out, lse = (np.asarray(part, np.float32) for part in given[:6])
    scale = np.float32(q.shape[3] ** -0.5)
    weights = np.exp(np.einsum("bhtd,bhsd->bhts", q, k) * scale - lse[..., None])
    minus = (out * dout).sum(axis=3)
    slopes = weights * (np.einsum("bhtd,bhsd->bhts", dout, v) - minus[..., None])
    slopes, weights = (x.astype(dtype).astype(np.float32) for x in (slopes, weights))
    dq, dk, dv = _three(slopes, weights, q, k, dout, 1)
    return dq * scale, dk * scale, dv


def _timed(B: int, H: int, T: int, D: int, causal: bool) -> Timed:
    def make(rng: Rng) -> tuple[Any, ...]:
        """`out` and `lse` only look like those of a forward pass: time does not depend on them."""
        parts = [noise(rng, (B, H, T, D), "bfloat16") for _ in range(4)]
        out = noise(rng, (B, H, T, D), "bfloat16", scale=0.1)
        seen = np.arange(1, T + 1) if causal else np.full(T, T)
        lse = np.broadcast_to(np.log(seen) + 0.5, (B, H, T)).astype(np.float32)
        return *parts, out, lse, causal

    work = 10.0 * B * H * T * T * D / (2 if causal else 1)
    bytes_each = 2.0 * B * H * T * D
    return Timed(
        name=f"B {B}, H {H}, T = S = {T}, D {D} bfloat16, {'causal' if causal else 'full'}",
        entry="flash_attention_backward",
        make=make,
        light={"read": 5 * bytes_each, "write": 3 * bytes_each, "bfloat16": work},
        tolerance=0.04,
    )


def timed() -> list[Timed]:
    """A long context in both kinds."""
    return [_timed(2, 16, 2048, 128, causal=True), _timed(2, 16, 2048, 64, causal=False)]
