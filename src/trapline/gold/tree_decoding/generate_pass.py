"""A pass over trees or drafted blocks in five kernels a layer: the decoder's short step for many.

The decoder's products serve any number of rows; only attention is another: nodes see their branch
(`kernels_attend`). Large models with many rows take cuBLAS for the products, and the norms and the
gate as kernels of their own: their time is the reading of weights, at which it is best.

Letters: R rows of the batch, M nodes of each with its root, C width.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor, nn
from torch.nn import functional

from trapline.gold.decoder.compact import LOG2_E, CompactStep, Cut, Weights
from trapline.gold.decoder.config import DecoderConfig
from trapline.gold.decoder.fused import swiglu
from trapline.gold.decoder.kernels_step import added_kernel, embed_kernel
from trapline.gold.decoder.layers import tensor
from trapline.gold.norms.api import rms_norm
from trapline.gold.tree_decoding.kernels_attend import tree_attend_kernel

#: A product of more weights than this, for more than FEW lines, is cuBLAS's.
LARGE, FEW = 1 << 23, 16
#: And one of less than this is cut for FEW lines at a time.
SMALL = 1 << 21
#: Queries of a program at most.
QUERIES = 32


class Body(NamedTuple):
    """What is passed through: a target, or a drafter with what it borrows of its target."""

    config: DecoderConfig
    embedding: nn.Module
    norm: nn.Module
    head: nn.Module


class Trees(NamedTuple):
    """Where the nodes of a pass stand."""

    lengths: Tensor  # (R,) committed positions
    depths: Tensor  # (R · M,)
    seen: Tensor  # (R, M, M) int8
    #: (R,) positions whose keys are stored; the others are those of `fresh`.
    known: Tensor | None = None
    #: (R · W, layers · 2 · G · D) projections of the positions committed last.
    fresh: Tensor | None = None


class TreePass(CompactStep):
    """Logits, or the best of their tiles, of R · M lines; keys and values lie in rows of `room`.

    `taps` are layers whose outputs are copied into `features` (R · M, taps · C).
    """

    def __init__(
        self,
        body: Body,
        layers: list[Weights],
        angles: tuple[Tensor, Tensor],
        store: tuple[Tensor, Tensor],
        *,
        rows: int,
        nodes: int,
        taps: tuple[int, ...] = (),
    ) -> None:
        keys, values = store  # (layers, R, room, G, D)
        super().__init__(body, layers, angles, keys, values, rows * nodes)  # type: ignore[arg-type]
        self._body, self._taps, self._rows, self._nodes = body, taps, rows, nodes
        self._room = keys.shape[2]
        width = body.config.dim
        self.features = self._norm.new_zeros((rows * nodes, len(taps) * width))
        self.wide = rows * nodes > FEW and layers[0].up.numel() > LARGE

    def run(self, ids: Tensor, trees: Trees) -> int:
        """Logits of these lines (R · M,) into `lines`; into how many tiles they were cut, or 0."""
        if self.wide:
            self._run_wide(ids, trees)
            return 0
        config, count = self._config, len(ids)
        embed_kernel[(count,)](
            *(ids, self._embedding, self._layers[0].norms[0], self._x, self._y),
            *(self._squares, config.dim),
            BLOCK=triton.next_power_of_2(config.dim),
            PDL=self._early,
            num_warps=4,
            **self._launch(),
        )
        tiles = 1
        for number, layer in enumerate(self._layers):
            self._scaled(self._y, layer.qkv, self._qkv, count, tiles)
            self._tree_attend(trees, layer, number, self._qkv, self._x)
            tiles = self._added(self._seen, layer.out, layer.norms[1], count)
            self._gated(layer.up, count, tiles)
            last = number + 1 == len(self._layers)
            after = self._norm if last else self._layers[number + 1].norms[0]
            tiles = self._added(self._inner, layer.down, after, count)
        self._tap_last(self._x)
        return self._scaled(self._y, self._head, self._logits, count, tiles, best=True)

    @property
    def lines(self) -> Tensor:
        """(R · M, V) float32."""
        return self._logits

    def fuse(
        self,
        features: Tensor,
        fuse: tuple[Tensor, Tensor],
        context: Tensor,
        rows_of: Tensor,
        out: Tensor,
    ) -> Tensor:
        """Keys and values of new context (lines, …): a product, a norm, a product.

        `context` must be zero: the first product is added to it. `fuse` is its weight and the
        norm's.
        """
        weight, gain = fuse
        if self.wide:
            normed = tensor(
                rms_norm(functional.linear(features, weight), gain, self._config.norm_eps)
            )
            return functional.linear(normed, rows_of)
        lines, (outputs, inputs) = len(features), weight.shape
        cut = self.cut_for("added", lines, outputs, inputs)
        tiles = -(-outputs // cut.block_n)
        added_kernel[(tiles, triton.cdiv(lines, cut.block_b))](
            *(features, weight, context, gain, self._y, self._squares),
            *(lines, outputs, inputs, features.stride(0), weight.stride(0)),
            **self._cut(cut, "added", outputs, inputs),
        )
        self._scaled(self._y, rows_of, out, lines, tiles)
        return out

    def cut_for(self, kind: str, rows: int, outputs: int, inputs: int) -> Cut:
        """Small products of many lines are cut as those of few: their weights are read again for
        every 16 lines, which costs nothing, and no program has more than a few steps."""
        small = outputs * inputs < SMALL
        return super().cut_for(kind, min(rows, FEW) if small else rows, outputs, inputs)

    def winners(self, tiles: int) -> tuple[Tensor, Tensor, int]:
        """The best of every tile and line and their tokens, (tiles, lines), after a `run`."""
        if tiles:
            return self._best, self._place, tiles
        best = self._logits.max(dim=-1)
        return best.values[None], best.indices[None].int(), 1

    def early(self, warps: int) -> dict[str, Any]:
        """How the small kernels of a round are launched."""
        return {"PDL": self._early, "num_warps": warps, **self._launch()}

    def _run_wide(self, ids: Tensor, trees: Trees) -> None:
        x, delta = tensor(self._body.embedding(ids)), None
        eps = self._config.norm_eps
        for number, layer in enumerate(self._layers):
            h, x = _add_norm(x, delta, layer.norms[0], eps)
            self._tree_attend(trees, layer, number, functional.linear(h, layer.qkv), x)
            delta = functional.linear(self._seen, layer.out)
            h, x = _add_norm(x, delta, layer.norms[1], eps)
            delta = functional.linear(swiglu(functional.linear(h, layer.up)), layer.down)
        h, x = _add_norm(x, delta, self._norm, eps)
        self._tap_last(x)
        self._logits.copy_(functional.linear(h, self._head))

    def _tap_last(self, x: Tensor) -> None:
        """Attention of a layer copies what the layer before left; the last has nobody behind it."""
        if len(self._layers) - 1 in self._taps:
            width = self._config.dim
            at = self._taps.index(len(self._layers) - 1) * width
            self.features[:, at : at + width] = x[: len(self.features)]

    def _tree_attend(
        self, trees: Trees, layer: Weights, number: int, qkv: Tensor, stream: Tensor
    ) -> None:
        config, tapped = self._config, number - 1 in self._taps
        ratio = config.heads // config.kv_heads
        chunk = max(1, min(self._nodes, QUERIES // ratio))
        block_d = triton.next_power_of_2(config.head_dim)
        fresh, fresh_row, pending = trees.fresh, 0, 1
        if fresh is not None:
            pending = len(fresh) // self._rows
            fresh_row = fresh.stride(0)
            fresh = fresh[:, number * 2 * config.kv_heads * config.head_dim :]
        features = None
        if tapped:
            features = self.features[:, self._taps.index(number - 1) * config.dim :]
        programs = self._rows * config.kv_heads * triton.cdiv(self._nodes, chunk)
        tile = tile_of(block_d, self._norm.element_size())
        tree_attend_kernel[(programs,)](
            *(qkv, self._keys[number], self._values[number], trees.lengths, trees.known),
            *(trees.depths, trees.seen, *self._angles, layer.q_norm, layer.k_norm, fresh),
            *(self._seen, stream, features, self._nodes, self._room, config.kv_heads, pending),
            *(qkv.stride(0), fresh_row, self.features.shape[1], config.dim),
            *(config.head_dim**-0.5 * LOG2_E, config.norm_eps, triton.cdiv(self._nodes, chunk)),
            QN=chunk,
            R=ratio,
            D=config.head_dim,
            BLOCK_D=block_d,
            BLOCK_M=max(16, triton.next_power_of_2(chunk * ratio)),
            BLOCK_T=max(16, triton.next_power_of_2(self._nodes)),
            BLOCK_W=max(16, triton.next_power_of_2(pending)),
            BLOCK_S=tile,
            BLOCK_C=triton.next_power_of_2(triton.cdiv(config.dim, config.kv_heads)),
            PRECISION=self._precision,
            PDL=self._early,
            num_warps=4,
            num_stages=2,
            **self._launch(),
        )


def tile_of(block_d: int, size: int) -> int:
    """Committed positions at a time."""
    return max(16, min(128, (8192 if size == 2 else 2048) // block_d))


def _add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of x + delta, x + delta)."""
    if delta is None:
        return tensor(rms_norm(x, weight, eps)), x
    normed = rms_norm(delta, weight, eps, residual=x)
    return tensor(normed.y), tensor(normed.residual)


def layer_weights(layer: Any, attention: Any, *, qk_norm: bool) -> Weights:
    """Weights of a target's or drafter's layer, joined; the parts become views of the whole."""
    feedforward = layer.feedforward
    return Weights(
        qkv=joined(attention.q, attention.k, attention.v),
        out=tensor(attention.out.weight),
        up=joined(feedforward.gate, feedforward.up),
        down=tensor(feedforward.down.weight),
        norms=(layer.attention_norm.weight, layer.feedforward_norm.weight),
        q_norm=attention.q_norm.weight if qk_norm else None,
        k_norm=attention.k_norm.weight if qk_norm else None,
        window=None,
    )


def joined(*parts: Any) -> Tensor:
    """One weight of several; each part's own becomes a view of it, so nothing is kept twice."""
    weights = [tensor(part.weight).detach() for part in parts]
    first, sizes = weights[0], [len(weight) for weight in weights]
    if _follow_each_other(weights):
        return first.as_strided((sum(sizes), first.shape[1]), first.stride())
    whole = torch.cat(weights)
    for part, piece in zip(parts, torch.split(whole, sizes), strict=True):
        part.weight.data = piece
    return whole


def _follow_each_other(weights: list[Tensor]) -> bool:
    """Whether they are pieces of one weight already: somebody joined them before."""
    return all(
        one.is_contiguous()
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.storage_offset() + one.numel() == other.storage_offset()
        for one, other in pairwise(weights)
    )
