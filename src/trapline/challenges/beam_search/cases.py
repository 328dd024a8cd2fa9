"""The contract of beam search, case by case, and how its speed is measured."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Call, case, robustness
from trapline.arena.process.proxy import Stub, Submission
from trapline.challenges.beam_search import table as lm

PENALTIES = (1.0, 0.0, 0.6, 2.0, -0.5, -1.0)


def random_prompts(rng: np.random.Generator, count: int, vocabulary: int) -> list[lm.Prefix]:
    """Prompts of different lengths, some of them equal to others."""
    lengths = rng.integers(1, 7, count)
    prompts = [tuple(int(t) for t in rng.integers(0, vocabulary, n)) for n in lengths]
    return [
        prompts[0] if count > 2 and index == count - 1 else p for index, p in enumerate(prompts)
    ]


@case
def random_models_one_prompt(submission: Submission, rng: np.random.Generator) -> None:
    for penalty in PENALTIES:
        vocabulary = int(rng.integers(3, 12))
        eos = int(rng.integers(vocabulary))
        bonus = float(rng.uniform(-2.0, 1.0))
        model = lm.random_model(int(rng.integers(2**31)), vocabulary, eos_id=eos, eos_bonus=bonus)
        lm.run(
            submission,
            model,
            random_prompts(rng, 1, vocabulary),
            beam_width=int(rng.integers(1, 6)),
            max_new_tokens=int(rng.integers(2, 8)),
            eos_id=eos,
            length_penalty=penalty,
            count_calls=True,
        )


@case
def random_batches(submission: Submission, rng: np.random.Generator) -> None:
    for penalty in PENALTIES:
        vocabulary = int(rng.integers(3, 9))
        eos = int(rng.integers(vocabulary))
        model = lm.random_model(int(rng.integers(2**31)), vocabulary, eos_id=eos, sparse=0.3)
        lm.run(
            submission,
            model,
            random_prompts(rng, int(rng.integers(2, 6)), vocabulary),
            beam_width=int(rng.integers(1, 5)),
            max_new_tokens=int(rng.integers(2, 7)),
            eos_id=eos,
            length_penalty=penalty,
        )


@case
def random_batches_with_ties(submission: Submission, rng: np.random.Generator) -> None:
    """Log-probabilities from a handful of exact values: sums tie all the time; no penalty, so
    scores are as exact as sums."""
    for _ in range(6):
        vocabulary = int(rng.integers(3, 7))
        seed = int(rng.integers(2**31))

        def model(prefix: lm.Prefix, seed: int = seed, vocabulary: int = vocabulary) -> np.ndarray:
            local = np.random.default_rng([seed, len(prefix), *prefix])
            return np.asarray(-0.5 * local.integers(1, 5, vocabulary))

        lm.run(
            submission,
            model,
            random_prompts(rng, 3, vocabulary),
            beam_width=int(rng.integers(2, 6)),
            max_new_tokens=int(rng.integers(2, 6)),
            eos_id=int(rng.integers(vocabulary)),
            length_penalty=0.0,
        )


@case
def wide_ties(submission: Submission, rng: np.random.Generator) -> None:
    """Hundreds of equal sums: enough for a sort that is not stable to show."""
    vocabulary, eos = 200, int(rng.integers(200))
    values = rng.choice([-1.0, -1.5, -2.0], vocabulary)
    prompt = random_prompts(rng, 1, vocabulary)[0]
    lm.run(
        submission,
        lambda prefix: values,
        [prompt],
        beam_width=90,
        max_new_tokens=2,
        eos_id=eos,
        length_penalty=0.0,
    )


@case
def one_call_a_step(submission: Submission, rng: np.random.Generator) -> None:
    vocabulary, eos = 6, int(rng.integers(6))
    model = lm.random_model(int(rng.integers(2**31)), vocabulary, eos_id=eos, eos_bonus=-1.0)
    prompts = [(int(t), int(rng.integers(6))) for t in rng.permutation(6)[:4]]
    lm.run(
        submission,
        model,
        prompts,
        beam_width=3,
        max_new_tokens=6,
        eos_id=eos,
        count_calls=True,
    )


@case
def width_one_is_greedy(submission: Submission, rng: np.random.Generator) -> None:
    """With EOS out of reach one beam follows the best token; computed without the oracle."""
    for _ in range(2):
        greedy_once(submission, rng)


def greedy_once(submission: Submission, rng: np.random.Generator) -> None:
    vocabulary, eos, steps = 8, int(rng.integers(8)), 6
    model = lm.random_model(int(rng.integers(2**31)), vocabulary, eos_id=eos)

    def endless(prefix: lm.Prefix) -> np.ndarray:
        values = model(prefix)
        values[eos] = -np.inf
        return values

    prompt = random_prompts(rng, 1, vocabulary)[0]
    tokens: list[int] = []
    total = 0.0
    for _ in range(steps):
        values = endless((*prompt, *tokens))
        tokens.append(int(values.argmax()))
        total += float(values.max())
    asked = lm.ask(submission, endless, [prompt], beam_width=1, max_new_tokens=steps, eos_id=eos)
    expect.that(len(asked.hypotheses[0]) == 1, "one beam gives one hypothesis")
    got, score = asked.hypotheses[0][0]
    expect.equal(got, tokens, "the greedy continuation")
    expect.that(abs(score - total / steps) < 1e-9, f"score {score}, expected {total / steps}")


@case
def wide_beam_is_exhaustive(submission: Submission, rng: np.random.Generator) -> None:
    """A beam wider than the space finds every hypothesis; the space is enumerated here."""
    vocabulary, eos, steps = 3, int(rng.integers(3)), 3
    model = lm.random_model(int(rng.integers(2**31)), vocabulary, eos_id=eos)
    prompt = random_prompts(rng, 1, vocabulary)[0]
    penalty = float(rng.choice([0.0, 0.5, 1.0, -0.5]))
    found = []
    for length in range(1, steps + 1):
        for tokens in itertools.product(range(vocabulary), repeat=length):
            ended = tokens[-1] == eos
            if eos in tokens[:-1] or (not ended and length < steps):
                continue
            rows = [model((*prompt, *tokens[:n])) for n in range(length)]
            total = sum(float(row[token]) for row, token in zip(rows, tokens, strict=True))
            found.append((total / length**penalty, list(tokens)))
    found.sort(reverse=True)
    asked = lm.ask(
        submission,
        model,
        [prompt],
        beam_width=vocabulary**steps,
        max_new_tokens=steps,
        eos_id=eos,
        length_penalty=penalty,
    )
    expect.equal([t for t, _ in asked.hypotheses[0]], [t for _, t in found], "all hypotheses")
    gaps = [abs(got - want) for (_, got), (want, _) in zip(asked.hypotheses[0], found, strict=True)]
    expect.that(max(gaps) < 1e-9, f"scores are off by {max(gaps)}")


@case
def float32_models(submission: Submission, rng: np.random.Generator) -> None:
    vocabulary, eos = 7, int(rng.integers(7))
    model = lm.random_model(int(rng.integers(2**31)), vocabulary, eos_id=eos)

    def rounded(prefix: lm.Prefix) -> np.ndarray:
        return model(prefix).astype(np.float32).astype(np.float64)

    lm.run(
        submission,
        rounded,
        random_prompts(rng, 2, vocabulary),
        dtype=np.float32,
        beam_width=3,
        max_new_tokens=5,
        eos_id=eos,
    )


@case
def views_of_the_model(submission: Submission, rng: np.random.Generator) -> None:
    """The model's answer may be a view: here the transposed half of a larger array."""
    vocabulary, eos = 6, int(rng.integers(6))
    model = lm.random_model(int(rng.integers(2**31)), vocabulary, eos_id=eos)
    prompts = random_prompts(rng, 3, vocabulary)
    settings: dict[str, Any] = {"beam_width": 2, "max_new_tokens": 4, "eos_id": eos}

    def spread(prefixes: Any) -> np.ndarray:
        rows = lm.rows(model, prefixes, np.float64)
        wide = np.full((vocabulary, 2 * len(rows)), np.nan)
        wide[:, ::2] = rows.T
        return wide[:, ::2].T

    got = submission.beam_search(Stub(log_probs=spread), [list(p) for p in prompts], **settings)
    asked = lm.Asked(lm.plain(got, len(prompts)), [])
    lm.same_hypotheses(asked, lm.searches(model, prompts, **settings))


@case
def default_penalty(submission: Submission, rng: np.random.Generator) -> None:
    """Without the argument the penalty is 1: the mean log-probability."""
    vocabulary, eos = 5, int(rng.integers(5))
    prompt = random_prompts(rng, 1, vocabulary)[0]
    model = lm.random_model(int(rng.integers(2**31)), vocabulary, eos_id=eos)
    settings: dict[str, Any] = {"beam_width": 4, "max_new_tokens": 4, "eos_id": eos}
    asked = lm.ask(submission, model, [prompt], **settings)
    lm.same_hypotheses(asked, lm.searches(model, [prompt], length_penalty=1.0, **settings))


@case
def empty_batch(submission: Submission, rng: np.random.Generator) -> None:
    stub = Stub(log_probs=lambda prefixes: np.zeros((len(prefixes), 4)))
    got = submission.beam_search(
        stub, [], beam_width=3, max_new_tokens=2, eos_id=int(rng.integers(4))
    )
    expect.that(isinstance(got, list | tuple) and len(got) == 0, f"the answer is {got!r}")
    expect.that(not stub.calls, "the model was called for an empty batch")


@robustness
def bad_input(submission: Submission, rng: np.random.Generator) -> None:
    def call(prompts: Any, answer: Any = None, **changes: Any) -> None:
        settings = {"beam_width": 2, "max_new_tokens": 2, "eos_id": int(rng.integers(4)), **changes}
        rows = answer or (lambda n: np.full((n, 4), -2.0))
        stub = Stub(log_probs=lambda prefixes: rows(len(prefixes)))
        expect.raises((ValueError, TypeError), submission.beam_search, stub, prompts, **settings)

    call([[1, 2]], beam_width=0)
    call([[1, 2]], max_new_tokens=0)
    call([[1, 2]], eos_id=9)
    call([[1, 2]], eos_id=-1)
    call([[1, 2]], length_penalty=float("nan"))
    call([1, 2])
    call([[1.5, 2]])
    call([[1, 2]], answer=lambda n: np.full((n, 4), np.inf))
    call([[1, 2]], answer=lambda n: np.full((n + 1, 4), -1.0))


def speed(submission: Submission, rng: np.random.Generator) -> Call:  # noqa: ARG001 - the hook's form
    """Wide beams over a real vocabulary for a few prompts: choosing the best is the work."""
    prompts, width, vocabulary, steps = 3, 24, 1500, 3
    eos = int(rng.integers(vocabulary))
    bank = rng.standard_normal((prompts * width, vocabulary))
    bank -= np.log(np.exp(bank).sum(axis=1, keepdims=True))
    starts = [[int(t)] for t in rng.permutation(vocabulary)[:prompts]]

    def answer(prefixes: Any) -> np.ndarray:
        """A row for each prefix, by its tokens: the model must be one that can be asked again."""
        return bank[[sum(int(t) for t in prefix) % len(bank) for prefix in prefixes]]

    def check(got: Any) -> None:
        for start, hypotheses in zip(starts, lm.plain(got, prompts), strict=True):
            want = _best_of(answer, start, width, steps, eos)
            expect.that(len(hypotheses) == width, f"{len(hypotheses)} hypotheses, not {width}")
            scores = [score for _, score in hypotheses]
            expect.close(np.array(scores), np.array(want), rtol=1e-9, what="the scores")

    settings = {"beam_width": width, "max_new_tokens": steps, "eos_id": eos}
    return Call("beam_search", (Stub(log_probs=answer), starts), settings, check)


def _best_of(
    answer: Callable[[Any], np.ndarray], start: list[int], width: int, steps: int, eos: int
) -> list[float]:
    """The scores of the best hypotheses, a whole step at once: the oracle takes a second for it."""
    live, totals, pool = [start], np.zeros(1), []
    for length in range(1, steps + 1):
        reached = totals[:, None] + answer(live)
        pool += (reached[:, eos] / length).tolist()
        reached[:, eos] = -np.inf
        chosen = np.argsort(-reached, axis=None, kind="stable")[:width]
        parents, tokens = np.unravel_index(chosen, reached.shape)
        live = [[*live[p], int(t)] for p, t in zip(parents, tokens, strict=True)]
        totals = reached[parents, tokens]
    return sorted([*pool, *(totals / steps).tolist()], reverse=True)[:width]


def measures(submission: Submission, rng: np.random.Generator) -> dict[str, float]:
    """How often four prompts of different lengths ask the model, all of them answered right."""
    vocabulary, eos = 8, int(rng.integers(8))
    model = lm.random_model(int(rng.integers(2**31)), vocabulary, eos_id=eos, eos_bonus=-2.0)
    prompts = random_prompts(rng, 4, vocabulary)
    asked = lm.run(submission, model, prompts, beam_width=4, max_new_tokens=16, eos_id=eos)
    return {"calls of the model": float(len(asked.calls))}
