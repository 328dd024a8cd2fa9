"""A run as it is kept: every graded cell with the evidence it rests on, in a folder or on a
PostgreSQL server. Nothing that was finished is ever lost."""

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
