"""One run: what is planned, who is at it, what was found, and what that rests on.

A bundle is kept before its cell is in the table; a cell is in the table before the next one
starts. A claim is worth as much as the life of the grader that made it.
"""

import json
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from pydantic import ValidationError

from trapline.arena.errors import ArenaError, UsageError
from trapline.arena.record import Bundle, Cell, CellKey
from trapline.arena.runs.store import address, migrations
from trapline.arena.runs.store.backend import Backend, reading, told, writing
from trapline.arena.runs.store.evidence import canonical, digest, opened
from trapline.arena.runs.store.folder import FolderBackend
from trapline.arena.runs.store.server import ServerBackend
from trapline.arena.runs.store.tables import KEY, cells, matches, meta, plan


class Store:
    """A run, by folder or URL; several graders and readers may have it open at once."""

    def __init__(self, place: Path | str, *, create: bool = True) -> None:
        self._backend = backend = _backend(place, create=create)
        self.where, self.name, self.folder = backend.where, backend.name, backend.folder
        self._grader = ""
        with told(self.where), backend.opening():
            with reading(backend) as connection:
                version = migrations.version_of(connection, backend.schema)
            migrations.refuse_the_future(version, self.where)
            if version == 0 and not create:
                raise UsageError(f"{self.where} holds no run")
            if version < migrations.NEWEST:
                with writing(backend) as connection:
                    backend.prepare(connection)
                    migrations.upgrade(connection, backend.schema)

    # Reading

    def history(self) -> list[Cell]:
        """Every record ever made, oldest first; a damaged one is left out."""
        return [cell for cell in self._records() if cell is not None]

    def damaged(self) -> int:
        return sum(cell is None for cell in self._records())

    def cells(self) -> list[Cell]:
        newest = {cell.key: cell for cell in self._records() if cell is not None}
        return [newest[key] for key in sorted(newest)]

    def newest(self, key: CellKey) -> Cell | None:
        found = [cell for cell in self._records(matches(cells, key)) if cell is not None]
        return found[-1] if found else None

    def _records(self, *which: sa.ColumnElement[bool]) -> Iterator[Cell | None]:
        asked = sa.select(cells.c.record, cells.c.digest).where(*which).order_by(cells.c.id)
        with reading(self._backend) as connection:
            for row in connection.execute(asked):
                yield _parse(row.record, row.digest)

    def bundle(self, address: str) -> Bundle:
        """The evidence of this address; refused when a byte of it has changed."""
        return opened(self._backend.evidence.text(address), address, f"{address}.json")

    def has_bundle(self, address: str) -> bool:
        return self._backend.evidence.is_whole(address)

    def find_bundle(self, beginning: str) -> str:
        found = self._backend.evidence.addresses(beginning.removesuffix(".json"))
        if len(found) == 1:
            return found[0]
        if found:
            raise UsageError(f"{len(found)} bundles in {self.where} begin with {beginning!r}")
        raise UsageError(f"no bundle in {self.where} begins with {beginning!r}")

    def waiting(self) -> dict[CellKey, str]:
        """Planned cells that are not graded yet → "waiting", or "running" in a live grader."""
        with reading(self._backend) as connection:
            rows = connection.execute(sa.select(plan).order_by(*(plan.c[k] for k in KEY))).all()
            graders = {row.grader for row in rows if row.grader}
            alive = {name for name in graders if self._backend.is_alive(connection, name)}
        return {CellKey(*row[:4]): "running" if row.grader in alive else "waiting" for row in rows}

    def is_planned(self, key: CellKey) -> bool:
        """Whether this cell is still to be graded, by any grader."""
        with reading(self._backend) as connection:
            return connection.execute(sa.select(plan).where(matches(plan, key))).first() is not None

    def meta(self) -> dict[str, Any]:
        with reading(self._backend) as connection:
            return {row.name: json.loads(row.value) for row in connection.execute(sa.select(meta))}

    # Writing

    def set_meta(self, **facts: Any) -> None:
        with writing(self._backend) as connection:
            for name, value in facts.items():
                connection.execute(sa.delete(meta).where(meta.c.name == name))
                connection.execute(sa.insert(meta).values(name=name, value=json.dumps(value)))

    def agree(self, name: str, value: Any) -> Any:
        """Sets a fact that is not set yet; returns the value that holds for all graders."""
        with writing(self._backend) as connection:
            asked = sa.select(meta.c.value).where(meta.c.name == name)
            found = connection.execute(asked).scalar_one_or_none()
            if found is None:
                found = json.dumps(value)
                connection.execute(sa.insert(meta).values(name=name, value=found))
        return json.loads(found)

    def plan(self, keys: Iterable[CellKey]) -> None:
        with writing(self._backend) as connection:
            known = {tuple(row[:4]) for row in connection.execute(sa.select(plan))}
            new = [dict(zip(KEY, key, strict=True)) for key in keys if key not in known]
            if new:
                connection.execute(sa.insert(plan), new)

    def withdraw(self, key: CellKey) -> None:
        """Takes a cell off the plan that need not be graded after all."""
        with writing(self._backend) as connection:
            connection.execute(sa.delete(plan).where(matches(plan, key)))

    def claim(self, key: CellKey) -> bool:
        """Takes a planned cell; False when it is done or another living grader has it."""
        with writing(self._backend) as connection:
            if not (self._grader and self._backend.is_alive(connection, self._grader)):
                raise ArenaError(f"the store {self.where} no longer knows this grader")
            row = connection.execute(sa.select(plan).where(matches(plan, key))).one_or_none()
            if row is None or (
                row.grader
                and row.grader != self._grader
                and self._backend.is_alive(connection, row.grader)
            ):
                return False
            connection.execute(
                sa.update(plan).where(matches(plan, key)).values(grader=self._grader)
            )
        return True

    def save(self, bundle: Bundle) -> Cell | None:
        """Keeps evidence and cell, in this order, and takes the cell off the plan; None when this
        grader was taken for dead meanwhile and another grader has the cell."""
        text = canonical(bundle)
        address = digest(text)
        if not self.has_bundle(address):
            self._backend.evidence.keep(address, text)
        cell = bundle.cell.model_copy(update={"bundle": address})
        record = cell.model_dump_json()
        with writing(self._backend) as connection:
            done = connection.execute(sa.delete(plan).where(self._is_ours(cell.key)))
            if self._grader and not done.rowcount:
                return None
            values = dict(zip(KEY, cell.key, strict=True))
            connection.execute(
                sa.insert(cells).values(**values, digest=digest(record), record=record)
            )
        return cell

    def _is_ours(self, key: CellKey) -> sa.ColumnElement[bool]:
        found = matches(plan, key)
        return sa.and_(found, plan.c.grader == self._grader) if self._grader else found

    # Graders

    @contextmanager
    def grading(self) -> Iterator[None]:
        """While this holds, other graders see that this one is alive."""
        self._grader = f"{os.getpid()}-{secrets.token_hex(6)}"
        try:
            with told(self.where), self._backend.living(self._grader):
                yield
        finally:
            self._grader = ""

    def close(self) -> None:
        self._backend.engine.dispose()


def _backend(place: Path | str, *, create: bool) -> Backend:
    if isinstance(place, str) and address.is_url(place):
        return ServerBackend(address.parse(place), create=create)
    return FolderBackend(Path(place), create=create)


def _parse(record: str, expected: str) -> Cell | None:
    if digest(record) != expected:
        return None
    try:
        return Cell.model_validate_json(record)
    except ValidationError:
        return None
