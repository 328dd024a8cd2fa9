"""The decoder: packed tokens in, logits out; attention, norms and caches are this library's own.

Sequences lie one after the other without padding, so rows of different lengths cannot influence
each other. Shape letters: N packed tokens, C channels, H query heads, G key/value heads, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from trapline.gold.attention.api import flash_attention_varlen
from trapline.gold.decoder.cache import SequenceCache
from trapline.gold.decoder.config import DecoderConfig
from trapline.gold.decoder.rope import frequencies, rotate
from trapline.gold.errors import RangeError
from trapline.gold.norms.api import layer_norm, rms_norm


@dataclass(frozen=True)
class Packing:
    """Where the new tokens of each sequence lie, and where they stand in it."""

    counts: list[int]
    caches: list[SequenceCache]
    positions: Tensor
    #: Cosine and sine of the rotary angles, (N, D/2) each; None for learned positions.
    angles: tuple[Tensor, Tensor] | None

    def pieces(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.split(x, self.counts)


class Norm(nn.Module):
    """RMS norm, or layer norm where there is a bias."""

    def __init__(self, width: int, eps: float, *, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return _tensor(rms_norm(x, self.weight, self.eps))
        return _tensor(layer_norm(x, self.weight, self.bias, self.eps))


class Attention(nn.Module):
    """Projections, rotary positions, cache, attention."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q = nn.Linear(config.dim, wide, bias=config.attention_bias)
        self.k = nn.Linear(config.dim, narrow, bias=config.attention_bias)
        self.v = nn.Linear(config.dim, narrow, bias=config.attention_bias)
        self.out = nn.Linear(wide, config.dim, bias=config.attention_bias)
        if config.qk_norm:
            self.q_norm = Norm(config.head_dim, config.norm_eps, bias=False)
            self.k_norm = Norm(config.head_dim, config.norm_eps, bias=False)

    def forward(self, x: Tensor, packing: Packing, layer: int) -> Tensor:
        shape = (len(x), -1, self.config.head_dim)
        q, k, v = (linear(x).view(shape) for linear in (self.q, self.k, self.v))
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if packing.angles is not None:
            q, k = rotate(q, *packing.angles), rotate(k, *packing.angles)
        return _tensor(self.out(self._attend(q, k, v, packing, layer).reshape(len(x), -1)))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, layer: int) -> Tensor:
        """Each sequence's new queries over all it has; the last query sees the last key."""
        stored = [
            cache.append(layer, *rows)
            for cache, *rows in zip(
                packing.caches, packing.pieces(k), packing.pieces(v), strict=True
            )
        ]
        lengths = [len(keys) for keys, _ in stored]
        keys, values = (torch.cat(parts) for parts in zip(*stored, strict=True))
        return _tensor(
            flash_attention_varlen(
                q,
                keys,
                values,
                _boundaries(packing.counts, q.device),
                _boundaries(lengths, q.device),
                max(packing.counts),
                max(lengths),
                causal=True,
                window=self.config.window,
            )
        )


class Feedforward(nn.Module):
    """SwiGLU, or GPT-2's two layers with GELU between them."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, config.hidden, bias=config.mlp_bias)
        self.down = nn.Linear(config.hidden, config.dim, bias=config.mlp_bias)
        self.gate = None
        if not config.is_gpt2:
            self.gate = nn.Linear(config.dim, config.hidden, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return _tensor(self.down(functional.gelu(self.up(x), approximate="tanh")))
        return _tensor(self.down(functional.silu(self.gate(x)) * self.up(x)))


class Layer(nn.Module):
    """Attention and feed-forward, each on a norm and added to the stream."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = Norm(config.dim, config.norm_eps, bias=config.is_gpt2)
        self.attention = Attention(config)
        self.feedforward_norm = Norm(config.dim, config.norm_eps, bias=config.is_gpt2)
        self.feedforward = Feedforward(config)

    def forward(self, x: Tensor, packing: Packing, number: int) -> Tensor:
        x = x + self.attention(self.attention_norm(x), packing, number)
        return _tensor(x + self.feedforward(self.feedforward_norm(x)))


class Decoder(nn.Module):
    """A language model: `decoder(ids)` for whole batches, `decoder.step` for growing sequences."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.position = nn.Embedding(config.context, config.dim) if config.is_gpt2 else None
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = Norm(config.dim, config.norm_eps, bias=config.is_gpt2)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "Decoder":
        """A Hugging Face checkpoint: `config.json` and safetensors, sharded too."""
        from trapline.gold.decoder.weights import load

        return load(Path(folder))

    def save_pretrained(self, folder: str | Path) -> None:
        """The opposite of `from_pretrained`."""
        from trapline.gold.decoder.weights import save

        save(self, Path(folder))

    def new_cache(self) -> SequenceCache:
        """An empty sequence."""
        weight = self.embedding.weight
        return SequenceCache(self.config, weight.dtype, weight.device)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (B, T, V) of whole rows (B, T), without anything remembered."""
        rows, length = ids.shape
        caches = [self.new_cache() for _ in range(rows)]
        hidden = self._hidden(list(ids), caches)
        return _tensor(self.head(hidden)).view(rows, length, -1)

    def step(self, new: Sequence[Sequence[int]], caches: list[SequenceCache]) -> Tensor:
        """Feeds each sequence its new tokens; logits (B, V) after the last of each."""
        device = self.embedding.weight.device
        ids = [torch.tensor(list(tokens), dtype=torch.long, device=device) for tokens in new]
        hidden = self._hidden(ids, caches)
        last = torch.tensor(list(accumulate(map(len, new))), device=device) - 1
        return _tensor(self.head(hidden[last]))

    def _hidden(self, ids: list[Tensor], caches: list[SequenceCache]) -> Tensor:
        packing = self._pack(ids, caches)
        x = self.embedding(torch.cat(ids))
        if self.position is not None:
            x = x + self.position(packing.positions)
        for number, layer in enumerate(self.layers):
            x = layer(x, packing, number)
        for cache, count in zip(caches, packing.counts, strict=True):
            cache.advance(count)
        return _tensor(self.norm(x))

    def _pack(self, ids: list[Tensor], caches: list[SequenceCache]) -> Packing:
        counts = [len(one) for one in ids]
        if min(counts, default=0) < 1:
            raise RangeError("every sequence needs at least one new token")
        spans = [
            torch.arange(cache.length, cache.length + count, device=ids[0].device)
            for cache, count in zip(caches, counts, strict=True)
        ]
        longest = max(int(span[-1]) + 1 for span in spans)
        if longest > self.config.context:
            raise RangeError(f"{longest} positions are more than the model's {self.config.context}")
        tokens = torch.cat(ids)
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.config.vocab:
            raise RangeError(f"a token id outside the vocabulary of {self.config.vocab}")
        positions = torch.cat(spans)
        return Packing(counts, caches, positions, self._angles(positions))

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.config.rope is None:
            return None
        turns = frequencies(self.config.rope, self.config.head_dim).to(positions.device)
        angles = positions[:, None].float() * turns
        dtype = self.embedding.weight.dtype
        return angles.cos().to(dtype), angles.sin().to(dtype)


def _boundaries(counts: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)


def _tensor(value: object) -> Tensor:
    """Modules are untyped: this is where a value becomes a Tensor again."""
    assert isinstance(value, Tensor)
    return value
