"""A paged KV cache. See prompt.md; write into pages and outputs, return nothing."""

import torch
import triton
import triton.language as tl


def paged_append(k, v, k_pages, v_pages, slots):
    raise RuntimeError("paged_append is not written yet")


def paged_attention(q, k_pages, v_pages, block_table, seq_lens, out):
    raise RuntimeError("paged_attention is not written yet")
