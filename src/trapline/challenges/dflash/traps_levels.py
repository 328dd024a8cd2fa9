"""Bugs of trees that are grown level by level and sorted after each level."""

import numpy as np

from trapline.arena.judge.traps import Mutant, edit, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.dflash import table
from trapline.challenges.dflash.situations import VOCABULARY, WRITTEN, distinct, float_type, rising
from trapline.challenges.dflash.traps_ties import CUT, merged
from trapline.challenges.dflash.traps_tree import TREE

#: Every parent of a level offers so many children; the pool is sorted with each level.
_GROWN = """\
    kept, level = [], [((), 0.0)]
    for row in ranked:
        if not level:
            break
        fresh = [
            ((*path, token), above + value)
            for place, (path, above) in enumerate(level)
            for value, token in row[:{share}]
        ]
        if len(kept) == budget:
            fresh = [node for node in fresh if budget and node[1] > kept[-1][1]]
        level = set(fresh)
        kept = {sort}[:budget]
        level = [node for node in kept if node in level]
    places = {{path: place for place, (path, _) in enumerate(kept)}}
    tokens = [path[-1] for path in places]
    parents = [places.get(path[:-1], -1) for path in places]
"""
_DESCENDING = "sorted(kept + fresh, key=lambda node: -node[1])"
_TURNED = "sorted(kept + fresh, key=lambda node: node[1])[::-1]"


def _grown(*, share: str = "budget // (place + 1)", sort: str = _DESCENDING) -> Mutant:
    return insert_before(TREE, _GROWN.format(share=share, sort=sort))


def no_ties(submission: Submission, rng: np.random.Generator) -> None:
    """Two levels of different weights; no parent has two of the heaviest children."""
    a, b, c, d = distinct(rng, 4)
    rows = [{a: -0.5, b: -1.0}, {c: -1.0, d: -1.25}]
    log_q = table.log_q_of(rows, VOCABULARY, float_type(rng))
    table.same_tree(submission, log_q, 3, ([a, b, c], [-1, -1, 0]))


@trap(
    catches="equally heavy prefixes come in reversed order: the deeper one, the later parent and "
    "the higher token first",
    severity="minor",
    story="A stable ascending sort is turned round, and its ties with it.",
    mutant=_grown(sort=_TURNED),
    also=[
        _grown(share="budget", sort=_TURNED),
        # All levels are sorted at once.
        merged('np.argsort(weights, kind="stable")[::-1]'),
    ],
    seen=WRITTEN,
    control=no_ties,
)
def ties_turned_round(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, d = rising(rng, 4)
    rows = [{a: -1.0, b: -1.0, c: -1.0}, {b: -1.0, d: -1.0}]
    log_q = table.log_q_of(rows, VOCABULARY, float_type(rng))
    tokens, parents = [a, b, c, b, d, b, d, b, d], [-1, -1, -1, 0, 0, 1, 1, 2, 2]
    for budget in (2, 5, 9):
        table.same_tree(submission, log_q, budget, (tokens[:budget], parents[:budget]))


#: Rows and levels are cut to the budget one by one, and then all levels together.
_LAST_KEPT = """\
    def heaviest(nodes):
        kept = sorted(nodes, key=lambda node: node[1])[max(len(nodes) - budget, 0) :]
        return sorted(kept, key=lambda node: -node[1])

    found, level = [], [((), 0.0)]
    for row in log_q:
        law = [(token, value) for token, value in heaviest([*enumerate(row)]) if value > -np.inf]
        level = heaviest(
            [
                ((*path, token), above + value)
                for place, (path, above) in enumerate(level)
                for token, value in law[: budget // (place + 1)]
            ]
        )
        found += level
    places = {path: place for place, (path, _) in enumerate(heaviest(found))}
    tokens = [path[-1] for path in places]
    parents = [places.get(path[:-1], -1) for path in places]
"""


def ties_that_fit(submission: Submission, rng: np.random.Generator) -> None:
    """Prefixes of the same weight are all kept, or none of them."""
    a, b, c, d = rising(rng, 4)
    rows = [{a: -0.5, b: -0.5}, {c: -1.0, d: -1.0}]
    log_q = table.log_q_of(rows, VOCABULARY, float_type(rng))
    tokens, parents = [a, b, c, d, c, d], [-1, -1, 0, 0, 1, 1]
    for budget in (2, 6):
        table.same_tree(submission, log_q, budget, (tokens[:budget], parents[:budget]))


@trap(
    catches="where not all of several equally heavy prefixes fit into the budget, the last are "
    "kept: the higher tokens, or those below later parents",
    severity="minor",
    story="The heaviest are taken from the end of an ascending sort and put in order afterwards.",
    mutant=insert_before(TREE, _LAST_KEPT),
    # The same of a row's tokens alone.
    also=[edit(CUT, '        candidates = np.sort(np.argsort(row, kind="stable")[-count:])\n')],
    seen=WRITTEN,
    control=ties_that_fit,
)
def last_of_equals_kept(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, d = rising(rng, 4)
    log_q = table.log_q_of([{a: -1.0, b: -1.0, c: -1.0, d: -1.0}], VOCABULARY, float_type(rng))
    for budget in (1, 3):
        table.same_tree(submission, log_q, budget, ([a, b, c][:budget], [-1] * budget))
    rows = [{a: -0.5, b: -0.5}, {c: -1.0, d: -1.0}]
    log_q = table.log_q_of(rows, VOCABULARY, float_type(rng))
    for budget in (3, 4):
        tree = [a, b, c, d][:budget], [-1, -1, 0, 0][:budget]
        table.same_tree(submission, log_q, budget, tree)


@trap(
    catches="each parent of a level may have only its even share of the budget as children",
    severity="major",
    story="As in a beam, the budget is divided by the number of parents; a likely parent loses "
    "heavy children.",
    mutant=_grown(share="-(-budget // len(level))"),
    also=[_grown(share="max(1, budget // len(level))")],
    seen=WRITTEN,
    control=no_ties,
)
def budget_shared_among_parents(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, d, e, f = distinct(rng, 6)
    rows = [
        {a: -0.5, b: -4.0, c: -4.5, d: -5.0},
        {a: -1.0, b: -1.25, c: -1.5, d: -1.75, e: -2.0, f: -2.25},
    ]
    log_q = table.log_q_of(rows, VOCABULARY, float_type(rng))
    table.same_tree(submission, log_q, 7, ([a, a, b, c, d, e, f], [-1] + [0] * 6))
