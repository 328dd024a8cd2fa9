"""Bugs that tiled attention really gets, each with the smallest situation that provokes it."""

import numpy as np

from trapline.arena import expect
from trapline.arena.proxy import Submission
from trapline.arena.traps import trap
from trapline.challenges.flash_attention_forward.cases import (
    REFUSALS,
    Arrays,
    Shape,
    agrees,
    attends,
    pair,
    weighed,
)


def with_logits(rng: np.random.Generator, logits: np.ndarray, T: int, dtype: type) -> Arrays:
    """q, k, v (one head, width 4) whose scaled dot products are logits[s] for each query.

    The scale of width 4 is ½, and one coordinate carries the logit, so it is exact in any dtype.
    """
    S = len(logits)
    q: np.ndarray = np.zeros((1, 1, T, 4), dtype)
    k: np.ndarray = np.zeros((1, 1, S, 4), dtype)
    q[..., 0] = 2.0
    k[0, 0, :, 0] = logits
    return q, k, rng.standard_normal((1, 1, S, 4)).astype(dtype)


# --- the online softmax ---------------------------------------------------------------------------


@trap(
    "rescale-direction",
    catches="exp(m_new − m_old) instead of exp(m_old − m_new) when the running maximum grows",
    severity="critical",
    story="A published comparison calls this the most common bug of open implementations and says "
    "that forward tests cannot see it. They can, as soon as there are two tiles.",
)
def rescale_direction(submission: Submission, rng: np.random.Generator) -> None:
    inputs = with_logits(rng, np.repeat([0.0, 1.0, 3.0], 4), 5, np.float64)
    attends(submission, *inputs, tile=4)


@trap(
    "output-not-rescaled",
    catches="the accumulated output keeps the weight of an outdated maximum",
    severity="critical",
    story="The sum is corrected and the output next to it is not; with one tile nothing shows.",
)
def output_not_rescaled(submission: Submission, rng: np.random.Generator) -> None:
    inputs = with_logits(rng, np.repeat([-1.0, 2.0], 4), 3, np.float64)
    attends(submission, *inputs, tile=4)


@trap(
    "sum-not-rescaled",
    catches="the running sum keeps the weight of an outdated maximum",
    severity="critical",
    story="The output is corrected and the denominator is not: rows no longer sum to one.",
)
def sum_not_rescaled(submission: Submission, rng: np.random.Generator) -> None:
    inputs = with_logits(rng, np.repeat([-2.0, 2.0], 4), 3, np.float64)
    inputs[2][...] = 1.0
    attends(submission, *inputs, tile=4)


@trap(
    "running-maximum-forgotten",
    catches="each tile subtracts its own maximum, so a later, lower tile overflows the correction",
    severity="critical",
    story="Mathematically the same, and right on random data; a strong first key (an attention "
    "sink) followed by ordinary ones overflows.",
)
def running_maximum_forgotten(submission: Submission, rng: np.random.Generator) -> None:
    inputs = with_logits(rng, np.repeat([2000.0, 0.0], 4), 3, np.float64)
    attends(submission, *inputs, tile=4)


@trap(
    "maximum-shared-by-rows",
    catches="one maximum for a whole tile, so that rows with low scores underflow",
    severity="critical",
    story="max() without an axis: right while all rows have scores of the same size, then one loud "
    "query silences its neighbours.",
)
def maximum_shared(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = with_logits(rng, np.array([2000.0, 1999.0, 2001.0, 2000.0]), 3, np.float64)
    q[0, 0, 1] = 0.0
    attends(submission, q, k, v, tile=2)


@trap(
    "fully-masked-tile-nan",
    catches="−inf − (−inf) = NaN for a row whose first tile is masked whole",
    severity="critical",
    story="The hazard every grader of this task asks about: rows that have seen no key yet share a "
    "tile with rows that have.",
)
def fully_masked_tile(submission: Submission, rng: np.random.Generator) -> None:
    for T, S, tile in ((12, 5, 8), (9, 3, 4), (6, 6, 2)):
        attends(submission, *Shape(T=T, S=S).draw(rng), causal=True, tile=tile)


@trap(
    "exponent-without-maximum",
    catches="exp of raw logits overflows",
    severity="critical",
    story="Logits of ±10⁴ come from untrained or quantised models; a softmax without its maximum "
    "answers NaN there and is right everywhere else.",
)
def exponent_without_maximum(submission: Submission, rng: np.random.Generator) -> None:
    inputs = with_logits(rng, np.array([1e4, -1e4, 9999.0, 0.0, 9998.0, 1e4]), 3, np.float32)
    attends(submission, *inputs, tile=2)


@trap(
    "maximum-starts-at-zero",
    catches="a running maximum that starts at 0 instead of −inf",
    severity="critical",
    story="Zero looks like a harmless start; rows whose logits are all far below it underflow to "
    "nothing.",
)
def maximum_starts_at_zero(submission: Submission, rng: np.random.Generator) -> None:
    inputs = with_logits(rng, np.array([-1e4, -1e4 - 1, -1e4 + 1, -1e4, -1e4 - 2]), 3, np.float32)
    attends(submission, *inputs, tile=2)


@trap(
    "tiles-averaged",
    catches="every tile is normalised by itself and the tiles are averaged",
    severity="critical",
    story="The tile size becomes part of the result: right only when all keys fit in one tile, as "
    "they do in small tests.",
)
def tiles_averaged(submission: Submission, rng: np.random.Generator) -> None:
    inputs = with_logits(rng, np.array([0.0, 0.0, 4.0, 4.0, 4.0]), 3, np.float64)
    for tile in (5, 2, 1):
        attends(submission, *inputs, tile=tile)


# --- tiles and edges ------------------------------------------------------------------------------


@trap(
    "last-key-tile-dropped",
    catches="keys behind the last whole tile are never read",
    severity="critical",
    story="Lengths in tests are powers of two; 300 keys in tiles of 97 are not.",
)
def last_key_tile(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=3, S=300).draw(rng), tile=97)


@trap(
    "last-query-tile-dropped",
    catches="queries behind the last whole tile stay zero",
    severity="critical",
    story="The same off-by-a-tile on the other axis: 300 queries in tiles of 97.",
)
def last_query_tile(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=300, S=3).draw(rng), tile=97)


@trap(
    "tile-larger-than-sequence-refused",
    catches="a tile larger than the sequence is refused or answered wrongly",
    severity="major",
    story="A default tile of 64 meets a prompt of five tokens on the first day of use.",
)
def tile_larger(submission: Submission, rng: np.random.Generator) -> None:
    for causal in (False, True):
        attends(submission, *Shape(T=5, S=5).draw(rng), causal=causal, tile=100)


@trap(
    "tile-must-be-power-of-two",
    catches="tiles that are no power of two are refused",
    severity="minor",
    story="A habit from kernels, where it is a rule, carried into an interface without it.",
)
def tile_any_size(submission: Submission, rng: np.random.Generator) -> None:
    inputs = Shape(T=11, S=11).draw(rng)
    for tile in (3, 7):
        attends(submission, *inputs, causal=True, tile=tile)


@trap(
    "padded-keys-counted",
    catches="the zeros that fill up the last tile take part in the softmax",
    severity="critical",
    story="A tail is padded with zeros, a zero key has logit 0, and 0 is a large logit in a row "
    "whose real ones are negative.",
)
def padded_keys(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *with_logits(rng, np.full(5, -6.0), 3, np.float64), tile=4)


# --- causal ---------------------------------------------------------------------------------------


@trap(
    "causal-row-zero",
    catches="a query does not see its own key (≥ instead of > in the mask)",
    severity="critical",
    story="Row 0 of a square causal problem sees exactly key 0, so its output is v₀: the check one "
    "entrant of the published field made and the others left out.",
)
def causal_row_zero(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(B=2, H=2, G=2, T=6, S=6).draw(rng)
    answer = submission.flash_attention(q, k, v, causal=True, tile=4)
    expect.close(pair(answer)[0][:, :, 0], v[:, :, 0], atol=1e-12, what="row 0 of out")
    attends(submission, q, k, v, causal=True, tile=4)


@trap(
    "causal-sees-next-key",
    catches="the mask lets through one key of the future",
    severity="critical",
    story="triu(k=2) for triu(k=1): training loss falls wonderfully, the answer is visible.",
)
def causal_sees_next(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(T=6, S=6).draw(rng)
    k[..., 1:, :] += 3.0 * q[..., :-1, :]
    attends(submission, q, k, v, causal=True, tile=3)


@trap(
    "causal-aligned-top-left",
    catches="the causal mask is aligned to the first key instead of the last one",
    severity="critical",
    story="With two new queries on six cached keys, query 0 must see five keys; several serving "
    "projects had a second prefill chunk that could not see the first.",
)
def causal_top_left(submission: Submission, rng: np.random.Generator) -> None:
    for T, S in ((2, 6), (1, 9), (6, 2)):
        attends(submission, *Shape(T=T, S=S).draw(rng), causal=True, tile=4)


@trap(
    "causal-mask-by-triu",
    catches="a mask from triu(k=1−T), which masks nothing",
    severity="critical",
    story="Seen in the published field: right for a single decoded token by accident, and no mask "
    "at all for a prompt.",
)
def causal_by_triu(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=1, S=7).draw(rng), causal=True, tile=4)
    attends(submission, *Shape(T=7, S=7).draw(rng), causal=True, tile=7)


@trap(
    "break-instead-of-continue",
    catches="the loop ends at the first masked tile although later ones are visible",
    severity="critical",
    story="Called fragile in the published field: the early exit holds for one loop order only.",
)
def break_in_loop(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=12, S=12).draw(rng), causal=True, tile=4)


@trap(
    "diagonal-key-skipped",
    catches="the bound of the key loop leaves out the last visible key",
    severity="critical",
    story="Skipping masked tiles saves half the work; an end one short loses the diagonal of the "
    "last row of each tile.",
)
def diagonal_key(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=8, S=8).draw(rng), causal=True, tile=4)


@trap(
    "mask-only-on-aligned-tile",
    catches="the mask is applied only where query tile and key tile start at the same index",
    severity="critical",
    story="True of square problems. With T ≠ S the diagonal crosses tiles at any place.",
)
def mask_only_aligned(submission: Submission, rng: np.random.Generator) -> None:
    for T, S in ((6, 11), (11, 13)):
        attends(submission, *Shape(T=T, S=S).draw(rng), causal=True, tile=4)


@trap(
    "query-tile-offset-forgotten",
    catches="positions start again at zero in every tile of queries",
    severity="critical",
    story="Every tile after the first sees too little; a test with one tile cannot tell.",
)
def query_tile_offset(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=10, S=10).draw(rng), causal=True, tile=5)


# --- masks and empty rows -------------------------------------------------------------------------


@trap(
    "finite-mask-averages-empty-rows",
    catches="−1e9 as mask: a row without any key becomes the mean of all values",
    severity="critical",
    story="A finite sentinel minus itself is 0, so a fully masked row gets equal weights, "
    "not none.",
)
def finite_mask_empty(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(T=7, S=4).draw(rng, np.float32)
    v += 3.0
    answer = submission.flash_attention(q, k, v, causal=True, tile=8)
    expect.equal(pair(answer)[0][:, :, :3], np.zeros((1, 1, 3, 4), np.float32), "an empty row")
    attends(submission, q, k, v, causal=True, tile=8)


@trap(
    "finite-mask-above-real-logits",
    catches="a finite sentinel that is larger than real logits, so that masked keys win",
    severity="critical",
    story="A widely used kernel library masked with −5·10⁴; valid logits below it vanished.",
)
def finite_mask_above(submission: Submission, rng: np.random.Generator) -> None:
    for low in (-3e4, -3e10):
        inputs = with_logits(rng, np.full(6, low), 6, np.float64)
        attends(submission, *inputs, causal=True, tile=3)


@trap(
    "empty-row-lse-plus-infinity",
    catches="the log-sum-exp of a row without keys is not −inf",
    severity="major",
    story="A well-known kernel answered +inf; merging such partial results drops the other part.",
)
def empty_row_lse(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(T=9, S=2).draw(rng)
    for tile in (2, 4, 16):
        _, lse = pair(submission.flash_attention(q, k, v, causal=True, tile=tile))
        expect.array(lse, shape=(1, 1, 9), dtype=np.float64, what="lse")
        expect.that(bool(np.all(lse[..., :7] == -np.inf)), "lse of an empty row is not −inf")


@trap(
    "empty-row-divides-by-zero",
    catches="0 / 0 in rows that see no key",
    severity="critical",
    story="More queries than keys under a bottom-right mask leave rows with nothing to normalise.",
)
def empty_row_division(submission: Submission, rng: np.random.Generator) -> None:
    for tile in (3, 16):
        attends(submission, *Shape(H=2, G=1, T=8, S=3).draw(rng), causal=True, tile=tile)


# --- the log-sum-exp ------------------------------------------------------------------------------


def lse_is_right(submission: Submission, rng: np.random.Generator, logits: list[float]) -> None:
    """Every query has these logits; what log-sum-exp they have needs no oracle."""
    q, k, v = with_logits(rng, np.array(logits), 2, np.float64)
    _, lse = pair(submission.flash_attention(q, k, v, tile=2))
    want = np.full((1, 1, 2), np.logaddexp.reduce(np.array(logits)))
    expect.close(lse, want, atol=1e-12, what="lse")


@trap(
    "lse-in-base-two",
    catches="the log-sum-exp in base 2, as kernels keep it",
    severity="major",
    story="exp2 is what the hardware has; the conversion back is what the backward pass relies on.",
)
def lse_base_two(submission: Submission, rng: np.random.Generator) -> None:
    lse_is_right(submission, rng, [0.0, 0.0, 0.0])


@trap(
    "lse-without-maximum",
    catches="log of the shifted sum: the maximum is not added back",
    severity="critical",
    story="The output is right either way, so only whoever uses lse finds out.",
)
def lse_without_maximum(submission: Submission, rng: np.random.Generator) -> None:
    lse_is_right(submission, rng, [5.0, 4.0, 5.0, 3.0])


@trap(
    "lse-of-unscaled-scores",
    catches="the maximum in lse is that of the unscaled dot products",
    severity="critical",
    story="Kernels fold the scale into the exponent and forget it where the maximum is stored.",
)
def lse_unscaled(submission: Submission, rng: np.random.Generator) -> None:
    lse_is_right(submission, rng, [-3.0, -3.0, -2.0])


@trap(
    "lse-with-last-tile-maximum",
    catches="lse combines the total sum with the maximum of the last tile only",
    severity="critical",
    story="A local variable of the loop survives it and looks like the running maximum.",
)
def lse_last_tile(submission: Submission, rng: np.random.Generator) -> None:
    lse_is_right(submission, rng, [6.0, 5.0, 0.0, -1.0])


@trap(
    "lse-in-double",
    catches="lse of float32 inputs comes back in float64",
    severity="minor",
    story="An allocation without a dtype; downstream, everything that touches it doubles in size.",
)
def lse_dtype(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(T=5, S=5).draw(rng, np.float32)
    _, lse = pair(submission.flash_attention(q, k, v, tile=4))
    expect.array(lse, shape=(1, 1, 5), dtype=np.float32, what="lse")


# --- scale ----------------------------------------------------------------------------------------


@trap(
    "scale-missing",
    catches="dot products are not divided by √D",
    severity="critical",
    story="The softmax is sharper than trained for; outputs look plausible.",
)
def scale_missing(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=6, S=6, D=16).draw(rng), tile=4)


@trap(
    "scale-without-root",
    catches="dot products are divided by D instead of √D",
    severity="critical",
    story="Invisible for D = 1 and easy to overlook for tiny widths.",
)
def scale_without_root(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=6, S=6, D=9).draw(rng), tile=4)


@trap(
    "scale-of-padded-width",
    catches="the scale comes from a width padded to a power of two",
    severity="critical",
    story="Head widths of 80 or 96 are padded to 128 for the hardware, and the scale follows.",
)
def scale_padded(submission: Submission, rng: np.random.Generator) -> None:
    for D in (5, 20):
        attends(submission, *Shape(T=6, S=6, D=D).draw(rng), tile=4)


# --- heads, batches, lengths ----------------------------------------------------------------------


@trap(
    "groups-by-tiling",
    catches="query head h reads kv head h mod G instead of h // (H/G)",
    severity="critical",
    story="np.tile for np.repeat: all shapes fit; a model with grouped heads talks nonsense.",
)
def groups_by_tiling(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(H=4, G=2, T=4, S=5).draw(rng), tile=4)


@trap(
    "groups-by-wrong-divisor",
    catches="query head h reads kv head h // G",
    severity="critical",
    story="H = 4, G = 2 hides it, because there H/G = G.",
)
def groups_wrong_divisor(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(H=6, G=3, T=4, S=5).draw(rng), tile=4)
    attends(submission, *Shape(H=4, G=4, T=4, S=5).draw(rng), tile=4)


@trap(
    "values-of-first-head",
    catches="keys are taken per group, values from the first head",
    severity="critical",
    story="Two index expressions, one of them updated when grouped heads were added.",
)
def values_of_first_head(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(H=4, G=2, T=3, S=4).draw(rng), tile=4)


@trap(
    "batch-shares-keys",
    catches="all rows of a batch read the keys and values of the first",
    severity="critical",
    story="Tests with B = 1 never notice; in serving, one user sees another's context.",
)
def batch_shares_keys(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(B=3, T=4, S=4).draw(rng), causal=True, tile=4)


@trap(
    "as-many-keys-as-queries",
    catches="the number of keys is taken from the queries",
    severity="critical",
    story="Self-attention tests have T = S; cross-attention and decoding do not.",
)
def as_many_keys(submission: Submission, rng: np.random.Generator) -> None:
    for T, S in ((3, 10), (1, 5)):
        attends(submission, *Shape(T=T, S=S).draw(rng), tile=4)


# --- nothing there --------------------------------------------------------------------------------


@trap(
    "no-keys",
    catches="S = 0 raises (maximum of an empty axis) instead of giving zeros and −inf",
    severity="major",
    story="An empty cache on the first step, a document of no tokens in a packed batch.",
)
def no_keys(submission: Submission, rng: np.random.Generator) -> None:
    for causal in (False, True):
        attends(submission, *Shape(T=3, S=0).draw(rng), causal=causal, tile=4)


@trap(
    "no-queries",
    catches="T = 0 raises (a tile clamped to zero) instead of giving empty arrays",
    severity="minor",
    story="A scheduler that hands over a request with nothing new to compute.",
)
def no_queries(submission: Submission, rng: np.random.Generator) -> None:
    for causal in (False, True):
        attends(submission, *Shape(T=0, S=3).draw(rng), causal=causal, tile=4)


@trap(
    "no-batch",
    catches="B = 0 raises (stacking nothing) instead of giving empty arrays",
    severity="minor",
    story="The last rank of a sharded evaluation gets an empty batch.",
)
def no_batch(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(B=0, H=2, G=2, T=3, S=3).draw(rng), tile=4)


# --- arrays as they come --------------------------------------------------------------------------


@trap(
    "strides-ignored",
    catches="inputs are read as if they were contiguous",
    severity="critical",
    story="Projections come out as (B,T,H,D) and are viewed as (B,H,T,D): a transposed view, not a "
    "copy.",
)
def strides_ignored(submission: Submission, rng: np.random.Generator) -> None:
    plain = [rng.standard_normal((2, 6, 3, 4)) for _ in range(3)]
    q, k, v = (x.transpose(0, 2, 1, 3) for x in plain)
    attends(submission, q, k, v, causal=True, tile=4)
    attends(submission, q[:, ::-1, ::2], k[:, ::-1, ::-2], v[:, :, ::2], tile=2)
    row = rng.standard_normal((1, 1, 1, 4))
    attends(submission, np.broadcast_to(row, q.shape), k, v, causal=True, tile=4)


@trap(
    "inputs-modified",
    catches="q is scaled in place",
    severity="critical",
    story="The second call with the same q then answers something else; here the arguments are "
    "looked at after the call.",
)
def inputs_modified(submission: Submission, rng: np.random.Generator) -> None:
    # Width 3: dividing by its scale again does not give back every number.
    inputs = Shape(H=2, G=1, T=64, S=64, D=3).draw(rng)
    for causal in (False, True):
        _, after = submission.observe("flash_attention", *inputs, causal=causal, tile=4)
        for name, left, given in zip("qkv", after, inputs, strict=True):
            expect.equal(left, given, f"{name} after the call")


@trap(
    "double-through-single",
    catches="float64 inputs pass through float32",
    severity="major",
    story="The dtype that comes out says double, the digits say single: 1e-8 where 1e-15 is due.",
)
def double_through_single(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(T=8, S=8, D=8).draw(rng)
    attends(submission, q + 1 / 3, k, v + 1 / 3, tile=4)


@trap(
    "single-through-half",
    catches="float32 inputs pass through float16",
    severity="critical",
    story="What is usual inside a tensor core is not what a caller with float32 asked for.",
)
def single_through_half(submission: Submission, rng: np.random.Generator) -> None:
    # 5 + 2⁻⁹ lies halfway between two numbers of float16, and is exact in float32.
    q, k, v = with_logits(rng, np.array([5.0, 5.0 + 2.0**-9, 5.0 + 2.0**-9]), 3, np.float32)
    v[0, 0] = np.array([[1.0], [-1.0], [-1.0]])
    attends(submission, q, k, v, tile=2)


@trap(
    "axes-of-one-squeezed",
    catches="an axis of size one disappears on the way",
    severity="major",
    story="squeeze() tidies up the axis that was meant, and every other that happens to be one.",
)
def axes_of_one(submission: Submission, rng: np.random.Generator) -> None:
    for causal in (False, True):
        attends(submission, *Shape(T=1, S=1, D=1).draw(rng), causal=causal)
        attends(submission, *Shape(T=3, S=1, D=2).draw(rng), causal=causal)
        attends(submission, *Shape(T=1, S=3, D=1).draw(rng), causal=causal, tile=2)


@trap(
    "output-in-double",
    catches="float32 inputs give a float64 output",
    severity="minor",
    story="1/np.sqrt(D) is a float64 scalar and quietly promotes everything it meets.",
)
def output_in_double(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=5, S=5).draw(rng, np.float32), tile=4)


@trap(
    "answers-remembered-by-shape",
    catches="an answer is kept from an earlier call of the same shape",
    severity="critical",
    story="A memo keyed by shape makes any benchmark look wonderful.",
)
def answers_remembered(submission: Submission, rng: np.random.Generator) -> None:
    for _ in range(3):
        attends(submission, *Shape(T=4, S=4).draw(rng), causal=True, tile=3)


def memory_rise(submission: Submission, rng: np.random.Generator) -> tuple[int, int]:
    """By how many bytes memory rises for 4608 queries and keys, and how many pairs these are."""
    q, k, v = Shape(T=4608, S=4608).draw(rng, np.float32)
    answer, rise = weighed(submission, "flash_attention", q, k, v, causal=True, tile=64)
    out, lse = pair(answer)
    expect.array(out, shape=q.shape, dtype=q.dtype, what="out")
    expect.array(lse, shape=q.shape[:3], dtype=q.dtype, what="lse")
    agrees((out[:, :, -2:], lse[:, :, -2:]), q[:, :, -2:], k, v, causal=True)
    return rise, q.shape[2] * k.shape[2]


@trap(
    "score-matrix-in-memory",
    catches="memory that grows as T·S: the whole score matrix is held",
    severity="critical",
    story="The one thing flash attention is for. 4608 queries and keys have 81 MiB of scores; half "
    "of that is far more than tiles and accumulators need.",
)
def score_matrix(submission: Submission, rng: np.random.Generator) -> None:
    rise, pairs = memory_rise(submission, rng)
    expect.that(rise < 2 * pairs, f"memory rose by {rise >> 20} MiB, all scores are {pairs >> 18}")


@trap(
    "mask-for-all-pairs",
    catches="the scores are tiled, but the causal mask is made for all T·S pairs at once",
    severity="major",
    story="One byte a pair is still quadratic: at 128k tokens the mask alone has 16 GiB.",
)
def mask_for_all_pairs(submission: Submission, rng: np.random.Generator) -> None:
    rise, pairs = memory_rise(submission, rng)
    expect.that(rise < pairs // 2, f"memory rose by {rise >> 20} MiB, a mask has {pairs >> 20}")


# --- what must be refused -------------------------------------------------------------------------


@trap(
    "uneven-groups-accepted",
    catches="H that is no multiple of G is not refused with ValueError",
    severity="major",
    story="Integer division rounds, the last heads read beyond the end or share silently.",
)
def uneven_groups(submission: Submission, rng: np.random.Generator) -> None:
    for H, G in ((5, 2), (2, 4), (3, 2)):
        inputs = Shape(H=H, G=G).draw(rng)
        expect.raises(ValueError, lambda inputs=inputs: submission.flash_attention(*inputs))  # type: ignore[misc]


@trap(
    "negative-tile-accepted",
    catches="a negative tile makes every loop empty and gives zeros",
    severity="minor",
    story="range(0, T, -3) is legal and empty: no error, no attention.",
)
def negative_tile(submission: Submission, rng: np.random.Generator) -> None:
    inputs = Shape().draw(rng)
    for tile in (-3, -1, 0):
        expect.raises(REFUSALS, lambda tile=tile: submission.flash_attention(*inputs, tile=tile))  # type: ignore[misc]


@trap(
    "integers-accepted",
    catches="integer arrays are accepted, and the answer is rounded to integers",
    severity="minor",
    story="Outputs allocated in the input's dtype turn every weight into 0.",
)
def integers_accepted(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = (np.rint(4 * x).astype(np.int64) for x in Shape().draw(rng))
    expect.raises(REFUSALS, lambda: submission.flash_attention(q, k, v))


@trap(
    "complex-accepted",
    catches="complex arrays are accepted, although their softmax has no meaning here",
    severity="minor",
    story="NumPy orders complex numbers, so the maximum works and so does everything after it.",
)
def complex_accepted(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = (x.astype(np.complex128) for x in Shape().draw(rng))
    expect.raises(REFUSALS, lambda: submission.flash_attention(q, k, v))


@trap(
    "longer-values-accepted",
    catches="v may be longer than k, and its tail is ignored",
    severity="minor",
    story="A cache whose keys and values disagree is a bug upstream; slicing hides it.",
)
def longer_values(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(T=4, S=6).draw(rng)
    expect.raises(REFUSALS, lambda: submission.flash_attention(q, k[:, :, :5], v))


@trap(
    "larger-batch-of-keys-accepted",
    catches="keys of more batch rows than queries are accepted and the rest ignored",
    severity="minor",
    story="Loops over q's batch never look at what else came along.",
)
def larger_batch(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(B=3, T=4, S=6).draw(rng)
    expect.raises(REFUSALS, lambda: submission.flash_attention(q[:2], k, v))


@trap(
    "one-column-of-values-accepted",
    catches="v of width 1 is broadcast over the width of q",
    severity="minor",
    story="Any other width fails by itself in an addition; one column fits everywhere.",
)
def one_column(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(T=4, S=6).draw(rng)
    for width in (1, 3):
        expect.raises(
            REFUSALS,
            lambda width=width: submission.flash_attention(q, k, v[..., :width]),  # type: ignore[misc]
        )


@trap(
    "integers-in-one-array-accepted",
    catches="only q's dtype is looked at; integer keys or values are promoted silently",
    severity="minor",
    story="Outputs have the dtype of q, so q is the one that gets checked; a quantised cache that "
    "was never dequantised comes in through k and v.",
)
def integers_in_one(submission: Submission, rng: np.random.Generator) -> None:
    inputs = Shape(T=4, S=6).draw(rng)
    for place in range(3):
        mixed = list(inputs)
        mixed[place] = np.rint(4 * mixed[place]).astype(np.int64)
        expect.raises(REFUSALS, lambda mixed=mixed: submission.flash_attention(*mixed))  # type: ignore[misc]


@trap(
    "empty-problem-unchecked",
    catches="an early return for empty arrays comes before the checks",
    severity="minor",
    story="The shortcut is added last and put first; a wrong number of heads then shows up only "
    "when the first token arrives.",
)
def empty_unchecked(submission: Submission, rng: np.random.Generator) -> None:
    for empty in ({"B": 0}, {"T": 0}, {"S": 0}):
        uneven = Shape(H=3, G=2, **empty).draw(rng)
        expect.raises(ValueError, lambda uneven=uneven: submission.flash_attention(*uneven))  # type: ignore[misc]
        q, k, v = Shape(**empty).draw(rng)
        expect.raises(REFUSALS, lambda q=q, k=k, v=v: submission.flash_attention(q, k, v, tile=0))  # type: ignore[misc]


# --- the ends of the numbers ----------------------------------------------------------------------


@trap(
    "scores-below-sentinel",
    catches="−1e30 stands for −inf somewhere, and finite scores below it count as hidden",
    severity="major",
    story="A floor under the running maximum saves a branch; the constant comes from another "
    "dtype's range.",
)
def scores_below_sentinel(submission: Submission, rng: np.random.Generator) -> None:
    for unit, dtype in ((-1e200, np.float64), (-1e36, np.float32)):
        # Every key is hopelessly behind the first, so its value is the answer without rounding.
        q, k, v = with_logits(rng, unit * np.arange(1, 7), 6, dtype)
        for tile in (4, 16):
            out, lse = pair(submission.flash_attention(q, k, v, causal=True, tile=tile))
            expect.array(lse, shape=(1, 1, 6), dtype=dtype, what="lse")
            expect.array(out, shape=(1, 1, 6, 4), dtype=dtype, what="out")
            slack = 8.0 * float(np.finfo(dtype).eps)
            expect.close(out, np.repeat(v[:, :, :1], 6, axis=2), rtol=slack, what="out")
            expect.close(lse, np.full((1, 1, 6), unit), rtol=slack, what="lse")


@trap(
    "small-rise-not-rescaled",
    catches="the correction is left out while the maximum rises by less than 1e-6",
    severity="minor",
    story="Skipping needless rescaling is a real speed-up when the old maximum is kept; with the "
    "new one every skipped step is an error, far above float64's.",
)
def small_rise(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *with_logits(rng, 5e-7 * np.arange(12), 3, np.float64), tile=2)


@trap(
    "small-weights-dropped",
    catches="weights below 1e-8 are set to 0, also in float64",
    severity="minor",
    story="A threshold that float32 cannot feel; in float64 it costs half of the digits.",
)
def small_weights(submission: Submission, rng: np.random.Generator) -> None:
    logits = np.array([0.0, -19.0, -19.5, -20.0])
    attends(submission, *with_logits(rng, logits, 3, np.float64), tile=4)
