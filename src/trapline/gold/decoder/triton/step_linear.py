# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Matrix products of a decoding step, fused with the operations between them.

With few rows a step is limited by reading weights, and all other work must hide behind that. So
every product includes its neighbours: the norm before it as a factor a row, the residual, SwiGLU or
argmax after it. A product that adds to the stream also writes the input of the next one: the
stream times the next norm's weight, and one sum of squares a program, from which the next product
computes its factor.

Weights are the left operand (BLOCK_N, K) as they lie in memory, rows of the batch the right one: a
matrix instruction takes 16 weights by 8 rows without padding. Within a program K is divided into
SPLIT parts for different warps, so that few outputs keep all of them busy.

A kernel may start while the previous one still runs (programmatic dependent launch): it prefetches
weights into L2 and then waits for the previous kernel's results.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trapline.gold.device import LOG2_E, launched
from trapline.gold.softmax_topk.triton.keys import larger, origin_of


@triton.jit
def prefetch(places):
    """Prefetches the cache lines of these pointers into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def prefetch_rows(w, n, N, K, w_row, AHEAD: tl.constexpr):
    """Prefetches the first AHEAD elements of weight rows n, a cache line at a time."""
    line = tl.minimum(tl.arange(0, AHEAD // 64) * 64, K - 1)
    row = tl.minimum(n, N - 1).to(tl.int64)
    prefetch(w + row[:, None] * w_row + line[None, :])


@triton.jit
def prefetch_share(w, count):
    """Prefetches this program's share of the `count` elements that the next kernel reads.

    One thread issues one bulk copy: single lines would delay this kernel's own loads.
    """
    share = tl.cdiv(tl.cdiv(count, tl.num_programs(0)), 64) * 64
    begin = tl.program_id(0) * share
    width: tl.constexpr = w.dtype.element_ty.primitive_bitwidth // 8
    size = tl.minimum(share, count - begin) * width // 16 * 16
    if size > 0:
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,r", [(w + begin).to(tl.int64), size],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def matmul_tile(
    x, w, b, n, rows, N, K, x_row, w_row,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(BLOCK_N, BLOCK_B): rows n of the weights (N, K) times rows b of x, in float32."""
    if SPLIT == 1:
        k = tl.arange(0, BLOCK_K)
        w_places = w + n.to(tl.int64)[:, None] * w_row + k[None, :]
        x_places = x + b[:, None] * x_row + k[None, :]
        stored, there = (n < N)[:, None], (b < rows)[:, None]
        total = tl.zeros([BLOCK_N, BLOCK_B], tl.float32)
        for start in range(0, K, BLOCK_K):
            if EVEN:
                weights = tl.load(w_places + start)
                values = tl.load(x_places + start, mask=there, other=0.0)
            else:
                inside = (start + k < K)[None, :]
                weights = tl.load(w_places + start, mask=stored & inside, other=0.0)
                values = tl.load(x_places + start, mask=there & inside, other=0.0)
            total = tl.dot(weights, tl.trans(values), total, input_precision=PRECISION)
        return total
    part = tl.arange(0, SPLIT)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    w_wide = w + n.to(tl.int64)[None, :, None] * w_row + part[:, None, :]
    x_wide = x + b[None, :, None] * x_row + part[:, None, :]
    held, real = (n < N)[None, :, None], (b < rows)[None, :, None]
    parts = tl.zeros([SPLIT, BLOCK_N, BLOCK_B], tl.float32)
    for start in range(0, K, SPLIT * BLOCK_K):
        if EVEN:
            some = tl.load(w_wide + start)
            given = tl.load(x_wide + start, mask=real, other=0.0)
        else:
            within = (start + part < K)[:, None, :]
            some = tl.load(w_wide + start, mask=held & within, other=0.0)
            given = tl.load(x_wide + start, mask=real & within, other=0.0)
        parts = tl.dot(some, tl.trans(given, 0, 2, 1), parts, input_precision=PRECISION)
    return tl.sum(parts, 0)


@triton.jit
def load_square_sums(squares, b, rows, count, PARTS: tl.constexpr):
    """The sums of squares of the rows b, (PARTS, BLOCK_B), `count` of them each.

    Loaded before a product and used after it: any use in between, even a cast, would wait.
    """
    part = tl.arange(0, PARTS)
    inside = (part < count)[:, None] & (b < rows)[None, :]
    return tl.load(squares + part[:, None] * rows + b[None, :], mask=inside, other=0.0)


@triton.jit
def rms_factor(sums, width, eps):
    """1/√(mean square + eps) of every row."""
    return tl.rsqrt(tl.sum(sums, 0) / width + eps)[None, :]


@launched
@triton.jit
def embed_kernel(
    ids, table, weight, x, y, squares, C, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Starts the stream of one row with an embedding.

    Like every kernel here it lets the next one start after its own wait, so at most two run at a
    time. What no kernel of a step writes (positions, tables, earlier cache entries) may be read
    before waiting.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    token = tl.load(ids + row)
    found = tl.load(table + token * C + c, mask=c < C, other=0.0)
    tl.store(x + row * C + c, found, mask=c < C)
    wide = found.to(tl.float32)
    scaled = wide * tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(y + row * C + c, scaled.to(y.dtype.element_ty), mask=c < C)
    tl.store(squares + row, tl.sum(wide * wide, 0))


@triton.jit
def store_group_maxima(known, maxima, peaks, totals, b, rows, N, GROUP: tl.constexpr):
    """Writes group maxima, maximum and softmax sum of a tile of logits (BLOCK_N, BLOCK_B)."""
    groups: tl.constexpr = known.shape[0] // GROUP
    highs = tl.reduce(tl.reshape(known, [groups, GROUP, known.shape[1]]), 1, larger)
    group = tl.program_id(0) * groups + tl.arange(0, groups)
    count = tl.cdiv(N, GROUP)
    inside = (group < count)[:, None] & (b < rows)[None, :]
    tl.store(maxima + b[None, :] * count + group[:, None], highs, mask=inside)
    peak = tl.reduce(highs, 0, larger)
    share = tl.sum(tl.exp2((known - origin_of(peak)[None, :]) * LOG2_E), 0)
    at = b * tl.num_programs(0) + tl.program_id(0)
    tl.store(peaks + at, peak, mask=b < rows)
    tl.store(totals + at, share, mask=b < rows)


@launched
@triton.jit
def normed_linear_kernel(
    x, w, squares, out, best, place,
    rows, N, K, count, x_row, w_row, out_row, eps,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    PARTS: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr, maxima=None, peaks=None, totals=None, GROUP: tl.constexpr = 0,
):  # fmt: skip
    """A product of a normed input. With `best`, also its largest column and the column's index.

    NaN counts as +inf there: a row with either has no softmax, and its maximum shows it. With
    `maxima`, also the input of the second half of top-k, where NaN stays NaN.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    if PDL:
        prefetch_rows(w, n, N, K, w_row, AHEAD)
        gdc_wait()
        gdc_launch_dependents()
    sums = load_square_sums(squares, b, rows, count, PARTS)
    total = matmul_tile(
        x, w, b, n, rows, N, K, x_row, w_row, BLOCK_B, BLOCK_N, BLOCK_K, SPLIT, EVEN, PRECISION
    )
    total *= rms_factor(sums, K, eps)
    inside = (n < N)[:, None] & (b < rows)[None, :]
    places = out + b.to(tl.int64)[None, :] * out_row + n[:, None]
    tl.store(places, total.to(out.dtype.element_ty), mask=inside)
    if best is not None:
        known = tl.where(total == total, total, float("inf"))
        known = tl.where((n < N)[:, None], known, float("-inf"))
        high, where = tl.max(known, 0, return_indices=True)
        at = tl.program_id(0) * rows + b
        tl.store(best + at, high, mask=b < rows)
        tl.store(place + at, tl.program_id(0) * BLOCK_N + where, mask=b < rows)
    if maxima is not None:
        known = tl.where((n < N)[:, None], total, float("-inf"))
        store_group_maxima(known, maxima, peaks, totals, b, rows, N, GROUP)


@launched
@triton.jit
def normed_swiglu_kernel(
    x, w, squares, out,
    rows, N, K, count, x_row, w_row, out_row, eps,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    PARTS: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """silu(gate) · up of a normed input; weight rows n are gates, rows N + n are up."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    # Gate and up in one tile, so that one loop issues all loads.
    pair = tl.arange(0, 2 * BLOCK_N)
    both = tl.program_id(0) * BLOCK_N + pair % BLOCK_N
    both = tl.where(both < N, both + pair // BLOCK_N * N, 2 * N)
    if PDL:
        prefetch_rows(w, both, 2 * N, K, w_row, AHEAD)
        gdc_wait()
        gdc_launch_dependents()
    sums = load_square_sums(squares, b, rows, count, PARTS)
    total = matmul_tile(
        x, w, b, both, rows, 2 * N, K, x_row, w_row,
        BLOCK_B, 2 * BLOCK_N, BLOCK_K, SPLIT, EVEN, PRECISION,
    )  # fmt: skip
    total *= rms_factor(sums, K, eps)
    gate, up = tl.split(tl.trans(tl.reshape(total, [2, BLOCK_N, BLOCK_B]), 1, 2, 0))
    inner = gate * up / (1.0 + tl.exp2(-gate * LOG2_E))
    inside = (n < N)[:, None] & (b < rows)[None, :]
    tl.store(
        out + b.to(tl.int64)[None, :] * out_row + n[:, None],
        inner.to(out.dtype.element_ty),
        mask=inside,
    )


@launched
@triton.jit
def residual_linear_kernel(
    x, w, stream, weight, y, squares,
    rows, N, K, x_row, w_row,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    EVEN: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Adds a product to the stream and writes the next product's input."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    gain = tl.load(weight + n, mask=n < N, other=0.0)
    if PDL:
        prefetch_rows(w, n, N, K, w_row, AHEAD)
        gdc_wait()
        gdc_launch_dependents()
    # Loads what the epilogue needs before the product.
    inside = (n < N)[:, None] & (b < rows)[None, :]
    at = b.to(tl.int64)[None, :] * N + n[:, None]
    before = tl.load(stream + at, mask=inside, other=0.0)
    total = matmul_tile(
        x, w, b, n, rows, N, K, x_row, w_row, BLOCK_B, BLOCK_N, BLOCK_K, SPLIT, EVEN, PRECISION
    )
    after = (before.to(tl.float32) + total).to(stream.dtype.element_ty)
    tl.store(stream + at, after, mask=inside)
    wide = tl.where(inside, after.to(tl.float32), 0.0)
    scaled = wide * gain.to(tl.float32)[:, None]
    tl.store(y + at, scaled.to(y.dtype.element_ty), mask=inside)
    tl.store(squares + tl.program_id(0) * rows + b, tl.sum(wide * wide, 0), mask=b < rows)


@launched
@triton.jit
def argmax_kernel(
    best, place, active, tokens, ids, positions, made, history, tiles, rows, room,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row's likeliest token, the lower of equal ones; advances the row by one step."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    tile = tl.arange(0, BLOCK)
    at = tile.to(tl.int64) * rows + row
    highs = tl.load(best + at, mask=tile < tiles, other=float("-inf"))
    high, where = tl.max(highs, 0, return_indices=True)
    found = tl.load(place + where.to(tl.int64) * rows + row).to(tl.int64)
    token = tl.where(tl.abs(high) == float("inf"), -1, found)
    said = tl.load(made + row)
    tl.store(tokens + row, token)
    tl.store(history + row * room + said % room, token)
    tl.store(ids + row, tl.maximum(token, 0))
    tl.store(positions + row, tl.load(positions + row) + tl.load(active + row).to(tl.int64))
    tl.store(made + row, said + 1)
