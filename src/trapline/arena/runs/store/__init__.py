"""A stored run: graded cells and their evidence, in a folder or on a PostgreSQL server."""

from trapline.arena.runs.store.evidence import canonical, digest, read_bundle, write_durably
from trapline.arena.runs.store.folder import last_run
from trapline.arena.runs.store.store import Store

__all__ = [
    "Store",
    "canonical",
    "digest",
    "last_run",
    "read_bundle",
    "write_durably",
]
