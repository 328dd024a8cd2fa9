import numpy as np
from solution import flash_attention, flash_attention_backward


def test_dv_one_element():
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.normal(size=(4, 1, 1, 6, 4))
    out, lse = flash_attention(q, k, v)
    dq, dk, dv = flash_attention_backward(dout, q, k, v, out, lse)
    step = np.zeros_like(v)
    step[0, 0, 1, 2] = 1e-6
    slope = np.sum(dout * (flash_attention(q, k, v + step)[0] - out)) / 1e-6
    assert abs(slope - dv[0, 0, 1, 2]) < 1e-4
