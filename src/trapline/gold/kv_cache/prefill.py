"""A long prompt in chunks: the same result, and never all scores at once."""

from typing import Any

import numpy as np

from trapline.gold import checks
from trapline.gold.errors import ShapeError
from trapline.gold.kv_cache.api import KVCache


def chunked_prefill(
    cache: KVCache,
    seq: int,
    layer: int,
    q: Any,
    k: Any,
    v: Any,
    chunk: int,
) -> Any:
    """Appends k, v (T,G,D) to a sequence and answers the attention of q (T,H,D).

    The result is that of one append and one attend, for every chunk size; scores take c·S·H numbers
    at a time instead of T·S·H. (In a cache with `recent` rows it is more exact in smaller chunks.)
    A prompt that does not fit raises MemoryError and changes nothing.
    """
    checks.integer_between(1, 2**62, chunk=chunk)
    cache.check_rows(k, v)
    cache.check_queries(q)
    if len(q) != len(k):
        raise ShapeError(f"q has {len(q)} positions, k has {len(k)}")
    out = np.empty_like(q) if isinstance(q, np.ndarray) else q.new_empty(q.shape)
    if len(q) > 0:
        cache.reserve(seq, layer, len(k))
    for start in range(0, len(q), chunk):
        part = slice(start, start + chunk)
        cache.append(seq, layer, k[part], v[part])
        out[part] = cache.attend(seq, layer, q[part])
    return out
