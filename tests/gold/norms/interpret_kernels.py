"""Runs the kernels in Triton's interpreter; test_kernels.py starts it and reads what it writes."""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from trapline.gold.norms.triton import backward, norm

# The interpreter runs programs one after the other: few, with large pieces. Rows count as wide
# from 1024 elements on, and as too wide to be held from 2048 on.
backward.PARTS, backward.PART_COLUMNS, backward.WIDE_PER = 8, 4096, 2
for table in (*norm.FORWARD.values(), *backward.BACKWARD.values()):
    for width in [width for width in table if width > 1024]:
        del table[width]
norm.HELD = {size: {2048: norm.Pieces(512, 4)} for size in norm.HELD}
norm.WIDE = norm.Pieces(1024, 4)
backward.WIDE_SUMS, backward.WIDE_WARPS = 1024, 4


def main(folder: Path) -> None:
    for number, problem in enumerate(json.loads((folder / "problems.json").read_text())):
        for dtype in (torch.float32, torch.float16):
            name = f"{number}-{str(dtype).removeprefix('torch.')}.npz"
            np.savez(folder / name, **solved(dtype, **problem))


def solved(
    dtype, shape, centred, affine, added, saved, only="", mixed=False
) -> dict[str, np.ndarray]:
    torch.manual_seed(0)
    # Rows of a wider matrix: neighbours are beside each other, rows are not.
    wide = torch.randn(2, *shape[:-1], shape[-1] + 3).to(dtype)
    x, dy = wide[..., : shape[-1]] + 0.0 if not shape[-1] % 2 else wide[..., : shape[-1]]
    residual, dtotal = torch.randn(2, *shape).to(dtype) if added else (None, None)
    kind = torch.float32 if mixed else dtype
    w = torch.randn(shape[-1]).to(kind) if affine and only != "bias" else None
    b = torch.randn(shape[-1]).to(kind) if affine and centred and only != "weight" else None
    y, total, mean, rstd = norm.norm_forward(x, residual, w, b, 1e-5, centred)
    normed = total if added else x
    statistics = (mean if centred else None, rstd) if saved else (None, None)
    options = 1e-5, centred, b is not None
    dx, dw, db = norm.norm_backward(dy, dtotal, normed, w, *statistics, *options)
    again = norm.norm_backward(dy, dtotal, normed, w, *statistics, *options)
    assert all(torch.equal(one, other) for one, other in zip((dx, dw, db), again, strict=True))
    named = {"x": x, "dy": dy, "residual": residual, "dtotal": dtotal, "w": w, "b": b, "y": y}
    named |= {"total": total, "dx": dx, "dw": dw, "db": db}
    return {name: value.numpy() for name, value in named.items() if value is not None}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
