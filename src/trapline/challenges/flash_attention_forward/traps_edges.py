"""Bugs at the edges of tiles, of masks kept between calls, of heads and of running means."""

import numpy as np

from trapline.arena.judge.traps import edit, edits, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_forward.cases import Shape, attends
from trapline.challenges.flash_attention_forward.situations import WRITTEN
from trapline.challenges.flash_attention_forward.solution_lines import (
    CALL,
    KEY_LOOP,
    MASK,
    QUERY_LOOP,
    RETURNED,
    SUM,
    UNANSWERED,
    WEIGHTED,
)

_IMPORT = "import numpy as np\n"
_CHECKED = "    _check(q, k, v, tile)\n"
_WHEN = "if causal and cols.stop > position + 1:"
_HIDDEN = "return np.arange(cols.start, cols.stop) > np.arange(position, position + rows)[:, None]"
_STOP = "stop = min(len(k), position + rows) if causal else len(k)"
_RETURN = "    return out, lse\n"


@trap(
    catches="the last key is ignored where it is alone in its tile",
    severity="major",
    story="The loop over tiles of keys ends one key early, which shows where the last tile has one "
    "key.",
    mutant=edit(KEY_LOOP, KEY_LOOP.replace("stop", "stop - 1")),
)
def lone_last_key_ignored(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=5, S=5).draw(rng), tile=4)


@trap(
    catches="the last query is ignored where it is alone in its tile",
    severity="major",
    story="The loop over tiles of queries ends one query early.",
    mutant=edits((QUERY_LOOP, QUERY_LOOP.replace("T,", "T - 1,")), UNANSWERED),
    also=(edit(QUERY_LOOP, QUERY_LOOP.replace("T,", "T - 1,")),),
)
def lone_last_query_ignored(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=5, S=5).draw(rng), tile=4)


def _kept(key: str) -> tuple[tuple[str, str], ...]:
    """The mask of a tile is made once for each value of `key`."""
    made = _HIDDEN.replace("return ", "made = ")
    return (
        (_IMPORT, _IMPORT + "\n_MASKS = {}\n"),
        (_HIDDEN, f"{made}\n    return _MASKS.setdefault({key}, made)"),
    )


#: One mask for all tiles that lie as far behind their queries, without S − T. It is made in every
#: call, causal or not, and hides nothing where it is first made without `causal`.
_KEPT_BY_DISTANCE = edits(
    (_IMPORT, _IMPORT + "\n_MASKS = {}\n"),
    (CALL, CALL + ", start"),
    ("causal: bool, tile: int\n", "causal: bool, tile: int, first: int\n"),
    (_STOP, "stop = len(k)"),
    (KEY_LOOP, "for start in range(0, min(stop, position + rows) if causal else stop, tile):"),
    (
        f"        {_WHEN}\n            {MASK}",
        "        size, shift = min(tile, max(stop, stop - position + first)), start - first\n"
        "        horizon = position - first if causal else stop\n"
        "        seen = np.arange(horizon, horizon + size)[:, None]\n"
        "        made = np.arange(shift, shift + size) > seen\n"
        "        hidden = _MASKS.setdefault((shift, size), made)\n"
        "        if shift + size - 1 > horizon:\n"
        "            scores[hidden[:rows, : scores.shape[1]]] = -np.inf",
    ),
)


@trap(
    catches="a mask kept from an earlier call is used for other lengths",
    severity="critical",
    story="Masks are cached by the shape or the place of a tile, without the offset S − T.",
    mutant=edits(*_kept("(rows, cols.stop - cols.start)")),
    seen=WRITTEN,
    also=(
        edits(*_kept("(rows, cols.start, cols.stop)")),
        edits(*_kept("rows")),
        _KEPT_BY_DISTANCE,
    ),
    keeps_state=True,
)
def mask_kept_between_calls(submission: Submission, rng: np.random.Generator) -> None:
    clean = submission.clean()
    for S in (4, 6, 5):
        attends(clean, *Shape(T=4, S=S).draw(rng), causal=True, tile=4)


def _first_choice(key: str) -> tuple[tuple[str, str], ...]:
    """For each value of `key`, all calls are as causal as the first."""
    return (
        (_IMPORT, _IMPORT + "\n_CAUSAL = {}\n"),
        (_CHECKED, f"{_CHECKED}    causal = _CAUSAL.setdefault({key}, causal)\n"),
    )


def causal_again(submission: Submission, rng: np.random.Generator) -> None:
    """Calls of one size, all of them causal."""
    clean = submission.clean()
    for _ in range(2):
        attends(clean, *Shape(T=5, S=5).draw(rng), causal=True, tile=8)


@trap(
    catches="what is kept from an earlier call of the same sizes is used although `causal` differs",
    severity="critical",
    story="A list of tiles or a mask is cached under a key without `causal`, and a call answers "
    "with the mask of an earlier one, or without any.",
    mutant=edits(*_first_choice("(q.shape[2], k.shape[2], tile)")),
    also=(
        edits(*_first_choice("(q.shape, k.shape)")),
        # The mask alone is kept, by the place of its tile.
        edits(
            (_IMPORT, _IMPORT + "\n_CAUSAL = {}\n"),
            (
                _WHEN,
                _WHEN.replace(
                    "causal", "_CAUSAL.setdefault((position, rows, cols.start, cols.stop), causal)"
                ),
            ),
        ),
    ),
    seen=WRITTEN,
    control=causal_again,
    keeps_state=True,
)
def kept_without_causal(submission: Submission, rng: np.random.Generator) -> None:
    clean = submission.clean()
    for length, choices in ((5, (False, True)), (6, (True, False))):
        for causal in choices:
            attends(clean, *Shape(T=length, S=length).draw(rng), causal=causal, tile=8)


@trap(
    catches="the offset of the mask is computed with another size than the number of queries",
    severity="major",
    story="An axis of the wrong array: S minus the heads of a group, or minus the width.",
    mutant=edit(CALL, CALL.replace("S - T", "S - H // G")),
    also=(
        edit(CALL, CALL.replace("S - T", "S - H")),
        edit(CALL, CALL.replace("S - T", "S - D")),
        edit(CALL, CALL.replace("S - T", "S - tile")),
    ),
)
def offset_by_another_size(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(H=6, G=1, T=8, S=8, D=5).draw(rng), causal=True, tile=4)


@trap(
    catches="a query that lies before all keys sees the first key",
    severity="critical",
    story="The number of visible keys is clipped at 1 instead of 0.",
    mutant=edits(
        (_STOP, "stop = min(len(k), max(1, position + rows)) if causal else len(k)"),
        (
            _HIDDEN,
            _HIDDEN.replace(
                "np.arange(position, position + rows)",
                "np.maximum(np.arange(position, position + rows), 0)",
            ),
        ),
    ),
    seen=WRITTEN,
)
def first_key_always_seen(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=6, S=4).draw(rng), causal=True, tile=8)


@trap(
    catches="a running mean is rescaled as if it were a sum, by the change of the maximum alone",
    severity="critical",
    story="A mean that is divided by its sum in every tile has to be rescaled by the old sum over "
    "the new one, too.",
    mutant=edits(
        (WEIGHTED, WEIGHTED + " / total[:, None]"),
        (RETURNED, RETURNED.replace("weighted / total[:, None]", "weighted")),
    ),
    seen=WRITTEN,
)
def mean_rescaled_as_a_sum(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=8, S=8).draw(rng), tile=4)


@trap(
    catches="the running sums are kept in float32, also for float64 inputs",
    severity="major",
    story="An accumulator that is allocated in a fixed dtype costs half of the digits.",
    mutant=edit(
        WEIGHTED,
        WEIGHTED.replace("= weighted", "= (weighted") + ").astype(np.float32)",
    ),
    also=(edit(SUM, SUM.replace("= total", "= (total") + ").astype(np.float32)"),),
    seen=WRITTEN,
)
def sums_in_single(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=8, S=8).draw(rng), tile=4)


@trap(
    catches="values are taken from another key/value head than keys",
    severity="major",
    story="One of two places that find the kv head of a query head is wrong.",
    mutant=edit(CALL, CALL.replace("v[b, g]", "v[b, h // G]")),
    also=(edit(CALL, CALL.replace("v[b, g]", "v[b, h % G]")),),
    seen=WRITTEN,
)
def values_of_another_head(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(H=6, G=3, T=4, S=4).draw(rng))


@trap(
    catches="keys are taken from another key/value head than values",
    severity="major",
    story="One of two places that find the kv head of a query head is wrong.",
    mutant=edit(CALL, CALL.replace("k[b, g]", "k[b, h // G]")),
    also=(edit(CALL, CALL.replace("k[b, g]", "k[b, h % G]")),),
)
def keys_of_another_head(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(H=6, G=3, T=4, S=4).draw(rng))


def _mixed(name: str) -> str:
    """Heads and rows of an array exchanged, and read back in the old shape."""
    return f"    {name} = {name}.swapaxes(1, 2).reshape({name}.shape)\n"


@trap(
    catches="rows of out belong to other heads: it is reshaped without exchanging its axes back",
    severity="major",
    story="(B, T, H, D) read as (B, H, T, D).",
    mutant=insert_before(_RETURN, _mixed("out")),
    also=(
        insert_before(_RETURN, _mixed("out") + _mixed("lse")),
        insert_before(_RETURN, _mixed("lse")),
    ),
)
def rows_of_out_mixed(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(H=4, G=2, T=5, S=5).draw(rng), tile=3)


@trap(
    catches="queries are reshaped to fold heads into rows, and rows belong to other heads",
    severity="major",
    story="q is read as (B, G, rows, D) after its axes were exchanged.",
    mutant=insert_before("    for b, h in np.ndindex(B, H):\n", _mixed("q")),
)
def rows_of_q_mixed(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(H=4, G=2, T=5, S=5).draw(rng), tile=3)
