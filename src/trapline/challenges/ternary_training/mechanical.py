"""Mechanical mutants of the gold solution that the checks need not catch, with the reason."""

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

#: Mechanical mutants that are bugs and survive: their effect on a trained model is too small.
_LIVE: dict[str, tuple[str, ...]] = {
    "slopes that are off a little: learned with them, a model does nearly as well with the right": (
        "model.py:attention_bias/constant/1",
        "model.py:attention_bias/arithmetic/2",
        "model.py:attention_bias/drop-operand/2",
        "model.py:attention_bias/constant/2",
        "model.py:attention_bias/drop-operand/6",
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
