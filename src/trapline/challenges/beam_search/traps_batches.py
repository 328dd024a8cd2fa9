"""Bugs of several prompts at once."""

from typing import Any

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, edits, insert_after, insert_before, trap
from trapline.arena.process.proxy import Stub, Submission
from trapline.challenges.beam_search import table as lm
from trapline.challenges.beam_search.situations import (
    BLIND,
    VOCABULARY,
    best,
    one,
    ordinary_search,
    prompt_of,
    tokens,
)
from trapline.challenges.beam_search.solution_lines import CALL, RETURN
from trapline.challenges.beam_search.table import Table

# Parts of the gold solution that several mutants edit.
_PREFIXES = "        return [self.prompt + tokens for tokens in self.beams]\n"
_ADVANCE = "        search.advance(log_probs[first:last])\n"
_MOVE_ON = _ADVANCE + "        first = last\n"
_WHILE = "    while any(search.beams for search in searches):\n"


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
    catches="all prompts stop when one of them is done",
    severity="critical",
    story="A stop test over the whole batch coupled prompts that do not belong together.",
    mutant=edit("    while any(", "    while searches and all("),
    also=[
        edit(_WHILE, _WHILE.replace("any(search.beams for search in searches)", one))
        for one in ("searches[0].beams", "searches[-1].beams", "searches and searches[-1].beams")
    ],
    seen="a public issue: huggingface/transformers#38778",
)
def batch_ends_with_its_first(submission: Submission, rng: np.random.Generator) -> None:
    alone_and_together(submission, rng)


@trap(
    catches="the prompts of a batch share one pool of finished hypotheses",
    severity="major",
    story="The list is created once per call instead of once per prompt.",
    mutant=edits(
        ("        self.pool = []\n", "        self.pool = pool\n"),
        ("prompt: list[int], rules: Rules) -> None:", "prompt, rules, pool) -> None:"),
        (
            "    searches = [Search(token_list(prompt), rules) for prompt in prompts]\n",
            "    pool = []\n"
            "    searches = [Search(token_list(prompt), rules, pool) for prompt in prompts]\n",
        ),
    ),
)
def pool_shared_by_prompts(submission: Submission, rng: np.random.Generator) -> None:
    alone_and_together(submission, rng)


@trap(
    catches="the model's rows are assigned W to a prompt although some have fewer live beams",
    severity="major",
    story="The batch arithmetic holds only while every prompt has W beams.",
    mutant=edit("last = first + len(search.beams)\n", "last = first + search.rules.beam_width\n"),
)
def rows_cut_by_width(submission: Submission, rng: np.random.Generator) -> None:
    alone_and_together(submission, rng)


def _one_two_one(submission: Submission, rng: np.random.Generator, *, strict: bool) -> None:
    """W = 2 and three prompts, of which the tables give the second one two first tokens and the
    others one. In a strict model they are all that lives; else noise fills the places."""
    E, A, B = tokens(rng, 3)
    prompts = [prompt_of(rng, first=100 + n) for n in range(3)]
    firsts: list[dict[int, float]] = [{A: -1.0}, {A: -1.0, B: -1.5}, {B: -1.0}]
    ends: list[dict[int, float]] = [{A: -2.0}, {A: -3.0, B: -0.25}, {B: -0.75}]
    tables: dict[lm.Prefix, Table] = {
        prompt: {(): first, **{(token,): {E: end[token]} for token in first}}
        for prompt, first, end in zip(prompts, firsts, ends, strict=True)
    }
    settings: dict[str, Any] = {"beam_width": 2, "max_new_tokens": 2, "eos_id": E}
    lm.run_tables(submission, VOCABULARY, tables, strict=strict, **settings)


def as_many_beams_each(submission: Submission, rng: np.random.Generator) -> None:
    _one_two_one(submission, rng, strict=False)


_SHARES = (
    "    first = 0\n    for search in open_searches:\n        last = first + len(search.beams)\n"
    + _MOVE_ON
)


def _equal_shares(share: str) -> Mutant:
    """Each prompt before this one is taken to have so many rows."""
    return edit(
        _SHARES,
        "    share = len(log_probs) // len(open_searches)\n"
        "    for place, search in enumerate(open_searches):\n"
        f"        first = place * {share}\n"
        "        search.advance(log_probs[first:first + len(search.beams)])\n",
    )


def _split(split: str) -> Mutant:
    """The rows are dealt out, to every prompt as many."""
    return edit(
        _SHARES,
        f"    shares = np.{split}(log_probs, len(open_searches))\n"
        "    for search, share in zip(open_searches, shares, strict=True):\n"
        "        search.advance(share)\n",
    )


@trap(
    catches="the rows of the model's answer are dealt out in equal shares, or a prompt's rows are "
    "looked for as if all prompts before it had as many live beams as it has",
    severity="major",
    story="The place of the prompt times a number of beams stands for a running offset; that holds "
    "until a prompt has fewer than W possible continuations.",
    mutant=_equal_shares("len(search.beams)"),
    also=[_equal_shares("share"), _split("split"), _split("array_split")],
    seen=BLIND,
    control=as_many_beams_each,
)
def rows_in_equal_shares(submission: Submission, rng: np.random.Generator) -> None:
    _one_two_one(submission, rng, strict=True)


@trap(
    catches="after one prompt has ended the others read their neighbour's rows",
    severity="major",
    story="Rows are counted over all prompts, but prefixes are sent for the open ones only.",
    mutant=edit(
        "    for search in open_searches:\n        last = first + len(search.beams)\n"
        "        search.advance(log_probs[first:last])\n",
        "    for search in searches:\n        last = first + max(1, len(search.beams))\n"
        "        if search.beams:\n            search.advance(log_probs[first:last])\n",
    ),
)
def rows_shift_when_a_prompt_ends(submission: Submission, rng: np.random.Generator) -> None:
    alone_and_together(submission, rng)


def _quick_prompt_is_last(submission: Submission, rng: np.random.Generator) -> None:
    """A control: one beam each, and no prompt behind the one that stops after the first step."""
    E, A, B = tokens(rng, 3)
    slow, quick = prompt_of(rng, first=100), prompt_of(rng, first=101)
    tables: dict[lm.Prefix, Table] = {
        slow: {(): {A: -1.0}, (A,): {B: -2.0}},
        quick: {(): {E: -0.5, B: -9.0}},
    }
    settings: dict[str, Any] = {"beam_width": 1, "max_new_tokens": 2, "eos_id": E}
    lm.run_tables(submission, VOCABULARY, tables, **settings)


def _moved_on(step: str) -> Mutant:
    """Where the rows of the next prompt begin."""
    return edit(_MOVE_ON, _ADVANCE + f"        first {step}\n")


@trap(
    catches="in the step in which a prompt stops or changes the number of its beams, the prompts "
    "behind it get rows of others, or none",
    severity="major",
    story="The offset into the model's answer moves on by the beams that are left, or the list of "
    "prompts becomes shorter while it is walked.",
    mutant=_moved_on("= last if search.beams else first"),
    also=[
        _moved_on("+= len(search.beams)"),
        edit(
            _MOVE_ON,
            f"{_MOVE_ON}        if not search.beams:\n            open_searches.remove(search)\n",
        ),
        _moved_on("= last if search.beams else first + 1"),
    ],
    seen=BLIND,
    control=_quick_prompt_is_last,
)
def rows_shift_in_the_last_step(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    prompts = [prompt_of(rng, first=100 + n) for n in range(3)]
    # The first prompt stops with one row, the second with two.
    ended: Table = {(): {A: -1.0, B: -2.0}, (A,): {E: -1.0}, (B,): {E: -0.5}}
    slow: Table = {(): {A: -3.0, B: -4.0}, (A,): {B: -1.0}, (B,): {A: -1.0}, (A, B): {E: -2.0}}
    tables: dict[lm.Prefix, Table] = {
        prompts[0]: {(): {E: -0.5}},
        prompts[1]: ended,
        prompts[2]: slow,
    }
    settings: dict[str, Any] = {"beam_width": 2, "max_new_tokens": 3, "eos_id": E, "strict": True}
    lm.run_tables(submission, VOCABULARY, tables, **settings)


@trap(
    catches="every prompt gets the first rows of the model's answer, or the last",
    severity="major",
    story="The offset does not move on.",
    mutant=_moved_on("= 0"),
    also=[edit(_ADVANCE, _ADVANCE.replace("first:last", "-len(search.beams) :"))],
    control=ordinary_search,
)
def same_rows_for_all_prompts(submission: Submission, rng: np.random.Generator) -> None:
    as_many_beams_each(submission, rng)


def _two_lengths(submission: Submission, rng: np.random.Generator, prompts: int) -> None:
    """W = 1 and up to two prompts: the first is longer, and greater than the second."""
    E, A, B = tokens(rng, 3)
    tables: dict[lm.Prefix, Table] = {
        prompt_of(rng, length=4, first=101): {(): {A: -1.0}, (A,): {E: -1.0}},
        prompt_of(rng, length=3, first=100): {(): {B: -2.0}, (B,): {E: -3.0}},
    }
    chosen = dict([*tables.items()][:prompts])
    settings: dict[str, Any] = {"beam_width": 1, "max_new_tokens": 2, "eos_id": E}
    lm.run_tables(submission, VOCABULARY, chosen, **settings)


@trap(
    catches="prefixes are given to the model in another order than its rows are read in",
    severity="major",
    story="Any order is allowed; the rows then come in that order, too.",
    mutant=insert_before(CALL, "    prefixes = prefixes[::-1]\n"),
    also=[insert_before(CALL, "    prefixes = sorted(prefixes, key=len)\n")],
    control=lambda submission, rng: _two_lengths(submission, rng, 1),
)
def rows_of_another_order(submission: Submission, rng: np.random.Generator) -> None:
    _two_lengths(submission, rng, 2)


@trap(
    catches="answers come in the order in which prompts finish",
    severity="major",
    story="A batch that retires finished prompts must return their answers in the original order.",
    mutant=insert_before(RETURN, "    searches.sort(key=lambda search: search.length)\n"),
    seen=BLIND,
)
def answers_out_of_order(submission: Submission, rng: np.random.Generator) -> None:
    alone_and_together(submission, rng)


@trap(
    catches="the model is still called with rows for prompts that are finished",
    severity="major",
    story="One library computes the finished rows of a batch and discards the result.",
    mutant=insert_before(
        CALL, "    prefixes += [search.prompt for search in searches if not search.beams]\n"
    ),
    seen=BLIND,
    also=(
        # The beams of a stopped prompt go on until every prompt has stopped.
        edits(
            ("        self.pool = []\n", "        self.pool = []\n        self.over = False\n"),
            (
                "        elif self._is_settled():\n            self.beams = []\n",
                "        else:\n            self.over = self._is_settled()\n",
            ),
            (
                "    while any(search.beams for",
                "    while any(search.beams and not search.over for",
            ),
        ),
    ),
)
def ended_prompts_still_asked(submission: Submission, rng: np.random.Generator) -> None:
    """The first prompt stops at once; the other one has worse beams, so that it is no bound."""
    E, A, B = tokens(rng, 3)
    quick, slow = prompt_of(rng, first=100), prompt_of(rng, first=101)
    tables: dict[lm.Prefix, Table] = {
        quick: {(): {E: -0.5, A: -4.0}, (A,): {B: -1.0}, (A, B): {B: -1.0}},
        slow: {(): {A: -9.0}, (A,): {B: -1.0}, (A, B): {E: -1.0}},
    }
    settings: dict[str, Any] = {"beam_width": 1, "max_new_tokens": 3, "eos_id": E, "strict": True}
    lm.run_tables(submission, VOCABULARY, tables, count_calls=True, length_penalty=0.0, **settings)


@trap(
    catches="the model is called once for every beam",
    severity="major",
    story="W·B calls per step where one is enough.",
    mutant=edit(
        CALL, CALL.replace("lm.log_probs(prefixes)", "[lm.log_probs([p])[0] for p in prefixes]")
    ),
)
def one_call_a_beam(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    table = {(): {A: -1.0, B: -2.0}, (A,): {A: -1.0}, (B,): {E: -1.0}}
    one(submission, rng, table, beam_width=2, max_new_tokens=2, eos_id=E, count_calls=True)


@trap(
    catches="the model is called once for every prompt",
    severity="major",
    story="`for prompt in prompts` around a whole search: batched in name only.",
    mutant=edit(
        CALL,
        CALL.replace(
            "lm.log_probs(prefixes)",
            "np.concatenate([lm.log_probs(s.prefixes()) for s in open_searches])",
        ),
    ),
    seen=BLIND,
)
def one_call_a_prompt(submission: Submission, rng: np.random.Generator) -> None:
    # The end is the second best continuation, so that all searches look at it.
    E, A = tokens(rng, 2)
    table: Table = {(): {A: -1.0, E: -20.0}, (A,): {E: -1.0}}
    tables = {prompt_of(rng, first=100 + n): table for n in range(4)}
    settings: dict[str, Any] = {"beam_width": 2, "max_new_tokens": 2, "eos_id": E}
    lm.run_tables(submission, VOCABULARY, tables, count_calls=True, **settings)


@trap(
    catches="an empty list of prompts still calls the model or fails",
    severity="minor",
    story="The loop makes a step before it checks whether a beam is alive.",
    mutant=edit("    while any(", "    step(lm, searches, rules.eos_id)\n    while any("),
    control=ordinary_search,
)
def empty_batch_asks(submission: Submission, rng: np.random.Generator) -> None:
    stub = Stub(log_probs=lambda prefixes: np.zeros((len(prefixes), VOCABULARY)))
    eos = int(rng.integers(VOCABULARY))
    got = submission.beam_search(stub, [], beam_width=2, max_new_tokens=2, eos_id=eos)
    expect.that(isinstance(got, list | tuple) and len(got) == 0, f"the answer is {got!r}")
    expect.that(not stub.calls, "the model was called for an empty batch")


@trap(
    catches="a prompt without tokens fails",
    severity="minor",
    story="Unconditional generation starts from an empty prompt.",
    mutant=insert_before(
        '    return [whole(token, "a prompt\'s token"',
        "    if not prompt:\n        raise ValueError('no tokens')\n",
    ),
    seen=BLIND,
    also=[
        insert_before(
            '    return [whole(token, "a prompt\'s token"',
            f"    if not prompt:\n        raise {error}\n",
        )
        for error in ("TypeError", "IndexError")
    ],
    control=ordinary_search,
)
def empty_prompt_refused(submission: Submission, rng: np.random.Generator) -> None:
    E, A = tokens(rng, 2)
    table = {(): {A: -1.0}, (A,): {E: -1.0}}
    asked = one(submission, rng, table, prompt=(), beam_width=2, max_new_tokens=2, eos_id=E)
    best(asked, [A, E], -1.0)


@trap(
    catches="hypotheses of an earlier call are still in the pool",
    severity="critical",
    story="A mutable default argument or a list of the class is created once for all calls.",
    seen=BLIND,
    mutant=edits(
        ("        self.pool = []\n", ""),
        ("    def __init__(self, prompt", "    pool = []\n\n    def __init__(self, prompt"),
    ),
)
def pool_kept_between_calls(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    clean, prompt = submission.clean(), prompt_of(rng)
    settings: dict[str, Any] = {"beam_width": 2, "max_new_tokens": 1, "eos_id": E}
    asked = one(clean, rng, {(): {E: -0.5, A: -3.0}}, prompt=prompt, **settings)
    best(asked, [E], -0.5)
    asked = one(clean, rng, {(): {E: -1.0, B: -2.0}}, prompt=prompt, **settings)
    best(asked, [E], -1.0)


def _cut(floor: str) -> Mutant:
    """Continuations below this sum are lost in all prompts."""
    return insert_after(
        CALL,
        "    sums = np.concatenate([s.sums for s in open_searches])[:, None] + log_probs\n"
        "    sums[:, eos_id] = -np.inf\n"
        "    width = min(open_searches[0].rules.beam_width, sums.size)\n"
        f"    lost = sums < {floor}\n"
        "    lost[:, eos_id] = False\n"
        "    log_probs = np.where(lost, -np.inf, log_probs)\n",
    )


@trap(
    catches="the sums of all prompts together decide which continuations are the W best",
    severity="critical",
    story="A cut over the whole batch: prompts with low sums lose their beams to the others.",
    seen=BLIND,
    mutant=_cut("np.partition(sums, -width, axis=None)[-width]"),
    # A floor for every row, and the highest of them for all.
    also=[_cut("np.sort(sums, axis=1)[:, -width:][:, 0].max()")],
)
def best_of_the_whole_batch(submission: Submission, rng: np.random.Generator) -> None:
    E, A, B = tokens(rng, 3)
    high, low = prompt_of(rng, first=100), prompt_of(rng, first=101)
    tables: dict[lm.Prefix, Table] = {
        high: {(): {A: -1.0, B: -2.0}},
        low: {(): {A: -8.0, B: -9.0}},
    }
    settings: dict[str, Any] = {"beam_width": 2, "max_new_tokens": 1, "eos_id": E}
    lm.run_tables(submission, VOCABULARY, tables, **settings)


def prefixes_matter(
    submission: Submission, rng: np.random.Generator, prompts: list[lm.Prefix], **settings: Any
) -> None:
    """A model that answers any prefix, each one differently."""
    E = int(rng.integers(VOCABULARY))
    model = lm.random_model(int(rng.integers(2**31)), VOCABULARY, eos_id=E)
    lm.run(submission, model, prompts, beam_width=2, max_new_tokens=3, eos_id=E, **settings)


@trap(
    catches="the model is given the generated tokens without the prompt",
    severity="critical",
    story="The prefixes are rebuilt from the beams alone.",
    seen=BLIND,
    mutant=edit(_PREFIXES, "        return [list(tokens) for tokens in self.beams]\n"),
)
def prefix_without_its_prompt(submission: Submission, rng: np.random.Generator) -> None:
    prefixes_matter(submission, rng, [prompt_of(rng)])


@trap(
    catches="the generated tokens stand before the prompt in what the model is given",
    severity="major",
    story="The parts of a sum of lists are exchanged.",
    mutant=edit("[self.prompt + tokens for", "[tokens + self.prompt for"),
)
def prompt_behind_its_tokens(submission: Submission, rng: np.random.Generator) -> None:
    prefixes_matter(submission, rng, [prompt_of(rng)])


@trap(
    catches="the model is given only the last token of each beam",
    severity="major",
    story="The habit of decoders with a cache; this model keeps no state.",
    mutant=edit(
        _PREFIXES, "        return [(self.prompt + tokens)[-1:] for tokens in self.beams]\n"
    ),
)
def prefix_of_one_token(submission: Submission, rng: np.random.Generator) -> None:
    prefixes_matter(submission, rng, [prompt_of(rng)])


@trap(
    catches="each prefix extends the caller's prompt in place, so beams see each other's tokens",
    severity="critical",
    story="extend() on the prompt instead of a new list.",
    seen=BLIND,
    mutant=edits(
        ("Search(token_list(prompt), rules)", "Search(prompt, rules)"),
        (
            _PREFIXES,
            "        for tokens in self.beams:\n"
            "            self.prompt.extend(tokens)\n"
            "        return [self.prompt] * len(self.beams)\n",
        ),
    ),
)
def prefix_grows_the_prompt(submission: Submission, rng: np.random.Generator) -> None:
    prefixes_matter(submission, rng, [prompt_of(rng)])


@trap(
    catches="prefixes of different length are padded to the longest",
    severity="major",
    story="The model takes lists of any lengths; what pads them becomes part of the text.",
    mutant=insert_before(
        CALL,
        "    longest = max(map(len, prefixes))\n"
        "    prefixes = [[0] * (longest - len(p)) + p for p in prefixes]\n",
    ),
)
def prefixes_padded(submission: Submission, rng: np.random.Generator) -> None:
    prefixes_matter(submission, rng, [prompt_of(rng, n + 1, 100 + n) for n in range(3)])


@trap(
    catches="prefixes are tuples or arrays instead of lists",
    severity="minor",
    story="The model is promised lists of ints.",
    mutant=insert_before(CALL, "    prefixes = [tuple(prefix) for prefix in prefixes]\n"),
)
def prefixes_are_tuples(submission: Submission, rng: np.random.Generator) -> None:
    prefixes_matter(submission, rng, [prompt_of(rng)])


@trap(
    catches="a prompt that occurs twice is answered once",
    severity="major",
    story="A dictionary by prompt merges equal ones.",
    mutant=edit(
        RETURN,
        "    found = {tuple(search.prompt): search.results() for search in searches}\n"
        "    return list(found.values())\n",
    ),
    control=ordinary_search,
)
def equal_prompts_answered_once(submission: Submission, rng: np.random.Generator) -> None:
    prompt = prompt_of(rng)
    prefixes_matter(submission, rng, [prompt, prompt_of(rng, first=101), prompt])
