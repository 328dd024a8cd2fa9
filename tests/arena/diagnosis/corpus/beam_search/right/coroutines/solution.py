# ruff: noqa: B905, RUF005
"""Beam search as coroutines: one per prompt, which yields prefixes and is sent the model's rows."""

import math

import numpy as np


def search_one(prompt, width, limit, eos, penalty):
    """Yields lists of prefixes, receives arrays (n, V), and returns the answer of this prompt."""
    pool = []
    beams, sums = [[]], np.zeros(1)
    for step in range(limit):
        n = step + 1
        norm = float(n) ** penalty
        rows = yield [prompt + beam for beam in beams]
        joint = np.add(rows, sums[:, np.newaxis], dtype=np.float64)

        ending = joint[:, eos].tolist()
        pool.extend((beam + [eos], s / norm) for beam, s in zip(beams, ending) if s > -math.inf)
        pool = trimmed(pool, width)

        joint[:, eos] = -math.inf
        parents, tokens, sums = top(joint, width)
        beams = [beams[p] + [t] for p, t in zip(parents, tokens)]
        if n == limit:
            pool.extend((beam, s / norm) for beam, s in zip(beams, sums.tolist()))
            pool = trimmed(pool, width)
        elif not beams or cannot_enter(pool, width, float(sums[0]), n, limit, penalty):
            break
    return pool


def trimmed(pool, width):
    """Best first; sorted() is stable, so whoever entered first stays in front."""
    return sorted(pool, key=lambda pair: -pair[1])[:width]


def top(joint, width):
    """Parents, tokens and sums of the best continuations, by sorting the candidates' keys."""
    flat = joint.reshape(-1)
    k = min(width, flat.size)
    kth = -np.partition(-flat, k - 1)[k - 1]
    where = np.flatnonzero((flat >= kth) & (flat != -math.inf))
    where = where[np.argsort(-flat[where], kind="stable")][:k]
    parents, tokens = np.divmod(where, joint.shape[1])
    return parents.tolist(), tokens.tolist(), flat[where]


def cannot_enter(pool, width, best, n, limit, penalty):
    """No continuation of a sum `best` reaches the pool: a longer one can at best keep its sum."""
    if len(pool) < width:
        return False
    worst = pool[-1][1]
    lengths = (n + 1, limit)
    return all(best / float(m) ** penalty <= worst for m in lengths)


def whole(value, least, name):
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}: expected a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")
    return int(value)


def model_answer(lm, prefixes, eos):
    rows = np.asarray(lm.log_probs(prefixes))
    if rows.ndim != 2 or rows.shape[0] != len(prefixes):
        raise ValueError(f"model: expected ({len(prefixes)}, V), got {rows.shape}")
    if eos >= rows.shape[1]:
        raise ValueError(f"eos_id: {eos} is outside a vocabulary of {rows.shape[1]}")
    peak = rows.max()  # NaN if there is one anywhere
    if np.isnan(peak) or peak == math.inf:
        raise ValueError("model: NaN or +inf among the log-probabilities")
    return rows


def beam_search(lm, prompts, *, beam_width, max_new_tokens, eos_id, length_penalty=1.0):
    """Drive the coroutines of all prompts; one call of the model per round."""
    width = whole(beam_width, 1, "beam_width")
    limit = whole(max_new_tokens, 1, "max_new_tokens")
    eos = whole(eos_id, 0, "eos_id")
    if not math.isfinite(length_penalty):
        raise ValueError("length_penalty: expected a finite number")
    penalty = float(length_penalty)
    if not isinstance(prompts, list) or not all(isinstance(p, list) for p in prompts):
        raise TypeError("prompts: expected a list of lists")
    for prompt in prompts:
        for token in prompt:
            if not isinstance(token, (int, np.integer)):
                raise TypeError("prompts: expected ints")

    answers = [None] * len(prompts)
    waiting = []  # (index, coroutine, the prefixes it wants answered)
    for index, prompt in enumerate(prompts):
        task = search_one(list(prompt), width, limit, eos, penalty)
        waiting.append((index, task, next(task)))
    while waiting:
        request = [prefix for _, _, wanted in waiting for prefix in wanted]
        rows = model_answer(lm, request, eos)
        cuts = np.cumsum([len(wanted) for _, _, wanted in waiting])[:-1]
        following = []
        for (index, task, _), part in zip(waiting, np.split(rows, cuts)):
            try:
                following.append((index, task, task.send(part)))
            except StopIteration as finished:
                answers[index] = finished.value
        waiting = following
    return answers
