"""Attention in torch, by tiles: memory grows with T + S, gradients come from q, k, v, out and lse.

All heads of all batches go through one tile of scores at a time; the query heads of a group are an
axis R of their own, so keys and values are never copied per head. 16-bit inputs are computed in
float32. Derivations: docs/components/attention.md.

Packed sequences (`varlen`) are loops of the same functions over the sequences.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trapline.gold.attention.dense.registry import a_group, computed_in, register

#: Large enough that torch's cost per call disappears, small enough to stay in a core's cache.
TILE = 256
#: The namespace of the operators in this file; `kernels` registers the same four under others.
TORCH = "trapline_attention"


class Rules(NamedTuple):
    """Who sees whom, and how a dot product becomes a score. A window of 0 is none."""

    causal: bool
    window: int
    softcap: float
    scale: float

    def hidden(self, rows: range, cols: range, offset: int, device: torch.device) -> Tensor | None:
        """True where query t, standing at key t + offset, does not see a key; None: sees all."""
        first, last = rows.start + offset, rows.stop - 1 + offset
        ahead_of_all = cols.stop - 1 - first
        behind_all = last - cols.start
        if (not self.causal or ahead_of_all <= 0) and (
            not self.window or max(ahead_of_all, behind_all) < self.window
        ):
            return None
        key = torch.arange(cols.start, cols.stop, device=device)
        ahead = key - torch.arange(first, last + 1, device=device)[:, None]
        hidden = ahead > 0 if self.causal else torch.zeros_like(ahead, dtype=torch.bool)
        return hidden | (ahead.abs() >= self.window) if self.window else hidden

    def key_tiles(self, rows: range, keys: int, offset: int) -> Iterator[range]:
        """Tiles of the keys that any of these queries sees."""
        first, last = rows.start + offset, rows.stop - 1 + offset
        begin, end = 0, keys
        if self.causal:
            end = min(end, last + 1)
        if self.window:
            begin = max(begin, first - self.window + 1)
            end = min(end, last + self.window)
        return tiles(begin, end)


def tiles(begin: int, end: int) -> Iterator[range]:
    """[begin, end) in pieces of at most TILE."""
    for start in range(begin, end, TILE):
        yield range(start, min(start + TILE, end))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int, softcap: float, scale: float
) -> tuple[Tensor, Tensor]:
    rules = Rules(causal, window, softcap, scale)
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    grouped = q.reshape(B, G, a_group(H, G), T, D)
    out = torch.zeros(grouped.shape, dtype=q.dtype, device=q.device)
    lse = torch.zeros(grouped.shape[:-1], dtype=computed_in(q.dtype), device=q.device)
    for rows in tiles(0, T):
        at = slice(rows.start, rows.stop)
        out[..., at, :], lse[..., at] = _attend(grouped[..., at, :], k, v, rows, S - T, rules)
    return out.reshape(B, H, T, D), lse.reshape(B, H, T)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, rows: range, offset: int, rules: Rules
) -> tuple[Tensor, Tensor]:
    """One tile of queries (B,G,R,rows,D) against every key it sees, with the online softmax."""
    wide = computed_in(q.dtype)
    peak = torch.full(q.shape[:-1], -torch.inf, dtype=wide, device=q.device)
    total = torch.zeros_like(peak)
    weighted = torch.zeros(q.shape, dtype=wide, device=q.device)
    for cols in rules.key_tiles(rows, k.shape[2], offset):
        scores, _ = _scores(q, k, rows, cols, offset, rules)
        new_peak = torch.maximum(peak, scores.amax(dim=-1))
        # A row that has seen no key stays at −inf, and −inf − (−inf) is not a number.
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
    q: Tensor, k: Tensor, rows: range, cols: range, offset: int, rules: Rules
) -> tuple[Tensor, Tensor | None]:
    """Masked scores (B,G,R,rows,cols), and tanh of the scaled products where they are capped."""
    wide = computed_in(q.dtype)
    keys = k[:, :, None, cols.start : cols.stop].to(wide)
    scores = (q.to(wide) * rules.scale) @ keys.transpose(-1, -2)
    squashed = None
    if rules.softcap:
        squashed = torch.tanh(scores / rules.softcap)
        scores = squashed * rules.softcap
    hidden = rules.hidden(rows, cols, offset, q.device)
    if hidden is not None:
        scores = scores.masked_fill_(hidden, -torch.inf)
    return scores, squashed


def _backward(
    dout: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    window: int,
    softcap: float,
    scale: float,
    _deterministic: bool = True,  # it is, always
) -> tuple[Tensor, Tensor, Tensor]:
    rules = Rules(causal, window, softcap, scale)
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    wide = computed_in(q.dtype)
    shape = (B, G, a_group(H, G), T, D)
    q_grouped, dout_grouped = q.reshape(shape), dout.reshape(shape)
    finite = lse.masked_fill(lse == -torch.inf, 0.0).reshape(shape[:-1])
    # lse is an output too: d lse / d score is the weight, so its gradient joins the row sum.
    delta = (dout.to(wide) * out.to(wide)).sum(dim=-1).sub_(dlse).reshape(shape[:-1])
    dq = torch.zeros(shape, dtype=wide, device=q.device)
    dk, dv = (torch.zeros((B, G, S, D), dtype=wide, device=q.device) for _ in range(2))
    for rows in tiles(0, T):
        at = slice(rows.start, rows.stop)
        q_rows, dout_rows = q_grouped[..., at, :], dout_grouped[..., at, :].to(wide)
        for cols in rules.key_tiles(rows, S, S - T):
            keys, values = (x[:, :, cols.start : cols.stop].to(wide) for x in (k, v))
            scores, squashed = _scores(q_rows, k, rows, cols, S - T, rules)
            weights = scores.sub_(finite[..., at, None]).exp_()
            dscores = dout_rows @ values[:, :, None].transpose(-1, -2)
            dscores = dscores.sub_(delta[..., at, None]).mul_(weights).mul_(scale)
            if squashed is not None:
                dscores = dscores.mul_(1.0 - squashed.square())
            dq[..., at, :] += dscores @ keys[:, :, None]
            # Contracting over R and rows together sums over the group.
            dk[:, :, cols.start : cols.stop] += _over_group(dscores, q_rows.to(wide))
            dv[:, :, cols.start : cols.stop] += _over_group(weights, dout_rows)
    return dq.reshape(B, H, T, D).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _over_group(left: Tensor, right: Tensor) -> Tensor:
    """(B,G,R,rows,cols) and (B,G,R,rows,D) → (B,G,cols,D)."""
    return left.flatten(2, 3).transpose(-1, -2) @ right.flatten(2, 3)


def _varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    _max_q: int,
    _max_k: int,
    causal: bool,
    window: int,
    softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.zeros((q.shape[1], q.shape[0]), dtype=computed_in(q.dtype), device=q.device)
    for here, there in _sequences(cu_q, cu_k):
        part_q, part_k, part_v = _unpacked(q, here), _unpacked(k, there), _unpacked(v, there)
        out_part, lse_part = _forward(part_q, part_k, part_v, causal, window, softcap, scale)
        out[here], lse[:, here] = out_part[0].transpose(0, 1), lse_part[0]
    return out, lse


def _varlen_backward(
    dout: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    _max_q: int,
    _max_k: int,
    causal: bool,
    window: int,
    softcap: float,
    scale: float,
    _deterministic: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    for here, there in _sequences(cu_q, cu_k):
        grads = _backward(
            _unpacked(dout, here),
            dlse[None, :, here],
            _unpacked(q, here),
            _unpacked(k, there),
            _unpacked(v, there),
            _unpacked(out, here),
            lse[None, :, here],
            causal,
            window,
            softcap,
            scale,
        )
        for whole, place, part in zip((dq, dk, dv), (here, there, there), grads, strict=True):
            whole[place] = part[0].transpose(0, 1)
    return dq, dk, dv


def _sequences(cu_q: Tensor, cu_k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Where each packed sequence has its queries and its keys."""
    q_ends, k_ends = cu_q.tolist(), cu_k.tolist()
    for i in range(len(q_ends) - 1):
        yield slice(q_ends[i], q_ends[i + 1]), slice(k_ends[i], k_ends[i + 1])


def _unpacked(x: Tensor, place: slice) -> Tensor:
    """(tokens, heads, D) of one sequence as (1, heads, n, D)."""
    return x[place].transpose(0, 1)[None]


def _in_its_own_dtype(
    function: Callable[..., tuple[Tensor, ...]],
) -> Callable[..., tuple[Tensor, ...]]:
    """Without autocast, which would round the products in here to 16 bits unasked."""

    def run(first: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        with torch.autocast(first.device.type, enabled=False):
            return function(first, *rest)

    return run


_LIBRARY = register(
    TORCH,
    {
        "forward": _in_its_own_dtype(_forward),
        "backward": _in_its_own_dtype(_backward),
        "varlen_forward": _in_its_own_dtype(_varlen_forward),
        "varlen_backward": _in_its_own_dtype(_varlen_backward),
    },
    "CompositeExplicitAutograd",
)
