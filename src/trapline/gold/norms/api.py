"""Layer norm and RMS norm: what is accepted, and who computes it."""

from typing import Any, NamedTuple

from trapline.gold import checks
from trapline.gold.impl import Impl, choose
from trapline.gold.norms import oracle

_OFFERED: tuple[Impl, ...] = ("oracle", "torch")


class Normed(NamedTuple):
    """What a residual RMS norm gives."""

    y: Any  # (..., D) the normed sum
    residual: Any  # (..., D) the sum itself, for the next residual


def layer_norm(
    x: Any, weight: Any, bias: Any, eps: float = 1e-5, *, impl: Impl | None = None
) -> Any:
    """weight · (x − mean) / √(variance + eps) + bias over the last axis, in x's dtype.

    x is (..., D), weight and bias (D,). NumPy arrays are computed in float64; torch tensors are
    differentiable in all three.
    """
    chosen = choose("layer_norm", _OFFERED, impl, x=x, weight=weight, bias=bias)
    _check(eps, x=(x, "... D"), weight=(weight, "D"), bias=(bias, "D"))
    if chosen == "oracle":
        return oracle.layer_norm(x, weight, bias, eps).astype(x.dtype)
    from trapline.gold.norms import fast

    return fast.layer_norm(x, weight, bias, eps)


def rms_norm(
    x: Any, weight: Any, eps: float = 1e-6, residual: Any = None, *, impl: Impl | None = None
) -> Any:
    """weight · x / √(mean(x²) + eps) over the last axis, in x's dtype.

    With a residual, x + residual is normed, and both come back: `Normed(y, residual)`.
    """
    extra = {} if residual is None else {"residual": residual}
    chosen = choose("rms_norm", _OFFERED, impl, x=x, weight=weight, **extra)
    with_axes = {name: (value, "... D") for name, value in extra.items()}
    _check(eps, x=(x, "... D"), weight=(weight, "D"), **with_axes)
    total = x if residual is None else x + residual
    y: Any
    if chosen == "oracle":
        y = oracle.rms_norm(total, weight, eps).astype(x.dtype)
    else:
        from trapline.gold.norms import fast

        y = fast.rms_norm(total, weight, eps)
    return y if residual is None else Normed(y, total)


def _check(eps: float, **arguments: tuple[Any, str]) -> None:
    checks.floating(*checks.LOW_FLOATS, **{name: array for name, (array, _) in arguments.items()})
    checks.axes(**arguments)
    checks.positive(eps=eps)
