"""Compiles the kernels for sm_90 without a GPU; test_kernels.py reads the result.

Every way that the benchmark's shapes are cut, for the rows of a batch and of a batch of beams.
With FEW in the environment only the smallest shape at eight rows is compiled.
"""

import json
import os
import sys
from pathlib import Path

import torch

from trapline.gold.decoder import tile_config
from trapline.gold.decoder.hopper import linear_tma
from trapline.gold.decoder.triton import (
    split_k_linear,
    step_attention,
    step_elementwise,
    step_linear,
)
from trapline.gold.device import compile_for_hopper

#: Width, joined projections, query heads times width, hidden, vocabulary, head width, ratio.
SHAPES = {
    "254M": (1024, 2048, 1024, 2816, 32_000, 64, 2),
    "1.7B": (2048, 4096, 2048, 6144, 151_936, 128, 2),
    "8B": (4096, 6144, 4096, 14_336, 128_256, 128, 4),
}
WIDE = {"squares", "best", "lse", "parts", "planes", "maxima", "peaks", "totals"}
#: Further arguments of the last product when it finds the best of its tiles.
NO_GROUPS = {"maxima": None, "peaks": None, "totals": None, "GROUP": 0}
WHOLE = {"ids", "positions", "slots", "made", "tokens", "history"}
SMALL = {"place", "arrived", "pages", "tails", "prefix"}
ROWS = {"x", "w", "out", "stream", "weight", "y", "table", "qkv", "keys", "values"}
ROWS |= {"cosine", "sine", "q_norm", "k_norm", "merged", "after", "q_out", "both"}
#: Those of the cut that is compiled.
BOXES = {"x_boxes": [0, 0], "w_boxes": [0, 0]}
ALIGNED = {"after_count", "N", "K", "x_row", "w_row", "out_row", "qkv_row", "width", "C"}


def main(folder: Path, few: bool) -> None:
    made = []
    for name, shape in list(SHAPES.items())[: 1 if few else None]:
        for rows in (8, 1) if few else (8, 64, 1):
            made += [product(rows, *one) for one in products(shape, rows)]
            made += held(shape, rows)
            made.append(ranking(shape, rows))
        made += [attention(shape, beams, 64) for beams in ((8,) if few else (1, 8))]
        made.append(attention(shape, 8, 128))
        made.append(attention(shape, 8, 128, ones=("G", "common", "splits")))
        made[-1]["shape"] = name
    made += [small("embed_kernel", {"BLOCK": 1024}), small("argmax_kernel", {"BLOCK": 512})]
    (folder / "step.json").write_text(json.dumps(made))
    (folder / "elementwise.json").write_text(json.dumps(elementwise()))


def products(shape, rows):
    """Each kind of product with its cut, once."""
    width, joined, wide, hidden, vocabulary, *_ = shape
    asked = [
        ("normed_linear", joined, width),
        ("residual_linear", width, wide),
        ("normed_swiglu", hidden, width),
    ]
    asked += [("residual_linear", width, hidden), ("normed_linear", vocabulary, width)]
    found = {}
    for kind, outputs, inputs in asked:
        if uses_split_k(kind, rows, outputs, inputs):
            continue
        cut = tile_config.tile_config_of(kind, rows, outputs, inputs, 2)
        even = outputs % cut.block_n == 0 and inputs % (cut.split * cut.block_k) == 0
        found[kind, cut, even, outputs, inputs] = (
            *(kind, cut, even, outputs, inputs),
            vocabulary == outputs,
        )
    return found.values()


def product(rows, kind, cut, even, outputs, inputs, last) -> dict[str, object]:
    shape = {"even": even, "outputs": outputs, "inputs": inputs}
    fixed = tile_config.tile_constants(cut, kind, **shape, precision="tf32", early=True)
    if kind != "residual_linear":
        fixed["PARTS"] = 64
    lines = 2 * outputs if kind == "normed_swiglu" else outputs
    weights = torch.empty((lines, inputs), dtype=torch.bfloat16, device="meta")
    if kind != "residual_linear" and not last and tile_config.uses_tma(kind, cut, weights):
        return boxed(kind, cut, outputs, inputs)
    if kind == "normed_linear":
        fixed |= NO_GROUPS if last else {"best": None, "place": None, **NO_GROUPS}
    fixed |= single(rows)
    made = compiled(f"{kind}_kernel", step_linear, fixed, cut.warps, cut.stages)
    return {**made, "cut": cut}


def ranking(shape, rows) -> dict[str, object]:
    """The last product where candidates are chosen from its maxima."""
    outputs, inputs = shape[4], shape[0]
    cut = tile_config.tile_config_of("normed_linear", rows, outputs, inputs, 2)
    even = outputs % cut.block_n == 0 and inputs % (cut.split * cut.block_k) == 0
    known = {"even": even, "outputs": outputs, "inputs": inputs}
    fixed = tile_config.tile_constants(cut, "normed_linear", **known, precision="tf32", early=True)
    fixed |= {"PARTS": 4, "GROUP": 32, "best": None, "place": None} | single(rows)
    return compiled("normed_linear_kernel", step_linear, fixed, cut.warps, cut.stages)


def boxed(kind, cut, outputs, inputs) -> dict[str, object]:
    fixed = {"PARTS": 4, **tile_config.tma_constants(cut, outputs, inputs)}
    BOXES["x_boxes"], BOXES["w_boxes"] = ([n, cut.block_k] for n in (cut.block_b, cut.block_n))
    if kind == "normed_linear":
        return compiled("normed_linear_tma_kernel", linear_tma, fixed, cut.warps, cut.stages)
    del fixed["AHEAD"]
    return compiled("normed_swiglu_tma_kernel", linear_tma, fixed, cut.warps, cut.stages)


def uses_split_k(kind, rows, outputs, inputs) -> bool:
    return kind == "residual_linear" and tile_config.uses_split_k(rows, outputs, inputs, 2)


def held(shape, rows) -> list[dict[str, object]]:
    """The products of so many rows that hold their weights, and what adds up their planes."""
    width, _, wide, hidden, *_ = shape
    fixed = {
        "BLOCK_B": tile_config.rows_per_program(rows),
        "BLOCK_N": tile_config.SPLIT_K_BLOCK_N,
        "BLOCK_K": tile_config.SPLIT_K_BLOCK_K,
    }
    fixed |= {"PRECISION": "tf32", "PDL": True} | single(rows)
    made = []
    for inputs in (wide, hidden):
        if uses_split_k("residual_linear", rows, width, inputs):
            after = {
                "COUNT": tile_config.split_k_parts(inputs),
                "BLOCK": tile_config.REDUCE_BLOCK,
                "PDL": True,
            }
            made.append(compiled("split_k_kernel", split_k_linear, fixed, 4, 1))
            made.append(
                compiled("reduce_split_k_kernel", split_k_linear, after | single(rows), 1, 1)
            )
    return made


def single(rows) -> dict[str, int]:
    """Triton turns an argument of value 1 into a compile-time constant."""
    return {"rows": 1} if rows == 1 else {}


def attention(shape, beams, tail, ones=()) -> dict[str, object]:
    width, ratio = shape[5:]
    cut = tile_config.attention_tile(width, 2, beams, ratio, tail)
    fixed = {
        "BEAMS": beams,
        "R": ratio,
        "D": width,
        "BLOCK_D": width,
        "BLOCK_M": max(16, beams * ratio),
        "BLOCK_S": cut.tile,
        "P": 16,
        "TAIL_P": 16 if beams == 1 else 1,
        "WINDOWED": False,
        "PRECISION": "tf32",
        "PDL": True,
        "PARTS": tile_config.MERGE_IN_PLACE,
        "q_norm": None,
        "k_norm": None,
    }
    if beams == 1 and width <= 64:  # wider heads are cut into parts
        fixed |= {"lse": None, "PARTS": 0}
    fixed |= dict.fromkeys(ones, 1)
    return compiled("attend_kernel", step_attention, fixed, cut.warps, 2, cut.registers)


def small(name, fixed) -> dict[str, object]:
    return compiled(name, step_linear, {**fixed, "PDL": True}, 4, 2)


def elementwise() -> list[dict[str, object]]:
    """The kernels between products of the step in torch."""
    made = []
    for dtype in ("bf16", "fp16", "fp32"):
        for width, rotated, normed in ((128, True, True), (64, True, False), (64, False, False)):
            fixed = {"D": width, "BLOCK": width // 2, "ROTATED": rotated, "NORMED": normed}
            fixed |= {} if rotated else {"cosine": None, "sine": None}
            fixed |= {} if normed else {"q_norm": None, "k_norm": None}
            made.append(compiled("rope_and_append_kernel", step_elementwise, fixed, 1, dtype=dtype))
    return made + [
        compiled("swiglu_kernel", step_elementwise, {"BLOCK": 1024}, 1, dtype=dtype)
        for dtype in ("bf16", "fp32")
    ]


def compiled(
    name, module, fixed, warps, stages=3, registers=None, dtype="bf16"
) -> dict[str, object]:
    kernel = getattr(module, name)
    types = {argument: type_of(argument, dtype) for argument in kernel.arg_names}
    limits = {"warps": warps, "stages": stages, "registers": registers}
    made = compile_for_hopper(kernel, types, fixed, aligned=ALIGNED, **limits)
    return {"kernel": name, "shared": made.metadata.shared}


def type_of(name: str, dtype: str) -> str:
    if name in BOXES:
        return f"tensordesc<bf16{BOXES[name]}>"
    if name in ("eps", "scale"):
        return "fp32"
    if name == "active":
        return "*i1"
    for names, kind in ((WIDE, "fp32"), (WHOLE, "i64"), (SMALL, "i32"), (ROWS, dtype)):
        if name in names:
            return f"*{kind}"
    return "i32"


if __name__ == "__main__":
    main(Path(sys.argv[1]), "FEW" in os.environ)
