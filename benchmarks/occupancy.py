"""Which kernels ran, with how many registers and how much shared memory, and how many fit.

    python benchmarks/occupancy.py            on a GPU; writes results/<device>/occupancy.json

Calls the library's operators once at the shapes of their benchmarks, then asks Triton what it
compiled for them. Nothing is listed by hand: a kernel that was not launched is not in the result.
"""

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from harness import Call, write
from triton.runtime.jit import JITFunction

import trapline.gold
from trapline.gold import flash_attention, layer_norm, paged_attention, rms_norm, softmax_topk

#: A Hopper multiprocessor: threads, registers, bytes of shared memory, blocks at most.
THREADS, REGISTERS, SHARED, BLOCKS = 2048, 65536, 228 * 1024, 32
#: Registers are handed out by the warp in units of 256; a block's shared memory pays 1 KB more.
REGISTER_UNIT, SHARED_RESERVED = 256, 1024


#: Shapes of the benchmarks; bf16 and float32.
NORMS = ((16384, 1024), (8192, 4096), (8192, 8192), (4096, 16384))
TOPK = (
    *((512, 128256, 64), (512, 128256, 1024), (64, 8192, 8), (1, 131072, 64)),
    *((6400, 10000, 64), (6400, 10000, 1024), (128, 4096, 1)),
)


@dataclass(frozen=True)
class Resident:
    """One compiled kernel, and how many of its blocks fit on a multiprocessor."""

    case: str
    kernel: str
    warps: int
    registers: int
    spills: int
    shared: int
    blocks: int
    limit: str

    @property
    def occupancy(self) -> float:
        """Threads in residence, of those a multiprocessor can hold."""
        return self.blocks * self.warps * 32 / THREADS


def resident(case: str, name: str, made: Any) -> Resident:
    """What fits of a compiled kernel, and which resource ends first."""
    warps, shared = made.metadata.num_warps, made.metadata.shared + declared(made)
    per_warp = -(-max(made.n_regs, 1) * 32 // REGISTER_UNIT) * REGISTER_UNIT
    room = {
        "registers": REGISTERS // (per_warp * warps),
        "shared memory": SHARED // (shared + SHARED_RESERVED),
        "threads": THREADS // (32 * warps),
        "blocks": BLOCKS,
    }
    limit = min(room, key=lambda resource: room[resource])
    return Resident(case, name, warps, made.n_regs, made.n_spills, shared, room[limit], limit)


def declared(made: Any) -> int:
    """Bytes of shared memory that a kernel declares in PTX, which Triton does not count."""
    return sum(map(int, re.findall(r"\.shared \.align \d+ \.b8 room\[(\d+)\]", made.asm["ptx"])))


def cases() -> Iterator[tuple[str, Call]]:
    """The benchmarks' main shapes."""
    for rows, width in NORMS:
        x, w, b = numbers(rows, width), numbers(width), numbers(width)
        yield f"layer norm {rows}×{width}", partial(both_ways, layer_norm, x, w, b)
        yield f"RMS norm {rows}×{width}", partial(both_ways, rms_norm, x, w)
    for rows, width, k in TOPK:
        logits = torch.randn(rows, width, device="cuda")
        yield f"softmax + top-{k} {rows}×{width}", partial(softmax_topk, logits, k)
    yield "paged decode B 32, L 4096", paged(32, 4096, 32, 8, 128, 16)
    for D, causal, fixed in product((64, 128), (True, False), (True, False)):
        q, k, v = (numbers(4, 2048 // D, 4096, D) for _ in range(3))
        attend = partial(flash_attention, causal=causal, deterministic=fixed)
        name = f"attention D {D}, {'causal' if causal else 'full'}"
        name += "" if fixed else ", not deterministic"
        yield name, partial(both_ways, attend, q, k, v)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)


def both_ways(operator: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> None:
    """Forward and backward."""
    out = operator(*inputs)
    out.backward(torch.randn_like(out))


def paged(B: int, L: int, H: int, G: int, D: int, page: int) -> Call:
    """One decode step over pages in no order."""
    pages = B * L // page
    k_pages, v_pages = (numbers(pages, G, page, D).detach() for _ in range(2))
    table = torch.randperm(pages, device="cuda").reshape(B, -1).int()
    lengths = torch.full((B,), L, dtype=torch.int32, device="cuda")
    return partial(paged_attention, numbers(B, H, D).detach(), k_pages, v_pages, table, lengths)


def kernels() -> list[JITFunction]:
    """Every kernel of the library that has been imported by now or can be."""
    found = {}
    for module in pkgutil.walk_packages(trapline.gold.__path__, "trapline.gold."):
        if ".kernels" in module.name:
            names = vars(importlib.import_module(module.name))
            found |= {id(one): one for one in names.values() if isinstance(one, JITFunction)}
    return list(found.values())


def compiled(kernel: JITFunction) -> dict[Any, Any]:
    """What Triton holds for this device, by key; nothing for functions that are only called."""
    return dict(kernel.device_caches[torch.cuda.current_device()][0])


def measure() -> list[Resident]:
    """The kernels each case adds."""
    rows, library = [], kernels()
    known = {(id(kernel), key) for kernel in library for key in compiled(kernel)}
    for case, call in cases():
        call()
        torch.cuda.synchronize()
        for kernel in library:
            for key, made in compiled(kernel).items():
                if (id(kernel), key) in known:
                    continue
                known.add((id(kernel), key))
                rows.append(resident(case, kernel.__name__, made))
    return rows


def main() -> None:
    rows = measure()
    for row in rows:
        print(
            f"{row.case:44} {row.kernel:24} {row.warps:2} warps {row.registers:3} registers "
            f"{row.spills:4} spilt {row.shared:6} B  {row.blocks:2} blocks ({row.limit}), "
            f"occupancy {row.occupancy:.0%}"
        )
    write("occupancy", "cuda", [asdict(row) | {"occupancy": row.occupancy} for row in rows])


if __name__ == "__main__":
    main()
