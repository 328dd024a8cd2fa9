# ruff: noqa: B905, RUF023, UP035, UP037
"""Draft trees as objects: nodes know their parent and their children."""

from __future__ import annotations

import heapq
import operator
from typing import Iterator

import numpy as np


class Check:
    """Turns arguments into clean values or refuses them."""

    @staticmethod
    def natural(value) -> int:
        number = operator.index(value)
        if number < 0:
            raise ValueError("expected a number that is not negative")
        return number

    @staticmethod
    def integers(values) -> np.ndarray:
        array = np.asarray(values)
        if not isinstance(values, np.ndarray) and array.shape == (0,):
            array = array.astype(np.int64)
        if not np.issubdtype(array.dtype, np.integer):
            raise TypeError("expected integers")
        if array.ndim != 1:
            raise ValueError("expected one axis")
        return array

    @staticmethod
    def floats(values, rank: int) -> np.ndarray:
        array = np.asarray(values)
        if not np.issubdtype(array.dtype, np.floating):
            raise TypeError("expected floating-point numbers")
        if array.ndim != rank:
            raise ValueError(f"expected {rank} axes")
        return array


class Node:
    """A drafted token below its parent; the root has index -1."""

    __slots__ = ("index", "token", "parent", "children")

    def __init__(self, index: int, token: int | None, parent: "Node | None"):
        self.index, self.token, self.parent = index, token, parent
        self.children: dict[int, Node] = {}

    def lineage(self) -> Iterator["Node"]:
        """This node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class Tree:
    """A checked tree in the order of its arrays."""

    def __init__(self, tokens, parents):
        tokens, parents = Check.integers(tokens), Check.integers(parents)
        if tokens.shape != parents.shape:
            raise ValueError("tokens and parents differ in length")
        self.root = Node(-1, None, None)
        self.nodes = [self.root]
        for index, (token, parent) in enumerate(zip(tokens.tolist(), parents.tolist())):
            if not -1 <= parent < index:
                raise ValueError("parents must come before their children")
            node = Node(index, token, self.nodes[parent + 1])
            node.parent.children.setdefault(token, node)
            self.nodes.append(node)

    def follow(self, picks: list[int]) -> tuple[list[int], int]:
        if len(picks) != len(self.nodes):
            raise ValueError("one pick for the root and each node")
        node, path = self.root, []
        while picks[node.index + 1] in node.children:
            node = node.children[picks[node.index + 1]]
            path.append(node.index)
        return path, picks[node.index + 1]


class Row:
    """One depth of the draft: its possible tokens, the likeliest first."""

    def __init__(self, law: np.ndarray, limit: int):
        law = law.astype(np.float64)
        possible = np.flatnonzero(law != -np.inf)
        ranked = possible[np.lexsort((possible, -law[possible]))][:limit]
        self.tokens = ranked.tolist()
        self.logs = law[ranked].tolist()


class Candidate:
    """A prefix that may enter the tree next."""

    __slots__ = ("weight", "depth", "parent", "rank", "row", "above")

    def __init__(self, row: Row, depth: int, parent: int, above: float, rank: int = 0):
        self.row, self.depth, self.parent, self.above, self.rank = row, depth, parent, above, rank
        self.weight = above + row.logs[rank]

    @property
    def token(self) -> int:
        return self.row.tokens[self.rank]

    def __lt__(self, other: "Candidate") -> bool:
        if self.weight != other.weight:
            return self.weight > other.weight
        return (self.depth, self.parent, self.token) < (other.depth, other.parent, other.token)


class Builder:
    def __init__(self, log_q: np.ndarray, budget: int):
        self.rows = [Row(law, budget) for law in log_q] if budget else []
        self.budget = budget
        self.heap: list[Candidate] = []

    def offer(self, depth: int, parent: int, above: float, rank: int) -> None:
        if depth <= len(self.rows) and rank < len(self.rows[depth - 1].tokens):
            heapq.heappush(self.heap, Candidate(self.rows[depth - 1], depth, parent, above, rank))

    def run(self) -> tuple[np.ndarray, np.ndarray]:
        chosen: list[tuple[int, int]] = []
        self.offer(1, -1, 0.0, 0)
        while self.heap and len(chosen) < self.budget:
            best = heapq.heappop(self.heap)
            self.offer(best.depth + 1, len(chosen), best.weight, 0)
            self.offer(best.depth, best.parent, best.above, best.rank + 1)
            chosen.append((best.token, best.parent))
        table = np.array(chosen, dtype=np.int64).reshape(-1, 2)
        return table[:, 0].copy(), table[:, 1].copy()


class Sampler:
    def __init__(self, probs, uniforms):
        self.probs = Check.floats(probs, 2).astype(np.float64)
        self.uniforms = Check.floats(uniforms, 1).astype(np.float64)
        if len(self.probs) != len(self.uniforms):
            raise ValueError("one number for each law")
        if not (self.probs >= 0).all():
            raise ValueError("negative or NaN probabilities")
        if not (self.probs > 0).any(axis=1).all():
            raise ValueError("a law without any possible token")
        if not ((self.uniforms >= 0) & (self.uniforms < 1)).all():
            raise ValueError("numbers outside [0, 1)")

    def picks(self) -> list[int]:
        return [self._pick(law, u) for law, u in zip(self.probs, self.uniforms)]

    @staticmethod
    def _pick(law: np.ndarray, u: float) -> int:
        place = int(np.searchsorted(np.cumsum(law), u, side="right"))
        return place if place < law.size else int(np.flatnonzero(law)[-1])


class Session:
    """One generation."""

    def __init__(self, target, drafter, prompt, budget):
        self.target, self.drafter = target, drafter
        self.budget = Check.natural(budget)
        self.prompt = [operator.index(token) for token in prompt]
        if not self.prompt:
            raise ValueError("the prompt is empty")
        self.output: list[int] = []
        self.stats = {"target_passes": 0, "accepted": 0}

    def round(self) -> tuple[list[int], int]:
        """The tokens that this round commits and how many of them were drafted."""
        log_q = np.asarray(self.drafter.block(self.prompt + self.output))
        tokens, parents = build_tree(log_q, self.budget)
        answer = self.target.tree_log_probs(
            self.prompt + self.output, tokens.copy(), parents.copy()
        )
        self.stats["target_passes"] += 1
        answer = Check.floats(answer, 2)
        if answer.shape != (tokens.size + 1, log_q.shape[1]) or not answer.shape[1]:
            raise ValueError("the target's answer has a wrong shape")
        if np.isnan(answer).any():
            raise ValueError("the target answered NaN")
        path, bonus = Tree(tokens, parents).follow([int(row.argmax()) for row in answer])
        return [int(tokens[i]) for i in path] + [bonus], len(path)

    def run(self, limit: int, eos_id) -> tuple[list[int], dict]:
        finished = False
        while not finished and len(self.output) < limit:
            fresh, drafted = self.round()
            fresh = fresh[: limit - len(self.output)]
            if eos_id in fresh:
                fresh = fresh[: fresh.index(eos_id) + 1]
                finished = True
            self.stats["accepted"] += min(drafted, len(fresh))
            self.output += fresh
        return self.output, self.stats


def build_tree(log_q, budget):
    log_q = Check.floats(log_q, 2)
    if np.isnan(log_q).any() or (log_q == np.inf).any():
        raise ValueError("NaN or +inf in log_q")
    return Builder(log_q, Check.natural(budget)).run()


def tree_mask(parents, prefix_len):
    parents = Check.integers(parents)
    prefix_len = Check.natural(prefix_len)
    tree = Tree(np.zeros(parents.shape, dtype=np.int64), parents)
    mask = np.zeros((len(tree.nodes), prefix_len + len(tree.nodes)), dtype=bool)
    mask[:, : prefix_len + 1] = True
    for row, node in enumerate(tree.nodes):
        mask[row, [prefix_len + 1 + above.index for above in node.lineage()]] = True
    return mask


def verify_tree(tokens, parents, choices):
    return Tree(tokens, parents).follow(Check.integers(choices).tolist())


def verify_sampled(tokens, parents, probs, uniforms):
    return Tree(tokens, parents).follow(Sampler(probs, uniforms).picks())


def compact(kv, prefix_len, path):
    kv, prefix_len, path = np.asarray(kv), Check.natural(prefix_len), Check.integers(path)
    if kv.ndim < 2 or kv.shape[-2] <= prefix_len:
        raise ValueError("kv does not hold the prefix and the root")
    if any(not 0 <= i < kv.shape[-2] - prefix_len - 1 for i in path.tolist()):
        raise ValueError("the path leaves the cache")
    head, tail = kv[..., : prefix_len + 1, :], kv[..., prefix_len + 1 :, :]
    return np.concatenate([head, tail[..., path.astype(np.intp), :]], axis=-2).astype(
        kv.dtype, copy=False
    )


def generate(target, drafter, prompt, *, max_new_tokens, eos_id, budget):
    limit = Check.natural(max_new_tokens)
    return Session(target, drafter, prompt, budget).run(limit, eos_id)
