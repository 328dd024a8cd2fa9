"""torch's scaled dot-product attention with a mask; ancestors by repeated steps to the parent."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def _mask(parents, prefix_len):
    B, N = parents.shape
    nodes = torch.arange(N, device=parents.device).expand(B, N)
    seen = torch.zeros((B, N, N + 1), dtype=torch.bool, device=parents.device)
    # The root is node N: it is its own parent.
    steps = torch.where(parents < 0, N, parents).long()
    steps = torch.cat((steps, torch.full_like(steps[:, :1], N)), dim=1)
    for _ in range(N):
        seen.scatter_(2, nodes[..., None], True)
        nodes = torch.gather(steps, 1, nodes)
    prefix = torch.ones((B, N, prefix_len), dtype=torch.bool, device=parents.device)
    return torch.cat((prefix, seen[..., :N]), dim=2)[:, None]


def tree_attention(q, k, v, parents, prefix_len, out):
    mask = _mask(parents, prefix_len)
    out.copy_(scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True))
