"""Attention problems shared by the tests of this component."""

import numpy as np
import pytest

#: B, H, G, T, S, D: square, cached prefix, empty rows, one query, grouped, no queries, no keys.
SHAPES = [
    (2, 4, 2, 17, 17, 5),
    (1, 2, 1, 5, 23, 4),
    (1, 2, 2, 23, 5, 4),
    (1, 6, 3, 1, 9, 3),
    (1, 2, 1, 0, 4, 3),
    (1, 2, 1, 4, 0, 3),
    (0, 2, 1, 3, 3, 3),
]
#: causal, window, softcap
RULES = [(False, None, 0.0), (True, None, 0.0), (False, 4, 0.0), (True, 3, 0.0), (True, None, 1.5)]


@pytest.fixture(params=SHAPES, ids=lambda shape: "B{}H{}G{}T{}S{}D{}".format(*shape))
def problem(request):
    """q, k, v, dout in float64."""
    B, H, G, T, S, D = request.param
    rng = np.random.default_rng(3)
    q, dout = rng.standard_normal((2, B, H, T, D))
    k, v = rng.standard_normal((2, B, G, S, D))
    return q, k, v, dout


@pytest.fixture(params=RULES, ids=lambda rules: "causal={} window={} softcap={}".format(*rules))
def rules(request):
    causal, window, softcap = request.param
    return {"causal": causal, "window": window, "softcap": softcap}
