"""Tables of every version there was become the tables of today, and nothing in them is lost."""

import sqlite3

import pytest
import sqlalchemy as sa

from trapline.arena.errors import MissingError
from trapline.arena.runs.store import Store, canonical, digest
from trapline.arena.runs.store.address import parse
from trapline.arena.runs.store.migrations import MIGRATIONS, NEWEST
from trapline.arena.runs.store.tables import metadata

#: As version 1 wrote them, before there was a number for it.
FIRST = """
CREATE TABLE cells (id INTEGER NOT NULL, entrant VARCHAR NOT NULL, challenge VARCHAR NOT NULL,
    track VARCHAR NOT NULL, attempt INTEGER NOT NULL, digest VARCHAR NOT NULL,
    record TEXT NOT NULL, PRIMARY KEY (id));
CREATE TABLE plan (entrant VARCHAR NOT NULL, challenge VARCHAR NOT NULL, track VARCHAR NOT NULL,
    attempt INTEGER NOT NULL, grader VARCHAR, PRIMARY KEY (entrant, challenge, track, attempt));
CREATE TABLE meta (name VARCHAR NOT NULL, value TEXT NOT NULL, PRIMARY KEY (name));
"""
ROWS = (
    "INSERT INTO cells (entrant, challenge, track, attempt, digest, record)"
    " VALUES ('a', 'sorting', 'cpu', 1, :digest, :record)",
    "INSERT INTO plan VALUES ('b', 'sorting', 'cpu', 1, NULL)",
    "INSERT INTO meta VALUES ('seed', '7')",
)


@pytest.fixture
def record(make_bundle):
    bundle = make_bundle()
    cell = bundle.cell.model_copy(update={"bundle": digest(canonical(bundle))})
    return {"record": cell.model_dump_json(), "digest": digest(cell.model_dump_json())}


@pytest.fixture
def old_place(place, record):
    """A run as version 1 left it."""
    if "://" in place:
        _make_on_a_server(place, record)
    else:
        _make_in_a_folder(place, record)
    return place


def _make_in_a_folder(place, record):
    from pathlib import Path

    Path(place).mkdir()
    raw = sqlite3.connect(Path(place) / "run.sqlite")
    raw.executescript(FIRST)
    for row in ROWS:
        raw.execute(row, record)
    raw.commit()
    raw.close()


def _make_on_a_server(place, record):
    """No version 1 was ever on a server: its migration stands for it."""
    address = parse(place)
    engine = sa.create_engine(address.url)
    with engine.begin() as connection:
        connection.execute(sa.schema.CreateSchema(address.schema))
        connection.exec_driver_sql(f'SET LOCAL search_path = "{address.schema}"')
        MIGRATIONS[0](connection)
        for row in ROWS:
            connection.execute(sa.text(row), record)
    engine.dispose()


def shape(store):
    """Columns, keys and indices of every table."""
    there = sa.inspect(store._backend.engine)
    schema = store._backend.schema
    return {
        name: (
            [
                (c["name"], type(c["type"])._type_affinity, c["nullable"])
                for c in there.get_columns(name, schema)
            ],
            there.get_pk_constraint(name, schema)["constrained_columns"],
            [(index["name"], index["column_names"]) for index in there.get_indexes(name, schema)],
        )
        for name in sorted(there.get_table_names(schema))
    }


def test_version_1_is_brought_up_to_date_with_everything_in_it(old_place, raw, make_bundle):
    store = Store(old_place)
    assert [cell.entrant for cell in store.cells()] == ["a"]
    assert [planned.entrant for planned in store.waiting()] == ["b"]
    assert store.meta() == {"seed": 7}
    assert raw(store, "SELECT version FROM @schema_version") == [(NEWEST,)]
    store.save(make_bundle("b"))
    store.close()
    again = Store(old_place, create=False)
    assert [cell.entrant for cell in again.cells()] == ["a", "b"]
    again.close()


def test_migrations_end_in_the_tables_of_today(old_place, tmp_path):
    migrated = Store(old_place)
    today = sa.create_engine(f"sqlite:///{tmp_path / 'today.sqlite'}")
    metadata.create_all(today)

    class Today:
        class _backend:
            engine, schema = today, None

    assert shape(migrated) == shape(Today)
    migrated.close()
    today.dispose()


def test_new_run_has_the_same_tables_as_a_migrated_one(old_place, postgres, tmp_path):
    new = Store(postgres.new_run() if "://" in old_place else tmp_path / "new")
    migrated = Store(old_place)
    assert shape(new) == shape(migrated)
    for store in (new, migrated):
        store.close()


def test_migration_that_fails_leaves_the_old_tables(old_place, raw, monkeypatch):
    from trapline.arena.runs.store import migrations

    def fails(connection):
        MIGRATIONS[1](connection)
        raise RuntimeError("in the middle")

    monkeypatch.setattr(migrations, "MIGRATIONS", (MIGRATIONS[0], fails))
    with pytest.raises(RuntimeError):
        Store(old_place)
    monkeypatch.undo()
    store = Store(old_place)
    assert [cell.entrant for cell in store.cells()] == ["a"]
    store.close()


def test_newer_store_is_refused(place, raw):
    store = Store(place)
    raw(store, f"UPDATE @schema_version SET version = {NEWEST + 1}")
    store.close()
    for create in (True, False):
        with pytest.raises(MissingError, match=r"newer trapline .*: update trapline"):
            Store(place, create=create)
