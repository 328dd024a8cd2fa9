"""Compiles the paged kernels for sm_90 without a GPU; test_paged_kernels.py reads the result.

`some` are wanted: one configuration of every kind of page and every feature; or `all`: every one
that `tiles_for` can answer for 16-bit and 32-bit queries.
"""

import itertools
import json
import sys
from pathlib import Path

import torch
import triton

from trapline.gold.attention.paged.hopper import decode
from trapline.gold.attention.paged.triton import attention, pages
from trapline.gold.device import compile_for_hopper

FLOATS = {"scale", "softcap"}
TYPES = dict.fromkeys(("block_table", "seq_lens", "cu_q", "prefix_pages", "counters"), "*i32")
TYPES |= {"tree": "*i64", "slots": "*i64"}
TYPES |= dict.fromkeys(("k_scale", "v_scale"), "*fp16")
TYPES |= dict.fromkeys(("parts", "stats", "prefix_parts", "prefix_stats"), "*fp32")
TYPES |= dict.fromkeys(("cosine", "sine"), "*fp32")
#: What pages are stored as, and read as.
STORED = {0: None, 1: "i8", 2: "fp8e4nv", 3: "u8"}
WORDS = {0: None, 1: "i32", 2: "i32", 3: "i16"}
TOPS = {0: 0, 1: 127, 2: 448, 3: 7}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: Arguments that a launch may leave out.
OPTIONAL = {"cu_q", "tree", "prefix_pages", "prefix_parts", "prefix_stats", "cosine", "sine"}
PREFIX = {"prefix_pages", "prefix_parts", "prefix_stats"}


def some() -> list[tuple]:
    """dtype, kind of pages, D, page, rows of queries, what is given, windowed and capped."""
    decode = [("bf16", kind, 128, 16, 4, set(), False) for kind in STORED]
    decode += [("bf16", 0, 64, 16, 4, PREFIX, True), ("fp16", 3, 256, 128, 8, {"cu_q"}, False)]
    return [*decode, ("bf16", 0, 128, 16, 64, {"cu_q", "tree"}, True)]


def every() -> list[tuple]:
    given = [(set(), False), ({"cu_q"}, True), ({"cu_q", "tree"}, False), ({"cu_q"} | PREFIX, True)]
    sizes = itertools.product(DTYPES, STORED, (64, 128, 256), (16, 128), (4, 32, 64, 128))
    return [(*one, *more) for one, more in zip(sizes, itertools.cycle(given), strict=False)]


def main(folder: Path) -> None:
    which = json.loads((folder / "wanted.json").read_text())
    made = []
    for number, one in enumerate(every() if which == "all" else some()):
        made.append(attention_compiled(*one))
        if number < 4 or (which == "all" and one[4] == 4):
            made.append(appended(*one[:4], given=one[5]))
        if PREFIX.issubset(one[5]):
            made.append(attention_compiled(*one, kernel=attention.prefix_kernel))
    made += [decoded(*one) for one in (every_decoding() if which == "all" else SOME_DECODING)]
    (folder / "compiled.json").write_text(json.dumps(made))


def attention_compiled(dtype, kind, D, page, rows, given, ruled, kernel=attention.attention_kernel):
    tiles = attention.tiles_for(rows, D, DTYPES[dtype], kind, many=True)
    fixed = {"P": page, "D": D, "KIND": kind, "OWN": True, "CAPPED": ruled}
    fixed |= {"WIDE": max(16, triton.next_power_of_2(D if kind == 0 else D // 4))}
    fixed |= {"BLOCK_M": tiles.rows, "BLOCK_S": tiles.positions, "BLOCK_B": 32}
    fixed |= {"BLOCK_D": triton.next_power_of_2(D), "ROWS": 4, "ALONE": rows < 16}
    fixed |= {"WINDOWED": ruled and "tree" not in given and not PREFIX.issubset(given)}
    fixed |= {"PRECISION": "ieee" if dtype == "fp32" else "tf32", "TWINS": page == 16}
    fixed |= {"ONE_TOP": rows < 16, "NARROW": page < 128}
    return compiled(kernel, dtype, WORDS[kind], fixed, given, kind, tiles.warps, tiles.stages)


#: dtype, kind of pages, D, page, heads a group.
SOME_DECODING = [("bf16", 0, 128, 16, 4), ("bf16", 2, 128, 16, 8), ("bf16", 3, 128, 16, 4)]


def every_decoding() -> list[tuple]:
    sizes = itertools.product(("bf16", "fp16"), sorted(decode.CONFIGS), (16, 48, 128))
    heads = itertools.cycle((1, 4, 8))
    return [(dtype, *kind_and_width, page, next(heads)) for dtype, kind_and_width, page in sizes]


def decoded(dtype, kind, D, page, heads):
    config = decode.config_for(kind, D, heads)
    fixed = decode.constants(kind, D, page, heads, 32, config) | {"NARROW": True}
    fixed["BY_PAIR"] = page < 128
    box = decode.box_of(kind, D, page, config.positions)
    bits = 8 if kind else 16
    layout = decode.box_layout(box[3], bits)
    pages = f"tensordesc<{'i8' if kind else dtype}{box},{layout!r}>"
    kernel = decode.decode_kernel
    return compiled(kernel, dtype, pages, fixed, set(), kind, 1, 1)


def appended(dtype, kind, D, page, given):
    fixed = {"P": page, "D": D, "BLOCK_G": 8, "BLOCK_D": triton.next_power_of_2(D // 2)}
    fixed["TOP"] = TOPS[kind]
    kernel = pages.append_kernel
    turned = {"cosine", "sine"} if given else set()
    return compiled(kernel, dtype, STORED[kind], fixed, turned, kind, 2, 3)


def compiled(kernel, dtype, pages, fixed, given, kind, warps, stages):
    names = kernel.arg_names
    absent = OPTIONAL - given | (set() if kind else {"k_scale", "v_scale"})
    fixed = {name: value for name, value in fixed.items() if name in names}
    fixed |= {name: None for name in names if name in absent}
    types = {name: type_of(name, dtype, pages or dtype) for name in names}
    loose = attention.UNFIXED
    aligned = {n for n in names if types[n] == "i32" and "_" in n and n not in loose}
    made = compile_for_hopper(kernel, types, fixed, aligned=aligned, warps=warps, stages=stages)
    # A pipeline of loads that the compiler gave up on would only be slow.
    ways = "cg.shared", "ca.shared", "bulk.tensor"
    copies = sum(made.asm["ptx"].count(f"cp.async.{way}") for way in ways)
    shared = made.metadata.shared
    return {"kernel": kernel.__name__, "kind": kind, "shared": shared, "copies": copies}


def type_of(name: str, dtype: str, pages: str) -> str:
    if name in ("k_pages", "v_pages"):
        return pages if pages.startswith("tensordesc") else f"*{pages}"
    if name in ("keys", "values"):
        return "*i8" if pages.startswith("tensordesc<i8") else f"*{dtype}"
    if name in ("q", "k", "v", "out"):
        return f"*{dtype}"
    return "fp32" if name in FLOATS else TYPES.get(name, "i32")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
