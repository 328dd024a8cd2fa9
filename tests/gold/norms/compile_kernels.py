"""Compiles the kernels for sm_90 without a GPU; test_kernels.py starts it and reads the result."""

import json
import sys
from pathlib import Path

from trapline.gold.kernels_device import compile_for_hopper
from trapline.gold.norms import kernels

STATISTICS = {"mean", "rstd", "dw_parts", "db_parts", "parts"}
WIDTHS = (1, 1000, 65536)


def main(folder: Path) -> None:
    made = [
        compiled(kernel, width, dtype, tile, share)
        for width in WIDTHS
        for dtype in ("bf16", "fp32")
        for kernel, tile, share in (
            (kernels.forward_kernel, kernels.FORWARD_TILE, kernels.FORWARD_SHARE),
            (kernels.backward_kernel, kernels.BACKWARD_TILE, kernels.BACKWARD_SHARE),
        )
    ]
    (folder / "compiled.json").write_text(json.dumps(made))


def compiled(kernel, width: int, dtype: str, tile: int, share: int) -> dict[str, object]:
    shape = kernels.shape_of(width, tile, share)
    fixed = {"D": width, "BLOCK_D": shape.width, "ROWS": shape.rows, "CENTRED": True}
    fixed["STAGES"] = kernels.stages_of(shape, 2 if dtype == "bf16" else 4)
    names = kernel.arg_names
    fixed = {name: value for name, value in fixed.items() if name in names}
    types = {name: type_of(name, dtype) for name in names}
    aligned = {name for name in names if name.endswith("_row") and width % 16 == 0}
    made = compile_for_hopper(kernel, types, fixed, aligned=aligned, warps=shape.warps)
    return {"kernel": kernel.__name__, "width": width, "shared": made.metadata.shared}


def type_of(name: str, dtype: str) -> str:
    if name == "M" or name.endswith("_row"):
        return "i32"
    if name == "eps":
        return "fp32"
    return "*fp32" if name in STATISTICS else f"*{dtype}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
