"""The weights in float32, 1024 outputs at a time, and an ordinary product."""

import torch


def ternary_matmul(packed, scales, x, out):
    K = x.shape[1]
    wide = x.float()
    shifts = torch.arange(4, device=x.device) * 2
    for first in range(0, packed.shape[0], 1024):
        rows = slice(first, first + 1024)
        codes = (packed[rows, :, None].int() >> shifts) & 3
        codes = codes.reshape(codes.shape[0], -1)[:, :K] - 1
        spread = scales[rows].float().repeat_interleave(128, dim=1)[:, :K]
        out[:, rows] = (wide @ (codes * spread).T).to(out.dtype)
