"""Bugs of quantised caches."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import edit, edits, insert_after, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.kv_cache.cases import EACH, PAGED, QUANTISED, Rng, Twin, twins
from trapline.challenges.kv_cache.situations import (
    BLIND,
    claimed_bytes,
    rows_of_one_size,
    three_quarters,
)


def _full(submission: Submission, rng: Rng, kind: str, bits: int | None) -> tuple[Twin, int]:
    """A float32 cache filled to the last position, and how many rows (of D elements) it holds."""
    twin = Twin(submission, rng, kind, bits, heads=2, width=64, page=8, pages=8, dtype=np.float32)
    twin.add(64)
    return twin, 64 * 2 * 2 * 2


def _at_most(submission: Submission, rng: Rng, kind: str, bits: int) -> None:
    twin, rows = _full(submission, rng, kind, bits)
    limit = rows * (bits * 64 // 8 + 8) + 64 * 8 * 2 + 4096
    claim = claimed_bytes(twin)
    expect.that(
        claim <= limit, f"nbytes() is too large: {claim} of {kind}, and {limit} are allowed"
    )


@trap(
    catches="a quantised cache takes more bytes than its codes and one scale a row (a scale for "
    "every element, for example)",
    severity="critical",
    story="With a scale and a zero point for every element the saving was −125 %.",
    seen="a published answer",
    mutant=edit("largest = np.abs(x).max(axis=-1, keepdims=True)", "largest = np.abs(x)"),
)
def scales_eat_the_saving(submission: Submission, rng: Rng) -> None:
    for kind, bits in QUANTISED:
        _at_most(submission, rng, kind, bits)


@trap(
    catches="4-bit codes are stored one per byte",
    severity="major",
    story="The range of the codes is right, but they are not packed.",
    mutant=edits(
        ("return (pack_nibbles(codes) if self.bits == 4 else codes), scale", "return codes, scale"),
        ("        if self.bits == 4:\n            codes = unpack_nibbles(codes, self.width)\n", ""),
    ),
    seen=BLIND,
)
def four_bits_in_a_byte(submission: Submission, rng: Rng) -> None:
    for kind in ("quantized", "paged_quantized"):
        _at_most(submission, rng, kind, 4)


@trap(
    catches="nbytes() leaves the scales out",
    severity="major",
    story="The reported saving is then larger than the real one.",
    seen=BLIND,
    mutant=edits(
        (
            "sum(pool.nbytes for pool in self.pools)",
            "sum(pool.nbytes for pool in self.pools[:: max(1, len(self.pools) // 2)])",
        ),
        (
            "sum(array.nbytes for fields in held for array in fields)",
            "sum(a.nbytes for f in held for a in f[:: max(1, len(f) // 2)])",
        ),
    ),
)
def scales_not_counted(submission: Submission, rng: Rng) -> None:
    for kind, bits in QUANTISED:
        twin, rows = _full(submission, rng, kind, bits)
        # The error bound holds for every row by itself: each needs at least a byte of scale.
        least = rows * (bits * 64 // 8 + 1)
        claim = claimed_bytes(twin)
        expect.that(
            claim >= least,
            f"nbytes() is too small: {claim} of {kind}, and codes and scales take {least}",
        )


@trap(
    catches="nbytes() counts one layer, or keys only",
    severity="minor",
    story="The reported size is too small by the number of layers, or by two.",
    mutant=edits(
        ("pool.nbytes for pool in self.pools", "pool[0].nbytes for pool in self.pools"),
        ("for fields in layers]", "for fields in layers[:1]]"),
    ),
)
def nbytes_of_one_layer(submission: Submission, rng: Rng) -> None:
    for kind in ("dense", "paged"):
        twin, rows = _full(submission, rng, kind, None)
        claim, least = claimed_bytes(twin), rows * 64 * 4
        expect.that(
            claim >= least, f"nbytes() is too small: {claim} of {kind}, and rows take {least}"
        )
        expect.that(
            claim <= 1.5 * least + 8192,
            f"nbytes() is too large: {claim} of {kind}, and rows take {least}",
        )


_POOLS = "sum(pool.nbytes for pool in self.pools) + tables"
_ARRAYS = "sum(array.nbytes for fields in held for array in fields)"


@trap(
    catches="nbytes() leaves the rows out, or counts elements, or eighths where bytes are meant",
    severity="minor",
    story="Only the tables are counted, or an array's size is taken for its bytes.",
    mutant=edits((_POOLS, "tables"), (_ARRAYS, "0")),
    also=[
        edit(_POOLS, "tables"),
        edits(
            (_POOLS, _POOLS.replace("nbytes", "size")), (_ARRAYS, _ARRAYS.replace("nbytes", "size"))
        ),
        edits(
            (_POOLS, _POOLS.replace("nbytes", "nbytes // 8")),
            (_ARRAYS, _ARRAYS.replace("nbytes", "nbytes // 8")),
        ),
    ],
)
def nbytes_without_rows(submission: Submission, rng: Rng) -> None:
    for kind in ("dense", "paged"):
        twin = Twin(submission, rng, kind, width=64, page=8, pages=8)
        twin.add(64)
        rows = 64 * 2 * 2 * 2 * 64 * 8
        claim = claimed_bytes(twin)
        # One layer of two, or keys only, is another bug.
        expect.that(
            claim >= rows // 4,
            f"nbytes() is far too small: {claim} of {kind}, and rows take {rows}",
        )


@trap(
    catches="nbytes() counts a shared page once for every sequence that holds it",
    severity="minor",
    story="The sum goes over the tables of the sequences, so that a fork doubles it.",
    seen=BLIND,
    mutant=edit(
        "        return sum(pool.nbytes for pool in self.pools) + tables\n",
        "        n = max(self.num_pages, sum(map(len, self.tables.values())))\n"
        "        return sum(pool.nbytes for pool in self.pools) * n // self.num_pages + tables\n",
    ),
)
def nbytes_of_shared_pages_twice(submission: Submission, rng: Rng) -> None:
    for kind, bits in PAGED:
        twin, _ = _full(submission, rng, kind, bits)
        before = claimed_bytes(twin)
        twin.forks(next(iter(twin.model.rows)), 2)
        claim = claimed_bytes(twin)
        expect.that(
            claim <= 1.25 * before + 4096,
            f"nbytes() grows with forks that share all pages: {before}, then {claim} of {kind}",
        )


@trap(
    catches="nbytes() counts one sequence only",
    severity="minor",
    story="The loop over the sequences ends with the first.",
    mutant=edits(
        (
            "sum(pool.nbytes for pool in self.pools)",
            "sum(pool.nbytes for pool in self.pools) // self.num_pages"
            " * len(next(iter(self.tables.values()), []))",
        ),
        ("for layers in self.rows.values()", "for layers in list(self.rows.values())[:1]"),
    ),
)
def nbytes_of_one_sequence(submission: Submission, rng: Rng) -> None:
    for kind, bits in EACH:
        twin = Twin(submission, rng, kind, bits, width=64, page=8, pages=8, dtype=np.float32)
        twin.add(32)
        twin.add(32)
        least = 64 * 2 * 2 * 2 * (bits * 64 // 8 if bits else 64 * 4)
        claim = claimed_bytes(twin)
        expect.that(
            claim >= least,
            f"nbytes() is too small: {claim} with two sequences of {kind} that take {least}",
        )


@trap(
    catches="one scale for all positions of an append",
    severity="major",
    story="One outlier token in a long prompt rounds the other tokens to zero.",
    control=rows_of_one_size,
    mutant=edit(
        "largest = np.abs(x).max(axis=-1, keepdims=True)",
        "largest = np.abs(x).max(axis=(0, 2), keepdims=True, initial=0).repeat(len(x), 0)",
    ),
    seen=BLIND,
)
def scale_of_the_whole_append(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, QUANTISED):
        seq = twin.add()
        k, v = twin.rows(4), twin.rows(4)
        k[1], v[2] = 1000 * k[1], 1000 * v[2]
        twin.put(seq, 0, k, v)
        twin.check()


@trap(
    catches="one scale for all heads of a position",
    severity="major",
    story="Heads differ by orders of magnitude; the largest sets the rounding error of all.",
    seen=BLIND,
    control=rows_of_one_size,
    mutant=edit(
        "largest = np.abs(x).max(axis=-1, keepdims=True)",
        "largest = np.abs(x).max(axis=(-2, -1), keepdims=True).repeat(x.shape[1], axis=1)",
    ),
)
def scale_shared_by_heads(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, QUANTISED):
        seq = twin.add()
        k, v = twin.rows(2), twin.rows(2)
        k[:, 1], v[:, 0] = 1000 * k[:, 1], 1000 * v[:, 0]
        twin.put(seq, 0, k, v)
        twin.check()


@trap(
    catches="the scale of the first tokens is used for all that follow",
    severity="major",
    story="Several engines froze scales on warm-up text; later tokens saturated.",
    control=rows_of_one_size,
    mutant=insert_after(
        "largest = np.abs(x).max(axis=-1, keepdims=True)\n",
        "        if x.size:\n"
        '            self.first = getattr(self, "first", largest.max())\n'
        "            largest = np.full_like(largest, self.first)\n",
    ),
)
def scale_frozen_at_the_start(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, QUANTISED):
        seq = twin.add()
        for size in (1.0, 50.0, 0.02):
            rows = size * rng.uniform(0.5, 1.0, (2, 2, 4))
            twin.put(seq, 0, rows, -rows)
        twin.check()


@trap(
    catches="stored positions are decoded and encoded again when others arrive",
    severity="major",
    story="A popular library rebuilds its cache every few tokens; the oldest error tripled.",
    mutant=edits(
        (
            "largest = np.abs(x).max(axis=-1, keepdims=True)",
            "largest = np.abs(x).max(axis=(0, 2), keepdims=True, initial=0).repeat(len(x), 0)",
        ),
        (
            "        self._write(seq, layer, start, self.codec.encode(k) + self.codec.encode(v))\n"
            "        self.counts[seq][layer] = start + len(k)\n",
            "        old_k, old_v = self.view(seq, layer)\n"
            "        k, v = np.concatenate([old_k, k]), np.concatenate([old_v, v])\n"
            "        self._write(seq, layer, 0, self.codec.encode(k) + self.codec.encode(v))\n"
            "        self.counts[seq][layer] = len(k)\n",
        ),
    ),
)
def whole_cache_requantised(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, QUANTISED):
        seq = twin.add(2)
        twin.check()
        for size in (3.0, 30.0, 300.0):
            twin.put(seq, 0, size * twin.rows(1), size * twin.rows(1))
        twin.append(seq, 3, [1])
        twin.check()


@trap(
    catches="a row of zeros divides by its scale of zero",
    severity="major",
    story="Padding tokens give such rows; a constant group gave NaN in a well-known 2-bit cache.",
    mutant=edit(
        "scale = (largest / self.top).astype(np.float32)",
        "unit = np.abs(x / largest).max(axis=-1, keepdims=True)\n"
        "        scale = (unit * largest / self.top).astype(np.float32)",
    ),
)
def zero_row(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, QUANTISED):
        seq = twin.add()
        rows = twin.rows(3)
        rows[1] = 0.0
        twin.put(seq, 0, rows, np.zeros_like(rows))
        twin.check()


@trap(
    catches="a floor under the scale, meant for zero rows, rounds small rows to zero",
    severity="major",
    story="An epsilon of 1e-3 against division by zero is as large as normalised keys.",
    mutant=edit("= (largest / self.top).astype", "= np.maximum(largest / self.top, 1e-3).astype"),
)
def small_rows_vanish(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, QUANTISED):
        seq = twin.add()
        rows = rng.uniform(0.002, 0.004, (3, 2, 4)) * rng.choice([-1.0, 1.0], (3, 2, 4))
        rows[..., 0] = 0.001
        twin.put(seq, 0, rows, -rows)
        twin.check()


@trap(
    catches="codes are truncated towards zero instead of rounded to the nearest",
    severity="major",
    story="A cast to int truncates: twice the error, and all of it in one direction.",
    seen=BLIND,
    mutant=edit("np.rint(x / divisor)", "np.trunc(x / divisor)"),
)
def codes_cut_not_rounded(submission: Submission, rng: Rng) -> None:
    for kind, bits in QUANTISED:
        twin = Twin(submission, rng, kind, bits, layers=1, width=8)
        rows = three_quarters(rng, bits)
        twin.put(twin.add(), 0, rows, -rows)
        twin.check()


def _largest_negative(submission: Submission, rng: Rng) -> None:
    """Rows whose largest element is negative."""
    for twin in twins(submission, rng, QUANTISED, layers=1):
        k, v = twin.rows(3), twin.rows(3)
        k[..., 1], v[..., 2] = -7.0, -7.0
        twin.put(twin.add(), 0, k, v)
        twin.check()


@trap(
    catches="8-bit codes are scaled by 128 instead of 127: the largest element becomes −128",
    severity="major",
    story="128 does not fit into eight signed bits.",
    mutant=edit("self.top = 2 ** (bits - 1) - 1", "self.top = 128 if bits == 8 else 7"),
)
def largest_element_wraps(submission: Submission, rng: Rng) -> None:
    for kind in ("quantized", "paged_quantized"):
        _largest_positive(Twin(submission, rng, kind, 8, layers=1))


@trap(
    catches="4-bit codes are scaled by 8 instead of 7: the largest positive element becomes −8",
    severity="critical",
    story="8 does not fit into four signed bits.",
    seen=BLIND,
    mutant=edit(
        "self.top = 2 ** (bits - 1) - 1",
        "self.top = 8 if bits == 4 else 127",
    ),
)
def largest_nibble_wraps(submission: Submission, rng: Rng) -> None:
    for kind in ("quantized", "paged_quantized"):
        _largest_positive(Twin(submission, rng, kind, 4, layers=1))


@trap(
    catches="codes are scaled by 2^(bits−1) and cut off one below, so the largest element shrinks",
    severity="major",
    story="Signed codes reach from −2^(bits−1) to 2^(bits−1) − 1; the scale fits the first only.",
    seen=BLIND,
    control=_largest_negative,
    mutant=edits(
        ("self.top = 2 ** (bits - 1) - 1", "self.top = 2 ** (bits - 1)"),
        ("-self.top, self.top).astype(np.int8)", "-self.top, self.top - 1).astype(np.int8)"),
    ),
)
def largest_element_clipped(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, QUANTISED, layers=1):
        _largest_positive(twin)


def _largest_positive(twin: Twin) -> None:
    """Rows whose largest element is positive."""
    k, v = twin.rows(3), twin.rows(3)
    k[..., 1], v[..., 2] = 7.0, 7.0
    twin.put(twin.add(), 0, k, v)
    twin.check()


@trap(
    catches="negative 4-bit codes come back as 8 … 15",
    severity="major",
    story="Unpacking does not sign-extend the fourth bit.",
    mutant=edit("(nibbles ^ 8).astype(np.int8) - np.int8(8)", "nibbles.astype(np.int8)"),
)
def nibbles_lose_their_sign(submission: Submission, rng: Rng) -> None:
    for kind in ("quantized", "paged_quantized"):
        twin = Twin(submission, rng, kind, 4, width=8)
        seq = twin.add()
        every = np.array([-7.0, -6, -5, -4, -3, -2, -1, 7, 6, 5, 4, 3, 2, 1, 0, -7])
        rows = every.reshape(1, 2, 8)
        twin.put(seq, 0, rows, rows[..., ::-1])
        twin.check()


@trap(
    catches="with an odd head_dim the last or the first 4-bit code is dropped",
    severity="major",
    story="D // 2 bytes are allocated for D codes.",
    mutant=edits(
        ("half = -(-codes.shape[-1] // 2)", "half = max(1, codes.shape[-1] // 2)"),
        (
            "high[..., : codes.shape[-1] - half] = codes[..., half:].view(np.uint8)",
            "rest = codes[..., half : 2 * half]\n"
            "    high[..., : rest.shape[-1]] = rest.view(np.uint8)",
        ),
        (
            "axis=-1)[..., :width]",
            "axis=-1)[..., :width]\n"
            "    nibbles = np.pad(nibbles, [(0, 0), (0, 0), (0, width - nibbles.shape[-1])])",
        ),
    ),
    also=[
        edit("axis=-1)[..., :width]", "axis=-1)[..., -width:]"),
        # A width of 1 has no codes at all, and wider rows do not fit into what is allocated.
        edit("half = -(-codes.shape[-1] // 2)", "half = codes.shape[-1] // 2"),
    ],
    seen=BLIND,
)
def odd_width_loses_an_element(submission: Submission, rng: Rng) -> None:
    for kind in ("quantized", "paged_quantized"):
        for width in (1, 3, 7):
            twin = Twin(submission, rng, kind, 4, width=width)
            seq = twin.add()
            rows = 2 + np.abs(twin.rows(3))
            twin.put(seq, 0, rows, -rows)
            twin.check()
