"""The traps of dflash on the GPU: one named bug each, in a small situation."""

import numpy as np

from trapline.arena.gpu import mutants
from trapline.arena.gpu.checks import Rng, far_apart, spaced
from trapline.arena.gpu.common_traps import EntryTraps, read_as_float16, seen_on_cpu
from trapline.arena.judge.traps import edit, edits, insert_after, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.dflash.gpu.cases import Sizes, ask, problem

# Lines of the gold solution that several mutants edit.
_LAST = (
    "        totals, maxima, sums, out, parts, D, PARTS=triton.next_power_of_2(parts), "
    "WIDTH=width\n    )\n"
)
_FACTORS = "factors = tl.exp(maxima - largest)"
_STRIDES = "*q.stride()[:3], *k.stride()[:3], *v.stride()[:3],"
_OWN = "row = lanes == node"


def a_chain(submission: Submission, rng: Rng) -> None:
    """Every node is the child of the one before it: what causal attention would do."""
    p = problem(rng, Sizes(N=4, L=3))
    p.parents[:] = np.arange(-1, 3)
    ask(submission, p)


def a_star(submission: Submission, rng: Rng) -> None:
    """All nodes hang below the prefix."""
    p = problem(rng, Sizes(N=4, L=3))
    p.parents[:] = -1
    ask(submission, p)


@trap(
    catches="nodes see all earlier nodes",
    severity="critical",
    story="A causal mask lets branches see each other; the two agree on a chain.",
    mutant=edit(_OWN, "row = lanes <= node"),
    control=a_chain,
    seen=seen_on_cpu("mask-causal"),
)
def branches_see_each_other(submission: Submission, rng: Rng) -> None:
    p = problem(rng, Sizes(N=6))
    p.parents[:] = [-1, -1, 0, 1, 2, 2]
    ask(submission, p)


@trap(
    catches="a node sees its parent, but not its grandparents",
    severity="critical",
    story="One step towards the root instead of all of them; trees of depth 2 do not show it.",
    mutant=edit(
        "        above = tl.load(parents + batch * parents_b + above)\n",
        "        above = -1 + 0 * above\n",
    ),
    control=a_star,
    seen=seen_on_cpu("mask-parent-only"),
)
def grandparents_missing(submission: Submission, rng: Rng) -> None:
    p = problem(rng, Sizes(N=5))
    p.parents[:] = [-1, 0, 1, 1, 3]
    ask(submission, p)


@trap(
    catches="a branch deeper than 32 is cut off",
    severity="major",
    story="A fixed number of steps towards the root.",
    mutant=edits(
        (_OWN, f"{_OWN}\n    steps = 0"),
        ("    while above >= 0:\n", "    while (above >= 0) & (steps < 32):\n        steps += 1\n"),
    ),
    control=a_chain,
)
def deep_branch(submission: Submission, rng: Rng) -> None:
    p = problem(rng, Sizes(N=70, L=2), "float16")
    p.parents[:] = np.arange(-1, 69)
    ask(submission, p)


@trap(
    catches="a node does not see itself",
    severity="critical",
    story="The walk starts at the parent.",
    mutant=edit(_OWN, "row = (lanes == node) & (lanes < 0)"),
    seen=seen_on_cpu("mask-without-self"),
)
def own_key_hidden(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(N=5)))


@trap(
    catches="the last row of the prefix is not seen",
    severity="major",
    story="It is the root of the tree, which belongs to the committed rows.",
    mutant=edit("(keys < prefix))[None, :] |", "(keys < prefix - 1))[None, :] |"),
)
def root_hidden(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(N=4, L=6)))


@trap(
    catches="the ancestors are looked up without the prefix subtracted",
    severity="major",
    story="Key L + j belongs to node j; without a prefix the two agree.",
    mutant=edit("own + (keys - prefix)[None, :]", "own + (keys % N)[None, :]"),
)
def prefix_not_subtracted(submission: Submission, rng: Rng) -> None:
    for L in (3, 40):
        ask(submission, problem(rng, Sizes(N=7, L=L)))


@trap(
    catches="all trees of a batch get the ancestors of the first",
    severity="major",
    story="The offset of the tree is missing from an address.",
    mutant=edit("own = seen + (batch * N + node)[:, None] * N", "own = seen + node[:, None] * N"),
    control=a_chain,
)
def first_tree_for_all(submission: Submission, rng: Rng) -> None:
    p = problem(rng, Sizes(B=3, N=6))
    p.parents[0], p.parents[1], p.parents[2] = np.arange(-1, 5), -1, [-1, 0, 0, 1, 1, 2]
    ask(submission, p)


@trap(
    catches="the row stride of the parents is taken to be N",
    severity="major",
    story="Trees are slices of a larger table.",
    mutant=edit("parents, seen, N, parents.stride(0),", "parents, seen, N, N,"),
    control=a_chain,
)
def parents_stride_ignored(submission: Submission, rng: Rng) -> None:
    p = problem(rng, Sizes(B=2, N=5))
    wide = np.full((2, 9), -1, np.int32)
    wide[:, :5] = p.parents
    wide[1, :5] = np.arange(-1, 4)
    ask(submission, p._replace(parents=wide[:, :5]))


@trap(
    catches="query heads take the key heads in turn",
    severity="major",
    story="Query head h reads key head h // (H / G), not h mod G.",
    mutant=edit(
        "head, node = group * members + rows // N, rows % N",
        "head, node = group + rows // N * G, rows % N",
    ),
    control=a_chain,
)
def group_in_turn(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(H=6, G=2), "float16"))


@trap(
    catches="parts of the keys are added without being brought to a common maximum",
    severity="major",
    story="Each part's sum is relative to its own maximum.",
    mutant=edit(_FACTORS, "factors = tl.where(maxima > -1e30, 1.0, 0.0)"),
    control=a_chain,
)
def parts_not_rescaled(submission: Submission, rng: Rng) -> None:
    p = problem(rng, Sizes(N=3, L=700))
    p.q[..., 0] = 4.0
    p.k[..., 0] = 0.01 * np.arange(703)
    ask(submission, p)


@trap(
    catches="a tile without a visible key gives NaN",
    severity="major",
    story="A node that sees none of a tile's keys: −inf − (−inf).",
    mutant=edit('base = tl.where(new == -float("inf"), 0.0, new)', "base = new"),
    control=a_chain,
)
def tile_without_visible_keys(submission: Submission, rng: Rng) -> None:
    p = problem(rng, Sizes(N=150, L=0), "float16")
    p.parents[:] = -1
    ask(submission, p)


@trap(
    catches="no maximum is subtracted: large scores overflow",
    severity="major",
    story="exp(89) is infinite in float32.",
    mutant=edit(
        "new = tl.maximum(largest, tl.max(scores, 1))",
        "new = tl.minimum(tl.maximum(largest, tl.max(scores, 1)), 0.0)",
    ),
)
def large_scores_overflow(submission: Submission, rng: Rng) -> None:
    p = problem(rng, Sizes(N=4, L=10))
    p.q[..., 0], p.k[..., 0] = 60.0, 20.0
    ask(submission, p)


@trap(
    catches="values are read with the strides of the keys",
    severity="major",
    story="Keys and values are slices of different buffers.",
    mutant=edit(_STRIDES, "*q.stride()[:3], *k.stride()[:3], *k.stride()[:3],"),
    control=a_chain,
)
def strides_confused(submission: Submission, rng: Rng) -> None:
    p = problem(rng, Sizes(B=2, H=2, G=2))
    ask(submission, p._replace(k=spaced(p.k, 8)))
    ask(submission, p._replace(v=spaced(p.v, 16)))


def exact_in_half(submission: Submission, rng: Rng) -> None:
    """Small integers, which every format holds, and equal keys, whose weights are all 1."""
    p = problem(rng, Sizes(N=4))
    p.q[:], p.v[:] = rng.integers(-2, 3, p.q.shape), rng.integers(-2, 3, p.v.shape)
    p.k[:] = rng.integers(-2, 3, p.k.shape[-1])
    ask(submission, p)


@trap(
    catches="float32 is multiplied in a shorter format",
    severity="major",
    story="1 + 2⁻¹² is 1 in TF32, float16 and bfloat16, and 7·10⁴ is infinite in float16.",
    mutant=edit("tl.dot(queries, tl", "tl.dot(queries.to(tl.float16).to(tl.float32), tl"),
    also=[mutants.halved_products("key", "value")],
    control=exact_in_half,
)
def precision_lowered(submission: Submission, rng: Rng) -> None:
    p = problem(rng, Sizes(N=3, L=5))
    p.q[:], p.k[:] = 1.0 + 2.0**-12, 2.0 * np.arange(8, dtype=np.float32)[:, None]
    ask(submission, p)
    p.q[:], p.k[:] = 0.0, 0.0
    p.q[..., 0] = 7e4
    p.k[..., 0] = 1e-4 * np.arange(8)
    ask(submission, p)


_SHARED = EntryTraps("tree_attention", _LAST, 1, lambda rng: problem(rng, Sizes(N=5)), ask, a_chain)


stale_answer = _SHARED.stale_answer("step")


@trap(
    catches="an answer remembered by a few of the values",
    severity="major",
    story="The queries are the same, and the tree is another.",
    mutant=mutants.fingerprint(_LAST, "tree_attention", 1),
    control=a_chain,
)
def remembered_by_fingerprint(submission: Submission, rng: Rng) -> None:
    p = problem(rng, Sizes(N=5))
    p.parents[:] = -1
    ask(submission, p)
    p.parents[:] = np.arange(-1, 4)
    ask(submission, p)


inputs_modified = _SHARED.inputs_modified("the queries are scaled in the caller's memory", 0)


@trap(
    catches="rows beyond 65535 are never computed",
    severity="major",
    story="Trees, heads or nodes in the second or third dimension of a launch, which end at 65535.",
    mutant=edit("_merge_kernel[(B * H * N,)]", "_merge_kernel[(min(B * H * N, 65535),)]"),
    control=a_chain,
)
def rows_beyond_65535(submission: Submission, rng: Rng) -> None:
    ask(submission, problem(rng, Sizes(B=1100, H=20, G=1, N=3, L=2, D=8), "float16"))


@trap(
    catches="offsets of 32 bits: rows beyond 2³¹ elements are read from elsewhere",
    severity="major",
    story="batch * stride overflows an int.",
    mutant=edit("k + batch * k_b + group", "k + batch.to(tl.int32) * k_b.to(tl.int32) + group"),
    control=a_chain,
)
def two_billion_elements_apart(submission: Submission, rng: Rng) -> None:
    """Two trees whose keys lie more than 2³¹ elements apart."""
    p = problem(rng, Sizes(B=2, N=4, L=5), "float16")
    ask(submission, p._replace(k=far_apart(p.k)))


bfloat16_read_as_float16 = read_as_float16(
    lambda submission, rng: ask(submission, problem(rng, Sizes(N=5), "bfloat16")),
    insert_after(
        "    G = k.shape[1]\n",
        "    if q.element_size() == 2:\n        k = k.view(torch.float16)\n",
    ),
    a_chain,
)


wrong_stream = _SHARED.wrong_stream()
