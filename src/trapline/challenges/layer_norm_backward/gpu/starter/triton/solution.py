"""Layer normalisation. See prompt.md; write into the outputs, return nothing."""

import torch
import triton
import triton.language as tl


def layer_norm_forward(x, gamma, beta, eps, y, mean, rstd):
    raise RuntimeError("layer_norm_forward is not written yet")


def layer_norm_backward(dy, x, gamma, mean, rstd, dx, dgamma, dbeta):
    raise RuntimeError("layer_norm_backward is not written yet")
