"""Compiles the paged kernels for sm_90 without a GPU; test_paged_kernels.py reads the result."""

import json
import sys
from pathlib import Path

from trapline.gold.attention import kernels_paged
from trapline.gold.kernels_device import compile_for_hopper

FLOATS = {"scale", "softcap"}
TYPES = {"block_table": "*i32", "seq_lens": "*i32", "cu_q": "*i32", "tree": "*i1", "slots": "*i64"}
TYPES |= {"k_scale": "*fp16", "v_scale": "*fp16", "scales": "*fp16", "lse": "*fp32"}
TYPES |= {"parts": "*fp32"}
#: Pages as they are, of 8-bit integers, 8-bit floats and bytes of two codes.
KINDS = {"bf16": 128, "i8": 128, "fp8e4nv": 128, "u8": 64}
TOPS = {"bf16": 0, "i8": 127, "fp8e4nv": 448, "u8": 7}


def main(folder: Path) -> None:
    made = []
    for kind, half in KINDS.items():
        common = {"P": 16, "D": 128, "HALF": half, "BLOCK_D": half}
        tile = {"BLOCK_M": 16, "BLOCK_S": 64, "PACKED": True, "WINDOWED": True, "CAPPED": True}
        tile["PRECISION"] = "tf32"
        absent = {"tree"} | ({"k_scale", "v_scale", "scales"} if kind == "bf16" else set())
        made.append(compiled(kernels_paged.attention_kernel, kind, {**common, **tile}, absent))
        top = {"TOP": TOPS[kind]}
        made.append(compiled(kernels_paged.append_kernel, kind, {**common, **top}, absent))
    merge = {"D": 128, "BLOCK_D": 128, "BLOCK_SPLITS": 16}
    made.append(compiled(kernels_paged.merge_kernel, "bf16", merge, set()))
    (folder / "compiled.json").write_text(json.dumps(made))


def compiled(kernel, kind: str, fixed: dict[str, object], absent: set[str]) -> dict[str, object]:
    names = kernel.arg_names
    fixed = fixed | {name: None for name in names if name in absent}
    types = {name: type_of(name, kind, kernel.__name__) for name in names}
    aligned = {name for name in names if types[name] == "i32" and "_" in name}
    made = compile_for_hopper(kernel, types, fixed, aligned=aligned)
    return {"kernel": kernel.__name__, "kind": kind, "shared": made.metadata.shared}


def type_of(name: str, kind: str, kernel: str) -> str:
    if name in ("k_pages", "v_pages", "pages"):
        return f"*{kind}"
    if name in ("q", "rows", "out"):
        return "*fp32" if name == "out" and kernel == "attention_kernel" else "*bf16"
    return "fp32" if name in FLOATS else TYPES.get(name, "i32")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
