"""Further bugs of the causal mask: its corner, its axes, its tiles, and what hidden keys do."""

import numpy as np

from trapline.arena.judge.traps import edit, edits, insert_after, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_forward.cases import Shape, agrees, attends
from trapline.challenges.flash_attention_forward.situations import WRITTEN, with_logits
from trapline.challenges.flash_attention_forward.solution_lines import (
    ATTENDED,
    CALL,
    COLUMNS,
    KEY_LOOP,
    MASK,
    QUERY_LOOP,
    SUM,
    UNANSWERED,
    WEIGHTED,
)

_POSITION = "start + S - T, causal"
_WHEN = "if causal and cols.stop > position + 1:"
_HIDDEN = "np.arange(cols.start, cols.stop) > np.arange(position, position + rows)[:, None]"
_STOP = "stop = min(len(k), position + rows) if causal else len(k)"
_WHOLE_COLUMNS = "cols = slice(start, min(start + tile, len(k)))"
_COLS, _ROWS = "np.arange(cols.start, cols.stop)", "np.arange(position, position + rows)[:, None]"


def causal_square(submission: Submission, rng: np.random.Generator, tile: int = 4) -> None:
    attends(submission, *Shape(T=8, S=8).draw(rng), causal=True, tile=tile)


def full_square(submission: Submission, rng: np.random.Generator) -> None:
    """The same shape without a mask."""
    attends(submission, *Shape(T=8, S=8).draw(rng), tile=4)


def full_keys_and_a_part(submission: Submission, rng: np.random.Generator) -> None:
    """Every query sees all keys, and they are no whole number of tiles."""
    attends(submission, *Shape(T=8, S=9).draw(rng), tile=4)


def one_query_a_tile(submission: Submission, rng: np.random.Generator) -> None:
    """Every tile is hidden as a whole or visible as a whole."""
    attends(submission, *Shape(T=8, S=10).draw(rng), causal=True, tile=1)


def ungrouped_heads(submission: Submission, rng: np.random.Generator) -> None:
    """Causal attention of two heads, each with its own keys."""
    attends(submission, *Shape(H=2, G=2, T=5, S=5).draw(rng), causal=True, tile=3)


# --- whether there is a mask ----------------------------------------------------------------------


@trap(
    catches="attention is causal even where causal=False",
    severity="major",
    story="The mask is applied without asking.",
    mutant=insert_after("    _check(q, k, v, tile)\n", "    causal = True\n"),
    control=causal_square,
)
def always_causal(submission: Submission, rng: np.random.Generator) -> None:
    full_square(submission, rng)


@trap(
    catches="causal=True hides nothing where there are more queries than keys, or another number",
    severity="major",
    story="A mask that is made for self-attention is left out where the lengths differ.",
    mutant=edit(_POSITION, "start + S - T, causal and T <= S"),
    also=[edit(_POSITION, f"start + S - T, causal and T {sign} S") for sign in ("==", ">=")],
    control=causal_square,
)
def causal_only_if_square(submission: Submission, rng: np.random.Generator) -> None:
    for T, S in ((8, 5), (5, 8)):
        attends(submission, *Shape(T=T, S=S).draw(rng), causal=True, tile=4)


@trap(
    catches="tiles on the diagonal are left unmasked: whether a tile needs the mask is decided by "
    "its first key or by the last of its queries",
    severity="critical",
    story="A tile needs no mask if its last key is visible to its first query.",
    mutant=edit(_WHEN, "if causal and cols.start > position:"),
    seen=WRITTEN,
    control=full_square,
)
def diagonal_tile_unmasked(submission: Submission, rng: np.random.Generator) -> None:
    causal_square(submission, rng)


@trap(
    catches="causal attention hides keys only by skipping whole tiles: nothing is masked in the "
    "tiles that the diagonal crosses",
    severity="major",
    story="A query sees all keys that any query of its tile sees; with a tile of one it is right.",
    mutant=edit(_WHEN, "if False:"),
    also=[edits((_WHEN, "if False:"), (COLUMNS, _WHOLE_COLUMNS))],
    control=one_query_a_tile,
)
def only_whole_tiles_hidden(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=8, S=10).draw(rng), causal=True, tile=4)


@trap(
    catches="whether a tile needs the mask is decided by its last query, so that tiles on the "
    "diagonal are left unmasked",
    severity="critical",
    story="A tile needs no mask if its last key is visible to its first query.",
    mutant=edits(
        (COLUMNS, _WHOLE_COLUMNS),
        (_WHEN, "if causal and cols.stop > position + rows:"),
    ),
    seen=WRITTEN,
    control=full_square,
)
def mask_decided_by_last_query(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=8, S=10).draw(rng), causal=True, tile=4)


@trap(
    catches="the causal mask is applied to one key tile for each tile of queries, where the "
    "diagonal crosses two",
    severity="critical",
    story="Where S − T is a multiple of the tile, as in square problems, the diagonal stays in one "
    "tile: the last one.",
    mutant=edit(_WHEN, "if causal and cols.stop == stop:"),
    also=[edit(_WHEN, "if causal and cols.start <= position < cols.stop:")],
    seen=WRITTEN,
    control=causal_square,
)
def mask_in_one_key_tile(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=8, S=14).draw(rng), causal=True, tile=4)


_MASKED = "_hidden(position, rows, cols)"


@trap(
    catches="the mask has the size of a whole tile, and does not fit where the last tile of keys "
    "or queries is smaller",
    severity="major",
    story="The bounds of a tile are start and start + tile; a slice of an array ends at its end, "
    "a range of positions does not.",
    mutant=edit(COLUMNS, "cols = slice(start, start + tile)"),
    also=[edit(MASK, MASK.replace(_MASKED, "_hidden(position, tile, cols)"))],
    control=causal_square,
)
def mask_of_a_whole_tile(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=6, S=6).draw(rng), causal=True, tile=4)


_ONE_PAST = (_WHEN, _WHEN.replace("+ 1", "+ 2"))


@trap(
    catches="a tile that reaches exactly one key past what its first query sees is left unmasked",
    severity="critical",
    story="Whether a tile needs the mask is decided by comparing the index of its last key with a "
    "count of visible keys. In tiles of three or more, a square problem does not show it.",
    mutant=edits(_ONE_PAST),
    also=[edits(_ONE_PAST, (COLUMNS, _WHOLE_COLUMNS))],
    seen=WRITTEN,
    control=causal_square,
)
def one_key_past_unmasked(submission: Submission, rng: np.random.Generator) -> None:
    """Two keys in a tile of which the first query sees the first."""
    for length, tile in ((2, 64), (6, 2)):
        inputs = Shape(T=length, S=length).draw(rng)
        attends(submission, *inputs, causal=True, tile=tile)


@trap(
    catches="the mask is inverted: what should be hidden is seen, and the reverse",
    severity="major",
    story="A mask of visible keys is used as one of hidden keys.",
    mutant=edits((_WHEN, "if causal:"), (_HIDDEN, f"{_COLS} <= {_ROWS}")),
    control=full_square,
)
def mask_inverted(submission: Submission, rng: np.random.Generator) -> None:
    causal_square(submission, rng, tile=8)


@trap(
    catches="the mask has its axes exchanged: a query sees only keys from its own on",
    severity="major",
    story="tril for triu, or rows for columns.",
    mutant=edits((_WHEN, "if causal:"), (_HIDDEN, f"{_COLS} < {_ROWS}")),
    control=full_square,
)
def mask_transposed(submission: Submission, rng: np.random.Generator) -> None:
    causal_square(submission, rng, tile=8)


# --- what hidden keys still do --------------------------------------------------------------------


@trap(
    catches="hidden scores are set to 0 instead of −inf",
    severity="major",
    story="Multiplying scores by a mask of zeros and ones hides nothing: exp(0) is 1.",
    mutant=edit(MASK, MASK.replace("-np.inf", "0")),
    control=full_square,
)
def hidden_scores_zero(submission: Submission, rng: np.random.Generator) -> None:
    causal_square(submission, rng, tile=8)


@trap(
    catches="hidden keys get weight 0 in the output, but stay in the sum",
    severity="major",
    story="The weights are masked after they were summed.",
    mutant=edits(
        (MASK, "hidden = _hidden(position, rows, cols)"),
        (
            SUM,
            SUM
            + "\n        if causal and cols.stop > position + 1:\n            weights[hidden] = 0",
        ),
    ),
    control=full_square,
)
def hidden_keys_in_the_sum(submission: Submission, rng: np.random.Generator) -> None:
    causal_square(submission, rng, tile=8)


@trap(
    catches="hidden keys are left out of the sum, but keep their weight in the output",
    severity="major",
    story="A second sweep over the keys forms the output and forgets the mask.",
    mutant=edits(
        (MASK, f"shown = scores.copy()\n            {MASK}"),
        (
            WEIGHTED,
            "if causal and cols.stop > position + 1:\n"
            "            weights = np.exp(shown - origin[:, None])\n"
            f"        {WEIGHTED}",
        ),
    ),
    seen=WRITTEN,
    control=full_square,
)
def hidden_keys_in_the_output(submission: Submission, rng: np.random.Generator) -> None:
    causal_square(submission, rng, tile=8)


_MAXIMUM_BEFORE_MASK = (
    ("scores = q @ k[cols].T", "scores = q @ k[cols].T\n        largest = scores.max(axis=1)"),
    ("np.maximum(peak, scores.max(axis=1))", "np.maximum(peak, largest)"),
)


@trap(
    catches="the maximum is taken before the mask, and a large hidden score makes a row underflow",
    severity="major",
    story="Right while hidden scores are not much larger than visible ones.",
    mutant=edits(*_MAXIMUM_BEFORE_MASK),
    also=[
        # Rows whose weights all underflow are divided by their sum of 0.
        edits(*_MAXIMUM_BEFORE_MASK, ("seen = total > 0", "seen = peak > -np.inf"))
    ],
    seen=WRITTEN,
)
def maximum_of_hidden_keys(submission: Submission, rng: np.random.Generator) -> None:
    inputs = with_logits(rng, np.array([0.0, 0.5, -0.5, 2000.0]), 4, np.float64)
    attends(submission, *inputs, causal=True, tile=4)


# --- where the diagonal lies ----------------------------------------------------------------------


@trap(
    catches="the causal offset S − T, or where a tile of queries starts by it, is not allowed to "
    "be negative: with more queries than keys the mask is aligned at the first key",
    severity="major",
    story="Queries that should see no key see some.",
    mutant=edit(_POSITION, "start + max(0, S - T), causal"),
    also=[edit(_POSITION, "max(0, start + S - T), causal")],
    seen=WRITTEN,
    control=causal_square,
)
def offset_never_negative(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=8, S=4).draw(rng), causal=True, tile=4)


def more_queries_in_one_tile(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=10, S=4).draw(rng), causal=True, tile=16)


@trap(
    catches="a tile of queries that sees no key ends the loop, and later queries get nothing",
    severity="major",
    story="A `break` that belongs to the loop over keys stands in the loop over queries, where the "
    "tiles that see keys are still to come.",
    mutant=edits(
        UNANSWERED,
        (
            "            rows = slice(start, start + tile)\n",
            "            if causal and start + tile + S - T <= 0:\n"
            "                out[b, h], lse[b, h] = 0, -np.inf\n"
            "                break\n"
            "            rows = slice(start, start + tile)\n",
        ),
    ),
    seen=WRITTEN,
    control=more_queries_in_one_tile,
)
def blind_tile_ends_the_loop(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=10, S=4).draw(rng), causal=True, tile=3)


@trap(
    catches="the causal offset is T − S instead of S − T",
    severity="major",
    story="Square problems do not show it.",
    mutant=edit(_POSITION, "start + T - S, causal"),
    control=causal_square,
)
def offset_reversed(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=6).draw(rng), causal=True, tile=8)


@trap(
    catches="the causal offset is |S − T|",
    severity="major",
    story="More queries than keys is the case that shows it.",
    mutant=edit(_POSITION, "start + abs(S - T), causal"),
    control=causal_square,
)
def offset_absolute(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=8, S=6).draw(rng), causal=True, tile=8)


@trap(
    catches="the first hidden key of a row is a negative index, and the slice counts from the end",
    severity="major",
    story="With more queries than keys, a row that sees nothing hides only the last few keys.",
    mutant=edit(
        MASK,
        "for row in range(rows):\n"
        "                first = position + row + 1 - start\n"
        "                if first < cols.stop - start:\n"
        "                    scores[row, first:] = -np.inf",
    ),
    seen=WRITTEN,
    control=causal_square,
)
def negative_index_hides_too_little(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=8, S=4).draw(rng), causal=True, tile=8)


@trap(
    catches="with more queries than keys the first query that sees a key is taken for blind",
    severity="major",
    story="The first query that sees a key is number T − S, not T − S + 1.",
    mutant=insert_before(
        "    return out, lse\n",
        "    if causal and 0 < S < T:\n        out[:, :, T - S], lse[:, :, T - S] = 0, -np.inf\n",
    ),
    also=[
        insert_before(
            "    return out, lse\n",
            "    if causal and 0 < S <= T:\n"
            "        out[:, :, T - S], lse[:, :, T - S] = 0, -np.inf\n",
        )
    ],
    seen=WRITTEN,
    control=full_square,
)
def first_seeing_query_blind(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=6, S=4).draw(rng), causal=True, tile=8)


# --- the mask and tiles ---------------------------------------------------------------------------


_LOCAL_ROWS = "np.arange(rows)[:, None]"
#: Key tiles end at the last visible key, and the triangle lies in the newest of them.
_NEWEST = (
    (_WHEN, "if causal:"),
    (
        MASK,
        "newest = max(0, stop - tile)\n"
        f"            scores[{_COLS} - newest > {_LOCAL_ROWS}] = -np.inf",
    ),
)
#: Query tiles begin at the first query that sees a key.
_SKIP_BLIND = (
    (QUERY_LOOP, QUERY_LOOP.replace("range(0,", "range(max(0, T - S) if causal else 0,")),
    UNANSWERED,
)


@trap(
    catches="the triangle of a tile on the diagonal is built as if the tile were square: its "
    "offset is lost where there are fewer queries than keys in it, or T ≠ S",
    severity="major",
    story="np.tri(rows, columns) without columns − rows; whole tiles and T = S hide it.",
    mutant=edits(*_NEWEST, *_SKIP_BLIND),
    also=[
        edits(*_NEWEST),
        edits((_HIDDEN, f"np.arange(cols.stop - cols.start) > {_LOCAL_ROWS}")),
    ],
    seen=WRITTEN,
    control=causal_square,
)
def triangle_of_a_square_tile(submission: Submission, rng: np.random.Generator) -> None:
    """The last tile of queries is half as long as the tile of keys; the diagonal is off by one."""
    attends(submission, *Shape(T=6, S=7).draw(rng), causal=True, tile=4)


@trap(
    catches="the mask counts the keys of every tile from zero",
    severity="critical",
    story="Later key tiles look earlier than they are, and queries see the future.",
    mutant=edit(_HIDDEN, f"np.arange(cols.stop - cols.start) > {_ROWS}"),
    seen=WRITTEN,
    control=full_square,
)
def key_tile_offset_forgotten(submission: Submission, rng: np.random.Generator) -> None:
    causal_square(submission, rng)


@trap(
    catches="every tile gets the same triangular mask, wherever it lies",
    severity="major",
    story="triu of one tile is right on the diagonal and hides half of every tile below it.",
    mutant=edits(
        (_WHEN, "if causal:"),
        (_HIDDEN, "np.arange(cols.stop - cols.start) > np.arange(rows)[:, None]"),
    ),
    control=full_square,
)
def same_mask_in_every_tile(submission: Submission, rng: np.random.Generator) -> None:
    causal_square(submission, rng)


@trap(
    catches="a key tile that begins at the last visible key of a query tile is skipped",
    severity="major",
    story="The test for tiles that are hidden as a whole is off by one (< for ≤).",
    mutant=edit(KEY_LOOP, "for start in range(0, stop - bool(causal), tile):"),
    seen=WRITTEN,
)
def tile_of_the_last_key_skipped(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=5).draw(rng), causal=True, tile=4)


@trap(
    catches="key tiles are skipped by what the first query of a tile sees, not the last",
    severity="major",
    story="Later rows of the tile lose keys; where the tiles of queries and keys are aligned there "
    "is nothing to lose.",
    mutant=edit(
        KEY_LOOP, "for start in range(0, min(stop, position + 1) if causal else stop, tile):"
    ),
    also=[edit("position + rows) if causal", "max(0, position + 1)) if causal")],
    seen=WRITTEN,
)
def tiles_skipped_by_first_query(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=6).draw(rng), causal=True, tile=4)


@trap(
    catches="in causal attention the keys of a tile of queries end at a whole tile: visible keys "
    "behind it are not read",
    severity="major",
    story="Whole tiles are counted by a division that rounds down.",
    mutant=edit(_STOP, _STOP.replace("position + rows)", "(position + rows) // tile * tile)")),
    also=[edit(_STOP, _STOP.replace("len(k), ", "len(k) // tile * tile or len(k), "))],
    control=full_keys_and_a_part,
)
def visible_keys_end_at_a_whole_tile(submission: Submission, rng: np.random.Generator) -> None:
    """The tiles of queries end at keys 5 and 9."""
    attends(submission, *Shape(T=8, S=9).draw(rng), causal=True, tile=4)


@trap(
    catches="a query skips a key tile of which it sees only a part",
    severity="critical",
    story="The test for tiles that are hidden as a whole asks for the last key of the tile.",
    mutant=edits(
        (COLUMNS, _WHOLE_COLUMNS),
        (_WHEN, "if causal:"),
        (_HIDDEN, f"np.broadcast_to(cols.stop - 1 > {_ROWS}, (rows, cols.stop - cols.start))"),
    ),
    also=[
        edits((COLUMNS, f"{_WHOLE_COLUMNS}\n        if causal and {reader}:\n            continue"))
        for reader in ("cols.stop > position + 1", "cols.stop > position + rows")
    ],
    seen=WRITTEN,
    control=full_square,
)
def partly_visible_tile_skipped(submission: Submission, rng: np.random.Generator) -> None:
    """Six queries, eight keys, tiles of four: no query tile ends with a key tile."""
    attends(submission, *Shape(T=6, S=8).draw(rng), causal=True, tile=4)


@trap(
    catches="key tiles are skipped as if the mask were aligned at the first key",
    severity="major",
    story="The mask has the offset S − T, the bound of the loop has not: cached keys are lost.",
    mutant=edit("k[b, g], v[b, g]", "*(x[b, g, : start + tile if causal else S] for x in (k, v))"),
    seen=WRITTEN,
    control=causal_square,
)
def tiles_skipped_without_offset(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=12).draw(rng), causal=True, tile=4)


@trap(
    catches="tiles are skipped with the offset T − S instead of S − T",
    severity="major",
    story="The mask has the right sign, the bound of the loop the wrong one: with more keys than "
    "queries, visible keys are lost.",
    mutant=edit(
        "k[b, g], v[b, g]",
        "*(x[b, g, : max(0, start + tile + T - S) if causal else S] for x in (k, v))",
    ),
    control=causal_square,
    seen=WRITTEN,
)
def tiles_skipped_with_reversed_offset(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=12).draw(rng), causal=True, tile=4)


# --- heads of a group folded into one list of rows ------------------------------------------------


@trap(
    catches="the query heads of a group are folded into one list of rows, and the causal limits "
    "are repeated for each row instead of for each head",
    severity="critical",
    story="np.repeat for np.tile; with H = G there is nothing to fold.",
    mutant=edits(
        (QUERY_LOOP, "for start in range(T):"),
        ("rows = slice(start, start + tile)", "rows = slice(start, start + 1)"),
        (_POSITION, "(h % (H // G) * T + start) // (H // G) + S - T, causal"),
    ),
    seen=WRITTEN,
    control=ungrouped_heads,
)
def limits_repeated_by_row(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(H=2, G=1, T=5, S=5).draw(rng), causal=True, tile=5)


@trap(
    catches="the query heads of a group are folded into one list of rows, and positions count on "
    "from head to head",
    severity="major",
    story="The second head of a group sees everything.",
    mutant=edit(_POSITION, "h % (H // G) * T + start + S - T, causal"),
    control=ungrouped_heads,
)
def positions_run_over_heads(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(H=2, G=1, T=5, S=5).draw(rng), causal=True, tile=5)


@trap(
    catches="the query heads of a group are folded into one list of rows, and a tile that crosses "
    "two heads reads only the keys that its last row sees",
    severity="major",
    story="The last row of such a tile is an early query of the next head.",
    mutant=edits(
        (QUERY_LOOP, "for start in range(T):"),
        ("rows = slice(start, start + tile)", "rows = slice(start, start + 1)"),
        (
            ATTENDED,
            "place = h % (H // G) * T + start\n"
            "            last = min(place // tile * tile + tile, H // G * T) - 1\n"
            "            reach = max(0, min(start, last % T) + 1 + S - T) if causal else S\n"
            "            " + ATTENDED,
        ),
        (CALL, "q[b, h, rows], k[b, g, :reach], v[b, g, :reach], 0, False, tile"),
    ),
    seen=WRITTEN,
    control=ungrouped_heads,
)
def reach_of_the_last_row(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(H=2, G=1, T=5, S=5).draw(rng), causal=True, tile=3)


# --- query tiles before all keys ------------------------------------------------------------------


@trap(
    catches="a tile of queries that sees no key at all raises",
    severity="major",
    story="Merging the parts of a query tile starts with its first part, and there is none.",
    mutant=insert_before(
        "    for start in range(0, stop, tile):\n",
        "    if causal and stop <= 0 < len(k):\n"
        '        raise TypeError("reduce() of empty iterable with no initial value")\n',
    ),
    seen=WRITTEN,
    control=causal_square,
)
def tile_without_keys_raises(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=8, S=4).draw(rng), causal=True, tile=4)


def full_when_asked(submission: Submission, rng: np.random.Generator) -> None:
    """The same, and `causal` is given."""
    attends(submission, *Shape(T=6, S=6).draw(rng), causal=False, tile=4)


@trap(
    catches="without the argument `causal` the attention is causal",
    severity="major",
    story="The default of the model at hand; an encoder then sees half of its text.",
    mutant=edit("causal: bool = False", "causal: bool = True"),
    control=full_when_asked,
)
def causal_by_default(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(T=6, S=6).draw(rng)
    agrees(submission.flash_attention(q, k, v), q, k, v, causal=False)
