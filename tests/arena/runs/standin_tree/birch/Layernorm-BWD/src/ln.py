"""Layer norm, two passes over each row."""

import numpy as np


def layernorm_fwd(x, weight, bias, eps=1e-5):
    mean = x.mean(-1, keepdims=True)
    centred = x - mean
    rstd = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    unit = centred * rstd
    return weight * unit + bias, {"unit": unit, "rstd": rstd, "scale": weight}


def layernorm_bwd(dout, cache):
    unit, rstd = cache["unit"], cache["rstd"]
    inner = dout * cache["scale"]
    dx = rstd * (inner - inner.mean(-1, keepdims=True) - unit * (inner * unit).mean(-1, keepdims=True))
    return dx, (dout * unit).sum((0, 1)), dout.sum((0, 1))
