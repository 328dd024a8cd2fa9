# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention's backward pass in plain Triton: every gradient has one owner, so it is repeatable.

`rows_kernel` makes δ = rowsum(dout · out) − dlse and the log-sum-exp in base 2. `dkdv_kernel` owns
a tile of keys, `dq_kernel` a tile of queries: seven products a tile instead of the five that a
kernel needs which adds to dq by atomics, and still faster than that (docs/components). So there is
nothing to gain here without `deterministic`. Read it beside `oracle.attention_backward_tiled`.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trapline.gold.arithmetic import cdiv
from trapline.gold.attention.dense.triton.backward_dkdv import dkdv_kernel
from trapline.gold.attention.dense.triton.backward_dq import dq_kernel
from trapline.gold.attention.dense.triton.tiles import (
    Layout,
    Tile,
    as_descriptor,
    block_width,
    dense,
    described,
    empty_like,
    has_tail,
    packed,
    reach,
    require,
    rule_flags,
)
from trapline.gold.device import LOG2_E


@triton.jit
def rows_kernel(
    dout, out, lse, dlse, sums_by_row, mantissa, H, T,
    dout_b, dout_h, dout_t, dout_d,
    out_b, out_h, out_t, out_d,
    row_n, row_h,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """δ times the mantissa, and lse in base 2, of a tile of queries of one head; 0 from T on."""
    tiles = row_h // BLOCK_T
    head = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = head // H, head % H
    t = tl.program_id(0) % tiles * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    inside = (t[:, None] < T) & (d[None, :] < D)
    row = t[:, None].to(tl.int64)
    place = b * dout_b + h * dout_h + row * dout_t + d[None, :] * dout_d
    left = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
    place = b * out_b + h * out_h + row * out_t + d[None, :] * out_d
    right = tl.load(out + place, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(dlse + head * T + t, mask=t < T, other=0.0)
    natural = tl.load(lse + head * T + t, mask=t < T, other=0.0)
    place = sums_by_row + head * row_h + t
    tl.store(place, (tl.sum(left * right, 1) - given) * mantissa)
    tl.store(place + row_n, natural * LOG2_E)


def backward(
    dout: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    window: int,
    softcap: float,
    scale: float,
    deterministic: bool = True,  # noqa: ARG001 - it is, and nothing is faster
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of `kernels_fwd.forward`, from what it gave."""
    layout = dense(q, k)
    rules = causal, window, softcap, scale
    return launch(dout, dlse, q, k, v, out, lse, layout, *rules)


def varlen_backward(
    dout: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    window: int,
    softcap: float,
    scale: float,
    deterministic: bool = True,  # noqa: ARG001 - it is, and nothing is faster
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of `kernels_fwd.varlen_forward`, from what it gave."""
    layout = packed(q, k, cu_q, cu_k, max_q, max_k)
    rules = causal, window, softcap, scale
    return launch(dout, dlse, q, k, v, out, lse, layout, *rules)


def parts_of(scale: float) -> tuple[float, float]:
    """A scale as its mantissa and a power of two.

    Slopes are rounded to 16 bits on their way into a product. Which numbers are rounded, scaled or
    unscaled ones, is worth ± 3 % of the error of dq and dk on a given input, and nothing on average
    (docs/components/flash_attention_backward.md). Scaled ones are what cuDNN rounds; yet the whole
    scale would push small slopes out of float16's range. Its mantissa gives the same roundings.
    """
    mantissa, exponent = math.frexp(scale)
    return mantissa, 2.0**exponent


#: No tile has more queries.
LONGEST = 128


def row_sums(
    dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor, mantissa: float, layout: Layout
) -> Tensor:
    """δ times the mantissa, lse in base 2: float32 (2, B, H, T and zeros up to whole tiles)."""
    *batches, heads, rows = layout.lse_shape
    found = lse.new_empty((2, *(batches or [1]), heads, cdiv(rows, LONGEST) * LONGEST))
    wide = block_width(dout)
    block = min(LONGEST, 4096 // wide)
    rows_kernel[(found.shape[-1] // block * (lse.numel() // rows),)](
        *(dout, out, lse.contiguous(), dlse.contiguous(), found, mantissa, heads, rows),
        *(*layout.strides(dout), *layout.strides(out), found.stride(0), found.shape[-1]),
        D=dout.shape[-1],
        BLOCK_D=wide,
        BLOCK_T=block,
    )
    return found


class Tiles(NamedTuple):
    """Of the kernel that owns keys, and of the one that owns queries."""

    keys: Tile
    queries: Tile


#: Width of a tile, whether any is masked → the tiles, for 16-bit inputs, found by measurement
#: (docs/components/flash_attention_kernels.md).
TILES = {
    (64, False): Tiles(keys=Tile(64, 64, 4, 2), queries=Tile(64, 64, 4, 2)),
    (64, True): Tiles(keys=Tile(128, 64, 4, 2), queries=Tile(64, 64, 4, 2)),
    (128, False): Tiles(keys=Tile(64, 64, 4, 2), queries=Tile(64, 64, 4, 2)),
    (128, True): Tiles(keys=Tile(64, 64, 4, 2), queries=Tile(128, 64, 8, 3)),
    (256, False): Tiles(keys=Tile(64, 64, 8, 1), queries=Tile(64, 32, 4, 2)),
    (256, True): Tiles(keys=Tile(64, 64, 8, 1), queries=Tile(64, 32, 4, 2)),
}


def tiles_for(q: Tensor, masked: bool) -> Tiles:
    """float32 takes twice the room and no tensor cores: small tiles."""
    if q.dtype == torch.float32:
        return Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1))
    return TILES[max(64, block_width(q)), masked]


def launch(
    dout: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: Layout,
    causal: bool,
    window: int,
    softcap: float,
    scale: float,
    tiles: Tiles | None = None,
    tma: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The pass with tiles and a way to read (tensor descriptors or pointers) of one's choice."""
    require(q)
    dq, dk, dv = (empty_like(x) for x in (q, k, v))
    if layout.empty or not q.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    window = reach(layout, window)
    tiles = tiles or tiles_for(q, causal or window > 0)
    if tma is None:
        tma = described(layout, q, k, v)
        if tma and not described(layout, dout):  # autograd likes to expand a single number
            dout = dout.contiguous()
    read = q, k, v, dout
    mantissa, power = parts_of(scale)
    rows = row_sums(dout, out, lse, dlse, mantissa, layout)
    numbers = (
        *(layout.cu_q, layout.cu_k, *layout.sizes, window, scale, mantissa, power, softcap),
        *(stride for x in read for stride in layout.strides(x)),
    )
    flags = rule_flags(q, layout, causal, window, softcap) | {"TMA": tma}
    tile = tiles.keys
    dkdv_kernel[(cdiv(layout.sizes[1], tile.keys) * layout.batches * layout.groups,)](
        *(*tiled(read, rows, tile, tma), dk, dv, layout.tokens(k), *numbers),
        *(*layout.strides(dk), *row_strides(rows, layout)),
        **flags,
        **tile.launch(),
    )
    tile = tiles.queries
    dq_kernel[(cdiv(layout.sizes[0], tile.queries) * layout.batches * layout.sizes[2],)](
        *(*tiled(read, rows, tile, tma), dq, layout.tokens(q), *numbers),
        *(*layout.strides(dq), *row_strides(rows, layout)),
        **flags,
        TAIL=has_tail(layout, tile, causal, window),
        **tile.launch(),
    )
    return dq, dk, dv


def tiled(read: tuple[Tensor, ...], rows: Tensor, tile: Tile, tma: bool) -> tuple[Any, ...]:
    """q, k, v, dout and the row sums as a kernel reads them: a few numbers are best by pointers."""
    if not tma:
        return *read, rows
    sizes = tile.queries, tile.keys, tile.keys, tile.queries
    return *(as_descriptor(x, n) for x, n in zip(read, sizes, strict=True)), rows


def row_strides(rows: Tensor, layout: Layout) -> tuple[int, int, int]:
    """From δ to lse, from batch to batch (packed sequences have none), from head to head."""
    kind, batch, head, _ = rows.stride()
    return kind, 0 if layout.cu_q is not None else batch, head
