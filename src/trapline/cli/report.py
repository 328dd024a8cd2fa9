"""`trapline report`: a run as a site, as Markdown, or as a table."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import Progress

from trapline.arena import output_paths
from trapline.arena.certify.certify import Certificate
from trapline.arena.certify.red_team import RedTeam
from trapline.arena.errors import UsageError
from trapline.arena.report.markdown import write_markdown
from trapline.arena.report.runview import RunView
from trapline.arena.report.single_file import single_file as single_file_of
from trapline.arena.report.site import MANIFEST, Site, write_site
from trapline.arena.report.tables import write_table
from trapline.cli.reading import PUBLISHED, ProfileOption, Run, opened, published

EXAMPLE = "trapline report runs/demo --format markdown"
Format = Literal["html", "markdown", "csv", "parquet", "json"]
#: Lies in a folder with Markdown or a table of ours; a site has its manifest.
MARKER = ".trapline-report"


def report(
    run: Run = None,
    out: Annotated[
        Path | None, typer.Option(help="Output path; default: RUN/report or NAME-report.")
    ] = None,
    form: Annotated[
        Format, typer.Option("--format", help="A site, Markdown documents, or a table.")
    ] = "html",
    certificates: Annotated[
        Path | None,
        typer.Option(help="Output of `trapline certify --json`, for the kill matrix."),
    ] = None,
    entrants: Annotated[
        list[str] | None,
        typer.Option(help="Only these, side by side: A,B,C; repeatable."),
    ] = None,
    single_file: Annotated[
        bool, typer.Option("--single-file", help="Write the site as one HTML file, to mail it.")
    ] = False,
    url: Annotated[
        str,
        typer.Option(help="Address where the site will be published, for link previews."),
    ] = "",
    red_team: Annotated[
        Path | None,
        typer.Option(help="Output of `trapline certify --red-team --json`."),
    ] = None,
    profile: ProfileOption = None,
) -> None:
    """Write a self-contained report; open its first page in a browser."""
    _check(form, certificates, single_file, url)
    known, team = read_certificates(certificates), read_red_team(red_team)
    with viewed(run, profile) as (found, folder):
        view = found.attacked(team)
        if entrants:
            view = view.only([name for part in entrants for name in part.split(",") if name])
        target = out or folder
        if single_file:
            path = target if target.suffix == ".html" else target.with_name(f"{target.name}.html")
            print(_single(view, output_paths.file(path, "a single-file report"), known))
        elif form == "html":
            print(_site(view, _claimed(target, "a site"), known, url))
        elif form == "markdown":
            for path in write_markdown(view, _claimed(target, "a set of documents")):
                print(path)
        elif target.suffix == f".{form}":
            output_paths.folder(target.parent, "the folder of a table")
            print(write_table(view.cells, target, form))
        else:
            inside = _claimed(target, f"an output without the ending .{form}")
            print(write_table(view.cells, inside / f"cells.{form}", form))


def refuse_foreign(out: Path) -> None:
    """Refuses a folder for a report that holds files of others."""
    output_paths.refuse_foreign(out, [MANIFEST, MARKER], "report")


def _claimed(out: Path, what: str) -> Path:
    """Makes the folder and marks it as ours; refuses one that holds files of others."""
    output_paths.folder(out, what)
    refuse_foreign(out)
    (output_paths.made(out, what) / MARKER).touch()
    return out


def _check(form: Format, certificates: Path | None, single_file: bool, url: str) -> None:
    """Refuses options that would change nothing."""
    if certificates is not None and form != "html":
        raise UsageError("--certificates needs --format html: only the site has a kill matrix")
    if form != "html" and (single_file or url):
        raise UsageError("--single-file and --url need --format html: they are about the site")
    if url and urlsplit(url).scheme not in ("http", "https"):
        raise UsageError(f"--url takes an address such as https://example.org/run, not {url}")
    if single_file and url:
        raise UsageError("--url needs a site of several files: leave out --single-file")


@contextmanager
def viewed(run: str | None, profile: str | None = None) -> Iterator[tuple[RunView, Path]]:
    """The view of the run's cells of one profile, and the default path of its report."""
    if run == PUBLISHED:
        yield RunView.of_report(published(), PUBLISHED), Path("published-report")
        return
    with opened(run) as store:
        folder = store.folder / "report" if store.folder else Path(f"{store.name}-report")
        yield RunView.of(store, profile), folder


def read_certificates(path: Path | None) -> list[Certificate]:
    """The certificates in a file that `trapline certify --json` printed."""
    if path is None:
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["certificates"]
        return TypeAdapter(list[Certificate]).validate_python(found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} does not contain certificates: {_sentence(error)}") from None


def read_red_team(path: Path | None) -> RedTeam | None:
    """The campaign in a file that `trapline certify --red-team --json` printed."""
    if path is None:
        return None
    try:
        return RedTeam.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} does not contain a red-team campaign: {_sentence(error)}"
        ) from None


def _sentence(error: Exception) -> str:
    """One line for an error; of a validation error, its first part."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    return " ".join((".".join(map(str, first["loc"])), first["msg"])).strip()


def _site(view: RunView, out: Path, certificates: list[Certificate], url: str) -> Path:
    with _shown() as show:
        return write_site(view, out, certificates=certificates, url=url, on_page=show)


def _single(view: RunView, out: Path, certificates: list[Certificate]) -> Path:
    with _shown() as show:
        text = single_file_of(Site(view, certificates=certificates), on_page=show)
    out.write_text(text, encoding="utf-8", errors="replace")
    return out


@contextmanager
def _shown() -> Iterator[Callable[[int, int], None]]:
    """A bar that counts pages on a terminal."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("writing pages", total=None)

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield show
