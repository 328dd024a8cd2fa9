"""One cycle of verification at temperature 0, judged by the golden test: equality with greedy.

`build_tree_mask(prompt_len, tree_parents)` gives who may attend to whom, as booleans.
`verify(lm, prompt, tree_tokens, tree_parents)` gives the tokens that a cycle appends, at least one.
`lm.logits(tokens, mask)` answers (len(tokens), V): each row depends on the tokens that its mask
shows, so that a wrong mask gives wrong logits. How many drafted tokens a cycle accepts beyond the
first is free, but a right chain is accepted whole.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import case
from trapline.arena.process.proxy import Stub, Submission

Rng = np.random.Generator
VOCABULARY = 12
#: Tokens of a draft, and the parent of each: −1 for a child of the prompt's last token.
Tree = tuple[list[int], list[int]]


class Target:
    """A model whose next token depends on all tokens that a position sees, in their order."""

    def __init__(self, rng: Rng) -> None:
        self.seed = int(rng.integers(2**31))

    def row(self, seen: Sequence[int]) -> np.ndarray:
        draw = np.random.default_rng([self.seed, len(seen), *seen])
        return np.asarray(draw.standard_normal(VOCABULARY))

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.row(tokens).argmax()))
        return tokens[len(prompt) :]

    def stub(self) -> Stub:
        return Stub(logits=self._logits)

    def _logits(self, tokens: Any, mask: Any) -> np.ndarray:
        tokens, mask = [int(t) for t in tokens], np.asarray(mask)
        if mask.shape != (len(tokens), len(tokens)) or mask.dtype != bool:
            raise ValueError(f"the mask is {mask.dtype}{list(mask.shape)} for {len(tokens)} tokens")
        return np.stack([self.row([t for t, m in zip(tokens, r, strict=True) if m]) for r in mask])


def right_mask(prompt_len: int, parents: Sequence[int]) -> np.ndarray:
    """From the definition, node by node."""
    total = prompt_len + len(parents)
    mask = np.zeros((total, total), bool)
    for row in range(total):
        mask[row, : min(row + 1, prompt_len)] = True
        node = row - prompt_len
        while node >= 0:
            mask[row, prompt_len + node] = True
            node = parents[node]
    return mask


def check_mask(submission: Submission, prompt_len: int, parents: list[int]) -> None:
    got = submission.build_tree_mask(prompt_len, parents)
    expect.equal(got, right_mask(prompt_len, parents), "the mask")


def appended(submission: Submission, target: Target, prompt: list[int], tree: Tree) -> list[int]:
    """What one cycle appends: a beginning of the greedy continuation, and not nothing."""
    got = submission.verify(target.stub(), prompt, *tree)
    whole = isinstance(got, list | tuple) and all(isinstance(t, int | np.integer) for t in got)
    expect.that(whole, f"a cycle appended {got!r}, not a list of tokens")
    tokens = [int(token) for token in got]
    want = target.greedy(prompt, len(tokens))
    expect.that(len(tokens) > 0, "a cycle appended nothing")
    expect.that(tokens == want, f"a cycle appended {tokens}, greedy decoding gives {want}")
    return tokens


def draft(rng: Rng, target: Target, prompt: list[int], parents: list[int], right: float) -> Tree:
    """A tree whose nodes hold the model's own next token with this probability."""
    tokens: list[int] = []
    for node, parent in enumerate(parents):
        path, at = [], parent
        while at >= 0:
            path.append(tokens[at])
            at = parents[at]
        best = int(target.row([*prompt, *reversed(path)]).argmax())
        taken = {tokens[other] for other in range(node) if parents[other] == parent}
        other = [t for t in range(VOCABULARY) if t != best and t not in taken]
        tokens.append(
            best if best not in taken and rng.random() < right else int(rng.choice(other))
        )
    return tokens, parents


def prompt_of(rng: Rng, length: int) -> list[int]:
    return [int(t) for t in rng.integers(0, VOCABULARY, length)]


#: Chains, branches, several roots, breadth first and depth first.
SHAPES = (
    [-1, 0, 1, 2],
    [-1, -1, -1],
    [-1, -1, 0, 0, 1, 2],
    [-1, 0, 1, -1, 3, 3],
    [-1, 0, 0, 1, 1, 2, -1],
)


@case
def masks(submission: Submission, rng: Rng) -> None:
    for parents in SHAPES:
        check_mask(submission, int(rng.integers(1, 5)), parents)
    random = [int(rng.integers(-1, node)) for node in range(10)]
    check_mask(submission, 3, random)


@case
def greedy_equality_on_random_trees(submission: Submission, rng: Rng) -> None:
    for right in (0.3, 0.6, 0.9):
        for parents in SHAPES:
            target, prompt = Target(rng), prompt_of(rng, 3)
            appended(submission, target, prompt, draft(rng, target, prompt, parents, right))


@case
def a_right_chain_is_accepted(submission: Submission, rng: Rng) -> None:
    target, prompt = Target(rng), prompt_of(rng, 4)
    parents = [-1, 0, 1, 2]
    got = appended(submission, target, prompt, draft(rng, target, prompt, parents, 1.0))
    expect.that(len(got) >= 4, f"a right chain of 4 tokens, of which {len(got)} were appended")


@case
def several_roots(submission: Submission, rng: Rng) -> None:
    """None right, the first, the second, or the last; the others hold what greedy says later."""
    for place in (None, 0, 1, 2) * 6:
        target, prompt = Target(rng), prompt_of(rng, 3)
        best, *later = target.greedy(prompt, VOCABULARY)
        others = [t for t in dict.fromkeys([*later, *range(VOCABULARY)]) if t != best]
        tokens = others[:3] if place is None else others[:2]
        if place is not None:
            tokens.insert(place, best)
        appended(submission, target, prompt, (tokens, [-1, -1, -1]))


@case
def a_rejected_subtree(submission: Submission, rng: Rng) -> None:
    """Children of a wrong node hold what greedy decoding says next."""
    for _ in range(3):
        target, prompt = Target(rng), prompt_of(rng, 3)
        first, second, third = target.greedy(prompt, 3)
        appended(
            submission, target, prompt, ([(first + 1) % VOCABULARY, second, third], [-1, 0, 1])
        )


@case
def cycles_equal_greedy_decoding(submission: Submission, rng: Rng) -> None:
    """Several cycles, each continuing the text of the one before."""
    target, text = Target(rng), prompt_of(rng, 3)
    for cycle in range(5):
        parents = SHAPES[cycle % len(SHAPES)]
        text = text + appended(submission, target, text, draft(rng, target, text, parents, 0.7))
