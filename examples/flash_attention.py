"""Flash attention forward and backward against the naive way: equal results, linear memory.

The naive way makes an N × N matrix of weights and keeps it for the backward pass. Flash attention
goes through the keys in tiles, keeps one log-sum-exp per row, and computes the weights again.

    python examples/flash_attention.py
"""

from collections.abc import Callable

import torch
from measured import measured
from torch import Tensor

from trapline.gold import flash_attention

HEADS, WIDTH = 2, 32


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / WIDTH**0.5
    above = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(above, -torch.inf), dim=-1) @ v


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attention(q, k, v, causal=True)


def gradients(way: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of the sum of its squares."""
    leaves = [x.clone().requires_grad_() for x in given]
    out = way(*leaves)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def main() -> None:
    torch.manual_seed(0)
    print(f"{'N':>5}  {'way':6}  {'ms':>6}  {'peak MiB':>8}  largest difference from float64")
    for n in (512, 1024, 2048):
        given = [torch.randn(1, HEADS, n, WIDTH) for _ in range(3)]
        truth = gradients(naive, [x.double() for x in given])
        for way in (naive, flash):
            found, ms, mib = measured(gradients, way, given)
            names = zip(("out", "dq", "dk", "dv"), found, truth, strict=True)
            far = "  ".join(f"{name} {float((x - y).abs().max()):.0e}" for name, x, y in names)
            print(f"{n:5}  {way.__name__:6}  {ms:6.0f}  {mib:8.1f}  {far}")


if __name__ == "__main__":
    main()
