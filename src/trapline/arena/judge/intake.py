"""Takes a submission in: its bytes once, so that what was digested is what is executed."""

import base64
import hashlib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from trapline.arena.errors import UsageError

MAX_FILES = 500
MAX_BYTES = 16 << 20
NO_SOLUTION = "there is no "
#: Further attempts may lie in the folder of the first, and do not belong to it.
ATTEMPT = re.compile(r"attempt-([1-9][0-9]{0,3})")
#: Left behind by tools, never part of an answer.
IGNORED = {
    "__pycache__",
    ".git",
    ".venv",
    ".pytest_cache",
    ".ruff_cache",
    ".mypy_cache",
    ".trapline",
}
#: In the answer's own folder: the log of the session that wrote it, which may hold private names.
SESSION = "session.jsonl"


@dataclass(frozen=True)
class Intake:
    """The files of a submission, path → bytes, or the reason why they were refused."""

    files: dict[str, bytes]
    refused: str = ""

    @property
    def is_empty(self) -> bool:
        """No file at all: there is no answer to judge."""
        return not self.files and self.refused.startswith(NO_SOLUTION)

    @property
    def digest(self) -> str:
        total = hashlib.sha256()
        for name, content in sorted(self.files.items()):
            total.update(f"{name}\0{len(content)}\0".encode())
            total.update(content)
        return total.hexdigest()

    def write(self, folder: Path) -> None:
        """Writes the files below the folder; a name that leads out of it is refused."""
        for name, content in self.files.items():
            if not stays_inside(name):
                raise UsageError(f"the evidence names a file outside its folder: {name!a}")
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def texts(self) -> tuple[dict[str, str], dict[str, str]]:
        """Text files as they are, the others in base64."""
        texts: dict[str, str] = {}
        others: dict[str, str] = {}
        for name, content in self.files.items():
            try:
                texts[name] = content.decode()
            except UnicodeDecodeError:
                others[name] = base64.b64encode(content).decode()
        return texts, others


def stays_inside(name: str) -> bool:
    """Whether a relative path, as evidence names its files, stays in the folder it begins in."""
    parts = Path(name).parts
    return bool(parts) and not Path(name).is_absolute() and ".." not in parts and "\0" not in name


def from_texts(texts: dict[str, str], others: dict[str, str]) -> Intake:
    files = {name: text.encode() for name, text in texts.items()}
    files |= {name: base64.b64decode(text) for name, text in others.items()}
    return Intake(files)


def take_in(folder: Path, entries: tuple[str, ...] = ("solution.py",)) -> Intake:
    """Reads every plain file below a folder, which holds one of these entry files.

    Links are not followed: they could lead anywhere.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder")
    files: dict[str, bytes] = {}
    total = 0
    for path in _plain_files(folder):
        name = str(path.relative_to(folder))
        if not name.isprintable():
            return Intake({}, f"the name of a file cannot be written: {name!a}")
        try:
            files[name] = _read(path)
        except PermissionError as error:
            return Intake({}, f"a file cannot be read: {name} ({error.strerror})")
        total += len(files[name])
        if len(files) > MAX_FILES or total > MAX_BYTES:
            limit = f"{MAX_FILES} files or {MAX_BYTES >> 20} MiB"
            return Intake({}, f"the submission is larger than {limit}")
    if not any(entry in files for entry in entries):
        return Intake(files, f"{NO_SOLUTION}{' or '.join(entries)}")
    return Intake(files)


def _plain_files(folder: Path) -> list[Path]:
    found: list[Path] = []
    for place, folders, names in os.walk(folder, followlinks=False):
        folders[:] = sorted(name for name in folders if name not in IGNORED)
        if Path(place) == folder:
            folders[:] = [name for name in folders if not ATTEMPT.fullmatch(name)]
            names = [name for name in names if name != SESSION]
        found += [
            path
            for name in sorted(names)
            if stat.S_ISREG((path := Path(place, name)).lstat().st_mode)
        ]
    return found


def _read(path: Path) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        return file.read(MAX_BYTES + 1)
