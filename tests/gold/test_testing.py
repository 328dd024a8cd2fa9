import numpy as np
import pytest

from trapline.gold import testing
from trapline.gold.norms import oracle


@pytest.fixture
def problem():
    """A layer norm of a real size, with its gradients."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((4, 256, 1024))
    gamma, beta = rng.standard_normal((2, 1024))
    dy = rng.standard_normal(x.shape)
    return (x, gamma, beta), dy, list(oracle.layer_norm_backward(dy, x, gamma))


def test_a_right_gradient_of_a_million_elements_passes(problem):
    inputs, dy, grads = problem
    calls = []

    def forward(*args):
        calls.append(args)
        return oracle.layer_norm(*args)

    errors = testing.gradient_errors(forward, grads, inputs, dy, directions=2)
    assert max(errors) < 1e-7
    assert len(calls) == 2 * 2 * 3  # two a direction, two directions, three inputs


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_wrong_element_is_seen(place):
    rng = np.random.default_rng(2)
    inputs = (rng.standard_normal((3, 4, 16)), *rng.standard_normal((2, 16)))
    dy = rng.standard_normal((3, 4, 16))
    grads = list(oracle.layer_norm_backward(dy, inputs[0], inputs[1]))
    right = testing.gradient_errors(oracle.layer_norm, grads, inputs, dy)
    assert max(right) < 1e-8
    grads[place] = grads[place].copy()
    grads[place].flat[-1] += 1e-3
    wrong = testing.gradient_errors(oracle.layer_norm, grads, inputs, dy)
    assert wrong[place] > 1e-6
    assert [e for i, e in enumerate(wrong) if i != place] == [
        e for i, e in enumerate(right) if i != place
    ]


def test_relative_error_has_a_floor():
    assert testing.relative_error([0.0], [0.0]) == 0.0
    assert testing.relative_error([1e-13], [0.0]) == pytest.approx(0.1)
    assert testing.relative_error([2.0], [1.0]) == 0.5


def test_largest_error_treats_infinities_as_values():
    assert testing.largest_error([1.0, -np.inf], [1.5, -np.inf]) == 0.5
    assert testing.largest_error([np.inf], [-np.inf]) == np.inf
    assert testing.largest_error([np.nan], [1.0]) == np.inf
    assert testing.largest_error(np.zeros((0, 3)), np.zeros((0, 3))) == 0.0
    with pytest.raises(AssertionError, match="shape"):
        testing.largest_error([1.0], [1.0, 1.0])


def test_a_budget_is_kept_or_named():
    exact = np.array([1.0, 2.0])
    careful = np.array([1.0, 2.0 + 1e-6], np.float32)
    testing.assert_within_budget(exact + 1.5e-6, exact, careful)
    with pytest.raises(AssertionError, match="dx is off by 1e-05, the budget is"):
        testing.assert_within_budget(exact + 1e-5, exact, careful, what="dx")
