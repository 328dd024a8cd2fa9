"""`PooledCache`: this cache for `generate` of Hugging Face transformers, paged and quantised.

    from trapline.gold.kv_cache.huggingface import PooledCache

    cache = PooledCache(model.config, positions=4096, bits=8)
    model.generate(ids, num_beams=4, past_key_values=cache)

Beams with the same parent share its pages; the cache of transformers copies all rows at each step.
"""

from typing import Any

import torch
from torch import Tensor

from trapline.gold.arithmetic import cdiv
from trapline.gold.errors import RangeError
from trapline.gold.kv_cache.api import KVCache
from trapline.gold.kv_cache.backend import Bits
from trapline.gold.kv_cache.reorder import follow

try:
    from transformers.cache_utils import Cache, CacheLayerMixin
except ImportError as error:
    raise ImportError("this adapter needs the package `transformers`") from error


class _Pool:
    """The sequences of a batch in one `KVCache`, created with the first rows."""

    def __init__(self, layers: int, positions: int, block_size: int, **options: Any) -> None:
        self.layers, self.block_size = layers, block_size
        self.num_blocks = cdiv(positions, block_size)
        self.options = options
        self.cache: KVCache | None = None
        self.seqs: list[int] = []
        self.counts = [0] * layers

    def begin(self, rows: Tensor) -> KVCache:
        """rows (B,G,n,D)."""
        if self.cache is None:
            self.cache = KVCache(
                "paged" if self.options["bits"] is None else "paged_quantized",
                num_layers=self.layers,
                num_kv_heads=rows.shape[1],
                head_dim=rows.shape[3],
                block_size=self.block_size,
                num_blocks=self.num_blocks,
                like=rows,
                **self.options,
            )
        if not self.seqs:
            self.seqs = [self.cache.add() for _ in rows]
        elif len(self.seqs) != len(rows):
            raise RangeError(f"the cache holds {len(self.seqs)} rows, not {len(rows)}")
        return self.cache

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores new rows (B,G,n,D) of a layer and returns all of its keys and values (B,G,S,D)."""
        cache = self.begin(k)
        for seq, new_k, new_v in zip(self.seqs, k, v, strict=True):
            cache.append(seq, layer, new_k.transpose(0, 1), new_v.transpose(0, 1))
        self.counts[layer] += k.shape[2]
        keys, values = zip(*(cache.view(seq, layer) for seq in self.seqs), strict=True)
        # Contiguous, as in transformers' cache: the same kernels, the same rounding.
        k, v = (torch.stack(rows).transpose(1, 2).contiguous() for rows in (keys, values))
        return k, v

    def select(self, rows: list[int]) -> None:
        """Replaces the batch by these of its rows; a row may occur more than once."""
        if self.cache is not None and self.seqs:
            self.seqs = follow(self.cache, self.seqs, rows)

    def crop(self, count: int) -> None:
        """Removes the last `count` positions."""
        for seq in self.seqs:
            assert self.cache is not None
            self.cache.truncate(seq, self.cache.length(seq) - count)
        if self.seqs:
            self.counts = [n - count for n in self.counts]

    def clear(self) -> None:
        for seq in self.seqs:
            assert self.cache is not None
            self.cache.free(seq)
        self.seqs, self.counts = [], [0] * self.layers


class PooledLayer(CacheLayerMixin):
    """One layer of the pool, as transformers expects it."""

    is_sliding = False
    is_croppable = True

    def __init__(self, pool: _Pool, number: int) -> None:
        super().__init__()
        self._pool, self._number = pool, number

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        del value_states
        self._pool.begin(key_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        del args, kwargs
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._pool.append(self._number, key_states, value_states)

    def get_seq_length(self) -> int:
        return self._pool.counts[self._number]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class PooledCache(Cache):
    """A transformers cache of `positions` positions, shared by the rows of a batch.

    `bits`, `rotate` and `recent` are those of `KVCache`. Beams share pages. A pool that is too
    small raises MemoryError.
    """

    def __init__(
        self,
        config: Any,
        *,
        positions: int,
        block_size: int = 16,
        bits: Bits | None = None,
        rotate: bool = False,
        recent: int = 0,
    ) -> None:
        text = config.get_text_config(decoder=True)
        if positions < 1 or block_size < 1:
            raise RangeError("positions and block_size must be at least 1")
        options = {"bits": bits, "rotate": rotate, "recent": recent}
        self._pool = _Pool(text.num_hidden_layers, positions, block_size, **options)
        super().__init__(layers=[PooledLayer(self._pool, i) for i in range(self._pool.layers)])

    @property
    def storage(self) -> KVCache | None:
        """The underlying cache, or None before the first rows."""
        return self._pool.cache

    def nbytes(self) -> int:
        """Bytes allocated, bookkeeping included."""
        return 0 if self._pool.cache is None else self._pool.cache.nbytes()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._pool.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._pool.select([row for row in range(len(self._pool.seqs)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        rows = torch.arange(len(self._pool.seqs), device=indices.device)
        self._pool.select(rows[indices].tolist())

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise RangeError("crop takes the number of tokens to remove as a negative number")
        self._pool.crop(-tokens_to_remove)

    def reset(self) -> None:
        self._pool.clear()
