"""The contract of layer_norm_backward on the GPU, and its measures."""

from typing import Any, NamedTuple

import numpy as np

from trapline.arena.gpu.checks import FLOAT32_EPS, Rng, near, noise, padded, repeats_bit_for_bit
from trapline.arena.gpu.contract import Entry, Output, Timed, dtype_name, rounded
from trapline.arena.judge.traps import Precision, case
from trapline.arena.process.proxy import Submission

Array = np.ndarray
DTYPES = ("float32", "float16")


def _forward_outputs(x: Array, *_: Any) -> tuple[Output, ...]:
    rows = Output((len(x),), "float32")
    return Output(x.shape, dtype_name(x)), rows, rows


def _backward_outputs(_dy: Array, x: Array, *_: Any) -> tuple[Output, ...]:
    dtype = dtype_name(x)
    return Output(x.shape, dtype), Output(x.shape[1:], dtype), Output(x.shape[1:], dtype)


ENTRIES = {
    "layer_norm_forward": Entry(_forward_outputs),
    "layer_norm_backward": Entry(_backward_outputs),
}


class Problem(NamedTuple):
    dy: Array
    x: Array
    gamma: Array
    beta: Array
    eps: float = 1e-5

    @property
    def dtype(self) -> str:
        return dtype_name(self.x)


def problem(rng: Rng, rows: int, width: int, dtype: str = "float32", shift: float = 0.5) -> Problem:
    dy, x = rng.standard_normal((2, rows, width))
    gamma, beta = rng.standard_normal((2, width))
    return Problem(
        rounded(dy, dtype),
        rounded(x + shift, dtype),
        rounded(1.0 + 0.5 * gamma, dtype),
        rounded(beta, dtype),
    )


def statistics(p: Problem) -> tuple[Array, Array]:
    """Mean and 1 / standard deviation of every row in float64."""
    wide = np.asarray(p.x, np.float64)
    mean = wide.mean(axis=1)
    variance = np.mean((wide - mean[:, None]) ** 2, axis=1)
    return mean, 1.0 / np.sqrt(variance + p.eps)


def check_forward(answer: Any, p: Problem) -> None:
    y, mean, rstd = answer
    want_mean, want_rstd = statistics(p)
    wide, gamma, beta = (np.asarray(part, np.float64) for part in (p.x, p.gamma, p.beta))
    normal = (wide - want_mean[:, None]) * want_rstd[:, None]
    # A mean far from 0 costs the digits that it shares with x.
    lost = 64 * FLOAT32_EPS * (1 + np.abs(want_mean) * want_rstd)
    size = np.abs(wide).max(axis=1, initial=0.0)
    near(mean, want_mean, dtype="float32", slack=16 * FLOAT32_EPS * size, what="mean")
    near(rstd, want_rstd, dtype="float32", slack=lost * want_rstd, what="rstd")
    slack = lost[:, None] * (np.abs(gamma) * (1 + np.abs(normal)) + np.abs(beta))
    near(y, normal * gamma + beta, dtype=p.dtype, slack=slack, what="y")


def gradients(p: Problem, mean: Array, rstd: Array) -> tuple[Array, Array, Array]:
    """dx, dgamma and dbeta in float64, with these means and deviations."""
    dy, x, gamma = (np.asarray(part, np.float64) for part in (p.dy, p.x, p.gamma))
    scale = np.asarray(rstd, np.float64)[:, None]
    normal = (x - np.asarray(mean, np.float64)[:, None]) * scale
    weighted = dy * gamma
    shift = weighted.mean(axis=1, keepdims=True)
    slope = (weighted * normal).mean(axis=1, keepdims=True)
    dx = (weighted - shift - normal * slope) * scale
    return dx, (dy * normal).sum(axis=0), dy.sum(axis=0)


def check_backward(answer: Any, p: Problem, mean: Array, rstd: Array) -> None:
    dx, dgamma, dbeta = answer
    want = gradients(p, mean, rstd)
    dy, gamma = (np.abs(np.asarray(part, np.float64)) for part in (p.dy, p.gamma))
    scale = np.asarray(rstd, np.float64)[:, None]
    normal = np.abs(np.asarray(p.x, np.float64) - np.asarray(mean, np.float64)[:, None]) * scale
    lost = 64 * FLOAT32_EPS
    largest = (dy * gamma).max(axis=1, keepdims=True, initial=0.0)
    near(dx, want[0], dtype=p.dtype, slack=lost * scale * largest * (1 + normal) ** 2, what="dx")
    near(dgamma, want[1], dtype=p.dtype, slack=lost * (dy * normal).sum(axis=0), what="dgamma")
    near(dbeta, want[2], dtype=p.dtype, slack=lost * dy.sum(axis=0), what="dbeta")


def forward(submission: Submission, p: Problem) -> None:
    check_forward(submission.layer_norm_forward(p.x, p.gamma, p.beta, p.eps), p)


def backward_arguments(p: Problem) -> tuple[Array, ...]:
    mean, rstd = (part.astype(np.float32) for part in statistics(p))
    return p.dy, p.x, p.gamma, mean, rstd


def backward(submission: Submission, p: Problem) -> None:
    given = backward_arguments(p)
    check_backward(submission.layer_norm_backward(*given), p, given[3], given[4])


def ask(submission: Submission, p: Problem) -> None:
    """Both passes are right for this problem."""
    forward(submission, p)
    backward(submission, p)


@case
def matches_float64(submission: Submission, rng: Rng) -> None:
    for dtype in DTYPES:
        for rows, width in ((3, 8), (1, 1), (5, 37), (2, 300)):
            ask(submission, problem(rng, rows, width, dtype))


@case
def matches_float64_in_bfloat16(submission: Submission, rng: Rng) -> None:
    for rows, width in ((3, 8), (5, 37), (70, 4096), (3, 16384)):
        ask(submission, problem(rng, rows, width, "bfloat16"))


@case
def wide_rows(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, 2, 1500))


@case
def many_rows(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, 270, 12))


@case
def padded_rows(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 4, 21)
    ask(submission, p._replace(x=padded(p.x), dy=padded(p.dy, 11)))


@case
def constant_rows(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 3, 16)
    p.x[1] = 2.5
    ask(submission, p)


@case
def no_rows(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, 0, 9))


@case
def repeated_calls_agree_in_every_bit(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 9, 33)
    repeats_bit_for_bit(submission, "layer_norm_forward", p.x, p.gamma, p.beta, p.eps)
    repeats_bit_for_bit(submission, "layer_norm_backward", *backward_arguments(p))


def precision(submission: Submission, rng: Rng) -> list[Precision]:
    """Both passes in float32 and float16, compared with float32 in NumPy."""
    measured = []
    for dtype in DTYPES:
        p = problem(rng, 64, 1024, dtype)
        given = backward_arguments(p)
        answers = submission.layer_norm_backward(*given)
        exact = gradients(p, given[3], given[4])
        careful = _careful(p, given[3], given[4])
        measured += [
            Precision(got, want, own.astype(got.dtype))
            for got, want, own in zip(answers, exact, careful, strict=True)
        ]
    return measured


def _careful(p: Problem, mean: Array, rstd: Array) -> tuple[Array, Array, Array]:
    dy, x, gamma = (np.asarray(part, np.float32) for part in (p.dy, p.x, p.gamma))
    normal = (x - mean[:, None]) * rstd[:, None]
    weighted = dy * gamma
    shift = weighted.mean(axis=1, keepdims=True)
    slope = (weighted * normal).mean(axis=1, keepdims=True)
    dx = (weighted - shift - normal * slope) * rstd[:, None]
    return dx, (dy * normal).sum(axis=0), dy.sum(axis=0)


def _timed(rows: int, width: int, dtype: str) -> Timed:
    size = 4 if dtype == "float32" else 2

    def make(rng: Rng) -> tuple[Any, ...]:
        dy, x = (noise(rng, (rows, width), dtype) for _ in range(2))
        gamma = noise(rng, (width,), dtype, scale=0.5, shift=1.0)
        wide = np.asarray(x, np.float32)
        rstd = 1.0 / np.sqrt(wide.var(axis=1) + 1e-5)
        return dy, x, gamma, wide.mean(axis=1), rstd.astype(np.float32)

    return Timed(
        name=f"backward, {rows}×{width} {dtype}",
        entry="layer_norm_backward",
        make=make,
        light={
            "read": 2 * rows * width * size,
            "write": rows * width * size,
            # x̂ 2, its gradient 1, two sums 3, gamma and beta 3, dx 4.
            "vector": 13 * rows * width,
        },
    )


def _timed_forward(rows: int, width: int, dtype: str) -> Timed:
    size = 4 if dtype == "float32" else 2

    def make(rng: Rng) -> tuple[Any, ...]:
        gamma = noise(rng, (width,), dtype, scale=0.5, shift=1.0)
        return noise(rng, (rows, width), dtype), gamma, noise(rng, (width,), dtype), 1e-5

    return Timed(
        name=f"forward, {rows}×{width} {dtype}",
        entry="layer_norm_forward",
        make=make,
        light={
            "read": rows * width * size,
            "write": rows * width * size,
            # Sum; centre; square, sum; scale; weight; bias.
            "vector": 7 * rows * width,
        },
    )


def timed() -> list[Timed]:
    """A training batch in both passes, and a wide one."""
    return [
        _timed(8192, 4096, "bfloat16"),
        _timed(8192, 1024, "float32"),
        _timed_forward(8192, 4096, "bfloat16"),
    ]
