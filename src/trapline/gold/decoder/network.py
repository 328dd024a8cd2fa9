"""The network of a decoder: packed tokens in, logits out, on this library's own kernels."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trapline.gold import checks
from trapline.gold.decoder.cache import SequenceCache
from trapline.gold.decoder.config import DecoderConfig
from trapline.gold.decoder.layers import Layer, Norm, tensor
from trapline.gold.decoder.packing import Cache, Packing, stores
from trapline.gold.decoder.rope import angles
from trapline.gold.errors import DTypeError, RangeError, ShapeError

#: Dtypes of token ids.
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Hidden(NamedTuple):
    """Hidden states of N packed tokens with C channels."""

    last: Tensor  # (N, C) after the final norm, the input of the head
    features: tuple[Tensor, ...]  # (N, C) outputs of the requested layers


def _embedding(rows: int, columns: int) -> nn.Embedding:
    """On the meta device nothing is drawn: torch would import its compiler for it (two seconds)."""
    is_meta = torch.get_default_device().type == "meta"
    return nn.Embedding(rows, columns, _weight=torch.empty(rows, columns) if is_meta else None)


class Network(nn.Module):
    """`network(ids)` for whole batches, `network.step` for growing sequences."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = _embedding(config.vocab, config.dim)
        self.position = _embedding(config.context, config.dim) if config.is_gpt2 else None
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.layers))
        self.norm = Norm(
            config.dim, config.norm_eps, bias=config.is_gpt2, unit_offset=config.unit_offset
        )
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    def new_cache(self) -> SequenceCache:
        """The cache of an empty sequence."""
        return SequenceCache(self.config, self.norm.weight.dtype, self.device)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (B, T, V) of whole rows (B, T); nothing is cached."""
        checks.arrays(ids=ids)
        if ids.ndim != 2:
            raise ShapeError(f"ids must have shape (B, T), got {tuple(ids.shape)}")
        rows, length = ids.shape
        caches = [self.new_cache() for _ in range(rows)]
        return self.logits(self.run(list(ids), caches).last).view(rows, length, -1)

    def step(self, new: Sequence[Sequence[int]], caches: Sequence[Cache]) -> Tensor:
        """Feeds each sequence its new tokens; returns logits (B, V) after the last of each."""
        hidden = self.run(new, caches).last
        last = torch.tensor(list(accumulate(map(len, new))), device=self.device) - 1
        return self.logits(hidden[last])

    def logits(self, hidden: Tensor) -> Tensor:
        """(…, C) to (…, V)."""
        return self.capped(tensor(self.head(hidden)))

    def embed(self, ids: Tensor) -> Tensor:
        """(…) to (…, C), scaled where the model does so; the factor has the model's dtype."""
        x = tensor(self.embedding(ids))
        scale = self.config.embedding_scale
        return x if scale == 1.0 else x * x.new_full((), scale)

    def capped(self, logits: Tensor) -> Tensor:
        """Logits with the model's soft cap."""
        cap = self.config.logit_softcap
        return logits if cap == 0.0 else torch.tanh(logits / cap) * cap

    def run(
        self,
        new: Sequence[Sequence[int] | Tensor],
        caches: Sequence[Cache],
        *,
        positions: Sequence[Sequence[int] | Tensor] | None = None,
        masks: Sequence[Tensor] | None = None,
        features: Sequence[int] = (),
    ) -> Hidden:
        """Feeds each sequence its new tokens and adds them to its cache.

        `positions` of the new tokens default to those after the cached ones. `masks` (new, cached +
        new) bool say which tokens each new token sees, by default all up to itself. Both together
        describe a tree; its nodes all go into the cache, and `keep` selects the accepted path.
        `features` names layers whose outputs are returned as well.
        """
        if not all(0 <= number < self.config.layers for number in features):
            raise RangeError(
                f"features must be layers 0 to {self.config.layers - 1}, got {features}"
            )
        ids = self.tokens(new)
        packing = self.pack([len(one) for one in new], caches, positions, masks)
        hidden = self.through(ids, packing, features)
        for cache, count in zip(caches, packing.counts, strict=True):
            cache.advance(count)
        return hidden

    def through(self, ids: Tensor, packing: Packing, features: Sequence[int] = ()) -> Hidden:
        """Runs all layers on packed tokens (N,); with a pool it never synchronises."""
        x = self.embed(ids)
        if self.position is not None:
            x = x + self.position(packing.positions)
        kept: dict[int, Tensor] = {}
        for number, layer in enumerate(self.layers):
            x = layer(x, partial(packing.attend, number, self.config.rules_of(number)))
            if number in features:
                kept[number] = x
        return Hidden(tensor(self.norm(x)), tuple(kept[number] for number in features))

    def tokens(self, new: Sequence[Sequence[int] | Tensor]) -> Tensor:
        """New tokens of all sequences (N,) on the device, checked against the vocabulary."""
        if min(map(len, new), default=0) < 1:
            raise RangeError("every sequence needs at least one new token")
        there = any(isinstance(one, Tensor) for one in new)
        where = self.device if there else torch.device("cpu")
        parts = [torch.as_tensor(one, device=where) for one in new]
        for part in parts:
            if part.dtype not in _INTEGERS:
                raise DTypeError(f"token ids must be integers, got {checks.dtype_name(part)}")
        ids = torch.cat(parts).long()
        if int(ids.min()) < 0 or int(ids.max()) >= self.config.vocab:
            raise RangeError(f"token ids must be below the vocabulary of {self.config.vocab}")
        return ids.to(self.device)

    def pack(
        self,
        counts: list[int],
        caches: Sequence[Cache],
        positions: Sequence[Sequence[int] | Tensor] | None = None,
        masks: Sequence[Tensor] | None = None,
    ) -> Packing:
        """Positions of the new tokens, and cache space for their keys and values."""
        places = self._places(counts, caches, positions)
        if masks is not None:
            for cache, count, mask in zip(caches, counts, masks, strict=True):
                if tuple(mask.shape) != (count, cache.length + count):
                    want = (count, cache.length + count)
                    raise ShapeError(f"a mask has shape {tuple(mask.shape)}, expected {want}")
        turns = {
            rope: angles(rope, self.config.head_dim, places, self.norm.weight)
            for rope in {self.config.rope, self.config.local_rope}
            if rope is not None
        }
        return Packing(counts, list(stores(caches, counts)), places, turns, masks)

    def _places(
        self,
        counts: list[int],
        caches: Sequence[Cache],
        positions: Sequence[Sequence[int] | Tensor] | None,
    ) -> Tensor:
        if positions is None:
            spans = [
                torch.arange(cache.length, cache.length + count, device="cpu")
                for cache, count in zip(caches, counts, strict=True)
            ]
        else:
            spans = [torch.as_tensor(one, device=self.device).long() for one in positions]
            if [len(span) for span in spans] != counts:
                raise ShapeError(f"positions must have one entry a new token ({counts})")
        places = torch.cat(spans)
        longest = int(places.max()) + 1
        if longest > self.config.context or int(places.min()) < 0:
            raise RangeError(f"the model has {self.config.context} positions, got {longest}")
        return places.to(self.device)
