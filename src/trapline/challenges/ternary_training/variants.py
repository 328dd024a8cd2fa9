"""Models that differ from the judged one in one respect.

A trainer that computes another model than the prompt's gives weights that fit its own model. Each
variant is such a model: where trained weights do clearly better in it than in the judged one, and
in no other variant better still, the trainer has that bug.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np

from trapline.arena.errors import Violation
from trapline.arena.process.proxy import Submission
from trapline.arena.process.transcript import Exchange
from trapline.challenges.ternary_training.cases import UNIGRAM_SHARE, weights_of
from trapline.challenges.ternary_training.situations import (
    VOCAB,
    config_of,
    trained,
    trained_on_few,
    unhurried,
)
from trapline.challenges.ternary_training.text import (
    Grammar,
    ends_with_its_first,
    unigram_perplexity,
)
from trapline.gold.ternary import small_lm

Weights = Mapping[str, np.ndarray]
#: What row s of the logits is trained to score, of the document's tokens.
Target = Literal["next", "same", "previous", "second next"]


@dataclass(frozen=True)
class Variant:
    """The defaults are the judged model."""

    #: How many places ahead a position sees.
    ahead: int = 0
    #: Whether what lies ahead is favoured by its slope instead of put back like what lies behind.
    ahead_favoured: bool = False
    neighbouring_columns: bool = True
    norm_by_mean: bool = True
    norm_in_layers: bool = True
    attention_added: bool = True
    mlp_added: bool = True
    transposed: bool = False
    tied: bool = False
    #: The number of the first head, for its slope.
    first_head: int = 1
    #: Whether distance back is added to the scores.
    distance_added: bool = False
    #: Where the layers after the first take their MLP from.
    later_mlps: Literal["own", "first", "none"] = "own"
    activation: Literal["relu", "squared relu", "none"] = "relu"
    norm_before_head: bool = True
    #: What logits are multiplied by.
    sharpness: float = 1.0
    target: Target = "next"


JUDGED = Variant()
EVERYTHING = 10**6
#: With the ids of the traps that name them.
VARIANTS: tuple[tuple[str, Variant], ...] = (
    ("future-visible", Variant(ahead=1)),
    ("future-visible", Variant(ahead=1, ahead_favoured=True)),
    ("future-visible", Variant(ahead=EVERYTHING)),
    ("heads-interleaved", Variant(neighbouring_columns=False)),
    ("norm-by-sum", Variant(norm_by_mean=False)),
    ("layers-without-norm", Variant(norm_in_layers=False)),
    ("attention-not-added", Variant(attention_added=False)),
    ("mlp-not-added", Variant(mlp_added=False)),
    ("projections-transposed", Variant(transposed=True)),
    ("head-tied-in-training", Variant(tied=True)),
    ("mlp-of-the-first-layer", Variant(later_mlps="first")),
    ("another-activation", Variant(activation="squared relu")),
    ("another-activation", Variant(activation="none")),
    ("head-without-norm", Variant(norm_before_head=False)),
    ("predicts-the-present", Variant(target="same")),
    ("targets-reversed", Variant(target="previous")),
    ("targets-shifted-twice", Variant(target="second next")),
)
#: Of the judged model's perplexity. Weights of right answers reach 0.98 in the best variant.
CLEARLY_BETTER = 0.96
#: Half-trained weights of right answers reach 0.95 where they see what is to come; a trainer that
#: sees it copies the next token.
BETTER_BY_THE_FUTURE = 0.86
#: Right answers that were given a tenth of the time reach 0.72 without the last norm, at 0.25 of
#: counting words and worse; a trainer without it, which is judged when it has learned this much,
#: reaches 0.17 to 0.19 in a fifth of the time.
LEARNED_WITHOUT_LAST_NORM = 0.24
#: Without the last norm logits are larger or smaller, which alone helps weights that are too sure,
#: as those that learned their documents by heart: with one of these factors they do far better.
#: Weights that were made without it do as well with a factor, within a hundredth or two.
SHARPNESS = (0.5, 0.7, 1.5, 2.5)
BETTER_BY_SHARPNESS = 0.93
#: The same for slopes with one head, where weights of right answers reach 0.999.
BETTER_WITH_ONE_HEAD = 0.985
ONE_HEAD_SECONDS = 2
#: For the sign of the slopes. There weights of right answers reach 0.99, wrong ones 0.55 to 0.87.
DISTANCE_SECONDS = 4
#: For weights whose later MLPs are untrained. Made for the first one's they reach 0.87 to 0.96;
#: where only the gradient is missing 1.05, where those MLPs are left out 1.01.
BETTER_WITH_FIRST_MLP = 0.985
#: Of the perplexity of guessing: the contract's limit on noise.
COLLAPSED = 4.0
#: For weights beyond that limit. Learned by heart, they do a little better or worse by chance.
BETTER_IF_COLLAPSED = 0.5


def perplexity(
    weights: Weights, documents: Sequence[Sequence[int]], config: Mapping[str, Any], model: Variant
) -> float:
    """As `small_lm.perplexity`, in the variant."""
    found = []
    for tokens in _of_one_length(documents):
        logits = _logits(weights, tokens, config, model)
        rows, wanted = _pairs(tokens, model.target)
        scores = logits[:, rows] - logits[:, rows].max(axis=-1, keepdims=True)
        log_probs = scores - np.log(np.sum(np.exp(scores), axis=-1, keepdims=True))
        found.append(np.take_along_axis(log_probs, wanted[..., None], axis=-1).ravel())
    return float(np.exp(-np.mean(np.concatenate(found))))


def _of_one_length(documents: Sequence[Sequence[int]]) -> Iterator[np.ndarray]:
    """All documents, in one array for each length."""
    by_length: dict[int, list[Sequence[int]]] = {}
    for document in documents:
        by_length.setdefault(len(document), []).append(document)
    for alike in by_length.values():
        yield np.asarray(alike, dtype=int)


def _pairs(tokens: np.ndarray, target: Target) -> tuple[slice, np.ndarray]:
    """Rows of the logits and the tokens that they are to score; documents come first."""
    if target == "same":
        return slice(None), tokens
    if target == "previous":
        return slice(1, None), tokens[:, :-1]
    if target == "second next":
        return slice(None, -2), tokens[:, 2:]
    return slice(None, -1), tokens[:, 1:]


def _logits(
    weights: Weights, tokens: np.ndarray, config: Mapping[str, Any], model: Variant
) -> np.ndarray:
    """(documents, tokens, words)."""
    x = weights["embedding"][tokens]
    for layer in range(config["layers"]):
        part = {name: weights[f"layers.{layer}.{name}"] for name in "qkvo"}
        normed = _norm(x, model) if model.norm_in_layers else x
        mixed = _attention(normed, part, config["heads"], model)
        x = x + mixed if model.attention_added else mixed
        normed = _norm(x, model) if model.norm_in_layers else x
        if layer and model.later_mlps == "none":
            continue
        source = 0 if model.later_mlps == "first" else layer
        hidden = _active(normed @ weights[f"layers.{source}.up"].T, model)
        moved = hidden @ weights[f"layers.{source}.down"].T
        x = x + moved if model.mlp_added else moved
    head = weights["embedding" if model.tied else "head"]
    last: np.ndarray = (_norm(x, model) if model.norm_before_head else x) @ head.T
    return model.sharpness * last


def _active(x: np.ndarray, model: Variant) -> np.ndarray:
    if model.activation == "none":
        return x
    positive: np.ndarray = np.maximum(x, 0.0)
    return positive if model.activation == "relu" else positive**2


def _norm(x: np.ndarray, model: Variant) -> np.ndarray:
    squares = np.mean(x * x, axis=-1, keepdims=True)
    factor = 1.0 if model.norm_by_mean else x.shape[-1]
    normed: np.ndarray = x / np.sqrt(squares * factor + small_lm.EPS)
    return normed


def _attention(x: np.ndarray, part: Weights, heads: int, model: Variant) -> np.ndarray:
    length, dim = x.shape[1:]
    width = dim // heads
    back = np.arange(length)[:, None] - np.arange(length)
    distance = back if model.ahead_favoured else np.abs(back)
    if model.transposed:
        part = {name: weight.T for name, weight in part.items()}
    columns = np.arange(dim).reshape(heads, width)  # of each head
    if not model.neighbouring_columns:
        columns = np.arange(dim).reshape(width, heads).T
    # (documents, heads, tokens, width)
    q, k, v = (x[:, None] @ part[name][columns].swapaxes(1, 2) for name in "qkv")
    numbers = np.arange(heads)[:, None, None] + model.first_head
    slopes = 2.0 ** (-8.0 * numbers / heads)
    slopes = -slopes if model.distance_added else slopes
    scores = q @ k.swapaxes(2, 3) / np.sqrt(width) - slopes * distance
    scores = np.where(back >= -model.ahead, scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = np.zeros_like(x)
    answers = shares / shares.sum(axis=-1, keepdims=True) @ v
    mixed[..., columns] = answers.swapaxes(1, 2)
    joined: np.ndarray = mixed @ part["o"].T
    return joined


@dataclass(frozen=True)
class Fit:
    """The trap of the variant that trained weights fit best; "" if none does clearly better."""

    trap: str
    perplexity: float
    judged: float


NONE = Fit("", np.nan, np.nan)
_FOUND: "WeakKeyDictionary[Submission, Fit]" = WeakKeyDictionary()


def best_fit(submission: Submission, rng: np.random.Generator) -> Fit:
    """Which model the submission's trained weights were made for, by unseen documents.

    Weights of a wrong form, and a training that failed, fit none: other checks are about those.
    """
    try:
        run = trained(submission, rng)
        weights = weights_of(run.tensors, run.config)
    except Violation:
        return NONE
    if submission not in _FOUND:
        judged = perplexity(weights, run.unseen, run.config, JUDGED)
        found, trap = min(
            (perplexity(weights, run.unseen, run.config, model), trap) for trap, model in VARIANTS
        )
        better = BETTER_BY_THE_FUTURE if trap == "future-visible" else CLEARLY_BETTER
        learned = UNIGRAM_SHARE
        if trap == "head-without-norm":
            learned = LEARNED_WITHOUT_LAST_NORM
            models = [replace(JUDGED, sharpness=factor) for factor in SHARPNESS]
            sharper = min(perplexity(weights, run.unseen, run.config, model) for model in models)
            if sharper < BETTER_BY_SHARPNESS * found:
                trap, found = "", judged
        _FOUND[submission] = _fit(trap, found, judged, run.unigram, better, learned)
    return _FOUND[submission]


def fit_of_collapse(submission: Submission, rng: np.random.Generator) -> Fit:
    """Whether weights that are far worse than guessing on noise do better where they see ahead.

    Nothing but the tokens to come can be learned from noise, so that a trainer that sees them
    shows it early. Weights that learned their documents by heart do badly either way.
    """
    try:
        run = trained_on_few(submission, rng)
        weights = weights_of(run.tensors, run.config)
    except Violation:
        return NONE
    models = [JUDGED, *(model for trap, model in VARIANTS if trap == "future-visible")]
    judged, *seeing = (perplexity(weights, run.unseen, run.config, model) for model in models)
    fits = judged > COLLAPSED * run.config["vocab"] and min(seeing) < BETTER_IF_COLLAPSED * judged
    return Fit("future-visible" if fits else "", min(seeing), judged)


def fit_of_slopes(submission: Submission, rng: np.random.Generator) -> Fit:
    """Whether weights of one head fit slopes that count heads from 0: 1 instead of 1/256.

    With several heads the two rules differ by less than two right trainers do.
    """
    grammar = Grammar(rng, VOCAB)
    config = config_of(rng, layers=1, heads=1, seconds=unhurried(ONE_HEAD_SECONDS))
    longest = config["context"] + 1
    shown, unseen = grammar.documents(rng, 150, longest), grammar.documents(rng, 40, longest)
    try:
        weights = weights_of(submission.train(shown, config), config)
    except Violation:
        return NONE
    judged, found = (
        perplexity(weights, unseen, config, model) for model in (JUDGED, Variant(first_head=0))
    )
    unigram = unigram_perplexity(shown, unseen, config["vocab"])
    return _fit("slopes-of-another-rule", found, judged, unigram, BETTER_WITH_ONE_HEAD)


_DISTANCE: "WeakKeyDictionary[Submission, tuple[Fit, Exchange]]" = WeakKeyDictionary()


def fit_of_distance(submission: Submission, rng: np.random.Generator) -> Fit:
    """Whether weights fit slopes of the wrong sign, where the farthest token is the one to copy.

    With such slopes it is easily seen. Elsewhere trained weights do nearly as well with both signs.
    """
    if submission not in _DISTANCE:
        vocab, heads = 6, 16
        documents = ends_with_its_first(rng, vocab, 2060, 6)
        shown, unseen = documents[:2000], documents[2000:]
        budget = unhurried(DISTANCE_SECONDS)
        config = config_of(rng, vocab=vocab, layers=1, heads=heads, context=8, seconds=budget)
        try:
            weights = weights_of(submission.train(shown, config), config)
        except Violation:
            return NONE
        models = JUDGED, Variant(distance_added=True)
        judged, found = (perplexity(weights, unseen, config, model) for model in models)
        fit = _fit(
            "distance-added",
            found,
            judged,
            unigram_perplexity(shown, unseen, vocab),
            CLEARLY_BETTER,
        )
        _DISTANCE[submission] = fit, submission.transcript.exchanges[-1]
    fit, call = _DISTANCE[submission]
    exchanges = submission.transcript.exchanges
    if all(exchange is not call for exchange in exchanges):
        exchanges.append(call)
    return fit


def fit_of_one_mlp(submission: Submission, rng: np.random.Generator) -> Fit:
    """Whether weights do better where every layer has the MLP of the first one.

    Weights that learned little count, too: this is asked where the other MLPs are untrained.
    """
    try:
        run = trained(submission, rng)
        weights = weights_of(run.tensors, run.config)
    except Violation:
        return NONE
    models = JUDGED, Variant(later_mlps="first"), Variant(later_mlps="none")
    judged, found, without = (
        perplexity(weights, run.unseen, run.config, model) for model in models
    )
    fits = found < min(BETTER_WITH_FIRST_MLP * judged, without)
    return Fit("mlp-of-the-first-layer" if fits else "", found, judged)


def _fit(
    trap: str,
    found: float,
    judged: float,
    unigram: float,
    better: float,
    learned: float = UNIGRAM_SHARE,
) -> Fit:
    """Weights that learned nothing fit some variant a little better by chance."""
    fits = found < better * judged and found < learned * unigram
    return Fit(trap if fits else "", found, judged)
