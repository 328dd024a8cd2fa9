"""Points: overall scores against their dimensions, averages and margins."""

from collections.abc import Iterator

from trapline.arena.standings.board import mean
from trapline.arena.studies.records import ReportedField
from trapline.arena.studies.rows import ComparisonRow, row

#: An overall score this close to the plain mean of its dimensions is its rounding.
_ROUNDING = 1.0


def score_rows(field: ReportedField) -> Iterator[ComparisonRow]:
    yield from _overall(field)
    yield from _margins(field)
    yield from _averages(field)


def _overall(field: ReportedField) -> Iterator[ComparisonRow]:
    for card in field.scores.card:
        ours = mean(list(card.dimensions.values()))
        yield row(
            "overall score",
            f"{card.model}, {card.challenge}",
            card.overall,
            f"{ours:.1f}",
            [card.source],
            holds=abs(card.overall - ours) <= _ROUNDING,
            note=f"mean of {len(card.dimensions)} dimensions; no weights are printed",
        )


def _margins(field: ReportedField) -> Iterator[ComparisonRow]:
    for margin in field.scores.margin:
        scores = {c.model: c.overall for c in field.scores.card if c.challenge == margin.challenge}
        best, *rest = sorted(scores, key=lambda model: -scores[model])
        yield row(
            "margin",
            f"{margin.challenge}, {' – '.join(sorted(scores))}",
            f"{margin.winner} +{margin.points}",
            f"{best} +{scores[best] - scores[rest[0]]}",
            [margin.source],
        )


def _averages(field: ReportedField) -> Iterator[ComparisonRow]:
    average = field.scores.average
    exact = {
        model: mean([card.overall for card in field.scores.card if card.model == model])
        for model in average.scores
    }
    for model, printed in average.scores.items():
        yield row(
            "average",
            f"{model}, {average.of} challenges",
            printed,
            round(exact[model]),
            [average.source],
            note=f"exactly {exact[model]:.2f}",
        )
    best, other = sorted(exact, key=lambda model: -exact[model])
    yield row(
        "margin",
        f"average, {' – '.join(sorted(exact))}",
        f"{average.winner} +{average.margin}",
        f"{best} +{round(exact[best] - exact[other])}",
        [average.source],
    )
    won = sum(margin.winner == average.winner for margin in field.scores.margin)
    yield row(
        "record",
        f"{average.winner}, challenges won",
        f"{average.won} of {average.of}",
        f"{won} of {len(field.scores.margin)}",
        [average.source],
    )
