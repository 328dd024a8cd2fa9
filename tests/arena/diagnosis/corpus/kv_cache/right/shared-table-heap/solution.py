"""KV caches with one page table per sequence for all layers; free pages are in a heap.

Kinds that are not paged are paged ones with pages of a single position: a sequence is then a list
of slots, and keeping positions is a matter of choosing from the list.
"""

import heapq
from array import array
from types import SimpleNamespace

import numpy as np

KEYS = 512  # keys and queries handled at a time in attention
QUERIES = 64


def _size(value, name):
    if not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}: not an int")
    if value < 1:
        raise ValueError(f"{name}: less than 1")
    return int(value)


def _online_attention(q, fetch, start):
    """Attention of q (n,H,D) at positions start..., over keys that fetch(a, b) gives in pieces.

    The softmax is online: running maximum, running sum, rescaled output.
    """
    n, heads, dim = q.shape
    rows = q.transpose(1, 0, 2) * q.dtype.type(dim**-0.5)
    top = np.full((heads, n, 1), -np.inf, q.dtype)
    mass = np.zeros((heads, n, 1), q.dtype)
    acc = np.zeros((heads, n, dim), q.dtype)
    for a in range(0, start + n, KEYS):
        b = min(a + KEYS, start + n)
        k, v = fetch(a, b)
        ratio = heads // k.shape[1]
        k = np.repeat(k.transpose(1, 2, 0), ratio, axis=0)
        v = np.repeat(v.transpose(1, 0, 2), ratio, axis=0)
        s = rows @ k
        if b - 1 > start:
            s = np.where(np.arange(a, b) <= start + np.arange(n)[:, None], s, q.dtype.type(-np.inf))
        # every query sees position 0, so that the maximum is finite from the first piece on
        new = np.maximum(top, s.max(axis=2, keepdims=True))
        fade = np.exp(top - new)
        p = np.exp(s - new)
        mass = mass * fade + p.sum(axis=2, keepdims=True)
        acc = acc * fade + p @ v
        top = new
    return (acc / mass).transpose(1, 0, 2)


class TableCache:
    def __init__(self, layers, heads, dim, page, pages, bits):
        self.layers, self.heads, self.dim = layers, heads, dim
        self.page, self.bits = page, bits
        self.heap = list(range(pages))
        self.refs = np.zeros(pages, np.int32)
        self.seqs, self.made, self.dtype = {}, 0, None
        self.x = self.scale = None

    # ---- storage: x (slots, layers, 2, G, width) and scale (slots, layers, 2, G)

    def _allocate(self, dtype):
        if self.x is not None:
            return
        shape = (len(self.refs) * self.page, self.layers, 2, self.heads)
        if self.bits:
            self.x = np.zeros((*shape, -(-self.dim * self.bits // 8)), np.uint8)
            self.scale = np.zeros(shape, np.float32)
        else:
            self.x = np.zeros((*shape, self.dim), dtype)
            self.scale = np.zeros((*shape[:1], 0), np.float32)

    def _store(self, slots, layer, both):
        if not self.bits:
            self.x[slots, layer] = both
            return
        top = (1 << (self.bits - 1)) - 1
        scale = (np.abs(both.astype(np.float64)).max(axis=3) / top).astype(np.float32)
        with np.errstate(divide="ignore", invalid="ignore"):
            level = both / scale[..., None].astype(np.float64)
        level[scale == 0] = 0
        level = np.clip(np.rint(level), -top, top).astype(int)
        if self.bits == 4:
            level = np.concatenate([level, np.zeros((*level.shape[:3], self.dim % 2), int)], axis=3)
            level = (level[..., ::2] + 7) * 16 + (level[..., 1::2] + 7)
        else:
            level = level + 127
        self.x[slots, layer] = level
        self.scale[slots, layer] = scale

    def _load(self, slots, layer):
        x = self.x[slots, layer]
        if self.bits:
            if self.bits == 4:
                level = np.stack(np.divmod(x, 16), axis=-1).reshape(*x.shape[:3], 2 * x.shape[3])[
                    ..., : self.dim
                ]
            else:
                level = x
            level = level.astype(self.dtype) - (7 if self.bits == 4 else 127)
            x = level * self.scale[slots, layer][..., None].astype(self.dtype)
        return x[:, 0], x[:, 1]

    def _slots(self, record, a, b):
        at = np.arange(a, b)
        return np.asarray(record.table, dtype=np.intp)[at // self.page] * self.page + at % self.page

    # ---- pages

    def _take(self):
        page = heapq.heappop(self.heap)
        self.refs[page] = 1
        return page

    def _drop(self, pages):
        for page in pages:
            self.refs[page] -= 1
            if self.refs[page] == 0:
                heapq.heappush(self.heap, page)

    def _plan(self, record, layer, n):
        """Table entries to copy before n positions are written to a layer, and pages to add."""
        a = record.held[layer]
        last = -(-(a + n) // self.page)
        touched = range(a // self.page, min(last, len(record.table)))
        shared = [i for i in touched if self.refs[record.table[i]] > 1]
        added = max(0, last - len(record.table))
        if len(shared) + added > len(self.heap):
            raise MemoryError("out of pages")
        return shared, added

    def _own(self, record, shared):
        for i in shared:
            old, new = record.table[i], self._take()
            source = slice(old * self.page, (old + 1) * self.page)
            target = slice(new * self.page, (new + 1) * self.page)
            self.x[target] = self.x[source]
            self.scale[target] = self.scale[source]
            record.table[i] = new
            self._drop([old])

    # ---- checks

    def _find(self, seq, layer=None):
        record = self.seqs[seq]
        if layer is not None:
            if not isinstance(layer, (int, np.integer)):
                raise TypeError("layer: not an int")
            if not 0 <= layer < self.layers:
                raise ValueError("layer: out of range")
        return record

    def _check(self, x, kv):
        if not isinstance(x, np.ndarray) or x.dtype.name not in ("float32", "float64"):
            raise TypeError("float32 or float64 arrays")
        if x.ndim != 3 or x.shape[2] != self.dim:
            raise ValueError("arrays of shape (n, heads, D)")
        if x.shape[1] == 0 or x.shape[1] % self.heads or (kv and x.shape[1] != self.heads):
            raise ValueError("number of heads")

    def _check_kv(self, k, v):
        self._check(k, True)
        self._check(v, True)
        if len(k) != len(v):
            raise ValueError("k and v differ in length")
        if k.dtype != v.dtype or self.dtype not in (None, k.dtype):
            raise TypeError("dtype")

    # ---- methods

    def _new(self, table, held):
        self.made += 1
        self.seqs[self.made] = SimpleNamespace(table=table, held=held)
        return self.made

    def add(self):
        return self._new(array("i"), [0] * self.layers)

    def fork(self, seq):
        record = self._find(seq)
        for page in record.table:
            self.refs[page] += 1
        return self._new(record.table[:], record.held[:])

    def append(self, seq, layer, k, v):
        record = self._find(seq, layer)
        self._check_kv(k, v)
        n = len(k)
        shared, added = self._plan(record, layer, n)
        self.dtype = k.dtype
        self._allocate(k.dtype)
        self._own(record, shared)
        record.table.extend(self._take() for _ in range(added))
        a = record.held[layer]
        self._store(self._slots(record, a, a + n), layer, np.stack([k, v], axis=1))
        record.held[layer] = a + n

    def view(self, seq, layer):
        record = self._find(seq, layer)
        if self.x is None:
            return tuple(np.zeros((2, 0, self.heads, self.dim), np.float32))
        k, v = self._load(self._slots(record, 0, record.held[layer]), layer)
        return k.copy(), v.copy()

    def attend(self, seq, layer, q):
        record = self._find(seq, layer)
        self._check(q, False)
        if len(q) > record.held[layer]:
            raise ValueError("more queries than positions")
        return self._attend_at(record, layer, q, record.held[layer] - len(q))

    def _attend_at(self, record, layer, q, start):
        def fetch(a, b):
            return self._load(self._slots(record, a, b), layer)

        out = np.empty(q.shape, q.dtype)
        for i in range(0, len(q), QUERIES):
            out[i : i + QUERIES] = _online_attention(q[i : i + QUERIES], fetch, start + i)
        return out

    def keep(self, seq, indices):
        record = self._find(seq)
        index = list(indices)
        if not all(isinstance(i, (int, np.integer)) for i in index):
            raise TypeError("indices must be ints")
        if len(index) != len(set(index)) or not set(index) <= set(range(self.length(seq))):
            raise ValueError("indices must be different and in range")
        if self.page == 1:
            table = array("i", [record.table[i] for i in index])
            chosen = set(index)
            self._drop([page for i, page in enumerate(record.table) if i not in chosen])
            record.table = table
        else:
            self._keep_pages(record, np.array(index, dtype=np.intp))
        record.held = [len(index)] * self.layers

    def _keep_pages(self, record, index):
        need = -(-len(index) // self.page)
        own = sum(self.refs[page] == 1 for page in record.table)
        if need > own + len(self.heap):
            raise MemoryError("out of pages")
        if need:
            slots = self._slots(record, 0, int(index.max()) + 1)[index]
            x, scale = self.x[slots], self.scale[slots]
        self._drop(record.table)
        record.table = array("i", [self._take() for _ in range(need)])
        if need:
            slots = self._slots(record, 0, len(index))
            self.x[slots], self.scale[slots] = x, scale

    def truncate(self, seq, n):
        record = self._find(seq)
        if not isinstance(n, (int, np.integer)):
            raise TypeError("n must be an int")
        if n < 0 or n > self.length(seq):
            raise ValueError("n out of range")
        pages = -(-n // self.page)
        self._drop(record.table[pages:])
        record.table = record.table[:pages]
        record.held = [int(n)] * self.layers

    def free(self, seq):
        self._drop(self.seqs.pop(seq).table)

    def length(self, seq):
        return min(self.seqs[seq].held)

    def nbytes(self):
        tables = sum(record.table.itemsize * len(record.table) for record in self.seqs.values())
        rows = 0 if self.x is None else self.x.nbytes + self.scale.nbytes
        return int(rows + tables + self.refs.nbytes)


def make_cache(kind, *, num_layers, num_kv_heads, head_dim, block_size, num_blocks, bits=None):
    """A cache with add, append, attend, view, fork, keep, truncate, free, length and nbytes."""
    allowed = {"dense": [None], "paged": [None], "quantized": [8, 4], "paged_quantized": [8, 4]}
    if kind not in allowed:
        raise ValueError(f"kind {kind!r}")
    if bits not in allowed[kind]:
        raise ValueError(f"bits {bits!r} for {kind}")
    layers, heads = _size(num_layers, "num_layers"), _size(num_kv_heads, "num_kv_heads")
    dim = _size(head_dim, "head_dim")
    page, pages = _size(block_size, "block_size"), _size(num_blocks, "num_blocks")
    if not kind.startswith("paged"):
        page, pages = 1, page * pages
    return TableCache(layers, heads, dim, page, pages, bits)


def chunked_prefill(cache, seq, layer, q, k, v, chunk):
    """Append k, v (T,G,D) and return the attention of q (T,H,D), `chunk` positions at a time."""
    record = cache._find(seq, layer)
    chunk = _size(chunk, "chunk")
    cache._check(q, False)
    cache._check_kv(k, v)
    if len(q) != len(k):
        raise ValueError("q and k differ in length")
    start = record.held[layer]
    if len(k):
        cache.append(seq, layer, k, v)
    parts = (
        cache._attend_at(record, layer, q[a : a + chunk], start + a)
        for a in range(0, len(q), chunk)
    )
    return np.concatenate([np.empty((0, *q.shape[1:]), q.dtype), *parts])


def max_context(spec, gpu_bytes, *, utilization, weight_bytes, reserve_bytes):
    """(tokens, terms): how many tokens of cache fit, and the numbers behind it."""
    missing = {"num_layers", "num_kv_heads", "head_dim", "bits"} - set(spec)
    if missing:
        raise ValueError(f"spec lacks {missing}")
    elements = (
        2 * _size(spec["num_layers"], "num_layers") * _size(spec["num_kv_heads"], "num_kv_heads")
    )
    elements *= _size(spec["head_dim"], "head_dim")
    token = elements * _size(spec["bits"], "bits") / 8
    if not 0 < utilization <= 1:
        raise ValueError("utilization")
    if any(x < 0 for x in (gpu_bytes, weight_bytes, reserve_bytes)):
        raise ValueError("bytes")
    budget = utilization * gpu_bytes - weight_bytes - reserve_bytes
    tokens = int(np.floor_divide(budget, token)) if budget > 0 else 0
    return tokens, {"bytes_per_token": token, "budget_bytes": budget, "token_elements": elements}
