"""torch's own attention for CPUs: one fused kernel, for problems without windows and soft caps.

16-bit inputs are computed in float32: the kernel would round the weights of a 16-bit softmax.
"""

import torch
from torch import Tensor

from trapline.gold.attention.dense import Problem, compute_dtype


def supports(problem: Problem) -> str | None:
    """None, or the reason why the kernel cannot compute the problem."""
    q, k = problem.q, problem.k
    if q.device.type != "cpu":
        return f"tensors on {q.device.type}"
    if problem.packed or problem.window or problem.softcap:
        return "packed sequences, windows and soft caps"
    if _is_causal(problem) and q.shape[2] != k.shape[2]:
        return "causal attention of fewer queries than keys"
    return None if q.numel() and k.numel() else "empty tensors"


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """out and lse, contiguous."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_operands(problem), 0.0, _is_causal(problem), scale=problem.scale
    )
    return out.to(problem.q.dtype).contiguous(), lse.contiguous()


def backward(
    problem: Problem, out: Tensor, lse: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of out alone, bitwise repeatable: every head has one owner."""
    dtype = compute_dtype(problem.q.dtype)
    q, k, v = _operands(problem)
    given = _plain(dout, dtype), q, k, v, _plain(out, dtype), lse
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *given, 0.0, _is_causal(problem), scale=problem.scale
    )
    dq, dk, dv = (x.to(problem.q.dtype).contiguous() for x in grads)
    return dq, dk, dv


def _is_causal(problem: Problem) -> bool:
    """The last query sees every key, so one query alone needs no mask."""
    return problem.causal and problem.q.shape[2] > 1


def _operands(problem: Problem) -> list[Tensor]:
    dtype = compute_dtype(problem.q.dtype)
    return [_plain(x, dtype) for x in (problem.q, problem.k, problem.v)]


def _plain(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in this dtype with contiguous rows."""
    x = x.to(dtype)
    return x if x.stride(-1) == 1 else x.contiguous()
