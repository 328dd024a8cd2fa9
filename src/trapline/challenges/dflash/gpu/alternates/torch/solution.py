"""A mask made on the host, and one head at a time, in float32."""

import torch


def tree_attention(q, k, v, parents, prefix_len, out):
    _, H, N, D = q.shape
    G = k.shape[1]
    for batch, tree in enumerate(parents.tolist()):
        mask = torch.zeros((N, prefix_len + N), dtype=torch.bool)
        mask[:, :prefix_len] = True
        for node, parent in enumerate(tree):
            if parent >= 0:
                mask[node] = mask[parent]
            mask[node, prefix_len + node] = True
        mask = mask.to(q.device)
        for head in range(H):
            keys, values = (x[batch, head // (H // G)].float() for x in (k, v))
            scores = q[batch, head].float() @ keys.T * D**-0.5
            weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=1)
            out[batch, head] = (weights @ values).to(out.dtype)
