"""The error of the prompt's first test: N = 256, D = 64, tiles of 64, causal."""

import numpy as np

from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_forward.cases import Shape, pair
from trapline.gold.attention import oracle


def figures(submission: Submission, rng: np.random.Generator) -> dict[str, float]:
    """By the names under which reports print them."""
    q, k, v = Shape(T=256, S=256, D=64).draw(rng)
    got = np.asarray(pair(submission.flash_attention(q, k, v, causal=True, tile=64))[0])
    exact, _ = oracle.attention(q, k, v, causal=True)
    return {"relative error": float(np.max(np.abs(got - exact)) / np.max(np.abs(exact)))}
