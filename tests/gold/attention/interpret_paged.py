"""Runs the paged kernels in Triton's interpreter beside the torch path, on the same pages.

test_paged_kernels.py starts it and reads the largest differences that it writes.
"""

import json
import sys
from pathlib import Path

import torch
from triton.runtime.interpreter import interpreter_builder

from trapline.gold.attention.paged import PagedProblem, reference
from trapline.gold.attention.paged.triton.attention import attention
from trapline.gold.attention.paged.triton.pages import append

KINDS = {"plain": None, "int8": torch.int8, "int4": torch.uint8}
#: lengths, queries of each, H, G, D, P, rules: long and short rows, odd pages, none, trees.
PROBLEMS = {
    "decode": ([9, 0, 70], [1, 1, 1], 6, 2, 20, 16, {}),
    "packed": ([9, 13], [5, 2], 4, 1, 32, 16, {"softcap": 1.5}),
    "window": ([41], [1], 2, 1, 16, 24, {"window": 5}),
    "tree": ([12, 8], [4, 4], 4, 2, 32, 16, {"tree": True}),
    "wide tree": ([80, 20], [65, 9], 1, 1, 16, 16, {"tree": True}),
    "tree behind a prefix": ([40, 37], [3, 3], 2, 2, 16, 24, {"tree": True, "prefix": [1]}),
    "long prefix": ([40, 700, 90, 500], [1] * 4, 1, 1, 16, 16, {"prefix": [1]}),
    "prefix": ([20, 18, 3, 6], [1, 1, 1, 1], 4, 2, 16, 16, {"prefix": [1, 0]}),
}
#: Half precision and codes once or twice: what they change is the same in every problem.
RUNS = [(name, "plain", torch.float32) for name in PROBLEMS]
RUNS += [("decode", "plain", torch.float16)]
RUNS += [("decode", "int8", torch.float32), ("packed", "int4", torch.float32)]
RUNS += [("window", "int4", torch.float16)]
RUNS += [("prefix", "int8", torch.float32)]
#: One of these in a row, and the row has no scale.
BROKEN = [float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 3e38]
#: Programs run in any order on a GPU, in theirs in the interpreter: these run last to first too.
BACKWARDS = [("decode", "plain"), ("long prefix", "plain")]


def main(folder: Path) -> None:
    found = {}
    for name, kind, dtype in RUNS:
        key = f"{name}-{kind}-{str(dtype).removeprefix('torch.')}"
        found[key] = differences(PROBLEMS[name], kind, dtype)
    forwards = interpreter_builder.set_grid_idx

    def backwards(x: int, y: int, z: int) -> None:
        forwards(interpreter_builder.grid_dim[0] - 1 - x, y, z)

    interpreter_builder.set_grid_idx = backwards
    for name, kind in BACKWARDS:
        found[f"{name}-backwards-float32"] = differences(PROBLEMS[name], kind, torch.float32)
    (folder / "differences.json").write_text(json.dumps(found))
    interpreter_builder.set_grid_idx = forwards
    (folder / "lost.json").write_text(json.dumps({kind: lost(kind) for kind in ("int8", "int4")}))


def lost(kind: str) -> list[list[bool]]:
    """Which scales are NaN, of keys and of values, if every second row cannot be encoded."""
    tokens, G, D, P = 2 * len(BROKEN), 1, 20, 16
    torch.manual_seed(0)
    rows = torch.randn(2, tokens, G, D)
    for number, value in enumerate(BROKEN):
        rows[:, 2 * number, 0, 3 + number] = value
    pages = empty_pages(1, G, P, D, kind, torch.float32)
    for scales in pages[2:]:
        scales.zero_()
    append(*rows, *pages[:2], torch.arange(tokens), *pages[2:], None, None)
    return [scales[0, 0, :tokens].isnan().tolist() for scales in pages[2:]]


def differences(problem, kind: str, dtype: torch.dtype) -> dict[str, float]:
    lengths, new, H, G, D, P, rules = problem
    torch.manual_seed(0)
    tokens, width = sum(lengths), -(-max(lengths) // P)
    table = torch.randperm(len(lengths) * width).int().view(len(lengths), width)
    slots = torch.cat([
        table[b, torch.arange(length) // P].long() * P + torch.arange(length) % P
        for b, length in enumerate(lengths)
    ])  # fmt: skip
    k, v = torch.randn(2, tokens, G, D).to(dtype)
    angles = torch.rand(tokens, D // 2)
    turn = (angles.cos(), angles.sin()) if "tree" in rules else (None, None)
    ours, theirs = (empty_pages(table.numel(), G, P, D, kind, dtype) for _ in range(2))
    # Every token is appended alike, by a program of its own: a hundred show it.
    few = [None if x is None else x[:100] for x in (k, v, slots, *turn)]
    rest = [None if x is None else x[100:] for x in (k, v, slots, *turn)]
    append(*few[:2], *ours[:2], apart(few[2]), *ours[2:], *few[3:])
    reference.append(*few[:2], *theirs[:2], few[2], *theirs[2:], *few[3:])
    appended = max(largest(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None)
    reference.append(*rest[:2], *theirs[:2], rest[2], *theirs[2:], *rest[3:])
    ends = torch.tensor([0, *new]).cumsum(0).int()
    q = torch.randn(int(ends[-1]), H, D).to(dtype)
    tree = torch.rand(len(q), max(new)) < 0.5 if "tree" in rules else None
    hint = shared(table, rules["prefix"]) if "prefix" in rules else (0, None)
    uniform = len(set(new)) == 1
    given = (q, *theirs[:2], table, torch.tensor(lengths).int(), None if uniform else ends)
    more = (
        max(new),
        *theirs[2:],
        tree,
        rules.get("window", 0),
        rules.get("softcap", 0.0),
        D**-0.5,
        *hint,
    )
    outs = [torch.full_like(q, 9.0) for _ in range(2)]
    attention(PagedProblem(*map(apart, given), *map(apart, more), outs[0]))
    reference.attention(PagedProblem(*given, *more, outs[1]))
    return {"appended": appended, "attended": largest(*outs)}


def apart(x):
    """Integers and masks that do not lie beside each other; everything else as it is."""
    if not isinstance(x, torch.Tensor) or x.dtype not in (torch.int32, torch.int64, torch.bool):
        return x
    return torch.stack((x, torch.zeros_like(x)), -1)[..., 0]


def shared(table: torch.Tensor, pages: list[int]) -> tuple[int, torch.Tensor]:
    """Lets the rows of each group begin with the pages of its first row."""
    rows = len(table) // len(pages)
    for group, count in enumerate(pages):
        one = slice(group * rows, (group + 1) * rows)
        table[one, :count] = table[group * rows, :count]
    return rows, torch.tensor(pages).int()


def empty_pages(pages: int, G: int, P: int, D: int, kind: str, dtype: torch.dtype):
    """Keys, values and their scales. Unwritten memory is NaN."""
    if kind == "plain":
        k, v = torch.full((2, pages, G, P, D), torch.nan).to(dtype)
        return k, v, None, None
    columns = D // 2 if kind == "int4" else D
    k, v = torch.full((2, pages, G, P, columns), 77, dtype=torch.uint8).view(KINDS[kind])
    k_scale, v_scale = torch.full((2, pages, G, P), torch.nan, dtype=torch.float16)
    return k, v, k_scale, v_scale


def largest(one: torch.Tensor, other: torch.Tensor) -> float:
    if not torch.equal(one.isnan(), other.isnan()):
        return float("inf")
    return float((one.double() - other.double()).nan_to_num(0.0).abs().max())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
