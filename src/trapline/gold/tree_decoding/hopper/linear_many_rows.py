# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Matrix products of a pass over 17 to 128 lines of a large model, loaded by Hopper's copy engine.

Every program reads all lines of its part of K through the cache, whose bandwidth is little above
that of the memory. A program therefore needs many weights per line, and every processor one
program. The SwiGLU product is split into about as many programs as there are processors, with one
and a half tiles of gates each up to 64 lines, and one tile of twice the size above. Products with
fewer outputs split K between programs: each stores a partial sum, and `reduce_split_k_kernel` of
the decode step adds these planes to the residual stream.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from trapline.gold.arithmetic import cdiv
from trapline.gold.decoder.joined_layer import LayerWeights
from trapline.gold.decoder.tile_config import TileConfig
from trapline.gold.decoder.triton.split_k_linear import reduce_split_k
from trapline.gold.decoder.triton.step_linear import load_square_sums, prefetch_rows
from trapline.gold.device import LOG2_E, is_hopper, launched, may_start_early, processors

#: These kernels serve models with more than LARGE weights in the SwiGLU product and passes of more
#: than FEW and at most MANY lines. The decode step serves fewer lines, cuBLAS more.
LARGE, FEW, MANY = 1 << 23, 16, 128
#: Up to this number of lines a program has one warp group.
GROUP = 64
#: Outputs per program of a split-K product, and the least number of inputs per split.
PLANE_N, PLANE_K = 64, 1024


@launched
@triton.jit
def split_k_kernel(
    x_boxes, w_boxes, w, planes, rows, N, K, each, w_row,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Partial products over `each` inputs, stored as one float32 plane (rows, N) per split of K."""
    first, top = tl.program_id(0) * BLOCK_N, tl.program_id(2) * BLOCK_B
    begin = tl.program_id(1) * each
    n, b = first + tl.arange(0, BLOCK_N), top + tl.arange(0, BLOCK_B)
    if PDL:
        prefetch_rows(w + begin, n, N, K - begin, w_row, 64)
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros([BLOCK_N, BLOCK_B], tl.float32)
    for start in range(begin, tl.minimum(begin + each, K), BLOCK_K):
        weights = w_boxes.load([first, start])
        total = tl.dot(weights, tl.trans(x_boxes.load([top, start])), total)
    row = tl.program_id(1).to(tl.int64) * rows + b
    inside = (n < N)[:, None] & (b < rows)[None, :]
    tl.store(planes + row[None, :] * N + n[:, None], total, mask=inside)


@triton.jit
def store_gated(gate, up, factor, b, n, out, rows, N, out_row):
    """Store silu(gate) · up; both are (BLOCK_B, BLOCK_N), not yet scaled by the norm's factor."""
    gate *= factor
    inner = gate * (up * factor) / (1.0 + tl.exp2(-gate * LOG2_E))
    places = out + b.to(tl.int64)[:, None] * out_row + n[None, :]
    inside = (b < rows)[:, None] & (n < N)[None, :]
    tl.store(places, inner.to(out.dtype.element_ty), mask=inside)


@launched
@triton.jit
def swiglu_wide_kernel(
    x_boxes, w_boxes, half_boxes, w, squares, out,
    rows, N, K, count, w_row, out_row, eps,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """SwiGLU product with one and a half tiles of gates per program.

    The rows of x are the left operand: half a tile of weights is too small for one.
    """
    HALF: tl.constexpr = BLOCK_N // 2
    first, top = tl.program_id(0) * (BLOCK_N + HALF), tl.program_id(1) * BLOCK_B
    second = first + BLOCK_N
    n, m = first + tl.arange(0, BLOCK_N), second + tl.arange(0, HALF)
    b = top + tl.arange(0, BLOCK_B)
    if PDL:
        prefetch_rows(w, n, N, K, w_row, 64)
        prefetch_rows(w, m, N, K, w_row, 64)
        prefetch_rows(w, N + n, 2 * N, K, w_row, 64)
        prefetch_rows(w, N + m, 2 * N, K, w_row, 64)
        gdc_wait()
        gdc_launch_dependents()
    sums = load_square_sums(squares, b, rows, count, PARTS)
    gate = tl.zeros([BLOCK_B, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_B, BLOCK_N], tl.float32)
    half_gate = tl.zeros([BLOCK_B, HALF], tl.float32)
    half_up = tl.zeros([BLOCK_B, HALF], tl.float32)
    for start in range(0, K, BLOCK_K):
        values = x_boxes.load([top, start])
        gate = tl.dot(values, tl.trans(w_boxes.load([first, start])), gate)
        up = tl.dot(values, tl.trans(w_boxes.load([N + first, start])), up)
        half_gate = tl.dot(values, tl.trans(half_boxes.load([second, start])), half_gate)
        half_up = tl.dot(values, tl.trans(half_boxes.load([N + second, start])), half_up)
    factor = tl.rsqrt(tl.sum(sums, 0) / K + eps)[:, None]
    store_gated(gate, up, factor, b, n, out, rows, N, out_row)
    store_gated(half_gate, half_up, factor, b, m, out, rows, N, out_row)


@launched
@triton.jit
def swiglu_kernel(
    x_boxes, w_boxes, w, squares, out,
    rows, N, K, count, w_row, out_row, eps,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """SwiGLU product with one tile of gates per program; the weights are the left operand."""
    first, top = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_B
    n, b = first + tl.arange(0, BLOCK_N), top + tl.arange(0, BLOCK_B)
    if PDL:
        prefetch_rows(w, n, N, K, w_row, 64)
        prefetch_rows(w, N + n, 2 * N, K, w_row, 64)
        gdc_wait()
        gdc_launch_dependents()
    sums = load_square_sums(squares, b, rows, count, PARTS)
    gate = tl.zeros([BLOCK_N, BLOCK_B], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_B], tl.float32)
    for start in range(0, K, BLOCK_K):
        values = tl.trans(x_boxes.load([top, start]))
        gate = tl.dot(w_boxes.load([first, start]), values, gate)
        up = tl.dot(w_boxes.load([N + first, start]), values, up)
    factor = tl.rsqrt(tl.sum(sums, 0) / K + eps)[:, None]
    store_gated(tl.trans(gate), tl.trans(up), factor, b, n, out, rows, N, out_row)


class ManyRowLinear:
    """Residual and SwiGLU products of `lines` lines, with the buffer for partial sums."""

    def __init__(self, layer: LayerWeights, lines: int) -> None:
        self._early = may_start_early(layer.out.device)
        self._processors = processors(layer.out)
        planes = max(self._splits(w) for w in (layer.out, layer.down))
        shape = planes, lines, len(layer.out)
        self._planes = layer.out.new_empty(shape, dtype=torch.float32)

    def _splits(self, w: Tensor) -> int:
        """Number of splits of K that gives every processor one program."""
        outputs, inputs = w.shape
        return max(1, min(self._processors * PLANE_N // outputs, inputs // PLANE_K))

    def add(
        self, x: Tensor, w: Tensor, stream: Tensor, weight: Tensor, y: Tensor, squares: Tensor
    ) -> int:
        """Adds x · wᵀ to the stream as `residual_linear_kernel` does; returns square sums a row."""
        rows, (outputs, inputs) = len(stream), w.shape
        cut = tile_config("residual_linear", rows, outputs)
        each = cdiv(inputs, self._splits(w) * cut.block_k) * cut.block_k
        planes = cdiv(inputs, each)
        grid = cdiv(outputs, cut.block_n), planes, cdiv(rows, cut.block_b)
        split_k_kernel[grid](
            TensorDescriptor.from_tensor(x, [cut.block_b, cut.block_k]),
            TensorDescriptor.from_tensor(w, [cut.block_n, cut.block_k]),
            *(w, self._planes, rows, outputs, inputs, each, w.stride(0)),
            **self._constants(cut),
        )
        after = stream, weight, y, squares
        return reduce_split_k(self._planes, planes, *after, rows, early=self._early)

    def gate(
        self, x: Tensor, w: Tensor, squares: Tensor, out: Tensor, parts: int, eps: float
    ) -> None:
        """silu(gate) · up of the normed x, as `normed_swiglu_kernel` computes it."""
        rows, outputs, inputs = len(x), w.shape[0] // 2, w.shape[1]
        cut = tile_config("normed_swiglu", rows, outputs)
        kernel, widths = swiglu_kernel, [cut.block_n]
        if rows <= GROUP:
            kernel, widths = swiglu_wide_kernel, [cut.block_n, cut.block_n // 2]
        kernel[(cdiv(outputs, sum(widths)), cdiv(rows, cut.block_b))](
            TensorDescriptor.from_tensor(x, [cut.block_b, cut.block_k]),
            *(TensorDescriptor.from_tensor(w, [width, cut.block_k]) for width in widths),
            *(w, squares, out, rows, outputs, inputs, parts, w.stride(0), out.stride(0), eps),
            PARTS=triton.next_power_of_2(parts),
            **self._constants(cut),
        )

    def _constants(self, cut: TileConfig) -> dict[str, object]:
        return {
            "BLOCK_B": cut.block_b,
            "BLOCK_N": cut.block_n,
            "BLOCK_K": cut.block_k,
            "PDL": self._early,
            "num_warps": cut.warps,
            "num_stages": cut.stages,
            **({"launch_pdl": True} if self._early else {}),
        }


def has_large_products(layer: LayerWeights, lines: int) -> bool:
    """Whether a pass over this many lines has large products."""
    return lines > FEW and layer.up.numel() > LARGE


def supports(layer: LayerWeights, lines: int) -> bool:
    """Whether these kernels serve this layer: bfloat16 on Hopper, rows aligned to 16 bytes."""
    if not has_large_products(layer, lines) or lines > MANY or layer.out.dtype != torch.bfloat16:
        return False
    return is_hopper(layer.out.device) and all(
        w.is_contiguous() and w.shape[1] % 8 == 0 and w.data_ptr() % 16 == 0
        for w in (layer.qkv, layer.out, layer.up, layer.down)
    )


def tile_config(kind: str, lines: int, outputs: int) -> TileConfig:
    """Tile sizes, one program per processor; docs/lab/tree_decoding.md lists what was measured."""
    few = lines <= GROUP
    block_b, warps = (64, 4) if few else (128, 8)
    if kind == "normed_swiglu":
        return TileConfig(block_b, 64 if few else 128, 64, 1, warps, 4)
    if kind == "residual_linear":
        return TileConfig(block_b, PLANE_N, 128, 1, warps, 4)
    if outputs > 20_000:
        return TileConfig(block_b, 128, 64, 1, warps, 4 if few else 6)
    return TileConfig(64, 64, 128, 1, 4, 4) if few else TileConfig(128, 64, 64, 1, 4, 6)
