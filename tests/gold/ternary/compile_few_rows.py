"""Compiles the tensor-core kernels for few rows for sm_90 without a GPU, as they are planned.

test_kernels.py starts it with a folder of problems and reads what it writes there.
"""

import json
import sys
from pathlib import Path

import triton

from trapline.gold.device import compile_for_hopper
from trapline.gold.ternary.triton import packed_matmul as kernels

TYPES = {"scales": "*fp16", "given": "i32", "N": "i32", "blocks": "i32"}


def main(folder: Path) -> None:
    problems = json.loads((folder / "problems.json").read_text())
    (folder / "compiled.json").write_text(json.dumps([compiled(*one) for one in problems]))


def compiled(groups, rows, kind, settled) -> dict[str, object]:
    plan = kernels.planned(groups, rows)
    fixed = {"GROUPS": groups, "M": triton.next_power_of_2(rows), "WARPS": plan.warps}
    fixed["SETTLED"] = settled
    if plan.stages:
        kernel, planes = kernels.ring_kernel, "*i32"
        fixed |= {"STAGES": plan.stages}
    else:
        kernel, planes = kernels.few_rows_kernel, "*u8"
        fixed |= {"EACH": plan.each, "PASSES": plan.passes, "STAYS": plan.stay > 0}
    types = TYPES | {"x": f"*{kind}", "y": f"*{kind}", "planes": planes}
    made = compile_for_hopper(kernel, types, fixed, warps=plan.warps, registers=plan.registers)
    ptx = made.asm["ptx"]
    load = "cp.async.cg" if plan.stages else "ld.global.nc.v2"
    return {
        "programs": max(1, plan.stay),
        "shared": made.metadata.shared,
        "products": ptx.count("mma.sync"),
        "asked before": ptx.index(load) < ptx.index("griddepcontrol.wait"),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
