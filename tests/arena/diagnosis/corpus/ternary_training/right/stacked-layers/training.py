"""The trainer: windows, Adam on latent weights with a straight-through quantiser, a watch on the clock."""

import time

import numpy as np

from model import backward, forward, loss, stack, starting_weights, unstack

BATCH_TOKENS = 640
LONGEST_WINDOW = 512
BUDGET_SHARE = 0.9
PEAK_RATE = 0.05
WARM_UP = 0.05
DECAY = 0.02
MEMORY = (0.9, 0.98)
LOOKS = 12
HELD_OUT_TOKENS = 1200
SOFTENING = (1.0, 0.8, 0.6, 0.45, 0.3, 0.2, 0.1, 0.03)


def windows_of(documents, context):
    """Pieces of at most context + 1 tokens; neighbours share a token, so every successor is predicted once."""
    reach = min(context, LONGEST_WINDOW)
    return [
        document[start : start + reach + 1]
        for document in documents
        for start in range(0, len(document) - 1, reach)
    ]


def batch_of(windows):
    """Inputs and targets, both (B, T); the targets behind a window's end are -1."""
    longest = max(len(window) for window in windows)
    tokens = np.zeros((len(windows), longest - 1), np.int64)
    targets = np.full(tokens.shape, -1)
    for row, window in enumerate(windows):
        tokens[row, : len(window) - 1] = window[:-1]
        targets[row, : len(window) - 1] = window[1:]
    return tokens, targets


def in_batches(windows):
    """The windows in order, in lists of about BATCH_TOKENS tokens."""
    size = max(1, BATCH_TOKENS // max(len(window) for window in windows))
    return [windows[start : start + size] for start in range(0, len(windows), size)]


def rounds(windows, rng):
    """Batches for ever, every window once a round."""
    while True:
        order = rng.permutation(len(windows))
        for chosen in in_batches([windows[index] for index in order]):
            yield batch_of(chosen)


def mean_losses(weights, windows, heads, factors=(1.0,)):
    """Mean negative log-probability of the windows' tokens, for every factor on the logits."""
    totals = np.zeros(len(factors))
    for chosen in in_batches(windows):
        tokens, targets = batch_of(chosen)
        logits, _ = forward(weights, tokens, heads)
        known = int((targets >= 0).sum())
        totals += [known * loss(logits * np.float32(factor), targets, 0.0)[0] for factor in factors]
    return totals / sum(len(window) - 1 for window in windows)


class Adam:
    """Adam with the rate given at every step."""

    def __init__(self, weights):
        self.first = {kind: np.zeros_like(array) for kind, array in weights.items()}
        self.second = {kind: np.zeros_like(array) for kind, array in weights.items()}
        self.steps = 0

    def step(self, weights, grads, rates):
        """Change the weights in place."""
        self.steps += 1
        fast, slow = MEMORY
        for kind, grad in grads.items():
            first, second = self.first[kind], self.second[kind]
            first += (1 - fast) * (grad - first)
            second += (1 - slow) * (grad * grad - second)
            size = np.sqrt(second / (1 - slow**self.steps)) + 1e-8
            weights[kind] *= np.float32(1 - DECAY * rates[kind])
            weights[kind] -= np.float32(rates[kind] / (1 - fast**self.steps)) * first / size


def rate_at(progress):
    """Linear warm-up, then linear decay to a little."""
    return min(progress / WARM_UP + 0.02, 1.0) * max(1 - progress, 0.02)


class Ternary:
    """The quantiser, and the ways from latent weights to the tensors of the answer and back."""

    def __init__(self, quantise, dequantize, layers):
        self.quantise = quantise
        self.dequantize = dequantize
        self.layers = layers

    def tensors(self, latent):
        """{name: (codes, scales)} of stacked latent weights."""
        return {name: self.quantise(array) for name, array in unstack(latent, self.layers).items()}

    def weights(self, tensors):
        """The stacked float32 weights that the tensors stand for."""
        return stack({name: self.dequantize(*pair) for name, pair in tensors.items()}, self.layers)

    def rounded(self, latent):
        """Stacked latent weights as the model will see them."""
        return {kind: self.dequantize(*self.quantise(array)) for kind, array in latent.items()}

    def softened(self, tensors, heads, watched):
        """The tensors with the head's scales lowered as far as the watched windows ask for."""
        weights = self.weights(tensors)
        losses = mean_losses(weights, watched, heads, SOFTENING)
        factor = np.float32(SOFTENING[int(np.argmin(losses))])
        return {**tensors, "head": self.quantise(weights["head"] * factor)}


def watch(windows, limit):
    """The first windows, up to about `limit` tokens."""
    ends = np.cumsum([len(window) for window in windows])
    return windows[: max(1, int(np.searchsorted(ends, limit)))]


def rates(latent, progress):
    """The step size of every kind: in proportion to the size of its starting weights."""
    rate = PEAK_RATE * rate_at(progress)
    return {
        kind: rate if kind == "embedding" else 2 * rate * array.shape[-1] ** -0.5
        for kind, array in latent.items()
    }


def train_model(texts, sides, settings, quantise, dequantize):
    """The quantised tensors after `seconds` of training, watched on the second of the two `sides`."""
    began = time.monotonic()
    heads, context = settings["heads"], settings["context"]
    ternary = Ternary(quantise, dequantize, settings["layers"])
    latent = stack(starting_weights(settings), settings["layers"])
    budget = BUDGET_SHARE * settings["seconds"]
    if budget == 0:
        return ternary.tensors(latent)
    windows, held_out = (windows_of(side, context) for side in sides)
    watched = watch(held_out, HELD_OUT_TOKENS) if windows and held_out else []
    if not watched:
        windows = windows_of(texts, context)
    known = sum(len(window) - 1 for window in windows)
    smoothing = min(0.4, (10 if watched else 60) / known)
    optimiser = Adam(latent)
    best, best_loss, next_look = None, np.inf, 1 / LOOKS
    for tokens, targets in rounds(windows, np.random.default_rng(settings["seed"])):
        progress = (time.monotonic() - began) / budget
        if progress >= 1:
            break
        weights = ternary.rounded(latent)
        logits, state = forward(weights, tokens, heads)
        grads = backward(weights, tokens, heads, loss(logits, targets, smoothing)[1], state)
        optimiser.step(latent, grads, rates(latent, progress))
        if watched and progress >= next_look:
            next_look = progress + 1 / LOOKS
            value = mean_losses(ternary.rounded(latent), watched, heads)[0]
            if value < best_loss:
                best, best_loss = ternary.tensors(latent), value
    final = ternary.tensors(latent)
    if not watched:
        return final
    if best is not None and mean_losses(ternary.weights(final), watched, heads)[0] > best_loss:
        final = best
    return ternary.softened(final, heads, watched)
