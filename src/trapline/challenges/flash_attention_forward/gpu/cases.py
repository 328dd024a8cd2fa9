"""The contract of flash_attention_forward on the GPU, and its measures."""

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

Array = np.ndarray
DTYPES = ("float32", "float16")


def _outputs(q: Array, *_: Any) -> tuple[Output, ...]:
    return Output(q.shape, dtype_name(q)), Output(q.shape[:3], "float32")


ENTRIES = {"flash_attention": Entry(_outputs)}


class Problem(NamedTuple):
    q: Array
    k: Array
    v: Array
    causal: bool = False


class Sizes(NamedTuple):
    """B batches, H query heads, G key heads, T queries, S keys, width D."""

    B: int = 1
    H: int = 1
    G: int = 1
    T: int = 5
    S: int = 7
    D: int = 16


def problem(rng: Rng, sizes: Sizes, dtype: str = "float32", causal: bool = False) -> Problem:
    B, H, G, T, S, D = sizes
    shapes = (B, H, T, D), (B, G, S, D), (B, G, S, D)
    q, k, v = (rounded(rng.standard_normal(shape), dtype) for shape in shapes)
    return Problem(q, k, v, causal)


def check(answer: Any, p: Problem) -> None:
    """The answer is right for this problem."""
    out, lse = answer
    want = oracle.attention(*p)
    dtype = dtype_name(p.q)
    lost = 64 * FLOAT32_EPS * want.steepness
    near(lse, want.lse, dtype="float32", slack=lost, what="lse")
    # Weights may be rounded to the dtype before they meet the values.
    slack = (2 * EPS[dtype] + lost[..., None]) * want.size
    near(out, want.out, dtype=dtype, slack=slack, what="out")


def ask(submission: Submission, p: Problem) -> None:
    check(submission.flash_attention(*p), p)


@case
def matches_float64(submission: Submission, rng: Rng) -> None:
    for dtype in DTYPES:
        ask(submission, problem(rng, Sizes(B=2, H=2, G=2, T=9, S=40), dtype))
        ask(submission, problem(rng, Sizes(T=40, S=40, D=32), dtype, causal=True))


@case
def matches_float64_in_bfloat16(submission: Submission, rng: Rng) -> None:
    for causal in (False, True):
        ask(submission, problem(rng, Sizes(2, 4, 2, 300, 300, 128), "bfloat16", causal))
        ask(submission, problem(rng, Sizes(1, 2, 2, 130, 259, 64), "bfloat16", causal))


@case
def many_tiles(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(T=140, S=70), "float16"))
    ask(submission, problem(rng, Sizes(T=40, S=210), causal=True))


@case
def grouped_heads(submission: Submission, rng: Rng) -> None:
    for heads, groups in ((4, 2), (6, 1), (3, 3)):
        ask(submission, problem(rng, Sizes(H=heads, G=groups), "float16", causal=True))


@case
def one_query_or_one_key(submission: Submission, rng: Rng) -> None:
    for T, S in ((1, 1), (1, 50), (50, 1)):
        ask(submission, problem(rng, Sizes(T=T, S=S)))
        ask(submission, problem(rng, Sizes(T=T, S=S), "float16", causal=True))


@case
def any_width(submission: Submission, rng: Rng) -> None:
    for width in (8, 24, 80, 256):
        ask(submission, problem(rng, Sizes(T=9, S=17, D=width), "float16"))


@case
def views_with_strides(submission: Submission, rng: Rng) -> None:
    """Heads beside each other in a row, as a projection gives them, and padded rows."""
    p = problem(rng, Sizes(B=2, H=2, G=2, T=9, S=9))
    q, k, v = (np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in p[:3])
    ask(submission, Problem(q, k, v, True))
    ask(submission, Problem(padded(p.q, 8), padded(p.k, 16), padded(p.v, 24)))


@case
def queries_without_keys(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(T=40, S=11), "float16", causal=True))
    ask(submission, problem(rng, Sizes(T=4, S=0)))


@case
def nothing_to_do(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(B=0)))
    ask(submission, problem(rng, Sizes(T=0)))


@case
def repeated_calls_agree_in_every_bit(submission: Submission, rng: Rng) -> None:
    repeats_bit_for_bit(submission, "flash_attention", *problem(rng, Sizes(T=20, S=90)))


def precision(submission: Submission, rng: Rng) -> list[Precision]:
    """float32 and float16, compared with float32 in NumPy."""
    measured = []
    for dtype in DTYPES:
        p = problem(rng, Sizes(H=2, G=2, T=128, S=128, D=64), dtype)
        out, lse = submission.flash_attention(*p)
        want = oracle.attention(*p)
        careful_out, careful_lse = _careful(p)
        measured.append(Precision(out, want.out, careful_out.astype(out.dtype)))
        measured.append(Precision(lse, want.lse, careful_lse))
    return measured


def _careful(p: Problem) -> tuple[Array, Array]:
    """In float32, weights rounded to the dtype before they meet the values."""
    q, k, v = (np.asarray(part, np.float32) for part in p[:3])
    scores = np.einsum("bhtd,bhsd->bhts", q, k) * np.float32(q.shape[3] ** -0.5)
    largest = scores.max(axis=3, keepdims=True)
    weights = np.exp(scores - largest)
    total = weights.sum(axis=3, keepdims=True)
    narrow = weights.astype(p.q.dtype).astype(np.float32)
    return np.einsum("bhts,bhsd->bhtd", narrow, v) / total, (largest + np.log(total))[..., 0]


def _timed(B: int, H: int, T: int, D: int, causal: bool) -> Timed:
    def make(rng: Rng) -> tuple[Any, ...]:
        return *(noise(rng, (B, H, T, D), "bfloat16") for _ in range(3)), causal

    work = 4.0 * B * H * T * T * D / (2 if causal else 1)
    bytes_each = 2.0 * B * H * T * D
    return Timed(
        name=f"B {B}, H {H}, T = S = {T}, D {D} bfloat16, {'causal' if causal else 'full'}",
        entry="flash_attention",
        make=make,
        light={"read": 3 * bytes_each, "write": bytes_each, "bfloat16": work},
    )


def timed() -> list[Timed]:
    """A long context in both kinds, and many short ones."""
    return [
        _timed(2, 16, 4096, 128, causal=True),
        _timed(2, 16, 4096, 128, causal=False),
        _timed(32, 16, 512, 64, causal=True),
    ]
