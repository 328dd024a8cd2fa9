"""Compiles the kernels for sm_90 without a GPU; test_kernels.py starts it and reads the result."""

import json
import sys
from pathlib import Path

from trapline.gold.attention import kernels_bwd, kernels_fwd
from trapline.gold.kernels_device import compile_for_hopper

BLOCKS = {"D": 80, "BLOCK_D": 128, "BLOCK_T": 64, "BLOCK_S": 64}
FLAGS = {
    "CAUSAL": True,
    "WINDOWED": True,
    "CAPPED": True,
    "PACKED": True,
    "PRECISION": "tf32",
    "TMA": False,
    "FUSED": True,
}
TYPES = {"lse": "*fp32", "dlse": "*fp32", "delta": "*fp32", "cu_q": "*i32", "cu_k": "*i32"}
TYPES |= {"scale": "fp32", "softcap": "fp32"}
TYPES |= {"lse2": "*fp32"}
TENSORS = {"q", "k", "v", "out", "dout", "dq", "dk", "dv"}


def main(folder: Path) -> None:
    kernels = [
        kernels_fwd.forward_kernel,
        kernels_bwd.dkdv_kernel,
        kernels_bwd.dq_kernel,
        kernels_bwd.rows_kernel,
    ]
    (folder / "compiled.json").write_text(json.dumps([compiled(kernel) for kernel in kernels]))


def compiled(kernel) -> dict[str, object]:
    names = kernel.arg_names
    # A width stride of one is what every contiguous tensor has, and what Triton specialises on.
    fixed = {name: 1 for name in names if name.endswith("_d")}
    fixed |= {name: value for name, value in {**BLOCKS, **FLAGS}.items() if name in names}
    types = {name: type_of(name) for name in names}
    aligned = {name for name in names if types[name] == "i32" and "_" in name}
    made = compile_for_hopper(kernel, types, fixed, aligned=aligned)
    return {
        "kernel": kernel.__name__,
        "shared": made.metadata.shared,
        "tensor_cores": "wgmma" in made.asm["ptx"],
    }


def type_of(name: str) -> str:
    return "*bf16" if name in TENSORS else TYPES.get(name, "i32")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
