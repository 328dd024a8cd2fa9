"""Head-to-heads: the record that their own rows give, who leads, and what the grades say."""

from collections import defaultdict
from collections.abc import Iterator

from trapline.arena.standings.margin import steps
from trapline.arena.studies.records import Matchup, ReportedField
from trapline.arena.studies.rows import ComparisonRow, row

_UNDECIDED = ("tie", "split")


def matchup_rows(field: ReportedField) -> Iterator[ComparisonRow]:
    for matchup in field.matchups.matchup:
        yield _record(matchup)
        yield _lead(matchup)
        yield from _overlap(field, matchup)
    for matchup in field.matchups.matchup:
        yield from _winners_against_grades(field, matchup)
    yield from _edges_against_winners(field)
    yield from _words_for_a_step(field)


def title(matchup: Matchup) -> str:
    return f"{matchup.a} – {matchup.b}"


def count(matchup: Matchup, side: str) -> tuple[int, int, int]:
    """Won, lost and undecided, from one side."""
    winners = [bout.winner for bout in matchup.bouts]
    undecided = sum(winner in _UNDECIDED for winner in winners)
    won = winners.count(side)
    return won, len(winners) - won - undecided, undecided


def _record(matchup: Matchup) -> ComparisonRow:
    """As it was printed: won-lost-tied, or won-lost with half a point for an undecided one."""
    won, lost, tied = count(matchup, matchup.leader or matchup.a)
    if matchup.record.count("-") == 2:
        ours = f"{won}-{lost}-{tied}"
    else:
        ours = f"{won + tied / 2:g}-{lost + tied / 2:g}"
    return row(
        "record",
        title(matchup),
        matchup.record,
        ours,
        [matchup.source],
        note=f"counted over {len(matchup.bouts)} rows, from {matchup.leader or matchup.a}'s side",
    )


def _lead(matchup: Matchup) -> ComparisonRow:
    won, lost, _ = count(matchup, matchup.a)
    leader = matchup.a if won > lost else matchup.b
    return row(
        "lead",
        title(matchup),
        f"{matchup.leader} leads" if matchup.leader else "level",
        f"{leader} leads" if won != lost else "level",
        [matchup.source],
        note=f"{won} won, {lost} lost",
    )


def _overlap(field: ReportedField, matchup: Matchup) -> Iterator[ComparisonRow]:
    if not matchup.overlap:
        return
    shared = set(field.took(matchup.a)) & set(field.took(matchup.b))
    for stated in matchup.overlap:
        yield row(
            "overlap",
            title(matchup),
            stated,
            len(shared),
            [matchup.source],
            note="shared challenges by the grade matrix",
        )
    yield row(
        "rows",
        title(matchup),
        f"{len(matchup.bouts)} rows",
        f"{len(shared)} rows",
        [matchup.source],
        note="one for each challenge that both have a grade in",
    )


def _winners_against_grades(field: ReportedField, matchup: Matchup) -> Iterator[ComparisonRow]:
    """The winner of a row never has the lower grade; a tie has equal grades."""
    matrix = field.matrix()
    for bout in matchup.bouts:
        a, b = (matrix[side, bout.challenge].letter for side in (matchup.a, matchup.b))
        ahead = steps(a) - steps(b)
        better = matchup.a if ahead > 0 else matchup.b
        decided = bout.winner not in _UNDECIDED
        yield row(
            "winner",
            f"{title(matchup)}, {bout.challenge}",
            bout.winner,
            better if ahead else "same grade",
            [matchup.source],
            holds=ahead == 0 or (decided and bout.winner == better),
            note=f"{a} and {b} in the matrix",
        )


def _edges_against_winners(field: ReportedField) -> Iterator[ComparisonRow]:
    """Who wins a task has the edge in more criteria than the other."""
    for matchup in field.matchups.matchup:
        winners = {bout.challenge: bout.winner for bout in matchup.bouts}
        for challenge, edges in matchup.edges.items():
            a, b = (list(edges.values()).count(side) for side in (matchup.a, matchup.b))
            ours = "level" if a == b else (matchup.a if a > b else matchup.b)
            winner = winners[challenge]
            yield row(
                "edges",
                f"{title(matchup)}, {challenge}",
                winner,
                f"{ours}, {max(a, b)} to {min(a, b)}",
                [matchup.source],
                holds=winner == ours or (winner in _UNDECIDED and ours == "level"),
                note=f"{len(edges)} criteria",
            )


def _words_for_a_step(field: ReportedField) -> Iterator[ComparisonRow]:
    """A difference of so many steps between two letters has one name."""
    matrix = field.matrix()
    words: dict[int, list[str]] = defaultdict(list)
    sources = set()
    for matchup in field.matchups.matchup:
        for bout in matchup.bouts:
            if bout.margin:
                sides = [
                    steps(matrix[side, bout.challenge].letter) for side in (matchup.a, matchup.b)
                ]
                words[abs(sides[0] - sides[1])].append(bout.margin)
                sources.add(matchup.source)
    for distance, used in sorted(words.items()):
        counts = ", ".join(f"{word} × {used.count(word)}" for word in sorted(set(used)))
        yield row(
            "margin word",
            f"two grades {distance} step{'' if distance == 1 else 's'} apart",
            counts,
            "one word",
            sorted(sources),
            holds=len(set(used)) == 1,
        )
