"""Compiles the search kernel for sm_90 without a GPU; test_batched_search.py reads the result."""

import json
import sys
from pathlib import Path

from trapline.gold.beam_search.triton.advance import FINISH, STOP, advance_kernel
from trapline.gold.device import compile_for_hopper

WHOLE = {"indices", "ends", "offset", "length", "parents", "tokens", "nodes", "ids", "positions"}
TYPES = dict.fromkeys(WHOLE, "*i64")
TYPES |= dict.fromkeys(("powers", "sums", "scores", "totals"), "*fp64")
TYPES |= dict.fromkeys(("logits", "lse", "top"), "*fp32")
TYPES |= dict.fromkeys(("broken", "tails", "own"), "*i32")


def main(folder: Path) -> None:
    ways = [(finish, STOP["bound"]) for finish in FINISH.values()]
    ways += [(FINISH["every"], stop) for stop in STOP.values() if stop != STOP["bound"]]
    made = [compiled(*one) for one in ways]
    (folder / "compiled.json").write_text(json.dumps(made))


def compiled(finish: int, stop: int) -> dict[str, object]:
    """Four beams, two ends, twelve candidates a beam."""
    fixed = {"W": 4, "C": 12, "E": 2, "BLOCK": 64, "ENTRIES": 16, "BEAMS": 4, "COLUMNS": 128}
    fixed |= {"FINISH": finish, "STOP": stop, "COUNTED": 0}
    types = {name: TYPES.get(name, "i32") for name in advance_kernel.arg_names}
    made = compile_for_hopper(advance_kernel, types, fixed)
    return {"kernel": advance_kernel.__name__, "shared": made.metadata.shared}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
