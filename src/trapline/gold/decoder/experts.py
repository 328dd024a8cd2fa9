"""A feed-forward of several experts: a router chooses some of them for every token.

Letters: N tokens, C channels, E experts, K experts a token, F inner width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from trapline.gold.decoder.config import ExpertsConfig


class Experts(nn.Module):
    """SwiGLU experts (E, F, C) whose outputs are added with the router's weights."""

    def __init__(self, dim: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(dim, config.count, bias=False)
        inner = (config.count, config.hidden, dim)
        self.gate = nn.Parameter(torch.empty(inner))
        self.up = nn.Parameter(torch.empty(inner))
        self.down = nn.Parameter(torch.empty(config.count, dim, config.hidden))
        for weight in (self.gate, self.up, self.down):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        chosen, weights = self.route(rows)
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            mixed = self.mix_static(rows, chosen, weights)
        else:
            mixed = self.mix(rows, chosen, weights)
        return mixed.view(x.shape)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of every token (N, K) and their weights; softmax and choice in float32."""
        law = torch.softmax(self.router(x).float(), dim=-1)
        weights, chosen = torch.topk(law, self.config.per_token, dim=-1)
        if self.config.renormalized:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return chosen, weights.to(x.dtype)

    def mix(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """One expert after another over the tokens that chose it; (N, C)."""
        out = torch.zeros_like(x)
        for expert in sorted(set(chosen.flatten().tolist())):
            token, place = torch.where(chosen == expert)
            rows = x[token]
            gate, up = (functional.linear(rows, w[expert]) for w in (self.gate, self.up))
            found = functional.linear(functional.silu(gate) * up, self.down[expert])
            out.index_add_(0, token, found * weights[token, place, None])
        return out

    def mix_static(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """`mix` without shapes that depend on values, as a CUDA graph needs it.

        A few tokens copy the weights of their experts; more run every expert over all tokens.
        """
        if chosen.numel() < self.config.count:
            picked = chosen.flatten()
            rows = x.repeat_interleave(chosen.shape[1], dim=0)[:, :, None]  # (N · K, C, 1)
            gate, up, down = (w[picked] for w in (self.gate, self.up, self.down))
            found = (down @ (functional.silu(gate @ rows) * (up @ rows)))[:, :, 0]
            return (found.view(*chosen.shape, -1) * weights[..., None]).sum(dim=1)
        everywhere = x.new_zeros((len(x), self.config.count)).scatter(1, chosen, weights)
        gate, up = (x @ w.transpose(1, 2) for w in (self.gate, self.up))  # (E, N, F)
        found = (functional.silu(gate) * up) @ self.down.transpose(1, 2)  # (E, N, C)
        return (found * everywhere.T[:, :, None]).sum(dim=0)
