"""The tables of a run, the same in a file and on a server."""

from typing import Any

import sqlalchemy as sa

from trapline.arena.record import CellKey

KEY = CellKey._fields
metadata = sa.MetaData()


def key_columns(**options: Any) -> list[sa.Column[Any]]:
    """What makes a cell the same cell in a run."""
    kinds = (sa.String, sa.String, sa.String, sa.Integer)
    return [sa.Column(name, kind, **options) for name, kind in zip(KEY, kinds, strict=True)]


#: Rows are only ever added: a cell graded again keeps its history.
cells = sa.Table(
    "cells",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    *key_columns(nullable=False),
    sa.Column("digest", sa.String, nullable=False),
    sa.Column("record", sa.Text, nullable=False),
    sa.Index("cells_by_key", *KEY),
)
#: What is to be graded, and by whom it is being graded.
plan = sa.Table(
    "plan",
    metadata,
    *key_columns(primary_key=True),
    sa.Column("grader", sa.String, nullable=True),
)
meta = sa.Table(
    "meta",
    metadata,
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)
#: Evidence by its digest, where no folder keeps it.
bundles = sa.Table(
    "bundles",
    metadata,
    sa.Column("digest", sa.String, primary_key=True),
    sa.Column("content", sa.Text, nullable=False),
)
schema_version = sa.Table(
    "schema_version", metadata, sa.Column("version", sa.Integer, nullable=False)
)


def matches(table: sa.Table, key: CellKey) -> sa.ColumnElement[bool]:
    return sa.and_(*(table.c[name] == part for name, part in zip(KEY, key, strict=True)))
