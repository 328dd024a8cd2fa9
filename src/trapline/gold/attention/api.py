"""Attention: the public functions, their checks, and the choice of an implementation."""

import sys
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from trapline.gold import checks
from trapline.gold.attention import oracle
from trapline.gold.errors import DTypeError, RangeError, ShapeError
from trapline.gold.impl import Impl, choose
from trapline.gold.replay import replayed

_OFFERED: tuple[Impl, ...] = ("oracle", "torch", "kernels", "triton", "hopper")
#: Heads before tokens, as in torch, or tokens before heads, as in flash-attn.
Layout = Literal["bhtd", "bthd"]
_LAYOUTS = get_args(Layout)


class Attended(NamedTuple):
    """The result of attention, with the log-sum-exp of each row."""

    out: Any  # (B, H, T, D), or (B, T, H, D) in that layout
    lse: Any  # (B, H, T), natural logarithm, −inf where a query sees no key


class AttentionGradients(NamedTuple):
    """Gradients of the inputs of attention, in their shapes and dtypes."""

    dq: Any
    dk: Any
    dv: Any


@replayed
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
    layout: Layout = "bhtd",
    impl: Impl | None = None,
) -> Any:
    """softmax(scale · q kᵀ) v, exact, without a score matrix: (B,H,T,D) in q's dtype.

    q is (B,H,T,D), k and v are (B,G,S,D); query head h reads key/value head h // (H/G). The scale
    defaults to D^-½. `causal` hides later keys; the last query is aligned with the last key. With a
    `window` of w, a query at position p sees the positions closer than w to p. A `softcap` of c
    turns a score s into c · tanh(s / c). A query that sees no key gives 0. Tensors are
    differentiable; gradients are bitwise repeatable unless `deterministic` is False, which lets the
    kernels use a faster algorithm. With `layout="bthd"` q is (B,T,H,D), k and v are (B,S,G,D) and
    the result is (B,T,H,D), as in flash-attn. `impl` names the implementation, see
    `trapline.gold.impl`; "triton" and "hopper" are the two tiers of "kernels".
    """
    if impl is None and layout == "bhtd" and window is None and softcap == 0.0 and scale is None:
        tensor = getattr(sys.modules.get("torch"), "Tensor", None)
        if type(q) is type(k) is type(v) is tensor and q.is_cpu:
            from trapline.gold.attention.dense.registry import attention_by_torch

            out = attention_by_torch(q, k, v, causal)
            if out is not None:
                return out
    rules = causal, window, softcap, scale, deterministic
    chosen, fields = _checked(q, k, v, rules, layout, impl)
    if chosen == "oracle":
        return _in_layout(_by_oracle(*fields).out, layout)
    from trapline.gold.attention.dense import dense_problem
    from trapline.gold.attention.dense.registry import attention

    # Without lse, torch's own function may serve, whose lse has no gradient.
    out, _ = attention(dense_problem(*fields), chosen, with_lse=False)
    return _in_layout(out, layout)


@replayed
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
    layout: Layout = "bhtd",
    impl: Impl | None = None,
) -> Attended:
    """`flash_attention` with the log-sum-exp of every row, as needed to merge partial results.

    lse (B,H,T) is float64 for float64 inputs and float32 for all others. It is differentiable.
    """
    rules = causal, window, softcap, scale, deterministic
    chosen, fields = _checked(q, k, v, rules, layout, impl)
    if chosen == "oracle":
        out, lse = _by_oracle(*fields)
    else:
        from trapline.gold.attention.dense import dense_problem
        from trapline.gold.attention.dense.registry import attention

        out, lse = attention(dense_problem(*fields), chosen)
    return Attended(_in_layout(out, layout), lse)


def _checked(
    q: Any,
    k: Any,
    v: Any,
    rules: tuple[bool, int | None, float, float | None, bool],
    layout: Layout,
    impl: Impl | None,
) -> tuple[Impl, tuple[Any, ...]]:
    """The implementation, and the fields of a dense problem, heads before tokens."""
    chosen = choose("flash_attention", _OFFERED, impl, q=q, k=k, v=v)
    if _tokens_first(layout):
        _check(q, k, v, "B T H D", "B S G D")
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    else:
        _check(q, k, v, "B H T D", "B G S D")
    causal, window, softcap, scale, deterministic = rules
    softcap, scale = checked_rules(q, window, softcap, scale)
    return chosen, (q, k, v, causal, window or 0, softcap, scale, deterministic)


def _by_oracle(
    q: Any, k: Any, v: Any, causal: bool, window: int, softcap: float, scale: float, _: bool
) -> Attended:
    out, lse = oracle.attention(
        q, k, v, causal=causal, window=window or None, softcap=softcap, scale=scale
    )
    return Attended(out.astype(q.dtype), lse.astype(np.promote_types(q.dtype, np.float32)))


def _in_layout(out: Any, layout: Layout) -> Any:
    """(B,H,T,D), or with tokens before heads if the caller's arrays have them so."""
    return out.swapaxes(1, 2) if layout == "bthd" else out


@replayed
def flash_attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    deterministic: bool = True,
    layout: Layout = "bhtd",
    impl: Impl | None = None,
) -> AttentionGradients:
    """dq, dk, dv of `flash_attention_lse`, from its inputs and its results `out` and `lse`.

    `dout` is the gradient of out, `dlse` that of lse (zeros if omitted). All options must equal
    those of the forward call; `layout` is that of all arrays but lse and dlse. Tensors need no
    `requires_grad`: this computes gradients, it does not record them.
    """
    arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    arrays |= {} if dlse is None else {"dlse": dlse}
    chosen = choose("flash_attention_backward", _OFFERED, impl, **arrays)
    checks.one_device(**arrays)
    if _tokens_first(layout):
        _check(q, k, v, "B T H D", "B S G D")
        checks.axes(q=(q, "B T H D"), out=(out, "B T H D"), dout=(dout, "B T H D"))
        dout, q, k, v, out = (x.swapaxes(1, 2) for x in (dout, q, k, v, out))
        rest: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap}
        rest |= {"scale": scale, "deterministic": deterministic, "impl": impl, "dlse": dlse}
        found = flash_attention_backward(dout, q, k, v, out, lse, **rest)
        return AttentionGradients(*(x.swapaxes(1, 2) for x in found))
    _check(q, k, v, "B H T D", "B G S D")
    checks.floating(*checks.LOW_FLOATS, q=q, out=out, dout=dout)
    checks.floating("float64" if checks.dtype_name(q) == "float64" else "float32", lse=lse)
    rows = {name: (arrays[name], "B H T") for name in ("lse", "dlse") if name in arrays}
    checks.axes(q=(q, "B H T D"), out=(out, "B H T D"), dout=(dout, "B H T D"), **rows)
    softcap, scale = checked_rules(q, window, softcap, scale)
    if chosen == "oracle":
        rules: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap}
        given = 0.0 if dlse is None else dlse
        grads = oracle.attention_backward_tiled(
            dout, q, k, v, out, lse, dlse=given, scale=scale, **rules
        )
        return AttentionGradients(*(x.astype(q.dtype) for x in grads))
    from trapline.gold.attention.dense import dense_problem
    from trapline.gold.attention.dense.registry import gradients

    problem = dense_problem(q, k, v, causal, window or 0, softcap, scale, deterministic)
    dlse = None if dlse is None else dlse.to(lse.dtype)
    return AttentionGradients(*gradients(dout, dlse, out, lse, *problem, chosen))


@replayed
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
    check: bool | None = None,
    impl: Impl | None = None,
) -> Any:
    """`flash_attention` of packed sequences: q (tokens, H, D), k and v (tokens, G, D).

    Sequence i has the queries cu_q[i] … cu_q[i+1] and the keys cu_k[i] … cu_k[i+1] (int32); max_q
    and max_k bound their lengths. Tokens outside all sequences give 0 and have zero gradients.

    `check=True` verifies that the boundaries rise from 0 to the number of tokens and that no
    sequence exceeds its bound. The default verifies, for NumPy arrays and CPU tensors, that they
    rise and stay within the tokens and bounds; for CUDA tensors, where reading them waits for the
    device and cannot be captured in a graph, and under `torch.compile`, it verifies nothing.
    `check=False` never does. Kernels cut a sequence that exceeds its bound; the rest gives 0.
    """
    chosen = choose("flash_attention_varlen", _OFFERED, impl, q=q, k=k, v=v, cu_q=cu_q, cu_k=cu_k)
    _check(q, k, v, "T H D", "S G D")
    checks.axes(cu_q=(cu_q, "N"), cu_k=(cu_k, "N"))
    checks.one_device(q=q, cu_q=cu_q, cu_k=cu_k)
    softcap, scale = checked_rules(q, window, softcap, scale)
    for name, ends in (("cu_q", cu_q), ("cu_k", cu_k)):
        if checks.dtype_name(ends) != "int32":
            raise DTypeError(f"{name} must be int32, got {checks.dtype_name(ends)}")
    if check or (check is None and readable(cu_q)):
        checks.integers(max_q=max_q, max_k=max_k)
        _check_boundaries("cu_q", cu_q.tolist(), q.shape[0], max_q, complete=bool(check))
        _check_boundaries("cu_k", cu_k.tolist(), k.shape[0], max_k, complete=bool(check))
    if chosen != "oracle":
        from trapline.gold.attention.dense import dense_problem
        from trapline.gold.attention.dense.registry import attention

        sizes = {"cu_q": cu_q, "cu_k": cu_k, "max_q": max_q, "max_k": max_k}
        rules = causal, window or 0, softcap, scale, deterministic
        problem = dense_problem(q, k, v, *rules)._replace(**sizes)
        return attention(problem, chosen)[0]
    out = np.zeros(q.shape, q.dtype)
    options: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap}
    for i in range(len(cu_q) - 1):
        here, there = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        one_q, one_k, one_v = (x.swapaxes(0, 1)[None] for x in (q[here], k[there], v[there]))
        one, _ = oracle.attention(one_q, one_k, one_v, scale=scale, **options)
        out[here] = one[0].swapaxes(0, 1)
    return out


def readable(array: Any) -> bool:
    """Whether values can be read at once: NumPy arrays and CPU tensors, unless being compiled."""
    if isinstance(array, np.ndarray):
        return True
    return array.device.type == "cpu" and not sys.modules["torch"].compiler.is_compiling()


def _check(q: Any, k: Any, v: Any, q_axes: str, kv_axes: str) -> None:
    if (
        q.dtype == k.dtype == v.dtype
        and q.device == k.device == v.device
        and q.shape == k.shape == v.shape
        and 2 * len(q.shape) == len(q_axes) + 1  # one letter an axis
        and checks.dtype_name(q) in checks.LOW_FLOATS
    ):
        return  # right at first sight: as many heads and tokens everywhere
    checks.floating(*checks.LOW_FLOATS, q=q, k=k, v=v)
    checks.one_device(q=q, k=k, v=v)
    sizes = checks.axes(q=(q, q_axes), k=(k, kv_axes), v=(v, kv_axes))
    tokens = sizes["T"], sizes["S"]
    try:
        check_heads(sizes["H"], sizes["G"], empty=True)
    except ShapeError as error:
        if q_axes != "B H T D" or not all(tokens) or tokens[0] % tokens[1]:
            raise
        raise ShapeError(f"{error}; if tokens come before heads, give layout='bthd'") from None


def _tokens_first(layout: str) -> bool:
    if layout not in _LAYOUTS:
        raise RangeError(f"layout must be 'bhtd' or 'bthd', got {layout!r}")
    return layout == "bthd"


def check_heads(heads: int, kv_heads: int, *, empty: bool) -> None:
    """Whether query heads can share key/value heads; `empty` permits none of either."""
    fits = heads % kv_heads == 0 if kv_heads else heads == 0 and empty
    if not fits:
        raise ShapeError(
            "the number of query heads must be a multiple of the number of key/value heads, "
            f"got {heads} and {kv_heads}"
        )


def checked_rules(
    q: Any, window: int | None, softcap: float, scale: float | None
) -> tuple[float, float]:
    """Softcap and scale as numbers."""
    if window is not None:
        checks.integer_between(1, 2**31 - 1, window=window)
    if not hasattr(softcap, "__float__"):
        raise DTypeError(f"softcap must be a number, got {softcap!r}")
    if not 0.0 <= softcap < float("inf"):
        raise RangeError(f"softcap must be 0 (none) or positive and finite, got {softcap}")
    if scale is None:
        return float(softcap), max(q.shape[-1], 1) ** -0.5
    checks.positive(scale=scale)
    return float(softcap), float(scale)


def _check_boundaries(
    name: str, ends: list[int], tokens: int, longest: int, *, complete: bool
) -> None:
    lengths = [end - start for start, end in pairwise(ends)]
    if complete:
        if not ends or ends[0] != 0 or ends[-1] != tokens or min(lengths, default=0) < 0:
            raise RangeError(f"{name} must rise from 0 to {tokens}, got {ends}")
    elif ends and (ends[0] < 0 or ends[-1] > tokens or min(lengths, default=0) < 0):
        raise RangeError(f"{name} must rise and stay between 0 and {tokens}, got {ends}")
    if max(lengths, default=0) > longest:
        raise RangeError(
            f"{name} has a sequence of {max(lengths)} tokens, but the maximum given is {longest}"
        )
