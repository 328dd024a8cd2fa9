"""Ternary weights: quantise, pack, split documents, train. The contract is in prompt.md.

The quantiser works on integers, so that every sum is exact and the order of summation has no influence. The model is
a list of instructions over named registers; one machine runs it forwards, and backwards by the same list.
"""

import hashlib
import numbers
import operator
import time

import numpy as np

LARGEST_HALF = 65504.0
FRACTION_BITS = 30
CODES_PER_BYTE = 4
ALL_ZERO_BYTE = 0b01010101
GROUP = 128


# ---------------------------------------------------------------- quantiser


def _group_bounds(length, group_size):
    """First positions and sizes of the groups of a row."""
    size = operator.index(group_size)
    if size < 1:
        raise ValueError("group_size must be at least 1")
    starts = np.arange(0, length, size)
    return starts, np.diff(np.append(starts, length))


def _per_group(reducer, values, starts):
    if starts.size == 0:
        return np.zeros(values.shape[:-1] + (0,), dtype=values.dtype)
    return reducer.reduceat(values, starts, axis=-1)


def ternarize(w, group_size=128):
    """w (..., n) -> codes int8 (..., n), scales float16 (..., ceil(n / group_size))."""
    weights = np.asarray(w)
    if weights.dtype.type not in (np.float32, np.float64):
        raise TypeError("w must be float32 or float64")
    if weights.ndim == 0:
        raise ValueError("w needs an axis")
    if not np.all(np.isfinite(weights)):
        raise ValueError("w must be finite")
    starts, sizes = _group_bounds(weights.shape[-1], group_size)
    magnitudes = np.abs(weights.astype(np.float64, order="C"))

    # integers of FRACTION_BITS bits, relative to the power of two above the largest of the group
    _, exponents = np.frexp(_per_group(np.maximum, magnitudes, starts))
    shifts = FRACTION_BITS - exponents
    fixed = np.rint(np.ldexp(magnitudes, np.repeat(shifts, sizes, axis=-1))).astype(np.int64)

    # kept are the weights above 0.7 times the mean
    totals = _per_group(np.add, fixed, starts)
    kept = 10 * fixed * sizes.repeat(sizes) > np.repeat(7 * totals, sizes, axis=-1)
    kept_sums = _per_group(np.add, np.where(kept, fixed, 0), starts)
    kept_counts = _per_group(np.add, kept.astype(np.int64), starts)
    means = np.ldexp(kept_sums / np.maximum(kept_counts, 1), -shifts)
    scales = np.minimum(means, LARGEST_HALF).astype(np.float16)

    kept &= np.repeat(scales > 0, sizes, axis=-1)
    codes = np.where(kept, np.sign(weights), 0).astype(np.int8)
    return codes, scales


def _checked_codes(codes):
    codes = np.asarray(codes)
    if codes.dtype != np.int8:
        raise TypeError("codes must be int8")
    if codes.ndim == 0:
        raise ValueError("codes need an axis")
    if np.any(codes < -1) or np.any(codes > 1):
        raise ValueError("codes must be -1, 0 or 1")
    return codes


def dequantize(codes, scales, group_size=128):
    """code times the scale of its group, float32."""
    codes, scales = _checked_codes(codes), np.asarray(scales)
    starts, sizes = _group_bounds(codes.shape[-1], group_size)
    if scales.dtype.kind != "f":
        raise TypeError("scales must be floating-point")
    if scales.shape != codes.shape[:-1] + starts.shape:
        raise ValueError("scales do not fit the codes")
    return codes * np.repeat(scales.astype(np.float32), sizes, axis=-1)


# ---------------------------------------------------------------- packing


def pack(codes):
    """codes int8 (..., n) -> uint8 (..., ceil(n / 4))."""
    codes = _checked_codes(codes)
    width = -(-codes.shape[-1] // CODES_PER_BYTE)
    packed = np.full(codes.shape[:-1] + (width,), ALL_ZERO_BYTE, dtype=np.uint8)
    for place in range(CODES_PER_BYTE):
        column = codes[..., place::CODES_PER_BYTE]
        # a code shifts its place's two bits from 01 down to 00 or up to 10; uint8 wraps as needed
        packed[..., : column.shape[-1]] += column.view(np.uint8) << np.uint8(2 * place)
    return packed


def unpack(packed, shape):
    """The codes of this shape that `pack` put into `packed`."""
    packed = np.asarray(packed)
    shape = tuple(operator.index(length) for length in shape)
    if packed.dtype != np.uint8:
        raise TypeError("packed data must be uint8")
    if not shape or min(shape) < 0:
        raise ValueError("not the shape of codes")
    if packed.shape != shape[:-1] + (-(-shape[-1] // CODES_PER_BYTE),):
        raise ValueError("packed data does not fit the shape")
    codes = np.empty(shape, dtype=np.int8)
    for place in range(CODES_PER_BYTE):
        column = codes[..., place::CODES_PER_BYTE]
        column[...] = (packed[..., : column.shape[-1]] >> (2 * place)) & 3
    codes -= 1
    if np.any(codes > 1):
        raise ValueError("a place with both bits set")
    return codes


# ---------------------------------------------------------------- documents


def _token_list(document):
    tokens = [operator.index(token) for token in document]
    if any(token < 0 for token in tokens):
        raise ValueError("a token id must not be negative")
    return tokens


def _lot(document):
    """A number in [0, 1) that depends on the tokens alone, a multiple of 2^-53."""
    text = ",".join(map(str, _token_list(document)))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2.0**53


def split(documents, fraction):
    """(train_ids, valid_ids), decided by each document's content."""
    if not isinstance(fraction, numbers.Real):
        raise TypeError("fraction must be a number")
    if not 0 <= fraction <= 1:
        raise ValueError("fraction must be between 0 and 1")
    sides = ([], [])
    for index, document in enumerate(documents):
        sides[_lot(document) < fraction].append(index)
    return sides


# ---------------------------------------------------------------- instructions


def _run_rows(table, tokens):
    return table[tokens], (table.shape, tokens)


def _back_rows(grad, kept):
    shape, tokens = kept
    table_grad = np.zeros(shape, dtype=grad.dtype)
    np.add.at(table_grad, tokens.ravel(), grad.reshape(-1, shape[1]))
    return table_grad, None


def _run_norm(x):
    inverse = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(1e-6))
    normed = x * inverse
    return normed, (normed, inverse)


def _back_norm(grad, kept):
    normed, inverse = kept
    return (inverse * (grad - normed * np.mean(grad * normed, axis=-1, keepdims=True)),)


def _run_linear(x, weight):
    return x @ weight.T, (x, weight)


def _back_linear(grad, kept):
    x, weight = kept
    return grad @ weight, grad.reshape(-1, weight.shape[0]).T @ x.reshape(-1, weight.shape[1])


def _run_add(x, y):
    return x + y, None


def _back_add(grad, _):
    return grad, grad


def _run_relu(x):
    return np.maximum(x, 0), x > 0


def _back_relu(grad, positive):
    return (grad * positive,)


def _to_heads(x, heads):
    batch, length, dim = x.shape
    return np.ascontiguousarray(x.reshape(batch, length, heads, dim // heads).transpose(0, 2, 1, 3))


def _from_heads(x):
    batch, heads, length, width = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, length, heads * width)


def _run_attend(q, k, v, bias):
    heads = bias.shape[0]
    q, k, v = (_to_heads(x, heads) for x in (q, k, v))
    scale = np.float32(1 / np.sqrt(q.shape[-1]))
    scores = (q @ k.swapaxes(-1, -2)) * scale + bias
    scores -= scores.max(axis=-1, keepdims=True)
    shares = np.exp(scores)
    shares /= shares.sum(axis=-1, keepdims=True)
    return _from_heads(shares @ v), (q, k, v, shares, scale)


def _back_attend(grad, kept):
    q, k, v, shares, scale = kept
    grad = _to_heads(grad, q.shape[1])
    share_grad = grad @ v.swapaxes(-1, -2)
    share_grad -= (share_grad * shares).sum(axis=-1, keepdims=True)
    score_grad = shares * share_grad * scale
    sources = (score_grad @ k, score_grad.swapaxes(-1, -2) @ q, shares.swapaxes(-1, -2) @ grad)
    return (*map(_from_heads, sources), None)


OPERATIONS = {
    "rows": (_run_rows, _back_rows),
    "norm": (_run_norm, _back_norm),
    "linear": (_run_linear, _back_linear),
    "add": (_run_add, _back_add),
    "relu": (_run_relu, _back_relu),
    "attend": (_run_attend, _back_attend),
}


def _write_program(layers):
    """The model as (result, operation, sources); every result is a register of its own."""
    program = [("x", "rows", ("embedding", "tokens"))]
    stream = "x"
    for i in range(layers):
        here = f"layers.{i}."
        program.append((here + "a", "norm", (stream,)))
        for part in "qkv":
            program.append((here + part + "_out", "linear", (here + "a", here + part)))
        program += [
            (here + "mixed", "attend", (here + "q_out", here + "k_out", here + "v_out", "bias")),
            (here + "o_out", "linear", (here + "mixed", here + "o")),
            (here + "middle", "add", (stream, here + "o_out")),
            (here + "b", "norm", (here + "middle",)),
            (here + "up_out", "linear", (here + "b", here + "up")),
            (here + "hidden", "relu", (here + "up_out",)),
            (here + "down_out", "linear", (here + "hidden", here + "down")),
            (here + "x", "add", (here + "middle", here + "down_out")),
        ]
        stream = here + "x"
    program.append(("last", "norm", (stream,)))
    program.append(("logits", "linear", ("last", "head")))
    return program


def _run(program, registers):
    """Fill the registers; answers what the way back needs."""
    kept = []
    for result, operation, sources in program:
        forward, _ = OPERATIONS[operation]
        registers[result], saved = forward(*(registers[source] for source in sources))
        kept.append(saved)
    return kept


def _run_back(program, kept, logits_grad):
    """The gradient of every register that has one."""
    grads = {"logits": logits_grad}
    for (result, operation, sources), saved in zip(reversed(program), reversed(kept)):
        _, backward = OPERATIONS[operation]
        for source, grad in zip(sources, backward(grads.pop(result), saved)):
            if grad is not None:
                grads[source] = grads[source] + grad if source in grads else grad
    return grads


# ---------------------------------------------------------------- training


WINDOW = 256
BATCH_TOKENS = 768
HELD_OUT_TOKENS = 2048
LEAST_TO_HOLD_OUT = 10
RATE = 0.015
WARM_UP = 30
DECAY = 0.03
FEW_WINDOWS_DOUBT = 0.6
DOUBT = 0.005
TEMPERATURES = (0.2, 0.35, 0.5, 0.7, 0.85, 1.0, 1.2)


def _shapes(config):
    vocab, dim = config["vocab"], config["dim"]
    shapes = {"embedding": (vocab, dim)}
    for i in range(config["layers"]):
        for part in "qkvo":
            shapes[f"layers.{i}.{part}"] = (dim, dim)
        shapes[f"layers.{i}.up"] = (4 * dim, dim)
        shapes[f"layers.{i}.down"] = (dim, 4 * dim)
    shapes["head"] = (vocab, dim)
    return shapes


def _checked_config(config):
    lowest = {"vocab": 1, "dim": 1, "heads": 1, "context": 1, "layers": 0, "seed": 0}
    missing = [name for name in (*lowest, "seconds") if name not in config]
    if missing:
        raise ValueError(f"config lacks {missing}")
    checked = {name: operator.index(config[name]) for name in lowest}
    for name, least in lowest.items():
        if checked[name] < least:
            raise ValueError(f"{name} must be at least {least}")
    if checked["dim"] % checked["heads"]:
        raise ValueError("dim must be divisible by heads")
    if not isinstance(config["seconds"], numbers.Real):
        raise TypeError("seconds must be a number")
    if not 0 <= config["seconds"] <= 60:
        raise ValueError("seconds must be between 0 and 60")
    checked["seconds"] = float(config["seconds"])
    return checked


def _windows(documents, vocab, length):
    """Pieces of at most length + 1 tokens; neighbours share one token, so that every token but the first is predicted."""
    windows = []
    for document in documents:
        tokens = _token_list(document)
        if tokens and max(tokens) >= vocab:
            raise ValueError("a token id outside the vocabulary")
        for start in range(0, len(tokens) - 1, length):
            windows.append(np.array(tokens[start : start + length + 1], dtype=np.int64))
    if not windows:
        raise ValueError("no token has a successor")
    return windows


def _lot_order(windows, rng):
    """Copies of one window stay together."""
    lots = {}
    for window in windows:
        lots.setdefault(window.tobytes(), rng.random())
    return sorted(windows, key=lambda window: lots[window.tobytes()])


def _hold_out(windows):
    """(to learn from, to judge by); the second is empty where there is too little text."""
    if len(windows) < LEAST_TO_HOLD_OUT:
        return windows, []
    aside, tokens = 0, 0
    while aside < len(windows) // 10 and tokens < HELD_OUT_TOKENS:
        tokens += windows[aside].size
        aside += 1
    while 0 < aside < len(windows) and np.array_equal(windows[aside - 1], windows[aside]):
        aside += 1  # a copy of what is learned judges nothing
    if aside == len(windows):
        return windows, []
    return windows[aside:], windows[:aside]


class _Model:
    """Latent weights, their ternary images and Adam's moments, by tensor name."""

    def __init__(self, config):
        self.config = config
        self.program = _write_program(config["layers"])
        rng = np.random.default_rng(config["seed"])
        self.latent = {
            name: (rng.standard_normal(shape) / np.sqrt(shape[1])).astype(np.float32)
            for name, shape in _shapes(config).items()
        }
        self.first = {name: np.zeros_like(w) for name, w in self.latent.items()}
        self.second = {name: np.zeros_like(w) for name, w in self.latent.items()}
        self.steps = 0

    def quantised(self):
        return {name: ternarize(w, GROUP) for name, w in self.latent.items()}

    def weights(self):
        return {name: dequantize(*pair, GROUP) for name, pair in self.quantised().items()}

    def _bias(self, length):
        heads = self.config["heads"]
        slopes = 2.0 ** (-8 * (np.arange(heads) + 1) / heads)
        places = np.arange(length)
        distance = places[:, None] - places[None, :]
        bias = np.where(distance >= 0, -slopes[:, None, None] * distance, -np.inf)
        return bias.astype(np.float32)

    def run(self, weights, windows):
        """Log-probabilities, the windows' targets, which of them count, and what the way back needs."""
        length = max(window.size for window in windows) - 1
        tokens = np.zeros((len(windows), length + 1), dtype=np.int64)
        counts = np.zeros((len(windows), length), dtype=bool)
        for row, window in enumerate(windows):
            tokens[row, : window.size] = window
            counts[row, : window.size - 1] = True
        registers = dict(weights, tokens=tokens[:, :-1], bias=self._bias(length))
        kept = _run(self.program, registers)
        logits = registers["logits"]
        logits = logits - logits.max(axis=-1, keepdims=True)
        logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        return logs, tokens[:, 1:, None], counts, kept

    def losses(self, weights, windows, factors=(1.0,)):
        """The mean negative log-probability with the head times each of the factors."""
        totals, number = np.zeros(len(factors)), 0
        for start in range(0, len(windows), 16):
            logs, targets, counts, _ = self.run(weights, windows[start : start + 16])
            number += counts.sum()
            for i, factor in enumerate(factors):
                scaled = logs * np.float32(factor)
                scaled -= np.log(np.exp(scaled).sum(axis=-1, keepdims=True))
                totals[i] -= np.take_along_axis(scaled, targets, axis=-1)[..., 0][counts].sum(dtype=np.float64)
        return totals / number

    def step(self, windows, rate, doubt):
        """One step of Adam; the gradient of a ternary weight is taken for that of its latent one."""
        logs, targets, counts, kept = self.run(self.weights(), windows)
        grad = np.exp(logs) - np.float32(doubt / logs.shape[-1])
        hit = np.take_along_axis(grad, targets, axis=-1) - np.float32(1 - doubt)
        np.put_along_axis(grad, targets, hit, axis=-1)
        grad *= (counts / np.float32(counts.sum()))[..., None].astype(np.float32)
        grads = _run_back(self.program, kept, grad)
        self.steps += 1
        correction = np.sqrt(1 - 0.98**self.steps) / (1 - 0.9**self.steps)
        for name, latent in self.latent.items():
            first, second = self.first[name], self.second[name]
            first += np.float32(0.1) * (grads[name] - first)
            second += np.float32(0.02) * (grads[name] ** 2 - second)
            latent *= np.float32(1 - rate * DECAY)
            latent -= np.float32(rate * correction) * first / (np.sqrt(second) + np.float32(1e-8))


def _batches(windows, rng):
    """Endless batches of about BATCH_TOKENS tokens in an order drawn anew for every round."""
    while True:
        order = rng.permutation(len(windows))
        batch, tokens = [], 0
        for i in order:
            batch.append(windows[i])
            tokens += windows[i].size
            if tokens >= BATCH_TOKENS:
                yield batch
                batch, tokens = [], 0
        if batch:
            yield batch


def _tempered(model, quantised, held_out):
    """The head's scales times the factor that suits the held-out text best."""
    weights = {name: dequantize(*pair, GROUP) for name, pair in quantised.items()}
    losses = model.losses(weights, held_out, TEMPERATURES)
    best = TEMPERATURES[int(np.argmin(losses))]
    return dict(quantised, head=ternarize(weights["head"] * np.float32(best), GROUP))


def train(documents, config):
    """{name: (codes, scales)} of the small language model."""
    began = time.perf_counter()
    config = _checked_config(config)
    windows = _windows(documents, config["vocab"], min(config["context"], WINDOW))
    model = _Model(config)
    seconds = config["seconds"]
    if seconds == 0:
        return model.quantised()
    rng = np.random.default_rng([config["seed"], 1])
    learned, held_out = _hold_out(_lot_order(windows, rng))
    doubt = DOUBT if held_out else FEW_WINDOWS_DOUBT
    best_loss, best = np.inf, None
    next_look = 0.3
    step_time, look_time = 0.0, 0.0
    elapsed = time.perf_counter() - began
    for batch in _batches(learned, rng):
        progress = elapsed / (0.9 * seconds)
        rate = RATE * min(1.0, (model.steps + 1) / WARM_UP) * max(0.02, 1 - progress)
        model.step(batch, rate, doubt)
        now = time.perf_counter() - began
        step_time = max(step_time, now - elapsed)
        elapsed = now
        finished = elapsed + step_time + 2 * look_time > 0.95 * seconds
        if held_out and (finished or elapsed > next_look * 0.9 * seconds):
            next_look += 0.07
            loss = model.losses(model.weights(), held_out)[0]
            if best is None or loss < best_loss:
                best_loss, best = loss, model.quantised()
            elapsed = time.perf_counter() - began
            look_time = max(look_time, elapsed - now)
        if finished:
            break
    if not held_out:
        return model.quantised()
    return _tempered(model, best, held_out)
