"""Attention: what is accepted, and who computes it."""

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from trapline.gold import checks
from trapline.gold.attention import oracle
from trapline.gold.errors import DTypeError, RangeError, ShapeError
from trapline.gold.impl import Impl, choose

_OFFERED: tuple[Impl, ...] = ("oracle", "torch", "kernels", "triton", "hopper")


class Attended(NamedTuple):
    """What attention gives, with the log-sum-exp of each row."""

    out: Any  # (B, H, T, D)
    lse: Any  # (B, H, T), natural logarithm, −inf where a query sees no key


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: int | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    deterministic: bool = True,
    impl: Impl | None = None,
) -> Any:
    """softmax(scale · q kᵀ) v, exact, without a score matrix: (B,H,T,D) in q's dtype.

    q is (B,H,T,D), k and v are (B,G,S,D); query head h reads key/value head h // (H/G). The scale
    is D^-½ unless given. `causal` hides later keys, aligned at the last query and the last key.
    With a `window` of w, a query at position p sees the positions closer than w to p. `softcap` c
    turns a score s into c · tanh(s / c). A query that sees nothing gives 0. Differentiable for
    tensors; gradients are bitwise repeatable unless `deterministic` is False, which the kernels
    use for a faster way. `impl` names who computes: see `trapline.gold.impl`; "triton" and "hopper"
    are the two tiers of the "kernels".
    """
    return flash_attention_lse(
        q,
        k,
        v,
        causal=causal,
        window=window,
        softcap=softcap,
        scale=scale,
        deterministic=deterministic,
        impl=impl,
    ).out


def flash_attention_lse(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: int | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    deterministic: bool = True,
    impl: Impl | None = None,
) -> Attended:
    """`flash_attention` with the log-sum-exp of every row, as needed to merge partial results.

    lse is float64 for float64 inputs and float32 for all others; it is differentiable too.
    """
    chosen = choose("flash_attention", _OFFERED, impl, q=q, k=k, v=v)
    _check(q, k, v, "B H T D", "B G S D")
    rules = _rules(q, window, softcap, scale)
    if chosen == "oracle":
        out, lse = oracle.attention(q, k, v, causal=causal, window=window, **rules)
        return Attended(out.astype(q.dtype), lse.astype(np.promote_types(q.dtype, np.float32)))
    from trapline.gold.attention.dense import registry as fast_operators

    plain = causal, window or 0, rules["softcap"], rules["scale"]
    way = _operators(chosen), deterministic
    return Attended(*fast_operators.attention(q, k, v, *plain, *way))


def flash_attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_q: Any,
    cu_k: Any,
    max_q: int,
    max_k: int,
    *,
    causal: bool = False,
    window: int | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    deterministic: bool = True,
    check: bool = False,
    impl: Impl | None = None,
) -> Any:
    """`flash_attention` of sequences packed one after the other: q (tokens, H, D), k, v (…, G, D).

    Sequence i has the queries cu_q[i] … cu_q[i+1] and the keys cu_k[i] … cu_k[i+1] (int32, starting
    with 0, ending with the number of tokens); max_q and max_k bound their lengths. Tokens that
    boundaries leave over give 0, and have no gradient. `check=True` verifies the boundaries, which
    on a GPU means waiting for it.
    """
    chosen = choose("flash_attention_varlen", _OFFERED, impl, q=q, k=k, v=v, cu_q=cu_q, cu_k=cu_k)
    _check(q, k, v, "T H D", "S G D")
    checks.axes(cu_q=(cu_q, "N"), cu_k=(cu_k, "N"))
    rules = _rules(q, window, softcap, scale)
    for name, ends in (("cu_q", cu_q), ("cu_k", cu_k)):
        if checks.dtype_name(ends) != "int32":
            raise DTypeError(f"{name} must be int32, got {checks.dtype_name(ends)}")
    if check:
        _check_boundaries("cu_q", cu_q.tolist(), q.shape[0], max_q)
        _check_boundaries("cu_k", cu_k.tolist(), k.shape[0], max_k)
    if chosen != "oracle":
        from trapline.gold.attention.dense import registry as fast_operators

        plain = causal, window or 0, rules["softcap"], rules["scale"]
        packing = cu_q, cu_k, max_q, max_k
        way = _operators(chosen), deterministic
        return fast_operators.attention_varlen(q, k, v, *packing, *plain, *way)
    out = np.zeros(q.shape, q.dtype)
    for i in range(len(cu_q) - 1):
        here, there = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        one_q, one_k, one_v = (x.swapaxes(0, 1)[None] for x in (q[here], k[there], v[there]))
        one, _ = oracle.attention(one_q, one_k, one_v, causal=causal, window=window, **rules)
        out[here] = one[0].swapaxes(0, 1)
    return out


def _operators(chosen: Impl) -> str:
    """The namespace of the operators that do the work; importing it registers them."""
    if chosen == "torch":
        from trapline.gold.attention.dense.reference import TORCH

        return TORCH
    from trapline.gold.attention.dense.tiers import KERNELS, TIERS

    return TIERS.get(chosen, KERNELS)


def _check(q: Any, k: Any, v: Any, q_axes: str, kv_axes: str) -> None:
    checks.floating(*checks.LOW_FLOATS, q=q, k=k, v=v)
    sizes = checks.axes(q=(q, q_axes), k=(k, kv_axes), v=(v, kv_axes))
    if sizes["H"] % sizes["G"] if sizes["G"] else sizes["H"]:
        raise ShapeError(
            f"{sizes['H']} query heads are no multiple of {sizes['G']} key/value heads"
        )


def _rules(q: Any, window: int | None, softcap: float, scale: float | None) -> dict[str, float]:
    if window is not None:
        checks.integer_between(1, 2**31 - 1, window=window)
    if not 0.0 <= softcap < float("inf"):
        raise RangeError(f"softcap must be 0 (none) or positive, got {softcap}")
    if scale is None:
        scale = max(q.shape[-1], 1) ** -0.5
    checks.positive(scale=scale)
    return {"softcap": float(softcap), "scale": float(scale)}


def _check_boundaries(name: str, ends: list[int], tokens: int, longest: int) -> None:
    lengths = [end - start for start, end in pairwise(ends)]
    if not ends or ends[0] != 0 or ends[-1] != tokens or min(lengths, default=0) < 0:
        raise RangeError(f"{name} must rise from 0 to {tokens}, got {ends}")
    if max(lengths, default=0) > longest:
        raise RangeError(f"{name} has a sequence of {max(lengths)}, longer than {longest}")
