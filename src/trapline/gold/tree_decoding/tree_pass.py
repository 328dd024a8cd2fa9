"""A pass over trees or drafted blocks: the fused decode step for several tokens per row.

It shares the decode step's kernels for products; only attention differs, since each node sees its
own branch (`triton.attention`). Large models use `hopper.linear_many_rows` for 17 to 128 lines, and
cuBLAS with separate norm and SwiGLU kernels above.

Letters: R rows of the batch, M nodes of each row with its root, C width.
"""

from functools import partial
from typing import Any, NamedTuple

import triton
from torch import Tensor, nn
from torch.nn import functional

from trapline.gold.arithmetic import LOG2_E, cdiv
from trapline.gold.decoder.config import DecoderConfig
from trapline.gold.decoder.fused_step import FusedDecodeStep
from trapline.gold.decoder.joined_layer import JoinedLayer, LayerWeights, add_norm
from trapline.gold.decoder.layers import Norm, tensor
from trapline.gold.decoder.tile_config import TileConfig
from trapline.gold.norms.api import rms_norm
from trapline.gold.tree_decoding.hopper import linear_many_rows
from trapline.gold.tree_decoding.hopper.linear_many_rows import FEW, ManyRowLinear
from trapline.gold.tree_decoding.triton.attention import tree_attend_kernel
from trapline.gold.tree_decoding.triton.draft import begin_kernel, project_kernel

#: Products of fewer weights stay in the cache, so that reading them repeatedly is cheap.
SMALL = 1 << 21
#: Queries per program: the rows of one tensor-core tile.
QUERIES = 16


class Body(NamedTuple):
    """The model of a pass: a target, or a drafter with its target's embedding and head."""

    config: DecoderConfig
    embedding: nn.Module
    norm: Norm
    head: nn.Module


class TreePositions(NamedTuple):
    """Positions and ancestors of the nodes of a pass."""

    lengths: Tensor  # (R,) committed positions
    depths: Tensor  # (R · M,)
    seen: Tensor  # (R, M, M) int8
    #: (R,) positions whose keys are stored; those of the remaining positions are in `fresh`.
    known: Tensor | None = None
    #: (R · W, layers · 2 · G · D) projections of the positions committed last.
    fresh: Tensor | None = None


class NewContext(NamedTuple):
    """Features of newly committed tokens, and the buffers for their projections, for a drafter."""

    features: Tensor  # (lines, F)
    fuse: Tensor  # (C, F)
    gain: Tensor  # (C,) of the norm after it
    context_weight: Tensor  # (layers · 2 · G · D, C): key and value weights of all layers
    context: Tensor  # (lines, C)
    sums: Tensor  # (C / 8, lines) float32
    fresh: Tensor  # (lines, layers · 2 · G · D)


class TreePass(FusedDecodeStep):
    """Logits of R · M lines, or the best of each tile; keys and values have R rows of `room`.

    The outputs of the layers `taps` are copied into `features` (R · M, taps · C).
    """

    def __init__(
        self,
        body: Body,
        layers: list[JoinedLayer],
        angles: tuple[Tensor, Tensor],
        store: tuple[Tensor, Tensor],
        *,
        rows: int,
        nodes: int,
        taps: tuple[int, ...] = (),
    ) -> None:
        keys, values = store  # (layers, R, room, G, D)
        weights = [layer.weights() for layer in layers]
        super().__init__(body, weights, angles, keys, values, rows * nodes)  # type: ignore[arg-type]
        self._body, self._joined = body, layers
        self._taps, self._rows, self._nodes = taps, rows, nodes
        self._room = keys.shape[2]
        width = body.config.dim
        self.features = self._norm.new_zeros((rows * nodes, len(taps) * width))
        self._large = (
            ManyRowLinear(weights[0], rows * nodes)
            if linear_many_rows.supports(weights[0], rows * nodes)
            else None
        )
        self.uses_cublas = self._large is None and linear_many_rows.has_large_products(
            weights[0], rows * nodes
        )

    def run(self, ids: Tensor, at: TreePositions, new: NewContext | None = None) -> int:
        """Write the logits of ids (R · M,) to `lines`; returns their number of tiles, 0 by cuBLAS.

        With `new` context a drafter's `fresh` projections are computed as well.
        """
        if self.uses_cublas:
            self._run_cublas(ids, at if new is None else self._fuse_cublas(at, new))
            return 0
        begun = new is not None and self._large is None
        if new is not None:
            at = self._begin(ids, at, new) if begun else self._fuse_cublas(at, new)
        if not begun:
            self._embed(ids)
        tiles = self._through(
            len(ids),
            lambda number, layer: self._tree_attend(at, number, layer, self._qkv, self._x),
            projected=begun,
        )
        self._tap_last(self._x)
        return self._scaled(self._y, self._head, self._logits, len(ids), tiles, best=True)

    @property
    def lines(self) -> Tensor:
        """(R · M, V) float32."""
        return self._logits

    def _begin(self, ids: Tensor, at: TreePositions, new: NewContext) -> TreePositions:
        """Embed the ids, fuse the new context, and project both for the first layer."""
        features, weight, first = new.features, new.fuse, self._layers[0]
        lines, (outputs, inputs) = len(features), weight.shape
        cut = self.tile_config_for("residual_linear", lines, outputs, inputs)
        tiles = cdiv(outputs, cut.block_n)
        programs = tiles * cdiv(lines, cut.block_b)
        begin_kernel[(programs + len(ids),)](
            *(features, weight, new.gain, new.context, new.sums),
            *(ids, self._embedding, first.norms[0], self._x, self._y, self._squares),
            *(lines, outputs, inputs, features.stride(0), weight.stride(0), tiles, programs),
            BLOCK=triton.next_power_of_2(outputs),
            **self._cut(cut, "residual_linear", outputs, inputs),
        )
        self._project(len(ids), new, tiles)
        return at._replace(fresh=new.fresh)

    def _project(self, count: int, new: NewContext, parts: int) -> None:
        lines, qkv = len(new.fresh), self._layers[0].qkv
        outputs, inputs = new.context_weight.shape
        cut = self.tile_config_for("normed_linear", max(lines, count), *qkv.shape)
        even = inputs % (cut.split * cut.block_k) == 0
        even = even and all(width % cut.block_n == 0 for width in (outputs, len(qkv)))
        own, tiles = (cdiv(width, cut.block_n) for width in (len(qkv), outputs))
        programs = tiles * cdiv(lines, cut.block_b)
        project_kernel[(programs + own * cdiv(count, cut.block_b),)](
            *(new.context, new.context_weight, new.sums, new.fresh, lines, outputs, tiles, parts),
            *(self._y, qkv, self._squares, self._qkv, count, len(qkv), own),
            *(inputs, programs, self._config.norm_eps),
            PARTS=triton.next_power_of_2(parts),
            **{**self._cut(cut, "normed_linear", len(qkv), inputs), "EVEN": even},
        )

    def _fuse_cublas(self, at: TreePositions, new: NewContext) -> TreePositions:
        fused = functional.linear(new.features, new.fuse)
        normed = tensor(rms_norm(fused, new.gain, self._config.norm_eps))
        return at._replace(fresh=functional.linear(normed, new.context_weight))

    def _add_linear(self, x: Tensor, w: Tensor, weight: Tensor, rows: int) -> int:
        """Add a product to the stream; returns the number of partial square sums per row."""
        if self._large is None:
            return self._added(x, w, weight, rows)
        return self._large.add(x, w, self._x, weight, self._y, self._squares)

    def _gated(self, w: Tensor, rows: int, parts: int) -> None:
        """The SwiGLU product."""
        if self._large is None:
            super()._gated(w, rows, parts)
        else:
            eps = self._config.norm_eps
            self._large.gate(self._y, w, self._squares, self._inner, parts, eps)

    def tile_config_for(self, kind: str, rows: int, outputs: int, inputs: int) -> TileConfig:
        """Small bfloat16 products and large products of many lines have tables of their own."""
        if self._large is not None:
            return linear_many_rows.tile_config(kind, rows, outputs)
        if outputs * inputs < SMALL and self._norm.element_size() == 2:
            return small_tile_config(kind, rows, inputs)
        return super().tile_config_for(kind, rows, outputs, inputs)

    def best_tokens(self, tiles: int) -> tuple[Tensor, Tensor, int]:
        """After `run`: the best logit of every tile and line, and its token, (tiles, lines)."""
        if tiles:
            return self._best, self._place, tiles
        best = self._logits.max(dim=-1)
        return best.values[None], best.indices[None].int(), 1

    def launch_options(self, warps: int) -> dict[str, Any]:
        """Launch options of the small kernels of a round."""
        return {"PDL": self._early, "num_warps": warps, **self._launch()}

    def _run_cublas(self, ids: Tensor, at: TreePositions) -> None:
        x, delta = tensor(self._body.embedding(ids)), None
        for number, layer in enumerate(self._joined):
            x, delta = layer(x, delta, partial(self._tree_attend, at, number, self._layers[number]))
        h, x = add_norm(self._body.norm, delta, x)
        self._tap_last(x)
        self._logits.copy_(functional.linear(h, self._head))

    def _tap_last(self, x: Tensor) -> None:
        """Attention copies the output of the layer before it; the last layer's is copied here."""
        if len(self._layers) - 1 in self._taps:
            width = self._config.dim
            at = self._taps.index(len(self._layers) - 1) * width
            self.features[:, at : at + width] = x[: len(self.features)]

    def _tree_attend(
        self, at: TreePositions, number: int, layer: LayerWeights, qkv: Tensor, stream: Tensor
    ) -> Tensor:
        config, tapped = self._config, number - 1 in self._taps
        ratio = config.heads // config.kv_heads
        block_d = triton.next_power_of_2(config.head_dim)
        chunk = max(1, min(self._nodes, QUERIES // ratio))
        programs = self._rows * config.kv_heads * cdiv(self._nodes, chunk)
        alone = programs <= self._processors
        tile, warps = attention_tile_config(block_d, self._norm.element_size(), alone=alone)
        fresh, fresh_row, pending = at.fresh, 0, 1
        if fresh is not None:
            pending = len(fresh) // self._rows
            fresh_row = fresh.stride(0)
            fresh = fresh[:, number * 2 * config.kv_heads * config.head_dim :]
        features = None
        if tapped:
            features = self.features[:, self._taps.index(number - 1) * config.dim :]
        tree_attend_kernel[(programs,)](
            *(qkv, self._keys[number], self._values[number], at.lengths, at.known),
            *(at.depths, at.seen, *self._angles, layer.q_norm, layer.k_norm, fresh),
            *(self._seen, stream, features, self._nodes, self._room, config.kv_heads, pending),
            *(qkv.stride(0), fresh_row, self.features.shape[1], config.dim),
            *(config.head_dim**-0.5 * LOG2_E, config.norm_eps, cdiv(self._nodes, chunk)),
            QN=chunk,
            BLOCK_Q=triton.next_power_of_2(chunk),
            R=ratio,
            D=config.head_dim,
            BLOCK_D=block_d,
            BLOCK_M=max(16, triton.next_power_of_2(chunk * ratio)),
            BLOCK_T=max(16, triton.next_power_of_2(self._nodes)),
            BLOCK_W=max(16, triton.next_power_of_2(pending)),
            BLOCK_S=tile,
            BLOCK_C=triton.next_power_of_2(cdiv(config.dim, config.kv_heads)),
            PRECISION=self._precision,
            PDL=self._early,
            num_warps=warps,
            num_stages=2,
            **self._launch(),
        )
        return self._seen


def small_tile_config(kind: str, lines: int, inputs: int) -> TileConfig:
    """Tile sizes of products that are limited by latency; docs/lab/tree_decoding.md lists trials.

    Programs have few lines, so that 16 lines take little longer than 8. From 33 lines on, reading
    the weights once per program dominates. With at most 256 inputs, two stages cover all of K.
    """
    one_step, few = inputs <= 256, 8 if lines <= 8 else 16
    if kind == "residual_linear":
        if one_step:
            return TileConfig(8, 16, 128, 2, 2, 2)
        return TileConfig(8 if lines <= 2 * FEW else 16, 16, 64, 4, 4, 4)
    if one_step and lines > 2 * FEW:
        return TileConfig(32, 16, 256, 1, 2, 2)
    if kind == "normed_swiglu":
        return TileConfig(few, 8, 128, 2, 2, 2 if one_step else 4)
    if one_step and lines > 8:
        return TileConfig(16, 16, 128, 2, 2, 2)
    return TileConfig(few, 16, 64, 4, 4, 6)


def attention_tile_config(block_d: int, size: int, *, alone: bool) -> tuple[int, int]:
    """Committed positions per tile, and warps.

    A tile of keys has 32 KB where each processor has at most one program, otherwise 16 KB: two
    programs with 32 KB do not fit on a processor.
    """
    elements = (16384 if alone else 8192) if size == 2 else 2048
    tile = max(16, min(128, elements // block_d))
    return tile, 8 if tile * block_d > 8192 else 4


def new_key_values(config: DecoderConfig, rows: int, room: int, like: Tensor) -> Tensor:
    """Keys and values (2, layers, R, room, G, D), zero."""
    return like.new_zeros((2, config.layers, rows, room, config.kv_heads, config.head_dim))
