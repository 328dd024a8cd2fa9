# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Dense attention in plain Triton: what the forward and the backward kernels share.

A tensor reaches a kernel in one of two ways. If strides and address allow it, as a *tensor
descriptor*: the copy engine fetches a whole tile and reads zeros outside the tensor, and threads
spend no registers on addresses. Otherwise as a pointer with strides. The mask is −inf: a finite
sentinel would average rows that see nothing. Offsets are 64-bit.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from trapline.gold.attention.dense import Problem
from trapline.gold.device import LOG2_E

LN_2 = tl.constexpr(0.6931471805599453)
MAX_WIDTH = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def sees(t, s, T, S, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """Whether query t, at key position t + S − T, sees key s. No query t < T sees a key s ≥ S."""
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
    """Where sequence b starts among packed tokens, and its length; (0, length) if not packed.

    A packed sequence longer than the declared maximum is cut there.
    """
    start = 0
    if PACKED:
        begin = tl.load(cu + b)
        length = tl.minimum(tl.load(cu + b + 1) - begin, length)
        start = begin.to(tl.int64)  # it is multiplied by strides
    return start, length


@triton.jit
def in_tiles(begin, clear_from, clear_to, end, BLOCK: tl.constexpr):
    """Split begin … end at two places: whole tiles between them lie in clear_from … clear_to.

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
    """This program's tile within its head, numbered from the most work to the least, and the head.

    Without a mask all tiles have equal work: heads come one after the other, so that keys stay in
    the cache. With a causal mask the long tiles of all heads come before the short ones, so that
    the last programs are short.
    """
    program = tl.program_id(0)
    if CAUSAL:
        heads = tl.num_programs(0) // tiles
        turn, head = program // heads, program % heads
    else:
        turn, head = program % tiles, program // tiles
    return turn, head.to(tl.int64)


@triton.jit
def rotated(place, begin, end, by):
    """`place` rotated by `by` within begin … end.

    Without a mask, all tiles of a head would otherwise read the same keys at the same time.
    """
    place += by % tl.maximum(end - begin, 1)
    return tl.where(place >= end, place - (end - begin), place)


@triton.jit
def head_of(x, b, h, first, by_batch, by_head, by_row, TMA: tl.constexpr):
    """The matrix of one head from row `first` on, for `rows_of`; a descriptor is unchanged."""
    if not TMA:
        x += b * by_batch + h * by_head + first * by_row
    return x


@triton.jit
def rows_of(
    x, b, h, start, length, by_row, by_d,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, TMA: tl.constexpr,
    WHOLE: tl.constexpr = False,
):  # fmt: skip
    """Rows start … start + BLOCK of the result of `head_of`; zero outside the matrix.

    WHOLE: no row is outside, so pointers need no mask.
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
    """δ and lse in base 2 of queries start … start + BLOCK, from `backward.row_sums`.

    Rows are padded with zeros to whole tiles, but a packed sequence is followed by the next.
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


@triton.jit
def zero_unpacked_tokens(
    x, cu, b, sequences, tokens, longest, turn, tiles, by_row, by_d,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Zeros in the rows of one head's matrix that no tile of a packed sequence covers.

    These are the tokens before the first and after the last sequence, and what a sequence has
    beyond the declared maximum length. Only the device knows how many there are, so the programs of
    the sequences write them, each its share.
    """
    begin = tl.load(cu + b)
    end = tl.load(cu + b + 1)
    zero_rows(x, begin + longest, end, turn, tiles, by_row, by_d, D, BLOCK_D, BLOCK)
    if b == 0:
        zero_rows(x, 0, begin, turn, tiles, by_row, by_d, D, BLOCK_D, BLOCK)
    if b == sequences - 1:
        zero_rows(x, end, tokens, turn, tiles, by_row, by_d, D, BLOCK_D, BLOCK)


@triton.jit
def zero_rows(
    x, begin, end, turn, tiles, by_row, by_d,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every `tiles`-th block of the rows begin … end, starting with block `turn`."""
    for top in range(begin + turn * BLOCK, end, tiles * BLOCK):
        row = top + tl.arange(0, BLOCK)
        d = tl.arange(0, BLOCK_D)
        places = x + row[:, None].to(tl.int64) * by_row + d[None, :] * by_d
        nothing = tl.zeros([BLOCK, BLOCK_D], x.dtype.element_ty)
        tl.store(places, nothing, mask=(row[:, None] < end) & (d[None, :] < D))


class Tile(NamedTuple):
    """Queries and keys that one program holds, its warps and its pipeline stages."""

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


def supports(problem: Problem) -> str | None:
    """None, or the reason why these kernels cannot compute the problem."""
    if problem.q.dtype not in DTYPES:
        return f"{problem.q.dtype} (float16, bfloat16 and float32 are supported)"
    width = problem.q.shape[-1]
    return f"heads wider than {MAX_WIDTH}, got {width}" if width > MAX_WIDTH else None


def boundaries(problem: Problem) -> tuple[Tensor | None, Tensor | None]:
    """cu_q and cu_k, contiguous as the kernels read them."""
    if problem.cu_q is None or problem.cu_k is None:
        return None, None
    return problem.cu_q.contiguous(), problem.cu_k.contiguous()


def tokens_of(problem: Problem, x: Tensor) -> int:
    """Packed tokens in x; 0 if nothing is packed."""
    return x.shape[0] if problem.packed else 0


def strides_of(problem: Problem, x: Tensor) -> tuple[int, ...]:
    """By sequence, head, position, element. Packed tokens have no stride by sequence."""
    if not problem.packed:
        return x.stride()
    token, head, element = x.stride()
    return 0, head, token, element


def reach(problem: Problem) -> int:
    """The window, or 0 if it hides nothing: kernels add it to positions in 32 bits."""
    T, S, _, _ = problem.sizes
    return problem.window if problem.window < max(T, S) else 0


def has_tail(problem: Problem, tile: Tile, window: int) -> bool:
    """Whether some tile of keys needs a mask; if none does, its code is left out.

    The code would cost registers: for heads of 64 elements, one program in three on a
    multiprocessor.
    """
    return problem.causal or window > 0 or problem.packed or problem.sizes[1] % tile.keys > 0


def can_describe(*tensors: Tensor) -> bool:
    """Whether tensor descriptors can read all of these dense, non-empty tensors."""
    if not all(x.numel() for x in tensors):
        return False
    if tensors[0].is_cuda and torch.cuda.get_device_capability(tensors[0].device) < (9, 0):
        return False
    return all(_is_describable(x) for x in tensors)


def _is_describable(x: Tensor) -> bool:
    """Elements of a row adjacent, every address a multiple of 16 bytes, no row repeated."""
    *steps, last = x.stride()
    if last != 1 or x.data_ptr() % 16:
        return False
    whole = 16 // x.element_size()
    return all(
        size == 1 or (step > 0 and step % whole == 0)
        for size, step in zip(x.shape, steps, strict=False)
    )


def description(x: Tensor, rows: int) -> tuple[list[int], list[int], list[int]]:
    """Shape, strides and tile of x (B,H,N,D). The stride of an axis of size 1 is free."""
    wide, shape = block_width(x), list(x.shape)
    strides = [stride if size > 1 else wide for size, stride in zip(shape, x.stride(), strict=True)]
    return shape, [*strides[:-1], 1], [1, 1, rows, wide]


def as_descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor(x, *description(x, rows))


def block_width(x: Tensor) -> int:
    """The width of a tile in memory: a power of two that holds a row."""
    return max(16, 1 << (x.shape[-1] - 1).bit_length())


def constants(problem: Problem, window: int) -> dict[str, Any]:
    """Compile-time arguments that all kernels take. float32 products are not rounded to TF32."""
    q = problem.q
    return {
        "D": q.shape[-1],
        "BLOCK_D": block_width(q),
        "CAUSAL": problem.causal,
        "WINDOWED": window > 0,
        "CAPPED": problem.softcap > 0.0,
        "PACKED": problem.packed,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }
