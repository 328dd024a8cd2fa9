"""Runs the paged kernels in Triton's interpreter beside the torch path, on the same pages.

test_paged_kernels.py starts it and reads the largest differences that it writes.
"""

import json
import sys
from pathlib import Path

import torch

from trapline.gold.attention import fast_paged, kernels_paged

KINDS = {"plain": None, "int8": torch.int8, "int4": torch.uint8}
#: lengths, queries of each, H, G, D, P, window, tree: splits and none, odd pages, long tails.
PROBLEMS = [
    ([20, 0, 70], [1, 1, 1], 6, 2, 20, 16, 0, False),
    ([9, 13], [5, 2], 4, 1, 32, 16, 0, False),
    ([67], [1], 2, 1, 16, 24, 5, False),
    ([12, 8], [4, 4], 4, 2, 32, 16, 0, True),
]


def main(folder: Path) -> None:
    found = {}
    for number, problem in enumerate(PROBLEMS):
        for kind in KINDS:
            for dtype in (torch.float32, torch.float16)[: 2 if kind == "plain" else 1]:
                name = f"{number}-{kind}-{str(dtype).removeprefix('torch.')}"
                found[name] = differences(problem, kind, dtype)
    (folder / "differences.json").write_text(json.dumps(found))


def differences(problem, kind: str, dtype: torch.dtype) -> dict[str, float]:
    lengths, new, H, G, D, P, window, treed = problem
    torch.manual_seed(0)
    tokens, width = sum(lengths), -(-max(lengths) // P)
    table = torch.randperm(len(lengths) * width).int().view(len(lengths), width)
    slots = torch.cat([
        table[b, torch.arange(length) // P].long() * P + torch.arange(length) % P
        for b, length in enumerate(lengths)
    ])  # fmt: skip
    k, v = torch.randn(2, tokens, G, D).to(dtype)
    ours, theirs = (empty_pages(table.numel(), G, P, D, kind, dtype) for _ in range(2))
    kernels_paged._append(k, v, *ours[:2], slots, *ours[2:])
    fast_paged._append(k, v, *theirs[:2], slots, *theirs[2:])
    appended = max(largest(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None)
    ends = torch.tensor([0, *new]).cumsum(0).int()
    q = torch.randn(int(ends[-1]), H, D).to(dtype)
    tree = torch.rand(len(q), max(new)) < 0.5 if treed else None
    uniform = len(set(new)) == 1
    given = (q, *theirs[:2], table, torch.tensor(lengths).int(), None if uniform else ends)
    rules = (max(new), *theirs[2:], tree, window, 0.0, D**-0.5)
    outs = [torch.full_like(q, 9.0) for _ in range(2)]
    kernels_paged._attention(*given, *rules, outs[0])
    fast_paged._attention(*given, *rules, outs[1])
    return {"appended": appended, "attended": largest(*outs)}


def empty_pages(pages: int, G: int, P: int, D: int, kind: str, dtype: torch.dtype):
    """Keys, values and their scales. What nobody writes is not a number."""
    if kind == "plain":
        k, v = torch.full((2, pages, G, P, D), torch.nan).to(dtype)
        return k, v, None, None
    columns = D // 2 if kind == "int4" else D
    k, v = torch.full((2, pages, G, P, columns), 77, dtype=torch.uint8).view(KINDS[kind])
    k_scale, v_scale = torch.full((2, pages, G, P), torch.nan, dtype=torch.float16)
    return k, v, k_scale, v_scale


def largest(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).nan_to_num(0.0).abs().max())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
