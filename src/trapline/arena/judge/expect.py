"""What cases and traps say about an answer. Each function raises `Violation` with the reason."""

from collections.abc import Callable
from typing import Any

import numpy as np

from trapline.arena.errors import SubmissionRaised, Violation


def that(condition: bool, message: str) -> None:
    if not condition:
        raise Violation(message)


def array(got: Any, *, shape: tuple[int, ...], dtype: Any, what: str = "the answer") -> np.ndarray:
    """`got` is an array of exactly this shape and dtype."""
    if not isinstance(got, np.ndarray):
        raise Violation(f"{what} is a {type(got).__name__}, not an array")
    if got.shape != tuple(shape):
        raise Violation(f"{what} has shape {got.shape}, expected {tuple(shape)}")
    if got.dtype != np.dtype(dtype):
        raise Violation(f"{what} has dtype {got.dtype}, expected {np.dtype(dtype)}")
    return got


def equal(got: Any, want: Any, what: str = "the answer") -> None:
    """Arrays: same shape, dtype and values (NaN equals NaN); else `==` and the same kind."""
    if isinstance(want, np.ndarray):
        got = array(got, shape=want.shape, dtype=want.dtype, what=what)
        same = (got == want) | ((got != got) & (want != want))
        if not np.all(same):
            raise Violation(f"{what} differs in {_where(~same, got, want)}")
        return
    that(
        type(got) is type(want) and got == want,
        f"{what} is {_brief(got)}, expected {_brief(want)}",
    )


def close(
    got: Any, want: Any, *, rtol: float = 0.0, atol: float = 0.0, what: str = "the answer"
) -> None:
    """Same shape, |got − want| ≤ atol + rtol·|want|, infinities and NaN at the same places."""
    want = np.asarray(want)
    got = array(got, shape=want.shape, dtype=getattr(got, "dtype", None), what=what)
    if got.dtype.kind != want.dtype.kind:  # the names take longer than a small comparison
        raise Violation(f"{what} has dtype {got.dtype}, expected {want.dtype}")
    wide = got.astype(np.float64), want.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        near = np.abs(wide[0] - wide[1]) <= atol + rtol * np.abs(wide[1])
    if near.all() and np.isfinite(wide[1]).all():
        return
    good = np.isclose(*wide, rtol=rtol, atol=atol, equal_nan=True)
    if not np.all(good):
        raise Violation(f"{what} is off in {_where(~good, got, want)}")


def raises(
    kinds: type[Exception] | tuple[type[Exception], ...],
    call: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> None:
    """The call with these arguments raises one of these exceptions (or one derived from them)."""
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    names = " or ".join(kind.__name__ for kind in kinds)
    try:
        answer = call(*args, **kwargs)
    except SubmissionRaised as raised:
        if not {kind.__name__ for kind in kinds} & {raised.kind, *raised.bases}:
            raise Violation(f"{raised} where {names} was due") from None
        return
    raise Violation(f"accepted what {names} should refuse, and answered {_brief(answer)}")


def _where(bad: np.ndarray, got: np.ndarray, want: np.ndarray) -> str:
    first = tuple(int(i) for i in np.argwhere(bad)[0])
    place = f" first at {list(first)}" if first else ""
    return (
        f"{int(np.count_nonzero(bad))} of {bad.size} elements,{place}: "
        f"got {got[first]!s}, expected {want[first]!s}"
    )


def _brief(value: Any, limit: int = 120) -> str:
    if isinstance(value, np.ndarray):
        return f"an array {value.dtype}{list(value.shape)}"
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
