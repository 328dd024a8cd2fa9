"""Shared by the verbs that read a run: by name, the last one, or the published field."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from trapline.arena.challenge import load_all
from trapline.arena.record import Cell
from trapline.arena.runs.store import Store, last_run
from trapline.arena.standings.profiles import of_one_profile
from trapline.arena.studies import ReportedField, as_cells
from trapline.arena.studies.published import load

PUBLISHED = "published"
RUN_HELP = "A run's folder or postgresql:// URL, or 'published'; the last run if not given."
#: The argument of verbs that read a run.
Run = Annotated[str | None, typer.Argument(help=RUN_HELP)]

#: Chooses the cells of one prompt in a run that holds several.
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        help="Only scores under this profile; `own` for the challenges' own contracts.",
        show_default=False,
    ),
]


@contextmanager
def opened(run: str | None) -> Iterator[Store]:
    store = Store(run or last_run(), create=False)
    try:
        yield store
    finally:
        store.close()


def published() -> ReportedField:
    return ReportedField.of(load())


def cells_of(run: str | None, profile: str | None = None) -> list[Cell]:
    """The newest grades of a run under one profile, or the published matrix as cells."""
    if run == PUBLISHED:
        return as_cells(published())
    with opened(run) as store:
        return of_one_profile(store.cells(), profile)


def history_of(run: str | None) -> list[Cell]:
    """All grades of a run, replaced ones included; none of the published field."""
    if run == PUBLISHED:
        return []
    with opened(run) as store:
        return store.history()


def difficulties() -> dict[str, str]:
    return {challenge.id: challenge.plan.difficulty for challenge in load_all().values()}


def trap_weights() -> dict[str, float]:
    """The share of a score that the traps decide, by challenge."""
    return {name: one.plan.weights.get("traps", 0.0) for name, one in load_all().items()}
