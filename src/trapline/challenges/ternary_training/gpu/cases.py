"""The contract of ternary_training on the GPU, and its measures."""

from typing import Any, NamedTuple

import numpy as np

from trapline.arena.gpu.checks import FLOAT32_EPS, Rng, near, noise, padded, repeats_bit_for_bit
from trapline.arena.gpu.contract import Entry, Output, Timed, dtype_name, rounded
from trapline.arena.judge.traps import Precision, case
from trapline.arena.process.proxy import Submission

Array = np.ndarray
DTYPES = ("float32", "float16")
GROUP = 128


def _outputs(packed: Array, _scales: Array, x: Array) -> tuple[Output, ...]:
    return (Output((len(x), len(packed)), dtype_name(x)),)


ENTRIES = {"ternary_matmul": Entry(_outputs)}


class Problem(NamedTuple):
    packed: Array
    scales: Array
    x: Array


def pack(codes: Array) -> Array:
    """Four codes a byte, the first in the lowest bits; places after a row's end hold code 0."""
    outputs, inputs = codes.shape
    padded_codes = np.zeros((outputs, -(-inputs // 4) * 4), np.int64)
    padded_codes[:, :inputs] = codes
    digits = (padded_codes + 1).reshape(outputs, -1, 4)
    return np.asarray((digits << np.array([0, 2, 4, 6])).sum(axis=2), np.uint8)


def unpack(packed: Array, inputs: int) -> Array:
    digits = (np.asarray(packed)[..., None] >> np.array([0, 2, 4, 6])) & 3
    return np.asarray(digits.reshape(len(packed), -1)[:, :inputs], np.int64) - 1


#: Every byte that holds four codes.
BYTES = pack(np.stack(np.meshgrid(*[[-1, 0, 1]] * 4), axis=-1).reshape(81, 4))[:, 0]


def problem(rng: Rng, rows: int, inputs: int, outputs: int, dtype: str = "float32") -> Problem:
    codes = rng.integers(-1, 2, (outputs, inputs))
    scales = rng.uniform(0.5, 2.0, (outputs, -(-inputs // GROUP))).astype(np.float16)
    return Problem(pack(codes), scales, rounded(rng.standard_normal((rows, inputs)), dtype))


def weights(p: Problem) -> Array:
    inputs = p.x.shape[1]
    spread = np.repeat(np.asarray(p.scales, np.float64), GROUP, axis=1)[:, :inputs]
    return unpack(p.packed, inputs) * spread


def check(answer: Any, p: Problem) -> None:
    wide, each = np.asarray(p.x, np.float64), weights(p)
    size = np.abs(wide) @ np.abs(each).T
    near(answer, wide @ each.T, dtype=dtype_name(p.x), slack=16 * FLOAT32_EPS * size, what="out")


def ask(submission: Submission, p: Problem) -> None:
    check(submission.ternary_matmul(*p), p)


@case
def matches_float64(submission: Submission, rng: Rng) -> None:
    for dtype in DTYPES:
        for rows, inputs, outputs in ((3, 256, 40), (1, 1, 1), (20, 130, 5)):
            ask(submission, problem(rng, rows, inputs, outputs, dtype))


@case
def matches_float64_in_bfloat16(submission: Submission, rng: Rng) -> None:
    for rows, inputs, outputs in ((1, 4096, 100), (17, 1000, 333), (200, 256, 64)):
        ask(submission, problem(rng, rows, inputs, outputs, "bfloat16"))


@case
def many_groups(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, 2, 2400, 33, "float16"))


@case
def many_rows(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, 70, 128, 70, "float16"))


@case
def any_number_of_inputs(submission: Submission, rng: Rng) -> None:
    for inputs in (2, 3, 5, 127, 129, 255):
        ask(submission, problem(rng, 2, inputs, 3))


@case
def padded_rows(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 3, 140, 6)
    ask(submission, Problem(padded(p.packed), padded(p.scales), padded(p.x)))


@case
def scales_of_zero(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 2, 200, 4)
    p.scales[1] = 0.0
    ask(submission, p)


@case
def nothing_to_do(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, 0, 9, 4))


@case
def repeated_calls_agree_in_every_bit(submission: Submission, rng: Rng) -> None:
    repeats_bit_for_bit(submission, "ternary_matmul", *problem(rng, 2, 2100, 7))


def precision(submission: Submission, rng: Rng) -> list[Precision]:
    """float32 and float16, compared with float32 in NumPy."""
    measured = []
    for dtype in DTYPES:
        p = problem(rng, 8, 1024, 64, dtype)
        answer = submission.ternary_matmul(*p)
        each = weights(p)
        careful = np.asarray(p.x, np.float32) @ each.T.astype(np.float32)
        exact = np.asarray(p.x, np.float64) @ each.T
        measured.append(Precision(answer, exact, careful.astype(answer.dtype)))
    return measured


def _timed(rows: int, inputs: int, outputs: int) -> Timed:
    def make(rng: Rng) -> tuple[Any, ...]:
        packed = BYTES[rng.integers(0, len(BYTES), (outputs, inputs // 4), np.uint8)]
        scales = rng.uniform(0.5, 2.0, (outputs, inputs // GROUP)).astype(np.float16)
        return packed, scales, noise(rng, (rows, inputs), "bfloat16")

    return Timed(
        name=f"{rows} rows, {inputs} → {outputs} bfloat16",
        entry="ternary_matmul",
        make=make,
        light={
            "read": outputs * inputs / 4 + 2.0 * rows * inputs + outputs * inputs / 64,
            "write": 2.0 * rows * outputs,
            "bfloat16": 2.0 * rows * inputs * outputs,
        },
    )


def timed() -> list[Timed]:
    """One token, a small batch, a prefill."""
    return [_timed(1, 16384, 16384), _timed(16, 8192, 28672), _timed(1024, 4096, 4096)]
