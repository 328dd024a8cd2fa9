"""Bugs of codes and scales."""

import numpy as np

from trapline.arena.judge.traps import Mutant, edit, edits, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.kv_cache.cases import QUANTISED, Rng, Twin, twins
from trapline.challenges.kv_cache.situations import (
    BLIND,
    rows_of_one_size,
    three_quarters,
    zeros_alone,
)
from trapline.challenges.kv_cache.traps_rows import WRITE

LARGEST = "largest = np.abs(x).max(axis=-1, keepdims=True)"
PACK = (
    "    half = -(-codes.shape[-1] // 2)\n"
    "    low = codes[..., :half].view(np.uint8) & 15\n"
    "    high = np.zeros_like(low)\n"
    "    high[..., : codes.shape[-1] - half] = codes[..., half:].view(np.uint8)\n"
)
PACK_PAIRS = (
    "    wide = np.zeros((*codes.shape[:-1], codes.shape[-1] + codes.shape[-1] % 2), np.int8)\n"
    "    wide[..., : codes.shape[-1]] = codes\n"
    "    low = np.ascontiguousarray(wide[..., ::2]).view(np.uint8) & 15\n"
    "    high = np.ascontiguousarray(wide[..., 1::2]).view(np.uint8)\n"
)
UNPACK = "nibbles = np.concatenate([packed & 15, packed >> 4], axis=-1)[..., :width]"


def _pairs(first: str, second: str) -> Mutant:
    """Neighbours in one byte, read back as these two halves."""
    return edits(
        (PACK, PACK_PAIRS),
        (
            UNPACK,
            f"nibbles = np.stack([{first}, {second}], axis=-1)\n"
            "    nibbles = nibbles.reshape(*packed.shape[:-1], -1)[..., :width]",
        ),
    )


@trap(
    catches="the scale is taken from the largest element instead of the largest magnitude",
    severity="critical",
    story="Rows dominated by negative elements are clipped.",
    seen=BLIND,
    mutant=edit(LARGEST, "largest = np.abs(x.max(axis=-1, keepdims=True))"),
)
def largest_without_sign(submission: Submission, rng: Rng) -> None:
    for kind, bits in QUANTISED:
        twin = Twin(submission, rng, kind, bits, layers=1)
        rows = np.tile(np.array([-5.0, 1.1, 2.0, 0.45]), (2, 2, 1))
        twin.put(twin.add(), 0, rows, -rows)
        twin.check()


def _positive_rows(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, QUANTISED, layers=1):
        twin.put(twin.add(), 0, np.abs(twin.rows(3)), np.abs(twin.rows(3)))
        twin.check()


_ROUNDED = "np.clip(np.rint(x / divisor), -self.top, self.top)"


@trap(
    catches="negative elements come back as 0, or as positive ones",
    severity="major",
    story="Codes between 0 and the top one, or of magnitudes.",
    mutant=edit(_ROUNDED, "np.clip(np.rint(x / divisor), 0, self.top)"),
    also=[edit(_ROUNDED, "np.abs(np.rint(x / divisor))")],
    control=_positive_rows,
)
def negative_elements_lost(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, QUANTISED, layers=1):
        twin.add(3)
        twin.check()


@trap(
    catches="the two 4-bit codes of a byte change places: packing and unpacking disagree on its "
    "halves",
    severity="critical",
    story="Two functions follow two conventions, and no round-trip test compares them.",
    seen=BLIND,
    mutant=edit("[packed & 15, packed >> 4]", "[packed >> 4, packed & 15]"),
    # The codes of a byte are neighbours.
    also=[_pairs("packed >> 4", "packed & 15")],
)
def nibbles_swapped(submission: Submission, rng: Rng) -> None:
    for kind in ("quantized", "paged_quantized"):
        twin = Twin(submission, rng, kind, 4, layers=1, width=6)
        rows = np.tile(np.array([7.0, 5, 3, -1, -4, -6]), (2, 2, 1))
        twin.put(twin.add(), 0, rows, -rows)
        twin.check()


@trap(
    catches="both 4-bit codes of a byte are read from its low half",
    severity="major",
    story="The shift by four bits is forgotten.",
    mutant=_pairs("packed & 15", "packed & 15 | 0 * packed"),
)
def low_nibble_read_twice(submission: Submission, rng: Rng) -> None:
    for kind in ("quantized", "paged_quantized"):
        twin = Twin(submission, rng, kind, 4, layers=1, width=6)
        rows = np.tile(np.array([7.0, 5, 3, -1, -4, -6]), (2, 2, 1))
        twin.put(twin.add(), 0, rows, -rows)
        twin.check()


@trap(
    catches="codes are rounded down instead of to the nearest",
    severity="major",
    story="floor() errs in one direction, by up to a whole step.",
    mutant=edit("np.rint(x / divisor)", "np.floor(x / divisor)"),
    seen=BLIND,
)
def codes_rounded_down(submission: Submission, rng: Rng) -> None:
    for kind, bits in QUANTISED:
        twin = Twin(submission, rng, kind, bits, layers=1, width=8)
        rows = three_quarters(rng, bits)
        twin.put(twin.add(), 0, rows, rows)
        twin.check()


@trap(
    catches="quantised values are stored with the scale of their keys",
    severity="major",
    story="The scales of k and v are made together, and the first is kept for both.",
    seen=BLIND,
    control=rows_of_one_size,
    mutant=edit(
        WRITE,
        "fields = self.codec.encode(k) + self.codec.encode(v)\n"
        "        if len(fields) == 4:\n"
        "            fields = (*fields[:3], fields[1])\n"
        "        self._write(seq, layer, start, fields)",
    ),
)
def values_with_the_scale_of_the_keys(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, QUANTISED, layers=1):
        rows = np.ones((3, 2, 4)) * rng.choice([-1.0, 1.0], (3, 2, 4))
        twin.put(twin.add(), 0, rows, 4 * rows)
        twin.check()


@trap(
    catches="keys and values of a position share one scale",
    severity="major",
    story="The larger of the two sets the rounding error of both.",
    control=rows_of_one_size,
    mutant=edits(
        (
            WRITE,
            "self.codec.other = v\n"
            "        fields = self.codec.encode(k)\n"
            "        self.codec.other = k\n"
            "        fields += self.codec.encode(v)\n"
            "        self.codec.other = None\n"
            "        self._write(seq, layer, start, fields)",
        ),
        (
            LARGEST,
            LARGEST + "\n"
            "        if getattr(self, 'other', None) is not None:\n"
            "            largest = np.maximum(largest, np.abs(self.other).max(-1, keepdims=True))",
        ),
    ),
    seen=BLIND,
)
def keys_and_values_share_a_scale(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, QUANTISED, layers=1):
        twin.put(twin.add(), 0, twin.rows(2), 1000 * twin.rows(2))
        twin.check()


@trap(
    catches="one scale for the whole tensor of an append",
    severity="major",
    story="One outlier rounds all other heads and positions to zero.",
    control=rows_of_one_size,
    mutant=edit(
        LARGEST,
        "largest = np.full((*x.shape[:2], 1), np.abs(x).max(initial=0))",
    ),
)
def one_scale_for_the_tensor(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, QUANTISED, layers=1):
        k, v = twin.rows(3), twin.rows(3)
        k[1, 0], v[2, 1] = 1000 * k[1, 0], 1000 * v[2, 1]
        twin.put(twin.add(), 0, k, v)
        twin.check()


@trap(
    catches="scales are stored in float16 or in its smallest steps: too coarse for small rows, and "
    "the first for 8-bit codes, too",
    severity="major",
    story="A scale of 1e-5 has four bits left in float16.",
    mutant=edit(
        "if self.bits == 4 else codes), scale",
        "if self.bits == 4 else codes), scale.astype(np.float16).astype(np.float32)",
    ),
    also=[
        edit(
            "if self.bits == 4 else codes), scale",
            "if self.bits == 4 else codes), np.rint(scale * 2**24) * np.float32(2**-24)",
        )
    ],
    seen=BLIND,
)
def scales_in_half_precision(submission: Submission, rng: Rng) -> None:
    for kind, bits in QUANTISED:
        twin = Twin(submission, rng, kind, bits, layers=1, width=8)
        rows = rng.uniform(0.5, 1.0, (3, 2, 8)) * 1.3e-3
        twin.put(twin.add(), 0, rows, -rows)
        twin.check()


@trap(
    catches="large rows are clipped at a fixed bound",
    severity="major",
    story="Activations are assumed to stay below a constant.",
    mutant=edit(LARGEST, "x = np.clip(x, -100.0, 100.0).astype(x.dtype)\n        " + LARGEST),
)
def large_rows_clipped(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, QUANTISED, layers=1):
        rows = 8000.0 * rng.uniform(0.5, 1.0, (2, 2, 4))
        twin.put(twin.add(), 0, rows, -rows)
        twin.check()


@trap(
    catches="quantised float64 rows come back as float32",
    severity="minor",
    story="The codes are multiplied by scales of float32.",
    mutant=edit("codes.astype(dtype) * scale.astype(dtype)", "codes.astype(np.float32) * scale"),
    seen=BLIND,
)
def quantised_rows_come_back_narrow(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, QUANTISED, layers=1):
        twin.add(2)
        twin.check()


@trap(
    catches="with an odd head_dim 4-bit rows come back one element too wide",
    severity="major",
    story="The element that fills up the last byte is not cut off.",
    mutant=edit("axis=-1)[..., :width]", "axis=-1)"),
)
def padding_comes_back(submission: Submission, rng: Rng) -> None:
    for kind in ("quantized", "paged_quantized"):
        twin = Twin(submission, rng, kind, 4, layers=1, width=3)
        twin.add(2)
        twin.check()


@trap(
    catches="negative 8-bit codes come back as 128 … 255",
    severity="major",
    story="Signed codes are written to bytes and read as unsigned ones.",
    mutant=edit(
        "            codes = unpack_nibbles(codes, self.width)\n",
        "            codes = unpack_nibbles(codes, self.width)\n"
        "        else:\n"
        "            codes = codes.view(np.uint8)\n",
    ),
)
def bytes_lose_their_sign(submission: Submission, rng: Rng) -> None:
    for kind in ("quantized", "paged_quantized"):
        twin = Twin(submission, rng, kind, 8, layers=1)
        rows = np.tile(np.array([127.0, -1.0, -100.0, 3.0]), (2, 2, 1))
        twin.put(twin.add(), 0, rows, rows)
        twin.check()


@trap(
    catches="rows are encoded with 127 (or 7) levels and decoded with 128 (or 8)",
    severity="major",
    story="Two functions follow two conventions.",
    mutant=edit(
        "return codes.astype(dtype) * scale.astype(dtype)",
        "return codes.astype(dtype) * scale.astype(dtype) * (self.top / (self.top + 1))",
    ),
)
def levels_disagree(submission: Submission, rng: Rng) -> None:
    for kind, bits in QUANTISED:
        twin = Twin(submission, rng, kind, bits, layers=1)
        top = 2.0 ** (bits - 1) - 1
        rows = np.tile(np.array([top, -top, 1.0, 2.0]), (2, 2, 1))
        twin.put(twin.add(), 0, rows, -rows)
        twin.check()


@trap(
    catches="the scale is taken from something else than a row's largest magnitude: half its "
    "range, its deviation, its mean magnitude or its first element",
    severity="major",
    story="Measures that suit asymmetric codes, or most elements.",
    mutant=edit(LARGEST, "largest = np.ptp(x, axis=-1, keepdims=True) / 2"),
    also=[
        edit(LARGEST, f"largest = {measure}")
        for measure in (
            "3 * np.sqrt((x * x).mean(axis=-1, keepdims=True))",
            "3 * x.std(axis=-1, keepdims=True)",
            "2 * np.abs(x).mean(axis=-1, keepdims=True)",
            "np.abs(x[..., :1])",
        )
    ],
)
def scale_of_another_measure(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, QUANTISED, layers=1, width=6):
        rows = np.tile(np.array([0.9, -5.0, 1.1, 2.0, 0.45, 9.0]), (2, 2, 1))
        twin.put(twin.add(), 0, rows, -rows)
        twin.check()


_TOP = "self.top = 2 ** (bits - 1) - 1"


@trap(
    catches="steps are wider than a / (2^(bits−1) − 1): scales are rounded up to a power of two, "
    "or have a margin, or codes use fewer levels",
    severity="major",
    story="Half a step is then more than the error that is allowed.",
    mutant=edit(LARGEST, f"{LARGEST}\n        largest *= 1.1"),
    also=[
        edit(LARGEST, LARGEST + "\n        largest = " + wider)
        for wider in (
            "np.exp2(np.ceil(np.log2(np.where(largest == 0, 1, largest)))) * (largest > 0)",
            "self.top * np.exp2(np.ceil(np.log2(np.where(largest == 0, 1, largest) / self.top)))"
            " * (largest > 0)",
        )
    ]
    + [edit(_TOP, "self.top = 2 ** (bits - 1) - 2"), edit(_TOP, "self.top = 2 ** (bits - 2) - 1")],
    seen=BLIND,
)
def steps_too_wide(submission: Submission, rng: Rng) -> None:
    for kind, bits in QUANTISED:
        twin = Twin(submission, rng, kind, bits, layers=1, width=64)
        rows = rng.uniform(-4.5, 4.5, (4, 2, 64))
        rows[..., 0] = 4.5
        twin.put(twin.add(), 0, rows, -rows)
        twin.check()


@trap(
    catches="something is added to the largest magnitude, which is wrong for small rows",
    severity="minor",
    story="A guard against a division by zero that is as large as the smallest rows.",
    mutant=edit(LARGEST, f"{LARGEST} + 1e-4"),
    also=[edit(LARGEST, f"{LARGEST} + 1e-3")],
)
def scale_with_an_addend(submission: Submission, rng: Rng) -> None:
    for kind, bits in QUANTISED:
        twin = Twin(submission, rng, kind, bits, layers=1, width=64)
        rows = rng.uniform(-1e-3, 1e-3, (4, 2, 64))
        rows[..., 0] = 1e-3
        twin.put(twin.add(), 0, rows, -rows)
        twin.check()


@trap(
    catches="codes are scaled by 2^bits − 1, or by 127 whatever bits says, and wrap or are cut",
    severity="major",
    story="The levels of unsigned codes, or those of 8 bits for 4.",
    mutant=edit(_TOP, "self.top = 2**bits - 1"),
    also=[edit(_TOP, "self.top = 127"), edit(_TOP, "self.top = 2**bits // 2 * 2 - 2")],
    control=zeros_alone,
)
def levels_of_unsigned_codes(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, QUANTISED, layers=1):
        twin.add(3)
        twin.check()


_CODES = "return (nibbles ^ 8).astype(np.int8) - np.int8(8)"


@trap(
    catches="4-bit codes are stored as two's complement and read with an offset, or the other way "
    "round, or with another offset",
    severity="major",
    story="Two functions follow two conventions.",
    mutant=edit(_CODES, "return nibbles.astype(np.int8) - np.int8(8)"),
    also=[
        edit(_CODES, "return nibbles.astype(np.int8) - np.int8(7)"),
        edit(_CODES, "return (nibbles ^ 8).astype(np.int8) - np.int8(7)"),
    ],
)
def nibbles_read_with_an_offset(submission: Submission, rng: Rng) -> None:
    for kind in ("quantized", "paged_quantized"):
        twin = Twin(submission, rng, kind, 4, layers=1)
        rows = np.tile(np.array([7.0, 5, -1, -6]), (2, 2, 1))
        twin.put(twin.add(), 0, rows, -rows)
        twin.check()
