# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""What surrounds the Hopper backward: row numbers before, dq in order after. Plain Triton."""

import triton
import triton.language as tl

from trapline.gold.device import LOG2_E


@triton.jit(do_not_specialize=["T", "H"])
def prepare_kernel(
    dout, out, lse, dlse, rows, sums, mantissa, T, H,
    dout_b, dout_h, dout_t, out_b, out_h, out_t,
    D: tl.constexpr, BLOCK: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """For each tile of queries: lse in base 2, then δ = rowsum(dout · out) − dlse, times the
    scale's mantissa.

    Rows that see nothing, and rows behind the last, get an lse of inf: all their weights are 0.
    With `SHARE`, the tile's sums of dq start at 0.
    """
    blocks = tl.cdiv(T, BLOCK)
    block = tl.program_id(0).to(tl.int64)
    head = block // blocks
    b, h = head // H, head % H
    t = block % blocks * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    inside = t < T
    places = b * dout_b + h * dout_h + t[:, None] * dout_t + d[None, :]
    left = tl.load(dout + places, mask=inside[:, None], other=0.0).to(tl.float32)
    places = b * out_b + h * out_h + t[:, None] * out_t + d[None, :]
    right = tl.load(out + places, mask=inside[:, None], other=0.0).to(tl.float32)
    given = tl.load(dlse + head * T + t, mask=inside, other=0.0)
    natural = tl.load(lse + head * T + t, mask=inside, other=float("-inf"))
    pair = rows + block * (2 * BLOCK) + tl.arange(0, BLOCK)
    seeing = natural != float("-inf")
    tl.store(pair, tl.where(seeing, natural * LOG2_E, float("inf")))
    tl.store(pair + BLOCK, (tl.sum(left * right, 1) - given) * mantissa)
    if SHARE:
        places = tl.arange(0, BLOCK)[:, None] * D + d[None, :]
        tl.store(sums + block * (BLOCK * D) + places, tl.zeros([BLOCK, D], tl.float32))


@triton.jit(do_not_specialize=["T"])
def finish_kernel(sums, dq, T, power, D: tl.constexpr, BLOCK: tl.constexpr):
    """dq (B,H,T,D) from its sums: two halves of each tile, each `in_register_order`."""
    blocks = tl.cdiv(T, BLOCK)
    block = tl.program_id(0).to(tl.int64)
    x = tl.load(sums + block * (BLOCK * D) + tl.arange(0, BLOCK * D)) * power
    x = tl.reshape(x.to(dq.dtype.element_ty), [2, D // 16, BLOCK // 16, 8, 4, 2, 2])
    x = tl.reshape(tl.permute(x, [2, 5, 3, 0, 1, 4, 6]), [BLOCK, D])
    t = block % blocks * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    places = (block // blocks * T + t[:, None]) * D + d[None, :]
    tl.store(dq + places, x, mask=t[:, None] < T)
