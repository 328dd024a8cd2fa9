"""Whether a submission and a mutant gave the same wrong answers to the same calls."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from trapline.arena.process.proxy import RemoteObject, Stub
from trapline.arena.process.transcript import Exchange, Transcript

#: Two right computations of the same formula differ by less than this share of the largest value,
#: by the width of the numbers in bytes.
_ROUNDING = {2: 4e-3, 4: 1e-4, 8: 1e-8, 16: 1e-8}
#: Of the distance to the right answer: what two forms of the same bug may differ by.
_SAME_ERROR = 0.02
#: Relative errors of float64 numbers that went through float32, and the factor by which two such
#: errors may differ: where they were rounded on the way is another matter in every code.
_THROUGH_SINGLE = (2.0**-28, 2.0**-18)
#: The same for float32 numbers of a GPU that went through its narrower formats.
_THROUGH_HALF = (2.0**-17, 2.0**-6)
_SAME_NOISE = 16.0
_PROPORTIONAL = 0.9
#: Of the largest of several measured errors: what another draw may bring or take away.
_SMALL_PART = 0.1
Mask = np.ndarray
#: Where the submission is wrong, where the mutant is wrong, where the two agree, and where the
#: submission gives a value that says something: not nothing, zero, infinity or an exception.
Masks = tuple[Mask, Mask, Mask, Mask]


class Opaque:
    """Stands for an object that stays in its own process."""


@dataclass(frozen=True)
class Comparison:
    """Element by element: where the submission is wrong, where the mutant is, where they agree."""

    wrong: Mask
    mutant_wrong: Mask
    same: Mask
    #: Where the submission's answer is a value, other than zero.
    telling: Mask
    #: Both checks ended after the same number of calls.
    same_end: bool

    @property
    def is_same(self) -> bool:
        """The same wrong answers throughout."""
        return self.same_end and bool(np.all(self.same)) and bool(np.any(self.wrong))

    @property
    def is_telling(self) -> bool:
        """Among the wrong elements that both have is one that few bugs would give: many answer
        nothing, zero or an exception."""
        return bool(np.any(self.explained & self.telling))

    @property
    def contains_mutant(self) -> bool:
        """The submission has every wrong element of the mutant, and perhaps others."""
        return bool(np.any(self.mutant_wrong)) and bool(np.all(self.same[self.mutant_wrong]))

    @property
    def is_right(self) -> bool:
        """Neither has a wrong answer: the check failed for what it saw beside the answers."""
        return self.same_end and not np.any(self.wrong) and not np.any(self.mutant_wrong)

    @property
    def explained(self) -> Mask:
        """The submission's wrong elements that the mutant has, too."""
        return np.asarray(self.wrong & self.mutant_wrong & self.same)

    def unexplained(self, others: Mask) -> bool:
        """This mutant explains wrong elements that the others leave open."""
        length = min(len(others), len(self.wrong))
        return bool(np.any(self.explained[:length] & ~others[:length]))


def compare(
    got: Transcript, mutant: Transcript, right: Transcript, *, lowered: bool = False
) -> Comparison:
    """Answers to the calls that all three were asked.

    With `lowered`, float32 numbers may have gone through a GPU's narrower formats.
    """
    masks: list[Masks] = []
    exchanges = zip(got.exchanges, mutant.exchanges, right.exchanges, strict=False)
    for mine, theirs, gold in exchanges:
        masks += _exchange(mine, theirs, gold, lowered)
        if mine.entry != theirs.entry:
            break
    wrong, mutant_wrong, same, telling = (
        np.concatenate(parts) if parts else np.zeros(0, bool)
        for parts in ([m[i] for m in masks] for i in range(4))
    )
    same_end = len(got.exchanges) == len(mutant.exchanges)
    return Comparison(wrong, mutant_wrong, same, telling, same_end)


def _exchange(mine: Exchange, theirs: Exchange, gold: Exchange, lowered: bool) -> Iterator[Masks]:
    if mine.returned and theirs.returned and gold.returned:
        yield from _values(mine.answer, theirs.answer, gold.answer, lowered)
    elif mine.returned and theirs.returned:
        # Both accept what the contract refuses; what they then answer is arbitrary.
        yield _one(True, True, True)
    else:
        outcomes = [
            exchange.raised or ("died" if exchange.died else "returned")
            for exchange in (mine, theirs, gold)
        ]
        same = outcomes[0] == outcomes[1] and mine.entry == theirs.entry
        yield _one(outcomes[0] != outcomes[2], outcomes[1] != outcomes[2], same)


def _one(wrong: bool, mutant_wrong: bool, same: bool, telling: bool = False) -> Masks:
    return np.array([wrong]), np.array([mutant_wrong]), np.array([same]), np.array([telling])


def is_telling(value: Any) -> bool:
    """Not empty, zero, infinite or without a value throughout."""
    if isinstance(value, list | tuple):
        return any(map(is_telling, value))
    if isinstance(value, dict):
        return any(map(is_telling, value.values()))
    if _is_number(value):
        return bool(np.any(_telling(np.asarray(value))))
    return value is not None and not _is_opaque(value)


def _telling(values: np.ndarray) -> Mask:
    if values.dtype.kind not in "biufc":  # such as integers beyond 64 bits
        return np.ones(values.shape, bool)
    return np.asarray(np.isfinite(values) & (values != 0))


def _values(mine: Any, theirs: Any, right: Any, lowered: bool) -> Iterator[Masks]:
    kinds = {_kind(value) for value in (mine, theirs, right)}
    if len(kinds) == 1 and isinstance(mine, list | tuple):
        for items in zip(mine, theirs, right, strict=True):
            yield from _values(*items, lowered)
    elif len(kinds) == 1 and isinstance(mine, dict):
        for key, value in mine.items():
            yield from _values(value, theirs[key], right[key], lowered)
    elif len(kinds) == 1 and isinstance(mine, np.ndarray):
        yield from _arrays(mine, theirs, right, lowered)
    else:
        agree = equal_values(mine, theirs) or _same_wrong_dtype(mine, theirs, right)
        wrong, mutant_wrong = not equal_values(mine, right), not equal_values(theirs, right)
        yield _one(wrong, mutant_wrong, agree, is_telling(mine))


def _same_wrong_dtype(mine: Any, theirs: Any, right: Any) -> bool:
    """Both have the same other dtype than the right answer, and equal values within the rounding of
    the narrower one: where code widens or narrows its numbers is another matter."""
    if not all(isinstance(value, np.ndarray) for value in (mine, theirs, right)):
        return False
    if (
        mine.dtype != theirs.dtype
        or mine.dtype == right.dtype
        or mine.dtype.kind != right.dtype.kind
    ):
        return False
    narrower = min(mine.dtype, right.dtype, key=lambda dtype: dtype.itemsize)
    return _equal_numbers(mine.astype(narrower), theirs.astype(narrower))


def _kind(value: Any) -> Any:
    """Values of the same kind are compared part by part."""
    if isinstance(value, np.ndarray):
        return "array", value.shape, value.dtype
    if isinstance(value, list | tuple):
        return "sequence", len(value)
    if isinstance(value, dict):
        return "dict", frozenset(value)
    return "value"


def _arrays(mine: Mask, theirs: Mask, right: Mask, lowered: bool) -> Iterator[Masks]:
    if mine.dtype.kind not in "fc":
        masks = mine != right, theirs != right, mine == theirs, mine != 0
        yield tuple(mask.ravel() for mask in masks)
        return
    a, b, exact = (value.astype(np.complex128).ravel() for value in (mine, theirs, right))
    real = mine.real.dtype
    rounding, eps = _ROUNDING[real.itemsize], float(np.finfo(real).eps)
    with np.errstate(all="ignore"):
        scale = _largest(exact) or _largest(a)
        error = _finite(np.abs(a - exact))
        largest = float(np.max(error, initial=0.0))
        is_rounding = largest < 10 * rounding * scale and bool(np.all(_both_finite(a, exact)))
        if is_rounding:  # an error of rounding must be the same one
            allowed = np.full(a.shape, 32 * eps * scale)
        else:
            allowed = np.maximum(rounding * scale, _SAME_ERROR * error)
            allowed = np.minimum(allowed, max(0.1 * largest, 32 * eps * scale))
        wrong, mutant_wrong = ~_close(a, exact, allowed), ~_close(b, exact, allowed)
        same = _close(a, b, allowed)
        single = is_rounding and real.itemsize == 8
        half = lowered and real.itemsize == 4 and bool(np.all(_both_finite(a, exact)))
        noise = _THROUGH_SINGLE if single else _THROUGH_HALF if half else None
        if noise is not None and _same_noise(a, b, exact, scale, noise):
            same = np.ones_like(same)
        yield wrong, mutant_wrong, same, _telling(a)


def _same_noise(a: Mask, b: Mask, exact: Mask, scale: float, bounds: tuple[float, float]) -> bool:
    """Both are wrong as by rounding on the way, by about as much, and not by a common factor."""
    if any(_is_factor(value - exact, exact) for value in (a, b)):
        return False
    errors = sorted(float(np.max(np.abs(value - exact), initial=0.0)) for value in (a, b))
    low, high = (bound * scale for bound in bounds)
    return low <= errors[0] and errors[1] <= min(high, _SAME_NOISE * errors[0])


def _is_factor(error: Mask, exact: Mask) -> bool:
    """The errors are nearly proportional to the values, as those of a wrong denominator are."""
    sizes = float(np.linalg.norm(error) * np.linalg.norm(exact))
    return sizes > 0.0 and float(np.abs(np.vdot(error, exact))) > _PROPORTIONAL * sizes


def _finite(values: Mask) -> Mask:
    return np.asarray(np.where(np.isfinite(values), values, 0.0))


def _both_finite(a: Mask, b: Mask) -> Mask:
    return np.asarray(np.isfinite(a) == np.isfinite(b))


def _largest(values: Mask) -> float:
    return float(np.max(_finite(np.abs(values)), initial=0.0))


def _close(a: Mask, b: Mask, allowed: Mask) -> Mask:
    close = np.abs(a - b) <= allowed
    return np.asarray(close | (a == b) | (np.isnan(a) & np.isnan(b)))


def equal_values(mine: Any, theirs: Any) -> bool:
    """Within rounding, and of the same form."""
    if _is_opaque(mine) or _is_opaque(theirs):
        return _is_opaque(mine) and _is_opaque(theirs)
    if isinstance(mine, list | tuple) and isinstance(theirs, list | tuple):
        return len(mine) == len(theirs) and all(map(equal_values, mine, theirs))
    if isinstance(mine, dict) and isinstance(theirs, dict):
        return mine.keys() == theirs.keys() and all(
            equal_values(value, theirs[key]) for key, value in mine.items()
        )
    if _is_number(mine) and _is_number(theirs):
        return _equal_numbers(np.asarray(mine), np.asarray(theirs))
    return type(mine) is type(theirs) and bool(mine == theirs)


def _is_opaque(value: Any) -> bool:
    return isinstance(value, RemoteObject | Stub | Opaque)


def _is_number(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic | int | float | complex)


def _equal_numbers(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape or a.dtype.kind != b.dtype.kind:
        return False
    if a.dtype.kind not in "fc":
        return bool(np.array_equal(a, b))
    if a.dtype != b.dtype:
        return False
    with np.errstate(all="ignore"):
        rounding = _ROUNDING[a.real.dtype.itemsize]
        wide_a, wide_b = a.astype(np.complex128), b.astype(np.complex128)
        allowed = np.full(a.shape, rounding * max(_largest(wide_a), _largest(wide_b)))
        return bool(np.all(_close(wide_a, wide_b, allowed)))


def same_magnitude(got: Transcript, mutant: Transcript) -> bool:
    """The last answers are about as large: a single number within a factor of 4; of several, each
    one within a factor of 16, unless it is small beside the largest."""
    if not got.exchanges or not mutant.exchanges:
        return False
    mine, theirs = (transcript.exchanges[-1].answer for transcript in (got, mutant))
    if isinstance(mine, dict) and isinstance(theirs, dict) and mine.keys() == theirs.keys():
        pairs = [(mine[key], theirs[key]) for key in mine]
    else:
        pairs = [(mine, theirs)]
    sizes = [tuple(map(_size, pair)) for pair in pairs]
    known = [(a, b) for a, b in sizes if a is not None and b is not None]
    factor, small = 4.0, 0.0
    if len(pairs) > 1:
        finite = [size for pair in known for size in pair if np.isfinite(size)]
        factor, small = _SAME_NOISE, _SMALL_PART * max(finite, default=0.0)
    return all(max(pair) <= max(factor * min(pair), small) for pair in known)


def _size(value: Any) -> float | None:
    """The size of a number; infinite for one that is not finite."""
    if not isinstance(value, float | np.floating):
        return None
    return abs(float(value)) if np.isfinite(value) else np.inf


def without_numbers(message: str) -> str:
    """Addresses of objects, which differ in every process, count as numbers."""
    return re.sub(r"0x[0-9a-f]+|[-+]?[\d.]+(e[-+]?\d+)?", "#", message)
