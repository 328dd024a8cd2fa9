"""Bugs of causality, masks and rows without a key."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_forward.cases import Shape, attends, pair
from trapline.challenges.flash_attention_forward.situations import with_logits

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
