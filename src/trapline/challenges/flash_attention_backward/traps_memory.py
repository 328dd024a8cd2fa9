"""Bugs of memory: what grows as T·S, in either pass."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, edits, insert_after, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_backward.cases import NAMES, triple
from trapline.challenges.flash_attention_backward.situations import BLIND, ordinary
from trapline.challenges.flash_attention_backward.solution_lines import CHECKED
from trapline.challenges.flash_attention_forward.cases import Shape, agrees, form, pair, weighed
from trapline.challenges.flash_attention_forward.situations import holds_no_mask, holds_no_matrix

_LSE = "    lse = np.zeros((B, H, T), q.dtype)\n"
_FORWARD_CHECKED = "    _check(q, k, v, tile)\n    (B, H"
#: Queries and keys of every situation here, and how many pairs these are.
LENGTH = 3072
PAIRS = LENGTH * LENGTH
_SQUARE = Shape(T=LENGTH, S=LENGTH)


def backward_rise(
    submission: Submission,
    rng: np.random.Generator,
    causal: bool,
    shape: Shape = _SQUARE,
    tile: int = 64,
) -> int:
    """By how many bytes memory rises in a backward pass; its dv is right in the sum."""
    q, k, v = shape.draw(rng, np.float32)
    dout = rng.standard_normal(q.shape).astype(q.dtype)
    arguments = dout, q, k, v, *blockwise(q, k, v, causal)
    settings = {"causal": causal, "tile": tile}
    answer, rise = weighed(submission, "flash_attention_backward", *arguments, **settings)
    for name, got in zip(NAMES, triple(answer), strict=True):
        form(submission.scope, got, q, q.dtype, name)
    # The weights of a row sum to one, so dv sums to dout.
    total = triple(answer)[2].astype(np.float64).sum(axis=2)
    expect.close(total, dout.sum(axis=2, dtype=np.float64), atol=0.1, what="dv summed over keys")
    return rise


def forward_rise(submission: Submission, rng: np.random.Generator, causal: bool) -> int:
    """By how many bytes memory rises in a forward pass; its last rows are right."""
    q, k, v = _SQUARE.draw(rng, np.float32)
    answer, rise = weighed(submission, "flash_attention", q, k, v, causal=causal, tile=64)
    scope = submission.scope
    out, lse = pair(answer)
    last = out[:, :, -2:], lse[:, :, -2:] if scope.has("lse") else None
    agrees(last, q[:, :, -2:], k, v, causal, scope)
    return rise


def blockwise(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of a square problem in its own dtype, a block of rows at a time."""
    outs, lses = [], []
    for end in range(256, q.shape[2] + 1, 256):
        weights = np.exp(q[:, :, end - 256 : end] @ k.swapaxes(2, 3) * q.shape[3] ** -0.5)
        if causal:
            weights = np.tril(weights, k=end - 256)
        total = weights.sum(axis=3)
        outs.append(weights @ v / total[..., None])
        lses.append(np.log(total))
    return np.concatenate(outs, axis=2), np.concatenate(lses, axis=2)


@trap(
    catches="memory that grows as T·S: weights or their gradients are held whole",
    severity="critical",
    story="3072 queries and keys have 36 MiB of weights; half of that is far more than tiles and "
    "gradients need.",
    mutant=insert_after(CHECKED, "    tile = max(q.shape[2], k.shape[2], 1)\n"),
    seen=BLIND,
    control=ordinary,
)
def score_matrix_in_memory(submission: Submission, rng: np.random.Generator) -> None:
    holds_no_matrix(backward_rise(submission, rng, False), PAIRS, "weights")


_BY_TRIU = "np.triu(np.ones((T, S), bool), S - T + 1) if causal else None"
_WHOLE_MASK = "np.arange(S) > np.arange(T)[:, None] + S - T if causal else None"
_SUM = "    # The sum over keys of weight"
_SLICED = (
    "weights = _weights(",
    "weights = (1 if pairs is None else ~pairs[rows, cols]) * _weights(",
)


@trap(
    catches="the weights are tiled, but the causal mask is made for all T·S pairs at once",
    severity="major",
    story="One byte a pair is still quadratic: at 128k tokens the mask alone has 16 GiB.",
    mutant=edits((_SUM, f"    pairs = {_WHOLE_MASK}\n" + _SUM), _SLICED),
    also=[edits((_SUM, f"    pairs = {_BY_TRIU}\n" + _SUM), _SLICED)],
    seen=BLIND,
    control=ordinary,
)
def mask_for_all_pairs(submission: Submission, rng: np.random.Generator) -> None:
    holds_no_mask(lambda causal: backward_rise(submission, rng, causal), PAIRS)


@trap(
    catches="the forward pass holds the scores whole: memory that grows as T·S",
    severity="major",
    story="Only the backward pass is written in tiles.",
    mutant=edit(
        _FORWARD_CHECKED,
        _FORWARD_CHECKED.replace("\n", "\n    tile = max(q.shape[2], k.shape[2], 1)\n"),
    ),
    control=ordinary,
)
def forward_score_matrix_in_memory(submission: Submission, rng: np.random.Generator) -> None:
    holds_no_matrix(forward_rise(submission, rng, False), PAIRS, "scores")


@trap(
    catches="the forward pass makes the causal mask for all T·S pairs at once",
    severity="major",
    story="One byte a pair is still quadratic: at 128k tokens the mask alone has 16 GiB.",
    mutant=insert_after(_LSE, f"    pairs = {_WHOLE_MASK}\n"),
    also=[insert_after(_LSE, f"    pairs = {_BY_TRIU}\n")],
    seen=BLIND,
    control=ordinary,
)
def forward_mask_for_all_pairs(submission: Submission, rng: np.random.Generator) -> None:
    holds_no_mask(lambda causal: forward_rise(submission, rng, causal), PAIRS)


#: With these, tile · D numbers for each pair of tiles are far more than the scores: 64 MiB and 4.
_WIDE, _NARROW_TILE = Shape(T=1024, S=1024, D=256), 16
_RETURN = "    return dq, dk, dv\n"
_DELTA = "    delta = (dout * out).sum(axis=-1)\n"
_SUMS = {
    "dq": ("dq[b, h, rows]", "dscores @ k[b, g, cols]"),
    "dk": ("dk[b, g, cols]", "dscores.T @ q[b, h, rows]"),
    "dv": ("dv[b, g, cols]", "weights.T @ dout[b, h, rows]"),
}


def _collected(*names: str) -> Mutant:
    """The parts of these gradients are kept in a list and summed at the end."""
    sums = [_SUMS[name] for name in names]
    return edits(
        (_DELTA, _DELTA + "    parts = []\n"),
        *((f"{place} += {part}", f"parts.append(({place}, {part}))") for place, part in sums),
        (_RETURN, "    for whole, part in parts:\n        whole += part\n" + _RETURN),
    )


@trap(
    catches="the parts of a gradient are kept for every pair of tiles and summed at the end: "
    "memory that grows as T·S·D / tile",
    severity="major",
    story="Each part is as small as a tile, but there is one for every pair: with narrow tiles "
    "they take more than the weights would.",
    mutant=_collected("dk"),
    also=[_collected("dv"), _collected("dq"), _collected("dk", "dv")],
    seen=BLIND,
    control=ordinary,
)
def gradient_parts_collected(submission: Submission, rng: np.random.Generator) -> None:
    rise = backward_rise(submission, rng, False, _WIDE, _NARROW_TILE)
    parts = _WIDE.T * _WIDE.S // _NARROW_TILE * _WIDE.D * 4
    text = f"memory rose by {rise >> 20} MiB, the parts of a gradient are {parts >> 20}"
    expect.that(rise < parts * 3 // 4, text)
