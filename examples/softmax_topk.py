"""Softmax and top-k over a large vocabulary: three ways, with time, memory and error.

The naive way writes all N·V probabilities and sorts them. `softmax_topk` reads the logits once,
keeps k candidates per row, and also gives the log-sum-exp.

    python examples/softmax_topk.py
"""

import torch
from measured import measured
from torch import Tensor

from trapline.gold import softmax_topk

ROWS, VOCABULARY, K = 32, 128_256, 50


def naive(logits: Tensor) -> Tensor:
    """Softmax as the textbook writes it: overflows where a logit is large."""
    probabilities = logits.exp() / logits.exp().sum(dim=1, keepdim=True)
    return probabilities.sort(dim=1, descending=True).values[:, :K]


def torch_functions(logits: Tensor) -> Tensor:
    return torch.softmax(logits, dim=1).topk(K, dim=1).values


def library(logits: Tensor) -> Tensor:
    return softmax_topk(logits, k=K).values


def main() -> None:
    torch.manual_seed(0)
    logits = 12 * torch.randn(ROWS, VOCABULARY)
    logits[0, 7] = 95.0  # exp(95) is beyond float32
    truth = torch_functions(logits.double())
    print(f"top {K} of {ROWS} × {VOCABULARY} float32 logits ({logits.nbytes / 2**20:.1f} MiB)\n")
    print(f"{'way':15}  {'ms':>6}  {'extra MiB':>9}  largest error")
    for way in (naive, torch_functions, library):
        values, ms, mib = measured(way, logits)
        error = float((values - truth).abs().nan_to_num(torch.inf).max())
        print(f"{way.__name__:15}  {ms:6.1f}  {mib:9.1f}  {error:.1e}")
    equal = softmax_topk(torch.zeros(1, 6), k=3)
    print(f"\nties go to the lower index: {equal.indices[0].tolist()}")


if __name__ == "__main__":
    main()
