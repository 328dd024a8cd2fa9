"""Compiles the kernels for sm_90 without a GPU.

test_kernels.py starts it with a folder and reads `compiled.json` there. `problems.json` says which
kernels to compile: "few" or "many" rows of x on tensor cores, or "other" kernels.
"""

import json
import re
import sys
from pathlib import Path

import triton

from trapline.gold.device import compile_for_hopper
from trapline.gold.ternary.hopper import many_rows as kernels_many
from trapline.gold.ternary.hopper import many_rows_registers as kernels_registers
from trapline.gold.ternary.hopper.few_rows import few_rows_kernel
from trapline.gold.ternary.hopper.few_rows_ring import ring_kernel
from trapline.gold.ternary.triton import packed_matmul as kernels

KINDS = {str(dtype): dtype for dtype in kernels_registers.TYPES.values()}


def main(folder: Path) -> None:
    which, problems = json.loads((folder / "problems.json").read_text())
    compiled = {"few": few, "many": many, "other": other}[which]
    (folder / "compiled.json").write_text(json.dumps([compiled(*one) for one in problems]))


def few(groups, rows, kind, settled) -> dict[str, object]:
    plan = kernels.planned(groups, rows)
    fixed = {"GROUPS": groups, "M": triton.next_power_of_2(rows), "WARPS": plan.warps}
    fixed["SETTLED"] = settled
    if plan.stages:
        kernel, planes = ring_kernel, "*i32"
        fixed |= {"STAGES": plan.stages}
    else:
        kernel, planes = few_rows_kernel, "*u8"
        fixed |= {"EACH": plan.each, "PASSES": plan.passes, "STAYS": plan.stay > 0}
    types = {"scales": "*fp16", "given": "i32", "N": "i32", "blocks": "i32"}
    types |= {"x": f"*{kind}", "y": f"*{kind}", "planes": planes}
    made = compile_for_hopper(kernel, types, fixed, warps=plan.warps, registers=plan.registers)
    ptx = made.asm["ptx"]
    load = "cp.async.cg" if plan.stages else "ld.global.nc.v2"
    return {
        "programs": max(1, plan.stay),
        "shared": made.metadata.shared,
        "products": ptx.count("mma.sync"),
        "asked before": ptx.index(load) < ptx.index("griddepcontrol.wait"),
    }


def many(rows, N, groups, kind, settled) -> dict[str, object]:
    how = kernels_many.cut(rows, N, groups, 132)
    y = kind if how.split == 1 else "fp32"
    x = kernels_registers.tile_layout(how.rows_of_x, KINDS[kind])
    codes = kernels_registers.codes_layout(how.rows, how.pack)
    types = {"scales": "*fp16", "y": f"*{y}", "M": "i32", "N": "i32"}
    types["x"] = f"tensordesc<{kind}{[how.rows_of_x, 128]},{x!r}>"
    types["planes"] = f"tensordesc<i32{[how.rows, 8 * how.pack]},{codes!r}>"
    fixed = kernels_registers.constants(how, groups, settled)
    made = compile_for_hopper(kernels_registers.registers_kernel, types, fixed, aligned=("N",))
    if how.split > 1:
        parts = {"parts_ptr": "*fp32", "y_ptr": f"*{kind}", "size": "i32"}
        adding = {"SPLIT": how.split, "BLOCK": kernels_many.ADDED}
        compile_for_hopper(kernels_many.add_parts_kernel, parts, adding)
    ptx = made.asm["ptx"]
    products = re.findall(r"wgmma\.mma_async\S*\s*\{[^}]*\},\s*(\{|%rd)", ptx)
    return {
        "split": how.split,
        "whole": groups % how.split == 0,
        "shared": made.metadata.shared,
        "products": len(products),
        "from registers": products.count("{"),
        "waits": ptx.count("griddepcontrol.wait"),
        "parts of a program": how.consumers + 1,
    }


def other(name) -> dict[str, object]:
    types = {"x_ptr": "*bf16", "y_ptr": "*bf16", "scales_ptr": "*fp16"}
    types |= {"words_ptr": "*i32", "plane_ptr": "*u8"}
    if name == "gemv_kernel":
        rows, words, warps = kernels.GEMV_BLOCK
        types["x_ptr"] = "*i64"
        fixed = {"M": 1, "BLOCK_N": rows, "BLOCK_W": words}
    else:
        columns, rows, warps = kernels.GEMM_BLOCK
        fixed = {"BLOCK_M": rows, "BLOCK_N": columns, "PRECISION": "tf32"}
    kernel = getattr(kernels, name)
    given = {name: types.get(name, "i32") for name in kernel.arg_names}
    aligned = ("N", "K", "row_bytes")
    made = compile_for_hopper(kernel, given, fixed, aligned=aligned, warps=warps)
    ptx = made.asm["ptx"]
    return {
        "shared": made.metadata.shared,
        "tensor_cores": "mma" in ptx,
        "barriers": len(re.findall(r"bar\.sync", ptx)),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
