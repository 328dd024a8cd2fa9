# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""W2A16 for nine rows of x and more on a Hopper GPU: how the product is divided into programs.

`many_rows_registers` has the kernel. Where a matrix has few rows, several programs share the groups
of a row (`split`), and a second kernel adds up what they have.
Shape letters: M rows of x, N rows of the matrix, K columns.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trapline.gold.arithmetic import cdiv
from trapline.gold.device import launched, processors
from trapline.gold.ternary.hopper import many_rows_registers

#: Elements a program of `add_parts_kernel` adds up.
ADDED = 1024
#: By rows of x a program: (warpgroups that compute, stages, groups a step), the fastest on an H200,
#: for matrices with too few rows to fill the GPU with programs of four warpgroups, and for others.
TILES = {
    16: ((2, 4, 1), (4, 4, 2)),
    32: ((2, 6, 2), (4, 4, 2)),
    64: ((2, 4, 2), (4, 4, 1)),
    128: ((2, 2, 2), (2, 2, 2)),
    256: ((2, 3, 1), (2, 3, 1)),
}


@launched
@triton.jit(do_not_specialize=["size"])
def add_parts_kernel(parts_ptr, y_ptr, size, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """y (size) from parts (SPLIT, size) in float32."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    gdc_wait()
    gdc_launch_dependents()
    total = tl.load(parts_ptr + at, mask=here, other=0.0)
    for i in tl.static_range(1, SPLIT):
        total += tl.load(parts_ptr + i * size.to(tl.int64) + at, mask=here, other=0.0)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=here)


class ManyRowsTiles(NamedTuple):
    """How a product is divided into programs."""

    rows_of_x: int
    #: Rows of the matrix of a warpgroup that computes: 64 or 128.
    rows: int
    #: Such warpgroups of a program: 2 or 4.
    consumers: int
    #: Steps that are on their way to shared memory, and groups of a step.
    stages: int
    pack: int
    #: Programs that share the groups of a row.
    split: int
    #: One set of sums instead of two: of 128 times 128 rows and more both do not fit the registers.
    in_units: bool = False

    @property
    def registers(self) -> int:
        """A thread's, of 65536 for the program; the warp that copies has 24 of them."""
        return 240 if self.consumers == 2 else 112

    def grid(self, M: int, N: int) -> tuple[int, int, int]:
        return cdiv(N, self.rows * self.consumers), cdiv(M, self.rows_of_x), self.split


def cut(M: int, N: int, groups: int, multiprocessors: int) -> ManyRowsTiles:
    """A program to a multiprocessor, or two in turn; `TILES` says which."""
    bm = min(256, max(16, triton.next_power_of_2(M)))
    split = _shared(groups, cdiv(N, 128) * cdiv(M, bm), multiprocessors // (2 if bm == 64 else 1))
    if split > 1 and bm == 256:  # sums in float32 would not fit the shared memory
        bm, split = 128, _shared(groups, cdiv(N, 128) * cdiv(M, 128), multiprocessors)
    high = 5 * cdiv(N, 256) * cdiv(M, bm) >= 4 * multiprocessors
    consumers, stages, pack = TILES[bm][high]
    if groups // split % pack:
        stages, pack = stages * pack, 1
    return ManyRowsTiles(bm, 64, consumers, stages, pack, split, bm == 256)


def _shared(groups: int, programs: int, room: int) -> int:
    """Number of parts that rows are divided into when the GPU has room for more programs."""
    if 2 * programs > room:
        return 1
    return max(part for part in range(1, min(groups, room // programs) + 1) if groups % part == 0)


def many_rows(
    x: Tensor,
    plane: Tensor,
    scales: Tensor,
    y: Tensor,
    *,
    settled: bool = False,
    how: ManyRowsTiles | None = None,
) -> None:
    """Fills y for 16-bit rows of x; contiguous, K in whole groups of 128; Hopper.

    `settled` as in `kernels.packed_matmul`.
    """
    (N, groups), M = scales.shape, x.shape[0]
    chosen = how or cut(M, N, groups, processors(x))
    out = y if chosen.split == 1 else x.new_empty((chosen.split, M, N), dtype=torch.float32)
    many_rows_registers.launch(x, plane.view(torch.int32), scales, out, chosen, settled)
    if chosen.split > 1:
        add: Any = add_parts_kernel[(cdiv(M * N, ADDED),)]
        add(out, y, M * N, SPLIT=chosen.split, BLOCK=ADDED, num_warps=4, launch_pdl=True)
