"""What a folder and a server do differently; everything else of a store is the same for both."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import sqlalchemy as sa

from trapline.arena.errors import ArenaError
from trapline.arena.runs.store.evidence import Evidence

#: An option of a connection: its transaction writes, so it waits for its turn before it reads.
WRITING = {"trapline_writing": True}


class Backend(Protocol):
    #: For messages; a password is never part of it.
    where: str
    #: For titles.
    name: str
    folder: Path | None
    engine: sa.Engine

    @property
    def schema(self) -> str | None:
        """The name space of the tables on a server with several runs."""
        ...

    @property
    def evidence(self) -> Evidence: ...

    def opening(self) -> AbstractContextManager[None]:
        """Two that open a new run at the same moment take turns."""
        ...

    def prepare(self, connection: sa.Connection) -> None:
        """What must be there before the first table."""
        ...

    def living(self, grader: str) -> AbstractContextManager[None]:
        """While this holds, others see that the grader is alive; it ends with the process,
        however the process ends."""
        ...

    def is_alive(self, _: sa.Connection, grader: str, /) -> bool:
        """Whether `living` is held for this grader."""
        ...


def is_writing(connection: sa.Connection) -> bool:
    return bool(connection.get_execution_options().get("trapline_writing"))


def sentence(error: Exception) -> str:
    """What a database says of a failure, in one line."""
    said = str(getattr(error, "orig", None) or error).strip()
    return " ".join(said.splitlines()[0].split()) if said else type(error).__name__


@contextmanager
def told(where: str) -> Iterator[None]:
    """Whatever a database raises becomes one sentence about the store."""
    try:
        yield
    except sa.exc.SQLAlchemyError as error:
        raise ArenaError(f"the store {where} failed: {sentence(error)}") from None


@contextmanager
def reading(backend: Backend) -> Iterator[sa.Connection]:
    with told(backend.where), backend.engine.begin() as connection:
        yield connection


@contextmanager
def writing(backend: Backend) -> Iterator[sa.Connection]:
    """Writers of a run take turns: what is read here does not change before it is written."""
    with (
        told(backend.where),
        backend.engine.connect().execution_options(**WRITING) as connection,
        connection.begin(),
    ):
        yield connection
