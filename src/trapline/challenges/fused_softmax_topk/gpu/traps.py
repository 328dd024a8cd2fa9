"""The traps of fused_softmax_topk on the GPU: one named bug each, in a small situation."""

import numpy as np

from trapline.arena.gpu.checks import (
    Rng,
    far_apart,
    leaves_inputs_alone,
    small_large_small,
    spaced,
)
from trapline.arena.gpu.common_traps import EntryTraps, read_as_float16, seen_on_cpu
from trapline.arena.gpu.contract import rounded
from trapline.arena.judge.traps import edit, edits, insert_after, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.fused_softmax_topk.gpu.cases import LONG, ask, check, logits_of

Array = np.ndarray
# Lines of the gold solution that several mutants edit.
_ENTRY = "def softmax_topk(logits, k, probs, indices):\n    rows, V = logits.shape\n"
_WEIGHTS = 'weights = tl.where(x == -float("inf"), 0.0, tl.exp(x - largest))'
_COLUMN = "(columns ^ 0x7FFFFFFF).to(tl.int64)"
_FILL = "    tl.store(mine + lanes, NO_ENTRY, mask=(lanes >= filled) & (lanes < ROOM))\n"
_ENTRIES = "torch.empty((rows, chunks, room), dtype=torch.int64, device=logits.device)"
_LAST = "        LANES=128, SIZE=size, KEPT=kept, num_warps=min(max(size // 256, 1), 8),\n    )"


def ordinary(submission: Submission, rng: Rng) -> None:
    """A short row, with nothing remarkable about it."""
    ask(submission, logits_of(rng, (2, 64)), 4)


def exact_weights(submission: Submission, rng: Rng) -> None:
    """Equal logits: every weight is 0 or 1 in any precision."""
    logits = np.full((1, 40), -np.inf, np.float32)
    logits[:, rng.permutation(40)[:8]] = 0.0
    ask(submission, logits, 8)


def one_row(rng: Rng, values: dict[int, float], length: int = LONG, low: float = -60.0) -> Array:
    """A row of low logits, all different, and these."""
    row = low - rng.permutation(length).astype(np.float32)[None] / 4096
    for place, value in values.items():
        row[0, place] = value
    return np.asarray(row, np.float32)


@trap(
    catches="lanes beyond the end of a row count as logits of 0",
    severity="major",
    story="Masked loads must give −inf; exp(0 − max) adds up where all logits are negative.",
    mutant=edits(
        ('mask=inside, other=-float("inf")', "mask=inside, other=0.0"),
        (_WEIGHTS, "weights = tl.exp(x - largest)"),
    ),
    control=ordinary,
)
def tail_lanes_counted(submission: Submission, rng: Rng) -> None:
    for vocabulary in (5, 33, 1025):
        ask(submission, -abs(logits_of(rng, (2, vocabulary))) - 30.0, 4)


@trap(
    catches="the last columns are dropped where V is not a multiple of a vector of four",
    severity="major",
    story="16-byte loads read V // 4 vectors, and nothing reads the rest.",
    mutant=edit("(columns < V)", "(columns < tl.maximum(V // 4 * 4, 1))"),
    control=ordinary,
)
def tail_columns_dropped(submission: Submission, rng: Rng) -> None:
    for vocabulary in (7, 131, 1027):
        logits = logits_of(rng, (2, vocabulary))
        logits[:, -1] = 20.0
        ask(submission, logits, 3)


@trap(
    catches="columns are numbered from 0 in every chunk of a row",
    severity="critical",
    story="The chunk's offset is missing from the index that is kept.",
    mutant=edit(_COLUMN, "(lanes ^ 0x7FFFFFFF).to(tl.int64)"),
    control=ordinary,
    seen=seen_on_cpu("index-within-the-tile"),
)
def index_within_the_chunk(submission: Submission, rng: Rng) -> None:
    first, second = (int(i) for i in LONG - 1 - rng.permutation(500)[:2])
    ask(submission, one_row(rng, {first: 2.0, second: 1.0}), 2)


@trap(
    catches="sums of chunks are added without being brought to the common maximum",
    severity="critical",
    story="Each chunk's sum is relative to its own maximum.",
    mutant=edit("part * tl.exp(maximum - new)", "part"),
    control=ordinary,
    seen=seen_on_cpu("rescale-missing"),
)
def chunk_sums_not_rescaled(submission: Submission, rng: Rng) -> None:
    first, late = int(rng.integers(500)), LONG - 1 - int(rng.integers(500))
    ask(submission, one_row(rng, {first: 0.0, late: 1.5}), 2)
    ask(submission, one_row(rng, {first: 1.5, late: 0.0}), 2)


@trap(
    catches="a chunk that is all −inf gives NaN",
    severity="critical",
    story="exp(−inf − (−inf)) is NaN; a masked vocabulary has such stretches.",
    mutant=edits(
        (_WEIGHTS, "weights = tl.exp(x - largest)"),
        (
            'part = tl.where(maximum == -float("inf"), 0.0, part * tl.exp(maximum - new))',
            "part = part * tl.exp(maximum - new)",
        ),
    ),
    control=ordinary,
    seen=seen_on_cpu("masked-first-tile"),
)
def chunk_of_minus_infinity(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (1, LONG))
    logits[:, : LONG // 2] = -np.inf
    ask(submission, logits, 5)


@trap(
    catches="exponentials of logits as they are: large ones overflow",
    severity="major",
    story="Without the maximum subtracted, exp(90) is infinite in float32.",
    mutant=edit("largest = tl.max(x, 0)\n", "largest = 0.0 * tl.max(x, 0)\n"),
    control=ordinary,
)
def large_logits_overflow(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (3, 40))
    logits += np.array([[7e4], [-7e4], [120.0]], np.float32)
    ask(submission, logits, 4)


@trap(
    catches="weights rounded to half precision before they are summed",
    severity="major",
    story="exp(−1) loses a part in 10⁴ in float16, and more in bfloat16; the sum of many keeps it.",
    mutant=edit("tl.sum(weights, 0))", "tl.sum(weights.to(tl.float16).to(tl.float32), 0))"),
    control=exact_weights,
)
def weights_summed_in_half(submission: Submission, rng: Rng) -> None:
    logits = np.full((2, 300), -1.0, np.float32)
    logits[:, rng.permutation(300)[:3]] = 0.0
    ask(submission, logits, 2)


@trap(
    catches="logits rounded to a shorter format before they are ranked",
    severity="major",
    story="1 and 1 + 2⁻¹² are equal in bfloat16, float16 and TF32, and rank by index.",
    mutant=edit(
        "tl.where(inside, _ordered(x), LOWEST)",
        "tl.where(inside, _ordered(x.to(tl.float16).to(tl.float32)), LOWEST)",
    ),
    control=exact_weights,
)
def ranked_in_lower_precision(submission: Submission, rng: Rng) -> None:
    logits = np.full((2, 50), -3.0, np.float32)
    first, second, third = np.sort(rng.permutation(50)[:3])
    logits[:, first], logits[:, second], logits[:, third] = 1.0, 1.0 + 2.0**-12, 1.0 + 2.0**-11
    ask(submission, logits, 3)


@trap(
    catches="between equal logits the higher index comes first",
    severity="major",
    story="A packed key holds the column as it is, so that the larger one wins.",
    mutant=edits(
        (_COLUMN, "columns.to(tl.int64)"),
        ("index = (best & 0x7FFFFFFF) ^ 0x7FFFFFFF", "index = best & 0x7FFFFFFF"),
    ),
    control=ordinary,
    seen=seen_on_cpu("ties-to-the-higher-index"),
)
def ties_by_higher_index(submission: Submission, rng: Rng) -> None:
    ask(submission, rng.integers(0, 3, (2, 40)).astype(np.float32), 12)


@trap(
    catches="−0 ranks below +0",
    severity="minor",
    story="Integer keys made of the bits of a float tell the two zeros apart.",
    mutant=edit("tl.where(x == 0.0, 0.0, x).to(tl.int32", "x.to(tl.int32"),
    control=ordinary,
    seen=seen_on_cpu("signed-zeros"),
)
def signed_zeros(submission: Submission, rng: Rng) -> None:
    logits = np.full((1, 30), -2.0, np.float32)
    places = np.sort(rng.permutation(30)[:6])
    logits[0, places] = [-0.0, 0.0, -0.0, -0.0, 0.0, 0.0]
    ask(submission, logits, 6)


@trap(
    catches="probabilities normalised over the k winners",
    severity="critical",
    story="The softmax is over the whole vocabulary, not over what is returned.",
    mutant=edit("- largest) / total\n", "- largest) / total\n    prob /= tl.sum(prob, 0)\n"),
    seen=seen_on_cpu("normalised-over-k"),
)
def normalised_over_the_winners(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (2, 100)), 8)


#: Chooses again, from the best four of each of 256 lanes; maxima and sums stay those of the row.
_FOUR_A_LANE = """\
    lanes = logits.new_full((rows, 256 * triton.cdiv(V, 256)), -float("inf"))
    lanes[:, :V] = logits
    lanes = lanes.view(rows, -1, 256)
    order = torch.sort(lanes.float(), dim=1, descending=True, stable=True).indices.argsort(1)
    best = torch.where(order < 4, lanes, -float("inf")).view(rows, -1)[:, :V].contiguous()
    _chunk_kernel[(rows * chunks,)](
        best, entries, maxima.clone(), sums.clone(), V, V, k, chunks, width,
        GROUPS=kept, ROOM=room, BLOCK=block, num_warps=min(max(block // 1024, 1), 16),
    )  # fmt: skip
"""


@trap(
    catches="candidates beyond the size of the buffer are dropped",
    severity="major",
    story="Winners that sit close together, or in one lane, exceed what was set aside for them.",
    mutant=edit("while (count > ROOM) &", "while (count > BLOCK) &"),
    also=(insert_before("    count = chunks * room\n", _FOUR_A_LANE),),
    control=ordinary,
)
def winners_in_one_lane(submission: Submission, rng: Rng) -> None:
    """Rising logits far above the rest: neighbours, or as far apart as lanes and blocks are."""
    for stride in (1, 32, 256, 1024):
        logits = logits_of(rng, (1, 6500)) - 100.0
        number = min(200, 6500 // stride)
        places = 6500 - stride * np.arange(number, 0, -1)
        logits[0, places] = np.sort(rng.permutation(1000)[:number]).astype(np.float32)
        ask(submission, logits, 8)


@trap(
    catches="the row stride is taken to be V",
    severity="major",
    story="A slice of a wider matrix has rows further apart.",
    mutant=edit("V, logits.stride(0), k", "V, V, k"),
    control=ordinary,
)
def row_stride_ignored(submission: Submission, rng: Rng) -> None:
    ask(submission, spaced(logits_of(rng, (3, 41)), 23), 4)


@trap(
    catches="unused slots of the candidates' buffer keep what was there before",
    severity="major",
    story="A workspace is kept between calls and not cleared: candidates of an earlier call win.",
    mutant=edits(
        (_FILL, ""),
        (_ENTRIES, "_kept(rows * chunks * room, logits.device)"),
        (
            "def _width(",
            "_KEPT = []\n\n\ndef _kept(size, device):\n"
            "    if not _KEPT or _KEPT[0].numel() < size:\n"
            "        _KEPT[:] = [torch.zeros(size, dtype=torch.int64, device=device)]\n"
            "    return _KEPT[0]\n\n\ndef _width(",
        ),
    ),
    control=ordinary,
)
def workspace_keeps_old_entries(submission: Submission, rng: Rng) -> None:
    """A row with fewer than k entries beside the padding, before and after a large problem."""
    small = -abs(logits_of(rng, (1, 6))) - 5.0, 5
    large = abs(logits_of(rng, (3, 700))) + 5.0, 5
    small_large_small(lambda problem: ask(submission, *problem), small, large)


@trap(
    catches="an answer remembered for this shape or this address",
    severity="major",
    story="A cache keyed by the address of the logits, or a graph that is replayed with the values "
    "it was captured with: the next batch lies in the same memory.",
    mutant=edits(
        (
            _ENTRY,
            "_SEEN = {}\n\n\n" + _ENTRY + "    place = logits.shape, k\n"
            "    if place in _SEEN:\n"
            "        probs.copy_(_SEEN[place][0])\n"
            "        indices.copy_(_SEEN[place][1])\n"
            "        return\n",
        ),
        (_LAST, _LAST + "\n    _SEEN[place] = probs.clone(), indices.clone()"),
    ),
    control=ordinary,
)
def stale_answer(submission: Submission, rng: Rng) -> None:
    for _ in range(4):
        ask(submission, logits_of(rng, (3, 300)), 4)


@trap(
    catches="an answer remembered for these shapes and a few of the values",
    severity="major",
    story="A fingerprint of some elements does not see a change in another.",
    mutant=edits(
        (
            _ENTRY,
            "_SEEN = {}\n\n\n"
            + _ENTRY
            + "    fingerprint = logits.shape, k, float(logits[:1, :1].sum())\n"
            "    if fingerprint in _SEEN:\n"
            "        probs.copy_(_SEEN[fingerprint][0])\n"
            "        indices.copy_(_SEEN[fingerprint][1])\n"
            "        return\n",
        ),
        (_LAST, _LAST + "\n    _SEEN[fingerprint] = probs.clone(), indices.clone()"),
    ),
    control=ordinary,
)
def remembered_by_fingerprint(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (2, 90))
    ask(submission, logits, 4)
    changed = logits.copy()
    changed[1, 1 + rng.integers(88)] += 25.0
    ask(submission, changed, 4)
    ask(submission, logits, 4)


@trap(
    catches="the maximum is subtracted in the caller's logits",
    severity="critical",
    story="The sampler still needs the logits after the call.",
    mutant=insert_after(_LAST, "\n    logits.sub_(maxima.amax(1, keepdim=True).to(logits.dtype))"),
    control=ordinary,
    seen=seen_on_cpu("logits-modified"),
)
def logits_modified(submission: Submission, rng: Rng) -> None:
    leaves_inputs_alone(submission, "softmax_topk", logits_of(rng, (3, 30)), 4)
    leaves_inputs_alone(submission, "softmax_topk", logits_of(rng, (3, 30), "float16"), 4)


@trap(
    catches="sums of a call before are added to those of this one",
    severity="major",
    story="An accumulator in global memory that is cleared when it is allocated, and never again.",
    mutant=edits(
        (
            "tl.store(sums + program, tl.sum(weights, 0))",
            "tl.store(sums + program, tl.load(sums + program) + tl.sum(weights, 0))",
        ),
        (
            "sums = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)",
            "new = torch.zeros((rows, chunks), dtype=torch.float32, device=logits.device)\n"
            "    sums = _SUMS.setdefault((rows, chunks), new)",
        ),
        ("def _width(", "_SUMS = {}\n\n\ndef _width("),
    ),
)
def accumulator_not_cleared(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (2, 77))
    for _ in range(3):
        ask(submission, logits, 3)


@trap(
    catches="a single row, or a single column, is not handled",
    severity="major",
    story="A special case for one element, or a block that needs two.",
    mutant=insert_before(
        "    width = _width(rows, V)\n",
        "    if V == 1:\n        probs.fill_(1.0)\n        return\n",
    ),
    control=ordinary,
)
def one_element(submission: Submission, rng: Rng) -> None:
    for rows in (1, 3):
        ask(submission, logits_of(rng, (rows, 1)), 1)
    ask(submission, logits_of(rng, (1, 2)), 2)


@trap(
    catches="rows beyond 65535 are never computed",
    severity="major",
    story="Rows in the second or third dimension of a launch, which end at 65535.",
    mutant=edit("_merge_kernel[(rows,)]", "_merge_kernel[(min(rows, 65535),)]"),
    control=ordinary,
)
def rows_beyond_65535(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (65600, 9), "float16"), 2)


@trap(
    catches="offsets of 32 bits: rows beyond 2³¹ elements are read from elsewhere",
    severity="major",
    story="row * stride overflows an int; 65536 rows of a vocabulary of 32768 suffice.",
    mutant=edits(
        ("    program = tl.program_id(0).to(tl.int64)\n", "    program = tl.program_id(0)\n"),
        ("start = logits + row * row_stride", "start = logits + row * row_stride.to(tl.int32)"),
    ),
    control=ordinary,
)
def two_billion_elements_apart(submission: Submission, rng: Rng) -> None:
    """Two rows whose distance exceeds 2³¹ elements; what lies between them is never touched."""
    logits = far_apart(logits_of(rng, (2, 300), "float16"))
    check(submission.softmax_topk(logits, 5), logits, 5)


bfloat16_read_as_float16 = read_as_float16(
    lambda submission, rng: ask(
        submission, rounded(3.0 * rng.standard_normal((2, 65)), "bfloat16"), 4
    ),
    insert_before(
        "    width = _width(rows, V)\n",
        "    if logits.element_size() == 2:\n        logits = logits.view(torch.float16)\n",
    ),
    ordinary,
)


_SHARED = EntryTraps(
    "softmax_topk",
    _LAST,
    2,
    lambda rng: logits_of(rng, (3, 50)),
    lambda submission, logits: ask(submission, logits, 4),
    ordinary,
)


wrong_stream = _SHARED.wrong_stream()
