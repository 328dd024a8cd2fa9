"""A run on a PostgreSQL server, for a team: cells and evidence are in its tables.

A grader is alive while its connection holds an advisory lock.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import sqlalchemy as sa

from trapline.arena.errors import MissingError, UsageError
from trapline.arena.runs.store.address import Address
from trapline.arena.runs.store.backend import Backend, is_writing, reading, sentence, writing
from trapline.arena.runs.store.tables import bundles

#: A peer that lost its power or its network is given up after about a minute.
CONNECTION = {
    "application_name": "trapline",
    "connect_timeout": "10",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
}
_SERVER_SIDE = {
    "tcp_keepalives_idle": 30,
    "tcp_keepalives_interval": 10,
    "tcp_keepalives_count": 3,
}
_IDLE_TIMEOUT_SINCE = (14,)


class ServerBackend:
    """One schema of one database, one run."""

    folder: Path | None = None

    def __init__(self, address: Address, *, create: bool) -> None:
        try:
            import psycopg  # noqa: F401
        except ImportError:
            raise MissingError(
                "a PostgreSQL store needs psycopg: pip install 'trapline[postgres]'"
            ) from None
        self.where, self.name, self.schema = address.where, address.name, address.schema
        url = address.url
        self.engine = sa.create_engine(
            url.update_query_dict({k: v for k, v in CONNECTION.items() if k not in url.query}),
            execution_options={"schema_translate_map": {None: self.schema}},
            pool_pre_ping=True,
            hide_parameters=True,
        )
        sa.event.listen(self.engine, "begin", self._begin)
        self.evidence = EvidenceTable(self)
        self._create = create

    def _begin(self, connection: sa.Connection) -> None:
        if is_writing(connection):
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(self._number("run"))))

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Connects first, to report an unreachable server or a missing run before any query."""
        try:
            with self.engine.connect() as connection:
                there = sa.inspect(connection).has_schema(self.schema)
        except sa.exc.SQLAlchemyError as error:
            raise MissingError(
                f"the store {self.where} cannot be opened: {sentence(error)}"
            ) from None
        if not there and not self._create:
            raise UsageError(f"{self.where} holds no run")
        yield

    def prepare(self, connection: sa.Connection) -> None:
        connection.execute(sa.schema.CreateSchema(self.schema, if_not_exists=True))

    @contextmanager
    def living(self, grader: str) -> Iterator[None]:
        """Holds the grader's lock on a separate connection.

        The connection ends with the process, and then the server releases the lock.
        """
        connection = self.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        try:
            connection.detach()
            for name, value in _SERVER_SIDE.items():
                connection.exec_driver_sql(f"SET {name} = {value}")
            if (connection.dialect.server_version_info or ()) >= _IDLE_TIMEOUT_SINCE:
                connection.exec_driver_sql("SET idle_session_timeout = 0")
            connection.execute(sa.select(sa.func.pg_advisory_lock(self._number(grader))))
            yield
        finally:
            # The end of the connection frees the lock too, but the server sees that a little later.
            with suppress(sa.exc.SQLAlchemyError):
                connection.execute(sa.select(sa.func.pg_advisory_unlock(self._number(grader))))
            connection.invalidate()
            connection.close()

    def is_alive(self, connection: sa.Connection, grader: str) -> bool:
        """Whether the grader holds its lock.

        The lock that is tried here is shared and ends with the transaction, so two processes that
        ask at the same time do not mistake each other for the grader.
        """
        free = sa.func.pg_try_advisory_xact_lock_shared(self._number(grader))
        return not connection.execute(sa.select(free)).scalar_one()

    def _number(self, purpose: str) -> sa.ColumnElement[int]:
        name = f"trapline {self.schema} {purpose}".encode()
        number = int.from_bytes(hashlib.sha256(name).digest()[:8], signed=True)
        return sa.cast(sa.literal(number, sa.BigInteger), sa.BigInteger)


class EvidenceTable:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def text(self, address: str) -> str:
        asked = sa.select(bundles.c.content).where(bundles.c.digest == address)
        with reading(self._backend) as connection:
            found = connection.execute(asked).scalar_one_or_none()
        if found is None:
            raise UsageError(f"no bundle {address} in {self._backend.where}")
        return str(found)

    def is_whole(self, address: str) -> bool:
        """The server computes the digest: a resumed run need not fetch all its evidence."""
        content = sa.func.convert_to(bundles.c.content, "UTF8")
        found = sa.select(sa.func.encode(sa.func.sha256(content), "hex"))
        with reading(self._backend) as connection:
            asked = found.where(bundles.c.digest == address)
            return bool(connection.execute(asked).scalar_one_or_none() == address)

    def keep(self, address: str, text: str) -> None:
        with writing(self._backend) as connection:
            connection.execute(sa.delete(bundles).where(bundles.c.digest == address))
            connection.execute(sa.insert(bundles).values(digest=address, content=text))

    def addresses(self, beginning: str) -> list[str]:
        asked = sa.select(bundles.c.digest).where(
            bundles.c.digest.startswith(beginning, autoescape=True)
        )
        with reading(self._backend) as connection:
            return sorted(connection.execute(asked).scalars())
