"""Bugs of merging, of tiles and their bounds."""

import numpy as np

from trapline.arena.judge.traps import edit, edits, insert_after, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_forward.cases import Shape, attends
from trapline.challenges.flash_attention_forward.situations import WRITTEN, with_logits
from trapline.challenges.flash_attention_forward.solution_lines import (
    COLUMNS,
    KEY_LOOP,
    LSE,
    RETURNED,
    SUM,
    UNANSWERED,
    WEIGHTED,
)

_WEIGHTS = "weights = np.exp(scores - origin[:, None])"
_NORMALISED = "weighted / total[:, None]"
_GUARDED = "total = np.where(seen, total, 1)"
_SMALL = ("1e-6", "1e-8", "1e-9", "1e-10", "1e-12")


def two_tiles(submission: Submission, rng: np.random.Generator) -> None:
    """Eight queries and keys in tiles of four, with scores that rise from tile to tile."""
    inputs = with_logits(rng, np.repeat([-0.5, 0.5], 4), 8, np.float64)
    attends(submission, *inputs, tile=4)


def one_tile(submission: Submission, rng: np.random.Generator) -> None:
    """The same numbers in one tile."""
    inputs = with_logits(rng, np.repeat([-0.5, 0.5], 4), 8, np.float64)
    attends(submission, *inputs, tile=8)


# --- merging --------------------------------------------------------------------------------------


@trap(
    catches="what was summed so far is merged by its maximum alone: its sum of exponentials is "
    "forgotten",
    severity="critical",
    story="A partial result is merged as if it were one key; with one tile there is nothing to "
    "merge.",
    mutant=edits(
        (SUM, "total = correction + weights.sum(axis=1)"),
        (
            WEIGHTED,
            "weighted = weighted * correction[:, None] + weights @ v[cols]\n"
            "        weighted = weighted / np.where(total > 0, total, 1)[:, None]",
        ),
        (RETURNED, f"return weighted, np.where(seen, {LSE}, -np.inf)"),
    ),
    seen=WRITTEN,
    control=one_tile,
)
def merge_forgets_the_sum(submission: Submission, rng: np.random.Generator) -> None:
    two_tiles(submission, rng)


@trap(
    catches="the normalised results of two tiles are averaged by their maxima alone, without sums",
    severity="critical",
    story="A partial result is a mean: its weight is its whole sum of exponentials.",
    mutant=edits(
        (
            WEIGHTED,
            "own = np.exp(scores.max(axis=1) - origin)\n"
            "        mass = weights.sum(axis=1)\n"
            "        mean = weights @ v[cols] / np.where(mass > 0, mass, 1)[:, None]\n"
            "        both = np.where(correction + own > 0, correction + own, 1)[:, None]\n"
            "        weighted = weighted * correction[:, None] + mean * own[:, None]\n"
            "        weighted = weighted / both",
        ),
        (RETURNED, f"return weighted, np.where(seen, {LSE}, -np.inf)"),
    ),
    seen=WRITTEN,
    control=one_tile,
)
def merged_by_maxima(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=8).draw(rng), tile=4)


@trap(
    catches="the weights of a new tile refer to its own maximum and are added without a correction",
    severity="major",
    story="The old part is corrected to the new maximum, the new part is not.",
    mutant=edit(
        _WEIGHTS,
        "own = scores.max(axis=1)\n"
        "        weights = np.exp(scores - np.where(own == -np.inf, 0, own)[:, None])",
    ),
    control=one_tile,
)
def new_tile_not_rescaled(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *with_logits(rng, np.repeat([0.5, -0.5], 4), 8, np.float64), tile=4)


@trap(
    catches="the sum of a new tile is added without its factor exp(its maximum − the common one), "
    "while its weighted values have it",
    severity="major",
    story="As if a new tile always held the greatest score so far.",
    mutant=edit(
        SUM,
        "own = scores.max(axis=1)\n"
        "        own = np.exp(scores - np.where(own == -np.inf, 0, own)[:, None]).sum(axis=1)\n"
        "        total = total * correction + own",
    ),
    seen=WRITTEN,
    control=one_tile,
)
def new_sum_not_rescaled(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *with_logits(rng, np.repeat([0.5, -0.5], 4), 8, np.float64), tile=4)


@trap(
    catches="the output is divided by the running sum in every tile, and never multiplied back",
    severity="major",
    story="Right in the last tile and wrong for what came before it; one tile does not show it.",
    mutant=edits(
        (WEIGHTED, WEIGHTED + "\n        weighted /= np.where(total > 0, total, 1)[:, None]"),
        (RETURNED, f"return weighted, np.where(seen, {LSE}, -np.inf)"),
    ),
    control=one_tile,
)
def normalised_in_every_tile(submission: Submission, rng: np.random.Generator) -> None:
    two_tiles(submission, rng)


@trap(
    catches="the output is never divided by the sum of the weights",
    severity="major",
    story="The accumulator is returned as it is.",
    mutant=edit(_NORMALISED, "weighted"),
)
def output_not_normalised(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=4).draw(rng), tile=4)


@trap(
    catches="a small constant is added to the sum of the weights",
    severity="minor",
    story="The constant guards against 0 / 0; the sum of a row that sees a key is at least 1, and "
    "in float64 the constant shows.",
    mutant=edit(_NORMALISED, "weighted / (total[:, None] + 1e-6)"),
    also=[
        *(
            edit(_NORMALISED, f"weighted / (total[:, None] + {size})")
            for size in ("1e-5", "1e-8", "1e-9", "1e-10", "1e-12")
        ),
        *(edit(LSE, f"peak + np.log(total + {size})") for size in _SMALL),
        *(edit(_GUARDED, f"total = np.where(seen, total, 1) + {size}") for size in _SMALL),
    ],
    seen=WRITTEN,
)
def constant_in_the_denominator(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(T=4, S=4).draw(rng)
    attends(submission, q, k, v + 2.0, tile=4)


# --- bounds of tiles ------------------------------------------------------------------------------


@trap(
    catches="values behind the last whole tile are missing in the output, though their weights are "
    "in the sum",
    severity="critical",
    story="A second sweep over the keys has another bound than the first: lse is right, out is too "
    "small.",
    mutant=edit("weights @ v[cols]", "weights @ v[cols] * (cols.stop - start == tile)"),
    seen=WRITTEN,
    control=two_tiles,
)
def last_values_dropped(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=6).draw(rng), tile=4)


@trap(
    catches="the last key of every whole tile is not read",
    severity="major",
    story="An end that is one too small: start + tile − 1.",
    mutant=edit(COLUMNS, "cols = slice(start, min(start + max(tile - 1, 1), stop))"),
)
def last_key_of_tiles_dropped(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=8, S=8).draw(rng), tile=4)


@trap(
    catches="a tile reads one key too many: the first key of the next tile counts twice",
    severity="major",
    story="An end that is one too large; the last tile is cut at the last key and hides it.",
    mutant=edit(COLUMNS, "cols = slice(start, min(start + tile + 1, stop))"),
    control=one_tile,
)
def tiles_overlap_by_one(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=8, S=8).draw(rng), tile=4)


@trap(
    catches="the last tile is moved back to be whole, and the keys that it shares count twice",
    severity="major",
    story="Moving the last tile back is right for rows that are written twice, not for keys that "
    "are summed.",
    mutant=edit(COLUMNS, "cols = slice(max(0, min(start, stop - tile)), min(start + tile, stop))"),
    seen=WRITTEN,
    control=two_tiles,
)
def last_tile_moved_back(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=6).draw(rng), tile=4)


@trap(
    catches="the first tile of keys is skipped",
    severity="major",
    story="The first tile initialises the state and the loop starts at the second, but the state "
    "is not set.",
    mutant=edit(
        KEY_LOOP, "for start in range(min(tile, stop - 1) if stop > 1 else 0, stop, tile):"
    ),
)
def first_key_tile_skipped(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=8, S=8).draw(rng), tile=4)


@trap(
    catches="the first query of every tile but the first is never answered",
    severity="critical",
    story="The next tile starts one too late: its first query keeps out 0 and lse −inf.",
    mutant=edits(
        UNANSWERED,
        ("rows = slice(start, start + tile)", "rows = slice(start + (start > 0), start + tile)"),
        ("start + S - T, causal", "rows.start + S - T, causal"),
    ),
    seen=WRITTEN,
    control=one_tile,
)
def query_between_tiles_skipped(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=8, S=8).draw(rng), tile=4)


@trap(
    catches="the last query of every whole tile is never answered",
    severity="major",
    story="An end that is one too small on the axis of queries.",
    mutant=edits(
        UNANSWERED, ("rows = slice(start, start + tile)", "rows = slice(start, start + tile - 1)")
    ),
)
def last_query_of_tiles_skipped(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=8, S=8).draw(rng), tile=4)


@trap(
    catches="the number of query tiles is counted from the keys",
    severity="major",
    story="Self-attention has T = S; with more queries than keys the last ones stay unanswered.",
    mutant=edits(UNANSWERED, ("for start in range(0, T, tile)", "for start in range(0, S, tile)")),
    control=two_tiles,
)
def as_many_queries_as_keys(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=8, S=4).draw(rng), tile=4)


@trap(
    catches="a tile that does not divide the lengths is refused",
    severity="major",
    story="The prompt says that tile need not divide T or S.",
    mutant=insert_after(
        "    _check(q, k, v, tile)\n",
        "    if q.shape[2] % tile or k.shape[2] % tile:\n"
        '        raise ValueError("tile must divide the lengths")\n',
    ),
    control=two_tiles,
)
def tile_must_divide(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=6, S=6).draw(rng), tile=4)
