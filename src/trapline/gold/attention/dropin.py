"""`torch.nn.functional.scaled_dot_product_attention`, computed by Trapline."""

import torch
from torch import Tensor

from trapline.gold.attention.api import flash_attention
from trapline.gold.errors import DTypeError, ShapeError, UnsupportedError


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale · query keyᵀ) value, with torch's signature and torch's meaning of it.

    query is (…, T, D), key and value are (…, S, D). `is_causal` is torch's: query t sees the keys
    up to t, counted from the *first* key, which differs from `flash_attention` when T ≠ S. Masks
    and dropout are rejected. Under autocast the operands are cast, as in torch.
    """
    _require_tensors(query=query, key=key, value=value)
    _refuse(attn_mask, dropout_p)
    query, key, value = autocast(query, key, value)
    _check(query, key, value, enable_gqa)
    q, k, v = (_as_four_axes(x) for x in (query, key, value))
    out = _from_the_first(q, k, v, scale) if is_causal else flash_attention(q, k, v, scale=scale)
    return out.reshape(query.shape)


def autocast(*operands: Tensor) -> tuple[Tensor, ...]:
    """The operands in autocast's dtype if it is enabled; float64 is unchanged, as in torch."""
    kind = operands[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return operands
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in operands)


def _from_the_first(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Causal counted from the first key: equal to counting from the last if T = S."""
    T, S = q.shape[2], k.shape[2]
    square = min(T, S)
    # No query sees the keys after the last query; queries after the last key see all keys.
    out: Tensor = flash_attention(
        q[:, :, :square], k[:, :, :square], v[:, :, :square], causal=True, scale=scale
    )
    if T <= S:
        return out
    return torch.cat([out, flash_attention(q[:, :, S:], k, v, scale=scale)], dim=2)


def _require_tensors(**operands: Tensor) -> None:
    for name, value in operands.items():
        if not isinstance(value, Tensor):
            raise DTypeError(f"{name} must be a torch tensor, got {type(value).__name__}")


def _refuse(attn_mask: Tensor | None, dropout_p: float) -> None:
    if attn_mask is not None:
        raise UnsupportedError(
            "attn_mask is not supported: is_causal=True is, flash_attention has windows, and "
            "flash_attention_varlen takes sequences of different lengths without padding"
        )
    if dropout_p:
        raise UnsupportedError(f"dropout_p must be 0, got {dropout_p}")


def _check(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    shapes = tuple(query.shape), tuple(key.shape), tuple(value.shape)
    listed = "query {}, key {} and value {}".format(*shapes)
    if min(map(len, shapes)) < 2 or len({*map(len, shapes)}) > 1:
        raise ShapeError(f"query, key and value must have axes (…, T, D), got {listed}")
    if shapes[0][-1] != shapes[2][-1]:
        raise UnsupportedError(f"queries and values must have the same width, got {listed}")
    leading = {shape[:-3] if enable_gqa else shape[:-2] for shape in shapes}
    if len(leading) > 1:
        hint = "" if enable_gqa else " (heads that share keys need enable_gqa=True)"
        raise ShapeError(f"the leading axes must be equal, got {listed}{hint}")


def _as_four_axes(x: Tensor) -> Tensor:
    """(…, heads, T, D) as (B, heads, T, D); missing axes have size 1."""
    if x.ndim < 4:
        return x[(None,) * (4 - x.ndim)]
    return x if x.ndim == 4 else x.flatten(0, -4)
