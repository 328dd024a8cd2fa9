"""Bugs of prefixes that weigh the same: their order, and which of them the budget keeps."""

import numpy as np

from trapline.arena.judge.traps import Mutant, edit, edits, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.dflash import table
from trapline.challenges.dflash.situations import VOCABULARY, WRITTEN, distinct, float_type
from trapline.challenges.dflash.solution_lines import POP, PUSH
from trapline.challenges.dflash.traps_tree import TREE, WHILE

CUT = (
    "        cut = np.partition(row, row.size - count)[row.size - count]\n"
    "        candidates = np.flatnonzero(row >= cut)\n"
)
#: Levels one after the other, each heaviest first, are merged by a sort that ignores ties.
_MERGED = """\
    depths, weights = [], []
    for token, parent in zip(tokens, parents):
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        weights.append((weights[parent] if parent >= 0 else 0.0) + log_q[depths[-1], token])
    order = np.argsort(depths, kind="stable")
    weights = np.array(weights)[order]
    order = order[{sort}][:budget].tolist()
    places = {{-1: -1, **{{node: place for place, node in enumerate(order)}}}}
    tokens = [tokens[node] for node in order]
    parents = [places.get(parents[node], -1) for node in order]
"""


_BEST = '    best = candidates[np.argsort(-row[candidates], kind="stable")[:count]]\n'
#: The whole row is sorted, not what the budget leaves of it.
_WHOLE_ROW = "    best = np.argsort(-row)[:count]\n    best = best[row[best] > -np.inf]\n"


def merged(sort: str) -> Mutant:
    return edits(
        (WHILE, "    levels = []\n    while heap:\n"),
        (
            POP,
            POP + "        if levels.count(depth) >= budget:\n            continue\n"
            "        levels.append(depth)\n",
        ),
        (TREE, _MERGED.format(sort=sort) + TREE),
    )


@trap(
    catches="equally heavy prefixes come in an arbitrary order: the sort is not stable, or knows "
    "nothing but the weight",
    severity="minor",
    story="Levels are merged by weight with the default argsort, which is a quicksort; ties keep "
    "their order in small trees only.",
    mutant=merged("np.argsort(-weights)"),
    also=[
        merged("np.argsort(weights)[::-1]"),
        # The tokens of a row, in the search's float64 or in the draft's own dtype.
        edit(_BEST, _BEST.replace(', kind="stable"', "")),
        edit(_BEST, _WHOLE_ROW),
        edits(
            (_BEST, _WHOLE_ROW),
            ("    return log_q.astype(np.float64)\n", "    return log_q\n"),
        ),
    ],
    seen=WRITTEN,
)
def ties_in_any_order(submission: Submission, rng: np.random.Generator) -> None:
    # The long row comes first: short ones are in order by chance, or on some processors always, and
    # then another bug of ties ends the check.
    log_q = -rng.integers(1, 3, (1, 300)).astype(float_type(rng))
    order = sorted(range(300), key=lambda token: (-log_q[0, token], token))
    table.same_tree(submission, log_q, 300, (order, [-1] * 300))
    for _ in range(3):
        log_q = -rng.integers(0, 2, (3, 6)).astype(float_type(rng))
        table.same_tree(submission, log_q, 60)


@trap(
    catches="equally heavy prefixes come in the order in which the search found them",
    severity="minor",
    story="A counter in the heap keeps tuples comparable and decides ties before depth, parent and "
    "token do.",
    mutant=edits(
        (
            PUSH,
            PUSH.replace("(-(above + value), ", "(-(above + value), len(found), ")
            + "            found.append(token)\n",
        ),
        (POP, POP.replace("negative, ", "negative, _, ")),
        (
            "    tokens, parents, heap = [], [], []\n",
            "    tokens, parents, heap, found = [], [], [], []\n",
        ),
    ),
)
def ties_as_found(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, d = distinct(rng, 4)
    b, c = sorted((b, c))
    rows = [{a: -0.5, b: -1.5, c: -1.5}, {d: -1.0}]
    log_q = table.log_q_of(rows, VOCABULARY, float_type(rng))
    table.same_tree(submission, log_q, 4, ([a, b, c, d], [-1, -1, -1, 0]))


@trap(
    catches="of equally likely tokens at the edge of the budget arbitrary ones are kept, not the "
    "lowest",
    severity="minor",
    story="argpartition says nothing about which of several equal values it keeps.",
    mutant=edit(
        CUT,
        "        rest = row.size - count\n"
        "        candidates = np.sort(np.argpartition(row, rest)[rest:])\n",
    ),
    also=[
        edit(CUT, "        candidates = np.sort(np.argpartition(-row, count - 1)[:count])\n"),
        edit(CUT, "        candidates = np.sort(np.argpartition(-row, count)[:count])\n"),
        edit(CUT, "        candidates = np.sort(np.argpartition(row, -count)[-count:])\n"),
        edit(
            CUT,
            "        candidates = np.flatnonzero(row > -np.inf)\n"
            "        if candidates.size > count:\n"
            "            kept = np.argpartition(row[candidates], -count)[-count:]\n"
            "            candidates = np.sort(candidates[kept])\n",
        ),
    ],
    seen=WRITTEN,
)
def ties_at_the_edge(submission: Submission, rng: np.random.Generator) -> None:
    log_q = -rng.integers(1, 4, (1, 300)).astype(float_type(rng))
    order = sorted(range(300), key=lambda token: (-log_q[0, token], token))
    for budget in (20, 40, 150):
        table.same_tree(submission, log_q, budget, (order[:budget], [-1] * budget))
