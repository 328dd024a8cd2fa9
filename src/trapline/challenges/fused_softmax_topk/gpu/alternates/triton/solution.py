"""One program a row: the maximum and the sum, then k times the best entry after the last one."""

import triton
import triton.language as tl


@triton.jit
def _rows(logits, probs, indices, V, k, row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    start = logits + row * row_stride
    largest = -float("inf")
    total = 0.0
    for first in range(0, V, BLOCK):
        columns = first + lanes
        x = tl.load(start + columns, mask=columns < V, other=-float("inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(x, 0))
        # Until a finite logit has come, there is nothing to rescale.
        shift = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(x - shift), 0)
        largest = new

    last_value = float("inf")
    last_column = -1
    for rank in range(k):
        value = -float("inf")
        column = V
        for first in range(0, V, BLOCK):
            columns = first + lanes
            inside = columns < V
            x = tl.load(start + columns, mask=inside, other=-float("inf")).to(tl.float32)
            later = (x < last_value) | ((x == last_value) & (columns > last_column))
            open_ = inside & later
            best = tl.max(tl.where(open_, x, -float("inf")), 0)
            where = tl.min(tl.where(open_ & (x == best), columns, V), 0)
            better = (where < V) & ((column == V) | (best > value))
            value = tl.where(better, best, value)
            column = tl.where(better, where, column)
        tl.store(probs + row * k + rank, tl.exp(value - largest) / total)
        tl.store(indices + row * k + rank, column.to(tl.int64))
        last_value = value
        last_column = column


def softmax_topk(logits, k, probs, indices):
    rows, V = logits.shape
    if rows:
        block = min(triton.next_power_of_2(V), 4096)
        _rows[(rows,)](logits, probs, indices, V, k, logits.stride(0), BLOCK=block)
