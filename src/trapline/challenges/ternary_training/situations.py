"""Situations that several checks share: weights on a grid, configurations, trained models.

Weights whose sums must not depend on the order of summation lie on a coarse binary grid: sums of a
few hundred of them are exact in float32, so that any right algorithm decides the same for a group
alone and among others.
"""

import time
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from trapline.arena.errors import Violation
from trapline.arena.judge import expect
from trapline.arena.process.proxy import Submission
from trapline.arena.process.time_limit import ProcessorWait
from trapline.arena.process.transcript import Exchange
from trapline.challenges.ternary_training.text import (
    Document,
    Grammar,
    noise,
    prose,
    unigram_perplexity,
)
from trapline.gold.ternary import small_lm

GROUP = 128
VOCAB = 40
Config = dict[str, Any]
Tensors = dict[str, tuple[np.ndarray, np.ndarray]]


def grid(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """float32 weights, multiples of 1/64 between −4 and 4, none of them 0."""
    steps = rng.integers(1, 257, shape) * rng.choice([-1, 1], shape)
    weights: np.ndarray = (steps / 64.0).astype(np.float32)
    return weights


def clear_cut(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """The same, one in four close to 0 and the others above 2.5: no weight lies on a threshold.

    Where one does, rounding decides, and for an answer that divides before it compares, rounding
    depends on the memory layout. The same holds for a scale halfway between two float16 numbers: in
    groups of 12 there is none.
    """
    large = rng.random(shape) < 0.75
    steps = np.where(large, rng.integers(160, 193, shape), rng.integers(1, 4, shape))
    weights: np.ndarray = (steps * rng.choice([-1, 1], shape) / 64.0).astype(np.float32)
    return weights


def exact(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    """0 and ±scale, each of them at least once a row: the contract fixes codes and scales."""
    codes = rng.integers(-1, 2, shape)
    codes[..., :3] = (1, -1, 0)
    weights: np.ndarray = (codes * scale).astype(np.float32)
    return weights


def ternary_codes(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random codes."""
    return rng.integers(-1, 2, shape).astype(np.int8)


def quantised(
    submission: Submission, w: np.ndarray, group_size: int = GROUP, what: str = "ternarize"
) -> tuple[np.ndarray, np.ndarray]:
    """The submission's codes and scales, once they have the form that the contract gives them."""
    answer = submission.ternarize(w, group_size)
    return well_formed(answer, w.shape, group_size, what)


def well_formed(
    answer: Any, shape: tuple[int, ...], group_size: int, what: str
) -> tuple[np.ndarray, np.ndarray]:
    """A pair of int8 codes in −1, 0, 1 and finite float16 scales, one a group."""
    pair = isinstance(answer, tuple | list) and len(answer) == 2
    expect.that(pair, f"{what} gave no pair of codes and scales")
    groups = -(-shape[-1] // group_size)
    codes = expect.array(answer[0], shape=shape, dtype=np.int8, what=f"{what}: codes")
    scales = expect.array(
        answer[1], shape=(*shape[:-1], groups), dtype=np.float16, what=f"{what}: scales"
    )
    expect.that(bool(np.all(np.abs(codes) <= 1)), f"{what}: a code is not −1, 0 or 1")
    good = bool(np.all(np.isfinite(scales)) and np.all(scales >= 0))
    expect.that(good, f"{what}: a scale is negative or not finite")
    return codes, scales


def refuses(submission: Submission, entry: str, *args: Any) -> None:
    """The submission answers these arguments with `ValueError` or `TypeError`."""
    expect.raises((ValueError, TypeError), submission.call, entry, args, {})


def config_of(rng: np.random.Generator, **changes: Any) -> Config:
    """A model that starts in milliseconds; nothing is trained unless `seconds` is given."""
    settings: Config = {
        "vocab": VOCAB,
        "dim": 32,
        "layers": 2,
        "heads": 4,
        "context": 32,
        "seconds": 0,
        "seed": int(rng.integers(2**31)),
    }
    return {**settings, **changes}


@dataclass(frozen=True)
class Trained:
    """What one training gave, and documents that it has not seen."""

    config: Config
    tensors: Tensors
    grammar: Grammar
    shown: list[Document]
    #: Of the grammar alone.
    unseen: list[Document]
    unseen_prose: list[Document]
    #: Perplexity of word counts on `unseen`.
    unigram: float
    #: The call, which every check that looks at its answer shows among its own.
    exchange: Exchange


#: What `_exercise` takes on an idle core, and the longest that a budget is stretched.
IDLE_SECONDS, MOST = 0.05, 6.0


def unhurried(seconds: float) -> float:
    """`seconds` on an idle machine; more where this one is slow, or busy with something else.

    Other cells that are judged in this process do not make the machine slow: waiting for them,
    which no processor is needed for, does not count where the kernel says what does.
    """
    started, used, wait = time.perf_counter(), time.thread_time(), ProcessorWait()
    _exercise()
    taken = time.perf_counter() - started
    if waited := wait.seconds():
        taken = min(taken, time.thread_time() - used + waited)
    return round(seconds * min(MOST, max(1.0, taken / IDLE_SECONDS)), 1)


def _exercise() -> None:
    """Small arrays, over and over: what a training step of the small model is made of."""
    weights = np.linspace(-1.0, 1.0, 64 * 64, dtype=np.float32).reshape(64, 64)
    for _ in range(400):
        np.exp(np.tanh(weights @ weights.T)).sum(axis=-1)


_TRAINED: "WeakKeyDictionary[Submission, Trained | Violation]" = WeakKeyDictionary()
#: Many times what learning takes; a good trainer stops before.
SECONDS, FULL_SECONDS, NOISE_SECONDS = 6, 60, 3
#: Enough for the gold solution and its mutants.
OUR_SECONDS = 2
#: What a rule takes: the short training shows it, the long one is for slower answers.
SHORT_RULE_SECONDS, RULE_SECONDS = 0.6, 3
#: Enough for a first step, where only the form of what comes back counts.
MOMENT = 0.05
UNSEEN_LINES = 15


def trained(submission: Submission, rng: np.random.Generator) -> Trained:
    """The submission's model of a fresh grammar and some prose; trained once for all checks."""
    if submission not in _TRAINED:
        try:
            _TRAINED[submission] = _train(submission, rng)
        except Violation as violation:
            _TRAINED[submission] = violation
    found = _TRAINED[submission]
    if isinstance(found, Violation):
        raise found
    exchanges = submission.transcript.exchanges
    if all(exchange is not found.exchange for exchange in exchanges):
        exchanges.append(found.exchange)
    return found


def _train(submission: Submission, rng: np.random.Generator) -> Trained:
    grammar = Grammar(rng, VOCAB)
    lines, letters = prose(first=VOCAB)
    order = [lines[index] for index in rng.permutation(len(lines))]
    if submission.is_ours:
        seconds = unhurried(OUR_SECONDS)
    else:
        seconds = FULL_SECONDS if submission.full else unhurried(SECONDS)
    config = config_of(rng, vocab=VOCAB + letters, seconds=seconds)
    longest = config["context"] + 1
    shown = [*grammar.documents(rng, 200, longest), *order[UNSEEN_LINES:]]
    unseen = grammar.documents(rng, 60, longest)
    unseen_prose = [line[:longest] for line in order[:UNSEEN_LINES]]
    started = time.monotonic()
    tensors = submission.train(shown, config)
    taken, granted = time.monotonic() - started, 1.4 * seconds + 3
    expect.that(taken <= granted, f"{taken:.0f} s of training, {granted:.0f} s are granted")
    return Trained(
        config=config,
        tensors=tensors,
        grammar=grammar,
        shown=shown,
        unseen=unseen,
        unseen_prose=unseen_prose,
        unigram=unigram_perplexity(shown, unseen, config["vocab"]),
        exchange=submission.transcript.exchanges[-1],
    )


def share_of_counting(
    submission: Submission,
    rng: np.random.Generator,
    documents: list[Document],
    unseen: int,
    seconds: float,
    **changes: Any,
) -> float:
    """Perplexity on the last `unseen` documents, over that of word counts, once trained on the
    others for so many `seconds`."""
    shown, judged = documents[:-unseen], documents[-unseen:]
    config = config_of(rng, layers=1, seconds=unhurried(seconds), **changes)
    tensors = submission.train(shown, config)
    for name, shape in small_lm.tensor_shapes(config).items():
        expect.that(isinstance(tensors, dict) and name in tensors, f"there is no tensor {name}")
        well_formed(tensors[name], shape, GROUP, name)
    got = small_lm.perplexity(small_lm.dense(tensors), judged, config)
    return got / unigram_perplexity(shown, judged, config["vocab"])


@dataclass(frozen=True)
class OnNoise:
    """What training on noise gave, and more noise of the same kind."""

    config: Config
    tensors: Tensors
    unseen: list[Document]


_ON_NOISE: "WeakKeyDictionary[Submission, tuple[OnNoise, Exchange]]" = WeakKeyDictionary()


def trained_on_few(submission: Submission, rng: np.random.Generator) -> OnNoise:
    """A few documents of noise; trained once for all checks."""
    if submission not in _ON_NOISE:
        run = trained_on_noise(submission, rng, count=32, length=16, vocab=32, heads=2)
        _ON_NOISE[submission] = run, submission.transcript.exchanges[-1]
    run, call = _ON_NOISE[submission]
    exchanges = submission.transcript.exchanges
    if all(exchange is not call for exchange in exchanges):
        exchanges.append(call)
    return run


def trained_on_noise(
    submission: Submission,
    rng: np.random.Generator,
    *,
    count: int,
    length: int,
    copies: int = 1,
    **changes: Any,
) -> OnNoise:
    """Documents of random tokens: predicting them takes memorising them or seeing the targets."""
    budget = unhurried(NOISE_SECONDS)
    config = config_of(rng, dim=24, layers=1, context=length - 1, seconds=budget, **changes)
    shown = noise(rng, config["vocab"], count, length) * copies
    unseen = noise(rng, config["vocab"], 100, length)
    return OnNoise(config, submission.train(shown, config), unseen)


def tensor_of(answer: object, name: str, config: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    expect.that(isinstance(answer, dict) and name in answer, f"there is no tensor {name}")
    assert isinstance(answer, dict)
    return well_formed(answer[name], small_lm.tensor_shapes(config)[name], GROUP, name)


def same_tensors(first: object, second: object) -> bool:
    expect.that(isinstance(first, dict) and isinstance(second, dict), "train gave no dict")
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    return sorted(first) == sorted(second) and all(
        same_pair(first[name], second[name]) for name in first
    )


def same_pair(one: Any, other: Any) -> bool:
    """Equal codes and scales."""
    return len(one) == len(other) and all(map(np.array_equal, one, other))
