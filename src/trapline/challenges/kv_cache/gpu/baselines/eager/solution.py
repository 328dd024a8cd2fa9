"""torch's indexing, and its scaled dot-product attention over gathered pages."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def paged_append(k, v, k_pages, v_pages, slots):
    page_size = k_pages.shape[1]
    where = slots // page_size, slots % page_size
    k_pages.index_put_(where, k)
    v_pages.index_put_(where, v)


def paged_attention(q, k_pages, v_pages, block_table, seq_lens, out):
    B, _, D = q.shape
    G = k_pages.shape[2]
    pages = block_table.long()
    keys = k_pages[pages].reshape(B, -1, G, D).transpose(1, 2)
    values = v_pages[pages].reshape(B, -1, G, D).transpose(1, 2)
    seen = torch.arange(keys.shape[2], device=q.device) < seq_lens[:, None]
    found = scaled_dot_product_attention(
        q[:, :, None], keys, values, attn_mask=seen[:, None, None], enable_gqa=True
    )
    out.copy_(found[:, :, 0])
