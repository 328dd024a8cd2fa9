"""The standings in detail: probabilities of every pair, and other influences."""

from typing import Any

from trapline.arena.record import Cell
from trapline.arena.report import formats, plots
from trapline.arena.report.reading import Reading
from trapline.arena.standings.harness_effect import (
    HarnessEffect,
    HarnessPair,
    harness_effect,
)
from trapline.arena.standings.history import history
from trapline.arena.standings.moments import spreads
from trapline.arena.standings.ranking import Ranking
from trapline.arena.standings.regrading import pooled, shares

MOST_IN_TABLE = 16


def context(reading: Reading) -> dict[str, Any]:
    ranking = reading.ranking
    names = [standing.entrant for standing in ranking.standings]
    matrix = ranking.matrix()
    large = len(names) > MOST_IN_TABLE
    return {
        "title": "Standings",
        "ranking": ranking,
        "names": names,
        "visible": _visible(ranking),
        "chances": [] if large else list(zip(names, matrix, strict=True)),
        "chances_plot": _plot(names, matrix) if large else None,
        "tables": detail_tables(reading),
        "plots": _value_plots(reading),
    }


def _value_plots(reading: Reading) -> list[tuple[str, Any]]:
    """Score against cost and against tokens, where at least two entrants tell them."""
    spent = [(each.entrant, each.mean_score, each.cost) for each in reading.ranking.standings]
    told = [(name, score, cost) for name, score, cost in spent if cost is not None]
    dollars = {name: (cost.usd, score) for name, score, cost in told if cost.usd}
    tokens = {
        name: (float(cost.input_tokens + cost.output_tokens), score)
        for name, score, cost in told
        if cost.input_tokens + cost.output_tokens
    }
    kinds = (("cost", "USD for all answers", dollars), ("tokens", "tokens of all answers", tokens))
    return [
        (f"Score against {name}", plots.scatter(points, axis, f"Mean score against {name}"))
        for name, axis, points in kinds
        if len(points) > 1
    ]


def _visible(ranking: Ranking) -> float | None:
    """The smallest detectable difference, if it is a difference that scores can have."""
    means = [standing.mean_score for standing in ranking.standings]
    smallest = ranking.smallest_visible
    return smallest if smallest is not None and smallest < max(means) - min(means) else None


def _plot(names: list[str], matrix: list[list[float | None]]) -> Any:
    filled = [[0.5 if value is None else value for value in row] for row in matrix]
    return plots.win_rates(names, filled, "Probability that the row is better than the column")


def detail_tables(reading: Reading) -> list[dict[str, Any]]:
    found = (
        _attempts(reading),
        _flaws(reading),
        _spreads(reading),
        _costs(reading),
        _harness(reading),
        _history(reading),
    )
    return [table for table in found if table["rows"]]


MOST_K = 5


def _attempts(reading: Reading) -> dict[str, Any]:
    """pass@k and the spread of attempts, where some cell has several."""
    most = max((len(square.attempts) for square in reading.field.squares.values()), default=0)
    if most < 2:
        return {"rows": []}
    ks = range(1, min(most, MOST_K) + 1)
    return {
        "title": "Attempts",
        "note": "pass@k: the chance that one of k attempts holds every contract case, the mean "
        "over the challenges with at least k attempts. Spread: the standard deviation of an "
        "entrant's attempts at the same challenge, pooled.",
        "heads": ["Entrant", "Attempts", *(f"pass@{k}" for k in ks), "Spread"],
        "rows": [_attempt_row(reading, name, ks) for name in reading.order],
    }


def _attempt_row(reading: Reading, name: str, ks: range) -> tuple[Any, ...]:
    graded = {
        str(square.column): [cell for cell in square.attempts if cell.score is not None]
        for square in reading.field.row(name)
    }
    passed = {key: [cell.state == "pass" for cell in cells] for key, cells in graded.items()}
    scores = [[cell.score or 0.0 for cell in cells] for cells in graded.values() if len(cells) > 1]
    values = (shares(passed, k) for k in ks)
    return (
        name,
        sum(map(len, passed.values())),
        *("–" if value is None else formats.percent(value) for value in values),
        formats.figure(pooled(scores)) if scores else "–",
    )


def _spreads(reading: Reading) -> dict[str, Any]:
    return {
        "title": "Which challenges separate the entrants",
        "note": "The wider the scores spread, the more a challenge separates the entrants.",
        "heads": ["Challenge", "Entrants", "Best", "Worst", "Standard deviation"],
        "rows": [
            (
                reading.field.challenges[each.challenge].title,
                each.entrants,
                formats.figure(each.best),
                formats.figure(each.worst),
                formats.figure(each.deviation),
            )
            for each in spreads(reading.run.cells)
        ],
    }


def _flaws(reading: Reading) -> dict[str, Any]:
    outcomes = ("noticed", "followed", "neither")
    told = [cell for cell in reading.run.cells if cell.flaw]
    entrants = [name for name in reading.order if any(cell.entrant == name for cell in told)]
    return {
        "title": "Who noticed the planted flaws",
        "note": "The prompts' pseudo-code has one flaw each, beside a golden test that is right. "
        "Noticed: right by the golden test. Followed: the wrong answers are those of the flaw.",
        "heads": ["Entrant", *(outcome.capitalize() for outcome in outcomes)],
        "rows": [
            (name, *(_titles(reading, told, name, outcome) for outcome in outcomes))
            for name in entrants
        ],
    }


def _titles(reading: Reading, cells: list[Cell], entrant: str, outcome: str) -> str:
    """The challenges of this entrant's cells with this outcome, with a second attempt's number."""
    found = [cell for cell in cells if (cell.entrant, cell.flaw) == (entrant, outcome)]
    names = [
        reading.field.challenges[cell.challenge].title
        + (f" ({cell.attempt})" if cell.attempt > 1 else "")
        for cell in found
    ]
    return ", ".join(names) or "–"


def _costs(reading: Reading) -> dict[str, Any]:
    return {
        "title": "Tokens, time and cost of the answers",
        "note": "From the transcripts beside the answers; scores do not depend on it. Tokens in "
        "include cached ones.",
        "heads": ["Entrant", *map(str.capitalize, formats.COST_HEADS[:-1]), formats.COST_HEADS[-1]],
        "rows": [
            (each.entrant, *formats.cost_figures(each.cost))
            for each in reading.ranking.standings
            if each.cost is not None
        ],
    }


def _harness(reading: Reading) -> dict[str, Any]:
    if not any(cell.harness for cell in reading.run.cells):
        return {"rows": []}
    effect = harness_effect(reading.run.cells, reading.run.bundles)
    return {
        "title": "Effect of the harness",
        "note": harness_note(effect),
        "heads": ["Harness", "Cells", "Mean score", "Pass", "Files", "Lines", "Tests", "Words"],
        "rows": [
            (
                row.harness or "unknown",
                row.cells,
                formats.figure(row.mean_score),
                formats.percent(row.pass_share),
                *(_maybe(value) for value in (row.files, row.lines, row.tests, row.prose_words)),
            )
            for row in effect.rows
        ],
    }


def harness_note(effect: HarnessEffect) -> str:
    """Only the same model in two harnesses isolates the harness's effect."""
    if not effect.pairs:
        return "No model ran in two harnesses, so differences may come from the models."
    return "The same models on the same challenges: " + "; ".join(map(_pair, effect.pairs)) + "."


def _pair(pair: HarnessPair) -> str:
    a, b, cells = pair.a or "unknown", pair.b or "unknown", formats.count(pair.shared, "cell")
    if pair.smallest_visible is None or abs(pair.difference) < pair.smallest_visible:
        return f"{a} and {b} cannot be told apart over {cells}"
    ahead, behind = (a, b) if pair.difference > 0 else (b, a)
    return f"{ahead} scores {abs(pair.difference):.1f} points more than {behind} over {cells}"


def _maybe(value: float | None) -> str:
    return "–" if value is None else formats.figure(value)


def _history(reading: Reading) -> dict[str, Any]:
    return {
        "title": "Graded again",
        "note": "Cells whose grade changed when they were graded again, and possible reasons.",
        "heads": ["Cell", "Before", "After", "What changed"],
        "rows": [
            (
                f"{each.entrant}, {each.challenge}",
                _graded(each.letter_before, each.score_before, each.state_before),
                _graded(each.letter_after, each.score_after, each.state_after),
                "; ".join(each.causes) or "nothing recorded",
            )
            for each in history(reading.run.history)
            if each.changed
        ],
    }


def _graded(letter: str | None, score: float | None, state: str) -> str:
    """Letter and score: two grades may share a letter."""
    return state.replace("_", " ") if score is None else f"{letter} {score:.1f}"
