"""The contract of `flash_attention`, and what is measured of it."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.remembered import remembered
from trapline.arena.judge.traps import Call, Precision, case, robustness
from trapline.arena.process.proxy import Submission
from trapline.arena.scope import WHOLE, Scope
from trapline.gold.attention import oracle

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]

attention = remembered(oracle.attention)
#: Traps that compute for seconds.
SLOW = frozenset({"score-matrix-in-memory", "mask-for-all-pairs"})


@dataclass(frozen=True)
class Shape:
    """B batch, H query heads, G key/value heads, T queries, S keys, D width."""

    B: int = 1
    H: int = 1
    G: int = 1
    T: int = 8
    S: int = 8
    D: int = 4

    def draw(self, rng: np.random.Generator, dtype: Any = np.float64) -> Arrays:
        """q, k, v of standard normal values."""
        kv = (self.B, self.G, self.S, self.D)
        q = rng.standard_normal((self.B, self.H, self.T, self.D)).astype(dtype)
        return q, rng.standard_normal(kv).astype(dtype), rng.standard_normal(kv).astype(dtype)


def rounding(q: np.ndarray, k: np.ndarray) -> float:
    """How far rounding can move a weight, relatively: the error of a dot product and of a sum.

    Holds for any order of summation in the inputs' dtype, so no right algorithm is refused.
    """
    S, D = k.shape[2:]
    heads = q.shape[1] // k.shape[1]
    sizes = np.abs(q) @ np.repeat(np.abs(k), heads, axis=1).swapaxes(2, 3) * D**-0.5
    largest = float(np.max(sizes, initial=1.0))
    eps = float(np.finfo(q.dtype).eps)
    return float(4.0 * eps * ((D + 4) * largest + S + 16))


def in_scope(scope: Scope, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Arrays:
    """The same situation within what the prompt asks for: equal heads, equal lengths.

    The shorter of queries and keys is repeated until both have the same length.
    """
    if not scope.has("grouped_heads"):
        k, v = (np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    if not scope.has("unequal_lengths") and q.shape[2] and k.shape[2]:
        length = max(q.shape[2], k.shape[2])
        q, k, v = (np.take(x, np.arange(length) % x.shape[2], axis=2) for x in (q, k, v))
    return q, k, v


def form(scope: Scope, got: Any, like: np.ndarray, dtype: Any, what: str) -> np.ndarray:
    """An array of this shape, and of this dtype where the prompt asks for one."""
    if not scope.has("dtypes"):
        dtype = getattr(got, "dtype", None)
    return expect.array(got, shape=like.shape, dtype=dtype, what=what)


def agrees(
    answer: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool, scope: Scope = WHOLE
) -> None:
    """The answer is (out, lse) of the right shapes, dtypes and values."""
    out, lse = pair(answer)
    want_out, want_lse = attention(q, k, v, causal=causal)
    slack = max(rounding(q, k), scope.tolerance)
    form(scope, out, want_out, q.dtype, "out")
    reach = float(np.max(np.abs(v), initial=1.0))
    expect.close(out, want_out, atol=slack * reach, what="out")
    if scope.has("lse"):
        form(scope, lse, want_lse, q.dtype, "lse")
        expect.close(lse, want_lse, atol=slack, what="lse")


def asked(entry: str, answer: Any, scope: Scope) -> Any:
    """The answer without a log-sum-exp that was not asked for."""
    if scope.has("lse") or entry != "flash_attention":
        return answer
    is_pair = isinstance(answer, tuple | list) and len(answer) == 2
    if is_pair and isinstance(answer[0], tuple | list):  # with the arguments as left
        return asked(entry, answer[0], scope), answer[1]
    return answer[:1] if is_pair else answer


def pair(answer: Any) -> tuple[Any, Any]:
    """The two parts of an answer."""
    expect.that(
        isinstance(answer, tuple | list) and len(answer) == 2, "the answer is not (out, lse)"
    )
    return answer[0], answer[1]


def attends(
    submission: Submission,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool = False,
    tile: int = 64,
) -> None:
    """The submission's attention of these inputs is right."""
    q, k, v = in_scope(submission.scope, q, k, v)
    answer = submission.flash_attention(q, k, v, causal=causal, tile=tile)
    agrees(answer, q, k, v, causal, submission.scope)


def weighed(
    submission: Submission, entry: str, *args: np.ndarray, **kwargs: Any
) -> tuple[Any, int]:
    """The answer of a call, and by how many bytes the submission's memory rose during it.

    In a process of its own, which keeps no freed memory from earlier calls; a first small call lets
    the libraries allocate what they need once.
    """
    fresh = submission.fresh()
    fresh.call(entry, [x[:, :, :64] for x in args], kwargs)
    running = fresh.session.running
    running.reset_peak()
    before = running.peak_bytes()
    answer = fresh.call(entry, args, kwargs)
    return answer, fresh.session.peak_bytes() - before


REFUSALS = (ValueError, TypeError)


@case
def full_attention(submission: Submission, rng: np.random.Generator) -> None:
    """Every query sees every key; several tiles a side, in both dtypes."""
    for dtype in (np.float64, np.float32):
        attends(submission, *Shape(B=2, H=3, G=3, T=40, S=40, D=16).draw(rng, dtype), tile=16)


@case
def causal_attention(submission: Submission, rng: np.random.Generator) -> None:
    """A query sees no later key; several tiles a side, in both dtypes."""
    for dtype in (np.float64, np.float32):
        inputs = Shape(B=2, H=2, G=2, T=40, S=40, D=8).draw(rng, dtype)
        attends(submission, *inputs, causal=True, tile=16)


@case
def defaults(submission: Submission, rng: np.random.Generator) -> None:
    """Without `causal` and `tile` it is full attention, also beyond one tile of 64."""
    q, k, v = Shape(T=70, S=130, D=3).draw(rng)
    agrees(submission.flash_attention(q, k, v), q, k, v, causal=False)


@case
def unequal_lengths(submission: Submission, rng: np.random.Generator) -> None:
    """T ≠ S both ways; causal is aligned at the last query and the last key."""
    for T, S in ((5, 19), (19, 5), (1, 23), (23, 1)):
        for causal in (False, True):
            attends(submission, *Shape(T=T, S=S).draw(rng), causal=causal, tile=4)


@case
def grouped_heads(submission: Submission, rng: np.random.Generator) -> None:
    """One key/value head for several query heads, or for all."""
    for H, G in ((6, 3), (8, 2), (5, 1)):
        attends(submission, *Shape(B=2, H=H, G=G, T=9, S=11).draw(rng), causal=True, tile=4)


@case
def tile_is_only_a_size_of_work(submission: Submission, rng: np.random.Generator) -> None:
    """One row at a time or everything at once: the same result up to rounding."""
    q, k, v = Shape(T=21, S=26).draw(rng)
    for causal in (False, True):
        for tile in (1, 2, 5, 13, 21, 26, 64):
            attends(submission, q, k, v, causal=causal, tile=tile)


@case
def empty_inputs(submission: Submission, rng: np.random.Generator) -> None:
    """No batch, no query or no key is an ordinary call."""
    for shape in (Shape(B=0), Shape(T=0), Shape(S=0), Shape(T=0, S=0)):
        for causal in (False, True):
            attends(submission, *shape.draw(rng, np.float32), causal=causal, tile=4)


@robustness
def bad_input_is_refused(submission: Submission, rng: np.random.Generator) -> None:
    """Ranks and shapes that do not fit are refused."""
    q, k, v = Shape(B=2, H=4, G=2, T=5, S=6, D=4).draw(rng)
    wrong = [
        (q[0], k, v),
        (q[None], k, v),
        (q, k[0], v[0]),
        (q, k[..., :3], v[..., :3]),
        (q[..., :3], k, v),
        (q, k, v[..., :3]),
        (q, k, v[:, :, :5]),
        (q, k[:, :1], v),
        (q[:1], k, v),
    ]
    for arrays in wrong:
        expect.raises(REFUSALS, submission.flash_attention, *arrays)
    expect.raises(REFUSALS, submission.flash_attention, q, k, v, tile=0)


@case
def calls_are_independent(submission: Submission, rng: np.random.Generator) -> None:
    """The same shapes with other values, then a smaller problem, then the first again."""
    first = Shape(T=10, S=10).draw(rng)
    second = Shape(T=10, S=10).draw(rng)
    small = Shape(T=3, S=3).draw(rng)
    for inputs in (first, second, small, first):
        attends(submission, *inputs, causal=True, tile=4)


# --- measures -----------------------------------------------------------------------------------


def precision(submission: Submission, rng: np.random.Generator) -> list[Precision]:
    """float32, logits of several units, many tiles; against an untiled float32 softmax."""
    found = []
    for causal in (False, True):
        q, k, v = Shape(H=2, G=1, T=192, S=192, D=64).draw(rng, np.float32)
        q *= np.float32(2.0)
        answer = pair(submission.flash_attention(q, k, v, causal=causal, tile=32))
        exact = oracle.attention(q, k, v, causal=causal)
        careful = _untiled(q, k, v, causal)
        found += [Precision(g, e, c) for g, e, c in zip(answer, exact, careful, strict=True)]
    return found


def _untiled(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The textbook formula in the inputs' own dtype, with the maximum subtracted."""
    (H, T, D), (G, S) = q.shape[1:], k.shape[1:3]
    k, v = np.repeat(k, H // G, axis=1), np.repeat(v, H // G, axis=1)
    scores = (q * D**-0.5) @ k.swapaxes(2, 3)
    if causal:
        scores = np.where(np.arange(S) > np.arange(S - T, S)[:, None], -np.inf, scores)
    scores = scores.astype(q.dtype)
    peak = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    return weights @ v / total, (peak + np.log(total))[..., 0]


#: Of a call of `speed`: two products of half of the scores, two operations each.
OPERATIONS = 4 * 4 * 448 * 448 * 64 // 2


def speed(submission: Submission, rng: np.random.Generator) -> Call:  # noqa: ARG001
    """Four heads over two, causal, 448 positions, float32."""
    q, k, v = Shape(H=4, G=2, T=448, S=448, D=64).draw(rng, np.float32)
    return Call(
        "flash_attention",
        (q, k, v),
        {"causal": True, "tile": 64},
        check=lambda answer: agrees(answer, q, k, v, causal=True),
    )


def memory(submission: Submission, rng: np.random.Generator, size: int) -> Call:
    """T = S = size: a score matrix has size² elements, everything else is linear and small."""
    q, k, v = Shape(T=size, S=size, D=4).draw(rng, np.float32)
    rows = [int(row) for row in rng.choice(size, 4, replace=False)]

    def check(answer: Any) -> None:
        out, lse = pair(answer)
        scope = submission.scope
        form(scope, out, q, q.dtype, "out")
        if scope.has("lse"):
            form(scope, lse, q[..., 0], q.dtype, "lse")
        for row in rows:
            here, past = slice(row, row + 1), slice(row + 1)
            part = out[:, :, here], lse[:, :, here] if scope.has("lse") else None
            agrees(part, q[:, :, here], k[:, :, past], v[:, :, past], True, scope)

    return Call("flash_attention", (q, k, v), {"causal": True, "tile": 64}, check=check)
