"""KV caches on plain bytes: a position is a record of fixed length, a page a bytearray of records.

Layers have books of their own: Book maps page numbers to bytearrays and counts who uses them.
A dense layer is a book in which every sequence has one page that grows.
"""

import numbers
from collections import defaultdict

import numpy as np


def whole(value, low, name):
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an int")
    if value < low:
        raise ValueError(f"{name} must be >= {low}")
    return int(value)


def ceil_div(a, b):
    return (a + b - 1) // b


class Record:
    """Turns k, v (n,G,D) into n byte records and back."""

    def __init__(self, heads, dim, bits):
        self.heads, self.dim, self.bits = heads, dim, bits

    def stride(self, dtype):
        if self.bits is None:
            return 2 * self.heads * self.dim * dtype.itemsize
        return 2 * self.heads * (ceil_div(self.bits * self.dim, 8) + 4)

    def write(self, k, v):
        both = np.stack((k, v), axis=1)  # (n, 2, G, D)
        if self.bits is None:
            return both.tobytes()
        largest = 127 if self.bits == 8 else 7
        both = both.astype(np.float64)
        scale = np.abs(both).max(axis=3) / largest
        scale = scale.astype("<f4")
        divisor = scale.astype(np.float64)
        divisor[divisor == 0] = np.inf
        code = np.rint(both / divisor[..., None]).clip(-largest, largest).astype(np.int8)
        if self.bits == 8:
            body = code.view(np.uint8)
        else:
            low = code[..., 0::2] & 15
            high = np.zeros_like(low)
            high[..., : self.dim // 2] = code[..., 1::2] & 15
            body = (low | (high << 4)).view(np.uint8)
        tail = np.ascontiguousarray(scale[..., None]).view(np.uint8)
        return np.concatenate((body, tail), axis=3).tobytes()

    def read(self, data, dtype):
        if self.bits is None:
            both = np.frombuffer(data, dtype).reshape(-1, 2, self.heads, self.dim)
            return both[:, 0].copy(), both[:, 1].copy()
        raw = np.frombuffer(data, np.uint8).reshape(
            -1, 2, self.heads, ceil_div(self.bits * self.dim, 8) + 4
        )
        scale = np.ascontiguousarray(raw[..., -4:]).view("<f4")
        body = np.ascontiguousarray(raw[..., :-4]).view(np.int8)
        if self.bits == 4:
            pairs = np.empty((*body.shape, 2), np.int8)
            pairs[..., 0] = (body << 4) >> 4  # arithmetic shifts bring the sign back
            pairs[..., 1] = body >> 4
            body = pairs.reshape(*body.shape[:-1], 2 * body.shape[-1])[..., : self.dim]
        both = body.astype(dtype) * scale.astype(dtype)
        return both[:, 0].copy(), both[:, 1].copy()


class Book:
    """The pages of one layer."""

    def __init__(self, block, blocks, paged):
        self.paged = paged
        self.block = block if paged else block * blocks
        self.limit = blocks if paged else block * blocks
        self.pages, self.users = {}, {}
        self.tables, self.lengths = defaultdict(list), defaultdict(int)
        self.fresh = 0

    def used(self):
        return len(self.pages) if self.paged else sum(self.lengths.values())

    def price(self, seq, n):
        """Room that n more positions take."""
        if not self.paged:
            return n
        have = self.lengths[seq]
        pages = ceil_div(have + n, self.block) - len(self.tables[seq])
        return pages + (have % self.block > 0 and self.users[self.tables[seq][-1]] > 1)

    def demand(self, price):
        if self.used() + price > self.limit:
            raise MemoryError("cache full")

    def open(self, content=b""):
        self.fresh += 1
        self.pages[self.fresh] = bytearray(content)
        self.users[self.fresh] = 1
        return self.fresh

    def close(self, page):
        self.users[page] -= 1
        if not self.users[page]:
            del self.users[page], self.pages[page]

    def extend(self, seq, data, stride):
        table, have = self.tables[seq], self.lengths[seq]
        n = len(data) // stride
        used = have % self.block
        if used:
            last = table[-1]
            if self.users[last] > 1:
                table[-1] = self.open(self.pages[last][: used * stride])
                self.close(last)
            else:
                del self.pages[last][used * stride :]
            gap = (self.block - used) * stride
            self.pages[table[-1]] += data[:gap]
            data = data[gap:]
        full = self.block * stride
        for at in range(0, len(data), full):
            table.append(self.open(data[at : at + full]))
        self.lengths[seq] = have + n

    def content(self, seq, stride):
        data = b"".join(self.pages[page] for page in self.tables[seq])
        return data[: self.lengths[seq] * stride]

    def share(self, old, new):
        if not self.paged:
            self.demand(self.lengths[old])
        self.lengths[new] = self.lengths[old]
        for page in self.tables[old]:
            if self.paged:
                self.users[page] += 1
                self.tables[new].append(page)
            else:
                self.tables[new].append(self.open(self.pages[page]))

    def shorten(self, seq, n):
        table = self.tables[seq]
        while len(table) > ceil_div(n, self.block):
            self.close(table.pop())
        self.lengths[seq] = n

    def own(self, seq):
        return sum(self.users[page] == 1 for page in self.tables[seq])


class ByteCache:
    def __init__(self, record, books):
        self.record, self.books = record, books
        self.alive, self.numbers, self.dtype = set(), 0, None

    def locate(self, seq, layer):
        self.known(seq)
        if whole(layer, 0, "layer") >= len(self.books):
            raise ValueError("layer out of range")
        return self.books[layer]

    def known(self, seq):
        if seq not in self.alive:
            raise KeyError(seq)

    def check(self, x, heads=None):
        if not isinstance(x, np.ndarray) or x.dtype.char not in "fd":
            raise TypeError("not a float32 or float64 array")
        if x.ndim != 3 or x.shape[2] != self.record.dim:
            raise ValueError("shape")
        if heads is not None and x.shape[1] != heads:
            raise ValueError("kv heads")
        if x.shape[1] < 1 or x.shape[1] % self.record.heads:
            raise ValueError("heads")

    def check_pair(self, k, v):
        self.check(k, self.record.heads)
        self.check(v, self.record.heads)
        if k.shape != v.shape:
            raise ValueError("k and v differ in shape")
        if k.dtype != v.dtype or (self.dtype is not None and k.dtype != self.dtype):
            raise TypeError("dtype")

    def add(self):
        seq = self.numbers
        self.numbers += 1
        self.alive.add(seq)
        return seq

    def append(self, seq, layer, k, v):
        book = self.locate(seq, layer)
        self.check_pair(k, v)
        if not len(k):
            raise ValueError("nothing to append")
        book.demand(book.price(seq, len(k)))
        book.extend(seq, self.record.write(k, v), self.record.stride(k.dtype))
        self.dtype = k.dtype

    def view(self, seq, layer):
        book = self.locate(seq, layer)
        dtype = self.dtype or np.dtype(np.float32)
        return self.record.read(book.content(seq, self.record.stride(dtype)), dtype)

    def attend(self, seq, layer, q):
        self.locate(seq, layer)
        self.check(q)
        k, v = self.view(seq, layer)
        first = len(k) - len(q)
        if first < 0:
            raise ValueError("more queries than positions")
        out = np.empty(q.shape, q.dtype)
        ratio = q.shape[1] // k.shape[1]
        for h in range(q.shape[1]):
            keys, values = k[:, h // ratio], v[:, h // ratio]
            for a in range(0, len(q), 96):
                rows = q[a : a + 96, h] / np.sqrt(q.shape[2], dtype=q.dtype)
                sees = first + a + len(rows)
                weight = np.einsum("nd,sd->ns", rows, keys[:sees], optimize=True)
                for i in range(len(rows)):
                    row = weight[i]
                    row[first + a + i + 1 :] = -np.inf
                    row -= row.max()
                np.exp(weight, out=weight)
                weight /= weight.sum(axis=1)[:, None]
                out[a : a + 96, h] = weight @ values[:sees]
        return out

    def fork(self, seq):
        self.known(seq)
        for book in self.books:
            if not book.paged:
                book.demand(book.lengths[seq])
        new = self.add()
        for book in self.books:
            book.share(seq, new)
        return new

    def keep(self, seq, indices):
        self.known(seq)
        length = self.length(seq)
        picks = [whole(i, 0, "index") for i in indices]
        if len(set(picks)) < len(picks):
            raise ValueError("an index occurs twice")
        if picks and max(picks) >= length:
            raise ValueError("an index is out of range")
        for book in self.books:
            if book.paged:
                book.demand(ceil_div(len(picks), book.block) - book.own(seq))
        for book in self.books:
            if not book.lengths[seq]:
                continue
            stride = self.record.stride(self.dtype)
            data = book.content(seq, stride)
            book.shorten(seq, 0)
            book.extend(seq, b"".join(data[i * stride : (i + 1) * stride] for i in picks), stride)

    def truncate(self, seq, n):
        self.known(seq)
        if whole(n, 0, "n") > self.length(seq):
            raise ValueError("n is larger than the sequence")
        for book in self.books:
            book.shorten(seq, n)

    def free(self, seq):
        self.known(seq)
        self.alive.remove(seq)
        for book in self.books:
            book.shorten(seq, 0)
            del book.tables[seq], book.lengths[seq]

    def length(self, seq):
        self.known(seq)
        return min(book.lengths[seq] for book in self.books)

    def nbytes(self):
        total = 0
        for book in self.books:
            total += sum(map(len, book.pages.values()))
            total += 8 * len(book.users) + 8 * sum(map(len, book.tables.values()))
        return total


def make_cache(kind, *, num_layers, num_kv_heads, head_dim, block_size, num_blocks, bits=None):
    """A cache with add, append, attend, view, fork, keep, truncate, free, length and nbytes."""
    if kind in ("quantized", "paged_quantized"):
        if bits is None or bits not in (4, 8):
            raise ValueError("bits must be 4 or 8")
    elif kind in ("dense", "paged"):
        if bits is not None:
            raise ValueError("bits without quantisation")
    else:
        raise ValueError(f"unknown kind {kind!r}")
    block, blocks = whole(block_size, 1, "block_size"), whole(num_blocks, 1, "num_blocks")
    record = Record(whole(num_kv_heads, 1, "num_kv_heads"), whole(head_dim, 1, "head_dim"), bits)
    books = [
        Book(block, blocks, "paged" in kind) for _ in range(whole(num_layers, 1, "num_layers"))
    ]
    return ByteCache(record, books)


def chunked_prefill(cache, seq, layer, q, k, v, chunk):
    """Append k, v (T,G,D) and return the attention of q (T,H,D), `chunk` positions at a time."""
    book = cache.locate(seq, layer)
    whole(chunk, 1, "chunk")
    cache.check(q)
    cache.check_pair(k, v)
    if len(q) != len(k):
        raise ValueError("q and k differ in length")
    if len(q):
        book.demand(book.price(seq, len(q)))  # from here on nothing can fail
    pieces = [np.empty((0, *q.shape[1:]), q.dtype)]
    for a in range(0, len(q), chunk):
        cache.append(seq, layer, k[a : a + chunk], v[a : a + chunk])
        pieces.append(cache.attend(seq, layer, q[a : a + chunk]))
    return np.concatenate(pieces)


def max_context(spec, gpu_bytes, *, utilization, weight_bytes, reserve_bytes):
    """(tokens, terms): how many tokens of cache fit, and the numbers behind it."""
    token_bits = 2
    for key in ("num_layers", "num_kv_heads", "head_dim", "bits"):
        if key not in spec:
            raise ValueError(f"spec has no {key}")
        token_bits *= whole(spec[key], 1, key)
    for amount in (gpu_bytes, weight_bytes, reserve_bytes):
        if not amount >= 0:
            raise ValueError("negative bytes")
    if not 0 < utilization <= 1:
        raise ValueError("utilization")
    terms = {"bytes_per_token": token_bits / 8, "usable_bytes": utilization * gpu_bytes}
    terms["budget_bytes"] = terms["usable_bytes"] - weight_bytes - reserve_bytes
    if terms["budget_bytes"] <= 0:
        return 0, terms
    return int(terms["budget_bytes"] // terms["bytes_per_token"]), terms
