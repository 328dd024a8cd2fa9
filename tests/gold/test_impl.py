import numpy as np
import pytest

from trapline.gold.errors import DTypeError, RangeError, UnsupportedError
from trapline.gold.impl import choose

ALL = ("oracle", "torch", "kernels")


class CudaTensor:
    """Stands for a tensor on a device this machine does not have."""

    is_cuda = True


@pytest.fixture
def tensors(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch, "Tensor", (torch.Tensor, CudaTensor))
    return torch.zeros(2), CudaTensor()


def test_the_input_chooses(tensors):
    cpu, cuda = tensors
    assert choose("f", ALL, None, x=np.zeros(2)) == "oracle"
    assert choose("f", ALL, None, x=cpu) == "torch"
    assert choose("f", ALL, None, x=cuda) == "kernels"


def test_the_caller_overrides(tensors):
    cpu, cuda = tensors
    assert choose("f", ALL, "kernels", x=cpu) == "kernels"
    assert choose("f", ALL, "torch", x=cuda) == "torch"


def test_missing_implementation_is_an_error(tensors):
    cpu, cuda = tensors
    with pytest.raises(UnsupportedError, match=r"f has no 'kernels' .*; use impl='torch'"):
        choose("f", ("oracle", "torch"), None, x=cuda)
    with pytest.raises(UnsupportedError, match="no implementation takes CPU tensors"):
        choose("f", ("oracle",), None, x=cpu)
    with pytest.raises(DTypeError, match="impl='torch' does not take NumPy arrays"):
        choose("f", ALL, "torch", x=np.zeros(2))
    with pytest.raises(DTypeError, match="impl='oracle' does not take CPU tensors"):
        choose("f", ALL, "oracle", x=cpu)


def test_arrays_of_two_kinds_are_refused(tensors):
    with pytest.raises(DTypeError, match="x is one of the NumPy arrays, y"):
        choose("f", ALL, None, x=np.zeros(2), y=tensors[0])


def test_unknown_names_and_lists_are_refused():
    with pytest.raises(RangeError, match=r"impl must be one of oracle, torch, .*, got 'numpy'"):
        choose("f", ALL, "numpy", x=np.zeros(2))
    with pytest.raises(DTypeError, match="x must be a NumPy array or a torch tensor, got list"):
        choose("f", ALL, None, x=[1.0])
