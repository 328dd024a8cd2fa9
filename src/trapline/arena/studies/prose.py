"""What was said in words, held against the tables: participation, only ones, facts told twice."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from trapline.arena.standings.margin import steps
from trapline.arena.studies.records import Holders, Only, ReportedField, SaidGrade
from trapline.arena.studies.rows import ComparisonRow, row

#: Figures this close are the same figure, rounded.
_CLOSE = 0.05


def prose_rows(field: ReportedField) -> Iterator[ComparisonRow]:
    for said in field.claims.participation:
        ours = len(field.took(said.model))
        yield row("participation", said.model, said.count, ours, [said.source], note=said.quote)
    for only in field.claims.only:
        yield _only(field, only)
    for grade in field.claims.grade:
        yield _said_grade(field, grade)
    yield from _holders(field)
    yield from _arithmetic(field)
    yield from _sweeps(field)
    yield from _facts(field)
    yield from _better_figure_loses(field)


def _only(field: ReportedField, only: Only) -> ComparisonRow:
    tests: dict[str, Callable[[ReportedField, str], bool]] = {
        "took_part_in_all": lambda each, model: len(each.took(model)) == len(each.grades.matrix),
        "never_declines": _never_declines,
        "narrowest_range": lambda each, model: _least(each, model, lambda h: max(h) - min(h)),
        "highest_floor": lambda each, model: _least(each, model, lambda heights: -min(heights)),
    }
    ours = [model for model in field.who.models if tests[only.test](field, model)]
    return row(
        "only one",
        only.what,
        ", ".join(only.models),
        ", ".join(ours) or "no model",
        [only.source],
        note=only.quote,
    )


def _never_declines(field: ReportedField, model: str) -> bool:
    """By the grades of the stages; one who missed a stage has nothing to show for it."""
    grades = {
        row.stage: steps(row.read()[model].letter)
        for row in field.grades.overall
        if model in row.grades
    }
    heights = [grades[stage.name] for stage in field.who.stages if stage.name in grades]
    return len(heights) == len(field.who.stages) and heights == sorted(heights)


def _least(field: ReportedField, model: str, figure: Callable[[list[int]], int]) -> bool:
    """Whether no other model's grades have a smaller figure."""
    figures = {name: figure(_heights(field, name)) for name in field.who.models}
    return figures[model] == min(figures.values())


def _heights(field: ReportedField, model: str) -> list[int]:
    matrix = field.matrix()
    return [steps(matrix[model, challenge].letter) for challenge in field.took(model)]


def _said_grade(field: ReportedField, said: SaidGrade) -> ComparisonRow:
    grade = field.matrix().get((said.model, said.challenge))
    ours = grade.letter if grade else "no grade"
    return row(
        "said in prose",
        f"{said.model}, {said.challenge}",
        said.grade,
        ours,
        [said.source],
        holds=grade is not None and said.grade in ("took part", grade.letter),
        note=said.quote,
    )


def _holders(field: ReportedField) -> Iterator[ComparisonRow]:
    """What is said to be the complete list includes everyone whom any other place names."""
    by_property: dict[str, list[Holders]] = defaultdict(list)
    for holders in field.claims.holders:
        by_property[holders.property].append(holders)
    for name, said in by_property.items():
        everyone = [model for model in field.who.models if any(model in h.models for h in said)]
        for holders in said:
            if holders.complete:
                yield row(
                    "only one",
                    name,
                    ", ".join(sorted(holders.models)),
                    ", ".join(sorted(everyone)),
                    [each.source for each in said],
                    note=holders.quote,
                )


def _arithmetic(field: ReportedField) -> Iterator[ComparisonRow]:
    for said in field.claims.arithmetic:
        ours = said.part / said.whole
        yield row(
            "arithmetic",
            said.what,
            f"{said.stated:g}",
            f"{ours:.3g}",
            [said.source],
            holds=math.isclose(said.stated, ours, rel_tol=_CLOSE),
            note=said.quote,
        )


def _sweeps(field: ReportedField) -> Iterator[ComparisonRow]:
    for said in field.claims.sweep:
        for matchup in field.matchups.matchup:
            edges = matchup.edges.get(said.challenge, {})
            if {matchup.a, matchup.b} == {said.winner, said.loser} and edges:
                won = list(edges.values()).count(said.winner)
                yield row(
                    "sweep",
                    f"{said.winner} over {said.loser}, {said.challenge}",
                    f"{len(edges)} of {len(edges)} criteria",
                    f"{won} of {len(edges)} criteria",
                    [said.source],
                    note=said.quote,
                )


def _facts(field: ReportedField) -> Iterator[ComparisonRow]:
    """A figure that is given more than once has one value."""
    told: dict[tuple[str, str, str], list[tuple[float | str, str, str]]] = defaultdict(list)
    for fact in field.facts.fact:
        for model, value in fact.values.items():
            told[model, fact.challenge, fact.quantity].append((value, fact.source, fact.note))
    for (model, challenge, quantity), versions in told.items():
        for value, source, note in versions[1:]:
            first, first_source, first_note = versions[0]
            yield row(
                "fact",
                ", ".join(part for part in (model, challenge, quantity) if part),
                _shown(value),
                _shown(first),
                [source, first_source],
                holds=_agree(value, first),
                note="; ".join(part for part in (note, first_note) if part),
            )


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _agree(a: float | str, b: float | str) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    return math.isclose(a, b, rel_tol=_CLOSE)


def _better_figure_loses(field: ReportedField) -> Iterator[ComparisonRow]:
    """Where a challenge is about one figure, the better figure wins."""
    for fact in field.facts.fact:
        if not fact.lower_wins:
            continue
        figures = {model: v for model, v in fact.values.items() if not isinstance(v, str)}
        for matchup in field.matchups.matchup:
            for bout in matchup.bouts:
                sides = (matchup.a, matchup.b)
                if bout.challenge == fact.challenge and set(sides) <= figures.keys():
                    yield _by_figure(fact.quantity, figures, sides, bout.winner, matchup.source)


def _by_figure(
    quantity: str, figures: dict[str, float], sides: Sequence[str], winner: str, source: str
) -> ComparisonRow:
    better = min(sides, key=lambda side: figures[side])
    return row(
        f"winner by {quantity}",
        " – ".join(sides),
        winner,
        better,
        [source],
        note=", ".join(f"{side} {figures[side]:g}" for side in sides),
    )
