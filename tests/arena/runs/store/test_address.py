"""The URL of a run: what it means, and that its password is never said again."""

import pytest

from trapline.arena.errors import UsageError
from trapline.arena.runs.store.address import parse

SECRET = "hunter2"


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_url_is_parsed(scheme):
    address = parse(f"{scheme}://team:{SECRET}@db.example:5433/evals?run=may&sslmode=require")
    assert address.url.drivername == "postgresql+psycopg"
    assert address.url.password == SECRET
    assert dict(address.url.query) == {"sslmode": "require"}
    assert (address.run, address.schema, address.name) == ("may", "trapline_may", "may")
    assert address.where == "postgresql://team@db.example:5433/evals?run=may&sslmode=require"


def test_database_has_a_run_of_its_own():
    address = parse("postgresql://db.example/evals")
    assert (address.schema, address.name) == ("trapline", "evals")
    assert address.where == "postgresql://db.example/evals"


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://team:{SECRET}@db.example/evals",
        f"postgresql://team:a/{SECRET}@db.example/evals",
        f"postgresql://team@db.example/evals?password={SECRET}",
        f"postgresql://team@db.example/evals?sslpassword={SECRET}&sslkey={SECRET}",
    ],
)
def test_displayed_url_holds_no_secret(url):
    address = parse(url)
    assert SECRET not in address.where
    assert SECRET not in repr(address)


@pytest.mark.parametrize(
    "url",
    [
        f"mysql://team:{SECRET}@db.example/evals",
        f"postgresql://team:{SECRET}@db.example",
        f"postgresql://team:{SECRET}@db.example/",
        f"postgresql://team:a@{SECRET}@db.example/evals",
        f"postgresql://team:a@db.example:{SECRET}/evals",
        f"postgresql://db.example/evals?run=no-{SECRET}",
        f"postgresql://db.example/evals?run=a&run={SECRET}",
        f"postgresql://[::1/{SECRET}",
    ],
)
def test_nothing_of_a_bad_url_is_repeated(url):
    with pytest.raises(UsageError) as caught:
        parse(url)
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)
