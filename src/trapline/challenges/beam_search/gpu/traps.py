"""The traps of beam_search on the GPU: one named bug each, in a small situation."""

import numpy as np

from trapline.arena.gpu.checks import (
    Rng,
    far_apart,
    small_large_small,
    spaced,
)
from trapline.arena.gpu.common_traps import EntryTraps, read_as_float16, seen_on_cpu
from trapline.arena.judge.traps import edit, edits, insert_after, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.beam_search.gpu.cases import Problem, ask, problem

# Lines of the gold solution that several mutants edit.
_LAST = "        SIZE=size, KEPT=kept, num_warps=min(max(size // 256, 1), 8),\n    )  # fmt: skip\n"
_COLUMN = "candidate = beam * V + columns"
_FILL = "    tl.store(mine + lanes, NO_ENTRY, mask=(lanes >= filled) & (lanes < ROOM))\n"
_SUM = "x = x + tl.load(sums + row)"


def ordinary(submission: Submission, rng: Rng) -> None:
    """One beam that beats all others by far, and a vocabulary that is a multiple of 8."""
    p = problem(rng, 1, 2, 64)
    p.sums[:] = [[0.0, -1000.0]]
    ask(submission, p)


@trap(
    catches="continuations are ranked by their own log-probability",
    severity="major",
    story="The sum of the beam belongs to the score of each of its continuations.",
    mutant=edit(_SUM, "x = x + 0.0 * tl.load(sums + row)"),
)
def sums_ignored(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, 2, 3, 20))


@trap(
    catches="all prompts get the sums of the first",
    severity="major",
    story="The offset of the prompt is missing from an address.",
    mutant=edit(_SUM, "x = x + tl.load(sums + beam)"),
    control=ordinary,
)
def sums_of_the_first_prompt(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 3, 3, 20)
    p.sums[:] = [[0, -9, -20], [-20, 0, -9], [-9, -20, 0]]
    ask(submission, p)


@trap(
    catches="the last tokens are dropped where V is not a multiple of four",
    severity="major",
    story="16-byte loads read V // 4 vectors, and nothing reads the rest.",
    mutant=edit("(columns < V)", "(columns < tl.maximum(V // 4 * 4, 1))"),
    control=ordinary,
)
def tail_tokens_dropped(submission: Submission, rng: Rng) -> None:
    for tokens in (7, 131, 1027):
        p = problem(rng, 2, 2, tokens)
        p.log_probs[..., -1] = -0.01
        ask(submission, p)


@trap(
    catches="tokens are numbered from 0 in every chunk of a row",
    severity="major",
    story="The chunk's offset is missing from the token that is kept.",
    mutant=edit(_COLUMN, "candidate = beam * V + lanes"),
    control=ordinary,
)
def token_within_the_chunk(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 1, 2, 5003)
    p.log_probs[..., -200:] += 30.0
    ask(submission, p)


@trap(
    catches="the parent is missing from a continuation",
    severity="major",
    story="Continuations of later beams are attributed to the first one.",
    mutant=edit(_COLUMN, "candidate = columns"),
    control=ordinary,
)
def parent_lost(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 2, 3, 12)
    p.sums[:] = [-3.0, -2.0, -1.0]
    ask(submission, p)


@trap(
    catches="each beam contributes a limited number of continuations",
    severity="major",
    story="All W winners may come from one beam, and from one lane of it.",
    mutant=edit("while (count > ROOM) &", "while (count > BLOCK) &"),
    control=ordinary,
)
def winners_from_one_beam(submission: Submission, rng: Rng) -> None:
    """Rising log-probabilities far above the rest: neighbours, or as far apart as lanes are."""
    for stride in (1, 32, 256, 1024):
        p = problem(rng, 1, 6, 6500)
        p.log_probs[:] -= 200.0
        number = min(200, 6500 // stride)
        places = 6500 - stride * np.arange(number, 0, -1)
        p.log_probs[0, 2, places] = -np.sort(rng.permutation(1000)[:number])[::-1] / 8
        ask(submission, p)


@trap(
    catches="between equal sums the later continuation comes first",
    severity="major",
    story="A packed key holds the place as it is, so that the larger one wins.",
    mutant=edits(
        ("(candidate ^ 0x7FFFFFFF).to(tl.int64)", "candidate.to(tl.int64)"),
        ("((best & 0x7FFFFFFF) ^ 0x7FFFFFFF).to(tl.int32)", "(best & 0x7FFFFFFF).to(tl.int32)"),
    ),
    control=ordinary,
)
def ties_by_later_place(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 2, 3, 20)
    p.log_probs[:], p.sums[:] = -rng.integers(1, 3, p.log_probs.shape), 0.0
    ask(submission, p)


@trap(
    catches="continuations of probability 0 become beams",
    severity="critical",
    story="Where fewer than W are possible the rest must stay empty: parent −1, token −1, −inf.",
    mutant=edit(
        '    inside = inside & (x > -float("inf"))\n',
        '    inside = inside & (x >= -float("inf"))\n',
    ),
    control=ordinary,
    seen=seen_on_cpu("zero-probability-lives-on"),
)
def impossible_continuations(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 2, 4, 10)
    p.log_probs[:] = -np.inf
    p.log_probs[:, 1, 3] = -0.5
    ask(submission, p)


@trap(
    catches="a beam that has ended or is dead is continued",
    severity="critical",
    story="Its sum is −inf; replaced by a large negative number it comes back.",
    mutant=edit(_SUM, "x = x + tl.maximum(tl.load(sums + row), -1e30)"),
    control=ordinary,
    seen=seen_on_cpu("finished-beam-expanded"),
)
def dead_beam_continued(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 1, 4, 2)
    p.sums[:, 1:] = -np.inf
    ask(submission, p)


@trap(
    catches="places without a continuation are marked as ended",
    severity="major",
    story="Token −1 is compared with an EOS of −1, or the flag is left as it was.",
    mutant=edit("(real & (token == eos_id))", "((token == eos_id) | (token < 0))"),
    control=ordinary,
)
def empty_places_marked(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 2, 4, 10)
    p.log_probs[:] = -np.inf
    p.log_probs[:, 1, 3] = -0.5
    ask(submission, p)
    ask(submission, p._replace(eos_id=-1))


@trap(
    catches="EOS is taken to be token 2",
    severity="major",
    story="The number of the EOS token is an argument.",
    mutant=edit("(real & (token == eos_id))", "(real & (token == 2))"),
)
def eos_hard_coded(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 2, 3, 6)
    p.log_probs[..., :4] = -0.1
    for eos_id in (0, 3):
        ask(submission, p._replace(eos_id=eos_id))


def integers(submission: Submission, rng: Rng) -> None:
    """Sums of small integers, which every format holds."""
    p = problem(rng, 1, 2, 16)
    p.log_probs[:], p.sums[:] = -rng.integers(1, 60, p.log_probs.shape), [[-1.0, -2.0]]
    ask(submission, p)


@trap(
    catches="sums are kept in half precision",
    severity="major",
    story="After a few hundred tokens sums differ in digits that float16 and bfloat16 lack.",
    mutant=edit(_SUM, "x = (x + tl.load(sums + row)).to(tl.float16).to(tl.float32)"),
    control=integers,
)
def sums_in_half(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 1, 2, 16)
    p.sums[:] = [[-300.0, -300.0 - 2.0**-12]]
    ask(submission, p)
    p.sums[:] = -7e4
    ask(submission, p)


@trap(
    catches="rows are taken to be V apart",
    severity="major",
    story="Log-probabilities are a slice of a matrix with a spaced vocabulary.",
    mutant=edit("*log_probs.stride()[:2], chunks", "W * V, V, chunks"),
    control=ordinary,
)
def row_stride_ignored(submission: Submission, rng: Rng) -> None:
    p = problem(rng, 2, 3, 21)
    ask(submission, p._replace(log_probs=spaced(p.log_probs, 11)))


@trap(
    catches="unused slots of the candidates' buffer keep what was there before",
    severity="major",
    story="A workspace is kept between calls and not cleared.",
    mutant=edits(
        (_FILL, ""),
        (
            "torch.empty((B, W, chunks, room), dtype=torch.int64, device=log_probs.device)",
            "_kept(B * W * chunks * room, log_probs.device)",
        ),
        (
            "def _width(",
            "_KEPT = []\n\n\ndef _kept(size, device):\n"
            "    if not _KEPT or _KEPT[0].numel() < size:\n"
            "        _KEPT[:] = [torch.full((size,), -(1 << 63), dtype=torch.int64, "
            "device=device)]\n"
            "    return _KEPT[0]\n\n\ndef _width(",
        ),
    ),
    control=ordinary,
)
def workspace_keeps_old_entries(submission: Submission, rng: Rng) -> None:
    small = problem(rng, 1, 4, 3)
    small.sums[:] = -50.0
    large = problem(rng, 3, 4, 300)
    small_large_small(lambda p: ask(submission, p), small, large)


_SHARED = EntryTraps("beam_step", _LAST, 4, lambda rng: problem(rng, 2, 3, 30), ask, ordinary)


stale_answer = _SHARED.stale_answer("step")


def _with_other_sums(p: Problem, rng: Rng) -> Problem:
    del rng
    return Problem(p.log_probs, p.sums[::-1] - 3.0 * np.arange(3, dtype=np.float32))


remembered_by_fingerprint = _SHARED.remembered_by_fingerprint(
    _with_other_sums, "The log-probabilities are the same, and the sums are others."
)


inputs_modified = _SHARED.inputs_modified(
    "the sums are added in the caller's memory", 0, "Log-probabilities belong to the caller."
)


@trap(
    catches="prompts beyond 65535 are never computed",
    severity="major",
    story="Prompts in the second or third dimension of a launch, which end at 65535.",
    mutant=edit("_merge_kernel[(B,)]", "_merge_kernel[(min(B, 65535),)]"),
    control=ordinary,
)
def prompts_beyond_65535(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, 65600, 2, 5, "float16"))


@trap(
    catches="offsets of 32 bits: rows beyond 2³¹ elements are read from elsewhere",
    severity="major",
    story="row * stride overflows an int; 4096 prompts of 8 beams over 65536 tokens suffice.",
    mutant=edit("batch * batch_stride", "batch.to(tl.int32) * batch_stride.to(tl.int32)"),
    control=ordinary,
)
def two_billion_elements_apart(submission: Submission, rng: Rng) -> None:
    """Two prompts whose distance exceeds 2³¹ elements."""
    p = problem(rng, 2, 2, 50, "float16")
    ask(submission, p._replace(log_probs=far_apart(p.log_probs)))


bfloat16_read_as_float16 = read_as_float16(
    lambda submission, rng: ask(submission, problem(rng, 2, 3, 40, "bfloat16")),
    insert_after(
        "    B, W, V = log_probs.shape\n",
        "    if log_probs.element_size() == 2:\n"
        "        log_probs = log_probs.view(torch.float16)\n",
    ),
    ordinary,
)


wrong_stream = _SHARED.wrong_stream()
