"""cuDNN's gradients of attention; T = S, as many key heads as query heads."""

import torch


def flash_attention_backward(dout, q, k, v, out, lse, causal, dq, dk, dv):
    nothing = torch.zeros((), dtype=torch.int64, device=q.device)
    found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse[..., None], nothing, nothing, None, None, None,
        q.shape[2], k.shape[2], 0.0, bool(causal),
    )  # fmt: skip
    for output, value in zip((dq, dk, dv), found, strict=True):
        output.copy_(value)
