"""Golden test of `flash_attention_backward`: the gradients of the whole score matrix."""

import importlib
from typing import Any

import numpy as np


def check(solution: Any) -> None:
    rng = np.random.default_rng(11)
    q, dout = rng.standard_normal((2, 1, 2, 5, 4))
    k, v = rng.standard_normal((2, 1, 2, 5, 4))
    for causal in (False, True):
        scores = q @ k.swapaxes(-1, -2) / 2.0
        if causal:
            scores = np.where(np.tri(5, dtype=bool), scores, -np.inf)
        lse = np.log(np.exp(scores).sum(axis=-1))
        weights = np.exp(scores - lse[..., None])
        out = weights @ v
        dweights = dout @ v.swapaxes(-1, -2)
        dscores = weights * (dweights - (weights * dweights).sum(axis=-1, keepdims=True)) / 2.0
        expected = dscores @ k, dscores.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ dout
        for tile in (8, 2):
            got = solution.flash_attention_backward(
                dout, q, k, v, out, lse, causal=causal, tile=tile
            )
            for name, gradient, right in zip(("dq", "dk", "dv"), got, expected, strict=True):
                what = f"{name}, causal={causal}, tile={tile}"
                np.testing.assert_allclose(gradient, right, rtol=1e-9, atol=1e-9, err_msg=what)


if __name__ == "__main__":
    check(importlib.import_module("solution"))
    print("the golden test passes")
