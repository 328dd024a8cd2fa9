"""Compiles the kernels for sm_90 without a GPU; test_kernels.py starts it and reads the result."""

import json
import re
import sys
from pathlib import Path

from trapline.gold.device import compile_for_hopper
from trapline.gold.softmax_topk.triton import topk as kernels
from trapline.gold.softmax_topk.triton import work_partition as plans

NUMBERS = ("V", "K", "logits_row", "groups", "blocks", "splits", "log", "rows", "lag")
TYPES = {"indices": "*i64", "read": "*i32", "temperature": "fp32", "deviations": "fp32"}
SHIFTS = {"fp32": 0, "fp16": 13, "bf16": 16}
PROCESSORS = 132


def main(folder: Path) -> None:
    problems = json.loads((folder / "wanted.json").read_text())
    made = [one for problem in problems for one in launches(*problem)]
    (folder / "compiled.json").write_text(json.dumps(made))


def launches(rows: int, vocabulary: int, k: int, dtype: str):
    """Every kernel that a call launches, compiled as the call would have it."""
    shift, width = SHIFTS[dtype], 4 if dtype == "fp32" else 8
    if plans.stays_in_cache(rows, vocabulary, k, PROCESSORS):
        if k <= plans.RANKED:
            plan = plans.small_k_plan(vocabulary, vocabulary, width)
            yield compiled(kernels.many_small_k_kernel, dtype, kernels.small_k_launch(plan, shift))
        elif plans.is_narrow(k, width):
            launch = kernels.narrow_launch(plans.narrow_plan(vocabulary, k, vocabulary), shift)
            yield compiled(kernels.many_narrow_kernel, dtype, launch)
        else:
            launch = kernels.many_launch(
                plans.many_plan(vocabulary, k, vocabulary, width), width, shift
            )
            yield compiled(kernels.many_kernel, dtype, launch)
        return
    if vocabulary <= plans.SHORT:
        plan = plans.short_plan(vocabulary, k)
        kernel, fixed = kernels.short_launch(plan, k, width, shift)
        yield compiled(kernel, dtype, fixed)
        return
    plan = plans.long_plan(rows, vocabulary, k, vocabulary, width, PROCESSORS)
    if plan.lag:
        launch = kernels.both_launch(plan, width, shift)
        yield compiled(kernels.stream_and_select_kernel, dtype, launch)
        yield compiled(kernels.clear_kernel, dtype, {"BLOCK": kernels.CLEARED, "num_warps": 4})
        return
    yield compiled(kernels.stream_kernel, dtype, kernels.stream_launch(plan, width, shift))
    yield compiled(kernels.select_kernel, dtype, kernels.select_launch(plan, width, shift))


def compiled(kernel, dtype: str, launch: dict[str, object]) -> dict[str, object]:
    warps, registers = launch.pop("num_warps"), launch.pop("maxnreg", None)
    fixed = {**launch, "PDL": 1}
    if "PER_ROW" in kernel.arg_names:
        fixed["PER_ROW"] = False
    if "rooms" in kernel.arg_names:
        fixed["rooms"] = None
    types = {name: type_of(name, dtype) for name in kernel.arg_names}
    made = compile_for_hopper(kernel, types, fixed, warps=warps, registers=registers)
    declared = re.findall(r"\.shared \.align \d+ \.b8 room\[(\d+)\]", made.asm["ptx"])
    shared = made.metadata.shared + sum(map(int, declared))
    return {"kernel": kernel.__name__, "shared": shared}


def type_of(name: str, dtype: str) -> str:
    if name in NUMBERS:
        return "i32"
    return f"*{dtype}" if name in ("logits", "values") else TYPES.get(name, "*fp32")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
