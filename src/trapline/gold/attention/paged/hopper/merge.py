# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment,untyped-decorator"
"""Parts of the same rows merged by one warp (Gluon): all loads of a few parts, then arithmetic."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from trapline.gold.attention.paged.hopper.codes import power_of_two


@gluon.jit
def merge(
    parts, stats, out, first, last, row, R, out_head,
    D: gl.constexpr, M: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """The parts of programs first … last, in this order, to the R heads that begin at `out + row`.

    The first program ended with these rows and stored them second (slot 2p + 1); the others began
    with them. ROWS: at least R.
    """
    # Few rows a lane: a row's two numbers are loaded by every lane that has some of the row.
    TALL: gl.constexpr = ROWS if ROWS < 8 else 8
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [TALL, 32 // TALL], [1, 1], [1, 0])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    # What 128 registers hold, but no more than the grid of a small launch has parts of a row.
    TOGETHER: gl.constexpr = 4096 // (ROWS * D) if ROWS * D > 256 else 16
    r = gl.arange(0, ROWS, layout=by_row)
    d = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    live = r < R
    peak = gl.full([ROWS], float("-inf"), gl.float32, by_row)
    total = gl.zeros([ROWS], gl.float32, by_row)
    acc = gl.zeros([ROWS, D], gl.float32, layout)
    for p in range(first, last + 1, TOGETHER):
        peaks = ()
        totals = ()
        sums = ()
        new_peak = peak
        for j in gl.static_range(TOGETHER):
            there = live & (p + j <= last)
            slot = (2 * (p + j) + gl.where(p + j == first, 1, 0)).to(gl.int64) * M + r
            # Another multiprocessor wrote them: what this one has cached may be older.
            at = stats + slot * 2
            m = gl.load(at, mask=there, other=float("-inf"), cache_modifier=".cg")
            peaks += (m,)
            totals += (gl.load(at + 1, mask=there, other=0.0, cache_modifier=".cg"),)
            inside = gl.expand_dims(there, 1)
            at = parts + gl.expand_dims(slot, 1) * D + gl.expand_dims(d, 0)
            sums += (gl.load(at, mask=inside, other=0.0, cache_modifier=".cg"),)
        for j in gl.static_range(TOGETHER):
            new_peak = gl.maximum(new_peak, peaks[j])
        origin = gl.where(new_peak == float("-inf"), 0.0, new_peak)
        c = power_of_two(peak - origin)
        total *= c
        acc *= gl.expand_dims(c, 1)
        for j in gl.static_range(TOGETHER):
            c = power_of_two(peaks[j] - origin)
            total += totals[j] * c
            acc += sums[j] * gl.expand_dims(c, 1)
        peak = new_peak
    answer = acc * gl.expand_dims(1.0 / gl.where(total == 0.0, 1.0, total), 1)
    at = out + row + gl.expand_dims(r.to(gl.int64) * out_head, 1) + gl.expand_dims(d, 0)
    gl.store(at, answer.to(out.dtype.element_ty), mask=gl.expand_dims(live, 1))
