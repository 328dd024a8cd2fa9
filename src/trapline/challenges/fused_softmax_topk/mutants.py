"""The named bugs of fused_softmax_topk as edits of the gold solution."""

from trapline.arena.certify.mutate import Mutant, edit

_TILE_DEF = "TILE = 8192"
_CHECKED = "    _check(logits, k)\n"
_PROBS = "probs = np.empty((rows, k), logits.dtype)"
_INDICES = "indices = np.empty((rows, k), np.int64)"
_LOOP = "    for row in range(rows):\n"
_CALL = "probs[row], indices[row] = _one_row(logits[row], k)"
_RETURN = "    return probs, indices\n"
_TILES = "for start in range(0, logits.size, TILE):"
_TILE = "tile = logits[start : start + TILE].astype(np.float64)"
_MERGE = "best, places = _merge(best, places, tile, start, k)"
_ANSWER = "return _weights(best, largest) / total, places"
_ALL_MASKED = "    if largest == -np.inf:\n"
_TILE_MAX = "tile_max = np.max(tile)"
_NOT_FINITE = "if not tile_max < np.inf:"
_NEW = "new = max(largest, tile_max)"
_NOTHING_YET = "if new == -np.inf:"
_SUM = "return new, total * _weights(largest, new) + np.sum(_weights(tile, new))"
_EXP = "return np.exp(values - largest)"
_FRESH = "fresh = np.flatnonzero(tile > best[-1]) if best.size == k else np.arange(tile.size)"
_VALUES = "values = np.concatenate((best, tile[fresh]))"
_PLACES = "places = np.concatenate((places, start + fresh))"
_KEPT = "kept = values >= cut"
_ORDER = 'order = np.argsort(-values, kind="stable")[:k]'
_ALL_VALUES = "fresh = np.arange(tile.size)"
_ZEROS = (
    (_PROBS, "probs = np.zeros((rows, k), logits.dtype)"),
    (_INDICES, "indices = np.zeros((rows, k), np.int64)"),
)

_SOFTMAX = [
    edit("exp-overflow", (_NEW, "new = 0.0")),
    edit(
        "normalised-over-k",
        (_ANSWER, "weights = _weights(best, largest)\n    return weights / weights.sum(), places"),
    ),
    edit(
        "rescale-direction",
        (
            "total * _weights(largest, new)",
            "(total * np.exp(new - largest) if total else 0.0)",
        ),
    ),
    edit("rescale-missing", ("total * _weights(largest, new)", "total")),
    edit("masked-first-tile", (_NOTHING_YET, "if False:")),
    edit(
        "masked-later-tile",
        (_NEW, "new = tile_max"),
        (_NOTHING_YET, "if largest == tile_max == -np.inf:"),
    ),
    edit(
        "lse-absorbed",
        (_ANSWER, "return np.exp(best - (largest + np.log(total))), places"),
    ),
    edit(
        "extreme-range",
        (_EXP, "return np.exp(values * 2.0 - largest * 2.0) ** 0.5"),
    ),
    edit("float16-sum", (_SUM, _SUM.replace("total *", "np.float16(total *") + ")")),
    edit("float16-differences", (_EXP, "return np.exp(np.float64(np.float16(values - largest)))")),
    edit("float64-in-float32", (_EXP, "return np.exp(np.float32(values - largest))")),
    edit("dtype-widened", (_PROBS, "probs = np.empty((rows, k))")),
]

_RANKING = [
    edit(
        "k-above-a-register-limit",
        *_ZEROS,
        (_CALL, "probs[row, :32], indices[row, :32] = _one_row(logits[row], min(k, 32))"),
    ),
    edit(
        "short-list-per-tile",
        (_FRESH, "fresh = np.sort(np.argsort(-tile, kind='stable')[: max(16, k // 4)])"),
    ),
    edit(
        "short-list-per-lane",
        (
            _FRESH,
            "lanes = [np.arange(i, tile.size, 32) for i in range(32)]\n"
            "    short = [lane[np.argsort(-tile[lane], kind='stable')[:8]] for lane in lanes]\n"
            "    fresh = np.sort(np.concatenate(short))",
        ),
    ),
    edit(
        "rows-of-a-block-merged",
        (_LOOP, "    kept = np.empty(0), np.empty(0, np.int64)\n    for row in range(rows):\n"),
        (_CALL, "probs[row], indices[row], kept = _one_row(logits[row], k, kept)"),
        ("def _one_row(logits: Floats, k: int)", "def _one_row(logits, k, kept)"),
        ("best, places = np.empty(0), np.empty(0, np.int64)", "best, places = kept"),
        (_ANSWER, "return _weights(best, largest) / total, places, (best, places)"),
    ),
    edit(
        "maximum-of-another-row",
        (_CALL, "probs[row], indices[row] = _one_row(logits[row], k, logits)"),
        ("def _one_row(logits: Floats, k: int)", "def _one_row(logits, k, block)"),
        (
            _MERGE,
            _MERGE
            + "\n    total, largest = total * _weights(largest, block.max()), float(block.max())",
        ),
    ),
    edit(
        "ties-to-the-higher-index", (_ORDER, "order = np.argsort(values, kind='stable')[::-1][:k]")
    ),
    edit(
        "ties-across-tiles",
        (_FRESH, _ALL_VALUES),
        (_VALUES, "values = np.concatenate((tile[fresh], best))"),
        (_PLACES, "places = np.concatenate((start + fresh, places))"),
    ),
    edit(
        "ties-at-the-cut",
        (_KEPT, "kept = np.sort(np.argpartition(values, values.size - k)[-k:])"),
        (_FRESH, _ALL_VALUES),
    ),
    edit(
        "all-equal",
        (_KEPT, "kept = np.sort(np.unique(values, return_index=True)[1])"),
        *_ZEROS,
        (
            _CALL,
            "some, where = _one_row(logits[row], k)\n"
            "        probs[row, : some.size], indices[row, : some.size] = some, where",
        ),
    ),
    edit(
        "signed-zeros",
        (_ORDER, "order = np.lexsort((np.signbit(values), -values))[:k]"),
    ),
    edit(
        "ranked-by-probability",
        (_ORDER, "order = np.argsort(-np.exp(values - np.max(values)), kind='stable')[:k]"),
        ("    if values.size > k:\n", "    if False:\n"),
        (_FRESH, _ALL_VALUES),
    ),
    edit(
        "keys-of-fewer-bits", (_ORDER, "order = np.argsort(-np.float16(values), kind='stable')[:k]")
    ),
    edit(
        "minus-infinity-left-out",
        (_PROBS, "probs = np.zeros((rows, k), logits.dtype)"),
        (_INDICES, "indices = np.full((rows, k), -1)"),
        (
            _CALL,
            "some, where = _one_row(logits[row], k)\n"
            "        finite = int(np.isfinite(logits[row][where]).sum())\n"
            "        probs[row, :finite], indices[row, :finite] = some[:finite], where[:finite]",
        ),
    ),
    edit(
        "unsorted",
        (
            _ANSWER,
            "order = np.argsort(places)\n"
            "    return _weights(best[order], largest) / total, places[order]",
        ),
    ),
    edit("late-last-place", (_FRESH, _FRESH.replace("best[-1]", "best[-2:][0]"))),
    edit("index-within-the-tile", (_PLACES, "places = np.concatenate((places, fresh))")),
    edit(
        "tail-dropped",
        (_TILES, "for start in range(0, max(logits.size - logits.size % 32, 1), 32):"),
        (_TILE, "tile = logits[start : start + 32].astype(np.float64)"),
    ),
    edit(
        "tail-padded-with-zeros",
        (_TILE, _TILE + "\n        tile = np.pad(tile, (0, TILE - tile.size))"),
    ),
    edit("last-row-dropped", (_LOOP, "    for row in range(rows - rows % 2):\n"), *_ZEROS),
    edit("short-indices", (_CALL, _CALL + "\n        indices[row] %= 65536")),
    edit("index-dtype", (_INDICES, "indices = np.empty((rows, k), np.int32)")),
    edit("k-equals-v", ("if not 1 <= k <= logits.shape[1]:", "if not 1 <= k < logits.shape[1]:")),
]

_REFUSED = [
    edit("nan-passes", (_TILE_MAX, "tile_max = np.fmax.reduce(tile)")),
    edit("plus-infinity-passes", (_NOT_FINITE, "if np.isnan(tile_max):")),
    edit("all-masked-row-passes", (_ALL_MASKED, "    if False:\n")),
    edit(
        "k-clamped",
        ("if not 1 <= k <= logits.shape[1]:", "if k is None:"),
        (_CHECKED, _CHECKED + "    k = min(max(k, 1), logits.shape[1])\n"),
    ),
    edit(
        "integers-accepted",
        (
            "if logits.dtype not in (np.float16, np.float32, np.float64):",
            "if logits.dtype == object:",
        ),
    ),
    edit(
        "rank-ignored",
        ("if logits.ndim != 2:", "if logits.ndim == 0:"),
        (_CHECKED, _CHECKED + "    logits = logits.reshape(-1, logits.shape[-1])\n"),
    ),
]

_REST = [
    edit(
        "strided-logits",
        (_CHECKED, _CHECKED + "    logits = logits.ravel(order='K').reshape(logits.shape)\n"),
    ),
    edit(
        "logits-modified",
        (
            _TILE,
            "tile = logits[start : start + TILE]\n"
            "        tile -= tile.max() if np.isfinite(tile.max()) else 0",
        ),
    ),
    edit(
        "answer-remembered",
        (_TILE_DEF, _TILE_DEF + "\nSEEN = {}"),
        (
            _CHECKED,
            _CHECKED + "    key = logits.shape, k, logits[:1, :1].tobytes()\n"
            "    if key in SEEN:\n"
            "        return SEEN[key]\n",
        ),
        (_RETURN, "    SEEN[key] = probs, indices\n    return probs, indices\n"),
    ),
    edit("no-rows-crash", (_RETURN, "    return np.stack(list(probs)), np.stack(list(indices))\n")),
    edit(
        "matrix-materialised",
        (_CHECKED, _CHECKED + "    logits = logits - np.zeros((), logits.dtype)\n"),
    ),
    edit("tile-grows-with-v", (_TILE_DEF, "TILE = 1 << 30")),
    edit(
        "half-matrix-widened",
        (_PROBS, _PROBS + "\n    logits = logits.astype(np.promote_types(logits.dtype, 'f4'))"),
    ),
    edit("k-above-a-tile", (_FRESH, _FRESH.replace("if best.size == k", "if best.size"))),
    edit(
        "nan-among-masked",
        (_TILE_MAX, "tile_max = np.fmax.reduce(tile)"),
        (_NOT_FINITE, "if tile_max == np.inf:"),
        (_ALL_MASKED, "    if np.isnan(total) or largest == -np.inf:\n"),
    ),
]

MUTANTS: list[Mutant] = [*_SOFTMAX, *_RANKING, *_REFUSED, *_REST]

#: Mechanical mutants that no check can tell from the original, and why.
EQUIVALENT: dict[str, str] = {
    "solution.py:<module>/constant/1": "the size of the tile is open and never changes the answer",
    "solution.py:_merge/compare/2": "equals of the k-th enter the pool and lose the tie there",
    "solution.py:_merge/compare/3": "a pool of exactly k keeps all of its values",
    "solution.py:_merge/never/1": "without the filter the pool is larger, its k best are the same",
    "solution.py:_merge/never/2": "without the cut the sort sees more values, with the same k best",
    "solution.py:_one_row/constant/3": "a first sum of 1 is multiplied by exp(−inf) = 0",
    "solution.py:_weights/drop-keyword/1": "silences a warning only",
}
