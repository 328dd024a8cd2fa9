"""Packed tokens so far apart that offsets leave 32 bits, in Triton's interpreter.

test_kernels.py starts it. The tensors are views into memory that is never touched in between.
"""

import json
import sys
from pathlib import Path

import torch

from trapline.gold.attention.dense import Problem, reference
from trapline.gold.attention.dense.triton.backward import backward
from trapline.gold.attention.dense.triton.forward import forward

STEP = 2**30 + 16


def main(folder: Path) -> None:
    torch.manual_seed(0)
    q, k, v, dout = (apart(torch.randn(3, 1, 16)) for _ in range(4))
    ends = torch.tensor([0, 2, 3]).int()
    options = ends, ends, 2, 2, True, 0, 0.0, 0.25, True
    far, near = Problem(q, k, v, *options), Problem(*(x.clone() for x in (q, k, v)), *options)
    out, lse = forward(far)
    found = [difference(a, b) for a, b in zip((out, lse), reference.forward(near), strict=True)]
    dlse = torch.zeros_like(lse)
    grads = backward(far, out, lse, dout, dlse)
    wanted = reference.backward(near, out.clone(), lse, dout.clone(), dlse)
    found += [difference(a, b) for a, b in zip(grads, wanted, strict=True)]
    (folder / "far.json").write_text(json.dumps(found))


def apart(x: torch.Tensor) -> torch.Tensor:
    """The same, a row every STEP elements."""
    room = torch.empty((len(x) - 1) * STEP + 64, dtype=torch.float16)
    far = room.as_strided(x.shape, (STEP, x.shape[2], 1))
    return far.copy_(x)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).abs().max())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
