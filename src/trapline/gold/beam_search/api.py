"""Batched beam search: the public functions, their checks, and the loop over steps."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from trapline.gold import checks
from trapline.gold.beam_search.policy import EarlyStopping, Name, Policy, Rules, named
from trapline.gold.beam_search.search import Beam, Search
from trapline.gold.errors import DTypeError, RangeError, ShapeError

_NO_LIMIT = 2**62
#: Longest prompt whose length to the power of the penalty must be finite, if it counts.
_LONGEST_PROMPT = 2**20
_LARGEST_LOG = 700.0


class LanguageModel(Protocol):
    """A model that gives the log-probabilities of next tokens."""

    def log_probs(self, prefixes: list[list[int]]) -> Any:
        """Log-probabilities (n, V) of every next token after each of n prefixes."""


class CachedModel(Protocol):
    """A model with a cache: it keeps the rows of its last answer, and `follow` continues them.

    With a paged cache, continuing a row is a `fork`, and rows that are not continued are freed:
    nothing is copied, and a prompt is read once.
    """

    def start(self, prompts: list[list[int]]) -> Any:
        """Log-probabilities (n, V) after each of n prompts."""

    def follow(self, parents: list[int], tokens: list[int]) -> Any:
        """(n, V) after rows `parents` of the last answer, each continued by its token."""


class Candidates(NamedTuple):
    """An answer without the tokens that cannot affect a search of width W with E ends.

    Each row needs its (1 + E) · W best tokens and all ends; tokens that a row omits are −inf.
    """

    log_probs: Any  # (n, U)
    tokens: Any  # (U,) ascending


def beam_search(
    lm: LanguageModel | CachedModel,
    prompts: Iterable[Sequence[int]],
    *,
    beam_width: int,
    max_new_tokens: int,
    eos_id: int | Iterable[int],
    length_penalty: float = 1.0,
    policy: Name | Policy = "canonical",
    early_stopping: EarlyStopping | None = None,
    n_best: int | None = None,
    **unknown: Any,
) -> list[list[Beam]]:
    """Up to `n_best` (all `beam_width` if not given) continuations of every prompt, best first.

    A beam's score is the sum of its log-probabilities over n^length_penalty, where n is the number
    of generated tokens with the end (`vllm` counts differently). `eos_id` is one end or several.
    The model is called once per step for the live beams of all prompts that have not stopped.
    `policy` is `canonical`, `hf` (with its `early_stopping`: False, True or
    "never"), `vllm`, `pooled`, or a `Policy`.
    """
    checks.refuse_options("beam_search", unknown)
    prompts = _prompts(prompts)
    if prompts:
        _check_model(lm)
    rules, count = checked_rules(
        beam_width,
        max_new_tokens,
        eos_id,
        length_penalty=length_penalty,
        policy=policy,
        early_stopping=early_stopping,
        n_best=n_best,
    )
    searches = [Search(prompt, rules) for prompt in prompts]
    _refuse_empty(searches, rules)
    _run(lm, searches, rules)
    return [search.beams(count) for search in searches]


def _check_model(lm: Any) -> None:
    if not hasattr(lm, "log_probs") and not (hasattr(lm, "start") and hasattr(lm, "follow")):
        kind = type(lm).__name__
        hint = "; search a Decoder with decoder.generate(…, beams=n)" if kind == "Decoder" else ""
        raise DTypeError(
            "lm must be an object with log_probs(prefixes), or with start(prompts) and "
            f"follow(parents, tokens), got {kind}{hint}"
        )


def checked_rules(
    beam_width: int,
    max_new_tokens: int,
    eos_id: int | Iterable[int],
    *,
    length_penalty: float = 1.0,
    policy: Name | Policy = "canonical",
    early_stopping: EarlyStopping | None = None,
    n_best: int | None = None,
) -> tuple[Rules, int]:
    """The rules of a search and the number of beams to return; raises if an argument is invalid."""
    checks.integer_between(1, _NO_LIMIT, beam_width=beam_width, max_new_tokens=max_new_tokens)
    count = beam_width if n_best is None else n_best
    checks.integer_between(1, beam_width, n_best=count)
    try:
        is_finite = math.isfinite(length_penalty)
    except TypeError:
        raise DTypeError(f"length_penalty must be a number, got {length_penalty!r}") from None
    if not is_finite:
        raise RangeError(f"length_penalty must be finite, got {length_penalty}")
    rules = Rules(
        beam_width,
        max_new_tokens,
        _ends(eos_id),
        float(length_penalty),
        named(policy, early_stopping),
    )
    _refuse_overflow(rules)
    return rules, count


def rescore(
    lm: LanguageModel,
    prompt: Sequence[int],
    tokens: Sequence[int],
    *,
    eos_id: int | Iterable[int],
    length_penalty: float = 1.0,
    policy: Name | Policy = "canonical",
) -> float:
    """The score of a continuation, computed from its tokens alone."""
    if not tokens:
        raise RangeError("tokens must not be empty: an empty continuation has no score")
    rules = Rules(len(tokens), len(tokens), _ends(eos_id), float(length_penalty), named(policy))
    prefixes = [[*prompt, *tokens[:n]] for n in range(len(tokens))]
    rows = _checked(lm.log_probs(prefixes), len(prefixes), rules.eos_ids)
    total = 0.0
    for row, token in zip(rows, tokens, strict=True):
        total += float(row[token])
    return rules.score(total, len(tokens), len(prompt), ended=tokens[-1] in rules.eos_ids)


def _run(lm: Any, searches: list[Search], rules: Rules) -> None:
    """Step until every search is over."""

    def by_prefix(running: list[Search]) -> Any:
        return lm.log_probs([p for search in running for p in search.prefixes()])

    ask = _Follower(lm) if hasattr(lm, "follow") else by_prefix
    while running := [search for search in searches if not search.is_over]:
        sizes = [len(search.nodes) for search in running]
        answer, columns = ask(running), None
        if isinstance(answer, Candidates):
            answer, columns = answer.log_probs, np.asarray(answer.tokens)
        rows = _checked(answer, sum(sizes), rules.eos_ids if columns is None else (0,))
        for search, part in zip(running, np.split(rows, np.cumsum(sizes)[:-1]), strict=True):
            search.advance(part, columns)


class _Follower:
    """Calls a model with a cache; keeps the order of the rows of its last answer."""

    def __init__(self, lm: CachedModel) -> None:
        self._lm = lm
        self._first_row: dict[int, int] = {}

    def __call__(self, running: list[Search]) -> Any:
        if not self._first_row:
            answer = self._lm.start([list(search.prompt) for search in running])
        else:
            parents = [self._first_row[id(s)] + parent for s in running for parent in s.parents]
            answer = self._lm.follow(parents, [token for s in running for token in s.tokens])
        ends = np.cumsum([len(search.nodes) for search in running]).tolist()
        self._first_row = {
            id(search): end - len(search.nodes) for search, end in zip(running, ends, strict=True)
        }
        return answer


def _checked(answer: Any, rows: int, eos_ids: tuple[int, ...]) -> np.ndarray:
    if hasattr(answer, "detach"):  # a tensor of any device and dtype, with or without gradients
        answer = answer.detach().double().cpu()
    try:
        log_probs = np.asarray(answer, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DTypeError(f"log_probs must return an array of numbers: {error}") from None
    if log_probs.ndim != 2 or log_probs.shape[0] != rows:
        raise ShapeError(f"log_probs must return shape ({rows}, V), got {log_probs.shape}")
    if max(eos_ids) >= log_probs.shape[1]:
        raise RangeError(f"eos_id {max(eos_ids)} is outside a vocabulary of {log_probs.shape[1]}")
    if not (log_probs < np.inf).all():
        raise RangeError("log_probs must not return NaN or +inf")
    return log_probs


def _ends(eos_id: int | Iterable[int]) -> tuple[int, ...]:
    several = isinstance(eos_id, Iterable)
    ends = tuple(eos_id) if isinstance(eos_id, Iterable) else (eos_id,)
    if several and not ends:
        raise RangeError("eos_id must name at least one token")
    for end in ends:
        checks.integer_between(0, _NO_LIMIT, eos_id=end)
    return tuple(sorted({int(end) for end in ends}))


def _refuse_empty(searches: list[Search], rules: Rules) -> None:
    """Raise for an end after an empty prompt if ends do not count: its length would be 0."""
    if rules.policy.length == "with-prompt" and not all(search.prompt for search in searches):
        raise RangeError("this policy counts the prompt's length, so a prompt must not be empty")


def _refuse_overflow(rules: Rules) -> None:
    """Raise if a length to the power of the penalty overflows or underflows."""
    counted = _LONGEST_PROMPT if rules.policy.length == "with-prompt" else 1
    if abs(rules.length_penalty) * math.log(rules.max_new_tokens + counted) > _LARGEST_LOG:
        longest = rules.max_new_tokens
        raise RangeError(
            f"length_penalty {rules.length_penalty:g} is too far from 0 for {longest} tokens"
        )


def _prompts(prompts: Any) -> list[list[int]]:
    """Prompts as lists; they may be NumPy arrays or tensors."""
    given = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise DTypeError(f"prompts must be a list of lists of token ids, got {prompts!r}")
    return [_tokens(prompt) for prompt in given]


def _tokens(prompt: Any) -> list[int]:
    if not isinstance(prompt, Iterable):
        raise DTypeError(
            f"a prompt must be a list of token ids, got {prompt!r}; write one prompt as [[5, 6]]"
        )
    for token in prompt:
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise DTypeError(f"a prompt must be made of ints, got {token!r}")
    return [int(token) for token in prompt]
