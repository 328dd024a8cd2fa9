"""The comprehensive comparison: matrix, head-to-heads, shapes, trajectory, ranking, picks."""

from collections.abc import Mapping
from itertools import combinations

from trapline.arena.report.field import Column
from trapline.arena.report.formats import chance, named, rank_set
from trapline.arena.report.markdown.parts import rubric_table, summary, title_of, winner
from trapline.arena.report.markdown.syntax import Raw, bullets, join, table, text
from trapline.arena.report.pages.entrant import trait_text
from trapline.arena.report.pages.overview import pick_rows
from trapline.arena.report.pages.standings import detail_tables
from trapline.arena.report.pages.traps import moment_row
from trapline.arena.report.reading import Reading
from trapline.arena.standings.failures import common_failures, silent_bugs
from trapline.arena.standings.moments import moments
from trapline.arena.standings.places import places
from trapline.arena.standings.trajectory import Trajectory

#: Head-to-heads between this many of the best entrants.
MOST_PAIRED = 6
MOST_LISTED = 12


def document(reading: Reading) -> str:
    return join(
        f"# Comprehensive comparison: {text(reading.run.meta.get('title') or reading.run.name)}",
        summary(reading),
        _matrix(reading),
        _ranking(reading),
        _heads(reading),
        _shapes(reading),
        _trajectory(reading),
        _moments(reading),
        _failures(reading),
        _details(reading),
        _picks(reading),
        rubric_table(),
    )


def _matrix(reading: Reading) -> list[str]:
    """Challenges down, entrants across, with the place in each challenge."""
    names = reading.order
    rows = []
    for column in reading.field.columns:
        info = reading.field.challenges[column.challenge]
        scores = {
            name: square.score
            for name in names
            if (square := reading.field.square(name, column)).score is not None
        }
        place = places({name: score for name, score in scores.items() if score is not None}, 0.999)
        cells = [_graded(reading, name, column, place.get(name)) for name in names]
        rows.append([title_of(reading, *column), info.difficulty.capitalize(), *cells])
    heads = ["Challenge", "Difficulty", *names]
    return ["## Per-challenge grade matrix", "", *table(heads, rows)]


def _graded(reading: Reading, name: str, column: Column, place: str | None) -> str:
    square = reading.field.square(name, column)
    return f"{square.shown} ({place})" if place and square.letter else square.shown


def _ranking(reading: Reading) -> list[str]:
    rows = []
    for each in reading.ranking.standings:
        shape = reading.shapes.get(each.entrant)
        strength = shape.strengths[0].evidence if shape and shape.strengths else "–"
        weakness = shape.weaknesses[0].evidence if shape and shape.weaknesses else "–"
        interval = f"{each.mean_score:.1f} ({each.score_low:.1f}–{each.score_high:.1f})"
        rows.append(
            [each.place, each.entrant, interval, rank_set(each), chance(each.p_first), strength,
             weakness]
        )  # fmt: skip
    heads = ["Rank", "Entrant", "Mean (95 %)", "Rank set", "P(first)", "Strength", "Weakness"]
    return ["## Aggregate ranking", "", *table(heads, rows)]


def _heads(reading: Reading) -> list[str]:
    names = [standing.entrant for standing in reading.ranking.standings[:MOST_PAIRED]]
    lines = ["## Head-to-head breakdown"]
    for a, b in combinations(names, 2):
        result = reading.duel(a, b)
        shared = len(result.bouts)
        lines += ["", f"### {text(a)} vs {text(b)} ({shared} shared)", ""]
        rows = [
            [
                title_of(reading, bout.challenge, bout.track),
                winner(bout.winners, result.entrants, bout.margin),
            ]
            for bout in result.bouts
        ]
        if rows:
            lines += [*table(["Challenge", "Winner"], rows), ""]
        lines += [f"Record: **{text(result.verdict)}**"]
    return lines if len(names) > 1 else []


def _shapes(reading: Reading) -> list[str]:
    lines = ["## The shape of each entrant"]
    for name in reading.order[:MOST_LISTED]:
        shape = reading.shapes.get(name)
        if shape is None or not (shape.strengths or shape.weaknesses):
            continue
        lines += ["", f"### {text(name)}", ""]
        for heading, traits in (("Strengths", shape.strengths), ("Weaknesses", shape.weaknesses)):
            if traits:
                told = "; ".join(text(trait_text(trait)) for trait in traits)
                lines += [f"**{heading}:** {told}.", ""]
    return lines if len(lines) > 1 else []


def _trajectory(reading: Reading) -> list[str]:
    return [
        *_stages(reading, "from easy to hard", reading.trajectories),
        *_stages(reading, "by round", reading.rounds),
    ]


def _stages(reading: Reading, title: str, found: Mapping[str, Trajectory]) -> list[str]:
    """Letters from stage to stage; nothing where there is one stage or none."""
    rows = [
        [name, *(stage.letter or "—" for stage in found[name].stages), found[name].trend]
        for name in reading.order
        if name in found
    ]
    stages = next(([stage.name for stage in one.stages] for one in found.values()), [])
    if len(stages) < 2:
        return []
    return [f"## The trajectory, {title}", "", *table(["Entrant", *stages, "Trend"], rows), ""]


def _moments(reading: Reading) -> list[str]:
    found = [moment_row(reading, moment) for moment in moments(reading.run.cells, 3)]
    if not found:
        return []
    lines = ["## Bugs that separate the field"]
    for number, row in enumerate(found, start=1):
        lines += ["", f"### {number}. {text(row['trap'])} ({text(row['challenge'])})", ""]
        if row["catches"]:
            lines += [text(row["catches"]), ""]
        lines += bullets([f"found in: {named(row['fell'])}", f"not found in: {named(row['held'])}"])
    return lines


def _failures(reading: Reading) -> list[str]:
    common = common_failures(reading.run.cells)[:MOST_LISTED]
    silent = silent_bugs(reading.run.cells)
    lines = []
    if common:
        rows = [
            [m.trap, m.challenge, f"{len(m.fell)} of {len(m.fell) + len(m.held)}"] for m in common
        ]
        lines += ["## Common failure modes", "", *table(["Bug", "Challenge", "Found in"], rows), ""]
    if silent:
        told = [
            f"{bug.entrant}, {bug.challenge}: {named([*bug.traps, *bug.cases])}"
            for bug in silent[:MOST_LISTED]
        ]
        lines += [
            "## Silent bugs: own tests pass, one of our checks fails",
            "",
            *bullets(told),
        ]
        if len(silent) > MOST_LISTED:
            lines += [f"- and {len(silent) - MOST_LISTED} more"]
    return lines


def _details(reading: Reading) -> list[str]:
    lines: list[str] = []
    for part in detail_tables(reading):
        lines += [f"## {part['title']}", "", part["note"], "", *table(part["heads"], part["rows"])]
        lines += [""]
    return lines[:-1]


def _picks(reading: Reading) -> list[str]:
    rows = []
    for row in pick_rows(reading):
        who = named(row["entrants"])
        rows.append([row["title"].capitalize(), Raw(f"**{text(who)}**"), row["why"], row["rule"]])
    heads = ["Criterion", "Pick", "Why", "Rule"]
    return ["## If you could only pick one", "", *table(heads, rows)] if rows else []
