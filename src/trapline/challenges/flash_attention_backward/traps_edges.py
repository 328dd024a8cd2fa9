"""Bugs at the edges of tiles, of masks kept between calls, and of heads folded into rows."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, edits, insert_after, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_backward.cases import differentiates, draw
from trapline.challenges.flash_attention_backward.situations import (
    BLIND,
    both_passes,
    grouped,
    ordinary,
)
from trapline.challenges.flash_attention_backward.solution_lines import (
    BACKWARD_HEAD,
    BACKWARD_MASK,
    CHECKED,
    FORWARD_CALL,
    FORWARD_HEAD,
    KEY_LOOP,
    RECOMPUTE,
    ROW_LOOP,
    UNBOUNDED,
)
from trapline.challenges.flash_attention_forward.cases import REFUSALS, Shape, attends

_TILE_ROWS = (
    BACKWARD_MASK,
    "    if causal and cols.stop > position + 1:\n"
    "        scores[_hidden(0, rows, cols)] = -np.inf\n    # A row without",
)
_IMPORT = "import numpy as np\n"
_HIDDEN = (
    "    return np.arange(cols.start, cols.stop) > np.arange(position, position + rows)[:, None]\n"
)
_CHECKED_FORWARD = "    _check(q, k, v, tile)\n    (B, H"
_POSITION = "position = top + S - T"
_OFFSET = "start + S - T, causal"
_DELTA = "    delta = (dout * out).sum(axis=-1)\n"
_RETURN = "    return dq, dk, dv\n"
_RETURN_FORWARD = "    return out, lse\n"
_OUT = "    out = np.zeros((B, H, T, D), q.dtype)\n"

#: The mask alone, where all heads of a group make one tile, so that tiles have fewer queries. The
#: first one has a query that sees a key, and keys behind the last query of a tile are not read.
_FEWER_ROWS = "range(max(0, T - S) if causal else 0, T, max(1, tile * G // H))"
_MASK_OF_FOLDED_HEADS = edits(
    (_IMPORT, _IMPORT + "\n_SHIFT = [0]\n"),
    (_OUT, "    _SHIFT[0] = T - H // G\n" + _OUT),
    ("lse = np.zeros((B, H, T), q.dtype)", "lse = np.full((B, H, T), -np.inf, q.dtype)"),
    (FORWARD_HEAD, FORWARD_HEAD.replace("range(0, T, tile)", _FEWER_ROWS)),
    ("slice(start, start + tile)", "slice(start, min(start + max(1, tile * G // H), T))"),
    ("if causal and cols.stop > position + 1:", "if causal:"),
    (ROW_LOOP, ROW_LOOP.replace("range(0, T, tile)", _FEWER_ROWS)),
    ("slice(top, min(top + tile, T))", "slice(top, min(top + max(1, tile * G // H), T))"),
    (
        _HIDDEN,
        "    keys, queries = np.arange(cols.start, cols.stop), position + np.arange(rows)\n"
        "    return (keys - _SHIFT[0] > queries[:, None]) | (keys >= position + rows)\n",
    ),
    (CHECKED, CHECKED + "    lse = flash_attention(q, k, v, causal=causal, tile=tile)[1]\n"),
)

# --- the edges of tiles ---------------------------------------------------------------------------


@trap(
    catches="the last key is ignored where it is alone in its tile",
    severity="critical",
    story="The loop over tiles of keys ends one key early, which shows where the last tile has one "
    "key.",
    mutant=edits(
        (KEY_LOOP, KEY_LOOP.replace("stop", "stop - 1")),
        (BACKWARD_HEAD, BACKWARD_HEAD.replace("range(0, S,", "range(0, S - 1,")),
        RECOMPUTE,
    ),
    seen=BLIND,
    also=(edit(KEY_LOOP, KEY_LOOP.replace("stop", "stop - 1")),),
    control=ordinary,
)
def lone_last_key_ignored(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=5, S=5).draw(rng), tile=4)


@trap(
    catches="the backward pass ignores the last key where it is alone in its tile",
    severity="major",
    story="The loop over tiles of keys ends one key early.",
    mutant=edit(BACKWARD_HEAD, BACKWARD_HEAD.replace("range(0, S,", "range(0, S - 1,")),
    control=ordinary,
)
def lone_last_key_without_gradient(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=5, S=5), rng, False), tile=4)


@trap(
    catches="the last query is ignored where it is alone in its tile",
    severity="major",
    story="The loop over tiles of queries ends one query early.",
    mutant=edits(
        (FORWARD_HEAD, FORWARD_HEAD.replace("range(0, T,", "range(0, T - 1,")),
        (ROW_LOOP, ROW_LOOP.replace("range(0, T,", "range(0, T - 1,")),
    ),
    also=(edit(FORWARD_HEAD, FORWARD_HEAD.replace("range(0, T,", "range(0, T - 1,")),),
    control=ordinary,
)
def lone_last_query_ignored(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=5, S=5).draw(rng), tile=4)


@trap(
    catches="the backward pass ignores the last query where it is alone in its tile",
    severity="major",
    story="The loop over tiles of queries ends one query early.",
    mutant=edit(ROW_LOOP, ROW_LOOP.replace("range(0, T,", "range(0, T - 1,")),
    control=ordinary,
)
def lone_last_query_without_gradient(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=5, S=5), rng, False), tile=4)


@trap(
    catches="queries beyond the number of keys neither get nor give gradients",
    severity="major",
    story="The loop over queries has the number of keys as its end.",
    mutant=edit(ROW_LOOP, ROW_LOOP.replace("range(0, T,", "range(0, min(T, S),")),
    control=ordinary,
)
def as_many_queries_as_keys(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=10, S=3), rng, False), tile=2)


@trap(
    catches="where a tile is only partly full, an earlier row or key is counted twice",
    severity="major",
    story="The last tile is moved back so that it is full, and overlaps the one before it.",
    mutant=edit(
        "            cols = slice(start, min(start + tile, S))\n",
        "            cols = slice(max(0, min(start, S - tile)), min(start + tile, S))\n",
    ),
    also=(
        edit(
            "                rows = slice(top, min(top + tile, T))\n",
            "                rows = slice(max(0, min(top, T - tile)), min(top + tile, T))\n",
        ),
    ),
    control=ordinary,
)
def last_tile_overlaps(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=6, S=6), rng, False), tile=4)


@trap(
    catches="without any key (S = 0) zero is divided by zero",
    severity="minor",
    story="The sum of no weights is 0, and nothing guards the division.",
    mutant=edit(_RETURN_FORWARD, "    if S == 0:\n        out[...] = np.nan\n" + _RETURN_FORWARD),
    seen=BLIND,
    also=(
        edit(
            _RETURN_FORWARD,
            "    if S == 0:\n        out[...] = lse[...] = np.nan\n" + _RETURN_FORWARD,
        ),
    ),
    control=ordinary,
)
def no_keys_divide_by_zero(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=0).draw(rng), tile=4)


@trap(
    catches="without any key (S = 0) lse is 0 instead of −inf",
    severity="minor",
    story="An early return for an empty problem answers zeros for out and lse alike.",
    mutant=edit(_RETURN_FORWARD, "    if S == 0:\n        lse[...] = 0\n" + _RETURN_FORWARD),
    seen=BLIND,
    control=ordinary,
)
def no_keys_lse_zero(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=3, S=0).draw(rng), tile=4)


# --- masks ----------------------------------------------------------------------------------------


def _kept(key: str) -> tuple[tuple[str, str], ...]:
    """The mask of a tile is made once for each value of `key`."""
    made = _HIDDEN.replace("    return ", "    made = ")
    return (
        (_IMPORT, _IMPORT + "\n_MASKS = {}\n"),
        (_HIDDEN, f"{made}    return _MASKS.setdefault({key}, made)\n"),
    )


@trap(
    catches="a mask kept from an earlier call is used for other lengths",
    severity="critical",
    story="Masks are cached by the shape or the place of a tile, without the offset S − T.",
    mutant=edits(*_kept("(rows, cols.stop - cols.start)")),
    seen=BLIND,
    also=(
        edits(*_kept("(rows, cols.start, cols.stop)")),
        edits(*_kept("(rows, cols.stop - cols.start)"), RECOMPUTE),
        edits(*_kept("rows")),
    ),
    control=ordinary,
    keeps_state=True,
)
def mask_kept_between_calls(submission: Submission, rng: np.random.Generator) -> None:
    clean = submission.clean()
    for S in (4, 6, 5):
        attends(clean, *Shape(T=4, S=S).draw(rng), causal=True, tile=4)


def _first_choice(key: str, forward: bool = True, backward: bool = True) -> Mutant:
    """For each value of `key`, all calls of these passes are as causal as the first."""
    chosen = f"    causal = _CAUSAL.setdefault({key}, causal)\n"
    pairs = [(_IMPORT, _IMPORT + "\n_CAUSAL = {}\n")]
    if forward:
        pairs.append((_CHECKED_FORWARD, _CHECKED_FORWARD.replace("    (B", chosen + "    (B")))
    if backward:
        pairs.append((CHECKED, CHECKED + chosen))
    return edits(*pairs)


_SIZES = "(q.shape[2], k.shape[2], tile)"


def causal_again(submission: Submission, rng: np.random.Generator) -> None:
    """Calls of one size, all of them causal."""
    clean = submission.clean()
    for _ in range(2):
        both_passes(clean, rng, 5, 8, causal=True)


@trap(
    catches="what is kept from an earlier call of the same sizes is used although `causal` differs",
    severity="critical",
    story="A list of tiles or a mask is cached under a key without `causal`, and a call answers "
    "with the mask of an earlier one, or without any.",
    mutant=_first_choice(_SIZES),
    also=(
        _first_choice("(q.shape, k.shape)"),
        _first_choice(_SIZES, backward=False),
        _first_choice(_SIZES, forward=False),
    ),
    seen=BLIND,
    control=causal_again,
    keeps_state=True,
)
def kept_without_causal(submission: Submission, rng: np.random.Generator) -> None:
    clean = submission.clean()
    for length, choices in ((5, (False, True)), (6, (True, False))):
        for causal in choices:
            both_passes(clean, rng, length, 8, causal=causal)


@trap(
    catches="the offset of the mask is computed with another size than the number of queries",
    severity="critical",
    story="An axis of the wrong array: S minus the heads of a group, or minus the width.",
    mutant=edits(
        (_OFFSET, "start + S - H // G, causal"),
        (_POSITION, "position = top + S - H // G"),
        RECOMPUTE,
    ),
    seen=BLIND,
    also=(
        edits((_OFFSET, "start + S - H, causal"), (_POSITION, "position = top + S - H"), RECOMPUTE),
        edits((_OFFSET, "start + S - D, causal"), (_POSITION, "position = top + S - D"), RECOMPUTE),
        edit(_OFFSET, "start + S - H // G, causal"),
        # The mask alone: which tiles are read follows the right offset.
        edits(
            (_IMPORT, _IMPORT + "\n_SHIFT = [0]\n"),
            (_OUT, "    _SHIFT[0] = T - H // G\n" + _OUT),
            (_HIDDEN, _HIDDEN.replace(" > np", " - _SHIFT[0] > np")),
            RECOMPUTE,
        ),
        _MASK_OF_FOLDED_HEADS,
    ),
    control=ordinary,
)
def offset_by_another_size(submission: Submission, rng: np.random.Generator) -> None:
    """Two heads where all heads of a group may make one tile, which then has two queries."""
    for heads in (6, 2):
        attends(submission, *Shape(H=heads, G=1, T=8, S=8, D=5).draw(rng), causal=True, tile=4)


@trap(
    catches="the backward mask counts queries from the start of their tile",
    severity="major",
    story="Right in the first tile of queries only.",
    mutant=edits(_TILE_ROWS),
    also=[edits(_TILE_ROWS, UNBOUNDED)],
    control=ordinary,
)
def backward_mask_in_tile_rows(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=8, S=8), rng, True), causal=True, tile=4)


@trap(
    catches="the mask counts keys from the start of their tile instead of the sequence",
    severity="major",
    story="Right in the first tile of keys; every later tile shows keys of the future.",
    mutant=edits(
        (_HIDDEN, _HIDDEN.replace("cols.start, cols.stop", "cols.stop - cols.start")), RECOMPUTE
    ),
    also=(edit(_HIDDEN, _HIDDEN.replace("cols.start, cols.stop", "cols.stop - cols.start")),),
    control=ordinary,
)
def mask_in_tile_columns(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=8, S=8).draw(rng), causal=True, tile=4)


@trap(
    catches="the mask is upside down: a query sees its own and the later keys",
    severity="major",
    story="The comparison is turned round, or the upper triangle taken for the lower.",
    mutant=edits(
        (_HIDDEN, _HIDDEN.replace(" > ", " < ")),
        ("if causal and cols.stop > position + 1:", "if causal:"),
        RECOMPUTE,
    ),
    control=ordinary,
)
def mask_upside_down(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=4, S=4).draw(rng), causal=True, tile=8)


# --- heads ----------------------------------------------------------------------------------------


@trap(
    catches="the forward pass takes the values of another head than the keys",
    severity="critical",
    story="One of two places that find the kv head of a query head is wrong.",
    mutant=edit(FORWARD_CALL, FORWARD_CALL.replace("v[b, g]", "v[b, h // G]")),
    seen=BLIND,
    also=(
        edit(FORWARD_CALL, FORWARD_CALL.replace("v[b, g]", "v[b, h % G]")),
        edit(FORWARD_CALL, FORWARD_CALL.replace("v[b, g]", "v[b, 0]")),
    ),
    control=ordinary,
)
def values_of_another_head(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(H=6, G=3, T=4, S=4).draw(rng))


@trap(
    catches="the forward pass takes the keys of another head than the values",
    severity="major",
    story="One of two places that find the kv head of a query head is wrong.",
    mutant=edit(FORWARD_CALL, FORWARD_CALL.replace("k[b, g]", "k[b, h // G]")),
    also=(
        edit(FORWARD_CALL, FORWARD_CALL.replace("k[b, g]", "k[b, h % G]")),
        edit(FORWARD_CALL, FORWARD_CALL.replace("k[b, g]", "k[b, 0]")),
    ),
    control=ordinary,
)
def keys_of_another_head(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(H=6, G=3, T=4, S=4).draw(rng))


def _mixed(name: str) -> str:
    """Heads and rows of an array exchanged, and read back in the old shape."""
    return f"    {name} = {name}.swapaxes(1, 2).reshape({name}.shape)\n"


@trap(
    catches="rows of dout belong to other heads: it is reshaped after its axes were exchanged",
    severity="critical",
    story="Heads are folded into rows by swapaxes and reshape for one array, by reshape for the "
    "others.",
    mutant=insert_after(_DELTA, _mixed("dout")),
    seen=BLIND,
    also=(insert_before(_DELTA, _mixed("dout")),),
    control=ordinary,
)
def rows_of_dout_mixed(submission: Submission, rng: np.random.Generator) -> None:
    grouped(submission, rng)


@trap(
    catches="rows of dq belong to other heads: it is reshaped without exchanging its axes back",
    severity="major",
    story="(B, T, H, D) read as (B, H, T, D).",
    mutant=insert_before(_RETURN, _mixed("dq")),
    control=ordinary,
)
def rows_of_dq_mixed(submission: Submission, rng: np.random.Generator) -> None:
    grouped(submission, rng)


@trap(
    catches="rows of out belong to other heads: it is reshaped without exchanging its axes back",
    severity="major",
    story="(B, T, H, D) read as (B, H, T, D).",
    mutant=insert_before(_RETURN_FORWARD, _mixed("out")),
    also=(insert_before(_RETURN_FORWARD, _mixed("out") + _mixed("lse")),),
    control=ordinary,
)
def rows_of_out_mixed(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(H=4, G=2, T=5, S=5).draw(rng), tile=3)


@trap(
    catches="delta of a tile multiplies its rows of dout with the first rows of out",
    severity="critical",
    story="One of the two arrays is indexed by the row inside the tile.",
    mutant=edit(
        "delta[b, h, rows, None]",
        "(dout[b, h, rows] * out[b, h, : rows.stop - rows.start]).sum(-1, keepdims=True)",
    ),
    seen=BLIND,
    also=(
        edit(
            "delta[b, h, rows, None]",
            "(dout[b, h, : rows.stop - rows.start] * out[b, h, rows]).sum(-1, keepdims=True)",
        ),
    ),
)
def delta_of_two_tiles(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=8, S=8), rng, False), tile=4)


# --- shapes that do not fit -----------------------------------------------------------------------

_SHAPES = "k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3])"


def _refuses_forward(submission: Submission, *arrays: np.ndarray) -> None:
    expect.raises(REFUSALS, submission.flash_attention, *arrays, tile=4)


@trap(
    catches="keys and values with another batch than the queries are accepted",
    severity="minor",
    story="Only the width is compared, and the surplus is ignored.",
    mutant=edit(_SHAPES, "k.shape != v.shape or q.shape[3] != k.shape[3]"),
    dimension="robustness",
    seen=BLIND,
    also=(
        # One entry is broadcast over the batch of the queries.
        edits(
            (_SHAPES, _SHAPES.replace("q.shape[0], ", "").replace("k.shape[0], ", "")),
            (
                _OUT,
                "    if len(k) not in (1, B):\n"
                "        raise ValueError(k.shape)\n"
                "    k, v = (np.broadcast_to(x, (B, *x.shape[1:])) for x in (k, v))\n" + _OUT,
            ),
        ),
    ),
)
def another_batch_accepted(submission: Submission, rng: np.random.Generator) -> None:
    q, _, _ = Shape(B=2, T=4, S=4).draw(rng)
    for B in (3, 1):
        _, k, v = Shape(B=B, T=4, S=4).draw(rng)
        _refuses_forward(submission, q, k, v)


@trap(
    catches="values of another length than the keys are accepted",
    severity="minor",
    story="Shapes are compared between q and k only.",
    mutant=edit(_SHAPES, _SHAPES.replace("k.shape != v.shape", "k.shape[:2] != v.shape[:2]")),
    dimension="robustness",
)
def longer_values_accepted(submission: Submission, rng: np.random.Generator) -> None:
    q, k, _ = Shape(T=4, S=4).draw(rng)
    _, _, v = Shape(T=4, S=6).draw(rng)
    _refuses_forward(submission, q, k, v)


@trap(
    catches="the backward pass does not check q, k, v and tile, which the forward pass checks",
    severity="minor",
    story="Shapes were checked in the forward pass, and the backward pass trusts them.",
    mutant=edit("    _check(q, k, v, tile)\n" + CHECKED, "    tile = max(tile, 1)\n" + CHECKED),
    dimension="robustness",
)
def backward_shapes_unchecked(submission: Submission, rng: np.random.Generator) -> None:
    dout, q, k, v, out, lse = draw(Shape(T=4, S=4), rng, False)
    wider = np.concatenate([k, k])
    with_batch = dout, q, wider, np.concatenate([v, v]), out, lse
    expect.raises(REFUSALS, submission.flash_attention_backward, *with_batch, tile=4)


@trap(
    catches="a tile of 1 is refused, or answered wrongly",
    severity="major",
    story="The check asks for more than 1 where it means at least 1.",
    mutant=edit("    if tile < 1:\n", "    if tile <= 1:\n"),
)
def tile_of_one_refused(submission: Submission, rng: np.random.Generator) -> None:
    differentiates(submission, draw(Shape(T=3, S=3), rng, False), tile=1)
