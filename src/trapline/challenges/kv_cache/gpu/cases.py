"""The contract of kv_cache on the GPU, and its measures."""

from typing import Any, NamedTuple

import numpy as np

from trapline.arena.gpu.checks import EPS, FLOAT32_EPS, Rng, near, noise, repeats_bit_for_bit
from trapline.arena.gpu.contract import Entry, Output, Timed, dtype_name, rounded
from trapline.arena.judge import expect
from trapline.arena.judge.traps import Precision, case
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_forward.gpu import oracle

Array = np.ndarray
DTYPES = ("float32", "float16")
#: What a block table holds beyond the pages of its sequence: never to be read as a page.
NO_PAGE = 1 << 30


def _no_outputs(*_: Any) -> tuple[Output, ...]:
    return ()


def _outputs(q: Array, *_: Any) -> tuple[Output, ...]:
    return (Output(q.shape, dtype_name(q)),)


ENTRIES = {
    "paged_append": Entry(_no_outputs, updated=(2, 3)),
    "paged_attention": Entry(_outputs),
}


class Appended(NamedTuple):
    """N tokens of G heads and width D, and pools of pages."""

    k: Array
    v: Array
    k_pages: Array
    v_pages: Array
    slots: Array


class Attended(NamedTuple):
    q: Array
    k_pages: Array
    v_pages: Array
    block_table: Array
    seq_lens: Array


class Sizes(NamedTuple):
    """H query heads, G key heads, width D, rows a page."""

    H: int = 2
    G: int = 2
    D: int = 16
    page: int = 8


SIZES = Sizes()


def append_problem(
    rng: Rng, tokens: int, sizes: Sizes = SIZES, dtype: str = "float32", pages: int = 5
) -> Appended:
    _, G, D, page = sizes
    k, v = (rounded(rng.standard_normal((tokens, G, D)), dtype) for _ in range(2))
    pools = [rounded(rng.standard_normal((pages, page, G, D)), dtype) for _ in range(2)]
    slots = rng.permutation(pages * page)[:tokens].astype(np.int64)
    return Appended(k, v, pools[0], pools[1], slots)


def attention_problem(
    rng: Rng, lengths: list[int], sizes: Sizes = SIZES, dtype: str = "float32"
) -> Attended:
    """Pages in random order; what is beyond a sequence's last row is huge, never NaN."""
    H, G, D, page = sizes
    counts = [-(-length // page) for length in lengths]
    total = sum(counts) + 2
    pools = []
    for _ in range(2):
        pools.append(rounded(rng.standard_normal((total, page, G, D)), dtype))
    order = rng.permutation(total - 1)
    table = np.full((len(lengths), max(counts, default=0) + 1), NO_PAGE, np.int32)
    used = 0
    for sequence, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        mine = order[used : used + count]
        table[sequence, :count] = mine
        used += count
        if length % page:
            for pool in pools:
                pool[mine[-1], length % page :] = 500.0
    q = rounded(rng.standard_normal((len(lengths), H, D)), dtype)
    return Attended(q, pools[0], pools[1], table, np.array(lengths, np.int32))


def check_append(answer: Any, p: Appended) -> None:
    """The rows are where they belong, and every other row is as it was."""
    for name, new, pool, got in zip(("k", "v"), p[:2], p[2:4], answer, strict=True):
        want = np.array(pool)
        flat = want.reshape(-1, *want.shape[2:])
        written = np.asarray(p.slots) >= 0
        flat[np.asarray(p.slots)[written]] = np.asarray(new)[written]
        expect.equal(np.asarray(got), np.asarray(want), f"{name}_pages")


def append(submission: Submission, p: Appended) -> None:
    check_append(submission.paged_append(*p), p)


def truth(p: Attended) -> tuple[Array, Array, Array]:
    """The exact answer, the weights' sum of |v|, and the largest score of each query."""
    H, D = p.q.shape[1:]
    page, G = p.k_pages.shape[1:3]
    parts = []
    for query, table, length in zip(p.q, p.block_table, p.seq_lens, strict=True):
        pages = table[: -(-int(length) // page)]
        keys, values = (
            np.asarray(pool)[pages].reshape(-1, G, D)[: int(length)].transpose(1, 0, 2)[None]
            for pool in (p.k_pages, p.v_pages)
        )
        found = oracle.attention(np.asarray(query)[None, :, None], keys, values, False)
        parts.append((found.out[0, :, 0], found.size[0, :, 0], found.steepness[0, :, 0]))
    if not parts:
        return np.zeros((0, H, D)), np.zeros((0, H, D)), np.zeros((0, H))
    out, size, steepness = (np.stack(column) for column in zip(*parts, strict=True))
    return out, size, steepness


def check_attention(answer: Any, p: Attended) -> None:
    want, size, steepness = truth(p)
    dtype = dtype_name(p.q)
    slack = (2 * EPS[dtype] + 64 * FLOAT32_EPS * steepness[..., None]) * size
    near(answer, want, dtype=dtype, slack=slack, what="out")


def attend(submission: Submission, p: Attended) -> None:
    check_attention(submission.paged_attention(*p), p)


@case
def attention_matches_float64(submission: Submission, rng: Rng) -> None:
    for dtype in DTYPES:
        attend(submission, attention_problem(rng, [5, 40, 1, 17], dtype=dtype))


@case
def append_matches(submission: Submission, rng: Rng) -> None:
    for dtype in DTYPES:
        append(submission, append_problem(rng, 7, dtype=dtype))


@case
def both_in_bfloat16(submission: Submission, rng: Rng) -> None:
    append(submission, append_problem(rng, 20, Sizes(8, 4, 128, 16), "bfloat16"))
    sizes = Sizes(H=8, G=2, D=128, page=16)
    attend(submission, attention_problem(rng, [1000, 3, 129], sizes, "bfloat16"))


@case
def tokens_without_a_slot(submission: Submission, rng: Rng) -> None:
    p = append_problem(rng, 9)
    p.slots[rng.permutation(9)[:4]] = -1
    append(submission, p)


@case
def long_sequences(submission: Submission, rng: Rng) -> None:
    attend(submission, attention_problem(rng, [700], Sizes(H=1, G=1)))


@case
def grouped_heads(submission: Submission, rng: Rng) -> None:
    for heads, groups in ((4, 2), (5, 1), (3, 3)):
        attend(submission, attention_problem(rng, [9, 20], Sizes(H=heads, G=groups), "float16"))


@case
def any_page_size_and_width(submission: Submission, rng: Rng) -> None:
    for page, width in ((1, 8), (3, 24), (16, 128), (64, 16)):
        sizes = Sizes(page=page, D=width)
        attend(submission, attention_problem(rng, [13, 66], sizes, "float16"))
        append(submission, append_problem(rng, 3, sizes))


@case
def interleaved_pools(submission: Submission, rng: Rng) -> None:
    """Keys and values of a page lie beside each other."""
    p = attention_problem(rng, [11, 30])
    pool = np.stack((p.k_pages, p.v_pages), axis=1)
    attend(submission, p._replace(k_pages=pool[:, 0], v_pages=pool[:, 1]))
    a = append_problem(rng, 5)
    pool = np.stack((a.k_pages, a.v_pages), axis=1)
    both = np.stack((a.k, a.v), axis=1)
    append(submission, Appended(both[:, 0], both[:, 1], pool[:, 0], pool[:, 1], a.slots))


@case
def empty_sequences(submission: Submission, rng: Rng) -> None:
    attend(submission, attention_problem(rng, [0, 4, 0]))


@case
def nothing_to_do(submission: Submission, rng: Rng) -> None:
    attend(submission, attention_problem(rng, []))
    append(submission, append_problem(rng, 0))


@case
def repeated_calls_agree_in_every_bit(submission: Submission, rng: Rng) -> None:
    repeats_bit_for_bit(submission, "paged_attention", *attention_problem(rng, [300, 7]))


def precision(submission: Submission, rng: Rng) -> list[Precision]:
    """float32 and float16, compared with float32 in NumPy."""
    measured = []
    for dtype in DTYPES:
        sizes = Sizes(H=2, G=2, D=64, page=16)
        p = attention_problem(rng, [150, 96], sizes, dtype)
        answer = submission.paged_attention(*p)
        measured.append(Precision(answer, truth(p)[0], _careful(p).astype(answer.dtype)))
    return measured


def _careful(p: Attended) -> Array:
    """In float32, weights rounded to the dtype before they meet the values; H = G."""
    found = []
    page, G, D = p.k_pages.shape[1:]
    for query, table, length in zip(p.q, p.block_table, p.seq_lens, strict=True):
        pages = table[: -(-int(length) // page)]
        keys, values = (
            pool[pages].reshape(-1, G, D)[: int(length)].astype(np.float32)
            for pool in (p.k_pages, p.v_pages)
        )
        scores = np.einsum("hd,shd->hs", query.astype(np.float32), keys) * np.float32(D**-0.5)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        total = weights.sum(axis=1, keepdims=True)
        narrow = weights.astype(p.q.dtype).astype(np.float32)
        found.append(np.einsum("hs,shd->hd", narrow, values) / total)
    return np.stack(found)


def _timed(sequences: int, length: int, sizes: Sizes) -> Timed:
    H, G, D, page = sizes
    pages = sequences * (length // page)

    def make(rng: Rng) -> tuple[Any, ...]:
        pools = [noise(rng, (pages, page, G, D), "bfloat16") for _ in range(2)]
        q = noise(rng, (sequences, H, D), "bfloat16")
        table = rng.permutation(pages).astype(np.int32).reshape(sequences, -1)
        lengths = np.full(sequences, length, np.int32) - rng.integers(0, page, sequences)
        return q, *pools, table, lengths.astype(np.int32)

    return Timed(
        name=f"attention, {sequences} sequences of {length}, H {H}, G {G}, D {D} bfloat16",
        entry="paged_attention",
        make=make,
        light={
            "read": 4.0 * sequences * (length - page) * G * D,
            "vector": 4.0 * sequences * (length - page) * H * D,
        },
    )


def timed() -> list[Timed]:
    """A batch of decoding, two long sequences, many short ones."""
    sizes = Sizes(H=32, G=8, D=128, page=16)
    return [_timed(32, 1024, sizes), _timed(2, 8192, sizes), _timed(128, 128, sizes)]
