"""A run in a folder and a run on a server, and what is put into them."""

import pytest

from trapline.arena.record import Bundle


@pytest.fixture
def make_bundle(plain_cell):
    """A bundle with a graded cell."""

    def make(entrant="a", challenge="sorting", **said):
        cell = plain_cell(entrant=entrant, challenge=challenge, **said)
        return Bundle(cell=cell, files={"solution.py": "x = 'ü\0'\n"})

    return make


@pytest.fixture(params=["folder", "server"])
def place(request, tmp_path):
    """Where a new run is to be: a folder, or a URL."""
    if request.param == "folder":
        return str(tmp_path / "run")
    return request.getfixturevalue("postgres").new_run()


@pytest.fixture
def raw():
    """Writes past the store, as a fault of the disk would; returns what a question gives."""

    def execute(store, statement, **values):
        import sqlalchemy as sa

        backend = store._backend
        prefix = f'"{backend.schema}".' if backend.schema else ""
        with backend.engine.begin() as connection:
            done = connection.execute(sa.text(statement.replace("@", prefix)), values)
            return done.all() if done.returns_rows else []

    return execute
