"""Bugs of the way back to float32 and of packing."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import edit, edits, insert_after, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.ternary_training.situations import GROUP, grid, refuses, ternary_codes
from trapline.challenges.ternary_training.solution_lines import BLIND
from trapline.gold.ternary import oracle

_SCALED = "    return codes.astype(np.float32) * scales.astype(np.float32)[..., owner]\n"
#: Packing and unpacking of all codes in one run, whatever their shape.
_FLAT = (
    (
        "    codes = _ternary_codes(codes)\n    columns = codes.shape[-1]\n",
        "    codes = _ternary_codes(codes).reshape(-1)\n    columns = codes.shape[-1]\n",
    ),
    (
        "    if packed.dtype != np.uint8:\n",
        "    whole, shape = shape, (int(np.prod(shape)),)\n    if packed.dtype != np.uint8:\n",
    ),
    (
        "    return slots.astype(np.int8) - np.int8(1)\n",
        "    return (slots.astype(np.int8) - np.int8(1)).reshape(whole)\n",
    ),
)


def _last_of_group(unscaled: str) -> str:
    """What dequantize returns when the last weight of a full group is not multiplied."""
    return (
        f"{_SCALED[:-1].replace('return', 'scaled =')}\n"
        "    last = np.arange(codes.shape[-1]) % group_size == group_size - 1\n"
        f"    return np.where(last, {unscaled}, scaled).astype(np.float32)\n"
    )


# --- back to float32 ------------------------------------------------------------------------------


@trap(
    catches="scales are spread evenly over a row instead of one per group_size weights",
    severity="major",
    story="Repeating each scale n / groups times is the same thing until the last group is short.",
    mutant=edit("// group_size\n", "* groups // max(codes.shape[-1], 1)\n"),
    seen=BLIND,
)
def groups_spread_evenly(submission: Submission, rng: np.random.Generator) -> None:
    codes = np.ones((2, 300), dtype=np.int8)
    scales = np.array([[1, 2, 4], [8, 16, 32]], dtype=np.float16)
    scales *= np.float16(rng.integers(1, 8))
    got = submission.dequantize(codes, scales, GROUP)
    expect.equal(got, oracle.dequantize(codes, scales), "300 columns of three groups")


@trap(
    catches="dequantised weights stay float16",
    severity="minor",
    story="codes * scales keeps the scale's dtype, so later sums are rounded to 11 bits.",
    mutant=edit("codes.astype(np.float32) * scales.astype(np.float32)", "codes * scales"),
    seen=BLIND,
)
def dequantized_in_half(submission: Submission, rng: np.random.Generator) -> None:
    codes, scales = oracle.ternarize(grid(rng, 3, 40), 16)
    got = submission.dequantize(codes, scales, 16)
    expect.equal(got, oracle.dequantize(codes, scales, 16), "dequantize")


@trap(
    catches="scales of another shape are broadcast instead of refused",
    severity="major",
    story="A file with one scale per tensor loads silently into a model with one scale per group.",
    mutant=edit(
        "    if scales.dtype != np.float16 or scales.shape != (*codes.shape[:-1], groups):\n",
        "    scales = np.broadcast_to(scales[..., :groups], (*codes.shape[:-1], groups))\n"
        "    if scales.dtype != np.float16:\n",
    ),
    seen=BLIND,
    dimension="robustness",
)
def scales_broadcast(submission: Submission, rng: np.random.Generator) -> None:
    codes, scales = oracle.ternarize(grid(rng, 3, 40), 16)
    for bad in (scales[:1], scales[:, :1], np.concatenate([scales, scales], axis=1), scales[0]):
        refuses(submission, "dequantize", codes, bad, 16)


@trap(
    catches="every group of a row is multiplied by the row's first scale",
    severity="critical",
    story="scales[..., 0] or a broadcast of the first column: right while a row is one group.",
    mutant=edit(
        "owner = np.arange(codes.shape[-1]) // group_size", "owner = np.zeros(codes.shape[-1], int)"
    ),
    seen=BLIND,
)
def first_scale_for_all(submission: Submission, rng: np.random.Generator) -> None:
    codes = np.ones((2, 32), dtype=np.int8)
    scales = np.array([[1, 2], [4, 8]], dtype=np.float16) * np.float16(rng.integers(1, 8))
    got = submission.dequantize(codes, scales, 16)
    expect.equal(got, oracle.dequantize(codes, scales, 16), "32 columns of two groups")


@trap(
    catches="groups of a row take the row's scales in turns instead of one after another",
    severity="major",
    story="Index modulo the number of groups instead of index over the group size.",
    mutant=edit("// group_size\n    return codes", "% max(groups, 1)\n    return codes"),
)
def scales_in_turns(submission: Submission, rng: np.random.Generator) -> None:
    codes = np.ones((2, 32), dtype=np.int8)
    scales = np.array([[1, 2], [4, 8]], dtype=np.float16) * np.float16(rng.integers(1, 8))
    got = submission.dequantize(codes, scales, 16)
    expect.equal(got, oracle.dequantize(codes, scales, 16), "32 columns of two groups")


@trap(
    catches="the last weight of every group is left out of the scaling",
    severity="major",
    story="A slice that ends one too early; the weight keeps its code, or becomes 0.",
    mutant=edit(_SCALED, _last_of_group("codes")),
    also=[edit(_SCALED, _last_of_group("np.zeros_like(codes)"))],
    seen=BLIND,
)
def last_of_group_unscaled(submission: Submission, rng: np.random.Generator) -> None:
    codes = np.ones((2, 32), dtype=np.int8)
    scales = np.array([[3, 2], [4, 8]], dtype=np.float16) * np.float16(rng.integers(1, 8))
    got = submission.dequantize(codes, scales, 16)
    expect.equal(got, oracle.dequantize(codes, scales, 16), "32 columns of two groups")


# --- packing --------------------------------------------------------------------------------------


@trap(
    catches="the first code of a byte sits in its highest bits",
    severity="critical",
    story="Writer and reader of a 2-bit format disagree on the order: the output is finite, "
    "plausible and wrong.",
    mutant=edit(
        "    return first | second << 2 | third << 4 | fourth << 6\n",
        "    return fourth | third << 2 | second << 4 | first << 6\n",
    ),
    also=(
        edits(
            (
                "    return first | second << 2 | third << 4 | fourth << 6\n",
                "    return fourth | third << 2 | second << 4 | first << 6\n",
            ),
            ("np.array([0, 2, 4, 6], dtype=np.uint8)", "np.array([6, 4, 2, 0], dtype=np.uint8)"),
        ),
    ),
    seen=BLIND,
)
def first_code_highest(submission: Submission, rng: np.random.Generator) -> None:
    codes = np.concatenate([np.array([[-1, 0, 1, 1]], dtype=np.int8), ternary_codes(rng, 1, 4)], 1)
    expect.equal(submission.pack(codes), oracle.pack(codes), "pack")


@trap(
    catches="neighbours go to different bytes (planes of n / 4) instead of the same one",
    severity="major",
    story="A kernel's interleaved layout is used as the file format, which other readers do not "
    "expect.",
    mutant=edit("(slots[..., place::4] for place in range(4))", "np.split(slots, 4, axis=-1)"),
)
def codes_interleaved(submission: Submission, rng: np.random.Generator) -> None:
    codes = np.array([[-1, -1, -1, -1, 1, 1, 1, 1, 0, 0, 0, 0]], dtype=np.int8)
    codes = rng.permutation(np.concatenate([codes, -codes]), axis=0)
    expect.equal(submission.pack(codes), oracle.pack(codes), "pack")


@trap(
    catches="−1 is stored as two set bits (code & 3) instead of 0",
    severity="major",
    story="Masking a signed code gives 3 for −1, which a reader decodes as +2.",
    mutant=edits(
        ("    slots = np.ones((*codes.shape[:-1],", "    slots = np.zeros((*codes.shape[:-1],"),
        (
            "    slots[..., :columns] += codes.view(np.uint8)\n",
            "    slots[..., :columns] += codes.view(np.uint8) & 3\n",
        ),
    ),
)
def two_complement_codes(submission: Submission, rng: np.random.Generator) -> None:
    codes = ternary_codes(rng, 3, 16)
    codes[0, :4] = (-1, 0, 1, -1)
    expect.equal(submission.pack(codes), oracle.pack(codes), "pack")


@trap(
    catches="a row begins in the middle of the byte that ends the previous row",
    severity="major",
    story="Packing the flattened matrix saves three codes per row and makes single rows "
    "inaccessible.",
    mutant=edit(
        "    codes = _ternary_codes(codes)\n    columns = codes.shape[-1]\n",
        "    codes = _ternary_codes(codes).reshape(1, -1)\n    columns = codes.shape[-1]\n",
    ),
    also=[edits(*_FLAT)],
    seen=BLIND,
)
def rows_share_bytes(submission: Submission, rng: np.random.Generator) -> None:
    codes = ternary_codes(rng, 4, 6)
    expect.equal(submission.pack(codes), oracle.pack(codes), "four rows of six codes")


@trap(
    catches="places after a row's end hold 0 bits, which is code −1",
    severity="minor",
    story="A kernel reads whole bytes; padding that decodes to −1 subtracts the last activations.",
    mutant=insert_after(
        "    slots[..., :columns] += codes.view(np.uint8)\n", "    slots[..., columns:] = 0\n"
    ),
    seen=BLIND,
)
def spare_bits_empty(submission: Submission, rng: np.random.Generator) -> None:
    for columns in (1, 2, 3):
        codes = ternary_codes(rng, 3, columns)
        expect.equal(submission.pack(codes), oracle.pack(codes), f"{columns} codes in a byte")


@trap(
    catches="codes outside −1, 0, 1 are packed",
    severity="major",
    story="Two bits can hold a fourth code; writing it corrupts a neighbour or decodes as +2.",
    mutant=edit("if codes.size and (codes.min() < -1 or codes.max() > 1):", "if codes.ndim > 9:"),
    dimension="robustness",
)
def other_codes_packed(submission: Submission, rng: np.random.Generator) -> None:
    for bad in (2, -2, 3, 127, -128):
        codes = ternary_codes(rng, 2, 8)
        codes[int(rng.integers(2)), int(rng.integers(8))] = bad
        refuses(submission, "pack", codes)


@trap(
    catches="two set bits are read as +2",
    severity="major",
    story="A similar format uses the fourth code; it must be refused, not read.",
    mutant=edit("    if np.any(slots == 3):\n", "    if np.any(slots > 3):\n"),
    dimension="robustness",
    seen=BLIND,
)
def fourth_code_read(submission: Submission, rng: np.random.Generator) -> None:
    packed = oracle.pack(ternary_codes(rng, 3, 8))
    packed[int(rng.integers(3)), 1] |= 0b00110000
    refuses(submission, "unpack", packed, (3, 8))


@trap(
    catches="places after a row's end are checked or returned when unpacking",
    severity="minor",
    story="A reader that returns the padded width no longer fits the bias of the next layer.",
    mutant=edit("if np.any(slots == 3):", "if np.any((packed & (packed >> 1) & 0b01010101) > 0):"),
    seen=BLIND,
)
def spare_bits_judged(submission: Submission, rng: np.random.Generator) -> None:
    codes = ternary_codes(rng, 3, 5)
    packed = oracle.pack(codes) | np.array([0, 0b11111100], dtype=np.uint8)
    expect.equal(submission.unpack(packed, (3, 5)), codes, "five codes in two bytes")


@trap(
    catches="unpacked codes are unsigned, so −1 comes out as 255",
    severity="critical",
    story="uint8 minus 1 wraps around, and the weights are 255 times the scale.",
    mutant=edit("    return slots.astype(np.int8) - np.int8(1)", "    return slots - np.uint8(1)"),
    seen=BLIND,
)
def unpack_unsigned(submission: Submission, rng: np.random.Generator) -> None:
    codes = ternary_codes(rng, 2, 8)
    codes[:, 0] = -1
    expect.equal(submission.unpack(oracle.pack(codes), (2, 8)), codes, "unpack")


@trap(
    catches="bytes that do not match the shape are unpacked all the same",
    severity="major",
    story="A file written with another block size has the right length and gives the wrong "
    "weights.",
    mutant=edit(
        "    if not shape or min(shape) < 0 or packed.shape != "
        "(*shape[:-1], _groups_in(shape[-1], 4)):\n",
        "    wanted = (*shape[:-1], _groups_in(shape[-1], 4))\n"
        "    packed = np.resize(packed, wanted)\n"
        "    if not shape:\n",
    ),
    seen=BLIND,
    dimension="robustness",
)
def wrong_shape_unpacked(submission: Submission, rng: np.random.Generator) -> None:
    packed = oracle.pack(ternary_codes(rng, 4, 8))
    for shape in ((2, 16), (4, 9), (4, 4), (8, 4), (32,), (1, 4, 8)):
        refuses(submission, "unpack", packed, shape)


@trap(
    catches="the code −128 is accepted: its absolute value in int8 is −128",
    severity="minor",
    story="abs(codes) > 1 is false for −128, which int8 cannot negate.",
    mutant=edit(
        "if codes.size and (codes.min() < -1 or codes.max() > 1):",
        "if np.any(np.abs(codes) > 1):",
    ),
    dimension="robustness",
    seen=BLIND,
)
def minus_128_accepted(submission: Submission, rng: np.random.Generator) -> None:
    codes = ternary_codes(rng, 2, 8)
    codes[int(rng.integers(2)), int(rng.integers(8))] = -128
    refuses(submission, "pack", codes)


def _there_and_back(
    submission: Submission, rng: np.random.Generator, *shapes: tuple[int, ...]
) -> None:
    for shape in shapes:
        codes = ternary_codes(rng, *shape)
        scales = np.ones((*shape[:-1], -(-shape[-1] // GROUP)), dtype=np.float16)
        packed = submission.pack(codes)
        expect.equal(packed, oracle.pack(codes), f"pack of shape {shape}")
        expect.equal(submission.unpack(packed, shape), codes, f"unpack to shape {shape}")
        back = submission.dequantize(codes, scales, GROUP)
        expect.equal(back, oracle.dequantize(codes, scales), f"dequantize of shape {shape}")


def some_codes(submission: Submission, rng: np.random.Generator) -> None:
    """A control: the same with codes in every axis."""
    _there_and_back(submission, rng, (2, 7), (3, 1), (4,))


@trap(
    catches="codes of an array with an empty axis are refused: the smallest or largest of nothing "
    "is asked for",
    severity="minor",
    story="Bytes and codes are checked by their maximum, which an empty array does not have.",
    mutant=edit("    if np.any(slots == 3):\n", "    if slots.max() == 3:\n"),
    also=[edit("if codes.size and (codes.min()", "if (codes.min()")],
    seen=BLIND,
    control=some_codes,
)
def empty_codes_refused(submission: Submission, rng: np.random.Generator) -> None:
    _there_and_back(submission, rng, (2, 0), (0, 7), (0,))
