"""Dense attention: q (B,H,T,D) with k, v (B,G,S,D), or packed sequences (tokens, heads, D).

`registry` chooses an implementation: `reference` in torch, `triton` for any GPU, `hopper` for the
most common problems on Hopper GPUs. All take a `Problem`.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Problem(NamedTuple):
    """One attention call. The fields are the operators' arguments, in their order."""

    q: Tensor
    k: Tensor
    v: Tensor
    #: Boundaries of packed sequences, int32; None for dense tensors.
    cu_q: Tensor | None
    cu_k: Tensor | None
    #: Upper bounds on the lengths of packed sequences; 0 for dense tensors.
    max_q: int
    max_k: int
    causal: bool
    #: 0 means no window.
    window: int
    #: 0.0 means no cap.
    softcap: float
    scale: float
    #: Whether gradients must be bitwise repeatable.
    deterministic: bool

    @property
    def packed(self) -> bool:
        return self.cu_q is not None

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.cu_q is None else len(self.cu_q) - 1

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """T and S (upper bounds if packed), query heads, query heads per key/value head."""
        heads, kv_heads = self.q.shape[1], self.k.shape[1]
        if self.cu_q is None:
            T, S = self.q.shape[2], self.k.shape[2]
        else:
            T, S = self.max_q, self.max_k
        return T, S, heads, heads_per_kv_head(heads, kv_heads)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """(B,H,T), or (H, tokens) if packed."""
        shape = self.q.shape
        return (shape[1], shape[0]) if self.packed else tuple(shape[:-1])


def dense_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window: int = 0,
    softcap: float = 0.0,
    scale: float = 1.0,
    deterministic: bool = True,
) -> Problem:
    """A problem without packed sequences."""
    return Problem(q, k, v, None, None, 0, 0, causal, window, softcap, scale, deterministic)


def heads_per_kv_head(heads: int, kv_heads: int) -> int:
    """How many query heads share one key/value head; 0 if there are no heads."""
    return heads // max(kv_heads, 1)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of intermediate results: float32 for 16-bit inputs."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
