"""One program a prompt: W times the best continuation after the last one."""

import torch
import triton
import triton.language as tl


@triton.jit
def _prompt(log_probs, sums, parents, tokens, new_sums, ended, W, V, eos_id, b_stride, w_stride,
            BLOCK: tl.constexpr):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    last_value = float("inf")
    last_place = -1
    for rank in range(W):
        value = -float("inf")
        place = -1
        for beam in range(W):
            base = tl.load(sums + batch * W + beam)
            start = log_probs + batch * b_stride + tl.full([], 1, tl.int64) * beam * w_stride
            for first in range(0, V, BLOCK):
                columns = first + lanes
                inside = columns < V
                x = tl.load(start + columns, mask=inside, other=-float("inf")).to(tl.float32) + base
                at = beam * V + columns
                later = (x < last_value) | ((x == last_value) & (at > last_place))
                x = tl.where(inside & later, x, -float("inf"))
                best = tl.max(x, 0)
                where = tl.min(tl.where(x == best, at, 0x7FFFFFFF), 0)
                better = best > value
                value = tl.where(better, best, value)
                place = tl.where(better, where, place)
        real = place >= 0
        token = tl.where(real, place % V, -1)
        out = batch * W + rank
        tl.store(parents + out, tl.where(real, place // V, -1))
        tl.store(tokens + out, token)
        tl.store(new_sums + out, value)
        tl.store(ended + out, (real & (token == eos_id)).to(tl.uint8))
        last_value = tl.where(real, value, -float("inf"))
        last_place = place


def beam_step(log_probs, sums, eos_id, parents, tokens, new_sums, ended):
    B, W, V = log_probs.shape
    if B:
        _prompt[(B,)](
            log_probs, sums, parents, tokens, new_sums, ended.view(torch.uint8), W, V, eos_id,
            *log_probs.stride()[:2], BLOCK=min(triton.next_power_of_2(V), 4096),
        )  # fmt: skip
