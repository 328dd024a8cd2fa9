"""The contract of dflash on the GPU, and its measures."""

from typing import Any, NamedTuple

import numpy as np

from trapline.arena.gpu.checks import (
    EPS,
    FLOAT32_EPS,
    Rng,
    near,
    noise,
    padded,
    repeats_bit_for_bit,
)
from trapline.arena.gpu.contract import Entry, Output, Timed, dtype_name, rounded
from trapline.arena.judge.traps import Precision, case
from trapline.arena.process.proxy import Submission

Array = np.ndarray
DTYPES = ("float32", "float16")


def _outputs(q: Array, *_: Any) -> tuple[Output, ...]:
    return (Output(q.shape, dtype_name(q)),)


ENTRIES = {"tree_attention": Entry(_outputs)}


class Problem(NamedTuple):
    q: Array
    k: Array
    v: Array
    parents: Array
    prefix_len: int


class Sizes(NamedTuple):
    """B trees, H query heads, G key heads, N nodes, prefix length L, width D."""

    B: int = 1
    H: int = 1
    G: int = 1
    N: int = 7
    L: int = 5
    D: int = 16


def random_parents(rng: Rng, N: int) -> Array:
    """Every node hangs below an earlier one, or below the prefix."""
    return np.array([int(rng.integers(-1, node)) for node in range(N)], np.int32)


def problem(rng: Rng, sizes: Sizes, dtype: str = "float32") -> Problem:
    B, H, G, N, L, D = sizes
    shapes = (B, H, N, D), (B, G, L + N, D), (B, G, L + N, D)
    q, k, v = (rounded(rng.standard_normal(shape), dtype) for shape in shapes)
    trees = [random_parents(rng, N) for _ in range(B)]
    parents = np.stack(trees) if trees else np.zeros((0, N), np.int32)
    return Problem(q, k, v, parents, L)


def visible(parents: Array, prefix_len: int) -> Array:
    """(N, L + N): the prefix, the ancestors, the node itself."""
    N = len(parents)
    mask = np.zeros((N, prefix_len + N), bool)
    mask[:, :prefix_len] = True
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] = mask[parent]
        mask[node, prefix_len + node] = True
    return mask


def truth(p: Problem) -> tuple[Array, Array, Array]:
    """The exact answer, the weights' sum of |v|, and the largest score of each query."""
    q, k, v = (np.asarray(part, np.float64) for part in p[:3])
    heads = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, heads, axis=1), np.repeat(v, heads, axis=1)
    scores = np.einsum("bhnd,bhsd->bhns", q, k) * q.shape[3] ** -0.5
    masks = [visible(tree, p.prefix_len) for tree in p.parents]
    mask = np.stack(masks)[:, None] if masks else np.zeros((0, 1, *scores.shape[2:]), bool)
    steepness = np.maximum(np.where(mask, np.abs(scores), 0.0).max(axis=3, initial=0.0), 1.0)
    scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=3, keepdims=True, initial=-1e300))
    weights /= weights.sum(axis=3, keepdims=True)
    out = np.einsum("bhns,bhsd->bhnd", weights, v)
    return out, np.einsum("bhns,bhsd->bhnd", weights, np.abs(v)), steepness


def check(answer: Any, p: Problem) -> None:
    want, size, steepness = truth(p)
    dtype = dtype_name(p.q)
    slack = (2 * EPS[dtype] + 64 * FLOAT32_EPS * steepness[..., None]) * size
    near(answer, want, dtype=dtype, slack=slack, what="out")


def ask(submission: Submission, p: Problem) -> None:
    check(submission.tree_attention(*p), p)


@case
def matches_float64(submission: Submission, rng: Rng) -> None:
    for dtype in DTYPES:
        ask(submission, problem(rng, Sizes(B=2, H=2, G=2, N=6, L=37), dtype))


@case
def matches_float64_in_bfloat16(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(B=2, H=8, G=2, N=60, L=700, D=128), "bfloat16"))
    ask(submission, problem(rng, Sizes(B=1, H=2, G=1, N=200, L=50, D=64), "bfloat16"))


@case
def long_prefix(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(N=3, L=600), "float16"))


@case
def no_prefix(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(N=9, L=0)))


@case
def chains_and_stars(submission: Submission, rng: Rng) -> None:
    p = problem(rng, Sizes(B=2, N=12))
    p.parents[0], p.parents[1] = np.arange(-1, 11), -1
    ask(submission, p)


@case
def grouped_heads(submission: Submission, rng: Rng) -> None:
    for heads, groups in ((4, 2), (3, 1)):
        ask(submission, problem(rng, Sizes(H=heads, G=groups), "float16"))


@case
def one_node(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(N=1, L=0)))
    ask(submission, problem(rng, Sizes(N=1, L=20)))


@case
def any_width(submission: Submission, rng: Rng) -> None:
    for width in (8, 24, 256):
        ask(submission, problem(rng, Sizes(D=width), "float16"))


@case
def views_with_strides(submission: Submission, rng: Rng) -> None:
    p = problem(rng, Sizes(B=2, H=2, G=2))
    q, k, v = (np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in p[:3])
    ask(submission, p._replace(q=q, k=k, v=v))
    ask(submission, p._replace(k=padded(p.k, 8), v=padded(p.v, 16), parents=padded(p.parents)))


@case
def nothing_to_do(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(B=0)))


@case
def repeated_calls_agree_in_every_bit(submission: Submission, rng: Rng) -> None:
    repeats_bit_for_bit(submission, "tree_attention", *problem(rng, Sizes(N=5, L=300)))


def precision(submission: Submission, rng: Rng) -> list[Precision]:
    """float32 and float16, compared with float32 in NumPy."""
    measured = []
    for dtype in DTYPES:
        p = problem(rng, Sizes(B=1, H=2, G=2, N=24, L=200, D=64), dtype)
        answer = submission.tree_attention(*p)
        measured.append(Precision(answer, truth(p)[0], _careful(p).astype(answer.dtype)))
    return measured


def _careful(p: Problem) -> Array:
    """In float32, weights rounded to the dtype before they meet the values; H = G."""
    q, k, v = (np.asarray(part, np.float32) for part in p[:3])
    scores = np.einsum("bhnd,bhsd->bhns", q, k) * np.float32(q.shape[3] ** -0.5)
    mask = np.stack([visible(tree, p.prefix_len) for tree in p.parents])[:, None]
    scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=3, keepdims=True))
    total = weights.sum(axis=3, keepdims=True)
    narrow = weights.astype(p.q.dtype).astype(np.float32)
    return np.asarray(np.einsum("bhns,bhsd->bhnd", narrow, v) / total)


def _timed(sizes: Sizes) -> Timed:
    B, H, G, N, L, D = sizes

    def make(rng: Rng) -> tuple[Any, ...]:
        shapes = (B, H, N, D), (B, G, L + N, D), (B, G, L + N, D)
        parts = [noise(rng, shape, "bfloat16") for shape in shapes]
        return *parts, np.stack([random_parents(rng, N) for _ in range(B)]), L

    rows = 2.0 * B * D
    return Timed(
        name=f"B {B}, H {H}, G {G}, {N} nodes, prefix {L}, D {D} bfloat16",
        entry="tree_attention",
        make=make,
        light={
            "read": rows * (H * N + 2 * G * (L + N)),
            "write": rows * H * N,
            "bfloat16": 4.0 * B * H * N * (L + N) * D,
        },
    )


def timed() -> list[Timed]:
    """A batch of trees, and one tree behind a long prefix."""
    return [
        _timed(Sizes(B=8, H=32, G=8, N=64, L=2048, D=128)),
        _timed(Sizes(B=1, H=32, G=8, N=32, L=16384, D=128)),
    ]
