"""Layer norm and RMS norm: checks the arguments and calls an implementation."""

import sys
from typing import Any, NamedTuple

from trapline.gold import checks
from trapline.gold.impl import Impl, choose
from trapline.gold.norms import TORCH_MOST, TORCH_MOST_RECORDED, oracle
from trapline.gold.replay import replayed

_OFFERED: tuple[Impl, ...] = ("oracle", "torch", "kernels")
#: Arguments of x's shape; the others are weights, one number per column.
_ROWS = ("x", "residual", "dy")


class Normed(NamedTuple):
    """Result of an RMS norm with a residual."""

    y: Any  # (..., D) the normed sum
    residual: Any  # (..., D) the sum itself, for the next residual


class LayerNormGradients(NamedTuple):
    """Gradients of a layer norm: dx in x's dtype, the others in the weight's or else in x's."""

    dx: Any  # (..., D)
    dweight: Any  # (D,), or None without a weight
    dbias: Any  # (D,)


@replayed
def layer_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    save_statistics: bool = True,
    impl: Impl | None = None,
) -> Any:
    """weight · (x − mean) / √(variance + eps) + bias over the last axis, in x's dtype.

    x is (..., D), weight and bias (D,) or None, in x's dtype; next to a 16-bit x both may be
    float32. NumPy arrays are computed in float64; torch tensors are differentiable in all three.
    Backward keeps x and two numbers per row; with `save_statistics=False` it recomputes the two
    numbers. Second derivatives raise an error, except on a CPU, where torch's layer norm serves.
    Autocast does what it does to torch's norms: on CUDA the result is float32.
    """
    if impl is None and save_statistics and _suits_torch(x, weight, bias, eps):
        torch = sys.modules["torch"]
        try:
            if torch.is_grad_enabled() and x.dtype.itemsize == 2:
                from trapline.gold.norms import reference

                return reference.torch_layer_norm(x, weight, bias, eps)[0]
            return torch.layer_norm(x, x.shape[-1:], weight, bias, eps)
        except (RuntimeError, TypeError):
            pass  # something does not fit: the checks say what
    x, weight, bias = _autocast(x=x, weight=weight, bias=bias)
    arrays = _present(x=x, weight=weight, bias=bias)
    chosen = choose("layer_norm", _OFFERED, impl, **arrays)
    _check(eps, arrays)
    if chosen == "oracle":
        gamma = 1.0 if weight is None else weight
        beta = 0.0 if bias is None else bias
        return oracle.layer_norm(x, gamma, beta, eps).astype(x.dtype)
    from trapline.gold.norms import registry

    y, _ = registry.norm(
        *(x, None, weight, bias, eps, chosen), centred=True, save_statistics=save_statistics
    )
    return y


@replayed
def layer_norm_backward(
    dy: Any, x: Any, weight: Any = None, eps: float = 1e-5, *, impl: Impl | None = None
) -> LayerNormGradients:
    """Gradients of ⟨dy, layer_norm(x, weight, bias, eps)⟩ with respect to x, weight and bias.

    dy and x are (..., D), weight (D,) or None; the bias does not occur in the gradients. NumPy
    arrays are computed in float64. Mean and variance are recomputed from x. The result carries no
    gradients of its own. The derivation: docs/components/layer_norm.md.
    """
    arrays = {"x": x, "dy": dy, **_present(x=x, weight=weight)}
    chosen = choose("layer_norm_backward", _OFFERED, impl, **arrays)
    _check(eps, arrays)
    found: tuple[Any, ...]
    if chosen == "oracle":
        exact = oracle.layer_norm_backward(dy, x, 1.0 if weight is None else weight, eps)
        found = tuple(gradient.astype(x.dtype) for gradient in exact)
    else:
        from trapline.gold.norms import registry

        found = registry.gradients(dy, x, weight, eps, chosen)
    dx, dweight, dbias = found
    return LayerNormGradients(dx, None if weight is None else dweight, dbias)


@replayed
def rms_norm(
    x: Any,
    weight: Any = None,
    eps: float = 1e-6,
    residual: Any = None,
    *,
    save_statistics: bool = True,
    impl: Impl | None = None,
) -> Any:
    """weight · x / √(mean(x²) + eps) over the last axis, in x's dtype.

    With a residual, x + residual is normed, and the sum is returned too: `Normed(y, residual)`.
    Dtypes and autocast are as for `layer_norm`. On a CPU torch's own RMS norm serves rows that fit
    in a core's cache, and keeps for backward what it needs.
    """
    if impl is None and residual is None and _suits_torch(x, weight, None, eps):
        torch = sys.modules["torch"]
        most = TORCH_MOST_RECORDED if torch.is_grad_enabled() else TORCH_MOST
        if 0 < x.numel() <= most * torch.get_num_threads():
            try:
                return torch.rms_norm(x, x.shape[-1:], weight, eps)
            except (RuntimeError, TypeError):
                pass  # something does not fit: the checks say what
    x, weight, residual = _autocast(x=x, weight=weight, residual=residual)
    arrays = _present(x=x, weight=weight, residual=residual)
    chosen = choose("rms_norm", _OFFERED, impl, **arrays)
    _check(eps, arrays)
    y: Any
    total: Any
    if chosen == "oracle":
        total = x if residual is None else x + residual
        gamma = 1.0 if weight is None else weight
        y = oracle.rms_norm(total, gamma, eps).astype(x.dtype)
    else:
        from trapline.gold.norms import registry

        y, total = registry.norm(
            *(x, residual, weight, None, eps, chosen),
            centred=False,
            save_statistics=save_statistics,
        )
    return y if residual is None else Normed(y, total)


def _present(**arrays: Any) -> dict[str, Any]:
    return {name: array for name, array in arrays.items() if array is not None or name == "x"}


def _check(eps: float, arrays: dict[str, Any]) -> None:
    checks.positive(eps=eps)
    checks.one_device(**arrays)
    rows = {name: array for name, array in arrays.items() if name in _ROWS}
    columns = {name: array for name, array in arrays.items() if name not in _ROWS}
    checks.axes(
        **{name: (array, "... D") for name, array in rows.items()},
        **{name: (array, "D") for name, array in columns.items()},
    )
    narrow = checks.dtype_name(arrays["x"]) in ("float16", "bfloat16")
    mixed = narrow and all(checks.dtype_name(array) == "float32" for array in columns.values())
    checks.floating(*checks.LOW_FLOATS, **(rows if mixed else arrays))


def _suits_torch(x: Any, weight: Any, bias: Any, eps: float) -> bool:
    """Whether torch's own function, if it takes these arguments, computes what is asked for.

    Then it is called at once: choosing and checking would take as long as a small norm.
    """
    if not getattr(x, "is_cpu", False) or type(eps) is not float or not 0.0 < eps < 1.0:
        return False
    torch, dtype = sys.modules["torch"], x.dtype
    if dtype is not torch.float32 and checks.dtype_name(x) not in checks.LOW_FLOATS:
        return False
    if torch.compiler.is_compiling():
        return False
    if dtype.itemsize == 2 and torch._C._are_functorch_transforms_active():
        return False  # the path of 16-bit norms with gradients is not made for them
    fits = weight is None or getattr(weight, "dtype", None) is dtype
    return fits and (bias is None or getattr(bias, "dtype", None) is dtype)


def _autocast(**tensors: Any) -> tuple[Any, ...]:
    """The tensors as CUDA's autocast gives them to torch's norms: in float32, float64 unchanged.

    The autocast of a CPU leaves norms alone.
    """
    x = tensors["x"]
    if not getattr(x, "is_cuda", False) or not sys.modules["torch"].is_autocast_enabled("cuda"):
        return tuple(tensors.values())
    return tuple(
        x.float() if x is not None and checks.dtype_name(x) in ("float16", "bfloat16") else x
        for x in tensors.values()
    )
