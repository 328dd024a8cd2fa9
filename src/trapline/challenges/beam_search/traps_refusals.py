"""Bad input that is accepted, and corners of valid input."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from trapline.arena.errors import Violation
from trapline.arena.judge import expect
from trapline.arena.judge.traps import edit, edits, trap
from trapline.arena.process.proxy import Stub, Submission
from trapline.challenges.beam_search import table as lm
from trapline.challenges.beam_search.situations import (
    BAD,
    BLIND,
    VOCABULARY,
    best,
    by_sum,
    one,
    ordinary_search,
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
    also=[
        # Nothing is searched, and nothing comes back.
        edits(
            ('"beam_width", least=1', '"beam_width", least=-9'),
            ("    while any(", "    while beam_width > 0 and any("),
        )
    ],
    dimension="robustness",
    control=ordinary_search,
)
def width_zero_accepted(submission: Submission, rng: np.random.Generator) -> None:
    for width in (0, -int(rng.integers(1, 5))):
        refused(submission, rng, flat, beam_width=width)


@trap(
    catches="max_new_tokens below 1 is accepted",
    severity="minor",
    story="A hypothesis of no tokens has no score: 0 / 0.",
    mutant=edit('"max_new_tokens", least=1', '"max_new_tokens", least=-9'),
    dimension="robustness",
    control=ordinary_search,
)
def no_new_tokens_accepted(submission: Submission, rng: np.random.Generator) -> None:
    for limit in (0, -int(rng.integers(1, 5))):
        refused(submission, rng, flat, max_new_tokens=limit)


@trap(
    catches="a beam_width that is not a whole number is rounded silently",
    severity="minor",
    story="int(2.5) hides a configuration mistake.",
    mutant=edit("whole(beam_width, ", "whole(int(beam_width), "),
    seen=BLIND,
    dimension="robustness",
    control=ordinary_search,
)
def fractional_width_accepted(submission: Submission, rng: np.random.Generator) -> None:
    refused(submission, rng, flat, beam_width=2.5)


@trap(
    catches="a max_new_tokens that is not a whole number is accepted",
    severity="minor",
    story="A limit of 2.5 steps is never reached exactly.",
    mutant=edit("whole(max_new_tokens, ", "whole(int(max_new_tokens), "),
    seen=BLIND,
    dimension="robustness",
    control=ordinary_search,
)
def fractional_limit_accepted(submission: Submission, rng: np.random.Generator) -> None:
    refused(submission, rng, flat, max_new_tokens=2.5)


@trap(
    catches="a length penalty that is NaN is accepted",
    severity="minor",
    story="Every comparison with NaN is false, so the search neither ranks nor stops.",
    mutant=edit("    if not math.isfinite(value):\n", "    if math.isinf(value):\n"),
    dimension="robustness",
    control=ordinary_search,
)
def nan_penalty_accepted(submission: Submission, rng: np.random.Generator) -> None:
    refused(submission, rng, flat, length_penalty=float("nan"))


@trap(
    catches="an infinite length penalty is accepted",
    severity="minor",
    story="All scores become 0 or -inf.",
    mutant=edit("    if not math.isfinite(value):\n", "    if math.isnan(value):\n"),
    dimension="robustness",
    seen=BLIND,
    control=ordinary_search,
)
def infinite_penalty_accepted(submission: Submission, rng: np.random.Generator) -> None:
    for penalty in (float("inf"), float("-inf")):
        refused(submission, rng, flat, length_penalty=penalty)


@trap(
    catches="a negative eos_id is taken as an index from the end",
    severity="minor",
    story="An unset id of -1 makes the last token of the vocabulary the end.",
    mutant=edit('"eos_id", least=0', '"eos_id", least=-9'),
    seen=BLIND,
    dimension="robustness",
    control=ordinary_search,
)
def negative_eos_wraps(submission: Submission, rng: np.random.Generator) -> None:
    refused(submission, rng, flat, eos_id=-int(rng.integers(1, 4)))


@trap(
    catches="an eos_id outside the model's vocabulary does not raise ValueError",
    severity="minor",
    story="Tokenizer and model can have different vocabularies.",
    mutant=edit("    if eos_id >= log_probs.shape[1]:\n", "    if eos_id < 0:\n"),
    dimension="robustness",
    seen=BLIND,
    control=ordinary_search,
)
def eos_outside_the_vocabulary(submission: Submission, rng: np.random.Generator) -> None:
    for outside in (4, 5 + int(rng.integers(9))):
        refused(submission, rng, flat, eos_id=outside)


def answers_with(value: float, rng: np.random.Generator) -> Callable[[int], np.ndarray]:
    """Answers of the model with this value in one place of the last row."""
    place = int(rng.integers(4))

    def answer(rows: int) -> np.ndarray:
        values = flat(rows)
        values[-1, place] = value
        return values

    return answer


@trap(
    catches="NaN from the model is sorted as if it were a number",
    severity="major",
    story="With a NaN among the scores the order of beams depends on the sort algorithm.",
    mutant=edit("np.isnan(log_probs).any() or np.isposinf", "np.isposinf"),
    seen=BLIND,
    dimension="robustness",
    control=ordinary_search,
)
def nan_log_probs_accepted(submission: Submission, rng: np.random.Generator) -> None:
    refused(submission, rng, answers_with(float("nan"), rng))


@trap(
    catches="+inf from the model is accepted",
    severity="minor",
    story="One infinite sum wins every comparison.",
    mutant=edit(" or np.isposinf(log_probs).any()", ""),
    seen=BLIND,
    dimension="robustness",
    control=ordinary_search,
)
def infinite_log_probs_accepted(submission: Submission, rng: np.random.Generator) -> None:
    refused(submission, rng, answers_with(float("inf"), rng))


@trap(
    catches="a model that answers more rows than it was asked for is not noticed",
    severity="minor",
    story="The first rows are used and the others dropped.",
    mutant=edit("log_probs.shape[0] != rows:", "log_probs.shape[0] < rows:"),
    dimension="robustness",
    seen=BLIND,
    control=ordinary_search,
)
def too_many_rows_accepted(submission: Submission, rng: np.random.Generator) -> None:
    refused(submission, rng, lambda rows: flat(rows + 1))


@trap(
    catches="a model that answers fewer rows than it was asked for is not noticed",
    severity="minor",
    story="Broadcasting or slicing hides the missing rows.",
    mutant=edits(
        ("log_probs.shape[0] != rows:", "log_probs.shape[0] > rows:"),
        (
            "        search.advance(log_probs[first:last])\n",
            "        search.advance(log_probs[np.arange(first, last) % max(len(log_probs), 1)])\n",
        ),
    ),
    dimension="robustness",
    control=ordinary_search,
)
def too_few_rows_accepted(submission: Submission, rng: np.random.Generator) -> None:
    asked: list[int] = []

    def answer(rows: int) -> np.ndarray:
        asked.append(rows)
        return flat(max(rows - 1, 1))

    try:
        refused(submission, rng, answer)
    except Violation:
        # Who asks for one prefix at a time was given a row for it each time.
        if set(asked) != {1}:
            raise


@trap(
    catches="a model that answers one number for each prefix is not noticed",
    severity="minor",
    story="One axis is missing, and broadcasting makes up for it.",
    mutant=edit(
        "    if log_probs.ndim != 2 or",
        "    log_probs = log_probs.reshape(len(log_probs), -1)\n    if log_probs.ndim != 2 or",
    ),
    dimension="robustness",
    control=ordinary_search,
)
def one_axis_accepted(submission: Submission, rng: np.random.Generator) -> None:
    refused(submission, rng, lambda rows: flat(rows)[:, 0], eos_id=0)


def _one_bad_step(submission: Submission, rng: np.random.Generator, step: int) -> None:
    """Models whose answers hold NaN or +inf, or have another shape, from this step on only."""
    E, place = int(rng.integers(4)), int(rng.integers(4))
    settings = {"beam_width": 2, "max_new_tokens": 3, "eos_id": E}

    def spoiled(value: float, more: int, prefixes: list[list[int]]) -> np.ndarray:
        # Who asks for prefixes in turn gets a bad answer for each that belongs to the step.
        good = flat(len(prefixes))
        if max(map(len, prefixes)) < 1 + step:
            return good
        good[-1, place] = value
        return np.concatenate((good, good[:more]))

    for value, more in ((np.nan, 0), (np.inf, 0), (-2.0, 1)):
        stub = Stub(log_probs=partial(spoiled, value, more))
        expect.raises(BAD, submission.clean().beam_search, stub, [[1], [3]], **settings)


def first_answer_bad(submission: Submission, rng: np.random.Generator) -> None:
    _one_bad_step(submission, rng, step=0)


@trap(
    catches="only the first answer of the model is checked: NaN, +inf or a wrong shape in a later "
    "one is accepted",
    severity="major",
    story="The check belongs to the look at the size of the vocabulary, which is taken once.",
    mutant=edit(
        CALL,
        "    answer = lm.log_probs(prefixes)\n"
        "    is_first = all(search.length == 0 for search in searches)\n"
        "    log_probs = checked(answer, len(prefixes), eos_id) if is_first else"
        " np.asarray(answer, dtype=np.float64)\n",
    ),
    dimension="robustness",
    seen=BLIND,
    control=first_answer_bad,
)
def later_answers_unchecked(submission: Submission, rng: np.random.Generator) -> None:
    _one_bad_step(submission, rng, step=1)


@trap(
    catches="prompts with tokens that are not ints are accepted",
    severity="minor",
    story="1.5 is not a token, and the model may round it.",
    mutant=edit(
        '    return [whole(token, "a prompt\'s token", least=0) for token in prompt]\n',
        "    return [int(token) for token in prompt]\n",
    ),
    dimension="robustness",
    control=ordinary_search,
)
def fractional_tokens_accepted(submission: Submission, rng: np.random.Generator) -> None:
    stub = Stub(log_probs=lambda prefixes: flat(len(prefixes)))
    settings = {"beam_width": 2, "max_new_tokens": 2, "eos_id": int(rng.integers(4))}
    expect.raises(BAD, submission.beam_search, stub, [[1.5, 2]], **settings)


@trap(
    catches="an EOS continuation of probability 1 does not finish",
    severity="major",
    story="A sum of 0 is treated as missing by a truth test, or by `< 0`.",
    mutant=edit("totals > -np.inf", "(totals < 0.0) & (totals > -np.inf)"),
    control=ordinary_search,
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
    control=ordinary_search,
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
    control=ordinary_search,
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
    control=ordinary_search,
)
def almost_a_tie(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    better = -1.0 + 2.0**-40
    table = {(): {E: -1.0, A: better}, (A,): {E: 0.0}}
    asked = by_sum(submission, rng, table, beam_width=1, max_new_tokens=3, eos_id=E)
    best(asked, [A, E], better)


@trap(
    catches="after the first step a continuation of probability 0 becomes a beam",
    severity="major",
    story="-inf is replaced by a large negative number where several beams are ranked together.",
    mutant=edit(
        "    return log_probs\n",
        "    return np.maximum(log_probs, -1e9) if rows > 1 else log_probs\n",
    ),
    control=ordinary_search,
)
def late_zero_probability_lives_on(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {A: -1.0, B: -2.0}, (A,): {A: -1.0}, (B,): {B: -1.0}}
    settings: dict[str, Any] = {"beam_width": 4, "max_new_tokens": 2, "eos_id": E}
    asked = one(submission, rng, table, strict=True, **settings)
    want = [[([A, A], -1.0), ([B, B], -1.5)]]
    expect.equal(asked.hypotheses, want, "the only possible hypotheses")


@trap(
    catches="a beam_width or a max_new_tokens of 1 is refused",
    severity="major",
    story="The check asks for more than the least value instead of at least that.",
    mutant=edit('"beam_width", least=1', '"beam_width", least=2'),
    also=[edit('"max_new_tokens", least=1', '"max_new_tokens", least=2')],
    control=ordinary_search,
)
def least_setting_refused(submission: Submission, rng: np.random.Generator) -> None:
    A, B = tokens(rng, 2)
    table = {(): {A: -3.0, B: -1.0}, (B,): {A: -1.0}}
    one(submission, rng, table, beam_width=1, max_new_tokens=2, eos_id=A)
    one(submission, rng, table, beam_width=2, max_new_tokens=1, eos_id=A)
