# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention's forward pass in plain Triton: one program per query tile, keys streamed by tiles.

Read it beside `oracle.attention_tiled`: the same recurrence, in base 2 because the hardware has
exp2. Any strides, any head width up to 256, T ≠ S, grouped heads, packed sequences. Offsets into
tensors are 64-bit. −inf is the mask: a finite sentinel would average rows that see nothing.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trapline.gold.errors import DTypeError, RangeError

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
WIDEST = 256


@triton.jit
def sees(t, s, T, S, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """Whether query t, standing at key t + S − T, sees key s. Nothing outside the problem sees."""
    ahead = s - (t + S - T)
    seen = (t < T) & (s < S)
    if CAUSAL:
        seen = seen & (ahead <= 0)
    if WINDOWED:
        seen = seen & (ahead < window) & (-ahead < window)
    return seen


@triton.jit
def scored(products, scale, softcap, CAPPED: tl.constexpr):
    """Scores from dot products. tanh(x) = 2 σ(2x) − 1."""
    scores = products * scale
    if CAPPED:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    return scores


@triton.jit
def span(cu, b, length, PACKED: tl.constexpr):
    """Where sequence b starts among packed tokens, and its length; (0, length) if not packed."""
    start = 0
    if PACKED:
        start = tl.load(cu + b)
        length = tl.load(cu + b + 1) - start
    return start, length


@triton.jit
def key_range(first, last, S, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """The keys that queries at the key positions first … last can see."""
    begin = 0
    end = S
    if CAUSAL:
        end = tl.minimum(end, last + 1)
    if WINDOWED:
        begin = tl.maximum(begin, first - window + 1)
        end = tl.minimum(end, last + window)
    return begin, end


@triton.jit
def rows_of(base, index, stride, d, stride_d, length, D: tl.constexpr):
    """Loads rows (len(index), len(d)) of a matrix; zero outside of it."""
    places = base + index[:, None].to(tl.int64) * stride + d[None, :] * stride_d
    return tl.load(places, mask=(index[:, None] < length) & (d[None, :] < D), other=0.0)


@triton.jit
def forward_kernel(
    q, k, v, out, lse, cu_q, cu_k,
    T, S, H, R, window, scale, softcap,
    q_b, q_h, q_t, q_d,
    k_b, k_g, k_s, k_d,
    v_b, v_g, v_s, v_d,
    out_b, out_h, out_t, out_d,
    lse_b, lse_h,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out and lse of one tile of queries of one head."""
    tiles = tl.cdiv(T, BLOCK_T)
    top = (tl.program_id(0) % tiles) * BLOCK_T
    head = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = head // H, head % H
    g = h // R
    q_start, T = span(cu_q, b, T, PACKED)
    k_start, S = span(cu_k, b, S, PACKED)
    if top >= T:
        return
    q += b * q_b + h * q_h + q_start * q_t
    k += b * k_b + g * k_g + k_start * k_s
    v += b * v_b + g * v_g + k_start * v_s
    out += b * out_b + h * out_h + q_start * out_t
    lse += b * lse_b + h * lse_h + q_start

    t = top + tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    queries = rows_of(q, t, q_t, d, q_d, T, D)
    peak = tl.full([BLOCK_T], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)
    weighted = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    last = tl.minimum(top + BLOCK_T, T) - 1
    begin, end = key_range(top + S - T, last + S - T, S, window, CAUSAL, WINDOWED)
    for start in range(begin, end, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        keys = rows_of(k, s, k_s, d, k_d, S, D)
        products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        scores = scored(products, scale, softcap, CAPPED) * LOG2_E
        seen = sees(t[:, None], s[None, :], T, S, window, CAUSAL, WINDOWED)
        scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # A row that has seen no key stays at −inf, and −inf − (−inf) is not a number.
        origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - origin[:, None])
        correction = tl.exp2(peak - origin)
        total = total * correction + tl.sum(weights, 1)
        values = rows_of(v, s, v_s, d, v_d, S, D)
        weighted = weighted * correction[:, None]
        weighted += tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        peak = new_peak

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    inside = t[:, None] < T
    places = out + t[:, None].to(tl.int64) * out_t + d[None, :] * out_d
    rows = (weighted / total[:, None]).to(out.dtype.element_ty)
    tl.store(places, rows, mask=inside & (d[None, :] < D))
    natural = tl.where(empty, float("-inf"), (peak + tl.log2(total)) * LN_2)
    tl.store(lse + t, natural, mask=t < T)


class Layout(NamedTuple):
    """A problem as the kernels see it: (B,H,T,D) and (B,G,S,D), or packed (tokens, heads, D)."""

    #: T, S (the longest, if packed), H, R
    sizes: tuple[int, int, int, int]
    batches: int
    cu_q: Tensor | None
    cu_k: Tensor | None
    lse_shape: tuple[int, ...]

    def strides(self, x: Tensor) -> tuple[int, ...]:
        """By batch, head, position, width. Packed tokens have no batch stride."""
        if self.cu_q is None:
            return x.stride()
        token, head, width = x.stride()
        return 0, head, token, width

    @property
    def lse_strides(self) -> tuple[int, int]:
        *_, heads, rows = self.lse_shape
        return (heads * rows, rows) if self.cu_q is None else (0, rows)


def dense(q: Tensor, k: Tensor) -> Layout:
    """Every sequence of a batch has the same length."""
    (B, H, T, _), (G, S) = q.shape, k.shape[1:3]
    return Layout((T, S, H, H // G), B, None, None, (B, H, T))


def packed(q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> Layout:
    """Sequences of any lengths, one after the other."""
    (tokens, H, _), G = q.shape, k.shape[1]
    return Layout((max_q, max_k, H, H // G), len(cu_q) - 1, cu_q, cu_k, (H, tokens))


def forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int, softcap: float, scale: float
) -> tuple[Tensor, Tensor]:
    """out (B,H,T,D) and lse (B,H,T) float32, of q (B,H,T,D) and k, v (B,G,S,D)."""
    return _forward(q, k, v, dense(q, k), causal, window, softcap, scale)


def varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    window: int,
    softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out (tokens,H,D) and lse (H,tokens) float32, of packed q (tokens,H,D) and k, v (…,G,D)."""
    layout = packed(q, k, cu_q, cu_k, max_q, max_k)
    return _forward(q, k, v, layout, causal, window, softcap, scale)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    causal: bool,
    window: int,
    softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    require(q)
    out, lse = empty_like(q), q.new_empty(layout.lse_shape, dtype=torch.float32)
    blocks = block_sizes(q)
    programs = triton.cdiv(layout.sizes[0], blocks["BLOCK_T"]) * layout.batches * layout.sizes[2]
    if programs:
        forward_kernel[(programs,)](
            *(q, k, v, out, lse, layout.cu_q, layout.cu_k),
            *(*layout.sizes, window, scale, softcap),
            *(stride for x in (q, k, v, out) for stride in layout.strides(x)),
            *layout.lse_strides,
            **blocks,
            **rule_flags(q, layout, causal, window, softcap),
        )
    return out, lse


def require(q: Tensor) -> None:
    """What the kernels take."""
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise DTypeError(f"the kernels take float16, bfloat16 and float32, not {q.dtype}")
    if not 1 <= q.shape[-1] <= WIDEST:
        raise RangeError(f"the kernels take heads up to {WIDEST} wide, not {q.shape[-1]}")


def empty_like(x: Tensor) -> Tensor:
    """Contiguous, whatever the strides of x."""
    return x.new_empty(x.shape)


def block_sizes(q: Tensor) -> dict[str, int]:
    """Tiles that fit into shared memory: half as many rows where a row is twice as long."""
    wide = max(16, triton.next_power_of_2(q.shape[-1]))
    rows = 32 if q.dtype == torch.float32 or wide > 128 else 64
    return {"D": q.shape[-1], "BLOCK_D": wide, "BLOCK_T": rows, "BLOCK_S": rows}


def rule_flags(
    q: Tensor, layout: Layout, causal: bool, window: int, softcap: float
) -> dict[str, Any]:
    """What is compiled in. float32 is not rounded to TF32 behind the caller's back."""
    return {
        "CAUSAL": causal,
        "WINDOWED": window > 0,
        "CAPPED": softcap > 0.0,
        "PACKED": layout.cu_q is not None,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }
