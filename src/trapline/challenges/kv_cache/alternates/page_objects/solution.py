"""Pages as objects that sequences hold; who shares a page is seen by looking, not by counting.

Rows are quantised between their smallest and largest element. Attention goes page by page with the
online softmax, so no row of scores is ever longer than a page.
"""

import math
from fractions import Fraction

import numpy as np


class Page:
    """Up to `size` encoded positions of one layer: a list of (key, value)."""

    def __init__(self, rows=()):
        self.rows = list(rows)


class Plain:
    """A row as it is."""

    def encode(self, row):
        return (row.copy(),)

    def decode(self, row):
        return row[0]


class MinMax:
    """b bits between the smallest and the largest element of each head."""

    def __init__(self, bits):
        self.bits = bits

    def encode(self, row):
        low = row.min(axis=1).astype(np.float32)
        step = ((row.max(axis=1) - low) / (2**self.bits - 1)).astype(np.float32)
        step[step == 0] = 1
        levels = np.rint((row - low[:, None].astype(row.dtype)) / step[:, None].astype(row.dtype))
        levels = np.clip(levels, 0, 2**self.bits - 1).astype(np.uint8)
        if self.bits == 4:
            levels = np.packbits(np.unpackbits(levels[..., None], axis=-1)[..., 4:].reshape(-1))
        return levels, low, step, row.shape, row.dtype

    def decode(self, encoded):
        levels, low, step, shape, dtype = encoded
        if self.bits == 4:
            nibbles = np.unpackbits(levels)[: 4 * math.prod(shape)].reshape(-1, 4)
            levels = (nibbles @ np.array([8, 4, 2, 1], np.uint8)).reshape(shape)
        return (levels * step[:, None].astype(dtype) + low[:, None].astype(dtype)).astype(dtype)


class Cache:
    """For each sequence and layer a list of pages, all full but the last."""

    def __init__(self, codec, layers, heads, width, page_size, num_pages, by_position):
        self.codec = codec
        self.layers, self.heads, self.width = layers, heads, width
        # A contiguous cache has room for positions, not for pages: pages of one.
        self.page_size = 1 if by_position else page_size
        self.num_pages = page_size * num_pages if by_position else num_pages
        self.held = {}
        self.numbers = iter(range(1, 1 << 62))
        self.dtype = None

    def add(self):
        seq = next(self.numbers)
        self.held[seq] = [[] for _ in range(self.layers)]
        return seq

    def append(self, seq, layer, k, v):
        self._sequence(seq)
        self._layer(layer)
        self._same_rows(k, v)
        if not len(k):
            raise ValueError("nothing to append")
        self._room(seq, layer, len(k))
        self.dtype = k.dtype
        pages = self.held[seq][layer]
        for key, value in zip(k, v, strict=True):
            row = self.codec.encode(key), self.codec.encode(value)
            if not pages or len(pages[-1].rows) == self.page_size:
                pages.append(Page())
            elif self._holders(layer, pages[-1]) > 1:
                pages[-1] = Page(pages[-1].rows)
            pages[-1].rows.append(row)

    def attend(self, seq, layer, q):
        self._sequence(seq)
        self._layer(layer)
        self._queries(q)
        count = self._count(seq, layer)
        if len(q) > count:
            raise ValueError("more queries than positions")
        out = np.zeros(q.shape)
        total = np.zeros(q.shape[:2])
        largest = np.full(q.shape[:2], -np.inf)
        group = q.shape[1] // self.heads
        last = count - len(q) + np.arange(len(q))
        first = 0
        for page in self.held[seq][layer]:
            k, v = self._decode(page.rows)
            hidden = first + np.arange(len(k)) > last[:, None]
            for h in range(q.shape[1]):
                scores = q[:, h].astype(float) @ k[:, h // group].astype(float).T
                scores = np.where(hidden, -np.inf, scores / math.sqrt(self.width))
                top = np.maximum(largest[:, h], scores.max(axis=1, initial=-np.inf))
                solid = np.where(np.isfinite(top), top, 0.0)
                weights = np.exp(scores - solid[:, None])
                shrink = np.exp(largest[:, h] - solid)
                total[:, h] = total[:, h] * shrink + weights.sum(axis=1)
                out[:, h] = out[:, h] * shrink[:, None] + weights @ v[:, h // group]
                largest[:, h] = top
            first += len(k)
        return (out / np.where(total == 0, 1, total)[..., None]).astype(q.dtype)

    def view(self, seq, layer):
        self._sequence(seq)
        self._layer(layer)
        return self._decode(row for page in self.held[seq][layer] for row in page.rows)

    def fork(self, seq):
        pages = self._sequence(seq)
        child = next(self.numbers)
        self.held[child] = [list(layer) for layer in pages]
        return child

    def keep(self, seq, indices):
        pages = self._sequence(seq)
        indices = [self._whole(i) for i in indices]
        if len(set(indices)) != len(indices) or not all(0 <= i < self.length(seq) for i in indices):
            raise ValueError("indices must be different positions of the sequence")
        if indices == list(range(len(indices))):
            self.truncate(seq, len(indices))
            return
        needed = -(-len(indices) // self.page_size)
        for layer in range(self.layers):
            own = sum(self._holders(layer, page) == 1 for page in pages[layer])
            if needed > self._free(layer) + own:
                raise MemoryError("no room to reorder")
        for layer in range(self.layers):
            rows = [row for page in pages[layer] for row in page.rows]
            pages[layer] = self._paginate([rows[i] for i in indices])

    def truncate(self, seq, n):
        pages = self._sequence(seq)
        if not 0 <= self._whole(n) <= self.length(seq):
            raise ValueError("cannot cut there")
        full, rest = divmod(n, self.page_size)
        for layer in range(self.layers):
            if rest and len(pages[layer][full].rows) > rest:
                if self._holders(layer, pages[layer][full]) > 1:
                    # The others keep the long page. Ours shares its rows, and counts as a copy only
                    # once it is written to: both stand for the same slots until then.
                    shorter = Page(pages[layer][full].rows[:rest])
                    shorter.twin = self._root(pages[layer][full])
                    pages[layer][full] = shorter
                else:
                    del pages[layer][full].rows[rest:]
            del pages[layer][full + bool(rest) :]

    def free(self, seq):
        self._sequence(seq)
        del self.held[seq]

    def length(self, seq):
        self._sequence(seq)
        return min(self._count(seq, layer) for layer in range(self.layers))

    def nbytes(self):
        seen = {}
        for pages in self.held.values():
            for layer in pages:
                for page in layer:
                    for row in page.rows:
                        seen[id(row)] = row
        parts = [part for row in seen.values() for encoded in row for part in encoded]
        return sum(part.nbytes for part in parts if isinstance(part, np.ndarray))

    def prefill(self, seq, layer, q, k, v, chunk):
        self._sequence(seq)
        self._layer(layer)
        self._queries(q)
        self._same_rows(k, v)
        if len(q) != len(k):
            raise ValueError("as many queries as keys")
        if len(k):
            self._room(seq, layer, len(k))
        outs = [np.zeros((0, *q.shape[1:]), q.dtype)]
        for start in range(0, len(q), chunk):
            stop = min(start + chunk, len(q))
            self.append(seq, layer, k[start:stop], v[start:stop])
            outs.append(self.attend(seq, layer, q[start:stop]))
        return np.concatenate(outs)

    def _paginate(self, rows):
        starts = range(0, len(rows), self.page_size)
        return [Page(rows[i : i + self.page_size]) for i in starts]

    def _decode(self, rows):
        pairs = [(self.codec.decode(key), self.codec.decode(value)) for key, value in rows]
        if not pairs:
            empty = np.zeros((0, self.heads, self.width), self.dtype or np.float64)
            return empty, empty
        keys, values = zip(*pairs, strict=True)
        return np.stack(keys), np.stack(values)

    def _count(self, seq, layer):
        return sum(len(page.rows) for page in self.held[seq][layer])

    def _root(self, page):
        return getattr(page, "twin", page)

    def _holders(self, layer, page):
        """How many sequences hold this page, or a shortened twin of it."""
        root = self._root(page)
        return sum(
            any(self._root(other) is root for other in pages[layer]) for pages in self.held.values()
        )

    def _free(self, layer):
        pages = (page for held in self.held.values() for page in held[layer])
        return self.num_pages - len({id(self._root(page)) for page in pages})

    def _room(self, seq, layer, n):
        pages = self.held[seq][layer]
        slack = self.page_size * len(pages) - self._count(seq, layer)
        needed = -(-max(0, n - slack) // self.page_size)
        if slack and self._holders(layer, pages[-1]) > 1:
            needed += 1
        if needed > self._free(layer):
            raise MemoryError(f"{needed} pages needed")

    def _whole(self, value):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError("a whole number is needed")
        return int(value)

    def _sequence(self, seq):
        if isinstance(seq, bool) or seq not in self.held:
            raise KeyError(seq)
        return self.held[seq]

    def _layer(self, layer):
        if self._whole(layer) not in range(self.layers):
            raise ValueError("no such layer")

    def _floats(self, x):
        if not isinstance(x, np.ndarray) or x.dtype.name not in ("float32", "float64"):
            raise TypeError("float32 or float64 arrays only")
        if x.ndim != 3 or x.shape[2] != self.width:
            raise ValueError("shape (n, heads, width) is needed")

    def _queries(self, q):
        self._floats(q)
        if not q.shape[1] or q.shape[1] % self.heads:
            raise ValueError("query heads must be a multiple of the kv heads")

    def _same_rows(self, k, v):
        self._floats(k)
        self._floats(v)
        if k.shape != v.shape or k.shape[1] != self.heads:
            raise ValueError("k and v must have one shape (n, kv heads, width)")
        if k.dtype != v.dtype or (self.dtype and self.dtype != k.dtype):
            raise TypeError("one dtype a cache")


def make_cache(kind, *, num_layers, num_kv_heads, head_dim, block_size, num_blocks, bits=None):
    """A cache of this kind."""
    by_position = {"dense": True, "quantized": True, "paged": False, "paged_quantized": False}
    if kind not in by_position:
        raise ValueError(f"unknown kind {kind!r}")
    sizes = (num_layers, num_kv_heads, head_dim, block_size, num_blocks)
    if any(isinstance(s, bool) or not isinstance(s, int) or s < 1 for s in sizes):
        raise ValueError("sizes are positive ints")
    if "quantized" in kind:
        if bits not in (8, 4):
            raise ValueError("8 or 4 bits")
        codec = MinMax(bits)
    else:
        codec = Plain()
    return Cache(codec, *sizes, by_position[kind])


def chunked_prefill(cache, seq, layer, q, k, v, chunk):
    """Append and attend, chunk by chunk."""
    if isinstance(chunk, bool) or not isinstance(chunk, int | np.integer) or chunk <= 0:
        raise ValueError("chunk must be a positive int")
    return cache.prefill(seq, layer, q, k, v, chunk)


def max_context(spec, gpu_bytes, *, utilization, weight_bytes, reserve_bytes):
    """Exact fractions, then one floor."""
    if utilization <= 0 or utilization > 1:
        raise ValueError("utilization is a share")
    if gpu_bytes < 0 or weight_bytes < 0 or reserve_bytes < 0:
        raise ValueError("negative bytes")
    if not {"num_layers", "num_kv_heads", "head_dim", "bits"}.issubset(spec):
        raise ValueError("the specification is not whole")
    elements = 2 * spec["num_layers"] * spec["num_kv_heads"] * spec["head_dim"]
    if elements <= 0 or spec["bits"] <= 0:
        raise ValueError("the specification is empty")
    a_token = Fraction(elements * spec["bits"], 8)
    budget = Fraction(utilization) * gpu_bytes - weight_bytes - reserve_bytes
    terms = {"bytes_per_token": float(a_token), "budget_bytes": float(budget)}
    return max(0, int(budget // a_token)), terms
