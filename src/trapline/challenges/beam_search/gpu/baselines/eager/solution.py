"""torch's own top-k over all continuations of a prompt."""

import torch


def beam_step(log_probs, sums, eos_id, parents, tokens, new_sums, ended):
    B, W, V = log_probs.shape
    totals = (log_probs.float() + sums[..., None]).reshape(B, W * V)
    values, places = torch.topk(totals, W, dim=1)
    new_sums.copy_(values)
    parents.copy_(places // V)
    tokens.copy_(places % V)
    torch.eq(tokens, eos_id, out=ended)
