"""Bugs at the borders of tiles and blocks."""

import numpy as np

from trapline.arena.judge.traps import Mutant, edit, edits, insert_after, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.fused_softmax_topk.cases import LONG, Array, Rng, ask, logits_of
from trapline.challenges.fused_softmax_topk.situations import (
    LATE,
    LENGTH,
    WRITTEN_BLIND,
    masked,
    one_tile,
    sparse,
)
from trapline.challenges.fused_softmax_topk.solution_lines import (
    ALL_VALUES,
    ANSWER,
    CALL,
    FRESH,
    LOOP,
    MERGE,
    ORDER,
    PLACES,
    SUM,
    TILE,
    VALUES,
    ZEROS,
)

_TOTAL = "total * _weights(largest, new)"
_MERGED = "tile: Floats, start: int, k: int"
_TILES = "for start in range(0, logits.size, TILE):"


def _own_length(tile: int) -> Mutant:
    return edits(
        ("TILE = 8192", f"TILE = {tile}"),
        (PLACES, PLACES.replace("start", "start // TILE * tile.size")),
    )


# --- the running sum ------------------------------------------------------------------------------


@trap(
    catches="the running sum multiplied by exp(new − old) when the maximum rises",
    severity="major",
    story="It shows as soon as a later tile has a larger maximum.",
    mutant=edit(_TOTAL, "(total * np.exp(new - largest) if total else 0.0)"),
    control=one_tile,
)
def rescale_direction(submission: Submission, rng: Rng) -> None:
    ask(submission, masked({rng.integers(32): 0.0, LATE + rng.integers(32): 1.0}), 2)


@trap(
    catches="the running sum kept as it is when the maximum rises",
    severity="critical",
    story="Works on rows whose maximum is in the first tile, as in sorted test data.",
    mutant=edit(_TOTAL, "total"),
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def rescale_missing(submission: Submission, rng: Rng) -> None:
    ask(submission, masked({rng.integers(32): 0.0, LATE + rng.integers(32): 1.0}), 2)


def _later_tiles_near(submission: Submission, rng: Rng) -> None:
    """Later tiles lie lower, but not so far that an exponential overflows."""
    ask(submission, sparse({rng.integers(16): 0.0, 16 + rng.integers(16): -1.0}), 2)


@trap(
    catches="the maximum of each tile replaces the running one: where a later tile lies far lower, "
    "the rescaled sum overflows",
    severity="major",
    story="The maximum is taken of the tile alone, and the sum is brought to it.",
    mutant=edit(
        "new = max(largest, tile_max)", "new = tile_max if tile_max > -np.inf else largest"
    ),
    seen=WRITTEN_BLIND,
    control=_later_tiles_near,
)
def maximum_of_the_latest_tile(submission: Submission, rng: Rng) -> None:
    low = sparse({rng.integers(16): 0.0, 16 + rng.integers(16): -1.0}, low=-800.0)
    ask(submission, low, 2)


@trap(
    catches="the sum of a tile, relative to its own maximum, is added to a running sum that is "
    "relative to a larger one",
    severity="major",
    story="Both summands must be brought to the common maximum, not only the earlier one.",
    mutant=edit(SUM, SUM.replace("(tile, new)", "(tile, max(tile_max, -1e300))")),
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def tile_sum_not_rescaled(submission: Submission, rng: Rng) -> None:
    ask(submission, masked({rng.integers(32): 1.0, LATE + rng.integers(32): 0.0}), 2)


@trap(
    catches="the running sum starts anew in every tile: only the last one counts",
    severity="major",
    story="The fold over tiles returns the sum of a tile without the sum so far.",
    mutant=edit(SUM, "return new, np.sum(_weights(tile, new))"),
    also=[
        # Of narrower tiles.
        edits(("TILE = 8192", "TILE = 4096"), (SUM, "return new, np.sum(_weights(tile, new))"))
    ],
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def only_the_last_tile_summed(submission: Submission, rng: Rng) -> None:
    ask(submission, sparse({rng.integers(32): 0.0, LENGTH - 1: 1.0}), 2)


@trap(
    catches="only the first tile counts in the sum",
    severity="major",
    story="A tile without a new maximum, or a later one, is skipped before it is added.",
    mutant=edit(SUM, f"if total:\n        return new, {_TOTAL}\n    {SUM}"),
    control=one_tile,
)
def only_the_first_tile_summed(submission: Submission, rng: Rng) -> None:
    ask(submission, sparse({rng.integers(32): 1.0, LATE + rng.integers(32): 0.0}), 2)


@trap(
    catches="tiles in which no new winner is found are left out of the sum",
    severity="major",
    story="A tile is skipped for the ranking and so for the sum.",
    mutant=edits(
        (
            "largest, total = _accumulate(largest, total, tile)",
            "if best.size < k or np.any(tile > best[-1]):\n"
            "            largest, total = _accumulate(largest, total, tile)",
        ),
    ),
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def skipped_tile_not_summed(submission: Submission, rng: Rng) -> None:
    late = LATE + rng.integers(32)
    ask(submission, sparse({rng.integers(16): 1.0, 16 + rng.integers(16): 0.5, late: 0.0}), 2)


@trap(
    catches="the maximum starts at 0: rows of very negative logits underflow to 0 / 0",
    severity="major",
    story="A running maximum needs −inf to begin with.",
    mutant=edits(
        ("largest, total = -np.inf, 0.0", "largest, total = 0.0, 0.0"),
        ("    if largest == -np.inf:\n", "    if np.all(best == -np.inf):\n"),
    ),
    control=one_tile,
)
def maximum_starts_at_zero(submission: Submission, rng: Rng) -> None:
    ask(submission, logits_of(rng, (2, 30)) - 3000.0, 4)


# --- places and borders ---------------------------------------------------------------------------


@trap(
    catches="indices that start again at 0 in every tile",
    severity="critical",
    story="The tile's offset is added in one of the two places where an index is made.",
    mutant=edit(PLACES, "places = np.concatenate((places, fresh))"),
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def index_within_the_tile(submission: Submission, rng: Rng) -> None:
    first, second = rng.permutation(32)[:2]
    ask(submission, sparse({LATE + first: 2.0, LATE + second: 1.0}), 2)


@trap(
    catches="in the last, shorter tile the places are counted as if all tiles were as short",
    severity="critical",
    story="The offset is the tile's number times its length, and the last tile has another one.",
    mutant=_own_length(8192),
    also=[_own_length(length) for length in (1024, 4096, 16384, 32768)],
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def short_tile_counted_by_its_own_length(submission: Submission, rng: Rng) -> None:
    first, second = rng.permutation(32)[:2]
    ask(submission, sparse({LENGTH - 32 + first: 2.0, LENGTH - 32 + second: 1.0}), 2)


@trap(
    catches="the last, incomplete tile is never read",
    severity="major",
    story="V = 50257 is not a multiple of the usual tiles: the last tokens could never be "
    "generated.",
    mutant=edit(_TILES, "for start in range(0, max(logits.size // TILE, 1) * TILE, TILE):"),
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def tail_dropped(submission: Submission, rng: Rng) -> None:
    first, second = rng.permutation(32)[:2]
    ask(submission, sparse({first: 1.0, second: 0.0, LENGTH - 1: 2.0}), 2)


@trap(
    catches="the last, incomplete tile is never read, and a row shorter than a tile is empty",
    severity="major",
    story="The number of tiles is rounded down.",
    mutant=edits(
        (_TILES, "for start in range(0, max(logits.size - logits.size % 32, 1), 32):"),
        (TILE, "tile = logits[start : start + 32].astype(np.float64)"),
    ),
)
def short_rows_cut(submission: Submission, rng: Rng) -> None:
    for vocabulary in (33, 1025):
        first, second = rng.permutation(32)[:2]
        row = sparse({first: 1.0, second: 0.0, vocabulary - 1: 2.0}, vocabulary)
        ask(submission, row, 2)


@trap(
    catches="the last tile is filled up with zeros, which beat negative logits",
    severity="major",
    story="Masked lanes must load −inf; zeros win the top-k and add to the sum.",
    mutant=insert_after(TILE, "\n        tile = np.pad(tile, (0, TILE - tile.size))"),
)
def tail_padded_with_zeros(submission: Submission, rng: Rng) -> None:
    for vocabulary in (5, 33, 1025, LONG):
        ask(submission, -abs(logits_of(rng, (1, vocabulary))) - 30.0, 4)


@trap(
    catches="the column at a border between two parts of a row is lost",
    severity="critical",
    story="The second part begins at middle + 1: neither part holds the column between them.",
    mutant=edits(
        (TILE, TILE.replace("start :", "start + bool(start) :")),
        (PLACES, PLACES.replace("start + fresh", "start + bool(start) + fresh")),
    ),
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def border_column_lost(submission: Submission, rng: Rng) -> None:
    """Half of a power of two is where halves meet, and tiles."""
    first, second = rng.permutation(32)[:2]
    ask(submission, sparse({first: 1.0, second: 0.0, LATE // 2: 2.0}, LATE), 2)


@trap(
    catches="the column at a border between two parts of a row is counted twice",
    severity="major",
    story="Both ends of a range are taken for inclusive.",
    mutant=edits(
        (TILE, TILE.replace("start + TILE", "start + TILE + 1")),
    ),
    also=[edit(_TILES, _TILES.replace("TILE", "TILE - 1"))],
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def border_column_twice(submission: Submission, rng: Rng) -> None:
    """The first column of a part, then the last one of the first part, whatever power of two from
    256 its length is: no other border of such parts that overlap by one lies at one of these."""
    first, second = rng.permutation(32)[:2]
    ask(submission, sparse({first: 1.0, second: 0.0, LATE // 2: 2.0}, LATE), 2)
    ends = {(1 << bits) - 1: 0.0 for bits in range(8, 16)}
    ask(submission, sparse({first: 2.0, second: 1.0} | ends, 2 * LATE), 2)


@trap(
    catches="rows beyond a multiple of the block are never written",
    severity="critical",
    story="A grid of N // 4 blocks leaves the last rows untouched.",
    mutant=edits((LOOP, "    for row in range(rows - rows % 64):\n"), *ZEROS),
    seen=WRITTEN_BLIND,
)
def last_row_dropped(submission: Submission, rng: Rng) -> None:
    for rows in (1, 3, 17, 33):
        ask(submission, logits_of(rng, (rows, 20)), 3)


@trap(
    catches="rows beyond the first block of rows are lost, or answered in the place of others",
    severity="major",
    story="Batches of tests are shorter than a block.",
    mutant=edits((LOOP, "    for row in range(min(rows, 1024)):\n"), *ZEROS),
    also=[
        edits(
            (
                CALL,
                CALL.replace("probs[row], indices[row]", "probs[row % 1024], indices[row % 1024]"),
            ),
            *ZEROS,
        )
    ],
    control=one_tile,
)
def rows_of_later_blocks(submission: Submission, rng: Rng) -> None:
    """More numbers than a block of 2^17 holds."""
    ask(submission, logits_of(rng, (4099, 32)), 2)


# --- which candidates enter -----------------------------------------------------------------------


@trap(
    catches="a threshold one rank too high: the k-th best is missed when it is in a late tile",
    severity="major",
    story="The filter compares with the wrong end of the sorted list and loses only the last "
    "element.",
    mutant=edit(FRESH, FRESH.replace("best[-1]", "best[-2:][0]")),
    control=one_tile,
)
def late_last_place(submission: Submission, rng: Rng) -> None:
    first, second, third = rng.permutation(32)[:3]
    early = {first: 5.0, second: 4.0, third: -1.0}
    ask(submission, sparse(early | {LATE + rng.integers(32): 0.0}), 3)


@trap(
    catches="only the last tile of a row is ranked: the entries kept from earlier ones are "
    "forgotten",
    severity="major",
    story="The kept entries are replaced where they should be merged.",
    mutant=edit(MERGE, MERGE.replace("best, places, tile", "best[:0], places[:0], tile")),
    control=one_tile,
)
def only_the_last_tile_ranked(submission: Submission, rng: Rng) -> None:
    ask(submission, sparse({rng.integers(32): 1.0, LENGTH - 1: 0.0}), 1)


@trap(
    catches="only the first tile of a row is ranked, though all of them are summed",
    severity="major",
    story="A list that is full takes nothing in, however large.",
    mutant=edit(FRESH, FRESH.replace("np.flatnonzero(tile > best[-1])", "np.arange(0)")),
    control=one_tile,
)
def only_the_first_tile_ranked(submission: Submission, rng: Rng) -> None:
    first, second = rng.permutation(32)[:2]
    ask(submission, sparse({first: 1.0, second: 0.0, LATE + rng.integers(32): 2.0}), 2)


@trap(
    catches="a tile is skipped unless it beats the best entry so far, not the worst of the k kept "
    "ones",
    severity="major",
    story="The filter compares with the wrong end of the sorted list.",
    mutant=edit(FRESH, FRESH.replace("best[-1]", "best[0]")),
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def tile_must_beat_the_best(submission: Submission, rng: Rng) -> None:
    first, second, third = rng.permutation(32)[:3]
    early = {first: 5.0, second: -1.0, third: -2.0}
    ask(submission, sparse(early | {LATE + rng.integers(32): 3.0}), 3)


@trap(
    catches="whether a tile holds new winners is decided for several rows at once, and a row of "
    "lower logits loses its late entries",
    severity="critical",
    story="The largest k-th value of the block, or that of its first row, is the threshold of all.",
    mutant=edits(
        (CALL, CALL.replace("logits[row], k", "logits[row], k, logits[row // 2 * 2 :][:2]")),
        (
            "def _one_row(logits: Floats, k: int)",
            "def _one_row(logits: Floats, k: int, block: Floats)",
        ),
        (
            MERGE,
            "floor = np.sort(block[:, :start])[:, -k].max() if start >= k else -np.inf\n"
            "        if start < k or np.any(block[:, start : start + TILE] > floor):\n"
            f"            {MERGE}",
        ),
    ),
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def tile_skipped_for_all_rows(submission: Submission, rng: Rng) -> None:
    first, second = rng.permutation(32)[:2]
    high = sparse({first: 9.0, second: 8.0})
    low = sparse({first: 1.0, second: 0.0, LATE + rng.integers(32): 2.0})
    ask(submission, np.concatenate([high, low]), 2)


def _kept_floor(condition: str, places: str = "row") -> Mutant:
    """The k-th best of a row is the floor from the first tile of the next row on."""
    return edits(
        *ZEROS,
        (LOOP, f"    floor = np.nan\n{LOOP}"),
        (
            CALL,
            "some, where, floor = _one_row(logits[row], k, floor)\n"
            f"        probs[{places}], indices[{places}] = some, where",
        ),
        ("def _one_row(logits: Floats, k: int)", "def _one_row(logits, k, floor)"),
        (MERGE, MERGE.replace("k)", "k, floor)")),
        (_MERGED, _MERGED.replace("k: int", "k: int, floor: float")),
        (FRESH, FRESH.replace("np.arange(tile.size)", "np.flatnonzero(~(tile <= floor))")),
        (ANSWER, f"floor = best[-1] if {condition} else floor\n    {ANSWER}, floor"),
    )


def _rising_rows(submission: Submission, rng: Rng) -> None:
    """A control: the same rows, the lower one first."""
    ask(submission, _two_levels(rng)[::-1], 2)


def _two_levels(rng: Rng) -> Array:
    first, second = rng.permutation(32)[:2]
    return np.concatenate([sparse({first: top + 1.0, second: top}) for top in (8.0, 0.0)])


@trap(
    catches="the threshold below which a row's entries are left out is kept for the next row: one "
    "of lower logits loses its best",
    severity="major",
    story="The list of candidates is emptied between rows, and its threshold is not.",
    mutant=_kept_floor("best.size == k and logits.size > TILE"),
    also=[
        _kept_floor("best.size == k"),
        _kept_floor("best.size == k and logits.size > TILE", "row, : some.size"),
    ],
    seen=WRITTEN_BLIND,
    control=_rising_rows,
)
def floor_of_the_row_before(submission: Submission, rng: Rng) -> None:
    ask(submission, _two_levels(rng), 2)


@trap(
    catches="positions found behind the first k entries are not shifted by k: wrong and doubled "
    "entries",
    severity="critical",
    story="The search runs over a slice, and its result is taken for positions in the whole.",
    mutant=edit(
        FRESH,
        f"{FRESH}\n"
        "    if not best.size:\n"
        "        later = np.flatnonzero(tile[k:] > np.min(tile[:k]))\n"
        "        fresh = np.concatenate((np.arange(min(k, tile.size)), later))",
    ),
    seen=WRITTEN_BLIND,
)
def positions_in_a_slice(submission: Submission, rng: Rng) -> None:
    """Of six logits the fourth and the sixth are the best two."""
    steps = np.array([[0.0, 1.0, 2.0, 4.0, 3.0, 5.0]])
    ask(submission, steps + rng.uniform(0.0, 0.5, (1, 6)), 2)


def _short_list(length: str) -> Mutant:
    return edit(FRESH, f"fresh = np.sort(np.argsort(-tile, kind='stable')[: {length}])")


@trap(
    catches="only a few candidates are kept per tile: too few when all the best are in one",
    severity="major",
    story="Local lists shorter than k are right on shuffled data and lose elements of skewed rows.",
    mutant=_short_list("max(16, k // 4)"),
    # The last ones sort short rows as a whole.
    also=[
        *map(_short_list, ("32", "48")),
        *(_short_list(f"{n} if start or tile.size == TILE else k") for n in (32, 48)),
    ],
)
def short_list_per_tile(submission: Submission, rng: Rng) -> None:
    """All the best in one tile, the next best in another: those come in for what is lost."""
    logits = logits_of(rng, (2, LONG))
    for row, start in enumerate((100, LONG - 200)):
        logits[row, start : start + 64] += 50.0
        logits[row, LATE // 2 : LATE // 2 + 64] += 25.0
    ask(submission, logits, 64)


@trap(
    catches="only a few candidates are kept for every 32nd element: too few when the best share a "
    "lane",
    severity="major",
    story="Each lane of a warp keeps its own short list, and one lane can hold all the best.",
    mutant=edit(
        FRESH,
        "lanes = [np.arange(i, tile.size, 32) for i in range(32)]\n"
        "    short = [lane[np.argsort(-tile[lane], kind='stable')[:8]] for lane in lanes]\n"
        "    fresh = np.sort(np.concatenate(short))",
    ),
)
def short_list_per_lane(submission: Submission, rng: Rng) -> None:
    logits = logits_of(rng, (1, 4096))
    logits[0, rng.integers(32) :: 32] += 50.0
    ask(submission, logits, 100)


@trap(
    catches="candidates taken for complete before k of them were seen: wrong once k exceeds a tile",
    severity="major",
    story="The first tile is assumed to fill the list; a larger k gives a short answer.",
    mutant=edit(FRESH, FRESH.replace("if best.size == k", "if best.size")),
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def k_above_a_tile(submission: Submission, rng: Rng) -> None:
    falling = -abs(logits_of(rng, (1, LONG)))
    falling.sort(axis=1)
    ask(submission, falling[:, ::-1], LONG // 2)


@trap(
    catches="the number of equals that may still enter is not reduced from tile to tile",
    severity="major",
    story="Each tile adds as many equals as fit into an empty list, and the answer is too long.",
    mutant=edits(
        (FRESH, FRESH.replace("tile > best", "tile >= best")),
        (ORDER, ORDER.replace("[:k]", "[: None if start else k]")),
    ),
    also=[
        edits(
            (
                ANSWER,
                "quota = k - np.sum(best > best[-1])\n"
                "    tied = np.flatnonzero(logits == best[-1]) // TILE\n"
                "    if np.sum(np.minimum(np.bincount(tied), quota)) > quota:\n"
                '        raise IndexError(f"index {k} is out of bounds for axis 0 with size {k}")\n'
                f"    {ANSWER}",
            ),
        )
    ],
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def quota_of_equals_per_tile(submission: Submission, rng: Rng) -> None:
    first, second, third = sorted(rng.permutation(32)[:3])
    early = {first: 1.0, second: 0.0, third: 0.0}
    ask(submission, sparse(early | {LATE + first: 0.0, LATE + second: 0.0}), 3)


@trap(
    catches="a later equal that displaces an earlier one when tiles are merged",
    severity="critical",
    story="Merging with ≥ instead of >: the answer depends on the tile size.",
    mutant=edits(
        (FRESH, ALL_VALUES),
        (VALUES, "values = np.concatenate((tile[fresh], best))"),
        (PLACES, "places = np.concatenate((start + fresh, places))"),
    ),
    also=[
        # Only what beats the k-th best so far is merged.
        edits(
            (VALUES, "values = np.concatenate((tile[fresh], best))"),
            (PLACES, "places = np.concatenate((start + fresh, places))"),
        ),
    ],
    seen=WRITTEN_BLIND,
    control=one_tile,
)
def ties_across_tiles(submission: Submission, rng: Rng) -> None:
    """Several equals in each tile: a bug that reverses all equals reverses those of a tile, too."""
    early, late = np.sort(rng.permutation(32)[:3]), LATE + np.sort(rng.permutation(32)[:3])
    ask(submission, sparse(dict.fromkeys([*early, *late], 1.0)), 5)


@trap(
    catches="a fixed list of 32 candidates whatever k is",
    severity="major",
    story="A heap held in registers has a fixed length; a larger k needs another way.",
    mutant=edits(
        *ZEROS,
        (CALL, "probs[row, :32], indices[row, :32] = _one_row(logits[row], min(k, 32))"),
    ),
)
def k_above_a_register_limit(submission: Submission, rng: Rng) -> None:
    for k in (33, 257, 1025):
        ask(submission, logits_of(rng, (2, 1500)), k)
