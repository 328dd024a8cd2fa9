"""Runs the kernels in Triton's interpreter; test_kernels.py starts it and reads what it writes."""

import json
import sys
from pathlib import Path

import torch

from trapline.gold.decoder import step_ops
from trapline.gold.decoder.config import RopeConfig
from trapline.gold.decoder.pool import StoredLayer
from trapline.gold.decoder.rope import Rope, angles
from trapline.gold.decoder.triton import step_elementwise

#: Rows, query heads, key heads, width, whether queries and keys are normed and turned.
PROBLEMS = [(3, 4, 2, 16, False, True), (2, 3, 1, 6, True, True), (4, 2, 2, 10, False, False)]
DTYPES = (torch.float32, torch.float16)


def main(folder: Path) -> None:
    found = [turned(dtype, *problem) for dtype in DTYPES for problem in PROBLEMS]
    found += [gated(dtype, *shape) for dtype in DTYPES for shape in ((3, 40), (2, 1500), (0, 8))]
    (folder / "errors.json").write_text(json.dumps(found))


def turned(dtype, rows, heads, groups, width, normed, rotated) -> dict[str, object]:
    torch.manual_seed(rows)
    # Rows of a wider matrix, as a slice of something larger would be.
    qkv = torch.randn(rows, (heads + 2 * groups) * width + 5).to(dtype)[:, :-5]
    cosine, sine = angles(RopeConfig(theta=100.0), width, torch.arange(50), qkv)
    weights = torch.randn(2, width).to(dtype) if normed else (None, None)
    turn = Rope(*((cosine, sine) if rotated else (None, None)), *weights, 1e-5)
    positions = torch.randint(0, 50, (rows,))
    slots = torch.randperm(20)[:rows]
    slots[0] = -1
    pools = [torch.full((20, groups, width), 7.0, dtype=dtype) for _ in range(4)]
    ours = step_elementwise.rope_and_append(qkv, turn, positions, slots, *pools[:2])
    stored = StoredLayer(*pools[2:], scales=None, bits=None, width=width, page_size=4)
    theirs = step_ops.rope_and_append(qkv, turn, positions, slots, stored)
    pairs = [(ours, theirs), (pools[0], pools[2]), (pools[1], pools[3])]
    untouched = int((pools[0] == 7.0).all(dim=(1, 2)).sum())
    return entry("rope_and_append", dtype, pairs) | {"untouched": untouched, "rows": rows}


def gated(dtype, rows, hidden) -> dict[str, object]:
    torch.manual_seed(1)
    both = torch.randn(rows, 2 * hidden + 3).to(dtype)[:, :-3]
    return entry("swiglu", dtype, [(step_elementwise.swiglu(both), step_ops.swiglu(both))])


def entry(kernel, dtype, pairs) -> dict[str, object]:
    worst = max(float((a - b).abs().max()) if a.numel() else 0.0 for a, b in pairs)
    return {"kernel": kernel, "dtype": str(dtype), "error": worst}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
