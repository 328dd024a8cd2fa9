"""The bugs that the traps are made for, as edits of the gold solution."""

from trapline.arena.certify.mutate import Mutant, edit

_CHECKED = "    _check_saved(dout, q, out, lse)\n"
_ROW_LOOP = "            for top in range(0, T, tile):\n"
_RETURN = "    return dq, dk, dv\n"
_SCORES = "scores = q @ k[cols].T * D**-0.5"
_BACKWARD_MASK = (
    "    if causal:\n        scores[_hidden(position, rows, cols)] = -np.inf\n    # A row without"
)
_FORWARD_MASK = "position + 1:\n            scores[_hidden(position, rows, cols)] = -np.inf"
_WEIGHTS = "return np.exp(np.minimum(scores - finite[:, None], 0))"
_DSCORES = "dscores = weights * (dweights - delta[b, h, rows, None]) * D**-0.5"
_BACKWARD_HEAD = "        g = h // (H // G)\n        for start in range(0, S, tile):"
_ORIGIN = "np.where(new_peak == -np.inf, 0, new_peak)"
_BUFFERS = '"""\n\nimport numpy as np\n'


def _mask(text: str) -> tuple[str, str]:
    """The backward pass's two lines of masking, replaced."""
    return _BACKWARD_MASK, text + "    # A row without"


MUTANTS: list[Mutant] = [
    # sums over groups, tiles, rows
    edit("dk-of-last-head-only", (_ROW_LOOP, "            dk[b, g, cols] = 0\n" + _ROW_LOOP)),
    edit("dv-of-last-head-only", (_ROW_LOOP, "            dv[b, g, cols] = 0\n" + _ROW_LOOP)),
    edit("dk-averaged-over-group", (_RETURN, "    return dq, dk / (H // G), dv\n")),
    edit("dv-averaged-over-group", (_RETURN, "    return dq, dk, dv / (H // G)\n")),
    edit("dq-of-last-key-tile-only", ("dq[b, h, rows] += ", "dq[b, h, rows] = ")),
    edit("dk-of-last-query-tile-only", ("dk[b, g, cols] += ", "dk[b, g, cols] = ")),
    edit("dv-of-last-query-tile-only", ("dv[b, g, cols] += ", "dv[b, g, cols] = ")),
    # the softmax's derivative
    edit("delta-missing", (_DSCORES, "dscores = weights * dweights * D**-0.5")),
    edit(
        "delta-of-first-rows",
        ("delta[b, h, rows, None]", "delta[b, h, : rows.stop - rows.start, None]"),
    ),
    edit("delta-of-first-head", ("delta[b, h, rows, None]", "delta[b, 0, rows, None]")),
    edit("delta-averaged", ("(dout * out).sum(axis=-1)", "(dout * out).mean(axis=-1)")),
    edit(
        "delta-over-one-tile-of-keys",
        ("delta[b, h, rows, None]", "(weights * dweights).sum(axis=1, keepdims=True)"),
    ),
    edit(
        "delta-with-wrong-sign",
        ("(dweights - delta[b, h, rows, None])", "(delta[b, h, rows, None] - dweights)"),
    ),
    # scale
    edit(
        "dq-without-scale",
        (
            "dq[b, h, rows] += dscores @ k[b, g, cols]",
            "dq[b, h, rows] += dscores @ k[b, g, cols] * D**0.5",
        ),
    ),
    edit(
        "dk-without-scale",
        (
            "dk[b, g, cols] += dscores.T @ q[b, h, rows]",
            "dk[b, g, cols] += dscores.T @ q[b, h, rows] * D**0.5",
        ),
    ),
    edit(
        "dk-scaled-twice",
        (
            "dk[b, g, cols] += dscores.T @ q[b, h, rows]",
            "dk[b, g, cols] += dscores.T @ q[b, h, rows] * D**-0.5",
        ),
    ),
    edit("weights-of-unscaled-scores", (_SCORES, "scores = q @ k[cols].T")),
    # the weights made again
    edit(
        "weights-not-normalised",
        (_WEIGHTS, "return np.exp(scores - scores.max(axis=1, keepdims=True, initial=-1e300))"),
    ),
    edit("weights-in-base-two", (_WEIGHTS, "return np.exp2(scores - finite[:, None])")),
    edit("weights-by-division", (_WEIGHTS, "return np.exp(scores) / np.exp(finite)[:, None]")),
    edit("empty-rows-nan", ("np.where(lse == -np.inf, 0, lse)", "lse")),
    edit(
        "empty-rows-infinite",
        _mask("    if causal:\n        scores[_hidden(position, rows, cols)] = -1e9\n"),
        ("np.where(lse == -np.inf, 0, lse)", "np.maximum(lse, -1e10)"),
        (_WEIGHTS, "return np.exp(scores - finite[:, None])"),
        ("    dout = _heard(dout, lse)\n", ""),
    ),
    # causal
    edit("mask-missing", _mask("")),
    edit(
        "mask-hides-own-key",
        _mask("    if causal:\n        scores[_hidden(position - 1, rows, cols)] = -np.inf\n"),
    ),
    edit(
        "mask-sees-next-key",
        _mask("    if causal:\n        scores[_hidden(position + 1, rows, cols)] = -np.inf\n"),
    ),
    edit("mask-aligned-top-left", ("position = top + S - T", "position = top")),
    edit(
        "mask-zeroes-scores",
        _mask("    if causal:\n        scores[_hidden(position, rows, cols)] = 0\n"),
    ),
    edit(
        "mask-above-real-logits",
        _mask("    if causal:\n        scores[_hidden(position, rows, cols)] = -1e4\n"),
    ),
    edit("break-instead-of-continue", ("continue  # these", "break  # these")),
    edit("diagonal-tile-skipped", ("<= start:\n", "<= start + 1:\n")),
    # tiles and lengths
    edit(
        "last-key-tile-dropped",
        (_BACKWARD_HEAD, _BACKWARD_HEAD.replace("range(0, S, ", "range(0, S - S % tile, ")),
    ),
    edit(
        "last-query-tile-dropped",
        (_ROW_LOOP, "            for top in range(0, T - T % tile, tile):\n"),
    ),
    edit(
        "tile-larger-than-sequence-refused",
        (
            _CHECKED,
            _CHECKED + "    if tile > max(k.shape[2], 1):\n        raise ValueError(tile)\n",
        ),
    ),
    edit(
        "as-many-keys-as-queries",
        (_BACKWARD_HEAD, _BACKWARD_HEAD.replace("range(0, S, ", "range(0, min(S, T), ")),
    ),
    # heads and batches
    edit("groups-by-tiling", (_BACKWARD_HEAD, _BACKWARD_HEAD.replace("h // (H // G)", "h % G"))),
    edit(
        "groups-by-wrong-divisor",
        (_BACKWARD_HEAD, _BACKWARD_HEAD.replace("h // (H // G)", "h // G")),
    ),
    edit(
        "batch-shares-values",
        ("dout[b, h, rows] @ v[b, g, cols].T", "dout[b, h, rows] @ v[0, g, cols].T"),
    ),
    # state
    edit(
        "needs-its-own-forward",
        (_BUFFERS, _BUFFERS + "\n_SAVED = {}\n"),
        ("    return out, lse\n", '    _SAVED["lse"] = lse\n    return out, lse\n'),
        (_CHECKED, _CHECKED + '    lse = _SAVED["lse"]\n'),
    ),
    edit(
        "gradients-pile-up",
        (_BUFFERS, _BUFFERS + "\n_SPARE = {}\n"),
        (
            "    # The sum over keys of weight",
            "    dk = _SPARE.setdefault(dk.shape, dk)\n    # The sum over keys of weight",
        ),
    ),
    # arrays as they come
    edit("out-overwritten", ("(dout * out).sum", "np.multiply(dout, out, out=out).sum")),
    edit(
        "lse-overwritten",
        (
            "    finite = np.where(lse == -np.inf, 0, lse)\n",
            "    lse[lse == -np.inf] = 0\n    finite = lse\n",
        ),
    ),
    edit(
        "dout-scaled-in-place",
        (_CHECKED, _CHECKED + "    dout *= q.shape[3] ** -0.5\n"),
        (_DSCORES, "dscores = weights * (dweights - delta[b, h, rows, None])"),
        ("weights.T @ dout[b, h, rows]", "weights.T @ dout[b, h, rows] * D**0.5"),
    ),
    edit(
        "strides-of-dout-ignored",
        (
            _CHECKED,
            _CHECKED + "    packed = np.empty(dout.shape, dout.dtype).strides\n"
            "    dout = np.lib.stride_tricks.as_strided(dout, strides=packed)\n",
        ),
    ),
    edit(
        "double-through-single",
        (
            "dout[b, h, rows] @ v[b, g, cols].T",
            "(dout[b, h, rows] @ v[b, g, cols].T).astype(np.float32)",
        ),
    ),
    edit("gradients-in-double", ("(np.zeros(x.shape, x.dtype) for x", "(np.zeros(x.shape) for x")),
    edit(
        "score-matrix-in-memory",
        (_CHECKED, _CHECKED + "    tile = max(q.shape[2], k.shape[2], 1)\n"),
    ),
    edit(
        "mask-for-all-pairs",
        (
            "    # The sum over keys of weight",
            "    pairs = np.arange(S) > np.arange(T)[:, None] + S - T\n"
            "    # The sum over keys of weight",
        ),
        (
            "weights = _weights(",
            "weights = ~(causal & pairs[rows, cols]) * _weights(",
        ),
    ),
    edit("axes-of-one-squeezed", (_SCORES, "scores = np.squeeze(q @ k[cols].T) * D**-0.5")),
    # nothing there
    edit("no-keys", (_CHECKED, _CHECKED + "    tile = min(tile, k.shape[2])\n")),
    edit("no-queries", (_ROW_LOOP, "            for top in range(0, T, min(tile, T)):\n")),
    edit("no-batch", (_CHECKED, _CHECKED + "    dout = np.stack(list(dout))\n")),
    # what must be refused
    edit("uneven-groups-accepted", (" or q.shape[1] % k.shape[1]", "")),
    edit("negative-tile-accepted", ("if tile < 1:", "if tile == 0:")),
    edit("dout-of-other-shape-accepted", ("dout.shape != q.shape or ", "")),
    edit("out-of-other-shape-accepted", ("out.shape != q.shape or lse", "lse")),
    edit("lse-of-other-shape-accepted", (" or lse.shape != q.shape[:3]", "")),
    edit("integers-accepted", ('kind == "f" for x in (dout', 'kind in "fiu" for x in (dout')),
    # the forward pass it rests on
    edit(
        "forward-rescale-direction",
        ("np.exp(peak - origin)", "np.exp(np.where(peak == -np.inf, 0, origin - peak))"),
    ),
    edit("forward-maximum-shared-by-rows", ("scores.max(axis=1)", "scores.max()")),
    edit("forward-empty-rows-nan", (_ORIGIN, "new_peak")),
    edit("forward-lse-without-maximum", ("peak + np.log(total)", "np.log(total)")),
    edit("forward-mask-aligned-top-left", ("start + S - T, causal", "start, causal")),
    edit("forward-finite-mask", (_FORWARD_MASK, _FORWARD_MASK.replace("-np.inf", "-1e9"))),
    # the ends of the numbers
    edit("huge-scores-overflow", (_WEIGHTS, "return np.exp(scores - finite[:, None])")),
    edit("empty-rows-overflow", ("    dout = _heard(dout, lse)\n", "")),
    edit(
        "scores-below-sentinel",
        ("np.where(lse == -np.inf, 0, lse)", "np.where(lse < -1e30, 0, lse)"),
    ),
    edit(
        "small-weights-dropped",
        (
            _WEIGHTS,
            _WEIGHTS.replace("return", "weights =")
            + "\n    return np.where(weights < 1e-8, 0, weights)",
        ),
    ),
    edit("integers-in-saved-accepted", ("for x in (dout, out, lse))", "for x in (dout,))")),
    edit(
        "zero-output-taken-for-empty-row",
        ("_heard(dout, lse)", "_heard(dout, np.where(out.any(axis=-1), lse, -np.inf))"),
    ),
]

#: Mechanical mutants that change nothing the contract speaks of, with the reason.
EQUIVALENT: dict[str, str] = {
    "solution.py:flash_attention/constant/2": "another default tile: a size of work only",
    "solution.py:flash_attention_backward/constant/2": "another default tile: a size of work only",
    "solution.py:flash_attention_backward/never/1": "skips no hidden tile, masks them all",
    "solution.py:flash_attention_backward/compare/1": "skips fewer hidden tiles, then masks them",
    "solution.py:flash_attention_backward/arithmetic/8": "skips fewer hidden tiles, masks them",
    "solution.py:flash_attention_backward/drop-operand/8": "skips fewer hidden tiles, masks them",
    "solution.py:_weights/constant/2": "any finite stand-in does where all scores are -inf",
    "solution.py:_weights/constant/3": "caps at e, not 1: acts only where rounding ate the weight",
    "solution.py:_heard/constant/1": "any small stand-in does in rows whose weights are all 0",
    "solution.py:_attend/never/1": "reads hidden tiles too and masks them: slower, not different",
    "solution.py:_attend/compare/1": "builds a mask that hides nothing one tile more often",
    "solution.py:_attend/arithmetic/6": "builds a mask that hides nothing in more tiles",
    "solution.py:_attend/drop-operand/6": "builds a mask that hides nothing one tile more often",
    "solution.py:_attend/constant/5": "any finite origin does for a row that has seen no key",
    "solution.py:_attend/constant/8": "zero by any positive stand-in is zero, and its lse is set",
}
