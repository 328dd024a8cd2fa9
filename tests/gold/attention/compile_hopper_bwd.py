"""Compiles the Hopper backward for sm_90 without a GPU; test_hopper_bwd.py reads what came out."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compile_hopper_fwd import assembled, described

from trapline.gold.attention.dense.hopper import backward as hopper
from trapline.gold.device import compile_for_hopper

QUERIES, LINE = hopper.QUERIES.value, hopper.LINE.value


def main(folder: Path) -> None:
    """`wanted.json`: a list of [dtype name, D, causal]."""
    wanted = json.loads((folder / "wanted.json").read_text())
    found = [
        {"wanted": one, "name": name, **looked_at(folder, made)}
        for one in wanted
        for name, made in compiled(*one)
    ]
    (folder / "compiled.json").write_text(json.dumps(found))


def compiled(dtype: str, D: int, causal: bool) -> Iterator[tuple[str, Any]]:
    """Every kernel that serves this configuration."""
    config = hopper.CONFIGS[D]
    tall = described(hopper.ROWS.value, D, dtype)
    long = described(config.dq_keys, D, dtype)
    numbers = dict.fromkeys(("scale", "mantissa", "power"), "fp32")
    types = dict.fromkeys(("q", "k", "v", "dout", "dk", "dv", "dq"), tall) | numbers
    lines = {"rows": plain(1, 2 * QUERIES), "sums": plain(QUERIES * D // LINE // 2, LINE)}
    for share in (True, False):
        fixed = hopper.dkdv_constants(config, causal, share)
        name = "dk, dv and shares of dq" if share else "dk, dv"
        yield name, made(hopper.dkdv_kernel, types | lines | {"sums_start": "*fp32"}, fixed)
    walked = types | {"k": long, "v": long, "rows": "*fp32"}
    yield "dq", made(hopper.dq_kernel, walked, hopper.dq_constants(config, causal))
    pointers = dict.fromkeys(("dout", "out", "dq"), f"*{dtype}")
    pointers |= dict.fromkeys(("lse", "dlse", "rows", "sums"), "*fp32") | numbers
    fixed = {"D": D, "BLOCK": QUERIES}
    yield "rows", made(hopper.prepare_kernel, pointers, {**fixed, "SHARE": True})
    yield "order", made(hopper.finish_kernel, pointers, fixed)


def plain(rows: int, width: int) -> str:
    """The type of a tensor descriptor of float32."""
    return f"tensordesc<fp32{[rows, width]},{hopper.PLAIN!r}>"


def made(kernel: Any, types: dict[str, str], fixed: dict[str, Any]) -> Any:
    named = {name: types.get(name, "i32") for name in kernel.arg_names}
    strides = [name for name in kernel.arg_names if "_" in name and named[name] == "i32"]
    return compile_for_hopper(kernel, named, fixed, aligned=strides)


def looked_at(folder: Path, made: Any) -> dict[str, object]:
    said, code = assembled(folder, made.asm["ptx"])
    return {
        "shared": made.metadata.shared,
        "spilled": sum(int(bytes_) for bytes_ in re.findall(r"(\d+) bytes spill", said)),
        "serialised": "serialized" in said or "wgmma" in said,
        "products": "HGMMA" in code,
        "copied": "UTMAREDG" in code,
        "reduced_by_fours": "REDG.E.ADD.F32x4" in code,
        "exponentials_while_waiting": exponentials_while_waiting(code),
    }


def exponentials_while_waiting(sass: str) -> list[int]:
    """Exponentials between the end of a score product and the next wait, for each such place."""
    parts = re.split(r"DEPBAR\.LE gsb0, 0x1\b", sass)[1:]
    return [re.split(r"DEPBAR\.LE gsb0", part)[0].count("MUFU.EX2") for part in parts]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
