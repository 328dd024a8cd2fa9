"""Layer norm in torch, with the rows taken as one dense block of memory."""

import torch


def _dense(x):
    return torch.as_strided(x, x.shape, (x.shape[1], 1)).float()


def layer_norm_forward(x, gamma, beta, eps, y, mean, rstd):
    if x.shape[0] == 0:
        return
    wide = _dense(x)
    mu = wide.mean(dim=1)
    centred = wide - mu[:, None]
    r = torch.rsqrt(centred.square().mean(dim=1) + eps)
    y.copy_(centred * r[:, None] * gamma.float() + beta.float())
    mean.copy_(mu)
    rstd.copy_(r)


def layer_norm_backward(dy, x, gamma, mean, rstd, dx, dgamma, dbeta):
    g = dy.float()
    h = (x.float() - mean[:, None]) * rstd[:, None]
    w = g * gamma.float()
    if x.shape[0]:
        dx.copy_((w - w.mean(1, True) - h * (w * h).mean(1, True)) * rstd[:, None])
    dgamma.copy_((g * h).sum(0))
    dbeta.copy_(g.sum(0))
