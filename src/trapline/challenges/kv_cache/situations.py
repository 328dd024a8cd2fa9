"""What traps of several themes share."""

import numpy as np

from trapline.arena.judge import expect
from trapline.challenges.kv_cache.cases import Twin

BAD = (ValueError, TypeError)


def claimed_bytes(twin: Twin) -> int:
    """The bytes that the cache reports."""
    claim = twin.cache.nbytes()
    expect.that(isinstance(claim, int | np.integer), f"nbytes() is a {type(claim).__name__}")
    return int(claim)
