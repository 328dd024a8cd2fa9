# ruff: noqa: B905, C901, RUF005
"""Beam search with nested Python loops over plain lists."""

import heapq
import math

import numpy as np


def beam_search(lm, prompts, *, beam_width, max_new_tokens, eos_id, length_penalty=1.0):
    """Continue every prompt; per prompt up to `beam_width` pairs (tokens, score), best first."""
    check_arguments(prompts, beam_width, max_new_tokens, eos_id, length_penalty)
    penalty = float(length_penalty)
    pools = [[] for _ in prompts]  # per prompt: (score, tokens), best first
    beams = [[(0.0, [])] for _ in prompts]  # per prompt: (sum, tokens), best first

    for length in range(1, max_new_tokens + 1):
        prefixes = []
        for prompt, live in zip(prompts, beams):
            for _, tokens in live:
                prefixes.append(list(prompt) + tokens)
        if not prefixes:
            break
        rows = ask_model(lm, prefixes, eos_id)

        next_row = 0
        for i in range(len(prompts)):
            if not beams[i]:
                continue
            heap = []  # worst kept continuation on top: (sum, -parent, -token)
            for parent, (total, tokens) in enumerate(beams[i]):
                row = rows[next_row]
                next_row += 1
                for token, log_prob in enumerate(row):
                    if log_prob == -math.inf:
                        continue
                    new_total = total + log_prob
                    if token == eos_id:
                        offer(pools[i], beam_width, new_total / length**penalty, tokens + [token])
                    elif len(heap) < beam_width:
                        heapq.heappush(heap, (new_total, -parent, -token))
                    elif new_total > heap[0][0]:
                        heapq.heapreplace(heap, (new_total, -parent, -token))
            chosen = []
            for new_total, minus_parent, minus_token in sorted(heap, reverse=True):
                chosen.append((new_total, beams[i][-minus_parent][1] + [-minus_token]))
            beams[i] = chosen

            if length == max_new_tokens:
                for total, tokens in beams[i]:
                    offer(pools[i], beam_width, total / length**penalty, tokens)
            elif beams[i] and len(pools[i]) == beam_width:
                best_sum = beams[i][0][0]
                worst = pools[i][-1][0]
                # best / n**p is monotone in n, so one of the two ends is the maximum
                soonest = best_sum / (length + 1) ** penalty
                latest = best_sum / max_new_tokens**penalty
                if soonest <= worst and latest <= worst:
                    beams[i] = []

    return [[(tokens, score) for score, tokens in pool] for pool in pools]


def offer(pool, width, score, tokens):
    """Insert behind everything that is at least as good, then drop what is too much."""
    place = len(pool)
    while place > 0 and pool[place - 1][0] < score:
        place -= 1
    pool.insert(place, (score, tokens))
    if len(pool) > width:
        pool.pop()


def ask_model(lm, prefixes, eos_id):
    """One call of the model, checked, as lists of Python floats."""
    answer = np.asarray(lm.log_probs(prefixes))
    if answer.ndim != 2 or answer.shape[0] != len(prefixes):
        raise ValueError(f"the model answered {answer.shape} to {len(prefixes)} prefixes")
    if eos_id >= answer.shape[1]:
        raise ValueError("eos_id is outside the vocabulary")
    answer = answer.astype(np.float64)
    if np.isnan(answer).any() or (answer == np.inf).any():
        raise ValueError("the model answered NaN or +inf")
    return answer.tolist()


def is_int(value):
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_arguments(prompts, beam_width, max_new_tokens, eos_id, length_penalty):
    for name, value in (("beam_width", beam_width), ("max_new_tokens", max_new_tokens)):
        if not is_int(value):
            raise TypeError(f"{name} must be an int")
        if value < 1:
            raise ValueError(f"{name} must be at least 1")
    if not is_int(eos_id):
        raise TypeError("eos_id must be an int")
    if eos_id < 0:
        raise ValueError("eos_id is outside the vocabulary")
    if not math.isfinite(length_penalty):
        raise ValueError("length_penalty must be finite")
    if not isinstance(prompts, (list, tuple)):
        raise TypeError("prompts must be a list")
    for prompt in prompts:
        if not isinstance(prompt, list) or not all(is_int(token) for token in prompt):
            raise TypeError("every prompt must be a list of ints")
