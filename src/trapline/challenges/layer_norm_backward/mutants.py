"""The named bugs of layer_norm_backward as edits of the gold solution."""

from trapline.arena.certify.mutate import Mutant, edit

_VAR = "var = np.mean(centred * centred, axis=-1)"
_NAIVE = "var = np.mean(x * x, axis=-1) - np.mean(x, axis=-1) ** 2"
_RSTD = "rstd = 1.0 / np.sqrt(var + eps)"
_Y = "y = gamma * x_hat + beta"
_CACHE = "(x_hat.astype(x.dtype), rstd.astype(x.dtype), gamma.copy())"
_UNPACK = "x_hat, rstd, gamma = cache\n"
_WIDE = "wide = x.astype(np.float64)"
_CENTRE = "centred = wide - np.mean(wide, axis=-1, keepdims=True)"
_WIDEN_DY = "    dy = dy.astype(np.float64)\n"
_G = "    g = dy * gamma\n"
_MEAN_GX = "mean_gx = np.mean(g * x_hat, axis=-1, keepdims=True)"
_DX = "dx = rstd[..., None] * (g - mean_g - x_hat * mean_gx)"
_DGAMMA = "dgamma = np.sum(dy * x_hat, axis=(0, 1))"
_DBETA = "dbeta = np.sum(dy, axis=(0, 1))"
_GRADIENTS = "gradients = backward(dy, forward(*inputs)[1])"
_DIRECTION = "direction = _direction(rng, inputs[place])"
_STEP = "STEP = 6e-6"
_ERROR = "float(np.linalg.norm(analytic - numeric) / scale)"

_STATISTICS = [
    edit("mean-1e8", (_VAR, _NAIVE)),
    edit("float32-mean-4096", (_VAR, _NAIVE)),
    edit("constant-row", (_RSTD, "rstd = 1.0 / np.sqrt(var)")),
    edit("one-feature", (_Y, "y = gamma * (x if x.shape[-1] == 1 else x_hat) + beta")),
    edit("eps-outside-the-root", (_RSTD, "rstd = 1.0 / (np.sqrt(var) + eps)")),
    edit("eps-as-a-floor", (_RSTD, "rstd = 1.0 / np.sqrt(np.maximum(var, eps))")),
    edit("eps-ignored", (_RSTD, "rstd = 1.0 / np.sqrt(var + 1e-5)")),
    edit("unbiased-variance", (_VAR, "var = np.var(centred, axis=-1, ddof=1)")),
    edit(
        "rows-share-statistics",
        (_CENTRE, "centred = wide - np.mean(wide, axis=(1, 2), keepdims=True)"),
        (_VAR, "var = np.mean(centred * centred, axis=(1, 2))[:, None] + np.zeros(x.shape[:2])"),
    ),
]

_FORMULA = [
    edit("gamma-missing-in-dx", (_G, "    g = dy\n")),
    edit("mean-term-missing", (_DX, "dx = rstd[..., None] * (g - x_hat * mean_gx)")),
    edit("variance-term-missing", (_DX, "dx = rstd[..., None] * (g - mean_g)")),
    edit("variance-term-sign", (_DX, "dx = rstd[..., None] * (g - mean_g + x_hat * mean_gx)")),
    edit("projection-of-dy", (_MEAN_GX, _MEAN_GX.replace("g * x_hat", "dy * x_hat"))),
    edit("rstd-missing", (_DX, "dx = g - mean_g - x_hat * mean_gx")),
    edit(
        "divided-by-the-wrong-length",
        (_MEAN_GX, "mean_gx = np.sum(g * x_hat, axis=-1, keepdims=True) / dy.shape[1]"),
    ),
    edit(
        "square-sequence",
        (_DX, "dx = rstd[:, None, :] * (g - mean_g - x_hat * mean_gx)"),
    ),
    edit("beta-scaled", (_Y, "y = gamma * (x_hat + beta)")),
    edit("dgamma-over-one-axis", (_DGAMMA, "dgamma = np.sum(dy * x_hat, axis=0)")),
    edit("dgamma-averaged", (_DGAMMA, "dgamma = np.mean(dy * x_hat, axis=(0, 1))")),
    edit("dbeta-scaled", (_DBETA, "dbeta = np.sum(dy * gamma, axis=(0, 1))")),
    edit(
        "dgamma-from-output",
        (_CACHE, _CACHE.replace(", gamma", ", beta.copy(), gamma")),
        (_UNPACK, "x_hat, rstd, beta, gamma = cache\n"),
        (_DGAMMA, "dgamma = np.sum(dy * (gamma * x_hat + beta), axis=(0, 1))"),
    ),
    edit(
        "zero-gamma",
        (_CACHE, "(y.astype(x.dtype), rstd.astype(x.dtype), gamma.copy(), beta.copy())"),
        (_UNPACK, "y, rstd, gamma, beta = cache\n    x_hat = (y - beta) / gamma\n"),
    ),
]

_CACHES = [
    edit(
        "bloated-cache",
        (_CACHE, _CACHE.replace("gamma.copy()", "gamma.copy(), x.copy()")),
        (_UNPACK, "x_hat, rstd, gamma, _ = cache\n"),
    ),
    edit("cache-in-double", (_CACHE, "(x_hat, rstd, gamma.copy())")),
    edit(
        "cache-of-row-copies",
        (
            _CACHE,
            _CACHE.replace("rstd.astype", "np.repeat(rstd[..., None], x.shape[-1], -1).astype"),
        ),
        (_UNPACK, "x_hat, rstd, gamma = cache\n    rstd = rstd[..., 0]\n"),
    ),
    edit(
        "last-forward-wins",
        (_STEP, _STEP + "\nLATEST = []"),
        (_Y, _Y + f"\n    LATEST[:] = {_CACHE}"),
        (_UNPACK, "x_hat, rstd, gamma = LATEST or cache\n"),
    ),
    edit(
        "cache-is-a-key",
        (_STEP, _STEP + "\nKEPT = {}"),
        (_Y, _Y + f"\n    KEPT[len(KEPT)] = {_CACHE}"),
        (f"return y.astype(x.dtype), {_CACHE}", "return y.astype(x.dtype), (len(KEPT) - 1,)"),
        (_UNPACK, "x_hat, rstd, gamma = KEPT[cache[0]]\n"),
    ),
    edit(
        "cache-is-an-object",
        (_STEP, _STEP + "\n\n\nclass Cache:\n    pass"),
        (_Y, _Y + f"\n    cache = Cache()\n    cache.parts = {_CACHE}"),
        (f"return y.astype(x.dtype), {_CACHE}", "return y.astype(x.dtype), cache"),
        (_UNPACK, "x_hat, rstd, gamma = cache.parts\n"),
    ),
    edit(
        "nested-cache",
        (_CACHE, "((x_hat.astype(x.dtype), rstd.astype(x.dtype)), gamma.copy())"),
        (_UNPACK, "(x_hat, rstd), gamma = cache\n"),
    ),
    edit("output-overwrites-cache", (_Y, "y = x_hat\n    y *= gamma\n    y += beta")),
]

_INPUT = [
    edit(
        "x-modified",
        (_WIDE, "x -= np.mean(x, axis=-1, keepdims=True)\n    " + _WIDE),
    ),
    edit("dy-modified", (_WIDEN_DY, ""), (_G, "    dy *= gamma\n    g = dy\n")),
    edit(
        "cache-modified",
        (_DX, "x_hat *= mean_gx.astype(dtype)\n    dx = rstd[..., None] * (g - mean_g - x_hat)"),
    ),
    edit("float64-computed-in-float32", (_WIDE, _WIDE.replace("float64", "float32"))),
    edit("float32-widened", ("return y.astype(x.dtype), (", "return y, (")),
    edit("huge-float32", (_WIDE, "wide = x")),
    edit("strided-x", (_WIDE, _WIDE.replace("x.", "x.ravel(order='K').reshape(x.shape)."))),
    edit(
        "strided-dy",
        (_WIDEN_DY, "    dy = dy.ravel(order='K').reshape(dy.shape).astype(np.float64)\n"),
    ),
    edit("no-rows", (_WIDE, _WIDE.replace("x.", "(x / np.max(np.abs(x)))."))),
    edit("batch-of-one", (_VAR, _VAR.replace("axis=-1)", "axis=-1, keepdims=True).squeeze()"))),
    edit(
        "gamma-broadcast",
        ("gamma.shape != (width,) or beta.shape != (width,)", "gamma.ndim != 1 or beta.ndim != 1"),
    ),
    edit("dy-broadcast", ("if dy.shape != x_hat.shape:", "if dy.ndim > x_hat.ndim:")),
    edit("rank-ignored", ("if x.ndim != 3:", "if x.ndim < 1:")),
    edit(
        "integers-accepted",
        ("if array.dtype not in (np.float32, np.float64):", "if array.dtype == object:"),
    ),
    edit("eps-unchecked", ("if not 0.0 < eps < np.inf:", "if isinstance(eps, str):")),
]

_CHECKS = [
    edit(
        "check-needs-every-element",
        ("for _ in range(DIRECTIONS):", "for element in range(inputs[place].size):"),
        (
            _DIRECTION,
            "direction = np.zeros(inputs[place].shape)\n            direction.flat[element] = 1.0",
        ),
    ),
    edit(
        "check-blind-to-length",
        (
            "max(np.linalg.norm(analytic), np.linalg.norm(numeric), 1e-12)",
            "np.sqrt(np.linalg.norm(analytic) * np.linalg.norm(numeric))",
        ),
        (_ERROR, "float(1 - abs(analytic @ numeric) / max(scale, 1e-12) ** 2)"),
    ),
    edit(
        "check-of-a-few-elements",
        (_DIRECTION, _DIRECTION + "\n            direction.flat[4:] = 0.0"),
    ),
    edit(
        "check-skips-parameters",
        ("    return errors\n", "    return {**errors, 'dgamma': 0.0, 'dbeta': 0.0}\n"),
    ),
    edit(
        "check-of-itself",
        (_GRADIENTS, "gradients = layer_norm_backward(dy, layer_norm_forward(*inputs)[1])"),
    ),
    edit(
        "check-with-ones",
        ("np.sum(dy * (shifted(1.0) - shifted(-1.0)))", "np.sum(shifted(1.0) - shifted(-1.0))"),
    ),
    edit("check-absolute", (_ERROR, "float(np.linalg.norm(analytic - numeric))")),
    edit(
        "check-of-zero-gradients",
        (
            "max(np.linalg.norm(analytic), np.linalg.norm(numeric), 1e-12)",
            "np.linalg.norm(numeric)",
        ),
    ),
    edit("check-step-too-large", (_STEP, "STEP = 0.05")),
    edit("check-step-too-small", (_STEP, "STEP = 1e-13")),
    edit(
        "check-modifies-x",
        (
            "value + sign * STEP * direction if i == place",
            "value.__iadd__(min(sign, 2 * sign) * STEP * direction) if i == place",
        ),
    ),
    edit(
        "check-of-its-own-forward",
        ("return forward(*moved)[0]", "return layer_norm_forward(*moved)[0]"),
    ),
    edit(
        "check-relative-to-one-side",
        (
            "max(np.linalg.norm(analytic), np.linalg.norm(numeric), 1e-12)",
            "max(np.linalg.norm(analytic), 1e-12)",
        ),
    ),
    edit(
        "check-one-sided",
        (
            "(shifted(1.0) - shifted(-1.0))) / (2.0 * STEP)",
            "(shifted(0.01) - shifted(0.0))) / (0.01 * STEP)",
        ),
    ),
    edit("check-of-one-direction", ("DIRECTIONS = 6", "DIRECTIONS = 1")),
]

MUTANTS: list[Mutant] = [*_STATISTICS, *_FORMULA, *_CACHES, *_INPUT, *_CHECKS]

#: Mechanical mutants that no check can tell from the original, and why.
_OPEN = "the contract leaves the choice of directions open; these serve as well"
EQUIVALENT: dict[str, str] = {
    "solution.py:<module>/constant/1": "seven directions instead of six: " + _OPEN,
    "solution.py:_direction/arithmetic/1": "the spread added to a random sign: " + _OPEN,
    "solution.py:_direction/constant/3": "a higher least spread: " + _OPEN,
    "solution.py:_direction/constant/4": "steps of −2 and 1: " + _OPEN,
    "solution.py:_direction/constant/5": "steps of −1 and 2: " + _OPEN,
    "solution.py:_direction/drop-keyword/1": "one spread for all rows: " + _OPEN,
    "solution.py:_require_floats/never/1": "refuses lists in place of arrays, which the contract"
    " leaves open",
}
