"""Bugs of when a search stops."""

from typing import Any

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import edit, edits, insert_before, trap
from trapline.arena.process.proxy import Submission
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
from trapline.challenges.beam_search.solution_lines import BOUND, CALL, RESULT
from trapline.challenges.beam_search.table import Table

_OVER_LENGTHS = (
    "        lengths = range(length + 1, self.max_new_tokens)\n"
    "        return max((self.score(total, n) for n in lengths))\n"
)


@trap(
    catches="the search stops at the first finished hypothesis",
    severity="critical",
    story="Stopping when the top beam ends lost the better, longer output in several toolkits.",
    mutant=edits(
        ("        return bound <= self.pool[-1].score\n", "        return True\n"),
        (
            "        if len(self.pool) < self.rules.beam_width or not self.beams:\n",
            "        if not self.pool or not self.beams:\n",
        ),
    ),
    seen="a public issue: OpenNMT/OpenNMT-py#1320",
)
def first_end_stops(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(): {E: -4.0, A: -1.0}, (A,): {E: -1.0}}
    asked = by_sum(submission, rng, table, beam_width=2, max_new_tokens=3, eos_id=E)
    best(asked, [A, E], -2.0)


@trap(
    catches="the search stops as soon as W hypotheses are finished",
    severity="critical",
    story="The default of one library for years: W finished is not the W best.",
    mutant=edit("        return bound <= self.pool[-1].score\n", "        return True\n"),
    seen=BLIND,
)
def full_pool_stops(submission: Submission, rng: np.random.Generator) -> None:
    # The ends come among the W best continuations: searches fill the pool that look no further.
    # When it is full there are W live beams, each of which could still enter it.
    E, A, B, C, D = tokens(rng, 5)
    table = {
        (): {E: -3.0, A: -1.0, B: -3.5},
        (A,): {E: -1.5, C: -0.5},
        (B,): {D: -0.125},
        (A, C): {E: -0.5},
    }
    asked = one(submission, rng, table, beam_width=2, max_new_tokens=4, eos_id=E)
    best(asked, [A, C, E], -2.0 / 3.0)


@trap(
    catches="the stop test rates live beams at their present length although longer is better",
    severity="critical",
    story="With a positive penalty this heuristic is not a bound; it was reported several times "
    "against the library that has it.",
    mutant=edit(BOUND, "        return self.score(total, length)\n"),
    seen="a public issue: huggingface/transformers#20901",
    control=ordinary_search,
)
def bound_at_current_length(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {E: -2.0, A: -2.5}, (A,): {B: -0.25}, (A, B): {E: -0.25}}
    asked = one(submission, rng, table, beam_width=1, max_new_tokens=4, eos_id=E)
    best(asked, [A, B, E], -1.0)


@trap(
    catches="the stop test allows for one more token only although longer is better",
    severity="critical",
    story="With a positive penalty one step of look-ahead is not a bound either.",
    mutant=edit(BOUND, "        return self.score(total, length + 1)\n"),
    seen=BLIND,
    control=ordinary_search,
)
def bound_at_next_length(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {E: -1.0, A: -2.5}, (A,): {B: -0.25}, (A, B): {B: -0.125}, (A, B, B): {E: -0.125}}
    asked = one(submission, rng, table, beam_width=1, max_new_tokens=4, eos_id=E)
    best(asked, [A, B, B, E], -0.75)


@trap(
    catches="the stop test compares with the hypothesis that entered last, not with the worst",
    severity="major",
    story="The pool is sorted only at the end, and its last element is taken for the worst.",
    mutant=edits(
        (
            "            self.pool.append(Hypothesis(tokens, score))\n",
            "            self.pool.append(Hypothesis(tokens, score))\n"
            "            self.newest = score\n",
        ),
        ("return bound <= self.pool[-1].score", "return bound <= self.newest"),
    ),
    seen=BLIND,
    control=ordinary_search,
)
def bound_against_the_newest(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {E: -3.0, A: -0.5, B: -0.75}, (A,): {A: -0.5}, (B,): {E: -0.125}, (A, A): {E: 0.0}}
    settings: dict[str, Any] = {"beam_width": 2, "max_new_tokens": 3, "length_penalty": 0.0}
    asked = one(submission, rng, table, eos_id=E, **settings)
    best(asked, [B, E], -0.875)


@trap(
    catches="max_new_tokens counts the tokens of the prompt, too",
    severity="critical",
    story="A maximum length and a maximum number of new tokens are two settings in many libraries.",
    mutant=edits(
        ("from dataclasses import dataclass\n", "from dataclasses import dataclass, replace\n"),
        (
            "        self.rules = rules\n",
            "        most = max(1, rules.max_new_tokens - len(prompt))\n"
            "        self.rules = replace(rules, max_new_tokens=most)\n",
        ),
    ),
    seen=BLIND,
)
def limit_counts_the_prompt(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {A: -1.0}, (A,): {B: -1.0}, (A, B): {A: -1.0}, (A, B, A): {E: -1.0}}
    asked = one(submission, rng, table, beam_width=1, max_new_tokens=4, eos_id=E)
    best(asked, [A, B, A, E], -1.0)


@trap(
    catches="the stop test uses the maximum length also where shorter is better",
    severity="critical",
    story="The bound for a positive penalty stops a search with a negative one far too early.",
    mutant=edit(BOUND, "        return self.score(total, self.max_new_tokens)\n"),
    seen=BLIND,
    control=ordinary_search,
)
def negative_penalty_bound(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(): {E: -4.0, A: -1.0}, (A,): {E: -0.5}}
    asked = one(
        submission, rng, table, beam_width=1, max_new_tokens=8, eos_id=E, length_penalty=-1.0
    )
    best(asked, [A, E], -3.0)


@trap(
    catches="the stop test looks at the worst live beam instead of the best",
    severity="critical",
    story="Taking the last of a sorted list for its first.",
    mutant=edit("float(self.sums[0])", "float(self.sums[-1])"),
    seen=BLIND,
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
    asked = by_sum(submission, rng, table, beam_width=2, max_new_tokens=5, eos_id=E)
    best(asked, [A, C, E], -2.0)


@trap(
    catches="the model is still called although nothing can enter the pool any more",
    severity="major",
    story="One engine always runs to the maximum length; every extra step costs a model call.",
    mutant=edit("        return bound <= self.pool[-1].score\n", "        return False\n"),
    control=ordinary_search,
)
def never_stops_early(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(): {E: -1.0, A: -8.0}, (A,): {A: -1.0}, (A, A): {A: -1.0}}
    settings: dict[str, Any] = {"beam_width": 1, "max_new_tokens": 3, "eos_id": E}
    for penalty in (0.0, 1.0, -1.0):
        one(submission, rng, table, length_penalty=penalty, count_calls=True, **settings)


@trap(
    catches="a live beam that can only tie with the pool's worst keeps the search going",
    severity="minor",
    story="On a tie the earlier hypothesis wins, so equality is enough to stop.",
    mutant=edit("bound <= self.pool[-1].score", "bound < self.pool[-1].score"),
    seen=BLIND,
    control=ordinary_search,
)
def a_tie_does_not_stop(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(): {E: -1.0, A: -4.0}, (A,): {A: 0.0}, (A, A): {A: 0.0}, (A, A, A): {E: 0.0}}
    settings: dict[str, Any] = {"beam_width": 1, "max_new_tokens": 4, "eos_id": E}
    one(submission, rng, table, count_calls=True, **settings)


@trap(
    catches="with a negative penalty the stop test ignores that one more token is needed",
    severity="minor",
    story="A bound at the present length is correct there, but not exact: it makes one call too "
    "many.",
    mutant=edit(BOUND, BOUND.replace("length + 1", "length")),
    seen=BLIND,
    control=ordinary_search,
)
def loose_bound_below_zero(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(): {E: -3.0, A: -2.0}, (A,): {A: -1.0}, (A, A): {E: -1.0}}
    settings: dict[str, Any] = {"beam_width": 1, "max_new_tokens": 3, "eos_id": E}
    one(submission, rng, table, length_penalty=-1.0, count_calls=True, **settings)


@trap(
    catches="a step after which no beam is alive breaks the search",
    severity="major",
    story="The best live beam is looked up in an empty list.",
    mutant=edit(" or not self.beams:\n", ":\n"),
    control=ordinary_search,
)
def everything_ends(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    settings: dict[str, Any] = {"max_new_tokens": 4, "eos_id": E, "strict": True}
    ended = one(submission, rng, {(): {E: -1.0}}, beam_width=1, **settings)
    best(ended, [E], -1.0)
    dead = one(submission, rng, {(): {A: -1.0}, (A,): {}}, beam_width=2, **settings)
    expect.equal(dead.hypotheses, [[]], "the hypotheses of a model that never ends nor goes on")


@trap(
    catches="beams still alive at the maximum length are not returned",
    severity="critical",
    story="A model that does not end within the limit gets an empty answer.",
    mutant=edit("            self._enter(self.beams, self.sums)\n", ""),
    seen=BLIND,
)
def cut_off_hypotheses_lost(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {A: -1.0, B: -2.0}, (A,): {B: -1.0}, (B,): {A: -1.0}}
    asked = one(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    best(asked, [A, B], -1.0)


@trap(
    catches="beams alive at the maximum length enter only when no hypothesis has finished",
    severity="major",
    story="A fallback instead of a rule: one weak finished hypothesis excludes every strong "
    "unfinished beam.",
    mutant=insert_before(
        "            self._enter(self.beams, self.sums)\n", "            if not self.pool:\n    "
    ),
    # They enter, and are left out of the answer.
    also=[
        edit(
            RESULT,
            "        found = [(h.tokens, h.score) for h in self.pool]\n"
            "        ended = [pair for pair in found if pair[0][-1] == self.rules.eos_id]\n"
            "        return ended or found\n",
        )
    ],
    seen=BLIND,
)
def cut_off_only_when_nothing_ended(submission: Submission, rng: np.random.Generator) -> None:
    # The end is the second best continuation of A, so that all searches look at it.
    E, A, B = tokens(rng, 3)
    table = {(): {E: -5.0, A: -1.0}, (A,): {B: -1.0, E: -20.0}}
    asked = by_sum(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    best(asked, [A, B], -2.0)


@trap(
    catches="hypotheses grow beyond max_new_tokens",
    severity="major",
    story="The limit is checked before the step instead of after it.",
    mutant=edit("        if self.length == self.rules", "        if self.length > self.rules"),
    seen=BLIND,
)
def one_token_too_many(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(A,) * n: {A: -1.0} for n in range(6)}
    for limit in (1, 3):
        asked = one(submission, rng, table, beam_width=1, max_new_tokens=limit, eos_id=E)
        best(asked, [A] * limit, -1.0)


@trap(
    catches="the last allowed token is never generated",
    severity="major",
    story="An off-by-one error of the limit in the other direction.",
    mutant=edit("== self.rules.max_new_tokens:\n", ">= self.rules.max_new_tokens - 1:\n"),
    also=[edit("== self.rules.max_new_tokens:\n", "== self.rules.max_new_tokens - 1:\n")],
)
def one_token_short(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(A,) * n: {A: -1.0} for n in range(4)}
    asked = one(submission, rng, table, beam_width=1, max_new_tokens=3, eos_id=E)
    best(asked, [A, A, A], -1.0)


@trap(
    catches="a search stops although its pool still has room",
    severity="major",
    story="Live beams are compared with the worst of a pool that is not full.",
    seen=BLIND,
    mutant=edit(
        "        if len(self.pool) < self.rules.beam_width or not self.beams:\n",
        "        if not self.pool or not self.beams:\n",
    ),
    control=ordinary_search,
)
def stops_before_the_pool_is_full(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(): {E: -1.0, A: -4.0}, (A,): {E: -1.0}}
    settings: dict[str, Any] = {"max_new_tokens": 3, "eos_id": E, "length_penalty": 0.0}
    asked = one(submission, rng, table, beam_width=2, strict=True, **settings)
    expect.equal(asked.hypotheses, [[([E], -1.0), ([A, E], -5.0)]], "the hypotheses")


def second_place_open(submission: Submission, rng: np.random.Generator) -> None:
    """The best is found in the first step; what takes the second place comes later."""
    E, A, B = tokens(rng, 3)
    table = {
        (): {E: -1.0, A: -2.0, B: -2.5},
        (A,): {E: -6.0, B: -0.25},
        (B,): {E: -6.0},
        (A, B): {E: -0.25},
    }
    asked = by_sum(submission, rng, table, beam_width=2, max_new_tokens=4, eos_id=E)
    found = [hypothesis for hypothesis, _ in asked.hypotheses[0]]
    expect.that(found == [[E], [A, B, E]], f"the hypotheses are {found}")


@trap(
    catches="the stop test compares live beams with the best of the pool instead of the worst",
    severity="major",
    story="Enough for the first hypothesis, not for the other W - 1.",
    mutant=edit("bound <= self.pool[-1].score", "bound <= self.pool[0].score"),
    control=ordinary_search,
)
def bound_against_the_best(submission: Submission, rng: np.random.Generator) -> None:
    second_place_open(submission, rng)


@trap(
    catches="a search stops when its best finished hypothesis beats every live beam",
    severity="major",
    story="As soon as the winner is known, the other places are left as they are, even empty.",
    mutant=edits(
        ("bound <= self.pool[-1].score", "bound <= self.pool[0].score"),
        (
            "        if len(self.pool) < self.rules.beam_width or not self.beams:\n",
            "        if not self.pool or not self.beams:\n",
        ),
    ),
)
def stops_when_the_winner_is_known(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B, C = tokens(rng, 4)
    table = {(): {E: -3.0, A: -1.0, B: -1.5}, (A,): {E: -1.0, C: -1.5}, (A, C): {E: -0.25}}
    settings: dict[str, Any] = {"max_new_tokens": 4, "eos_id": E, "length_penalty": 0.0}
    asked = one(submission, rng, table, beam_width=3, strict=True, **settings)
    found = [hypothesis for hypothesis, _ in asked.hypotheses[0]]
    expect.that(found == [[A, E], [A, C, E], [E]], f"the hypotheses are {found}")


@trap(
    catches="the stop test compares the bare sum of a live beam with scores",
    severity="major",
    story="A sum is never above its own score under a positive penalty, so searches stop early.",
    mutant=edit(BOUND, "        return total\n"),
    control=ordinary_search,
)
def bound_by_the_bare_sum(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table: Table = {(): {E: -2.0, A: -2.5}, (A,): {E: -0.5}}
    asked = one(submission, rng, table, beam_width=1, max_new_tokens=3, eos_id=E)
    best(asked, [A, E], -1.5)


@trap(
    catches="the stop test takes the longest hypothesis to be one token shorter than allowed",
    severity="major",
    story="A maximum counted from zero.",
    mutant=edit(
        BOUND, BOUND.replace("self.max_new_tokens)", "max(length + 1, self.max_new_tokens - 1))")
    ),
    # A range without its last number, which is empty in the step before the last.
    also=[
        edit(BOUND, _OVER_LENGTHS.replace("lengths))", "lengths), default=-math.inf)")),
        edit(BOUND, _OVER_LENGTHS),
    ],
    control=ordinary_search,
)
def bound_one_token_short(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {E: -1.0, A: -2.5}, (A,): {B: -0.125}, (A, B): {E: -0.125}}
    asked = one(submission, rng, table, beam_width=1, max_new_tokens=3, eos_id=E)
    best(asked, [A, B, E], -2.75 / 3)


@trap(
    catches="the stop test takes only the longest or only the next length, by the penalty's sign,"
    " the wrong way round",
    severity="major",
    story="Sums are negative: a positive penalty favours the longest hypothesis.",
    mutant=edit(
        BOUND,
        "        n = length + 1 if self.length_penalty > 0 else self.max_new_tokens\n"
        "        return self.score(total, n)\n",
    ),
    control=ordinary_search,
)
def bound_by_the_wrong_sign(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    settings: dict[str, Any] = {"beam_width": 1, "eos_id": E}
    table = {(): {E: -1.0, A: -2.5}, (A,): {B: -0.25}, (A, B): {B: -0.125}, (A, B, B): {E: -0.125}}
    asked = one(submission, rng, table, max_new_tokens=4, **settings)
    expect.that(len(asked.hypotheses[0]) == 1, "W = 1 gives one hypothesis")
    short = {(): {E: -4.0, A: -1.0}, (A,): {E: -0.5}}
    asked = one(submission, rng, short, max_new_tokens=8, length_penalty=-1.0, **settings)
    best(asked, [A, E], -3.0)


@trap(
    catches="the model is asked once before the search, for the size of its vocabulary",
    severity="minor",
    story="Every call counts: the first step's answer has the same shape.",
    mutant=insert_before(
        "    searches = [Search(",
        "    if prompts:\n        lm.log_probs([list(prompts[0])])\n",
    ),
)
def model_asked_for_its_size(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(): {A: -1.0}, (A,): {E: -1.0}}
    one(submission, rng, table, beam_width=1, max_new_tokens=2, eos_id=E, count_calls=True)


_SETTLED = "        elif self._is_settled():\n"
_TOTALS = "        totals = self.sums[:, None] + log_probs\n"


@trap(
    catches="the stop test is made only in steps in which a hypothesis finished",
    severity="minor",
    story="The sums of the live beams sink below the pool in a step without an end, and the model "
    "is asked again for nothing.",
    mutant=edits(
        (_TOTALS, _TOTALS + "        ended = totals[:, self.rules.eos_id] > -np.inf\n"),
        (_SETTLED, "        elif ended.any() and self._is_settled():\n"),
    ),
    seen=BLIND,
    also=(
        edits(
            (_TOTALS, _TOTALS + "        before = list(self.pool)\n"),
            (_SETTLED, "        elif self.pool != before and self._is_settled():\n"),
        ),
    ),
    control=ordinary_search,
)
def stop_tested_only_after_an_end(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {E: -2.0, A: -1.0}, (A,): {B: -3.0}, (A, B): {A: -1.0}, (A, B, A): {A: -1.0}}
    settings: dict[str, Any] = {"beam_width": 1, "max_new_tokens": 4, "eos_id": E}
    by_sum(submission, rng, table, strict=True, count_calls=True, **settings)


@trap(
    catches="the stop test of a prompt takes the best live beam of the whole batch",
    severity="major",
    story="One bound for all rows of a batch: a prompt goes on because another one does well.",
    mutant=edits(
        (
            CALL,
            CALL
            + "    totals = np.concatenate([s.sums for s in open_searches])[:, None] + log_probs\n"
            "    totals[:, eos_id] = -np.inf\n"
            "    Search.best_sum = float(totals.max(initial=-np.inf))\n",
        ),
        (
            "best_possible(float(self.sums[0]), self.length)",
            "best_possible(Search.best_sum, self.length)",
        ),
    ),
    seen=BLIND,
    control=ordinary_search,
)
def bound_of_the_whole_batch(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    low, high = prompt_of(rng, first=100), prompt_of(rng, first=101)
    tables: dict[lm.Prefix, Table] = {
        low: {(): {E: -2.0, A: -3.0}, (A,): {A: -1.0}},
        high: {(): {A: -0.5}, (A,): {E: -0.5}},
    }
    settings: dict[str, Any] = {"beam_width": 1, "max_new_tokens": 3, "eos_id": E}
    lm.run_tables(
        submission,
        VOCABULARY,
        tables,
        strict=True,
        count_calls=True,
        length_penalty=0.0,
        **settings,
    )


_LIVE = "searches if search.beams]"
_GOES_ON = (
    "search.beams or (search.length < search.rules.max_new_tokens"
    " and len(search.pool) < search.rules.beam_width)"
)


@trap(
    catches="a prompt whose beams have all ended goes on while its pool has room: the model is "
    "called without any prefix",
    severity="major",
    story="Whether the pool is full is asked before whether any beam is alive.",
    mutant=edits(
        ("while any(search.beams for", f"while any({_GOES_ON} for"),
        (_LIVE, f"searches if {_GOES_ON}]"),
    ),
    seen=BLIND,
    control=ordinary_search,
)
def dead_end_still_called(submission: Submission, rng: np.random.Generator) -> None:
    (E,) = tokens(rng, 1)
    settings: dict[str, Any] = {"beam_width": 2, "max_new_tokens": 4, "eos_id": E}
    one(submission, rng, {(): {E: -1.0}}, strict=True, **settings)


def _stops_after_a_step(submission: Submission, rng: np.random.Generator, longest: int) -> None:
    E, A = tokens(rng, 2)
    table = {(): {E: -1.0, A: -8.0}, (A,): {A: -1.0}, (A, A): {A: -1.0}}
    settings: dict[str, Any] = {"beam_width": 1, "max_new_tokens": longest, "eos_id": E}
    by_sum(submission, rng, table, count_calls=True, **settings)


@trap(
    catches="the stop test looks at the live beams of the step before",
    severity="minor",
    story="It is made before the beams of the next step are chosen: one call too many.",
    mutant=edits(
        (
            "        self._expand(totals)\n",
            "        settled = self._is_settled()\n        self._expand(totals)\n",
        ),
        (_SETTLED, "        elif settled:\n"),
    ),
    also=[
        edits(
            (_TOTALS, _TOTALS + "        settled = self._is_settled()\n"),
            (_SETTLED, "        elif settled:\n"),
        )
    ],
    control=lambda submission, rng: _stops_after_a_step(submission, rng, 1),
)
def bound_of_the_step_before(submission: Submission, rng: np.random.Generator) -> None:
    _stops_after_a_step(submission, rng, 4)
