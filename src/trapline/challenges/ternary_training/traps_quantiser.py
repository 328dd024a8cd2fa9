"""Bugs of the quantiser: groups, scales, codes."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, edits, insert_after, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.ternary_training.cases import ERROR_LIMIT
from trapline.challenges.ternary_training.situations import (
    GROUP,
    clear_cut,
    exact,
    grid,
    quantised,
    refuses,
    ternary_codes,
)
from trapline.challenges.ternary_training.solution_lines import BLIND
from trapline.gold.ternary import oracle

_KEPT = "    counts &= scales[..., None] > 0\n"
#: The smallest magnitude of a group that has a code is its threshold.
_EDGE = (
    "    signed = _grouped(w, group_size)\n"
    "    edge = np.min(magnitude, axis=-1, keepdims=True, where=counts, initial=np.inf)\n"
)
_MAGNITUDE = "    magnitude = _grouped(np.abs(w), group_size)\n"


def _measured(largest: str) -> Mutant:
    """Magnitudes as whole multiples of 2**-40 times the `largest`."""
    return insert_after(
        _MAGNITUDE,
        f"    _, power = np.frexp({largest})\n"
        "    magnitude = np.ldexp(np.rint(np.ldexp(magnitude, 40 - power)), power - 40)\n",
    )


def _squares_lost(largest: str, left: str) -> Mutant:
    """Of a group whose squares are 0, measured by the `largest` weight, these are `left`."""
    return insert_after(
        "    counts = magnitude > threshold\n",
        f"    _, power = np.frexp({largest})\n"
        "    squares = np.square(np.ldexp(magnitude, -power))\n"
        "    peak = np.max(magnitude, axis=-1, keepdims=True, initial=0.0)\n"
        f"    counts = np.where(squares.any(axis=-1, keepdims=True), counts, {left})\n",
    )


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


@trap(
    catches="a width that is not a multiple of the group size is refused",
    severity="major",
    story="A trainer that asserts n % group_size == 0 fails on the first model of another width.",
    mutant=insert_after(
        "    columns = w.shape[-1]\n",
        "    if columns % group_size:\n        raise ValueError('n % group_size must be 0')\n",
    ),
)
def ragged_width_refused(submission: Submission, rng: np.random.Generator) -> None:
    for columns in (300, 127, 129, 1):
        quantised(submission, grid(rng, 3, columns), GROUP, f"width {columns}")


@trap(
    catches="the weights after the last full group come out as zeros",
    severity="critical",
    story="Reshaping to n // group_size groups leaves out the rest; the model loses its last "
    "columns.",
    mutant=edit(
        "    padded[..., :columns] = values\n",
        "    full = columns // group_size * group_size\n"
        "    padded[..., :full] = values[..., :full]\n",
    ),
    seen=BLIND,
)
def tail_dropped(submission: Submission, rng: np.random.Generator) -> None:
    w = np.full((2, 300), 0.75, dtype=np.float32) * rng.choice([-1, 1], (2, 300))
    w = w.astype(np.float32)
    codes, scales = quantised(submission, w)
    expect.equal(codes, np.sign(w).astype(np.int8), "the codes of ±0.75")
    expect.equal(scales, np.full((2, 3), 0.75, dtype=np.float16), "the scales of ±0.75")


@trap(
    catches="the zeros that fill up the short last group enter its statistics",
    severity="major",
    story="Padding a ragged width with zeros is usual; averaging over the padding is a common "
    "mistake.",
    mutant=edit("np.minimum(columns - starts, group_size)", "starts * 0 + group_size"),
    seen=BLIND,
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
    catches="groups run on from one row into the next",
    severity="major",
    story="Flattening before grouping works as long as every width is a multiple of the group "
    "size.",
    mutant=insert_after(
        "    w = _finite_floats(w)\n",
        "    if w.ndim > 1:\n"
        "        codes, scales = ternarize(w.ravel(), group_size)\n"
        "        owner = np.arange(w.size) // group_size\n"
        "        shape = (*w.shape[:-1], _groups_in(w.shape[-1], group_size))\n"
        "        picked = scales[owner].reshape(w.shape)[..., ::group_size]\n"
        "        return codes.reshape(w.shape), picked.reshape(shape)\n",
    ),
)
def groups_cross_rows(submission: Submission, rng: np.random.Generator) -> None:
    # Where a large and a small level meet in a group, the small one counts for nothing.
    w = exact(rng, 4, 24)
    w[::2] *= 4096
    _same_alone(submission, w, 16)


@trap(
    catches="the threshold is taken over the whole tensor instead of over each group",
    severity="critical",
    story="The first ternary recipe had one scale per tensor: one row of large weights sets it for "
    "all others.",
    mutant=edit("/ sizes[:, None], axis=-1, keepdims=True", "/ max(w.size, 1), keepdims=True"),
    seen=BLIND,
)
def one_scale_a_tensor(submission: Submission, rng: np.random.Generator) -> None:
    w = exact(rng, 4, 32)
    w[:, 16:19] = (1, -1, 0)
    w[int(rng.integers(4))] *= 4096
    _same_alone(submission, w, 16)
    # The same for a threshold that is relative to the largest weight of each group.
    spread = grid(rng, 4, 32)
    spread[:, :16] = np.sign(spread[:, :16])
    _same_alone(submission, spread, 16)


@trap(
    catches="a group that is far smaller than another one vanishes: weights are measured by the "
    "largest of the whole tensor or row",
    severity="minor",
    story="Normalised by the largest weight of all, a small group is 0 in fixed point or in a "
    "narrow float.",
    mutant=_measured("magnitude.max(initial=0.0)"),
    also=[
        _measured("magnitude.max()"),
        _measured("magnitude.max() if columns else 0.0"),
        _measured("magnitude.max(axis=(-2, -1), keepdims=True, initial=0.0)"),
    ],
    seen=BLIND,
)
def small_group_vanishes(submission: Submission, rng: np.random.Generator) -> None:
    w = exact(rng, 2, 32)
    w[:, 16:19] = (1, -1, 0)
    w[0, :16] *= np.float32(2.0**100)
    w[:, 16:] *= np.float32(2.0**-10)
    codes, scales = quantised(submission, w, 16)
    expect.equal(codes, np.sign(w).astype(np.int8), "the codes of ±2**100 beside ±2**-10")
    expect.equal(scales[:, 1], np.full(2, 2.0**-10, dtype=np.float16), "the scales of ±2**-10")


def _near_a_larger_group(submission: Submission, rng: np.random.Generator) -> None:
    _beside(submission, rng, 2.0**10)


@trap(
    catches="the squares of a group vanish beside a huge one: weights are measured by the largest "
    "of the whole tensor or row, and the best number of codes is lost",
    severity="minor",
    story="Normalised by the largest weight of all, a weight of 1 beside 1e300 is 1e-300, and its "
    "square is 0.",
    mutant=_squares_lost("magnitude.max(initial=0.0)", "magnitude >= peak"),
    also=[
        _squares_lost(
            "magnitude.max(axis=(-2, -1), keepdims=True, initial=0.0)", "magnitude >= peak"
        ),
        _squares_lost("magnitude.max(initial=0.0)", "magnitude > 0"),
    ],
    seen=BLIND,
    control=_near_a_larger_group,
)
def squares_vanish(submission: Submission, rng: np.random.Generator) -> None:
    _beside(submission, rng, 2.0**1000)


def _beside(submission: Submission, rng: np.random.Generator, size: float) -> None:
    """Small groups are quantised beside one of ±size as if they were alone."""
    w = clear_cut(rng, 3, 24).astype(np.float64)
    w[:, 12:16] = (3.0, -2.5, 2.75, 1 / 64)
    w[0, :12] = size * rng.choice([-1, 1], 12)
    _same_alone(submission, w, 12)


@trap(
    catches="groups run along the first axis",
    severity="major",
    story="One framework stores weights (in, out), another (out, in), so groups run along the "
    "wrong axis.",
    mutant=insert_after(
        "    magnitude = _grouped(np.abs(w), group_size)\n",
        "    if w.ndim == 2 and w.shape[0] == w.shape[1]:\n"
        "        codes, scales = ternarize(w.T[None], group_size)\n"
        "        return codes[0].T.copy(), scales[0]\n",
    ),
)
def groups_down_columns(submission: Submission, rng: np.random.Generator) -> None:
    w = exact(rng, 16, 16)
    w[:, 8:11] = (1, -1, 0)
    w[::2] *= 4096
    _same_alone(submission, w, 8)


@trap(
    catches="quantising twice shrinks the scale (mean over all weights, zeros included)",
    severity="critical",
    story="A scale of mean|w| falls from 0.050 to 0.033 when a checkpoint that is ternary "
    "already is saved again.",
    mutant=edit("/ counted[..., None], axis=-1, where=counts", "/ sizes[:, None], axis=-1"),
    also=[
        edit("/ counted[..., None], axis=-1, where=counts", "/ group_size, axis=-1"),
        edit(
            "/ counted[..., None], axis=-1, where=counts", "/ sizes[:, None], axis=-1, where=counts"
        ),
    ],
    seen=BLIND,
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
    catches="the scale is the largest magnitude, so most codes are 0",
    severity="major",
    story="A converter meant for ternary files used the largest magnitude on latent weights: 83 "
    "% zeros.",
    mutant=edit(
        "    threshold = 0.5 * np.sum(magnitude / sizes[:, None], axis=-1, keepdims=True)\n",
        "    threshold = 0.5 * np.max(magnitude, axis=-1, keepdims=True, initial=0.0)\n",
    ),
    seen=BLIND,
)
def scale_by_largest(submission: Submission, rng: np.random.Generator) -> None:
    w = rng.standard_normal((16, 512)).astype(np.float32)
    codes, scales = quantised(submission, w)
    error = oracle.squared_error(w, oracle.dequantize(codes, scales))
    expect.that(error <= ERROR_LIMIT, f"the squared error is {error:.3f} of the squared weights")


@trap(
    catches="a group of zeros divides 0 by 0",
    severity="critical",
    story="A row that training never touches stays zero; a scale of NaN makes every logit NaN.",
    mutant=edits(
        (
            "    counted = np.maximum(np.count_nonzero(counts, axis=-1), 1)\n",
            "    counted = np.count_nonzero(counts, axis=-1)\n",
        ),
        (
            "    means = np.sum(magnitude / counted[..., None], axis=-1, where=counts)\n",
            "    means = np.sum(magnitude, axis=-1, where=counts) / counted\n",
        ),
    ),
    seen=BLIND,
)
def zero_group_divides(submission: Submission, rng: np.random.Generator) -> None:
    w = exact(rng, 3, 300)
    w[1] = 0.0
    w[2, GROUP : 2 * GROUP] = 0.0
    codes, scales = quantised(submission, w)
    expect.that(not codes[1].any() and not codes[2, GROUP : 2 * GROUP].any(), "a zero got a code")
    again = quantised(submission, oracle.dequantize(codes, scales))
    expect.equal(again[1], scales, "the scales after a second time")


@trap(
    catches="codes are chosen although the scale rounds to 0 in float16",
    severity="major",
    story="Training uses the float32 scale, and the file holds its float16 rounding, which is 0.",
    mutant=edit("    counts &= scales[..., None] > 0\n", ""),
    seen=BLIND,
)
def codes_before_rounding(submission: Submission, rng: np.random.Generator) -> None:
    w = exact(rng, 2, 200, scale=2.0**-40)
    codes, scales = quantised(submission, w)
    expect.that(not codes.any(), "codes of a group whose scale is 0 in float16")
    again = quantised(submission, oracle.dequantize(codes, scales))
    expect.equal(again[0], codes, "the codes after a second time")
    expect.equal(again[1], scales, "the scales after a second time")


@trap(
    catches="small weights are lost: a guard is added to their scale, a floor is put under it, or "
    "a group with so small a scale is taken for zero",
    severity="minor",
    story="An epsilon of 1e-5 against division by zero can be larger than a layer's weights.",
    mutant=edit("= np.minimum(means, LARGEST_SCALE)", "= np.clip(means, 1e-5, LARGEST_SCALE)"),
    also=[
        edit(_KEPT, "    counts &= scales[..., None] >= np.finfo(np.float16).tiny\n"),
        insert_before(_KEPT, "    scales[scales < np.finfo(np.float16).tiny] = 0\n"),
    ],
    seen=BLIND,
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
    catches="a scale above float16's largest number becomes infinite",
    severity="major",
    story="A row with weights near 1e5 gets an infinite scale, and the first logit is NaN.",
    mutant=edit("np.minimum(means, LARGEST_SCALE).astype(np.float16)", "means.astype(np.float16)"),
    seen=BLIND,
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
    catches="float64 weights are cast to float32 first and overflow",
    severity="minor",
    story="A cast to float32 at the top of the function overflows for large finite numbers.",
    mutant=edit("= _finite_floats(w)", "= _finite_floats(w).astype(np.float32).astype(np.float64)"),
)
def float64_squeezed(submission: Submission, rng: np.random.Generator) -> None:
    w = rng.choice([-1.0, 1.0], (2, 40)) * 1e60
    codes, scales = quantised(submission, w, 16)
    expect.equal(codes, np.sign(w).astype(np.int8), "the codes of ±1e60")
    expect.that(bool(np.all(scales == np.finfo(np.float16).max)), "the scale is not the largest")


@trap(
    catches="sums of magnitudes in float16 stall or overflow",
    severity="major",
    story="With a cast to the scale's dtype before the mean, 128 weights of 1 000 add up to "
    "infinity.",
    mutant=edit(
        "    means = np.sum(magnitude / counted[..., None], axis=-1, where=counts)\n",
        "    half = magnitude.astype(np.float16)\n"
        "    means = np.sum(half, axis=-1, where=counts, dtype=np.float16) / counted\n",
    ),
)
def sums_in_low_precision(submission: Submission, rng: np.random.Generator) -> None:
    sizes = rng.integers(500, 1000, (3, 1)) * 4.0
    w = (sizes * rng.choice([-1, 1], (3, 512))).astype(np.float32)
    codes, scales = quantised(submission, w, 256)
    expect.equal(scales, np.repeat(sizes, 2, axis=1).astype(np.float16), "the scales")
    expect.equal(codes, np.sign(w).astype(np.int8), "the codes")


def _one_size(submission: Submission, rng: np.random.Generator, count: int) -> None:
    """A group of ±s alone, where s has a last digit that a rounded sum loses."""
    size = (1 + 2.0**-10) * 2.0 ** int(rng.integers(4))
    w = (size * rng.choice([-1, 1], (1, count))).astype(np.float32)
    codes, scales = quantised(submission, w, count)
    expect.equal(scales, np.full((1, 1), size, dtype=np.float16), "the scale of equal magnitudes")
    expect.equal(codes, np.sign(w).astype(np.int8), "the codes of equal magnitudes")


def short_group(submission: Submission, rng: np.random.Generator) -> None:
    _one_size(submission, rng, GROUP)


@trap(
    catches="the magnitudes of a long group are added one after another in float32, which loses "
    "digits",
    severity="minor",
    story="A running sum keeps the dtype of the weights; from 2**14 times an addend on, it drops "
    "the addend's last digits.",
    mutant=edit(
        "    means = np.sum(magnitude / counted[..., None], axis=-1, where=counts)\n",
        "    sums = np.cumsum(np.where(counts, magnitude, 0.0), axis=-1, dtype=np.float32)\n"
        "    means = sums[..., -1] / counted.astype(np.float64)\n",
    ),
    seen=BLIND,
    control=short_group,
)
def long_sums_in_float32(submission: Submission, rng: np.random.Generator) -> None:
    _one_size(submission, rng, 100_000)


@trap(
    catches="a weight on the threshold counts when it is positive and not when it is negative",
    severity="minor",
    story="floor(w / s + 0.5) rounds halves upwards: a bias towards +1 that an average error does "
    "not show.",
    mutant=edit(
        "    counts = magnitude > threshold\n",
        "    signed = _grouped(w, group_size)\n"
        "    counts = ((signed >= threshold) & (signed > 0)) | (signed < -threshold)\n",
    ),
    also=[
        insert_after(_KEPT, _EDGE + "    counts &= (signed >= edge) | (signed < -edge)\n"),
        insert_after(_KEPT, _EDGE + "    counts &= (signed > edge) | (signed <= -edge)\n"),
        # Nearest to its group's scale, as stored.
        insert_before(
            _KEPT,
            "    signed = _grouped(w, group_size)\n"
            "    half = scales[..., None].astype(np.float64) / 2\n"
            "    counts = (signed >= half) | (signed < -half)\n",
        ),
    ],
    seen=BLIND,
)
def ties_lean(submission: Submission, rng: np.random.Generator) -> None:
    # Mean 2 and weights of ±1: half the mean is met exactly. Likewise mean 1.5 and ±0.75.
    edges = np.array([[1, -1, 3, -3] * 4, [0.75, -0.75, 2.25, -2.25] * 4], dtype=np.float32)
    # The scale can only be 65504, and weights of half of that lie between two codes.
    clipped = np.array([[1e6, 32752, -1e6, -32752] * 4], dtype=np.float32)
    for w in (edges, grid(rng, 2, 16), clipped):
        codes, scales = quantised(submission, w, 16)
        negated, same = quantised(submission, -w, 16)
        expect.equal(negated, -codes, "the codes of −w")
        expect.equal(same, scales, "the scales of −w")


@trap(
    catches="the group size is always 128, whatever the argument says",
    severity="major",
    story="The constant of the paper is in the code, and the argument is unused.",
    mutant=edit(
        '    w = _finite_floats(w)\n    group_size = _positive(group_size, "group_size")\n',
        '    w = _finite_floats(w)\n    _positive(group_size, "group_size")\n'
        "    group_size = GROUP\n",
    ),
)
def group_size_ignored(submission: Submission, rng: np.random.Generator) -> None:
    w = grid(rng, 2, 96)
    for group_size in (1, 7, 32, 96, 1000):
        quantised(submission, w, group_size, f"group size {group_size}")


@trap(
    catches="a transposed or strided view is read in memory order",
    severity="major",
    story="ravel in memory order instead of index order scrambles a transposed weight.",
    mutant=edit("    return w.astype", '    return np.ravel(w, order="K").reshape(w.shape).astype'),
)
def memory_order_read(submission: Submission, rng: np.random.Generator) -> None:
    base = clear_cut(rng, 48, 48)
    views = {
        "transposed": base.T,
        "every second column": base[:, ::2],
        "reversed": base[::-1, ::-1],
    }
    for name, view in views.items():
        codes, scales = quantised(submission, view, 12, name)
        plain = quantised(submission, np.ascontiguousarray(view), 12, "its copy")
        expect.equal(codes, plain[0], f"the codes of a {name} view")
        expect.equal(scales, plain[1], f"the scales of a {name} view")


@trap(
    catches="the caller's weights are modified in place",
    severity="major",
    story="abs with out= saves a buffer and makes the caller's latent weights positive.",
    mutant=edits(
        (
            "    w = np.asarray(w)\n    if w.dtype not in",
            "    original = w\n    w = np.asarray(w)\n    if w.dtype not in",
        ),
        (
            "    return w.astype(np.float64)\n",
            "    wide = w.astype(np.float64)\n"
            "    np.abs(original, out=original)\n"
            "    return wide\n",
        ),
    ),
)
def weights_overwritten(submission: Submission, rng: np.random.Generator) -> None:
    for dtype in (np.float32, np.float64):
        w = grid(rng, 4, 300).astype(dtype)
        _, after = submission.observe("ternarize", w, GROUP)
        expect.equal(after[0], w, "w after the call")


@trap(
    catches="NaN or infinity among the weights passes silently",
    severity="major",
    story="NaN compares false with every threshold and becomes code 0, so a diverged run exports "
    "without an error.",
    mutant=edit("    if not np.isfinite(w).all():\n", "    if w.ndim > 9:\n"),
    seen=BLIND,
    dimension="robustness",
)
def nan_accepted(submission: Submission, rng: np.random.Generator) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        w = grid(rng, 3, 40)
        w[int(rng.integers(3)), int(rng.integers(40))] = bad
        refuses(submission, "ternarize", w, 16)


@trap(
    catches="a group size of 0 or below is accepted",
    severity="minor",
    story="A configuration file without the key can give 0.",
    mutant=edit("return _at_least(value, 1, name)", "return max(1, abs(operator.index(value)))"),
    dimension="robustness",
)
def group_size_unchecked(submission: Submission, rng: np.random.Generator) -> None:
    w = grid(rng, 2, 8)
    codes, scales = oracle.ternarize(w, 4)
    for group_size in (0, -1, -128):
        refuses(submission, "ternarize", w, group_size)
        refuses(submission, "dequantize", codes, scales, group_size)


@trap(
    catches="negative weights never get a code: the threshold meets the signed weights",
    severity="critical",
    story="w > threshold without the absolute value; half of the weights come out as 0.",
    mutant=edit(
        "    counts = magnitude > threshold\n",
        "    counts = _grouped(w, group_size) > threshold\n",
    ),
    seen=BLIND,
)
def negative_weights_lost(submission: Submission, rng: np.random.Generator) -> None:
    _reproduced(submission, exact(rng, 3, 32, scale=0.75), 16)


@trap(
    catches="codes lose their sign: every weight that counts gets +1",
    severity="major",
    story="The codes are taken from the mask of the weights that count, without their signs.",
    mutant=edit("np.where(flags, np.sign(w), 0.0)", "np.where(flags, 1.0, 0.0)"),
)
def signs_lost(submission: Submission, rng: np.random.Generator) -> None:
    _reproduced(submission, exact(rng, 3, 32, scale=1.5), 16)


@trap(
    catches="weights of equal magnitude get no code: the threshold is the mean itself",
    severity="major",
    story="|w| > mean|w| holds for none of a group's weights when all are ±s.",
    mutant=edit("    threshold = 0.5 * np.sum(", "    threshold = np.sum("),
    seen=BLIND,
)
def equal_magnitudes_lost(submission: Submission, rng: np.random.Generator) -> None:
    w = rng.choice([-0.75, 0.75], (2, 32)).astype(np.float32)
    _reproduced(submission, w, 16)


@trap(
    catches="the mean magnitude is taken over 128 weights, whatever the width of the group",
    severity="minor",
    story="A constant of the usual group size: in wider groups the threshold rises above all "
    "weights.",
    mutant=edit("magnitude / sizes[:, None]", "magnitude / GROUP"),
    seen=BLIND,
)
def mean_over_128(submission: Submission, rng: np.random.Generator) -> None:
    w = rng.choice([-0.75, 0.75], (2, 1000)).astype(np.float32)
    _reproduced(submission, w, 1000)


@trap(
    catches="an array without rows raises an error",
    severity="minor",
    story="A reduction over no rows, or a reshape with −1, has no answer for shape (0, 5).",
    mutant=insert_after(
        "    columns = w.shape[-1]\n",
        "    if columns and not w.size:\n        raise ValueError('zero-size array')\n",
    ),
    seen=BLIND,
    also=(
        insert_after(
            "    columns = w.shape[-1]\n",
            "    if columns and not w.size:\n        raise ZeroDivisionError\n",
        ),
        insert_after(
            "    columns = w.shape[-1]\n",
            "    if columns and not w.size:\n        raise IndexError\n",
        ),
    ),
)
def no_rows_refused(submission: Submission, rng: np.random.Generator) -> None:
    quantised(submission, grid(rng, 0, 5), 4, "a matrix without rows")
    quantised(submission, grid(rng, 2, 0, 5), 4, "two matrices without rows")


@trap(
    catches="an array without columns raises an error",
    severity="minor",
    story="The number of groups is 0, and a reduction over no weights has no answer.",
    mutant=insert_after(
        "    columns = w.shape[-1]\n",
        "    if not columns:\n        raise ValueError('zero-size array')\n",
    ),
    also=(
        insert_after(
            "    columns = w.shape[-1]\n",
            "    if not columns:\n        raise ZeroDivisionError\n",
        ),
        insert_after(
            "    columns = w.shape[-1]\n", "    if not columns:\n        raise IndexError\n"
        ),
    ),
    seen=BLIND,
)
def no_columns_refused(submission: Submission, rng: np.random.Generator) -> None:
    quantised(submission, grid(rng, 3, 0), 4, "a matrix without columns")
    quantised(submission, grid(rng, 0), 4, "a vector without elements")


@trap(
    catches="weights go through float16 before they are quantised",
    severity="minor",
    story="A cast to the scale's dtype at the top: from 65 520 on weights are infinite, and the "
    "scale is NaN or 0.",
    mutant=edit(
        "    return w.astype(np.float64)\n",
        "    return w.astype(np.float16).astype(np.float64)\n",
    ),
    seen=BLIND,
    also=(
        edits(
            (
                "    return w.astype(np.float64)\n",
                "    return w.astype(np.float16).astype(np.float64)\n",
            ),
            (
                "    scales = np.minimum(means, LARGEST_SCALE).astype(np.float16)\n",
                "    bad = np.isinf(magnitude).any(axis=-1)\n"
                "    means = np.where(bad, np.nan, means)\n"
                "    scales = np.minimum(means, LARGEST_SCALE).astype(np.float16)\n",
            ),
        ),
    ),
)
def weights_through_half(submission: Submission, rng: np.random.Generator) -> None:
    w = rng.choice([-1e5, 1e5], (2, 32)).astype(np.float32)
    codes, scales = quantised(submission, w, 16)
    expect.equal(codes, np.sign(w).astype(np.int8), "the codes of ±100 000")
    largest = np.full((2, 2), np.finfo(np.float16).max, dtype=np.float16)
    expect.equal(scales, largest, "the scales of ±100 000")


def _reproduced(submission: Submission, w: np.ndarray, group_size: int) -> None:
    """Weights that are ternary already keep their signs as codes and their size as scale."""
    codes, scales = quantised(submission, w, group_size)
    expect.equal(codes, np.sign(w).astype(np.int8), "the codes of 0 and ±s")
    groups = np.abs(w).reshape(len(w), -1, group_size).max(axis=-1)
    expect.equal(scales, groups.astype(np.float16), "the scales of 0 and ±s")


@trap(
    catches="a group size of 1 is refused",
    severity="minor",
    story="The check asks for more than 1 where it means at least 1.",
    mutant=edit("    return _at_least(value, 1, name)\n", "    return _at_least(value, 2, name)\n"),
)
def group_of_one_refused(submission: Submission, rng: np.random.Generator) -> None:
    w = rng.choice([-2.0, 0.0, 2.0], (2, 5))
    codes, scales = quantised(submission, w, 1)
    expect.equal(codes * scales.astype(np.float64), w, "weights in groups of one")
