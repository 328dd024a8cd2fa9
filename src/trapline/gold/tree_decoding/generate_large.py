"""Launches of `hopper.linear_many_rows`: for which products, and how they are cut."""

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from trapline.gold.arithmetic import cdiv
from trapline.gold.decoder.fused_step import LayerWeights
from trapline.gold.decoder.split_k_linear import reduce_split_k
from trapline.gold.decoder.tile_config import TileConfig
from trapline.gold.device import is_hopper, may_start_early, processors
from trapline.gold.tree_decoding.hopper.linear_many_rows import (
    gated_large_kernel,
    gated_whole_kernel,
    planes_kernel,
)

#: A model with more weights than this in its gated product is large; its products are cut for so
#: many lines as lie between FEW and MANY. Fewer are a plain step's, and more are cuBLAS's.
LARGE, FEW, MANY = 1 << 23, 16, 128
#: Up to so many lines a program has one group of warps.
GROUP = 64
#: Outputs of a program whose K is cut; of K at least so many.
PLANE_N, PLANE_K = 64, 1024


class Large:
    """Planes for the products of `lines` lines that are added to the stream."""

    def __init__(self, layer: LayerWeights, lines: int) -> None:
        self._early = may_start_early(layer.out.device)
        self._processors = processors(layer.out)
        planes = max(self._planes_of(w) for w in (layer.out, layer.down))
        shape = planes, lines, len(layer.out)
        self._planes = layer.out.new_empty(shape, dtype=torch.float32)

    def _planes_of(self, w: Tensor) -> int:
        """Parts of K that give every processor a program."""
        outputs, inputs = w.shape
        return max(1, min(self._processors * PLANE_N // outputs, inputs // PLANE_K))

    def add(
        self, x: Tensor, w: Tensor, stream: Tensor, weight: Tensor, y: Tensor, squares: Tensor
    ) -> int:
        """Adds x · wᵀ to the stream as `residual_linear_kernel` does; returns square sums a row."""
        rows, (outputs, inputs) = len(stream), w.shape
        cut = large_cut("residual_linear", rows, outputs)
        each = cdiv(inputs, self._planes_of(w) * cut.block_k) * cut.block_k
        planes = cdiv(inputs, each)
        grid = cdiv(outputs, cut.block_n), planes, cdiv(rows, cut.block_b)
        planes_kernel[grid](
            TensorDescriptor.from_tensor(x, [cut.block_b, cut.block_k]),
            TensorDescriptor.from_tensor(w, [cut.block_n, cut.block_k]),
            *(w, self._planes, rows, outputs, inputs, each, w.stride(0)),
            **self._cut(cut),
        )
        after = stream, weight, y, squares
        return reduce_split_k(self._planes, planes, *after, rows, early=self._early)

    def gate(
        self, x: Tensor, w: Tensor, squares: Tensor, out: Tensor, parts: int, eps: float
    ) -> None:
        """silu(gate) · up of x behind a norm, as `gated_kernel` does."""
        rows, outputs, inputs = len(x), w.shape[0] // 2, w.shape[1]
        cut = large_cut("normed_swiglu", rows, outputs)
        kernel, widths = gated_whole_kernel, [cut.block_n]
        if rows <= GROUP:
            kernel, widths = gated_large_kernel, [cut.block_n, cut.block_n // 2]
        kernel[(cdiv(outputs, sum(widths)), cdiv(rows, cut.block_b))](
            TensorDescriptor.from_tensor(x, [cut.block_b, cut.block_k]),
            *(TensorDescriptor.from_tensor(w, [width, cut.block_k]) for width in widths),
            *(w, squares, out, rows, outputs, inputs, parts, w.stride(0), out.stride(0), eps),
            PARTS=triton.next_power_of_2(parts),
            **self._cut(cut),
        )

    def _cut(self, cut: TileConfig) -> dict[str, object]:
        return {
            "BLOCK_B": cut.block_b,
            "BLOCK_N": cut.block_n,
            "BLOCK_K": cut.block_k,
            "PDL": self._early,
            "num_warps": cut.warps,
            "num_stages": cut.stages,
            **({"launch_pdl": True} if self._early else {}),
        }


def is_large(layer: LayerWeights, lines: int) -> bool:
    """Whether a pass over these lines has large products."""
    return lines > FEW and layer.up.numel() > LARGE


def serves(layer: LayerWeights, lines: int) -> bool:
    """Whether these are for here: stages are Hopper's, and its copy engine wants whole 16 bytes."""
    if not is_large(layer, lines) or lines > MANY or layer.out.dtype != torch.bfloat16:
        return False
    return is_hopper(layer.out.device) and all(
        w.is_contiguous() and w.shape[1] % 8 == 0 and w.data_ptr() % 16 == 0
        for w in (layer.qkv, layer.out, layer.up, layer.down)
    )


def large_cut(kind: str, lines: int, outputs: int) -> TileConfig:
    """docs/components/tree_decoding.md says what was tried.

    One program a processor, with as many stages as help; two that fit would not be on all of them.
    """
    few = lines <= GROUP
    block_b, warps = (64, 4) if few else (128, 8)
    if kind == "normed_swiglu":
        return TileConfig(block_b, 64 if few else 128, 64, 1, warps, 4)
    if kind == "residual_linear":
        return TileConfig(block_b, PLANE_N, 128, 1, warps, 4)
    if outputs > 20_000:
        return TileConfig(block_b, 128, 64, 1, warps, 4 if few else 6)
    return TileConfig(64, 64, 128, 1, 4, 4) if few else TileConfig(128, 64, 64, 1, 4, 6)
