"""KV caches in one array of records per layer; a record is a position with heads and scales.

Paged kinds cut the array into pages. The other two keep sequences back to back in it, and move the
later ones when an earlier one grows or shrinks, so that no position is ever lost to fragments.
"""

import operator

import numpy as np

FLOATS = {np.dtype(np.float32), np.dtype(np.float64)}


def _int(value, name, low=1, high=None):
    value = operator.index(value)
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} = {value} is out of range")
    return value


def _attention(q, k, v, start):
    """Causal attention in float64, 64 queries at a time; query i stands at position start + i."""
    n, heads, dim = q.shape
    group = heads // k.shape[1]
    keys = k.astype(np.float64).transpose(1, 2, 0) * dim**-0.5
    values = v.astype(np.float64).transpose(1, 0, 2)
    out = np.empty(q.shape, q.dtype)
    for a in range(0, n, 64):
        b = min(a + 64, n)
        visible = start + b
        late = np.arange(visible)[None, :] > np.arange(start + a, start + b)[:, None]
        for h in range(heads):
            s = q[a:b, h].astype(np.float64) @ keys[h // group][:, :visible]
            s[late] = -np.inf
            p = np.exp(s - s.max(axis=1)[:, None])
            out[a:b, h] = (p @ values[h // group][:visible]) / p.sum(axis=1)[:, None]
    return out


class ArenaCache:
    def __init__(self, paged, bits, layers, heads, dim, block, blocks):
        self.paged, self.bits = paged, bits
        self.layers, self.heads, self.dim = layers, heads, dim
        self.block, self.capacity = block, block * blocks
        self.sizes = {}  # seq -> positions in each layer; the order is that of the dense arena
        self.tables = {}  # seq -> page numbers of each layer
        self.refs = np.zeros((layers, blocks), np.uint32)
        self.arena, self.dtype, self.last = None, None, -1

    # -- records

    def _record_type(self, dtype):
        if self.bits is None:
            return np.dtype([("x", dtype, (2, self.heads, self.dim))])
        width = (self.bits * self.dim + 7) // 8
        return np.dtype([("x", "u1", (2, self.heads, width)), ("scale", "f4", (2, self.heads))])

    def _encode(self, k, v):
        both = np.stack([k, v], axis=1)
        rows = np.empty(len(k), self._record_type(k.dtype))
        if self.bits is None:
            rows["x"] = both
            return rows
        half = 2 ** (self.bits - 1)
        rows["scale"] = np.abs(both).max(axis=-1) / (half - 1)
        divisor = np.where(rows["scale"] == 0, 1, rows["scale"]).astype(np.float64)
        code = np.round(both / divisor[..., None]).clip(1 - half, half - 1) + half
        code = code.astype(np.uint8)
        if self.bits == 4:
            rows["x"] = code[..., ::2]
            rows["x"][..., : self.dim // 2] |= code[..., 1::2] << 4
        else:
            rows["x"] = code
        return rows

    def _decode(self, rows):
        if self.bits is None:
            both = rows["x"].copy()
        else:
            code = rows["x"]
            if self.bits == 4:
                code = np.repeat(code, 2, axis=-1)
                code[..., 0::2] &= 15
                code[..., 1::2] >>= 4
            centred = code[..., : self.dim].astype(self.dtype) - 2 ** (self.bits - 1)
            both = centred * rows["scale"][..., None].astype(self.dtype)
        return np.ascontiguousarray(both[:, 0]), np.ascontiguousarray(both[:, 1])

    # -- room

    def _free_pages(self, layer):
        return np.flatnonzero(self.refs[layer] == 0)

    def _slots(self, seq, layer):
        """Where in the arena the positions are."""
        size = self.sizes[seq][layer]
        if self.paged:
            pages = np.array(self.tables[seq][layer], np.intp)
            return (pages[:, None] * self.block + np.arange(self.block)).ravel()[:size]
        begin = 0
        for other, sizes in self.sizes.items():
            if other == seq:
                break
            begin += sizes[layer]
        return np.arange(begin, begin + size)

    def _lacking(self, seq, layer, size):
        """Whether there is too little room to bring a layer to this size, keeping its rows."""
        if not self.paged:
            others = sum(s[layer] for other, s in self.sizes.items() if other != seq)
            return others + size > self.capacity
        table, old = self.tables[seq][layer], self.sizes[seq][layer]
        need = -(-size // self.block) - len(table)
        if size > old and old % self.block and self.refs[layer, table[-1]] > 1:
            need += 1
        return need > len(self._free_pages(layer))

    def _resize(self, seq, layer, size):
        old = self.sizes[seq][layer]
        if self.paged:
            self._resize_pages(layer, self.tables[seq][layer], old, size)
        elif size != old and self.arena is not None:
            slots = self._slots(seq, layer)
            end = int(slots[-1]) + 1 if old else sum_before(self.sizes, seq, layer)
            used = sum(s[layer] for s in self.sizes.values())
            line = self.arena[layer]
            line[end + size - old : used + size - old] = line[end:used].copy()
        self.sizes[seq][layer] = size

    def _resize_pages(self, layer, table, old, size):
        pages = -(-size // self.block)
        while len(table) > pages:
            self.refs[layer, table.pop()] -= 1
        if size > old and old % self.block and self.refs[layer, table[-1]] > 1:
            shared, mine = table[-1], int(self._free_pages(layer)[0])
            by_page = self.arena[layer].reshape(-1, self.block)
            by_page[mine] = by_page[shared]
            self.refs[layer, shared] -= 1
            self.refs[layer, mine] = 1
            table[-1] = mine
        fresh = self._free_pages(layer)[: pages - len(table)]
        self.refs[layer, fresh] = 1
        table.extend(fresh.tolist())

    # -- what the caller sees

    def _check(self, x, what):
        if not isinstance(x, np.ndarray) or x.dtype not in FLOATS:
            raise TypeError(f"{what} is not a float array")
        if x.ndim != 3 or x.shape[2] != self.dim or x.shape[1] == 0 or x.shape[1] % self.heads:
            raise ValueError(f"{what} has shape {x.shape}")

    def _check_kv(self, k, v):
        self._check(k, "k")
        self._check(v, "v")
        if k.shape != v.shape or k.shape[1] != self.heads:
            raise ValueError("k and v must be (n, G, D)")
        if k.dtype != v.dtype or (self.dtype is not None and self.dtype != k.dtype):
            raise TypeError("one dtype for everything")

    def _check_layer(self, seq, layer):
        if seq not in self.sizes:
            raise KeyError(seq)
        return _int(layer, "layer", 0, self.layers - 1)

    def add(self):
        self.last += 1
        self.sizes[self.last] = [0] * self.layers
        self.tables[self.last] = [[] for _ in range(self.layers)]
        return self.last

    def append(self, seq, layer, k, v):
        layer = self._check_layer(seq, layer)
        self._check_kv(k, v)
        old = self.sizes[seq][layer]
        if len(k) == 0:
            return
        if self._lacking(seq, layer, old + len(k)):
            raise MemoryError("the arena is full")
        if self.arena is None:
            self.dtype = k.dtype
            self.arena = np.zeros((self.layers, self.capacity), self._record_type(k.dtype))
        self._resize(seq, layer, old + len(k))
        self.arena[layer, self._slots(seq, layer)[old:]] = self._encode(k, v)

    def view(self, seq, layer):
        layer = self._check_layer(seq, layer)
        if self.arena is None:
            return tuple(np.zeros((2, 0, self.heads, self.dim), np.float32))
        return self._decode(self.arena[layer, self._slots(seq, layer)])

    def attend(self, seq, layer, q):
        layer = self._check_layer(seq, layer)
        self._check(q, "q")
        start = self.sizes[seq][layer] - len(q)
        if start < 0:
            raise ValueError("there are fewer positions than queries")
        k, v = self.view(seq, layer)
        return _attention(q, k, v, start)

    def fork(self, seq):
        if seq not in self.sizes:
            raise KeyError(seq)
        if self.paged:
            new = self.add()
            self.sizes[new] = list(self.sizes[seq])
            for layer, table in enumerate(self.tables[seq]):
                self.tables[new][layer] = list(table)
                self.refs[layer, table] += 1
            return new
        for layer, size in enumerate(self.sizes[seq]):
            if sum(s[layer] for s in self.sizes.values()) + size > self.capacity:
                raise MemoryError("no room for the copy")
        new = self.add()
        for layer, size in enumerate(self.sizes[seq]):
            if size:
                self._resize(new, layer, size)
                self.arena[layer, self._slots(new, layer)] = self.arena[
                    layer, self._slots(seq, layer)
                ]
        return new

    def keep(self, seq, indices):
        n = self.length(seq)
        index = np.array([_int(i, "index", 0, n - 1) for i in indices], np.intp)
        if len(set(index.tolist())) != len(index):
            raise ValueError("an index occurs twice")
        if self.paged:
            for layer, table in enumerate(self.tables[seq]):
                own = np.count_nonzero(self.refs[layer, table] == 1)
                if -(-len(index) // self.block) > own + len(self._free_pages(layer)):
                    raise MemoryError("no pages of its own")
        for layer in range(self.layers):
            if not self.sizes[seq][layer]:
                continue
            rows = self.arena[layer, self._slots(seq, layer)[index]]
            self._resize(seq, layer, 0)
            self._resize(seq, layer, len(index))
            self.arena[layer, self._slots(seq, layer)] = rows

    def truncate(self, seq, n):
        n = _int(n, "n", 0, self.length(seq))
        for layer in range(self.layers):
            self._resize(seq, layer, n)

    def free(self, seq):
        if seq not in self.sizes:
            raise KeyError(seq)
        for layer in range(self.layers):
            self._resize(seq, layer, 0)
        del self.sizes[seq], self.tables[seq]

    def length(self, seq):
        return min(self.sizes[seq])

    def nbytes(self):
        entries = sum(len(table) for tables in self.tables.values() for table in tables)
        return (0 if self.arena is None else self.arena.nbytes) + self.refs.nbytes + 8 * entries


def sum_before(sizes, seq, layer):
    """Positions of the sequences that lie before seq in the arena."""
    before = 0
    for other in sizes:
        if other == seq:
            return before
        before += sizes[other][layer]
    raise KeyError(seq)


def make_cache(kind, *, num_layers, num_kv_heads, head_dim, block_size, num_blocks, bits=None):
    """A cache with add, append, attend, view, fork, keep, truncate, free, length and nbytes."""
    if kind not in {"dense", "paged", "quantized", "paged_quantized"}:
        raise ValueError(f"no such kind: {kind!r}")
    if ("quantized" in kind) != (bits is not None) or bits not in (None, 4, 8):
        raise ValueError(f"bits = {bits!r} with {kind}")
    return ArenaCache(
        "paged" in kind,
        bits,
        _int(num_layers, "num_layers"),
        _int(num_kv_heads, "num_kv_heads"),
        _int(head_dim, "head_dim"),
        _int(block_size, "block_size"),
        _int(num_blocks, "num_blocks"),
    )


def chunked_prefill(cache, seq, layer, q, k, v, chunk):
    """Append k, v (T,G,D) and return the attention of q (T,H,D), `chunk` positions at a time."""
    layer = cache._check_layer(seq, layer)
    chunk = _int(chunk, "chunk")
    cache._check(q, "q")
    cache._check_kv(k, v)
    if len(q) != len(k):
        raise ValueError("q, k and v differ in length")
    if cache._lacking(seq, layer, cache.sizes[seq][layer] + len(k)):
        raise MemoryError("the prompt does not fit")
    out = np.empty(q.shape, q.dtype)
    done = 0
    while done < len(q):
        todo = slice(done, done + chunk)
        cache.append(seq, layer, k[todo], v[todo])
        out[todo] = cache.attend(seq, layer, q[todo])
        done += chunk
    return out


def max_context(spec, gpu_bytes, *, utilization, weight_bytes, reserve_bytes):
    """(tokens, terms): how many tokens of cache fit, and the numbers behind it."""
    try:
        layers, heads, dim, bits = (
            _int(spec[name], name) for name in ("num_layers", "num_kv_heads", "head_dim", "bits")
        )
    except LookupError as missing:
        raise ValueError(f"spec has no {missing}") from missing
    if utilization <= 0 or utilization > 1:
        raise ValueError("utilization out of (0, 1]")
    if gpu_bytes < 0 or weight_bytes < 0 or reserve_bytes < 0:
        raise ValueError("negative bytes")
    terms = {
        "bytes_per_token": 2 * layers * heads * dim * bits / 8,
        "budget_bytes": gpu_bytes * utilization - weight_bytes - reserve_bytes,
    }
    tokens, _ = divmod(terms["budget_bytes"], terms["bytes_per_token"])
    return int(max(tokens, 0)), terms
