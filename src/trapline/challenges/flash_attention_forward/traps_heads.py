"""Further bugs of batches, heads, scale and log-sum-exp."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import edit, edits, insert_after, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_forward.cases import Shape, attends, pair
from trapline.challenges.flash_attention_forward.situations import WRITTEN
from trapline.challenges.flash_attention_forward.solution_lines import LSE, SCALE, UNANSWERED

_KV = "k[b, g], v[b, g]"
_HEAD = "h // (H // G)"


def one_head(submission: Submission, rng: np.random.Generator) -> None:
    """One batch row, one head."""
    attends(submission, *Shape(T=4, S=4).draw(rng), tile=4)


def equal_heads(submission: Submission, rng: np.random.Generator) -> None:
    """Every query head has its own keys."""
    attends(submission, *Shape(H=4, G=4, T=4, S=4).draw(rng), tile=4)


# --- batches and heads ----------------------------------------------------------------------------


@trap(
    catches="all rows of a batch read the values of the first",
    severity="critical",
    story="Of two index expressions only one has the batch row in it.",
    mutant=edit(_KV, "k[b, g], v[0, g]"),
    seen=WRITTEN,
    control=one_head,
)
def values_of_first_batch(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(B=3, T=4, S=4).draw(rng), tile=4)


@trap(
    catches="all rows of a batch read the keys of the first",
    severity="major",
    story="Of two index expressions only one has the batch row in it.",
    mutant=edit(_KV, "k[0, g], v[b, g]"),
    control=one_head,
)
def keys_of_first_batch(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(B=3, T=4, S=4).draw(rng), tile=4)


@trap(
    catches="values are taken per group, keys from the first head",
    severity="major",
    story="Of two index expressions only one is updated for several heads.",
    mutant=edit(_KV, "k[b, 0], v[b, g]"),
    control=one_head,
)
def keys_of_first_head(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(H=3, G=3, T=4, S=4).draw(rng), tile=4)


@trap(
    catches="all query heads read the first key/value head",
    severity="major",
    story="Right for G = 1 only.",
    mutant=edit(f"g = {_HEAD}", "g = 0"),
    control=one_head,
)
def first_head_for_all(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(H=3, G=3, T=4, S=4).draw(rng), tile=4)


@trap(
    catches="query heads beyond G read the last key/value head",
    severity="major",
    story="An index that is cut at the end instead of being divided.",
    mutant=edit(_HEAD, "min(h, G - 1)"),
    control=equal_heads,
)
def heads_cut_at_the_last(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(H=6, G=2, T=4, S=4).draw(rng), tile=4)


@trap(
    catches="only as many query heads are answered as there are key/value heads",
    severity="major",
    story="The loop runs over G where it means H; the other heads stay as they were allocated.",
    mutant=edit("in np.ndindex(B, H):", "in np.ndindex(B, G):"),
    also=[edits(UNANSWERED, ("in np.ndindex(B, H):", "in np.ndindex(B, G):"))],
    control=equal_heads,
)
def as_many_heads_as_keys(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(H=6, G=2, T=4, S=4).draw(rng), tile=4)


@trap(
    catches="fewer key/value heads than query heads are refused",
    severity="major",
    story="The prompt allows every G that divides H.",
    mutant=edit("or q.shape[1] % k.shape[1]:", "or q.shape[1] != k.shape[1]:"),
    control=equal_heads,
)
def grouped_heads_refused(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(H=4, G=2, T=4, S=4).draw(rng), tile=4)


# --- scale ----------------------------------------------------------------------------------------


@trap(
    catches="dot products are multiplied by √D instead of divided by it",
    severity="major",
    story="A sign lost in the exponent.",
    mutant=edit(SCALE, "q = q * D**0.5"),
)
def scale_inverted(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=4, D=4).draw(rng), tile=4)


@trap(
    catches="the scale is that of width 64, whatever D is",
    severity="major",
    story="0.125 is written down once and stays.",
    mutant=edit(SCALE, "q = q * 0.125"),
)
def scale_of_width_64(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=4, D=6).draw(rng), tile=4)


@trap(
    catches="the scale comes from the width of all heads together",
    severity="major",
    story="The model's width is H·D; the scale belongs to one head.",
    mutant=insert_after("(B, H, T, D), (G, S) = q.shape, k.shape[1:3]\n", "    q = q * H**-0.5\n"),
    seen=WRITTEN,
    control=one_head,
)
def scale_of_all_heads(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(H=3, G=3, T=4, S=4).draw(rng), tile=4)


@trap(
    catches="the scale comes from the length of the sequence instead of the width",
    severity="major",
    story="A wrong axis of the shape.",
    mutant=insert_after(
        "(B, H, T, D), (G, S) = q.shape, k.shape[1:3]\n",
        "    q = q * (D / max(T, 1)) ** 0.5\n",
    ),
    seen=WRITTEN,
)
def scale_of_the_length(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=9, S=9).draw(rng), tile=16)


# --- log-sum-exp ----------------------------------------------------------------------------------


def lse_of_one_tile(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=4).draw(rng), tile=4)


@trap(
    catches="lse is the maximum of the scores: the logarithm of the sum is missing",
    severity="major",
    story="The running maximum is returned in its place.",
    mutant=edit(LSE, "peak"),
)
def lse_is_the_maximum(submission: Submission, rng: np.random.Generator) -> None:
    lse_of_one_tile(submission, rng)


@trap(
    catches="lse is the maximum minus the logarithm of the sum",
    severity="major",
    story="A sign from the formula of the weights, exp(score − maximum − log sum).",
    mutant=edit(LSE, "peak - np.log(total)"),
)
def lse_with_wrong_sign(submission: Submission, rng: np.random.Generator) -> None:
    lse_of_one_tile(submission, rng)


@trap(
    catches="lse adds the sum of the exponentials itself, without its logarithm",
    severity="major",
    story="log is forgotten where the two parts are put together.",
    mutant=edit(LSE, "peak + total"),
)
def lse_without_logarithm(submission: Submission, rng: np.random.Generator) -> None:
    lse_of_one_tile(submission, rng)


@trap(
    catches="lse keeps an axis of length one: (B, H, T, 1)",
    severity="major",
    story="keepdims=True is right inside and not in the answer.",
    mutant=edit("    return out, lse\n", "    return out, lse[..., None]\n"),
)
def lse_with_an_extra_axis(submission: Submission, rng: np.random.Generator) -> None:
    lse_of_one_tile(submission, rng)


@trap(
    catches="the log-sum-exp of a row without keys is 0",
    severity="major",
    story="The array is allocated with zeros and rows without keys are left as they are.",
    mutant=edit("peak + np.log(total), -np.inf)", "peak + np.log(total), 0)"),
    seen=WRITTEN,
)
def empty_row_lse_zero(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=8, S=4).draw(rng), causal=True, tile=8)


@trap(
    catches="float32 inputs give both results in float64",
    severity="minor",
    story="Everything is computed in float64, and the answer is not converted back.",
    mutant=edits(
        ("np.zeros((B, H, T, D), q.dtype)", "np.zeros((B, H, T, D))"),
        ("np.zeros((B, H, T), q.dtype)", "np.zeros((B, H, T))"),
    ),
    seen=WRITTEN,
)
def results_in_double(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=5, S=5).draw(rng, np.float32), tile=4)


# --- float64 through float32 ----------------------------------------------------------------------


@trap(
    catches="keys of float64 pass through float32",
    severity="major",
    story="float32 inputs do not notice; float64 inputs get errors of 1e-8.",
    mutant=edit("q @ k[cols].T", "q @ k[cols].astype(np.float32).T"),
    seen=WRITTEN,
)
def keys_through_single(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(T=8, S=8).draw(rng)
    attends(submission, q, k + 1 / 3, v, tile=8)


@trap(
    catches="values of float64 pass through float32",
    severity="major",
    story="float32 inputs do not notice; float64 inputs get errors of 1e-8.",
    mutant=edit("weights @ v[cols]", "weights @ v[cols].astype(np.float32)"),
)
def values_through_single(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(T=8, S=8).draw(rng)
    attends(submission, q, k, v + 1 / 3, tile=8)


@trap(
    catches="float64 inputs are computed in float32 throughout",
    severity="major",
    story="Scores of 1e9 and a little more are all equal in float32: the softmax becomes a mean.",
    mutant=edit(
        "        g = h // (H // G)\n",
        "        g = h // (H // G)\n"
        "        if b == h == 0:\n"
        "            q, k, v = (x.astype(np.float32) for x in (q, k, v))\n",
    ),
)
def computed_in_single(submission: Submission, rng: np.random.Generator) -> None:
    q = np.zeros((1, 1, 4, 4))
    k = np.zeros((1, 1, 4, 4))
    q[..., 0], k[0, 0, :, 0] = 2.0, 1e9 + np.arange(4)
    attends(submission, q, k, rng.standard_normal(k.shape), tile=4)


@trap(
    catches="the output of float64 inputs is stored in float32 on the way",
    severity="major",
    story="A buffer of the wrong dtype, converted back at the end.",
    mutant=edit(
        "    return out, lse\n", "    return out.astype(np.float32).astype(q.dtype), lse\n"
    ),
)
def output_through_single(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(T=4, S=4).draw(rng)
    attends(submission, q, k, v + 1 / 3, tile=4)


# --- inputs ---------------------------------------------------------------------------------------


@trap(
    catches="k is scaled in place",
    severity="major",
    story="The scale is applied to the keys, in the caller's array.",
    mutant=edits(
        (SCALE, "q = q * 1"),
        (
            "(B, H, T, D), (G, S) = q.shape, k.shape[1:3]\n",
            "(B, H, T, D), (G, S) = q.shape, k.shape[1:3]\n    k *= D**-0.5\n",
        ),
    ),
)
def keys_modified(submission: Submission, rng: np.random.Generator) -> None:
    inputs = Shape(H=2, G=2, T=8, S=8, D=3).draw(rng)
    answer, after = submission.observe("flash_attention", *inputs, tile=8)
    pair(answer)
    for name, left, given in reversed(list(zip("kv", after[1:], inputs[1:], strict=True))):
        expect.equal(left, given, f"{name} after the call")
