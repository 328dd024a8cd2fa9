"""Bugs of refusing bad input."""

from typing import Any

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import edit, edits, trap
from trapline.arena.process.proxy import Stub, Submission
from trapline.challenges.beam_search import table as lm
from trapline.challenges.beam_search.situations import (
    BAD,
    VOCABULARY,
    best,
    one,
    prompt_of,
    tokens,
)
from trapline.challenges.beam_search.solution_lines import BOUND, CALL, EXPAND
from trapline.challenges.beam_search.table import Table


def refused(submission: Submission, rng: np.random.Generator, answer: Any, **changes: Any) -> None:
    """The call is refused, whether before or after the model has been asked."""
    settings = {"beam_width": 2, "max_new_tokens": 3, "eos_id": int(rng.integers(4)), **changes}
    stub = Stub(log_probs=lambda prefixes: answer(len(prefixes)))
    prompts = [[1, 2], [3]]
    expect.raises(BAD, submission.beam_search, stub, prompts, **settings)


def flat(rows: int) -> np.ndarray:
    return np.full((rows, 4), -2.0)


@trap(
    catches="beam_width below 1 is accepted",
    severity="minor",
    story="Zero beams return nothing, which looks like a model without an answer.",
    mutant=edits(
        ('"beam_width", least=1', '"beam_width", least=-9'),
        (EXPAND, EXPAND.replace("self.rules.beam_width", "max(1, self.rules.beam_width)")),
    ),
)
def width_zero_accepted(submission: Submission, rng: np.random.Generator) -> None:
    for width in (0, -int(rng.integers(1, 5))):
        refused(submission, rng, flat, beam_width=width)


@trap(
    catches="max_new_tokens below 1 is accepted",
    severity="minor",
    story="A hypothesis of no tokens has no score: 0 / 0.",
    mutant=edit('"max_new_tokens", least=1', '"max_new_tokens", least=-9'),
)
def no_new_tokens_accepted(submission: Submission, rng: np.random.Generator) -> None:
    for limit in (0, -int(rng.integers(1, 5))):
        refused(submission, rng, flat, max_new_tokens=limit)


@trap(
    catches="a width or limit that is not an integer is rounded silently",
    severity="minor",
    story="int(2.5) hides a configuration mistake.",
    mutant=edit("isinstance(value, bool) or not isinstance(value, Integral):", "value is None:"),
)
def fractional_width_accepted(submission: Submission, rng: np.random.Generator) -> None:
    refused(submission, rng, flat, beam_width=2.5)
    refused(submission, rng, flat, max_new_tokens=2.5)


@trap(
    catches="a length penalty that is NaN or infinite is accepted",
    severity="minor",
    story="Every comparison with NaN is false, so the search neither ranks nor stops.",
    mutant=edit("    if not math.isfinite(value):\n", "    if value is None:\n"),
)
def nan_penalty_accepted(submission: Submission, rng: np.random.Generator) -> None:
    for penalty in (float("nan"), float("inf"), float("-inf")):
        refused(submission, rng, flat, length_penalty=penalty)


@trap(
    catches="a negative eos_id is taken as an index from the end",
    severity="minor",
    story="An unset id of -1 makes the last token of the vocabulary the end.",
    mutant=edit('"eos_id", least=0', '"eos_id", least=-9'),
)
def negative_eos_wraps(submission: Submission, rng: np.random.Generator) -> None:
    refused(submission, rng, flat, eos_id=-int(rng.integers(1, 4)))


@trap(
    catches="an eos_id outside the model's vocabulary does not raise ValueError",
    severity="minor",
    story="Tokenizer and model can have different vocabularies.",
    mutant=edit("    if eos_id >= log_probs.shape[1]:\n", "    if eos_id < 0:\n"),
)
def eos_outside_the_vocabulary(submission: Submission, rng: np.random.Generator) -> None:
    for outside in (4, 5 + int(rng.integers(9))):
        refused(submission, rng, flat, eos_id=outside)


@trap(
    catches="NaN from the model is sorted as if it were a number",
    severity="major",
    story="With a NaN among the scores the order of beams depends on the sort algorithm.",
    mutant=edit("if np.isnan(log_probs).any() or np.isposinf(log_probs).any():", "if rows < 0:"),
)
def nan_log_probs_accepted(submission: Submission, rng: np.random.Generator) -> None:
    place = int(rng.integers(4))

    def answer(rows: int) -> np.ndarray:
        values = flat(rows)
        values[-1, place] = np.nan
        return values

    refused(submission, rng, answer)


@trap(
    catches="a model that returns fewer or more rows than prefixes is not noticed",
    severity="major",
    story="Broadcasting silently uses one row for all beams.",
    mutant=edit("if log_probs.ndim != 2 or log_probs.shape[0] != rows:", "if log_probs.ndim != 2:"),
)
def wrong_row_count_accepted(submission: Submission, rng: np.random.Generator) -> None:
    refused(submission, rng, lambda rows: flat(rows + 1))
    refused(submission, rng, lambda rows: flat(1))
    refused(submission, rng, lambda rows: flat(rows)[:, 0])


@trap(
    catches="an EOS continuation of probability 1 does not finish",
    severity="major",
    story="A sum of 0 is treated as missing by a truth test, or by `< 0`.",
    mutant=edit("totals > -np.inf", "(totals < 0.0) & (totals > -np.inf)"),
)
def certain_end_lost(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table: Table = {(): {E: 0.0, A: -1.0}}
    asked = one(submission, rng, table, beam_width=1, max_new_tokens=2, eos_id=E)
    best(asked, [E], 0.0)


@trap(
    catches="many live beams are given to the model in several calls",
    severity="minor",
    story="A fixed batch size for model calls, left over from other code.",
    mutant=edit(
        CALL,
        "    pieces = [prefixes[i : i + 128] for i in range(0, len(prefixes), 128)]\n"
        "    answers = np.concatenate([lm.log_probs(piece) for piece in pieces])\n"
        "    log_probs = checked(answers, len(prefixes), eos_id)\n",
    ),
)
def large_batch_in_pieces(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table: Table = {(): {A: -1.0}, (A,): {E: -1.0}}
    tables = {prompt_of(rng, first=300 + n): table for n in range(150)}
    settings: dict[str, Any] = {"beam_width": 2, "max_new_tokens": 2, "eos_id": E}
    lm.run_tables(submission, VOCABULARY, tables, count_calls=True, **settings)


@trap(
    catches="with a negative penalty the stop test leaves out the very next token",
    severity="major",
    story="A length that already includes the next token is incremented once more.",
    mutant=edit(BOUND, BOUND.replace("length + 1", "length + 2")),
)
def negative_penalty_bound_too_long(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(): {E: -5.0, A: -2.0}, (A,): {E: -0.25}}
    asked = one(
        submission, rng, table, beam_width=1, max_new_tokens=8, eos_id=E, length_penalty=-1.0
    )
    best(asked, [A, E], -4.5)


@trap(
    catches="scores within a tolerance of each other are treated as equal",
    severity="minor",
    story="A comparison with a small tolerance stops a search that a live beam could still win.",
    mutant=edit("bound <= self.pool[-1].score\n", "bound <= self.pool[-1].score + 1e-9\n"),
)
def almost_a_tie(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    better = -1.0 + 2.0**-40
    table = {(): {E: -1.0, A: better}, (A,): {E: 0.0}}
    asked = one(
        submission, rng, table, beam_width=1, max_new_tokens=3, eos_id=E, length_penalty=0.0
    )
    best(asked, [A, E], better)


@trap(
    catches="after the first step a continuation of probability 0 becomes a beam",
    severity="major",
    story="-inf is replaced by a large negative number where several beams are ranked together.",
    mutant=edit(
        "    return log_probs\n",
        "    return np.maximum(log_probs, -1e9) if rows > 1 else log_probs\n",
    ),
)
def late_zero_probability_lives_on(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {A: -1.0, B: -2.0}, (A,): {A: -1.0}, (B,): {B: -1.0}}
    settings: dict[str, Any] = {"beam_width": 4, "max_new_tokens": 2, "eos_id": E}
    asked = one(submission, rng, table, strict=True, **settings)
    want = [[([A, A], -1.0), ([B, B], -1.5)]]
    expect.equal(asked.hypotheses, want, "the only possible hypotheses")
