"""Compiles the Hopper forward for sm_90 without a GPU; test_hopper_fwd.py reads what came out."""

import json
import re
import subprocess
import sys
from pathlib import Path

import triton

from trapline.gold.attention.dense import hopper
from trapline.gold.attention.dense.hopper import forward
from trapline.gold.device import compile_for_hopper

NAMES = {dtype.name: dtype for dtype in hopper.TYPES.values()}


def main(folder: Path) -> None:
    """`wanted.json`: a list of [dtype name, D, causal, queries]."""
    wanted = json.loads((folder / "wanted.json").read_text())
    found = [{"wanted": one, **compiled(folder, *one)} for one in wanted]
    (folder / "compiled.json").write_text(json.dumps(found))


def compiled(folder: Path, dtype: str, D: int, causal: bool, T: int) -> dict[str, object]:
    config = forward.config_for(T, D)
    tall, long = described(hopper.ROWS.value, D, dtype), described(config.block_s, D, dtype)
    types = {"q": tall, "k": long, "v": long, "out": tall, "lse": "*fp32", "scale": "fp32"}
    kernel = forward.forward_kernel
    types = {name: types.get(name, "i32") for name in kernel.arg_names}
    made = compile_for_hopper(kernel, types, forward.constants(config, causal))
    said, code = assembled(folder, made.asm["ptx"])
    return {
        "shared": made.metadata.shared,
        "spilled": [int(bytes_) for bytes_ in re.findall(r"(\d+) bytes spill", said)],
        "serialised": "serialized" in said or "wgmma" in said,
        "exponentials_while_waiting": exponentials_while_waiting(code),
    }


def described(rows: int, D: int, dtype: str) -> str:
    """A tensor descriptor's type as the compiler spells it."""
    block = [1, 1, rows, D]
    return f"tensordesc<{dtype}{block},{hopper.tile_layout(rows, D, NAMES[dtype])!r}>"


def assembled(folder: Path, ptx: str) -> tuple[str, str]:
    """What ptxas says (spilled bytes, warnings that products wait for each other) and makes."""
    source, cubin = folder / "kernel.ptx", folder / "kernel.cubin"
    source.write_text(ptx)
    tools = triton.knobs.nvidia
    command = [tools.ptxas.path, "-v", "--gpu-name=sm_90a", str(source), "-o", str(cubin)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    shown = [tools.cuobjdump.path, "-sass", str(cubin)]
    return said, subprocess.run(shown, capture_output=True, text=True, check=True).stdout


def exponentials_while_waiting(sass: str) -> list[int]:
    """Exponentials between the wait for the scores and the wait for the sums, for each step."""
    parts = re.split(r"DEPBAR\.LE gsb0, 0x1\b", sass)[1:]
    return [re.split(r"DEPBAR\.LE gsb0, 0x0\b", part)[0].count("MUFU.EX2") for part in parts]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
