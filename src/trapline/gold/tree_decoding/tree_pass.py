"""A pass over trees or drafted blocks in five kernels a layer: the decoder's short step for many.

The decoder's products serve any number of rows; only attention is another: nodes see their branch
(`triton.attention`). Large models with some dozens of lines have products of their own
(`hopper.linear_many_rows`); with more lines cuBLAS serves, and norms and gates are kernels apart.

Letters: R rows of the batch, M nodes of each with its root, C width.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor, nn
from torch.nn import functional

from trapline.gold.arithmetic import LOG2_E, cdiv
from trapline.gold.decoder.config import DecoderConfig
from trapline.gold.decoder.fused_step import FusedDecodeStep, LayerWeights
from trapline.gold.decoder.layers import tensor
from trapline.gold.decoder.step_ops import swiglu
from trapline.gold.decoder.tile_config import TileConfig
from trapline.gold.decoder.triton.step_linear import embed_kernel
from trapline.gold.norms.api import rms_norm
from trapline.gold.tree_decoding.generate_large import FEW, Large, is_large, large_cut, serves
from trapline.gold.tree_decoding.triton.attention import tree_attend_kernel
from trapline.gold.tree_decoding.triton.draft import begin_kernel, project_kernel

#: A product of fewer weights than this has them in the cache: they may be read many times.
SMALL = 1 << 21
#: Queries of a program: a tile of the matrix unit.
QUERIES = 16


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


class Grown(NamedTuple):
    """What a drafter's context has grown by, and where its parts go on the way to `fresh`."""

    features: Tensor  # (lines, F)
    fuse: Tensor  # (C, F)
    gain: Tensor  # (C,) of the norm behind it
    rows_of: Tensor  # (layers · 2 · G · D, C): keys and values for every layer
    context: Tensor  # (lines, C)
    sums: Tensor  # (C / 8, lines) float32
    fresh: Tensor  # (lines, layers · 2 · G · D)


class TreePass(FusedDecodeStep):
    """Logits, or the best of their tiles, of R · M lines; keys and values lie in rows of `room`.

    `taps` are layers whose outputs are copied into `features` (R · M, taps · C).
    """

    def __init__(
        self,
        body: Body,
        layers: list[LayerWeights],
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
        self._large = Large(layers[0], rows * nodes) if serves(layers[0], rows * nodes) else None
        self.wide = self._large is None and is_large(layers[0], rows * nodes)

    def run(self, ids: Tensor, trees: Trees, grown: Grown | None = None) -> int:
        """Logits of these lines (R · M,) into `lines`; into how many tiles they were cut, or 0.

        A drafter's context may have `grown`: its `fresh` rows are made on the way.
        """
        if self.wide:
            self._run_wide(ids, trees if grown is None else self._fuse_wide(trees, grown))
            return 0
        count, tiles = len(ids), 1
        begun = False
        if grown is not None and self._large is None:
            trees, begun = self._begin(ids, trees, grown), True
        else:
            trees = trees if grown is None else self._fuse_wide(trees, grown)
            self._embed(ids)
        for number, layer in enumerate(self._layers):
            if number > 0 or not begun:
                self._scaled(self._y, layer.qkv, self._qkv, count, tiles)
            self._tree_attend(trees, layer, number, self._qkv, self._x)
            tiles = self._summed(self._seen, layer.out, layer.norms[1], count)
            self._gates(layer.up, count, tiles)
            last = number + 1 == len(self._layers)
            after = self._norm if last else self._layers[number + 1].norms[0]
            tiles = self._summed(self._inner, layer.down, after, count)
        self._tap_last(self._x)
        return self._scaled(self._y, self._head, self._logits, count, tiles, best=True)

    def _embed(self, ids: Tensor) -> None:
        width = self._config.dim
        embed_kernel[(len(ids),)](
            *(ids, self._embedding, self._layers[0].norms[0], self._x, self._y),
            *(self._squares, width),
            BLOCK=triton.next_power_of_2(width),
            PDL=self._early,
            num_warps=4,
            **self._launch(),
        )

    @property
    def lines(self) -> Tensor:
        """(R · M, V) float32."""
        return self._logits

    def _begin(self, ids: Tensor, trees: Trees, grown: Grown) -> Trees:
        """The stream of these ids and its first projections, and those of what has `grown`."""
        features, weight, first = grown.features, grown.fuse, self._layers[0]
        lines, (outputs, inputs) = len(features), weight.shape
        cut = self.tile_config_for("residual_linear", lines, outputs, inputs)
        tiles = cdiv(outputs, cut.block_n)
        programs = tiles * cdiv(lines, cut.block_b)
        begin_kernel[(programs + len(ids),)](
            *(features, weight, grown.gain, grown.context, grown.sums),
            *(ids, self._embedding, first.norms[0], self._x, self._y, self._squares),
            *(lines, outputs, inputs, features.stride(0), weight.stride(0), tiles, programs),
            BLOCK=triton.next_power_of_2(outputs),
            **self._cut(cut, "residual_linear", outputs, inputs),
        )
        self._project(len(ids), grown, tiles)
        return trees._replace(fresh=grown.fresh)

    def _project(self, count: int, grown: Grown, parts: int) -> None:
        (outputs, inputs), lines, qkv = grown.rows_of.shape, len(grown.fresh), self._layers[0].qkv
        cut = self.tile_config_for("normed_linear", max(lines, count), *qkv.shape)
        even = inputs % (cut.split * cut.block_k) == 0
        even = even and all(width % cut.block_n == 0 for width in (outputs, len(qkv)))
        old, new = (cdiv(width, cut.block_n) for width in (len(qkv), outputs))
        programs = new * cdiv(lines, cut.block_b)
        project_kernel[(programs + old * cdiv(count, cut.block_b),)](
            *(grown.context, grown.rows_of, grown.sums, grown.fresh, lines, outputs, new, parts),
            *(self._y, qkv, self._squares, self._qkv, count, len(qkv), old),
            *(inputs, programs, self._config.norm_eps),
            PARTS=triton.next_power_of_2(parts),
            **{**self._cut(cut, "normed_linear", len(qkv), inputs), "EVEN": even},
        )

    def _fuse_wide(self, trees: Trees, grown: Grown) -> Trees:
        fused = functional.linear(grown.features, grown.fuse)
        normed = tensor(rms_norm(fused, grown.gain, self._config.norm_eps))
        return trees._replace(fresh=functional.linear(normed, grown.rows_of))

    def _summed(self, x: Tensor, w: Tensor, weight: Tensor, rows: int) -> int:
        """The stream and one more product; into how many squares a row of it is cut."""
        if self._large is None:
            return self._added(x, w, weight, rows)
        return self._large.add(x, w, self._x, weight, self._y, self._squares)

    def _gates(self, w: Tensor, rows: int, parts: int) -> None:
        """The gated product."""
        if self._large is None:
            self._gated(w, rows, parts)
        else:
            eps = self._config.norm_eps
            self._large.gate(self._y, w, self._squares, self._inner, parts, eps)

    def tile_config_for(self, kind: str, rows: int, outputs: int, inputs: int) -> TileConfig:
        """Small products of bfloat16, and large ones of some dozens of lines, have own tables."""
        if self._large is not None:
            return large_cut(kind, rows, outputs)
        if outputs * inputs < SMALL and self._norm.element_size() == 2:
            return small_cut(kind, rows, inputs)
        return super().tile_config_for(kind, rows, outputs, inputs)

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
        self, trees: Trees, layer: LayerWeights, number: int, qkv: Tensor, stream: Tensor
    ) -> None:
        config, tapped = self._config, number - 1 in self._taps
        ratio = config.heads // config.kv_heads
        block_d = triton.next_power_of_2(config.head_dim)
        chunk = max(1, min(self._nodes, QUERIES // ratio))
        programs = self._rows * config.kv_heads * cdiv(self._nodes, chunk)
        alone = programs <= self._processors
        tile, warps = attend_cut(block_d, self._norm.element_size(), alone=alone)
        fresh, fresh_row, pending = trees.fresh, 0, 1
        if fresh is not None:
            pending = len(fresh) // self._rows
            fresh_row = fresh.stride(0)
            fresh = fresh[:, number * 2 * config.kv_heads * config.head_dim :]
        features = None
        if tapped:
            features = self.features[:, self._taps.index(number - 1) * config.dim :]
        tree_attend_kernel[(programs,)](
            *(qkv, self._keys[number], self._values[number], trees.lengths, trees.known),
            *(trees.depths, trees.seen, *self._angles, layer.q_norm, layer.k_norm, fresh),
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


def small_cut(kind: str, lines: int, inputs: int) -> TileConfig:
    """Products whose time is that of their steps: docs/components/tree_decoding.md says what
    was tried.

    Few lines a program, so that 16 take hardly longer than 8; from 33 lines on the reading of
    weights by every program counts. Where 256 inputs are all, more stages than two would only ask
    for what is not there.
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


def attend_cut(block_d: int, size: int, *, alone: bool) -> tuple[int, int]:
    """Committed positions at a time, and warps.

    Keys of 32 KB where programs are alone on their processors. Two of these do not fit on one, and
    would be done one after the other: where there are more programs, 16 KB.
    """
    elements = (16384 if alone else 8192) if size == 2 else 2048
    tile = max(16, min(128, elements // block_d))
    return tile, 8 if tile * block_d > 8192 else 4


def _add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of x + delta, x + delta)."""
    if delta is None:
        return tensor(rms_norm(x, weight, eps)), x
    normed = rms_norm(delta, weight, eps, residual=x)
    return tensor(normed.y), tensor(normed.residual)


def layer_weights(layer: Any, attention: Any, *, qk_norm: bool) -> LayerWeights:
    """Weights of a target's or drafter's layer, joined; the parts become views of the whole."""
    feedforward = layer.feedforward
    return LayerWeights(
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
