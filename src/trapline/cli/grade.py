"""`trapline grade`: grades every answer of a field; resumes."""

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from trapline.arena.challenge import Challenge, load, refuse_unknown_profile
from trapline.arena.errors import UsageError
from trapline.arena.judge.analysis_judge import Judge, judge_cells, named
from trapline.arena.judge.draws import draw_key, is_held_out, public_seed
from trapline.arena.judge.request import GradeRequest
from trapline.arena.record import Cell, Track
from trapline.arena.report.formats import duration
from trapline.arena.runs.cluster import Cluster
from trapline.arena.runs.executor import Executor, LocalExecutor
from trapline.arena.runs.field import find_entries, read_settings
from trapline.arena.runs.gpu_workers import GpuWorkers
from trapline.arena.runs.run import Options, grade_field, open_run, refuse_other_machines
from trapline.arena.runs.store import Store
from trapline.cli.exit_codes import INCOMPLETE
from trapline.cli.isolation import Isolation, Required
from trapline.cli.matrix import matrix
from trapline.cli.trap_sets import read_trap_set

EXAMPLE = "trapline grade field --challenge kv_cache"
#: How many reasons the terminal shows.
MOST_REASONS = 5

Seed = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Seed of all situations; if not given, each answer's own, drawn for its bytes "
        "with this user's secret key.",
        show_default=False,
    ),
]
HeldOut = Annotated[
    bool, typer.Option(help="Draw situations that no training environment and no other run draws.")
]
SameDraws = Annotated[
    bool,
    typer.Option(
        help="All answers to a challenge meet the same situations, drawn for the bytes of all of "
        "them; what they have in common is then worked out once."
    ),
]


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
    jobs: Annotated[int | None, typer.Option(min=1, help="Cells at a time (GPU: 1).")] = None,
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
    traps: Annotated[
        Path | None,
        typer.Option(help="Folder of a private trap set; implies --held-out.", show_default=False),
    ] = None,
    held_out: HeldOut = False,
    seed: Seed = None,
    same_draws: SameDraws = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Grade every answer of a field and print the matrix.

    The same command resumes an interrupted run; cells that are up to date are kept.
    """
    if track == "gpu" and executor == "ray":
        raise UsageError("--track gpu grades here and by the own contracts: leave out the option")
    if address is not None and executor != "ray":
        raise UsageError("--address needs a Ray cluster: add --executor ray")
    held_out = held_out or traps is not None
    _refuse_seed(seed, held_out)
    judge = named(judge_endpoint, judge_model)
    if profile:
        refuse_unknown_profile(profile)
    entries = find_entries(field, challenge or [], gold, profile, track, _note)
    if traps is not None:
        entries = _with_traps(entries, traps, executor, track)
    with open_run(out or str(Path("runs") / field.resolve().name)) as store:
        place = _executor(track, jobs, executor, address)
        options = Options(
            place.level(required, isolation),
            full,
            only_this_level=isolation is not None,
            held_out=held_out,
            seed=seed,
            same_draws=same_draws,
        )
        refuse_other_machines(store, track)
        if rounds := read_settings(field).rounds:
            store.set_meta(rounds=rounds)
        _grade_all(entries, store, options, place)
        cells = _asked_for(entries, store)
        if judge is not None:
            _judge_all(judge, cells, store, traps)
            cells = _asked_for(entries, store)
        _show(cells, store, as_json)
    if len(cells) < len(entries) or any(cell.score is None for cell in cells):
        raise typer.Exit(INCOMPLETE)


def _executor(track: Track, jobs: int | None, executor: str, address: str | None) -> Executor:
    if executor == "ray":
        return Cluster(address or "auto", jobs)
    if track == "gpu":
        return GpuWorkers(jobs) if jobs and jobs > 1 else LocalExecutor(1)
    return LocalExecutor(jobs)


def _refuse_seed(seed: int | None, held_out: bool) -> None:
    """Refuses a seed that is not public, before the run is opened."""
    if seed is not None and held_out:
        raise UsageError("--seed fixes public situations: leave out --held-out and --traps")
    public_seed(seed)


def _show(cells: list[Cell], store: Store, as_json: bool) -> None:
    """Prints the cells as JSON; or the matrix, where the run is, and what was not measured."""
    if as_json:
        print(json.dumps({"run": store.where, "cells": [_brief(cell) for cell in cells]}))
        return
    console = Console()
    console.print(matrix(cells, console.width))
    print(f"run: {store.where}")
    for private in sorted({str(cell.trap_set) for cell in cells if cell.trap_set}):
        print(f"private traps: {private}, on held-out situations")
    _tell_unmeasured(cells)


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
        more = len(reasons) - MOST_REASONS
        _note(f"{more} more {'was' if more == 1 else 'were'} not measured")


def _judge_of(cell: Cell, traps: Path | None = None) -> Challenge:
    return load(cell.challenge, cell.track, cell.profile, traps)


def _with_traps(
    entries: list[GradeRequest], traps: Path, executor: str, track: Track
) -> list[GradeRequest]:
    """The entries, to be graded with the traps of a private set too."""
    if executor == "ray":
        raise UsageError("--traps grades on this machine: leave out --executor ray")
    profiles = {entry.profile for entry in entries} - {""}
    graded = list(dict.fromkeys(entry.challenge for entry in entries))
    private = read_trap_set(traps, [], next(iter(profiles), None), track)
    private.refuse_retired()
    if not set(graded) & set(private.challenges):
        raise UsageError(
            f"the trap set {private} has traps for {', '.join(private.challenges)}, and the "
            f"answers are to {', '.join(graded)}"
        )
    return [replace(entry, trap_set=private.folder) for entry in entries]


def _note(text: str) -> None:
    Console(stderr=True).print(f"trapline: {text}", markup=False, highlight=False)


def _judge_all(judge: Judge, cells: list[Cell], store: Store, traps: Path | None) -> None:
    """Judges the analyses; a failed judgement leaves the grade and is reported."""
    silent = []
    for bundle in judge_cells(judge, cells, partial(_judge_of, traps=traps), store.bundle):
        store.save(bundle)
        if bundle.cell.dimensions["analysis"].score is None:
            silent.append(bundle.cell.dimensions["analysis"].reason)
    if silent:
        what = "1 analysis was" if len(silent) == 1 else f"{len(silent)} analyses were"
        _note(f"{what} not judged: {silent[0]}")


def _grade_all(
    entries: list[GradeRequest], store: Store, options: Options, place: Executor
) -> None:
    if options.seed is None and (reason := draw_key().not_kept):
        _note(f"the key of the situations is not kept, so other runs draw others: {reason}")
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
        "answer": cell.answer,
        "score": cell.score,
        "letter": cell.letter,
        "isolation": cell.isolation,
        "reason": cell.reason,
        "bundle": cell.bundle,
        "trap_set": str(cell.trap_set) if cell.trap_set else "",
        "held_out": is_held_out(cell.seed),
        "dimensions": {name: dimension.score for name, dimension in cell.dimensions.items()},
        "flaw": cell.flaw,
        "findings": [
            finding.model_dump(include={"cause", "certainty", "severity", "sentence", "explains"})
            for finding in cell.findings
        ],
        "traps": {trap.id: trap.state for trap in cell.traps},
    }
