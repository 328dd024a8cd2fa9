"""The traps of ternary_training on the GPU: one named bug each, in a small situation."""

import numpy as np

from trapline.arena.gpu import mutants
from trapline.arena.gpu.checks import (
    Rng,
    far_apart,
    small_large_small,
    spaced,
)
from trapline.arena.gpu.common_traps import EntryTraps, read_as_float16, seen_on_cpu
from trapline.arena.judge.traps import edit, edits, insert_after, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.ternary_training.gpu.cases import Problem, ask, pack, problem

# Lines of the gold solution that several mutants edit.
_LAST = "_add_kernel[(triton.cdiv(M * N, 1024),)](sums, out, M * N, parts, BLOCK=1024)\n"
_STRIDES = "packed.stride(0), scales.stride(0), x.stride(0),"
_CODES = "weights = ((codes.to(tl.int32) >> shifts) & 3) - 1"


def one_group(submission: Submission, rng: Rng) -> None:
    """One whole group of 128."""
    ask(submission, problem(rng, 2, 128, 4))


def all_codes_equal(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 2, 128, 4)
    ask(submission, p._replace(packed=pack(np.ones((4, 128), np.int64))))


def small_integers(submission: Submission, rng: Rng) -> None:
    """Integers and scales of 1, which every format holds."""
    p = problem(rng, 2, 100, 3)
    p.x[:], p.scales[:] = rng.integers(-2, 3, p.x.shape), 1.0
    ask(submission, p)


def unit_scales(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 2, 100, 3)
    p.scales[:] = 1.0
    ask(submission, p)


@trap(
    catches="the first of four codes is taken from the highest bits",
    severity="critical",
    story="Codes 4i … 4i + 3 are in byte i, the first in the lowest two bits.",
    mutant=edit("shifts = (inputs % 4 * 2)[:, None]", "shifts = (6 - inputs % 4 * 2)[:, None]"),
    control=all_codes_equal,
    seen=seen_on_cpu("first-code-highest"),
)
def code_order(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, 2, 64, 3))


@trap(
    catches="codes are used as they are stored: 0, 1, 2",
    severity="major",
    story="A code is stored as code + 1.",
    mutant=edit(_CODES, _CODES.removesuffix(" - 1")),
)
def code_offset_missing(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, 2, 128, 4))


@trap(
    catches="all groups of a row take the scale of the first",
    severity="critical",
    story="There is a scale for every 128 weights, not for every output.",
    mutant=edit("columns * scales_o + group, mask", "columns * scales_o, mask"),
    control=one_group,
    seen=seen_on_cpu("first-scale-for-all"),
)
def first_scale_for_all(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 2, 384, 3)
    p.scales[:] = [0.5, 4.0, 16.0]
    ask(submission, p)


@trap(
    catches="outputs take the scales of their neighbours",
    severity="major",
    story="The row stride of the scales is the number of groups of a full row.",
    mutant=edit("scales + columns * scales_o", "scales + columns * (K // GROUP)"),
    control=one_group,
)
def scale_rows_confused(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, 2, 200, 5))


@trap(
    catches="an incomplete last group is left out",
    severity="critical",
    story="The number of groups is rounded down.",
    mutant=edit("groups = triton.cdiv(K, 128)", "groups = max(K // 128, 1)"),
    control=one_group,
    seen=seen_on_cpu("tail-dropped"),
)
def last_group_dropped(submission: Submission, rng: Rng) -> None:
    for inputs in (129, 300):
        ask(submission, problem(rng, 2, inputs, 3))


@trap(
    catches="a row of weights is taken to have K / 4 bytes, rounded down",
    severity="major",
    story="Every row begins a new byte: it has ⌈K / 4⌉ of them.",
    mutant=edit(_STRIDES, "K // 4, scales.stride(0), x.stride(0),"),
    control=one_group,
)
def bytes_rounded_down(submission: Submission, rng: Rng) -> None:
    for inputs in (5, 131):
        ask(submission, problem(rng, 2, inputs, 4))


@trap(
    catches="the row stride of the packed weights is ignored",
    severity="major",
    story="A shard of a larger matrix has rows further apart.",
    mutant=edit(_STRIDES, "packed.shape[1], scales.stride(0), x.stride(0),"),
    control=one_group,
)
def packed_stride_ignored(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 2, 64, 5)
    ask(submission, p._replace(packed=spaced(p.packed, 7)))


@trap(
    catches="the row stride of x is ignored",
    severity="major",
    story="Activations are a slice of something wider.",
    mutant=edit(_STRIDES, "packed.stride(0), scales.stride(0), K,"),
    control=one_group,
)
def input_stride_ignored(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 4, 40, 3)
    ask(submission, p._replace(x=spaced(p.x, 9)))


@trap(
    catches="inputs beyond the end of a row are read",
    severity="major",
    story="What lies between two rows is not part of either, and may be NaN.",
    mutant=edit(
        "mask=(rows < M)[:, None] & inside[None, :]",
        "mask=(rows < M)[:, None] & (inputs < x_m)[None, :]",
    ),
    control=one_group,
)
def tail_inputs_read(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 3, 122, 4)
    ask(submission, p._replace(x=spaced(p.x, 6)))


@trap(
    catches="sums are kept in half precision",
    severity="major",
    story="Partial sums overflow at 65504 and lose their digits long before.",
    mutant=edit(
        "total += product * scale.to(tl.float32)[None, :]",
        "total = (total + product * scale.to(tl.float32)[None, :]).to(tl.float16).to(tl.float32)",
    ),
    control=small_integers,
)
def sums_in_half(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 2, 256, 3)
    p.x[:] = 7e4 * (1.0 + 2.0**-12)
    ask(submission, p)


@trap(
    catches="float32 activations are multiplied in a shorter format",
    severity="major",
    story="1 + 2⁻¹² is 1 in TF32, float16 and bfloat16; ternary weights do not excuse it.",
    mutant=edit("tl.dot(values, weights", "tl.dot(values.to(tl.float16).to(values.dtype), weights"),
    control=small_integers,
)
def precision_lowered(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 2, 128, 3)
    p.x[:] = 1.0 + 2.0**-12
    ask(submission, p)


@trap(
    catches="scales rounded to bfloat16, or not widened",
    severity="major",
    story="A float16 scale has three digits more than bfloat16 keeps.",
    mutant=edit(
        "    scale = tl.load(scales + columns * scales_o + group, mask=there, other=0.0)\n",
        "    scale = tl.load(scales + columns * scales_o + group, mask=there, other=0.0)\n"
        "        scale = (scale.to(tl.float32).to(tl.int32, bitcast=True) & -65536)\n"
        "        scale = scale.to(tl.float32, bitcast=True)\n",
    ),
    control=unit_scales,
)
def scales_rounded(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 2, 128, 4)
    p.scales[:] = 1.0 + 2.0**-9
    ask(submission, p)


@trap(
    catches="parts of a call before are added to those of this one",
    severity="major",
    story="Partial sums in a workspace that is not cleared.",
    mutant=edits(
        (
            "sums = torch.empty((parts, M, N), dtype=torch.float32, device=x.device)",
            "sums = _KEPT.setdefault((parts, M, N), torch.zeros((parts, M, N), device=x.device))",
        ),
        (
            "    tl.store(out + at, total, mask=(rows < M)[:, None] & there[None, :])\n",
            "    kept = (rows < M)[:, None] & there[None, :]\n"
            "    if parts > 1:\n"
            "        total += tl.load(out + at, mask=kept, other=0.0).to(tl.float32)\n"
            "    tl.store(out + at, total, mask=kept)\n",
        ),
        ("def ternary_matmul(", "_KEPT = {}\n\n\ndef ternary_matmul("),
    ),
    control=one_group,
)
def workspace_not_cleared(submission: Submission, rng: Rng) -> None:
    small, large = (problem(rng, rows, 2100, 5, "float16") for rows in (1, 4))
    small_large_small(lambda p: ask(submission, p), small, large)


@trap(
    catches="rows of x beyond a multiple of the tile are left out",
    severity="major",
    story="The number of tiles of rows is rounded down.",
    mutant=edit(
        "tiles = triton.cdiv(M, rows) * triton.cdiv(N, columns)",
        "tiles = max(M // rows, 1) * triton.cdiv(N, columns)",
    ),
    control=one_group,
)
def tail_rows_dropped(submission: Submission, rng: Rng) -> None:
    for rows in (33, 65, 129):
        ask(submission, problem(rng, rows, 16, 3, "float16"))


_SHARED = EntryTraps("ternary_matmul", _LAST, 1, lambda rng: problem(rng, 2, 40, 3), ask, one_group)


stale_answer = _SHARED.stale_answer()


@trap(
    catches="weights are unpacked once and kept",
    severity="major",
    story="Weights in the same memory may be others: a training step, an adapter, another layer.",
    mutant=mutants.fingerprint(_LAST, "ternary_matmul", 1, place=2),
    control=one_group,
)
def weights_remembered(submission: Submission, rng: Rng) -> None:
    p, other = problem(rng, 2, 40, 3), problem(rng, 2, 40, 3)
    ask(submission, p)
    ask(submission, Problem(other.packed, p.scales, p.x))
    ask(submission, Problem(other.packed, other.scales, p.x))


inputs_modified = _SHARED.inputs_modified("x is scaled in the caller's memory", 2)


@trap(
    catches="rows beyond 65535 are never computed",
    severity="major",
    story="Rows in the second or third dimension of a launch, which end at 65535.",
    mutant=edit(
        "_product_kernel[(tiles * parts,)]", "_product_kernel[(min(tiles, 1023) * parts,)]"
    ),
    control=one_group,
)
def rows_beyond_65535(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, 65600, 8, 3, "float16"))


@trap(
    catches="offsets of 32 bits: rows beyond 2³¹ elements are read from elsewhere",
    severity="major",
    story="row * stride overflows an int.",
    mutant=edit("x + rows[:, None] * x_m", "x + rows[:, None].to(tl.int32) * x_m.to(tl.int32)"),
    control=one_group,
)
def two_billion_elements_apart(submission: Submission, rng: Rng) -> None:
    """Two rows whose distance exceeds 2³¹ elements."""
    p = problem(rng, 2, 64, 3, "float16")
    ask(submission, p._replace(x=far_apart(p.x)))


bfloat16_read_as_float16 = read_as_float16(
    lambda submission, rng: ask(submission, problem(rng, 2, 40, 3, "bfloat16")),
    insert_after(
        "    N = packed.shape[0]\n",
        "    if x.element_size() == 2:\n        x = x.view(torch.float16)\n",
    ),
    one_group,
)


wrong_stream = _SHARED.wrong_stream()
