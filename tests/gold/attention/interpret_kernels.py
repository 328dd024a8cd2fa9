"""Runs the kernels in Triton's interpreter; test_kernels.py starts it and reads what it writes."""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from trapline.gold.attention.dense import Problem, dense_problem, reference, registry
from trapline.gold.attention.dense.triton.backward import BackwardTiles, backward
from trapline.gold.attention.dense.triton.forward import forward
from trapline.gold.attention.dense.triton.tiles import Tile, can_describe

#: Small and uneven, so that a small problem has tiles with and without masks.
TILE = Tile(queries=16, keys=32, warps=4, stages=1)
#: Elements between packed tokens so far apart that offsets leave 32 bits.
STEP = 2**30 + 16


def main(folder: Path) -> None:
    (folder / "far.json").write_text(json.dumps(far_apart()))
    torch.use_deterministic_algorithms(True)  # uninitialised memory is full of NaN
    for number, (shape, rules, dtype) in enumerate(
        json.loads((folder / "problems.json").read_text())
    ):
        np.savez(folder / f"{number}.npz", **solved(shape, rules, getattr(torch, dtype)))
    np.savez(folder / "packed.npz", **packed())
    for number, packing in enumerate(json.loads((folder / "packings.json").read_text())):
        np.savez(folder / f"outside {number}.npz", **with_tokens_outside(*packing))
    np.savez(folder / "too long.npz", **with_tokens_outside([0, 40, 90], [0, 60, 100], 7))
    registered()


def solved(shape: list[int], rules: list[float], dtype: torch.dtype) -> dict[str, np.ndarray]:
    """What both ways to read give."""
    B, H, G, T, S, D = shape
    torch.manual_seed(0)
    # (B,T,H,D) viewed as (B,H,T,D): strides as projections give them.
    q, dout = torch.randn(2, B, T, H, D).to(dtype).transpose(2, 3)
    k, v = torch.randn(2, B, S, G, D).to(dtype).transpose(2, 3)
    problem = dense_problem(q, k, v, *rules, max(D, 1) ** -0.5)
    named = {"q": q, "k": k, "v": v, "dout": dout}
    for way in ["tma"] * can_describe(q, k, v, dout) + ["pointers"]:
        out, lse = forward(problem, TILE, way == "tma")
        named |= {f"out {way}": out, f"lse {way}": lse}
        tiles = BackwardTiles(TILE, TILE)
        grads = backward(problem, out, lse, dout, torch.zeros_like(lse), tiles, way == "tma")
        named |= {f"d{x} {way}": g for x, g in zip("qkv", grads, strict=True)}
    return {name: value.numpy() for name, value in named.items()}


def packed() -> dict[str, np.ndarray]:
    """Sequences of several lengths, one without queries; strides of every kind; default tiles."""
    torch.manual_seed(1)
    q, dout = torch.randn(2, 50, 4, 12)
    k, v = torch.randn(2, 60, 2, 24)[..., ::2]
    table = torch.tensor([[0, 0], [10, 5], [10, 20], [50, 60]], dtype=torch.int32)
    cu_q, cu_k = table.unbind(1)  # columns: boundaries need not lie side by side either
    problem = Problem(q, k, v, cu_q, cu_k, 40, 40, True, 0, 0.0, 0.3, True)
    out, lse = forward(problem)
    dq, dk, dv = backward(problem, out, lse, dout, torch.zeros_like(lse))
    named = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse}
    named |= {"dq": dq, "dk": dk, "dv": dv, "cu_q": cu_q, "cu_k": cu_k}
    return {name: value.numpy() for name, value in named.items()}


def with_tokens_outside(
    cu_q: list[int], cu_k: list[int], shorter: int = 0
) -> dict[str, np.ndarray]:
    """More tokens than the sequences have; the declared maxima are `shorter` than the truth."""
    torch.manual_seed(2)
    q, dout = torch.randn(2, 90, 2, 12)
    k, v = torch.randn(2, 100, 1, 12)
    longest = [max(np.diff(cu).tolist(), default=0) - shorter for cu in (cu_q, cu_k)]
    packing = *(torch.tensor(cu, dtype=torch.int32) for cu in (cu_q, cu_k)), *longest
    problem = Problem(q, k, v, *packing, True, 0, 0.0, 0.3, True)
    out, lse = forward(problem)
    grads = backward(problem, out, lse, dout, torch.zeros_like(lse))
    named = {"q": q, "k": k, "v": v, "dout": dout, "out": out}
    named |= {f"d{name}": grad for name, grad in zip("qkv", grads, strict=True)}
    return {name: value.numpy() for name, value in named.items()}


def far_apart() -> list[float]:
    """Differences from the torch path, for views into memory that is never touched in between."""
    torch.manual_seed(0)
    q, k, v, dout = (apart(torch.randn(3, 1, 16)) for _ in range(4))
    ends = torch.tensor([0, 2, 3]).int()
    options = ends, ends, 2, 2, True, 0, 0.0, 0.25, True
    far, near = Problem(q, k, v, *options), Problem(*(x.clone() for x in (q, k, v)), *options)
    found = out, lse = forward(far)
    dlse = torch.zeros_like(lse)
    found += backward(far, out, lse, dout, dlse)
    wanted = reference.forward(near)
    wanted += reference.backward(near, out.clone(), lse, dout.clone(), dlse)
    pairs = zip(found, wanted, strict=True)
    return [float((one.double() - other.double()).abs().max()) for one, other in pairs]


def apart(x: torch.Tensor) -> torch.Tensor:
    """The same, a row every STEP elements."""
    room = torch.empty((len(x) - 1) * STEP + 64, dtype=torch.float16)
    far = room.as_strided(x.shape, (STEP, x.shape[2], 1))
    return far.copy_(x)


def registered() -> None:
    """The operators, here on the CPU: torch's own checks, and one graph for both passes."""
    q, k, v = torch.randn(1, 2, 5, 16), torch.randn(1, 1, 7, 16), torch.randn(1, 1, 7, 16)
    rules = True, 0, 0.0, 0.25
    arguments = *dense_problem(q, k, v, *rules), "triton"
    torch.library.opcheck(registry.forward_operator.overload, arguments)
    out, lse = registry.forward_operator(*arguments)
    saved = torch.ones_like(out), torch.zeros_like(lse), out, lse
    torch.library.opcheck(registry.backward_operator.overload, (*saved, *arguments))

    def loss(*inputs: torch.Tensor) -> torch.Tensor:
        problem = dense_problem(*inputs, *rules)
        return registry.Attention.apply(*problem, "triton")[0].square().sum()

    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    plain = torch.autograd.grad(loss(*inputs), inputs)
    traced = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for one, other in zip(plain, torch.autograd.grad(traced(*inputs), inputs), strict=True):
        torch.testing.assert_close(one, other)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
