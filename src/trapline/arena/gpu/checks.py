"""What the checks of GPU challenges share: the law of tolerance, padded rows, repeats, state."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from trapline.arena.gpu.contract import STORED, BFloat16, rounded
from trapline.arena.judge import expect
from trapline.arena.process.proxy import Submission

Rng = np.random.Generator
#: Distance from 1 to the next number.
EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
#: Below the smallest normal number an answer may be rounded or flushed to 0; float16 is computed in
#: float32, where this does not happen.
SMALLEST = {"float32": 2.0**-126, "float16": 2.0**-24, "bfloat16": 2.0**-126}
FLOAT32_EPS = EPS["float32"]
#: Elements that are added to the distance between two rows.
PADDING = 5
#: A prime number: rows of any usual length do not repeat soon.
DRAWN = 4_194_301


def near(got: Any, want: np.ndarray, *, dtype: str, slack: Any = 0.0, what: str) -> None:
    """|got − want| ≤ eps(dtype)·|want| + slack; infinities and NaN at the same places."""
    stored = np.dtype(np.float32) if dtype == "bfloat16" else STORED[dtype]
    got = expect.array(got, shape=want.shape, dtype=stored, what=what).astype(np.float64)
    finite = np.isfinite(want)
    with np.errstate(invalid="ignore"):
        allowed = EPS[dtype] * np.abs(want) + 2 * SMALLEST[dtype] + slack
        inside = np.abs(got - want) <= allowed
    good = np.where(finite, inside, (got == want) | (np.isnan(got) & np.isnan(want)))
    if not np.all(good):
        bad = np.argwhere(~good)
        first = tuple(int(i) for i in bad[0])
        room = float(np.broadcast_to(allowed, want.shape)[first])
        expect.that(
            False,
            f"{what}{list(first)} is {got[first]:.9g}, expected {want[first]:.9g} ± {room:.2g} "
            f"({len(bad)} of {want.size} elements are off)",
        )


def noise(
    rng: Rng, shape: tuple[int, ...], dtype: str, *, scale: float = 1.0, shift: float = 0.0
) -> np.ndarray:
    """Normal numbers for a timed call: a few million are drawn, and repeated to fill the shape."""
    size = int(np.prod(shape, dtype=np.int64))
    drawn = scale * rng.standard_normal(min(size, DRAWN), np.float32) + np.float32(shift)
    filled = np.resize(np.asarray(rounded(drawn, dtype)), shape)
    return filled.view(BFloat16) if dtype == "bfloat16" else filled


def padded(values: np.ndarray, extra: int = PADDING) -> np.ndarray:
    """The same rows, further apart: between them lie NaN, or the largest integer."""
    filler = np.nan if values.dtype.kind == "f" else np.iinfo(values.dtype).max
    return _apart(values, extra, filler)


def spaced(values: np.ndarray, extra: int = PADDING) -> np.ndarray:
    """The same rows, further apart: between them lie numbers like those of the rows, so that all
    code that reads them is wrong in the same way, whatever it makes of NaN."""
    drawn = np.asarray(values).reshape(-1)[::-1]
    return _apart(values, extra, np.resize(drawn, (*values.shape[:-1], extra)))


def _apart(values: np.ndarray, extra: int, filler: Any) -> np.ndarray:
    wide = np.empty((*values.shape[:-1], values.shape[-1] + extra), values.dtype)
    wide = wide.view(type(values))
    wide[..., : values.shape[-1]] = values
    wide[..., values.shape[-1] :] = filler
    view: np.ndarray = wide[..., : values.shape[-1]]
    return view


def leaves_inputs_alone(submission: Submission, entry: str, *args: Any) -> None:
    """After the call every argument holds what it held before."""
    _, after = submission.observe(entry, *args)
    for place, (given, left) in enumerate(zip(args, after, strict=True)):
        if isinstance(given, np.ndarray):
            same = np.array_equal(np.asarray(given), np.asarray(left), equal_nan=True)
            expect.that(same, f"argument {place} of {entry} differs after the call")


def repeats_bit_for_bit(submission: Submission, entry: str, *args: Any, times: int = 3) -> None:
    """The same call gives the same bits, however often it is made."""
    first = submission.call(entry, args, {})
    for turn in range(1, times):
        again = submission.call(entry, args, {})
        pairs = zip(_flat(first), _flat(again), strict=True)
        same = all(one.tobytes() == other.tobytes() for one, other in pairs)
        expect.that(same, f"call {turn + 1} with the same arguments gives other bits than call 1")


class _LateInputs:
    """A submission whose inputs come on its stream, right before its own work."""

    def __init__(self, submission: Submission) -> None:
        self._submission = submission

    def __getattr__(self, entry: str) -> Callable[..., Any]:
        return lambda *args: self._submission.late_inputs(entry, *args)


def with_late_inputs(submission: Submission) -> Submission:
    """Asks as the submission does; only work on the stream that it is given sees the inputs."""
    return cast(Submission, _LateInputs(submission))


def _flat(answer: Any) -> list[np.ndarray]:
    return list(answer) if isinstance(answer, tuple) else [answer]


def small_large_small(ask: Callable[[Any], None], small: Any, large: Any) -> None:
    """What a large problem leaves in memory must not show in a small one."""
    for problem in (small, large, small):
        ask(problem)


def far_apart(values: np.ndarray) -> np.ndarray:
    """The same float16 values, with more than 2³¹ elements between entries of the first axis; what
    lies between them is never touched."""
    wide = np.zeros((len(values), (1 << 31) + 64), np.float16)
    rows = wide[:, : values[0].size].reshape(values.shape, copy=False)
    rows[...] = values
    return rows
