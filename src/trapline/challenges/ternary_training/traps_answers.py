"""Bugs of what is returned, of defaults, and of valid arguments at their bounds."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, edits, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.ternary_training import text
from trapline.challenges.ternary_training.situations import (
    config_of,
    grid,
    quantised,
    refuses,
    tensor_of,
)
from trapline.gold.ternary import oracle

_CODES = "np.where(flags, np.sign(w), 0.0).astype(np.int8)"
_TERNARY = f"    return {_CODES}, scales\n"
_PRODUCT = "codes.astype(np.float32) * scales.astype(np.float32)[..., owner]"
_BYTES = "first | second << 2 | third << 4 | fourth << 6"
_SIDES = "    return train, valid\n"
_FRACTION = "if not 0.0 <= fraction <= 1.0:"


def _ternary(codes: str = _CODES, scales: str = "scales") -> Mutant:
    return edit(_TERNARY, f"    return {codes}, {scales}\n")


def _sides(train: str, valid: str) -> Mutant:
    return edit(_SIDES, f"    return {train}, {valid}\n")


@trap(
    catches="ternarize answers (scales, codes)",
    severity="major",
    story="The pair in the order in which the two are computed.",
    mutant=_ternary("scales", _CODES),
)
def scales_before_codes(submission: Submission, rng: np.random.Generator) -> None:
    quantised(submission, grid(rng, 2, 300))


@trap(
    catches="codes come back in another dtype than int8",
    severity="major",
    story="sign() answers floats; four or eight times the memory, and `pack` refuses them.",
    mutant=_ternary(_CODES.replace("np.int8", "np.int64")),
    also=[_ternary(_CODES.replace("np.int8", dtype)) for dtype in ("w.dtype", "np.int32")],
)
def codes_of_another_dtype(submission: Submission, rng: np.random.Generator) -> None:
    quantised(submission, grid(rng, 2, 300))


@trap(
    catches="scales come back in another dtype than float16",
    severity="major",
    story="The scales of the training, as they were computed.",
    mutant=_ternary(scales="scales.astype(np.float32)"),
    also=[_ternary(scales=f"scales.astype({dtype})") for dtype in ("w.dtype", "np.float64")],
)
def scales_of_another_dtype(submission: Submission, rng: np.random.Generator) -> None:
    quantised(submission, grid(rng, 2, 300))


@trap(
    catches="scales come back with a further axis of length one",
    severity="major",
    story="A mean that kept its axis broadcasts against its group.",
    mutant=_ternary(scales="scales[..., None]"),
    also=[_ternary(scales="scales[..., None, :]")],
)
def scales_keep_an_axis(submission: Submission, rng: np.random.Generator) -> None:
    quantised(submission, grid(rng, 2, 300))


def _dequantised(submission: Submission, rng: np.random.Generator) -> None:
    codes, scales = oracle.ternarize(grid(rng, 2, 48), 16)
    expect.equal(submission.dequantize(codes, scales, 16), oracle.dequantize(codes, scales, 16))


@trap(
    catches="dequantize divides by the scale",
    severity="major",
    story="As the way there divided by it.",
    mutant=edit(_PRODUCT, _PRODUCT.replace("*", "/")),
)
def divided_by_the_scale(submission: Submission, rng: np.random.Generator) -> None:
    _dequantised(submission, rng)


@trap(
    catches="dequantize answers float64",
    severity="minor",
    story="A product with a float64 array, or Python's own numbers.",
    mutant=edit(_PRODUCT, f"({_PRODUCT}).astype(np.float64)"),
)
def dequantized_in_double(submission: Submission, rng: np.random.Generator) -> None:
    _dequantised(submission, rng)


@trap(
    catches="packed codes come back in another dtype than uint8",
    severity="major",
    story="Shifts and sums of codes widen; eight bytes hold what belongs in one.",
    mutant=edit(_BYTES, f"({_BYTES}).astype(np.int64)"),
    also=[edit(_BYTES, f"({_BYTES}).{how}") for how in ("view(np.int8)", "astype(np.int32)")],
)
def packed_in_another_dtype(submission: Submission, rng: np.random.Generator) -> None:
    codes, _ = oracle.ternarize(grid(rng, 2, 30), 16)
    expect.equal(submission.pack(codes), oracle.pack(codes))


@trap(
    catches="split answers the documents instead of their indices",
    severity="major",
    story="Two lists of documents are what a caller trains with.",
    mutant=_sides("[documents[i] for i in train]", "[documents[i] for i in valid]"),
)
def split_answers_documents(submission: Submission, rng: np.random.Generator) -> None:
    _ascending(submission, rng)


@trap(
    catches="the indices of a side are not in ascending order",
    severity="minor",
    story="They stand in the order of the draw, or of a set.",
    mutant=_sides("train[::-1]", "valid[::-1]"),
    also=[
        _sides("sorted(train, key=lambda i: _draw(documents[i]))", "valid"),
        _sides("train", "sorted(valid, key=lambda i: _draw(documents[i]))"),
    ],
)
def sides_not_ascending(submission: Submission, rng: np.random.Generator) -> None:
    _ascending(submission, rng)


def _ascending(submission: Submission, rng: np.random.Generator) -> None:
    sides = submission.split(text.noise(rng, 50, 60, 8), 0.5)
    for side, what in zip(sides, ("training", "validation"), strict=True):
        expect.that(
            all(isinstance(index, int | np.integer) for index in side),
            f"the {what} side does not hold indices",
        )
        expect.that([*side] == sorted(side), f"the {what} side is not in ascending order")


@trap(
    catches="a fraction below 0 or above 1 is accepted",
    severity="minor",
    story="Ten percent given as 10 holds out everything.",
    mutant=edit(_FRACTION, "if not fraction == fraction:"),
    also=[
        edit(_FRACTION, "if not 0.0 <= fraction:"),
        edit(_FRACTION, "if not fraction <= 1.0:"),
        edits((_FRACTION, "fraction = min(max(fraction, 0.0), 1.0)\n    if not 0 <= fraction:")),
    ],
    dimension="robustness",
)
def fraction_beyond_its_range(submission: Submission, rng: np.random.Generator) -> None:
    documents = text.noise(rng, 50, 6, 8)
    for fraction in (1.5, -0.5):
        refuses(submission, "split", documents, fraction)


def _by_default(submission: Submission, w: np.ndarray) -> None:
    codes, scales = oracle.ternarize(w)
    expect.equal(submission.dequantize(codes, scales), oracle.dequantize(codes, scales))


def groups_of_128(submission: Submission, rng: np.random.Generator) -> None:
    """The same, and the group size is given."""
    w = grid(rng, 2, 300)
    quantised(submission, w, 128)
    codes, scales = oracle.ternarize(w)
    expect.equal(submission.dequantize(codes, scales, 128), oracle.dequantize(codes, scales))


_GROUP_OF_CODES = "def ternarize(w: np.ndarray, group_size: int = "
_GROUP_OF_SCALES = "scales: np.ndarray, group_size: int = "


@trap(
    catches="a default group size other than 128",
    severity="major",
    story="Other formats have 32, 64 or 256; ternarize and dequantize may even differ.",
    mutant=edits(*((g + "GROUP", g + "64") for g in (_GROUP_OF_CODES, _GROUP_OF_SCALES))),
    also=[
        edits((g + "GROUP", g + size))
        for g in (_GROUP_OF_CODES, _GROUP_OF_SCALES)
        for size in ("64", "32", "256")
    ],
    control=groups_of_128,
)
def another_default_group_size(submission: Submission, rng: np.random.Generator) -> None:
    w = grid(rng, 2, 300)
    _by_default(submission, w)
    answer = submission.ternarize(w)
    expect.equal(np.shape(answer[1]), (2, 3), "the shape of the scales")


@trap(
    catches="a vocabulary, a width, a number of heads or a context of 1 is refused",
    severity="minor",
    story="The check asks for more than 1 where it means at least 1.",
    mutant=edit('"vocab": 1,', '"vocab": 2,'),
    also=[
        edit('"dim": 1,', '"dim": 2,'),
        edit('"heads": 1,', '"heads": 2,'),
        edit('"context": 1,', '"context": 2,'),
    ],
)
def size_of_one_refused(submission: Submission, rng: np.random.Generator) -> None:
    for name in ("vocab", "heads", "context", "dim"):
        config = config_of(rng, dim=16, layers=1, **({"heads": 1} if name == "dim" else {}))
        config[name] = 1
        documents = [[0, 0, 0], [0, 0]] if name == "vocab" else text.noise(rng, 8, 6, 8)
        tensor_of(submission.train(documents, config), "head", config)
