"""Compiles the kernels for sm_90 without a GPU; test_kernels.py starts it and reads the result."""

import json
import re
import sys
from pathlib import Path

from trapline.gold.device import compile_for_hopper
from trapline.gold.ternary.triton import packed_matmul as kernels

ALIGNED = ("N", "K", "row_bytes")
TYPES = {"x_ptr": "*bf16", "y_ptr": "*bf16", "scales_ptr": "*fp16"}
TYPES |= {"words_ptr": "*i32", "plane_ptr": "*u8"}


def main(folder: Path) -> None:
    rows, words, warps = kernels.GEMV_BLOCK
    columns, many, more = kernels.GEMM_BLOCK
    made = [
        compiled(kernels.gemv_kernel, warps, {"x_ptr": "*i64"}, M=1, BLOCK_N=rows, BLOCK_W=words),
        compiled(kernels.gemm_kernel, more, {}, BLOCK_M=many, BLOCK_N=columns, PRECISION="tf32"),
    ]
    (folder / "compiled.json").write_text(json.dumps(made))


def compiled(kernel, warps, types, **fixed) -> dict[str, object]:
    given = {name: (TYPES | types).get(name, "i32") for name in kernel.arg_names}
    made = compile_for_hopper(kernel, given, fixed, aligned=ALIGNED, warps=warps)
    ptx = made.asm["ptx"]
    return {
        "kernel": kernel.__name__,
        "shared": made.metadata.shared,
        "tensor_cores": "mma" in ptx,
        "barriers": len(re.findall(r"bar\.sync", ptx)),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
