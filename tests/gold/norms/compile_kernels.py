"""Compiles the kernels for sm_90 without a GPU; test_kernels.py starts it and reads the result.

Every configuration is compiled, for the dtype that is wanted.
"""

import json
import sys
from pathlib import Path

import triton

from trapline.gold.device import compile_for_hopper
from trapline.gold.norms.hopper import cooperative_rows
from trapline.gold.norms.triton import backward, kernels, norm

FLOAT32 = {"mean", "rstd", "sums", "dw_parts", "db_parts"}
SIZES = {"bf16": 2, "fp32": 4}
KINDS = {2: "bf16", 4: "f32"}


def main(folder: Path) -> None:
    dtype = json.loads((folder / "wanted.json").read_text())
    made = [compiled(*one, dtype) for one in configurations(SIZES[dtype])]
    (folder / "compiled.json").write_text(json.dumps(made))


def configurations(size: int):
    """Kernel, fixed arguments and warps of everything that can be launched."""
    for width, tile in norm.FORWARD[size].items():
        fixed = {"D": width, "BLOCK_D": triton.next_power_of_2(width), "ROWS": tile.rows}
        fixed |= {"AHEAD": tile.ahead, "EARLY": tile.early}
        yield kernels.forward_kernel, fixed, tile.warps
    for width, tile in backward.BACKWARD[size].items():
        block = triton.next_power_of_2(width)
        kept = backward.kept_rows(tile, block, size)
        fixed = {"D": width, "BLOCK_D": block, "ROWS": tile.rows, "STAGES": tile.stages}
        yield kernels.backward_kernel, fixed | {"KEPT": kept, "EARLY": True}, tile.warps
    team = backward.TEAM
    for width in (2 * backward.TEAM_FROM[size], norm.WIDEST):
        words = width * size // 4
        fixed = {"WIDTH": words, "SHARE": backward.share_of(words), "BLOCK": team.share}
        fixed |= {"TEAM": backward.members(words), "PLACES": team.places, "LAG": team.lag}
        fixed |= {"KIND": KINDS[size], "num_warps": team.warps, "EARLY": True}
        yield cooperative_rows.team_backward_kernel, fixed, team.warps
    for kernel, width, cut in (
        *((kernels.held_forward_kernel, *entry) for entry in norm.HELD[size].items()),
        (kernels.wide_forward_kernel, norm.WIDEST, norm.WIDE),
    ):
        yield kernel, {"D": width, "CHUNK": cut.size, "EARLY": cut.early}, cut.warps
    fixed = {"D": norm.WIDEST, "CHUNK": backward.WIDE_SUMS}
    for kernel in (kernels.statistics_kernel, kernels.row_sums_kernel):
        yield kernel, fixed, backward.WIDE_WARPS
    tile = backward.WIDE_TILE
    fixed = {"D": norm.WIDEST, "CHUNK": backward.WIDE_COLUMNS, "ROWS": tile.rows}
    yield kernels.columns_kernel, {**fixed, "STAGES": tile.stages}, tile.warps
    parts = {"BLOCK_P": backward.PARTS, "BLOCK_D": backward.PART_COLUMNS, "EARLY": True}
    yield kernels.add_parts_kernel, parts, backward.PART_WARPS
    yield kernels.clear_kernel, {"BLOCK": backward.CLEARED, "EARLY": True}, 4


def compiled(kernel, fixed: dict, warps: int, dtype: str) -> dict[str, object]:
    names = kernel.arg_names
    if "CENTRED" in names:
        fixed = {**fixed, "CENTRED": True}
    # Teams see 16-bit floats as pairs.
    word = "i32" if kernel.is_gluon() and dtype == "bf16" else dtype
    types = {name: type_of(name, word) for name in names}
    aligned = {name for name in names if name.endswith("_row")}
    made = compile_for_hopper(kernel, types, fixed, aligned=aligned, warps=warps)
    facts = {"kernel": kernel.__name__, "dtype": dtype, "shared": made.metadata.shared}
    return {**facts, "copies": made.asm["ptx"].count("cp.async.cg")}


def type_of(name: str, dtype: str) -> str:
    if name in ("M", "N", "P", "D", "PER") or name.endswith("_row"):
        return "i32"
    if name == "eps":
        return "fp32"
    if name in ("board", "words"):
        return "*i64"
    return "*fp32" if name in FLOAT32 else f"*{dtype}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
