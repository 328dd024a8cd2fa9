"""Compiles the kernels for sm_90 without a GPU; test_kernels.py starts it and reads the result."""

import json
import re
import sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trapline.gold.ternary import kernels

ALIGNED = ("x_ptr", "words_ptr", "plane_ptr", "scales_ptr", "y_ptr", "N", "K", "row_bytes")
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
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in fixed else (TYPES | types).get(n, "i32") for n in names},
        constexprs={(names.index(name),): value for name, value in fixed.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in names if n in ALIGNED},
    )
    target = GPUTarget("cuda", 90, 32)
    made = triton.compile(source, target=target, options={"num_warps": warps})
    ptx = made.asm["ptx"]
    return {
        "kernel": kernel.__name__,
        "shared": made.metadata.shared,
        "tensor_cores": "mma" in ptx,
        "barriers": len(re.findall(r"bar\.sync", ptx)),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
