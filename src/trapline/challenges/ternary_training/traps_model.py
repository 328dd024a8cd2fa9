"""Bugs of the model's tensors that show without training."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.ternary_training import text
from trapline.challenges.ternary_training.situations import (
    config_of,
    refuses,
    same_tensors,
    tensor_of,
)
from trapline.gold.ternary import small_lm


def _start(
    submission: Submission, rng: np.random.Generator, **changes: object
) -> tuple[object, dict[str, int]]:
    config = config_of(rng, **changes)
    return submission.train(text.noise(rng, min(8, config["vocab"]), 6, 8), config), config


@trap(
    "embedding-left-dense",
    catches="the embedding is not ternary",
    severity="critical",
    story="The most common deviation seen: embeddings kept dense, most of the bytes of a small "
    "model.",
)
def embedding_left_dense(submission: Submission, rng: np.random.Generator) -> None:
    answer, config = _start(submission, rng)
    tensor_of(answer, "embedding", config)


@trap(
    "head-left-dense",
    catches="the head is missing or not ternary",
    severity="critical",
    story="The head was tied to the embedding, or kept in float: either way not what was shipped.",
)
def head_left_dense(submission: Submission, rng: np.random.Generator) -> None:
    answer, config = _start(submission, rng)
    tensor_of(answer, "head", config)


@trap(
    "scale-for-every-weight",
    catches="a tensor is called ternary with one scale for every weight",
    severity="critical",
    story="sign(w) and |w| as codes and scales satisfy every check on codes and save nothing at "
    "all.",
)
def scale_for_every_weight(submission: Submission, rng: np.random.Generator) -> None:
    answer, config = _start(submission, rng, dim=48)
    for name in small_lm.tensor_shapes(config):
        tensor_of(answer, name, config)


@trap(
    "group-of-the-model-width",
    catches="tensors are grouped by the model's width instead of by 128",
    severity="major",
    story="One scale a row is as good as a group while rows have 128 weights; the wide ones "
    "differ.",
)
def group_of_the_model_width(submission: Submission, rng: np.random.Generator) -> None:
    answer, config = _start(submission, rng, dim=40, layers=1)
    tensor_of(answer, "layers.0.down", config)


@trap(
    "layers-fixed",
    catches="the number of layers is fixed in the code",
    severity="major",
    story="The architecture of the example stood in the code; other configurations were ignored.",
)
def layers_fixed(submission: Submission, rng: np.random.Generator) -> None:
    for layers in (1, 3):
        answer, config = _start(submission, rng, dim=16, layers=layers)
        expect.that(isinstance(answer, dict), "train gave no dict")
        assert isinstance(answer, dict)
        expect.equal(sorted(answer), sorted(small_lm.tensor_shapes(config)), f"{layers} layers")


@trap(
    "vocabulary-from-the-text",
    catches="the vocabulary is what occurs in the training text",
    severity="major",
    story="max(token) + 1 rows: the first rare token after deployment read beyond the embedding.",
)
def vocabulary_from_the_text(submission: Submission, rng: np.random.Generator) -> None:
    answer, config = _start(submission, rng, vocab=77, dim=16, layers=1)
    for name in ("embedding", "head"):
        tensor_of(answer, name, config)


@trap(
    "seed-ignored",
    catches="every seed starts from the same weights",
    severity="major",
    story="Three runs with three seeds gave one number three times, reported with an error bar "
    "of 0.",
)
def seed_ignored(submission: Submission, rng: np.random.Generator) -> None:
    documents, config = text.noise(rng, 8, 6, 8), config_of(rng)
    first = submission.train(documents, config)
    second = submission.train(documents, {**config, "seed": config["seed"] + 1})
    expect.that(not same_tensors(first, second), "two seeds start from the same weights")


@trap(
    "start-not-repeatable",
    catches="the same seed starts from other weights the next time",
    severity="major",
    story="Weights drawn from a global generator: the second run of a process was never the "
    "first again.",
)
def start_not_repeatable(submission: Submission, rng: np.random.Generator) -> None:
    documents, config = text.noise(rng, 8, 6, 8), config_of(rng)
    first = submission.train(documents, config)
    expect.that(same_tensors(first, submission.train(documents, config)), "a second call differs")
    other = submission.fresh().train(documents, config)
    expect.that(same_tensors(first, other), "another process differs")


@trap(
    "training-carries-over",
    catches="a training starts from where the one before ended",
    severity="major",
    story="A module-level cache of weights for resuming: the second experiment began trained.",
)
def training_carries_over(submission: Submission, rng: np.random.Generator) -> None:
    config = config_of(rng, dim=16, layers=1)
    documents = text.noise(rng, 8, 12, 8)
    first = submission.train(documents, config)
    submission.train(documents, {**config, "seconds": 0.3})
    again = submission.train(documents, config)
    expect.that(same_tensors(first, again), "the starting weights remember a training")


@trap(
    "negative-id-wraps",
    catches="token id −1 reads the last row of the embedding",
    severity="major",
    story="Padding with −1 met an indexing that counts from the end; the last word learned to "
    "be padding.",
)
def negative_id_wraps(submission: Submission, rng: np.random.Generator) -> None:
    config = config_of(rng, dim=16, layers=1)
    for bad in (-1, config["vocab"], -config["vocab"]):
        documents = [*text.noise(rng, 8, 3, 8), [1, bad, 2]]
        refuses(submission, "train", documents, config)


@trap(
    "heads-unchecked",
    catches="a width that does not divide into the heads is accepted",
    severity="minor",
    story="dim // heads rounds down; the last columns of every projection were never used.",
)
def heads_unchecked(submission: Submission, rng: np.random.Generator) -> None:
    documents = text.noise(rng, 8, 3, 8)
    for bad in ({"heads": 5}, {"heads": 0}, {"dim": 0}, {"context": 0}, {"vocab": 0}):
        config = config_of(rng, **bad)
        refuses(submission, "train", documents, config)
    refuses(submission, "train", documents, config_of(rng, seconds=-1))


@trap(
    "nothing-to-predict",
    catches="documents in which nothing can be predicted are trained on",
    severity="minor",
    story="An empty glob gave no documents; the run ended at once and saved random weights as a "
    "model.",
)
def nothing_to_predict(submission: Submission, rng: np.random.Generator) -> None:
    config = config_of(rng, dim=16, layers=1)
    hopeless: list[list[text.Document]] = [[], [[]], [[1], [], [2]]]
    for documents in hopeless:
        refuses(submission, "train", documents, config)


@trap(
    "documents-shuffled",
    catches="training shuffles or cuts the caller's documents",
    severity="major",
    story="rng.shuffle(documents) works in place: the caller's held-out indices now named "
    "training text.",
)
def documents_shuffled(submission: Submission, rng: np.random.Generator) -> None:
    documents, config = text.noise(rng, 8, 40, 9), config_of(rng, dim=16, layers=1, context=4)
    _, after = submission.observe("train", documents, config)
    expect.equal(after[0], documents, "the documents after training")
    expect.equal(after[1], config, "the config after training")
