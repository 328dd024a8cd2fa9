# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""What attention's plain Triton kernels share: tiles, who sees whom, and how a problem lies.

A tensor reaches a kernel in one of two ways. Where strides and address allow, as a *tensor
descriptor*: the copy engine fetches a whole tile, reads zeros outside of the tensor, and a thread
spends no registers on addresses. Otherwise as a pointer with strides, for anything else.
−inf is the mask: a finite sentinel would average rows that see nothing. Offsets are 64-bit.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from trapline.gold.attention.dense.registry import a_group
from trapline.gold.device import LOG2_E
from trapline.gold.errors import DTypeError, RangeError

LN_2 = tl.constexpr(0.6931471805599453)
WIDEST = 256


@triton.jit
def sees(t, s, T, S, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """Whether query t, standing at key t + S − T, sees key s. No query t < T sees a key s ≥ S."""
    ahead = s - (t + S - T)
    seen = ahead <= 0 if CAUSAL else s < S
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
def weights_and_slopes(
    products, dweights, lse2, delta, seen, scale, mantissa, softcap,
    CAPPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Softmax weights of a tile, and the gradient of its dot products, in either order.

    The gradient lacks the power of two in `scale`; `delta` comes with the mantissa.
    """
    if CAPPED:
        scores = scored(products, scale, softcap, CAPPED)
        weights = tl.exp2(scores * LOG2_E - lse2)
    else:
        weights = tl.exp2(products * (scale * LOG2_E) - lse2)
    if MASKED:
        # A row without keys has lse −inf and weights of inf up to here; nothing of it is seen.
        weights = tl.where(seen, weights, 0.0)
    slopes = weights * (dweights * mantissa - delta)
    if CAPPED:
        slopes = slopes * (1.0 - (scores / softcap) * (scores / softcap))
    return weights, slopes


@triton.jit
def span(cu, b, length, PACKED: tl.constexpr):
    """Where sequence b starts among packed tokens, and its length; (0, length) if not packed."""
    start = 0
    if PACKED:
        begin = tl.load(cu + b)
        length = tl.load(cu + b + 1) - begin
        start = begin.to(tl.int64)  # it is multiplied by strides
    return start, length


@triton.jit
def in_tiles(begin, clear_from, clear_to, end, BLOCK: tl.constexpr):
    """Splits begin … end at two places: whole tiles between them lie in clear_from … clear_to.

    The first tile starts at a multiple of its size, so that what is read stays aligned.
    """
    begin = begin // BLOCK * BLOCK
    clear = begin + tl.cdiv(tl.maximum(clear_from - begin, 0), BLOCK) * BLOCK
    clear = tl.minimum(clear, end)
    hidden = clear + tl.maximum(clear_to - clear, 0) // BLOCK * BLOCK
    return begin, clear, hidden, end


@triton.jit
def keys_seen(
    first, last, S, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, BLOCK: tl.constexpr
):
    """The keys that queries at the key positions first … last see, as begin, clear, hidden, end.

    Nothing before begin or from end on is seen; in the whole tiles clear … hidden, all see all.
    """
    begin = 0
    end = S
    clear_from = 0
    clear_to = S
    if CAUSAL:
        end = tl.minimum(end, last + 1)
        clear_to = tl.minimum(clear_to, first + 1)
    if WINDOWED:
        begin = tl.maximum(begin, first - window + 1)
        end = tl.minimum(end, last + window)
        clear_from = tl.maximum(clear_from, last - window + 1)
        clear_to = tl.minimum(clear_to, first + window)
    return in_tiles(begin, clear_from, clear_to, end, BLOCK)


@triton.jit
def queries_seeing(
    first, last, T, offset, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The queries that see keys first … last, as begin, clear, hidden, end; offset is S − T.

    Seen from the keys the past is the future: causality bounds the beginning, not the end.
    """
    begin = 0
    end = T
    clear_from = 0
    clear_to = T
    if CAUSAL:
        begin = tl.maximum(begin, first - offset)
        clear_from = tl.maximum(clear_from, last - offset)
    if WINDOWED:
        begin = tl.maximum(begin, first - window + 1 - offset)
        end = tl.minimum(end, last + window - offset)
        clear_from = tl.maximum(clear_from, last - window + 1 - offset)
        clear_to = tl.minimum(clear_to, first + window - offset)
    else:
        clear_to = tl.cdiv(T, BLOCK) * BLOCK
    return in_tiles(begin, clear_from, clear_to, end, BLOCK)


@triton.jit
def turn_and_head(tiles, CAUSAL: tl.constexpr):
    """Which of a head's tiles is this program's, in order of work (most first), and which head.

    Without a mask all have the same to do: one head after the other, so that what they share stays
    in the cache. Under a causal one the long tiles of all heads come before the short, so that the
    last programs to finish are short ones.
    """
    program = tl.program_id(0)
    if CAUSAL:
        heads = tl.num_programs(0) // tiles
        turn, head = program // heads, program % heads
    else:
        turn, head = program % tiles, program // tiles
    return turn, head.to(tl.int64)


@triton.jit
def turned(place, begin, end, by):
    """begin … end walked from another place on, round about.

    Without a mask, all tiles of a head would ask the same corner of the cache for the same keys at
    the same time.
    """
    place += by % tl.maximum(end - begin, 1)
    return tl.where(place >= end, place - (end - begin), place)


@triton.jit
def head_of(x, b, h, first, by_batch, by_head, by_row, TMA: tl.constexpr):
    """The matrix of one head from row `first` on, for `rows_of`: a descriptor stays as it is."""
    if not TMA:
        x += b * by_batch + h * by_head + first * by_row
    return x


@triton.jit
def rows_of(
    x, b, h, start, length, by_row, by_d,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, TMA: tl.constexpr,
    WHOLE: tl.constexpr = False,
):  # fmt: skip
    """Rows start … start + BLOCK of what `head_of` gave; zero outside of the matrix.

    WHOLE says that no row is outside, which saves pointers the test.
    """
    if TMA:
        tile = x.load([b.to(tl.int32), h.to(tl.int32), start, 0]).reshape(BLOCK, BLOCK_D)
    else:
        row = start + tl.arange(0, BLOCK)
        d = tl.arange(0, BLOCK_D)
        places = x + row[:, None].to(tl.int64) * by_row + d[None, :] * by_d
        if not WHOLE and D < BLOCK_D:
            tile = tl.load(places, mask=(row[:, None] < length) & (d[None, :] < D), other=0.0)
        elif D < BLOCK_D:
            tile = tl.load(places, mask=d[None, :] < D, other=0.0)
        elif not WHOLE:
            tile = tl.load(places, mask=row[:, None] < length, other=0.0)
        else:
            tile = tl.load(places)
    return tile


@triton.jit
def row_sums_of(
    x, b, h, first, start, length, by_kind, by_batch, by_head,
    BLOCK: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """δ and lse in base 2 of queries start … start + BLOCK, as `kernels_bwd.row_sums` lays them.

    Rows are padded with zeros to whole tiles; but after a packed sequence comes another.
    """
    row = start + tl.arange(0, BLOCK)
    places = x + b * by_batch + h * by_head + first + row
    if PACKED:
        delta = tl.load(places, mask=row < length, other=0.0)
        lse2 = tl.load(places + by_kind, mask=row < length, other=0.0)
    else:
        delta = tl.load(places)
        lse2 = tl.load(places + by_kind)
    return delta, lse2


class Tile(NamedTuple):
    """How much of a problem one program holds, and what it runs on."""

    queries: int
    keys: int
    warps: int
    stages: int

    def launch(self) -> dict[str, int]:
        return {
            "BLOCK_T": self.queries,
            "BLOCK_S": self.keys,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


class Layout(NamedTuple):
    """A problem as the kernels see it: (B,H,T,D) and (B,G,S,D), or packed (tokens, heads, D)."""

    #: T, S (the longest, if packed), H, R
    sizes: tuple[int, int, int, int]
    batches: int
    cu_q: Tensor | None
    cu_k: Tensor | None
    lse_shape: tuple[int, ...]

    @property
    def groups(self) -> int:
        """Key/value heads."""
        return self.sizes[2] // self.sizes[3]

    @property
    def empty(self) -> bool:
        """Whether no query meets a key: then nothing has a gradient."""
        return not (self.batches and all(self.sizes))

    def tokens(self, x: Tensor) -> int:
        """How many packed tokens x holds; 0 where nothing is packed."""
        return 0 if self.cu_q is None else x.shape[0]

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
    return Layout((T, S, H, a_group(H, G)), B, None, None, (B, H, T))


def packed(q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> Layout:
    """Sequences of any lengths, one after the other."""
    (tokens, H, _), G = q.shape, k.shape[1]
    ends = cu_q.contiguous(), cu_k.contiguous()  # kernels read one after the other
    return Layout((max_q, max_k, H, a_group(H, G)), len(cu_q) - 1, *ends, (H, tokens))


def reach(layout: Layout, window: int) -> int:
    """The window, or 0 (none) if nothing lies outside: kernels add it to positions, in 32 bits."""
    return window if window < max(layout.sizes[:2]) else 0


def has_tail(layout: Layout, tile: Tile, causal: bool, window: int) -> bool:
    """Whether some tile of keys needs a mask; if none does, its code need not be there.

    It would cost registers: for 64 wide heads, one program in three on a multiprocessor.
    """
    return causal or window > 0 or layout.cu_q is not None or layout.sizes[1] % tile.keys > 0


def described(layout: Layout, *tensors: Tensor) -> bool:
    """Whether all of them can be read by tensor descriptors.

    Packed sequences cannot: a tile's last rows are another sequence's, not zeros. Nor can nothing.
    """
    if layout.cu_q is not None or not all(x.numel() for x in tensors):
        return False
    if tensors[0].is_cuda and torch.cuda.get_device_capability(tensors[0].device) < (9, 0):
        return False
    return all(_describable(x) for x in tensors)


def _describable(x: Tensor) -> bool:
    """Elements of a row side by side, every address a multiple of 16 bytes, no row repeated."""
    *steps, last = x.stride()
    if last != 1 or x.data_ptr() % 16:
        return False
    whole = 16 // x.element_size()
    return all(
        size == 1 or (step > 0 and step % whole == 0)
        for size, step in zip(x.shape, steps, strict=False)
    )


def description(x: Tensor, rows: int) -> tuple[list[int], list[int], list[int]]:
    """Shape, strides and tile of x (B,H,N,D). Where there is one of a thing, its stride is free."""
    wide, shape = block_width(x), list(x.shape)
    strides = [stride if size > 1 else wide for size, stride in zip(shape, x.stride(), strict=True)]
    return shape, [*strides[:-1], 1], [1, 1, rows, wide]


def as_descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor(x, *description(x, rows))


def block_width(x: Tensor) -> int:
    """The width of a tile in memory: a power of two that holds a row."""
    return max(16, 1 << (x.shape[-1] - 1).bit_length())


def require(q: Tensor) -> None:
    """What the kernels take."""
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise DTypeError(f"the kernels take float16, bfloat16 and float32, not {q.dtype}")
    if q.shape[-1] > WIDEST:
        raise RangeError(f"the kernels take heads up to {WIDEST} wide, not {q.shape[-1]}")


def empty_like(x: Tensor) -> Tensor:
    """Contiguous, whatever the strides of x."""
    return x.new_empty(x.shape)


def rule_flags(
    q: Tensor, layout: Layout, causal: bool, window: int, softcap: float
) -> dict[str, Any]:
    """What is compiled in. float32 is not rounded to TF32 behind the caller's back."""
    return {
        "D": q.shape[-1],
        "BLOCK_D": block_width(q),
        "CAUSAL": causal,
        "WINDOWED": window > 0,
        "CAPPED": softcap > 0.0,
        "PACKED": layout.cu_q is not None,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }
