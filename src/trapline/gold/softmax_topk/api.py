"""Softmax fused with top-k: checks the arguments and calls an implementation."""

from typing import Any, NamedTuple

import numpy as np

from trapline.gold import checks
from trapline.gold.errors import DTypeError, RangeError
from trapline.gold.impl import Impl, choose
from trapline.gold.replay import replayed
from trapline.gold.softmax_topk import oracle

#: Logits of up to 10⁸ can be divided by it in float32.
SMALLEST_TEMPERATURE = 1e-30
_OFFERED: tuple[Impl, ...] = ("oracle", "torch", "kernels")


class TopK(NamedTuple):
    """The k largest logits of each row."""

    values: Any  # (N, K) probabilities, or their logarithms, in the logits' dtype
    indices: Any  # (N, K) int64
    lse: Any  # (N,) natural log of Σ exp(logit / temperature), float32 (float64 for float64)


@replayed
def softmax_topk(
    logits: Any,
    k: int,
    *,
    temperature: Any = 1.0,
    log_probs: bool = False,
    check: bool | None = None,
    impl: Impl | None = None,
) -> TopK:
    """The k most probable of V for each row, best first, ties to the lower index.

    logits is (N, V); probabilities are over all V; temperature is a number, or an array (N,) with
    one for each row. A −inf logit has probability 0. The result carries no gradients.

    `check` reads the values and refuses rows with NaN or +inf, rows that are all −inf, and
    temperatures that are not positive. By default it is on for NumPy arrays and CPU tensors, and
    off for CUDA tensors, where it would wait for the device and prevent capture in a CUDA graph,
    and under `torch.compile`.
    Without it NaN ranks above everything, as in torch, and the probabilities of such a row are NaN.
    NumPy arrays are always checked.
    """
    chosen = choose("softmax_topk", _OFFERED, impl, logits=logits)
    checks.floating(*checks.LOW_FLOATS, logits=logits)
    vocabulary = checks.axes(logits=(logits, "N V"))["V"]
    checks.integer_between(1, vocabulary, k=k)
    check = checks.reads_values(check, logits)
    _check_temperature(temperature, logits, check)
    if chosen == "oracle":
        return _by_oracle(logits, int(k), temperature, log_probs)
    by = _by_kernels if chosen == "kernels" else _by_torch
    found, row_max = by(logits.detach(), int(k), temperature, log_probs)
    if check:
        _refuse_rows_without_a_softmax(row_max)
    return found


def _check_temperature(temperature: Any, logits: Any, check: bool) -> None:
    if not hasattr(temperature, "shape"):
        if isinstance(temperature, list | tuple):
            raise DTypeError(
                "temperature must be a number or an array with one number per row, "
                f"got {temperature!r}"
            )
        checks.positive(temperature=temperature)
        if temperature < SMALLEST_TEMPERATURE and checks.dtype_name(logits) != "float64":
            raise RangeError(
                f"temperature must be at least {SMALLEST_TEMPERATURE}, got {temperature}"
            )
        return
    if temperature.shape == ():
        if check:
            checks.positive(temperature=temperature)
        return
    if isinstance(temperature, np.ndarray) != isinstance(logits, np.ndarray):
        raise DTypeError(
            "temperature and logits must both be NumPy arrays or both tensors, "
            f"got {type(temperature).__name__} and {type(logits).__name__}"
        )
    checks.axes(logits=(logits, "N V"), temperature=(temperature, "N"))
    if check and not bool((temperature > 0.0).all() and (temperature < float("inf")).all()):
        raise RangeError("every row's temperature must be positive and finite")


def _by_oracle(logits: Any, k: int, temperature: Any, log_probs: bool) -> TopK:
    ranked = oracle.softmax_topk(logits, k, temperature)
    values = ranked.log_probs if log_probs else ranked.probs
    wide = np.float64 if logits.dtype == np.float64 else np.float32
    return TopK(values.astype(logits.dtype), ranked.indices, ranked.lse.astype(wide))


def _by_torch(logits: Any, k: int, temperature: Any, log_probs: bool) -> tuple[TopK, Any]:
    from trapline.gold.softmax_topk import reference

    found = reference.softmax_topk(logits, k, temperature)
    values = found.log_probs if log_probs else found.log_probs.exp()
    return TopK(values.to(logits.dtype), found.indices, found.lse), found.row_max


def _by_kernels(logits: Any, k: int, temperature: Any, log_probs: bool) -> tuple[TopK, Any]:
    from trapline.gold.softmax_topk.triton import topk as kernels

    found = kernels.softmax_topk(logits, k, temperature, log_probs)
    return TopK(found.values, found.indices, found.lse), found.row_max


def _refuse_rows_without_a_softmax(row_max: Any) -> None:
    from trapline.gold.softmax_topk import reference

    if not reference.every_row_has_a_softmax(row_max):
        raise RangeError("a row of logits contains NaN or +inf, or is all -inf")
