"""Training with master weights in float32 and ternary shadows of them.

Every step runs the model on the shadows and moves the masters by the shadows' gradients (straight-through). A tenth of
the text is kept back: it picks the best of the states that training passed through, and how sure the head may be.
"""

from math import isfinite, log, sqrt
from operator import index
from time import perf_counter

import numpy as np

from model import Network, Size, log_softmax, shapes
from quantiser import GROUP, dequantize, ternarize

RATE, WARMUP = 0.015, 20
MOMENTUM, MEMORY, TINY = 0.9, 0.98, 1e-8
CLIP = 1.0
BATCH_TOKENS = 256
BATCH_CELLS = 1 << 21  # attention scores or logits of a batch
JUDGED_TOKENS, JUDGED_CELLS = 2048, 1 << 19  # of the text kept back: tokens, logits
CHECKS = 16  # looks at the text kept back
TRAINED_SHARE = 0.93  # of the time; the rest is for the end
SMALLEST, FEW = 8, 10  # tokens of a window that may be halved; windows below which it is
DOUBT = 4  # imagined tokens that the held-out text is diluted with
SAFE_RANGE = log(3)  # of the logits, where no text could be kept back
SHARPNESS = (0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9, 1.0, 1.15, 1.3)


# ---------------------------------------------------------------------------------------------- the input


def _read_config(config):
    lowest = {"vocab": 1, "dim": 1, "heads": 1, "context": 1, "layers": 0, "seed": 0}
    missing = [name for name in [*lowest, "seconds"] if name not in config]
    if missing:
        raise ValueError(f"config lacks {missing}")
    numbers = {}
    for name, least in lowest.items():
        if isinstance(config[name], bool | np.bool_):
            raise TypeError(f"{name} must be an int")
        numbers[name] = index(config[name])
        if numbers[name] < least:
            raise ValueError(f"{name} must be at least {least}")
    if numbers["dim"] % numbers["heads"]:
        raise ValueError("dim must be a multiple of heads")
    seconds = config["seconds"]
    if isinstance(seconds, str | bool | np.bool_):
        raise TypeError("seconds must be a number")
    seconds = float(seconds)
    if not isfinite(seconds) or seconds < 0:
        raise ValueError("seconds must be finite and not negative")
    size = Size(*(numbers[name] for name in Size._fields))
    return size, numbers["context"], numbers["seed"], seconds


def _read_documents(documents, vocab):
    read = []
    for document in documents:
        tokens = [index(token) for token in document]
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab:
            raise ValueError(f"token ids must lie in 0 ... {vocab - 1}")
        read.append(tokens)
    if not any(len(tokens) > 1 for tokens in read):
        raise ValueError("no token has a successor")
    return read


def _windows(documents, context):
    """Pieces of 2 to context + 1 tokens in which every successor of a document is predicted once."""
    return [
        np.array(tokens[start : start + context + 1])
        for tokens in documents
        for start in range(0, len(tokens) - 1, context)
    ]


def _keep_back(windows, vocab, rng):
    """Windows to train on and windows to judge by; a few long windows are halved first."""
    windows = list(windows)
    while len(windows) < FEW and max(map(len, windows)) >= SMALLEST:
        longest = windows.pop(int(np.argmax([len(window) for window in windows])))
        windows += [longest[: len(longest) // 2], longest[len(longest) // 2 :]]
    order = rng.permutation(len(windows))
    held = max(1, len(windows) // 10) if len(windows) > 2 else 0
    sizes = np.array([len(windows[place]) for place in order[:held]], dtype=np.int64)
    held = int(np.searchsorted(np.cumsum(sizes) - sizes, min(JUDGED_TOKENS, JUDGED_CELLS // vocab)))
    judged = [windows[place] for place in order[:held]]
    kept_back = {window.tobytes() for window in judged}  # copies of them would flatter every state
    rest = [window for window in windows if window.tobytes() not in kept_back]
    return (rest, judged) if rest else (windows, [])


class Batch:
    """Windows side by side, filled up with token 0; `real` names the places that are scored."""

    def __init__(self, windows):
        longest = max(map(len, windows))
        table = np.zeros((len(windows), longest), dtype=np.int64)
        real = np.zeros((len(windows), longest - 1), dtype=bool)
        for row, window in enumerate(windows):
            table[row, : len(window)] = window
            real[row, : len(window) - 1] = True
        self.tokens = table[:, :-1]
        self.targets = table[:, 1:].ravel()
        self.real = np.flatnonzero(real.ravel())


def _rows_per_batch(windows, size):
    length = max(map(len, windows)) - 1
    cells = max(length * length * size.heads, length * size.vocab, 4 * length * size.dim)
    return max(1, min(BATCH_TOKENS // length, BATCH_CELLS // cells))


# ---------------------------------------------------------------------------------------------- the weights


def _start(size, seed):
    rng = np.random.default_rng(seed)
    spread = {"head": 0.05, "embedding": 0.5}
    masters = {}
    for name, shape in shapes(size).items():
        width = spread.get(name, 1.0) / sqrt(shape[1]) if name != "embedding" else spread[name]
        masters[name] = (width * rng.standard_normal(shape)).astype(np.float32)
    return masters


def _ternary(masters):
    return {name: ternarize(master, GROUP) for name, master in masters.items()}


def _shadows(ternary):
    return {name: dequantize(*pair, GROUP) for name, pair in ternary.items()}


class Adam:
    def __init__(self, masters):
        self.mean = {name: np.zeros_like(master) for name, master in masters.items()}
        self.power = {name: np.zeros_like(master) for name, master in masters.items()}
        self.steps = 0

    def step(self, masters, grads, rate):
        self.steps += 1
        total = sqrt(sum(float(np.vdot(grad, grad)) for grad in grads.values()))
        shrink = min(1.0, CLIP / max(total, TINY))
        mean_fix, power_fix = 1 - MOMENTUM**self.steps, 1 - MEMORY**self.steps
        for name, grad in grads.items():
            mean, power = self.mean[name], self.power[name]
            mean += (1 - MOMENTUM) * (shrink * grad - mean)
            power += (1 - MEMORY) * (shrink * shrink * grad * grad - power)
            masters[name] -= (rate / mean_fix) * mean / (np.sqrt(power / power_fix) + TINY)


def _gradients(ternary, size, batch):
    network = Network(_shadows(ternary), size, batch.tokens)
    slope = np.zeros_like(network.logits)
    slope[batch.real] = np.exp(log_softmax(network.logits[batch.real]))
    slope[batch.real, batch.targets[batch.real]] -= 1
    return network.backward(slope / np.float32(batch.real.size))


# ---------------------------------------------------------------------------------------------- judging


class Judge:
    """Losses on the text kept back, diluted with imagined tokens that are all equally likely."""

    def __init__(self, windows, size):
        rows = _rows_per_batch(windows, size) if windows else 1
        ordered = sorted(windows, key=len)
        self.batches = [Batch(ordered[start : start + rows]) for start in range(0, len(ordered), rows)]
        self.size = size

    def _answers(self, ternary):
        weights = _shadows(ternary)
        for batch in self.batches:
            yield Network(weights, self.size, batch.tokens).logits[batch.real], batch.targets[batch.real]

    def losses(self, ternary, sharpness):
        """The loss for each factor on the head."""
        totals, count = np.zeros((2, len(sharpness))), 0
        for logits, targets in self._answers(ternary):
            count += targets.size
            for column, factor in enumerate(sharpness):
                laws = log_softmax(np.float32(factor) * logits)
                totals[0, column] -= laws[np.arange(targets.size), targets].sum()
                totals[1, column] -= laws.mean(axis=1).sum()
        seen, imagined = totals / count
        return (count * seen + DOUBT * imagined) / (count + DOUBT)


def _soften(ternary, factor):
    """The same model with the head's weights multiplied."""
    return ternary | {"head": ternarize(np.float32(factor) * dequantize(*ternary["head"], GROUP), GROUP)}


def _safe_factor(ternary, dim):
    """A factor for the head with which no two logits can differ by more than SAFE_RANGE."""
    rows = dequantize(*ternary["head"], GROUP)
    reach = 2 * sqrt(dim) * float(np.sqrt((rows * rows).sum(axis=1)).max())
    return min(1.0, SAFE_RANGE / max(reach, TINY))


def _all_moved(ternary, start):
    return not any(all(map(np.array_equal, pair, start[name])) for name, pair in ternary.items())


# ---------------------------------------------------------------------------------------------- training


def _order(count, rng):
    """Indices of windows for ever, each round in a new order."""
    while True:
        yield from rng.permutation(count)


class Run:
    """Training against the clock."""

    def __init__(self, masters, size, windows, judged, rng, began, seconds):
        self.masters, self.size = masters, size
        self.windows = windows
        self.judge = Judge(judged, size) if judged else None
        self.places = _order(len(windows), rng)
        self.rows = _rows_per_batch(windows, size)
        self.adam = Adam(masters)
        self.start = self.ternary = _ternary(masters)
        self.checked = 0
        self.best, self.best_rank = self.ternary, (False, -np.inf)
        self.began, self.seconds = began, seconds

    def _share(self):
        """The share of the training time that has gone."""
        return (perf_counter() - self.began) / (TRAINED_SHARE * self.seconds)

    def _step(self, share):
        batch = Batch([self.windows[next(self.places)] for _ in range(self.rows)])
        rate = RATE * min(1.0, (self.adam.steps + 1) / WARMUP) * max(0.05, 1 - share)
        self.adam.step(self.masters, _gradients(self.ternary, self.size, batch), rate)
        self.ternary = _ternary(self.masters)

    def _check(self):
        self.checked = self.adam.steps
        loss = self.judge.losses(self.ternary, [1.0])[0] if self.judge else -self.adam.steps
        rank = (_all_moved(self.ternary, self.start), -loss)
        if rank > self.best_rank:
            self.best, self.best_rank = self.ternary, rank

    def finish(self):
        share, slowest = self._share(), 0.0
        next_check = 1 / CHECKS
        while share + slowest < 1:
            self._step(share)
            if next_check <= self._share() < 1:
                self._check()
                next_check = self._share() + 1 / CHECKS
            now = self._share()
            share, slowest = now, max(0.9 * slowest, now - share)
        if self.checked < self.adam.steps:
            self._check()
        if self.judge is None:
            return _soften(self.best, _safe_factor(self.best, self.size.dim))
        losses = self.judge.losses(self.best, SHARPNESS)
        return _soften(self.best, SHARPNESS[int(np.argmin(losses))])


def train(documents, config):
    """{name: (codes, scales)} of the small language model."""
    began = perf_counter()
    size, context, seed, seconds = _read_config(config)
    read = _read_documents(documents, size.vocab)
    masters = _start(size, seed)
    if seconds == 0:
        return _ternary(masters)
    rng = np.random.default_rng([seed, 1])
    windows, judged = _keep_back(_windows(read, context), size.vocab, rng)
    return Run(masters, size, windows, judged, rng, began, seconds).finish()
