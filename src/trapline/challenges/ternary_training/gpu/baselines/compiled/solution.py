"""The weights unpacked in the dtype of x, and torch's own product, compiled.

bfloat16 is shorter than the scales: what rounding takes from them has a product of its own.
"""

import torch


@torch.compile(dynamic=False)
def _product(packed, scales, x):
    K = x.shape[1]
    shifts = torch.arange(4, device=packed.device, dtype=torch.uint8) * 2
    codes = ((packed[..., None] >> shifts) & 3).reshape(packed.shape[0], -1)[:, :K]
    codes = codes.to(x.dtype) - 1
    spread = scales.to(x.dtype)
    found = x @ (codes * spread.repeat_interleave(128, dim=1)[:, :K]).T
    if x.dtype == torch.bfloat16:
        rest = (scales - spread.to(scales.dtype)).to(x.dtype)
        found = found + x @ (codes * rest.repeat_interleave(128, dim=1)[:, :K]).T
    return found


def ternary_matmul(packed, scales, x, out):
    out.copy_(_product(packed, scales, x))
