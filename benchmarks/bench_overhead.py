"""The host's share of a call, beside that of the torch function that it replaces.

    PYTHONPATH=src python benchmarks/bench_overhead.py
    … --only attention       cases whose name has this in it
    … --quick                a few rounds: does it run?

*Host time* is `perf_counter` around calls in a row on tensors so small that the GPU is never
behind, synchronised before and not after: what the CPU does until the last launch is queued.
"each call checked" is the same function without `trapline.gold.call_plans`: checks, choice of
kernels and Triton's launcher at each call. *As called* are CUDA events around calls in a row on
tensors of a real size: the larger of host and device time. Contenders take turns (`harness`).
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import Call, Clock, Contender, Rules, Timing, compare, show, write
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from trapline.gold import (
    call_plans,
    flash_attention,
    layer_norm,
    paged_attention,
    rms_norm,
    softmax_topk,
)

BF16 = torch.bfloat16
#: Calls in a row. A GPU's queue holds about a thousand launches.
CALLS = 50
#: Tokens in all, of the attention that is timed as called.
TOKENS, WIDTH_IN_ALL = 16384, 2048


class HostClock:
    """Until the last launch is queued."""

    def prepare(self, contender: Contender, rules: Rules) -> Callable[[], float]:
        call = contender.make(0)
        for _ in range(3):
            call()  # compiled, seen, recorded

        def timer() -> float:
            _wait()
            started = time.perf_counter()
            for _ in range(rules.calls):
                call()
            taken = time.perf_counter() - started
            _wait()
            return taken / rules.calls

        return timer


class EventClock:
    """Between events around calls in a row."""

    def prepare(self, contender: Contender, rules: Rules) -> Callable[[], float]:
        call = contender.make(0)
        for _ in range(3):
            call()

        def timer() -> float:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            _wait()
            start.record()
            for _ in range(rules.calls):
                call()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3 / rules.calls

        return timer


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def drawn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device=_device(), dtype=dtype)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def contenders(ours: Callable[..., Any], arguments: Sequence[Any], **options: Any) -> list[Any]:
    """Ours, and ours without plans."""

    def plain() -> Any:
        call_plans.repeating = False
        try:
            return ours(*arguments, **options)
        finally:
            call_plans.repeating = True

    return [
        Contender("ours", lambda _: lambda: ours(*arguments, **options)),
        Contender("ours, each call checked", lambda _: plain),
    ]


def peer(name: str, call: Call) -> Contender:
    return Contender(name, lambda _: call)


def attention_cases() -> dict[str, list[Contender]]:
    q, k, v = (drawn(1, 4, 128, 128) for _ in range(3))
    chosen = peer("torch", lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    dense = [*contenders(flash_attention, (q, k, v), causal=True), chosen]
    pages, table = drawn(2, 64, 8, 16, 128), torch.arange(64, device=_device()).view(4, 16).int()
    lengths = torch.full((4,), 256, device=_device(), dtype=torch.int32)
    query = drawn(4, 32, 128)
    one, keys, values = query[:, :, None], drawn(4, 8, 256, 128), drawn(4, 8, 256, 128)
    peers = peer(
        "torch, contiguous cache",
        lambda: functional.scaled_dot_product_attention(one, keys, values, enable_gqa=True),
    )
    given = query, pages[0], pages[1], table, lengths
    return {
        "flash_attention": dense,
        "paged_attention": [*contenders(paged_attention, given), peers],
    }


def row_cases() -> dict[str, list[Contender]]:
    x, weight, bias = drawn(64, 1024), drawn(1024), drawn(1024)
    logits, short = drawn(8, 32000), drawn(64, 8192)

    def torch_topk(rows: Tensor, k: int) -> Call:
        return lambda: torch.topk(torch.softmax(rows, -1), k)

    norm = peer("torch", lambda: functional.layer_norm(x, (1024,), weight, bias))
    rms = peer("torch", lambda: functional.rms_norm(x, (1024,), weight, 1e-6))
    return {
        "layer_norm": [*contenders(layer_norm, (x, weight, bias)), norm],
        "rms_norm": [*contenders(rms_norm, (x, weight)), rms],
        "softmax_topk 8×32000 k64": [
            *contenders(softmax_topk, (logits, 64)),
            peer("torch", torch_topk(logits, 64)),
        ],
        "softmax_topk 64×8192 k8": [
            *contenders(softmax_topk, (short, 8)),
            peer("torch", torch_topk(short, 8)),
        ],
    }


def training_cases() -> dict[str, list[Contender]]:
    """Forward and backward of small tensors, recorded by autograd."""
    q, k, v = (drawn(1, 4, 128, 128).requires_grad_() for _ in range(3))
    x, w, b = drawn(64, 1024).requires_grad_(), drawn(1024), drawn(1024)
    dout, dy = torch.randn_like(q), torch.randn_like(x)

    def gradient(forward: Call, inputs: Any, grad: Tensor) -> Call:
        return lambda: torch.autograd.grad(forward(), inputs, grad)

    def theirs() -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def ours() -> Any:
        return flash_attention(q, k, v, causal=True)

    return {
        "training flash_attention": [
            peer("ours", gradient(ours, (q, k, v), dout)),
            peer("torch", gradient(theirs, (q, k, v), dout)),
        ],
        "training layer_norm": [
            peer("ours", gradient(lambda: layer_norm(x, w, b), x, dy)),
            peer("torch", gradient(lambda: functional.layer_norm(x, (1024,), w, b), x, dy)),
        ],
    }


def called_cases() -> dict[str, list[Contender]]:
    """Attention of 16 384 tokens, as a user calls it."""
    made = {}
    for width, length in ((128, 512), (128, 1024), (64, 1024), (128, 4096)):
        heads = WIDTH_IN_ALL // width
        shape = TOKENS // length, heads, length, width
        q, k, v = (drawn(*shape).requires_grad_() for _ in range(3))
        dout = drawn(*shape)
        name = f"D{width} N{length} causal"
        made[f"{name} forward"] = forward_contenders(*(x.detach() for x in (q, k, v)))
        made[f"{name} backward"] = backward_contenders(q, k, v, dout)
    return made


def forward_contenders(q: Tensor, k: Tensor, v: Tensor) -> list[Contender]:
    def cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return [*contenders(flash_attention, (q, k, v), causal=True), peer("cuDNN", cudnn)]


def backward_contenders(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Contender]:
    def again(out: Any) -> Call:
        return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    ours = flash_attention(q, k, v, causal=True)
    faster = flash_attention(q, k, v, causal=True, deterministic=False)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        cudnn = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return [
        peer("ours", again(ours)),
        peer("ours, deterministic=False", again(faster)),
        peer("cuDNN", again(cudnn)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)
    # Autograd calls backward passes on its own thread; one round warms each of them up.
    rules = Rules(rounds=3 if given.quick else 21, calls=CALLS, warm_up=0.1, drift=0.2, repeats=5)
    host = attention_cases() | row_cases()
    results: dict[str, list[Timing]] = {}

    def measure(cases: dict[str, list[Contender]], rules: Rules, clock: Clock, kind: str) -> None:
        for name, several in cases.items():
            if given.only in name:
                results[kind + name] = compare(several, _device(), rules, clock=clock)
                print(f"{kind}{name}\n{show(results[kind + name])}", flush=True)
        write("overhead", _device(), results)

    with torch.no_grad():
        measure(host, rules, HostClock(), "host ")
    measure(training_cases(), rules, HostClock(), "host ")
    if torch.cuda.is_available():
        few = Rules(rounds=rules.rounds // 3 or 1, calls=20, warm_up=0.1, drift=0.1, repeats=3)
        measure(called_cases(), few, EventClock(), "as called ")


if __name__ == "__main__":
    main()
