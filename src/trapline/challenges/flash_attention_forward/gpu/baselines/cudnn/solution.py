"""cuDNN's attention; T = S, as many key heads as query heads."""

import torch


def flash_attention(q, k, v, causal, out, lse):
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, bool(causal), False
    )
    out.copy_(found[0])
    lse.copy_(found[1].reshape(lse.shape))
