"""Bugs of the order among equals: of live beams, and of the answers."""

from typing import Any

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, insert_after, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.beam_search.situations import (
    BLIND,
    by_sum,
    one,
    ordinary_search,
    rising_tokens,
)
from trapline.challenges.beam_search.solution_lines import EXPAND, POOLED, RESULT
from trapline.challenges.beam_search.table import Table


def _numbered(keys: str) -> Mutant:
    """The right continuations, equal ones in the order of these keys, the last key first."""
    return insert_after(
        EXPAND,
        "        parent, token = np.divmod(chosen, totals.shape[1])\n"
        f"        order = np.lexsort(({keys}, -totals.ravel()[chosen]))\n"
        "        chosen = chosen[order]\n",
    )


@trap(
    catches="the right continuations live, but equal ones are numbered in the wrong order",
    severity="minor",
    story="Sorted ascending and then reversed, the W best come with their ties reversed, too; "
    "later ties go to the wrong parent.",
    mutant=_numbered("-token, -parent"),
    also=(
        _numbered("-token, parent"),
        _numbered("token, -parent"),
        _numbered("parent, token"),
    ),
    seen=BLIND,
    control=ordinary_search,
)
def equals_numbered_wrongly(submission: Submission, rng: np.random.Generator) -> None:
    A, B, X, Y, E = rising_tokens(rng, 5)
    # As many beams as continuations: none of the equals is cut.
    equal = {X: -1.0, Y: -1.0}
    table: Table = {(): {A: -1.0, B: -1.0}, (A,): equal, (B,): equal}
    settings: dict[str, Any] = {"beam_width": 4, "max_new_tokens": 2, "eos_id": E}
    asked = one(submission, rng, table, strict=True, **settings)
    found = [hypothesis for hypothesis, _ in asked.hypotheses[0]]
    expect.that(found == [[A, X], [A, Y], [B, X], [B, Y]], f"the beams are {found}")


def _listed(key: str) -> Mutant:
    """The answers of a prompt, sorted once more by this key."""
    return edit(RESULT, RESULT.replace("self.pool]", f"sorted(self.pool, key=lambda h: {key})]"))


@trap(
    catches="of equal scores the longer hypothesis is listed first, although it entered later",
    severity="minor",
    story="The answers are sorted by score and length.",
    mutant=_listed("(-h.score, -len(h.tokens))"),
    control=ordinary_search,
)
def tie_longer_listed_first(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = rising_tokens(rng, 3)
    table: Table = {(): {E: -2.0, A: -1.0, B: -1.5}, (A,): {E: -1.0}, (B,): {E: -0.5}}
    asked = by_sum(submission, rng, table, beam_width=3, max_new_tokens=2, eos_id=E)
    found = [hypothesis for hypothesis, _ in asked.hypotheses[0]]
    expect.that(found == [[E], [A, E], [B, E]], f"the hypotheses are {found}")


@trap(
    catches="where the worst of a full pool tie, a better hypothesis drives out the one that "
    "entered first, not the last",
    severity="minor",
    story="A heap of score and arrival, or `min` over the pool, finds the earliest of equals.",
    mutant=edit(
        POOLED,
        "            if len(self.pool) == self.rules.beam_width:\n"
        "                worst = min(self.pool, key=lambda hypothesis: hypothesis.score)\n"
        "                if score <= worst.score:\n"
        "                    continue\n"
        "                self.pool.remove(worst)\n" + POOLED,
    ),
    seen=BLIND,
    control=ordinary_search,
)
def earliest_of_equals_evicted(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B, C = rising_tokens(rng, 4)
    # [E] and [A, E] tie at -3, then [A, C, E] is better.
    table: Table = {
        (): {E: -3.0, A: -1.0, B: -1.5},
        (A,): {E: -2.0, C: -0.5},
        (A, C): {E: -0.5},
    }
    asked = by_sum(submission, rng, table, beam_width=2, max_new_tokens=3, eos_id=E)
    found = [hypothesis for hypothesis, _ in asked.hypotheses[0]]
    expect.that(found == [[A, C, E], [E]], f"the hypotheses are {found}")
