"""The named bugs as edits of the gold solution."""

from trapline.arena.certify.mutate import Mutant, edit

MODEL, TRAINING = "model.py", "training.py"

MUTANTS: list[Mutant] = [
    # the quantiser
    edit(
        "ragged-width-refused",
        (
            "    columns = w.shape[-1]\n",
            "    columns = w.shape[-1]\n    if columns % group_size:\n"
            "        raise ValueError('n % group_size must be 0')\n",
        ),
    ),
    edit(
        "tail-dropped",
        (
            "    padded[..., :columns] = values\n",
            "    full = columns // group_size * group_size\n"
            "    padded[..., :full] = values[..., :full]\n",
        ),
    ),
    edit(
        "padding-counted",
        ("return np.minimum(columns - starts, group_size)", "return starts * 0 + group_size"),
    ),
    edit(
        "groups-cross-rows",
        (
            "    w = _finite_floats(w)\n",
            "    w = _finite_floats(w)\n"
            "    if w.ndim > 1:\n"
            "        codes, scales = ternarize(w.ravel(), group_size)\n"
            "        owner = np.arange(w.size) // group_size\n"
            "        shape = (*w.shape[:-1], _groups_in(w.shape[-1], group_size))\n"
            "        picked = scales[owner].reshape(w.shape)[..., ::group_size]\n"
            "        return codes.reshape(w.shape), picked.reshape(shape)\n",
        ),
    ),
    edit(
        "one-scale-a-tensor",
        (
            "    threshold = 0.5 * np.sum(magnitude / sizes[:, None], axis=-1, keepdims=True)\n",
            "    threshold = 0.5 * np.sum(magnitude / max(w.size, 1), keepdims=True)\n",
        ),
    ),
    edit(
        "groups-down-columns",
        (
            "    magnitude = _grouped(np.abs(w), group_size)\n",
            "    magnitude = _grouped(np.abs(w), group_size)\n"
            "    if w.ndim == 2 and w.shape[0] == w.shape[1]:\n"
            "        codes, scales = ternarize(w.T[None], group_size)\n"
            "        return codes[0].T.copy(), scales[0]\n",
        ),
    ),
    edit(
        "scale-shrinks",
        (
            "    means = np.sum(magnitude / counted[..., None], axis=-1, where=counts)\n",
            "    means = np.sum(magnitude / sizes[:, None], axis=-1)\n",
        ),
    ),
    edit(
        "scale-by-largest",
        (
            "    threshold = 0.5 * np.sum(magnitude / sizes[:, None], axis=-1, keepdims=True)\n",
            "    threshold = 0.5 * np.max(magnitude, axis=-1, keepdims=True, initial=0.0)\n",
        ),
    ),
    edit(
        "zero-group-divides",
        (
            "    counted = np.maximum(np.count_nonzero(counts, axis=-1), 1)\n",
            "    counted = np.count_nonzero(counts, axis=-1)\n",
        ),
        (
            "    means = np.sum(magnitude / counted[..., None], axis=-1, where=counts)\n",
            "    means = np.sum(magnitude, axis=-1, where=counts) / counted\n",
        ),
    ),
    edit("codes-before-rounding", ("    counts &= scales[..., None] > 0\n", "")),
    edit(
        "small-scale-lost",
        (
            "    scales = np.minimum(means, LARGEST_SCALE).astype(np.float16)\n",
            "    scales = np.clip(means, 1e-5, LARGEST_SCALE).astype(np.float16)\n",
        ),
    ),
    edit(
        "scale-overflows",
        ("np.minimum(means, LARGEST_SCALE).astype(np.float16)", "means.astype(np.float16)"),
    ),
    edit(
        "float64-squeezed",
        (
            "    w = _finite_floats(w)\n",
            "    w = _finite_floats(w).astype(np.float32).astype(np.float64)\n",
        ),
    ),
    edit(
        "sums-in-low-precision",
        (
            "    means = np.sum(magnitude / counted[..., None], axis=-1, where=counts)\n",
            "    half = magnitude.astype(np.float16)\n"
            "    means = np.sum(half, axis=-1, where=counts, dtype=np.float16) / counted\n",
        ),
    ),
    edit(
        "ties-lean",
        (
            "    counts = magnitude > threshold\n",
            "    signed = _grouped(w, group_size)\n"
            "    counts = ((signed >= threshold) & (signed > 0)) | (signed < -threshold)\n",
        ),
    ),
    edit(
        "group-size-ignored",
        (
            '    w = _finite_floats(w)\n    group_size = _positive(group_size, "group_size")\n',
            '    w = _finite_floats(w)\n    _positive(group_size, "group_size")\n'
            "    group_size = GROUP\n",
        ),
    ),
    edit(
        "memory-order-read",
        (
            "    return w.astype(np.float64)\n",
            '    return np.ravel(w, order="K").reshape(w.shape).astype(np.float64)\n',
        ),
    ),
    edit(
        "weights-overwritten",
        (
            "    w = np.asarray(w)\n    if w.dtype not in",
            "    original = w\n    w = np.asarray(w)\n    if w.dtype not in",
        ),
        (
            "    return w.astype(np.float64)\n",
            "    wide = w.astype(np.float64)\n"
            "    np.abs(original, out=original)\n"
            "    return wide\n",
        ),
    ),
    edit("nan-accepted", ("    if not np.isfinite(w).all():\n", "    if w.ndim > 9:\n")),
    edit(
        "group-size-unchecked",
        (
            "    return _at_least(value, 1, name)\n",
            "    return max(1, abs(operator.index(value)))\n",
        ),
    ),
    # back to float32
    edit(
        "groups-spread-evenly",
        (
            "    owner = np.arange(codes.shape[-1]) // group_size\n",
            "    owner = np.arange(codes.shape[-1]) * groups // max(codes.shape[-1], 1)\n",
        ),
    ),
    edit(
        "dequantized-in-half",
        (
            "    return codes.astype(np.float32) * scales.astype(np.float32)[..., owner]\n",
            "    return codes * scales[..., owner]\n",
        ),
    ),
    edit(
        "scales-broadcast",
        (
            "    if scales.dtype != np.float16 or scales.shape != (*codes.shape[:-1], groups):\n",
            "    scales = np.broadcast_to(scales[..., :groups], (*codes.shape[:-1], groups))\n"
            "    if scales.dtype != np.float16:\n",
        ),
    ),
    # packing
    edit(
        "first-code-highest",
        (
            "    return first | second << 2 | third << 4 | fourth << 6\n",
            "    return fourth | third << 2 | second << 4 | first << 6\n",
        ),
    ),
    edit(
        "codes-interleaved",
        (
            "(slots[..., place::4] for place in range(4))",
            "np.split(slots, 4, axis=-1)",
        ),
    ),
    edit(
        "two-complement-codes",
        (
            "    slots = np.ones((*codes.shape[:-1],",
            "    slots = np.zeros((*codes.shape[:-1],",
        ),
        (
            "    slots[..., :columns] += codes.view(np.uint8)\n",
            "    slots[..., :columns] += codes.view(np.uint8) & 3\n",
        ),
    ),
    edit(
        "rows-share-bytes",
        (
            "    codes = _ternary_codes(codes)\n    columns = codes.shape[-1]\n",
            "    codes = _ternary_codes(codes).reshape(1, -1)\n    columns = codes.shape[-1]\n",
        ),
    ),
    edit(
        "spare-bits-empty",
        (
            "    slots[..., :columns] += codes.view(np.uint8)\n",
            "    slots[..., :columns] += codes.view(np.uint8)\n    slots[..., columns:] = 0\n",
        ),
    ),
    edit(
        "other-codes-packed",
        (
            "    if codes.size and (codes.min() < -1 or codes.max() > 1):\n",
            "    if codes.ndim > 9:\n",
        ),
    ),
    edit("fourth-code-read", ("    if np.any(slots == 3):\n", "    if np.any(slots > 3):\n")),
    edit(
        "spare-bits-judged",
        (
            "    if np.any(slots == 3):\n",
            "    if np.any((packed & (packed >> 1) & 0b01010101) > 0):\n",
        ),
    ),
    edit(
        "unpack-unsigned",
        ("    return slots.astype(np.int8) - np.int8(1)\n", "    return slots - np.uint8(1)\n"),
    ),
    edit(
        "wrong-shape-unpacked",
        (
            "    if not shape or min(shape) < 0 or packed.shape != "
            "(*shape[:-1], _groups_in(shape[-1], 4)):\n",
            "    wanted = (*shape[:-1], _groups_in(shape[-1], 4))\n"
            "    packed = np.resize(packed, wanted)\n"
            "    if not shape:\n",
        ),
    ),
    # the split
    edit(
        "equal-documents-parted",
        (
            "    sides = [_draw(document) < fraction for document in documents]\n",
            "    sides = [_draw([index]) < fraction for index, _ in enumerate(documents)]\n",
        ),
    ),
    edit(
        "split-by-process",
        (
            "    digest = hashlib.sha256(text.encode()).digest()\n"
            '    return int.from_bytes(digest[:6], "big") / 2.0**48\n',
            "    return (hash(text) % 2**48) / 2.0**48\n",
        ),
    ),
    edit(
        "split-by-place",
        (
            "    sides = [_draw(document) < fraction for document in documents]\n",
            "    first = {}\n"
            "    for index, document in enumerate(documents):\n"
            "        first.setdefault(tuple(document), index)\n"
            "    sides = [_draw([first[tuple(document)]]) < fraction for document in documents]\n",
        ),
    ),
    edit(
        "split-by-company",
        (
            "    sides = [_draw(document) < fraction for document in documents]\n",
            "    draws = [_draw(document) for document in documents]\n"
            "    ranked = sorted(set(draws))\n"
            "    held = set(ranked[: round(fraction * len(ranked))])\n"
            "    sides = [draw in held for draw in draws]\n",
        ),
    ),
    edit(
        "fraction-upside-down",
        (
            "    sides = [_draw(document) < fraction for document in documents]\n",
            "    sides = [_draw(document) >= fraction for document in documents]\n",
        ),
    ),
    edit(
        "only-the-beginning-hashed",
        ("for token in document)\n    digest", "for token in document[:16])\n    digest"),
    ),
    edit(
        "large-ids-refused",
        (
            "    digest = hashlib.sha256(text.encode()).digest()\n",
            "    digest = hashlib.sha256(bytes(list(document)) + text.encode()).digest()\n",
        ),
    ),
    edit(
        "copies-vanish",
        (
            "    train = [index for index, held_out in enumerate(sides) if not held_out]\n",
            "    first = {tuple(document): index for index, document in enumerate(documents)}\n"
            "    kept = set(first.values())\n"
            "    train = [i for i, held_out in enumerate(sides) if not held_out and i in kept]\n",
        ),
        (
            "    valid = [index for index, held_out in enumerate(sides) if held_out]\n",
            "    valid = [i for i, held_out in enumerate(sides) if held_out and i in kept]\n",
        ),
    ),
    edit(
        "documents-sorted",
        (
            "    sides = [_draw(document) < fraction for document in documents]\n",
            "    documents.sort()\n"
            "    sides = [_draw(document) < fraction for document in documents]\n",
        ),
    ),
    # the model's tensors
    edit(
        "embedding-left-dense",
        (
            "    return {name: ternarize(latent[name], GROUP) for name in tensor_shapes(config)}\n",
            "    tensors = {name: ternarize(w, GROUP) for name, w in latent.items()}\n"
            '    return {**tensors, "embedding": (latent["embedding"], np.ones(1, np.float16))}\n',
        ),
    ),
    edit(
        "head-left-dense",
        (
            "for name in tensor_shapes(config)}\n",
            'for name in tensor_shapes(config) if name != "head"}\n',
        ),
    ),
    edit(
        "scale-for-every-weight",
        (
            "    return {name: ternarize(latent[name], GROUP) for name in tensor_shapes(config)}\n",
            "    return {name: ternarize(latent[name], 1) for name in tensor_shapes(config)}\n",
        ),
    ),
    edit(
        "group-of-the-model-width",
        (
            "    return {name: ternarize(latent[name], GROUP) for name in tensor_shapes(config)}\n",
            '    width = config["dim"]\n'
            "    return {name: ternarize(latent[name], width) for name in tensor_shapes(config)}\n",
        ),
    ),
    edit(
        "layers-fixed",
        (
            '    for layer in range(config["layers"]):\n        for name in',
            "    for layer in range(2):\n        for name in",
        ),
        file=MODEL,
    ),
    edit(
        "vocabulary-from-the-text",
        (
            "    chosen, held_out = _hold_out(pieces)\n",
            '    config["vocab"] = 1 + max(int(piece.max()) for piece in pieces)\n'
            "    chosen, held_out = _hold_out(pieces)\n",
        ),
    ),
    edit(
        "seed-ignored",
        (
            '    rng = np.random.default_rng(config["seed"])\n',
            "    rng = np.random.default_rng(0)\n",
        ),
        file=TRAINING,
    ),
    edit(
        "start-not-repeatable",
        ('    rng = np.random.default_rng(config["seed"])\n', "    rng = np.random\n"),
        file=TRAINING,
    ),
    edit(
        "training-carries-over",
        (
            "    latent = initial_weights(config)\n",
            '    latent = RESUME.setdefault(config["seed"], initial_weights(config))\n',
        ),
        ("EVALUATE_EVERY = 10\n", "EVALUATE_EVERY = 10\nRESUME = {}\n"),
        file=TRAINING,
    ),
    edit(
        "negative-id-wraps",
        (
            '        if tokens and not 0 <= min(tokens) <= max(tokens) < config["vocab"]:\n',
            '        if tokens and max(tokens) >= config["vocab"]:\n',
        ),
    ),
    edit(
        "heads-unchecked",
        (
            '    if checked["dim"] % checked["heads"]:\n',
            '    if checked["heads"] > checked["dim"]:\n',
        ),
    ),
    edit(
        "nothing-to-predict",
        (
            "    if not pieces:\n",
            "    if not pieces:\n        return [np.zeros(2, dtype=int)]\n    if not pieces:\n",
        ),
    ),
    edit(
        "documents-shuffled",
        (
            "    config = _checked_config(config)\n    pieces",
            "    config = _checked_config(config)\n"
            '    np.random.default_rng(config["seed"]).shuffle(documents)\n    pieces',
        ),
    ),
    # training
    edit(
        "short-documents-break",
        ("        if tokens and not 0 <= min", "        if not 0 <= min"),
    ),
    edit(
        "long-documents-dropped",
        (
            '        for begin in range(0, len(tokens) - 1, config["context"]):\n',
            "        if len(tokens) > length:\n            continue\n"
            '        for begin in range(0, len(tokens) - 1, config["context"]):\n',
        ),
    ),
    edit(
        "seconds-ignored",
        (
            "        while self.time_left() > 0 and patience:\n",
            "        while time.monotonic() - self.start < 8.0:\n",
        ),
        file=TRAINING,
    ),
    edit(
        "future-visible",
        (
            "    bias = np.where(back >= 0, -slopes[:, None, None] * back, -np.inf)\n",
            "    bias = -slopes[:, None, None] * np.abs(back)\n",
        ),
        file=MODEL,
    ),
    edit(
        "predicts-the-present",
        (
            "    return table[:, :-1], table[:, 1:]\n",
            "    return table[:, :-1], table[:, :-1]\n",
        ),
        file=TRAINING,
    ),
    edit(
        "trains-until-collapse",
        (
            "        while self.time_left() > 0 and patience:\n",
            "        while self.time_left() > 0:\n",
        ),
        ("            if loss < best_loss:\n", "            if loss is not None:\n"),
        file=TRAINING,
    ),
    edit(
        "leaky-early-stopping",
        (
            "    draws = [_draw(piece) for piece in pieces]\n",
            "    draws = [_draw([index]) for index, _ in enumerate(pieces)]\n",
        ),
    ),
    # --- the corners of the contract
    edit(
        "threshold-overflows",
        (
            "np.sum(magnitude / sizes[:, None], axis=-1, keepdims=True)",
            "np.sum(magnitude, axis=-1, keepdims=True) / sizes[:, None]",
        ),
    ),
    edit(
        "empty-document-never-held-out",
        ("[_draw(document) < fraction for", "[bool(document) and _draw(document) < fraction for"),
    ),
    edit(
        "ids-cut-to-32-bits",
        ("str(operator.index(token))", "str(operator.index(token) & 0xFFFFFFFF)"),
    ),
    edit(
        "order-of-tokens-ignored",
        ("for token in document)\n    digest", "for token in sorted(document))\n    digest"),
    ),
    edit(
        "lone-token-unchecked",
        ("        if tokens and not 0 <=", "        if len(tokens) > 1 and not 0 <="),
    ),
    edit(
        "seed-cut-to-32-bits",
        ('default_rng(config["seed"])', 'default_rng(config["seed"] % 2**32)'),
        file=TRAINING,
    ),
    edit(
        "group-filled-up",
        ("    group_size = min(group_size, columns or 1)\n", ""),
    ),
    edit(
        "no-number-as-fraction",
        (
            "    if not 0.0 <= fraction <= 1.0:\n",
            "    if fraction < 0.0 or fraction > 1.0:\n",
        ),
    ),
    edit(
        "setting-missing",
        (
            '    missing = [name for name in (*SETTINGS, "seconds") if name not in config]\n',
            '    config = {"seed": 0, "seconds": 0, **config}\n    missing = []\n',
        ),
    ),
]


#: Mechanical mutants that keep to the contract, and why: reason → places.
_REASONS: dict[str, tuple[str, ...]] = {
    "a weight exactly on the threshold may count or not": ("solution.py:ternarize/compare/1",),
    "wider integers on the way to the same int8 codes": ("solution.py:unpack/drop-keyword/1",),
    "differs for a draw that equals the fraction: one in 2⁴⁸": ("solution.py:split/compare/2",),
    "how many documents are held out is free": (
        "solution.py:_hold_out/drop-operand/2",
        "solution.py:_hold_out/constant/2",
    ),
    "pieces may overlap by more than one token": ("solution.py:_pieces/constant/1",),
    "a row that is empty has no groups, whatever their size": ("solution.py:ternarize/constant/2",),
    "how large a batch is, is free": (
        "training.py:<module>/constant/1",
        "training.py:_endless_batches/constant/1",
        "training.py:_endless_batches/arithmetic/1",
        "training.py:_endless_batches/drop-operand/1",
    ),
    "how often the held-out loss is looked at is free": ("training.py:<module>/constant/3",),
    "stopping early is welcome and not asked for; the best weights are kept in any case": (
        "training.py:<module>/constant/4",
        "training.py:_Run.best/arithmetic/1",
        "training.py:_Run.best/constant/3",
    ),
    "how the steps shrink is free": (
        "training.py:_Run.best/constant/2",
        "training.py:_Run.step/drop-operand/2",
    ),
    "of two equally good models either may be kept": ("training.py:_Run.best/compare/2",),
    "differs where the time left is exactly 0": ("training.py:_Run.best/compare/1",),
    "a second for every training: three are granted, and stopping early is welcome": (
        "training.py:_Run.time_left/drop-operand/2",
    ),
    "counts for a vector of zeros alone, and no row of ternary weights becomes one in training": (
        "model.py:_normalise/arithmetic/2",
        "model.py:_normalise/drop-operand/2",
    ),
}
EQUIVALENT: dict[str, str] = {
    place: reason for reason, places in _REASONS.items() for place in places
}

#: Mechanical mutants that are bugs and live: what they break shows too little in what is trained.
_LIVE: dict[str, tuple[str, ...]] = {
    "slopes that are off a little: learned with them, a model does nearly as well with the right": (
        "model.py:attention_bias/constant/1",
        "model.py:attention_bias/arithmetic/2",
        "model.py:attention_bias/drop-operand/2",
        "model.py:attention_bias/constant/2",
        "model.py:attention_bias/drop-operand/6",
    ),
    "random embeddings that are never trained are enough for the layers behind them": (
        "model.py:_backward/drop-statement/1",
    ),
    "a norm over positions, not features: rows of ternary weights are of much the same size": (
        "model.py:_normalise/drop-unary/1",
        "model.py:_normalise/constant/2",
    ),
    "a gradient whose share along the vector itself is wrong: the norm forgets what it moves": (
        "model.py:_normalise_backward/arithmetic/2",
        "model.py:_normalise_backward/drop-operand/2",
        "model.py:_normalise_backward/drop-keyword/1",
        "model.py:_normalise_backward/drop-operand/4",
    ),
    "guards against overflow, which small models within a minute do not reach": (
        "model.py:_log_softmax/arithmetic/1",
        "model.py:_log_softmax/drop-keyword/1",
        "model.py:_log_softmax/drop-operand/1",
    ),
    "scores that are too steep or too flat in training: the projections make up for it": (
        "model.py:_attention/arithmetic/2",
        "model.py:_attention/drop-operand/2",
    ),
    "a wrong gradient of scores or values that still points the right way; steps follow signs": (
        "model.py:_attention_backward/drop-operand/1",
        "model.py:_attention_backward/arithmetic/4",
        "model.py:_attention_backward/drop-operand/4",
        "model.py:_attention_backward/arithmetic/6",
        "model.py:_attention_backward/drop-operand/6",
    ),
    "what flows back through a layer is wrong: the direct path past it carries the training": (
        "model.py:_attention_backward/drop-operand/10",
        "model.py:_attention_backward/drop-operand/11",
        "model.py:_mlp_backward/arithmetic/3",
        "model.py:_mlp_backward/drop-operand/3",
    ),
    "a rectifier, or its gradient, with another bend: the MLP learns around it": (
        "model.py:_mlp/constant/1",
        "model.py:_mlp_backward/drop-operand/1",
        "model.py:_mlp_backward/compare/1",
        "model.py:_mlp_backward/constant/1",
    ),
    "the wanted token is pushed twice as hard: calibration suffers less than the limits see": (
        "model.py:_cross_entropy/constant/2",
    ),
    "one token of many is never learned as what comes next: the mean hardly shows it": (
        "model.py:_cross_entropy/constant/1",
    ),
    "weights that begin smaller and move less: a worse choice that time makes up for": (
        "training.py:_spread/constant/1",
    ),
    "overruns that the granted three seconds hide, or that early stopping ends first": (
        "training.py:_Run.best/bool/1",
        "training.py:_Run.time_left/constant/1",
        "training.py:_Run.time_left/drop-operand/1",
    ),
    "one of the held-out documents is trained on too: the others still say when to stop": (
        "solution.py:_hold_out/compare/2",
    ),
    "padding is learned as if it were text: it is easy to learn": (
        "training.py:collate/drop-unary/1",
    ),
}
SURVIVORS: dict[str, str] = {place: reason for reason, places in _LIVE.items() for place in places}
