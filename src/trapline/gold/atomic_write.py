"""Files and folders that are whole or as they were before. Links are followed and stay links."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

from safetensors import SafetensorError

#: Seconds after which an unfinished write is considered abandoned.
_LONGEST = 86_400
Write = Callable[[Path], object]


def write_file(path: str | Path, write: Write) -> None:
    """Writes a file beside its place, then moves it: a full disk leaves what was there."""
    path = Path(path).resolve()
    with _room(path, path.parent) as room:
        write(room / path.name)
        os.replace(room / path.name, path)


def write_folder(folder: str | Path, write: Write) -> None:
    """The same for a folder of files, which is replaced as a whole and keeps its mode.

    A process killed between the two moves leaves the old folder beside its place, with the suffix
    `.trapline.old`; the next writer restores it. A mount point cannot be moved and an empty folder
    need not be: these are filled.
    """
    folder = Path(folder).resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.is_dir() and (os.path.ismount(folder) or not any(folder.iterdir())):
        _fill(folder, write)
    else:
        _replace(folder, write)


def update_folder(folder: Path, write: Write) -> set[str]:
    """Adds or replaces files of a folder and keeps the others; returns the names written.

    All new files are complete before the first one takes its place, `config.json` last.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with _room(folder, folder) as room:
        write(room)
        new = sorted(room.iterdir(), key=lambda path: path.name == "config.json")
        for path in new:
            os.replace(path, folder / path.name)
        return {path.name for path in new}


def _fill(folder: Path, write: Write) -> None:
    """File by file, once all are written."""
    with _room(folder, folder) as room:
        write(room)
        # config.json is removed first and restored last: without it the folder is not a model.
        for path in sorted(folder.iterdir(), key=lambda path: path.name != "config.json"):
            if not path.is_dir():
                path.unlink()
        for path in sorted(room.iterdir(), key=lambda path: path.name == "config.json"):
            os.replace(path, folder / path.name)


def _replace(folder: Path, write: Write) -> None:
    # A name of our own: what others keep beside it, say as `.old`, is theirs.
    old = folder.with_name(f"{folder.name}.trapline.old")
    _take_back(folder, old)
    with _room(folder, folder.parent) as room:
        new = room / folder.name
        new.mkdir()
        write(new)
        try:
            if folder.exists():
                shutil.copymode(folder, new)
                _remove(old)
                os.replace(folder, old)
            os.replace(new, folder)
        finally:
            _take_back(folder, old)
    _remove(old)


def _take_back(folder: Path, old: Path) -> None:
    """Restores the old folder after a process ended between the two moves."""
    if old.exists() and not folder.exists():
        os.replace(old, folder)


def _remove(folder: Path) -> None:
    """Or a link to one, of which only the link goes."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _room(place: Path, parent: Path) -> Iterator[Path]:
    """A folder for this writer alone; what is still in it at the end is taken away."""
    prefix = f"{place.name}.trapline.partial-"
    _forget_the_dead(parent, prefix)
    room = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        yield room
    except SafetensorError as error:
        raise OSError(f"{place} could not be written whole: {error}") from None
    finally:
        shutil.rmtree(room, ignore_errors=True)


def _forget_the_dead(parent: Path, prefix: str) -> None:
    for left in parent.glob(f"{escape(prefix)}*"):
        with suppress(FileNotFoundError):  # another writer was faster
            if time.time() - left.stat().st_mtime > _LONGEST:
                _remove(left)
