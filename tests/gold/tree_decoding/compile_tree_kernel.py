"""Compiles the tree kernel for sm_90 without a GPU; test_tree_kernel.py reads the result."""

import json
import sys
from pathlib import Path

from trapline.gold.device import compile_for_hopper
from trapline.gold.tree_decoding.triton import tree

TYPES = {
    "row_of": "i32",
    "values": "*fp64",
    "candidates": "*i64",
    "tokens": "*i64",
    "parents": "*i64",
    "roots": "*i64",
    "ids": "*i64",
    "deep": "*i64",
    "seen": "*i8",
}
#: Those of a pass: none of them for a tree alone.
LAYOUT = dict.fromkeys(("roots", "ids", "deep", "seen"))


def main(folder: Path) -> None:
    made = [compiled(slots, **LAYOUT) for slots in (2, 32, 128, 1024)]
    made += [compiled(slots) for slots in (16, 64)]
    (folder / "compiled.json").write_text(json.dumps(made))


def compiled(slots: int, **absent: None) -> dict[str, int]:
    kernel = tree.best_first_kernel
    types = {name: TYPES.get(name, "i32") for name in kernel.arg_names}
    fixed = {"SLOTS": slots, "LINES": 8, "ROUNDS": 3, "PDL": True, **absent}
    made = compile_for_hopper(kernel, types, fixed, warps=tree.WARPS)
    return {"slots": slots, "shared": made.metadata.shared}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
