"""Layer norm and RMS norm, forward and backward, against every peer there is, in the same run.

    PYTHONPATH=src python benchmarks/bench_norms.py
    … --peers FOLDER adds what lies there: liger_kernel (its sources), and layer_norm_tutorial.py
      (Triton's tutorial 05 without the calls at its end)
    … --quick: one shape, few rounds; --warm compiles everything and times nothing
    … --more: times what the results file does not have yet, and keeps what it has

Operators are called directly, also backward's. Bytes are those that must move: x and y, or x, dy
and dx, and one tensor more for each of residual, sum and the gradient through the sum. Errors are
against float64: y and dx on the first rows, dw and db over all of them.
"""

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from harness import Contender, Rules, ceilings, compare, errors, measured_before, show, write
from torch import Tensor

from trapline.gold.norms.registry import backward_operator, forward_operator

#: The goals' shapes, and other widths for layer norm in bf16.
SHAPES = [(16384, 1024), (8192, 4096), (8192, 8192), (4096, 16384), (65536, 768)]
OTHERS = [(1024, 65536), (8192, 12288), (2048, 32768), (16384, 2048)]
KINDS = ("layer norm", "RMS norm", "RMS norm + residual")
DTYPES = (torch.bfloat16, torch.float32)
EPS = 1e-5
#: Seconds: a killed run keeps what is older.
KEPT_EVERY = 4.0
#: Float64 elements that exist at the same time.
AT_ONCE = 1 << 24
DEVICE = "cuda"
#: Set by --without.
LEFT_OUT = ""
Call = Callable[[], Any]
aten = torch.ops.aten


@dataclass(frozen=True)
class Problem:
    """One norm of one shape, in one direction."""

    rows: int
    width: int
    dtype: torch.dtype
    kind: str  # "layer norm", "RMS norm" or "RMS norm + residual"
    forward: bool

    @property
    def name(self) -> str:
        way = "forward" if self.forward else "backward"
        return f"{self.kind} {way} {self.rows}×{self.width} {str(self.dtype)[6:]}"

    @property
    def centred(self) -> bool:
        return self.kind == "layer norm"

    @property
    def added(self) -> bool:
        return self.kind.endswith("residual")

    @property
    def tensors(self) -> int:
        """How many of (rows, width) must be moved."""
        return (4 if self.added else 2) if self.forward else (4 if self.added else 3)

    @property
    def bytes(self) -> int:
        return self.tensors * self.rows * self.width * self.dtype.itemsize


class Data:
    """Inputs of one data set; what backward is given is what forward would have saved."""

    def __init__(self, problem: Problem, number: int) -> None:
        source = torch.Generator(DEVICE).manual_seed(number)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=source, device=DEVICE).to(problem.dtype)

        shape = problem.rows, problem.width
        self.x, self.w, self.b = normal(*shape), normal(shape[1]), normal(shape[1])
        self.residual = normal(*shape) if problem.added else None
        self.dy = None if problem.forward else normal(*shape)
        self.dtotal = normal(*shape) if problem.added and not problem.forward else None
        if not problem.forward:
            self.mean, self.rstd = statistics(self.x, problem.centred)


def statistics(x: Tensor, centred: bool) -> tuple[Tensor, Tensor]:
    """Means and reciprocal deviations in float32, computed in float64 a few rows at a time."""
    means, rstds = [], []
    for part in x.split(max(1, AT_ONCE // x.shape[1])):
        wide = part.double()
        mean = wide.mean(1, keepdim=True) * centred
        means.append(mean.float())
        rstds.append(((wide - mean).square().mean(1, keepdim=True) + EPS).rsqrt().float())
    return torch.cat(means), torch.cat(rstds)


def ours(problem: Problem, data: Data) -> Call:
    b = data.b if problem.centred else None
    if problem.forward:
        given = data.x, data.residual, data.w, b, EPS, problem.centred, "kernels"
        return lambda: forward_operator(*given)
    mean = data.mean if problem.centred else None
    rest = data.w, mean, data.rstd, EPS, problem.centred, problem.centred, "kernels"
    return lambda: backward_operator(data.dy, data.dtotal, data.x, *rest)


def eager(problem: Problem, data: Data) -> Call:
    """The operator of torch itself; RMS norm's is given the sum for a residual."""
    return partial(torch_operator(problem), *torch_inputs(problem, data))


def compiled(problem: Problem, data: Data) -> Call:
    return partial(compiled_operator(problem), *torch_inputs(problem, data))


@cache
def compiled_operator(problem: Problem) -> Callable[..., Any]:
    torch._dynamo.reset()  # every shape is compiled for itself
    return torch.compile(torch_operator(problem), dynamic=False)


def torch_operator(problem: Problem) -> Callable[..., Any]:
    shape = [problem.width]

    def layer_forward(x: Tensor, w: Tensor, b: Tensor) -> Any:
        return aten.native_layer_norm(x, shape, w, b, EPS)

    def layer_backward(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor, b: Tensor):
        return aten.native_layer_norm_backward(dy, x, shape, mean, rstd, w, b, [True] * 3)

    def rms_forward(x: Tensor, w: Tensor) -> Any:
        return aten._fused_rms_norm(x, shape, w, EPS)

    def rms_backward(dy: Tensor, x: Tensor, rstd: Tensor, w: Tensor) -> Any:
        return aten._fused_rms_norm_backward(dy, x, shape, rstd, w, [True, True])

    def added_forward(x: Tensor, residual: Tensor, w: Tensor) -> Any:
        total = x + residual
        y, _ = aten._fused_rms_norm(total, shape, w, EPS)
        return y, total

    def added_backward(dy: Tensor, dtotal: Tensor, x: Tensor, rstd: Tensor, w: Tensor) -> Any:
        dx, dw = aten._fused_rms_norm_backward(dy, x, shape, rstd, w, [True, True])
        return dx + dtotal, dw

    if problem.centred:
        return layer_forward if problem.forward else layer_backward
    if problem.added:
        return added_forward if problem.forward else added_backward
    return rms_forward if problem.forward else rms_backward


def torch_inputs(problem: Problem, data: Data) -> tuple[Tensor, ...]:
    if problem.forward:
        middle = (data.residual,) if problem.added else ()
        return (data.x, *middle, data.w, *((data.b,) if problem.centred else ()))
    if problem.centred:
        return data.dy, data.x, data.mean, data.rstd, data.w, data.b
    return (data.dy, *((data.dtotal,) if problem.added else ()), data.x, data.rstd, data.w)


def liger(problem: Problem, data: Data) -> Call:
    if problem.centred:
        layer = importlib.import_module("liger_kernel.ops.layer_norm")
        if problem.forward:
            return lambda: layer.layer_norm_forward(data.x, data.w, data.b, EPS)[0]
        saved = (data.mean[:, 0].to(problem.dtype), data.rstd[:, 0].to(problem.dtype))
        return lambda: layer.layer_norm_backward(data.dy, data.x, data.w, data.b, *saved)
    if problem.added:
        return liger_added(problem, data)
    rms = importlib.import_module("liger_kernel.ops.rms_norm")
    if problem.forward:
        return lambda: rms.rms_norm_forward(data.x, data.w, EPS, 0.0, "llama", None)[0]
    rstd = data.rstd[:, 0].contiguous()
    block, warps, mode = rms.rms_norm_forward(data.x[:1], data.w, EPS, 0.0, "llama", None)[3:]
    # Its own default is to write dx over dy; without it dx would be filled with zeros first.
    dy = data.dy.clone()
    rest = 0.0, mode, block, warps, True, None
    return lambda: rms.rms_norm_backward(dy, data.x, data.w, rstd, *rest)


def liger_added(problem: Problem, data: Data) -> Call:
    added = importlib.import_module("liger_kernel.ops.fused_add_rms_norm")
    forward = added.fused_add_rms_norm_forward
    if problem.forward:
        return lambda: forward(data.x, data.residual, data.w, EPS, 0.0, "llama")[:2]
    rstd = data.rstd[:, 0].contiguous()
    block, warps, stages, mode = forward(data.x[:1], data.x[:1], data.w, EPS, 0.0, "llama")[3:]
    rest = 0.0, mode, block, warps, stages, False
    backward = added.fused_add_rms_norm_backward

    def call() -> Any:
        dx, _, dw = backward(data.dy, data.dtotal, data.x, data.w, rstd, *rest)
        return dx, dw

    return call


def tutorial(problem: Problem, data: Data) -> Call:
    tutorial = importlib.import_module("layer_norm_tutorial").LayerNorm
    if problem.forward:
        context = SimpleNamespace(save_for_backward=lambda *_: None)
        return lambda: tutorial.forward(context, data.x, (problem.width,), data.w, data.b, EPS)
    block = 1 << (problem.width - 1).bit_length()
    context = SimpleNamespace(
        saved_tensors=(data.x, data.w, data.b, data.mean, data.rstd),
        BLOCK_SIZE=block,
        num_warps=min(max(block // 256, 1), 8),
    )

    def call() -> Any:
        dx, _, dw, db, _ = tutorial.backward(context, data.dy)
        return dx, dw, db

    return call


def peers(problem: Problem, folder: Path | None) -> dict[str, Callable[[Problem, Data], Call]]:
    """Ours first; then those that take this problem, but for the one that is left out."""
    found = {"trapline": ours, "torch": eager, "torch.compile": compiled}
    if folder is not None and (folder / "liger_kernel").is_dir():
        found["Liger"] = liger
    fits = problem.centred and problem.width * problem.dtype.itemsize <= 65536
    if folder is not None and (folder / "layer_norm_tutorial.py").is_file() and fits:
        found["Triton tutorial"] = tutorial
    return {name: build for name, build in found.items() if name != LEFT_OUT}


def contenders(
    problem: Problem, folder: Path | None, data: Callable[[int], Data]
) -> list[Contender]:
    def made(build: Callable[[Problem, Data], Call], number: int) -> Call:
        return build(problem, data(number))

    return [
        Contender(name, partial(made, build), bytes=problem.bytes)
        for name, build in peers(problem, folder).items()
    ]


def exact(problem: Problem, data: Data) -> dict[str, Tensor]:
    """Float64: y or dx of the first rows, dw and db of all."""
    rows = max(1, AT_ONCE // problem.width)
    dw = torch.zeros(problem.width, dtype=torch.float64, device=DEVICE)
    db, first = dw.clone(), None
    wide_w = data.w.double()
    for start in range(0, problem.rows, rows):
        here = slice(start, start + rows)
        x = data.x[here].double()
        x = x + data.residual[here].double() if problem.added and problem.forward else x
        mean = x.mean(1, keepdim=True) * problem.centred
        rstd = ((x - mean).square().mean(1, keepdim=True) + EPS).rsqrt()
        x_hat = (x - mean) * rstd
        if problem.forward:
            return {"y": x_hat * wide_w + (data.b.double() if problem.centred else 0.0)}
        dy = data.dy[here].double()
        dw, db = dw + (dy * x_hat).sum(0), db + dy.sum(0)
        if first is None:
            g = dy * wide_w
            dx = g - x_hat * (g * x_hat).mean(1, keepdim=True)
            dx = rstd * (dx - g.mean(1, keepdim=True) * problem.centred)
            first = dx + data.dtotal[here].double() if problem.added else dx
    return {"dx": first, "dw": dw, **({"db": db} if problem.centred else {})}


def accuracy(problem: Problem, folder: Path | None, data: Data) -> dict[str, Any]:
    """Each contender's answers on one data set."""
    shown = max(1, (1 << 18) // problem.width)
    wanted = {
        key: value[:shown] if value.ndim == 2 else value
        for key, value in exact(problem, data).items()
    }
    found: dict[str, Any] = {}
    for name, build in peers(problem, folder).items():
        got = build(problem, data)()
        got = got if isinstance(got, tuple | list) else (got,)
        pairs = zip(wanted.items(), got, strict=False)
        found[name] = {key: errors(part[: len(want)], want) for (key, want), part in pairs}
    return found


def problems(quick: bool) -> Iterator[Problem]:
    """The goals' shapes first."""
    if quick:
        for forward in (True, False):
            yield Problem(8192, 4096, torch.bfloat16, "layer norm", forward)
        return
    blocks = [(kind, dtype, SHAPES) for kind, dtype in product(KINDS, DTYPES)]
    blocks.append((KINDS[0], DTYPES[0], OTHERS))
    for kind, dtype, shapes in blocks:
        for (rows, width), forward in product(shapes, (False, True)):
            yield Problem(rows, width, dtype, kind, forward)


def measured(problem: Problem, folder: Path | None, rules: Rules) -> dict[str, Any]:
    data = cache(partial(Data, problem))
    made = contenders(problem, folder, data)
    times = compare([*made, ceilings(problem.bytes, DEVICE)[0]], DEVICE, rules)
    copy = next(one.seconds for one in times if one.name == "copy")
    print(f"{problem.name}: {100 * copy / times[0].seconds:.1f} % of copy")
    print(show(times), flush=True)
    wrong = accuracy(problem, folder, data(0))
    for name, each in wrong.items():
        print(f"  {name}:", {key: f"{value['relative']:.1e}" for key, value in each.items()})
    torch.cuda.empty_cache()
    return {"times": times, "errors": wrong, "of_copy": copy / times[0].seconds}


def warmed(problem: Problem, folder: Path | None) -> None:
    """Compiles what the problem needs, so that a timed run finds it in the caches."""
    data = Data(problem, 0)
    for name, build in peers(problem, folder).items():
        build(problem, data)()
        torch.cuda.synchronize()
        print(problem.name, name, flush=True)
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--only", default="", help="problems whose name has this in it")
    parser.add_argument("--without", default="", help="a peer that is left out")
    parser.add_argument("--part", default="0/1", help="every N-th of them, from the I-th: I/N")
    parser.add_argument("--more", action="store_true", help="only what has no result yet")
    given = parser.parse_args()
    global LEFT_OUT
    LEFT_OUT = given.without
    if given.peers is not None:
        sys.path.insert(0, str(given.peers))
    part, of = (int(word) for word in given.part.split("/"))
    results = measured_before("norms", DEVICE) if given.more else {}
    chosen = [one for one in problems(given.quick) if given.only in one.name]
    chosen = [one for one in chosen if one.name not in results][part::of]
    if given.warm:
        for problem in chosen:
            warmed(problem, given.peers)
        return
    rules = Rules(rounds=3, warm_up=0.1) if given.quick else Rules()
    written = time.monotonic()
    for problem in chosen:
        results[problem.name] = measured(problem, given.peers, rules)
        rules = replace(rules, warm_up=0.05)  # it is warm now
        if time.monotonic() - written > KEPT_EVERY:
            write("norms", DEVICE, results)
            written = time.monotonic()
    print(write("norms", DEVICE, results))


if __name__ == "__main__":
    main()
