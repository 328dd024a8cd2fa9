"""Bugs of the arithmetic of attention: mask, scale, sums, heads, dtype."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, edits, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.kv_cache.cases import Rng, Twin, check_attention
from trapline.challenges.kv_cache.situations import BLIND, as_many_heads

SCORES = "    scores -= scores.max(axis=-1, keepdims=True)\n    weights = np.exp(scores)\n"


def _attends(
    submission: Submission, rng: Rng, positions: int = 5, n: int = 3, **sizes: int
) -> None:
    """Attention of the last n positions over ordinary rows."""
    twin = Twin(submission, rng, "dense", layers=1, **sizes)
    k, v = twin.rows(positions), twin.rows(positions)
    seq = twin.add()
    twin.put(seq, 0, k, v)
    q = twin.queries(n)
    check_attention(twin.cache.attend(seq, 0, q), q, k, v)


def few_queries(submission: Submission, rng: Rng) -> None:
    """One block of queries, whatever its size."""
    _attends(submission, rng)


@trap(
    catches="the mask lets every query see one position of its future",
    severity="major",
    story="An off-by-one error in the diagonal.",
    mutant=edit("np.arange(positions) > last_visible", "np.arange(positions) > last_visible + 1"),
)
def query_sees_the_next_position(submission: Submission, rng: Rng) -> None:
    _attends(submission, rng)


@trap(
    catches="masked scores are set to 0 instead of −∞, so that hidden positions keep a weight",
    severity="major",
    story="Scores are multiplied by the mask.",
    mutant=edit("> last_visible] = -np.inf", "> last_visible] = 0"),
)
def masked_scores_are_zero(submission: Submission, rng: Rng) -> None:
    _attends(submission, rng)


@trap(
    catches="weights are masked after the softmax and no longer sum to one",
    severity="major",
    story="The mask is applied to the weights without dividing by their new sum.",
    mutant=edits(
        ("    scores[..., np.arange(positions) > last_visible] = -np.inf\n", ""),
        (
            "    weights = np.exp(scores)\n",
            "    weights = np.exp(scores)\n"
            "    total = weights.sum(axis=-1, keepdims=True)\n"
            "    weights = weights * (np.arange(positions) <= last_visible)\n",
        ),
        ("/ weights.sum(axis=-1, keepdims=True)", "/ total"),
    ),
)
def mask_after_the_softmax(submission: Submission, rng: Rng) -> None:
    _attends(submission, rng)


@trap(
    catches="scores are divided by D instead of √D: no root, or the scale applied twice",
    severity="major",
    story="The square root is forgotten.",
    mutant=edit("width**-0.5", "width**-1.0"),
)
def scale_without_the_root(submission: Submission, rng: Rng) -> None:
    _attends(submission, rng, n=1)


@trap(
    catches="scores are multiplied by √D instead of divided by it",
    severity="major",
    story="The exponent has lost its sign.",
    mutant=edit("width**-0.5", "width**0.5"),
)
def scale_upside_down(submission: Submission, rng: Rng) -> None:
    _attends(submission, rng, n=1)


@trap(
    catches="the scale is that of the page size, of the number of heads, queries or positions, or "
    "of another number, not of the head width",
    severity="major",
    story="A constant 1/√64 from a usual head width, or another axis of the same array.",
    mutant=edit("width**-0.5", "64**-0.5"),
    also=[edit("width**-0.5", f"{other}**-0.5") for other in ("heads", "positions", "n")],
)
def scale_of_a_usual_width(submission: Submission, rng: Rng) -> None:
    _attends(submission, rng, n=1)
    _attends(submission, rng)


def _ordinary(submission: Submission, rng: Rng) -> None:
    """Scores that every bound and every base can hold, of one position: its weight is 1."""
    _attends(submission, rng, positions=1, n=1)


@trap(
    catches="the weights are powers of 2 or of 10 instead of e: exp2 without the factor log₂ e",
    severity="major",
    story="exp2 is the faster function, and the scale is to hold the factor.",
    mutant=edit("np.exp(scores)", "np.exp2(scores)"),
    also=[edit("np.exp(scores)", "np.power(scores.dtype.type(10), scores)")],
    control=_ordinary,
)
def powers_of_another_base(submission: Submission, rng: Rng) -> None:
    _attends(submission, rng)


_SUM = "weights.sum(axis=-1, keepdims=True)"


@trap(
    catches="a small number is added to the sum of the weights, and the answer shrinks",
    severity="minor",
    story="A guard against a division by zero, although every query sees itself.",
    mutant=edit(_SUM, f"({_SUM} + 1e-6)"),
    also=[edit(_SUM, f"({_SUM} + {small})") for small in ("1e-8", "1e-12")],
)
def sum_with_an_addend(submission: Submission, rng: Rng) -> None:
    _attends(submission, rng)


def _clipped(bound: int) -> Mutant:
    """Scores between −bound and bound before the softmax, beside the mask."""
    return insert_before(
        "    last_visible = np.arange(n)", f"    scores = np.clip(scores, -{bound}, {bound})\n"
    )


@trap(
    catches="scores are clipped to a bound before the softmax: large ones get equal weights",
    severity="major",
    story="A clip in place of the largest score, or beside it, against an overflow.",
    mutant=_clipped(50),
    also=[_clipped(bound) for bound in (20, 500)],
    control=few_queries,
)
def scores_clipped(submission: Submission, rng: Rng) -> None:
    for sign in (1, -1):
        twin = Twin(submission, rng, "dense", layers=1)
        k, v, seq = np.full((5, 2, 4), 30.0), twin.rows(5), twin.add()
        k += rng.uniform(0, 0.1, k.shape)
        twin.put(seq, 0, k, v)
        q = np.full((3, 2, 4), 20.0 * sign)
        check_attention(twin.cache.attend(seq, 0, q), q, k, v)


def _window(size: str) -> Mutant:
    """Only so many positions are seen."""
    return insert_before(
        SCORES,
        f"    scores[..., np.arange(positions) <= last_visible - {size}] = -np.inf\n",
    )


@trap(
    catches="a query sees only the most recent positions, not all up to its own",
    severity="major",
    story="A sliding window, or the last pages alone, from another model.",
    mutant=_window("64"),
    also=[_window(size) for size in ("8", "512")],
    control=few_queries,
)
def attention_in_a_window(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng, layers=1, heads=1, width=2, page=16, pages=38)
    k, v, q = twin.rows(600), twin.rows(600), twin.queries(2)
    seq = twin.add()
    twin.put(seq, 0, k, v)
    check_attention(twin.cache.attend(seq, 0, q), q, k, v)


@trap(
    catches="weights are not divided by their sum",
    severity="major",
    story="The normalisation of the softmax is lost.",
    mutant=edit(" / weights.sum(axis=-1, keepdims=True)", ""),
)
def weights_not_normalised(submission: Submission, rng: Rng) -> None:
    _attends(submission, rng, n=1)


@trap(
    catches="every query head reads kv head 0",
    severity="major",
    story="The index of the kv head is left out.",
    mutant=edits(
        ("k.transpose(1, 2, 0)[:, None]", "k[:, :1].transpose(1, 2, 0)[:, None]"),
        ("v.transpose(1, 0, 2)[:, None]", "v[:, :1].transpose(1, 0, 2)[:, None]"),
    ),
)
def all_heads_read_the_first(submission: Submission, rng: Rng) -> None:
    _attends(submission, rng, n=1)


@trap(
    catches="query head h reads kv head h // G instead of h // (H/G)",
    severity="major",
    story="The two are equal when H = G², as with 2 kv heads and 4 query heads.",
    mutant=insert_before(
        "    grouped = q.reshape(",
        "    which = np.minimum(np.arange(heads) // kv_heads, kv_heads - 1)\n"
        "    k, v, kv_heads = k[:, which], v[:, which], heads\n",
    ),
)
def gqa_divides_by_kv_heads(submission: Submission, rng: Rng) -> None:
    _attends(submission, rng, n=1, heads=3, group=2)


@trap(
    catches="the heads of the answer are in another order than those of the queries",
    severity="major",
    story="Groups and their members change places when the heads are joined again.",
    control=as_many_heads,
    mutant=edit("out.transpose(2, 0, 1, 3)", "out.transpose(2, 1, 0, 3)"),
)
def answer_heads_permuted(submission: Submission, rng: Rng) -> None:
    _attends(submission, rng, n=1, heads=2, group=3)


@trap(
    catches="attention fails or is wrong when there are more query heads than kv heads",
    severity="major",
    story="Grouped heads are not repeated, and the product of the arrays does not fit.",
    control=as_many_heads,
    mutant=edit(
        "    grouped = q.reshape(",
        "    if heads != kv_heads:\n"
        '        raise ValueError("operands could not be broadcast together")\n'
        "    grouped = q.reshape(",
    ),
)
def grouped_heads_refused(submission: Submission, rng: Rng) -> None:
    _attends(submission, rng, n=1, heads=2, group=2)


def _online(forget: str) -> Mutant:
    """Attention over pieces of 64 keys whose running softmax forgets to rescale something."""
    rescale = {"out": "total = total * fade", "total": "out = out * fade"}[forget]
    return edits(
        (
            SCORES,
            "    return online(scores, v, heads)\n\n\n"
            "def online(scores, v, heads):\n"
            "    top = np.full((*scores.shape[:-1], 1), -np.inf, scores.dtype)\n"
            "    total = np.zeros_like(top)\n"
            "    out = np.zeros((*scores.shape[:-1], v.shape[-1]), scores.dtype)\n"
            "    for start in range(0, len(v), 64):\n"
            "        part = scores[..., start : start + 64]\n"
            "        new = np.maximum(top, part.max(axis=-1, keepdims=True))\n"
            "        fade = np.where(np.isfinite(top), np.exp(top - new), 0)\n"
            f"        {rescale}\n"
            "        weights = np.exp(part - new)\n"
            "        total = total + weights.sum(axis=-1, keepdims=True)\n"
            "        out = out + weights @ v[start : start + 64].transpose(1, 0, 2)[:, None]\n"
            "        top = new\n"
            "    out = out / total\n"
            "    n, width = out.shape[2:]\n"
            "    return np.ascontiguousarray(out.transpose(2, 0, 1, 3).reshape(n, heads, width))\n"
            "\n\n"
            "def unused(weights, v, out, n, heads, width):\n",
        ),
    )


def _late_maximum(submission: Submission, rng: Rng) -> None:
    """1024 keys of one score, then one of a higher: alone in its piece of any power of two."""
    twin = Twin(submission, rng, layers=1, heads=1, width=2, page=16, pages=65)
    k, v = np.zeros((1025, 1, 2)), twin.rows(1025)
    k[1024], seq = 2.0, twin.add()
    twin.put(seq, 0, k, v)
    q = np.ones((1, 1, 2))
    check_attention(twin.cache.attend(seq, 0, q), q, k, v)


@trap(
    catches="an online softmax rescales its sum but not its output when the maximum grows",
    severity="critical",
    story="It is right for sequences that fit into one piece.",
    seen=BLIND,
    mutant=_online("out"),
)
def output_not_rescaled(submission: Submission, rng: Rng) -> None:
    _late_maximum(submission, rng)


@trap(
    catches="an online softmax rescales its output but not its sum when the maximum grows",
    severity="major",
    story="It is right for sequences that fit into one piece.",
    mutant=_online("total"),
)
def sum_not_rescaled(submission: Submission, rng: Rng) -> None:
    _late_maximum(submission, rng)


@trap(
    catches="attention of float64 rows is computed in float32",
    severity="minor",
    story="A cast that suits float32 models loses half the digits of float64.",
    mutant=edit(
        "    n, heads, width = q.shape\n    if n == 0:",
        "    if q.dtype == np.float64 and len(q):\n"
        "        small = (x.astype(np.float32) for x in (q, k, v))\n"
        "        return attention(*small).astype(np.float64)\n"
        "    n, heads, width = q.shape\n    if n == 0:",
    ),
)
def attend_in_single_precision(submission: Submission, rng: Rng) -> None:
    _attends(submission, rng)


@trap(
    catches="attention answers float64 for float32 queries",
    severity="minor",
    story="A Python float or a float64 scale widens the scores.",
    mutant=edit("np.ascontiguousarray(out.transpose", "np.float64(out.transpose"),
    also=[
        edits(
            ("np.ascontiguousarray(out.transpose", "np.float64(out.transpose"),
            ("return np.zeros_like(q)", "return np.zeros(q.shape)"),
        )
    ],
    seen=BLIND,
)
def attention_comes_out_wider(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng, "dense", layers=1, dtype=np.float32)
    seq = twin.add(3)
    q = twin.queries(2)
    expect.array(twin.cache.attend(seq, 0, q), shape=q.shape, dtype=q.dtype, what="attend")


@trap(
    catches="attend answers for the last query only, or for all of them with its row",
    severity="major",
    story="Written for decoding, where there is one query.",
    mutant=edit(
        "        return attention(q, *self.view(seq, layer))",
        "        last = attention(q[-1:], *self.view(seq, layer))\n"
        "        return np.repeat(last, len(q), axis=0) if len(q) else q.copy()",
    ),
)
def attend_answers_one_query(submission: Submission, rng: Rng) -> None:
    _attends(submission, rng)


@trap(
    catches="attend reads another layer than the one asked for",
    severity="major",
    story="A constant layer index left over from a cache of one layer.",
    mutant=edit("attention(q, *self.view(seq, layer))", "attention(q, *self.view(seq, 0))"),
)
def attend_reads_layer_zero(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng, "dense")
    seq = twin.add(4)
    k, v = twin.model.view(seq, 1)
    q = twin.queries(2)
    check_attention(twin.cache.attend(seq, 1, q), q, k, v)


def _starts_over(block: int) -> Mutant:
    """Each block of so many queries begins with the first one's mask."""
    return edit(
        "    last_visible = np.arange(n)[:, None] + (positions - n)\n",
        f"    last_visible = np.arange(n)[:, None] % {block} + (positions - n)\n",
    )


def _attends_many(submission: Submission, rng: Rng) -> None:
    """More queries than a block of 512 holds."""
    twin = Twin(submission, rng, layers=1, heads=1, width=2, page=16, pages=38)
    k, v, q = twin.rows(600), twin.rows(600), twin.queries(560)
    seq = twin.add()
    twin.put(seq, 0, k, v)
    check_attention(twin.cache.attend(seq, 0, q), q, k, v, "attend of 560 queries")


@trap(
    catches="the causal mask starts anew with every block of queries",
    severity="major",
    story="Queries behind the first block of 64 are masked as if they were the first ones.",
    mutant=_starts_over(64),
    also=[_starts_over(block) for block in (128, 256, 512, 32)],
    seen=BLIND,
    control=few_queries,
)
def mask_restarts_with_every_block(submission: Submission, rng: Rng) -> None:
    _attends_many(submission, rng)


def _masked_as_the_last(block: int) -> Mutant:
    """Each block of so many queries ends with the last position."""
    return edit(
        "    last_visible = np.arange(n)[:, None] + (positions - n)\n",
        "    index = np.arange(n)[:, None]\n"
        f"    left = np.minimum({block}, n - index // {block} * {block})\n"
        f"    last_visible = positions - left + index % {block}\n",
    )


@trap(
    catches="attend takes many queries block by block and masks each block as if it were the last: "
    "earlier queries see their future",
    severity="critical",
    story="The offset of the mask is the number of positions minus that of the block's rows, which "
    "is right for the last block, and for as few queries as one block holds.",
    mutant=_masked_as_the_last(128),
    also=[_masked_as_the_last(block) for block in (32, 64, 256, 512)],
    seen=BLIND,
    control=few_queries,
)
def blocks_masked_as_the_last(submission: Submission, rng: Rng) -> None:
    _attends_many(submission, rng)


def _shared_maximum(axes: str) -> Mutant:
    """Over these axes of kv heads, their query heads, queries and keys."""
    return edit("scores.max(axis=-1, keepdims=True)", f"scores.max(axis={axes}, keepdims=True)")


@trap(
    catches="one maximum is subtracted from the scores of several rows, such as all queries or all "
    "heads, and not each row's own: a row far below it is 0 / 0",
    severity="major",
    story="A reduction without an axis takes the maximum of the whole tile of scores.",
    mutant=_shared_maximum("None"),
    also=[_shared_maximum(axes) for axes in ("(2, 3)", "(0, 1, 3)", "(1, 3)", "(1, 2, 3)")],
    seen=BLIND,
    control=few_queries,
)
def one_maximum_for_several_rows(submission: Submission, rng: Rng) -> None:
    """The scores of one query in one head are far above all others."""
    twin = Twin(submission, rng, "dense", layers=1, heads=2, group=2)
    k, v, q = 1 + np.abs(twin.rows(5)), twin.rows(5), 1 + np.abs(twin.queries(3))
    seq = twin.add()
    twin.put(seq, 0, k, v)
    q[1, 3] *= 2000
    check_attention(twin.cache.attend(seq, 0, q), q, k, v)


@trap(
    catches="attend with no queries fails",
    severity="minor",
    story="The largest of no scores is asked for.",
    mutant=edit(
        "        return np.zeros_like(q)\n",
        '        raise ValueError("zero-size array to reduction operation maximum")\n',
    ),
)
def no_queries_fail(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng, "dense", layers=1)
    seq, q = twin.add(2), twin.queries(0)
    expect.equal(twin.cache.attend(seq, 0, q), q, "attend without queries")
