import numpy as np
import pytest

from trapline.gold import checks
from trapline.gold.errors import DTypeError, RangeError, ShapeError


def test_axes_gives_the_size_of_every_letter():
    x, weight = np.zeros((2, 3, 4)), np.zeros(4)
    assert checks.axes(x=(x, "B T D"), weight=(weight, "D")) == {"B": 2, "T": 3, "D": 4}


def test_leading_axes_are_free_but_equal():
    a, b = np.zeros((5, 2, 4)), np.zeros((5, 2, 4))
    assert checks.axes(a=(a, "... D"), b=(b, "... D")) == {"D": 4}
    with pytest.raises(ShapeError, match=r"b has leading axes \(2, 5\), but a has \(5, 2\)"):
        checks.axes(a=(a, "... D"), b=(np.zeros((2, 5, 4)), "... D"))


@pytest.mark.parametrize(
    ("shape", "letters", "sentence"),
    [
        ((2, 3), "B T D", r"x must have axes \(B T D\), got shape \(2, 3\)"),
        ((), "... D", r"x must have axes \(... D\), got shape \(\)"),
        ((3, 4), "N N", "x has N = 4, but an earlier argument has 3"),
    ],
)
def test_a_shape_that_does_not_fit_is_named(shape, letters, sentence):
    with pytest.raises(ShapeError, match=sentence):
        checks.axes(x=(np.zeros(shape), letters))


def test_floating_requires_one_allowed_dtype():
    checks.floating("float32", "float64", x=np.zeros(2), y=np.zeros(3))
    with pytest.raises(DTypeError, match="x must be float32 or float64, got int64"):
        checks.floating("float32", "float64", x=np.zeros(2, int))
    with pytest.raises(DTypeError, match="got x float64, y float32"):
        checks.floating("float32", "float64", x=np.zeros(2), y=np.zeros(3, np.float32))


def test_floating_reads_torch_dtypes():
    torch = pytest.importorskip("torch")
    checks.floating("bfloat16", x=torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(DTypeError, match="got float32"):
        checks.floating("bfloat16", x=torch.zeros(2))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_positive_refuses(value):
    with pytest.raises(RangeError, match="eps must be positive and finite"):
        checks.positive(eps=value)


def test_integer_between():
    checks.integer_between(1, 4, k=np.int32(4))
    for wrong in (0, 5):
        with pytest.raises(RangeError, match="k must be between 1 and 4"):
            checks.integer_between(1, 4, k=wrong)
    for wrong in (2.0, True, "2"):
        with pytest.raises(DTypeError, match="k must be an integer"):
            checks.integer_between(1, 4, k=wrong)


def test_arrays_refuses_lists():
    checks.arrays(x=np.zeros(2))
    with pytest.raises(DTypeError, match="x must be an array, got list"):
        checks.arrays(x=[1.0])
