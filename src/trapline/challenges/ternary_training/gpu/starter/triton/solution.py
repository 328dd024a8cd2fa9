"""A product with ternary weights. See prompt.md; write into `out`, return nothing."""

import torch
import triton
import triton.language as tl


def ternary_matmul(packed, scales, x, out):
    raise RuntimeError("ternary_matmul is not written yet")
