"""Golden test of `layer_norm_backward`: central differences of the forward pass."""

import importlib
from typing import Any

import numpy as np

STEP = 1e-6


def check(solution: Any) -> None:
    rng = np.random.default_rng(5)
    x, dy = rng.standard_normal((2, 2, 3, 4)) + 1.0
    gamma, beta = rng.standard_normal((2, 4)) + 2.0
    _, cache = solution.layer_norm_forward(x, gamma, beta)
    got = solution.layer_norm_backward(dy, cache)
    for place, name in enumerate(("dx", "dgamma", "dbeta")):
        expected = numerical(solution, [x, gamma, beta], place, dy)
        np.testing.assert_allclose(got[place], expected, rtol=1e-5, atol=1e-6, err_msg=name)


def numerical(solution: Any, inputs: list[np.ndarray], place: int, dy: np.ndarray) -> np.ndarray:
    """The gradient of sum(dy * y) with respect to one of the inputs."""
    gradient = np.zeros_like(inputs[place])
    for index in np.ndindex(gradient.shape):
        losses = []
        for step in (STEP, -STEP):
            moved = [array.copy() for array in inputs]
            moved[place][index] += step
            y, _ = solution.layer_norm_forward(*moved)
            losses.append(float((dy * y).sum()))
        gradient[index] = (losses[0] - losses[1]) / (2 * STEP)
    return gradient


if __name__ == "__main__":
    check(importlib.import_module("solution"))
    print("the golden test passes")
