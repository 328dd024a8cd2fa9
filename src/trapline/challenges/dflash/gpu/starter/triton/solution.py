"""Attention over a draft tree. See prompt.md; write into `out`, return nothing."""

import torch
import triton
import triton.language as tl


def tree_attention(q, k, v, parents, prefix_len, out):
    raise RuntimeError("tree_attention is not written yet")
