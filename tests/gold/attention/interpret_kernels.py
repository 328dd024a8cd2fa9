"""Runs the kernels in Triton's interpreter; test_kernels.py starts it and reads what it writes."""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from trapline.gold.attention.dense import registry as fast_operators
from trapline.gold.attention.dense.triton import backward as kernels_bwd
from trapline.gold.attention.dense.triton import forward as kernels_fwd
from trapline.gold.attention.dense.triton.tiles import Tile, dense

#: Small and uneven, so that a small problem has tiles with and without masks.
TILE = Tile(queries=16, keys=32, warps=4, stages=1)


def main(folder: Path) -> None:
    torch.use_deterministic_algorithms(True)  # memory nobody has written to is full of NaN
    for number, (shape, rules, dtype) in enumerate(
        json.loads((folder / "problems.json").read_text())
    ):
        np.savez(folder / f"{number}.npz", **solved(shape, rules, getattr(torch, dtype)))
    np.savez(folder / "packed.npz", **packed())
    for number, packing in enumerate(json.loads((folder / "packings.json").read_text())):
        np.savez(folder / f"outside {number}.npz", **with_tokens_outside(*packing))
    registered()


def solved(shape: list[int], rules: list[float], dtype: torch.dtype) -> dict[str, np.ndarray]:
    """What both ways to read give."""
    B, H, G, T, S, D = shape
    torch.manual_seed(0)
    # (B,T,H,D) viewed as (B,H,T,D): strides as projections give them.
    q, dout = torch.randn(2, B, T, H, D).to(dtype).transpose(2, 3)
    k, v = torch.randn(2, B, S, G, D).to(dtype).transpose(2, 3)
    arguments = (dense(q, k), *rules, max(D, 1) ** -0.5)
    named = {"q": q, "k": k, "v": v, "dout": dout}
    for way in ["tma"] * described(q, k, v, dout) + ["pointers"]:
        out, lse = kernels_fwd.launch(q, k, v, *arguments, tile=TILE, tma=way == "tma")
        named |= {f"out {way}": out, f"lse {way}": lse}
        saved = dout, torch.zeros_like(lse), q, k, v, out, lse
        tiles = kernels_bwd.Tiles(TILE, TILE)
        grads = kernels_bwd.launch(*saved, *arguments, tiles, way == "tma")
        named |= {f"d{x} {way}": g for x, g in zip("qkv", grads, strict=True)}
    return {name: value.numpy() for name, value in named.items()}


def described(*tensors: torch.Tensor) -> bool:
    """Whether descriptors can read them, by the rule the kernels use."""
    return kernels_fwd.described(dense(tensors[0], tensors[1]), *tensors)


def packed() -> dict[str, np.ndarray]:
    """Sequences of several lengths, one without queries; strides of every kind; default tiles."""
    torch.manual_seed(1)
    q, dout = torch.randn(2, 50, 4, 12)
    k, v = torch.randn(2, 60, 2, 24)[..., ::2]
    table = torch.tensor([[0, 0], [10, 5], [10, 20], [50, 60]], dtype=torch.int32)
    cu_q, cu_k = table.unbind(1)  # columns: boundaries need not lie side by side either
    packing, rules = (cu_q, cu_k, 40, 40), (True, 0, 0.0, 0.3)
    out, lse = kernels_fwd.varlen_forward(q, k, v, *packing, *rules)
    saved = dout, torch.zeros_like(lse), q, k, v, out, lse
    dq, dk, dv = kernels_bwd.varlen_backward(*saved, *packing, *rules)
    named = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse}
    named |= {"dq": dq, "dk": dk, "dv": dv, "cu_q": cu_q, "cu_k": cu_k}
    return {name: value.numpy() for name, value in named.items()}


def with_tokens_outside(cu_q: list[int], cu_k: list[int]) -> dict[str, np.ndarray]:
    """More tokens than the sequences have, by whole tiles: no two heads of them alike."""
    torch.manual_seed(2)
    q, dout = torch.randn(2, 90, 2, 12)
    k, v = torch.randn(2, 100, 1, 12)
    longest = [max(np.diff(cu).tolist(), default=0) for cu in (cu_q, cu_k)]
    packing = *(torch.tensor(cu, dtype=torch.int32) for cu in (cu_q, cu_k)), *longest
    rules = True, 0, 0.0, 0.3
    out, lse = kernels_fwd.varlen_forward(q, k, v, *packing, *rules)
    saved = dout, torch.zeros_like(lse), q, k, v, out, lse
    grads = kernels_bwd.varlen_backward(*saved, *packing, *rules)
    named = {"q": q, "k": k, "v": v, "dout": dout, "out": out}
    named |= {f"d{name}": grad for name, grad in zip("qkv", grads, strict=True)}
    return {name: value.numpy() for name, value in named.items()}


def registered() -> None:
    """As operators, here of the CPU: torch's own checks, and one graph for both passes."""
    functions = {"forward": kernels_fwd.forward, "backward": kernels_bwd.backward}
    packed = kernels_fwd.varlen_forward, kernels_bwd.varlen_backward
    functions |= dict(zip(("varlen_forward", "varlen_backward"), packed, strict=True))
    kept = fast_operators.register("trapline_interpreted", functions, "CPU")
    operators = torch.ops.trapline_interpreted
    q, k, v = torch.randn(1, 2, 5, 16), torch.randn(1, 1, 7, 16), torch.randn(1, 1, 7, 16)
    rules = True, 0, 0.0, 0.25
    torch.library.opcheck(operators.forward.default, (q, k, v, *rules))
    out, lse = operators.forward(q, k, v, *rules)
    saved = torch.ones_like(out), torch.zeros_like(lse), q, k, v, out, lse
    torch.library.opcheck(operators.backward.default, (*saved, *rules))

    def loss(*inputs: torch.Tensor) -> torch.Tensor:
        return fast_operators.attention(*inputs, *rules, "trapline_interpreted")[0].square().sum()

    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    plain = torch.autograd.grad(loss(*inputs), inputs)
    traced = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for one, other in zip(plain, torch.autograd.grad(traced(*inputs), inputs), strict=True):
        torch.testing.assert_close(one, other)
    del kept  # the operators live as long as this


if __name__ == "__main__":
    main(Path(sys.argv[1]))
