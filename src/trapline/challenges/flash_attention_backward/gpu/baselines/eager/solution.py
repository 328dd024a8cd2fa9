"""FlashAttention's gradients as torch ships them; T = S, as many key heads as query heads."""

import torch


def flash_attention_backward(dout, q, k, v, out, lse, causal, dq, dk, dv):
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, bool(causal),
        state, torch.zeros((), dtype=torch.uint64, device=q.device),
    )  # fmt: skip
    for output, value in zip((dq, dk, dv), found, strict=True):
        output.copy_(value)
