"""torch's scaled dot-product attention, compiled; T = S, as many key heads as query heads."""

import torch


@torch.compile(dynamic=False)
def _attention(q, k, v, causal, out, lse):
    found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)
    out.copy_(found[0])
    lse.copy_(found[1])


def flash_attention(q, k, v, causal, out, lse):
    _attention(q, k, v, bool(causal), out, lse)
