"""Compiles the kernels for sm_90 without a GPU; test_kernels.py starts it and reads the result."""

import json
import sys
from pathlib import Path

from trapline.gold.decoder.triton import step_elementwise
from trapline.gold.device import compile_for_hopper

INTEGERS = {"positions": "*i64", "slots": "*i64", "H": "i32", "G": "i32", "hidden": "i32"}


def main(folder: Path) -> None:
    made = [
        compiled(
            step_elementwise.rope_and_append_kernel,
            {"D": width, "BLOCK": width // 2, "ROTATED": rotated, "NORMED": normed},
            dtype,
        )
        for dtype in ("bf16", "fp16", "fp32")
        for width, rotated, normed in ((128, True, True), (64, True, False), (64, False, False))
    ]
    made += [compiled(step_elementwise.swiglu_kernel, {"BLOCK": 1024}, d) for d in ("bf16", "fp32")]
    (folder / "compiled.json").write_text(json.dumps(made))


def compiled(kernel, fixed: dict[str, object], dtype: str) -> dict[str, object]:
    if not fixed.get("ROTATED", True):
        fixed = {**fixed, "cosine": None, "sine": None}
    if not fixed.get("NORMED", True):
        fixed = {**fixed, "q_norm": None, "k_norm": None}
    types = {name: type_of(name, dtype) for name in kernel.arg_names}
    made = compile_for_hopper(kernel, types, fixed, warps=1)
    return {"kernel": kernel.__name__, "dtype": dtype, "shared": made.metadata.shared}


def type_of(name: str, dtype: str) -> str:
    if name == "eps":
        return "fp32"
    return INTEGERS.get(name, "i32" if name.endswith("_stride") else f"*{dtype}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
