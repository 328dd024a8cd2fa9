"""Attention's backward pass for Hopper GPUs, from Gluon kernels: two ways to the same gradients.

Where the order of additions may vary (`deterministic=False`), `kernels_hopper_dkdv` makes dk, dv
and shares of dq in one walk; `kernels_hopper_rows` clears the sums before and puts dq in order
after. Otherwise `kernels_hopper_dkdv` makes dk and dv alone, and `kernels_hopper_dq` computes the
scores again for dq. The plain-Triton twin of both is `kernels_bwd.backward`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trapline.gold.arithmetic import cdiv
from trapline.gold.attention.dense.hopper import forward_launch as kernels_hopper_fwd
from trapline.gold.attention.dense.hopper.backward_dkdv import LINE, QUERIES, dkdv_kernel
from trapline.gold.attention.dense.hopper.backward_dq import dq_kernel
from trapline.gold.attention.dense.hopper.backward_prepare import finish_kernel, prepare_kernel
from trapline.gold.attention.dense.hopper.forward_launch import descriptor
from trapline.gold.attention.dense.hopper.primitives import ROWS
from trapline.gold.attention.dense.triton.backward import parts_of
from trapline.gold.attention.dense.triton.tiles import dense, described
from trapline.gold.device import processors

#: How single numbers lie in shared memory.
PLAIN = gl.NVMMASharedLayout(0, 32, 2)


class Plan(NamedTuple):
    """How the kernels are cut for a head width. Each is checked on the GPU against float64."""

    #: Query tiles in flight: with shares of dq, and without.
    share_stages: int
    stages: int
    #: Whether the copy engine adds the shares: it needs shared memory, the threads need time.
    copy: bool
    #: Keys of a tile in the walk for dq, and how many tiles are in flight.
    dq_keys: int
    dq_stages: int


PLANS = {64: Plan(3, 3, False, 128, 2), 128: Plan(2, 3, True, 128, 2)}


def lacks(
    _dout: Tensor,
    _dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    _out: Tensor,
    _lse: Tensor,
    causal: bool,
    window: int,
    softcap: float,
    scale: float,
    _deterministic: bool = True,
) -> str | None:
    """What these arguments need and these kernels have not: the same as in the forward pass."""
    return kernels_hopper_fwd.lacks(q, k, v, causal, window, softcap, scale)


def faster(
    _dout: Tensor,
    _dlse: Tensor,
    q: Tensor,
    _k: Tensor,
    _v: Tensor,
    _out: Tensor,
    _lse: Tensor,
    causal: bool,
    _window: int,
    _softcap: float,
    _scale: float,
    deterministic: bool = True,
) -> bool:
    """Where the plain kernels' smaller tiles win, as measured on one H200.

    That is where most of a tile would stay empty; and with narrow heads, whose products are too
    short to hide much behind, unless causal shares of dq spare two of seven products.
    """
    few, narrow = q.shape[2] <= QUERIES.value, q.shape[3] <= 64
    return not few and (not narrow or (causal and not deterministic))


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
    deterministic: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of attention's forward pass, from what it gave."""
    del window, softcap  # there are none: `lacks` sees to it
    if not described(dense(q, k), dout):
        dout = dout.contiguous()
    tiles = q.shape[0] * q.shape[1] * cdiv(q.shape[2], QUERIES.value)
    rows = q.new_empty((tiles, 2 * QUERIES.value), dtype=torch.float32)
    # What is not shared needs no sums; an address must be there all the same.
    lines = 0 if deterministic else tiles * QUERIES.value * q.shape[3] // LINE.value
    sums = q.new_empty((max(lines, 1), LINE.value), dtype=torch.float32)
    mantissa, power = parts_of(scale)
    prepare(dout, dlse, out, lse, rows, sums, mantissa, share=not deterministic)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    along_keys(q, k, v, dout, rows, dk, dv, sums, causal, scale, share=not deterministic)
    if deterministic:
        along_queries(q, k, v, dout, rows, dq, causal, scale)
    else:
        sizes = {"D": q.shape[3], "BLOCK": QUERIES.value}
        finish_kernel[(tiles,)](sums, dq, q.shape[2], power, **sizes)
    return dq, dk, dv


def prepare(
    dout: Tensor,
    dlse: Tensor,
    out: Tensor,
    lse: Tensor,
    rows: Tensor,
    sums: Tensor,
    mantissa: float,
    *,
    share: bool,
) -> None:
    """lse and δ by tiles of queries, and sums of 0."""
    if out.stride(-1) != 1:
        out = out.contiguous()
    _, H, T, D = dout.shape
    prepare_kernel[(rows.shape[0],)](
        *(dout, out, lse.contiguous(), dlse.contiguous(), rows, sums, mantissa, T, H),
        *(*dout.stride()[:3], *out.stride()[:3]),
        D=D,
        BLOCK=QUERIES.value,
        SHARE=share,
    )


def along_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    rows: Tensor,
    dk: Tensor,
    dv: Tensor,
    sums: Tensor,
    causal: bool,
    scale: float,
    *,
    share: bool,
) -> None:
    """dk and dv, and with `share` all shares of dq."""
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    tiles = cdiv(S, 2 * ROWS.value)
    lines = QUERIES.value * D // LINE.value // 2
    dkdv_kernel[(tiles * B * G,)](
        *(descriptor(x, ROWS.value) for x in (q, k, v, dout)),
        TensorDescriptor.from_tensor(rows, [1, 2 * QUERIES.value], PLAIN),
        *(descriptor(x, ROWS.value) for x in (dk, dv)),
        TensorDescriptor.from_tensor(sums, [lines, LINE.value], PLAIN),
        *(sums, T, S, H, H // G, B * G, bunch(q, tiles, causal), scale, *parts_of(scale)),
        **dkdv_constants(PLANS[D], causal, share),
        num_warps=4,
    )


def along_queries(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    rows: Tensor,
    dq: Tensor,
    causal: bool,
    scale: float,
) -> None:
    """dq by owners."""
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    tiles, plan = cdiv(T, 2 * ROWS.value), PLANS[D]
    dq_kernel[(tiles * B * H,)](
        descriptor(q, ROWS.value),
        *(descriptor(x, plan.dq_keys) for x in (k, v)),
        descriptor(dout, ROWS.value),
        *(rows, descriptor(dq, ROWS.value)),
        *(T, S, H, H // G, B * H, bunch(q, tiles, causal), scale, *parts_of(scale)),
        **dq_constants(plan, causal),
        num_warps=4,
    )


def bunch(q: Tensor, tiles: int, causal: bool) -> int:
    """How many groups, or heads, are dealt together: as many as run at once, if tiles differ."""
    return max(1, processors(q) // tiles) if causal else 1


def dkdv_constants(plan: Plan, causal: bool, share: bool) -> dict[str, Any]:
    """What is compiled in."""
    stages = plan.share_stages if share else plan.stages
    return {"STAGES": stages, "CAUSAL": causal, "SHARE": share, "COPY": share and plan.copy}


def dq_constants(plan: Plan, causal: bool) -> dict[str, Any]:
    return {"BLOCK_S": plan.dq_keys, "STAGES": plan.dq_stages, "CAUSAL": causal}
