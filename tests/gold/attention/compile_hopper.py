"""Compiles the Hopper kernels for sm_90 without a GPU; test_hopper.py reads what came out."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.nvidia.compiler import get_ptxas

from trapline.gold.attention.dense.hopper import backward, forward
from trapline.gold.attention.dense.hopper import tiles as hopper
from trapline.gold.device import compile_for_hopper

NAMES = {dtype.name: dtype for dtype in hopper.TYPES.values()}
ROWS, QUERIES, LINE = hopper.ROWS.value, backward.QUERIES.value, backward.LINE.value


def main(folder: Path) -> None:
    """`wanted.json`: a list of [dtype name, D, causal], with a number of queries for forward."""
    wanted = json.loads((folder / "wanted.json").read_text())
    found = [
        {"wanted": one, "name": name, **looked_at(folder, made)}
        for one in wanted
        for name, made in (forward_compiled if len(one) == 4 else backward_compiled)(*one)
    ]
    (folder / "compiled.json").write_text(json.dumps(found))


def forward_compiled(dtype: str, D: int, causal: bool, T: int) -> Iterator[tuple[str, Any]]:
    config = forward.config_for(T, D)
    tall, long = described(ROWS, D, dtype), described(config.block_s, D, dtype)
    types = {"q": tall, "k": long, "v": long, "out": tall, "lse": "*fp32", "scale": "fp32"}
    yield "out", compiled(forward.forward_kernel, types, forward.constants(config, causal))


def backward_compiled(dtype: str, D: int, causal: bool) -> Iterator[tuple[str, Any]]:
    """Every kernel that serves this configuration."""
    tall = described(ROWS, D, dtype)
    numbers = dict.fromkeys(("scale", "mantissa", "power"), "fp32")
    types = dict.fromkeys(("q", "k", "v", "dout", "dk", "dv"), tall) | numbers
    types |= {"rows": plain(1, 2 * QUERIES), "sums": plain(QUERIES * D // LINE // 2, LINE)}
    types |= {"sums_start": "*fp32", "turns": "*i32"}
    kinds = {"dq in order": (True, False)}
    if not causal:
        kinds["dq in a ring"] = (True, True)
    kinds["dq in shares"] = (False, False)
    for name, (ordered, ring) in kinds.items():
        fixed = backward.constants(backward.CONFIGS[D], causal, ordered, ring)
        yield name, compiled(backward.dkdv_kernel, types, fixed)
    pointers = dict.fromkeys(("dout", "out", "dq"), f"*{dtype}")
    pointers |= dict.fromkeys(("lse", "dlse", "rows", "sums"), "*fp32") | numbers
    pointers |= {"turns": "*i32"}
    fixed = {"D": D, "BLOCK": QUERIES}
    yield "rows", compiled(backward.prepare_kernel, pointers, {**fixed, "ORDERED": True})
    yield "order", compiled(backward.finish_kernel, pointers, fixed)


def described(rows: int, D: int, dtype: str) -> str:
    """A tensor descriptor's type as the compiler spells it."""
    block = [1, 1, rows, D]
    return f"tensordesc<{dtype}{block},{hopper.tile_layout(rows, D, NAMES[dtype])!r}>"


def plain(rows: int, width: int) -> str:
    """The type of a tensor descriptor of float32."""
    return f"tensordesc<fp32{[rows, width]},{backward.PLAIN!r}>"


def compiled(kernel: Any, types: dict[str, str], fixed: dict[str, Any]) -> Any:
    named = {name: types.get(name, "i32") for name in kernel.arg_names}
    strides = [name for name in kernel.arg_names if "_" in name and named[name] == "i32"]
    return compile_for_hopper(kernel, named, fixed, aligned=strides)


def looked_at(folder: Path, made: Any) -> dict[str, object]:
    """What ptxas says (spilled bytes, warnings that products wait for each other) and makes."""
    source, cubin = folder / "kernel.ptx", folder / "kernel.cubin"
    source.write_text(made.asm["ptx"])
    assembler = get_ptxas(90).path  # a package of Triton's has two of different age
    command = [assembler, "-v", "--gpu-name=sm_90a", str(source), "-o", str(cubin)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    shown = [triton.knobs.nvidia.cuobjdump.path, "-sass", str(cubin)]
    code = subprocess.run(shown, capture_output=True, text=True, check=True).stdout
    return {
        "shared": made.metadata.shared,
        "waits_for_its_turn": "ld.acquire.gpu" in made.asm["ptx"],
        "lets_the_next": "red.release.gpu" in made.asm["ptx"],
        "spilled": [int(bytes_) for bytes_ in re.findall(r"(\d+) bytes spill", said)],
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
