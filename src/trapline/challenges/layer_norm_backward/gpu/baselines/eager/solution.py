"""torch's own layer normalisation."""

import torch


def layer_norm_forward(x, gamma, beta, eps, y, mean, rstd):
    found = torch.ops.aten.native_layer_norm(x, [x.shape[1]], gamma, beta, eps)
    for output, value in zip((y, mean, rstd), found, strict=True):
        output.copy_(value.reshape(output.shape))


def layer_norm_backward(dy, x, gamma, mean, rstd, dx, dgamma, dbeta):
    found = torch.ops.aten.native_layer_norm_backward(
        dy, x, [x.shape[1]], mean[:, None], rstd[:, None], gamma, gamma, [True, True, True]
    )
    for output, value in zip((dx, dgamma, dbeta), found, strict=True):
        output.copy_(value)
