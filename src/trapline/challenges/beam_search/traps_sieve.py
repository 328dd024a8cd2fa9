"""Bugs of a sieve in front of the choice, which leaves fewer continuations to be sorted."""

from typing import Any

import numpy as np

from trapline.arena.judge.traps import Mutant, edit, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.beam_search import table as lm
from trapline.challenges.beam_search.situations import BLIND, ordinary_search, prompt_of
from trapline.challenges.beam_search.table import Table

#: A prime: groups of any size leave a rest.
_VOCABULARY = 1031
_END = 100
_CUT = (
    "        cut = np.partition(values, values.size - count)[values.size - count]\n"
    "        candidates = np.flatnonzero(values >= cut)\n"
)
_WITHOUT_THE_REST = "np.flatnonzero(values[: groups * 64] >= floor)"
_BESTS_OF = "np.sort(np.append({}, np.arange(groups * 64, values.size)))"
_STRIDED, _IN_A_ROW = "reshape(64, groups).T", "reshape(groups, 64)"


def _sieve(grouped: str, candidates: str, *, least: str = "count", rank: str = "count") -> Mutant:
    """The floor is one of the groups' best, where there are at least so many groups."""
    return edit(
        _CUT,
        "        groups = values.size // 64\n"
        f"        in_groups = values[: groups * 64].{grouped}\n"
        "        bests = in_groups.argmax(axis=1)\n"
        "        candidates = np.arange(values.size)\n"
        f"        if groups >= {least}:\n"
        f"            floor = np.sort(in_groups.max(axis=1))[-min({rank}, groups)]\n"
        f"            candidates = {candidates}\n",
    )


def _only_these(
    submission: Submission, rng: np.random.Generator, first: dict[int, float], width: int
) -> None:
    """These are the possible first tokens, and the end comes next. The limit is one step later:
    bugs of the limit do not show."""
    settings: dict[str, Any] = {"beam_width": width, "max_new_tokens": 3, "eos_id": _END}
    ends: Table = {(token,): {_END: -1.0} for token in first}
    tables: dict[lm.Prefix, Table] = {prompt_of(rng): {(): first, **ends}}
    lm.run_tables(submission, _VOCABULARY, tables, **settings, length_penalty=0.0, strict=True)


@trap(
    catches="a first sieve loses the W-th best sum: what lies on its floor is not kept, or the "
    "floor is too high",
    severity="major",
    story="A lower bound of the W-th best sum is often that sum itself.",
    mutant=_sieve(_STRIDED, "np.flatnonzero(values > floor)"),
    also=[
        _sieve(_IN_A_ROW, "np.flatnonzero(values > floor)"),
        *(
            _sieve(grouped, "np.flatnonzero(values >= floor)", rank="max(count - 1, 1)")
            for grouped in (_STRIDED, _IN_A_ROW)
        ),
    ],
    seen=BLIND,
    control=ordinary_search,
)
def sieve_loses_its_floor(submission: Submission, rng: np.random.Generator) -> None:
    _only_these(submission, rng, {int(rng.integers(9)): -1.0}, 1)
    # They share no group, whether tokens in a row or every n-th one make a group.
    _only_these(submission, rng, {2: -1.0, 901: -2.0}, 2)


@trap(
    catches="a sieve over groups of tokens leaves out some of the W best: those behind the last "
    "whole group, the second best of a group, or what is below every group's best where there are "
    "fewer groups than W",
    severity="major",
    story="The groups' best ones bound the W-th best sum from below; they are not the W best.",
    mutant=_sieve(_STRIDED, _WITHOUT_THE_REST),
    also=[
        _sieve(_IN_A_ROW, _WITHOUT_THE_REST),
        _sieve(_STRIDED, _BESTS_OF.format("np.arange(groups) + groups * bests")),
        _sieve(_IN_A_ROW, _BESTS_OF.format("np.arange(groups) * 64 + bests")),
        _sieve(_STRIDED, "np.flatnonzero(values >= floor)", least="1"),
        _sieve(_IN_A_ROW, "np.flatnonzero(values >= floor)", least="1"),
    ],
    control=ordinary_search,
)
def sieve_of_groups(submission: Submission, rng: np.random.Generator) -> None:
    # The last token is behind all whole groups.
    _only_these(submission, rng, {_VOCABULARY - 1: -1.0, int(rng.integers(9)): -2.0}, 1)
    # The two best share a group of tokens in a row, or of every n-th token.
    _only_these(submission, rng, {2: -1.0, 3: -2.0, 501: -3.0}, 2)
    _only_these(submission, rng, {2: -1.0, 130: -2.0, 501: -3.0}, 2)
    # Every group has one of the best, which are fewer than W.
    lower = {token: -2.0 - token for token in range(_VOCABULARY) if token != _END}
    best = {token: -1.0 for token in lower if token < 64 or token % 16 == 0}
    _only_these(submission, rng, lower | best, 150)
