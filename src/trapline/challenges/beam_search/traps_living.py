"""Bugs of choosing the live beams."""

from typing import Any

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, edits, insert_after, trap
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
    rising_tokens,
    tokens,
)
from trapline.challenges.beam_search.solution_lines import EXPAND, POOLED
from trapline.challenges.beam_search.table import Table

# Parts of the gold solution that several mutants edit.
_CHOSEN = "    return candidates[order[:count]]\n"
_SUMS = "        self.sums = totals.ravel()[chosen]\n"
_GROWN = (
    "            self.beams[parent] + [token]\n"
    "            for parent, token in zip(parents.tolist(), tokens.tolist(), strict=True)\n"
)


def _eos_is_the_last_token(submission: Submission, rng: np.random.Generator) -> None:
    """The same search where no token comes behind EOS."""
    A, B = rising_tokens(rng, 2)
    E = VOCABULARY
    table: Table = {(): {A: -2.0, B: -1.0}, (A,): {E: -1.0}, (B,): {E: -1.0}}
    settings: dict[str, Any] = {"beam_width": 2, "max_new_tokens": 2, "eos_id": E}
    asked = lm.run_tables(submission, VOCABULARY + 1, {prompt_of(rng): table}, **settings)
    best(asked, [B, E], -1.0)


@trap(
    catches="the search starts with W copies of the prompt",
    severity="major",
    story="Without exactly one live beam at the start, W identical hypotheses win.",
    mutant=edits(
        (
            "        self.beams = [[]]\n",
            "        self.beams = [[] for _ in range(rules.beam_width)]\n",
        ),
        ("        self.sums = np.zeros(1)\n", "        self.sums = np.zeros(rules.beam_width)\n"),
    ),
)
def identical_beams_at_the_start(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B, C = tokens(rng, 4)
    table: Table = {(): {A: -1.0, B: -2.0, C: -3.0}}
    asked = one(submission, rng, table, beam_width=3, max_new_tokens=1, eos_id=E, count_calls=True)
    found = [tuple(hypothesis) for hypothesis, _ in asked.hypotheses[0]]
    expect.that(len(set(found)) == 3, f"the beams are {found}")


@trap(
    catches="every beam is continued by its own best token, without competition between beams",
    severity="major",
    story="W greedy searches side by side are not a beam search.",
    mutant=insert_after(
        EXPAND,
        "        if self.length > 1:\n"
        "            tops = totals.argmax(axis=1)\n"
        "            chosen = np.arange(len(totals)) * totals.shape[1] + tops\n",
    ),
)
def each_beam_keeps_its_own_best(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B, C, D = tokens(rng, 5)
    table = {(): {A: -1.0, B: -3.0}, (A,): {C: -1.0, D: -1.5}, (B,): {C: -1.0}}
    asked = by_sum(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    found = [hypothesis for hypothesis, _ in asked.hypotheses[0]]
    expect.that(found == [[A, C], [A, D]], f"the beams are {found}")


@trap(
    catches="one live beam fewer than W is kept",
    severity="major",
    story="A width that is one too small shows only when the last beam wins.",
    mutant=edit(EXPAND, EXPAND.replace("beam_width", "beam_width - 1 or 1")),
    also=[
        edit("np.flatnonzero(values >= cut)", "np.flatnonzero(values > cut)"),
        edits(
            ("np.flatnonzero(values >= cut)", "np.flatnonzero(values > cut)"),
            ("np.arange(values.size)", "np.flatnonzero(values > values.min())"),
        ),
    ],
    seen=BLIND,
)
def too_few_live_beams(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B, C = tokens(rng, 4)
    table = {(): {A: -1.0, B: -2.0, C: -3.0}, (A,): {E: -6.0}, (B,): {E: -6.0}, (C,): {E: -0.5}}
    asked = by_sum(submission, rng, table, beam_width=3, max_new_tokens=2, eos_id=E)
    best(asked, [C, E], -3.5)


@trap(
    catches="more than W beams stay alive",
    severity="major",
    story="Taking 2W candidates is right only when they are cut to W afterwards.",
    mutant=edit(EXPAND, EXPAND.replace("beam_width", "beam_width * 2")),
)
def too_many_live_beams(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B, C = tokens(rng, 4)
    table = {(): {A: -1.0, B: -2.0, C: -3.0}, (A,): {E: -6.0}, (B,): {E: -6.0}, (C,): {E: -0.5}}
    asked = by_sum(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    best(asked, [A, E], -7.0)


@trap(
    catches="a continuation of probability 0 becomes a beam",
    severity="major",
    story="With fewer possible tokens than W, the top W fill up with impossible ones.",
    mutant=edit("    candidates = candidates[values[candidates] > -np.inf]\n", ""),
    seen=BLIND,
    control=ordinary_search,
)
def zero_probability_lives_on(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    settings: dict[str, Any] = {"beam_width": 3, "max_new_tokens": 1, "eos_id": E}
    asked = one(submission, rng, {(): {A: -1.0}}, strict=True, **settings)
    expect.equal(asked.hypotheses, [[([A], -1.0)]], "the only possible hypothesis")


@trap(
    catches="an EOS continuation of probability 0 enters the pool",
    severity="major",
    story="A score of -inf occupies a place in the pool and lets the search stop.",
    mutant=edit("possible = np.flatnonzero(totals > -np.inf)", "possible = np.arange(len(totals))"),
    seen=BLIND,
    control=ordinary_search,
)
def zero_probability_ends(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(): {A: -1.0}, (A,): {A: -1.0}}
    settings: dict[str, Any] = {"beam_width": 2, "max_new_tokens": 2, "eos_id": E}
    asked = one(submission, rng, table, strict=True, **settings)
    expect.equal(asked.hypotheses, [[([A, A], -1.0)]], "the only possible hypothesis")


@trap(
    catches="-inf is replaced by a large negative number: impossible continuations live and end",
    severity="major",
    story="A finite stand-in for -inf keeps sums finite, and with them what cannot happen.",
    mutant=edit("    return log_probs\n", "    return np.maximum(log_probs, -1e9)\n"),
    also=[
        edit(
            "        totals = self.sums[:, None] + log_probs\n",
            "        totals = np.maximum(self.sums[:, None] + log_probs, -1e9)\n",
        )
    ],
    control=ordinary_search,
)
def impossible_made_finite(submission: Submission, rng: np.random.Generator) -> None:
    """Three tokens, of which all are candidates: no tie between impossible ones is cut."""
    E, A, _ = (int(t) for t in rng.permutation(3))
    settings: dict[str, Any] = {"beam_width": 3, "max_new_tokens": 1, "eos_id": E, "strict": True}
    asked = lm.run_tables(submission, 3, {prompt_of(rng): {(): {A: -1.0}}}, **settings)
    expect.equal(asked.hypotheses, [[([A], -1.0)]], "the only possible hypothesis")


@trap(
    catches="a beam width above the number of continuations fails",
    severity="major",
    story="The first step has one beam and V tokens; a library's top-k refuses W > V.",
    mutant=edit("    if values.size > count:\n", "    if values.size:\n"),
    seen=BLIND,
    control=ordinary_search,
)
def width_over_vocabulary(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = (int(t) for t in rng.permutation(3))
    rows = {E: -2.0, A: -1.0, B: -1.5}
    table = {(): rows, (A,): rows, (B,): rows}
    settings: dict[str, Any] = {"beam_width": 11, "max_new_tokens": 2, "eos_id": E}
    asked = lm.run_tables(submission, 3, {prompt_of(rng): table}, **settings)
    expect.that(len(asked.hypotheses[0]) == 7, "not every possible hypothesis was found")


@trap(
    catches="of two finished hypotheses with equal score the later one is preferred",
    severity="minor",
    story="A heap or an insertion at the front reverses the order of ties.",
    mutant=edit(
        POOLED,
        "            self.pool.insert(0, Hypothesis(tokens, score))\n",
    ),
    seen=BLIND,
    control=ordinary_search,
)
def tie_later_hypothesis_wins(submission: Submission, rng: np.random.Generator) -> None:
    E, A = rising_tokens(rng, 2)
    table = {(): {E: -2.0, A: -1.0}, (A,): {E: -1.0}}
    for width in (1, 2):
        asked = by_sum(submission, rng, table, beam_width=width, max_new_tokens=2, eos_id=E)
        best(asked, [E], -2.0)


@trap(
    catches="of two equal hypotheses that end in one step the one of the higher parent wins",
    severity="minor",
    story="Ties decide which of two equal answers a user sees; they must not depend on the device.",
    mutant=edit("= np.flatnonzero(totals > -np.inf)", "= np.flatnonzero(totals > -np.inf)[::-1]"),
    control=ordinary_search,
)
def tie_higher_parent_ends_first(submission: Submission, rng: np.random.Generator) -> None:
    A, B, E = rising_tokens(rng, 3)
    table = {(): {A: -1.0, B: -2.0}, (A,): {E: -3.0}, (B,): {E: -2.0}}
    asked = one(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    best(asked, [A, E], -2.0)


@trap(
    catches="between equal continuations the lower token is preferred before the lower parent",
    severity="minor",
    story="Flattening tokens by beams instead of beams by tokens swaps the two rules.",
    mutant=edits(
        (EXPAND, EXPAND.replace("totals.ravel()", "totals.T.ravel()")),
        (
            "        parents, tokens = np.divmod(chosen, totals.shape[1])\n",
            "        tokens, parents = np.divmod(chosen, totals.shape[0])\n"
            "        chosen = parents * totals.shape[1] + tokens\n",
        ),
    ),
    seen=BLIND,
    control=ordinary_search,
)
def tie_token_before_parent(submission: Submission, rng: np.random.Generator) -> None:
    low, A, B, high, other = rising_tokens(rng, 5)
    E = next(t for t in range(VOCABULARY) if t not in (low, A, B, high, other))
    table = {(): {A: -1.0, B: -2.0}, (A,): {other: -1.0, high: -3.0}, (B,): {low: -2.0}}
    asked = one(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    found = [hypothesis for hypothesis, _ in asked.hypotheses[0]]
    expect.that(found == [[A, other], [A, high]], f"the beams are {found}")


@trap(
    catches="between equal continuations of one beam the higher token is preferred",
    severity="minor",
    story="A reversed ascending sort reverses the ties with it.",
    mutant=edit(
        "    candidates = candidates[values[candidates] > -np.inf]\n",
        "    candidates = candidates[values[candidates] > -np.inf][::-1]\n",
    ),
    seen=BLIND,
    control=ordinary_search,
)
def tie_higher_token_wins(submission: Submission, rng: np.random.Generator) -> None:
    low, middle, high, E = rising_tokens(rng, 4)
    table: Table = {(): {low: -1.0, middle: -1.0, high: -1.0}}
    asked = one(submission, rng, table, beam_width=2, max_new_tokens=1, eos_id=E)
    found = [hypothesis for hypothesis, _ in asked.hypotheses[0]]
    expect.that(found == [[low], [middle]], f"ties were broken as {found}")


def equal_tokens(submission: Submission, rng: np.random.Generator) -> None:
    """Four equal tokens and W = 2: the two lowest live."""
    *equal, E = rising_tokens(rng, 5)
    table: Table = {(): dict.fromkeys(equal, -1.0)}
    asked = one(submission, rng, table, beam_width=2, max_new_tokens=1, eos_id=E)
    found = [hypothesis for hypothesis, _ in asked.hypotheses[0]]
    expect.that(found == [[equal[0]], [equal[1]]], f"ties were broken as {found}")


@trap(
    catches="a continuation that only ties with the last live beam replaces it",
    severity="minor",
    story="A heap of the W best compares with >= where > is meant: the last of the equals stays.",
    seen=BLIND,
    mutant=edit(
        _CHOSEN,
        "    kept = order[:count].copy()\n"
        "    if len(kept):\n"
        "        equal = values[candidates] == values[candidates[kept[-1]]]\n"
        "        kept[-1] = np.flatnonzero(equal)[-1]\n"
        "    return candidates[kept]\n",
    ),
    control=ordinary_search,
)
def tie_replaces_the_last_beam(submission: Submission, rng: np.random.Generator) -> None:
    equal_tokens(submission, rng)


@trap(
    catches="of equal continuations at the cut the last ones live, not the first",
    severity="minor",
    story="The W largest are the end of an ascending sort, and so are the last of the equals.",
    mutant=edit(
        _CHOSEN,
        '    kept = np.sort(np.argsort(values[candidates], kind="stable")[-count:])\n'
        '    return candidates[kept][np.argsort(-values[candidates][kept], kind="stable")]\n',
    ),
    control=ordinary_search,
)
def tie_keeps_the_last_ones(submission: Submission, rng: np.random.Generator) -> None:
    equal_tokens(submission, rng)


def _partitioned(chosen: str) -> Mutant:
    """The W best are what this partition gives, best first."""
    return edit(
        _CHOSEN,
        "    if values.size > count:\n"
        f"        candidates = {chosen}\n"
        "        candidates = candidates[values[candidates] > -np.inf]\n"
        '        order = np.argsort(-values[candidates], kind="stable")\n' + _CHOSEN,
    )


#: Only continuations that are possible are partitioned.
_OF_POSSIBLE = (
    "(possible := np.flatnonzero(values > -np.inf))"
    "[np.argpartition(-values[possible], min(count, possible.size) - 1)[:count]]"
)


@trap(
    catches="argpartition decides which of many equal continuations live",
    severity="minor",
    story="A partition promises nothing about the order of equals.",
    mutant=_partitioned("np.argpartition(-values, count - 1)[:count]"),
    seen=BLIND,
    also=(
        _partitioned("np.sort(np.argpartition(-values, count - 1)[:count])"),
        _partitioned("np.argpartition(values, values.size - count)[-count:]"),
        _partitioned("np.sort(np.argpartition(values, values.size - count)[-count:])"),
        _partitioned(_OF_POSSIBLE),
    ),
    control=ordinary_search,
)
def tie_left_to_a_partition(submission: Submission, rng: np.random.Generator) -> None:
    many_equals(submission, rng)


def many_equals(submission: Submission, rng: np.random.Generator) -> None:
    """W = 45 of 119 continuations with four different sums."""
    vocabulary = 120
    E = int(rng.integers(60, vocabulary))
    values = rng.choice([-1.0, -1.5, -2.0, -2.5], vocabulary).tolist()
    table: Table = {(): {token: values[token] for token in range(vocabulary) if token != E}}
    settings: dict[str, Any] = {"beam_width": 45, "max_new_tokens": 1, "eos_id": E}
    asked = lm.run_tables(submission, vocabulary, {prompt_of(rng): table}, strict=True, **settings)
    expect.that(len(asked.hypotheses[0]) == 45, f"{len(asked.hypotheses[0])} hypotheses for W = 45")


@trap(
    catches="a sort that is not stable decides which of many equal continuations live",
    severity="minor",
    story="NumPy's default sort promises nothing about the order of equals.",
    mutant=edit('values[candidates], kind="stable")', "values[candidates])"),
    also=[
        edit('values[candidates], kind="stable")', 'values[candidates], kind="heapsort")'),
    ],
    control=ordinary_search,
)
def tie_left_to_an_unstable_sort(submission: Submission, rng: np.random.Generator) -> None:
    many_equals(submission, rng)


@trap(
    catches="every continuation that ties with the last live beam lives, so more than W are asked",
    severity="major",
    story="The cut is a value, and all that reach it are kept.",
    seen=BLIND,
    mutant=edit(_CHOSEN, "    return candidates[order]\n"),
    control=ordinary_search,
)
def ties_widen_the_beam(submission: Submission, rng: np.random.Generator) -> None:
    *equal, E = rising_tokens(rng, 5)
    table = {(): dict.fromkeys(equal, -1.0), (equal[0],): {E: -1.0}, (equal[1],): {E: -2.0}}
    one(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E, count_calls=True)


@trap(
    catches="a chosen token is appended to the beam in its own place, not to its parent",
    severity="major",
    story="The token index is taken from the flat choice and the beam index is forgotten.",
    mutant=edit(
        _GROWN,
        "            self.beams[min(place, len(self.beams) - 1)] + [token]\n"
        "            for place, token in enumerate(tokens.tolist())\n",
    ),
)
def parents_ignored(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B, C, D = tokens(rng, 5)
    table = {(): {A: -1.0, B: -3.0}, (A,): {C: -1.0, D: -1.5}, (B,): {C: -9.0}}
    asked = by_sum(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    found = [hypothesis for hypothesis, _ in asked.hypotheses[0]]
    expect.that(found == [[A, C], [A, D]], f"the beams are {found}")


@trap(
    catches="the children of one beam share its list of tokens",
    severity="major",
    story="append() on the parent's list: two children of one parent get each other's tokens.",
    mutant=edit(
        "            self.beams[parent] + [token]\n",
        "            (self.beams[parent].append(token), self.beams[parent])[1]\n",
    ),
)
def children_share_one_list(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table: Table = {(): {A: -1.0, B: -2.0}}
    asked = one(submission, rng, table, beam_width=2, max_new_tokens=1, eos_id=E)
    found = [hypothesis for hypothesis, _ in asked.hypotheses[0]]
    expect.that(found == [[A], [B]], f"the beams are {found}")


def sums_of_two_beams(submission: Submission, rng: np.random.Generator) -> None:
    """Both children come from the second beam, and the sums of three steps decide."""
    E, A, B, C, D = tokens(rng, 5)
    table = {
        (): {A: -1.0, B: -2.0},
        (A,): {C: -9.0},
        (B,): {C: -1.0, D: -1.5},
        (B, C): {E: -3.0},
        (B, D): {E: -0.5},
    }
    asked = by_sum(submission, rng, table, beam_width=2, max_new_tokens=3, eos_id=E)
    best(asked, [B, D, E], -4.0)


@trap(
    catches="a beam carries the log-probability of its last token, not the sum of all, or nothing",
    severity="major",
    story="The sum is overwritten by the step's own values, or is never added to them.",
    mutant=edit(_SUMS, _SUMS.replace("[chosen]", "[chosen] - self.sums[parents]")),
    also=[
        edit(
            "        totals = self.sums[:, None] + log_probs\n",
            "        totals = log_probs.copy()\n",
        )
    ],
)
def sum_of_the_last_token(submission: Submission, rng: np.random.Generator) -> None:
    sums_of_two_beams(submission, rng)


@trap(
    catches="a beam's sum continues the beam in its own place, not its parent",
    severity="major",
    story="Tokens are gathered by parent, sums are not.",
    mutant=edit(
        _SUMS,
        _SUMS.replace(
            "[chosen]",
            "[chosen] - self.sums[parents]"
            " + self.sums[np.minimum(np.arange(len(chosen)), len(self.sums) - 1)]",
        ),
    ),
)
def sums_not_gathered(submission: Submission, rng: np.random.Generator) -> None:
    sums_of_two_beams(submission, rng)


@trap(
    catches="-inf in the model's answer is refused although it means probability 0",
    severity="major",
    story="A test with isfinite rejects masked vocabularies together with NaN.",
    seen=BLIND,
    mutant=edit(
        "    if np.isnan(log_probs).any() or np.isposinf(log_probs).any():\n",
        "    if not np.isfinite(log_probs).all():\n",
    ),
    control=ordinary_search,
)
def masked_vocabulary_refused(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    settings: dict[str, Any] = {"beam_width": 2, "max_new_tokens": 1, "eos_id": E}
    table: Table = {(): {A: -1.0, B: -2.0, E: -3.0}}
    asked = one(submission, rng, table, strict=True, **settings)
    best(asked, [A], -1.0)


@trap(
    catches="live beams are numbered by parent and token instead of best first",
    severity="major",
    story="The chosen continuations are sorted by position: ties go to the wrong parent, and the "
    "first beam need not be the best.",
    mutant=edit(EXPAND, EXPAND.replace("largest(", "np.sort(largest(").replace(")\n", "))\n")),
    seen=BLIND,
    control=ordinary_search,
)
def beams_in_order_of_position(submission: Submission, rng: np.random.Generator) -> None:
    A, B, X, Y, E = rising_tokens(rng, 5)
    table = {(): {A: -2.0, B: -1.0}, (A,): {X: -1.0}, (B,): {X: -2.0, Y: -1.5}}
    asked = one(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    expect.equal([t for t, _ in asked.hypotheses[0]], [[B, Y], [B, X]], "the two live beams")


@trap(
    catches="tokens behind EOS are numbered one too low: its column is removed before the choice",
    severity="major",
    story="np.delete takes the column of EOS out, and the places in the shorter row are taken for "
    "token ids.",
    mutant=edits(
        (EXPAND, "        totals = np.delete(totals, self.rules.eos_id, axis=1)\n" + EXPAND),
    ),
    seen=BLIND,
    control=_eos_is_the_last_token,
)
def tokens_numbered_without_eos(submission: Submission, rng: np.random.Generator) -> None:
    A, E, B = rising_tokens(rng, 3)
    table: Table = {(): {A: -2.0, B: -1.0}, (A,): {E: -1.0}, (B,): {E: -1.0}}
    asked = one(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    best(asked, [B, E], -1.0)


@trap(
    catches="a new token is put in front of the tokens before it",
    severity="major",
    story="The parts of a sum of lists are exchanged.",
    mutant=edit(
        "            self.beams[parent] + [token]\n", "            [token] + self.beams[parent]\n"
    ),
)
def tokens_in_reverse(submission: Submission, rng: np.random.Generator) -> None:
    sums_of_two_beams(submission, rng)


@trap(
    catches="an end is rated by its own log-probability, without those of the tokens before it",
    severity="major",
    story="The model's row goes to the pool instead of the sums.",
    mutant=edit("self._finish(totals[", "self._finish(log_probs["),
)
def end_rated_alone(submission: Submission, rng: np.random.Generator) -> None:
    sums_of_two_beams(submission, rng)


_TOTALS = "        totals = self.sums[:, None] + log_probs\n"


@trap(
    catches="what is appended to a beam is not the token: its parent's number, or its place among "
    "the chosen or in the flattened sums",
    severity="major",
    story="Several indices are at hand where a beam grows.",
    mutant=edit(
        "            self.beams[parent] + [token]\n", "            self.beams[parent] + [parent]\n"
    ),
    also=[
        edit(_GROWN, _GROWN.replace("tokens.tolist()", numbers))
        for numbers in ("range(len(chosen))", "chosen.tolist()")
    ],
)
def another_index_appended(submission: Submission, rng: np.random.Generator) -> None:
    sums_of_two_beams(submission, rng)


@trap(
    catches="the sums stand in another order than their beams",
    severity="major",
    story="One of two lists that belong together is sorted.",
    mutant=edit(_SUMS, "        self.sums = np.sort(totals.ravel()[chosen])\n"),
    also=[
        edit(_SUMS, _SUMS.replace("[chosen]", "[np.sort(chosen)]")),
        edit(_SUMS, _SUMS.replace("[chosen]", "[chosen[::-1]]")),
    ],
)
def sums_in_another_order(submission: Submission, rng: np.random.Generator) -> None:
    A, B, C, E = rising_tokens(rng, 4)
    table = {(): {A: -2.0, B: -1.0}, (A,): {C: -0.5}, (B,): {C: -3.0}, (A, C): {E: -1.0}}
    by_sum(submission, rng, table, beam_width=2, max_new_tokens=3, eos_id=E)


@trap(
    catches="live beams are numbered worst first",
    severity="major",
    story="An ascending sort: ties go to the wrong parent, and the stop test meets the worst beam.",
    mutant=edit("np.argsort(-values[candidates]", "np.argsort(values[candidates]"),
    also=[edit(_CHOSEN, "    return candidates[order[:count]][::-1]\n")],
    control=ordinary_search,
)
def beams_worst_first(submission: Submission, rng: np.random.Generator) -> None:
    A, B, E = rising_tokens(rng, 3)
    table = {(): {A: -2.0, B: -1.0}, (A,): {E: -2.0}, (B,): {E: -3.0}}
    asked = by_sum(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E)
    best(asked, [B, E], -4.0)


def _cut_to(width: str) -> Mutant:
    return edit(EXPAND, EXPAND.replace("self.rules.beam_width", f"min({width})"))


@trap(
    catches="no more beams live than the vocabulary has tokens, though W is larger",
    severity="major",
    story="W is cut to what the first step can give, and stays cut.",
    mutant=_cut_to("self.rules.beam_width, totals.shape[1]"),
    also=[_cut_to("self.rules.beam_width, totals.shape[1] - 1")],
    control=ordinary_search,
)
def width_cut_to_the_vocabulary(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = (int(t) for t in rng.permutation(3))
    table: Table = {(): {A: -1.0, B: -1.5}, (A,): {A: -1.0, B: -2.0}, (B,): {A: -1.0, B: -2.25}}
    settings: dict[str, Any] = {"beam_width": 4, "max_new_tokens": 2, "eos_id": E, "strict": True}
    lm.run_tables(submission, 3, {prompt_of(rng): table}, **settings)


def _beside_a_strong_beam(submission: Submission, rng: np.random.Generator, weak: float) -> None:
    """The pool is full when [A, C] has -1.5; [B, C] enters it only if its last token is likely."""
    E, A, B, C = tokens(rng, 4)
    table = {
        (): {E: -3.0, A: -1.0, B: -2.0},
        (A,): {E: -1.0, C: -0.5},
        (B,): {C: weak},
        (A, C): {E: -0.5},
        (B, C): {E: -4.0},
    }
    settings: dict[str, Any] = {"beam_width": 2, "max_new_tokens": 4, "eos_id": E}
    by_sum(submission, rng, table, strict=True, count_calls=True, **settings)


def _pruned(keeps: str) -> Mutant:
    """Beams that cannot enter the pool are dropped one by one."""
    return edit(
        "        elif self._is_settled():\n            self.beams = []\n",
        "        elif self._is_settled():\n            self.beams = []\n"
        "        elif len(self.pool) == self.rules.beam_width:\n"
        "            bounds = [self.rules.best_possible(s, self.length) for s in self.sums]\n"
        f"            kept = [n for n, b in enumerate(bounds) if b {keeps} self.pool[-1].score]\n"
        "            self.beams = [self.beams[n] for n in kept]\n"
        "            self.sums = self.sums[kept]\n",
    )


@trap(
    catches="single beams that can no longer enter the pool are left out of the model's calls",
    severity="minor",
    story="The contract lets a prompt stop, not a beam: the W best live until then.",
    mutant=_pruned(">"),
    also=[_pruned(">=")],
    seen=BLIND,
    control=lambda submission, rng: _beside_a_strong_beam(submission, rng, -0.5),
)
def hopeless_beams_dropped(submission: Submission, rng: np.random.Generator) -> None:
    _beside_a_strong_beam(submission, rng, -2.0)
