"""Bugs of the log-sum-exp, the scale, heads and lengths."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import edit, edits, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_forward.cases import Shape, attends, pair
from trapline.challenges.flash_attention_forward.situations import WRITTEN, with_logits
from trapline.challenges.flash_attention_forward.solution_lines import LSE

# --- the log-sum-exp ------------------------------------------------------------------------------


def lse_is_right(submission: Submission, rng: np.random.Generator, logits: list[float]) -> None:
    """Every query has these logits; what log-sum-exp they have needs no oracle."""
    q, k, v = with_logits(rng, np.array(logits), 2, np.float64)
    _, lse = pair(submission.flash_attention(q, k, v, tile=2))
    want = np.full((1, 1, 2), np.logaddexp.reduce(np.array(logits)))
    expect.close(lse, want, atol=1e-12, what="lse")


def _exact_scale(submission: Submission, rng: np.random.Generator) -> None:
    """A width whose scale, ½, is exact in every dtype."""
    q, k, v = Shape(T=6, S=6, D=4).draw(rng)
    attends(submission, 4 * q, k, v, tile=8)


@trap(
    catches="the log-sum-exp in base 2, as kernels keep it",
    severity="major",
    story="The hardware computes exp2; the backward pass relies on the conversion back.",
    mutant=edit(LSE, "peak / np.log(2) + np.log2(total)"),
    seen=WRITTEN,
)
def lse_in_base_two(submission: Submission, rng: np.random.Generator) -> None:
    lse_is_right(submission, rng, [0.0, 0.0, 0.0])


@trap(
    catches="log of the shifted sum: the maximum is not added back",
    severity="major",
    story="The output is right either way; only code that uses lse is affected.",
    mutant=edit(LSE, "np.log(total)"),
    seen=WRITTEN,
)
def lse_without_maximum(submission: Submission, rng: np.random.Generator) -> None:
    lse_is_right(submission, rng, [5.0, 4.0, 5.0, 3.0])


@trap(
    catches="lse takes another function of the sum than its natural logarithm: log10 or log1p",
    severity="major",
    story="log1p(x) is log(1 + x): it looks more careful and is another number.",
    mutant=edit(LSE, "peak + np.log1p(total)"),
    also=[edit(LSE, "peak + np.log10(total)")],
)
def lse_by_another_logarithm(submission: Submission, rng: np.random.Generator) -> None:
    lse_is_right(submission, rng, [0.0, 0.0, 0.0])


@trap(
    catches="lse is the logarithm of a mean: log(S) is subtracted",
    severity="major",
    story="The sum is divided by the number of keys.",
    mutant=edit(LSE, "peak + np.log(total / max(len(k), 1))"),
    also=[edit(LSE, "peak + np.log(total / max(stop, 1))")],
)
def lse_of_a_mean(submission: Submission, rng: np.random.Generator) -> None:
    lse_is_right(submission, rng, [0.0, 0.0, 0.0])


@trap(
    catches="the maximum in lse is scaled a second time",
    severity="major",
    story="The scores are scaled already, and the scale is applied again where lse is written.",
    mutant=edit(LSE, "peak * D**-0.5 + np.log(total)"),
    also=[edit(LSE, "(peak + np.log(total)) * D**-0.5")],
)
def lse_scaled_again(submission: Submission, rng: np.random.Generator) -> None:
    lse_is_right(submission, rng, [-3.0, -3.0, -2.0])


@trap(
    catches="the maximum in lse is that of the unscaled dot products",
    severity="major",
    story="Kernels fold the scale into the exponent and forget it where the maximum is stored.",
    mutant=edit(LSE, "peak * D**0.5 + np.log(total)"),
    seen=WRITTEN,
)
def lse_of_unscaled_scores(submission: Submission, rng: np.random.Generator) -> None:
    lse_is_right(submission, rng, [-3.0, -3.0, -2.0])


@trap(
    catches="lse combines the total sum with the maximum of the last tile only",
    severity="major",
    story="A local variable of the loop is used after it in place of the running maximum.",
    mutant=edits(
        (
            "        peak = new_peak\n",
            "        peak = new_peak\n        last = scores.max(axis=1)\n",
        ),
        (LSE, "last + np.log(total)"),
    ),
)
def lse_with_last_tile_maximum(submission: Submission, rng: np.random.Generator) -> None:
    lse_is_right(submission, rng, [6.0, 5.0, 0.0, -1.0])


@trap(
    catches="lse of float32 inputs comes back in float64",
    severity="minor",
    story="An allocation without a dtype; everything computed from it doubles in size.",
    mutant=edit("np.zeros((B, H, T), q.dtype)", "np.zeros((B, H, T))"),
    seen=WRITTEN,
)
def lse_in_double(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(T=5, S=5).draw(rng, np.float32)
    _, lse = pair(submission.flash_attention(q, k, v, tile=4))
    expect.array(lse, shape=(1, 1, 5), dtype=np.float32, what="lse")


@trap(
    catches="lse of float64 inputs comes back in float32",
    severity="major",
    story="Kernels keep lse in float32; gradients that use it lose half their digits.",
    mutant=edit("np.zeros((B, H, T), q.dtype)", "np.zeros((B, H, T), np.float32)"),
    seen=WRITTEN,
)
def lse_in_single(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(T=5, S=5).draw(rng, np.float64)
    _, lse = pair(submission.flash_attention(q, k, v, tile=4))
    expect.array(lse, shape=(1, 1, 5), dtype=np.float64, what="lse")


# --- scale ----------------------------------------------------------------------------------------


@trap(
    catches="dot products are not divided by √D",
    severity="major",
    story="The softmax is sharper than the model was trained for; outputs look plausible.",
    mutant=edit("q = q * D**-0.5", "q = q * 1"),
)
def scale_missing(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=6, S=6, D=16).draw(rng), tile=4)


@trap(
    catches="dot products are divided by D instead of √D",
    severity="critical",
    story="Invisible for D = 1 and easy to overlook for tiny widths.",
    mutant=edit("q = q * D**-0.5", "q = q * D**-1.0"),
    seen=WRITTEN,
)
def scale_without_root(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=6, S=6, D=9).draw(rng), tile=4)


@trap(
    catches="dot products are multiplied by D^-¼: the root that each of q and k gets, for q alone",
    severity="major",
    story="Scaling both sides by the fourth root is stable, and one of the two was left out.",
    mutant=edit("q = q * D**-0.5", "q = q * D**-0.25"),
)
def scale_by_fourth_root(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=6, S=6, D=16).draw(rng), tile=4)


@trap(
    catches="the root of the width is rounded to an integer",
    severity="major",
    story="Widths of 16 or 64 have whole roots and hide it.",
    mutant=edit("q = q * D**-0.5", "q = q / int(D**0.5)"),
    also=[edit("q = q * D**-0.5", "q = q / round(D**0.5)")],
    control=_exact_scale,
)
def scale_by_a_whole_root(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=6, S=6, D=8).draw(rng), tile=8)


@trap(
    catches="the scale comes from a width padded to a power of two",
    severity="major",
    story="Head widths of 80 or 96 are padded to 128 for the hardware, and the scale uses the "
    "padded width.",
    mutant=edit("q = q * D**-0.5", "q = q * (1 << (D - 1).bit_length()) ** -0.5"),
)
def scale_of_padded_width(submission: Submission, rng: np.random.Generator) -> None:
    for D in (5, 20):
        attends(submission, *Shape(T=6, S=6, D=D).draw(rng), tile=4)


@trap(
    catches="the scale is rounded to float32, also for float64 inputs",
    severity="minor",
    story="A scale that is kept in float32 costs half of the digits.",
    mutant=edit("q = q * D**-0.5", "q = q * np.float32(D**-0.5)"),
    control=_exact_scale,
    seen=WRITTEN,
)
def scale_in_single(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(T=6, S=6, D=5).draw(rng)
    attends(submission, 4 * q, k, v, tile=8)


# --- heads, batches, lengths ----------------------------------------------------------------------


@trap(
    catches="query head h reads kv head h mod G instead of h // (H/G)",
    severity="critical",
    story="np.tile instead of np.repeat: all shapes fit, and a model with grouped heads generates "
    "nonsense.",
    mutant=edit("h // (H // G)", "h % G"),
    seen=WRITTEN,
)
def groups_by_tiling(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(H=4, G=2, T=4, S=5).draw(rng), tile=4)


@trap(
    catches="query head h reads kv head h // G",
    severity="major",
    story="H = 4, G = 2 hides it, because there H/G = G.",
    mutant=edit("h // (H // G)", "h // G"),
    seen=WRITTEN,
)
def groups_by_wrong_divisor(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(H=6, G=3, T=4, S=5).draw(rng), tile=4)
    attends(submission, *Shape(H=4, G=4, T=4, S=5).draw(rng), tile=4)


@trap(
    catches="keys are taken per group, values from the first head",
    severity="major",
    story="Of two index expressions only one is updated for grouped heads.",
    mutant=edit("v[b, g], start", "v[b, 0], start"),
)
def values_of_first_head(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(H=4, G=2, T=3, S=4).draw(rng), tile=4)


@trap(
    catches="all rows of a batch read the keys and values of the first",
    severity="major",
    story="Tests with B = 1 cannot show it; in serving, one user sees another's context.",
    mutant=edit("k[b, g], v[b, g]", "k[0, g], v[0, g]"),
)
def batch_shares_keys(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(B=3, T=4, S=4).draw(rng), causal=True, tile=4)


@trap(
    catches="the number of keys is taken from the queries",
    severity="major",
    story="Self-attention tests have T = S; cross-attention and decoding do not.",
    mutant=edit("k[b, g], v[b, g]", "k[b, g, :T], v[b, g, :T]"),
)
def as_many_keys_as_queries(submission: Submission, rng: np.random.Generator) -> None:
    for T, S in ((3, 10), (1, 5)):
        attends(submission, *Shape(T=T, S=S).draw(rng), tile=4)
