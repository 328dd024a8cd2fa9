import numpy as np
from solution import make_cache


def test_roundtrip():
    c = make_cache("paged", num_layers=1, num_kv_heads=2, head_dim=4, block_size=4, num_blocks=4)
    s = c.add()
    k = np.random.randn(1, 2, 4)
    c.append(s, 0, k, k)
    assert np.allclose(c.view(s, 0)[0], k)
    assert c.attend(s, 0, k).shape == (1, 2, 4)
