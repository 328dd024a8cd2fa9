"""`trapline rank`: the standings with their uncertainty."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trapline.arena.report.evidence import number
from trapline.arena.report.formats import COST_HEADS, cost_figures
from trapline.arena.standings.participation import ranked
from trapline.arena.standings.picks import Pick
from trapline.arena.standings.picks import picks as pick_all
from trapline.arena.standings.ranking import Ranking
from trapline.arena.standings.regrading import noise
from trapline.cli.reading import (
    ProfileOption,
    Run,
    cells_of,
    difficulties,
    history_of,
    trap_weights,
)

EXAMPLE = "trapline rank runs/demo --picks"


def rank(
    run: Run = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of resampled fields.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the resampling.")] = 0,
    picks: Annotated[
        bool, typer.Option(help="Also print the best entrant for each purpose.")
    ] = False,
    profile: ProfileOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Rank the entrants of a run, with 95 % intervals from resampling it."""
    cells = cells_of(run, profile)
    table = ranked(
        cells,
        rounds=rounds,
        seed=seed,
        trap_weight=trap_weights(),
        noise=noise(history_of(run)),
    )
    if as_json:
        print(table.model_dump_json())
        return
    console = Console()
    console.print(Text(table.conclusion))
    console.print(_standings(table))
    if any(each.cost for each in table.standings):
        console.print(_costs(table))
    if table.unranked:
        console.print(Text(f"not measured: {', '.join(table.unranked)}"))
    if picks:
        console.print(_picks(pick_all(cells, difficulties())))


def _standings(ranking: Ranking) -> Table:
    table = Table("place", "entrant", "mean", "95 %", "rank set", "P(1st)", "challenges")
    for each in ranking.standings:
        table.add_row(
            each.place,
            Text(each.entrant, overflow="fold"),
            f"{each.mean_score:.1f}",
            f"{each.score_low:.1f}–{each.score_high:.1f}",
            f"{each.rank_low}–{each.rank_high}",
            f"{each.p_first:.2f}",
            str(each.challenges),
        )
    return table


def _costs(ranking: Ranking) -> Table:
    table = Table("entrant", *COST_HEADS)
    for each in ranking.standings:
        if each.cost is not None:
            table.add_row(Text(each.entrant, overflow="fold"), *cost_figures(each.cost))
    return table


def _picks(found: list[Pick]) -> Table:
    table = Table("if you had to", "pick", "because of the")
    for pick in found:
        if pick.decides:
            best = max(pick.values[name] for name in pick.winners)
            why = f"{pick.rule} ({number(best)} {pick.unit})"
            table.add_row(pick.criterion, Text(", ".join(pick.winners), overflow="fold"), why)
    return table
