"""KV caches, written for reading.

Every sequence keeps its own rows, layer by layer. Room is a separate matter: a sequence holds page
numbers, forks hold the same ones, and a write to a page that others hold takes a new number.
"""

import math

import numpy as np


class Sequence:
    def __init__(self, num_layers):
        self.keys = [[] for _ in range(num_layers)]
        self.values = [[] for _ in range(num_layers)]
        self.pages = []

    def count(self, layer):
        return len(self.keys[layer])

    def length(self):
        return min(len(rows) for rows in self.keys)


class Cache:
    def __init__(self, num_layers, num_kv_heads, head_dim, page_size, num_pages, bits):
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.page_size = page_size
        self.num_pages = num_pages
        self.bits = bits
        self.sequences = {}
        self.last_number = 0
        self.last_page = 0
        self.dtype = None

    # --- sequences ---------------------------------------------------------

    def add(self):
        self.last_number += 1
        self.sequences[self.last_number] = Sequence(self.num_layers)
        return self.last_number

    def fork(self, seq):
        parent = self.find(seq)
        number = self.add()
        child = self.sequences[number]
        child.keys = [list(rows) for rows in parent.keys]
        child.values = [list(rows) for rows in parent.values]
        child.pages = list(parent.pages)
        return number

    def free(self, seq):
        self.find(seq)
        del self.sequences[seq]

    def length(self, seq):
        return self.find(seq).length()

    def truncate(self, seq, n):
        sequence = self.find(seq)
        check_int(n)
        if n < 0 or n > sequence.length():
            raise ValueError("n must be between 0 and the length")
        for layer in range(self.num_layers):
            del sequence.keys[layer][n:]
            del sequence.values[layer][n:]
        del sequence.pages[math.ceil(n / self.page_size) :]

    def keep(self, seq, indices):
        sequence = self.find(seq)
        indices = [check_int(i) for i in indices]
        if len(set(indices)) != len(indices):
            raise ValueError("an index appears twice")
        if any(i < 0 or i >= sequence.length() for i in indices):
            raise ValueError("an index is outside the sequence")
        # Rewriting takes pages of our own; those that only we hold can be used again.
        needed = math.ceil(len(indices) / self.page_size)
        own = [page for page in sequence.pages if self.holders(page) == 1]
        if needed > self.free_pages() + len(own):
            raise MemoryError("no room to reorder")
        for layer in range(self.num_layers):
            sequence.keys[layer] = [sequence.keys[layer][i] for i in indices]
            sequence.values[layer] = [sequence.values[layer][i] for i in indices]
        sequence.pages = own[:needed]
        while len(sequence.pages) < needed:
            sequence.pages.append(self.new_page())

    # --- rows --------------------------------------------------------------

    def append(self, seq, layer, k, v):
        sequence = self.find(seq)
        self.check_layer(layer)
        self.check_rows(k, v)
        if len(k) == 0:
            raise ValueError("no rows")
        self.make_room(sequence, layer, len(k))
        self.dtype = k.dtype
        for i in range(len(k)):
            sequence.keys[layer].append(self.encode(k[i]))
            sequence.values[layer].append(self.encode(v[i]))

    def view(self, seq, layer):
        sequence = self.find(seq)
        self.check_layer(layer)
        return self.decode(sequence.keys[layer]), self.decode(sequence.values[layer])

    def attend(self, seq, layer, q):
        sequence = self.find(seq)
        self.check_layer(layer)
        self.check_queries(q)
        if len(q) > sequence.count(layer):
            raise ValueError("more queries than positions")
        k, v = self.view(seq, layer)
        group = q.shape[1] // self.num_kv_heads
        out = np.zeros(q.shape, q.dtype)
        for i in range(len(q)):
            visible = len(k) - len(q) + i + 1
            for h in range(q.shape[1]):
                scores = k[:visible, h // group] @ q[i, h] / np.sqrt(self.head_dim)
                weights = np.exp(scores - scores.max())
                out[i, h] = weights @ v[:visible, h // group] / weights.sum()
        return out

    def nbytes(self):
        total = 0
        for sequence in self.sequences.values():
            for layer in range(self.num_layers):
                for row in sequence.keys[layer] + sequence.values[layer]:
                    total += sum(part.nbytes for part in row)
        return total

    # --- quantisation ------------------------------------------------------

    def encode(self, row):
        if self.bits is None:
            return (row.copy(),)
        top = 2 ** (self.bits - 1) - 1
        scale = np.abs(row).max(axis=1, keepdims=True) / top
        scale = np.where(scale == 0, 1, scale).astype(np.float32)
        codes = np.clip(np.rint(row / scale.astype(row.dtype)), -top, top).astype(np.int8)
        if self.bits == 4:
            codes = (codes + 8).astype(np.uint8)
            if self.head_dim % 2 == 1:
                codes = np.pad(codes, ((0, 0), (0, 1)))
            codes = codes[:, 0::2] * 16 + codes[:, 1::2]
        return codes, scale

    def decode(self, rows):
        shape = (len(rows), self.num_kv_heads, self.head_dim)
        out = np.zeros(shape, self.dtype or np.float64)
        for i, row in enumerate(rows):
            if self.bits is None:
                out[i] = row[0]
                continue
            codes, scale = row
            if self.bits == 4:
                pairs = np.stack([codes // 16, codes % 16], axis=2)
                codes = pairs.reshape(self.num_kv_heads, -1)[:, : self.head_dim].astype(int) - 8
            out[i] = codes.astype(self.dtype) * scale.astype(self.dtype)
        return out

    # --- room --------------------------------------------------------------

    def holders(self, page):
        return sum(page in sequence.pages for sequence in self.sequences.values())

    def free_pages(self):
        held = {page for sequence in self.sequences.values() for page in sequence.pages}
        return self.num_pages - len(held)

    def new_page(self):
        self.last_page += 1
        return self.last_page

    def make_room(self, sequence, layer, n):
        start = sequence.count(layer)
        needed = math.ceil((start + n) / self.page_size)
        touched = range(start // self.page_size, min(needed, len(sequence.pages)))
        shared = [i for i in touched if self.holders(sequence.pages[i]) > 1]
        missing = max(0, needed - len(sequence.pages))
        if len(shared) + missing > self.free_pages():
            raise MemoryError("the pool is exhausted")
        for i in shared:
            sequence.pages[i] = self.new_page()
        for _ in range(missing):
            sequence.pages.append(self.new_page())

    # --- checks ------------------------------------------------------------

    def find(self, seq):
        if seq not in self.sequences:
            raise KeyError(seq)
        return self.sequences[seq]

    def check_layer(self, layer):
        check_int(layer)
        if layer < 0 or layer >= self.num_layers:
            raise ValueError("no such layer")

    def check_rows(self, k, v):
        check_array(k)
        check_array(v)
        if k.shape != v.shape or k.shape[1:] != (self.num_kv_heads, self.head_dim):
            raise ValueError("k and v must have shape (n, kv heads, head_dim)")
        if k.dtype != v.dtype:
            raise TypeError("k and v must have one dtype")

    def check_queries(self, q):
        check_array(q)
        if q.shape[2] != self.head_dim or q.shape[1] == 0 or q.shape[1] % self.num_kv_heads != 0:
            raise ValueError("q must have shape (n, multiple of kv heads, head_dim)")


def check_int(value):
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError("an int is needed")
    return int(value)


def check_array(x):
    if not isinstance(x, np.ndarray) or x.dtype not in (np.float32, np.float64):
        raise TypeError("a float32 or float64 array is needed")
    if x.ndim != 3:
        raise ValueError("three axes are needed")


def make_cache(kind, *, num_layers, num_kv_heads, head_dim, block_size, num_blocks, bits=None):
    if kind not in ("dense", "paged", "quantized", "paged_quantized"):
        raise ValueError("unknown kind")
    for size in (num_layers, num_kv_heads, head_dim, block_size, num_blocks):
        if check_int(size) < 1:
            raise ValueError("sizes must be positive")
    if kind in ("dense", "paged"):
        bits = None
    elif bits not in (4, 8):
        raise ValueError("bits must be 4 or 8")
    if kind in ("dense", "quantized"):
        block_size, num_blocks = 1, block_size * num_blocks
    return Cache(num_layers, num_kv_heads, head_dim, block_size, num_blocks, bits)


def chunked_prefill(cache, seq, layer, q, k, v, chunk):
    if check_int(chunk) < 1:
        raise ValueError("chunk must be positive")
    sequence = cache.find(seq)
    cache.check_layer(layer)
    cache.check_queries(q)
    cache.check_rows(k, v)
    if len(q) != len(k):
        raise ValueError("q and k must have the same length")
    out = np.zeros(q.shape, q.dtype)
    if len(k) > 0:
        cache.make_room(sequence, layer, len(k))
    for start in range(0, len(q), chunk):
        stop = start + chunk
        cache.append(seq, layer, k[start:stop], v[start:stop])
        out[start:stop] = cache.attend(seq, layer, q[start:stop])
    return out


def max_context(spec, gpu_bytes, *, utilization, weight_bytes, reserve_bytes):
    if utilization <= 0 or utilization > 1:
        raise ValueError("utilization must be in (0, 1]")
    if min(spec[name] for name in ("num_layers", "num_kv_heads", "head_dim", "bits")) < 1:
        raise ValueError("the sizes of the model must be positive")
    if gpu_bytes < 0 or weight_bytes < 0 or reserve_bytes < 0:
        raise ValueError("bytes must not be negative")
    elements = 2 * spec["num_layers"] * spec["num_kv_heads"] * spec["head_dim"]
    bytes_per_token = elements * spec["bits"] / 8
    budget = utilization * gpu_bytes - weight_bytes - reserve_bytes
    tokens = max(0, math.floor(budget / bytes_per_token))
    return tokens, {"bytes_per_token": bytes_per_token, "budget_bytes": budget}
