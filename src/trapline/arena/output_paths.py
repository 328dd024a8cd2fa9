"""Checks of output paths, made before the work so that a wrong path loses nothing."""

import os
from collections.abc import Sequence
from pathlib import Path

from trapline.arena.errors import UsageError


def folder(path: Path, what: str, hint: str = "; --out names another place") -> Path:
    """Returns the path if it is or can become a folder; `hint` helps where it is not writable."""
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; {what} is a folder")
    for above in path.parents:
        if above.exists() and not above.is_dir():
            raise UsageError(f"cannot write {path}: {above} is a file")
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not os.access(existing, os.W_OK):
        raise UsageError(f"cannot write {path}: {existing} is not writable{hint}")
    return path


def made(path: Path, what: str) -> Path:
    """Makes the folder, so that a place that cannot hold it is refused before the work."""
    try:
        folder(path, what).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"{error.strerror}; --out names another place"
        raise UsageError(f"cannot write {path}: {reason}") from None
    return path


def file(path: Path, what: str) -> Path:
    """Returns the path if it is or can become a file in an existing folder."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder; {what} is a file")
    if not folder(path.parent, f"the parent of {path.name}").exists():
        raise UsageError(f"cannot write {path}: there is no folder {path.parent}")
    return path


def refuse_foreign(path: Path, markers: Sequence[str], verb: str) -> None:
    """Refuses a folder with files of others; this verb leaves one of the markers in its own."""
    if not path.is_dir() or any((path / name).is_file() for name in markers):
        return
    if any(path.iterdir()):
        raise UsageError(
            f"{path} is not empty and was not written by `trapline {verb}`; nothing was written. "
            "Give --out an empty or new folder"
        )
