"""torch's own top-k over all continuations of a prompt, compiled."""

import torch


@torch.compile(dynamic=False)
def _step(log_probs, sums, eos_id, parents, tokens, new_sums, ended):
    B, W, V = log_probs.shape
    totals = (log_probs.float() + sums[..., None]).reshape(B, W * V)
    values, places = torch.topk(totals, W, dim=1)
    new_sums.copy_(values)
    parents.copy_(places // V)
    tokens.copy_(places % V)
    ended.copy_(places % V == eos_id)


def beam_step(log_probs, sums, eos_id, parents, tokens, new_sums, ended):
    _step(log_probs, sums, eos_id, parents, tokens, new_sums, ended)
