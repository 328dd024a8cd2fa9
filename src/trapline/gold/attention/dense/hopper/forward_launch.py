"""Attention's forward pass for Hopper GPUs: what it serves, how its kernel is cut and launched.

The kernel is `kernels_hopper_out`. The plain-Triton twin is `kernels_fwd.forward`: the same
recurrence, any shape and option.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trapline.gold.arithmetic import LOG2_E, cdiv
from trapline.gold.attention.dense.hopper.forward import forward_kernel
from trapline.gold.attention.dense.hopper.softmax import ROWS
from trapline.gold.attention.dense.hopper.work_partition import together
from trapline.gold.attention.dense.triton.tiles import dense, described, description
from trapline.gold.device import processors


class Plan(NamedTuple):
    """How the kernel is cut for a head width. Checked on the GPU against float64, each of them."""

    consumers: int
    block_s: int
    stages: int
    #: A consumer's registers; the loading warp has 24 and all of a block's warps share 65536 / 32.
    registers: int


#: Head width → plan. Wider heads leave registers for two warpgroups a block, narrow ones for three.
PLANS = {64: Plan(3, 128, 2, 160), 128: Plan(2, 128, 2, 240)}
#: Up to so many queries other plans win: tiles of 192 reach far beyond the diagonal and the end.
FEW = 1024
PLANS_FOR_FEW = PLANS | {64: Plan(2, 128, 2, 240)}
TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def lacks(
    q: Tensor, k: Tensor, v: Tensor, _causal: bool, window: int, softcap: float, _scale: float
) -> str | None:
    """What these arguments need and this kernel has not."""
    if window or softcap:
        return "sliding window" if window else "softcap"
    if q.dtype not in TYPES:
        return f"kernel for {q.dtype}"
    if q.shape[-1] not in PLANS:
        return f"kernel for heads {q.shape[-1]} wide"
    if q.is_cuda and torch.cuda.get_device_capability(q.device) != (9, 0):
        return "kernel for this GPU"
    if not described(dense(q, k), q, k, v):
        return "kernel for empty tensors, nor for steps that are no multiples of 16 bytes"
    return None


def faster(q: Tensor, _k: Tensor, _v: Tensor, causal: bool, *_: Any) -> bool:
    """Where the plain kernel's smaller tiles win, as measured on one H200.

    That is where most of a tile would stay empty, and where few queries of narrow heads see all
    keys: what surrounds a tile's short walk is the same, and it has more blocks to hide it behind.
    """
    queries, width = q.shape[2:]
    one_tile, narrow = queries <= ROWS.value, width <= 64
    return queries > FEW or not (one_tile or (narrow and not causal))


def plan_for(T: int, D: int) -> Plan:
    return PLANS_FOR_FEW[D] if T <= FEW else PLANS[D]


def constants(plan: Plan, causal: bool) -> dict[str, Any]:
    """What is compiled in."""
    return {
        "CONSUMERS": plan.consumers,
        "BLOCK_S": plan.block_s,
        "STAGES": plan.stages,
        "REGISTERS": plan.registers,
        "CAUSAL": causal,
    }


@cache
def tile_layout(rows: int, D: int, dtype: gl.dtype) -> gl.NVMMASharedLayout:
    """How a tile lies in shared memory: swizzled, as the copy engine and the tensor cores agree."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, D], dtype)


def descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """x (B,H,N,D) by tiles of `rows` rows."""
    layout = tile_layout(rows, x.shape[-1], TYPES[x.dtype])
    return TensorDescriptor(x, *description(x, rows), layout)


def forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int, softcap: float, scale: float
) -> tuple[Tensor, Tensor]:
    """out (B,H,T,D) and lse (B,H,T) float32, of q (B,H,T,D) and k, v (B,G,S,D)."""
    del window, softcap  # there are none: `lacks` sees to it
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    plan = plan_for(T, D)
    out, lse = q.new_empty(q.shape), q.new_empty((B, H, T), dtype=torch.float32)
    rows, programs = cdiv(T, plan.consumers * ROWS.value), processors(q)
    groups, group = together(B * H, rows, programs)
    tiles = B * H * rows
    forward_kernel[(min(tiles, programs),)](
        descriptor(q, ROWS.value),
        descriptor(k, plan.block_s),
        descriptor(v, plan.block_s),
        descriptor(out, ROWS.value),
        *(lse, T, S, H, H // G, groups, group, tiles, scale * LOG2_E),
        **constants(plan, causal),
        num_warps=4,
    )
    return out, lse
