"""A head and 256 queries at a time, with the scores of all keys, in float32."""

import torch

SLAB = 256


def flash_attention(q, k, v, causal, out, lse):
    B, H, T, D = q.shape
    G, S = k.shape[1], k.shape[2]
    columns = torch.arange(S, device=q.device)
    for batch in range(B):
        for head in range(H):
            keys = k[batch, head // (H // G)].float()
            values = v[batch, head // (H // G)].float()
            for first in range(0, T, SLAB):
                rows = slice(first, min(first + SLAB, T))
                scores = q[batch, head, rows].float() @ keys.T * D**-0.5
                if causal:
                    last = torch.arange(rows.start, rows.stop, device=q.device) + S - T
                    scores.masked_fill_(columns > last[:, None], -torch.inf)
                logarithm = torch.logsumexp(scores, dim=1)
                weights = torch.exp(scores - logarithm[:, None]).nan_to_num(0.0)
                out[batch, head, rows] = (weights @ values).to(out.dtype)
                lse[batch, head, rows] = logarithm
