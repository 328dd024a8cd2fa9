"""`trapline redact`: makes transcripts safe to publish."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from trapline.arena import output_paths
from trapline.arena.errors import UsageError
from trapline.arena.solving.redact import Redactor
from trapline.arena.solving.redact_json import redact_document, scan_document
from trapline.cli.exit_codes import NOT_HELD

EXAMPLE = "trapline redact transcripts/raw --out transcripts/public"


def redact(
    source: Annotated[Path, typer.Argument(help="A transcript, or a folder of them.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the safe copies; without it, only scan.")
    ] = None,
) -> None:
    """Remove names, home paths, addresses and keys; exit code 4 if a scan finds any."""
    if out is not None:
        output_paths.folder(out, "the output")
    redactor = Redactor()
    left = 0
    for path, name in _files(source):
        text = path.read_bytes().decode(errors="replace")
        if out is not None:
            text = redact_document(text, redactor)
        found = [*_told_by(name, text, redactor)]
        left += len(found)
        for one in found:
            print(one)
        if out is not None and not found:
            target = out / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(text.encode())
    if left:
        print(f"{left} findings; files with findings are not written")
        raise typer.Exit(NOT_HELD)


def _told_by(name: Path, text: str, redactor: Redactor) -> Iterator[str]:
    """Findings in the text and in the path; binary files cannot be scanned.

    Session ids in paths look random but are not secret.
    """
    for one in redactor.scan(str(name)):
        if one.kind != "random":
            yield f"{name}: {one.kind} {one.hint} in the path"
    if "\0" in text:
        yield f"{name}: not a text file, so it cannot be scanned"
        return
    for one in scan_document(text, redactor):
        yield f"{name}:{one.line}: {one.kind} {one.hint}"


def _files(source: Path) -> list[tuple[Path, Path]]:
    if source.is_file():
        return [(source, Path(source.name))]
    if not source.is_dir():
        raise UsageError(f"no such file or folder: {source}")
    found = [path for path in sorted(source.rglob("*")) if path.is_file()]
    if not found:
        raise UsageError(f"{source} contains no files")
    return [(path, path.relative_to(source)) for path in found]
