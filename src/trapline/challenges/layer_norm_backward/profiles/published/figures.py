"""Errors of the gradients in float64, and how many items the cache holds."""

import numpy as np

from trapline.arena.process.proxy import Submission
from trapline.challenges.layer_norm_backward.cases import forward, problem, three
from trapline.gold.norms import oracle


def figures(submission: Submission, rng: np.random.Generator) -> dict[str, float]:
    """By the names under which reports print them."""
    p = problem(rng, (4, 8, 16))
    _, cache = forward(submission, p)
    got = three(submission.layer_norm_backward(p.dy, cache))
    exact = oracle.layer_norm_backward(p.dy, p.x, p.gamma, p.eps)
    found = {
        f"relative error of {name}": float(np.linalg.norm(g - e) / np.linalg.norm(e))
        for name, g, e in zip(("dx", "dgamma", "dbeta"), got, exact, strict=True)
    }
    found["largest error of dx"] = float(np.max(np.abs(got[0] - exact[0])))
    if isinstance(cache, tuple | list | dict):
        found["items in the cache"] = float(len(cache))
    return found
