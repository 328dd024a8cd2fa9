"""The table of `occupancy.py` without a GPU: its kernels compiled for an H200 that is not here.

    python benchmarks/occupancy_ahead.py          writes results/nvidia-h200/occupancy.json

The library's own launch code runs on tensors without memory, as if on an H200; where it would
launch, Triton compiles for sm_90 and stops. Registers and spills are read from the machine code.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from harness import RESULTS
from occupancy import NORMS, TOPK, Resident, resident
from triton.runtime.jit import JITFunction

from trapline.gold.attention import kernels as attention
from trapline.gold.attention import kernels_hopper_bwd, kernels_hopper_fwd, kernels_paged_hopper
from trapline.gold.kernels_device import HOPPER
from trapline.gold.norms import kernels as norms
from trapline.gold.norms import kernels_backward, kernels_forward
from trapline.gold.softmax_topk import kernels as topk

PROCESSORS = 132
EPS = 1e-5


class NoDevice:
    """What Triton asks its driver before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return HOPPER


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def norm(rows: int, width: int, centred: bool) -> None:
    """Forward and backward, with weights, and a bias if centred."""
    x, w = empty(rows, width), empty(width)
    b = w if centred else None
    _, _, mean, rstd = norms._forward(x, None, w, b, EPS, centred)
    saved = (mean if centred else None), rstd
    norms._backward(x, None, x, w, *saved, EPS, centred, centred)


def ranked(rows: int, width: int, k: int) -> None:
    topk._softmax_topk(empty(rows, width, dtype=torch.float32), k, 1.0, None, False)


def attended(D: int, causal: bool, deterministic: bool) -> None:
    q = empty(4, 2048 // D, 4096, D)
    options = causal, 0, 0.0, D**-0.5
    out, lse = attention.by_default("forward")(q, q, q, *options)
    given = out, lse, q, q, q, out, lse
    attention.by_default("backward")(*given, *options, deterministic)


def decoded(B: int, L: int, H: int, G: int, D: int, page: int) -> None:
    """One query a sequence over bf16 pages."""
    pages, q = empty(B * L // page, G, page, D), empty(B, H, D)
    table, lengths = (empty(*n, dtype=torch.int32) for n in ((B, L // page), (B,)))
    given = q, pages, pages, table, lengths, None, None, 0, D**-0.5, q
    kernels_paged_hopper.decode(*given)


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    for rows, width in NORMS:
        yield f"layer norm {rows}×{width}", partial(norm, rows, width, True)
        yield f"RMS norm {rows}×{width}", partial(norm, rows, width, False)
    for rows, width, k in TOPK:
        yield f"softmax + top-{k} {rows}×{width}", partial(ranked, rows, width, k)
    yield "paged decode B 32, L 4096", partial(decoded, 32, 4096, 32, 8, 128, 16)
    for D, causal, fixed in product((64, 128), (True, False), (True, False)):
        name = f"attention D {D}, {'causal' if causal else 'full'}"
        name += "" if fixed else ", not deterministic"
        yield name, partial(attended, D, causal, fixed)


@contextmanager
def as_on_a_hopper(made: list[tuple[str, Any]]) -> Iterator[None]:
    """Launches compile, and are noted with their kernel's name."""
    launched = JITFunction.run

    def compiled(self: Any, *given: Any, grid: Any, warmup: bool, **more: Any) -> Any:
        del warmup
        found = launched(self, *given, grid=grid, warmup=True, **more)
        made.append((self.__name__, found))
        return found

    def yes(*_: Any) -> bool:
        return True

    with ExitStack() as patched:
        patched.enter_context(patch.object(JITFunction, "run", compiled))
        for module in (kernels_forward, kernels_backward, topk):
            patched.enter_context(patch.object(module, "may_start_early", yes))
        hopper = kernels_hopper_fwd, kernels_hopper_bwd, kernels_paged_hopper
        for module in (kernels_backward, topk, *hopper):
            patched.enter_context(patch.object(module, "processors", lambda _: PROCESSORS))
        counters = patch.object(
            kernels_paged_hopper, "arrivals", lambda count, _: empty(count, dtype=torch.int32)
        )
        patched.enter_context(counters)
        patched.enter_context(patch.object(kernels_backward, "on_hopper", yes))
        patched.enter_context(patch.object(topk, "rooms", lambda *_: None))
        yield


def loaded(made: Any) -> Any:
    """A compiled kernel with the registers and spills that a driver would report."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.findall(rf"{name}:(\d+)", said)[0]) for name in ("REG", "STACK"))
    return SimpleNamespace(
        metadata=made.metadata, asm=made.asm, n_regs=registers, n_spills=stack // 4
    )


def measure() -> list[Resident]:
    """The kernels each case launches, once each."""
    rows, known = [], set()
    for case, call in cases():
        made: list[tuple[str, Any]] = []
        with as_on_a_hopper(made):
            call()
        for name, kernel in made:
            if kernel.hash not in known:
                known.add(kernel.hash)
                rows.append(resident(case, name, loaded(kernel)))
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    triton.runtime.driver.set_active(NoDevice())
    rows = [asdict(row) | {"occupancy": row.occupancy} for row in measure()]
    machine = {"device": "compiled for sm_90", "versions": {"triton": triton.__version__}}
    record = {"command": Path(__file__).name, "machine": machine, "results": rows}
    path = RESULTS / "nvidia-h200" / "occupancy.json"
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
