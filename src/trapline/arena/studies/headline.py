"""The headline ranking against the mean grades and against what resampling supports."""

from collections.abc import Iterator

from trapline.arena.judge.rubric import LETTERS
from trapline.arena.standings.board import mean
from trapline.arena.standings.margin import steps
from trapline.arena.standings.places import ordinal, places, ranks
from trapline.arena.standings.ranking import Ranking, Standing, ranking
from trapline.arena.studies.cells import as_cells
from trapline.arena.studies.records import ReportedField
from trapline.arena.studies.rows import ComparisonRow, row

_HALF_A_STEP = 0.5


def headline_rows(field: ReportedField) -> Iterator[ComparisonRow]:
    means = mean_steps(field)
    yield from _ranks_by_mean(field, means)
    yield from _average_letters(field, means)
    yield from _ranks_by_resampling(field, ranking(as_cells(field)))


def mean_steps(field: ReportedField) -> dict[str, float]:
    """The mean of each model's letters, in steps of the ladder."""
    matrix = field.matrix()
    return {
        model: mean([steps(matrix[model, challenge].letter) for challenge in field.took(model)])
        for model in field.who.models
    }


def _ranks_by_mean(field: ReportedField, means: dict[str, float]) -> Iterator[ComparisonRow]:
    ours, words = ranks(means), places(means)
    for line in field.grades.rank:
        yield row(
            "rank by mean grade",
            line.model,
            ordinal(line.rank),
            words[line.model],
            [line.source],
            holds=line.rank == ours[line.model],
            note=f"mean of {len(field.took(line.model))} grades: {_between(means[line.model])}",
        )


def _average_letters(field: ReportedField, means: dict[str, float]) -> Iterator[ComparisonRow]:
    for line in field.grades.rank:
        printed = [steps(part) for part in line.average.split("/")]
        height = means[line.model]
        yield row(
            "average grade",
            line.model,
            line.average,
            _between(height),
            [line.source],
            holds=min(printed) - _HALF_A_STEP <= height <= max(printed) + _HALF_A_STEP,
            note=f"{len(field.took(line.model))} grades",
        )


def _between(height: float) -> str:
    """A mean as a letter: the nearest, with how far above or below it lies."""
    nearest = LETTERS[len(LETTERS) - 1 - round(height)][0]
    away = height - round(height)
    return nearest if abs(away) < 0.05 else f"{nearest} {away:+.2f} steps"


def _ranks_by_resampling(field: ReportedField, ours: Ranking) -> Iterator[ComparisonRow]:
    standings = {standing.entrant: standing for standing in ours.standings}
    for line in field.grades.rank:
        standing = standings[line.model]
        yield row(
            "rank",
            line.model,
            line.rank,
            f"{standing.rank}, 95 % {_rank_set(standing)}",
            [line.source],
            holds=standing.rank_low <= line.rank <= standing.rank_high,
            note=f"P(first) {standing.p_first:.2f}; holds where the rank lies in the 95 % set",
        )
    for said in field.claims.clear_first:
        standing = standings[said.model]
        yield row(
            "clear first",
            said.model,
            "clear first",
            f"rank {standing.rank}, 95 % {_rank_set(standing)}, P(first) {standing.p_first:.2f}",
            [said.source],
            holds=standing.rank_high == 1,
            note=said.quote,
        )


def _rank_set(standing: Standing) -> str:
    return f"{standing.rank_low}–{standing.rank_high}"
