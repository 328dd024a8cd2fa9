"""Compiles the kernels for sm_90 without a GPU; test_kernels.py starts it and reads the result."""

import json
import sys
from pathlib import Path

import triton

from trapline.gold.kernels_device import compile_for_hopper
from trapline.gold.softmax_topk import kernels

TYPES = {"kept": "*i32", "indices": "*i64"}
NUMBERS = {"V", "K", "logits_row", "groups", "chunk", "splits"}


def main(folder: Path) -> None:
    made = []
    for dtype, shift, k in json.loads((folder / "configurations.json").read_text()):
        short = {"BLOCK": 16384, "K_BLOCK": k, "SHIFT": shift}
        made.append(compiled(kernels.short_kernel, dtype, short, kernels.warps_for(16384)))
        plan = kernels.plan_of(512, 128256, k, 132)
        groups = triton.next_power_of_2(triton.cdiv(128256, plan.group))
        streamed = {"G": plan.group, "BLOCK": kernels.BLOCK}
        made.append(compiled(kernels.stream_kernel, dtype, streamed, 4))
        blocks = {"GROUPS_BLOCK": groups, "SPLITS_BLOCK": 1, "K_BLOCK": k, "G": plan.group}
        warps = kernels.warps_for(max(groups, k * plan.group))
        made.append(compiled(kernels.select_kernel, dtype, {**blocks, "SHIFT": shift}, warps))
    (folder / "compiled.json").write_text(json.dumps(made))


def compiled(kernel, dtype: str, fixed: dict[str, int], warps: int) -> dict[str, object]:
    types = {name: type_of(name, dtype) for name in kernel.arg_names}
    aligned = {"V", "logits_row", "chunk"}
    made = compile_for_hopper(kernel, types, fixed, aligned=aligned, warps=warps)
    return {"kernel": kernel.__name__, "shared": made.metadata.shared}


def type_of(name: str, dtype: str) -> str:
    if name in NUMBERS:
        return "i32"
    return f"*{dtype}" if name == "logits" else TYPES.get(name, "*fp32")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
