"""Compiles the kernels of fast rounds for sm_90; test_fast_rounds.py reads the result."""

import inspect
import json
import os
import sys
from pathlib import Path

from trapline.gold.decoder.hopper import linear_tma
from trapline.gold.decoder.triton import step_linear
from trapline.gold.device import compile_for_hopper
from trapline.gold.tree_decoding.hopper import linear_many_rows
from trapline.gold.tree_decoding.triton import attention as tree_attention
from trapline.gold.tree_decoding.triton import draft as draft_kernels
from trapline.gold.tree_decoding.triton import round as round_kernels

INTEGERS = {
    *("tokens", "ids", "parents", "depths", "choices", "path", "roots", "lengths", "known"),
    *("made", "limits", "text", "log", "rounds", "kept", "anchors", "seeds"),
}
SMALL = {"best": "*fp32", "place": "*i32", "logits": "*fp32", "heat": "*fp32", "seen": "*i8"}
SUMS = {"sums": "*fp32", "squares": "*fp32", "context_sums": "*fp32", "planes": "*fp32"}
ATTENDED = {
    *("qkv", "keys", "values", "cosine", "sine", "q_norm", "k_norm", "out", "stream"),
    *("features", "fresh", "context", "w", "gain", "table", "weight", "x", "y", "context_w"),
}
#: Multiples of 16, as those of large models are.
WIDTHS = {"N", "K", "each", "x_row", "w_row", "out_row"}
#: Where the copy engine does not serve a product: what threads know that load it.
THREADS = {"SPLIT": 1, "EVEN": True, "AHEAD": 64, "PRECISION": "tf32", "best": None, "place": None}


def main(folder: Path, which: str) -> None:
    made = [compiled(*one) for one in few()]
    if which == "all":
        made += [compiled(*one) for one in others()]
    (folder / "compiled.json").write_text(json.dumps(made))


def few():
    rounds = round_kernels
    yield rounds.prepare_kernel, {"BLOCK": 32, "ROUNDS": 3}
    yield rounds.verdict_kernel, {"BLOCK": 32}
    yield attention("bf16", width=64, share=2, nodes=33, fresh=False)


def others():
    rounds = round_kernels
    yield rounds.choose_kernel, {"BLOCK": 64}
    yield rounds.chain_kernel, {"BLOCK": 64}
    yield rounds.draw_kernel, {"BLOCK": 2048}
    yield rounds.verdict_kernel, {"BLOCK": 16, "anchors": None}
    yield rounds.move_kernel, {"BLOCK_L": 16, "BLOCK": 256}
    yield rounds.lookup_kernel, {"WIDTH": 3, "BLOCK": 512, "BLOCK_L": 16}
    yield attention("bf16", width=128, share=4, nodes=128, fresh=False)
    yield attention("bf16", width=128, share=4, nodes=16, fresh=False, alone=False)
    yield attention("fp32", width=64, share=2, nodes=8, fresh=True)
    for kind in ("bf16", "fp32"):
        yield product("residual_linear", draft_kernels.begin_kernel, 8, 1024, {"BLOCK": 256}, kind)
        yield product("normed_linear", draft_kernels.project_kernel, 8, 256, {"PARTS": 16}, kind)
    for lines, inputs in ((8, 256), (16, 768), (128, 256), (128, 768)):
        yield product("residual_linear", step_linear.residual_linear_kernel, lines, inputs, {})
    for lines in (8, 16, 128):
        yield product("normed_swiglu", step_linear.normed_swiglu_kernel, lines, 256, {"PARTS": 16})
        yield product("normed_linear", step_linear.normed_linear_kernel, lines, 256, {"PARTS": 16})
    for lines in (64, 128):
        yield large("residual_linear", linear_many_rows.split_k_kernel, lines, {})
    parts = {"PARTS": 16}
    yield large("normed_swiglu", linear_many_rows.swiglu_wide_kernel, 64, parts)
    yield large("normed_swiglu", linear_many_rows.swiglu_kernel, 128, parts)
    yield large("normed_linear", linear_tma.normed_linear_tma_kernel, 128, {**parts, "AHEAD": 64})
    yield large("normed_linear", step_linear.normed_linear_kernel, 128, {**parts, **THREADS})


def large(name: str, kernel, lines: int, fixed: dict) -> tuple:
    cut = linear_many_rows.tile_config(name, lines, 4096)
    known = {"BLOCK_B": cut.block_b, "BLOCK_N": cut.block_n, "BLOCK_K": cut.block_k}
    widths = {"x": cut.block_b, "w": cut.block_n, "half": cut.block_n // 2}
    tiles = {f"{x}_boxes": f"tensordesc<bf16[{n}, {cut.block_k}]>" for x, n in widths.items()}
    return kernel, {**known, **fixed}, "bf16", cut.warps, cut.stages, tiles


def product(name: str, kernel, lines: int, inputs: int, fixed: dict, kind: str = "bf16") -> tuple:
    from trapline.gold.decoder.tile_config import tile_config_of, tile_constants
    from trapline.gold.tree_decoding.tree_pass import small_tile_config

    cut = small_tile_config(name, lines, inputs)
    if kind == "fp32":
        cut = tile_config_of(name, lines, 256, inputs, 4)
    sizes = {"even": True, "outputs": 256, "inputs": inputs, "early": True}
    precision = "ieee" if kind == "fp32" else "tf32"
    known = tile_constants(cut, name, precision=precision, **sizes)
    return kernel, {**known, **fixed}, kind, cut.warps, cut.stages


def attention(
    kind: str, *, width: int, share: int, nodes: int, fresh: bool, alone: bool = True
) -> tuple:
    from trapline.gold.tree_decoding.tree_pass import QUERIES, attention_tile_config

    chunk = max(1, min(nodes, QUERIES // share))
    tile, warps = attention_tile_config(width, 2 if kind == "bf16" else 4, alone=alone)
    fixed = {
        "QN": chunk,
        "BLOCK_Q": 1 << (chunk - 1).bit_length(),
        "R": share,
        "D": width,
        "BLOCK_D": width,
        "BLOCK_C": 128,
        "BLOCK_M": max(16, chunk * share),
        "BLOCK_T": max(16, 1 << (nodes - 1).bit_length()),
        "BLOCK_W": 16,
        "BLOCK_S": tile,
        "PRECISION": "ieee" if kind == "fp32" else "tf32",
        **({"features": None} if fresh else {"fresh": None, "known": None}),
    }
    return tree_attention.tree_attend_kernel, fixed, kind, warps


def compiled(
    kernel, fixed, kind: str = "bf16", warps: int = 4, stages: int = 2, boxes: dict | None = None
) -> dict:
    types = {**dict.fromkeys(kernel.arg_names, "i32"), **(boxes or {})}
    types.update(dict.fromkeys(INTEGERS, "*i64"), **SMALL, **SUMS, scale="fp32", eps="fp32")
    types.update(dict.fromkeys(ATTENDED, f"*{kind}"))
    given = inspect.signature(kernel.fn).parameters.values()
    left = {one.name: one.default for one in given if one.default is not one.empty}
    fixed = {**left, **fixed, **({"PDL": True} if "PDL" in kernel.arg_names else {})}
    aligned = WIDTHS if boxes else ()
    made = compile_for_hopper(kernel, types, fixed, aligned=aligned, warps=warps, stages=stages)
    return {"name": kernel.__name__, "shared": made.metadata.shared}


if __name__ == "__main__":
    main(Path(sys.argv[1]), os.environ["KERNELS"])
