"""The bugs that beam searches have, each in the smallest situation that shows it.

E is the end-of-sequence token, A to D are ordinary ones; a table says which continuation has which
log-probability, and what it leaves out is noise (see `table.py`). All values are multiples of a
power of two, so that sums and ties are exact in every order of addition.
"""

from typing import Any

import numpy as np

from trapline.arena import expect
from trapline.arena.proxy import Stub, Submission
from trapline.arena.traps import trap
from trapline.challenges.beam_search import table as lm
from trapline.challenges.beam_search.table import Asked, Table

VOCABULARY = 9
BAD = (ValueError, TypeError)


def tokens(rng: np.random.Generator, count: int) -> list[int]:
    """Distinct token ids in random order."""
    return [int(t) for t in rng.permutation(VOCABULARY)[:count]]


def rising_tokens(rng: np.random.Generator, count: int) -> list[int]:
    """Distinct token ids, the lower ones first, for where the order of ids decides."""
    return sorted(tokens(rng, count))


def prompt_of(rng: np.random.Generator, length: int = 3, first: int = 100) -> lm.Prefix:
    """A prompt of tokens that the model never says, so that none of them is the end."""
    return (first, *(int(t) for t in rng.integers(200, 300, length - 1)))


def one(
    submission: Submission,
    rng: np.random.Generator,
    table: Table,
    *,
    prompt: lm.Prefix | None = None,
    **settings: Any,
) -> Asked:
    """One prompt, one table, compared with the oracle."""
    prompt = prompt_of(rng) if prompt is None else prompt
    return lm.run_tables(submission, VOCABULARY, {prompt: table}, **settings)


def best(asked: Asked, hypothesis: list[int], score: float) -> None:
    """The first hypothesis of the first prompt is this one, with exactly this score."""
    expect.that(bool(asked.hypotheses[0]), "no hypothesis at all")
    got = asked.hypotheses[0][0]
    expect.that(got == (hypothesis, score), f"the best is {got}, expected {hypothesis} {score}")


# --- finished hypotheses -------------------------------------------------------------


@trap(
    "eos-beam-dropped",
    catches="a finished hypothesis is thrown away when its beam ends",
    severity="critical",
    story="The classic of the task: the end at -3.0 loses to a continuation at -5.0 that merely "
    "had not stopped yet.",
)
def eos_beam_dropped(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {E: -3.0, A: -1.0}, (A,): {B: -4.0}}
    asked = one(
        submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E, length_penalty=0.0
    )
    best(asked, [E], -3.0)


@trap(
    "pool-forgets-earlier-steps",
    catches="only the hypotheses that finished in the latest step are remembered",
    severity="critical",
    story="An entrant moved finished beams to a list that the next step rebuilt from the "
    "expanding beams alone.",
)
def pool_forgets(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {E: -1.0, A: -1.0}, (A,): {E: -2.0, B: -3.0}}
    asked = one(
        submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E, length_penalty=0.0
    )
    best(asked, [E], -1.0)


@trap(
    "finished-beam-expanded",
    catches="a beam that has produced EOS is continued",
    severity="critical",
    story="Several open decoders emitted tokens behind the end because a finished beam kept its "
    "slot among the live ones.",
)
def finished_beam_expanded(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {E: -1.0, A: -2.0}, (A,): {E: -3.0, B: -1.0}, (A, B): {E: -1.0}}
    asked = one(
        submission, rng, table, beam_width=2, max_new_tokens=3, eos_id=E, length_penalty=0.0
    )
    for hypothesis, _ in asked.hypotheses[0]:
        expect.that(E not in hypothesis[:-1], f"{hypothesis} goes on after its end")
    for prefix in [prefix for call in asked.calls for prefix in call]:
        expect.that(E not in prefix, f"the model was asked to continue {list(prefix)}")


@trap(
    "eos-takes-a-slot",
    catches="EOS continuations use up places among the live beams",
    severity="critical",
    story="Taking the W best of all continuations and then moving the ended ones out leaves fewer "
    "than W beams alive; big libraries take 2W candidates for this reason.",
)
def eos_takes_a_slot(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B, C = tokens(rng, 4)
    table = {(): {E: -1.0, A: -2.0, B: -3.0}, (A,): {E: -9.0, C: -9.5}, (B,): {E: -0.5}}
    asked = one(
        submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E, length_penalty=0.0
    )
    expect.that([B, E] in [t for t, _ in asked.hypotheses[0]], "the second live beam was lost")


@trap(
    "eos-fills-the-row",
    catches="each beam offers only its W best tokens, EOS among them, so W - 1 are left",
    severity="major",
    story="A top-k of width W per beam looks sufficient; with the end among the W it is one short.",
)
def eos_fills_the_row(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {E: -1.0, A: -2.0, B: -3.0}, (A,): {E: -9.0}, (B,): {E: -0.5}}
    asked = one(
        submission, rng, table, beam_width=2, max_new_tokens=3, eos_id=E, length_penalty=0.0
    )
    expect.that([B, E] in [t for t, _ in asked.hypotheses[0]], "the last token of a row was lost")


@trap(
    "eos-only-when-ranked",
    catches="an EOS continuation counts only when it is among the W best of its step",
    severity="major",
    story="One widely used library finishes a beam only at rank < W; this contract lets every "
    "EOS continuation into the pool.",
)
def eos_only_when_ranked(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {A: -1.0, E: -2.0}, (A,): {B: -4.0}}
    asked = one(
        submission, rng, table, beam_width=1, max_new_tokens=2, eos_id=E, length_penalty=0.0
    )
    best(asked, [E], -2.0)


@trap(
    "finished-use-up-the-width",
    catches="finished hypotheses take places from the live beams of later steps",
    severity="major",
    story="Pooling finished and live beams into the same W slots was praised in one round; with "
    "a separate pool it silently narrows the search.",
)
def finished_use_up_the_width(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B, C, D = tokens(rng, 5)
    table = {
        (): {A: -1.0, B: -2.0, E: -8.0},
        (A,): {C: -1.0},
        (B,): {D: -1.0},
        (A, C): {E: -7.0},
        (B, D): {E: -0.5},
    }
    asked = one(
        submission, rng, table, beam_width=2, max_new_tokens=3, eos_id=E, length_penalty=0.0
    )
    best(asked, [B, D, E], -3.5)


@trap(
    "pool-keeps-the-first",
    catches="the pool keeps the first W hypotheses instead of the W best",
    severity="critical",
    story="Several toolkits returned the W shortest outputs: the pool was full and nothing "
    "replaced its worst.",
)
def pool_keeps_the_first(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {E: -4.0, A: -1.0, B: -1.5}, (A,): {E: -1.0}, (B,): {E: -1.0}}
    asked = one(
        submission, rng, table, beam_width=2, max_new_tokens=3, eos_id=E, length_penalty=0.0
    )
    best(asked, [A, E], -2.0)


@trap(
    "pool-unbounded",
    catches="more than W hypotheses are returned",
    severity="major",
    story="One serving engine keeps a list of completed beams without a bound.",
)
def pool_unbounded(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {E: -4.0, A: -1.0, B: -1.5}, (A,): {E: -1.0}, (B,): {E: -1.0}}
    asked = one(
        submission, rng, table, beam_width=2, max_new_tokens=3, eos_id=E, length_penalty=0.0
    )
    expect.that(len(asked.hypotheses[0]) == 2, f"{len(asked.hypotheses[0])} hypotheses for W = 2")


@trap(
    "worst-first",
    catches="the hypotheses come in rising instead of falling order",
    severity="critical",
    story="A heap of the best gives its worst first; read out as it is, it is upside down.",
)
def worst_first(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {E: -4.0, A: -1.0, B: -1.5}, (A,): {E: -1.0}, (B,): {E: -1.0}}
    asked = one(
        submission, rng, table, beam_width=3, max_new_tokens=3, eos_id=E, length_penalty=0.0
    )
    scores = [score for _, score in asked.hypotheses[0]]
    expect.that(scores == [-2.0, -2.5, -4.0], f"scores are {scores}")


@trap(
    "immediate-end-forbidden",
    catches="EOS as the very first token is not taken",
    severity="major",
    story="The end at the first step is the situation that tests of beam search are built on.",
)
def immediate_end_forbidden(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table: Table = {(): {E: -0.25, A: -1.0}}
    asked = one(submission, rng, table, beam_width=2, max_new_tokens=1, eos_id=E)
    best(asked, [E], -0.25)


@trap(
    "eos-in-the-prompt",
    catches="a prompt that ends with the EOS token counts as finished",
    severity="major",
    story="Chat prompts end with an end-of-turn token all the time; only generated tokens count.",
)
def eos_in_the_prompt(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(): {A: -1.0}, (A,): {E: -1.0}}
    prompt = (*prompt_of(rng), E)
    asked = one(submission, rng, table, prompt=prompt, beam_width=2, max_new_tokens=3, eos_id=E)
    best(asked, [A, E], -1.0)


# --- scores --------------------------------------------------------------------------


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


@trap(
    "ranked-by-sum",
    catches="finished hypotheses of different length are ranked by sum, not by score",
    severity="critical",
    story="Two EOS beams of different length under a penalty: the test that most entrants did not "
    "write.",
)
def ranked_by_sum(submission: Submission, rng: np.random.Generator) -> None:
    E, A, table = two_ends_of_different_length(rng)
    asked = one(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    best(asked, [A, E], -1.5)


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
    E, A, table = two_ends_of_different_length(rng)
    asked = one(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    best(asked, [A, E], -1.5)


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
    E, A, table = two_ends_of_different_length(rng)
    asked = one(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    best(asked, [A, E], -1.5)


@trap(
    "shifted-length-penalty",
    catches="the ((5 + n) / 6)^a form of a translation paper is used instead of n^a",
    severity="major",
    story="The best-known formula is not the one that the contract states.",
)
def shifted_length_penalty(submission: Submission, rng: np.random.Generator) -> None:
    E, A, table = two_ends_of_different_length(rng)
    asked = one(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    best(asked, [A, E], -1.5)


@trap(
    "score-is-the-sum",
    catches="the reported score is the sum, not the score",
    severity="major",
    story="Ranking by one figure and printing another made several reports contradict themselves.",
)
def score_is_the_sum(submission: Submission, rng: np.random.Generator) -> None:
    E, A, table = two_ends_of_different_length(rng)
    asked = one(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    best(asked, [A, E], -1.5)


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


# --- what comes back -----------------------------------------------------------------


@trap(
    "prompt-in-the-answer",
    catches="the returned tokens begin with the prompt",
    severity="major",
    story="Generation interfaces differ in this; the contract says without.",
)
def prompt_in_the_answer(submission: Submission, rng: np.random.Generator) -> None:
    E, A, table = two_ends_of_different_length(rng)
    asked = one(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    best(asked, [A, E], -1.5)


@trap(
    "eos-stripped",
    catches="the EOS token is taken off the returned tokens",
    severity="major",
    story="Without it a caller cannot tell a finished hypothesis from one cut off.",
)
def eos_stripped(submission: Submission, rng: np.random.Generator) -> None:
    E, A, table = two_ends_of_different_length(rng)
    asked = one(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    best(asked, [A, E], -1.5)


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


# --- when it stops -------------------------------------------------------------------


@trap(
    "first-end-stops",
    catches="the search stops at the first finished hypothesis",
    severity="critical",
    story="Stopping when the top beam ends lost the better, longer output in several toolkits.",
)
def first_end_stops(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(): {E: -4.0, A: -1.0}, (A,): {E: -1.0}}
    asked = one(
        submission, rng, table, beam_width=2, max_new_tokens=3, eos_id=E, length_penalty=0.0
    )
    best(asked, [A, E], -2.0)


@trap(
    "full-pool-stops",
    catches="the search stops as soon as W hypotheses are finished",
    severity="critical",
    story="The default of one library for years: W finished is not the W best.",
)
def full_pool_stops(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(): {E: -4.0, A: -1.0}, (A,): {E: -1.0}}
    asked = one(
        submission, rng, table, beam_width=1, max_new_tokens=3, eos_id=E, length_penalty=0.0
    )
    best(asked, [A, E], -2.0)


@trap(
    "bound-at-current-length",
    catches="the stop test rates live beams at their present length although longer is better",
    severity="critical",
    story="A heuristic that is no bound when the penalty is positive; reported several times "
    "against the library that has it.",
)
def bound_at_current_length(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {E: -2.0, A: -2.5}, (A,): {B: -0.25}, (A, B): {E: -0.25}}
    asked = one(submission, rng, table, beam_width=1, max_new_tokens=4, eos_id=E)
    best(asked, [A, B, E], -1.0)


@trap(
    "bound-at-next-length",
    catches="the stop test allows for one more token only although longer is better",
    severity="critical",
    story="One step of look-ahead is still no bound when the penalty is positive.",
)
def bound_at_next_length(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {E: -1.0, A: -2.5}, (A,): {B: -0.25}, (A, B): {B: -0.125}, (A, B, B): {E: -0.125}}
    asked = one(submission, rng, table, beam_width=1, max_new_tokens=4, eos_id=E)
    best(asked, [A, B, B, E], -0.75)


@trap(
    "negative-penalty-bound",
    catches="the stop test uses the maximum length also where shorter is better",
    severity="critical",
    story="The bound for a positive penalty stops a search with a negative one far too early.",
)
def negative_penalty_bound(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(): {E: -4.0, A: -1.0}, (A,): {E: -0.5}}
    asked = one(
        submission, rng, table, beam_width=1, max_new_tokens=8, eos_id=E, length_penalty=-1.0
    )
    best(asked, [A, E], -3.0)


@trap(
    "bound-from-the-weakest-beam",
    catches="the stop test looks at the worst live beam instead of the best",
    severity="critical",
    story="Taking the last of a sorted list for its first.",
)
def bound_from_the_weakest_beam(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B, C, D = tokens(rng, 5)
    table = {
        (): {E: -3.0, A: -1.0, B: -4.0},
        (A,): {E: -3.0, C: -0.5},
        (B,): {E: -5.0, D: -4.0},
        (A, C): {E: -0.5},
        (B, D): {E: -1.0},
    }
    asked = one(
        submission, rng, table, beam_width=2, max_new_tokens=5, eos_id=E, length_penalty=0.0
    )
    best(asked, [A, C, E], -2.0)


@trap(
    "never-stops-early",
    catches="the model is asked on although nothing can enter the pool any more",
    severity="major",
    story="One engine always runs to the maximum length; every step of it is paid for.",
)
def never_stops_early(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(): {E: -1.0, A: -8.0}, (A,): {A: -1.0}, (A, A): {A: -1.0}}
    settings: dict[str, Any] = {"beam_width": 1, "max_new_tokens": 3, "eos_id": E}
    for penalty in (0.0, 1.0, -1.0):
        one(submission, rng, table, length_penalty=penalty, count_calls=True, **settings)


@trap(
    "a-tie-does-not-stop",
    catches="a live beam that can only tie with the pool's worst keeps the search going",
    severity="minor",
    story="On a tie the earlier hypothesis wins, so equality is enough to stop.",
)
def a_tie_does_not_stop(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(): {E: -1.0, A: -4.0}, (A,): {A: 0.0}, (A, A): {A: 0.0}, (A, A, A): {E: 0.0}}
    settings: dict[str, Any] = {"beam_width": 1, "max_new_tokens": 4, "eos_id": E}
    one(submission, rng, table, count_calls=True, **settings)


@trap(
    "loose-bound-below-zero",
    catches="with a negative penalty the stop test forgets that one more token is needed",
    severity="minor",
    story="A bound at the present length is correct there, but not exact: it asks once too often.",
)
def loose_bound_below_zero(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(): {E: -3.0, A: -2.0}, (A,): {A: -1.0}, (A, A): {E: -1.0}}
    settings: dict[str, Any] = {"beam_width": 1, "max_new_tokens": 3, "eos_id": E}
    one(submission, rng, table, length_penalty=-1.0, count_calls=True, **settings)


@trap(
    "everything-ends",
    catches="a step in which no beam lives on breaks the search",
    severity="major",
    story="The best live beam is looked up in an empty list.",
)
def everything_ends(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    settings: dict[str, Any] = {"max_new_tokens": 4, "eos_id": E, "strict": True}
    ended = one(submission, rng, {(): {E: -1.0}}, beam_width=1, **settings)
    best(ended, [E], -1.0)
    dead = one(submission, rng, {(): {A: -1.0}, (A,): {}}, beam_width=2, **settings)
    expect.equal(dead.hypotheses, [[]], "the hypotheses of a model that never ends nor goes on")


@trap(
    "cut-off-hypotheses-lost",
    catches="beams still alive at the maximum length are not returned",
    severity="critical",
    story="A model that does not end within the limit gets an empty answer.",
)
def cut_off_lost(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {A: -1.0, B: -2.0}, (A,): {B: -1.0}, (B,): {A: -1.0}}
    asked = one(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    best(asked, [A, B], -1.0)


@trap(
    "cut-off-only-when-nothing-ended",
    catches="beams alive at the maximum length enter only when no hypothesis has finished",
    severity="major",
    story="A fallback in place of a rule: a weak ending keeps every strong unfinished beam out.",
)
def cut_off_only_when_nothing_ended(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {E: -5.0, A: -1.0}, (A,): {B: -1.0}}
    asked = one(
        submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E, length_penalty=0.0
    )
    best(asked, [A, B], -2.0)


@trap(
    "one-token-too-many",
    catches="hypotheses grow beyond max_new_tokens",
    severity="critical",
    story="The limit is tested before the step instead of after it.",
)
def one_token_too_many(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(A,) * n: {A: -1.0} for n in range(6)}
    for limit in (1, 3):
        asked = one(submission, rng, table, beam_width=1, max_new_tokens=limit, eos_id=E)
        best(asked, [A] * limit, -1.0)


@trap(
    "one-token-short",
    catches="the last allowed token is never generated",
    severity="major",
    story="An off-by-one of the limit in the other direction.",
)
def one_token_short(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(A,) * n: {A: -1.0} for n in range(4)}
    asked = one(submission, rng, table, beam_width=1, max_new_tokens=3, eos_id=E)
    best(asked, [A, A, A], -1.0)


# --- which beams live on -------------------------------------------------------------


@trap(
    "identical-beams-at-the-start",
    catches="the search starts with W copies of the prompt",
    severity="critical",
    story="Without one live beam at the start, W identical hypotheses win.",
)
def identical_beams(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B, C = tokens(rng, 4)
    table: Table = {(): {A: -1.0, B: -2.0, C: -3.0}}
    asked = one(submission, rng, table, beam_width=3, max_new_tokens=1, eos_id=E, count_calls=True)
    found = [tuple(hypothesis) for hypothesis, _ in asked.hypotheses[0]]
    expect.that(len(set(found)) == 3, f"the beams are {found}")


@trap(
    "each-beam-keeps-its-own-best",
    catches="every beam is continued by its own best token, without competition between beams",
    severity="critical",
    story="W greedy searches side by side are no beam search.",
)
def each_beam_keeps_its_own_best(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B, C, D = tokens(rng, 5)
    table = {(): {A: -1.0, B: -3.0}, (A,): {C: -1.0, D: -1.5}, (B,): {C: -1.0}}
    asked = one(
        submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E, length_penalty=0.0
    )
    found = [hypothesis for hypothesis, _ in asked.hypotheses[0]]
    expect.that(found == [[A, C], [A, D]], f"the beams are {found}")


@trap(
    "too-few-live-beams",
    catches="one live beam fewer than W is kept",
    severity="major",
    story="A width that is one short shows only when the last beam is the one that wins.",
)
def too_few_live_beams(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B, C = tokens(rng, 4)
    table = {(): {A: -1.0, B: -2.0, C: -3.0}, (A,): {E: -6.0}, (B,): {E: -6.0}, (C,): {E: -0.5}}
    asked = one(
        submission, rng, table, beam_width=3, max_new_tokens=2, eos_id=E, length_penalty=0.0
    )
    best(asked, [C, E], -3.5)


@trap(
    "too-many-live-beams",
    catches="more than W beams live on",
    severity="major",
    story="Taking 2W candidates is right only when they are cut to W afterwards.",
)
def too_many_live_beams(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B, C = tokens(rng, 4)
    table = {(): {A: -1.0, B: -2.0, C: -3.0}, (A,): {E: -6.0}, (B,): {E: -6.0}, (C,): {E: -0.5}}
    asked = one(
        submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E, length_penalty=0.0
    )
    best(asked, [A, E], -7.0)


@trap(
    "zero-probability-lives-on",
    catches="a continuation of probability 0 becomes a beam",
    severity="major",
    story="With fewer possible tokens than W, the top W fill up with impossible ones.",
)
def zero_probability_lives_on(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    settings: dict[str, Any] = {"beam_width": 3, "max_new_tokens": 1, "eos_id": E}
    asked = one(submission, rng, {(): {A: -1.0}}, strict=True, **settings)
    expect.equal(asked.hypotheses, [[([A], -1.0)]], "the only possible hypothesis")


@trap(
    "zero-probability-ends",
    catches="an EOS continuation of probability 0 enters the pool",
    severity="major",
    story="A score of -inf fills a place of the pool and lets the search stop.",
)
def zero_probability_ends(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(): {A: -1.0}, (A,): {A: -1.0}}
    settings: dict[str, Any] = {"beam_width": 2, "max_new_tokens": 2, "eos_id": E}
    asked = one(submission, rng, table, strict=True, **settings)
    expect.equal(asked.hypotheses, [[([A, A], -1.0)]], "the only possible hypothesis")


@trap(
    "width-over-vocabulary",
    catches="a beam width above the number of continuations fails",
    severity="major",
    story="The first step has one beam and V tokens; a top-k of W > V is refused by the library.",
)
def width_over_vocabulary(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = (int(t) for t in rng.permutation(3))
    rows = {E: -2.0, A: -1.0, B: -1.5}
    table = {(): rows, (A,): rows, (B,): rows}
    settings: dict[str, Any] = {"beam_width": 11, "max_new_tokens": 2, "eos_id": E}
    asked = lm.run_tables(submission, 3, {prompt_of(rng): table}, **settings)
    expect.that(len(asked.hypotheses[0]) == 7, "not every possible hypothesis was found")


@trap(
    "tie-later-hypothesis-wins",
    catches="of two finished hypotheses with equal score the later one is preferred",
    severity="minor",
    story="A heap or an insertion at the front turns the order of ties around.",
)
def tie_later_wins(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(): {E: -2.0, A: -1.0}, (A,): {E: -1.0}}
    for width in (1, 2):
        asked = one(
            submission,
            rng,
            table,
            beam_width=width,
            max_new_tokens=2,
            eos_id=E,
            length_penalty=0.0,
        )
        best(asked, [E], -2.0)


@trap(
    "tie-higher-parent-ends-first",
    catches="of two equal hypotheses that end in one step the one of the higher parent wins",
    severity="minor",
    story="Ties decide which of two equal answers a user sees; they must not depend on the device.",
)
def tie_higher_parent_ends(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {A: -1.0, B: -2.0}, (A,): {E: -3.0}, (B,): {E: -2.0}}
    asked = one(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    best(asked, [A, E], -2.0)


@trap(
    "tie-token-before-parent",
    catches="between equal continuations the lower token is preferred before the lower parent",
    severity="minor",
    story="Flattening tokens by beams instead of beams by tokens swaps the two rules.",
)
def tie_token_before_parent(submission: Submission, rng: np.random.Generator) -> None:
    low, A, B, high = rising_tokens(rng, 4)
    E = next(t for t in range(VOCABULARY) if t not in (low, A, B, high))
    table = {(): {A: -1.0, B: -2.0}, (A,): {high: -3.0}, (B,): {low: -2.0}}
    asked = one(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    best(asked, [A, high], -2.0)


@trap(
    "tie-higher-token-wins",
    catches="between equal continuations of one beam the higher token is preferred",
    severity="minor",
    story="A reversed ascending sort reverses the ties with it.",
)
def tie_higher_token_wins(submission: Submission, rng: np.random.Generator) -> None:
    low, middle, high, E = rising_tokens(rng, 4)
    table: Table = {(): {low: -1.0, middle: -1.0, high: -1.0}}
    asked = one(submission, rng, table, beam_width=2, max_new_tokens=1, eos_id=E)
    found = [hypothesis for hypothesis, _ in asked.hypotheses[0]]
    expect.that(found == [[low], [middle]], f"ties were broken as {found}")


# --- batches -------------------------------------------------------------------------


def unlike_neighbours(rng: np.random.Generator) -> tuple[int, dict[lm.Prefix, Table]]:
    """Three prompts with W = 2: two stop after two steps, the other one runs for three."""
    E, A, B, C = tokens(rng, 4)
    quick, slow, middle = (prompt_of(rng, length=n + 1, first=100 + n) for n in range(3))
    return E, {
        quick: {(): {E: -0.5, A: -9.0}, (A,): {E: -0.25, B: -6.0}},
        slow: {
            (): {A: -1.0, B: -1.5},
            (A,): {A: -1.0, C: -1.25},
            (B,): {B: -0.25, C: -3.0},
            (B, B): {E: -1.0, A: -2.0},
            (A, A): {E: -2.0, B: -0.5},
        },
        middle: {(): {C: -1.0, E: -2.0}, (C,): {E: -0.5, A: -20.0}},
    }


def alone_and_together(submission: Submission, rng: np.random.Generator) -> None:
    """In every order of the batch each prompt gets what it gets alone."""
    E, tables = unlike_neighbours(rng)
    prompts = list(tables)
    settings: dict[str, Any] = {"beam_width": 2, "max_new_tokens": 3, "eos_id": E}
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        batch = {prompts[index]: tables[prompts[index]] for index in order}
        lm.run_tables(submission, VOCABULARY, batch, **settings)


@trap(
    "batch-ends-with-its-first",
    catches="all prompts stop when the first one is done",
    severity="critical",
    story="A stop test over the whole batch coupled prompts that do not belong together.",
)
def batch_ends_with_its_first(submission: Submission, rng: np.random.Generator) -> None:
    alone_and_together(submission, rng)


@trap(
    "pool-shared-by-prompts",
    catches="the prompts of a batch share one pool of finished hypotheses",
    severity="critical",
    story="A list made once for the class instead of once a prompt.",
)
def pool_shared(submission: Submission, rng: np.random.Generator) -> None:
    alone_and_together(submission, rng)


@trap(
    "rows-cut-by-width",
    catches="the model's rows are handed out W to a prompt although some have fewer live beams",
    severity="critical",
    story="Batch arithmetic that holds only while every prompt has W beams.",
)
def rows_cut_by_width(submission: Submission, rng: np.random.Generator) -> None:
    alone_and_together(submission, rng)


@trap(
    "rows-shift-when-a-prompt-ends",
    catches="after one prompt has ended the others read their neighbour's rows",
    severity="critical",
    story="Rows counted over all prompts, prefixes sent for the open ones only.",
)
def rows_shift(submission: Submission, rng: np.random.Generator) -> None:
    alone_and_together(submission, rng)


@trap(
    "answers-out-of-order",
    catches="answers come in the order in which prompts finish",
    severity="critical",
    story="A batch that retires finished prompts must put their answers back in their places.",
)
def answers_out_of_order(submission: Submission, rng: np.random.Generator) -> None:
    alone_and_together(submission, rng)


@trap(
    "ended-prompts-still-asked",
    catches="the model is still given rows for prompts that are done",
    severity="major",
    story="A library goes on computing finished rows of a batch and throws the result away.",
)
def ended_prompts_still_asked(submission: Submission, rng: np.random.Generator) -> None:
    E, tables = unlike_neighbours(rng)
    settings: dict[str, Any] = {"beam_width": 2, "max_new_tokens": 3, "eos_id": E}
    lm.run_tables(submission, VOCABULARY, tables, count_calls=True, **settings)


@trap(
    "one-call-a-beam",
    catches="the model is called once for every beam",
    severity="major",
    story="Seen in most entries of one round: W·B calls a step where one is enough.",
)
def one_call_a_beam(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {A: -1.0, B: -2.0}, (A,): {A: -1.0}, (B,): {E: -1.0}}
    one(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E, count_calls=True)


@trap(
    "one-call-a-prompt",
    catches="the model is called once for every prompt",
    severity="major",
    story="`for prompt in prompts` around a whole search: batched in name only.",
)
def one_call_a_prompt(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table: Table = {(): {A: -1.0}, (A,): {E: -1.0}}
    tables = {prompt_of(rng, first=100 + n): table for n in range(4)}
    settings: dict[str, Any] = {"beam_width": 2, "max_new_tokens": 2, "eos_id": E}
    lm.run_tables(submission, VOCABULARY, tables, count_calls=True, **settings)


@trap(
    "empty-batch-asks",
    catches="an empty list of prompts still calls the model or fails",
    severity="minor",
    story="A loop that steps first and asks afterwards whether anything is alive.",
)
def empty_batch(submission: Submission, rng: np.random.Generator) -> None:
    stub = Stub(log_probs=lambda prefixes: np.zeros((len(prefixes), VOCABULARY)))
    eos = int(rng.integers(VOCABULARY))
    got = submission.beam_search(stub, [], beam_width=2, max_new_tokens=2, eos_id=eos)
    expect.that(isinstance(got, list | tuple) and len(got) == 0, f"the answer is {got!r}")
    expect.that(not stub.calls, "the model was called for an empty batch")


@trap(
    "empty-prompt-refused",
    catches="a prompt without tokens fails",
    severity="minor",
    story="Unconditional generation starts from nothing.",
)
def empty_prompt(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(): {A: -1.0}, (A,): {E: -1.0}}
    asked = one(submission, rng, table, prompt=(), beam_width=2, max_new_tokens=2, eos_id=E)
    best(asked, [A, E], -1.0)


# --- bad input -----------------------------------------------------------------------


def refused(submission: Submission, rng: np.random.Generator, answer: Any, **changes: Any) -> None:
    """The call is refused, whether before or after the model has been asked."""
    settings = {"beam_width": 2, "max_new_tokens": 3, "eos_id": int(rng.integers(4)), **changes}
    stub = Stub(log_probs=lambda prefixes: answer(len(prefixes)))
    prompts = [[1, 2], [3]]
    expect.raises(BAD, lambda: submission.beam_search(stub, prompts, **settings))


def flat(rows: int) -> np.ndarray:
    return np.full((rows, 4), -2.0)


@trap(
    "width-zero-accepted",
    catches="beam_width below 1 is accepted",
    severity="minor",
    story="Zero beams find nothing and look like a model without an answer.",
)
def width_zero(submission: Submission, rng: np.random.Generator) -> None:
    for width in (0, -int(rng.integers(1, 5))):
        refused(submission, rng, flat, beam_width=width)


@trap(
    "no-new-tokens-accepted",
    catches="max_new_tokens below 1 is accepted",
    severity="minor",
    story="A hypothesis of no tokens has no score: 0 / 0.",
)
def no_new_tokens(submission: Submission, rng: np.random.Generator) -> None:
    for limit in (0, -int(rng.integers(1, 5))):
        refused(submission, rng, flat, max_new_tokens=limit)


@trap(
    "fractional-width-accepted",
    catches="a width or limit that is no whole number is rounded in silence",
    severity="minor",
    story="int(2.5) hides a configuration mistake.",
)
def fractional_width(submission: Submission, rng: np.random.Generator) -> None:
    refused(submission, rng, flat, beam_width=2.5)
    refused(submission, rng, flat, max_new_tokens=2.5)


@trap(
    "nan-penalty-accepted",
    catches="a length penalty that is NaN or infinite is accepted",
    severity="minor",
    story="Every comparison with NaN is false, so the search neither ranks nor stops.",
)
def nan_penalty(submission: Submission, rng: np.random.Generator) -> None:
    for penalty in (float("nan"), float("inf"), float("-inf")):
        refused(submission, rng, flat, length_penalty=penalty)


@trap(
    "negative-eos-wraps",
    catches="a negative eos_id is taken as an index from the end",
    severity="minor",
    story="An unset id of -1 makes the last token of the vocabulary the end.",
)
def negative_eos(submission: Submission, rng: np.random.Generator) -> None:
    refused(submission, rng, flat, eos_id=-int(rng.integers(1, 4)))


@trap(
    "eos-outside-the-vocabulary",
    catches="an eos_id that the model does not have is not refused with a ValueError",
    severity="minor",
    story="Tokenizer and model of different vocabularies.",
)
def eos_outside(submission: Submission, rng: np.random.Generator) -> None:
    for outside in (4, 5 + int(rng.integers(9))):
        refused(submission, rng, flat, eos_id=outside)


@trap(
    "nan-log-probs-accepted",
    catches="NaN from the model is sorted as if it were a number",
    severity="major",
    story="A NaN in the logits decides the order of beams by the whim of the sort.",
)
def nan_log_probs(submission: Submission, rng: np.random.Generator) -> None:
    place = int(rng.integers(4))

    def answer(rows: int) -> np.ndarray:
        values = flat(rows)
        values[-1, place] = np.nan
        return values

    refused(submission, rng, answer)


@trap(
    "wrong-row-count-accepted",
    catches="a model that answers fewer or more rows than prefixes is not noticed",
    severity="major",
    story="Broadcasting makes one row serve all beams without a word.",
)
def wrong_row_count(submission: Submission, rng: np.random.Generator) -> None:
    refused(submission, rng, lambda rows: flat(rows + 1))
    refused(submission, rng, lambda rows: flat(1))
    refused(submission, rng, lambda rows: flat(rows)[:, 0])


@trap(
    "certain-end-lost",
    catches="an EOS continuation of probability 1 does not finish",
    severity="major",
    story="A sum of 0 is taken for a missing one by a test for truth or for less than zero.",
)
def certain_end_lost(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table: Table = {(): {E: 0.0, A: -1.0}}
    asked = one(submission, rng, table, beam_width=1, max_new_tokens=2, eos_id=E)
    best(asked, [E], 0.0)


@trap(
    "large-batch-in-pieces",
    catches="many live beams are given to the model in several calls",
    severity="minor",
    story="A fixed size of model batches, kept from another project.",
)
def large_batch_in_pieces(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table: Table = {(): {A: -1.0}, (A,): {E: -1.0}}
    tables = {prompt_of(rng, first=300 + n): table for n in range(150)}
    settings: dict[str, Any] = {"beam_width": 2, "max_new_tokens": 2, "eos_id": E}
    lm.run_tables(submission, VOCABULARY, tables, count_calls=True, **settings)


@trap(
    "negative-penalty-bound-too-long",
    catches="with a negative penalty the stop test leaves out the very next token",
    severity="major",
    story="A length that has been counted up already is counted up once more.",
)
def negative_penalty_bound_too_long(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(): {E: -5.0, A: -2.0}, (A,): {E: -0.25}}
    asked = one(
        submission, rng, table, beam_width=1, max_new_tokens=8, eos_id=E, length_penalty=-1.0
    )
    best(asked, [A, E], -4.5)


@trap(
    "almost-a-tie",
    catches="scores within a tolerance of each other are treated as equal",
    severity="minor",
    story="A comparison with a small tolerance stops a search that a live beam could still win.",
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
    "late-zero-probability-lives-on",
    catches="after the first step a continuation of probability 0 becomes a beam",
    severity="major",
    story="-inf is replaced by a large negative number where several beams are ranked together.",
)
def late_zero_probability_lives_on(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {A: -1.0, B: -2.0}, (A,): {A: -1.0}, (B,): {B: -1.0}}
    settings: dict[str, Any] = {"beam_width": 4, "max_new_tokens": 2, "eos_id": E}
    asked = one(submission, rng, table, strict=True, **settings)
    want = [[([A, A], -1.0), ([B, B], -1.5)]]
    expect.equal(asked.hypotheses, want, "the only possible hypotheses")
