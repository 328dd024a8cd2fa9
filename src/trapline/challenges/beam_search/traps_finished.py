"""Bugs of finished hypotheses."""

from typing import Any

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, edits, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.beam_search.situations import (
    BLIND,
    best,
    by_sum,
    one,
    ordinary_search,
    prompt_of,
    rising_tokens,
    tokens,
)
from trapline.challenges.beam_search.solution_lines import EXPAND, POOLED, RESULT
from trapline.challenges.beam_search.table import Table

# Parts of the gold solution that several mutants edit.
_FINISH = "        self._finish(totals[:, self.rules.eos_id])\n"
_MASK = "        totals[:, self.rules.eos_id] = -np.inf\n"
_SORT = "        self.pool.sort(key=lambda hypothesis: -hypothesis.score)\n"
_CUT = "        del self.pool[self.rules.beam_width :]\n"
_LIMIT = "            self._enter(self.beams, self.sums)\n"


@trap(
    catches="a finished hypothesis is thrown away when its beam ends",
    severity="critical",
    story="The best-known bug of beam search: the end at -3.0 loses to a continuation at -5.0 that "
    "has merely not stopped yet.",
    mutant=edit(_FINISH, ""),
    seen="a published answer",
)
def eos_beam_dropped(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {E: -3.0, A: -1.0}, (A,): {B: -4.0}}
    asked = by_sum(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    best(asked, [E], -3.0)


@trap(
    catches="only the hypotheses that finished in the latest step are remembered",
    severity="major",
    story="The list of finished hypotheses is built anew in every step.",
    mutant=insert_before(_FINISH, "        self.pool = []\n"),
)
def pool_forgets_earlier_steps(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {E: -1.0, A: -1.0}, (A,): {E: -2.0, B: -3.0}}
    asked = by_sum(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    best(asked, [E], -1.0)


@trap(
    catches="a beam that has produced EOS is continued",
    severity="critical",
    story="Several open decoders emitted tokens behind the end because a finished beam kept its "
    "slot among the live ones.",
    mutant=edit(_MASK, ""),
    seen="a public issue: facebookresearch/ParlAI#2058",
)
def finished_beam_expanded(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {E: -1.0, A: -2.0}, (A,): {E: -3.0, B: -1.0}, (A, B): {E: -1.0}}
    asked = by_sum(submission, rng, table, beam_width=2, max_new_tokens=3, eos_id=E)
    for hypothesis, _ in asked.hypotheses[0]:
        expect.that(E not in hypothesis[:-1], f"{hypothesis} goes on after its end")
    for prefix in [prefix for call in asked.calls for prefix in call]:
        expect.that(E not in prefix, f"the model was asked to continue {list(prefix)}")


@trap(
    catches="EOS continuations use up places among the live beams",
    severity="critical",
    story="Taking the W best of all continuations and then moving the ended ones out leaves fewer "
    "than W beams alive; big libraries take 2W candidates for this reason.",
    mutant=edits(
        (_MASK, ""),
        (
            "        self._expand(totals)\n",
            "        self._expand(totals)\n"
            "        alive = [i for i, b in enumerate(self.beams) if b[-1] != self.rules.eos_id]\n"
            "        self.beams = [self.beams[i] for i in alive]\n"
            "        self.sums = self.sums[alive]\n",
        ),
    ),
    seen=BLIND,
)
def eos_takes_a_slot(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B, C = tokens(rng, 4)
    table = {(): {E: -1.0, A: -2.0, B: -3.0}, (A,): {E: -9.0, C: -9.5}, (B,): {E: -0.5}}
    asked = by_sum(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    expect.that([B, E] in [t for t, _ in asked.hypotheses[0]], "the second live beam was lost")


@trap(
    catches="each beam offers only its W best tokens, EOS among them, so W - 1 are left",
    severity="major",
    story="A top-k of width W per beam looks sufficient; with the end among the W it is one short.",
    mutant=insert_before(
        _MASK,
        "        width = min(self.rules.beam_width, totals.shape[1])\n"
        "        floors = -np.partition(-totals, width - 1, axis=1)[:, width - 1 : width]\n"
        "        totals[totals < floors] = -np.inf\n",
    ),
    seen=BLIND,
)
def eos_fills_the_row(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B, C, D, F = tokens(rng, 6)
    table = {
        (): {A: -1.0, B: -8.0},
        (A,): {E: -1.0, C: -2.0, D: -2.5},
        (B,): {F: -1.0},
        (A, C): {E: -9.0},
        (A, D): {E: -0.5},
        (B, F): {E: -0.5},
    }
    asked = by_sum(submission, rng, table, beam_width=2, max_new_tokens=3, eos_id=E)
    found = [hypothesis for hypothesis, _ in asked.hypotheses[0]]
    expect.that(found == [[A, E], [A, D, E]], f"the hypotheses are {found}")


def _ranked(count: str) -> Mutant:
    """EOS continuations enter the pool only if they are among so many of their step."""
    return edits(
        (
            "        possible = np.flatnonzero(totals > -np.inf)\n",
            "        possible = np.flatnonzero((totals >= self.cut) & (totals > -np.inf))\n",
        ),
        (
            _FINISH,
            "        flat = np.sort(totals.ravel())\n"
            f"        self.cut = flat[-min({count}, flat.size)]\n" + _FINISH,
        ),
    )


@trap(
    catches="an EOS continuation counts only when it is among the W, or 2W, best of its step",
    severity="major",
    story="One widely used library finishes a beam only at rank < W; this contract lets every "
    "EOS continuation into the pool.",
    mutant=_ranked("self.rules.beam_width"),
    also=[_ranked("2 * self.rules.beam_width")],
    seen=BLIND,
)
def eos_only_when_ranked(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {A: -1.0, E: -2.0}, (A,): {B: -4.0}}
    asked = by_sum(submission, rng, table, beam_width=1, max_new_tokens=2, eos_id=E)
    best(asked, [E], -2.0)
    table = {(): {A: -1.0, B: -1.5, E: -2.0}, (A,): {B: -4.0}}
    asked = by_sum(submission, rng, table, beam_width=1, max_new_tokens=2, eos_id=E)
    best(asked, [E], -2.0)


@trap(
    catches="finished hypotheses take places from the live beams of later steps",
    severity="major",
    story="One published round praised keeping finished and live beams in the same W slots; with a "
    "separate pool it silently narrows the search.",
    mutant=edit(
        EXPAND,
        "        width = max(1, self.rules.beam_width - len(self.pool))\n"
        "        chosen = largest(totals.ravel(), width)\n",
    ),
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
    asked = by_sum(submission, rng, table, beam_width=2, max_new_tokens=3, eos_id=E)
    best(asked, [B, D, E], -3.5)


@trap(
    catches="the pool keeps the first W hypotheses instead of the W best",
    severity="major",
    story="Several toolkits returned the W shortest outputs: the pool was full and nothing "
    "replaced its worst.",
    mutant=insert_before(
        "            self.pool.append(Hypothesis(tokens, score))\n",
        "            if len(self.pool) < self.rules.beam_width:\n    ",
    ),
)
def pool_keeps_the_first(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {E: -4.0, A: -1.0, B: -1.5}, (A,): {E: -1.0}, (B,): {E: -1.0}}
    asked = by_sum(submission, rng, table, beam_width=2, max_new_tokens=3, eos_id=E)
    best(asked, [A, E], -2.0)


@trap(
    catches="more than W hypotheses are returned",
    severity="major",
    story="One serving engine keeps a list of completed beams without a bound.",
    mutant=edit(_CUT, ""),
)
def pool_unbounded(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {E: -4.0, A: -1.0, B: -1.5}, (A,): {E: -1.0}, (B,): {E: -1.0}}
    asked = by_sum(submission, rng, table, beam_width=2, max_new_tokens=3, eos_id=E)
    expect.that(len(asked.hypotheses[0]) == 2, f"{len(asked.hypotheses[0])} hypotheses for W = 2")


@trap(
    catches="the hypotheses come in ascending instead of descending order",
    severity="major",
    story="A min-heap of the best yields its worst first.",
    mutant=edit(RESULT, RESULT.replace("self.pool", "reversed(self.pool)")),
)
def worst_first(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {E: -4.0, A: -1.0, B: -1.5}, (A,): {E: -1.0}, (B,): {E: -1.0}}
    asked = by_sum(submission, rng, table, beam_width=3, max_new_tokens=3, eos_id=E)
    scores = [score for _, score in asked.hypotheses[0]]
    expect.that(scores == [-2.0, -2.5, -4.0], f"scores are {scores}")


@trap(
    catches="EOS as the very first token is not taken",
    severity="major",
    story="The end at the first step is the situation that tests of beam search are built on.",
    mutant=insert_before(_FINISH, "        if self.length > 1:\n    "),
)
def immediate_end_forbidden(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table: Table = {(): {E: -0.25, A: -1.0}}
    asked = one(submission, rng, table, beam_width=2, max_new_tokens=1, eos_id=E)
    best(asked, [E], -0.25)


@trap(
    catches="a prompt that ends with the EOS token counts as finished",
    severity="major",
    story="Chat prompts usually end with an end-of-turn token; only generated tokens count.",
    mutant=edit("self.beams = [[]]", "self.beams = [] if prompt[-1:] == [rules.eos_id] else [[]]"),
    seen=BLIND,
    control=ordinary_search,
)
def eos_in_the_prompt(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(): {A: -1.0}, (A,): {E: -1.0}}
    prompt = (*prompt_of(rng), E)
    asked = one(submission, rng, table, prompt=prompt, beam_width=2, max_new_tokens=3, eos_id=E)
    best(asked, [A, E], -1.0)


def three_ends(submission: Submission, rng: np.random.Generator) -> None:
    """W = 3: [E], [A, E] and [B, E] enter in this order with -4.0, -2.0 and -2.5."""
    E, A, B = tokens(rng, 3)
    table = {(): {E: -4.0, A: -1.0, B: -1.5}, (A,): {E: -1.0}, (B,): {E: -1.0}}
    asked = by_sum(submission, rng, table, beam_width=3, max_new_tokens=3, eos_id=E)
    scores = [score for _, score in asked.hypotheses[0]]
    expect.that(scores == [-2.0, -2.5, -4.0], f"scores are {scores}")


@trap(
    catches="the pool's heap is returned in its internal order, which is not best first",
    severity="critical",
    story="A heap sorts only what is popped from it.",
    seen=BLIND,
    mutant=edit(
        RESULT,
        "        import heapq\n\n"
        "        heap = []\n"
        "        for h in sorted(self.pool, key=lambda h: len(h.tokens)):\n"
        "            heapq.heappush(heap, (h.score, h.tokens))\n"
        "        return [(tokens, score) for score, tokens in heap]\n",
    ),
)
def pool_in_heap_order(submission: Submission, rng: np.random.Generator) -> None:
    three_ends(submission, rng)


@trap(
    catches="the hypotheses come in the order in which they finished",
    severity="major",
    story="The pool is a list that is never sorted.",
    mutant=edit(
        RESULT, RESULT.replace("self.pool", "sorted(self.pool, key=lambda h: len(h.tokens))")
    ),
    # The pool, never sorted, then keeps its first W.
    also=[edit(_SORT, "")],
)
def pool_in_order_of_entry(submission: Submission, rng: np.random.Generator) -> None:
    three_ends(submission, rng)


@trap(
    catches="hypotheses that finish in one step are merged into the pool in the order of beams",
    severity="major",
    story="heapq.merge needs sorted inputs; the beams' order is not that of their ends.",
    seen=BLIND,
    mutant=edits(
        (POOLED, "            new.append(Hypothesis(tokens, score))\n"),
        (
            _SORT,
            "        import heapq\n\n"
            "        self.pool = list(heapq.merge(self.pool, new, key=lambda h: -h.score))\n",
        ),
        (
            "        for tokens, total in zip(candidates, totals, strict=True):\n",
            "        new = []\n"
            "        for tokens, total in zip(candidates, totals, strict=True):\n",
        ),
    ),
)
def newcomers_merged_unsorted(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {A: -1.0, B: -2.0}, (A,): {E: -5.0}, (B,): {E: -0.5}}
    asked = by_sum(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    best(asked, [B, E], -2.5)


@trap(
    catches="only the EOS continuation of the best beam enters the pool",
    severity="major",
    story="The end is looked for in the first row of the step.",
    mutant=edit(
        "        possible = np.flatnonzero(totals > -np.inf)\n",
        "        possible = np.flatnonzero(totals > -np.inf)[:1]\n",
    ),
)
def only_the_best_beam_ends(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B, C = tokens(rng, 4)
    table = {(): {A: -1.0, B: -2.0}, (A,): {C: -4.0, E: -9.0}, (B,): {E: -0.5}}
    asked = by_sum(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    best(asked, [B, E], -2.5)


@trap(
    catches="of equal scores the latest is listed first, and the earliest is pushed out",
    severity="minor",
    story="The sequence number that breaks ties in a heap has the wrong sign.",
    seen=BLIND,
    mutant=edits(
        (
            POOLED,
            "            worst = self.pool[-1].score if self.pool else 0.0\n"
            "            if len(self.pool) < self.rules.beam_width or score > worst:\n"
            "                self.pool.insert(0, Hypothesis(tokens, score))\n"
            "                self.pool.sort(key=lambda hypothesis: -hypothesis.score)\n"
            "                del self.pool[self.rules.beam_width :]\n",
        ),
    ),
    control=ordinary_search,
)
def tie_latest_listed_first(submission: Submission, rng: np.random.Generator) -> None:
    E, A = rising_tokens(rng, 2)
    table = {(): {E: -2.0, A: -1.0}, (A,): {E: -1.0}}
    settings: dict[str, Any] = {"max_new_tokens": 2, "eos_id": E, "length_penalty": 0.0}
    asked = one(submission, rng, table, beam_width=1, **settings)
    best(asked, [E], -2.0)
    asked = one(submission, rng, table, beam_width=2, **settings)
    best(asked, [E], -2.0)


@trap(
    catches="a hypothesis that only ties with the worst of a full pool takes its place",
    severity="minor",
    story=">= where > is meant; what entered first is lost.",
    mutant=edits(
        (
            POOLED,
            "            full = len(self.pool) == self.rules.beam_width\n"
            "            if full and score >= self.pool[-1].score:\n"
            "                self.pool.pop()\n"
            "            if len(self.pool) < self.rules.beam_width:\n"
            "                self.pool.append(Hypothesis(tokens, score))\n"
            "                self.pool.sort(key=lambda hypothesis: -hypothesis.score)\n",
        ),
    ),
    seen=BLIND,
    control=ordinary_search,
)
def tie_enters_a_full_pool(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = rising_tokens(rng, 3)
    table = {(): {E: -3.0, A: -1.0, B: -2.0}, (A,): {E: -1.0}, (B,): {E: -1.0}}
    asked = by_sum(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    found = [hypothesis for hypothesis, _ in asked.hypotheses[0]]
    expect.that(found == [[A, E], [E]], f"the hypotheses are {found}")


@trap(
    catches="in the last step live beams come before finished hypotheses of the same score",
    severity="minor",
    story="The live beams are put in front of the pool before the sort.",
    seen=BLIND,
    mutant=edit(
        _LIMIT,
        "            earlier, self.pool = self.pool, []\n"
        + _LIMIT
        + "            self.pool += earlier\n"
        "            self.pool.sort(key=lambda hypothesis: -hypothesis.score)\n"
        "            del self.pool[self.rules.beam_width :]\n",
    ),
    control=ordinary_search,
)
def tie_live_beam_before_an_end(submission: Submission, rng: np.random.Generator) -> None:
    A, E, B = rising_tokens(rng, 3)
    table = {(): {A: -1.0}, (A,): {E: -1.0, B: -1.0}}
    asked = by_sum(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    best(asked, [A, E], -2.0)


@trap(
    catches="equal scores are ordered by their tokens instead of by who entered first",
    severity="minor",
    story="Sorting pairs of score and tokens compares the tokens when the scores are equal.",
    mutant=edit(_SORT, "        self.pool.sort(key=lambda h: (-h.score, h.tokens))\n"),
    also=[
        # Only the answers are sorted so, not the pool.
        edit(
            RESULT,
            RESULT.replace("self.pool]", "sorted(self.pool, key=lambda h: (-h.score, h.tokens))]"),
        )
    ],
    control=ordinary_search,
)
def tie_ordered_by_tokens(submission: Submission, rng: np.random.Generator) -> None:
    A, E = rising_tokens(rng, 2)
    table = {(): {E: -2.0, A: -1.0}, (A,): {E: -1.0}}
    asked = by_sum(submission, rng, table, beam_width=3, max_new_tokens=2, eos_id=E)
    best(asked, [E], -2.0)


@trap(
    catches="equal scores are ordered by their tokens, the higher ones first",
    severity="minor",
    story="A reversed sort of pairs of score and tokens reverses the tokens, too.",
    mutant=edit(_SORT, "        self.pool.sort(key=lambda h: (h.score, h.tokens), reverse=True)\n"),
    control=ordinary_search,
)
def tie_ordered_by_higher_tokens(submission: Submission, rng: np.random.Generator) -> None:
    E, A = rising_tokens(rng, 2)
    table = {(): {E: -2.0, A: -1.0}, (A,): {E: -1.0}}
    asked = by_sum(submission, rng, table, beam_width=3, max_new_tokens=2, eos_id=E)
    best(asked, [E], -2.0)


@trap(
    catches="live beams enter the pool also when a search stops before the limit",
    severity="major",
    story="One function closes a search, whether it has reached the limit or not.",
    mutant=edit(
        "        elif self._is_settled():\n",
        "        elif self._is_settled():\n" + _LIMIT,
    ),
    seen=BLIND,
    control=ordinary_search,
)
def early_stop_returns_live_beams(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(): {E: -3.0, A: -2.0}, (A,): {E: -1.0}}
    asked = one(
        submission, rng, table, beam_width=1, max_new_tokens=3, eos_id=E, length_penalty=-1.0
    )
    best(asked, [E], -3.0)


@trap(
    catches="the end token costs nothing: its log-probability is not added to the sum",
    severity="critical",
    story="A beam that ends enters the pool with the sum that it had before the end.",
    mutant=edit(
        "        self._finish(totals[:, self.rules.eos_id])\n",
        "        possible = log_probs[:, self.rules.eos_id] > -np.inf\n"
        "        self._finish(np.where(possible, self.sums, -np.inf))\n",
    ),
    seen="an answer of another author",
)
def end_costs_nothing(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(): {E: -3.0, A: -1.0}, (A,): {E: -1.0}}
    asked = by_sum(submission, rng, table, beam_width=2, max_new_tokens=3, eos_id=E)
    best(asked, [A, E], -2.0)


def _of_one_step(best_of: str) -> Mutant:
    """Which of a step's ends enter the pool."""
    return edit("possible = np.flatnonzero(totals > -np.inf)", f"possible = {best_of}")


@trap(
    catches="of the hypotheses that end in one step only the best enters the pool",
    severity="major",
    story="One end a step is looked for, by its maximum.",
    mutant=_of_one_step("np.flatnonzero((totals == totals.max()) & (totals > -np.inf))"),
    also=[
        _of_one_step("np.flatnonzero((totals == totals.max()) & (totals > -np.inf))[:1]"),
        _of_one_step("np.flatnonzero(totals == totals.max())"),
    ],
)
def one_end_a_step(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {A: -1.0, B: -2.0}, (A,): {E: -1.0}, (B,): {E: -0.5}}
    by_sum(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)


def _finished_late(ends: str) -> Mutant:
    """The ends of a step, behind the choice of the beams of the next one."""
    return edits(
        (_FINISH, "        ends = totals[:, self.rules.eos_id].copy()\n"),
        (
            "        self._expand(totals)\n",
            f"        self._expand(totals)\n        self._finish({ends})\n",
        ),
    )


@trap(
    catches="EOS is appended to the beams of the next step instead of to those that ended",
    severity="major",
    story="The list of beams has already been replaced when the ends are collected.",
    mutant=_finished_late("ends[: len(self.beams)]"),
    also=[_finished_late("ends")],
)
def ends_of_the_next_beams(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {E: -3.0, A: -1.0, B: -2.0}, (A,): {E: -1.0}, (B,): {E: -0.5}}
    by_sum(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)


_ENDED = "        self._enter([ended[beam] for beam in possible], totals[possible])\n"


@trap(
    catches="where a beam cannot end, the ends of those behind it get another beam's sum or tokens",
    severity="major",
    story="One of two lists that belong together is filtered.",
    mutant=edit(_ENDED, _ENDED.replace("totals[possible]", "totals[: len(possible)]")),
    also=[edit(_ENDED, _ENDED.replace("for beam in possible", "for beam in range(len(possible))"))],
    control=ordinary_search,
)
def ends_shift_past_a_beam(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B, C = tokens(rng, 4)
    table = {(): {A: -1.0, B: -2.0}, (A,): {C: -4.0}, (B,): {E: -0.5}}
    by_sum(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E, strict=True)
