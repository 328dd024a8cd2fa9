"""Peak memory of attention through autograd: ours and SDPA's, one sequence after the other."""

from typing import Any

import torch
from attention_peers import Problem
from torch import Tensor


def memory(one: Problem) -> dict[str, Any]:
    """Peak bytes of a forward and a backward pass through autograd, beyond the inputs."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from trapline.gold import flash_attention

    def torchs(backend: SDPBackend) -> Any:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=one.causal, enable_gqa=one.heads != one.groups
                )

        return attend

    ways = {
        "cuDNN": torchs(SDPBackend.CUDNN_ATTENTION),
        "FlashAttention-2": torchs(SDPBackend.FLASH_ATTENTION),
        "ours": lambda q, k, v: flash_attention(q, k, v, causal=one.causal),
        "ours, not deterministic": lambda q, k, v: flash_attention(
            q, k, v, causal=one.causal, deterministic=False
        ),
    }
    q, k, v, dout = one.draw(0, "cuda")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    return {name: _peaks(attend, leaves, dout) for name, attend in ways.items()}


def _peaks(attend: Any, leaves: list[Tensor], dout: Tensor) -> dict[str, int]:
    attend(*leaves).backward(dout)  # compilation and workspaces that stay
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attend(*leaves)
    torch.cuda.synchronize()
    forward = torch.cuda.max_memory_allocated() - before
    out.backward(dout)
    torch.cuda.synchronize()
    both = torch.cuda.max_memory_allocated() - before
    del out
    for leaf in leaves:
        leaf.grad = None
    return {"forward": forward, "forward and backward": both}
