"""Brings the tables of an older run up to date, one version after another.

A migration is history: it says what a version added, in its own words, and is never edited. The
tables of today are in `tables`; a test holds the two together.
"""

from collections.abc import Callable

import sqlalchemy as sa

from trapline.arena.errors import MissingError
from trapline.arena.runs.store.tables import schema_version

Migration = Callable[[sa.Connection], None]


def _cells_plan_and_meta(connection: sa.Connection) -> None:
    made = sa.MetaData()
    key = (("entrant", sa.String), ("challenge", sa.String), ("track", sa.String))
    sa.Table(
        "cells",
        made,
        sa.Column("id", sa.Integer, primary_key=True),
        *(sa.Column(name, kind, nullable=False) for name, kind in key),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("digest", sa.String, nullable=False),
        sa.Column("record", sa.Text, nullable=False),
    )
    sa.Table(
        "plan",
        made,
        *(sa.Column(name, kind, primary_key=True) for name, kind in key),
        sa.Column("attempt", sa.Integer, primary_key=True),
        sa.Column("grader", sa.String, nullable=True),
    )
    sa.Table(
        "meta",
        made,
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
    )
    made.create_all(connection)


def _evidence_versions_and_an_index(connection: sa.Connection) -> None:
    made = sa.MetaData()
    sa.Table(
        "bundles",
        made,
        sa.Column("digest", sa.String, primary_key=True),
        sa.Column("content", sa.Text, nullable=False),
    )
    sa.Table("schema_version", made, sa.Column("version", sa.Integer, nullable=False))
    made.create_all(connection)
    names = ("entrant", "challenge", "track", "attempt")
    cells = sa.Table("cells", sa.MetaData(), *(sa.Column(name, sa.String) for name in names))
    sa.Index("cells_by_key", *(cells.c[name] for name in names)).create(connection)


#: The first makes version 1 out of nothing, the second version 2 out of version 1, …
MIGRATIONS: tuple[Migration, ...] = (_cells_plan_and_meta, _evidence_versions_and_an_index)
NEWEST = len(MIGRATIONS)


def version_of(connection: sa.Connection, schema: str | None) -> int:
    """The version of the tables that are there; 0 where there are none."""
    there = sa.inspect(connection)
    if there.has_table("schema_version", schema=schema):
        return int(connection.execute(sa.select(schema_version.c.version)).scalar_one())
    return 1 if there.has_table("cells", schema=schema) else 0


def upgrade(connection: sa.Connection, schema: str | None) -> None:
    """Runs what is missing, inside the caller's transaction: all of it or nothing."""
    version = version_of(connection, schema)
    for migration in MIGRATIONS[version:]:
        migration(connection)
    if version < NEWEST:
        connection.execute(sa.delete(schema_version))
        connection.execute(sa.insert(schema_version).values(version=NEWEST))


def refuse_the_future(version: int, where: str) -> None:
    """A store that a newer program wrote may mean what this one cannot know."""
    if version > NEWEST:
        raise MissingError(
            f"{where} was written by a newer trapline (its tables are version {version}, this one "
            f"knows {NEWEST}): update trapline"
        )
