"""torch's own layer normalisation, compiled."""

import torch


@torch.compile(dynamic=False)
def _forward(x, gamma, beta, eps, y, mean, rstd):
    wide = x.float()
    variance, average = torch.var_mean(wide, dim=1, correction=0, keepdim=True)
    scale = torch.rsqrt(variance + eps)
    y.copy_((wide - average) * scale * gamma.float() + beta.float())
    mean.copy_(average[:, 0])
    rstd.copy_(scale[:, 0])


@torch.compile(dynamic=False)
def _backward(dy, x, gamma, mean, rstd, dx, dgamma, dbeta):
    normal = (x.float() - mean[:, None]) * rstd[:, None]
    weighted = dy.float() * gamma.float()
    shift = weighted.mean(dim=1, keepdim=True)
    slope = (weighted * normal).mean(dim=1, keepdim=True)
    dx.copy_((weighted - shift - normal * slope) * rstd[:, None])
    dgamma.copy_((dy.float() * normal).sum(dim=0))
    dbeta.copy_(dy.float().sum(dim=0))


def layer_norm_forward(x, gamma, beta, eps, y, mean, rstd):
    _forward(x, gamma, beta, eps, y, mean, rstd)


def layer_norm_backward(dy, x, gamma, mean, rstd, dx, dgamma, dbeta):
    _backward(dy, x, gamma, mean, rstd, dx, dgamma, dbeta)
