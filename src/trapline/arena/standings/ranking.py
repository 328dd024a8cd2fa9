"""The ranking: strengths, ranks, and their uncertainty by resampling."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from pydantic import Field
from scipy.special import expit, stdtrit

from trapline.arena.record import Cell, Record
from trapline.arena.standings.board import Item, entrants_of
from trapline.arena.standings.bradley_terry import EQUAL, RIDGE, Floats, fit
from trapline.arena.standings.conclusion import conclude
from trapline.arena.standings.costs import Cost, total_cost
from trapline.arena.standings.margin import TIE_BAND
from trapline.arena.standings.places import label
from trapline.arena.standings.regrading import SILENT, Noise
from trapline.arena.standings.resample import Draws, Table, as_graded, draw

#: Pairs per block: their data fit the processor's cache.
_CHUNK = 100_000
#: Power of the smallest detectable difference, at the 5 % level.
_POWER = 0.8
#: Scores have one decimal; their differences have rounding errors.
_ROUNDING = 1e-6
_BELOW, _ABOVE = 0.025, 0.975


class Standing(Record):
    entrant: str
    rank: int
    #: The rank as text, with "=" if it is shared.
    place: str
    #: Bradley–Terry strength in log-odds; the field's mean is near 0.
    strength: float
    #: The share of points it would take from the rest of the field.
    expected: float
    mean_score: float
    score_low: float
    score_high: float
    median_rank: int
    #: 95 % of the resampled fields put it between these ranks.
    rank_low: int
    rank_high: int
    #: Share of the resampled fields in which it is first; shared firsts are split.
    p_first: float
    challenges: int
    attempts: int
    #: Of all its answers whose transcripts tell it; the place does not depend on it.
    cost: Cost | None = None


class Pair(Record):
    a: str
    b: str
    #: How often a is stronger than b in the resampled fields; None if nothing connects the two.
    p: float | None
    #: Challenges (and tracks) in which both have a score.
    shared: int
    #: Mean score of a minus that of b over what they share.
    difference: float | None
    #: The smallest mean difference detectable with this many shared challenges.
    smallest_visible: float | None


class Ranking(Record):
    #: One sentence: what the data support and what they do not.
    conclusion: str
    standings: list[Standing]
    pairs: list[Pair]
    #: Groups that share no challenge with each other; one group is the normal case.
    islands: list[list[str]]
    #: Entrants without any measured cell.
    unranked: list[str]
    #: Entrants that took too few challenges to have a place.
    few: list[str] = Field(default_factory=list)
    #: The median over all pairs.
    smallest_visible: float | None
    challenges: int
    rounds: int
    seed: int
    ridge: float
    tie_band: float

    def odds(self, a: str, b: str) -> float | None:
        for pair in self.pairs:
            if (pair.a, pair.b) == (a, b):
                return pair.p
            if (pair.a, pair.b) == (b, a):
                return None if pair.p is None else 1.0 - pair.p
        raise KeyError((a, b))

    def matrix(self) -> list[list[float | None]]:
        """P(row is stronger than column), in the order of the standings; None on the diagonal."""
        place = {standing.entrant: row for row, standing in enumerate(self.standings)}
        table: list[list[float | None]] = [[None] * len(place) for _ in place]
        for pair in self.pairs:
            row, column = place[pair.a], place[pair.b]
            table[row][column] = pair.p
            table[column][row] = None if pair.p is None else 1.0 - pair.p
        return table


class _Fits(NamedTuple):
    ranks: Floats
    firsts: Floats
    #: How often row is stronger than column, ties half.
    stronger: Floats


def ranking(
    cells: Iterable[Cell],
    *,
    rounds: int = 1000,
    seed: int = 0,
    tie_band: float = TIE_BAND,
    trap_weight: Mapping[str, float] | None = None,
    noise: Noise = SILENT,
) -> Ranking:
    """The standings, with uncertainty from `rounds` resampled fields.

    `trap_weight` says, by challenge, what share of a score hangs on its traps; `noise`, how much
    grading again changes a score.
    """
    everything = list(cells)
    table = Table.of(everything, trap_weight or {}, noise)
    graded = as_graded(table)
    theta = fit(_points(graded, tie_band))[0]
    drawn = draw(table, rounds, seed)
    fits = _fit_all(drawn, tie_band, theta)
    standings = _standings(table, graded, theta, drawn, fits)
    groups = islands(table.entrants, table.tries)
    pairs = _pairs(table, graded, fits, [each.entrant for each in standings], groups)
    visible = [pair.smallest_visible for pair in pairs if pair.smallest_visible is not None]
    smallest = float(np.median(visible)) if visible else None
    return Ranking(
        conclusion=conclude(
            [each.entrant for each in standings if each.rank_low == 1],
            _strongest(standings),
            len(standings),
            len(table.challenges),
            groups,
            _worth_saying(smallest, standings),
        ),
        standings=standings,
        pairs=pairs,
        islands=groups,
        unranked=[name for name in entrants_of(everything) if name not in table.entrants],
        smallest_visible=smallest,
        challenges=len(table.challenges),
        rounds=rounds,
        seed=seed,
        ridge=RIDGE,
        tie_band=tie_band,
    )


def _strongest(standings: Sequence[Standing]) -> str:
    """The entrant with the highest strength; empty if several share it."""
    return standings[0].entrant if standings and standings[0].place == "1st" else ""


def _worth_saying(smallest: float | None, standings: Sequence[Standing]) -> float | None:
    """The smallest detectable difference, unless a claim about the field would contradict it.

    A limit above the whole spread of the means says nothing, and a leader whose lead is below the
    limit leads by its record, not by its mean.
    """
    means = [each.mean_score for each in standings]
    if smallest is None or smallest >= max(means) - min(means):
        return None
    leads_alone = sum(each.rank_low == 1 for each in standings) == 1
    lead = means[0] - max(means[1:], default=means[0])
    return None if leads_alone and lead < smallest else smallest


def _points(draws: Draws, tie_band: float) -> Floats:
    """(R, E, E): what row took from column over the drawn items."""
    rounds, count, items = draws.scores.shape
    total = np.zeros((rounds, count, count))
    band = tie_band - _ROUNDING
    for item in range(items):
        score = draws.scores[:, :, item]
        ahead = score[:, :, None] - score[:, None, :]
        half = 0.5 * draws.weights[:, item, None, None]
        # Half a point for not losing, half for winning. NaN compares false: an entrant without
        # a score neither takes nor gives a point.
        total += half * (ahead > -band)
        total += half * (ahead >= band)
    return total


def _fit_all(draws: Draws, tie_band: float, start: Floats) -> _Fits:
    rounds, count, _ = draws.scores.shape
    ranks = np.ones((rounds, count))
    firsts, above = np.zeros(count), np.zeros((count, count))
    size = max(1, _CHUNK // max(1, count) ** 2)
    for begin in range(0, rounds, size):
        part = slice(begin, begin + size)
        chunk = Draws(draws.scores[part], draws.weights[part])
        theta = fit(_points(chunk, tie_band), start)
        stronger = theta[:, :, None] > theta[:, None, :] + EQUAL
        above += stronger.sum(axis=0)
        ranks[part] = 1 + stronger.sum(axis=1)
        first = ranks[part] == 1
        firsts += (first / first.sum(axis=1, keepdims=True)).sum(axis=0)
    return _Fits(ranks, firsts / rounds, 0.5 + 0.5 * (above - above.T) / rounds)


def _standings(
    table: Table, graded: Draws, theta: Floats, drawn: Draws, fits: _Fits
) -> list[Standing]:
    if not table.entrants:
        return []
    ranks = {
        name: 1 + int(np.sum(theta > theta[row] + EQUAL)) for row, name in enumerate(table.entrants)
    }
    places = label(ranks)
    means = np.nanmean(graded.scores[0], axis=1)
    score_low, score_high = _score_intervals(drawn, means)
    low, middle, high = np.quantile(
        fits.ranks, (_BELOW, 0.5, _ABOVE), axis=0, method="inverted_cdf"
    )
    found = [
        Standing(
            entrant=name,
            rank=ranks[name],
            place=places[name],
            strength=float(theta[row]),
            expected=_expected(theta, row),
            mean_score=float(means[row]),
            score_low=float(score_low[row]),
            score_high=float(score_high[row]),
            median_rank=int(middle[row]),
            rank_low=int(low[row]),
            rank_high=int(high[row]),
            p_first=float(fits.firsts[row]),
            challenges=int(np.sum(~np.isnan(graded.scores[0, row]))),
            attempts=sum(len(tries) for (who, _), tries in table.tries.items() if who == name),
            cost=total_cost(
                cell for (who, _), tries in table.tries.items() if who == name for cell in tries
            ),
        )
        for row, name in enumerate(table.entrants)
    ]
    return sorted(found, key=lambda standing: (standing.rank, standing.entrant))


def _expected(theta: Floats, row: int) -> float:
    others = np.delete(theta, row)
    return float(np.mean(expit(theta[row] - others))) if others.size else 0.5


def _score_intervals(drawn: Draws, means: Floats) -> tuple[Floats, Floats]:
    """The 95 % interval of the resampled mean scores; rounds without a score are left out."""
    weight = drawn.weights[:, None, :] * ~np.isnan(drawn.scores)
    total = weight.sum(axis=2)
    summed = np.nansum(drawn.scores * weight, axis=2)
    resampled = np.divide(summed, total, out=np.full(total.shape, np.nan), where=total > 0)
    filled = np.where(np.isnan(resampled), means, resampled)
    low, high = np.quantile(filled, (_BELOW, _ABOVE), axis=0)
    return low, high


def _pairs(
    table: Table, graded: Draws, fits: _Fits, order: Sequence[str], groups: list[list[str]]
) -> list[Pair]:
    row = {name: place for place, name in enumerate(table.entrants)}
    island = {name: place for place, group in enumerate(groups) for name in group}
    scores = graded.scores[0]
    pairs = []
    for place, a in enumerate(order):
        ahead = scores[row[a]] - scores[[row[b] for b in order[place + 1 :]]]
        for b, differences in zip(order[place + 1 :], ahead, strict=True):
            shared = differences[~np.isnan(differences)]
            joined = island[a] == island[b]
            pairs.append(
                Pair(
                    a=a,
                    b=b,
                    p=float(fits.stronger[row[a], row[b]]) if joined else None,
                    shared=shared.size,
                    difference=float(shared.mean()) if shared.size else None,
                    smallest_visible=smallest_visible(shared),
                )
            )
    return pairs


@cache
def _reach(count: int) -> float:
    """Standard errors that a true difference must measure to be seen with the power we ask for."""
    return float(stdtrit(count - 1, _ABOVE) + stdtrit(count - 1, _POWER))


def smallest_visible(differences: Floats) -> float | None:
    """The smallest true mean difference that a paired t-test over these would show 4 times in 5."""
    if differences.size < 2:
        return None
    error = float(np.std(differences, ddof=1)) / differences.size**0.5
    return float(_reach(differences.size) * error)


def interval(differences: Floats) -> tuple[float, float] | None:
    """The 95 % interval of the mean difference by a paired t-test; None for fewer than two."""
    if differences.size < 2:
        return None
    middle = float(np.mean(differences))
    error = float(np.std(differences, ddof=1)) / differences.size**0.5
    reach = float(stdtrit(differences.size - 1, _ABOVE)) * error
    return middle - reach, middle + reach


def islands(entrants: Sequence[str], taken: Iterable[tuple[str, Item]]) -> list[list[str]]:
    """Groups connected by chains of shared items, largest first: only these can be compared."""
    groups: list[tuple[set[str], set[Item]]] = []
    by_entrant: dict[str, set[Item]] = {name: set() for name in entrants}
    for name, item in taken:
        by_entrant[name].add(item)
    for name, items in by_entrant.items():
        joined = [group for group in groups if group[1] & items]
        names = {name}.union(*(group[0] for group in joined))
        reach = items.union(*(group[1] for group in joined))
        groups = [group for group in groups if group not in joined] + [(names, reach)]
    return sorted((sorted(names) for names, _ in groups), key=lambda names: (-len(names), names))
