"""Who takes part in `bench_attention.py`: our tiers and the others, called as directly as can be.

A method has a forward or a backward or both: given a problem and its tensors, each returns a call
without arguments. Backward passes run on what a forward saved beforehand: no autograd engine in
what is timed. A peer that cannot do a problem raises; the benchmark says so and goes on.
"""

import importlib.util
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor
from triton.testing import do_bench

Call = Callable[[], Any]
TUTORIAL = "triton_tutorial_attention.py"


@dataclass(frozen=True)
class Problem:
    """`batch` sequences of `length`, `heads` query heads on `groups` key/value heads."""

    batch: int
    heads: int
    groups: int
    length: int
    width: int
    causal: bool

    @property
    def name(self) -> str:
        shared = f" GQA {self.heads // self.groups}:1" if self.groups != self.heads else ""
        return f"D{self.width} N{self.length} {'causal' if self.causal else 'full'}{shared}"

    @property
    def flops(self) -> int:
        """Of a forward pass: two products, and half of the scores where later keys are hidden."""
        pairs = self.batch * self.heads * self.length**2
        return 4 * pairs * self.width // (2 if self.causal else 1)

    @property
    def bytes(self) -> int:
        """q, k, v and out, once each, in 16 bits."""
        return 4 * self.batch * self.length * self.width * (self.heads + self.groups)

    @property
    def scale(self) -> float:
        return float(self.width**-0.5)

    def draw(self, number: int, device: str, *, outliers: bool = False) -> tuple[Tensor, ...]:
        """q, k, v and dout in bfloat16, N(0, 1); with outliers: one in a thousand is N(0, 100)."""
        source = torch.Generator(device).manual_seed(number)
        q_shape = (self.batch, self.heads, self.length, self.width)
        kv_shape = (self.batch, self.groups, self.length, self.width)
        drawn = []
        for shape in (q_shape, kv_shape, kv_shape, q_shape):
            x = torch.randn(shape, generator=source, device=device)
            if outliers:
                struck = torch.rand(shape, generator=source, device=device) < 1e-3
                x += struck * 10 * torch.randn(shape, generator=source, device=device)
            drawn.append(x.bfloat16())
        return tuple(drawn)


@dataclass(frozen=True)
class Method:
    """One way to compute attention."""

    name: str
    forward: Callable[..., Call] | None = None
    backward: Callable[..., Call] | None = None
    #: Where it takes part (way, problem): compiling some for every shape outlasts the measurement.
    takes: Callable[[str, Problem], bool] = lambda _way, _problem: True


# --- ours ---------------------------------------------------------------------------------------


def ours() -> list[Method]:
    """Both tiers of the kernels; backward passes repeatable and not."""
    made = []
    for tier in ("hopper", "triton"):
        made.append(Method(f"ours {tier}", _our_forward(tier)))
        for same, how in ((True, "deterministic"), (False, "not deterministic")):
            made.append(Method(f"ours {tier}, {how}", backward=_our_backward(tier, same)))
    return made


def _our_problem(problem: Problem, q: Tensor, k: Tensor, v: Tensor, same: bool = True) -> Any:
    from trapline.gold.attention.dense import dense_problem

    return dense_problem(q, k, v, problem.causal, 0, 0.0, problem.scale, same)


def _our_forward(tier: str) -> Callable[..., Call]:
    def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Call:
        from trapline.gold.attention.dense.registry import forward_operator

        arguments = _our_problem(problem, q, k, v)
        return lambda: forward_operator(*arguments, tier)

    return forward


def _our_backward(tier: str, repeatable: bool) -> Callable[..., Call]:
    def backward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Call:
        from trapline.gold.attention.dense.registry import backward_operator, forward_operator

        arguments = _our_problem(problem, q, k, v, repeatable)
        # The fastest tier computes what is saved.
        out, lse = forward_operator(*arguments, "kernels")
        saved = dout, torch.zeros_like(lse), out, lse
        return lambda: backward_operator(*saved, *arguments, tier)

    return backward


# --- torch's SDPA -------------------------------------------------------------------------------


def cudnn_forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Call:
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention
    return lambda: operator(q, k, v, None, True, 0.0, problem.causal, False, scale=problem.scale)[
        :2
    ]


def cudnn_backward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Call:
    forward = torch.ops.aten._scaled_dot_product_cudnn_attention
    made = forward(q, k, v, None, True, 0.0, problem.causal, False, scale=problem.scale)
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = made
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    saved = dout, q, k, v, out, lse, seed, offset, None, cum_q, cum_k, max_q, max_k
    return lambda: operator(*saved, 0.0, problem.causal, scale=problem.scale)


def flash_forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Call:
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    return lambda: operator(q, k, v, 0.0, problem.causal, False, scale=problem.scale)[:2]


def flash_backward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Call:
    forward = torch.ops.aten._scaled_dot_product_flash_attention
    made = forward(q, k, v, 0.0, problem.causal, False, scale=problem.scale)
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = made
    operator = torch.ops.aten._scaled_dot_product_flash_attention_backward
    saved = dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, problem.causal, seed, offset
    return lambda: operator(*saved, scale=problem.scale)


def deterministic(backward: Callable[..., Call]) -> Callable[..., Call]:
    """The same with torch's switch for deterministic algorithms on."""

    def made(*arguments: Any) -> Call:
        call = backward(*arguments)

        def run() -> Any:
            with _deterministic():
                return call()

        return run

    return made


@contextmanager
def _deterministic() -> Any:
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# --- FlexAttention ------------------------------------------------------------------------------


def flex_forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Call:
    attend, mask = _flex(problem)
    grouped = problem.heads != problem.groups

    def call() -> Tensor:
        out: Tensor = attend(q, k, v, block_mask=mask, scale=problem.scale, enable_gqa=grouped)
        return out

    return torch.no_grad()(call)


def flex_backward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Call:
    # The backward pass exists in compiled form only behind autograd, which runs it on the stream
    # of its forward pass: the one that graphs are captured on. A graph holds the kernels alone.
    from torch._functorch import config

    config.donated_buffer = False  # it is called more than once
    attend, mask = _flex(problem)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    grouped = problem.heads != problem.groups
    stream = _capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = attend(*leaves, block_mask=mask, scale=problem.scale, enable_gqa=grouped)
    torch.cuda.current_stream().wait_stream(stream)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def _capture_stream() -> torch.cuda.Stream:
    """The stream on which `torch.cuda.graph` captures by default."""
    if torch.cuda.graph.default_capture_stream is None:
        torch.cuda.graph.default_capture_stream = torch.cuda.Stream()
    return torch.cuda.graph.default_capture_stream


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = 64
    torch._inductor.config.compile_threads = 1  # starting helpers takes longer than one kernel
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def _flex(problem: Problem) -> tuple[Any, Any]:
    from torch.nn.attention.flex_attention import create_block_mask

    mask = None
    if problem.causal:
        size = problem.length
        mask = create_block_mask(_not_later, None, None, size, size, device="cuda")
    return _compiled_flex(), mask


def _not_later(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


# --- Triton's tutorial --------------------------------------------------------------------------


class Tutorial:
    """Triton's fused-attention tutorial from a file, with its own autotuning; fp16 is all it has.

    Of its configurations those with 128 queries a tile and two or three stages are tuned, once a
    width and mask, at the first length that is asked for. Its backward pass is causal only.
    """

    def __init__(self, file: Path) -> None:
        self.module = _loaded(file)
        self.tuner = self.module._attn_fwd
        self.all = [
            one
            for one in self.tuner.configs
            if one.kwargs["BLOCK_M"] == 128
            and one.kwargs["BLOCK_N"] >= 64
            and one.num_warps == (8 if one.kwargs["BLOCK_N"] == 128 else 4)
            and one.num_stages <= 3
        ]
        self.best: dict[tuple[int, bool], Any] = {}
        self.tuner._do_bench = partial(do_bench, warmup=5, rep=20)

    def forward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Call:
        half = [x.half() for x in (q, k, v)]
        return lambda: self._run(problem, _Context(), half)

    def backward(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Call:
        if not problem.causal:
            raise NotImplementedError("the tutorial's backward pass is causal only")
        context = _Context()
        self._run(problem, context, [x.half() for x in (q, k, v)])
        grad = dout.half()
        return lambda: self.module._attention.backward(context, grad)[:3]

    def _run(self, problem: Problem, context: "_Context", qkv: list[Tensor]) -> Tensor:
        key = problem.width, problem.causal
        self.tuner.configs = [self.best[key]] if key in self.best else self._allowed(problem)
        self.tuner.cache.clear()
        out: Tensor = self.module._attention.forward(
            context, *qkv, problem.causal, problem.scale, False
        )
        self.best.setdefault(key, self.tuner.best_config)
        return out

    def _allowed(self, problem: Problem) -> list[Any]:
        return [one for one in self.all if one.kwargs["BLOCK_N"] <= problem.width]


class _Context:
    """What an autograd function keeps between its two passes."""

    saved_tensors: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


def _loaded(file: Path) -> ModuleType:
    if importlib.util.find_spec("pytest") is None:
        sys.modules["pytest"] = (
            MagicMock()
        )  # the tutorial imports it for tests that are not run here
    spec = importlib.util.spec_from_file_location("triton_tutorial_attention", file)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- all of them --------------------------------------------------------------------------------


def methods(folder: Path | None) -> list[Method]:
    """cuDNN first: all others are compared with it."""
    made = [
        Method("cuDNN", cudnn_forward, cudnn_backward),
        *ours(),
        Method("FlashAttention-2", flash_forward, flash_backward),
        Method("FlexAttention", flex_forward, flex_backward, takes=_flex_takes),
    ]
    for peer, backward in (("cuDNN", cudnn_backward), ("FlashAttention-2", flash_backward)):
        name = f"{peer}, deterministic"
        made.append(Method(name, backward=deterministic(backward), takes=_at_two_lengths))
    if folder is not None:
        tutorial = Tutorial(folder / TUTORIAL)
        made.append(
            Method("Triton's tutorial", tutorial.forward, tutorial.backward, _tutorial_takes)
        )
    return made


def _flex_takes(way: str, problem: Problem) -> bool:
    """Where goals are: compiling one more shape takes longer than measuring it."""
    if problem.heads != problem.groups:
        return False
    lengths = {"forward": (4096, 8192, 16384, 32768), "backward": (4096, 16384)}
    wide = problem.width == 128
    return problem.length in lengths[way] if wide else problem.length == 16384


def _at_two_lengths(_way: str, problem: Problem) -> bool:
    return problem.width == 128 and problem.causal and problem.length in (4096, 16384)


def _tutorial_takes(way: str, problem: Problem) -> bool:
    ungrouped = problem.heads == problem.groups
    return ungrouped and (way == "forward" or (problem.causal and problem.length == 4096))
