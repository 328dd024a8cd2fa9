"""The traps of flash_attention_forward on the GPU: one named bug each, in a small situation."""

import numpy as np

from trapline.arena.gpu import mutants
from trapline.arena.gpu.checks import Rng, far_apart, spaced
from trapline.arena.gpu.common_traps import EntryTraps, read_as_float16, seen_on_cpu
from trapline.arena.judge.traps import edit, edits, insert_after, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_forward.gpu.cases import Problem, Sizes, ask, problem

# Lines of the gold solution that several mutants edit.
_LAST = "        num_warps=warps, num_stages=stages,\n    )  # fmt: skip\n"
_GROUP = "group = h // heads_per_group"
_STRIDES = "*q.stride()[:3], *k.stride()[:3], *v.stride()[:3],"
_DOT = "tl.dot(queries, tl.trans(key)"


def ordinary(submission: Submission, rng: Rng) -> None:
    """One full tile without a mask."""
    ask(submission, problem(rng, Sizes(T=32, S=32)))


def scores_below_zero(submission: Submission, rng: Rng) -> None:
    p = problem(rng, Sizes(T=5, S=9))
    p.q[..., 0], p.k[..., 0] = 6.0, -8.0
    ask(submission, p)


def without_mask(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(T=9, S=14)))


def equal_lengths(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(T=12, S=12), causal=True))


def _rising(rng: Rng, step: float) -> Problem:
    """Scores that rise by this step from tile to tile of 32 keys."""
    p = problem(rng, Sizes(T=3, S=200))
    p.q[..., 0] = 4.0
    p.k[..., 0] = step * (np.arange(200) // 32)
    return p


@trap(
    catches="the scale 1 / D instead of 1 / √D",
    severity="critical",
    story="The two agree at D = 1 only.",
    mutant=edit("D**-0.5 * LOG2_E", "1.0 / D * LOG2_E"),
    seen=seen_on_cpu("scale-without-root"),
)
def scale_without_root(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(T=4, S=6)))


@trap(
    catches="the running result is not rescaled when the maximum rises",
    severity="major",
    story="Works where the largest score is in the first tile of keys.",
    mutant=edit("total = total * factor[:, None]", "total = total * 1.0"),
    control=ordinary,
)
def result_not_rescaled(submission: Submission, rng: Rng) -> None:
    ask(submission, _rising(rng, 1.0))


@trap(
    catches="the running sum is not rescaled when the maximum rises",
    severity="critical",
    story="The denominator keeps weights that were relative to a smaller maximum.",
    mutant=edit("summed = summed * factor + tl.sum(weights, 1)", "summed += tl.sum(weights, 1)"),
    control=ordinary,
    seen=seen_on_cpu("sum-not-rescaled"),
)
def sum_not_rescaled(submission: Submission, rng: Rng) -> None:
    ask(submission, _rising(rng, 1.0))


@trap(
    catches="keys beyond the end count with a score of 0",
    severity="major",
    story="S is not a multiple of the tile, and the padding is not masked.",
    mutant=edit(
        "            seen = inside[None, :]\n", "            seen = inside[None, :] | True\n"
    ),
    control=ordinary,
)
def tail_keys_counted(submission: Submission, rng: Rng) -> None:
    for S in (1, 17, 33, 129):
        p = problem(rng, Sizes(T=5, S=S), "float16")
        p.q[..., 0], p.k[..., 0] = 6.0, -6.0
        ask(submission, p)


@trap(
    catches="no maximum is subtracted: large scores overflow",
    severity="critical",
    story="exp(89) is infinite in float32, and scores of a trained model reach hundreds.",
    mutant=edit(
        "new = tl.maximum(largest, tl.max(scores, 1))",
        "new = tl.minimum(tl.maximum(largest, tl.max(scores, 1)), 0.0)",
    ),
    control=scores_below_zero,
    seen=seen_on_cpu("exponent-without-maximum"),
)
def large_scores_overflow(submission: Submission, rng: Rng) -> None:
    p = problem(rng, Sizes(T=5, S=40))
    p.q[..., 0], p.k[..., 0] = 60.0, 20.0
    ask(submission, p)


@trap(
    catches="the running maximum starts at 0",
    severity="major",
    story="Very negative scores underflow to 0 / 0; the maximum must start at −inf.",
    mutant=edit(
        'largest = tl.full([QUERIES], -float("inf"), tl.float32)',
        "largest = tl.zeros([QUERIES], tl.float32)",
    ),
    control=ordinary,
)
def maximum_starts_at_zero(submission: Submission, rng: Rng) -> None:
    p = problem(rng, Sizes(T=5, S=40))
    p.q[..., 0], p.k[..., 0] = 60.0, -20.0
    ask(submission, p)


@trap(
    catches="a query that sees no key gives NaN",
    severity="critical",
    story="−inf − (−inf), or 0 / 0, where causal attention has more queries than keys.",
    mutant=edit('base = tl.where(new == -float("inf"), 0.0, new)', "base = new"),
    control=without_mask,
    seen=seen_on_cpu("empty-row-divides-by-zero"),
)
def no_visible_key(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(T=20, S=9), causal=True))


@trap(
    catches="causal attention is aligned at the first key",
    severity="critical",
    story="With a cache, T < S, the last query must see all keys: j ≤ t + S − T.",
    mutant=edit("    shift = S - T\n", "    shift = 0\n"),
    control=equal_lengths,
    seen=seen_on_cpu("causal-aligned-top-left"),
)
def causal_alignment(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(T=6, S=45), causal=True))
    ask(submission, problem(rng, Sizes(T=1, S=45), causal=True))


@trap(
    catches="a query does not see its own key",
    severity="critical",
    story="The mask says < where it must say ≤.",
    mutant=edit("keys[None, :] <= rows[:, None] + shift", "keys[None, :] < rows[:, None] + shift"),
    control=without_mask,
    seen=seen_on_cpu("causal-row-zero"),
)
def own_key_hidden(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(T=12, S=12), causal=True))


@trap(
    catches="query heads take the key heads in turn",
    severity="major",
    story="Query head h reads key head h // (H / G), not h mod G; the two agree for G = 1 and H.",
    mutant=edit(_GROUP, "group = h % (H // heads_per_group)"),
    control=ordinary,
)
def group_in_turn(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(H=6, G=2), "float16"))


@trap(
    catches="lse as a logarithm to base 2",
    severity="major",
    story="Scores are kept in units of log2, and the result is not brought back.",
    mutant=edit("(largest + tl.log2(summed)) * LN_2)", "largest + tl.log2(summed))"),
)
def lse_in_base_two(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(T=4, S=9)))


@trap(
    catches="values are read with the strides of the keys",
    severity="major",
    story="Keys and values are slices of different buffers.",
    mutant=edit(_STRIDES, "*q.stride()[:3], *k.stride()[:3], *k.stride()[:3],"),
    control=ordinary,
)
def strides_confused(submission: Submission, rng: Rng) -> None:
    p = problem(rng, Sizes(B=2, H=2, G=2, T=6, S=10))
    ask(submission, p._replace(k=spaced(p.k, 8)))
    ask(submission, p._replace(v=spaced(p.v, 16)))


@trap(
    catches="inputs are taken to be contiguous",
    severity="major",
    story="A projection gives (B, T, H, D); its view as (B, H, T, D) has other strides.",
    mutant=edit(_STRIDES, "H * T * D, T * D, D, *k.stride()[:3], *v.stride()[:3],"),
    control=ordinary,
)
def query_layout_ignored(submission: Submission, rng: Rng) -> None:
    p = problem(rng, Sizes(H=3, G=3, T=5))
    view = np.ascontiguousarray(p.q.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    ask(submission, p._replace(q=view))


def exact_in_half(submission: Submission, rng: Rng) -> None:
    """Small integers, which every format holds, and equal keys, whose weights are all 1."""
    p = problem(rng, Sizes(T=4, S=8))
    p.q[:], p.v[:] = rng.integers(-2, 3, p.q.shape), rng.integers(-2, 3, p.v.shape)
    p.k[:] = rng.integers(-2, 3, p.k.shape[-1])
    ask(submission, p)


@trap(
    catches="float32 is multiplied in a shorter format",
    severity="major",
    story="1 + 2⁻¹² is 1 in TF32, float16 and bfloat16, and 7·10⁴ is infinite in float16.",
    mutant=edit(_DOT, "tl.dot(queries.to(tl.float16).to(tl.float32), tl.trans(key)"),
    also=[mutants.halved_products("key", "value")],
    control=exact_in_half,
)
def precision_lowered(submission: Submission, rng: Rng) -> None:
    p = problem(rng, Sizes(T=4, S=8))
    p.q[:], p.k[:] = 1.0 + 2.0**-12, 2.0 * np.arange(8, dtype=np.float32)[:, None]
    ask(submission, p)
    p.q[:], p.k[:] = 0.0, 0.0
    p.q[..., 0] = 7e4
    p.k[..., 0] = 1e-4 * np.arange(8)
    ask(submission, p)


_SHARED = EntryTraps(
    "flash_attention", _LAST, 2, lambda rng: problem(rng, Sizes(T=4, S=9)), ask, ordinary
)


stale_answer = _SHARED.stale_answer()


def _with_other_value(p: Problem, rng: Rng) -> Problem:
    p.v[0, 0, rng.integers(9), rng.integers(16)] += 5.0
    return p


remembered_by_fingerprint = _SHARED.remembered_by_fingerprint(_with_other_value)


inputs_modified = _SHARED.inputs_modified(
    "the queries are scaled in the caller's memory", 0, "The backward pass still needs them."
)


@trap(
    catches="heads beyond 65535 are never computed",
    severity="major",
    story="B · H in the second or third dimension of a launch, which end at 65535.",
    mutant=edit(
        "_forward_kernel[(B * H * triton.cdiv(T, queries),)]",
        "_forward_kernel[(min(B * H, 65535) * triton.cdiv(T, queries),)]",
    ),
    control=ordinary,
)
def heads_beyond_65535(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(B=8200, H=8, G=1, T=1, S=3, D=8), "float16"))


@trap(
    catches="offsets of 32 bits: batches beyond 2³¹ elements are read from elsewhere",
    severity="major",
    story="batch * stride overflows an int; a cache of many long sequences is that large.",
    mutant=edits(
        ("batch * k_b + group", "batch.to(tl.int32) * k_b.to(tl.int32) + group"),
    ),
    control=ordinary,
)
def two_billion_elements_apart(submission: Submission, rng: Rng) -> None:
    """Two batches whose distance exceeds 2³¹ elements."""
    p = problem(rng, Sizes(B=2, T=5, S=9), "float16")
    ask(submission, p._replace(k=far_apart(p.k)))


bfloat16_read_as_float16 = read_as_float16(
    lambda submission, rng: ask(submission, problem(rng, Sizes(T=5, S=9), "bfloat16")),
    insert_after(
        "    G, S = k.shape[1], k.shape[2]\n",
        "    if q.element_size() == 2:\n"
        "        import torch\n\n"
        "        q, k, v = (x.view(torch.float16) for x in (q, k, v))\n",
    ),
    ordinary,
)


wrong_stream = _SHARED.wrong_stream()
