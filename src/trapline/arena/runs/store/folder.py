"""A run in a folder: `run.sqlite` (write-ahead log, full synchronisation), `bundles/<digest>.json`
and `graders/` with a lock file for each grader at work."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from trapline.arena import output_paths
from trapline.arena.errors import UsageError
from trapline.arena.runs.store.backend import is_writing
from trapline.arena.runs.store.evidence import EvidenceFiles

BUSY_SECONDS = 60


class FolderBackend:
    """One folder, one run."""

    schema = None

    def __init__(self, folder: Path, *, create: bool) -> None:
        if not create and not (folder / "run.sqlite").exists():
            raise UsageError(f"{folder} holds no run")
        output_paths.folder(folder, "a run", *([] if create else [""]))
        for name in ("bundles", "graders"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self.folder: Path | None = folder
        self.where, self.name = str(folder), folder.resolve().name
        self.evidence = EvidenceFiles(folder / "bundles")
        self._graders, self._opening = folder / "graders", folder / "opening.lock"
        self.engine = sa.create_engine(
            sa.URL.create("sqlite", database=str(folder / "run.sqlite")),
            connect_args={"timeout": BUSY_SECONDS, "check_same_thread": False},
            hide_parameters=True,
        )
        sa.event.listen(self.engine, "connect", _prepare)
        sa.event.listen(self.engine, "begin", _begin)

    @contextmanager
    def opening(self) -> Iterator[None]:
        lock = os.open(self._opening, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def prepare(self, connection: sa.Connection) -> None:
        """The file makes itself."""

    @contextmanager
    def living(self, grader: str) -> Iterator[None]:
        path = self._graders / grader
        lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            os.close(lock)
            path.unlink(missing_ok=True)

    def is_alive(self, _: sa.Connection, grader: str) -> bool:
        try:
            lock = os.open(self._graders / grader, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            # Shared: two that ask at the same moment must not take each other for the grader.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False


def last_run(root: Path = Path("runs")) -> Path:
    """The run that was written to last."""
    runs = list(root.glob("*/run.sqlite"))
    if not runs:
        raise UsageError(f"no run in {root}/; `trapline grade FIELD` makes one")
    return max(runs, key=lambda path: (_written(path), path)).parent


def _written(database: Path) -> float:
    """When; while a run goes on, what is new stands in the log beside its database."""
    log = database.with_name(f"{database.name}-wal")
    stats = [path.stat() for path in (database, log) if path.exists()]
    return max(stat.st_mtime for stat in stats if stat.st_size)


def _prepare(connection: Any, _: Any) -> None:
    connection.isolation_level = None
    for pragma in ("journal_mode=WAL", "synchronous=FULL", f"busy_timeout={BUSY_SECONDS * 1000}"):
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: sa.Connection) -> None:
    """A writer takes the lock at once: two that first read and then write would deadlock."""
    connection.exec_driver_sql("BEGIN IMMEDIATE" if is_writing(connection) else "BEGIN")
