"""Exact language models on the controller's side, and the comparison of an answer with the oracle.

A trap states its model as a table: `{(): {EOS: -3.0, A: -1.0}}` says that after the prompt the end
has log-probability -3.0. Everything that a table does not mention is noise: possible, at less than
-64 per token, and never chosen. So that a trap fails for its own bug only, it compares what the
table mentions and ignores the noise.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from trapline.arena.errors import SubmissionRaised, Violation
from trapline.arena.judge import expect
from trapline.arena.process.proxy import Stub, Submission
from trapline.gold.beam_search.oracle import Hypothesis, Search, calls, search_one

Prefix = tuple[int, ...]
Model = Callable[[Prefix], np.ndarray]
Table = Mapping[Prefix, Mapping[int, float]]


def noise(vocabulary: int, depth: int) -> np.ndarray:
    """Very low log-probabilities whose sums never tie: tokens are digits, depths are places."""
    return np.asarray(-64.0 - np.arange(vocabulary) * 2.0 ** (-10 - 4 * min(depth, 6)))


def table_model(vocabulary: int, tables: Mapping[Prefix, Table], *, strict: bool = False) -> Model:
    """A model from one table a prompt: continuation → {token: log-probability}.

    No prompt may be the beginning of another prompt's prefix. In a strict model there is no noise:
    what is not mentioned has probability 0.
    """

    lengths = sorted({len(prompt) for prompt in tables})

    def model(prefix: Prefix) -> np.ndarray:
        table, continuation = _look_up(tables, lengths, prefix)
        values = noise(vocabulary, len(continuation))
        if strict:
            values[:] = -np.inf
        for token, log_prob in table.get(continuation, {}).items():
            values[token] = log_prob
        return values

    return model


def _look_up(
    tables: Mapping[Prefix, Table], lengths: Sequence[int], prefix: Prefix
) -> tuple[Table, Prefix]:
    """The table of the prompt that this continues; `lengths` are those of the prompts."""
    for length in lengths:
        table = tables.get(prefix[:length]) if length <= len(prefix) else None
        if table is not None:
            return table, prefix[length:]
    raise Violation(f"the model was asked about {list(prefix)}, which continues no prompt")


def mentioned(found: Sequence[tuple[list[int], float]], table: Table) -> list[Hypothesis]:
    """The hypotheses of which the table mentions every token."""
    return [
        Hypothesis(tokens, score)
        for tokens, score in found
        if all(t in table.get(tuple(tokens[:n]), {}) for n, t in enumerate(tokens))
    ]


def random_model(
    seed: int, vocabulary: int, *, eos_id: int, eos_bonus: float = 0.0, sparse: float = 0.0
) -> Model:
    """A model whose rows are drawn from the prefix: the same prefix always gets the same row."""

    def model(prefix: Prefix) -> np.ndarray:
        return _row_after(tuple(prefix), seed, vocabulary, eos_id, eos_bonus, sparse).copy()

    return model


@lru_cache(maxsize=1 << 14)
def _row_after(
    prefix: Prefix, seed: int, vocabulary: int, eos_id: int, eos_bonus: float, sparse: float
) -> np.ndarray:
    """Drawn once: submission and oracle ask for the rows after the same prefixes."""
    rng = np.random.default_rng([seed, len(prefix), *prefix])
    logits = rng.standard_normal(vocabulary) * 1.5
    logits[eos_id] += eos_bonus
    values = logits - np.log(np.exp(logits).sum())
    values[rng.random(vocabulary) < sparse] = -np.inf
    return np.asarray(values)


@dataclass(frozen=True)
class Asked:
    """A submission's answer, brought to plain lists, and the calls that it made."""

    hypotheses: list[list[tuple[list[int], float]]]
    calls: list[list[Prefix]]


def ask(
    submission: Submission,
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    dtype: Any = np.float64,
    **settings: Any,
) -> Asked:
    """Runs the submission on a model and checks the form of its answer and of its calls."""
    seen: list[Violation] = []
    made: list[list[Prefix]] = []

    def answer(prefixes: Any) -> np.ndarray:
        try:
            values = rows(model, prefixes, dtype)
        except Violation as violation:
            # Raised here it would end the session, so the submission gets an error instead.
            seen.append(violation)
            raise ValueError("these prefixes are not live beams") from violation
        made.append([tuple(int(token) for token in prefix) for prefix in prefixes])
        return values

    batch = [list(prompt) for prompt in prompts]
    try:
        got = submission.beam_search(Stub(log_probs=answer), batch, **settings)
    except SubmissionRaised as raised:
        raise (seen[0] if seen else raised) from None
    if seen:
        raise seen[0]
    return Asked(plain(got, len(prompts)), made)


def rows(model: Model, prefixes: Any, dtype: Any) -> np.ndarray:
    """What the stub answers: one row per prefix, after a check of the request's form."""
    expect.that(type(prefixes) in (list, tuple), "log_probs was not given a list of prefixes")
    expect.that(len(prefixes) > 0, "log_probs was called without any prefix")
    for prefix in prefixes:
        well_formed = type(prefix) is list and all(
            isinstance(token, int | np.integer) and not isinstance(token, bool) for token in prefix
        )
        expect.that(well_formed, f"a prefix is {prefix!r}, not a list of ints")
    return np.stack([model(tuple(int(t) for t in prefix)) for prefix in prefixes]).astype(dtype)


def plain(got: Any, prompts: int) -> list[list[tuple[list[int], float]]]:
    """The answer as lists of (list of ints, float)."""
    expect.that(isinstance(got, list | tuple), f"the answer is a {type(got).__name__}, not a list")
    expect.that(len(got) == prompts, f"{len(got)} answers for {prompts} prompts")
    return [[_hypothesis(entry) for entry in _list(group)] for group in got]


def _list(group: Any) -> Any:
    expect.that(isinstance(group, list | tuple), "a prompt's answer is not a list of hypotheses")
    return group


def _hypothesis(entry: Any) -> tuple[list[int], float]:
    is_pair = isinstance(entry, list | tuple) and len(entry) == 2
    expect.that(is_pair, f"a hypothesis is {entry!r}, not (tokens, score)")
    tokens, score = entry
    listed = tokens.tolist() if isinstance(tokens, np.ndarray) else tokens
    whole = isinstance(listed, list | tuple) and all(
        isinstance(token, int | np.integer) and not isinstance(token, bool) for token in listed
    )
    expect.that(whole, f"tokens are {tokens!r}, not ints")
    number = isinstance(score, float | int | np.floating) and not isinstance(score, bool)
    expect.that(number, f"a score is {score!r}, not a float")
    return [int(token) for token in listed], float(score)


def searches(model: Model, prompts: Sequence[Sequence[int]], **settings: Any) -> list[Search]:
    """The truth, prompt by prompt."""
    return [search_one(model, tuple(prompt), **settings) for prompt in prompts]


def same_hypotheses(asked: Asked, truth: Sequence[Search], rtol: float = 1e-9) -> None:
    """The same tokens in the same order, and scores within rounding."""
    for number, (got, search) in enumerate(zip(asked.hypotheses, truth, strict=True)):
        where = f"prompt {number}"
        want = search.hypotheses
        expect.that(
            [tokens for tokens, _ in got] == [tokens for tokens, _ in want],
            f"{where}: {_brief(got)}, expected {_brief(want)}",
        )
        for (tokens, score), (_, right) in zip(got, want, strict=True):
            expect.that(
                abs(score - right) <= rtol * max(1.0, abs(right)),
                f"{where}: {tokens} has score {score!r}, expected {right!r}",
            )


def same_calls(asked: Asked, truth: Sequence[Search]) -> None:
    """One call per step, each with exactly the live beams of all prompts, in any order."""
    want = calls(truth)
    expect.that(
        len(asked.calls) == len(want),
        f"the model was called {len(asked.calls)} times, expected {len(want)}",
    )
    for step, (got, right) in enumerate(zip(asked.calls, want, strict=True), start=1):
        expect.that(
            sorted(got) == sorted(right),
            f"call {step} asked for {len(got)} prefixes, "
            f"expected exactly the {len(right)} live beams",
        )


def run(
    submission: Submission,
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    count_calls: bool = False,
    dtype: Any = np.float64,
    **settings: Any,
) -> Asked:
    """Asks and compares with the oracle: the hypotheses, and the calls where they are the point."""
    asked = ask(submission, model, prompts, dtype=dtype, **settings)
    truth = searches(model, prompts, **settings)
    same_hypotheses(asked, truth)
    if count_calls:
        same_calls(asked, truth)
    return asked


def run_tables(
    submission: Submission,
    vocabulary: int,
    tables: Mapping[Prefix, Table],
    *,
    strict: bool = False,
    count_calls: bool = False,
    dtype: Any = np.float64,
    **settings: Any,
) -> Asked:
    """Asks about all prompts of the tables and compares what the tables mention."""
    model = table_model(vocabulary, tables, strict=strict)
    prompts = list(tables)
    asked = ask(submission, model, prompts, dtype=dtype, **settings)
    truth = searches(model, prompts, **settings)
    known = [
        mentioned(found, tables[prompt])
        for found, prompt in zip(asked.hypotheses, prompts, strict=True)
    ]
    right = [
        search._replace(hypotheses=mentioned(search.hypotheses, tables[prompt]))
        for search, prompt in zip(truth, prompts, strict=True)
    ]
    same_hypotheses(Asked([list(group) for group in known], asked.calls), right)
    if count_calls:
        same_calls(asked, truth)
    return asked


def _brief(hypotheses: Sequence[tuple[list[int], float]]) -> str:
    shown = ", ".join(f"{tokens} {score:.6g}" for tokens, score in hypotheses[:4])
    return f"[{shown}{', …' if len(hypotheses) > 4 else ''}]"
