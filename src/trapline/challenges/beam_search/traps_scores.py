"""Bugs of scores, and of what is returned."""

from typing import Any

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, edits, trap
from trapline.arena.process.proxy import Stub, Submission
from trapline.challenges.beam_search import table as lm
from trapline.challenges.beam_search.situations import (
    BLIND,
    VOCABULARY,
    best,
    by_sum,
    one,
    ordinary_search,
    prompt_of,
    tokens,
)
from trapline.challenges.beam_search.solution_lines import CALL, RESULT, RETURN
from trapline.challenges.beam_search.table import Table

# Parts of the gold solution that several mutants edit.
_TOTALS = "        totals = self.sums[:, None] + log_probs\n"
_SCORE = "        return total / length**self.length_penalty\n"
_DEFAULT = "length_penalty: float = 1.0,"
_ENTER = "            score = self.rules.score(float(total), self.length)\n"


@trap(
    catches="the length penalty is applied to the sum that the next step continues",
    severity="major",
    story="A beam that carries its penalised score compounds the penalty at every step.",
    mutant=edit("totals.ravel()[chosen]", "self.rules.score(totals.ravel()[chosen], self.length)"),
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
    catches="finished hypotheses of different length are ranked by sum, not by score",
    severity="major",
    story="Two hypotheses of different length under a penalty: the sum favours the shorter one.",
    mutant=edit(
        "key=lambda hypothesis: -hypothesis.score)",
        "key=lambda h: -h.score * len(h.tokens) ** self.rules.length_penalty)",
    ),
    also=[
        # The pool is cut by sum, and listed by score.
        edit(
            "        del self.pool[self.rules.beam_width :]\n",
            "        power = self.rules.length_penalty\n"
            "        self.pool.sort(key=lambda h: -h.score * len(h.tokens) ** power)\n"
            "        del self.pool[self.rules.beam_width :]\n"
            "        self.pool.sort(key=lambda hypothesis: -hypothesis.score)\n",
        )
    ],
    seen=BLIND,
)
def ranked_by_sum(submission: Submission, rng: np.random.Generator) -> None:
    the_longer_end_wins(submission, rng)
    E, A, B = tokens(rng, 3)
    # The longer one also keeps its place in a pool of one.
    table: Table = {(): {E: -2.0, A: -1.0}, (A,): {E: -2.0, B: -9.0}}
    best(one(submission, rng, table, beam_width=1, max_new_tokens=2, eos_id=E), [A, E], -1.5)


@trap(
    catches="the prompt's tokens count in the length that the penalty uses",
    severity="critical",
    story="Reported against a serving engine in 2024 and still there: with a long prompt the "
    "penalty has almost no effect; it changes the winner in a third to a half of the cases.",
    mutant=edit(_ENTER, _ENTER.replace("self.length", "self.length + len(self.prompt)")),
    seen="a public issue: vllm-project/vllm#2606",
)
def prompt_counted_in_length(submission: Submission, rng: np.random.Generator) -> None:
    E, A, table = two_ends_of_different_length(rng)
    prompt = prompt_of(rng, length=40)
    asked = one(submission, rng, table, prompt=prompt, beam_width=2, max_new_tokens=2, eos_id=E)
    best(asked, [A, E], -1.5)


@trap(
    catches="the length leaves out the EOS token",
    severity="major",
    story="A well-known library changed this between releases; older ones divided by one less.",
    mutant=edit(
        _ENTER,
        "            n = self.length - (tokens[-1] == self.rules.eos_id)\n"
        "            score = self.rules.score(float(total), max(n, 1))\n",
    ),
    seen="a public issue: huggingface/transformers#8722",
)
def eos_not_counted(submission: Submission, rng: np.random.Generator) -> None:
    the_longer_end_wins(submission, rng)


@trap(
    catches="hypotheses cut off at the maximum length are counted one token too long",
    severity="major",
    story="One is added for an end token that never comes.",
    mutant=edit(
        _ENTER,
        "            n = self.length + (tokens[-1] != self.rules.eos_id)\n"
        "            score = self.rules.score(float(total), n)\n",
    ),
    seen=BLIND,
)
def unfinished_length_off_by_one(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {A: -2.0}, (A,): {B: -2.0}}
    asked = one(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    best(asked, [A, B], -2.0)


@trap(
    catches="a length penalty of zero or less is treated as no penalty",
    severity="major",
    story="`if length_penalty > 0` reads naturally and disables half of the range.",
    mutant=edit(_SCORE, _SCORE.replace("self.length_penalty", "max(self.length_penalty, 0.0)")),
    control=ordinary_search,
)
def negative_penalty_ignored(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(): {E: -3.0, A: -1.0}, (A,): {E: -1.0}}
    asked = one(
        submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E, length_penalty=-1.0
    )
    best(asked, [E], -3.0)


def two_ends_with_a_penalty(submission: Submission, rng: np.random.Generator) -> None:
    """The same, and the penalty is given."""
    E, A, table = two_ends_of_different_length(rng)
    asked = one(
        submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E, length_penalty=1.0
    )
    best(asked, [A, E], -1.5)


@trap(
    catches="a default length_penalty other than 1",
    severity="major",
    story="Papers and libraries have 0, 0.6 or 2.",
    mutant=edit(_DEFAULT, "length_penalty: float = 0.0,"),
    also=[edit(_DEFAULT, f"length_penalty: float = {other},") for other in (0.5, 0.6, 0.7, 2.0)],
    control=two_ends_with_a_penalty,
)
def another_default_penalty(submission: Submission, rng: np.random.Generator) -> None:
    the_longer_end_wins(submission, rng)


def without_penalty(submission: Submission, rng: np.random.Generator) -> None:
    """The same, and the penalty is 0: the shorter one wins by its sum."""
    E, _, table = two_ends_of_different_length(rng)
    asked = by_sum(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    best(asked, [E], -2.0)


@trap(
    catches="length_penalty=0.0 falls back to the default",
    severity="major",
    story="`length_penalty or 1.0` treats 0.0 as absent.",
    mutant=edit("        finite(length_penalty,", "        finite(length_penalty or 1.0,"),
    seen=BLIND,
    control=ordinary_search,
)
def zero_penalty_as_default(submission: Submission, rng: np.random.Generator) -> None:
    without_penalty(submission, rng)


@trap(
    catches="the sum is multiplied by the length's power instead of divided",
    severity="major",
    story="Sums are negative, so the direction of the penalty is easily reversed.",
    mutant=edit(_SCORE, _SCORE.replace("/", "*")),
)
def penalty_multiplied(submission: Submission, rng: np.random.Generator) -> None:
    the_longer_end_wins(submission, rng)


@trap(
    catches="the ((5 + n) / 6)^a form of a translation paper is used instead of n^a",
    severity="major",
    story="The best-known formula is not the one that the contract states.",
    mutant=edit(_SCORE, _SCORE.replace("length**", "((5 + length) / 6) ** ")),
    seen=BLIND,
)
def shifted_length_penalty(submission: Submission, rng: np.random.Generator) -> None:
    the_longer_end_wins(submission, rng)


@trap(
    catches="the reported score is the sum, not the score",
    severity="major",
    story="Ranking by one number and printing another made several reports contradict themselves.",
    mutant=edit(
        RESULT,
        RESULT.replace(
            "hypothesis.score)",
            "hypothesis.score * len(hypothesis.tokens) ** self.rules.length_penalty)",
        ),
    ),
)
def score_is_the_sum(submission: Submission, rng: np.random.Generator) -> None:
    the_longer_end_wins(submission, rng)


@trap(
    catches="the model's log-probabilities are put through a softmax again",
    severity="critical",
    story="A log-softmax changes every row that does not sum to 1, as masked rows do not.",
    mutant=edit(
        "    return log_probs\n",
        "    return log_probs - np.log(np.exp(log_probs).sum(axis=1, keepdims=True))\n",
    ),
    seen=BLIND,
)
def log_probabilities_as_logits(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(): {E: -3.0, A: -3.5}, (A,): {E: -0.25}}
    asked = by_sum(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    best(asked, [E], -3.0)


@trap(
    catches="probabilities are multiplied, so long or unlikely hypotheses become 0",
    severity="major",
    story="exp(-800) is 0 in float64; a few hundred tokens of ordinary text are enough.",
    mutant=edit(
        _TOTALS,
        "        with np.errstate(divide='ignore'):\n"
        "            totals = np.log(np.exp(self.sums)[:, None] * np.exp(log_probs))\n",
    ),
    control=ordinary_search,
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
    asked = by_sum(submission, rng, table, strict=True, **settings)
    best(asked, [B, C, E], -802.0)


@trap(
    catches="scores are made of probabilities, added or multiplied, not of log-probabilities",
    severity="major",
    story="What the model answers is put through exp before it is used.",
    mutant=edit(_TOTALS, _TOTALS.replace("log_probs", "np.exp(log_probs)")),
    also=[
        edit(
            _TOTALS,
            _TOTALS.replace(
                "log_probs", "np.where(log_probs > -np.inf, np.exp(log_probs), -np.inf)"
            ),
        ),
        edits(
            ("self.sums = np.zeros(1)", "self.sums = np.ones(1)"),
            (_TOTALS, _TOTALS.replace("+ log_probs", "* np.exp(log_probs)")),
        ),
    ],
)
def probabilities_in_the_sum(submission: Submission, rng: np.random.Generator) -> None:
    the_longer_end_wins(submission, rng)


@trap(
    catches="sums are kept in the model's own float32",
    severity="major",
    story="In low precision the later tokens of a long hypothesis stop making a difference.",
    mutant=edits(
        ("np.asarray(answer, dtype=np.float64)", "np.asarray(answer)"),
        (
            _TOTALS,
            "        totals = self.sums.astype(log_probs.dtype)[:, None] + log_probs\n",
        ),
    ),
    seen=BLIND,
    control=ordinary_search,
)
def sums_in_float32(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    worse, better = sorted(set(range(VOCABULARY)) - {E, A})[:2]
    big = -(2.0**24)
    table = {(): {A: big}, (A,): {worse: -1.5, better: -1.25}}
    settings: dict[str, Any] = {"beam_width": 1, "max_new_tokens": 2, "eos_id": E}
    settings |= {"dtype": np.float32, "strict": True}
    asked = by_sum(submission, rng, table, **settings)
    best(asked, [A, better], big - 1.25)


@trap(
    catches="the returned tokens begin with the prompt",
    severity="major",
    story="Generation interfaces differ in this; the contract says without.",
    mutant=edit(RESULT, RESULT.replace("(hypothesis.tokens", "(self.prompt + hypothesis.tokens")),
    seen=BLIND,
)
def prompt_in_the_answer(submission: Submission, rng: np.random.Generator) -> None:
    the_longer_end_wins(submission, rng)


@trap(
    catches="the EOS token is taken off the returned tokens",
    severity="major",
    story="Without it a caller cannot tell a finished hypothesis from one cut off.",
    mutant=edit(
        RESULT,
        RESULT.replace(
            "(hypothesis.tokens",
            "([t for t in hypothesis.tokens if t != self.rules.eos_id]",
        ),
    ),
)
def eos_stripped(submission: Submission, rng: np.random.Generator) -> None:
    the_longer_end_wins(submission, rng)


@trap(
    catches="shorter hypotheses are filled up to a common length",
    severity="major",
    story="Rows of a finished prompt went on producing fake tokens until the whole batch was done.",
    mutant=edit(
        RESULT,
        RESULT.replace(
            "(hypothesis.tokens",
            "(hypothesis.tokens + [self.rules.eos_id]"
            " * (self.rules.max_new_tokens - len(hypothesis.tokens))",
        ),
    ),
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
    catches="generated tokens are appended to the caller's prompt",
    severity="major",
    story="`prefix += [token]` changes a list that belongs to the caller.",
    mutant=edits(
        ("Search(token_list(prompt), rules)", "Search(prompt, rules)"),
        (RESULT, "        self.prompt += self.pool[0].tokens\n" + RESULT),
    ),
    seen=BLIND,
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
    catches="the answer to a prompt is remembered and given again for another model",
    severity="major",
    story="A module-level cache keyed by the prompt survives from one call to the next.",
    mutant=edit(
        RETURN,
        "    return [\n"
        "        REMEMBERED.setdefault(tuple(s.prompt), s.results()) for s in searches\n"
        "    ]\n\n\nREMEMBERED = {}\n",
    ),
    seen=BLIND,
    also=(
        edits(
            (
                CALL,
                "    key = str(prefixes)\n"
                "    if key not in REMEMBERED:\n"
                "        REMEMBERED[key] = np.array(lm.log_probs(prefixes))\n"
                "    log_probs = checked(REMEMBERED[key], len(prefixes), eos_id)\n",
            ),
            (RETURN, RETURN + "\n\nREMEMBERED = {}\n"),
        ),
    ),
    keeps_state=True,
)
def answers_remembered(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    prompt, clean = prompt_of(rng), submission.clean()
    for last in (-2.0, -3.0):
        table = {(): {A: -1.0}, (A,): {E: last}}
        settings: dict[str, Any] = {"beam_width": 1, "max_new_tokens": 2, "eos_id": E}
        asked = by_sum(clean, rng, table, prompt=prompt, **settings)
        best(asked, [A, E], last - 1.0)


@trap(
    catches="sums are kept in float32 even where the model answers in float64",
    severity="major",
    story="A buffer of the wrong dtype costs half of the digits.",
    mutant=edit(
        _TOTALS,
        _TOTALS.replace("log_probs\n", "log_probs.astype(np.float32)\n")
        + "        totals = totals.astype(np.float32)\n",
    ),
    seen=BLIND,
    control=ordinary_search,
)
def float64_summed_in_float32(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    worse, better = sorted(set(range(VOCABULARY)) - {E, A})[:2]
    big = -(2.0**24)
    table = {(): {A: big}, (A,): {worse: -1.5, better: -1.25}}
    settings: dict[str, Any] = {"beam_width": 1, "max_new_tokens": 2, "eos_id": E}
    asked = by_sum(submission, rng, table, strict=True, **settings)
    best(asked, [A, better], big - 1.25)


@trap(
    catches="the model's float64 values are rounded to float32 before they are summed",
    severity="major",
    story="np.asarray(answer, np.float32) makes neighbours equal.",
    mutant=edit(
        "np.asarray(answer, dtype=np.float64)",
        "np.asarray(answer, dtype=np.float32).astype(np.float64)",
    ),
    seen=BLIND,
    control=ordinary_search,
)
def model_rounded_to_float32(submission: Submission, rng: np.random.Generator) -> None:
    (E,) = tokens(rng, 1)
    worse, better = sorted(set(range(VOCABULARY)) - {E})[:2]
    table: Table = {(): {worse: -1.0 - 2.0**-30, better: -1.0}}
    settings: dict[str, Any] = {"beam_width": 1, "max_new_tokens": 1, "eos_id": E}
    asked = by_sum(submission, rng, table, strict=True, **settings)
    best(asked, [better], -1.0)


@trap(
    catches="the live beams that enter at the limit are rated by their sum, not by their score",
    severity="major",
    story="The end of a search is a path of its own, and the penalty is forgotten on it.",
    seen=BLIND,
    mutant=edit(
        "            self._enter(self.beams, self.sums)\n",
        "            factor = self.length**self.rules.length_penalty\n"
        "            self._enter(self.beams, self.sums * factor)\n",
    ),
)
def cut_off_score_is_the_sum(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {A: -2.0}, (A,): {B: -2.0}}
    asked = one(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    best(asked, [A, B], -2.0)


def under_penalty_two(submission: Submission, rng: np.random.Generator) -> None:
    """Penalty 2: [A, E] has -3 / 4, [E] has -2."""
    E, A, table = two_ends_of_different_length(rng)
    asked = one(
        submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E, length_penalty=2.0
    )
    best(asked, [A, E], -0.75)


@trap(
    catches="length_penalty is ignored: every sum is divided by its length",
    severity="major",
    story="The mean log-probability is right for the default only.",
    mutant=edit(_SCORE, "        return total / length\n"),
    control=ordinary_search,
)
def penalty_ignored(submission: Submission, rng: np.random.Generator) -> None:
    under_penalty_two(submission, rng)


@trap(
    catches="the sum is not divided at all: length_penalty has no effect",
    severity="major",
    story="The penalty is an argument that nothing reads.",
    mutant=edit(_SCORE, "        return total\n"),
)
def score_not_normalised(submission: Submission, rng: np.random.Generator) -> None:
    under_penalty_two(submission, rng)


@trap(
    catches="the length is multiplied by the penalty instead of raised to it",
    severity="major",
    story="n * penalty and n ** penalty agree for a penalty of 1.",
    mutant=edit(_SCORE, "        return total / (length * self.length_penalty or 1.0)\n"),
)
def penalty_as_a_factor(submission: Submission, rng: np.random.Generator) -> None:
    under_penalty_two(submission, rng)


@trap(
    catches="the penalty is a term, so much for every token, instead of the power of a divisor",
    severity="major",
    story="A reward for each word is the older way to favour long translations.",
    mutant=edit(_SCORE, "        return total - self.length_penalty * length\n"),
    also=[edit(_SCORE, "        return total + self.length_penalty * length\n")],
    control=without_penalty,
)
def penalty_as_a_term(submission: Submission, rng: np.random.Generator) -> None:
    the_longer_end_wins(submission, rng)


@trap(
    catches="base and exponent change places: the penalty is raised to the length",
    severity="major",
    story="n ** a and a ** n are one slip apart.",
    mutant=edit(_SCORE, "        return total / (self.length_penalty**length or 1.0)\n"),
    also=[edit(_SCORE, "        return total / self.length_penalty**length\n")],
)
def penalty_to_the_length(submission: Submission, rng: np.random.Generator) -> None:
    under_penalty_two(submission, rng)


@trap(
    catches="every length is one too long",
    severity="major",
    story="A token before the first one, or the next one, is counted.",
    mutant=edit(_ENTER, _ENTER.replace("self.length", "self.length + 1")),
)
def length_one_too_long(submission: Submission, rng: np.random.Generator) -> None:
    the_longer_end_wins(submission, rng)


@trap(
    catches="every length is one too short",
    severity="major",
    story="The length is that of the prefix before the last token.",
    mutant=edit(_ENTER, _ENTER.replace("self.length", "max(self.length - 1, 1)")),
    also=[
        edit(_SCORE, _SCORE.replace("length**", "max(length - 1, 1) ** ")),
        # The first token has length 0.
        edit(_ENTER, _ENTER.replace("self.length", "self.length - 1")),
        edits(
            ("        self.length += 1\n", ""),
            (_TOTALS, _TOTALS + "        self.length = len(self.beams[0])\n"),
        ),
    ],
)
def length_one_too_short(submission: Submission, rng: np.random.Generator) -> None:
    the_longer_end_wins(submission, rng)


@trap(
    catches="a negative length penalty is taken for a positive one",
    severity="major",
    story="abs() protects against a value that is allowed.",
    mutant=edit(_SCORE, _SCORE.replace("self.length_penalty", "abs(self.length_penalty)")),
    control=ordinary_search,
)
def negative_penalty_made_positive(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(): {E: -3.0, A: -1.0}, (A,): {E: -1.0}}
    asked = one(
        submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E, length_penalty=-1.0
    )
    best(asked, [E], -3.0)


@trap(
    catches="the score is a probability, exp of what the contract asks for",
    severity="major",
    story="The order stays right, the numbers do not.",
    mutant=edit(RESULT, RESULT.replace("hypothesis.score)", "math.exp(hypothesis.score))")),
)
def score_is_a_probability(submission: Submission, rng: np.random.Generator) -> None:
    the_longer_end_wins(submission, rng)


@trap(
    catches="a negative length penalty given as an int fails",
    severity="minor",
    story="NumPy refuses integers to negative integer powers.",
    mutant=edits(
        ("    return float(value)\n", "    return value\n"),
        (_SCORE, _SCORE.replace("length**", "np.int64(length) ** ")),
    ),
    control=ordinary_search,
)
def integer_penalty_fails(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(): {E: -3.0, A: -1.0}, (A,): {E: -1.0}}
    asked = one(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E, length_penalty=-1)
    best(asked, [E], -3.0)


def one_vocabulary(submission: Submission, rng: np.random.Generator) -> None:
    _two_models(submission, rng, sizes=(9, 9))


@trap(
    catches="the size of the vocabulary is remembered from one call to the next",
    severity="major",
    story="The check that all answers of the model agree in size keeps the first size on a class "
    "or in a module, and a second model with another vocabulary is refused.",
    mutant=edits(
        (
            CALL,
            CALL + "    size = log_probs.shape[1]\n"
            '    if SIZES.setdefault("vocabulary", size) != size:\n'
            '        raise ValueError("the size of the vocabulary has changed")\n',
        ),
        (RETURN, RETURN + "\n\nSIZES = {}\n"),
    ),
    seen=BLIND,
    keeps_state=True,
    control=one_vocabulary,
)
def vocabulary_remembered(submission: Submission, rng: np.random.Generator) -> None:
    _two_models(submission, rng, sizes=(9, 12))


def _two_models(submission: Submission, rng: np.random.Generator, sizes: tuple[int, int]) -> None:
    """Two calls with models of these vocabularies."""
    clean, prompt = submission.clean(), prompt_of(rng)
    for size in sizes:
        E, A = rng.permutation(8)[:2].tolist()
        table: Table = {(): {A: -1.0, E: -2.0}, (A,): {E: -1.0}}
        settings: dict[str, Any] = {"beam_width": 2, "max_new_tokens": 2, "eos_id": E}
        lm.run_tables(clean, size, {prompt: table}, **settings)


def _under_penalties(submission: Submission, rng: np.random.Generator) -> None:
    """Penalties beside the whole numbers and 1, with two ends of different length."""
    for penalty in (0.5, 2.0, 1.75):
        E, _, table = two_ends_of_different_length(rng)
        settings: dict[str, Any] = {"beam_width": 2, "max_new_tokens": 2, "eos_id": E}
        one(submission, rng, table, **settings, length_penalty=penalty)


def _changed_penalty(changed: str) -> Mutant:
    return edit(_SCORE, _SCORE.replace("self.length_penalty", changed))


@trap(
    catches="the length penalty is held within limits: one below 1 counts as 1, or one above as 1",
    severity="major",
    story="Any finite number is allowed; a clip is meant as a protection.",
    mutant=_changed_penalty("max(self.length_penalty, 1.0)"),
    also=[
        _changed_penalty("min(self.length_penalty, 1.0)"),
        _changed_penalty("min(max(self.length_penalty, 0.0), 1.0)"),
    ],
    control=ordinary_search,
)
def penalty_clipped(submission: Submission, rng: np.random.Generator) -> None:
    _under_penalties(submission, rng)


@trap(
    catches="a length penalty between two whole numbers is rounded to one of them",
    severity="major",
    story="int() on a setting that is a number.",
    mutant=_changed_penalty("int(self.length_penalty)"),
    also=[
        _changed_penalty("round(self.length_penalty)"),
        edit("    return float(value)\n", "    return int(value)\n"),
    ],
    control=ordinary_search,
)
def penalty_rounded(submission: Submission, rng: np.random.Generator) -> None:
    _under_penalties(submission, rng)


@trap(
    catches="a small constant is added to the length, or to its power",
    severity="minor",
    story="A guard against a division by zero that cannot happen changes every score.",
    mutant=edit(_SCORE, _SCORE.replace("length**", "(length + 1e-6) ** ")),
    also=[
        edit(_SCORE, _SCORE.replace("length**", "(length + 1e-8) ** ")),
        edit(_SCORE, "        return total / (length**self.length_penalty + 1e-6)\n"),
        edit(_SCORE, "        return total / (length**self.length_penalty + 1e-8)\n"),
    ],
)
def guard_in_the_divisor(submission: Submission, rng: np.random.Generator) -> None:
    the_longer_end_wins(submission, rng)
