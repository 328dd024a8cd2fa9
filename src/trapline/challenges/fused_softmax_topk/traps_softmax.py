"""Bugs of the softmax."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, edits, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.fused_softmax_topk.cases import (
    DTYPES,
    LONG,
    Rng,
    ask,
    check,
    logits_of,
    pair,
)
from trapline.challenges.fused_softmax_topk.situations import (
    LATE,
    WRITTEN_BLIND,
    masked,
    one_tile,
    sparse,
)
from trapline.challenges.fused_softmax_topk.solution_lines import (
    ANSWER,
    CALL,
    MERGE,
    PROBS,
    SUM,
    TILE,
)
from trapline.gold.softmax_topk import oracle

# Parts of the gold solution that several mutants edit.
_NEW = "new = max(largest, tile_max)"
_NOTHING_YET = "if new == -np.inf:"
_EXP = "return np.exp(values - largest)"


@trap(
    catches="exp of the raw logits: inf / inf from a logit of 710 on in float64",
    severity="major",
    story="The textbook formula without the maximum; logits of untrained heads reach hundreds.",
    mutant=edit(_NEW, "new = 0.0"),
    control=one_tile,
)
def exp_overflow(submission: Submission, rng: Rng) -> None:
    for dtype, offset in ((np.float64, 1e4), (np.float32, 1e4), (np.float16, 2e4)):
        ask(submission, (logits_of(rng, (2, 30)) + offset).astype(dtype), 5)


@trap(
    catches="the maximum is subtracted in the numerators and not in the sum",
    severity="critical",
    story="The sum of exp(logit) divides exp(logit − max): all is off by exp(max).",
    mutant=edit(ANSWER, "return _weights(best, largest) / (total * np.exp(largest)), places"),
    seen=WRITTEN_BLIND,
)
def sum_without_the_maximum(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (2, 30)), 5)


@trap(
    catches="the maximum is subtracted in the sum and not in the numerators",
    severity="major",
    story="exp(logit) is divided by the sum of exp(logit − max): all is off by exp(max).",
    mutant=edit(ANSWER, "return np.exp(best) / total, places"),
)
def numerators_without_the_maximum(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (2, 30)), 5)


@trap(
    catches="exp(logit − max) is returned without the division by the sum",
    severity="major",
    story="The best entry then has probability 1.",
    mutant=edit(ANSWER, "return _weights(best, largest), places"),
)
def not_normalised(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (2, 30)), 5)


@trap(
    catches="logits are returned in place of probabilities",
    severity="major",
    story="The values that were ranked are returned as they are.",
    mutant=edit(ANSWER, "return best, places"),
)
def logits_returned(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (2, 30)), 5)


@trap(
    catches="logarithms of the probabilities are returned",
    severity="major",
    story="Beam search wants logarithms; this contract does not.",
    mutant=edit(ANSWER, "return best - largest - np.log(total), places"),
)
def log_probabilities_returned(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (2, 30)), 5)


@trap(
    catches="probabilities divided by the sum of the k kept ones",
    severity="critical",
    story="It is right for sampling among the k, but it is not the probability under the softmax.",
    mutant=edit(
        ANSWER, "weights = _weights(best, largest)\n    return weights / weights.sum(), places"
    ),
    seen=WRITTEN_BLIND,
)
def normalised_over_k(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (3, 40)), 4)


@trap(
    catches="the sum runs over the entries that were not kept: the k best are missing in it",
    severity="major",
    story="The winners are taken out of the row before it is summed.",
    mutant=edit(
        ANSWER,
        "weights = _weights(best, largest)\n    return weights / (total - weights.sum()), places",
    ),
)
def winners_missing_in_the_sum(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (3, 40)), 4)


@trap(
    catches="the k best are counted twice in the sum",
    severity="major",
    story="Kept entries are merged with the next tile and added again.",
    mutant=edit(
        ANSWER,
        "weights = _weights(best, largest)\n    return weights / (total + weights.sum()), places",
    ),
    seen=WRITTEN_BLIND,
)
def winners_counted_twice(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (3, 40)), 4)


@trap(
    catches="one sum for all rows",
    severity="major",
    story="A reduction without `axis` gives one number for the whole block.",
    mutant=edits(
        (CALL, f"{CALL}\n    probs /= max(rows, 1)"),
    ),
)
def sum_over_all_rows(submission: Submission, rng: Rng) -> None:
    """Rows that are permutations of each other, so that each has the same sum."""
    row = logits_of(rng, (1, 20))
    ask(submission, rng.permuted(np.repeat(row, 3, axis=0), axis=1), 4)


@trap(
    catches="−inf − (−inf) = NaN where every logit of a tile, or every one so far, is −inf",
    severity="critical",
    story="Grammar masks can forbid the whole beginning of a vocabulary.",
    mutant=edit(_NOTHING_YET, "if False:"),
    also=[
        edits(
            (_NOTHING_YET, "if False:"),
            (SUM, SUM.replace("(tile, new))", "(tile, tile_max)) * _weights(tile_max, new)")),
        ),
    ],
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def masked_first_tile(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (2, LONG))
    logits[:, : LONG - 30] = -np.inf
    ask(submission, logits, 5)


@trap(
    catches="the maximum of the latest tile replaces the running one, and a tile of −inf spoils "
    "the sum",
    severity="major",
    story="The end of a padded vocabulary is masked, and the maximum of that tile alone is −inf.",
    mutant=edits(
        (_NEW, "new = tile_max"),
        (_NOTHING_YET, "if largest == tile_max == -np.inf:"),
    ),
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def masked_later_tile(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (2, LONG))
    logits[:, 30:] = -np.inf
    ask(submission, logits, 40)


@trap(
    catches="a row is refused because one of its tiles is all −inf, although the row is not",
    severity="major",
    story="All −inf is checked for each tile, and long stretches of a vocabulary are masked.",
    mutant=insert_before(
        "    new = max(largest, tile_max)\n",
        "    if tile_max == -np.inf:\n        raise ValueError('a row of logits is all -inf')\n",
    ),
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def masked_tile_refused(submission: Submission, rng: Rng) -> None:
    places = int(rng.integers(32)), LATE + int(rng.integers(32))
    ask(submission, np.concatenate([masked({place: 0.0}) for place in places]), 1)


@trap(
    catches="exp(x − (m + log Σ)): the logarithm vanishes beside a large m, the sum is above 1",
    severity="major",
    story="A log-sum-exp kept as one number cannot represent log 2 beside 1e17.",
    mutant=edit(ANSWER, "return np.exp(best - (largest + np.log(total))), places"),
    also=[
        # Rounded to the dtype of the logits.
        edit(
            ANSWER,
            "lse = float(logits.dtype.type(largest + np.log(total)))\n"
            "    return np.exp(best - lse), places",
        )
    ],
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def lse_absorbed(submission: Submission, rng: Rng) -> None:
    for dtype, size in ((np.float64, 1e17), (np.float32, 1e17)):
        logits = np.zeros((2, 9), dtype)
        logits[:, rng.permutation(9)[:3]] = size
        logits[1] *= -1.0
        ask(submission, logits, 5)


@trap(
    catches="differences of finite logits that leave the range and become NaN",
    severity="major",
    story="Finite masks (the lowest number of a dtype) instead of −inf.",
    mutant=edit(_EXP, "return np.exp(values * 2.0 - largest * 2.0) ** 0.5"),
    control=one_tile,
)
def extreme_range(submission: Submission, rng: Rng) -> None:
    for dtype in DTYPES:
        info = np.finfo(dtype)
        logits = np.full((2, 12), info.min, dtype)
        logits[0, rng.integers(12)] = info.max
        ask(submission, logits, 6)


def _narrow_total(tile: int) -> Mutant:
    """After each tile of this length the sum is rounded to the dtype of the logits."""
    line = "largest, total = _accumulate(largest, total, tile)"
    return edits(
        ("TILE = 8192", f"TILE = {tile}"),
        (line, f"{line}\n        total = float(logits.dtype.type(total))"),
    )


def _first_of_equals(submission: Submission, rng: Rng) -> None:
    """A control: which of as many equals are taken, whatever their sum."""
    logits = np.full((1, 70001), rng.integers(-4, 5), np.float32)
    _, indices = pair(submission.softmax_topk(logits, 3))
    expect.equal(indices, np.arange(3)[None], "indices")


@trap(
    catches="float16 sums, which stop growing at 2048 and overflow at 65504",
    severity="major",
    story="Half-precision kernels without a wide accumulator give probability 1/2048 in flat rows.",
    mutant=edit(SUM, SUM.replace("total *", "np.float16(total *") + ")"),
    also=[_narrow_total(tile) for tile in (512, 1024, 4096, 8192)],
    seen=WRITTEN_BLIND,
    control=_first_of_equals,
)
def float16_sum(submission: Submission, rng: Rng) -> None:
    logits = np.full((1, 70001), rng.integers(-4, 5), np.float16)
    ask(submission, logits, 3)


@trap(
    catches="x − m and its exponential rounded to float16",
    severity="major",
    story="One rounding to 11 bits before the exponential costs a percent after it.",
    mutant=edit(_EXP, "return np.exp(np.float64(np.float16(values - largest)))"),
)
def float16_differences(submission: Submission, rng: Rng) -> None:
    logits = np.linspace(-9.0, 9.0, 300).astype(np.float16)[None]
    logits = np.repeat(logits, 4, axis=0)
    ask(submission, rng.permuted(logits, axis=1) + np.float16(0), 250)
    # Half of the sum comes from differences that lie half a float16 step from the next one.
    flat = np.full((1, 70001), 0.0038, np.float16)
    flat[0, 0] = 11.0  # first, so that it is the maximum for every tile
    _ask_half(submission, flat, 3)


@trap(
    catches="the exponentials of the answered float16 entries are computed in float16",
    severity="major",
    story="The sum is careful, the numerators are not.",
    mutant=edit(ANSWER, "return np.exp((best - largest).astype(logits.dtype)) / total, places"),
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def float16_numerators(submission: Submission, rng: Rng) -> None:
    """The difference of the two is half a float16 step off."""
    logits = np.full((1, 40), -60.0, np.float16)
    logits[0, rng.permutation(40)[:2]] = 9.0, 0.0038
    _ask_half(submission, logits, 2)


@trap(
    catches="the exponentials and the sum of float16 logits are computed in float16",
    severity="major",
    story="Arithmetic in the dtype of the logits, where the contract asks for float32 or better.",
    mutant=edits(
        (
            "= _accumulate(largest, total, tile)",
            "= _accumulate(largest, total, tile, logits.dtype)",
        ),
        (
            "def _accumulate(largest: float, total: float, tile: Floats)",
            "def _accumulate(largest, total, tile, dtype)",
        ),
        (SUM, SUM.replace("_weights(tile, new)", "np.exp(tile.astype(dtype) - dtype.type(new))")),
    ),
    # Nothing is widened: the running sum and the numerators are narrow, too.
    also=[
        edits(
            (TILE, TILE.removesuffix(".astype(np.float64)")),
            ("best, places = np.empty(0),", "best, places = np.empty(0, logits.dtype),"),
            (
                "largest, total = -np.inf, 0.0",
                "largest, total = np.array([-np.inf, 0.0], logits.dtype)",
            ),
        )
    ],
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def float16_throughout(submission: Submission, rng: Rng) -> None:
    """Two thirds of the sum come from differences that are half a float16 step off."""
    logits = np.full((1, 16001), 0.0038, np.float16)
    logits[0, rng.integers(32)] = 9.0
    _ask_half(submission, logits, 2)


@trap(
    catches="float64 probabilities computed in float32",
    severity="major",
    story="A cast to the kernel's dtype leaves seven correct digits in a float64 answer.",
    mutant=edit(_EXP, "return np.exp(np.float32(values - largest))"),
    seen=WRITTEN_BLIND,
)
def float64_in_float32(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (2, 50)), 10)


@trap(
    catches="float32 or float64 probabilities for narrower logits",
    severity="major",
    story="The accumulator's dtype is returned and doubles the size of the answer.",
    mutant=edit(PROBS, "probs = np.empty((rows, k))"),
    # float16 logits, the others as they are.
    also=[edit(PROBS, "probs = np.empty((rows, k), np.result_type(logits.dtype, np.float32))")],
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def dtype_widened(submission: Submission, rng: Rng) -> None:
    for dtype in (np.float16, np.float32):
        ask(submission, logits_of(rng, (2, 20), dtype), 3)


def _ask_half(submission: Submission, logits: np.ndarray, k: int) -> None:
    """As `ask`; an error of some thousandths, as arithmetic in float16 makes, is called that."""
    answer = submission.softmax_topk(logits, k)
    probs, _ = pair(answer)
    exact = oracle.softmax_topk(logits, k).probs
    if isinstance(probs, np.ndarray) and probs.shape == exact.shape:
        error = float(np.max(np.abs(probs[:, 0] / exact[:, 0] - 1.0)))
        expect.that(not 1.1e-3 < error < 1e-2, f"probs are off by {1e3 * error:.1f} thousandths")
    check(answer, logits, k)


def _guarded(size: str) -> tuple[str, str]:
    return ANSWER, ANSWER.replace("/ total", f"/ (total + {size})")


def _without_small(cut: float) -> Mutant:
    """Exponentials of what lies further below the maximum do not count."""
    return edit(
        SUM, SUM.replace("_weights(tile, new))", f"_weights(tile[tile > new - {cut}], new))")
    )


def similar_logits(submission: Submission, rng: Rng) -> None:
    """A row as wide as the trap's whose exponentials are all of the same size."""
    ask(submission, rng.uniform(-1.0, 0.0, (1, 1 << 14)), 1)


@trap(
    catches="small exponentials are left out of the sum, though together they weigh something",
    severity="major",
    story="Logits far below the maximum are skipped as negligible; a vocabulary has many of them.",
    mutant=_without_small(8.0),
    also=[_without_small(cut) for cut in (5.0, 6.0, 10.0, 12.0, 15.0, 16.0, 20.0)],
    seen=WRITTEN_BLIND,
    control=similar_logits,
)
def small_exponentials_dropped(submission: Submission, rng: Rng) -> None:
    row = sparse({rng.integers(32): 0.0}, 1 << 14, low=-22.0)
    for place, level in enumerate((-5.5, -7.0, -9.0, -11.0, -13.5, -15.5, -18.0), 1):
        row[0, place * 2048 : (place + 1) * 2048] = level
    ask(submission, row + rng.uniform(0.0, 0.2), 1)


def _clipped(least: str) -> Mutant:
    return edit(
        "return _weights(best, largest) / total",
        f"return np.exp(np.maximum(best - largest, {least})) / total",
    )


@trap(
    catches="differences to the maximum are clipped, so that −inf gets a probability above 0",
    severity="major",
    story="A guard against underflow, which exp does not need.",
    mutant=_clipped("-50.0"),
    also=[
        *(_clipped(least) for least in ("-20.0", "-30.0", "-80.0", "-88.0", "-100.0", "-700.0")),
        edit("np.exp(values - largest)", "np.exp(np.maximum(values - largest, -50.0))"),
    ],
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def differences_clipped(submission: Submission, rng: Rng) -> None:
    ask(submission, sparse({3: 0.5, 17: rng.uniform()}, 30, low=-np.inf), 4)


@trap(
    catches="a small constant is added to the sum of the exponentials",
    severity="minor",
    story="A guard against division by zero, although the sum is at least 1, costs digits.",
    mutant=edit(*_guarded("1e-9")),
    seen=WRITTEN_BLIND,
    also=[edit(*_guarded(size)) for size in ("1e-6", "1e-7", "1e-8", "1e-10", "1e-12", "1e-5")],
)
def constant_in_the_sum(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (2, 30)), 4)


@trap(
    catches="a row with a logit of −inf is refused, although −inf means probability 0",
    severity="major",
    story="isfinite or isinf where only +inf and NaN are meant.",
    mutant=insert_before(
        "    tile_max = np.max(tile)\n",
        "    if np.isinf(tile).any():\n        raise ValueError('infinite logits')\n",
    ),
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def masked_logits_refused(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (2, 30))
    logits[:, int(rng.integers(30))] = -np.inf
    ask(submission, logits, 4)


def _stand_in(value: str) -> tuple[tuple[str, str], ...]:
    line = "        largest, total = _accumulate(largest, total, tile)\n"
    return ((line, f"        tile[tile == -np.inf] = {value}\n{line}"),)


@trap(
    catches="a finite number stands for −inf, and lower logits rank behind masked ones",
    severity="major",
    story="−1e30 looks like minus infinity, until a float64 logit is below it.",
    mutant=edits(*_stand_in("-1e30")),
    seen=WRITTEN_BLIND,
    also=[edits(*_stand_in(value)) for value in ("-1e9", "-1e38", "-1e4", "-65504")],
    control=one_tile,
)
def finite_stand_in_for_masked(submission: Submission, rng: Rng) -> None:
    logits = np.full((1, 12), -np.inf)
    places = rng.permutation(12)
    logits[0, places[:3]] = 0.0, -1e300, -2e300
    ask(submission, logits, 12)


_LOWEST = "np.maximum(tile, np.finfo(logits.dtype).min)"


@trap(
    catches="the lowest finite number of the dtype stands for −inf, and masked logits tie with a "
    "logit of that size",
    severity="minor",
    story="A usual mask value; −65504 is an ordinary float16 number, and the lower index wins.",
    mutant=edit(MERGE, MERGE.replace("tile", _LOWEST)),
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def lowest_number_for_masked(submission: Submission, rng: Rng) -> None:
    for dtype in DTYPES:
        logits = np.full((1, 12), -np.inf, dtype)
        # One alone, with probability 1: no other tie, and an order by probability is right.
        logits[0, 4 + int(rng.integers(8))] = np.finfo(dtype).min
        ask(submission, logits, 1)


@trap(
    catches="in very long rows the sum of the early tiles is forgotten",
    severity="major",
    story="A buffer of partial sums is emptied when it is full instead of added up.",
    mutant=edit(
        "_accumulate(largest, total, tile)\n        best",
        "_accumulate(largest, total if start % 65536 else 0.0, tile)\n        best",
    ),
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def early_sums_forgotten(submission: Submission, rng: Rng) -> None:
    ask(submission, sparse({rng.integers(32): 0.0, 199_990: 0.0}, length=200_000), 2)
