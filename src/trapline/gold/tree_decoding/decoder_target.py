"""The library's decoder as the target of speculation: one pass over a tree, commit by `keep`."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from trapline.gold.decoder.network import Network
from trapline.gold.decoder.packing import Cache
from trapline.gold.tree_decoding.generate import Row, Trees


class KeepingCache(Cache, Protocol):
    """A cache that can drop all but some positions."""

    def keep(self, positions: Sequence[int]) -> None: ...


class DecoderTarget:
    """`generate.Target` of a decoder; the drafter reads the outputs of `target_layers`.

    `new_cache` makes the cache of one row; the decoder's own by default.
    """

    def __init__(
        self,
        decoder: Network,
        target_layers: Sequence[int] = (),
        *,
        new_cache: Callable[[], KeepingCache] | None = None,
    ) -> None:
        self._decoder, self._layers = decoder, tuple(target_layers)
        self._new_cache = new_cache or decoder.new_cache
        self.vocab, self.context = decoder.config.vocab, decoder.config.context
        self._features: dict[int, Tensor] = {}

    def open(self, rows: list[Row]) -> None:
        for row in rows:
            row.target = self._new_cache()
        longer = [row for row in rows if len(row.tokens) > 1]
        if not longer:
            return
        texts = [row.tokens[:-1] for row in longer]
        hidden = self._decoder.run(texts, [row.target for row in longer], features=self._layers)
        if self._layers:
            features = torch.cat(hidden.features, dim=-1)
            pieces = torch.split(features, [len(text) for text in texts])
            for row, own in zip(longer, pieces, strict=True):
                row.fresh.append(own)

    def verify(self, rows: list[Row], trees: Trees) -> Tensor:
        caches: list[KeepingCache] = [row.target for row in rows]
        masks = [
            torch.cat((own.new_ones((len(own), cache.length)), own), dim=1)
            for own, cache in zip(trees.seen, caches, strict=True)
        ]
        # Padding may exceed the context; its outputs are not used.
        positions = [
            (own + cache.length).clamp(max=self.context - 1)
            for own, cache in zip(trees.depths, caches, strict=True)
        ]
        hidden = self._decoder.run(
            list(trees.ids),
            caches,
            positions=positions,
            masks=masks,
            features=self._layers,
        )
        if self._layers:
            features = torch.cat(hidden.features, dim=-1).view(*trees.ids.shape, -1)
            self._features = {row.number: f for row, f in zip(rows, features, strict=True)}
        return self._decoder.logits(hidden.last).view(*trees.ids.shape, -1)

    def commit(self, rows: list[Row], paths: list[list[int]]) -> None:
        for row, path in zip(rows, paths, strict=True):
            before = len(row.tokens) - 1
            tree_rows = [0, *(node + 1 for node in path)]
            row.target.keep([*range(before), *(before + place for place in tree_rows)])
            if self._layers:
                row.fresh.append(self._features[row.number][tree_rows])

    def close(self, rows: list[Row]) -> None:
        for row in rows:
            # A sequence of a pool returns its pages; other caches need nothing.
            if hasattr(row.target, "free"):
                row.target.free()
            row.target = None
