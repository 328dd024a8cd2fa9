"""`trapline grade`: grades every answer of a field; resumes."""

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from trapline.arena.challenge import Challenge, load, refuse_unknown_profile
from trapline.arena.errors import UsageError
from trapline.arena.judge.analysis_judge import Judge, judge_cells, named
from trapline.arena.judge.request import GradeRequest
from trapline.arena.record import Cell
from trapline.arena.report.formats import duration
from trapline.arena.runs.cluster import Cluster
from trapline.arena.runs.executor import Executor, LocalExecutor
from trapline.arena.runs.field import find_entries
from trapline.arena.runs.run import Options, grade_field, open_run, refuse_other_machines
from trapline.arena.runs.store import Store
from trapline.cli.exit_codes import INCOMPLETE
from trapline.cli.isolation import Isolation, Required
from trapline.cli.matrix import matrix

EXAMPLE = "trapline grade field --challenge kv_cache"
#: How many reasons the terminal shows.
MOST_REASONS = 5


def grade(
    field: Annotated[Path, typer.Argument(help="<entrant>/<challenge>/solution.py")],
    challenge: Annotated[list[str] | None, typer.Option(help="Only this one; repeatable.")] = None,
    track: Annotated[
        Literal["cpu", "gpu"], typer.Option(help="gpu: CUDA and Triton answers, on a GPU.")
    ] = "cpu",
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            "--store",
            help="Where the run is kept: a folder (runs/<field> if not given), or a team's "
            "postgresql://user@host/database?run=name.",
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option(help="Grade longer: train for a minute, try more mutants.")
    ] = False,
    isolation: Isolation = None,
    required: Required = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Cells at a time.")] = None,
    executor: Annotated[
        Literal["local", "ray"], typer.Option(help="This machine, or the nodes of a Ray cluster.")
    ] = "local",
    address: Annotated[
        str | None,
        typer.Option(help="Address of the Ray cluster: host:port or ray://…; found if not given."),
    ] = None,
    judge_endpoint: Annotated[
        str | None,
        typer.Option(help="URL of a model that judges the analysis; the key is OPENAI_API_KEY."),
    ] = None,
    judge_model: Annotated[str | None, typer.Option(help="Name of the judging model.")] = None,
    gold: Annotated[
        bool | None,
        typer.Option(
            "--gold/--no-gold",
            help="Grade the gold solutions too, as the entrant `gold`; if not given, where the "
            "field's field.toml says so.",
            show_default=False,
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            help="The prompt that the answers were written to, such as `published`; if not given, "
            "as the field's field.toml says, or the challenges' own.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Grade every answer of a field and print the matrix.

    The same command resumes an interrupted run; cells that are up to date are kept.
    """
    if track == "gpu" and (executor == "ray" or profile):
        raise UsageError("--track gpu grades here and by the own contracts: leave out the option")
    if address is not None and executor != "ray":
        raise UsageError("--address needs a Ray cluster: add --executor ray")
    judge = named(judge_endpoint, judge_model)
    if profile:
        refuse_unknown_profile(profile)
    entries = find_entries(field, challenge or [], gold, profile, track)
    with open_run(out or str(Path("runs") / field.resolve().name)) as store:
        jobs = 1 if track == "gpu" else jobs  # one answer at a time has the GPU
        place = Cluster(address or "auto", jobs) if executor == "ray" else LocalExecutor(jobs)
        options = Options(
            place.level(required, isolation), full, jobs, only_this_level=isolation is not None
        )
        refuse_other_machines(store, track)
        _grade_all(entries, store, options, place)
        cells = _asked_for(entries, store)
        if judge is not None:
            _judge_all(judge, cells, store)
            cells = _asked_for(entries, store)
        if as_json:
            print(json.dumps({"run": store.where, "cells": [_brief(cell) for cell in cells]}))
        else:
            console = Console()
            console.print(matrix(cells, console.width))
            print(f"run: {store.where}")
            _tell_unmeasured(cells)
    if len(cells) < len(entries) or any(cell.score is None for cell in cells):
        raise typer.Exit(INCOMPLETE)


def _asked_for(entries: list[GradeRequest], store: Store) -> list[Cell]:
    """The newest grades of these entries; a run may hold others."""
    keys = {entry.key for entry in entries}
    return [cell for cell in store.cells() if cell.key in keys]


def _tell_unmeasured(cells: list[Cell]) -> None:
    """Prints why the first few cells, or dimensions of cells, were not measured."""
    reasons = []
    for cell in cells:
        where = f"{cell.entrant}/{cell.challenge} #{cell.attempt}"
        if cell.score is None:
            reasons.append(f"{where} was not measured: {cell.reason}")
        weights = _judge_of(cell).plan.weights
        reasons += [
            f"{where}: {name} not measured: {dimension.reason}"
            for name, dimension in cell.dimensions.items()
            if dimension.score is None and name != "analysis" and name in weights
        ]
    for reason in reasons[:MOST_REASONS]:
        _note(reason)
    if len(reasons) > MOST_REASONS:
        _note(f"{len(reasons) - MOST_REASONS} more were not measured")


def _judge_of(cell: Cell) -> Challenge:
    return load(cell.challenge, cell.track, cell.profile)


def _note(text: str) -> None:
    Console(stderr=True).print(f"trapline: {text}", markup=False, highlight=False)


def _judge_all(judge: Judge, cells: list[Cell], store: Store) -> None:
    """Judges the analyses; a failed judgement leaves the grade and is reported."""
    silent = []
    for bundle in judge_cells(judge, cells, _judge_of, store.bundle):
        store.save(bundle)
        if bundle.cell.dimensions["analysis"].score is None:
            silent.append(bundle.cell.dimensions["analysis"].reason)
    if silent:
        what = "1 analysis was" if len(silent) == 1 else f"{len(silent)} analyses were"
        _note(f"{what} not judged: {silent[0]}")


def _grade_all(
    entries: list[GradeRequest], store: Store, options: Options, place: Executor
) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}"),
    )
    console = Console(stderr=True)
    if not console.is_terminal:
        for line in progress_lines(grade_field(entries, store, options, executor=place), entries):
            print(line, file=sys.stderr, flush=True)
        return
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("grading", total=len(entries), now="")

        def show(entry: GradeRequest, step: str) -> None:
            progress.update(task, now=f"{entry.entrant}/{entry.challenge}: {step}")

        done = 0
        for done, _ in enumerate(grade_field(entries, store, options, show, place), 1):
            progress.update(task, completed=done)
        progress.update(task, completed=max(done, len(entries)))


def progress_lines(cells: Iterable[Cell], entries: Sized) -> Iterator[str]:
    """A line for each cell as it is graded: how many are done, and the time left."""
    started = time.monotonic()
    for done, cell in enumerate(cells, 1):
        left = (time.monotonic() - started) / done * (len(entries) - done)
        grade = cell.state if cell.score is None else f"{cell.letter} {cell.score:.1f}"
        ahead = f"; about {duration(left)} left" if done < len(entries) else ""
        where = f"{cell.entrant}/{cell.challenge} #{cell.attempt}"
        yield f"[{done}/{len(entries)}] {where}: {grade}, {duration(cell.seconds)}{ahead}"


def _brief(cell: Cell) -> dict[str, object]:
    return {
        "entrant": cell.entrant,
        "challenge": cell.challenge,
        "track": cell.track,
        "attempt": cell.attempt,
        "profile": cell.profile,
        "state": cell.state,
        "score": cell.score,
        "letter": cell.letter,
        "isolation": cell.isolation,
        "reason": cell.reason,
        "bundle": cell.bundle,
        "dimensions": {name: dimension.score for name, dimension in cell.dimensions.items()},
        "flaw": cell.flaw,
        "findings": [
            finding.model_dump(include={"cause", "certainty", "severity", "sentence", "explains"})
            for finding in cell.findings
        ],
        "traps": {trap.id: trap.state for trap in cell.traps},
    }
