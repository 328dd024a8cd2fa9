"""Errors of the gradients against the naive way, and a digest of them."""

import hashlib

import numpy as np

from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_backward.cases import NAMES, draw, triple
from trapline.challenges.flash_attention_forward.cases import Shape
from trapline.gold.attention import oracle

#: The inputs are the same in each run, so that digests can be compared.
SEED = 25


def figures(submission: Submission, _: np.random.Generator) -> dict[str, float | str]:
    """By the names under which reports print them."""
    arguments = draw(Shape(T=64, S=64, D=32), np.random.default_rng(SEED), True)
    got = triple(submission.flash_attention_backward(*arguments, causal=True, tile=16))
    exact = oracle.attention_backward(*arguments[:4], causal=True)
    errors = {
        name: float(np.max(np.abs(g - e)) / np.max(np.abs(e)))
        for name, g, e in zip(NAMES, got, exact, strict=True)
    }
    whole = b"".join(np.ascontiguousarray(g).tobytes() for g in got)
    return {
        "gradient error": errors["dv"],
        "error of dq against the naive gradient": errors["dq"],
        "digest": hashlib.sha256(whole).hexdigest(),
    }
