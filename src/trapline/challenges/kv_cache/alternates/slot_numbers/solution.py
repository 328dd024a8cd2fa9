"""One flat pool of slots; a sequence is an array of slot numbers, the same for all layers.

Nothing is counted as it changes: which pages are free or shared is worked out from the slot arrays
whenever they are needed. Scales are float16. Attention is two einsums in float64.
"""

import math

import numpy as np

KINDS = {
    "dense": (False, False),
    "quantized": (False, True),
    "paged": (True, False),
    "paged_quantized": (True, True),
}


class SlotCache:
    """slots[seq] lists where each position lies; page = slot // P."""

    def __init__(self, paged, bits, sizes):
        self.layers, self.heads, self.width, page, pages = sizes
        self.bits = bits
        self.page = page if paged else 1
        self.pages = pages if paged else page * pages
        self.slots = {}
        self.ends = {}
        self.born = 0
        self.memory = None
        self.dtype = None

    # sequences

    def add(self):
        self.born += 1
        self.slots[self.born] = np.zeros(0, np.intp)
        self.ends[self.born] = np.zeros(self.layers, int)
        return self.born

    def fork(self, seq):
        self.known(seq)
        child = self.add()
        self.slots[child] = self.slots[seq].copy()
        self.ends[child] = self.ends[seq].copy()
        return child

    def free(self, seq):
        self.known(seq)
        del self.slots[seq], self.ends[seq]

    def length(self, seq):
        self.known(seq)
        return int(self.ends[seq].min())

    def truncate(self, seq, n):
        self.known(seq)
        if isinstance(n, bool) or not isinstance(n, int | np.integer):
            raise TypeError("n must be an int")
        if n < 0 or n > self.length(seq):
            raise ValueError("n must lie inside the sequence")
        self.slots[seq] = self.slots[seq][: self.page * math.ceil(n / self.page)]
        self.ends[seq][:] = n

    def keep(self, seq, indices):
        self.known(seq)
        order = np.array(list(indices), dtype=object)
        if not all(isinstance(i, int | np.integer) for i in order):
            raise TypeError("indices must be ints")
        order = order.astype(np.intp)
        inside = np.isin(order, np.arange(self.length(seq))).all()
        if not inside or len(set(order.tolist())) < len(order):
            raise ValueError("indices must be distinct positions")
        if (order == np.arange(len(order))).all():
            self.truncate(seq, len(order))
            return
        old = self.slots.pop(seq)
        try:
            fresh = self.unused(math.ceil(len(order) / self.page))
        except MemoryError:
            self.slots[seq] = old
            raise
        rows = [part[:, old[order]] for part in self.memory]
        for part, kept in zip(self.memory, rows, strict=True):
            part[:, fresh[: len(order)]] = kept
        self.slots[seq] = fresh
        self.ends[seq][:] = len(order)

    # rows

    def append(self, seq, layer, k, v):
        self.place(seq, layer)
        self.rows(k, v)
        if k.shape[0] < 1:
            raise ValueError("no positions")
        self.claim(seq, layer, k.shape[0])
        start = self.ends[seq][layer]
        where = self.slots[seq][start : start + k.shape[0]]
        self.dtype = k.dtype
        encoded = [*self.encode(k), *self.encode(v)]
        if self.memory is None:
            total = self.page * self.pages
            self.memory = [np.zeros((self.layers, total, *e.shape[1:]), e.dtype) for e in encoded]
        for part, rows in zip(self.memory, encoded, strict=True):
            part[layer, where] = rows
        self.ends[seq][layer] += k.shape[0]

    def view(self, seq, layer):
        self.place(seq, layer)
        if self.memory is None:
            return np.zeros((0, self.heads, self.width)), np.zeros((0, self.heads, self.width))
        where = self.slots[seq][: self.ends[seq][layer]]
        parts = [part[layer, where] for part in self.memory]
        half = len(parts) // 2
        return self.decode(*parts[:half]), self.decode(*parts[half:])

    def attend(self, seq, layer, q):
        self.place(seq, layer)
        self.queries(q)
        n, count = len(q), int(self.ends[seq][layer])
        if n > count:
            raise ValueError("queries without positions")
        if n == 0:
            return q.copy()
        k, v = (np.repeat(x, q.shape[1] // self.heads, axis=1) for x in self.view(seq, layer))
        scores = np.einsum("nhd,shd->hns", q.astype(float), k.astype(float)) / np.sqrt(self.width)
        scores += np.triu(np.full((n, count), -np.inf), k=count - n + 1)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        return np.einsum("hns,shd->nhd", weights, v.astype(float)).astype(q.dtype)

    def nbytes(self):
        tables = sum(slots.nbytes for slots in self.slots.values())
        return tables + sum(part.nbytes for part in self.memory or ())

    def encode(self, x):
        if self.bits is None:
            return (x,)
        top = {8: 127, 4: 7}[self.bits]
        scale = (np.abs(x).max(axis=2) / top).astype(np.float16)
        wide = np.where(scale == 0, 1, scale)[..., None].astype(x.dtype)
        codes = (np.clip(np.rint(x / wide), -top, top) + top).astype(np.uint8)
        if self.bits == 4:
            if self.width % 2:
                codes = np.concatenate([codes, codes[..., :1]], axis=2)
            codes = codes[..., ::2] + 16 * codes[..., 1::2]
        return codes, scale

    def decode(self, codes, scale=None):
        if scale is None:
            return codes
        if self.bits == 4:
            pairs = np.stack([codes % 16, codes // 16], axis=-1)
            codes = pairs.reshape(*codes.shape[:2], 2 * codes.shape[2])[..., : self.width]
        centred = codes.astype(self.dtype) - {8: 127, 4: 7}[self.bits]
        return centred * scale[..., None].astype(self.dtype)

    # room

    def unused(self, pages):
        """The slots of that many pages that no sequence holds."""
        taken = [slots // self.page for slots in self.slots.values()]
        free = np.setdiff1d(np.arange(self.pages), np.concatenate([[-1], *taken]))
        if len(free) < pages:
            raise MemoryError(f"{pages} pages wanted, {len(free)} left")
        return (free[:pages, None] * self.page + np.arange(self.page)).ravel()

    def claim(self, seq, layer, n):
        """Makes every slot of the next n positions the sequence's own."""
        slots, start = self.slots[seq], int(self.ends[seq][layer])
        others = [s // self.page for name, s in self.slots.items() if name != seq]
        touched = np.arange(start, min(start + n, len(slots)))
        pages = slots[touched] // self.page
        shared = np.unique(touched[np.isin(pages, np.concatenate([[-1], *others]))] // self.page)
        more = max(0, math.ceil((start + n) / self.page) - len(slots) // self.page)
        fresh = self.unused(len(shared) + more).reshape(-1, self.page)
        slots = slots.copy()
        for number, new in zip(shared, fresh, strict=False):
            old = slice(number * self.page, (number + 1) * self.page)
            for part in self.memory:
                part[:, new] = part[:, slots[old]]
            slots[old] = new
        self.slots[seq] = np.concatenate([slots, *fresh[len(shared) :]])

    # refusals

    def known(self, seq):
        if isinstance(seq, bool) or seq not in self.slots:
            raise KeyError(f"sequence {seq}")

    def place(self, seq, layer):
        self.known(seq)
        if isinstance(layer, bool) or layer not in list(range(self.layers)):
            raise ValueError(f"layer {layer}")

    def queries(self, q):
        if getattr(q, "dtype", None) not in (np.float32, np.float64):
            raise TypeError("floats of 32 or 64 bits")
        if q.ndim != 3 or q.shape[2] != self.width or not q.shape[1]:
            raise ValueError("rank or width")
        if q.shape[1] % self.heads:
            raise ValueError("query heads must come in groups")

    def rows(self, k, v):
        if getattr(k, "dtype", None) not in (np.float32, np.float64) or k.dtype != v.dtype:
            raise TypeError("floats of 32 or 64 bits, both the same")
        if self.dtype is not None and k.dtype != self.dtype:
            raise TypeError("the cache began with another dtype")
        if k.shape != v.shape or k.ndim != 3 or k.shape[1:] != (self.heads, self.width):
            raise ValueError("k and v must be (n, kv heads, width)")


def make_cache(kind, *, num_layers, num_kv_heads, head_dim, block_size, num_blocks, bits=None):
    """A slot cache; contiguous kinds are those with pages of one position."""
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is none of {sorted(KINDS)}")
    paged, quantised = KINDS[kind]
    sizes = [num_layers, num_kv_heads, head_dim, block_size, num_blocks]
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
            raise ValueError(f"{size!r} is not a size")
    if quantised and bits not in (4, 8):
        raise ValueError("bits: 4 or 8")
    return SlotCache(paged, bits if quantised else None, sizes)


def chunked_prefill(cache, seq, layer, q, k, v, chunk):
    """All room is claimed at once, then the chunks follow."""
    if isinstance(chunk, bool) or not isinstance(chunk, int | np.integer) or chunk < 1:
        raise ValueError("chunk must be at least 1")
    cache.place(seq, layer)
    cache.queries(q)
    cache.rows(k, v)
    if len(q) != len(k):
        raise ValueError("q and k differ in length")
    out = np.zeros(q.shape, q.dtype)
    if len(q):
        cache.claim(seq, layer, len(q))
    done, step = 0, min(chunk, 128)  # all scores of a long chunk would grow as T²
    while done < len(q):
        end = done + step
        cache.append(seq, layer, k[done:end], v[done:end])
        out[done:end] = cache.attend(seq, layer, q[done:end])
        done = end
    return out


def max_context(spec, gpu_bytes, *, utilization, weight_bytes, reserve_bytes):
    """tokens = floor(budget / bytes a token), 0 at least."""
    try:
        shape = spec["num_layers"], spec["num_kv_heads"], spec["head_dim"], spec["bits"]
    except KeyError as missing:
        raise ValueError(f"the specification has no {missing}") from None
    if min(shape) < 1 or min(gpu_bytes, weight_bytes, reserve_bytes) < 0:
        raise ValueError("sizes must be positive and bytes not negative")
    if not (utilization > 0 and utilization <= 1):
        raise ValueError("utilization must be in (0, 1]")
    per_token = np.prod(np.array(shape, float)) / 4
    budget = gpu_bytes * utilization - weight_bytes - reserve_bytes
    tokens = int(budget // per_token) if budget > 0 else 0
    return tokens, {"bytes_per_token": float(per_token), "budget_bytes": budget}
