"""Speculative generation, the readable loop: draft, verify in one pass, commit what agrees.

The output is the target's own, greedy or sampled, for any drafter. A target and a drafter are given
as two protocols: `decoder_target` implements the target for a `Decoder`, `drafter` and
`prompt_lookup` the two kinds of drafter. `fast_generate` runs the same rounds as CUDA graphs.

Letters: R rows of a batch, L drafted depths, N nodes, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from trapline.gold import checks
from trapline.gold.decoder.penalties import History, penalised_nodes
from trapline.gold.decoder.sampling import Sampling, TokenSampler, sampling_per_prompt
from trapline.gold.decoder.speculator import Burst
from trapline.gold.errors import RangeError, ShapeError
from trapline.gold.tree_decoding import reference
from trapline.gold.tree_decoding.api import build_tree
from trapline.gold.tree_decoding.statistics import Statistics

Mode = Literal["chain", "tree"]
_NO_LIMIT = 2**62
#: Stands for a choice without a softmax; differs from the −1 of padding nodes.
UNDEFINED_TOKEN = -2


#: Why a prompt ends without an answer.
UNDEFINED = "the model's logits contain NaN or +inf, or only −inf"


@dataclass
class Row:
    """A prompt in progress. The last of `tokens` is the root: known, but not in a cache yet."""

    number: int
    tokens: list[int]
    prompt_length: int
    sampling: Sampling = field(default_factory=Sampling)
    #: State of the target and of the drafter for this row.
    target: Any = None
    drafter: Any = None
    #: (n, …) features of committed tokens that the drafter has not processed yet.
    fresh: list[Tensor] = field(default_factory=list)

    @property
    def made(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def history(self) -> History:
        return History(self.tokens[: self.prompt_length], self.tokens[self.prompt_length :])


class Trees(NamedTuple):
    """Input of the target: the root and N drafted nodes of every row."""

    ids: Tensor  # (R, N+1); column 0 is the root; padding carries token 0
    depths: Tensor  # (R, N+1)
    seen: Tensor  # (R, N+1, N+1), ancestors of root and nodes


class Target(Protocol):
    """The model that decides the output."""

    vocab: int
    context: int

    def open(self, rows: list[Row]) -> None:
        """Process all tokens of new rows but the last."""

    def verify(self, rows: list[Row], trees: Trees) -> Tensor:
        """Logits (R, N+1, V) after root and nodes, each conditioned on its own branch."""

    def commit(self, rows: list[Row], paths: list[list[int]]) -> None:
        """Keep root and path of each row's last tree, drop the other nodes."""

    def close(self, rows: list[Row]) -> None:
        """Free the state of rows that are done."""


class Drafter(Protocol):
    """The model that proposes tokens."""

    vocab: int

    def refuses(self, prompt: Sequence[int]) -> str | None:
        """Why this prompt cannot be continued, or None."""

    def draft(self, rows: list[Row]) -> Tensor:
        """Log-probabilities (R, L, V) of the tokens after each row's root; consumes `fresh`.

        −inf for tokens that are not drafted.
        """


class Output(NamedTuple):
    """All answers, without prompts and with stop tokens, and the statistics."""

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
        mode=mode,
        budget=budget,
        batch=batch,
        statistics=statistics,
    ):
        if burst.error:
            raise RangeError(f"prompt {burst.prompt}: {burst.error}")
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
    mode: Mode = "tree",
    budget: int = 64,
    batch: int = 32,
    finished: Callable[[int], bool] = lambda prompt: False,
    statistics: Statistics | None = None,
) -> Iterator[Burst]:
    """Yield bursts as they come; at most `batch` prompts run at once, the others wait.

    `budget` is the number of drafted nodes per pass: the heaviest prefixes in mode `tree`, the
    first `budget` tokens of the most likely chain in mode `chain`. `finished(i)` is called after
    each burst of prompt i; True ends that prompt.
    """
    rules = Rules(max_new_tokens, frozenset(stop_ids), mode, budget)
    check(target, drafter, prompts, rules, batch)
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
            over = []
            for row, burst in _round(target, drafter, running, rules, statistics):
                yield burst
                if burst.last or finished(row.number):
                    over.append(row)
            target.close(over)
            running = [row for row in running if row not in over]


@dataclass(frozen=True)
class Rules:
    """Settings of every round."""

    max_new_tokens: int
    stops: frozenset[int]
    mode: Mode
    budget: int


def _round(
    target: Target, drafter: Drafter, rows: list[Row], rules: Rules, statistics: Statistics
) -> list[tuple[Row, Burst]]:
    with statistics.time("draft"):
        log_q = _within_limits(_defined(drafter.draft(rows)), rows, rules.max_new_tokens)
    with statistics.time("tree"):
        tokens, parents = _tree(log_q, rules)
        trees = _trees(rows, tokens, parents)
    with statistics.time("verify"):
        logits = target.verify(rows, trees)
        choices = _choices(rows, logits, tokens, trees)
        # An undefined choice must not match the −1 of padding nodes.
        choices = choices.masked_fill(choices < 0, UNDEFINED_TOKEN)
        accepted = reference.accepted_branch(tokens, parents, trees.seen, choices, log_q.shape[1])
        # The only place where a round waits for the device.
        drafted = tokens.tolist()
        paths, lengths, bonuses = (values.tolist() for values in accepted)
    bursts, going, kept = [], [], []
    for row, path, length, bonus, nodes in zip(rows, paths, lengths, bonuses, drafted, strict=True):
        path = path[:length]
        said = [*(nodes[node] for node in path), bonus]
        burst = cut(row.number, said, length, rules.max_new_tokens - row.made, rules.stops)
        statistics.count(length, len(burst.tokens), burst.drafted)
        bursts.append((row, burst))
        if not burst.last:
            going.append(row)
            kept.append(path)
    with statistics.time("commit"):
        target.commit(going, kept)
        for row, burst in bursts:
            row.tokens += burst.tokens
    return bursts


def cut(prompt: int, tokens: list[int], accepted: int, left: int, stops: frozenset[int]) -> Burst:
    """Accepted tokens and the bonus as a burst that ends at the limit or with a stop token."""
    tokens = tokens[:left]
    end = next((i for i, token in enumerate(tokens) if token < 0 or token in stops), None)
    if end is not None and tokens[end] < 0:
        return Burst(prompt, tokens[:end], min(accepted, end), last=True, error=UNDEFINED)
    tokens = tokens if end is None else tokens[: end + 1]
    last = end is not None or len(tokens) >= left
    return Burst(prompt, tokens, min(accepted, len(tokens)), last)


def _defined(log_q: Tensor) -> Tensor:
    """Drops the drafts of rows that contain NaN or +inf, so that these rows draft nothing.

    The target decides whether such a row ends; the other rows go on.
    """
    defined = (log_q < torch.inf).flatten(1).all(dim=1)
    return torch.where(defined[:, None, None], log_q, -torch.inf)


def _within_limits(log_q: Tensor, rows: list[Row], max_new_tokens: int) -> Tensor:
    """Mask depths that an answer cannot reach: the bonus always follows the drafted tokens."""
    useful = [max_new_tokens - row.made - 1 for row in rows]
    log_q = log_q[:, : max(useful)]
    depth = torch.arange(log_q.shape[1], device=log_q.device)
    beyond = depth >= torch.tensor(useful, device=log_q.device)[:, None]
    return log_q.masked_fill(beyond[:, :, None], -torch.inf)


def _tree(log_q: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
    if rules.mode == "tree":
        return build_tree(log_q, rules.budget)
    log_q = log_q[:, : rules.budget]
    tokens, parents = reference.chain(log_q)
    impossible = log_q.amax(dim=-1) == -torch.inf
    return tokens.masked_fill(impossible, reference.PAD), parents


def _trees(rows: list[Row], tokens: Tensor, parents: Tensor) -> Trees:
    roots = torch.tensor([[row.tokens[-1]] for row in rows], device=tokens.device)
    seen = reference.ancestors(parents)
    return Trees(torch.cat((roots, tokens.clamp(min=0)), dim=1), reference.depths(seen), seen)


def _choices(rows: list[Row], logits: Tensor, tokens: Tensor, trees: Trees) -> Tensor:
    if any(row.sampling.changes_logits for row in rows):
        logits = torch.stack(
            [
                penalised_nodes(logits[i], row.sampling, row.history, tokens[i], trees.seen[i])
                for i, row in enumerate(rows)
            ]
        )
    made = torch.tensor([[row.made] for row in rows], device=logits.device) + trees.depths
    return picks(logits, [row.sampling for row in rows], made)


def picks(logits: Tensor, ways: Sequence[Sampling], made: Tensor) -> Tensor:
    """(R, N+1) tokens for logits (R, N+1, V); `made` (R, N+1) tokens of the answer come before.

    Row i says what follows node i; bias and penalties for the text down to that node are in the
    logits already. The random number of a pick belongs to the position of the token that is picked,
    not to the node or the round: with the same seed the same text comes out, drafted or not.
    Negative where the softmax is undefined.
    """
    rows, nodes, vocabulary = logits.shape
    plain = [way.without_penalties for way in ways for _ in range(nodes)]
    choose = TokenSampler(plain, vocabulary, logits.device)
    return choose(logits.reshape(rows * nodes, vocabulary), made.flatten()).view(rows, nodes)


def check(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    rules: Rules,
    batch: int,
) -> None:
    """Raise before anything is computed if an argument cannot be served."""
    checks.integer_between(
        1, _NO_LIMIT, budget=rules.budget, max_new_tokens=rules.max_new_tokens, batch=batch
    )
    if rules.mode not in get_args(Mode):
        raise RangeError(f"mode must be 'chain' or 'tree', got {rules.mode!r}")
    if drafter.vocab != target.vocab:
        raise ShapeError(
            f"the drafter's vocabulary of {drafter.vocab} is not the target's {target.vocab}"
        )
    for stop in rules.stops:
        if not 0 <= stop < target.vocab:
            raise RangeError(f"stop token {stop} is outside the vocabulary of {target.vocab}")
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
