"""A stable sort of all continuations of a prompt."""

import torch


def beam_step(log_probs, sums, eos_id, parents, tokens, new_sums, ended):
    B, W, V = log_probs.shape
    for prompt in range(B):
        totals = (log_probs[prompt].float() + sums[prompt, :, None]).reshape(-1) + 0.0
        found = torch.sort(totals, descending=True, stable=True)
        values, places = found.values[:W], found.indices[:W]
        count = values.shape[0]
        real = values > -torch.inf
        parents[prompt], tokens[prompt], new_sums[prompt] = -1, -1, -torch.inf
        parents[prompt, :count] = torch.where(real, places // V, -1).int()
        tokens[prompt, :count] = torch.where(real, places % V, -1).int()
        new_sums[prompt, :count] = values
        ended[prompt] = (tokens[prompt] == eos_id) & (tokens[prompt] >= 0)
