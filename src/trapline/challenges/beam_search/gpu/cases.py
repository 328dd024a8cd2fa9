"""The contract of beam_search on the GPU, and its measures."""

from typing import Any, NamedTuple

import numpy as np

from trapline.arena.gpu.checks import Rng, noise, padded, repeats_bit_for_bit
from trapline.arena.gpu.contract import Entry, Output, Timed, rounded
from trapline.arena.judge import expect
from trapline.arena.judge.traps import Precision, case
from trapline.arena.process.proxy import Submission

Array = np.ndarray
DTYPES = ("float32", "float16")
NAMES = ("parents", "tokens", "new_sums", "ended")


def _outputs(log_probs: Array, *_: Any) -> tuple[Output, ...]:
    shape = log_probs.shape[:2]
    return tuple(Output(shape, dtype) for dtype in ("int32", "int32", "float32", "bool"))


ENTRIES = {"beam_step": Entry(_outputs)}


class Problem(NamedTuple):
    log_probs: Array
    sums: Array
    eos_id: int = 1


def problem(rng: Rng, prompts: int, beams: int, tokens: int, dtype: str = "float32") -> Problem:
    logits = 3.0 * rng.standard_normal((prompts, beams, tokens))
    logits -= np.log(np.exp(logits).sum(axis=2, keepdims=True))
    sums = -5.0 * rng.random((prompts, beams))
    return Problem(rounded(logits, dtype), sums.astype(np.float32))


def truth(p: Problem) -> tuple[Array, ...]:
    """Exact: one addition in float32 for each continuation, then a stable sort."""
    B, W, V = p.log_probs.shape
    totals = np.asarray(p.log_probs, np.float32) + p.sums[..., None]
    totals = totals.reshape(B, W * V)
    order = np.argsort(-totals, axis=1, kind="stable")[:, :W]
    values = np.full((B, W), -np.inf, np.float32)
    values[:, : order.shape[1]] = np.take_along_axis(totals, order, axis=1)
    places = np.full((B, W), -1, np.int64)
    places[:, : order.shape[1]] = order
    real = values > -np.inf
    parents = np.where(real, places // V, -1).astype(np.int32)
    tokens = np.where(real, places % V, -1).astype(np.int32)
    return parents, tokens, values, real & (tokens == p.eos_id)


def check(answer: Any, p: Problem) -> None:
    for name, got, want in zip(NAMES, answer, truth(p), strict=True):
        expect.equal(got, want, name)


def ask(submission: Submission, p: Problem) -> None:
    check(submission.beam_step(*p), p)


@case
def matches_a_sort(submission: Submission, rng: Rng) -> None:
    for dtype in DTYPES:
        for prompts, beams, tokens in ((2, 2, 11), (1, 1, 5), (1, 4, 130)):
            ask(submission, problem(rng, prompts, beams, tokens, dtype))


@case
def matches_a_sort_in_bfloat16(submission: Submission, rng: Rng) -> None:
    for prompts, beams, tokens in ((2, 3, 11), (2, 8, 50257)):
        ask(submission, problem(rng, prompts, beams, tokens, "bfloat16"))


@case
def large_vocabulary(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, 1, 2, 5003))


@case
def wide_beams(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, 1, 9, 33))


@case
def ended_beams_are_marked(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 2, 4, 9)
    p.log_probs[:, ::2, 1] = 0.0
    ask(submission, p)


@case
def equal_sums_in_order(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 2, 4, 30)
    p.log_probs[:] = -rng.integers(1, 4, p.log_probs.shape)
    p.sums[:] = -rng.integers(0, 2, p.sums.shape)
    ask(submission, p)


@case
def fewer_continuations_than_beams(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 2, 5, 12)
    p.log_probs[:] = -np.inf
    p.log_probs[0, 3, 7] = -1.0
    ask(submission, p)
    ask(submission, problem(rng, 1, 3, 1))


@case
def dead_beams(submission: Submission, rng: Rng) -> None:
    """The first step: only one beam is alive."""
    p = problem(rng, 2, 4, 20)
    p.sums[:, 1:] = -np.inf
    ask(submission, p)


@case
def padded_rows(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 2, 3, 17)
    ask(submission, p._replace(log_probs=padded(p.log_probs)))


@case
def nothing_to_do(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, 0, 3, 7))


@case
def repeated_calls_agree_in_every_bit(submission: Submission, rng: Rng) -> None:
    repeats_bit_for_bit(submission, "beam_step", *problem(rng, 2, 3, 200))


def precision(submission: Submission, rng: Rng) -> list[Precision]:
    """Sums are one addition in float32: there is an exact answer."""
    p = problem(rng, 4, 4, 500)
    _, _, sums, _ = submission.beam_step(*p)
    parents, tokens, values, _ = truth(p)
    wide = np.asarray(p.log_probs, np.float64) + p.sums[..., None]
    exact = wide[np.arange(4)[:, None], parents, tokens]
    return [Precision(sums, exact, values)]


def _timed(prompts: int, beams: int, tokens: int) -> Timed:

    def make(rng: Rng) -> tuple[Any, ...]:
        drawn = noise(rng, (prompts, beams, tokens), "float32", scale=3.0, shift=-16.0)
        sums = -5.0 * rng.random((prompts, beams), np.float32)
        return drawn, sums, 2

    return Timed(
        name=f"{prompts} prompts, {beams} beams, {tokens} tokens float32",
        entry="beam_step",
        make=make,
        light={
            "read": 4.0 * prompts * beams * tokens,
            "write": 13.0 * prompts * beams,
            "vector": 2.0 * prompts * beams * tokens,  # an addition and a comparison
        },
    )


def timed() -> list[Timed]:
    """A large batch, a wide beam, a few prompts.

    In float32 there are hardly any ties, which torch breaks in any order.
    """
    return [
        _timed(64, 8, 128256),
        _timed(16, 32, 32000),
        _timed(8, 4, 50257),
    ]
