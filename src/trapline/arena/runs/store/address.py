"""The URL of a run on a server; what is printed of it never holds its password."""

import re
from dataclasses import dataclass

import sqlalchemy as sa

from trapline.arena.errors import UsageError

#: All of them mean the same driver.
SCHEMES = ("postgresql", "postgres", "postgresql+psycopg")
_RUN = re.compile(r"[a-z0-9_]{1,40}")
_SECRET = ("password", "passfile", "sslpassword", "sslkey")


@dataclass(frozen=True, repr=False)
class Address:
    """`postgresql://user@host:port/database?run=name`; without `run` the database's own run."""

    url: sa.URL
    run: str

    @property
    def schema(self) -> str:
        """Runs of one database live in name spaces of their own."""
        return f"trapline_{self.run}" if self.run else "trapline"

    @property
    def name(self) -> str:
        return self.run or self.url.database or "trapline"

    @property
    def where(self) -> str:
        """The URL without anything secret; with PGPASSWORD or a password file it is as good."""
        kept = {key: value for key, value in self.url.query.items() if key not in _SECRET}
        if self.run:
            kept["run"] = self.run
        url = self.url
        shown = sa.URL.create(
            "postgresql", url.username, None, url.host, url.port, url.database, kept
        )
        return shown.render_as_string()


def is_url(text: str) -> bool:
    return "://" in text


def parse(text: str) -> Address:
    """Nothing of a URL that cannot be read is repeated: a part of it may be the password."""
    scheme = text.partition("://")[0]
    if scheme not in SCHEMES:
        raise UsageError("a run is a folder or a postgresql:// URL")
    try:
        url = sa.make_url(text)
    except (sa.exc.ArgumentError, ValueError):
        raise _unreadable() from None
    if not url.database or "@" in url.database or "@" in (url.host or ""):
        raise _unreadable()
    run = url.query.get("run", "")
    if not isinstance(run, str) or (run and not _RUN.fullmatch(run)):
        raise UsageError("run= in a store's URL takes up to 40 of a–z, 0–9 and _")
    return Address(url.set(drivername="postgresql+psycopg").difference_update_query(["run"]), run)


def _unreadable() -> UsageError:
    return UsageError(
        "the store's URL cannot be read; it has the form postgresql://user@host:port/database, "
        "and in a password @ is written %40, / is %2F, : is %3A"
    )
