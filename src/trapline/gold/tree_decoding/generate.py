"""Speculative generation: draft, verify in one pass, commit the branch that the target agrees with.

The output is the target's own, greedy or sampled, whatever the drafter says. What a target and a
drafter must be able to do is written down as two protocols; `decoder_target` has them for the
library's decoder, `drafter` and `prompt_lookup` for the two ways to draft.

Letters: R rows of a batch, L drafted depths, N nodes, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from trapline.gold import checks
from trapline.gold.decoder.sampling import Sampling, sampling_per_prompt
from trapline.gold.errors import RangeError, ShapeError
from trapline.gold.tree_decoding import fast_verify, reference
from trapline.gold.tree_decoding.choice import Penalties, penalised, picks
from trapline.gold.tree_decoding.statistics import Statistics

Mode = Literal["chain", "tree"]
_NO_LIMIT = 2**62


@dataclass
class Row:
    """One prompt at work. The last of `tokens` is the root: known, but not yet in any cache."""

    number: int
    tokens: list[int]
    prompt_length: int
    sampling: Sampling = field(default_factory=Sampling)
    #: What the target keeps of this row, and what the drafter does.
    target: Any = None
    drafter: Any = None
    #: (n, …) features of committed tokens that the drafter has not taken in yet.
    fresh: list[Tensor] = field(default_factory=list)

    @property
    def made(self) -> int:
        return len(self.tokens) - self.prompt_length


class Trees(NamedTuple):
    """What the target is asked about: for every row its root and N drafted nodes."""

    ids: Tensor  # (R, N+1); column 0 is the root; padding carries token 0
    depths: Tensor  # (R, N+1)
    seen: Tensor  # (R, N+1, N+1), which of root and nodes each of them continues


class Target(Protocol):
    """The model whose words come out."""

    vocab: int
    context: int

    def open(self, rows: list[Row]) -> None:
        """Takes in all tokens of new rows but their last."""

    def verify(self, rows: list[Row], trees: Trees) -> Tensor:
        """Logits (R, N+1, V) after root and nodes, each after its own branch."""

    def commit(self, rows: list[Row], paths: list[list[int]]) -> None:
        """Keeps root and path of each row's last tree, forgets the other nodes."""

    def close(self, rows: list[Row]) -> None:
        """Forgets rows that are done."""


class Drafter(Protocol):
    """Who proposes."""

    vocab: int

    def refuses(self, prompt: Sequence[int]) -> str | None:
        """Why this prompt cannot be continued, if so."""

    def draft(self, rows: list[Row]) -> Tensor:
        """Log-probabilities (R, L, V) of the tokens after each row's root, −inf where it has none.

        Consumes `fresh`.
        """


class Burst(NamedTuple):
    """What one pass gave one prompt: the first `drafted` tokens were drafted, the rest is bonus."""

    prompt: int
    tokens: list[int]
    drafted: int
    last: bool


class Output(NamedTuple):
    """All answers, without prompts, stop tokens included; and how they came about."""

    tokens: list[list[int]]
    statistics: Statistics


def generate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    sampling: Sampling | Sequence[Sampling] | None = None,
    penalties: Penalties | None = None,
    mode: Mode = "tree",
    budget: int = 64,
    batch: int = 32,
) -> Output:
    """The answers to all prompts, and the statistics."""
    statistics = Statistics()
    answers: list[list[int]] = [[] for _ in prompts]
    for burst in stream(
        target,
        drafter,
        prompts,
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        sampling=sampling,
        penalties=penalties,
        mode=mode,
        budget=budget,
        batch=batch,
        statistics=statistics,
    ):
        answers[burst.prompt] += burst.tokens
    return Output(answers, statistics)


def stream(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    sampling: Sampling | Sequence[Sampling] | None = None,
    penalties: Penalties | None = None,
    mode: Mode = "tree",
    budget: int = 64,
    batch: int = 32,
    statistics: Statistics | None = None,
) -> Iterator[Burst]:
    """Yields bursts as they come; at most `batch` prompts run at once, others wait their turn.

    `budget` is the number of drafted nodes a pass: the heaviest prefixes in mode `tree`, the first
    so many of the most likely chain in mode `chain`.
    """
    rules = _Rules(max_new_tokens, frozenset(stop_ids), mode, budget, penalties or Penalties())
    _check(target, drafter, prompts, rules, batch)
    ways = sampling_per_prompt(sampling, len(prompts))
    waiting = [
        Row(number, list(prompt), len(prompt), way)
        for number, (prompt, way) in enumerate(zip(prompts, ways, strict=True))
    ][::-1]
    running: list[Row] = []
    statistics = statistics or Statistics()
    with torch.no_grad():
        while waiting or running:
            entering = [waiting.pop() for _ in range(min(batch - len(running), len(waiting)))]
            if entering:
                with statistics.time("prefill"):
                    target.open(entering)
            running += entering
            bursts = _round(target, drafter, running, rules, statistics)
            yield from bursts
            over = [row for row, burst in zip(running, bursts, strict=True) if burst.last]
            target.close(over)
            running = [row for row, burst in zip(running, bursts, strict=True) if not burst.last]


@dataclass(frozen=True)
class _Rules:
    """What holds for every round."""

    max_new_tokens: int
    stops: frozenset[int]
    mode: Mode
    budget: int
    penalties: Penalties


def _round(
    target: Target, drafter: Drafter, rows: list[Row], rules: _Rules, statistics: Statistics
) -> list[Burst]:
    with statistics.time("draft"):
        log_q = _within_limits(drafter.draft(rows), rows, rules.max_new_tokens)
    with statistics.time("tree"):
        tokens, parents = _tree(log_q, rules)
        trees = _trees(rows, tokens, parents)
    with statistics.time("verify"):
        logits = target.verify(rows, trees)
        choices = _choices(rows, logits, tokens, trees, rules.penalties)
        accepted = fast_verify.accepted_branch(tokens, parents, trees.seen, choices, log_q.shape[1])
        # The one place a round waits for the device.
        refused, drafted = (choices < 0).any().tolist(), tokens.tolist()
        paths, lengths, bonuses = (values.tolist() for values in accepted)
    if refused:
        raise RangeError("the model's logits hold NaN or +inf, or nothing but −inf")
    bursts, going, kept = [], [], []
    for row, path, length, bonus, nodes in zip(rows, paths, lengths, bonuses, drafted, strict=True):
        path = path[:length]
        burst = _burst(row, [nodes[node] for node in path], bonus, rules)
        statistics.count(length, len(burst.tokens), burst.drafted)
        bursts.append(burst)
        if not burst.last:
            going.append(row)
            kept.append(path)
    with statistics.time("commit"):
        target.commit(going, kept)
        for row, burst in zip(rows, bursts, strict=True):
            row.tokens += burst.tokens
    return bursts


def _within_limits(log_q: Tensor, rows: list[Row], max_new_tokens: int) -> Tensor:
    """Nothing deeper than what may still be said: the last token of an answer is never drafted
    deeper than where it can be verified together with a bonus behind it."""
    useful = [max_new_tokens - row.made - 1 for row in rows]
    log_q = log_q[:, : max(useful)]
    depth = torch.arange(log_q.shape[1], device=log_q.device)
    beyond = depth >= torch.tensor(useful, device=log_q.device)[:, None]
    return log_q.masked_fill(beyond[:, :, None], -torch.inf)


def _tree(log_q: Tensor, rules: _Rules) -> tuple[Tensor, Tensor]:
    if rules.mode == "tree":
        return reference.heaviest_prefixes(log_q, rules.budget)
    log_q = log_q[:, : rules.budget]
    tokens, parents = reference.chain(log_q)
    impossible = log_q.amax(dim=-1) == -torch.inf
    return tokens.masked_fill(impossible, reference.PAD), parents


def _trees(rows: list[Row], tokens: Tensor, parents: Tensor) -> Trees:
    roots = torch.tensor([[row.tokens[-1]] for row in rows], device=tokens.device)
    seen = reference.ancestors(parents)
    return Trees(torch.cat((roots, tokens.clamp(min=0)), dim=1), reference.depths(seen), seen)


def _choices(
    rows: list[Row], logits: Tensor, tokens: Tensor, trees: Trees, rule: Penalties
) -> Tensor:
    if not rule.are_none:
        logits = torch.stack(
            [
                penalised(
                    logits[i],
                    rule,
                    row.tokens[: row.prompt_length],
                    row.tokens[row.prompt_length :],
                    tokens[i],
                    trees.seen[i],
                )
                for i, row in enumerate(rows)
            ]
        )
    made = torch.tensor([[row.made] for row in rows], device=logits.device) + trees.depths
    return picks(logits, [row.sampling for row in rows], made)


def _burst(row: Row, branch: list[int], bonus: int, rules: _Rules) -> Burst:
    """The branch and the bonus, cut behind a stop token and at the length limit."""
    tokens = [*branch, bonus][: rules.max_new_tokens - row.made]
    stop = next((i for i, token in enumerate(tokens) if token in rules.stops), None)
    if stop is not None:
        tokens = tokens[: stop + 1]
    last = stop is not None or row.made + len(tokens) >= rules.max_new_tokens
    return Burst(row.number, tokens, min(len(branch), len(tokens)), last)


def _check(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    rules: _Rules,
    batch: int,
) -> None:
    """Refuses before anything is computed."""
    checks.integer_between(
        1, _NO_LIMIT, budget=rules.budget, max_new_tokens=rules.max_new_tokens, batch=batch
    )
    if rules.mode not in get_args(Mode):
        raise RangeError(f"mode must be chain or tree, got {rules.mode!r}")
    if drafter.vocab != target.vocab:
        raise ShapeError(
            f"the drafter's vocabulary of {drafter.vocab} is not the target's {target.vocab}"
        )
    for stop in rules.stops:
        if not 0 <= stop < target.vocab:
            raise RangeError(f"stop token {stop} is outside the vocabulary")
    for number, prompt in enumerate(prompts):
        _check_prompt(target, drafter, number, prompt, rules.max_new_tokens)


def _check_prompt(
    target: Target, drafter: Drafter, number: int, prompt: Sequence[int], max_new_tokens: int
) -> None:
    if not prompt:
        raise RangeError(f"prompt {number} is empty")
    if not all(0 <= token < target.vocab for token in prompt):
        raise RangeError(f"prompt {number} has a token outside the vocabulary of {target.vocab}")
    total = len(prompt) + max_new_tokens
    if total > target.context:
        raise RangeError(f"prompt {number} needs {total} positions, the model has {target.context}")
    if reason := drafter.refuses(prompt):
        raise RangeError(f"prompt {number}: {reason}")
