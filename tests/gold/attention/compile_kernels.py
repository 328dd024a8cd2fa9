"""Compiles the kernels for sm_90 without a GPU; test_kernels.py starts it and reads the result.

Every tile of the tables, read by descriptors; or, if `features` are wanted, one of each kernel with
every feature compiled in, read by pointers.
"""

import json
import sys
from pathlib import Path

from trapline.gold.attention.dense.triton import backward, forward
from trapline.gold.attention.dense.triton.tiles import Tile
from trapline.gold.device import compile_for_hopper

PLAIN = {
    "CAUSAL": False,
    "WINDOWED": False,
    "CAPPED": False,
    "PACKED": False,
    "PRECISION": "tf32",
    "TMA": True,
    "TAIL": True,
    "cu_q": None,
    "cu_k": None,
}
FEATURES = {"CAUSAL": True, "WINDOWED": True, "CAPPED": True, "PACKED": True, "TMA": False}
TYPES = {"cu_q": "*i32", "cu_k": "*i32"}
TYPES |= dict.fromkeys(("scale", "mantissa", "power", "softcap"), "fp32")
TYPES |= dict.fromkeys(("lse", "dlse", "sums_by_row"), "*fp32")
TENSORS = {"q", "k", "v", "out", "dout", "dq", "dk", "dv"}


def main(folder: Path) -> None:
    wanted = json.loads((folder / "wanted.json").read_text())
    done = with_every_feature() if wanted == "features" else every_tile()
    (folder / "compiled.json").write_text(json.dumps(list(done)))


def every_tile():
    wanted = {(forward.forward_kernel, x[0], tile) for x, tile in forward.TILES.items()}
    for (wide, _), tiles in backward.TILES.items():
        wanted |= {(backward.dkdv_kernel, wide, tiles.keys)}
        wanted |= {(backward.dq_kernel, wide, tiles.queries)}
    for kernel, wide, tile in wanted:
        yield compiled(kernel, wide, wide, tile, {})
    yield compiled(backward.rows_kernel, 80, 128, Tile(64, 64, 4, 3), {})


def with_every_feature():
    tiles = backward.TILES[128, True]
    yield compiled(forward.forward_kernel, 80, 128, forward.TILES[128, True], FEATURES)
    yield compiled(backward.dkdv_kernel, 80, 128, tiles.keys, FEATURES)
    yield compiled(backward.dq_kernel, 80, 128, tiles.queries, FEATURES)


def compiled(kernel, width, wide, tile, chosen) -> dict[str, object]:
    names = kernel.arg_names
    values = PLAIN | {"D": width, "BLOCK_D": wide} | tile.launch() | chosen
    if values["PACKED"]:
        values = {name: value for name, value in values.items() if name not in ("cu_q", "cu_k")}
    # A width stride of one is what every contiguous tensor has, and what Triton specialises on.
    fixed = {name: 1 for name in names if name.endswith("_d")}
    fixed |= {name: value for name, value in values.items() if name in names}
    rows = {"q": tile.queries, "dout": tile.queries, "k": tile.keys, "v": tile.keys}
    described = values["TMA"] and "TMA" in names
    types = {name: type_of(name, rows if described else {}, wide) for name in names}
    aligned = {name for name in names if types[name] == "i32" and "_" in name}
    options = {"aligned": aligned, "warps": tile.warps, "stages": tile.stages}
    made = compile_for_hopper(kernel, types, fixed, **options)
    return {
        "kernel": kernel.__name__,
        "tile": tile,
        "shared": made.metadata.shared,
        "tensor_cores": "wgmma" in made.asm["ptx"],
    }


def type_of(name: str, rows: dict[str, int], wide: int) -> str:
    """`rows` of what is read by descriptors."""
    if name in rows:
        return f"tensordesc<bf16[1,1,{rows[name]},{wide}]>"
    return "*bf16" if name in TENSORS else TYPES.get(name, "i32")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
