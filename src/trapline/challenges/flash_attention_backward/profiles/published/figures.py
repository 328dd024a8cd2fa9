"""Errors of the gradients against the naive way, and memory at the size of the prompt's test."""

import numpy as np

from trapline.arena.judge.measure import weigh
from trapline.arena.judge.traps import Call
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_backward.cases import NAMES, Saved, draw, triple
from trapline.challenges.flash_attention_forward.cases import Shape
from trapline.gold.attention import oracle


def figures(submission: Submission, rng: np.random.Generator) -> dict[str, float]:
    """By the names under which reports print them."""
    arguments = draw(Shape(T=64, S=64, D=32), rng, True)
    got = triple(submission.flash_attention_backward(*arguments, causal=True, tile=16))
    exact = oracle.attention_backward(*arguments[:4], causal=True)
    errors = {
        name: float(np.max(np.abs(g - e)) / np.max(np.abs(e)))
        for name, g, e in zip(NAMES, got, exact, strict=True)
    }
    before, peak = weigh(submission, rng, _at, 128, 4096)
    return {
        "gradient error": errors["dv"],
        "error of dq against the naive gradient": errors["dq"],
        "peak memory of the gradient at N = 4096": (peak - before) / 1e6,
    }


def _at(_: Submission, rng: np.random.Generator, size: int) -> Call:
    """One head in float64, as the prompt's test of memory has it; out and lse are any."""
    q, k, v = Shape(T=size, S=size, D=64).draw(rng)
    out, lse = rng.standard_normal(q.shape), np.full(q.shape[:3], 10.0)
    arguments: Saved = rng.standard_normal(q.shape), q, k, v, out, lse
    settings = {"causal": True, "tile": 128}
    return Call("flash_attention_backward", arguments, settings)
