"""`trapline demo`: the example field, graded and reported; needs no files of one's own."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from trapline.arena import output_paths
from trapline.arena.certify.certify import PUBLISHED_CERTIFICATES
from trapline.arena.certify.red_team import PUBLISHED_RED_TEAM
from trapline.arena.errors import MissingError
from trapline.arena.runs.field import EXAMPLE_FIELD
from trapline.cli.grade import grade
from trapline.cli.isolation import Isolation
from trapline.cli.report import refuse_foreign, report

EXAMPLE = "trapline demo --challenge kv_cache"


def demo(
    out: Annotated[
        Path, typer.Option(help="Folder of the run; the report is OUT/report/index.html.")
    ] = Path("runs/demo"),
    challenge: Annotated[list[str] | None, typer.Option(help="Only this one; repeatable.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Cells at a time.")] = None,
    isolation: Isolation = None,
) -> None:
    """Grade the example field and write its report.

    Eight entrants, from the gold solutions to broken ones, answer the challenges. Grading all of
    them takes minutes; the same command resumes an interrupted run.
    """
    if find_spec("matplotlib") is None:
        raise MissingError("the report needs matplotlib: pip install 'trapline[report]'")
    output_paths.folder(out, "a run")
    refuse_foreign(out / "report")
    unmeasured: typer.Exit | None = None
    try:
        grade(
            EXAMPLE_FIELD,
            challenge,
            out=str(out),
            jobs=jobs,
            same_draws=True,
            isolation=isolation,
        )
    except typer.Exit as error:  # some cells were not measured; the report shows the others
        unmeasured = error
    report(
        str(out),
        out / "report",
        certificates=PUBLISHED_CERTIFICATES,
        red_team=PUBLISHED_RED_TEAM,
    )
    if unmeasured is not None:
        raise unmeasured
