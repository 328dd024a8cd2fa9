"""Runs what surrounds the Hopper backward in Triton's interpreter; test_hopper.py checks it."""

import sys
from pathlib import Path

import numpy as np
import torch

from trapline.gold.attention.dense.hopper.backward import finish_kernel, prepare_kernel

BLOCK, H, T, D = 64, 2, 100, 64
MANTISSA = 0.75


def main(folder: Path) -> None:
    numbers = torch.Generator().manual_seed(0)
    # As projections give them: (B,T,H,D) viewed as (B,H,T,D).
    dout, out = torch.randn(2, 1, T, H, D, generator=numbers).transpose(2, 3)
    lse, dlse = torch.randn(2, 1, H, T, generator=numbers)
    lse[0, 1, 3] = -torch.inf
    tiles = H * -(-T // BLOCK)
    rows, sums = torch.full((tiles, 2, BLOCK), 7.0), torch.full((tiles, BLOCK * D), 7.0)
    turns = torch.full((tiles,), 7, dtype=torch.int32)
    for ordered in (False, True):
        prepare_kernel[(tiles,)](
            *(dout, out, lse, dlse, rows, sums, turns, MANTISSA, T, H),
            *(*dout.stride()[:3], *out.stride()[:3]),
            D=D,
            BLOCK=BLOCK,
            ORDERED=ordered,
        )
    given = torch.randn(tiles, BLOCK, D, generator=numbers)
    dq, late = torch.full((2, 1, H, T, D), 7.0)
    finish_kernel[(tiles,)](in_registers(given), dq, T, 0, 2.0, D=D, BLOCK=BLOCK)
    # Nothing is written to the sums of a tile whose queries see nothing.
    given[::2] = torch.nan
    finish_kernel[(tiles,)](in_registers(given), late, T, BLOCK + 9, 2.0, D=D, BLOCK=BLOCK)
    given[::2] = 0.0
    kept = {"dout": dout, "out": out, "lse": lse, "dlse": dlse, "rows": rows, "sums": sums}
    np.savez(folder / "rows.npz", **kept, turns=turns, given=given, dq=dq, late=late)


def in_registers(tiles: torch.Tensor) -> torch.Tensor:
    """What `backward_dkdv.in_register_order` makes of both halves of each tile's columns.

    By the hardware's layout: register e of a thread, in fours: column + 0, + 1, then the same
    eight rows below; fours go through the columns by eights. A warp has sixteen rows, a lane two
    columns of one of eight rows.
    """
    made = torch.empty(tiles.shape[0], 2, D // 16, 4, 32, 4)
    for warp in range(4):
        for lane in range(32):
            for e in range(4):
                row = 16 * warp + lane // 4 + 8 * (e // 2)
                columns = 2 * (lane % 4) + e % 2 + 8 * torch.arange(D // 8)
                made[:, :, :, warp, lane, e] = tiles[:, row, columns].reshape(-1, 2, D // 16)
    return made.reshape(tiles.shape[0], -1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
