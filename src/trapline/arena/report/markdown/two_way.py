"""2-way head-to-heads: every pair, task by task, with an edge per criterion."""

from itertools import combinations

from trapline.arena.report.markdown.parts import (
    criteria,
    odds,
    rubric_table,
    summary,
    title_of,
    winner,
)
from trapline.arena.report.markdown.syntax import join, table, text
from trapline.arena.report.reading import Reading
from trapline.arena.standings.duel import Duel

#: Pairs of this many of the best entrants; all pairs of a hundred would be 4,950.
MOST_ENTRANTS = 8


def document(reading: Reading) -> str:
    names = [standing.entrant for standing in reading.ranking.standings]
    shown = names[:MOST_ENTRANTS]
    left_out = ""
    if len(shown) < len(names):
        left_out = f"Pairs of the first {len(shown)} of {len(names)} entrants."
    sections = [_pair(reading, a, b) for a, b in combinations(shown, 2)]
    return join(
        "# 2-way head-to-head comparisons",
        summary(reading),
        left_out,
        *(section for section in sections),
        rubric_table(),
    )


def _pair(reading: Reading, a: str, b: str) -> list[str]:
    result = reading.duel(a, b)
    lines = [f"## {text(a)} vs {text(b)}", ""]
    for number, bout in enumerate(result.bouts, start=1):
        lines += [f"### Task {number}: {text(title_of(reading, bout.challenge, bout.track))}", ""]
        if any(edge.winners for edge in bout.edges):
            lines += [*criteria(result, bout.edges), ""]
        scores = ", ".join(
            f"{text(name)} {bout.letters[name]} ({bout.scores[name]:.1f})"
            for name in result.entrants
            if bout.scores[name] is not None
        )
        lines += [f"Winner: {winner(bout.winners, result.entrants, bout.margin)}. {scores}.", ""]
    return [*lines, *_overall(reading, result)]


def _overall(reading: Reading, result: Duel) -> list[str]:
    a, b = result.entrants
    lines = [f"### {text(a)} vs {text(b)} overall", "", f"**{text(result.verdict)}** "]
    lines[-1] += odds(reading, a, b)
    rows = [
        [
            title_of(reading, bout.challenge, bout.track),
            winner(bout.winners, result.entrants, bout.margin),
        ]
        for bout in result.bouts
    ]
    if rows:
        lines += ["", *table(["Challenge", "Winner"], rows)]
    if result.not_compared:
        lines += ["", f"Not compared: {text(', '.join(result.not_compared))}."]
    return lines
