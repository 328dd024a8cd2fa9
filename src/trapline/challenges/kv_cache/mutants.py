"""The bugs that the traps are named after, as edits of the gold solution."""

from trapline.arena.certify.mutate import Mutant, edit

MUTANTS: list[Mutant] = [
    # --- attention over the cache
    edit(
        "gqa-by-tiling",
        (
            "q.reshape(n, kv_heads, heads // kv_heads, width).transpose(1, 2, 0, 3)",
            "q.reshape(n, heads // kv_heads, kv_heads, width).transpose(2, 1, 0, 3)",
        ),
        ("out.transpose(2, 0, 1, 3)", "out.transpose(2, 1, 0, 3)"),
    ),
    edit(
        "causal-mask-upper-left",
        ("np.arange(n)[:, None] + (positions - n)", "np.arange(n)[:, None]"),
    ),
    edit(
        "no-causal-mask",
        ("np.arange(positions) > last_visible", "np.arange(positions) > positions"),
    ),
    edit("query-blind-to-itself", ("np.arange(positions) > last", "np.arange(positions) >= last")),
    edit("scale-missing", (" * width**-0.5", "")),
    edit("softmax-overflow", ("    scores -= scores.max(axis=-1, keepdims=True)\n", "")),
    edit("keys-and-values-swapped", ("*self.view(seq, layer))", "*self.view(seq, layer)[::-1])")),
    edit(
        "layout-disagreement",
        (
            "k.transpose(1, 2, 0)[:, None]",
            "k.reshape(kv_heads, positions, -1).swapaxes(1, 2)[:, None]",
        ),
        ("v.transpose(1, 0, 2)[:, None]", "v.reshape(kv_heads, positions, -1)[:, None]"),
    ),
    edit(
        "attend-uses-the-shortest-layer",
        (
            "attention(q, *self.view(seq, layer))",
            "attention(q, *(x[: self.length(seq)] for x in self.view(seq, layer)))",
        ),
    ),
    edit("more-queries-than-positions", ("if len(q) > self.counts[seq][layer]:", "if False:")),
    edit(
        "attend-in-half-precision",
        (
            "weights = np.exp(scores)",
            "weights = np.exp(scores.astype(np.float16)).astype(scores.dtype)",
        ),
    ),
    # --- appending
    edit(
        "append-one-token-only",
        ("self.codec.encode(k) + self.codec.encode(v)", "self._first(k) + self._first(v)"),
        (
            "    def _register(",
            "    def _first(self, rows):\n"
            "        return self.codec.encode(np.repeat(rows[:1], len(rows), axis=0))\n\n"
            "    def _register(",
        ),
    ),
    edit(
        "append-across-pages",
        ("table[positions // self.page_size]", "table[positions[:1] // self.page_size]"),
    ),
    edit("layers-overwrite-each-other", ("pool[layer, pages, slots] =", "pool[0, pages, slots] =")),
    edit(
        "one-counter-for-all-layers",
        (
            "self.counts[seq][layer] = start + len(k)",
            "self.counts[seq] = [start + len(k)] * self.num_layers",
        ),
    ),
    edit("length-of-the-first-layer", ("min(self.counts[seq])", "self.counts[seq][0]")),
    edit(
        "strided-input",
        ("self.codec.encode(k) +", 'self.codec.encode(np.ravel(k, order="K").reshape(k.shape)) +'),
    ),
    edit(
        "float64-stored-as-float32",
        ("        return (x,)\n", "        return (x.astype(np.float32),)\n"),
    ),
    edit("float32-comes-back-wider", ("fields[0].astype(dtype)", "fields[0].astype(np.float64)")),
    edit(
        "narrow-rows-are-stretched",
        ("if rows.shape[1:] != (self.heads, self.width):", "if False:"),
    ),
    edit("one-value-for-many-keys", ("if len(k) != len(v):", "if False:")),
    edit(
        "integer-rows-accepted",
        ("if not isinstance(x, np.ndarray) or x.dtype not in FLOATS:", "if False:"),
        ("or (self.dtype is not None and self.dtype != k.dtype)", ""),
    ),
    edit(
        "mixed-dtypes-accepted",
        ("if k.dtype != v.dtype or (self.dtype", "if (self.dtype"),
    ),
    edit("rank-not-checked", ("if x.ndim != 3:", "if False:")),
    edit("negative-layer", ("not 0 <= layer < self.num_layers", "not layer < self.num_layers")),
    # --- sequences
    edit(
        "sequences-share-a-counter",
        ("self._register([0] * self.num_layers)", "self._register(self.zeros)"),
        (
            "        self.counts: dict[int, list[int]] = {}\n",
            "        self.counts: dict[int, list[int]] = {}\n"
            "        self.zeros = [0] * num_layers\n",
        ),
    ),
    edit(
        "two-caches-share-state",
        ("self.counts: dict[int, list[int]] = {}", "self.counts = SHARED"),
        ("KINDS = (", "SHARED = {}\nKINDS = ("),
    ),
    edit(
        "freed-sequence-answers",
        (
            "        self._forget(seq)\n        del self.counts[seq]\n",
            "        self.counts[seq] = [0] * self.num_layers\n",
        ),
    ),
    edit(
        "unknown-sequence-created",
        (
            '            raise KeyError(f"no sequence {seq!r}")\n',
            "            self.counts[seq] = [0] * self.num_layers\n            self._open(seq)\n",
        ),
    ),
    edit(
        "sequence-number-reused",
        (
            "seq, self.next_seq = self.next_seq, self.next_seq + 1",
            "seq = next(i for i in range(len(self.counts) + 1) if i not in self.counts)",
        ),
    ),
    # --- pages: order, room, release
    edit(
        "pages-read-in-pool-order",
        (
            "self.tables[seq][: self._pages_for(count)]",
            "sorted(self.tables[seq][: self._pages_for(count)])",
        ),
    ),
    edit(
        "page-size-taken-for-a-power-of-two",
        ("positions % self.page_size", "positions & (self.page_size - 1)"),
    ),
    edit(
        "page-numbers-wrap",
        (
            "table = np.array(self.tables[seq], dtype=np.int64)",
            "table = np.array(self.tables[seq], dtype=np.int64).astype(np.uint8)",
        ),
    ),
    edit(
        "reads-beyond-the-end",
        (
            "attention(q, *self.view(seq, layer))",
            "attention(q, *(self.view(seq, layer) if isinstance(self, DenseCache) "
            "else self._whole_pages(seq, layer)))",
        ),
        (
            "    def fork(self, seq: int) -> int:",
            "    def _whole_pages(self, seq, layer):\n"
            "        counts, whole = self.counts, len(self.tables[seq]) * self.page_size\n"
            "        self.counts = {seq: [whole] * self.num_layers}\n"
            "        rows = self.view(seq, layer)\n"
            "        self.counts = counts\n"
            "        return rows\n\n"
            "    def fork(self, seq: int) -> int:",
        ),
    ),
    edit(
        "full-page-takes-another",
        ("return -(-n // self.page_size)", "return n // self.page_size + 1"),
    ),
    edit(
        "page-for-every-append",
        ("missing = max(0, needed - len(table))", "missing = self._pages_for(n)"),
    ),
    edit(
        "page-for-every-layer",
        ("missing = max(0, needed - len(table))", "missing = needed - self._pages_for(start)"),
    ),
    edit("pool-limit-ignored", ("if n > self._capacity_left(layer):", "if False:")),
    edit(
        "exhaustion-is-another-error",
        (
            '            raise MemoryError(f"{len(shared) + missing} pages',
            '            raise IndexError(f"{len(shared) + missing} pages',
        ),
    ),
    edit(
        "failed-append-keeps-pages",
        (
            "if len(shared) + missing > len(self.free_pages):",
            "if len(shared) > len(self.free_pages):",
        ),
        (
            "        page = self.free_pages.pop()\n",
            "        if not self.free_pages:\n            raise MemoryError\n"
            "        page = self.free_pages.pop()\n",
        ),
        (
            "        table.extend(self._take() for _ in range(missing))\n",
            "        for _ in range(missing):\n            table.append(self._take())\n",
        ),
    ),
    edit(
        "failed-append-half-written",
        (
            "        self._reserve(seq, layer, len(k))\n        self._fix_dtype(k.dtype)\n",
            "        if len(k) > 1:\n"
            "            for i in range(len(k)):\n"
            "                self.append(seq, layer, k[i : i + 1], v[i : i + 1])\n"
            "            return\n"
            "        self._reserve(seq, layer, len(k))\n        self._fix_dtype(k.dtype)\n",
        ),
    ),
    edit(
        "refused-rows-already-written",
        (
            "        self._check_rows(k, v)\n        if len(k) == 0:",
            "        self._check_rows(k, k)\n"
            "        self._reserve(seq, layer, len(k))\n"
            "        self.counts[seq][layer] += len(k)\n"
            "        self._check_rows(k, v)\n"
            "        self.counts[seq][layer] -= len(k)\n"
            "        if len(k) == 0:",
        ),
    ),
    edit(
        "free-leaks-pages",
        (
            "        self._shrink(seq, 0)\n        self._forget(seq)\n",
            "        self._forget(seq)\n",
        ),
    ),
    edit("truncate-leaks-pages", ("        self._shrink(seq, n)\n", "")),
    edit(
        "truncate-frees-a-page-in-use", ("kept = self._pages_for(n)", "kept = n // self.page_size")
    ),
    edit(
        "keep-leaks-pages",
        ("        self._shrink(seq, start)\n", "        del self.tables[seq][fixed:]\n"),
    ),
    edit(
        "keep-needs-a-second-copy",
        ("if needed > len(self.free_pages) + own:", "if needed > len(self.free_pages):"),
    ),
    # --- forks
    edit(
        "shared-tail-written-in-place",
        ("shared = [i for i in written if self.holders[table[i]] > 1]", "shared = []"),
    ),
    edit(
        "parent-writes-without-copy",
        (
            "if self.holders[table[i]] > 1]",
            "if self.holders[table[i]] > 1\n"
            "            and seq != min(s for s, t in self.tables.items() if table[i] in t)]",
        ),
    ),
    edit(
        "copy-of-one-layer",
        ("pool[:, copy] = pool[:, page]", "pool[0, copy] = pool[0, page]"),
    ),
    edit(
        "copy-of-keys-only",
        (
            "        for pool in self.pools:\n            pool[:, copy]",
            "        for pool in self.pools[: len(self.pools) // 2]:\n            pool[:, copy]",
        ),
    ),
    edit(
        "copy-without-scales",
        (
            "        for pool in self.pools:\n            pool[:, copy]",
            "        for pool in self.pools[:: max(1, len(self.pools) // 2)]:\n"
            "            pool[:, copy]",
        ),
    ),
    edit(
        "fork-shares-the-page-table",
        ("self.tables[child] = list(self.tables[seq])", "self.tables[child] = self.tables[seq]"),
    ),
    edit(
        "fork-shares-the-length",
        ("self._register(list(self.counts[seq]))", "self._register(self.counts[seq])"),
    ),
    edit(
        "fork-not-counted",
        (
            "        for page in self.tables[child]:\n            self.holders[page] += 1\n",
            "",
        ),
    ),
    edit("free-takes-shared-pages", ("if self.holders[page] == 0:", "if self.holders[page] >= 0:")),
    edit(
        "copied-page-stays-held",
        ("        self._release(page)\n        return copy\n", "        return copy\n"),
    ),
    edit(
        "fork-copies-pages",
        (
            "        self.tables[child] = list(self.tables[seq])\n"
            "        for page in self.tables[child]:\n            self.holders[page] += 1\n",
            "        if len(self.tables[seq]) > len(self.free_pages):\n"
            "            raise MemoryError\n"
            "        for page in self.tables[seq]:\n            self.holders[page] += 1\n"
            "        self.tables[child] = [self._own_copy(page) for page in self.tables[seq]]\n",
        ),
    ),
    edit(
        "shared-pages-counted-twice",
        (
            "if len(shared) + missing > len(self.free_pages):",
            "if len(shared) + missing > self.num_pages - sum(map(len, self.tables.values())):",
        ),
    ),
    edit(
        "copy-not-counted",
        ("if len(shared) + missing > len(self.free_pages):", "if missing > len(self.free_pages):"),
    ),
    edit("sole-owner-copies", ("if self.holders[table[i]] > 1]", "if self.holders[table[i]] > 0]")),
    edit(
        "full-pages-taken-for-immutable",
        (
            "if self.holders[table[i]] > 1]",
            "if self.holders[table[i]] > 1\n"
            "            and all(self.counts[s][layer] < (i + 1) * self.page_size\n"
            "            for s, t in self.tables.items() if table[i] in t)]",
        ),
    ),
    edit(
        "fork-between-layers",
        (
            "shared = [i for i in written if self.holders[table[i]] > 1]",
            "shared = [i for i in written[-1:] if self.holders[table[i]] > 1]",
        ),
    ),
    # --- keep and truncate
    edit(
        "keep-sorts-its-indices",
        ("        return indices\n", "        return np.sort(indices)\n"),
    ),
    edit("keep-in-one-layer", ("pool[:, pages, slots] = rows", "pool[0, pages, slots] = rows[0]")),
    edit(
        "keep-leaves-a-layer-ahead",
        (
            "            self.counts[seq] = [len(indices)] * self.num_layers",
            "            ahead = [count - self.length(seq) for count in self.counts[seq]]\n"
            "            self.counts[seq] = [len(indices) + more for more in ahead]",
        ),
    ),
    edit(
        "keep-overwrites-its-source",
        ("tuple(array[indices] for array", "tuple(moved(array, indices) for array"),
        (
            "def grown(",
            "def moved(array, indices):\n"
            "    array = array.copy()\n"
            "    for i, j in enumerate(indices):\n"
            "        array[i] = array[j]\n"
            "    return array[: len(indices)]\n\n\n"
            "def grown(",
        ),
    ),
    edit(
        "keep-writes-shared-pages",
        (
            "        self._shrink(seq, start)\n"
            "        self.tables[seq].extend(self._take() for _ in range(needed))\n",
            "        self._shrink(seq, len(indices))\n",
        ),
    ),
    edit(
        "keep-without-scales",
        (
            "        for pool, rows in zip(self.pools, kept, strict=True):\n",
            "        half = max(1, len(kept) // 2)\n"
            "        for pool, rows in zip(self.pools[::half], kept[::half], strict=True):\n",
        ),
    ),
    edit(
        "keep-nothing",
        ('(indices.size and indices.dtype.kind not in "iu")', 'indices.dtype.kind not in "iu"'),
    ),
    edit(
        "keep-fails-half-way",
        (
            "        if needed > len(self.free_pages) + own:\n"
            '            raise MemoryError(f"{needed} pages needed, '
            '{len(self.free_pages) + own} free")\n',
            "",
        ),
        (
            "        self._shrink(seq, start)\n",
            "        self._shrink(seq, start)\n"
            "        if needed > len(self.free_pages):\n            raise MemoryError(own)\n",
        ),
    ),
    edit("keep-twice-the-same", ("if len(np.unique(indices)) < len(indices):", "if False:")),
    edit(
        "keep-outside-the-sequence",
        (
            "if indices.size and not 0 <= indices.min() <= indices.max() < self.length(seq):",
            "if False:",
        ),
    ),
    edit(
        "truncate-in-one-layer",
        (
            "self.counts[seq] = [n] * self.num_layers",
            "self.counts[seq] = [n, *self.counts[seq][1:]]",
        ),
    ),
    edit(
        "truncate-to-nothing",
        (
            "        self._shrink(seq, n)\n",
            "        n = n or self.length(seq)\n        self._shrink(seq, n)\n",
        ),
    ),
    edit(
        "truncate-leaves-a-layer-ahead",
        (
            "        self._shrink(seq, n)\n",
            "        if n == self.length(seq):\n            return\n        self._shrink(seq, n)\n",
        ),
    ),
    edit(
        "truncate-below-zero",
        (
            "if not is_int(n) or not 0 <= n <= self.length(seq):",
            "n = n if n >= 0 else self.length(seq) + n\n        if n > self.length(seq):",
        ),
    ),
    edit(
        "truncate-beyond-the-end",
        (
            "if not is_int(n) or not 0 <= n <= self.length(seq):",
            "n = min(n, self.length(seq))\n        if n < 0:",
        ),
    ),
    # --- quantisation
    edit(
        "scales-eat-the-saving",
        ("largest = np.abs(x).max(axis=-1, keepdims=True)", "largest = np.abs(x)"),
    ),
    edit(
        "four-bits-in-a-byte",
        ("return (pack_nibbles(codes) if self.bits == 4 else codes), scale", "return codes, scale"),
        ("        if self.bits == 4:\n            codes = unpack_nibbles(codes, self.width)\n", ""),
    ),
    edit(
        "scales-not-counted",
        (
            "sum(pool.nbytes for pool in self.pools)",
            "sum(pool.nbytes for pool in self.pools[:: max(1, len(self.pools) // 2)])",
        ),
    ),
    edit(
        "nbytes-of-one-layer",
        ("sum(pool.nbytes for pool in self.pools)", "sum(pool[0].nbytes for pool in self.pools)"),
    ),
    edit(
        "scale-of-the-whole-append",
        (
            "largest = np.abs(x).max(axis=-1, keepdims=True)",
            "largest = np.abs(x).max(axis=(0, 2), keepdims=True, initial=0).repeat(len(x), 0)",
        ),
    ),
    edit(
        "scale-shared-by-heads",
        (
            "largest = np.abs(x).max(axis=-1, keepdims=True)",
            "largest = np.abs(x).max(axis=(-2, -1), keepdims=True).repeat(x.shape[1], axis=1)",
        ),
    ),
    edit(
        "scale-frozen-at-the-start",
        (
            "largest = np.abs(x).max(axis=-1, keepdims=True)\n",
            "largest = np.abs(x).max(axis=-1, keepdims=True)\n"
            "        if x.size:\n"
            '            self.first = getattr(self, "first", largest.max())\n'
            "            largest = np.full_like(largest, self.first)\n",
        ),
    ),
    edit(
        "whole-cache-requantised",
        (
            "largest = np.abs(x).max(axis=-1, keepdims=True)",
            "largest = np.abs(x).max(axis=(0, 2), keepdims=True, initial=0).repeat(len(x), 0)",
        ),
        (
            "        self._write(seq, layer, start, self.codec.encode(k) + self.codec.encode(v))\n"
            "        self.counts[seq][layer] = start + len(k)\n",
            "        old_k, old_v = self.view(seq, layer)\n"
            "        k, v = np.concatenate([old_k, k]), np.concatenate([old_v, v])\n"
            "        self._write(seq, layer, 0, self.codec.encode(k) + self.codec.encode(v))\n"
            "        self.counts[seq][layer] = len(k)\n",
        ),
    ),
    edit(
        "zero-row",
        (
            "scale = (largest / self.top).astype(np.float32)",
            "unit = np.abs(x / largest).max(axis=-1, keepdims=True)\n"
            "        scale = (unit * largest / self.top).astype(np.float32)",
        ),
    ),
    edit(
        "small-rows-vanish",
        (
            "scale = (largest / self.top).astype(np.float32)",
            "scale = np.maximum(largest / self.top, 1e-3).astype(np.float32)",
        ),
    ),
    edit("codes-cut-not-rounded", ("np.rint(x / divisor)", "np.trunc(x / divisor)")),
    edit(
        "largest-element-wraps",
        ("self.top = 2 ** (bits - 1) - 1", "self.top = 2 ** (bits - 1)"),
    ),
    edit(
        "nibbles-lose-their-sign",
        ("return (nibbles ^ 8).astype(np.int8) - np.int8(8)", "return nibbles.astype(np.int8)"),
    ),
    edit("nibbles-swapped", ("[packed & 15, packed >> 4]", "[packed >> 4, packed & 15]")),
    edit(
        "odd-width-loses-an-element",
        ("half = -(-codes.shape[-1] // 2)", "half = max(1, codes.shape[-1] // 2)"),
        (
            "high[..., : codes.shape[-1] - half] = codes[..., half:].view(np.uint8)",
            "rest = codes[..., half : 2 * half]\n"
            "    high[..., : rest.shape[-1]] = rest.view(np.uint8)",
        ),
        (
            "axis=-1)[..., :width]",
            "axis=-1)[..., :width]\n"
            "    nibbles = np.pad(nibbles, [(0, 0), (0, 0), (0, width - nibbles.shape[-1])])",
        ),
    ),
    # --- chunked prefill
    edit(
        "prefill-with-made-up-queries",
        (
            "self.attend(seq, layer, q[part])",
            "self.attend(seq, layer, np.random.standard_normal(q[part].shape))",
        ),
    ),
    edit(
        "prefill-sees-its-future",
        (
            "            self.append(seq, layer, k[part], v[part])\n",
            "            if start == 0:\n                self.append(seq, layer, k, v)\n",
        ),
    ),
    edit(
        "chunks-blind-to-earlier-ones",
        ("self.attend(seq, layer, q[part])", "attention(q[part], k[part], v[part])"),
    ),
    edit(
        "prefill-forgets-the-prefix",
        (
            "        out = np.empty(q.shape, q.dtype)\n",
            "        out = np.empty(q.shape, q.dtype)\n        self.truncate(seq, 0)\n",
        ),
    ),
    edit(
        "last-chunk-dropped",
        ("range(0, len(q), chunk)", "range(0, len(q) // chunk * chunk, chunk)"),
    ),
    edit(
        "prefill-stores-nothing",
        (
            "        out = np.empty(q.shape, q.dtype)\n",
            "        out = np.empty(q.shape, q.dtype)\n        seq = self.fork(seq)\n",
        ),
        (
            "            out[part] = self.attend(seq, layer, q[part])\n        return out\n",
            "            out[part] = self.attend(seq, layer, q[part])\n"
            "        self.free(seq)\n        return out\n",
        ),
    ),
    edit(
        "prefill-into-a-shared-page",
        (
            "        for start in range(0, len(q), chunk):\n",
            "        if isinstance(self, PagedCache):\n"
            "            self.holders = [min(count, 1) for count in self.holders]\n"
            "        for start in range(0, len(q), chunk):\n",
        ),
        (
            "pool changes nothing.\n        self._reserve(seq, layer, len(k))\n",
            "pool changes nothing.\n",
        ),
    ),
    edit(
        "prefill-half-done-when-full",
        (
            "        self._reserve(seq, layer, len(k))\n        for start in",
            "        for start in",
        ),
    ),
    edit(
        "prefill-stores-before-it-checks",
        (
            "        self._check_queries(q)\n        self._check_rows(k, v)\n",
            "        self._check_rows(k, v)\n",
        ),
    ),
    edit(
        "prefill-anywhere",
        (
            "        self._check_place(seq, layer)\n"
            "        self._check_queries(q)\n        self._check_rows",
            "        self._check_queries(q)\n        self._check_rows",
        ),
    ),
    edit("chunk-below-one", ("if not is_int(chunk) or chunk < 1:", "if not is_int(chunk):")),
    edit(
        "queries-modified",
        (
            "    scores = grouped @ k.transpose(1, 2, 0)[:, None] * width**-0.5\n",
            "    grouped *= width**-0.5\n    scores = grouped @ k.transpose(1, 2, 0)[:, None]\n",
        ),
    ),
    # --- make_cache and max_context
    edit("unknown-kind", ("if kind not in KINDS:", "if False:")),
    edit(
        "bits-not-checked",
        ("if quantised and (not is_int(bits) or bits not in (4, 8)):", "if False:"),
    ),
    edit(
        "sizes-not-checked",
        (
            "    if not all(is_int(size) and size >= 1 for size in shape):\n"
            '        raise ValueError(f"sizes must be ints ≥ 1: {shape}")\n',
            "",
        ),
    ),
    edit("context-of-keys-only", ("2 * math.prod(sizes) / 8", "math.prod(sizes) / 8")),
    edit("bits-taken-for-bytes", ("2 * math.prod(sizes) / 8", "2 * math.prod(sizes)")),
    edit(
        "four-bit-context",
        ("2 * math.prod(sizes) / 8", "2 * math.prod(sizes[:3]) * max(1, sizes[3] // 8)"),
    ),
    edit(
        "negative-context",
        ("max(0, math.floor(budget / bytes_per_token))", "math.floor(budget / bytes_per_token)"),
    ),
    edit(
        "context-rounded-up",
        ("math.floor(budget / bytes_per_token)", "round(budget / bytes_per_token)"),
    ),
    edit(
        "utilization-of-the-rest",
        (
            "utilization * gpu_bytes - weight_bytes - reserve_bytes",
            "utilization * (gpu_bytes - weight_bytes - reserve_bytes)",
        ),
    ),
    edit("reserve-ignored", ("- weight_bytes - reserve_bytes", "- weight_bytes")),
    edit(
        "specification-not-checked",
        ("if not all(is_int(size) and size >= 1 for size in sizes):", "if False:"),
    ),
    edit("negative-bytes", ("if min(gpu_bytes, weight_bytes, reserve_bytes) < 0:", "if False:")),
    edit("utilization-in-percent", ("if not 0 < utilization <= 1:", "if False:")),
    edit(
        "fraction-of-a-byte",
        ("2 * math.prod(sizes) / 8", "max(1, 2 * math.prod(sizes) // 8)"),
    ),
    # --- what a careful reader of the contract still gets wrong
    edit("finite-mask", ("= -np.inf", "= -1e9")),
    edit(
        "page-boundary-taken-for-a-new-page",
        (
            "if self.holders[table[i]] > 1]",
            "if self.holders[table[i]] > 1 and start % self.page_size]",
        ),
    ),
    edit(
        "copies-before-it-counts",
        (
            "        if len(shared) + missing > len(self.free_pages):\n",
            "        for i in shared[: len(self.free_pages)]:\n"
            "            table[i] = self._own_copy(table[i])\n"
            "        shared = [i for i in shared if self.holders[table[i]] > 1]\n"
            "        if len(shared) + missing > len(self.free_pages):\n",
        ),
    ),
    edit(
        "refused-fork-takes-room",
        (
            "        self._check_fork(seq)\n"
            "        child = self._register(list(self.counts[seq]))\n",
            "        child = self._register(list(self.counts[seq]))\n"
            "        self._check_fork(seq)\n",
        ),
    ),
    edit(
        "fork-shares-spare-room",
        (
            "[tuple(a.copy() for a in fields) for fields in self.rows[seq]]",
            "list(self.rows[seq])",
        ),
    ),
    edit(
        "keep-of-everything-does-nothing",
        (
            "        indices = self._check_indices(seq, indices)\n",
            "        indices = self._check_indices(seq, indices)\n"
            "        if np.array_equal(indices, np.arange(self.length(seq))):\n"
            "            return\n",
        ),
    ),
    edit(
        "floor-near-the-smallest-row",
        (
            "(largest / self.top).astype(np.float32)",
            "np.maximum(largest / self.top, 1e-5 * (largest > 0)).astype(np.float32)",
        ),
    ),
    edit(
        "spare-rows-beyond-the-pool",
        (
            "min(max(stop, len(held[0]) * 3 // 2), self.page_size * self.num_pages)",
            "max(stop, len(held[0]) * 2)",
        ),
    ),
    edit(
        "prefill-of-nothing-anywhere",
        (
            "        self._check_place(seq, layer)\n"
            "        self._check_queries(q)\n"
            "        self._check_rows(k, v)\n"
            "        if len(q) != len(k):",
            "        if len(q) == 0 == len(k):\n"
            "            return np.empty(q.shape, q.dtype)\n"
            "        self._check_place(seq, layer)\n"
            "        self._check_queries(q)\n"
            "        self._check_rows(k, v)\n"
            "        if len(q) != len(k):",
        ),
    ),
    edit("empty-answers-are-wider", ("return np.zeros_like(q)", "return np.zeros(q.shape)")),
    edit(
        "softmax-underflow",
        (
            "    scores[..., np.arange(positions) > last_visible] = -np.inf\n"
            "    scores -= scores.max(axis=-1, keepdims=True)\n",
            "    scores -= scores.max(axis=-1, keepdims=True)\n"
            "    scores[..., np.arange(positions) > last_visible] = -np.inf\n",
        ),
    ),
    edit(
        "specification-not-whole",
        (
            "    missing = [name for name in SPEC if name not in spec]\n",
            '    spec = {"bits": 16, "num_kv_heads": 8, **spec}\n    missing = []\n',
        ),
    ),
]

#: Why nobody who keeps to the prompt can tell these from the original: reason → places.
_REASONS: dict[str, tuple[str, ...]] = {
    "0 / 0 becomes code 0, and the scale is 0 too": ("IntCodec.encode/constant/3",),
    "the divisor of a row of zeros does not matter": ("IntCodec.encode/constant/4",),
    "numbers of sequences are the cache's own choice; they stay different": (
        "Cache.__init__/constant/1",
        "Cache._register/arithmetic/1",
        "Cache._register/constant/1",
    ),
    "an append of no positions is left open": ("Cache.append/never/1",),
    "the look-up that follows raises the same KeyError": (
        "Cache.fork/drop-statement/1",
        "Cache.keep/drop-statement/1",
        "Cache.truncate/drop-statement/1",
        "Cache.free/drop-statement/1",
        "Cache.length/drop-statement/1",
        "Cache._check_seq/never/1",
        "Cache._check_seq/bool/1",
        "Cache._check_place/drop-statement/1",
    ),
    "whether a dense fork needs room is left open": (
        "Cache.fork/drop-statement/2",
        "DenseCache._check_fork/drop-statement/1",
    ),
    "an empty table without a sequence stays behind; nobody can reach it": (
        "Cache.free/drop-statement/3",
    ),
    "all fields of a row have the same length": (
        "DenseCache._write/constant/1",
        "DenseCache._write/constant/2",
        "DenseCache._write/constant/3",
        "PagedCache._write/constant/1",
    ),
    "how fast an array grows is no part of the contract; it always has room": (
        "DenseCache._write/compare/1",
        "DenseCache._write/arithmetic/2",
        "DenseCache._write/drop-operand/2",
        "DenseCache._write/arithmetic/3",
        "DenseCache._write/drop-operand/3",
        "DenseCache._write/constant/4",
        "DenseCache._write/constant/5",
    ),
    "both sides have the same length here, whether checked or not": (
        "DenseCache._write/drop-keyword/1",
        "DenseCache._write/constant/6",
        "PagedCache._write/drop-keyword/1",
        "PagedCache._write/constant/2",
        "PagedCache._gather/drop-keyword/1",
        "PagedCache._gather/constant/3",
    ),
    "a page that is taken is set to one holder, whatever stood there": (
        "PagedCache.__init__/constant/1",
    ),
    "what a page table takes is within the slack that the prompt grants": (
        "PagedCache.nbytes/arithmetic/1",
        "PagedCache.nbytes/drop-operand/1",
        "PagedCache.nbytes/constant/1",
        "PagedCache.nbytes/drop-operand/2",
    ),
    "NumPy takes any negative size for the unknown one": ("PagedCache._read/constant/1",),
    "a list of ints becomes int64 by itself; nothing is looked up in an empty table": (
        "PagedCache._address/drop-keyword/1",
    ),
    "NumPy integers as arguments are left open": ("is_int/drop-operand/1",),
}
#: Mechanical mutants that are equivalent to the gold solution, with the reason.
EQUIVALENT: dict[str, str] = {
    f"solution.py:{place}": reason for reason, places in _REASONS.items() for place in places
}
