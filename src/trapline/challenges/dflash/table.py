"""Exact models on the controller's side, small trees, and comparisons with the oracle."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from trapline.arena.errors import SubmissionRaised, Violation
from trapline.arena.judge import expect
from trapline.arena.process.proxy import Stub, Submission
from trapline.gold.tree_decoding import oracle

Prefix = tuple[int, ...]


# --- trees ---------------------------------------------------------------------------


def log_q_of(rows: Sequence[Mapping[int, float]], vocabulary: int, dtype: Any) -> np.ndarray:
    """A draft (L, V) from one {token: log-probability} a depth; everything else is impossible."""
    log_q = np.full((len(rows), vocabulary), -np.inf, dtype=dtype)
    for depth, entries in enumerate(rows):
        for token, value in entries.items():
            log_q[depth, token] = value
    return log_q


def weights_of(tokens: np.ndarray, parents: np.ndarray, log_q: np.ndarray) -> list[float]:
    """The weight of every node, from its own branch."""
    weights: list[float] = []
    depths: list[int] = []
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        above, depth = (0.0, 0) if parent < 0 else (weights[parent], depths[parent] + 1)
        expect.that(depth < len(log_q), f"a node hangs at depth {depth + 1} of {len(log_q)}")
        expect.that(0 <= token < log_q.shape[1], f"token {token} is outside the vocabulary")
        weights.append(above + float(log_q[depth, token]))
        depths.append(depth)
    return weights


def tree(submission: Submission, log_q: np.ndarray, budget: int) -> tuple[np.ndarray, np.ndarray]:
    """The submission's tree, in the right form."""
    got = submission.build_tree(log_q, budget)
    expect.that(isinstance(got, tuple | list) and len(got) == 2, "not (tokens, parents)")
    return tree_form(*got)


def tree_form(tokens: Any, parents: Any) -> tuple[np.ndarray, np.ndarray]:
    """Two int64 arrays of one length, parents before children."""
    expect.that(isinstance(tokens, np.ndarray) and tokens.ndim == 1, "tokens is not an array (N,)")
    expect.array(tokens, shape=tokens.shape, dtype=np.int64, what="tokens")
    expect.array(parents, shape=tokens.shape, dtype=np.int64, what="parents")
    rising = (parents >= -1) & (parents < np.arange(len(parents)))
    expect.that(bool(rising.all()), f"parents {parents.tolist()} do not come before their children")
    return tokens, parents


def same_tree(
    submission: Submission,
    log_q: np.ndarray,
    budget: int,
    want: tuple[Sequence[int], Sequence[int]] | None = None,
) -> None:
    """The oracle's tree (or the one written down). Prefixes of probability zero may follow."""
    tokens, parents = tree(submission, log_q, budget)
    right = oracle.build_tree(log_q, budget) if want is None else want
    possible = sum(weight > -np.inf for weight in weights_of(tokens, parents, log_q))
    expect.that(len(tokens) <= max(budget, 0), f"{len(tokens)} nodes for a budget of {budget}")
    got = list(zip(tokens.tolist(), parents.tolist(), strict=True))
    expected = list(zip(np.asarray(right[0]).tolist(), np.asarray(right[1]).tolist(), strict=True))
    expect.that(
        got[: len(expected)] == expected and possible == len(expected),
        f"(token, parent) are {_brief(got)}, expected {_brief(expected)}",
    )


class Tree(NamedTuple):
    """A tree as the verifying functions take it."""

    tokens: np.ndarray
    parents: np.ndarray


def small_tree(rng: np.random.Generator, nodes: int, vocabulary: int) -> Tree:
    """A random tree in random order, parents before children, siblings with different tokens."""
    tokens: list[int] = []
    parents: list[int] = []
    while len(tokens) < nodes:
        parent = int(rng.integers(-1, len(tokens)))
        token = int(rng.integers(vocabulary))
        if (parent, token) not in set(zip(parents, tokens, strict=True)):
            parents.append(parent)
            tokens.append(token)
    return Tree(np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64))


def verdict(got: Any) -> tuple[list[int], int]:
    """Path and bonus, in whatever integer form they come."""
    expect.that(isinstance(got, tuple | list) and len(got) == 2, "not (path, bonus)")
    path, bonus = got
    listed = path.tolist() if isinstance(path, np.ndarray) else path
    is_path = isinstance(listed, list | tuple) and all(_is_int(node) for node in listed)
    expect.that(is_path, f"the path is {path!r}, not a list of node indices")
    expect.that(_is_int(bonus), f"the bonus is {bonus!r}, not an int")
    return [int(node) for node in listed], int(bonus)


def same_verdict(got: Any, want: tuple[Sequence[int], int]) -> None:
    """Path and bonus are these."""
    found = verdict(got)
    right = ([int(node) for node in want[0]], int(want[1]))
    expect.that(found == right, f"(path, bonus) is {found}, expected {right}")


def verify(
    submission: Submission,
    tokens: Sequence[int] | np.ndarray,
    parents: Sequence[int] | np.ndarray,
    choices: Sequence[int] | np.ndarray,
    want: tuple[Sequence[int], int] | None = None,
) -> None:
    """`verify_tree` against the oracle, or against what is written down."""
    arrays = [np.asarray(values, dtype=np.int64) for values in (tokens, parents, choices)]
    truth = oracle.verify_tree(*(array.tolist() for array in arrays)) if want is None else want
    same_verdict(submission.verify_tree(*arrays), truth)


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _brief(pairs: list[tuple[int, int]]) -> str:
    return f"{pairs[:8]}{'…' if len(pairs) > 8 else ''}"


#: Everything that `run` can compare.
ALL = ("passes", "accepted", "target_passes", "nodes")


# --- models for generate -------------------------------------------------------------


def random_law(seed: int, vocabulary: int, *, eos_id: int, eos_bonus: float = 0.0) -> oracle.Law:
    """A target whose law after a prefix is drawn from the prefix."""

    def law(prefix: Prefix) -> np.ndarray:
        return _law_after(tuple(prefix), seed, vocabulary, eos_id, eos_bonus).copy()

    return law


@lru_cache(maxsize=1 << 14)
def _law_after(
    prefix: Prefix, seed: int, vocabulary: int, eos_id: int, eos_bonus: float
) -> np.ndarray:
    """Drawn once: drafter, target and oracle ask for the laws after the same prefixes."""
    rng = np.random.default_rng([seed, len(prefix), *prefix])
    values = rng.standard_normal(vocabulary)
    values[eos_id] += eos_bonus
    return np.asarray(values - np.log(np.exp(values).sum()))


def scripted_law(vocabulary: int, prompt: Prefix, script: Sequence[int]) -> oracle.Law:
    """A target that continues the prompt with the script, and picks another token elsewhere.

    Off the script its pick still depends on the whole prefix, so that a wrong prefix shows.
    """

    def law(prefix: Prefix) -> np.ndarray:
        values = np.full(vocabulary, -8.0)
        said = prefix[len(prompt) :]
        on_script = prefix[: len(prompt)] == prompt and tuple(script[: len(said)]) == said
        if on_script and len(said) < len(script):
            values[script[len(said)]] = -0.25
        else:
            values[(sum(prefix) + 3 * len(prefix)) % vocabulary] = -0.5
        return values

    return law


def one_hot(tokens: Sequence[int], vocabulary: int) -> np.ndarray:
    """A draft (L, V) that is sure of one continuation."""
    log_q = np.full((len(tokens), vocabulary), -9.0)
    log_q[np.arange(len(tokens)), list(tokens)] = -0.25
    return log_q


def perfect_draft(law: oracle.Law, depth: int, vocabulary: int) -> oracle.Draft:
    """A drafter that proposes exactly what the target picks."""

    def draft(prefix: Prefix) -> np.ndarray:
        future: list[int] = []
        while len(future) < depth:
            future.append(int(np.argmax(law((*prefix, *future)))))
        return one_hot(future, vocabulary)

    return draft


def hopeless_draft(law: oracle.Law, depth: int, vocabulary: int) -> oracle.Draft:
    """A drafter that gives the target's next token probability 0."""

    def draft(prefix: Prefix) -> np.ndarray:
        log_q = np.full((depth, vocabulary), -2.0)
        log_q[0, int(np.argmax(law(prefix)))] = -np.inf
        return log_q

    return draft


def noisy_draft(seed: int, law: oracle.Law, depth: int, vocabulary: int) -> oracle.Draft:
    """A drafter that is right at some positions, second best at others, and random at the rest."""
    perfect = perfect_draft(law, depth, vocabulary)

    def draft(prefix: Prefix) -> np.ndarray:
        rng = np.random.default_rng([seed, len(prefix), *prefix])
        log_q = perfect(prefix) / 4 - 0.125 * rng.integers(0, 24, (depth, vocabulary))
        return np.asarray(log_q)

    return draft


class Generated(NamedTuple):
    """What a submission generated, and what it asked the models."""

    tokens: list[int]
    stats: dict[str, Any]
    target_prefixes: list[Prefix]
    draft_prefixes: list[Prefix]
    nodes: list[int]


def generate(
    submission: Submission,
    law: oracle.Law,
    draft: Callable[[Prefix], np.ndarray],
    prompt: Sequence[int],
    *,
    dtype: Any = np.float64,
    **settings: Any,
) -> Generated:
    """Runs `generate` on exact models, and checks the form of every request to them."""
    seen: list[Violation] = []
    nodes: list[int] = []
    asked: list[Prefix] = []
    drafted: list[Prefix] = []

    def watched(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def watching(*args: Any, **kwargs: Any) -> np.ndarray:
            try:
                return function(*args, **kwargs)
            except Violation as violation:
                # Raised here it would end the session, so the submission gets an error instead.
                seen.append(violation)
                raise ValueError("the model cannot answer this") from violation

        return watching

    def tree_log_probs(prefix: Any, tokens: Any, parents: Any) -> np.ndarray:
        start = _prefix(prefix)
        branches = _branches(tokens, parents)
        asked.append(start)
        nodes.append(len(branches) - 1)
        return np.stack([law(start + branch) for branch in branches]).astype(dtype)

    def block(prefix: Any) -> np.ndarray:
        drafted.append(_prefix(prefix))
        return draft(drafted[-1]).astype(dtype)

    target = Stub(tree_log_probs=watched(tree_log_probs))
    drafter = Stub(block=watched(block))
    try:
        got = submission.generate(target, drafter, list(prompt), **settings)
    except SubmissionRaised as raised:
        raise (seen[0] if seen else raised) from None
    if seen:
        raise seen[0]
    tokens, stats = _output(got)
    return Generated(tokens, stats, asked, drafted, nodes)


def _prefix(prefix: Any) -> Prefix:
    is_list = type(prefix) is list and all(_is_int(token) for token in prefix)
    expect.that(is_list, f"a model was given {prefix!r}, not a list of ints")
    expect.that(len(prefix) > 0, "a model was given an empty prefix")
    return tuple(int(token) for token in prefix)


def _branches(tokens: Any, parents: Any) -> list[Prefix]:
    """What the target has read at the root and at every node, from parents alone."""
    for values in (tokens, parents):
        is_row = isinstance(values, list | tuple) or getattr(values, "ndim", 0) == 1
        expect.that(is_row, f"the target was given a tree of {type(values).__name__}")
    listed = [v.tolist() if isinstance(v, np.ndarray) else list(v) for v in (tokens, parents)]
    expect.that(len(listed[0]) == len(listed[1]), "tokens and parents differ in length")
    branches: list[Prefix] = [()]
    for node, (token, parent) in enumerate(zip(*listed, strict=True)):
        expect.that(_is_int(token) and _is_int(parent), "tokens and parents must be integers")
        expect.that(-1 <= parent < node, f"node {node} hangs below {parent}")
        branches.append((*branches[parent + 1], token))
    return branches


def _output(got: Any) -> tuple[list[int], dict[str, Any]]:
    expect.that(isinstance(got, tuple | list) and len(got) == 2, "not (tokens, stats)")
    tokens, stats = got
    listed = tokens.tolist() if isinstance(tokens, np.ndarray) else tokens
    is_list = isinstance(listed, list | tuple) and all(_is_int(token) for token in listed)
    expect.that(is_list, f"tokens are {tokens!r}, not ints")
    expect.that(isinstance(stats, dict), "stats is not a dict")
    for name in ("target_passes", "accepted"):
        expect.that(_is_int(stats.get(name)), f"stats[{name!r}] is {stats.get(name)!r}, not an int")
    return [int(token) for token in listed], stats


def run(
    submission: Submission,
    law: oracle.Law,
    draft: Callable[[Prefix], np.ndarray],
    prompt: Sequence[int],
    *,
    compare: Collection[str] = (),
    dtype: Any = np.float64,
    **settings: Any,
) -> Generated:
    """Generates, and compares the output and what `compare` names with the oracle's.

    `passes`: the prefix of every pass. `accepted`, `target_passes`: the statistics. `nodes`: the
    budget. A trap names only what it is about, so that it fails for its own bug only.
    """
    got = generate(submission, law, draft, prompt, dtype=dtype, **settings)
    want = oracle.generate(law, draft, prompt, **settings)
    expect.equal(got.tokens, want.tokens, "the output")
    counted = int(got.stats["accepted"])
    same_passes = "passes" not in compare or got.target_prefixes == want.prefixes
    same_count = "accepted" not in compare or counted == want.accepted
    if not (same_passes and same_count):
        cut = list(_with_cut_trees(want.tokens, draft, prompt, **settings))
        if not same_passes and got.target_prefixes not in [prefixes for prefixes, _ in cut]:
            expect.equal(got.target_prefixes, want.prefixes, "the prefixes of the target's passes")
        if not same_count and counted not in [count for _, count in cut]:
            expect.equal(counted, want.accepted, "accepted")
    if "target_passes" in compare:
        passes = int(got.stats["target_passes"])
        expect.equal(passes, len(got.target_prefixes), "target_passes")
    if "nodes" in compare:
        most, budget = max(got.nodes, default=0), settings["budget"]
        expect.that(most <= budget, f"{most} nodes for a budget of {budget}")
    return got


#: Levels and nodes fewer than tokens are still allowed; None where they are not cut.
_CUTS: tuple[tuple[int | None, int | None], ...] = (
    (0, None),
    (1, None),
    (None, 0),
    (None, 1),
    (0, 0),
    (1, 1),
)


def _with_cut_trees(
    output: Sequence[int],
    draft: Callable[[Prefix], np.ndarray],
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    budget: int,
    **_: Any,
) -> Iterator[tuple[list[Prefix], int]]:
    """Passes and accepted tokens where the tree is cut to as many levels or nodes as are allowed.

    The contract leaves this open: near the limit a tree may be whole, or have as many levels or
    nodes as tokens are still allowed, with or without the bonus.
    """
    for levels, nodes in _CUTS:
        done = accepted = 0
        prefixes: list[Prefix] = []
        while done < len(output):
            left = max_new_tokens - done
            prefixes.append((*prompt, *output[:done]))
            log_q = draft(prefixes[-1])[: None if levels is None else left - levels]
            most = budget if nodes is None else min(budget, left - nodes)
            drafted = _agreeing(*oracle.build_tree(log_q, most), output[done:])
            accepted += drafted
            done = min(done + drafted + 1, len(output))
        yield prefixes, accepted


def _agreeing(tokens: np.ndarray, parents: np.ndarray, continuation: Sequence[int]) -> int:
    """How much of the continuation is a branch of the tree."""
    children = {
        edge: node for node, edge in enumerate(zip(parents.tolist(), tokens.tolist(), strict=True))
    }
    node, steps = -1, 0
    while steps < len(continuation) and (node, continuation[steps]) in children:
        node = children[node, continuation[steps]]
        steps += 1
    return steps
