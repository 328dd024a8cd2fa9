"""A run on disk: every graded cell, with the evidence it rests on. Nothing that was finished is
ever lost.

A run is a folder: `run.sqlite` (write-ahead log, full synchronisation), `bundles/<digest>.json`,
and `graders/` with a lock file for each grader at work. A bundle is on disk before its cell is in
the table; a cell is in the table before the next one starts. Rows are only ever added: a cell
graded again keeps its history.
"""

import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy as sa
from pydantic import ValidationError

from trapline.arena.errors import ArenaError, UsageError
from trapline.arena.record import Bundle, Cell

Key = tuple[str, str, str, int]
BUSY_SECONDS = 60


class Planned(NamedTuple):
    """A cell of the run that has not been graded yet."""

    entrant: str
    challenge: str
    track: str
    attempt: int
    status: str


_tables = sa.MetaData()
_key = ("entrant", "challenge", "track", "attempt")


def _key_columns(**options: Any) -> list[sa.Column[Any]]:
    kinds = (sa.String, sa.String, sa.String, sa.Integer)
    return [sa.Column(name, kind, **options) for name, kind in zip(_key, kinds, strict=True)]


_cells = sa.Table(
    "cells",
    _tables,
    sa.Column("id", sa.Integer, primary_key=True),
    *_key_columns(nullable=False),
    sa.Column("digest", sa.String, nullable=False),
    sa.Column("record", sa.Text, nullable=False),
)
_plan = sa.Table(
    "plan",
    _tables,
    *_key_columns(primary_key=True),
    sa.Column("grader", sa.String, nullable=True),
)
_meta = sa.Table(
    "meta",
    _tables,
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)


def digest(text: str) -> str:
    """The address of a content."""
    return hashlib.sha256(text.encode()).hexdigest()


class Store:
    """One run. Several graders and readers may have it open at once."""

    def __init__(self, folder: Path | str, *, create: bool = True) -> None:
        self.folder = Path(folder)
        if not create and not (self.folder / "run.sqlite").exists():
            raise UsageError(f"{self.folder} holds no run")
        if self.folder.exists() and not self.folder.is_dir():
            raise UsageError(f"{self.folder} is a file; a run is a folder")
        for name in ("bundles", "graders"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self._engine = sa.create_engine(
            f"sqlite:///{self.folder / 'run.sqlite'}",
            connect_args={"timeout": BUSY_SECONDS, "check_same_thread": False},
        )
        sa.event.listen(self._engine, "connect", _prepare)
        sa.event.listen(self._engine, "begin", _begin)
        with _locked(self.folder / "opening.lock"):
            _tables.create_all(self._engine)
        self._grader = ""
        self._lock: int | None = None

    # Reading

    def history(self) -> list[Cell]:
        """Every record ever made, oldest first; a damaged one is left out."""
        with self._engine.connect() as connection:
            rows = connection.execute(sa.select(_cells).order_by(_cells.c.id)).all()
        return [cell for row in rows if (cell := _parse(row.record, row.digest)) is not None]

    def cells(self) -> list[Cell]:
        """The newest record of each cell, by entrant and challenge."""
        newest = {cell.key: cell for cell in self.history()}
        return [newest[key] for key in sorted(newest)]

    def bundle(self, address: str) -> Bundle:
        """The evidence of this address; refused when a byte of it has changed."""
        return read_bundle(self.folder / "bundles" / f"{address}.json")

    def has_bundle(self, address: str) -> bool:
        """Whether the evidence is there and whole."""
        try:
            self.bundle(address)
        except ArenaError:
            return False
        return True

    def waiting(self) -> list[Planned]:
        """What is planned and not graded yet: waiting, or running in a grader that is alive."""
        with self._engine.connect() as connection:
            rows = connection.execute(sa.select(_plan)).all()
        return [Planned(row[0], row[1], row[2], row[3], self._status(row.grader)) for row in rows]

    def _status(self, grader: str | None) -> str:
        return "running" if grader and self._alive(grader) else "waiting"

    def meta(self) -> dict[str, Any]:
        """Facts about the run as a whole."""
        with self._engine.connect() as connection:
            return {row.name: json.loads(row.value) for row in connection.execute(sa.select(_meta))}

    # Writing

    def set_meta(self, **facts: Any) -> None:
        with self._engine.begin() as connection:
            for name, value in facts.items():
                connection.execute(sa.delete(_meta).where(_meta.c.name == name))
                connection.execute(sa.insert(_meta).values(name=name, value=json.dumps(value)))

    def plan(self, keys: Iterable[Key]) -> None:
        """Announces cells that are to be graded."""
        with self._engine.begin() as connection:
            known = {tuple(row[:4]) for row in connection.execute(sa.select(_plan))}
            new = [dict(zip(_key, key, strict=True)) for key in keys if key not in known]
            if new:
                connection.execute(sa.insert(_plan), new)

    def claim(self, key: Key) -> bool:
        """Takes a planned cell for this grader; False when another living grader has it or it is
        done."""
        with self._engine.begin() as connection:
            row = connection.execute(sa.select(_plan).where(_matches(_plan, key))).one_or_none()
            if row is None or (
                row.grader and row.grader != self._grader and self._alive(row.grader)
            ):
                return False
            connection.execute(
                sa.update(_plan).where(_matches(_plan, key)).values(grader=self._grader)
            )
        return True

    def save(self, bundle: Bundle) -> Cell:
        """Puts evidence and cell on disk, in this order, and takes the cell off the plan."""
        cell = self._save_bundle(bundle)
        record = cell.model_dump_json()
        with self._engine.begin() as connection:
            values = dict(zip(_key, cell.key, strict=True))
            connection.execute(
                sa.insert(_cells).values(**values, digest=digest(record), record=record)
            )
            connection.execute(sa.delete(_plan).where(_matches(_plan, cell.key)))
        return cell

    def _save_bundle(self, bundle: Bundle) -> Cell:
        text = canonical(bundle)
        address = digest(text)
        path = self.folder / "bundles" / f"{address}.json"
        if not self.has_bundle(address):
            write_durably(path, text)
        return bundle.cell.model_copy(update={"bundle": address})

    # Graders

    @contextmanager
    def grading(self) -> Iterator[None]:
        """While this holds, other graders see that this one is alive."""
        self._grader = f"{os.getpid()}-{secrets.token_hex(6)}"
        path = self.folder / "graders" / self._grader
        self._lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            os.close(self._lock)
            path.unlink(missing_ok=True)
            self._lock, self._grader = None, ""

    def _alive(self, grader: str) -> bool:
        """A grader lives while it holds its lock; the kernel lets go of it when the process
        dies."""
        if grader == self._grader:
            return True
        try:
            lock = os.open(self.folder / "graders" / grader, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False

    def close(self) -> None:
        self._engine.dispose()


def canonical(bundle: Bundle) -> str:
    """The one text of a bundle that its address is computed from."""
    data = bundle.model_dump(mode="json")
    data["cell"]["bundle"] = ""
    return json.dumps(data, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def read_bundle(path: Path) -> Bundle:
    """A bundle from its file; the file's name is its digest, so a changed byte is seen."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise UsageError(f"no bundle {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ArenaError(f"{path} cannot be read: {error}") from None
    if digest(text) != path.stem:
        raise ArenaError(f"{path.name} was changed: its content does not match its digest")
    try:
        return Bundle.model_validate_json(text)
    except ValidationError as error:
        raise ArenaError(f"{path.name} is no bundle: {error.errors()[0]['msg']}") from None


def write_durably(path: Path, text: str) -> None:
    """The file is there whole, or not at all, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def last_run(root: Path = Path("runs")) -> Path:
    """The run that was written to last."""
    runs = list(root.glob("*/run.sqlite"))
    if not runs:
        raise UsageError(f"no run in {root}/; `trapline grade FIELD` makes one")
    return max(runs, key=lambda path: (path.stat().st_mtime, path)).parent


def _prepare(connection: Any, _: Any) -> None:
    connection.isolation_level = None
    for pragma in ("journal_mode=WAL", "synchronous=FULL", f"busy_timeout={BUSY_SECONDS * 1000}"):
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: sa.Connection) -> None:
    """Takes the write lock at once: two graders that first read and then write would deadlock."""
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _matches(table: sa.Table, key: Key) -> sa.ColumnElement[bool]:
    return sa.and_(*(table.c[name] == part for name, part in zip(_key, key, strict=True)))


def _parse(record: str, expected: str) -> Cell | None:
    if digest(record) != expected:
        return None
    try:
        return Cell.model_validate_json(record)
    except ValidationError:
        return None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Two graders that open a new run at the same moment take turns."""
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
