"""Bugs of causality, masks and rows without a key."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, edits, insert_after, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_forward.cases import Shape, attends, pair
from trapline.challenges.flash_attention_forward.situations import WRITTEN, with_logits
from trapline.challenges.flash_attention_forward.solution_lines import KEY_LOOP, MASK

# Parts of the gold solution that several mutants edit.
_STOP = "stop = min(len(k), position + rows) if causal else len(k)"

# --- causal ---------------------------------------------------------------------------------------


@trap(
    catches="a query does not see its own key (≥ instead of > in the mask, or S − T − 1)",
    severity="critical",
    story="Row 0 of a square causal problem sees exactly key 0, so its output is v₀: one entrant "
    "of the published field checked this and the others did not.",
    mutant=edit("np.arange(cols.start, cols.stop) > np", "np.arange(cols.start, cols.stop) >= np"),
    also=[edit("start + S - T, causal", "start + S - T - 1, causal")],
    seen=WRITTEN,
)
def causal_row_zero(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(B=2, H=2, G=2, T=6, S=6).draw(rng)
    answer = submission.flash_attention(q, k, v, causal=True, tile=4)
    expect.close(pair(answer)[0][:, :, 0], v[:, :, 0], atol=1e-12, what="row 0 of out")
    attends(submission, q, k, v, causal=True, tile=4)


@trap(
    catches="the mask lets through one key of the future",
    severity="major",
    story="triu(k=2) instead of triu(k=1): the training loss falls quickly because the target is "
    "visible.",
    mutant=edit("position, position + rows", "position + 1, position + 1 + rows"),
    also=[edit("start + S - T, causal", "start + S - T + 1, causal")],
)
def causal_sees_next_key(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(T=6, S=6).draw(rng)
    k[..., 1:, :] += 3.0 * q[..., :-1, :]
    attends(submission, q, k, v, causal=True, tile=3)


@trap(
    catches="the causal mask is aligned to the first key instead of the last one",
    severity="critical",
    story="With two new queries on six cached keys, query 0 must see five keys; several serving "
    "projects had a second prefill chunk that could not see the first.",
    mutant=edit("start + S - T, causal", "start, causal"),
    seen=WRITTEN,
)
def causal_aligned_top_left(submission: Submission, rng: np.random.Generator) -> None:
    for T, S in ((2, 6), (1, 9), (6, 2)):
        attends(submission, *Shape(T=T, S=S).draw(rng), causal=True, tile=4)


@trap(
    catches="causal=True masks nothing: every query sees every key",
    severity="critical",
    story="Seen in the published field as triu(k=1−T), which is right for a single decoded token "
    "by accident and has no effect on a prompt; a flag that is never read does the same.",
    mutant=insert_after("    _check(q, k, v, tile)\n", "    causal = False\n"),
    seen="a published answer",
)
def causal_mask_by_triu(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=1, S=8).draw(rng), causal=True, tile=4)
    attends(submission, *Shape(T=8, S=8).draw(rng), causal=True, tile=4)


@trap(
    catches="the loop ends at the first masked tile although later ones are visible",
    severity="major",
    story="Called fragile in the published field: the early exit holds for one loop order only.",
    mutant=edits(
        (_STOP, "stop = len(k)"),
        (
            KEY_LOOP,
            "for start in reversed(range(0, stop, tile)):\n"
            "        if causal and start >= position + rows:\n"
            "            break",
        ),
    ),
)
def break_instead_of_continue(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=12, S=12).draw(rng), causal=True, tile=4)


@trap(
    catches="the bound of the key loop leaves out the last visible key",
    severity="critical",
    story="Skipping masked tiles saves half the work; an end that is one too small loses the "
    "diagonal of the last row of each tile.",
    mutant=edit(_STOP, _STOP.replace("rows)", "rows - 1)")),
    seen=WRITTEN,
)
def diagonal_key_skipped(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=8, S=8).draw(rng), causal=True, tile=4)


@trap(
    catches="the mask is applied only where query tile and key tile start at the same index",
    severity="major",
    story="This holds for square problems; with T ≠ S the diagonal can cross a tile anywhere.",
    mutant=edit("cols.stop > position + 1", "cols.start == position"),
    seen=WRITTEN,
)
def mask_only_on_aligned_tile(submission: Submission, rng: np.random.Generator) -> None:
    for T, S in ((6, 11), (11, 13)):
        attends(submission, *Shape(T=T, S=S).draw(rng), causal=True, tile=4)


@trap(
    catches="positions start again at zero in every tile of queries",
    severity="major",
    story="Every tile after the first sees too few keys; a test with one tile cannot show it.",
    mutant=edit("start + S - T, causal", "S - T, causal"),
    seen=WRITTEN,
)
def query_tile_offset_forgotten(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=10, S=10).draw(rng), causal=True, tile=5)


# --- masks and empty rows -------------------------------------------------------------------------


@trap(
    catches="a finite number such as −1e9 as mask: a row without any key becomes the mean of "
    "hidden values",
    severity="critical",
    story="A finite sentinel minus itself is 0, so a fully masked row gets equal weights, "
    "not none.",
    mutant=edit(MASK, MASK.replace("-np.inf", "-1e9")),
    also=[
        edit(MASK, MASK.replace("-np.inf", number)) for number in ("-1e30", "np.finfo(q.dtype).min")
    ],
    seen=WRITTEN,
)
def finite_mask_averages_empty_rows(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(T=7, S=4).draw(rng, np.float32)
    v += 3.0
    answer = submission.flash_attention(q, k, v, causal=True, tile=8)
    expect.equal(pair(answer)[0][:, :, :3], np.zeros((1, 1, 3, 4), np.float32), "an empty row")
    attends(submission, q, k, v, causal=True, tile=8)


@trap(
    catches="a finite sentinel that is larger than real logits, so that masked keys win",
    severity="major",
    story="A widely used kernel library masked with −5·10⁴; valid logits below it vanished.",
    mutant=edit(MASK, MASK.replace("-np.inf", "-1e4")),
    also=(
        edit(
            MASK,
            MASK.replace("-np.inf", "-1e3")
            + "\n            scores[np.arange(position, position + rows) < 0] = -np.inf",
        ),
    ),
    seen=WRITTEN,
)
def finite_mask_above_real_logits(submission: Submission, rng: np.random.Generator) -> None:
    for low in (-3e4, -3e10):
        inputs = with_logits(rng, np.full(6, low), 6, np.float64)
        attends(submission, *inputs, causal=True, tile=3)


def _added(number: str) -> Mutant:
    """The number is added to hidden scores; rows that see no key are still answered rightly."""
    return edit(
        MASK,
        f"scores += np.where(_hidden(position, rows, cols), {number}, 0)\n"
        "            scores[np.arange(position, position + rows) < 0] = -np.inf",
    )


def hidden_keys_without_preference(submission: Submission, rng: np.random.Generator) -> None:
    """The visible key is no worse than the hidden ones."""
    attends(submission, *with_logits(rng, np.zeros(6), 6, np.float64), causal=True, tile=3)


@trap(
    catches="a large finite number is added to hidden scores, and one that is larger by more wins",
    severity="major",
    story="scores + mask · (−1e9) keeps the differences between hidden scores: a hidden score that "
    "lies far enough above the visible ones is still the largest.",
    mutant=_added("-1e9"),
    also=[_added(number) for number in ("-1e4", "-1e30")],
    control=hidden_keys_without_preference,
)
def finite_mask_added(submission: Submission, rng: np.random.Generator) -> None:
    for low in (-3e6, -3e10, -3e35):
        q, k, v = with_logits(rng, np.array([low, 0, 0, 0, 0, 0]), 6, np.float64)
        for tile in (2, 8):
            out, lse = pair(submission.flash_attention(q, k, v, causal=True, tile=tile))
            expect.array(out, shape=(1, 1, 6, 4), dtype=np.float64, what="out")
            # The first query sees one key, so that key's value and score are the answer.
            expect.close(out[:, :, 0], v[:, :, 0], atol=1e-12, what="row 0 of out")
            expect.array(lse, shape=(1, 1, 6), dtype=np.float64, what="lse")
            expect.close(lse[:, :, :1], np.full((1, 1, 1), low), rtol=1e-12, what="lse of row 0")


@trap(
    catches="the log-sum-exp of a row without keys is not −inf",
    severity="major",
    story="A well-known kernel returned +inf; merging such partial results drops the other part.",
    mutant=edit("peak + np.log(total), -np.inf)", "peak + np.log(total), np.inf)"),
    also=[
        edit("peak + np.log(total), -np.inf)", f"peak + np.log(total), {number})")
        for number in ("np.finfo(q.dtype).min", "np.nan", "-1e30", "-1e9")
    ],
    seen=WRITTEN,
)
def empty_row_lse_plus_infinity(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(T=9, S=2).draw(rng)
    for tile in (2, 4, 16):
        _, lse = pair(submission.flash_attention(q, k, v, causal=True, tile=tile))
        expect.array(lse, shape=(1, 1, 9), dtype=np.float64, what="lse")
        expect.that(bool(np.all(lse[..., :7] == -np.inf)), "lse of an empty row is not −inf")


@trap(
    catches="0 / 0 in rows that see no key",
    severity="critical",
    story="More queries than keys under a bottom-right mask leave rows without any visible key.",
    mutant=edit("total = np.where(seen, total, 1)", "total = total * 1"),
    seen=WRITTEN,
)
def empty_row_divides_by_zero(submission: Submission, rng: np.random.Generator) -> None:
    for tile in (3, 16):
        attends(submission, *Shape(H=2, G=1, T=8, S=3).draw(rng), causal=True, tile=tile)
