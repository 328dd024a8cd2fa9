"""Runs the kernels in Triton's interpreter; test_kernels.py starts it and reads what it writes."""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from trapline.gold.ternary import oracle
from trapline.gold.ternary.triton import packed_matmul as kernels


def main(folder: Path) -> None:
    for number, (M, N, K, group) in enumerate(json.loads((folder / "problems.json").read_text())):
        rng = np.random.default_rng(number)
        codes, scales = oracle.ternarize(rng.standard_normal((N, K)), group)
        plane = torch.from_numpy(oracle.pack(codes))
        for dtype in (torch.float32, torch.float16):
            x = torch.from_numpy(rng.standard_normal((M, K))).to(dtype)
            y = kernels.packed_matmul(x, plane, torch.from_numpy(scales), group)
            name = f"{number}-{str(dtype).removeprefix('torch.')}.npz"
            np.savez(folder / name, x=x.numpy(), y=y.numpy(), codes=codes, scales=scales)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
