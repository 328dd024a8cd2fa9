"""The published prompt's beam search: finished and live beams share the places.

Models answer normalised log-probabilities without zeros and ties, over a vocabulary of more than
twice the beam width, as the prompt's own model does. How often the model is called is free.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import case
from trapline.arena.process.proxy import Submission
from trapline.challenges.beam_search import table as lm
from trapline.gold.beam_search.oracle import search_one_pooled

Rng = np.random.Generator
Logits = Mapping[lm.Prefix, Mapping[int, float]]
EOS = 0
#: An answer may compute its log-probabilities from ours once more.
RTOL = 1e-6


def normalised(logits: np.ndarray) -> np.ndarray:
    return np.asarray(logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max())


def scripted(vocabulary: int, script: Logits) -> lm.Model:
    """Log-probabilities after prompt and continuation; tokens that are not named are unlikely."""

    def model(prefix: lm.Prefix) -> np.ndarray:
        row = -30.0 - np.arange(vocabulary) * 2.0 ** (-4 - len(prefix) % 8)
        for token, value in script.get(prefix, {}).items():
            row[token] = value
        return normalised(row)

    return model


def random_model(rng: Rng, vocabulary: int, bonus: float = 0.0) -> lm.Model:
    seed = int(rng.integers(2**31))
    return lm.random_model(seed, vocabulary, eos_id=EOS, eos_bonus=bonus)


def answers(
    submission: Submission, model: lm.Model, prompts: Sequence[Sequence[int]], **settings: Any
) -> list[list[tuple[list[int], float]]]:
    return lm.ask(submission, model, prompts, eos_id=EOS, **settings).hypotheses


def check(
    submission: Submission, model: lm.Model, prompts: Sequence[Sequence[int]], **settings: Any
) -> None:
    """The submission returns the beams that hold the places, best first, with their scores."""
    asked = lm.ask(submission, model, prompts, eos_id=EOS, **settings)
    truth = [search_one_pooled(model, tuple(prompt), eos_id=EOS, **settings) for prompt in prompts]
    lm.same_hypotheses(asked, truth, RTOL)


def settings(width: int = 2, steps: int = 3, penalty: float = 0.6) -> dict[str, Any]:
    return {"beam_width": width, "max_new_tokens": steps, "length_penalty": penalty}


@case
def random_models_one_prompt(submission: Submission, rng: Rng) -> None:
    for bonus, penalty in ((0.0, 0.6), (1.5, 0.6), (-1.0, 1.0), (1.0, 0.0)):
        model = random_model(rng, int(rng.integers(12, 20)), bonus)
        prompt = [int(t) for t in rng.integers(1, 12, 3)]
        check(submission, model, [prompt], **settings(int(rng.integers(2, 6)), 5, penalty))


@case
def random_batches(submission: Submission, rng: Rng) -> None:
    """Prompts of different lengths, each as if it were alone."""
    for bonus in (0.0, 1.5):
        model = random_model(rng, 14, bonus)
        prompts = [[int(t) for t in rng.integers(1, 14, n)] for n in (3, 5, 1)]
        check(submission, model, prompts, **settings(3, 5))


@case
def one_beam_is_greedy(submission: Submission, rng: Rng) -> None:
    """Computed without the oracle."""
    for bonus in (-2.0, 2.0):
        model = random_model(rng, 10, bonus)
        tokens: list[int] = []
        while len(tokens) < 5 and EOS not in tokens:
            tokens.append(int(model((4, *tokens)).argmax()))
        (group,) = answers(submission, model, [[4]], **settings(1, 5, 0.0))
        found = [found for found, _ in group]
        expect.that(found == [tokens], f"one beam returns {found}, greedy decoding {tokens}")


@case
def an_early_end_stays(submission: Submission, rng: Rng) -> None:  # noqa: ARG001
    """A short, likely answer is not lost to a longer one that is less likely."""
    script = {(5, 6): {EOS: -3.0, 1: -4.0, 2: 0.0}, (5, 6, 1): {3: -1.0, 4: 0.5}}
    script |= {(5, 6, 2): {7: -6.0, 8: -6.5, 9: 0.0}}
    for steps in (2, 3):
        check(submission, scripted(40, script), [[5, 6]], **settings(3, steps, 0.0))


@case
def penalised_scores_give_the_places(submission: Submission, rng: Rng) -> None:  # noqa: ARG001
    """A longer live beam with a lower sum holds its place against an end."""
    script = {(1,): {EOS: 0.0, 2: 0.1}, (1, 2): {3: 0.0, 4: -0.01}}
    check(submission, scripted(20, script), [[1]], **settings(2, 2, 2.0))


@case
def scores_and_order(submission: Submission, rng: Rng) -> None:
    """Scores fall, and each is its sum over its length to the penalty."""
    model = random_model(rng, 16, 1.0)
    for penalty in (0.3, 1.0):
        check(submission, model, [[2, 3]], **settings(4, 4, penalty))


@case
def calls_are_independent(submission: Submission, rng: Rng) -> None:
    """Answers of the same shapes: nothing ends, so that all have the same lengths."""
    model = random_model(rng, 12, -25.0)
    for prompt in ([1, 2], [3], [1, 2]):
        check(submission, model, [prompt], **settings(2, 3))
