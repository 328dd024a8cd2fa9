"""Compiles the kernels for sm_90 without a GPU; test_kernels.py starts it and reads the result."""

import json
import sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trapline.gold.softmax_topk import kernels

TYPES = {"kept": "*i32", "indices": "*i64"}
NUMBERS = {"V", "K", "logits_row", "groups", "chunk", "splits"}


def main(folder: Path) -> None:
    made = []
    for dtype, shift, k in (("bf16", 16, 64), ("fp32", 0, 1024)):
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
    names = kernel.arg_names
    signature = {name: "constexpr" if name in fixed else type_of(name, dtype) for name in names}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in fixed.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name, kind in signature.items()
            if kind.startswith("*") or name in {"V", "logits_row", "chunk"}
        },
    )
    options = {"num_warps": warps}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return {"kernel": kernel.__name__, "shared": made.metadata.shared}


def type_of(name: str, dtype: str) -> str:
    if name in NUMBERS:
        return "i32"
    return f"*{dtype}" if name == "logits" else TYPES.get(name, "*fp32")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
