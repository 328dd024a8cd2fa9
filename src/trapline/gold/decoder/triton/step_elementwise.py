# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Two Triton kernels of a decoding step; `step_ops.py` has the same operations in torch.

Arithmetic is in float32; loads and stores have the model's dtype. The head width may be any even
number: blocks are the next power of two and masked.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trapline.gold.arithmetic import cdiv
from trapline.gold.decoder.rope import Rope
from trapline.gold.device import launched


@launched
@triton.jit
def rope_and_append_kernel(
    qkv, q_out, keys, values, positions, slots, cosine, sine, q_norm, k_norm,
    eps, H, G, qkv_stride,
    D: tl.constexpr, BLOCK: tl.constexpr, ROTATED: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """One head of one row: H query heads, then G keys, then G values."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half: tl.constexpr = D // 2
    d = tl.arange(0, BLOCK)
    inside = d < half
    source = qkv + row * qkv_stride + head * D + d
    left = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    if head < H + G:
        if NORMED:
            mean_square = (tl.sum(left * left, 0) + tl.sum(right * right, 0)) / D
            scale = 1.0 / tl.sqrt(mean_square + eps)
            # Rounded to the model's dtype like a separate norm, so that both paths agree.
            if head < H:
                weights = tl.load(q_norm + d, mask=inside, other=0.0)
                others = tl.load(q_norm + half + d, mask=inside, other=0.0)
            else:
                weights = tl.load(k_norm + d, mask=inside, other=0.0)
                others = tl.load(k_norm + half + d, mask=inside, other=0.0)
            left = (left * scale * weights.to(tl.float32)).to(qkv.dtype.element_ty).to(tl.float32)
            right = (right * scale * others.to(tl.float32)).to(qkv.dtype.element_ty).to(tl.float32)
        if ROTATED:
            angle = tl.load(positions + row) * half + d
            cos = tl.load(cosine + angle, mask=inside, other=0.0).to(tl.float32)
            sin = tl.load(sine + angle, mask=inside, other=0.0).to(tl.float32)
            rotated = left * cos - right * sin
            right = right * cos + left * sin
            left = rotated
    if head < H:
        target = q_out + (row * H + head) * D + d
        stored = inside
    else:
        slot = tl.load(slots + row)
        # Not `inside & (slot >= 0)`: the interpreter of Triton 3.9 rejects masks from scalars.
        stored = d < tl.where(slot >= 0, half, 0)
        if head < H + G:
            target = keys + (slot * G + head - H) * D + d
        else:
            target = values + (slot * G + head - H - G) * D + d
    tl.store(target, left.to(q_out.dtype.element_ty), mask=stored)
    tl.store(target + half, right.to(q_out.dtype.element_ty), mask=stored)


@launched
@triton.jit
def swiglu_kernel(both, out, hidden, both_stride, BLOCK: tl.constexpr):
    """A block of one row of silu(gate) · up."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    source = both + row * both_stride + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + hidden, mask=inside, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.store(out + row * hidden + column, product.to(out.dtype.element_ty), mask=inside)


def rope_and_append(
    qkv: Tensor, turn: Rope, positions: Tensor, slots: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """As `step_ops.rope_and_append`."""
    groups, width = keys.shape[1:]
    heads = qkv.shape[1] // width - 2 * groups
    q = torch.empty((len(qkv), heads, width), dtype=qkv.dtype, device=qkv.device)
    grid = (len(qkv), heads + 2 * groups)
    rope_and_append_kernel[grid](
        *(qkv, q, keys, values, positions, slots),
        *(turn.cosine, turn.sine, turn.q_norm, turn.k_norm),
        *(turn.eps, heads, groups, qkv.stride(0)),
        D=width,
        BLOCK=triton.next_power_of_2(width // 2),
        ROTATED=turn.cosine is not None,
        NORMED=turn.q_norm is not None,
        num_warps=1,
    )
    return q


def swiglu(both: Tensor) -> Tensor:
    """As `step_ops.swiglu`."""
    rows, hidden = both.shape[0], both.shape[1] // 2
    out = torch.empty((rows, hidden), dtype=both.dtype, device=both.device)
    block = 1024
    grid = (rows, cdiv(hidden, block))
    swiglu_kernel[grid](both, out, hidden, both.stride(0), BLOCK=block)
    return out
