"""torch's scaled dot-product attention with a mask, compiled."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def _mask(parents, prefix_len):
    B, N = parents.shape
    nodes = torch.arange(N, device=parents.device)
    step = (parents[..., None] == nodes).float() + torch.eye(N, device=parents.device)
    # Squared log2 N times, one step towards the root becomes all of them.
    for _ in range((N - 1).bit_length()):
        step = (step @ step).clamp(max=1.0)
    prefix = torch.ones((B, N, prefix_len), dtype=torch.bool, device=parents.device)
    return torch.cat((prefix, step > 0), dim=2)[:, None]


@torch.compile(dynamic=False)
def _attention(q, k, v, parents, prefix_len, out):
    mask = _mask(parents, prefix_len)
    out.copy_(scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True))


def tree_attention(q, k, v, parents, prefix_len, out):
    _attention(q, k, v, parents, prefix_len, out)
