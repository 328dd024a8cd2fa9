"""Maps the contract's calls to this answer's `forward` and `backward`."""

from layernorm import backward, forward


def layer_norm_forward(x, gamma, beta, eps=1e-5):
    """The result and the cache."""
    return forward(x, gamma, beta, eps)


def layer_norm_backward(dy, cache):
    """The three gradients."""
    return backward(dy, cache)
