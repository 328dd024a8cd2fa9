"""FlashAttention as torch ships it; T = S, as many key heads as query heads."""

import torch


def flash_attention(q, k, v, causal, out, lse):
    found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, bool(causal), False)
    out.copy_(found[0])
    lse.copy_(found[1])
