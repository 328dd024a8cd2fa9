"""Named bugs of ternary code, each in the smallest situation that shows it for every seed."""

import time

import numpy as np

from trapline.arena import expect
from trapline.arena.proxy import Submission
from trapline.arena.traps import trap
from trapline.challenges.ternary_training import text
from trapline.challenges.ternary_training.cases import ERROR_LIMIT, weights_of
from trapline.challenges.ternary_training.situations import (
    GROUP,
    config_of,
    grid,
    quantised,
    refuses,
    ternary_codes,
    trained,
    trained_on_noise,
    well_formed,
)
from trapline.gold.ternary import oracle, small_lm


def _same_alone(submission: Submission, w: np.ndarray, group_size: int) -> None:
    """Every group of every row is quantised as if it were the only one."""
    codes, scales = quantised(submission, w, group_size)
    for row, weights in enumerate(w):
        for number, start in enumerate(range(0, w.shape[1], group_size)):
            piece = slice(start, start + group_size)
            alone = quantised(submission, weights[piece].copy(), group_size, "a group alone")
            where = f"row {row}, group {number}"
            expect.equal(codes[row, piece], alone[0], f"the codes of {where} against it alone")
            expect.equal(scales[row, number : number + 1], alone[1], f"the scale of {where}")


# --- the quantiser --------------------------------------------------------------------------------


@trap(
    "ragged-width-refused",
    catches="a width that is no multiple of the group size is refused",
    severity="critical",
    story="A trainer asserted n % group_size == 0 and fell over with the first model of another "
    "width.",
)
def ragged_width_refused(submission: Submission, rng: np.random.Generator) -> None:
    for columns in (300, 127, 129, 1):
        quantised(submission, grid(rng, 3, columns), GROUP, f"width {columns}")


@trap(
    "tail-dropped",
    catches="the weights after the last full group come out as zeros",
    severity="critical",
    story="Reshaping n // group_size groups forgets the rest; the model loses its last columns.",
)
def tail_dropped(submission: Submission, rng: np.random.Generator) -> None:
    w = np.full((2, 300), 0.75, dtype=np.float32) * rng.choice([-1, 1], (2, 300))
    w = w.astype(np.float32)
    codes, scales = quantised(submission, w)
    expect.equal(codes, np.sign(w).astype(np.int8), "the codes of ±0.75")
    expect.equal(scales, np.full((2, 3), 0.75, dtype=np.float16), "the scales of ±0.75")


@trap(
    "padding-counted",
    catches="the zeros that fill up the short last group enter its statistics",
    severity="major",
    story="Padding a ragged width with zeros is the usual cure; averaging over the padding is "
    "the usual slip.",
)
def padding_counted(submission: Submission, rng: np.random.Generator) -> None:
    # 20 real weights in a place for 128: a mean over 128 lets the small ones pass.
    tail = np.concatenate([np.full(10, 4.0), np.full(10, 1.0)]) * rng.choice([-1, 1], 20)
    w = np.concatenate([grid(rng, GROUP), tail.astype(np.float32)])
    codes, scales = quantised(submission, w)
    alone = quantised(submission, w[GROUP:].copy(), 20, "the last group alone")
    expect.equal(codes[GROUP:], alone[0], "the codes of a short last group")
    expect.equal(scales[1:], alone[1], "the scale of a short last group")


@trap(
    "groups-cross-rows",
    catches="groups run on from one row into the next",
    severity="critical",
    story="Flattening before grouping works as long as every width is a multiple of the group "
    "size.",
)
def groups_cross_rows(submission: Submission, rng: np.random.Generator) -> None:
    w = grid(rng, 4, 24)
    w[::2] *= 64
    _same_alone(submission, w, 16)


@trap(
    "one-scale-a-tensor",
    catches="one scale for the whole tensor instead of one a group",
    severity="critical",
    story="The first ternary recipe had one scale a tensor: one loud row silences all others.",
)
def one_scale_a_tensor(submission: Submission, rng: np.random.Generator) -> None:
    w = grid(rng, 4, 32)
    w[int(rng.integers(4))] *= 4096
    _same_alone(submission, w, 16)


@trap(
    "groups-down-columns",
    catches="groups run along the first axis",
    severity="critical",
    story="Weights stored (in, out) in one framework and (out, in) in another: groups on the "
    "wrong axis.",
)
def groups_down_columns(submission: Submission, rng: np.random.Generator) -> None:
    w = grid(rng, 16, 16)
    w[:, int(rng.integers(16))] *= 1024
    _same_alone(submission, w, 8)


@trap(
    "scale-shrinks",
    catches="quantising twice shrinks the scale (mean over all weights, zeros included)",
    severity="critical",
    story="A scale of mean|w| falls from 0.050 to 0.033 when a checkpoint that is ternary "
    "already is saved again.",
)
def scale_shrinks(submission: Submission, rng: np.random.Generator) -> None:
    codes = ternary_codes(rng, 4, 300)
    codes[:, ::50] = 1
    codes[:, 1::50] = 0
    scales = rng.integers(1, 2000, (4, 3)).astype(np.float16) / np.float16(1024)
    again = quantised(submission, oracle.dequantize(codes, scales))
    expect.equal(again[0], codes, "the codes of weights that are ternary already")
    expect.equal(again[1], scales, "the scales of weights that are ternary already")


@trap(
    "scale-by-largest",
    catches="the scale is the largest magnitude, so most codes are 0",
    severity="major",
    story="A converter meant for ternary files used the largest magnitude on latent weights: 83 "
    "% zeros.",
)
def scale_by_largest(submission: Submission, rng: np.random.Generator) -> None:
    w = rng.standard_normal((16, 512)).astype(np.float32)
    codes, scales = quantised(submission, w)
    error = oracle.squared_error(w, oracle.dequantize(codes, scales))
    expect.that(error <= ERROR_LIMIT, f"the squared error is {error:.3f} of the squared weights")


@trap(
    "zero-group-divides",
    catches="a group of zeros divides 0 by 0",
    severity="critical",
    story="A row that training never touched stays zero; its scale was NaN, and so was every "
    "logit.",
)
def zero_group_divides(submission: Submission, rng: np.random.Generator) -> None:
    w = grid(rng, 3, 300)
    w[1] = 0.0
    w[2, GROUP : 2 * GROUP] = 0.0
    codes, scales = quantised(submission, w)
    expect.that(not codes[1].any() and not codes[2, GROUP : 2 * GROUP].any(), "a zero got a code")
    again = quantised(submission, oracle.dequantize(codes, scales))
    expect.equal(again[1], scales, "the scales after a second time")


@trap(
    "codes-before-rounding",
    catches="codes are chosen although the scale rounds to 0 in float16",
    severity="major",
    story="Training saw the float32 scale, the file held its float16 rounding: 0. Codes without "
    "a scale.",
)
def codes_before_rounding(submission: Submission, rng: np.random.Generator) -> None:
    w = grid(rng, 2, 200) * np.float32(2.0**-40)
    codes, scales = quantised(submission, w)
    expect.that(not codes.any(), "codes of a group whose scale is 0 in float16")
    again = quantised(submission, oracle.dequantize(codes, scales))
    expect.equal(again[0], codes, "the codes after a second time")
    expect.equal(again[1], scales, "the scales after a second time")


@trap(
    "small-scale-lost",
    catches="a small guard added to the scale, or a floor under it, swallows small weights",
    severity="minor",
    story="An epsilon of 1e-5 against division by zero is larger than the weights of a "
    "well-trained layer.",
)
def small_scale_lost(submission: Submission, rng: np.random.Generator) -> None:
    smallest = float(np.finfo(np.float16).smallest_subnormal)
    for size in (smallest, 3 * smallest, 2.0**-14):
        w = (ternary_codes(rng, 2, 128) * size).astype(np.float32)
        w[:, 0], w[:, 1] = size, 0.0
        codes, scales = quantised(submission, w)
        expect.equal(scales, np.full((2, 1), size, dtype=np.float16), f"the scale of ±{size:.2g}")
        expect.equal(codes, np.sign(w).astype(np.int8), f"the codes of ±{size:.2g}")


@trap(
    "scale-overflows",
    catches="a scale above float16's largest number becomes infinite",
    severity="major",
    story="A spike in training left one row at 1e5: the exported scale was inf, the first logit "
    "NaN.",
)
def scale_overflows(submission: Submission, rng: np.random.Generator) -> None:
    w = np.full((2, 140), 1e6, dtype=np.float32) * rng.choice([-1, 1], (2, 140))
    w = w.astype(np.float32)
    codes, scales = quantised(submission, w)
    largest = np.finfo(np.float16).max
    expect.equal(scales, np.full((2, 2), largest, dtype=np.float16), "the scales of ±1e6")
    expect.equal(codes, np.sign(w).astype(np.int8), "the codes of ±1e6")
    again = quantised(submission, oracle.dequantize(codes, scales))
    expect.equal(again[0], codes, "the codes after a second time")


@trap(
    "float64-squeezed",
    catches="float64 weights are cast to float32 first and overflow",
    severity="minor",
    story="A cast at the top of the function, for speed, made infinities of finite numbers.",
)
def float64_squeezed(submission: Submission, rng: np.random.Generator) -> None:
    w = rng.choice([-1.0, 1.0], (2, 40)) * 1e60
    codes, scales = quantised(submission, w, 16)
    expect.equal(codes, np.sign(w).astype(np.int8), "the codes of ±1e60")
    expect.that(bool(np.all(scales == np.finfo(np.float16).max)), "the scale is not the largest")


@trap(
    "sums-in-low-precision",
    catches="sums of magnitudes in float16 stall or overflow",
    severity="major",
    story="Casting to the scale's dtype before the mean: 128 weights of 1 000 add up to infinity.",
)
def sums_in_low_precision(submission: Submission, rng: np.random.Generator) -> None:
    sizes = rng.integers(500, 1000, (3, 1)) * 4.0
    w = (sizes * rng.choice([-1, 1], (3, 512))).astype(np.float32)
    codes, scales = quantised(submission, w, 256)
    expect.equal(scales, np.repeat(sizes, 2, axis=1).astype(np.float16), "the scales")
    expect.equal(codes, np.sign(w).astype(np.int8), "the codes")


@trap(
    "ties-lean",
    catches="a weight on the threshold counts when it is positive and not when it is negative",
    severity="minor",
    story="floor(w / s + 0.5) rounds halves upwards: a bias towards +1 that no average error "
    "shows.",
)
def ties_lean(submission: Submission, rng: np.random.Generator) -> None:
    # Mean 2 and weights of ±1: half the mean is met exactly. Likewise mean 1.5 and ±0.75.
    w = np.array([[1, -1, 3, -3] * 4, [0.75, -0.75, 2.25, -2.25] * 4], dtype=np.float32)
    w = np.concatenate([w, grid(rng, 2, 16)])
    codes, scales = quantised(submission, w, 16)
    negated, same = quantised(submission, -w, 16)
    expect.equal(negated, -codes, "the codes of −w")
    expect.equal(same, scales, "the scales of −w")


@trap(
    "group-size-ignored",
    catches="the group size is 128 whatever was asked for",
    severity="critical",
    story="The constant of the paper stood in the code, the argument in the signature.",
)
def group_size_ignored(submission: Submission, rng: np.random.Generator) -> None:
    w = grid(rng, 2, 96)
    for group_size in (1, 7, 32, 96, 1000):
        quantised(submission, w, group_size, f"group size {group_size}")


@trap(
    "memory-order-read",
    catches="a transposed or strided view is read in memory order",
    severity="major",
    story="ravel in memory order instead of the array's own: a transposed weight came out "
    "scrambled.",
)
def memory_order_read(submission: Submission, rng: np.random.Generator) -> None:
    base = grid(rng, 48, 40)
    views = {
        "transposed": base.T,
        "every second column": base[:, ::2],
        "reversed": base[::-1, ::-1],
    }
    for name, view in views.items():
        codes, scales = quantised(submission, view, 16, name)
        plain = quantised(submission, np.ascontiguousarray(view), 16, "its copy")
        expect.equal(codes, plain[0], f"the codes of a {name} view")
        expect.equal(scales, plain[1], f"the scales of a {name} view")


@trap(
    "weights-overwritten",
    catches="the caller's weights are modified in place",
    severity="critical",
    story="abs with out= saves a buffer and turns the latent weights of the training run positive.",
)
def weights_overwritten(submission: Submission, rng: np.random.Generator) -> None:
    for dtype in (np.float32, np.float64):
        w = grid(rng, 4, 300).astype(dtype)
        _, after = submission.observe("ternarize", w, GROUP)
        expect.equal(after[0], w, "w after the call")


@trap(
    "nan-accepted",
    catches="NaN or infinity among the weights passes silently",
    severity="major",
    story="A diverged run was exported: NaN compares false with every threshold and became code 0.",
)
def nan_accepted(submission: Submission, rng: np.random.Generator) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        w = grid(rng, 3, 40)
        w[int(rng.integers(3)), int(rng.integers(40))] = bad
        refuses(submission, "ternarize", w, 16)


@trap(
    "group-size-unchecked",
    catches="a group size of 0 or below is accepted",
    severity="minor",
    story="A config file without the key gave 0, and ceil division made a group of it.",
)
def group_size_unchecked(submission: Submission, rng: np.random.Generator) -> None:
    w = grid(rng, 2, 8)
    codes, scales = oracle.ternarize(w, 4)
    for group_size in (0, -1, -128):
        refuses(submission, "ternarize", w, group_size)
        refuses(submission, "dequantize", codes, scales, group_size)


# --- back to float32 ------------------------------------------------------------------------------


@trap(
    "groups-spread-evenly",
    catches="scales are spread evenly over a row instead of one per group_size weights",
    severity="critical",
    story="Repeating each scale n / groups times is the same thing until the last group is short.",
)
def groups_spread_evenly(submission: Submission, rng: np.random.Generator) -> None:
    codes = np.ones((2, 300), dtype=np.int8)
    scales = np.array([[1, 2, 4], [8, 16, 32]], dtype=np.float16)
    scales *= np.float16(rng.integers(1, 8))
    got = submission.dequantize(codes, scales, GROUP)
    expect.equal(got, oracle.dequantize(codes, scales), "300 columns of three groups")


@trap(
    "dequantized-in-half",
    catches="dequantised weights stay float16",
    severity="minor",
    story="codes * scales keeps the scale's dtype; what is added to it later is rounded to 11 "
    "bits.",
)
def dequantized_in_half(submission: Submission, rng: np.random.Generator) -> None:
    codes, scales = oracle.ternarize(grid(rng, 3, 40), 16)
    got = submission.dequantize(codes, scales, 16)
    expect.equal(got, oracle.dequantize(codes, scales, 16), "dequantize")


@trap(
    "scales-broadcast",
    catches="scales of another shape are broadcast instead of refused",
    severity="major",
    story="A file with one scale a tensor loaded without complaint into a model with one scale "
    "a group.",
)
def scales_broadcast(submission: Submission, rng: np.random.Generator) -> None:
    codes, scales = oracle.ternarize(grid(rng, 3, 40), 16)
    for bad in (scales[:1], scales[:, :1], np.concatenate([scales, scales], axis=1), scales[0]):
        refuses(submission, "dequantize", codes, bad, 16)


# --- packing --------------------------------------------------------------------------------------


@trap(
    "first-code-highest",
    catches="the first code of a byte sits in its highest bits",
    severity="critical",
    story="Writer and reader of a 2-bit format disagreed on the order: finite, plausible, "
    "scrambled output.",
)
def first_code_highest(submission: Submission, rng: np.random.Generator) -> None:
    codes = np.concatenate([np.array([[-1, 0, 1, 1]], dtype=np.int8), ternary_codes(rng, 1, 4)], 1)
    expect.equal(submission.pack(codes), oracle.pack(codes), "pack")


@trap(
    "codes-interleaved",
    catches="neighbours go to different bytes (planes of n / 4) instead of the same one",
    severity="critical",
    story="A kernel's interleaved layout leaked into the file format; every other reader saw "
    "noise.",
)
def codes_interleaved(submission: Submission, rng: np.random.Generator) -> None:
    codes = np.array([[-1, -1, -1, -1, 1, 1, 1, 1, 0, 0, 0, 0]], dtype=np.int8)
    codes = rng.permutation(np.concatenate([codes, -codes]), axis=0)
    expect.equal(submission.pack(codes), oracle.pack(codes), "pack")


@trap(
    "two-complement-codes",
    catches="−1 is stored as two set bits (code & 3) instead of 0",
    severity="critical",
    story="Masking a signed code gives 3 for −1, which the other side reads as +2.",
)
def two_complement_codes(submission: Submission, rng: np.random.Generator) -> None:
    codes = ternary_codes(rng, 3, 16)
    codes[0, :4] = (-1, 0, 1, -1)
    expect.equal(submission.pack(codes), oracle.pack(codes), "pack")


@trap(
    "rows-share-bytes",
    catches="a row begins in the middle of the byte that ends the row before",
    severity="critical",
    story="Packing the flattened matrix saves three codes a row and makes no row addressable.",
)
def rows_share_bytes(submission: Submission, rng: np.random.Generator) -> None:
    codes = ternary_codes(rng, 4, 6)
    expect.equal(submission.pack(codes), oracle.pack(codes), "four rows of six codes")


@trap(
    "spare-bits-empty",
    catches="places after a row's end hold 0 bits, which is code −1",
    severity="minor",
    story="A kernel reads whole bytes; padding that decodes to −1 adds the last activations "
    "negatively.",
)
def spare_bits_empty(submission: Submission, rng: np.random.Generator) -> None:
    for columns in (1, 2, 3):
        codes = ternary_codes(rng, 3, columns)
        expect.equal(submission.pack(codes), oracle.pack(codes), f"{columns} codes in a byte")


@trap(
    "other-codes-packed",
    catches="codes outside −1, 0, 1 are packed",
    severity="major",
    story="Two bits have room for a fourth code; whoever writes it corrupts its neighbour or "
    "invents +2.",
)
def other_codes_packed(submission: Submission, rng: np.random.Generator) -> None:
    for bad in (2, -2, 3, 127, -128):
        codes = ternary_codes(rng, 2, 8)
        codes[int(rng.integers(2)), int(rng.integers(8))] = bad
        refuses(submission, "pack", codes)


@trap(
    "fourth-code-read",
    catches="two set bits are read as +2",
    severity="major",
    story="A file in a format of the same name used the fourth code; it was read without a word.",
)
def fourth_code_read(submission: Submission, rng: np.random.Generator) -> None:
    packed = oracle.pack(ternary_codes(rng, 3, 8))
    packed[int(rng.integers(3)), 1] |= 0b00110000
    refuses(submission, "unpack", packed, (3, 8))


@trap(
    "spare-bits-judged",
    catches="places after a row's end are judged or returned when unpacking",
    severity="minor",
    story="A reader returned the padded width, and the bias of the next layer no longer fitted.",
)
def spare_bits_judged(submission: Submission, rng: np.random.Generator) -> None:
    codes = ternary_codes(rng, 3, 5)
    packed = oracle.pack(codes) | np.array([0, 0b11111100], dtype=np.uint8)
    expect.equal(submission.unpack(packed, (3, 5)), codes, "five codes in two bytes")


@trap(
    "unpack-unsigned",
    catches="unpacked codes are unsigned, so −1 comes out as 255",
    severity="critical",
    story="uint8 minus 1 wraps around; the weights were 255 times the scale.",
)
def unpack_unsigned(submission: Submission, rng: np.random.Generator) -> None:
    codes = ternary_codes(rng, 2, 8)
    codes[:, 0] = -1
    expect.equal(submission.unpack(oracle.pack(codes), (2, 8)), codes, "unpack")


@trap(
    "wrong-shape-unpacked",
    catches="bytes that do not belong to the shape are unpacked all the same",
    severity="major",
    story="A file written with another block size was read to the end: right length, wrong "
    "weights.",
)
def wrong_shape_unpacked(submission: Submission, rng: np.random.Generator) -> None:
    packed = oracle.pack(ternary_codes(rng, 4, 8))
    for shape in ((2, 16), (4, 9), (4, 4), (8, 4), (32,), (1, 4, 8)):
        refuses(submission, "unpack", packed, shape)


# --- the split ------------------------------------------------------------------------------------


def _held_out(submission: Submission, documents: list[text.Document], fraction: float) -> set[int]:
    _, valid = submission.split(documents, fraction)
    return {int(index) for index in valid}


@trap(
    "equal-documents-parted",
    catches="copies of one document land on both sides",
    severity="critical",
    story="A reported perplexity of 319 rested on validation text that had been trained on.",
)
def equal_documents_parted(submission: Submission, rng: np.random.Generator) -> None:
    once = text.noise(rng, 50, 60, 8)
    held_out = _held_out(submission, [*once, *reversed(once), *once], 0.5)
    for index in range(60):
        sides = {place in held_out for place in (index, 119 - index, 120 + index)}
        expect.that(len(sides) == 1, f"document {index} and its copies are on both sides")


@trap(
    "split-by-process",
    catches="the split changes with every process (a salted hash)",
    severity="critical",
    story="Python salts the hash of strings: after a restart, yesterday's validation text was "
    "trained on.",
)
def split_by_process(submission: Submission, rng: np.random.Generator) -> None:
    documents = text.noise(rng, 50, 120, 8)
    here = submission.split(documents, 0.5)
    there = submission.fresh().split(documents, 0.5)
    expect.equal(list(map(list, there)), list(map(list, here)), "the split in another process")


@trap(
    "split-by-place",
    catches="a document's side depends on its place in the list",
    severity="major",
    story="A shuffle with a fixed seed is repeatable until somebody adds a file at the front.",
)
def split_by_place(submission: Submission, rng: np.random.Generator) -> None:
    documents = text.noise(rng, 50, 120, 8)
    order = rng.permutation(120)
    held_out = _held_out(submission, documents, 0.5)
    moved = _held_out(submission, [documents[i] for i in order], 0.5)
    expect.equal(sorted(int(order[i]) for i in moved), sorted(held_out), "held out after a shuffle")


@trap(
    "split-by-company",
    catches="adding documents moves others to the other side",
    severity="major",
    story="Ranking by hash and taking the first n per cent: with more text, old validation text "
    "is trained on.",
)
def split_by_company(submission: Submission, rng: np.random.Generator) -> None:
    documents = text.noise(rng, 50, 200, 8)
    few = _held_out(submission, documents[:101], 0.5)
    many = _held_out(submission, documents, 0.5)
    expect.equal(sorted(i for i in many if i < 101), sorted(few), "held out of the first 101")
    alone = {i for i in range(40) if _held_out(submission, [documents[i]], 0.5)}
    expect.equal(sorted(i for i in few if i < 40), sorted(alone), "held out when each is alone")


@trap(
    "fraction-upside-down",
    catches="the fraction is taken as the training share",
    severity="critical",
    story="split(documents, 0.1) held out nine tenths; the model starved, the loss looked honest.",
)
def fraction_upside_down(submission: Submission, rng: np.random.Generator) -> None:
    count = len(_held_out(submission, text.noise(rng, 50, 400, 8), 0.1))
    # 400 draws of 0.1: more than 80 happen less than once in 10⁸ runs.
    expect.that(1 <= count <= 80, f"{count} of 400 documents held out at fraction 0.1")


@trap(
    "only-the-beginning-hashed",
    catches="documents that begin alike land on one side together",
    severity="major",
    story="Every file began with the same licence text; hashing the first tokens made them one "
    "document.",
)
def only_the_beginning_hashed(submission: Submission, rng: np.random.Generator) -> None:
    opening = text.noise(rng, 50, 1, 200)[0]
    documents = [opening + ending for ending in text.noise(rng, 50, 200, 8)]
    count = len(_held_out(submission, documents, 0.5))
    # 200 fair draws: outside 60 … 140 less than once in 10⁷ runs.
    expect.that(60 <= count <= 140, f"{count} of 200 documents with one opening held out")


@trap(
    "large-ids-refused",
    catches="token ids above 255 break the split",
    severity="major",
    story="bytes(document) is a fine digest of byte tokens and an exception with any real "
    "vocabulary.",
)
def large_ids_refused(submission: Submission, rng: np.random.Generator) -> None:
    documents = [[int(t) for t in row] for row in rng.integers(256, 200_000, (20, 6))]
    documents += [[], [2**40, 3]]
    train, valid = submission.split(documents, 0.5)
    expect.equal(sorted([*map(int, train), *map(int, valid)]), list(range(22)), "both sides")


@trap(
    "copies-vanish",
    catches="copies of a document are dropped from both sides",
    severity="major",
    story="Splitting a dict of unique texts forgets the others; a corpus shrank by a third "
    "unnoticed.",
)
def copies_vanish(submission: Submission, rng: np.random.Generator) -> None:
    documents = text.noise(rng, 50, 10, 8) * 3
    train, valid = submission.split(documents, 0.5)
    expect.equal(sorted([*map(int, train), *map(int, valid)]), list(range(30)), "both sides")


@trap(
    "documents-sorted",
    catches="split reorders the caller's documents",
    severity="major",
    story="Sorting in place for a stable split: the indices returned no longer named the "
    "caller's documents.",
)
def documents_sorted(submission: Submission, rng: np.random.Generator) -> None:
    documents = [
        [int(t), *rest]
        for t, rest in zip(range(30, 0, -1), text.noise(rng, 50, 30, 5), strict=True)
    ]
    _, after = submission.observe("split", documents, 0.5)
    expect.equal(after[0], documents, "the documents after the call")


# --- the model's tensors, without training --------------------------------------------------------


def _start(
    submission: Submission, rng: np.random.Generator, **changes: object
) -> tuple[object, dict[str, int]]:
    config = config_of(rng, **changes)
    return submission.train(text.noise(rng, min(8, config["vocab"]), 6, 8), config), config


def _tensor(answer: object, name: str, config: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    expect.that(isinstance(answer, dict) and name in answer, f"there is no tensor {name}")
    assert isinstance(answer, dict)
    return well_formed(answer[name], small_lm.tensor_shapes(config)[name], GROUP, name)


@trap(
    "embedding-left-dense",
    catches="the embedding is not ternary",
    severity="critical",
    story="The most common deviation seen: embeddings kept dense, most of the bytes of a small "
    "model.",
)
def embedding_left_dense(submission: Submission, rng: np.random.Generator) -> None:
    answer, config = _start(submission, rng)
    _tensor(answer, "embedding", config)


@trap(
    "head-left-dense",
    catches="the head is missing or not ternary",
    severity="critical",
    story="The head was tied to the embedding, or kept in float: either way not what was shipped.",
)
def head_left_dense(submission: Submission, rng: np.random.Generator) -> None:
    answer, config = _start(submission, rng)
    _tensor(answer, "head", config)


@trap(
    "scale-for-every-weight",
    catches="a tensor is called ternary with one scale for every weight",
    severity="critical",
    story="sign(w) and |w| as codes and scales satisfy every check on codes and save nothing at "
    "all.",
)
def scale_for_every_weight(submission: Submission, rng: np.random.Generator) -> None:
    answer, config = _start(submission, rng, dim=48)
    for name in small_lm.tensor_shapes(config):
        _tensor(answer, name, config)


@trap(
    "group-of-the-model-width",
    catches="tensors are grouped by the model's width instead of by 128",
    severity="major",
    story="One scale a row is as good as a group while rows have 128 weights; the wide ones "
    "differ.",
)
def group_of_the_model_width(submission: Submission, rng: np.random.Generator) -> None:
    answer, config = _start(submission, rng, dim=40, layers=1)
    _tensor(answer, "layers.0.down", config)


@trap(
    "layers-fixed",
    catches="the number of layers is fixed in the code",
    severity="major",
    story="The architecture of the example stood in the code; other configurations were ignored.",
)
def layers_fixed(submission: Submission, rng: np.random.Generator) -> None:
    for layers in (1, 3):
        answer, config = _start(submission, rng, dim=16, layers=layers)
        expect.that(isinstance(answer, dict), "train gave no dict")
        assert isinstance(answer, dict)
        expect.equal(sorted(answer), sorted(small_lm.tensor_shapes(config)), f"{layers} layers")


@trap(
    "vocabulary-from-the-text",
    catches="the vocabulary is what occurs in the training text",
    severity="major",
    story="max(token) + 1 rows: the first rare token after deployment read beyond the embedding.",
)
def vocabulary_from_the_text(submission: Submission, rng: np.random.Generator) -> None:
    answer, config = _start(submission, rng, vocab=77, dim=16, layers=1)
    for name in ("embedding", "head"):
        _tensor(answer, name, config)


def _same_tensors(first: object, second: object) -> bool:
    expect.that(isinstance(first, dict) and isinstance(second, dict), "train gave no dict")
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    return sorted(first) == sorted(second) and all(
        np.array_equal(mine, other)
        for name in first
        for mine, other in zip(first[name], second[name], strict=True)
    )


@trap(
    "seed-ignored",
    catches="every seed starts from the same weights",
    severity="major",
    story="Three runs with three seeds gave one number three times, reported with an error bar "
    "of 0.",
)
def seed_ignored(submission: Submission, rng: np.random.Generator) -> None:
    documents, config = text.noise(rng, 8, 6, 8), config_of(rng)
    first = submission.train(documents, config)
    second = submission.train(documents, {**config, "seed": config["seed"] + 1})
    expect.that(not _same_tensors(first, second), "two seeds start from the same weights")


@trap(
    "start-not-repeatable",
    catches="the same seed starts from other weights the next time",
    severity="major",
    story="Weights drawn from a global generator: the second run of a process was never the "
    "first again.",
)
def start_not_repeatable(submission: Submission, rng: np.random.Generator) -> None:
    documents, config = text.noise(rng, 8, 6, 8), config_of(rng)
    first = submission.train(documents, config)
    expect.that(_same_tensors(first, submission.train(documents, config)), "a second call differs")
    other = submission.fresh().train(documents, config)
    expect.that(_same_tensors(first, other), "another process differs")


@trap(
    "training-carries-over",
    catches="a training starts from where the one before ended",
    severity="major",
    story="A module-level cache of weights for resuming: the second experiment began trained.",
)
def training_carries_over(submission: Submission, rng: np.random.Generator) -> None:
    config = config_of(rng, dim=16, layers=1)
    documents = text.noise(rng, 8, 12, 8)
    first = submission.train(documents, config)
    submission.train(documents, {**config, "seconds": 0.3})
    again = submission.train(documents, config)
    expect.that(_same_tensors(first, again), "the starting weights remember a training")


@trap(
    "negative-id-wraps",
    catches="token id −1 reads the last row of the embedding",
    severity="major",
    story="Padding with −1 met an indexing that counts from the end; the last word learned to "
    "be padding.",
)
def negative_id_wraps(submission: Submission, rng: np.random.Generator) -> None:
    config = config_of(rng, dim=16, layers=1)
    for bad in (-1, config["vocab"], -config["vocab"]):
        documents = [*text.noise(rng, 8, 3, 8), [1, bad, 2]]
        refuses(submission, "train", documents, config)


@trap(
    "heads-unchecked",
    catches="a width that does not divide into the heads is accepted",
    severity="minor",
    story="dim // heads rounds down; the last columns of every projection were never used.",
)
def heads_unchecked(submission: Submission, rng: np.random.Generator) -> None:
    documents = text.noise(rng, 8, 3, 8)
    for bad in ({"heads": 5}, {"heads": 0}, {"dim": 0}, {"context": 0}, {"vocab": 0}):
        config = config_of(rng, **bad)
        refuses(submission, "train", documents, config)
    refuses(submission, "train", documents, config_of(rng, seconds=-1))


@trap(
    "nothing-to-predict",
    catches="documents in which nothing can be predicted are trained on",
    severity="minor",
    story="An empty glob gave no documents; the run ended at once and saved random weights as a "
    "model.",
)
def nothing_to_predict(submission: Submission, rng: np.random.Generator) -> None:
    config = config_of(rng, dim=16, layers=1)
    hopeless: list[list[text.Document]] = [[], [[]], [[1], [], [2]]]
    for documents in hopeless:
        refuses(submission, "train", documents, config)


@trap(
    "documents-shuffled",
    catches="training shuffles or cuts the caller's documents",
    severity="major",
    story="rng.shuffle(documents) works in place: the caller's held-out indices now named "
    "training text.",
)
def documents_shuffled(submission: Submission, rng: np.random.Generator) -> None:
    documents, config = text.noise(rng, 8, 40, 9), config_of(rng, dim=16, layers=1, context=4)
    _, after = submission.observe("train", documents, config)
    expect.equal(after[0], documents, "the documents after training")
    expect.equal(after[1], config, "the config after training")


# --- training -------------------------------------------------------------------------------------


@trap(
    "short-documents-break",
    catches="an empty document or one of a single token breaks the training",
    severity="major",
    story="A trailing newline made an empty document; its batch had length −1.",
)
def short_documents_break(submission: Submission, rng: np.random.Generator) -> None:
    config = config_of(rng, dim=16, layers=1, seconds=0.3)
    documents = [[], [3], *text.noise(rng, 8, 6, 8), [5], [], [1, 2]]
    answer = submission.train(documents, config)
    _tensor(answer, "head", config)


@trap(
    "long-documents-dropped",
    catches="documents longer than the context are dropped",
    severity="major",
    story="Filtering by length left a corpus of long articles empty.",
)
def long_documents_dropped(submission: Submission, rng: np.random.Generator) -> None:
    config = config_of(rng, dim=16, layers=1, context=8, seconds=0.3)
    answer = submission.train(text.noise(rng, 8, 8, 40), config)
    _tensor(answer, "head", config)


@trap(
    "seconds-ignored",
    catches="training takes the time it takes",
    severity="major",
    story="A fixed number of steps, tuned on a fast machine, ran into every limit on a slow one.",
)
def seconds_ignored(submission: Submission, rng: np.random.Generator) -> None:
    grammar = text.Grammar(rng, 40)
    documents, config = grammar.documents(rng, 60, 33), config_of(rng, seconds=0.2)
    started = time.monotonic()
    submission.train(documents, config)
    seconds = time.monotonic() - started
    expect.that(seconds <= 3 * 0.2 + 3, f"asked for 0.2 s of training, took {seconds:.1f} s")


@trap(
    "future-visible",
    catches="the model sees the tokens that it is to predict (no causal mask in training)",
    severity="critical",
    story="Training loss fell to 0.02; with the mask that generation needs, the model knew "
    "nothing.",
)
def future_visible(submission: Submission, rng: np.random.Generator) -> None:
    # Nothing can be learned from what came before, so whoever gains anything has looked ahead.
    run = trained_on_noise(submission, rng, count=400, length=5, vocab=16, heads=1)
    weights = weights_of(run.tensors, run.config)
    masked = small_lm.perplexity(weights, run.unseen, run.config)
    peeking = small_lm.perplexity(weights, run.unseen, run.config, causal=False)
    expect.that(
        masked <= 1.4 * peeking,
        f"perplexity {masked:.1f} with a causal mask, {peeking:.1f} when it may look ahead",
    )


@trap(
    "predicts-the-present",
    catches="the model is trained to repeat the token it sees (targets not shifted)",
    severity="critical",
    story="Input and target were the same slice: a loss of zero after ten steps, and an echo "
    "for a model.",
)
def predicts_the_present(submission: Submission, rng: np.random.Generator) -> None:
    run = trained(submission, rng)
    weights = weights_of(run.tensors, run.config)
    echo, said = [], []
    for document in run.unseen:
        table = small_lm.log_probs(weights, document, run.config)
        echo.append(table[np.arange(len(document) - 1), document[:-1]])
        said.append(table[np.arange(len(document) - 1), document[1:]])
    # No class of the grammar follows itself, so the present token never comes next.
    repeats, follows = float(np.mean(np.concatenate(echo))), float(np.mean(np.concatenate(said)))
    expect.that(
        repeats < follows,
        f"log-probability {repeats:.2f} for the token before, {follows:.2f} for the one after",
    )


@trap(
    "trains-until-collapse",
    catches="training goes on after the held-out loss has turned, and the last weights are kept",
    severity="critical",
    story="1 500 steps on 48 000 tokens: training loss 0.18, perplexity 30 731 on text not seen "
    "before.",
)
def trains_until_collapse(submission: Submission, rng: np.random.Generator) -> None:
    run = trained_on_noise(submission, rng, count=32, length=16, vocab=32, heads=2)
    _not_worse_than_guessing(run.tensors, run.unseen, run.config)


@trap(
    "leaky-early-stopping",
    catches="the documents that decide when to stop are copies of training documents",
    severity="critical",
    story="Validation by random index over a corpus with copies: the held-out loss fell to the "
    "end.",
)
def leaky_early_stopping(submission: Submission, rng: np.random.Generator) -> None:
    run = trained_on_noise(submission, rng, count=32, length=16, copies=4, vocab=32, heads=2)
    _not_worse_than_guessing(run.tensors, run.unseen, run.config)


def _not_worse_than_guessing(
    tensors: dict[str, tuple[np.ndarray, np.ndarray]],
    unseen: list[text.Document],
    config: dict[str, int],
) -> None:
    got = small_lm.perplexity(weights_of(tensors, config), unseen, config)
    # Five held-out documents of noise may flatter a model by chance; never by this much.
    expect.that(
        got <= 4.0 * config["vocab"],
        f"perplexity {got:.0f} on unseen documents; guessing blindly gives {config['vocab']}",
    )


# --- the corners of the contract ------------------------------------------------------------------


def _about_half(submission: Submission, documents: list[list[int]], what: str) -> None:
    """400 different documents: 100 is ten standard deviations away from half of them."""
    held_out = len(submission.split(documents, 0.5)[1])
    expect.that(100 <= held_out <= 300, f"{held_out} of {len(documents)} {what} held out")


@trap(
    "threshold-overflows",
    catches="the sum of a group's magnitudes overflows before it is divided",
    severity="minor",
    story="A mean of huge weights was infinite, so none of them exceeded it: the group became 0.",
)
def threshold_overflows(submission: Submission, rng: np.random.Generator) -> None:
    w = rng.choice([-1.7e308, 1.7e308], (2, GROUP))
    _, scales = quantised(submission, w)
    expect.equal(scales, np.full((2, 1), np.finfo(np.float16).max), "the scale of huge weights")


@trap(
    "empty-document-never-held-out",
    catches="an empty document stays on the training side, whatever the fraction",
    severity="minor",
    story="A guard for empty texts in front of the hash: all documents held out but those.",
)
def empty_document_never_held_out(submission: Submission, rng: np.random.Generator) -> None:
    documents = [*text.noise(rng, 8, 3, 8), [], []]
    for fraction, left in ((1.0, 0), (0.0, 1)):
        expect.equal(len(submission.split(documents, fraction)[left]), 0, f"at {fraction}")


@trap(
    "ids-cut-to-32-bits",
    catches="only the low bits of a token id decide the side of a document",
    severity="minor",
    story="Ids were packed as 32-bit words; documents that differed above shared one fate.",
)
def ids_cut_to_32_bits(submission: Submission, rng: np.random.Generator) -> None:
    token = int(rng.integers(1000))
    documents = [[token + (i << 40), token] for i in range(400)]
    _about_half(submission, documents, "documents that differ in high bits")


@trap(
    "order-of-tokens-ignored",
    catches="documents with the same tokens in another order always share a side",
    severity="minor",
    story="A sum over token hashes: all permutations of a list were one document to the split.",
)
def order_of_tokens_ignored(submission: Submission, rng: np.random.Generator) -> None:
    unique = {tuple(int(t) for t in rng.permutation(40)) for _ in range(400)}
    _about_half(submission, [list(document) for document in unique], "permutations")


@trap(
    "lone-token-unchecked",
    catches="ids out of range pass in documents that are too short to train on",
    severity="minor",
    story="Short documents were skipped before anybody looked at their tokens.",
)
def lone_token_unchecked(submission: Submission, rng: np.random.Generator) -> None:
    config = config_of(rng, dim=16, layers=1)
    for bad in (-1, config["vocab"]):
        refuses(submission, "train", [*text.noise(rng, 8, 3, 8), [bad]], config)


@trap(
    "group-filled-up",
    catches="a group size far beyond the width takes memory for weights that do not exist",
    severity="minor",
    story="One group a row was asked for with a very large number: terabytes of padding.",
)
def group_filled_up(submission: Submission, rng: np.random.Generator) -> None:
    w, huge = grid(rng, 2, 24), 2**40
    codes, scales = quantised(submission, w, huge)
    row = quantised(submission, w, 24)
    expect.equal(codes, row[0], "the codes of a group wider than the row")
    expect.equal(scales, row[1], "the scales of a group wider than the row")
    got = submission.dequantize(codes, scales, huge)
    expect.equal(got, oracle.dequantize(codes, scales, 24), "dequantize with that group size")


@trap(
    "no-number-as-fraction",
    catches="a fraction that is not a number passes the check of its range",
    severity="minor",
    story="0 / 0 documents gave the share; NaN is neither below 0 nor above 1: none was held out.",
)
def no_number_as_fraction(submission: Submission, rng: np.random.Generator) -> None:
    refuses(submission, "split", text.noise(rng, 8, 3, 8), float("nan"))


@trap(
    "setting-missing",
    catches="a missing config value is made up, or ends in another error than the contract's",
    severity="minor",
    story="A misspelt key trained with a default for a week; elsewhere it was a bare KeyError.",
)
def setting_missing(submission: Submission, rng: np.random.Generator) -> None:
    documents, config = text.noise(rng, 8, 6, 8), config_of(rng, dim=16, layers=1)
    for name in config:
        refuses(submission, "train", documents, {k: v for k, v in config.items() if k != name})


@trap(
    "seed-cut-to-32-bits",
    catches="seeds of more than 32 bits are refused or fall together",
    severity="minor",
    story="An older generator takes 32 bits; seeds made of a date and a number did not fit.",
)
def seed_cut_to_32_bits(submission: Submission, rng: np.random.Generator) -> None:
    documents, config = text.noise(rng, 8, 6, 8), config_of(rng)
    first, second = (
        submission.train(documents, {**config, "seed": seed}) for seed in (1, 2**32 + 1)
    )
    expect.that(not _same_tensors(first, second), "two seeds start from the same weights")
