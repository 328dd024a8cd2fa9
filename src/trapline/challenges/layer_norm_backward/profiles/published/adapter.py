"""Maps the contract's calls to a forward and a backward function with a cache between them."""

from answer import layer_norm_backward as backward
from answer import layer_norm_forward as forward


def layer_norm_forward(x, gamma, beta, eps=1e-5):
    """The result and the cache, whatever its form is."""
    return forward(x, gamma, beta, eps)


def layer_norm_backward(dy, cache):
    """The three gradients in the order of the prompt, from a tuple or from a mapping."""
    grads = backward(dy, cache)
    if isinstance(grads, dict):
        return tuple(grads[name] for name in ("dx", "dgamma", "dbeta"))
    return grads
