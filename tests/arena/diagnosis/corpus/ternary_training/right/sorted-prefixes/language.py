"""The language model of prompt.md in NumPy: forward, backward, and the loop that fits it within its time."""

import math
import time
from typing import NamedTuple

import numpy as np

EPSILON = 1e-6
PEAK = 0.015  # the highest learning rate
DECAY = np.float32(0.02)
WORK = 1.5e9  # floating-point operations of one step, roughly


class Course(NamedTuple):
    """What a model learns from and what it is checked with: lists of token windows, and two of these for noise."""

    learn: list
    held_out: list
    noise: tuple
    doubtful: bool  # the held-out text says little: copies abound, or there is none


class Batch(NamedTuple):
    """Windows side by side: inputs and targets (windows, T), and which targets count."""

    inputs: np.ndarray
    targets: np.ndarray
    counts: np.ndarray


def batch_of(windows):
    longest = max(len(window) for window in windows) - 1
    inputs = np.zeros((len(windows), longest), np.int64)
    targets = np.zeros_like(inputs)
    counts = np.zeros(inputs.shape, bool)
    for row, window in enumerate(windows):
        length = len(window) - 1
        inputs[row, :length] = window[:-1]
        targets[row, :length] = window[1:]
        counts[row, :length] = True
    return Batch(inputs, targets, counts)


def norm(x):
    """x with mean square 1, and the factor of every row."""
    factor = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(EPSILON))
    return x * factor, factor


def norm_backward(dy, y, factor):
    return factor * (dy - y * np.mean(dy * y, axis=-1, keepdims=True))


def penalties(heads, length):
    """What is added to scores[h, s, r]: the distance times the head's slope, −inf for later tokens."""
    slopes = 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)
    distance = np.arange(length)[:, None] - np.arange(length)
    return np.where(distance >= 0, -slopes[:, None, None] * distance, -np.inf).astype(np.float32)


class Model:
    """One pass of the model over a batch, with what the way back needs."""

    def __init__(self, weights, sizes):
        self.weights = weights
        self.layers, self.heads = sizes["layers"], sizes["heads"]
        self.width = sizes["dim"] // sizes["heads"]
        self.root = np.float32(math.sqrt(self.width))

    def _split_heads(self, x):
        return x.reshape(*x.shape[:2], self.heads, self.width).swapaxes(1, 2)

    def _join_heads(self, x):
        return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)

    def forward(self, inputs):
        """Logits (windows, T, vocab)."""
        w = self.weights
        bias = penalties(self.heads, inputs.shape[1])
        x = w["embedding"][inputs]
        self.inputs, self.kept = inputs, []
        for layer in range(self.layers):
            name = f"layers.{layer}."
            a, factor = norm(x)
            q, k, v = (self._split_heads(a @ w[name + part].T) for part in "qkv")
            scores = q @ k.swapaxes(-1, -2) / self.root + bias
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= scores.sum(axis=-1, keepdims=True)
            mixed = self._join_heads(scores @ v)
            x = x + mixed @ w[name + "o"].T
            b, second = norm(x)
            hidden = np.maximum(b @ w[name + "up"].T, 0)
            x = x + hidden @ w[name + "down"].T
            self.kept.append((a, factor, q, k, v, scores, mixed, b, second, hidden))
        self.last, self.last_factor = norm(x)
        return self.last @ w["head"].T

    def backward(self, dlogits):
        """Gradients of all weights."""
        w, gradients = self.weights, {}

        def product(dy, x, name):
            gradients[name] = dy.reshape(-1, dy.shape[-1]).T @ x.reshape(-1, x.shape[-1])
            return dy @ w[name]

        dx = norm_backward(product(dlogits, self.last, "head"), self.last, self.last_factor)
        for layer in reversed(range(self.layers)):
            name = f"layers.{layer}."
            a, factor, q, k, v, weights, mixed, b, second, hidden = self.kept[layer]
            dhidden = product(dx, hidden, name + "down") * (hidden > 0)
            dx = dx + norm_backward(product(dhidden, b, name + "up"), b, second)
            dmixed = self._split_heads(product(dx, mixed, name + "o"))
            dv = weights.swapaxes(-1, -2) @ dmixed
            dscores = dmixed @ v.swapaxes(-1, -2)
            dscores -= np.sum(dscores * weights, axis=-1, keepdims=True)
            dscores *= weights / self.root
            dq, dk = dscores @ k, dscores.swapaxes(-1, -2) @ q
            da = sum(product(self._join_heads(part), a, name + at) for part, at in ((dq, "q"), (dk, "k"), (dv, "v")))
            dx = dx + norm_backward(da, a, factor)
        vocab = w["embedding"].shape[0]
        once = (self.inputs.reshape(-1, 1) == np.arange(vocab)).astype(np.float32) if vocab <= 256 else None
        flat = dx.reshape(-1, dx.shape[-1])
        if once is not None:
            gradients["embedding"] = once.T @ flat
        else:
            gradients["embedding"] = np.zeros_like(w["embedding"])
            np.add.at(gradients["embedding"], self.inputs.reshape(-1), flat)
        return gradients


def losses(logits, batch):
    """Negative log-probabilities of the targets that count, and all probabilities."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    probabilities = np.exp(shifted)
    total = probabilities.sum(axis=-1, keepdims=True)
    probabilities /= total
    chosen = np.take_along_axis(shifted, batch.targets[..., None], axis=-1)
    return (np.log(total) - chosen)[..., 0][batch.counts], probabilities


def loss_and_gradients(weights, sizes, batch):
    """The mean loss of a batch and the gradients of all weights."""
    model = Model(weights, sizes)
    values, slope = losses(model.forward(batch.inputs), batch)
    places = np.take_along_axis(slope, batch.targets[..., None], axis=-1)
    np.put_along_axis(slope, batch.targets[..., None], places - 1, axis=-1)
    slope *= batch.counts[..., None] / np.float32(batch.counts.sum())
    return float(values.mean()), model.backward(slope)


class Adam:
    """Adam with a rate that is given anew at every step."""

    def __init__(self, weights):
        self.mean = {name: np.zeros_like(weight) for name, weight in weights.items()}
        self.square = {name: np.zeros_like(weight) for name, weight in weights.items()}
        self.steps = 0

    def step(self, weights, gradients, rate):
        self.steps += 1
        fair_mean, fair_square = 1 - 0.9**self.steps, 1 - 0.98**self.steps
        for name, gradient in gradients.items():
            mean, square = self.mean[name], self.square[name]
            mean += 0.1 * (gradient - mean)
            square += 0.02 * (gradient * gradient - square)
            weights[name] *= 1 - rate * DECAY
            weights[name] -= rate * (mean / fair_mean) / (np.sqrt(square / fair_square) + 1e-8)


class Keeper:
    """Remembers the weights to hand back: those with the best cautious loss on held-out text.

    Cautious: the mean loss plus two standard errors, so that a few lucky words do not excuse rash probabilities.
    Where the held-out text says little and shows no gain, the weights are taken that are furthest trained while
    unordered text still costs no more than twice guessing.
    """

    def __init__(self, weights, sizes, course, shadow):
        self.sizes, self.shadow, self.doubtful = sizes, shadow, course.doubtful
        self.held_out = batch_of(course.held_out[: min(64, 4 * windows_at_once(weights, sizes))]) if course.held_out else None
        self.noise = [batch_of(windows) for windows in course.noise]
        self.guessing = math.log(sizes["vocab"])
        self.best, self.best_loss = copied(weights), math.inf
        self.tame, self.tame_loss = copied(weights), math.inf
        self.last = math.inf
        self.offer(weights, math.inf)

    def _losses(self, weights, batch):
        return losses(Model(weights, self.sizes).forward(batch.inputs), batch)[0]

    def offer(self, weights, train_loss):
        seen = self.shadow(weights)
        if self.held_out:
            values = self._losses(seen, self.held_out)
            self.last = float(values.mean() + 2 * values.std() / math.sqrt(values.size))
            if self.last < self.best_loss:
                self.best, self.best_loss = copied(weights), self.last
        if self.doubtful and train_loss < self.tame_loss:
            if max(self._losses(seen, batch).mean() for batch in self.noise) < self.guessing + math.log(2):
                self.tame, self.tame_loss = copied(weights), train_loss

    def hopeless(self):
        """Whether the held-out loss has risen far above its best."""
        return self.last > self.best_loss + 1 and (not self.doubtful or self.best_loss < self.guessing - 0.2)

    def choice(self):
        if self.doubtful and not self.best_loss < self.guessing - 0.1:
            return self.tame
        return self.best


def copied(weights):
    return {name: weight.copy() for name, weight in weights.items()}


def windows_at_once(weights, sizes):
    """How many windows a step takes, so that a large model's step does not outlast its time."""
    per_token = 6 * sum(weight.size for weight in weights.values()) + 6 * sizes["layers"] * sizes["context"] * sizes["dim"]
    return max(1, min(32, int(WORK / per_token / sizes["context"])))


def fit(weights, sizes, course, shadow, began, seconds):
    """Weights after training until `seconds` after `began`."""
    stream = np.random.default_rng([sizes["seed"], 2])
    weights = copied(weights)
    per_batch = min(len(course.learn), windows_at_once(weights, sizes))
    optimiser, keeper = Adam(weights), Keeper(weights, sizes, course, shadow)
    slowest, smooth, steps, checked = 0.0, None, 0, 0.0
    order = []
    while not keeper.hopeless():
        now = time.monotonic()
        spent = (now - began) / seconds
        if now - began + 1.5 * slowest > seconds * 0.95:
            break
        if len(order) < per_batch:
            order = stream.permutation(len(course.learn)).tolist()
        batch = batch_of([course.learn[order.pop()] for _ in range(per_batch)])
        loss, gradients = loss_and_gradients(shadow(weights), sizes, batch)
        rate = PEAK * min(1, (steps + 1) / 20) * max(0.03, math.cos(min(spent, 1) * math.pi / 2))
        optimiser.step(weights, gradients, np.float32(rate))
        smooth = loss if smooth is None else 0.9 * smooth + 0.1 * loss
        steps += 1
        if spent - checked > 0.03 or steps in (1, 3, 6, 10, 15, 20, 30, 40, 60, 80):
            keeper.offer(weights, smooth)
            checked = spent
        slowest = max(slowest, time.monotonic() - now)
    keeper.offer(weights, smooth if steps else math.inf)
    return keeper.choice()
