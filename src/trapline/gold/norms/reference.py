"""Layer norm and RMS norm in torch, forward and backward.

Layer norm is torch's own, and so is RMS norm of a few rows without statistics. Of many
rows, RMS norm, which torch composes of whole tensors, runs over blocks that stay in a core's cache.
Sums run in float32 for 16-bit inputs and in the input's own dtype
otherwise. The gradient of RMS norm has a closed form (docs/components/layer_norm.md), with
g = dy · weight:

    dx = rstd · (g − x_hat · mean(g · x_hat))
"""

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trapline.gold.norms import TORCH_MOST, TORCH_MOST_RECORDED

#: Elements per thread of a block of rows: its temporaries stay in a core's cache.
_BLOCK = 1 << 17


def forward(
    x: Tensor,
    residual: Tensor | None,
    w: Tensor | None,
    b: Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = x if residual is None else x + residual
    if centred:
        y, mean, rstd = torch_layer_norm(total, w, b, eps)
    else:
        y, rstd = _rms_norm(total, w, b, eps)
        mean = x.new_empty(0, dtype=rstd.dtype)
    return y, x.new_empty(0) if residual is None else total, mean, rstd


def torch_norm(
    x: Tensor,
    residual: Tensor | None,
    w: Tensor | None,
    b: Tensor | None,
    eps: float,
    centred: bool,
    is_recorded: bool,
) -> tuple[Tensor, Tensor] | None:
    """y and total by torch's differentiable functions where they are the fastest, else None."""
    if x.device.type != "cpu":
        return None
    if centred:
        total = x if residual is None else x + residual
        return torch_layer_norm(total, w, b, eps)[0], total
    most = TORCH_MOST_RECORDED if is_recorded else TORCH_MOST
    fits = b is None and (w is None or w.dtype == x.dtype)
    if not fits or not 0 < x.numel() <= most * torch.get_num_threads():
        return None
    total = x if residual is None else x + residual
    return functional.rms_norm(total, total.shape[-1:], w, eps), total


def backward(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    w: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    eps: float,
    centred: bool,
    biased: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if centred:
        dx, dw, db = _layer_norm_backward(dy, x, w, mean, rstd, eps, biased)
    else:
        dx, dw, db = _rms_norm_backward(dy, x, w, rstd, eps, biased)
    if dtotal is not None:
        dx = dx + dtotal
    return dx.to(x.dtype), dw, db


def torch_layer_norm(
    x: Tensor, w: Tensor | None, b: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """y, mean, rstd. Statistics of 16-bit rows are float32, as torch's own are not."""
    rows = _rows_for_torch(x)
    y, mean, rstd = torch.native_layer_norm(
        rows, x.shape[-1:], _weight_for_torch(x, w), None if b is None else _wide(b), eps
    )
    return y if rows is x else y.to(x.dtype), mean, rstd


def _layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    w: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    eps: float,
    biased: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dw, db. dx is wide where torch computes it so."""
    if mean is None or rstd is None:
        _, mean, rstd = torch_layer_norm(x, w, None, eps)
    bias = x.new_empty(x.shape[-1], dtype=_wide_dtype(x)) if biased else None  # only its shape
    dx, dw, db = torch.ops.aten.native_layer_norm_backward(
        *(_rows_for_torch(dy), _rows_for_torch(x), x.shape[-1:], mean, rstd),
        *(_weight_for_torch(x, w), bias, [True, w is not None, biased]),
    )
    return (
        dx,
        x.new_empty(0) if w is None else dw.to(w.dtype),
        db.to((x if w is None else w).dtype) if biased else x.new_empty(0),
    )


def _rows_for_torch(x: Tensor) -> Tensor:
    """On a CPU, torch takes 16-bit rows with float32 weights; elsewhere all must have one dtype."""
    return x if x.device.type == "cpu" else _wide(x)


def _weight_for_torch(x: Tensor, w: Tensor | None) -> Tensor | None:
    """Next to 16-bit rows a float32 weight makes torch keep float32 statistics."""
    if w is not None:
        return _wide(w)
    return x.new_ones(x.shape[-1], dtype=torch.float32) if _is_narrow(x) else None


def _rms_norm(x: Tensor, w: Tensor | None, b: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """y, rstd."""
    flat, narrow = _flat(x), _is_narrow(x)
    weight, bias = (None if one is None else _wide(one) for one in (w, b))
    y = torch.empty_like(flat, memory_format=torch.contiguous_format)
    rstd = flat.new_empty((len(flat), 1), dtype=_wide_dtype(x))
    for here in _blocks(flat):
        rows, out = _wide(flat[here]), y[here]
        scale = _rstd(rows, eps)
        rstd[here] = scale
        # Wide rows of 16-bit inputs are copies already.
        scaled = rows.mul_(scale) if narrow else torch.mul(rows, scale, out=out)
        scaled = scaled if weight is None else scaled.mul_(weight)
        scaled = scaled if bias is None else scaled.add_(bias)
        if narrow:
            out.copy_(scaled)
    return y.view(x.shape), rstd.view(*x.shape[:-1], 1)


def _rms_norm_backward(
    dy: Tensor, x: Tensor, w: Tensor | None, rstd: Tensor | None, eps: float, biased: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dw, db."""
    flat, flat_dy = _flat(x), _flat(dy)
    width = x.shape[-1]
    weight = None if w is None else _wide(w)
    each = None if rstd is None else rstd.reshape(-1, 1)
    dx = torch.empty_like(flat, memory_format=torch.contiguous_format)
    dw, db = (torch.zeros(width, dtype=_wide_dtype(x), device=x.device) for _ in range(2))
    for here in _blocks(flat):
        rows, gradient = _wide(flat[here]), _wide(flat_dy[here])
        scale = _rstd(rows, eps) if each is None else each[here]
        x_hat = rows * scale
        products = gradient * x_hat
        dw = dw if weight is None else dw.add_(products.sum(0))
        db = db.add_(gradient.sum(0)) if biased else db
        along = products if weight is None else products.mul_(weight)
        g = gradient if weight is None else gradient * weight
        mean = along.mean(-1, keepdim=True)
        dx[here] = torch.addcmul(g, x_hat, mean, value=-1.0).mul_(scale)
    return (
        dx.view(x.shape),
        x.new_empty(0) if w is None else dw.to(w.dtype),
        db.to((x if w is None else w).dtype) if biased else x.new_empty(0),
    )


def _rstd(rows: Tensor, eps: float) -> Tensor:
    # The fastest sum of squares that torch has: it needs no temporary of the rows' size.
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return norms.square_().div_(rows.shape[-1]).add_(eps).rsqrt_()


def _flat(x: Tensor) -> Tensor:
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def _blocks(flat: Tensor) -> Iterator[slice]:
    """Slices of rows: all of them at once on a GPU."""
    rows, width = flat.shape
    step = _BLOCK * torch.get_num_threads() // max(width, 1) if flat.device.type == "cpu" else rows
    step = max(step, 1)
    for start in range(0, rows, step):
        yield slice(start, start + step)


def _is_narrow(x: Tensor) -> bool:
    return x.dtype in (torch.float16, torch.bfloat16)


def _wide(x: Tensor) -> Tensor:
    return x.float() if _is_narrow(x) else x


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if _is_narrow(x) else x.dtype


def forward_shapes(
    x: Tensor,
    residual: Tensor | None,
    _w: Any,
    _b: Any,
    _eps: float,
    centred: bool,
    _impl: str = "",
    statistics: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, total, mean, rstd; an absent result is a tensor without elements."""
    per_row = (*x.shape[:-1], 1)
    wide = torch.promote_types(x.dtype, torch.float32)
    return (
        x.new_empty(x.shape),
        x.new_empty(0 if residual is None else x.shape),
        x.new_empty(per_row if centred and statistics else 0, dtype=wide),
        x.new_empty(per_row if statistics else 0, dtype=wide),
    )


def backward_shapes(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dw, db; an absent result is a tensor without elements."""
    x, w, biased = arguments[2], arguments[3], arguments[8]
    width = x.shape[-1]
    return (
        x.new_empty(x.shape),
        x.new_empty(0) if w is None else x.new_empty(width, dtype=w.dtype),
        x.new_empty(width if biased else 0, dtype=(x if w is None else w).dtype),
    )
