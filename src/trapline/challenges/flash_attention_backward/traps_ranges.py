"""Bugs of which keys a tile of queries reads and which of them it masks."""

import numpy as np

from trapline.arena.judge.traps import edit, edits, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_backward.cases import differentiates, draw
from trapline.challenges.flash_attention_backward.situations import BLIND, ordinary
from trapline.challenges.flash_attention_backward.solution_lines import (
    FORWARD_MASK,
    KEY_LOOP,
    RECOMPUTE,
    SKIP_BLIND,
    UNBOUNDED,
    mask,
)
from trapline.challenges.flash_attention_forward.cases import Shape, attends

# Parts of the gold solution that several mutants edit.
_TEST = "if causal and cols.stop > position + 1:"
_SKIP = "position + rows.stop - top <= start"
_HIDE = "        scores[_hidden(position, rows, cols)] = -np.inf\n"
#: Compares a tile's first key with its first query.
_BY_STARTS = "if causal and cols.start >= position:"
_BACKWARD_BY_STARTS = mask(f"    {_BY_STARTS}\n{_HIDE}")
_FIRST_STOP = ("min(len(k), position + rows) if causal", "min(len(k), position + 1) if causal")
_FIRST_TILES = (
    KEY_LOOP,
    KEY_LOOP.replace("stop, tile", "min(stop, position + 1) if causal else stop, tile"),
)
_BACKWARD_FIRST = mask(
    "    if causal:\n        scores[:, np.arange(cols.start, cols.stop) > position] = -np.inf\n"
)
_BACKWARD_FIRST_TILES = (_SKIP, "position < start")


def _with_a_past(submission: Submission, rng: np.random.Generator) -> None:
    """Four queries on six keys, in tiles of four: a tile ends where no query tile does."""
    attends(submission, *Shape(T=4, S=6).draw(rng), causal=True, tile=4)


@trap(
    catches="a tile that the diagonal crosses is not masked, because only its first key is tested",
    severity="critical",
    story="Whether every query of a tile sees every key is a matter of the tile's last key.",
    mutant=edit(_TEST, _BY_STARTS),
    also=[
        edits((_TEST, _BY_STARTS), *SKIP_BLIND),
        edits((_TEST, _BY_STARTS), RECOMPUTE),
        edits((_TEST, _BY_STARTS), _BACKWARD_BY_STARTS),
        edits((_TEST, _BY_STARTS), _BACKWARD_BY_STARTS, UNBOUNDED),
    ],
    seen=BLIND,
    control=ordinary,
)
def tile_judged_by_its_first_key(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=6).draw(rng), causal=True, tile=8)


@trap(
    catches="the backward pass leaves tiles unmasked of which only the first key is tested",
    severity="major",
    story="Whether every query of a tile sees every key is a matter of the tile's last key.",
    mutant=edits(_BACKWARD_BY_STARTS),
    also=[edits(_BACKWARD_BY_STARTS, UNBOUNDED)],
    control=ordinary,
)
def backward_tile_judged_by_its_first_key(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=6), rng, True), causal=True, tile=8)


@trap(
    catches="a tile of queries reads only the keys that its first query sees",
    severity="critical",
    story="The range of keys ends at the tile's first query instead of its last.",
    mutant=edits(_FIRST_STOP, _BACKWARD_FIRST),
    also=[
        edits(_FIRST_STOP, _BACKWARD_FIRST, *SKIP_BLIND),
        edits(_FIRST_STOP, RECOMPUTE),
        edits(_FIRST_STOP),
        edits(_FIRST_STOP, *SKIP_BLIND),
        edits(_FIRST_TILES, _BACKWARD_FIRST_TILES),
        edits(_FIRST_TILES),
    ],
    seen=BLIND,
    control=ordinary,
)
def keys_end_at_the_first_query(submission: Submission, rng: np.random.Generator) -> None:
    _with_a_past(submission, rng)


@trap(
    catches="the backward pass skips keys that the first query of a tile does not see",
    severity="major",
    story="The later queries of the tile see them.",
    mutant=edits(_BACKWARD_FIRST),
    also=[edits(_BACKWARD_FIRST, *SKIP_BLIND), edits(_BACKWARD_FIRST_TILES)],
    control=ordinary,
)
def backward_keys_end_at_the_first_query(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=4, S=6), rng, True), causal=True, tile=4)


_DK = "                dk[b, g, cols] += dscores.T"
#: Of these rows, those that see the last key of the tile.
_SEES_ALL = (
    "                if causal:\n"
    "                    whole = position + np.arange(rows.stop - top) >= cols.stop - 1\n"
    "                    weights, dscores = weights * whole[:, None], dscores * whole[:, None]\n"
)
_DQ = "                dq[b, h, rows] += dscores @"


@trap(
    catches="a query that sees only a part of a tile of keys adds nothing to the dk and dv of that "
    "tile",
    severity="critical",
    story="For each tile of keys the loop over queries begins at the first query that sees its "
    "last key, not its first; tiles of one key are right.",
    mutant=insert_before(_DK, _SEES_ALL),
    also=[insert_before(_DQ, _SEES_ALL)],
    seen=BLIND,
    control=ordinary,
)
def partly_visible_tile_without_gradient(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=6, S=8), rng, True), causal=True, tile=4)


_LAST_KEY_SKIP = (_SKIP, "position + rows.stop - top < cols.stop")


@trap(
    catches="the backward pass skips a tile of keys for all queries of a tile whose last query "
    "sees only a part of it",
    severity="major",
    story="The test for tiles that are hidden as a whole asks for the last key of the tile; in "
    "square problems the last query of a tile on the diagonal sees it.",
    mutant=edits(_LAST_KEY_SKIP),
    also=[edits(_LAST_KEY_SKIP, *SKIP_BLIND)],
    control=ordinary,
)
def backward_partly_visible_tile_skipped(submission: Submission, rng: np.random.Generator) -> None:
    """No tile of queries ends with a tile of keys."""
    differentiates(submission, draw(Shape(T=6, S=8), rng, True), causal=True, tile=4)


# --- the mask of the forward pass alone -----------------------------------------------------------


def _causal(submission: Submission, rng: np.random.Generator) -> None:
    """Eight positions in tiles of four."""
    attends(submission, *Shape(T=8, S=8).draw(rng), causal=True, tile=4)


@trap(
    catches="tiles on the diagonal are not masked in the forward pass",
    severity="major",
    story="The backward pass has a mask of its own, which is right.",
    mutant=edit(_TEST, "if False:"),
    also=[edit(_TEST, "if causal and cols.start > position:")],
    control=ordinary,
)
def forward_diagonal_unmasked(submission: Submission, rng: np.random.Generator) -> None:
    _causal(submission, rng)


@trap(
    catches="the forward mask hides a query's own key",
    severity="major",
    story=">= where > is meant, in one of two masks.",
    mutant=edits(
        (_TEST, "if causal:"),
        (
            FORWARD_MASK.split("\n")[1],
            "            scores[_hidden(position - 1, rows, cols)] = -np.inf",
        ),
    ),
    control=ordinary,
)
def forward_own_key_hidden(submission: Submission, rng: np.random.Generator) -> None:
    _with_a_past(submission, rng)


@trap(
    catches="the forward mask shows one key of the future",
    severity="major",
    story="A triangle one diagonal too high, in one of two masks.",
    mutant=edit(FORWARD_MASK, FORWARD_MASK.replace("(position,", "(position + 1,")),
    also=[
        edits(
            (FORWARD_MASK, FORWARD_MASK.replace("(position,", "(position + 1,")),
            (
                "min(len(k), position + rows) if causal",
                "min(len(k), position + rows + 1) if causal",
            ),
        )
    ],
    control=ordinary,
)
def forward_next_key_seen(submission: Submission, rng: np.random.Generator) -> None:
    _causal(submission, rng)
