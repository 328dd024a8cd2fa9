"""Training of the small model: Adam on latent weights, straight through the quantiser.

The forward pass sees exactly the weights that will be shipped: codes times the float16 scale. The
gradient with respect to those is applied to the latent weights unchanged. There is no weight decay:
it would drag latent weights over the thresholds for no reason that the data gave. What is kept is
the best model on documents that were never trained on, not the last one.
"""

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from model import Config, Weights, loss_and_gradients, loss_only, tensor_shapes

Documents = Sequence[Sequence[int]]
Batch = tuple[np.ndarray, np.ndarray, np.ndarray]
Quantise = Callable[[np.ndarray], np.ndarray]

BATCH_TOKENS = 512
PEAK_RATE = 0.1
FINAL_RATE = 0.01
WARM_UP_STEPS = 4
BETAS = (0.9, 0.98)
CLIP = 1.0
PATIENCE = 12
EVALUATE_EVERY = 10
#: A head that begins small begins close to "every token is equally likely".
SPREAD = {"head": 0.2, "embedding": 4.0}


def initial_weights(config: Config) -> Weights:
    """Latent weights, drawn from the seed, float32."""
    rng = np.random.default_rng(config["seed"])
    weights = {}
    for name, (rows, columns) in tensor_shapes(config).items():
        spread = SPREAD.get(name, 1.0) * columns**-0.5
        weights[name] = (rng.standard_normal((rows, columns)) * spread).astype(np.float32)
    return weights


def fit(train: Documents, valid: Documents, config: Config, quantise: Quantise) -> Weights:
    """Latent weights of the best model found within `config["seconds"]`.

    `train` and `valid` are lists of token arrays of 2 to context + 1 tokens; `quantise` maps a
    latent tensor to the float32 tensor that ternary storage would give back.
    """
    start = time.monotonic()
    latent = initial_weights(config)
    if config["seconds"] <= 0:
        return latent
    return _Run(latent, config, quantise, start).best(train, valid)


class _Run:
    """One training run: latent weights, Adam's moments, and the clock."""

    def __init__(self, latent: Weights, config: Config, quantise: Quantise, start: float) -> None:
        self.latent = latent
        self.config = config
        self.quantise = quantise
        self.start = start
        self.rng = np.random.default_rng([config["seed"], 1])
        self.first = {name: np.zeros_like(value) for name, value in latent.items()}
        self.second = {name: np.zeros_like(value) for name, value in latent.items()}
        self.steps = 0

    def best(self, train: Documents, valid: Documents) -> Weights:
        """Train until the time is over or the held-out loss has stopped falling."""
        held_out = collate(valid)
        best_loss, best, stale = self.held_out_loss(held_out), _copy(self.latent), 0
        batches = _endless_batches(train, self.rng)
        while self.progress() < 1.0 and stale < PATIENCE:
            self.step(next(batches))
            if self.steps % EVALUATE_EVERY == 0 or self.progress() >= 1.0:
                loss = self.held_out_loss(held_out)
                stale += 1
                if loss < best_loss:
                    best_loss, best, stale = loss, _copy(self.latent), 0
        return best

    def progress(self) -> float:
        """The share of the time that is over."""
        return (time.monotonic() - self.start) / self.config["seconds"]

    def quantised(self) -> Weights:
        """The weights as they will be shipped."""
        return {name: self.quantise(value) for name, value in self.latent.items()}

    def held_out_loss(self, held_out: Batch) -> float:
        """How well the shipped weights do on what was not trained on."""
        return loss_only(self.quantised(), *held_out, self.config)

    def step(self, batch: Batch) -> None:
        """One batch: gradients, clipping, Adam."""
        _, gradients = loss_and_gradients(self.quantised(), *batch, self.config)
        norm = np.sqrt(sum(float(np.sum(g * g)) for g in gradients.values()))
        shrink = min(1.0, CLIP / (norm + 1e-12))
        self.steps += 1
        for name, gradient in gradients.items():
            self._adam(name, gradient * np.float32(shrink))

    def _adam(self, name: str, gradient: np.ndarray) -> None:
        """Move one latent tensor; moments are corrected for their start at zero."""
        slow, slower = BETAS
        first, second = self.first[name], self.second[name]
        first += (1 - slow) * (gradient - first)
        second += (1 - slower) * (gradient * gradient - second)
        unbiased = first / (1 - slow**self.steps)
        size = np.sqrt(second / (1 - slower**self.steps)) + 1e-8
        self.latent[name] -= np.float32(self._rate(name)) * unbiased / size

    def _rate(self, name: str) -> float:
        """Warm-up, then a straight line down over the time left; relative to a row's size."""
        warm = min(1.0, self.steps / WARM_UP_STEPS)
        done = min(1.0, self.progress())
        size = self.latent[name].shape[1] ** -0.5 * (SPREAD[name] if name == "embedding" else 1.0)
        return warm * size * (PEAK_RATE + (FINAL_RATE - PEAK_RATE) * done)


def collate(documents: Documents) -> Batch:
    """Pad documents to (tokens, targets, weight), each (B, T)."""
    length = max(len(document) for document in documents) - 1
    tokens = np.zeros((len(documents), length), dtype=np.int64)
    targets = np.zeros_like(tokens)
    weight = np.zeros(tokens.shape, dtype=np.float32)
    for row, document in enumerate(documents):
        size = len(document) - 1
        tokens[row, :size] = document[:-1]
        targets[row, :size] = document[1:]
        weight[row, :size] = 1.0
    return tokens, targets, weight


def _endless_batches(documents: Documents, rng: np.random.Generator) -> Iterator[Batch]:
    """Batches of about BATCH_TOKENS tokens, every document once in each pass, in a new order."""
    longest = max(len(document) for document in documents)
    size = max(1, BATCH_TOKENS // longest)
    while True:
        order = rng.permutation(len(documents))
        for begin in range(0, len(order), size):
            yield collate([documents[i] for i in order[begin : begin + size]])


def _copy(weights: Weights) -> Weights:
    """The weights as they are now."""
    return {name: value.copy() for name, value in weights.items()}
