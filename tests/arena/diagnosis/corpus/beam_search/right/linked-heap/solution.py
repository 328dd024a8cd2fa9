# ruff: noqa: B905, E501, SIM108
"""Beam search on linked nodes: tokens are read back through parent links, the pool is a heap."""

import heapq
import math
from itertools import count
from numbers import Integral

import numpy as np

NEG = float("-inf")


class Node:
    __slots__ = ("parent", "token", "total")

    def __init__(self, parent, token, total):
        self.parent = parent
        self.token = token
        self.total = total

    def path(self):
        """Generated tokens from the root to here."""
        tokens, node = [], self
        while node.parent is not None:
            tokens.append(node.token)
            node = node.parent
        tokens.reverse()
        return tokens


def best_continuations(flat, width):
    """Positions of the `width` largest entries above -inf, largest first, lowest position on ties."""
    if flat.size > width:
        cut = np.partition(flat, flat.size - width)[flat.size - width]
    else:
        cut = NEG
    if cut == NEG:
        chosen = np.flatnonzero(flat > NEG)
    else:
        above = np.flatnonzero(flat > cut)
        level = np.flatnonzero(flat == cut)[: width - above.size]
        chosen = np.concatenate((above, level))
    # lexsort: last key first, so by value descending and then by position
    return chosen[np.lexsort((chosen, -flat[chosen]))]


def push(heap, width, ticket, score, node):
    """The heap's top is the worst hypothesis: lowest score, and of equal ones the latest ticket."""
    entry = (score, -ticket, node)
    if len(heap) < width:
        heapq.heappush(heap, entry)
    elif score > heap[0][0]:
        heapq.heapreplace(heap, entry)


def hopeless(heap, width, total, length, limit, penalty):
    """Whether no descendant of a beam with this sum can enter the heap."""
    if len(heap) < width:
        return False
    n = length + 1 if penalty < 0 else limit
    return total / n**penalty <= heap[0][0]


def validate(prompts, beam_width, max_new_tokens, eos_id, length_penalty):
    for value in (beam_width, max_new_tokens, eos_id):
        if not isinstance(value, Integral):
            raise TypeError("beam_width, max_new_tokens and eos_id are whole numbers")
    if min(beam_width, max_new_tokens) < 1:
        raise ValueError("beam_width and max_new_tokens are at least 1")
    if eos_id < 0:
        raise ValueError("eos_id is outside the vocabulary")
    if not math.isfinite(length_penalty):
        raise ValueError("length_penalty is not finite")
    for prompt in prompts:
        if type(prompt) is not list:
            raise TypeError("prompts are lists")
        for token in prompt:
            if not isinstance(token, Integral):
                raise TypeError("prompts hold ints")


def query(lm, prefixes, eos_id):
    answer = np.asarray(lm.log_probs(prefixes))
    if answer.ndim != 2:
        raise ValueError("the model must answer with two axes")
    n, vocabulary = answer.shape
    if n != len(prefixes):
        raise ValueError("the model must answer one row per prefix")
    if eos_id >= vocabulary:
        raise ValueError("eos_id is outside the vocabulary")
    if np.isnan(answer).any() or np.isposinf(answer).any():
        raise ValueError("the model answered NaN or +inf")
    return answer


def beam_search(lm, prompts, *, beam_width, max_new_tokens, eos_id, length_penalty=1.0):
    """Beam search for each prompt; lists of (tokens, score), best first."""
    validate(prompts, beam_width, max_new_tokens, eos_id, length_penalty)
    penalty, limit = float(length_penalty), int(max_new_tokens)
    heaps = {i: [] for i in range(len(prompts))}
    live = {i: [Node(None, None, 0.0)] for i in heaps}
    tickets = count()
    length = 0
    while live:
        length += 1
        prefixes = [prompts[i] + node.path() for i, nodes in live.items() for node in nodes]
        answer = query(lm, prefixes, eos_id)
        vocabulary = answer.shape[1]
        survivors = {}
        offset = 0
        for i, nodes in live.items():
            heap = heaps[i]
            totals = np.array([node.total for node in nodes], dtype=np.float64)
            sums = totals[:, None] + answer[offset : offset + len(nodes)]
            offset += len(nodes)
            for node, total in zip(nodes, sums[:, eos_id].tolist()):
                if total != NEG:
                    leaf = Node(node, int(eos_id), total)
                    push(heap, beam_width, next(tickets), total / length**penalty, leaf)
            sums[:, eos_id] = NEG
            flat = sums.ravel()
            children = [
                Node(nodes[position // vocabulary], position % vocabulary, float(flat[position]))
                for position in best_continuations(flat, int(beam_width)).tolist()
            ]
            if length == limit:
                for child in children:
                    push(heap, beam_width, next(tickets), child.total / length**penalty, child)
            elif children and not hopeless(
                heap, beam_width, children[0].total, length, limit, penalty
            ):
                survivors[i] = children
        live = survivors
    return [
        [(node.path(), score) for score, _, node in sorted(heaps[i], key=lambda e: e[:2])[::-1]]
        for i in range(len(prompts))
    ]
