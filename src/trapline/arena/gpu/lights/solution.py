"""What this GPU can do at most, today: copy, read, multiply matrices."""

import torch
import triton
import triton.language as tl


@triton.jit
def _read_kernel(source, total, size, step: tl.constexpr, rounds: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * step * rounds
    places = tl.arange(0, step)
    found = tl.zeros((step,), tl.float32)
    for turn in range(rounds):
        here = start + turn * step + places
        found += tl.load(source + here, mask=here < size, other=0.0)
    tl.store(total + tl.program_id(0), tl.sum(found, 0))


def copy(source, target):
    target.copy_(source)


def read(source, total):
    step, rounds = 4096, 8
    blocks = triton.cdiv(source.numel(), step * rounds)
    _read_kernel[(blocks,)](source, total, source.numel(), step, rounds, num_warps=8)


def matmul(a, b, out):
    torch.matmul(a, b, out=out)
