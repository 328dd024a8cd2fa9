"""Which files of site-packages a distribution and everything it needs consist of."""

import csv
import re
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath

from trapline.arena.errors import ArenaError, MissingError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
#: Never shown to a submission, whatever depends on it.
_OURSELVES = "trapline"


@cache
def entries(packages: tuple[str, ...]) -> dict[str, Path]:
    """Name on the import path → real place, for these distributions and what they require."""
    found: dict[str, Path] = {}
    for name in sorted(_closure(packages)):
        found.update(_entries_of(name))
    return found


def _closure(packages: tuple[str, ...]) -> set[str]:
    reached: set[str] = set()
    waiting = [_normal(name) for name in packages]
    for name in waiting:
        if not is_installed(name):
            raise MissingError(f"the package {name!r} is not installed")
    while waiting:
        name = waiting.pop()
        if name in reached or name == _OURSELVES or not is_installed(name):
            continue
        reached.add(name)
        # Names it requires; those of an extra are left out, those for other systems do no harm.
        names = []
        for line in distribution(name).requires or []:
            _, _, marker = line.partition(";")
            match = _NAME.match(line)
            if match and "extra" not in marker:
                names.append(_normal(match.group()))
        waiting += names
    return reached


@cache
def _entries_of(name: str) -> dict[str, Path]:
    found = distribution(name)
    files = _recorded(found)
    if not files:
        raise ArenaError(f"the package {found.name!r} does not list its files (RECORD is missing)")
    root = Path(str(found.locate_file(""))).resolve()
    shown: dict[str, Path] = {}
    for file in files:
        top = file.parts[0]
        if top == "..":
            # `pip install --target` lists a program where another installation would have it.
            listed = Path(str(found.locate_file(file)))
            there = root / "bin" / file.name
            shown.update(_script(file.name, listed if listed.is_file() else there))
        elif top != "__pycache__" and not top.endswith(".pth"):
            shown[top] = root / top
    return {name: path for name, path in shown.items() if path.exists()}


def _recorded(found: Distribution) -> list[PurePosixPath]:
    """As the record says: from Python 3.12 on, `files` leaves out what is not at its place."""
    if record := found.read_text("RECORD"):
        return [PurePosixPath(row[0]) for row in csv.reader(record.splitlines()) if row]
    return list(found.files or ())


def _script(name: str, path: Path) -> dict[str, Path]:
    """A compiled program that comes along (ruff); scripts name an interpreter that is hidden."""
    if path.parent.name != "bin" or not path.is_file():
        return {}
    with path.open("rb") as file:
        is_compiled = file.read(4) == b"\x7fELF"
    return {f"bin/{name}": path.resolve()} if is_compiled else {}


def is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
