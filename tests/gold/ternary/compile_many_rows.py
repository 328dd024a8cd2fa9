"""Compiles the kernels for many rows for sm_90 without a GPU, as products are cut.

test_kernels.py starts it with a folder of problems and reads what it writes there.
"""

import json
import sys
from pathlib import Path

from trapline.gold.device import compile_for_hopper
from trapline.gold.ternary.hopper import many_rows as kernels_many
from trapline.gold.ternary.hopper import many_rows_wide as kernels_many_wide

TYPES = {"scales": "*fp16", "scales_ptr": "*fp16", "M": "i32", "N": "i32"}
TYPES |= {"planes": "*i32", "words_ptr": "*i32"}
KINDS = {str(dtype): dtype for dtype in kernels_many_wide.TYPES.values()}


def main(folder: Path) -> None:
    problems = json.loads((folder / "problems.json").read_text())
    (folder / "compiled.json").write_text(json.dumps([compiled(*one) for one in problems]))


def compiled(rows, N, groups, kind, settled) -> dict[str, object]:
    how = kernels_many.cut(rows, N, groups, 132)
    y = kind if how.split == 1 else "fp32"
    fixed = {"GROUPS": groups, "SPLIT": how.split, "STAGES": how.stages}
    fixed |= {"BLOCK_M": how.rows_of_x, "BLOCK_N": how.rows}
    if how.wide:
        layout = kernels_many_wide.tile_layout(how.rows_of_x, KINDS[kind])
        x = f"tensordesc<{kind}{[how.rows_of_x, 128]},{layout!r}>"
        fixed |= {"WARPS": how.warps, "SETTLED": settled, "DTYPE": KINDS[kind]}
        kernel, types = kernels_many_wide.wide_kernel, {"x": x, "y": f"*{y}"}
    else:
        fixed["PAIRS"] = how.pairs
        kernel, types = kernels_many.many_rows_kernel, {"x_ptr": f"*{kind}", "y_ptr": f"*{y}"}
    made = compile_for_hopper(
        kernel, TYPES | types, fixed, aligned=("N",), warps=how.warps, stages=how.stages
    )
    if how.split > 1:
        parts = {"parts_ptr": "*fp32", "y_ptr": f"*{kind}", "size": "i32"}
        adding = {"SPLIT": how.split, "BLOCK": kernels_many.ADDED}
        compile_for_hopper(kernels_many.add_parts_kernel, parts, adding)
    ptx = made.asm["ptx"]
    return {
        "split": how.split,
        "whole": groups % how.split == 0,
        "shared": made.metadata.shared,
        "products": ptx.count("wgmma.mma_async"),
        "asked before": ptx.index("ld.global") < ptx.index("griddepcontrol.wait"),
        "may ask before": how.wide and settled,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
