"""Runs the kernels in Triton's interpreter; test_kernels.py starts it and reads what it writes."""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from trapline.gold.softmax_topk import kernels


def main(folder: Path) -> None:
    kernels.SHORT, kernels.BLOCK = 512, 256
    for number, (shape, k, kind) in enumerate(json.loads((folder / "problems.json").read_text())):
        for dtype in (torch.float32, torch.float16):
            x = made(shape, kind).to(dtype)
            each = torch.linspace(0.5, 2.0, shape[0])
            log_probs, indices, lse, row_max = kernels._softmax_topk(x, k, each)
            name = f"{number}-{str(dtype).removeprefix('torch.')}.npz"
            found = {"x": x, "each": each, "log_probs": log_probs, "indices": indices}
            found |= {"lse": lse, "row_max": row_max}
            np.savez(folder / name, **{key: value.numpy() for key, value in found.items()})


def made(shape: list[int], kind: str) -> torch.Tensor:
    rows, V = shape
    x = torch.randn(rows, V + 1, generator=torch.manual_seed(V))[:, :V]  # rows not side by side
    if kind == "coarse":
        return (x * 2).round() / 2
    if kind == "masked":
        return x.masked_fill(torch.arange(V) < V - 3, -torch.inf)
    if kind == "constant":
        return torch.zeros(rows, V)
    if kind == "zeros":
        return torch.tensor([-0.0, 0.0]).repeat(V)[:V].expand(rows, V)
    if kind == "rising":
        return torch.arange(V, dtype=torch.float32).expand(rows, V) / V
    return x


if __name__ == "__main__":
    main(Path(sys.argv[1]))
