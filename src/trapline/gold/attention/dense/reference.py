"""Dense attention in torch, by tiles: memory grows with T + S, not with T · S.

On a CPU, torch's own kernel computes the problems that it supports. For all others,
all heads of all sequences go through one tile of scores at a time. The query heads that share keys
are an axis R of their own, so keys and values are not copied per head. 16-bit inputs are computed
in float32. Gradients come from q, k, v, out and lse. Derivations: docs/components/attention.md.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trapline.gold.attention.dense import Problem, compute_dtype, heads_per_kv_head

#: torch's own kernels for CPUs; looking up an overload costs as much as a small call.
_CPU_FORWARD: Any = torch._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
#: Large enough to hide torch's cost per call, small enough for a core's cache.
TILE = 256
#: Elements of 16-bit queries per thread that are widened at a time: the copies stay in its cache.
_WIDENED = 1 << 17


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """out like q, and lse (B,H,T) or (H, tokens)."""
    if problem.packed:
        return _packed_forward(problem)
    if cpu_kernel_supports(problem) is None:
        return cpu_kernel_forward(*problem[:3], _is_causal(problem), problem.scale)
    q, k, v = problem.q, problem.k, problem.v
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    grouped = q.reshape(B, G, heads_per_kv_head(H, G), T, D)
    out = torch.zeros(grouped.shape, dtype=q.dtype, device=q.device)
    lse = torch.zeros(grouped.shape[:-1], dtype=compute_dtype(q.dtype), device=q.device)
    for rows in tiles(0, T):
        at = slice(rows.start, rows.stop)
        out[..., at, :], lse[..., at] = _attend(problem, grouped[..., at, :], k, v, rows, S - T)
    return out.reshape(B, H, T, D), lse.reshape(B, H, T)


def _attend(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, rows: range, offset: int
) -> tuple[Tensor, Tensor]:
    """One tile of queries (B,G,R,rows,D) against every key it sees, with the online softmax."""
    wide = compute_dtype(q.dtype)
    peak = torch.full(q.shape[:-1], -torch.inf, dtype=wide, device=q.device)
    total = torch.zeros_like(peak)
    weighted = torch.zeros(q.shape, dtype=wide, device=q.device)
    for cols in key_tiles(problem, rows, k.shape[2], offset):
        scores, _ = _scores(problem, q, k, rows, cols, offset)
        new_peak = torch.maximum(peak, scores.amax(dim=-1))
        # A row that has seen no key stays at −inf, and −inf − (−inf) is NaN.
        origin = new_peak.masked_fill(new_peak == -torch.inf, 0.0)
        weights = scores.sub_(origin[..., None]).exp_()
        correction = (peak - origin).exp_()
        total = total.mul_(correction).add_(weights.sum(dim=-1))
        values = v[:, :, None, cols.start : cols.stop].to(wide)
        weighted = weighted.mul_(correction[..., None]).add_(weights @ values)
        peak = new_peak
    empty = total == 0
    total = total.masked_fill_(empty, 1.0)
    lse = (peak + total.log()).masked_fill_(empty, -torch.inf)
    return (weighted / total[..., None]).to(q.dtype), lse


def _scores(
    problem: Problem, q: Tensor, k: Tensor, rows: range, cols: range, offset: int
) -> tuple[Tensor, Tensor | None]:
    """Masked scores (B,G,R,rows,cols), and tanh of the scaled products if they are capped."""
    wide = compute_dtype(q.dtype)
    keys = k[:, :, None, cols.start : cols.stop].to(wide)
    scores = (q.to(wide) * problem.scale) @ keys.transpose(-1, -2)
    squashed = None
    if problem.softcap:
        squashed = torch.tanh(scores / problem.softcap)
        scores = squashed * problem.softcap
    mask = hidden(problem, rows, cols, offset)
    if mask is not None:
        scores = scores.masked_fill_(mask, -torch.inf)
    return scores, squashed


def hidden(problem: Problem, rows: range, cols: range, offset: int) -> Tensor | None:
    """True where query t, at key position t + offset, does not see a key; None if all are seen."""
    first, last = rows.start + offset, rows.stop - 1 + offset
    ahead_of_all = cols.stop - 1 - first
    behind_all = last - cols.start
    causal, window = problem.causal, problem.window
    if (not causal or ahead_of_all <= 0) and (not window or max(ahead_of_all, behind_all) < window):
        return None
    device = problem.q.device
    key = torch.arange(cols.start, cols.stop, device=device)
    ahead = key - torch.arange(first, last + 1, device=device)[:, None]
    mask = ahead > 0 if causal else torch.zeros_like(ahead, dtype=torch.bool)
    return mask | (ahead.abs() >= window) if window else mask


def key_tiles(problem: Problem, rows: range, keys: int, offset: int) -> Iterator[range]:
    """Tiles of the keys that at least one of these queries sees."""
    first, last = rows.start + offset, rows.stop - 1 + offset
    begin, end = 0, keys
    if problem.causal:
        end = min(end, last + 1)
    if problem.window:
        begin = max(begin, first - problem.window + 1)
        end = min(end, last + problem.window)
    return tiles(begin, end)


def tiles(begin: int, end: int) -> Iterator[range]:
    """[begin, end) in pieces of at most TILE."""
    for start in range(begin, end, TILE):
        yield range(start, min(start + TILE, end))


def backward(
    problem: Problem, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, always bitwise repeatable. Without a gradient of lse, dlse is None."""
    if problem.packed:
        return _packed_backward(problem, out, lse, dout, dlse)
    if dlse is None and cpu_kernel_supports(problem) is None:
        return cpu_kernel_backward(problem, out, lse, dout)
    q, k, v = problem.q, problem.k, problem.v
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    wide = compute_dtype(q.dtype)
    shape = (B, G, heads_per_kv_head(H, G), T, D)
    q_grouped, dout_grouped = q.reshape(shape), dout.reshape(shape)
    finite = lse.masked_fill(lse == -torch.inf, 0.0).reshape(shape[:-1])
    # lse is an output too: d lse / d score is the weight, so its gradient joins the row sum.
    delta = (dout.to(wide) * out.to(wide)).sum(dim=-1).reshape(shape[:-1])
    if dlse is not None:
        delta = delta.sub_(dlse.reshape(shape[:-1]))
    dq = torch.zeros(shape, dtype=wide, device=q.device)
    dk, dv = (torch.zeros((B, G, S, D), dtype=wide, device=q.device) for _ in range(2))
    for rows in tiles(0, T):
        at = slice(rows.start, rows.stop)
        q_rows, dout_rows = q_grouped[..., at, :], dout_grouped[..., at, :].to(wide)
        for cols in key_tiles(problem, rows, S, S - T):
            keys, values = (x[:, :, cols.start : cols.stop].to(wide) for x in (k, v))
            scores, squashed = _scores(problem, q_rows, k, rows, cols, S - T)
            weights = scores.sub_(finite[..., at, None]).exp_()
            dscores = dout_rows @ values[:, :, None].transpose(-1, -2)
            dscores = dscores.sub_(delta[..., at, None]).mul_(weights).mul_(problem.scale)
            if squashed is not None:
                dscores = dscores.mul_(1.0 - squashed.square())
            dq[..., at, :] += dscores @ keys[:, :, None]
            # Contracting over R and rows together sums over the heads that share keys.
            dk[:, :, cols.start : cols.stop] += _over_group(dscores, q_rows.to(wide))
            dv[:, :, cols.start : cols.stop] += _over_group(weights, dout_rows)
    return dq.reshape(B, H, T, D).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _over_group(left: Tensor, right: Tensor) -> Tensor:
    """(B,G,R,rows,cols) and (B,G,R,rows,D) → (B,G,cols,D)."""
    return left.flatten(2, 3).transpose(-1, -2) @ right.flatten(2, 3)


# --- packed sequences: one at a time ------------------------------------------------------------


def _packed_forward(problem: Problem) -> tuple[Tensor, Tensor]:
    q = problem.q
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.zeros(problem.lse_shape, dtype=compute_dtype(q.dtype), device=q.device)
    for here, one in _sequences(problem):
        out_part, lse_part = forward(one)
        out[here[0]], lse[:, here[0]] = out_part[0].transpose(0, 1), lse_part[0]
    return out, lse


def _packed_backward(
    problem: Problem, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = problem.q, problem.k, problem.v
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in inputs)
    for (here, there), one in _sequences(problem):
        saved = _unpacked(out, here), lse[None, :, here]
        given = _unpacked(dout, here), None if dlse is None else dlse[None, :, here]
        grads = backward(one, *saved, *given)
        for whole, place, part in zip((dq, dk, dv), (here, there, there), grads, strict=True):
            whole[place] = part[0].transpose(0, 1)
    return dq, dk, dv


def _sequences(problem: Problem) -> Iterator[tuple[tuple[slice, slice], Problem]]:
    """The slices of queries and keys of each packed sequence, and its dense problem."""
    assert problem.cu_q is not None
    assert problem.cu_k is not None
    q_ends, k_ends = problem.cu_q.tolist(), problem.cu_k.tolist()
    for i in range(len(q_ends) - 1):
        here, there = slice(q_ends[i], q_ends[i + 1]), slice(k_ends[i], k_ends[i + 1])
        q = _unpacked(problem.q, here)
        k, v = (_unpacked(x, there) for x in (problem.k, problem.v))
        one = problem._replace(q=q, k=k, v=v, cu_q=None, cu_k=None, max_q=0, max_k=0)
        yield (here, there), one


def _unpacked(x: Tensor, place: slice) -> Tensor:
    """(tokens, heads, D) of one sequence as (1, heads, n, D)."""
    return x[place].transpose(0, 1)[None]


def cpu_kernel_supports(problem: Problem) -> str | None:
    """None, or the reason why torch's own kernel for CPUs cannot compute the problem."""
    q, k = problem.q, problem.k
    if q.device.type != "cpu":
        return f"tensors on {q.device.type}"
    if problem.packed or problem.window or problem.softcap:
        return "packed sequences, windows and soft caps"
    if _is_causal(problem) and q.shape[2] != k.shape[2]:
        return "causal attention of fewer queries than keys"
    return None if q.numel() and k.numel() else "empty tensors"


def torch_differentiates(problem: Problem) -> bool:
    """Whether autograd may record torch's kernel itself: it keeps what we would keep.

    Of 16-bit inputs it would keep float32 copies.
    """
    dtype = problem.q.dtype
    return dtype == compute_dtype(dtype) and cpu_kernel_supports(problem) is None


def cpu_kernel_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """out, laid out like q, and lse with tokens before heads, as torch leaves them.

    A 16-bit softmax would round its weights, so it is widened, a few sequences at a time.
    """
    dtype = compute_dtype(q.dtype)
    B, H, T, D = q.shape
    step = B if q.dtype == dtype else max(_WIDENED * torch.get_num_threads() // (H * T * D), 1)
    if step >= B:
        operands = _plain(q, dtype), _plain(k, dtype), _plain(v, dtype)
        out, lse = _CPU_FORWARD(*operands, 0.0, causal, scale=scale)
        return _plain(out, q.dtype), lse
    out = torch.empty_like(q)
    lse = q.new_empty((B, T, H), dtype=dtype).transpose(1, 2)
    for start in range(0, B, step):
        here = slice(start, start + step)
        operands = _plain(q[here], dtype), _plain(k[here], dtype), _plain(v[here], dtype)
        out[here], lse[here] = _CPU_FORWARD(*operands, 0.0, causal, scale=scale)
    return out, lse


def cpu_kernel_backward(
    problem: Problem, out: Tensor, lse: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of out alone, bitwise repeatable: every head has one owner."""
    dtype = compute_dtype(problem.q.dtype)
    given = [_plain(x, dtype) for x in (dout, problem.q, problem.k, problem.v, out)]
    grads = _CPU_BACKWARD(*given, lse, 0.0, _is_causal(problem), scale=problem.scale)
    dq, dk, dv = (x.to(problem.q.dtype) for x in grads)
    return dq, dk, dv


def _is_causal(problem: Problem) -> bool:
    """The last query sees every key, so one query alone needs no mask."""
    return problem.causal and problem.q.shape[2] > 1


def _plain(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in this dtype with contiguous rows."""
    if x.dtype != dtype:
        x = x.to(dtype)
    return x if x.stride(-1) == 1 else x.contiguous()
