"""Problems that several traps are built from."""

from typing import Any

import numpy as np

from trapline.challenges.layer_norm_backward.cases import Problem, Rng, problem


def plain(rng: Rng, *args: Any, **kwargs: Any) -> Problem:
    """A problem with gamma = 1: a bug in the handling of gamma has traps of its own."""
    p = problem(rng, *args, **kwargs)
    return p._replace(gamma=np.ones_like(p.gamma))
