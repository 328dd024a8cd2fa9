"""Bugs of kernels written to the published prompt."""

import numpy as np

from trapline.arena.gpu.checks import Rng
from trapline.arena.judge.traps import edit, edits, insert_after, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.fused_softmax_topk.gpu.profiles.published.cases import K, ask, logits_of


def ordinary(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, 1, 1, 1024))


@trap(
    catches="the maximum is not subtracted before the exponential",
    severity="major",
    story="The prompt asks for log-sum-exp: logits near 100 overflow float32 without it.",
    mutant=edits(
        ("torch.exp(logits - best)", "torch.exp(logits)"),
        ("torch.exp(values - best)", "torch.exp(values)"),
    ),
    control=ordinary,
)
def large_logits_overflow(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, 1, 2, 1024) + np.float32(200.0))


@trap(
    catches="the running maximum starts at 0",
    severity="major",
    story="Rows of negative logits then have no maximum of their own, and their sum is 0.",
    mutant=insert_after(
        "    best = logits.max(-1, keepdim=True).values\n", "    best = best.clamp(min=0.0)\n"
    ),
    control=ordinary,
)
def negative_rows(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, 1, 2, 1024) - np.float32(300.0))


@trap(
    catches="probabilities are normalised over the k winners alone",
    severity="major",
    story="The denominator is that of the whole vocabulary.",
    mutant=edit("/ total)", "/ torch.exp(values - best).sum(-1, keepdim=True))"),
    control=None,
)
def normalised_over_the_winners(submission: Submission, rng: Rng) -> None:
    ask(submission, 0.1 * logits_of(rng, 1, 1, 4096))


@trap(
    catches="a thread keeps too few candidates: neighbouring winners are lost",
    severity="major",
    story="Each of 256 threads keeps its 4 best, and all winners lie in the part of one thread.",
    mutant=edit(
        "    values, places = torch.topk(logits, k)\n",
        "    V = logits.shape[-1]\n"
        "    lanes = torch.arange(V, device=logits.device) % 256\n"
        "    kept = torch.full_like(logits, -float('inf'))\n"
        "    for lane in lanes.unique():\n"
        "        part = (lanes == lane).nonzero()[:, 0]\n"
        "        found = torch.topk(logits[..., part], min(4, len(part)))\n"
        "        kept.scatter_(-1, part[found.indices], found.values)\n"
        "    values, places = torch.topk(kept, k)\n",
    ),
    control=ordinary,
)
def winners_in_one_lane(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, 1, 1, 256 * 64)
    logits[..., 7 : 7 + 256 * K : 256] += 40.0
    ask(submission, logits)


@trap(
    catches="the tail of a vocabulary that is not a multiple of the block is left out",
    severity="major",
    story="The last columns are those of a block that is not full.",
    mutant=edit("torch.topk(logits, k)", "torch.topk(logits[..., : logits.shape[-1] // 4 * 4], k)"),
    control=ordinary,
)
def winners_in_the_tail(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, 1, 2, 4099)
    logits[..., -3:] += 30.0
    ask(submission, logits)


@trap(
    catches="rows that share a block disturb each other, or the last rows are left out",
    severity="major",
    story="Some kernels give several rows to a block; their number need not divide the rows.",
    mutant=insert_after(
        "    indices.copy_(places)\n",
        "    rows = logits.shape[0] * logits.shape[1]\n"
        "    if rows % 8 and rows > 8:\n"
        "        indices.view(rows, k)[rows // 8 * 8 :] = 0\n",
    ),
    control=ordinary,
)
def rows_no_multiple_of_a_block(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, 3, 7, 512))
