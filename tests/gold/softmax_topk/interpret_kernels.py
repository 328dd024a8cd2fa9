"""Runs the kernels in Triton's interpreter; test_kernels.py starts it and reads what it writes."""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from trapline.gold.softmax_topk.triton import topk as kernels
from trapline.gold.softmax_topk.triton import work_partition as plans


def main(folder: Path) -> None:
    plans.SHORT, plans.LITTLE_STREAM = 512, (1024, 4)
    plans.STREAM = {4: (2048, 8), 8: (2048, 8)}
    plans.LITTLE, plans.IN_REGISTERS, plans.HUNDREDS, plans.NARROW = 2500, 128, 85, 86
    problems = json.loads((folder / "problems.json").read_text())
    for number, (shape, k, kind, processors, dtype) in enumerate(problems):
        kernels.processors = lambda _, count=processors: count
        plans.SHORT = 512 if processors > 1 or shape[1] <= plans.MANY_TILE else 4 * plans.MANY_TILE
        x = made(shape, kind).to(getattr(torch, dtype))
        each = torch.linspace(0.5, 2.0, shape[0]) if number % 3 else None
        values, indices, lse, row_max = kernels._softmax_topk(x, k, 0.7, each, number % 4 > 1)
        each = torch.full((shape[0],), 0.7) if each is None else each
        found = {"x": x.float(), "each": each, "values": values.float(), "indices": indices}
        found |= {"lse": lse, "row_max": row_max}
        np.savez(folder / f"{number}.npz", **{key: value.numpy() for key, value in found.items()})


def made(shape: list[int], kind: str) -> torch.Tensor:
    rows, V = shape
    x = torch.randn(rows, V + 1, generator=torch.manual_seed(V))[:, :V]  # rows not side by side
    if kind == "side by side":
        return x.contiguous()
    if kind == "coarse":
        return (x * 2).round() / 2
    if kind == "masked":
        return x.masked_fill(torch.arange(V) < V - 3, -torch.inf)
    if kind == "nothing":
        return torch.full_like(x, -torch.inf)
    if kind == "not a number":
        return x.masked_fill(torch.arange(V) % 50 == 7, torch.nan)
    if kind == "constant":
        return torch.zeros(rows, V)
    if kind == "zeros":
        return torch.tensor([-0.0, 0.0]).repeat(V)[:V].expand(rows, V)
    if kind == "rising":
        return torch.arange(V, dtype=torch.float32).expand(rows, V) / V
    raised = {
        "one stride": (torch.arange(V) % 32 == 5, 10),
        "late": (torch.arange(V) > V - 200, 600),
    }
    if kind in raised:
        where, height = raised[kind]
        return torch.where(where, x + height, x)
    return x


if __name__ == "__main__":
    main(Path(sys.argv[1]))
