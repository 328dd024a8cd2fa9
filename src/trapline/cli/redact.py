"""`trapline redact`: makes transcripts safe to publish."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from trapline.arena import output_paths
from trapline.arena.errors import UsageError
from trapline.arena.solving.redact import Redactor
from trapline.arena.solving.redact_json import learn_document, redact_document, scan_document
from trapline.cli.exit_codes import NOT_HELD

EXAMPLE = "trapline redact transcripts/raw --out transcripts/public"


def redact(
    source: Annotated[Path, typer.Argument(help="A transcript, or a folder of them.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the safe copies; without it, only scan.")
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(help="A further name to hide, of a person or a machine; repeatable."),
    ] = None,
) -> None:
    """Remove names, paths, addresses and keys; exit code 4 if a scan finds any.

    Names are learned from home paths, listings, prompts and keys such as `user` in all the files,
    and hidden everywhere in them. What was removed is counted by kind.
    """
    if out is not None:
        output_paths.folder(out, "the output")
    asked = frozenset(_checked(one) for one in name or [])
    files = [(path.read_bytes().decode(errors="replace"), at) for path, at in _files(source)]
    learned = frozenset().union(*(learn_document(text) for text, _ in files))
    redactor = Redactor(asked=asked, learned=learned)
    hidden, left = Counter[str](), Counter[str]()
    for text, at in files:
        if out is not None:
            text = redact_document(text, redactor, hidden)
        found = [*_told_by(at, text, redactor)]
        for kind, sentence in found:
            left[kind] += 1
            print(sentence)
        if out is not None and not found:
            target = out / at
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(text.encode())
    if out is not None:
        print(f"removed: {_counted(hidden)}")
    if left:
        print(f"{left.total()} findings ({_counted(left)}); files with findings are not written")
        raise typer.Exit(NOT_HELD)
    count = "1 file" if len(files) == 1 else f"{len(files)} files"
    print(f"{count} scanned, nothing found" if out is None else f"{count} written to {out}")


def _checked(name: str) -> str:
    if len(name.strip()) < 2:
        raise UsageError(f"--name {name!r} is too short: give a name of two characters or more")
    return name.strip()


def _counted(kinds: Counter[str]) -> str:
    """`12 home, 3 name`, the most frequent first."""
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common() if count) or "nothing"


def _told_by(name: Path, text: str, redactor: Redactor) -> Iterator[tuple[str, str]]:
    """Kind and sentence of findings in the text and the path; binary files cannot be scanned.

    Session ids in paths look random but are not secret.
    """
    for one in redactor.scan(str(name)):
        if one.kind != "random":
            yield one.kind, f"{name}: {one.kind} {one.hint} in the path"
    if "\0" in text:
        yield "binary", f"{name}: not a text file, so it cannot be scanned"
        return
    for one in scan_document(text, redactor):
        yield one.kind, f"{name}:{one.line}: {one.kind} {one.hint}"


def _files(source: Path) -> list[tuple[Path, Path]]:
    if source.is_file():
        return [(source, Path(source.name))]
    if not source.is_dir():
        raise UsageError(f"no such file or folder: {source}")
    found = [path for path in sorted(source.rglob("*")) if path.is_file()]
    if not found:
        raise UsageError(f"{source} contains no files")
    return [(path, path.relative_to(source)) for path in found]
