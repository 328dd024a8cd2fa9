"""The weights unpacked in the dtype of x, and torch's own product.

bfloat16 is shorter than the scales: what rounding takes from them has a product of its own.
"""

import torch


def _weights(packed, scales, K, dtype):
    shifts = torch.arange(4, device=packed.device, dtype=torch.uint8) * 2
    codes = ((packed[..., None] >> shifts) & 3).reshape(packed.shape[0], -1)[:, :K]
    spread = scales.to(dtype).repeat_interleave(128, dim=1)[:, :K]
    return (codes.to(dtype) - 1) * spread


def ternary_matmul(packed, scales, x, out):
    K, dtype = x.shape[1], x.dtype
    torch.mm(x, _weights(packed, scales, K, dtype).T, out=out)
    if dtype == torch.bfloat16:
        rest = scales - scales.to(dtype).to(scales.dtype)
        out.addmm_(x, _weights(packed, rest, K, dtype).T)
