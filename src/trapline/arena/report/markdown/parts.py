"""Parts that several documents share: the summary and the rubric."""

from collections.abc import Sequence

from trapline.arena.judge import rubric
from trapline.arena.report.formats import chance, rank_set
from trapline.arena.report.markdown.syntax import Raw, bold, table, text
from trapline.arena.report.pages.overview import caveat, red_team_fact
from trapline.arena.report.reading import Reading
from trapline.arena.standings.duel import Duel, Edge

PODIUM = 6


def summary(reading: Reading) -> list[str]:
    """TL;DR: the ranking with its caveat."""
    standings = reading.ranking.standings[:PODIUM]
    places = ", ".join(f"{s.place} {text(s.entrant)} (rank {rank_set(s)})" for s in standings)
    lines = [f"**TL;DR.** {text(reading.ranking.conclusion)}"]
    if places:
        lines += ["", f"**Ranking:** {places}."]
    lines += ["", f"*{text(caveat(reading))}*"]
    red_team = red_team_fact(reading)
    isolation = f"Isolation: {reading.isolation}."
    if red_team:
        isolation += f" Red team: {red_team[2]}."
    return [*lines, "", text(f"{isolation} {reading.graded_by}".rstrip())]


def rubric_table() -> list[str]:
    """The table of letters and caps that every report prints."""
    letters = [letter for letter, _ in rubric.LETTERS]
    least = [f"{least:g}" for _, least in rubric.LETTERS]
    return [
        "## Rubric",
        "",
        *table(["Letter", *letters], [["from", *least]]),
        "",
        f"A failed contract caps a score at {rubric.FAIL_CAP:g}, a critical trap at "
        f"{rubric.CRITICAL_CAP:g}; a hack is 0. What could not be measured is left out.",
    ]


def title_of(reading: Reading, challenge: str, track: str) -> str:
    title = reading.field.challenges[challenge].title
    return f"{title} ({track})" if len(reading.field.tracks) > 1 else title


def winner(winners: Sequence[str], everyone: Sequence[str], margin: str | None) -> Raw:
    if not winners:
        return Raw("–")
    if len(winners) == len(everyone) or margin in (None, "tie"):
        return Raw("Tie" if len(winners) == len(everyone) else f"{text(', '.join(winners))} (tie)")
    return Raw(f"{bold(', '.join(winners))} ({margin})")


def value(edge: Edge, name: str) -> str:
    behind = edge.behind.get(name, "")
    return (edge.text(name) or "–") + (f" ({behind})" if behind and edge.text(name) else "")


def criteria(duel: Duel, edges: Sequence[Edge]) -> list[str]:
    """Criteria | A | B | Edge."""
    return table(
        ["Criteria", *duel.entrants, "Edge"],
        [
            [
                edge.criterion,
                *(value(edge, name) for name in duel.entrants),
                winner(edge.winners, duel.entrants, edge.margin),
            ]
            for edge in edges
            if edge.is_comparison
        ],
    )


def odds(reading: Reading, a: str, b: str) -> str:
    p = reading.ranking.odds(a, b)
    return "" if p is None else f"P({text(a)} is the stronger) = {chance(p)}."
