"""Packed tokens so far apart that offsets leave 32 bits, in Triton's interpreter.

test_kernels.py starts it. The tensors are views into memory that is never touched in between.
"""

import json
import sys
from pathlib import Path

import torch

from trapline.gold.attention.dense import reference as fast
from trapline.gold.attention.dense.triton import backward as kernels_bwd
from trapline.gold.attention.dense.triton import forward as kernels_fwd

STEP = 2**30 + 16


def main(folder: Path) -> None:
    torch.manual_seed(0)
    q, k, v, dout = (apart(torch.randn(3, 1, 16)) for _ in range(4))
    ends = torch.tensor([0, 2, 3]).int()
    rules = (ends, ends, 2, 2, True, 0, 0.0, 0.25)
    ours, theirs = kernels_fwd.varlen_forward(q, k, v, *rules), near(fast._varlen_forward, q, k, v)
    found = [difference(a, b) for a, b in zip(ours, theirs(*rules), strict=True)]
    given = dout, torch.zeros_like(ours[1]), q, k, v, *ours
    grads = kernels_bwd.varlen_backward(*given, *rules), near(fast._varlen_backward, *given)(*rules)
    found += [difference(a, b) for a, b in zip(*grads, strict=True)]
    (folder / "far.json").write_text(json.dumps(found))


def apart(x: torch.Tensor) -> torch.Tensor:
    """The same, a row every STEP elements."""
    room = torch.empty((len(x) - 1) * STEP + 64, dtype=torch.float16)
    far = room.as_strided(x.shape, (STEP, x.shape[2], 1))
    return far.copy_(x)


def near(function, *tensors):
    return lambda *more: function(*(x.clone() for x in tensors), *more)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).abs().max())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
