# ruff: noqa: B905, E501
"""Beam search where one set of flat arrays holds the beams of all prompts at once."""

import math
import operator

import numpy as np


def rank_in_group(groups):
    """For sorted group labels: 0, 1, 2, ... within every run."""
    starts = np.searchsorted(groups, groups, side="left")
    return np.arange(groups.size) - starts


def take_best(groups, values, width):
    """Indices of the `width` largest values per group, by group, best first, earlier first on ties."""
    order = np.lexsort((-values, groups))
    return order[rank_in_group(groups[order]) < width]


class _Finished:
    """The pools of all prompts as parallel columns, sorted by prompt and then best first."""

    def __init__(self):
        self.owner = np.empty(0, dtype=np.int64)
        self.score = np.empty(0, dtype=np.float64)
        self.tokens = []

    def merge(self, owner, score, tokens, width):
        owner = np.concatenate((self.owner, owner))
        score = np.concatenate((self.score, score))
        tokens = self.tokens + tokens
        keep = take_best(owner, score, width)
        self.owner, self.score = owner[keep], score[keep]
        self.tokens = [tokens[i] for i in keep]

    def worst_of_full(self, count, width):
        """Per prompt the score that has to be beaten: -inf where the pool has room."""
        worst = np.full(count, -np.inf)
        size = np.bincount(self.owner, minlength=count)
        last = np.cumsum(size) - 1
        full = size == width
        worst[full] = self.score[last[full]]
        return worst


def _model_rows(lm, prefixes, eos):
    rows = np.asarray(lm.log_probs(prefixes), dtype=np.float64)
    if rows.ndim != 2 or rows.shape[0] != len(prefixes):
        raise ValueError("the model has to answer with shape (n, V)")
    if eos >= rows.shape[1]:
        raise ValueError("eos_id is not in the vocabulary")
    if np.any(np.isnan(rows) | (rows == np.inf)):
        raise ValueError("the model's answer holds NaN or +inf")
    return rows


def _parse(prompts, beam_width, max_new_tokens, eos_id, length_penalty):
    width, limit, eos = map(operator.index, (beam_width, max_new_tokens, eos_id))
    if width < 1 or limit < 1:
        raise ValueError("beam_width and max_new_tokens must be positive")
    if eos < 0:
        raise ValueError("eos_id is not in the vocabulary")
    if not math.isfinite(length_penalty):
        raise ValueError("length_penalty must be a finite number")
    copies = []
    for prompt in prompts:
        if not isinstance(prompt, list):
            raise TypeError("each prompt must be a list of ints")
        copies.append([operator.index(token) for token in prompt])
    return copies, width, limit, eos, float(length_penalty)


def beam_search(lm, prompts, *, beam_width, max_new_tokens, eos_id, length_penalty=1.0):
    """Beam search over a batch of prompts."""
    prompts, width, limit, eos, penalty = _parse(
        prompts, beam_width, max_new_tokens, eos_id, length_penalty
    )
    count = len(prompts)
    done = _Finished()
    owner = np.arange(count)  # which prompt a live beam belongs to; always ascending
    total = np.zeros(count)
    history = np.empty((count, 0), dtype=np.int64)

    for length in range(1, limit + 1):
        if owner.size == 0:
            break
        tails = history.tolist()
        prefixes = [prompts[o] + tail for o, tail in zip(owner.tolist(), tails)]
        sums = _model_rows(lm, prefixes, eos) + total[:, None]

        ended = np.flatnonzero(sums[:, eos] > -np.inf)
        done.merge(
            owner[ended],
            sums[ended, eos] / length**penalty,
            [tails[i] + [eos] for i in ended],
            width,
        )

        sums[:, eos] = -np.inf
        if sums.shape[1] > width:  # no row can give more than its own best `width`
            floor = np.partition(sums, -width, axis=1)[:, -width, None]
            candidate = (sums >= floor) & (sums > -np.inf)
        else:
            candidate = sums > -np.inf
        row, token = np.nonzero(candidate)  # ordered by row, then token
        value = sums[row, token]
        best = take_best(owner[row], value, width)
        row, token, total = row[best], token[best], value[best]
        owner = owner[row]
        history = np.concatenate((history[row], token[:, None]), axis=1)

        if length == limit:
            done.merge(owner, total / length**penalty, history.tolist(), width)
            break
        bar = done.worst_of_full(count, width)
        leader = np.full(count, -np.inf)
        first = rank_in_group(owner) == 0
        leader[owner[first]] = total[first]
        dream = np.maximum(leader / (length + 1) ** penalty, leader / limit**penalty)
        going = (dream > bar)[owner]
        owner, total, history = owner[going], total[going], history[going]

    answers = [[] for _ in prompts]
    for o, tokens, score in zip(done.owner.tolist(), done.tokens, done.score.tolist()):
        answers[o].append((tokens, score))
    return answers
