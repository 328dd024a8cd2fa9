"""Bugs of the answer's form: what stands where, in which order, and how much of it."""

from typing import Any

import numpy as np

from trapline.arena.judge.traps import Mutant, edit, insert_after, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.beam_search import table as lm
from trapline.challenges.beam_search.situations import (
    VOCABULARY,
    best,
    by_sum,
    one,
    prompt_of,
    tokens,
)
from trapline.challenges.beam_search.solution_lines import RESULT, RETURN
from trapline.challenges.beam_search.table import Table

_ENTER = "            score = self.rules.score(float(total), self.length)\n"


def _pairs(pair: str) -> Mutant:
    """What is returned for each hypothesis h."""
    return edit(RESULT, f"        return [{pair} for h in self.pool]\n")


def _one_hypothesis(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table: Table = {(): {A: -1.0}, (A,): {E: -0.5}}
    by_sum(submission, rng, table, beam_width=1, max_new_tokens=2, eos_id=E)


@trap(
    catches="a hypothesis is returned as (score, tokens) instead of (tokens, score)",
    severity="major",
    story="Pairs that begin with the score can be sorted as they are, and are returned like that.",
    mutant=_pairs("(h.score, h.tokens)"),
    also=[_pairs("(-h.score, h.tokens)")],
)
def score_before_tokens(submission: Submission, rng: np.random.Generator) -> None:
    _one_hypothesis(submission, rng)


@trap(
    catches="hypotheses are not pairs: the score is missing, or they are dicts",
    severity="major",
    story="Generation interfaces differ in this; the contract says (tokens, score).",
    mutant=_pairs("h.tokens"),
    also=[
        _pairs('{"tokens": h.tokens, "score": h.score}'),
        _pairs("(h.tokens, h.score, len(h.tokens))"),
        edit(
            RESULT, "        return [h.tokens for h in self.pool], [h.score for h in self.pool]\n"
        ),
    ],
)
def hypotheses_not_pairs(submission: Submission, rng: np.random.Generator) -> None:
    _one_hypothesis(submission, rng)


def _two_places(submission: Submission, rng: np.random.Generator, width: int) -> None:
    E, A = tokens(rng, 2)
    table: Table = {(): {E: -1.0, A: -2.0}}
    by_sum(submission, rng, table, beam_width=width, max_new_tokens=1, eos_id=E)


@trap(
    catches="only the best hypothesis of a prompt is returned",
    severity="major",
    story="The winner is what a caller wants most; the contract asks for up to W.",
    mutant=edit(RESULT, RESULT.replace("self.pool", "self.pool[:1]")),
    control=lambda submission, rng: _two_places(submission, rng, 1),
)
def only_the_best_returned(submission: Submission, rng: np.random.Generator) -> None:
    _two_places(submission, rng, 2)


@trap(
    catches="one hypothesis fewer than W is returned",
    severity="major",
    story="The worst place of the pool is a mark of where it ends, it is thought.",
    mutant=edit(RESULT, RESULT.replace("self.pool", "self.pool[: self.rules.beam_width - 1]")),
    also=[
        edit("self.pool[self.rules.beam_width :]", "self.pool[self.rules.beam_width - 1 :]"),
        edit(RESULT, RESULT.replace("self.pool", "self.pool[:-1]")),
    ],
)
def one_place_too_few(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table: Table = {(): {E: -1.0, A: -2.0, B: -3.0}}
    by_sum(submission, rng, table, beam_width=3, max_new_tokens=1, eos_id=E)


def _keeps(sort: str) -> Mutant:
    """The pool, sorted and cut like this."""
    return edit(
        "        self.pool.sort(key=lambda hypothesis: -hypothesis.score)\n"
        "        del self.pool[self.rules.beam_width :]\n",
        sort,
    )


def _one_of_two(submission: Submission, rng: np.random.Generator, worse: float) -> None:
    """W = 1: an end at -1, then a live beam at the limit."""
    E, A = tokens(rng, 2)
    table: Table = {(): {E: -1.0, A: worse}}
    asked = by_sum(submission, rng, table, beam_width=1, max_new_tokens=1, eos_id=E, strict=True)
    best(asked, [E], -1.0)


@trap(
    catches="the pool keeps its W worst hypotheses",
    severity="major",
    story="Sorted the wrong way round, and what is cut off is the best.",
    mutant=_keeps(
        "        self.pool.sort(key=lambda hypothesis: hypothesis.score)\n"
        "        del self.pool[self.rules.beam_width :]\n"
    ),
    also=[
        _keeps(
            "        self.pool.sort(key=lambda hypothesis: -hypothesis.score)\n"
            "        del self.pool[: -self.rules.beam_width]\n"
        ),
    ],
    control=lambda submission, rng: _one_of_two(submission, rng, -np.inf),
)
def pool_keeps_the_worst(submission: Submission, rng: np.random.Generator) -> None:
    _one_of_two(submission, rng, -2.0)


def _one_score(submission: Submission, rng: np.random.Generator, total: float) -> None:
    (E,) = tokens(rng, 1)
    settings: dict[str, Any] = {"beam_width": 1, "max_new_tokens": 1, "eos_id": E}
    best(by_sum(submission, rng, {(): {E: total}}, **settings), [E], total)


def _rounded(digits: int) -> Mutant:
    return _pairs(f"(h.tokens, round(h.score, {digits}))")


@trap(
    catches="scores are rounded to a few decimal places",
    severity="major",
    story="What is meant for printing is returned.",
    mutant=_rounded(6),
    also=[
        *map(_rounded, (2, 3, 4, 5)),
        # Before they are compared.
        insert_after(_ENTER, "            score = round(score, 6)\n"),
        insert_after(_ENTER, "            score = round(score, 4)\n"),
    ],
    control=lambda submission, rng: _one_score(submission, rng, -1.5),
)
def scores_rounded(submission: Submission, rng: np.random.Generator) -> None:
    # No other value in float32, so that numbers that go through it pass.
    _one_score(submission, rng, -1.0 - 2.0**-20)


@trap(
    catches="the score is a cost: its sign is the other one, or it is a perplexity",
    severity="major",
    story="A negative log-likelihood is the same ranking with the other sign.",
    mutant=_pairs("(h.tokens, -h.score)"),
    also=[_pairs("(h.tokens, float(np.exp(-h.score)))")],
)
def score_is_a_cost(submission: Submission, rng: np.random.Generator) -> None:
    _one_hypothesis(submission, rng)


def _of_a_batch(submission: Submission, rng: np.random.Generator, prompts: int) -> None:
    """Neither length, nor tokens, nor scores rise or fall along the batch."""
    E, A = tokens(rng, 2)
    lengths, firsts, ends = (3, 4, 2), (101, 102, 100), (-2.0, -3.0, -1.0)
    tables: dict[lm.Prefix, Table] = {
        prompt_of(rng, length=length, first=first): {(): {E: end, A: -4.0}}
        for length, first, end in [*zip(lengths, firsts, ends, strict=True)][:prompts]
    }
    settings: dict[str, Any] = {"beam_width": 2, "max_new_tokens": 1, "eos_id": E}
    lm.run_tables(submission, VOCABULARY, tables, **settings)


def _sorted_by(key: str) -> Mutant:
    """The prompts' answers in this order."""
    return edit(RETURN, RETURN.replace("in searches", f"in sorted(searches, key=lambda s: {key})"))


@trap(
    catches="the answers of a batch come in another order than its prompts: reversed or sorted",
    severity="major",
    story="Prompts are sorted by length to search like with like, and stay sorted.",
    mutant=edit(RETURN, RETURN.replace("in searches", "in reversed(searches)")),
    also=[
        _sorted_by("len(s.prompt)"),
        _sorted_by("-len(s.prompt)"),
        _sorted_by("s.prompt"),
        _sorted_by("-s.pool[0].score if s.pool else np.inf"),
    ],
    control=lambda submission, rng: _of_a_batch(submission, rng, 1),
)
def answers_in_another_order(submission: Submission, rng: np.random.Generator) -> None:
    _of_a_batch(submission, rng, 3)


def _several(submission: Submission, rng: np.random.Generator) -> None:
    """Two prompts with two hypotheses each."""
    _of_a_batch(submission, rng, 2)


@trap(
    catches="a list of one is left out: a batch of one prompt is answered without the outer list, "
    "or a single hypothesis without its own",
    severity="major",
    story="What is convenient for one is another type for a caller who counts on a list.",
    mutant=edit(
        RETURN,
        "    answers = [search.results() for search in searches]\n"
        "    return answers[0] if len(answers) == 1 else answers\n",
    ),
    also=[
        edit(
            RESULT,
            "        pairs = [(h.tokens, h.score) for h in self.pool]\n"
            f"        return pairs[0] if {single} else pairs\n",
        )
        for single in ("len(pairs) == 1", "pairs and self.rules.beam_width == 1")
    ],
    control=_several,
)
def single_one_without_its_list(submission: Submission, rng: np.random.Generator) -> None:
    _one_hypothesis(submission, rng)


def _one_way(submission: Submission, rng: np.random.Generator, log_prob: float) -> None:
    E, A = tokens(rng, 2)
    settings: dict[str, Any] = {"beam_width": 2, "max_new_tokens": 1, "eos_id": E}
    one(submission, rng, {(): {A: log_prob}}, **settings, strict=True)


def _without_any(found: str) -> Mutant:
    """The answer of a prompt without any hypothesis."""
    return edit(RETURN, RETURN.replace("search.results()", f"search.results() or {found}"))


@trap(
    catches="a prompt without any hypothesis gets an empty one, or has no place in the answer",
    severity="major",
    story="There is always a best one, it is thought; where every probability is 0 there is none.",
    mutant=_without_any("[([], 0.0)]"),
    also=[
        _without_any("[([], -math.inf)]"),
        _without_any("None"),
        edit(RETURN, RETURN.replace("searches]", "searches if search.pool]")),
    ],
    control=lambda submission, rng: _one_way(submission, rng, -1.0),
)
def nothing_found_is_something(submission: Submission, rng: np.random.Generator) -> None:
    _one_way(submission, rng, -np.inf)


_SCORE = "        return total / length**self.length_penalty\n"


@trap(
    catches="scores are rounded to float32",
    severity="minor",
    story="The score is taken out of an array of the model's dtype.",
    mutant=_pairs("(h.tokens, float(np.float32(h.score)))"),
    also=[
        edit(_SCORE, "        return float(np.float32(total / length**self.length_penalty))\n"),
        edit(_SCORE, "        return np.float32(total / length**self.length_penalty)\n"),
    ],
    control=lambda submission, rng: _one_score(submission, rng, -1.5),
)
def scores_in_float32(submission: Submission, rng: np.random.Generator) -> None:
    # As a sum it is 0 and a remainder, so that sums in float32 are seen, too.
    _one_score(submission, rng, -1.0 - 2.0**-30)
