"""The traps of flash_attention_backward on the GPU: one named bug each, in a small situation."""

import numpy as np

from trapline.arena.gpu.checks import Rng, far_apart, spaced
from trapline.arena.gpu.common_traps import EntryTraps, read_as_float16, seen_on_cpu
from trapline.arena.judge.traps import edit, edits, insert_after, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_backward.gpu.cases import Problem, arguments, ask, problem
from trapline.challenges.flash_attention_forward.gpu.cases import Sizes

# Lines of the gold solution that several mutants edit.
_LAST = "            dout, q, k, v, lse, delta, dk, dv, *sizes, *strides, **options\n        )\n"
_STRIDES = "*dout.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3]"
_KEY_SLOPE = "slope = (weights * (slope - minus[:, None])).to(queries.dtype)"
_QUERY_SLOPE = "slope = (weights * (slope - minus[:, None])).to(keys.dtype)"


def ordinary(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(T=32, S=32)))


def equal_lengths(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(T=12, S=12), causal=True))


@trap(
    catches="the softmax is differentiated as if it were an exponential",
    severity="critical",
    story="The part −Σ out · dout is missing: the weights of a query sum to 1.",
    mutant=edits(
        (_KEY_SLOPE, "slope = (weights * slope).to(queries.dtype)"),
        (_QUERY_SLOPE, "slope = (weights * slope).to(keys.dtype)"),
    ),
    seen=seen_on_cpu("delta-missing"),
)
def delta_missing(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(T=4, S=6)))


@trap(
    catches="dk without the scale",
    severity="critical",
    story="The scale belongs to dq and to dk; one of them is easily forgotten.",
    mutant=edit("key_sum * scale, mask", "key_sum, mask"),
    seen=seen_on_cpu("dk-without-scale"),
)
def keys_not_scaled(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(T=4, S=6)))


@trap(
    catches="dk and dv of the last query head of a group only",
    severity="critical",
    story="Every query head of a group reads the same keys; their gradients add up.",
    mutant=edit(
        "for member in range(heads_per_group):",
        "for member in range(heads_per_group - 1, heads_per_group):",
    ),
    control=ordinary,
    seen=seen_on_cpu("dk-of-last-head-only"),
)
def group_not_summed(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(H=4, G=2)))


@trap(
    catches="query heads take the key heads in turn",
    severity="major",
    story="Query head h reads key head h // (H / G), not h mod G.",
    mutant=edit("    group = h // heads_per_group\n", "    group = h % (H // heads_per_group)\n"),
    control=ordinary,
)
def group_in_turn(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(H=6, G=2), "float16"))


@trap(
    catches="causal attention is aligned at the first key",
    severity="critical",
    story="With T ≠ S query t sees the keys j ≤ t + S − T, in both directions.",
    mutant=edit("columns[None, :] <= rows[:, None] + shift", "columns[None, :] <= rows[:, None]"),
    control=equal_lengths,
    seen=seen_on_cpu("aligned-to-the-first-key"),
)
def causal_alignment(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(T=6, S=25), causal=True))


@trap(
    catches="a query does not see its own key",
    severity="critical",
    story="The mask says < where it must say ≤.",
    mutant=edit(
        "columns[None, :] <= rows[:, None] + shift", "columns[None, :] < rows[:, None] + shift"
    ),
    control=ordinary,
    seen=seen_on_cpu("own-key-hidden"),
)
def own_key_hidden(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(T=12, S=12), causal=True))


@trap(
    catches="the causal mask is missing in the gradients",
    severity="major",
    story="The forward pass has it; weights of hidden keys come out of the saved lse.",
    mutant=edit("    if CAUSAL:\n        seen = seen", "    if False:\n        seen = seen"),
    control=ordinary,
)
def mask_missing(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(T=9, S=9), causal=True))


@trap(
    catches="queries that do not fill a tile are left out of dk and dv",
    severity="major",
    story="T is not a multiple of the tile.",
    mutant=edit(
        "for start in range(first_query, T, QUERIES):",
        "for start in range(first_query, tl.maximum(T // 16 * 16, 1), QUERIES):",
    ),
    control=ordinary,
)
def tail_queries_dropped(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(T=33, S=8)))
    ask(submission, problem(rng, Sizes(T=65, S=8), "float16"))
    ask(submission, problem(rng, Sizes(T=129, S=8), "float16"))


@trap(
    catches="keys that do not fill a tile are left out of dq",
    severity="major",
    story="S is not a multiple of the tile.",
    mutant=edit("range(0, last, KEYS)", "range(0, tl.maximum(last // 16 * 16, 1), KEYS)"),
    control=ordinary,
)
def tail_keys_dropped(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(T=8, S=33)))
    ask(submission, problem(rng, Sizes(T=8, S=65), "float16"))
    ask(submission, problem(rng, Sizes(T=8, S=129), "float16"))


@trap(
    catches="a query that sees no key gives NaN",
    severity="major",
    story="Its lse is −inf, and −inf − (−inf) is NaN; it spoils dk and dv of all keys.",
    mutant=edits(
        ('base = tl.where(lse == -float("inf"), 0.0, lse)', "base = lse"),
        (
            'tl.where(seen, scores - base[:, None], -float("inf"))',
            '(tl.where(seen, scores, -float("inf")) - base[:, None])',
        ),
    ),
    control=ordinary,
)
def no_visible_key(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(T=20, S=9), causal=True))


@trap(
    catches="the saved lse is taken for a logarithm to base 2",
    severity="major",
    story="Scores are scaled by log2 e for exp2, the lse is not.",
    mutant=edit(
        'tl.exp2(tl.where(seen, scores - base[:, None], -float("inf")) * LOG2_E)',
        'tl.exp2(tl.where(seen, scores * LOG2_E - base[:, None], -float("inf")))',
    ),
)
def lse_in_base_two(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(T=4, S=9)))


@trap(
    catches="gradients are added to what the outputs held",
    severity="major",
    story="dq is accumulated in memory that is taken to be zero.",
    mutant=edit(
        "    tl.store(dq + place[:, None] * D + lanes[None, :], total * scale, mask=there)\n",
        "    at = dq + place[:, None] * D + lanes[None, :]\n"
        "    held = tl.load(at, mask=there, other=0.0).to(tl.float32)\n"
        "    tl.store(at, total * scale + held, mask=there)\n",
    ),
)
def outputs_not_cleared(submission: Submission, rng: Rng) -> None:
    for _ in range(2):
        ask(submission, problem(rng, Sizes(T=5, S=9)))


@trap(
    catches="values are read with the strides of the keys",
    severity="major",
    story="Keys and values are slices of different buffers.",
    mutant=edit(_STRIDES, "*dout.stride()[:3], *q.stride()[:3], *k.stride()[:3], *k.stride()[:3]"),
    control=ordinary,
)
def strides_confused(submission: Submission, rng: Rng) -> None:
    p = problem(rng, Sizes(B=2, H=2, G=2, T=6, S=10))
    ask(submission, p._replace(k=spaced(p.k, 8)))
    ask(submission, p._replace(v=spaced(p.v, 16)))


@trap(
    catches="dout is read with the strides of q",
    severity="major",
    story="The gradient comes from the next layer with a layout of its own.",
    mutant=edit(_STRIDES, "*q.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3]"),
    control=ordinary,
)
def gradient_layout_ignored(submission: Submission, rng: Rng) -> None:
    p = problem(rng, Sizes(H=3, G=3, T=5))
    view = np.ascontiguousarray(p.dout.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    ask(submission, p._replace(dout=view))


def exact_in_half(submission: Submission, rng: Rng) -> None:
    """One key: every weight is 1, and slopes are 0."""
    p = problem(rng, Sizes(T=4, S=1))
    p.dout[:] = rng.integers(-2, 3, p.dout.shape)
    ask(submission, p)


@trap(
    catches="float32 gradients are multiplied in a shorter format",
    severity="major",
    story="1 + 2⁻¹² is 1 in TF32, float16 and bfloat16.",
    mutant=edit(
        "narrow = tl.trans(weights.to(gradient.dtype))",
        "narrow = tl.trans(weights.to(tl.float16).to(gradient.dtype))",
    ),
    control=exact_in_half,
)
def precision_lowered(submission: Submission, rng: Rng) -> None:
    p = problem(rng, Sizes(T=4, S=3))
    p.dout[:] = 1.0 + 2.0**-12
    ask(submission, p)


@trap(
    catches="with no queries dk and dv are not written",
    severity="major",
    story="A sum over nothing is 0; an early return leaves what was in the memory.",
    mutant=insert_after(
        "    G, S = k.shape[1], k.shape[2]\n", "    if B * H * T == 0:\n        return\n"
    ),
    control=ordinary,
    seen=seen_on_cpu("no-queries"),
)
def no_queries_no_gradients(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(T=0, S=5)))


_SHARED = EntryTraps(
    "flash_attention_backward", _LAST, 3, lambda rng: problem(rng, Sizes(T=4, S=9)), ask, ordinary
)


stale_answer = _SHARED.stale_answer()


def _with_other_value(p: Problem, rng: Rng) -> Problem:
    p.dout[0, 0, 1 + rng.integers(3), rng.integers(16)] += 5.0
    return p


remembered_by_fingerprint = _SHARED.remembered_by_fingerprint(_with_other_value)


inputs_modified = _SHARED.inputs_modified(
    "dout is overwritten",
    0,
    "It belongs to the caller, who may need it for another gradient.",
    arguments,
)


@trap(
    catches="heads beyond 65535 are never computed",
    severity="major",
    story="B · H in the second or third dimension of a launch, which end at 65535.",
    mutant=edit("_queries_kernel[(B * H *", "_queries_kernel[(min(B * H, 65535) *"),
    control=ordinary,
)
def heads_beyond_65535(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(B=8200, H=8, G=1, T=1, S=3, D=8), "float16"))


@trap(
    catches="offsets of 32 bits: batches beyond 2³¹ elements are read from elsewhere",
    severity="major",
    story="batch * stride overflows an int.",
    mutant=edit(
        "queries = q + batch * q_b + h * q_h",
        "queries = q + batch.to(tl.int32) * q_b.to(tl.int32) + h * q_h",
    ),
    control=ordinary,
)
def two_billion_elements_apart(submission: Submission, rng: Rng) -> None:
    """Two batches whose distance exceeds 2³¹ elements."""
    p = problem(rng, Sizes(B=2, T=5, S=9), "float16")
    ask(submission, p._replace(q=far_apart(p.q)))


bfloat16_read_as_float16 = read_as_float16(
    lambda submission, rng: ask(submission, problem(rng, Sizes(T=5, S=9), "bfloat16")),
    insert_after(
        "    G, S = k.shape[1], k.shape[2]\n",
        "    if q.element_size() == 2:\n        k = k.view(torch.float16)\n",
    ),
    ordinary,
)


wrong_stream = _SHARED.wrong_stream()
