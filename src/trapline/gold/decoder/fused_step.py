"""`FusedDecodeStep`: a decoding step in five kernels a layer, on buffers that never move.

The launches of a layer: norm and qkv product; head norms, RoPE, cache update and attention; output
product and residual; norm, gate and up products and SwiGLU; down product and residual. The kernels
are in `triton/` and `hopper/`. Small residual products of many rows take two launches instead
(`triton/split_k_linear`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor, nn
from triton.tools.tensor_descriptor import TensorDescriptor

from trapline.gold.arithmetic import LOG2_E, cdiv
from trapline.gold.decoder.hopper.linear_tma import (
    normed_linear_tma_kernel,
    normed_swiglu_tma_kernel,
)
from trapline.gold.decoder.joined_layer import LayerWeights
from trapline.gold.decoder.layers import Feedforward, Layer
from trapline.gold.decoder.network import Network
from trapline.gold.decoder.sampling import ranked
from trapline.gold.decoder.step_ops import DecodeBatch
from trapline.gold.decoder.tile_config import (
    AFTER,
    AHEAD,
    MERGE_IN_PLACE,
    TileConfig,
    attention_splits,
    attention_tile,
    tile_config_of,
    tile_constants,
    tma_constants,
    uses_tma,
)
from trapline.gold.decoder.triton.split_k_linear import SplitKLinear
from trapline.gold.decoder.triton.step_attention import attend_kernel, merge_kernel
from trapline.gold.decoder.triton.step_linear import (
    argmax_kernel,
    embed_kernel,
    normed_linear_kernel,
    normed_swiglu_kernel,
    residual_linear_kernel,
)
from trapline.gold.device import may_start_early, processors
from trapline.gold.softmax_topk.api import TopK
from trapline.gold.softmax_topk.triton import topk

#: Query heads a key head that fit into a tile of `triton.step_attention`.
MOST_HEADS = 16


def suits(decoder: Network) -> bool:
    """Whether the kernels serve this model: plain layers and weights, no bias."""
    config = decoder.config
    if not config.is_plain:
        return False
    linears: list[object] = [decoder.head]
    for layer in decoder.layers:
        assert isinstance(layer, Layer)
        attention, feedforward = layer.attention, layer.feedforward
        assert isinstance(feedforward, Feedforward)
        linears += [attention.q, attention.k, attention.v, attention.out]
        linears += [feedforward.gate, feedforward.up, feedforward.down]
    return (
        decoder.norm.weight.dtype in (torch.bfloat16, torch.float32)
        and not (config.attention_bias or config.out_bias or config.mlp_bias)
        and 16 <= config.head_dim <= 256
        and config.head_dim % 2 == 0
        and config.heads <= MOST_HEADS * config.kv_heads
        and all(type(part) is nn.Linear for part in linears)
    )


class FusedDecodeStep:
    """Logits or greedy tokens of up to `rows` rows."""

    def __init__(
        self,
        decoder: Network,
        layers: list[LayerWeights],
        angles: tuple[Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
        rows: int,
    ) -> None:
        config = decoder.config
        self._config, self._layers, self._angles = config, layers, angles
        self._keys, self._values = keys, values
        self._embedding, self._head = decoder.embedding.weight, decoder.head.weight
        self._norm = decoder.norm.weight
        self._processors = processors(self._norm)
        self._early = may_start_early(self._norm.device)
        self._precision = "ieee" if self._norm.dtype == torch.float32 else "tf32"
        wide = config.heads * config.head_dim
        joined = wide + 2 * config.kv_heads * config.head_dim
        like = self._norm
        self._x, self._y = like.new_empty((2, rows, config.dim))
        self._qkv = like.new_empty((rows, joined))
        self._seen = like.new_empty((rows, wide))
        self._inner = like.new_empty((rows, config.hidden))
        self._logits = like.new_empty((rows, config.vocab), dtype=torch.float32)
        self._squares = like.new_empty((cdiv(config.dim, 8), rows), dtype=torch.float32)
        self._arrived = like.new_zeros((rows, config.kv_heads), dtype=torch.int32)
        shapes = [(config.dim, wide), (config.dim, config.hidden)]
        self._split_k = SplitKLinear(like, shapes, rows, self._precision, early=self._early)
        tiles = cdiv(config.vocab, 16)
        self._best = like.new_empty((tiles, rows), dtype=torch.float32)
        self._place = like.new_empty((tiles, rows), dtype=torch.int32)

    def logits(self, rows: DecodeBatch) -> Tensor:
        """Stores keys and values of these tokens; returns logits (B, V) in float32."""
        self._run(rows)
        return self._logits[: len(rows.ids)]

    def ranked(self, rows: DecodeBatch, count: int) -> tuple[Tensor, TopK]:
        """Logits, and the `count` likeliest tokens of each row with their log-probabilities.

        The last product leaves the group maxima that the first half of top-k would compute.
        """
        lines, (vocabulary, inputs) = len(rows.ids), self._head.shape
        group = topk.group_of(lines, vocabulary, count, self._logits)
        block = self.tile_config_for("normed_linear", lines, vocabulary, inputs).block_n
        if group is None or block % group:
            logits = self.logits(rows)
            return logits, ranked(logits, count)
        maxima = self._logits.new_empty((lines, cdiv(vocabulary, group)))
        peaks, totals = self._logits.new_empty((2, lines, cdiv(vocabulary, block)))
        self._run(rows, {"maxima": maxima, "peaks": peaks, "totals": totals, "GROUP": group})
        logits = self._logits[:lines]
        found = topk.decided(logits, count, maxima, peaks, totals)
        return logits, TopK(found.values, found.indices, found.lse)

    def pick(self, rows: DecodeBatch, made: Tensor, tokens: Tensor, history: Tensor) -> None:
        """The likeliest token of every row; advances ids, positions and `made` by one step.

        Writes it to `history` (rows, room) at made % room; −1 where a row has no softmax.
        """
        tiles = self._run(rows)
        count = len(rows.ids)
        argmax_kernel[(count,)](
            *(self._best, self._place, rows.active, tokens, rows.ids, rows.positions, made),
            *(history, tiles, count, history.shape[1]),
            BLOCK=triton.next_power_of_2(tiles),
            PDL=self._early,
            num_warps=4,
            **self._launch(),
        )

    def _run(self, rows: DecodeBatch, extra: dict[str, Any] | None = None) -> int:
        """Runs everything up to the logits; returns the number of tiles of their columns.

        `extra` are further arguments of the last product; without them it finds the best logit of
        each tile.
        """
        count = len(rows.ids)
        self._embed(rows.ids)
        tiles = self._through(count, partial(self._attend, rows))
        head = self._y, self._head, self._logits, count, tiles
        return self._scaled(*head, best=extra is None, extra=extra)

    def _embed(self, ids: Tensor) -> None:
        """Starts the residual stream, and its norm for the first layer."""
        width = self._config.dim
        embed_kernel[(len(ids),)](
            *(ids, self._embedding, self._layers[0].norms[0], self._x, self._y),
            *(self._squares, width),
            BLOCK=triton.next_power_of_2(width),
            PDL=self._early,
            num_warps=4,
            **self._launch(),
        )

    def _through(
        self,
        count: int,
        attend: Callable[[int, LayerWeights], object],
        *,
        projected: bool = False,
    ) -> int:
        """Runs all layers on embedded rows; returns the number of square sums a row.

        `attend` maps `_qkv` to `_seen`. `projected`: `_qkv` of the first layer is there already.
        """
        tiles = 1
        for number, layer in enumerate(self._layers):
            if number > 0 or not projected:
                self._scaled(self._y, layer.qkv, self._qkv, count, tiles)
            attend(number, layer)
            tiles = self._add_linear(self._seen, layer.out, layer.norms[1], count)
            self._gated(layer.up, count, tiles)
            last = number + 1 == len(self._layers)
            after = self._norm if last else self._layers[number + 1].norms[0]
            tiles = self._add_linear(self._inner, layer.down, after, count)
        return tiles

    def _add_linear(self, x: Tensor, w: Tensor, weight: Tensor, rows: int) -> int:
        """Adds a product to the stream; returns the number of square sums a row."""
        if not self._split_k.serves(w, rows):
            return self._added(x, w, weight, rows)
        return self._split_k.add(x, w, self._x, weight, self._y, self._squares, rows)

    def _launch(self) -> dict[str, bool]:
        return {"launch_pdl": True} if self._early else {}

    def _scaled(
        self, x: Tensor, w: Tensor, out: Tensor, rows: int, parts: int, *,
        best: bool = False, extra: dict[str, Any] | None = None,
    ) -> int:  # fmt: skip
        outputs, inputs = w.shape
        cut = self.tile_config_for("normed_linear", rows, outputs, inputs)
        tiles = cdiv(outputs, cut.block_n)
        if self._early and out is self._qkv and uses_tma("normed_linear", cut, w):
            normed_linear_tma_kernel[(outputs // cut.block_n, cdiv(rows, cut.block_b))](
                TensorDescriptor.from_tensor(x[:rows], [cut.block_b, cut.block_k]),
                TensorDescriptor.from_tensor(w, [cut.block_n, cut.block_k]),
                *(w, self._squares, out, rows, outputs, inputs, parts, w.stride(0), out.stride(0)),
                self._config.norm_eps,
                PARTS=triton.next_power_of_2(parts),
                **tma_constants(cut, outputs, inputs),
                num_warps=cut.warps,
                num_stages=cut.stages,
                launch_pdl=True,
            )
            return tiles
        normed_linear_kernel[(tiles, cdiv(rows, cut.block_b))](
            *(x, w, self._squares, out),
            *((self._best, self._place) if best else (None, None)),
            *(rows, outputs, inputs, parts, x.stride(0), w.stride(0), out.stride(0)),
            self._config.norm_eps,
            PARTS=triton.next_power_of_2(parts),
            **self._cut(cut, "normed_linear", outputs, inputs),
            **(extra or {}),
        )
        return tiles

    def _gated(self, w: Tensor, rows: int, parts: int) -> None:
        outputs, inputs = w.shape[0] // 2, w.shape[1]
        cut = self.tile_config_for("normed_swiglu", rows, outputs, inputs)
        if self._early and uses_tma("normed_swiglu", cut, w):
            normed_swiglu_tma_kernel[(outputs // cut.block_n, cdiv(rows, cut.block_b))](
                TensorDescriptor.from_tensor(self._y[:rows], [cut.block_b, cut.block_k]),
                TensorDescriptor.from_tensor(w, [cut.block_n, cut.block_k]),
                *(self._squares, self._inner, rows, outputs, inputs, parts, self._inner.stride(0)),
                self._config.norm_eps,
                BLOCK_B=cut.block_b,
                BLOCK_N=cut.block_n,
                BLOCK_K=cut.block_k,
                PARTS=triton.next_power_of_2(parts),
                num_warps=cut.warps,
                num_stages=cut.stages,
                launch_pdl=True,
            )
            return
        normed_swiglu_kernel[(cdiv(outputs, cut.block_n), cdiv(rows, cut.block_b))](
            *(self._y, w, self._squares, self._inner, rows, outputs, inputs, parts),
            *(self._y.stride(0), w.stride(0), self._inner.stride(0), self._config.norm_eps),
            PARTS=triton.next_power_of_2(parts),
            **self._cut(cut, "normed_swiglu", outputs, inputs),
        )

    def _added(self, x: Tensor, w: Tensor, weight: Tensor, rows: int) -> int:
        outputs, inputs = w.shape
        cut = self.tile_config_for("residual_linear", rows, outputs, inputs)
        tiles = cdiv(outputs, cut.block_n)
        residual_linear_kernel[(tiles, cdiv(rows, cut.block_b))](
            *(x, w, self._x, weight, self._y, self._squares),
            *(rows, outputs, inputs, x.stride(0), w.stride(0)),
            **self._cut(cut, "residual_linear", outputs, inputs),
        )
        return tiles

    def tile_config_for(self, kind: str, rows: int, outputs: int, inputs: int) -> TileConfig:
        """Tile sizes of a product."""
        return tile_config_of(kind, rows, outputs, inputs, self._norm.element_size())

    def _cut(self, cut: TileConfig, kind: str, outputs: int, inputs: int) -> dict[str, object]:
        """Keyword arguments of a product's launch."""
        even = outputs % cut.block_n == 0 and inputs % (cut.split * cut.block_k) == 0
        fixed = tile_constants(
            *(cut, kind),
            even=even,
            outputs=outputs,
            inputs=inputs,
            precision=self._precision,
            early=self._early,
        )
        return {**fixed, "num_warps": cut.warps, "num_stages": cut.stages, **self._launch()}

    def _attend(self, rows: DecodeBatch, number: int, layer: LayerWeights) -> None:
        config, count = self._config, len(rows.ids)
        ratio, groups = config.heads // config.kv_heads, count // rows.beams
        block_d = triton.next_power_of_2(config.head_dim)
        tail = rows.tails.shape[1] * rows.tail_size
        cut = attention_tile(block_d, self._norm.element_size(), rows.beams, ratio, tail)
        common, splits = self._splits(rows, cut.tile)
        parts, lse = self._seen, None
        if common + splits > 1:
            shape = (common + splits, count, config.heads)
            parts = self._norm.new_empty((*shape, config.head_dim), dtype=torch.float32)
            lse = self._norm.new_empty(shape, dtype=torch.float32)
        at_once = rows.beams > 1 and common + splits <= MERGE_IN_PLACE
        programs = (groups * common + count * splits) * config.kv_heads
        attend_kernel[(programs,)](
            *(self._qkv, self._keys[number], self._values[number], rows.pages, rows.tails),
            *(rows.prefix, rows.positions, rows.active, *self._angles, layer.q_norm, layer.k_norm),
            *(parts, lse, self._seen, self._arrived, count, config.kv_heads, self._qkv.stride(0)),
            *(rows.pages.stride(0), rows.tails.stride(0)),
            *(config.head_dim**-0.5 * LOG2_E, config.norm_eps, layer.window or 0, common, splits),
            BEAMS=rows.beams,
            R=ratio,
            D=config.head_dim,
            BLOCK_D=block_d,
            BLOCK_M=max(16, triton.next_power_of_2(rows.beams * ratio)),
            BLOCK_S=cut.tile,
            P=rows.page_size,
            TAIL_P=rows.tail_size,
            WINDOWED=layer.window is not None,
            PRECISION=self._precision,
            PDL=self._early,
            PARTS=common + splits if at_once else 0,
            **self._prefetch_arguments(layer.out),
            num_warps=cut.warps,
            num_stages=2,
            maxnreg=cut.registers,
            **self._launch(),
        )
        if lse is not None and not at_once:
            merge_kernel[(count * config.heads,)](
                *(parts, lse, self._seen, common + splits, count * config.heads),
                D=config.head_dim,
                BLOCK_D=block_d,
                BLOCK_PARTS=triton.next_power_of_2(common + splits),
                PDL=self._early,
                num_warps=1,
                **self._launch(),
            )

    def _prefetch_arguments(self, w: Tensor) -> dict[str, object]:
        """Weights of the next product for attention to prefetch, if that product does not."""
        fits = w.numel() >= AHEAD and w.nbytes <= AFTER
        whole = w.is_contiguous() and w.data_ptr() % 16 == 0  # bulk copies need 16-byte alignment
        asks = self._early and fits and whole
        return {"after": w, "after_count": w.numel()} if asks else {}

    def _splits(self, rows: DecodeBatch, tile: int) -> tuple[int, int]:
        """Splits of prefix and tails that fill the GPU, of at least one tile each."""
        heads, count = self._config.kv_heads, len(rows.ids)
        each = 256 if self._norm.element_size() == 4 else max(tile, 64)
        common = 0
        if rows.beams > 1:
            positions = rows.pages.shape[1] * rows.page_size
            common = attention_splits(
                positions, count // rows.beams * heads, self._processors, each
            )
        positions = rows.tails.shape[1] * rows.tail_size
        return common, attention_splits(positions, count * heads, self._processors, each)
