"""The traps of kv_cache on the GPU: one named bug each, in a small situation."""

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
from trapline.challenges.kv_cache.gpu.cases import (
    Attended,
    Sizes,
    append,
    append_problem,
    attend,
    attention_problem,
)

# Lines of the gold solution that several mutants edit.
_LAST = (
    "        totals, maxima, sums, out, parts, D, PARTS=triton.next_power_of_2(parts), "
    "WIDTH=width\n    )\n"
)
_FACTORS = 'factors = tl.where(maxima == -float("inf"), 0.0, tl.exp(maxima - largest))'
_TABLE = "table + batch * table_b + positions // page_size"
_POOLS = "*k_pages.stride()[:3], *v_pages.stride()[:3], block_table"


def attends(submission: Submission, rng: Rng) -> None:
    """Full pages of one sequence."""
    attend(submission, attention_problem(rng, [16]))


def appends(submission: Submission, rng: Rng) -> None:
    append(submission, append_problem(rng, 4))


@trap(
    catches="rows beyond the end of a sequence are attended to",
    severity="major",
    story="The last page is read whole; its unused rows hold what another sequence left there.",
    mutant=edits(
        (
            "last = tl.minimum(first + share, length)",
            "last = tl.minimum(first + share, tl.cdiv(length, page_size) * page_size)",
        ),
    ),
    control=attends,
)
def unused_rows_counted(submission: Submission, rng: Rng) -> None:
    for length in (1, 9, 23):
        attend(submission, attention_problem(rng, [length]))


@trap(
    catches="every sequence is read with the first one's pages",
    severity="major",
    story="The row of the block table is missing from its address.",
    mutant=edit(_TABLE, "table + positions // page_size"),
    control=attends,
)
def first_table_for_all(submission: Submission, rng: Rng) -> None:
    attend(submission, attention_problem(rng, [20, 20, 20]))


@trap(
    catches="a page is taken to have 16 rows",
    severity="major",
    story="The size of a page is a property of the pool.",
    mutant=edits(
        (_TABLE, "table + batch * table_b + positions // 16"),
        (
            "page, row = page.to(tl.int64), positions % page_size",
            "page, row = page.to(tl.int64), positions % tl.minimum(page_size, 16)",
        ),
    ),
    control=appends,
)
def page_of_sixteen_rows(submission: Submission, rng: Rng) -> None:
    attend(submission, attention_problem(rng, [30, 30], Sizes(page=8)))
    attend(submission, attention_problem(rng, [70], Sizes(page=32)))


@trap(
    catches="the row stride of the block table is taken to be what the sequences need",
    severity="major",
    story="Tables are slices of a larger one.",
    mutant=edit("block_table.stride(0),\n", "block_table.shape[1],\n"),
    control=attends,
)
def table_stride_ignored(submission: Submission, rng: Rng) -> None:
    p = attention_problem(rng, [20, 20])
    table = np.zeros((2, p.block_table.shape[1] + 3), np.int32)
    table[:, : p.block_table.shape[1]] = p.block_table
    attend(submission, p._replace(block_table=table[:, : p.block_table.shape[1]]))


@trap(
    catches="keys and values are taken to lie in pools of the same strides",
    severity="major",
    story="One of the pools is a slice of something larger.",
    mutant=edit(_POOLS, "*k_pages.stride()[:3], *k_pages.stride()[:3], block_table"),
    control=attends,
)
def pool_strides_confused(submission: Submission, rng: Rng) -> None:
    p = attention_problem(rng, [12, 5])
    attend(submission, p._replace(v_pages=spaced(p.v_pages, 8)))
    attend(submission, p._replace(k_pages=spaced(p.k_pages, 8)))


@trap(
    catches="parts of a sequence are added without being brought to a common maximum",
    severity="major",
    story="Each part's sum is relative to its own maximum.",
    mutant=edit(_FACTORS, 'factors = tl.where(maxima == -float("inf"), 0.0, 1.0 + 0.0 * maxima)'),
    control=attends,
)
def parts_not_rescaled(submission: Submission, rng: Rng) -> None:
    p = attention_problem(rng, [900], Sizes(H=1, G=1, D=16, page=32))
    p.q[..., 0] = 4.0
    for page, place in enumerate(p.block_table[0, :29]):
        p.k_pages[place, :, :, 0] = 0.25 * page
    attend(submission, p)


@trap(
    catches="a part without keys gives NaN",
    severity="major",
    story="A short sequence beside a long one leaves parts empty: exp(−inf − (−inf)).",
    mutant=edit(_FACTORS, "factors = tl.exp(maxima - maxima) * tl.exp(maxima - largest)"),
    control=attends,
)
def empty_part(submission: Submission, rng: Rng) -> None:
    attend(submission, attention_problem(rng, [600, 5], Sizes(H=1, G=1, page=32)))


@trap(
    catches="an empty sequence gives NaN",
    severity="major",
    story="0 / 0: a sequence that has just been added has no rows; its answer is 0.",
    mutant=edits(
        ("total / tl.where(summed == 0.0, 1.0, summed)", "total / summed"),
    ),
    control=attends,
)
def empty_sequence(submission: Submission, rng: Rng) -> None:
    attend(submission, attention_problem(rng, [3, 0]))


@trap(
    catches="query heads take the key heads in turn",
    severity="major",
    story="Query head h reads key head h // (H / G), not h mod G.",
    mutant=edit("head = group * members + heads", "head = group + heads * G"),
    control=attends,
)
def group_in_turn(submission: Submission, rng: Rng) -> None:
    attend(submission, attention_problem(rng, [10], Sizes(H=6, G=2)))


@trap(
    catches="no maximum is subtracted: large scores overflow",
    severity="critical",
    story="exp(89) is infinite in float32.",
    mutant=edit(
        "new = tl.maximum(largest, tl.max(scores, 1))",
        "new = tl.minimum(tl.maximum(largest, tl.max(scores, 1)), 0.0)",
    ),
    control=appends,
    seen=seen_on_cpu("softmax-overflow"),
)
def large_scores_overflow(submission: Submission, rng: Rng) -> None:
    p = attention_problem(rng, [20])
    p.q[..., 0], p.k_pages[..., 0] = 60.0, 20.0
    attend(submission, p)


def exact_in_half(submission: Submission, rng: Rng) -> None:
    """Small integers, which every format holds, and equal keys, whose weights are all 1."""
    p = attention_problem(rng, [16])
    p.q[:], p.v_pages[:] = rng.integers(-2, 3, p.q.shape), rng.integers(-2, 3, p.v_pages.shape)
    p.k_pages[:] = rng.integers(-2, 3, p.k_pages.shape[-1])
    attend(submission, p)


@trap(
    catches="float32 is multiplied in a shorter format",
    severity="major",
    story="1 + 2⁻¹² is 1 in TF32, float16 and bfloat16, and 7·10⁴ is infinite in float16.",
    mutant=edit("tl.dot(queries, tl", "tl.dot(queries.to(tl.float16).to(tl.float32), tl"),
    also=[mutants.halved_products("keys", "values")],
    control=exact_in_half,
)
def precision_lowered(submission: Submission, rng: Rng) -> None:
    p = attention_problem(rng, [8], Sizes(page=8))
    p.q[:] = 1.0 + 2.0**-12
    p.k_pages[:] = 2.0 * np.arange(8, dtype=np.float32)[:, None, None]
    attend(submission, p)
    p.q[:], p.k_pages[:] = 0.0, 0.0
    p.q[..., 0] = 7e4
    p.k_pages[..., 0] = 1e-4 * np.arange(8)[:, None]
    attend(submission, p)


@trap(
    catches="tokens without a slot are written to slot 0",
    severity="major",
    story="−1 marks padding; clamped to 0 it overwrites the first row of the first page.",
    mutant=edits(
        ("slot = tl.load(slots + token)\n", "slot = tl.maximum(tl.load(slots + token), 0)\n"),
    ),
    control=appends,
)
def padding_written(submission: Submission, rng: Rng) -> None:
    p = append_problem(rng, 6)
    p.slots[:] = rng.permutation(np.arange(1, 40))[:6]
    p.slots[2] = -1
    append(submission, p)


@trap(
    catches="rows that are not written lose what they held",
    severity="major",
    story="A page is cleared when a row of it is written.",
    mutant=insert_after(
        "def paged_append(k, v, k_pages, v_pages, slots):\n    tokens, G, D = k.shape\n",
        "    k_pages[slots[slots >= 0] // k_pages.shape[1]] = 0.0\n",
    ),
    control=attends,
)
def neighbours_cleared(submission: Submission, rng: Rng) -> None:
    append(submission, append_problem(rng, 2))


@trap(
    catches="a slot is multiplied by the row stride, as if pages followed each other",
    severity="major",
    story="In an interleaved pool the next page is not one page of keys away.",
    mutant=edit("k_pages + page * kp_p + row * kp_s +", "k_pages + slot * kp_s +"),
    control=appends,
)
def pages_taken_as_contiguous(submission: Submission, rng: Rng) -> None:
    p = append_problem(rng, 9)
    pool = np.stack((p.k_pages, p.v_pages), axis=1)
    append(submission, p._replace(k_pages=pool[:, 0], v_pages=pool[:, 1]))


@trap(
    catches="rows of the new keys are taken to be contiguous",
    severity="major",
    story="Keys are a slice of the projection's output.",
    mutant=edit("*k.stride()[:2], *v.stride()[:2]", "G * D, D, *v.stride()[:2]"),
    control=appends,
)
def new_rows_strided(submission: Submission, rng: Rng) -> None:
    p = append_problem(rng, 4)
    both = np.concatenate((p.k, p.v), axis=1)
    append(submission, p._replace(k=both[:, :2], v=both[:, 2:]))


@trap(
    catches="what a large batch left in the workspace shows in a small one",
    severity="major",
    story="A workspace is kept between calls; parts without keys are not written.",
    mutant=edits(
        *(
            (
                f"    tl.store(parts_{name}, mask=heads < members)\n",
                f"    tl.store(parts_{name}, mask=(heads < members) & (last > first))\n",
            )
            for name in ("max + place, largest", "sum + place, summed")
        ),
        *(
            (
                f"{name} = torch.empty((B, H, parts), dtype=torch.float32, device=q.device)",
                f"{name} = _KEPT.setdefault(('{name}', B, H, parts), "
                "torch.zeros((B, H, parts), device=q.device))",
            )
            for name in ("maxima", "sums")
        ),
        ("def paged_append(", "_KEPT = {}\n\n\ndef paged_append("),
    ),
    control=appends,
)
def workspace_kept(submission: Submission, rng: Rng) -> None:
    sizes = Sizes(H=1, G=1, page=32)
    small, large = (attention_problem(rng, [600, n], sizes) for n in (3, 600))
    small.q[1], small.k_pages[:] = 0.0, -1.0
    small_large_small(lambda p: attend(submission, p), small, large)


_SHARED = EntryTraps(
    "paged_attention", _LAST, 1, lambda rng: attention_problem(rng, [9, 12]), attend, attends
)


stale_answer = _SHARED.stale_answer("step")


def _with_an_appended_page(p: Attended, rng: Rng) -> Attended:
    del rng
    p.v_pages[p.block_table[1, 0]] += 3.0
    return p


remembered_by_fingerprint = _SHARED.remembered_by_fingerprint(
    _with_an_appended_page, "The query is the same, and a page has been appended to."
)


inputs_modified = _SHARED.inputs_modified("the query is scaled in the caller's memory", 0)


@trap(
    catches="sequences beyond 65535 are never computed",
    severity="major",
    story="Sequences or tokens in the second or third dimension of a launch, which end at 65535.",
    mutant=edit("_merge_kernel[(B * H,)]", "_merge_kernel[(min(B * H, 65535),)]"),
    control=attends,
)
def sequences_beyond_65535(submission: Submission, rng: Rng) -> None:
    sizes = Sizes(H=16, G=1, D=8, page=4)
    attend(submission, attention_problem(rng, [1] * 4100, sizes, "float16"))


@trap(
    catches="offsets of 32 bits: pages beyond 2³¹ elements are read from elsewhere",
    severity="major",
    story="page * stride overflows an int; a pool of 8 GB is that large.",
    mutant=edit("at_k = page * kp_p", "at_k = page.to(tl.int32) * kp_p.to(tl.int32)"),
    control=attends,
)
def two_billion_elements_apart(submission: Submission, rng: Rng) -> None:
    """Two pages whose distance exceeds 2³¹ elements."""
    p = attention_problem(rng, [5], Sizes(H=1, G=1, D=16, page=8), "float16")
    used = p.block_table[0, 0]
    pool = far_apart(np.stack((p.k_pages[used] * 0, p.k_pages[used])))
    values = np.stack((p.v_pages[0] * 0, p.v_pages[used]))
    table = np.array([[1, 0]], np.int32)
    attend(submission, p._replace(k_pages=pool, v_pages=values, block_table=table))


bfloat16_read_as_float16 = read_as_float16(
    lambda submission, rng: attend(submission, attention_problem(rng, [9], dtype="bfloat16")),
    insert_after(
        "    page_size, G = k_pages.shape[1], k_pages.shape[2]\n",
        "    if q.element_size() == 2:\n        k_pages = k_pages.view(torch.float16)\n",
    ),
    appends,
)


wrong_stream = _SHARED.wrong_stream()
