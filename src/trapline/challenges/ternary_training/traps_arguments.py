"""Bugs of arguments: other dtypes, values out of range, views, and what a call leaves behind."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, edits, insert_after, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.ternary_training import text
from trapline.challenges.ternary_training.situations import (
    config_of,
    grid,
    refuses,
    same_pair,
    ternary_codes,
)
from trapline.challenges.ternary_training.solution_lines import TRAINING
from trapline.gold.ternary import oracle

# --- dtypes ---------------------------------------------------------------------------------------

_WEIGHTS = "    if w.dtype not in (np.float32, np.float64):\n"
_CODES = "    if codes.dtype != np.int8:\n"
_PACKED = "    if packed.dtype != np.uint8:\n"


@trap(
    catches="float16 weights are quantised although only float32 and float64 are allowed",
    severity="minor",
    story="np.issubdtype(dtype, np.floating) is true of float16, too.",
    mutant=edit(_WEIGHTS, '    if w.dtype.kind != "f":\n'),
    dimension="robustness",
)
def half_weights_accepted(submission: Submission, rng: np.random.Generator) -> None:
    refuses(submission, "ternarize", grid(rng, 2, 8).astype(np.float16), 4)


@trap(
    catches="integers, booleans or complex numbers are quantised as if they were weights",
    severity="minor",
    story="np.asarray(w, float) takes integers without a word, and of complex numbers the real "
    "part.",
    mutant=edit(_WEIGHTS, '    if w.dtype.kind not in "fiub":\n'),
    also=[
        insert_before(_WEIGHTS, '    w = w.real if w.dtype.kind == "c" else w\n'),
        insert_before(_WEIGHTS, '    w = w.astype(float) if w.dtype.kind in "iubc" else w\n'),
    ],
    dimension="robustness",
)
def integer_weights_accepted(submission: Submission, rng: np.random.Generator) -> None:
    w = grid(rng, 2, 8)
    for dtype in (np.complex128, np.int64, np.int8):
        refuses(submission, "ternarize", w.astype(dtype), 4)


def _converted(kinds: str) -> Mutant:
    """Codes whose dtype is of one of these kinds are converted."""
    return insert_before(
        _CODES, f'    codes = codes.astype(np.int8) if codes.dtype.kind in "{kinds}" else codes\n'
    )


@trap(
    catches="pack or dequantize accepts codes of another integer dtype than int8",
    severity="minor",
    story="Codes are converted instead of checked; 255 then becomes −1.",
    mutant=_converted("iub"),
    also=[_converted(kind) for kind in "iub"],
    dimension="robustness",
)
def codes_of_another_dtype_accepted(submission: Submission, rng: np.random.Generator) -> None:
    codes = ternary_codes(rng, 2, 8)
    scales = np.ones((2, 1), np.float16)
    ones = np.abs(codes)
    for bad in (codes.astype(np.int64), ones.astype(np.uint8), ones.astype(bool)):
        refuses(submission, "pack", bad)
        refuses(submission, "dequantize", bad, scales, 8)


@trap(
    catches="unpack accepts bytes that are not uint8",
    severity="minor",
    story="Bytes that were read as int8 are negative from 128 on, and a shift keeps their sign.",
    mutant=insert_before(
        _PACKED, "    packed = packed.view(np.uint8) if packed.dtype == np.int8 else packed\n"
    ),
    also=[
        insert_before(
            _PACKED,
            '    packed = packed.astype(np.uint8) if packed.dtype.kind in "iu" else packed\n',
        )
    ],
    dimension="robustness",
)
def signed_bytes_unpacked(submission: Submission, rng: np.random.Generator) -> None:
    packed = oracle.pack(ternary_codes(rng, 3, 8))
    for dtype in (np.int64, np.int8):
        refuses(submission, "unpack", packed.astype(dtype), (3, 8))


# --- values out of range --------------------------------------------------------------------------


def _least(name: str, low: int) -> Mutant:
    """The setting is accepted below its least value."""
    least = 0 if name in ("layers", "seed") else 1
    return edit(f'"{name}": {least}', f'"{name}": {low}')


@trap(
    catches="a size or a seed below its least value is accepted, or raises another error",
    severity="minor",
    story="range(−1) is empty and a width of 0 gives empty arrays: what comes back has the form of "
    "a model. 0 heads divide by zero.",
    mutant=_least("layers", -9),
    also=[
        _least("dim", 0),
        _least("heads", 0),
        edits(
            ('"seed": 0}', '"seed": -9}'),
            (
                '    return {**checked, "s',
                '    checked["seed"] = abs(checked["seed"])\n    return {**checked, "s',
            ),
        ),
    ],
    dimension="robustness",
)
def size_out_of_range_accepted(submission: Submission, rng: np.random.Generator) -> None:
    documents = text.noise(rng, 8, 6, 8)
    for name, low in {
        "vocab": 0,
        "dim": 0,
        "heads": 0,
        "context": 0,
        "layers": -1,
        "seed": -1,
    }.items():
        refuses(submission, "train", documents, config_of(rng, **{"dim": 16, name: low}))


_SECONDS = '    if not config["seconds"] >= 0:\n'


@trap(
    catches="a negative time, or one that is not a number, is accepted",
    severity="minor",
    story="A deadline in the past ends the loop at once, and with NaN every comparison is false.",
    mutant=edit(_SECONDS, '    if config["seconds"] < 0:\n'),
    also=[
        edits(
            (_SECONDS, '    if config["seconds"] != config["seconds"]:\n'),
            ('"seconds": float(config["seconds"])', '"seconds": max(0.0, config["seconds"])'),
        )
    ],
    dimension="robustness",
)
def time_out_of_range_accepted(submission: Submission, rng: np.random.Generator) -> None:
    documents = text.noise(rng, 8, 6, 8)
    for seconds in (-1, -0.5, float("nan")):
        refuses(submission, "train", documents, config_of(rng, dim=16, seconds=seconds))


# --- views, and arguments after the call ----------------------------------------------------------


def _contiguous_codes(submission: Submission, rng: np.random.Generator) -> None:
    """The same calls with arrays in order."""
    codes = ternary_codes(rng, 12, 12)
    packed = oracle.pack(codes)
    expect.equal(submission.pack(codes), packed, "pack")
    expect.equal(submission.unpack(packed, codes.shape), codes, "unpack")


_IN_MEMORY_ORDER = '{0} = np.ravel({0}, order="K").reshape({0}.shape)\n'
_UNPACKED = "    slots = (packed[..., None] >> "


@trap(
    catches="codes or bytes that are a transposed or strided view are read in memory order",
    severity="major",
    story="tobytes, a view of another dtype or ravel take what lies in memory, in that order.",
    mutant=edit(
        "    return np.ascontiguousarray(codes)\n",
        '    return np.ravel(codes, order="K").reshape(codes.shape)\n',
    ),
    also=[insert_before(_UNPACKED, "    " + _IN_MEMORY_ORDER.format("packed"))],
    control=_contiguous_codes,
)
def strided_codes_misread(submission: Submission, rng: np.random.Generator) -> None:
    codes = ternary_codes(rng, 24, 24)
    for name, view in {
        "transposed": codes.T,
        "every second column": codes[:, ::2],
        "reversed": codes[::-1, ::-1],
    }.items():
        expect.equal(submission.pack(view), oracle.pack(view), f"pack of a {name} view")
        scales = np.ones((len(view), 1), np.float16)
        values = submission.dequantize(view, scales, 32)
        expect.equal(values, oracle.dequantize(view, scales, 32), f"dequantize of a {name} view")
    packed = np.asfortranarray(oracle.pack(codes))
    expect.equal(submission.unpack(packed, codes.shape), codes, "unpack of a transposed array")


@trap(
    catches="pack adds 1 to the caller's codes, or unpack shifts the caller's bytes, in place",
    severity="major",
    story="codes += 1 needs no second array; the model that is saved is broken in memory.",
    mutant=edits(
        ("    slots = np.ones((*codes", "    codes += np.int8(1)\n    slots = np.ones((*codes"),
        ("] += codes.view(np.uint8)", "] = codes.view(np.uint8)"),
    ),
    also=[
        edit(
            "    slots = (packed[..., None] >> np.array([0, 2, 4, 6], dtype=np.uint8)) & 3\n",
            "    places = []\n    for _ in range(4):\n        places.append(packed & 3)\n"
            "        packed >>= 2\n    slots = np.stack(places, axis=-1)\n",
        )
    ],
)
def codes_overwritten(submission: Submission, rng: np.random.Generator) -> None:
    codes = ternary_codes(rng, 3, 16)
    packed, after = submission.observe("pack", codes)
    expect.equal(packed, oracle.pack(codes), "pack")
    expect.equal(after[0], codes, "the codes after pack")
    given = oracle.pack(codes)
    unpacked, after = submission.observe("unpack", given, codes.shape)
    expect.equal(unpacked, codes, "unpack")
    expect.equal(after[0], given, "the bytes after unpack")


# --- how documents and weights are drawn ----------------------------------------------------------


@trap(
    catches="documents with the same end, or with the same length and last token, are always "
    "assigned to one side",
    severity="major",
    story="With a signature at the end of every file, hashing the last tokens makes all of them "
    "one document.",
    mutant=edit("for token in document)\n    digest", "for token in document[-16:])\n    digest"),
    also=[
        edit(
            "for token in document)\n    digest",
            "for token in [len(document), *document[-1:]])\n    digest",
        )
    ],
)
def only_the_end_hashed(submission: Submission, rng: np.random.Generator) -> None:
    end = text.noise(rng, 50, 1, 200)[0]
    documents = [beginning + end for beginning in text.noise(rng, 50, 200, 8)]
    count = len(submission.split(documents, 0.5)[1])
    # 200 fair draws: outside 60 … 140 less than once in 10⁷ runs.
    expect.that(60 <= count <= 140, f"{count} of 200 documents with one end held out")


@trap(
    catches="the share that is held out is rounded to whole per cents or tenths",
    severity="minor",
    story="hash % 100 < 100 · fraction: of a large corpus half a per cent is enough, and none is "
    "held out.",
    mutant=edit("_draw(document) < fraction", "int(100 * _draw(document)) < int(100 * fraction)"),
    also=[edit("_draw(document) < fraction", "_draw(document) < round(fraction, 1)")],
)
def share_rounded(submission: Submission, rng: np.random.Generator) -> None:
    documents = text.noise(rng, 1000, 6000, 6)
    # 6000 draws of 0.005: none, or more than 80, less than once in 10¹⁰ runs.
    few = len(submission.split(documents, 0.005)[1])
    expect.that(1 <= few <= 80, f"{few} of 6000 documents held out at fraction 0.005")
    left = len(submission.split(documents, 0.995)[0])
    expect.that(1 <= left <= 80, f"{left} of 6000 documents left at fraction 0.995")


_DRAWN = (
    "        weights[name] = (rng.standard_normal(shape) * _spread(shape)).astype(np.float32)\n"
)


def _constant(part: str, value: int) -> Mutant:
    """This tensor begins with the same number everywhere."""
    lines = f'        if "{part}" in name:\n            weights[name][:] = {value}\n'
    return insert_after(_DRAWN, lines, file=TRAINING)


@trap(
    catches="a tensor begins with zeros or ones instead of weights drawn from the seed",
    severity="minor",
    story="Zeros in the last projection of a block are a known recipe; ternarised, they are a "
    "group without a scale, and every seed has the same.",
    mutant=_constant("head", 0),
    also=[_constant(part, 0) for part in (".o", ".down", "embedding")],
)
def tensor_not_drawn(submission: Submission, rng: np.random.Generator) -> None:
    documents, config = text.noise(rng, 8, 6, 8), config_of(rng, layers=1)
    first = submission.train(documents, config)
    second = submission.train(documents, {**config, "seed": config["seed"] + 1})
    expect.that(isinstance(first, dict) and isinstance(second, dict), "train gave no dict")
    for name in first:
        expect.that(not same_pair(first[name], second[name]), f"two seeds start from one {name}")
