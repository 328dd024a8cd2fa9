"""How a problem finds its tier and its device."""

from unittest.mock import MagicMock

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from trapline.gold.attention.dense import dense_problem, registry  # noqa: E402
from trapline.gold.errors import DTypeError, RangeError, UnsupportedError  # noqa: E402


@pytest.mark.parametrize("impl", ["kernels", "triton"])
def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch, entered, impl):
    """A launch goes to the current device, which may be another one than the tensors'."""
    seen = []
    tier = registry.Tier(lambda *_: seen.append(list(entered)), lambda _: None, lambda _: True)
    q = MagicMock(is_cuda=True)
    problem = dense_problem(q, q, q)
    for tiers in ("forward_tiers", "backward_tiers"):
        monkeypatch.setattr(registry, tiers, lambda: {"triton": tier})
    with registry._on_its_device(problem):
        registry.tier_for(problem, impl, registry.forward_tiers())[1].run(problem)
    assert seen == [[q]]
    assert entered == []


def test_unsupported_problems_are_rejected_with_the_reason(monkeypatch):
    monkeypatch.setattr(registry, "_require_gpu", lambda *_: None)
    x = torch.zeros(1, 1, 8, 64, dtype=torch.float16)
    ends = torch.zeros(2, dtype=torch.int32)
    packed = dense_problem(x, x, x)._replace(cu_q=ends, cu_k=ends)
    with pytest.raises(UnsupportedError, match="packed sequences; use impl='triton'"):
        registry.tier_for(packed, "hopper", registry.forward_tiers())
    wide = torch.zeros(1, 1, 8, 320)
    with pytest.raises(RangeError, match="wider than 256, got 320"):
        registry.tier_for(dense_problem(wide, wide, wide), "triton", registry.backward_tiers())
    problem = dense_problem(x.double(), x.double(), x.double())
    with pytest.raises(DTypeError, match="float64"):
        registry.tier_for(problem, "kernels", registry.forward_tiers())


@pytest.mark.parametrize("impl", ["kernels", "triton", "hopper"])
def test_kernels_reject_cpu_tensors(impl):
    x = torch.zeros(1, 1, 8, 64)
    with pytest.raises(UnsupportedError, match=f"impl='{impl}' needs CUDA tensors"):
        registry.forward_operator(*dense_problem(x, x, x), impl)
