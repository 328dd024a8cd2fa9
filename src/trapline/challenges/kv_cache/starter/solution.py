"""KV caches: dense, paged, quantised; chunked prefill; maximal context. See prompt.md."""


def make_cache(kind, *, num_layers, num_kv_heads, head_dim, block_size, num_blocks, bits=None):
    """A cache with add, append, attend, view, fork, keep, truncate, free, length and nbytes."""
    raise NotImplementedError


def chunked_prefill(cache, seq, layer, q, k, v, chunk):
    """Append k, v (T,G,D) and return the attention of q (T,H,D), `chunk` positions at a time."""
    raise NotImplementedError


def max_context(spec, gpu_bytes, *, utilization, weight_bytes, reserve_bytes):
    """(tokens, terms): how many tokens of cache fit, and the numbers behind it."""
    raise NotImplementedError
