"""The formulas in float32, a slab of rows at a time."""

import torch

SLAB = 4096


def layer_norm_forward(x, gamma, beta, eps, y, mean, rstd):
    for first in range(0, x.shape[0], SLAB):
        rows = slice(first, first + SLAB)
        wide = x[rows].float()
        average = wide.mean(dim=1, keepdim=True)
        centred = wide - average
        scale = torch.rsqrt(centred.square().mean(dim=1, keepdim=True) + eps)
        y[rows] = (centred * scale * gamma.float() + beta.float()).to(y.dtype)
        mean[rows] = average[:, 0]
        rstd[rows] = scale[:, 0]


def layer_norm_backward(dy, x, gamma, mean, rstd, dx, dgamma, dbeta):
    total = torch.zeros((2, x.shape[1]), dtype=torch.float32, device=x.device)
    for first in range(0, x.shape[0], SLAB):
        rows = slice(first, first + SLAB)
        scale = rstd[rows, None]
        normal = (x[rows].float() - mean[rows, None]) * scale
        gradient = dy[rows].float()
        weighted = gradient * gamma.float()
        shift = weighted.mean(dim=1, keepdim=True)
        slope = (weighted * normal).mean(dim=1, keepdim=True)
        dx[rows] = ((weighted - shift - normal * slope) * scale).to(dx.dtype)
        total[0] += (gradient * normal).sum(dim=0)
        total[1] += gradient.sum(dim=0)
    dgamma.copy_(total[0])
    dbeta.copy_(total[1])
