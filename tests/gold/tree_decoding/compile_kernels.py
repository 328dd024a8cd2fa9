"""Compiles the tree kernel for sm_90 without a GPU; test_kernels.py reads the result."""

import json
import sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trapline.gold.tree_decoding import kernels

TYPES = {"values": "*fp64", "candidates": "*i64", "tokens": "*i64", "parents": "*i64"}


def main(folder: Path) -> None:
    made = [compiled(slots) for slots in (2, 32, 128, 1024)]
    (folder / "compiled.json").write_text(json.dumps(made))


def compiled(slots: int) -> dict[str, int]:
    kernel = kernels.best_first_kernel
    names = kernel.arg_names
    signature = {name: TYPES.get(name, "i32") for name in names} | {"SLOTS": "constexpr"}
    source = ASTSource(
        fn=kernel, signature=signature, constexprs={(names.index("SLOTS"),): slots}, attrs={}
    )
    target, options = GPUTarget("cuda", 90, 32), {"num_warps": kernels.WARPS}
    made = triton.compile(source, target=target, options=options)
    return {"slots": slots, "shared": made.metadata.shared}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
