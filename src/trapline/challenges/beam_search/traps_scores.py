"""Bugs of scores, and of what comes back."""

from typing import Any

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import trap
from trapline.arena.process.proxy import Stub, Submission
from trapline.challenges.beam_search import table as lm
from trapline.challenges.beam_search.situations import (
    VOCABULARY,
    best,
    one,
    prompt_of,
    tokens,
)
from trapline.challenges.beam_search.table import Table


@trap(
    "penalty-on-running-sum",
    catches="the length penalty is applied to the sum that the next step continues",
    severity="critical",
    story="A beam that carries its penalised score compounds the penalty at every step; the "
    "winning design kept the sum and the score apart.",
)
def penalty_on_running_sum(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B, C = tokens(rng, 4)
    table = {
        (): {A: -2.0, B: -2.5},
        (A,): {C: -2.0},
        (B,): {C: -1.0},
        (A, C): {E: -4.0},
        (B, C): {E: -4.0},
    }
    asked = one(submission, rng, table, beam_width=2, max_new_tokens=3, eos_id=E)
    best(asked, [B, C, E], -2.5)


def two_ends_of_different_length(rng: np.random.Generator) -> tuple[int, int, Table]:
    """[E] with sum -2 and [A, E] with sum -3: under penalty 1 the longer one wins, -1.5 to -2."""
    E, A = tokens(rng, 2)
    return E, A, {(): {E: -2.0, A: -1.0}, (A,): {E: -2.0}}


def the_longer_end_wins(submission: Submission, rng: np.random.Generator) -> None:
    """Of the two it comes first, by its score, without the prompt and with its EOS."""
    E, A, table = two_ends_of_different_length(rng)
    asked = one(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    best(asked, [A, E], -1.5)


@trap(
    "ranked-by-sum",
    catches="finished hypotheses of different length are ranked by sum, not by score",
    severity="critical",
    story="Two EOS beams of different length under a penalty: the test that most entrants did not "
    "write.",
)
def ranked_by_sum(submission: Submission, rng: np.random.Generator) -> None:
    the_longer_end_wins(submission, rng)


@trap(
    "prompt-counted-in-length",
    catches="the prompt's tokens count in the length that the penalty uses",
    severity="critical",
    story="Reported against a serving engine in 2024 and still there: with a long prompt the "
    "penalty has almost no effect; it changes the winner in a third to a half of the cases.",
)
def prompt_counted_in_length(submission: Submission, rng: np.random.Generator) -> None:
    E, A, table = two_ends_of_different_length(rng)
    prompt = prompt_of(rng, length=40)
    asked = one(submission, rng, table, prompt=prompt, beam_width=2, max_new_tokens=2, eos_id=E)
    best(asked, [A, E], -1.5)


@trap(
    "eos-not-counted",
    catches="the length leaves out the EOS token",
    severity="major",
    story="A well-known library changed this between releases; older ones divided by one less.",
)
def eos_not_counted(submission: Submission, rng: np.random.Generator) -> None:
    the_longer_end_wins(submission, rng)


@trap(
    "unfinished-length-off-by-one",
    catches="hypotheses cut off at the maximum length are counted one token too long",
    severity="major",
    story="Adding one for the end that is yet to come, also where it never comes.",
)
def unfinished_length(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {A: -2.0}, (A,): {B: -2.0}}
    asked = one(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    best(asked, [A, B], -2.0)


@trap(
    "negative-penalty-ignored",
    catches="a length penalty of zero or less is treated as no penalty",
    severity="major",
    story="`if length_penalty > 0` reads naturally and switches half of the range off.",
)
def negative_penalty_ignored(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(): {E: -3.0, A: -1.0}, (A,): {E: -1.0}}
    asked = one(
        submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E, length_penalty=-1.0
    )
    best(asked, [E], -3.0)


@trap(
    "zero-penalty-as-default",
    catches="length_penalty=0.0 falls back to the default",
    severity="major",
    story="`length_penalty or 1.0` takes 0.0 for absent.",
)
def zero_penalty_as_default(submission: Submission, rng: np.random.Generator) -> None:
    E, _, table = two_ends_of_different_length(rng)
    asked = one(
        submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E, length_penalty=0.0
    )
    best(asked, [E], -2.0)


@trap(
    "penalty-multiplied",
    catches="the sum is multiplied by the length's power instead of divided",
    severity="critical",
    story="Sums are negative, so the direction of the penalty is easily turned around.",
)
def penalty_multiplied(submission: Submission, rng: np.random.Generator) -> None:
    the_longer_end_wins(submission, rng)


@trap(
    "shifted-length-penalty",
    catches="the ((5 + n) / 6)^a form of a translation paper is used instead of n^a",
    severity="major",
    story="The best-known formula is not the one that the contract states.",
)
def shifted_length_penalty(submission: Submission, rng: np.random.Generator) -> None:
    the_longer_end_wins(submission, rng)


@trap(
    "score-is-the-sum",
    catches="the reported score is the sum, not the score",
    severity="major",
    story="Ranking by one figure and printing another made several reports contradict themselves.",
)
def score_is_the_sum(submission: Submission, rng: np.random.Generator) -> None:
    the_longer_end_wins(submission, rng)


@trap(
    "log-probabilities-as-logits",
    catches="the model's log-probabilities are put through a softmax again",
    severity="critical",
    story="An entrant's test fed logits where log-probabilities were meant, printed a score of "
    "0.0000 and never noticed.",
)
def log_probabilities_as_logits(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(): {E: -3.0, A: -3.5}, (A,): {E: -0.25}}
    asked = one(
        submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E, length_penalty=0.0
    )
    best(asked, [E], -3.0)


@trap(
    "probabilities-underflow",
    catches="probabilities are multiplied, so long or unlikely hypotheses become 0",
    severity="major",
    story="exp(-800) is 0 in float64; a few hundred tokens of ordinary text are enough.",
)
def probabilities_underflow(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B, C = tokens(rng, 4)
    table = {
        (): {A: -400.0, B: -401.0},
        (A,): {C: -402.0},
        (B,): {C: -400.0},
        (A, C): {E: -1.0},
        (B, C): {E: -1.0},
    }
    settings: dict[str, Any] = {"beam_width": 2, "max_new_tokens": 3, "eos_id": E}
    asked = one(submission, rng, table, strict=True, length_penalty=0.0, **settings)
    best(asked, [B, C, E], -802.0)


@trap(
    "sums-in-float32",
    catches="sums are kept in the model's own float32",
    severity="major",
    story="In low precision the later tokens of a long hypothesis stop making a difference.",
)
def sums_in_float32(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    worse, better = sorted(set(range(VOCABULARY)) - {E, A})[:2]
    big = -(2.0**24)
    table = {(): {A: big}, (A,): {worse: -1.5, better: -1.25}}
    settings: dict[str, Any] = {"beam_width": 1, "max_new_tokens": 2, "eos_id": E}
    settings |= {"dtype": np.float32, "strict": True}
    asked = one(submission, rng, table, length_penalty=0.0, **settings)
    best(asked, [A, better], big - 1.25)


@trap(
    "prompt-in-the-answer",
    catches="the returned tokens begin with the prompt",
    severity="major",
    story="Generation interfaces differ in this; the contract says without.",
)
def prompt_in_the_answer(submission: Submission, rng: np.random.Generator) -> None:
    the_longer_end_wins(submission, rng)


@trap(
    "eos-stripped",
    catches="the EOS token is taken off the returned tokens",
    severity="major",
    story="Without it a caller cannot tell a finished hypothesis from one cut off.",
)
def eos_stripped(submission: Submission, rng: np.random.Generator) -> None:
    the_longer_end_wins(submission, rng)


@trap(
    "answers-padded",
    catches="shorter hypotheses are filled up to a common length",
    severity="major",
    story="Rows of a finished prompt went on producing fake tokens until the whole batch was done.",
)
def answers_padded(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    short, long = prompt_of(rng, first=100), prompt_of(rng, first=101)
    tables: dict[lm.Prefix, Table] = {
        short: {(): {E: -0.5}},
        long: {(): {A: -0.5}, (A,): {A: -0.5}, (A, A): {E: -0.5}},
    }
    settings: dict[str, Any] = {"beam_width": 1, "max_new_tokens": 3, "eos_id": E}
    asked = lm.run_tables(submission, VOCABULARY, tables, **settings)
    best(asked, [E], -0.5)


@trap(
    "prompts-modified",
    catches="generated tokens are appended to the caller's prompt",
    severity="major",
    story="`prefix += [token]` on a list that belongs to somebody else.",
)
def prompts_modified(submission: Submission, rng: np.random.Generator) -> None:
    E, _, table = two_ends_of_different_length(rng)
    prompt = prompt_of(rng)
    model = lm.table_model(VOCABULARY, {prompt: table})
    stub = Stub(log_probs=lambda prefixes: lm.rows(model, prefixes, np.float64))
    settings = {"beam_width": 2, "max_new_tokens": 2, "eos_id": E}
    _, after = submission.observe("beam_search", stub, [list(prompt)], **settings)
    expect.equal(after[1], [list(prompt)], "the prompts after the call")


@trap(
    "answers-remembered",
    catches="the answer to a prompt is remembered and given again for another model",
    severity="critical",
    story="A module-level cache keyed by the prompt survives from one call to the next.",
)
def answers_remembered(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    prompt = prompt_of(rng)
    for last in (-2.0, -3.0):
        table = {(): {A: -1.0}, (A,): {E: last}}
        settings: dict[str, Any] = {"beam_width": 1, "max_new_tokens": 2, "eos_id": E}
        asked = one(submission, rng, table, prompt=prompt, length_penalty=0.0, **settings)
        best(asked, [A, E], last - 1.0)
