"""Bugs of the beams that are alive at the limit, and of steps that leave none alive."""

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
    tokens,
)

# Parts of the gold solution that several mutants edit.
_LIMIT = "            self._enter(self.beams, self.sums)\n"
_LENGTH = "        self.length += 1\n"
_EXPAND = "        self._expand(totals)\n"
_STEP_END = "        search.advance(log_probs[first:last])\n        first = last\n"
_KEEP = (_LENGTH, "        self.before = self.beams, self.sums\n" + _LENGTH)
_AT_THE_LIMIT = "            self.length = self.rules.max_new_tokens\n"


@trap(
    catches="beams alive at the maximum length enter only a pool that has room",
    severity="major",
    story="A better unfinished hypothesis does not replace a worse finished one.",
    mutant=insert_before(_LIMIT, "            if len(self.pool) < self.rules.beam_width:\n    "),
    seen=BLIND,
    also=(
        edit(
            _LIMIT,
            "            room = self.rules.beam_width - len(self.pool)\n"
            "            self._enter(self.beams[:room], self.sums[:room])\n",
        ),
    ),
)
def cut_off_only_where_there_is_room(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {E: -5.0, A: -1.0}, (A,): {B: -1.0}}
    asked = by_sum(submission, rng, table, beam_width=1, max_new_tokens=2, eos_id=E)
    best(asked, [A, B], -2.0)


@trap(
    catches="of the beams alive at the maximum length only the best enters the pool",
    severity="major",
    story="The pool has room for the others.",
    mutant=edit(_LIMIT, "            self._enter(self.beams[:1], self.sums[:1])\n"),
)
def only_the_best_is_cut_off(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {A: -1.0, B: -2.0}, (A,): {B: -1.0}, (B,): {A: -1.0}}
    asked = by_sum(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    found = [hypothesis for hypothesis, _ in asked.hypotheses[0]]
    expect.that(found == [[A, B], [B, A]], f"the hypotheses are {found}")


@trap(
    catches="where a step leaves no beam alive, the beams of the step before enter the pool",
    severity="critical",
    story="The loop ends early, and what stands in its variables is taken for the live beams.",
    mutant=edits(
        _KEEP,
        (_EXPAND, _EXPAND + "        self.lives = bool(self.beams)\n"),
        (
            "            self.beams = []\n        elif self._is_settled():\n",
            "            self.beams = []\n"
            "        elif self._is_settled():\n"
            "            self.lives = False\n",
        ),
        (
            _STEP_END,
            _STEP_END + "    if not any(search.lives for search in open_searches):\n"
            "        for search in open_searches:\n"
            "            search.length = search.rules.max_new_tokens\n"
            "            search._enter(*search.before)\n",
        ),
    ),
    seen=BLIND,
    also=(
        edits(
            _KEEP,
            (
                _EXPAND,
                _EXPAND + "        if not self.beams:\n            self._enter(*self.before)\n",
            ),
        ),
        edits(
            _KEEP,
            (
                _EXPAND,
                _EXPAND
                + "        if not self.beams:\n"
                + _AT_THE_LIMIT
                + "            self._enter(*self.before)\n",
            ),
        ),
    ),
    control=ordinary_search,
)
def dead_end_returns_the_step_before(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    settings: dict[str, Any] = {"beam_width": 2, "max_new_tokens": 3, "strict": True}
    asked = one(submission, rng, {(): {A: -1.0}, (A,): {E: -1.0}}, eos_id=E, **settings)
    found = [hypothesis for hypothesis, _ in asked.hypotheses[0]]
    expect.that(found == [[A, E]], f"the hypotheses are {found}")


def _with_end(log_prob: str) -> Mutant:
    """EOS is appended to the beams that are alive at the limit."""
    return edit(
        _LIMIT,
        "            ends = [[*tokens, self.rules.eos_id] for tokens in self.beams]\n"
        f"            {log_prob}self._enter(ends, self.sums)\n",
    )


@trap(
    catches="EOS is appended to hypotheses that are cut off at the maximum length",
    severity="major",
    story="Every answer is to end in EOS, it is thought; the model never gave it.",
    mutant=_with_end(""),
    also=(_with_end("self.length += 1\n            "),),
)
def cut_off_gets_an_end(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {A: -2.0}, (A,): {B: -2.0}}
    asked = one(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    best(asked, [A, B], -2.0)
