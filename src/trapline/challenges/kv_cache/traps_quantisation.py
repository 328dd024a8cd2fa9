"""Bugs of quantised caches."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.kv_cache.cases import (
    QUANTISED,
    Rng,
    Twin,
)
from trapline.challenges.kv_cache.situations import claimed_bytes
from trapline.gold.kv_cache.oracle import quantization_step


def _full(submission: Submission, rng: Rng, kind: str, bits: int | None) -> tuple[Twin, int]:
    """A float32 cache filled to the last position, and how many rows (of D elements) it holds."""
    twin = Twin(submission, rng, kind, bits, heads=2, width=64, page=8, pages=8, dtype=np.float32)
    twin.add(64)
    return twin, 64 * 2 * 2 * 2


def _at_most(submission: Submission, rng: Rng, kind: str, bits: int) -> None:
    twin, rows = _full(submission, rng, kind, bits)
    limit = rows * (bits * 64 // 8 + 8) + 64 * 8 * 2 + 4096
    claim = claimed_bytes(twin)
    expect.that(claim <= limit, f"{kind} with {bits} bits takes {claim} bytes, more than {limit}")


@trap(
    "scales-eat-the-saving",
    catches="a scale for every element: the quantised cache is larger than the plain one",
    severity="critical",
    story="Two published entries stored a scale per element; one reported a saving of −125 %.",
)
def scales_eat_the_saving(submission: Submission, rng: Rng) -> None:
    for kind, bits in QUANTISED:
        _at_most(submission, rng, kind, bits)


@trap(
    "four-bits-in-a-byte",
    catches="4 bit codes are stored one a byte",
    severity="major",
    story="The range is right, the packing was left for later.",
)
def four_bits_in_a_byte(submission: Submission, rng: Rng) -> None:
    for kind in ("quantized", "paged_quantized"):
        _at_most(submission, rng, kind, 4)


@trap(
    "scales-not-counted",
    catches="nbytes() leaves the scales out",
    severity="major",
    story="A saving of 4× was reported while 0.4× was stored.",
)
def scales_not_counted(submission: Submission, rng: Rng) -> None:
    for kind, bits in QUANTISED:
        twin, rows = _full(submission, rng, kind, bits)
        # The error bound holds for every row by itself: each needs at least a byte of scale.
        least = rows * (bits * 64 // 8 + 1)
        claim = claimed_bytes(twin)
        expect.that(claim >= least, f"{kind}: {claim} bytes cannot hold {least} bytes of codes")


@trap(
    "nbytes-of-one-layer",
    catches="nbytes() counts one layer, or keys only",
    severity="minor",
    story="The number on the dashboard was a factor of 64 too small.",
)
def nbytes_of_one_layer(submission: Submission, rng: Rng) -> None:
    for kind in ("dense", "paged"):
        twin, rows = _full(submission, rng, kind, None)
        claim, least = claimed_bytes(twin), rows * 64 * 4
        expect.that(claim >= least, f"{kind}: {claim} bytes cannot hold {least} bytes of rows")
        expect.that(claim <= 1.5 * least + 8192, f"{kind}: {claim} bytes for {least} bytes of rows")


@trap(
    "scale-of-the-whole-append",
    catches="one scale for all positions of an append",
    severity="critical",
    story="One outlier token in a prompt of a thousand erased the others.",
)
def scale_of_the_whole_append(submission: Submission, rng: Rng) -> None:
    for kind, bits in QUANTISED:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add()
        k, v = twin.rows(4), twin.rows(4)
        k[1], v[2] = 1000 * k[1], 1000 * v[2]
        twin.put(seq, 0, k, v)
        twin.check(attend=False)


@trap(
    "scale-shared-by-heads",
    catches="one scale for all heads of a position",
    severity="major",
    story="Heads differ by orders of magnitude; the loudest silenced the rest.",
)
def scale_shared_by_heads(submission: Submission, rng: Rng) -> None:
    for kind, bits in QUANTISED:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add()
        k, v = twin.rows(2), twin.rows(2)
        k[:, 1], v[:, 0] = 1000 * k[:, 1], 1000 * v[:, 0]
        twin.put(seq, 0, k, v)
        twin.check(attend=False)


@trap(
    "scale-frozen-at-the-start",
    catches="the scale of the first tokens is used for all that follow",
    severity="critical",
    story="Several engines froze scales on warm-up text; later tokens saturated.",
)
def scale_frozen_at_the_start(submission: Submission, rng: Rng) -> None:
    for kind, bits in QUANTISED:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add()
        for size in (1.0, 50.0, 0.02):
            rows = size * rng.uniform(0.5, 1.0, (2, 2, 4))
            twin.put(seq, 0, rows, -rows)
        twin.check(attend=False)


@trap(
    "whole-cache-requantised",
    catches="stored positions are decoded and encoded again when others arrive",
    severity="critical",
    story="A popular library rebuilds its cache every few tokens; the oldest error tripled.",
)
def whole_cache_requantised(submission: Submission, rng: Rng) -> None:
    for kind, bits in QUANTISED:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add(2)
        twin.check(attend=False)
        for size in (3.0, 30.0, 300.0):
            twin.put(seq, 0, size * twin.rows(1), size * twin.rows(1))
        twin.append(seq, 3, [1])
        twin.check(attend=False)


@trap(
    "zero-row",
    catches="a row of zeros divides by its scale of zero",
    severity="critical",
    story="Padding tokens: a constant group gave NaN in a well-known 2-bit cache.",
)
def zero_row(submission: Submission, rng: Rng) -> None:
    for kind, bits in QUANTISED:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add()
        rows = twin.rows(3)
        rows[1] = 0.0
        twin.put(seq, 0, rows, np.zeros_like(rows))
        twin.check()


@trap(
    "small-rows-vanish",
    catches="a floor under the scale that is meant for zeros flattens small rows",
    severity="major",
    story="An epsilon of 1e-3 against division by zero; normalised keys are of that size.",
)
def small_rows_vanish(submission: Submission, rng: Rng) -> None:
    for kind, bits in QUANTISED:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add()
        rows = rng.uniform(0.002, 0.004, (3, 2, 4)) * rng.choice([-1.0, 1.0], (3, 2, 4))
        rows[..., 0] = 0.001
        twin.put(seq, 0, rows, -rows)
        twin.check(attend=False)


@trap(
    "codes-cut-not-rounded",
    catches="codes are cut towards zero instead of rounded to the nearest",
    severity="major",
    story="A cast to int; twice the error, and all of it in one direction.",
)
def codes_cut_not_rounded(submission: Submission, rng: Rng) -> None:
    for kind, bits in QUANTISED:
        twin = Twin(submission, rng, kind, bits, width=32)
        seq = twin.add()
        k, v = twin.rows(2), twin.rows(2)
        for rows in (k, v):
            step = quantization_step(rows, bits)
            rows[..., 0] = 0.75 * step[..., 0]
        twin.put(seq, 0, k, v)
        twin.check(attend=False)


@trap(
    "largest-element-wraps",
    catches="the largest positive element becomes the most negative code",
    severity="critical",
    story="128 does not fit into eight signed bits.",
)
def largest_element_wraps(submission: Submission, rng: Rng) -> None:
    for kind, bits in QUANTISED:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add()
        k, v = twin.rows(3), twin.rows(3)
        k[..., 1], v[..., 2] = 7.0, 7.0
        twin.put(seq, 0, k, v)
        twin.check(attend=False)


@trap(
    "nibbles-lose-their-sign",
    catches="negative 4 bit codes come back as 8 … 15",
    severity="critical",
    story="Unpacking forgets that the fourth bit is a sign.",
)
def nibbles_lose_their_sign(submission: Submission, rng: Rng) -> None:
    for kind in ("quantized", "paged_quantized"):
        twin = Twin(submission, rng, kind, 4, width=8)
        seq = twin.add()
        every = np.array([-7.0, -6, -5, -4, -3, -2, -1, 7, 6, 5, 4, 3, 2, 1, 0, -7])
        rows = every.reshape(1, 2, 8)
        twin.put(seq, 0, rows, rows[..., ::-1])
        twin.check(attend=False)


@trap(
    "nibbles-swapped",
    catches="packing and unpacking disagree on which half of a byte comes first",
    severity="critical",
    story="Two functions, two conventions, and a round trip that nobody ran.",
)
def nibbles_swapped(submission: Submission, rng: Rng) -> None:
    for kind in ("quantized", "paged_quantized"):
        twin = Twin(submission, rng, kind, 4, width=6)
        seq = twin.add()
        rows = np.tile(np.array([7.0, 5, 3, -1, -4, -6]), (2, 2, 1))
        twin.put(seq, 0, rows, -rows)
        twin.check(attend=False)


@trap(
    "odd-width-loses-an-element",
    catches="with an odd head_dim the last 4 bit code is dropped",
    severity="major",
    story="D // 2 bytes for D codes.",
)
def odd_width_loses_an_element(submission: Submission, rng: Rng) -> None:
    for kind in ("quantized", "paged_quantized"):
        for width in (1, 3, 7):
            twin = Twin(submission, rng, kind, 4, width=width)
            seq = twin.add()
            rows = 2 + np.abs(twin.rows(3))
            twin.put(seq, 0, rows, -rows)
            twin.check(attend=False)
