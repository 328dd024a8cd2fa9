"""Training of the small model: sign descent on latent weights, straight through the quantiser.

The forward pass sees exactly the weights that will be shipped: codes times the float16 scale. The
gradient with respect to those moves the latent weights. A step has the same size in every weight of
a tensor and only its direction is the gradient's: a code changes when its latent weight crosses a
threshold, so what counts is how far it moves against the spread of its row. Steps shrink as time
runs out. There is no weight decay: it would drag latent weights over the thresholds for no reason
that the data gave. What is kept is the best model on documents that were never trained on, not the
last one.
"""

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from model import Config, Weights, loss_and_gradients, loss_only, tensor_shapes

Documents = Sequence[Sequence[int]]
Batch = tuple[np.ndarray, np.ndarray]
Quantise = Callable[[np.ndarray], np.ndarray]

BATCH_TOKENS = 512
RATE = 0.1
EVALUATE_EVERY = 10
PATIENCE = 12


def initial_weights(config: Config) -> Weights:
    """Latent weights, drawn from the seed, float32."""
    rng = np.random.default_rng(config["seed"])
    weights = {}
    for name, shape in tensor_shapes(config).items():
        weights[name] = (rng.standard_normal(shape) * _spread(shape)).astype(np.float32)
    return weights


def fit(train: Documents, valid: Documents, config: Config, quantise: Quantise) -> Weights:
    """Latent weights of the best model found within `config["seconds"]`.

    `train` and `valid` are lists of token arrays of 2 to context + 1 tokens; `quantise` maps a
    latent tensor to the float32 tensor that ternary storage would give back.
    """
    start = time.monotonic()
    latent = initial_weights(config)
    if config["seconds"] == 0:
        return latent
    return _Run(latent, config, quantise, start).best(train, valid)


class _Run:
    """One training run: latent weights and the clock."""

    def __init__(self, latent: Weights, config: Config, quantise: Quantise, start: float) -> None:
        self.latent = latent
        self.config = config
        self.quantise = quantise
        self.start = start

    def best(self, train: Documents, valid: Documents) -> Weights:
        """Train until the time is over or the held-out loss has stopped falling."""
        held_out = collate(valid)
        best_loss, best, patience = self.held_out_loss(held_out), _copy(self.latent), PATIENCE
        batches = _endless_batches(train, self.config["seed"])
        while self.time_left() > 0 and patience:
            for _ in range(EVALUATE_EVERY):
                self.step(next(batches), max(0.0, self.time_left()))
            patience -= 1
            loss = self.held_out_loss(held_out)
            if loss < best_loss:
                best_loss, best, patience = loss, _copy(self.latent), PATIENCE
        return best

    def time_left(self) -> float:
        """The share of the time that is left; below 0 when it is over."""
        return 1 - (time.monotonic() - self.start) / self.config["seconds"]

    def quantised(self) -> Weights:
        """The weights as they will be shipped."""
        return {name: self.quantise(value) for name, value in self.latent.items()}

    def held_out_loss(self, held_out: Batch) -> float:
        """How well the shipped weights do on what was not trained on."""
        return loss_only(self.quantised(), *held_out, self.config)

    def step(self, batch: Batch, share: float) -> None:
        """One batch: gradients, and a move of the size that this time calls for."""
        _, gradients = loss_and_gradients(self.quantised(), *batch, self.config)
        for name, gradient in gradients.items():
            size = RATE * share * _spread(gradient.shape)
            self.latent[name] -= np.float32(size) * np.sign(gradient)


def _spread(shape: tuple[int, ...]) -> float:
    """How large the weights of a tensor begin; a step is measured by it."""
    _, columns = shape
    return columns**-0.5


def collate(documents: Documents) -> Batch:
    """Pad documents to (tokens, targets), each (B, T); a target of -1 is none.

    A padded token is -1 too and reads the last row of the embedding: no real position sees it, and
    no gradient comes back from it.
    """
    table = np.full((len(documents), max(map(len, documents))), -1)
    for row, document in enumerate(documents):
        table[row, : len(document)] = document
    return table[:, :-1], table[:, 1:]


def _endless_batches(documents: Documents, seed: int) -> Iterator[Batch]:
    """Batches of about BATCH_TOKENS tokens, every document once in each pass, in a new order."""
    rng = np.random.default_rng(seed)
    size = max(1, BATCH_TOKENS // max(map(len, documents)))
    while True:
        order = rng.permutation(len(documents))
        for begin in range(0, len(order), size):
            yield collate([documents[i] for i in order[begin : begin + size]])


def _copy(weights: Weights) -> Weights:
    """The weights as they are now."""
    return {name: value.copy() for name, value in weights.items()}
