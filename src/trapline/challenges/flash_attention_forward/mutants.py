"""The bugs that the traps are made for, as edits of the gold solution."""

from trapline.arena.certify.mutate import Mutant, edit

_CHECKED = "    _check(q, k, v, tile)\n"
_ORIGIN = "np.where(new_peak == -np.inf, 0, new_peak)"
_LSE = "peak + np.log(total)"
_MASK = "scores[_hidden(position, rows, cols)] = -np.inf"
_KEY_LOOP = "for start in range(0, stop, tile):"
_STOP = "stop = min(len(k), position + rows) if causal else len(k)"

MUTANTS: list[Mutant] = [
    # the online softmax
    edit(
        "rescale-direction",
        ("np.exp(peak - origin)", "np.exp(np.where(peak == -np.inf, 0, origin - peak))"),
    ),
    edit(
        "output-not-rescaled",
        ("weighted = weighted * correction[:, None] + weights", "weighted = weighted + weights"),
    ),
    edit("sum-not-rescaled", ("total = total * correction + weights", "total = total + weights")),
    edit(
        "running-maximum-forgotten", ("np.maximum(peak, scores.max(axis=1))", "scores.max(axis=1)")
    ),
    edit("maximum-shared-by-rows", ("scores.max(axis=1)", "scores.max()")),
    edit("fully-masked-tile-nan", (_ORIGIN, "new_peak")),
    edit(
        "exponent-without-maximum",
        (_ORIGIN, "np.zeros_like(new_peak)"),
        ("np.exp(peak - origin)", "np.ones_like(peak)"),
        (_LSE, "np.log(total)"),
    ),
    edit(
        "maximum-starts-at-zero",
        ("peak = np.full(rows, -np.inf, q.dtype)", "peak = np.zeros(rows, q.dtype)"),
    ),
    edit(
        "tiles-averaged",
        (
            "total = total * correction + weights.sum(axis=1)",
            "weights /= weights.sum(axis=1, keepdims=True)\n        total = total + 1",
        ),
        ("weighted = weighted * correction[:, None] + weights", "weighted = weighted + weights"),
    ),
    # tiles and edges
    edit("last-key-tile-dropped", (_KEY_LOOP, "for start in range(0, stop - stop % tile, tile):")),
    edit(
        "last-query-tile-dropped",
        ("for start in range(0, T, tile):", "for start in range(0, T - T % tile, tile):"),
    ),
    edit(
        "tile-larger-than-sequence-refused",
        ("if tile < 1:", "if tile < 1 or tile > k.shape[2] > 0:"),
    ),
    edit("tile-must-be-power-of-two", ("if tile < 1:", "if tile < 1 or tile & (tile - 1):")),
    edit(
        "padded-keys-counted",
        (
            "scores = q @ k[cols].T",
            "scores = np.zeros((rows, tile), q.dtype)\n"
            "        scores[:, : cols.stop - cols.start] = q @ k[cols].T",
        ),
        ("weights @ v[cols]", "weights[:, : cols.stop - cols.start] @ v[cols]"),
    ),
    # causal
    edit(
        "causal-row-zero",
        ("np.arange(cols.start, cols.stop) > np", "np.arange(cols.start, cols.stop) >= np"),
    ),
    edit(
        "causal-sees-next-key",
        ("np.arange(position, position + rows)", "np.arange(position + 1, position + 1 + rows)"),
    ),
    edit("causal-aligned-top-left", ("start + S - T, causal", "start, causal")),
    edit(
        "causal-mask-by-triu",
        (
            "np.arange(cols.start, cols.stop) > np.arange(position, position + rows)[:, None]",
            "~np.triu(np.ones((rows, cols.stop - cols.start), dtype=bool), k=1 - rows)",
        ),
    ),
    edit(
        "break-instead-of-continue",
        (_STOP, "stop = len(k)"),
        (
            _KEY_LOOP,
            "for start in reversed(range(0, stop, tile)):\n"
            "        if causal and start >= position + rows:\n"
            "            break",
        ),
    ),
    edit("diagonal-key-skipped", (_STOP, _STOP.replace("rows)", "rows - 1)"))),
    edit("mask-only-on-aligned-tile", ("cols.stop > position + 1", "cols.start == position")),
    edit("query-tile-offset-forgotten", ("start + S - T, causal", "S - T, causal")),
    # masks, empty rows
    edit("finite-mask-averages-empty-rows", (_MASK, _MASK.replace("-np.inf", "-1e9"))),
    edit("finite-mask-above-real-logits", (_MASK, _MASK.replace("-np.inf", "-1e4"))),
    edit(
        "empty-row-lse-plus-infinity",
        ("peak + np.log(total), -np.inf)", "peak + np.log(total), np.inf)"),
    ),
    edit("empty-row-divides-by-zero", ("total = np.where(seen, total, 1)", "total = total * 1")),
    # the log-sum-exp
    edit("lse-in-base-two", (_LSE, "peak / np.log(2) + np.log2(total)")),
    edit("lse-without-maximum", (_LSE, "np.log(total)")),
    edit("lse-of-unscaled-scores", (_LSE, "peak * D**0.5 + np.log(total)")),
    edit(
        "lse-with-last-tile-maximum",
        (
            "        peak = new_peak\n",
            "        peak = new_peak\n        last = scores.max(axis=1)\n",
        ),
        (_LSE, "last + np.log(total)"),
    ),
    edit("lse-in-double", ("np.zeros((B, H, T), q.dtype)", "np.zeros((B, H, T))")),
    # scale
    edit("scale-missing", ("q = q * D**-0.5", "q = q * 1")),
    edit("scale-without-root", ("q = q * D**-0.5", "q = q * D**-1.0")),
    edit(
        "scale-of-padded-width", ("q = q * D**-0.5", "q = q * (1 << (D - 1).bit_length()) ** -0.5")
    ),
    # heads, batches, lengths
    edit("groups-by-tiling", ("h // (H // G)", "h % G")),
    edit("groups-by-wrong-divisor", ("h // (H // G)", "h // G")),
    edit("values-of-first-head", ("v[b, g], start", "v[b, 0], start")),
    edit("batch-shares-keys", ("k[b, g], v[b, g]", "k[0, g], v[0, g]")),
    edit("as-many-keys-as-queries", ("k[b, g], v[b, g]", "k[b, g, :T], v[b, g, :T]")),
    # nothing there
    edit("no-keys", (_KEY_LOOP, "for start in range(0, max(stop, 1), tile):")),
    edit("no-queries", (_CHECKED, _CHECKED + "    tile = min(tile, q.shape[2])\n")),
    edit(
        "no-batch",
        (
            "out = np.zeros((B, H, T, D), q.dtype)",
            "out = np.stack([np.zeros((H, T, D), q.dtype) for _ in range(B)])",
        ),
    ),
    # arrays as they come
    edit(
        "strides-ignored",
        (
            _CHECKED,
            _CHECKED + "    packed = np.empty(q.shape, q.dtype).strides\n"
            "    q = np.lib.stride_tricks.as_strided(q, strides=packed)\n",
        ),
    ),
    edit("inputs-modified", ("q = q * D**-0.5", "q *= D**-0.5")),
    edit("double-through-single", ("q = q * D**-0.5", "q = (q * D**-0.5).astype(np.float32)")),
    edit("output-in-double", ("np.zeros((B, H, T, D), q.dtype)", "np.zeros((B, H, T, D))")),
    edit(
        "answers-remembered-by-shape",
        ("import numpy as np\n", "import numpy as np\n\n_ANSWERS = {}\n"),
        (
            _CHECKED,
            _CHECKED + "    key = q.shape, k.shape, causal, tile\n"
            "    if key in _ANSWERS:\n"
            "        return _ANSWERS[key]\n",
        ),
        ("    return out, lse\n", "    _ANSWERS[key] = out, lse\n    return out, lse\n"),
    ),
    edit(
        "score-matrix-in-memory",
        (_CHECKED, _CHECKED + "    tile = max(q.shape[2], k.shape[2], 1)\n"),
    ),
    edit(
        "mask-for-all-pairs",
        (
            "    rows, D = q.shape\n    q = q * ",
            "    rows, D = q.shape\n"
            "    pairs = np.arange(len(k)) > np.arange(len(k))[:, None]\n"
            "    q = q * ",
        ),
        (
            "scores[_hidden(position, rows, cols)] = -np.inf",
            "scores[_hidden(position, rows, cols) | pairs[-1, cols]] = -np.inf",
        ),
    ),
    edit(
        "single-through-half",
        (
            "scores = q @ k[cols].T",
            "scores = (q @ k[cols].T.astype(np.float16)).astype(q.dtype)",
        ),
    ),
    edit("axes-of-one-squeezed", ("scores = q @ k[cols].T", "scores = np.squeeze(q @ k[cols].T)")),
    # what must be refused
    edit("uneven-groups-accepted", (" or q.shape[1] % k.shape[1]", "")),
    edit("negative-tile-accepted", ("if tile < 1:", "if tile == 0:")),
    edit("integers-accepted", ('x.dtype.kind == "f"', 'x.dtype.kind in "fiu"')),
    edit("complex-accepted", ('x.dtype.kind == "f"', 'x.dtype.kind in "fc"')),
    edit("longer-values-accepted", ("k.shape != v.shape or ", "")),
    edit(
        "larger-batch-of-keys-accepted",
        ("(q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3])", "q.shape[3] != k.shape[3]"),
    ),
    edit("one-column-of-values-accepted", ("k.shape != v.shape", "k.shape[:3] != v.shape[:3]")),
    edit("integers-in-one-array-accepted", ("for x in (q, k, v))", "for x in (q, k))")),
    edit(
        "empty-problem-unchecked",
        (
            _CHECKED,
            "    if q.size == 0 or k.size == 0:\n"
            "        return np.zeros(q.shape, q.dtype), np.full(q.shape[:3], -np.inf, q.dtype)\n"
            + _CHECKED,
        ),
    ),
    # the ends of the numbers
    edit("scores-below-sentinel", (_ORIGIN, "np.maximum(new_peak, q.dtype.type(-1e30))")),
    edit(
        "small-weights-dropped",
        (
            "weights = np.exp(scores - origin[:, None])",
            "weights = np.exp(scores - origin[:, None])\n"
            "        weights = np.where(weights < 1e-8, 0, weights)",
        ),
    ),
    edit(
        "small-rise-not-rescaled",
        ("np.exp(peak - origin)", "np.exp(np.where(origin - peak < 1e-6, 0, peak - origin))"),
    ),
]

#: Mechanical mutants that change nothing the contract speaks of, with the reason.
EQUIVALENT: dict[str, str] = {
    "solution.py:flash_attention/constant/2": "another default tile: a size of work only",
    "solution.py:_attend/never/1": "reads hidden tiles too and masks them: slower, not different",
    "solution.py:_attend/compare/1": "builds a mask that hides nothing one tile more often",
    "solution.py:_attend/arithmetic/6": "builds a mask that hides nothing in more tiles",
    "solution.py:_attend/drop-operand/6": "builds a mask that hides nothing one tile more often",
    "solution.py:_attend/constant/5": "any finite origin does for a row that has seen no key",
    "solution.py:_attend/constant/8": "zero by any positive stand-in is zero, and its lse is set",
}
