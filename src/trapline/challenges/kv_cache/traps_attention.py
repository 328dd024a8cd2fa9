"""Bugs of attention over the cache."""

import numpy as np

from trapline.arena.judge.traps import edit, edits, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.kv_cache.cases import (
    EACH,
    PLAIN,
    Rng,
    Twin,
    check_attention,
    twins,
)
from trapline.challenges.kv_cache.situations import BAD, BLIND, as_many_heads, layers_in_step


@trap(
    catches="query head h reads kv head h % G instead of h // (H/G)",
    severity="critical",
    story="A common grouped-query mistake: the list of heads is repeated instead of each head.",
    seen=BLIND,
    control=as_many_heads,
    mutant=edits(
        (
            "q.reshape(n, kv_heads, heads // kv_heads, width).transpose(1, 2, 0, 3)",
            "q.reshape(n, heads // kv_heads, kv_heads, width).transpose(2, 1, 0, 3)",
        ),
        ("out.transpose(2, 0, 1, 3)", "out.transpose(2, 1, 0, 3)"),
    ),
)
def gqa_by_tiling(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng, heads=2, group=2)
    seq = twin.add()
    k, v = twin.rows(3), np.zeros((3, 2, 4))
    v[:, 1] = 100.0
    twin.put(seq, 0, k, v)
    q = twin.queries(1)
    check_attention(twin.cache.attend(seq, 0, q), q, k, v)


@trap(
    catches="new queries are masked as if the sequence began with them",
    severity="critical",
    story="Reported against at least four inference engines: chunk two cannot see chunk one.",
    seen=BLIND,
    mutant=edit("np.arange(n)[:, None] + (positions - n)", "np.arange(n)[:, None]"),
)
def causal_mask_upper_left(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng, "dense", layers=1)
    seq = twin.add(6)
    k, v = twin.model.view(seq, 0)
    q = twin.queries(3)
    check_attention(twin.cache.attend(seq, 0, q), q, k, v)


@trap(
    catches="several new queries see each other's future",
    severity="critical",
    story="Decoding one token per step needs no mask; a speculative step with several does.",
    seen=BLIND,
    mutant=edit("np.arange(positions) > last_visible", "np.arange(positions) > positions"),
)
def no_causal_mask(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng, "dense", layers=1)
    seq = twin.add(5)
    k, v = twin.rows(3), np.zeros((3, 2, 4))
    v[2] = 1e3
    twin.put(seq, 0, k, v)
    keys, values = twin.model.view(seq, 0)
    q = twin.queries(3)
    check_attention(twin.cache.attend(seq, 0, q), q, keys, values)


@trap(
    catches="a query does not see its own position",
    severity="critical",
    story="A strict comparison in the mask; position 0 sees nothing and turns into NaN.",
    seen=BLIND,
    mutant=edit("np.arange(positions) > last", "np.arange(positions) >= last"),
)
def query_blind_to_itself(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng, "dense")
    seq = twin.add()
    k, v = twin.rows(2), twin.rows(2)
    twin.put(seq, 0, k, v)
    q = twin.queries(2)
    check_attention(twin.cache.attend(seq, 0, q), q, k, v)


@trap(
    catches="scores are not multiplied by D^-½",
    severity="major",
    story="The factor is easily lost when cached attention is written beside the uncached one.",
    mutant=edit(" * width**-0.5", ""),
)
def scale_missing(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng, width=16)
    seq = twin.add()
    k, v = twin.rows(4), twin.rows(4)
    twin.put(seq, 0, k, v)
    q = twin.queries(1) / 2
    check_attention(twin.cache.attend(seq, 0, q), q, k, v)


@trap(
    catches="scores are scaled by the width of all heads together, (H·D)^-½",
    severity="major",
    story="The width of the model stands where that of a head belongs.",
    seen=BLIND,
    mutant=edit(" * width**-0.5", " * (heads * width) ** -0.5"),
)
def scale_of_all_heads(submission: Submission, rng: Rng) -> None:
    scale_missing.run(submission, rng)


@trap(
    catches="exp of a score without subtracting the largest",
    severity="critical",
    story="Random test data does not show it; attention sinks reach scores of several hundred.",
    seen=BLIND,
    mutant=edit("    scores -= scores.max(axis=-1, keepdims=True)\n", ""),
)
def softmax_overflow(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng, "dense")
    seq = twin.add()
    k, v = 1000.0 * (1 + np.abs(twin.rows(3))), twin.rows(3)
    twin.put(seq, 0, k, v)
    q = 1 + np.abs(twin.queries(1))
    check_attention(twin.cache.attend(seq, 0, q), q, k, v)


@trap(
    catches="attention reads values as keys",
    severity="major",
    story="A pair of arrays with the same shape is unpacked in the wrong order.",
    mutant=edit("*self.view(seq, layer))", "*self.view(seq, layer)[::-1])"),
)
def keys_and_values_swapped(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, (("dense", None), ("paged_quantized", 8))):
        seq = twin.add()
        k, v = twin.rows(3), 10.0 + twin.rows(3)
        twin.put(seq, 0, k, v)
        keys, values = twin.stored(seq, 0)
        q = twin.queries(1)
        check_attention(twin.cache.attend(seq, 0, q), q, keys, values)


@trap(
    catches="keys are reshaped where they must be transposed: positions and heads get mixed",
    severity="major",
    story="With as many positions as heads the shapes match and the values do not.",
    mutant=edits(
        (
            "k.transpose(1, 2, 0)[:, None]",
            "k.reshape(kv_heads, positions, -1).swapaxes(1, 2)[:, None]",
        ),
        ("v.transpose(1, 0, 2)[:, None]", "v.reshape(kv_heads, positions, -1)[:, None]"),
    ),
)
def layout_disagreement(submission: Submission, rng: Rng) -> None:
    # As many positions as heads: a reshape in place of a transposition keeps every shape.
    for twin in twins(submission, rng, PLAIN, heads=4):
        seq = twin.add()
        k, v = twin.rows(4), twin.rows(4)
        k[:, 0], v[:, 0] = 3.0, -50.0
        k[:, 1:], v[:, 1:] = -3.0, 50.0
        twin.put(seq, 0, k, v)
        q = np.ones((1, 4, 4))
        check_attention(twin.cache.attend(seq, 0, q), q, k, v)


@trap(
    catches="attention of a layer sees only the positions that all layers have",
    severity="major",
    story="During a step layer 0 is ahead of the others, so the common length is one too small.",
    control=layers_in_step,
    mutant=edit(
        "attention(q, *self.view(seq, layer))",
        "attention(q, *(x[: self.length(seq)] for x in self.view(seq, layer)))",
    ),
    seen=BLIND,
)
def attend_uses_the_shortest_layer(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        seq = twin.add(3)
        twin.append(seq, 1, [0])
        k, v = twin.stored(seq, 0)
        q = twin.queries(1)
        check_attention(twin.cache.attend(seq, 0, q), q, k, v, "attend of a layer that is ahead")


@trap(
    catches="queries without a position of their own are answered",
    severity="minor",
    story="The mask hides every key and the softmax returns NaN instead of raising an error.",
    dimension="robustness",
    mutant=edit("if len(q) > self.counts[seq][layer]:", "if False:"),
    seen=BLIND,
)
def more_queries_than_positions(submission: Submission, rng: Rng) -> None:
    twin = Twin(submission, rng)
    seq = twin.add(2)
    twin.refuses(BAD, "attend", seq, 0, twin.queries(3))


@trap(
    catches="attention rounds to half precision on the way",
    severity="major",
    story="A cast meant for the stored values is applied to the arithmetic.",
    mutant=edit("= np.exp(scores)", "= np.exp(scores.astype(np.float16)).astype(scores.dtype)"),
)
def attend_in_half_precision(submission: Submission, rng: Rng) -> None:
    for dtype in (np.float32, np.float64):
        twin = Twin(submission, rng, dtype=dtype)
        seq = twin.add(12)
        k, v = twin.model.view(seq, 0)
        q = twin.queries(8) / 4
        check_attention(twin.cache.attend(seq, 0, q), q, k, v, f"attend in {np.dtype(dtype)}")
