"""How an operation finds its tier and its device."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from trapline.gold.attention.dense import tiers as kernels  # noqa: E402
from trapline.gold.errors import UnsupportedError  # noqa: E402


@pytest.fixture
def current(monkeypatch):
    """A second GPU, as far as a machine without one can have it: whose device is current."""
    entered = []

    class DeviceOf:
        def __init__(self, tensor):
            self.tensor = tensor

        def __enter__(self):
            entered.append(self.tensor)

        def __exit__(self, *_):
            entered.pop()

    monkeypatch.setattr(torch.cuda, "device_of", DeviceOf)
    return entered


@pytest.mark.parametrize("operation", kernels.OPERATIONS)
def test_kernels_are_launched_where_their_first_tensor_is(monkeypatch, current, operation):
    """Whichever device is current: a launch would go there, and read the other one's addresses."""
    seen = []
    tier = kernels.Kernel(lambda *arguments: seen.append((arguments, list(current))))
    monkeypatch.setitem(kernels.OPERATIONS, operation, {"triton": tier})
    first = torch.zeros(1)
    kernels.by_default(operation)(first, 1)
    kernels.by_tier(operation, "triton")(first, 1)
    assert seen == [((first, 1), [first])] * 2
    assert current == []


def test_a_tier_without_the_operation_says_so():
    with pytest.raises(UnsupportedError, match="varlen_forward"):
        kernels.by_tier("varlen_forward", "hopper")(torch.zeros(1))
